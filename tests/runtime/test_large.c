/*
 * test_large.c - tensors of more than 2^31 elements: operands, outputs written by TMA and by
 * threads.
 *
 * x repeats its first rows, so that references stay small; everything is exact (rig_exact.h). On
 * the host the extents are cut: a few rows show that the test itself is right.
 */
#include "runtime/fp8_format.h"
#include "tests/runtime/rig_exact.h"

enum { N = 16, PERIOD = 64 };

static struct {
    int64_t m, k;
    struct rig_layers layers;
    const struct rig_layer *layer;
    struct exact x, w, dy; /* x: PERIOD rows; its device memory holds all m */
    fp8_operand operands[3];
} large;

/* m rows on the device of those that e has. */
static void repeat_rows(struct exact *e, int64_t m)
{
    const size_t row = (size_t)e->cols * 2;
    void *all;
    RIG_OK(fp8_memory_alloc(rig.context, (size_t)m * row, &all));
    for (int64_t at = 0; at < m; at += e->rows) {
        size_t rows = (size_t)(m - at < e->rows ? m - at : e->rows);
        RIG_OK(fp8_memory_copy(rig.context, (char *)all + (size_t)at * row, e->device, rows * row,
                               rig.stream));
    }
    RIG_OK(fp8_stream_synchronize(rig.context, rig.stream));
    fp8_memory_free(rig.context, e->device);
    e->device = all;
}

static int open_large(void **state)
{
    (void)state;
    large.m = rig_cut("M", 16400, 100);
    large.k = rig_cut("K", 131072, 300);
    struct rig_spec spec = { .out_features = N, .in_features = large.k, .max_tokens = large.m };
    rig_layers_open(&large.layers, &spec, 1);
    large.layer = &large.layers.layer[0];
    exact_make(&large.x, PERIOD, large.k, 31);
    repeat_rows(&large.x, large.m);
    exact_make(&large.w, N, large.k, 32);
    exact_make(&large.dy, large.m, N, 33);
    exact_quantize(large.layer, FP8_ROLE_X, &large.x, large.m, &exact_operands[0],
                   &large.operands[0]);
    exact_quantize(large.layer, FP8_ROLE_W, &large.w, N, &exact_operands[1], &large.operands[1]);
    exact_quantize(large.layer, FP8_ROLE_DY, &large.dy, large.m, &exact_operands[2],
                   &large.operands[2]);
    return 0;
}

static int close_large(void **state)
{
    exact_free(&large.x), exact_free(&large.w), exact_free(&large.dy);
    rig_layers_close(&large.layers);
    return exact_release_all(state);
}

static void multiply(fp8_pass pass, const fp8_operand *a, const fp8_operand *b, fp8_tensor out)
{
    fp8_gemm_args args = FP8_GEMM_ARGS_INIT;
    args.pass = pass, args.a = a, args.b = b, args.out = &out;
    args.call = exact_call(large.layer, large.m, &exact_workspace);
    RIG_OK(fp8_gemm(large.layer->handle, &args));
}

static void pull(void *host, const void *device, size_t bytes)
{
    RIG_OK(fp8_memory_copy(rig.context, host, device, bytes, rig.stream));
    RIG_OK(fp8_stream_synchronize(rig.context, rig.stream));
}

static void rows_of_an_operand(void **state)
{
    (void)state;
    const size_t count = (size_t)(large.m * N);
    uint16_t *y = malloc(count * sizeof *y), want[PERIOD][N];
    assert_non_null(y);
    exact_need(&exact_output, count * sizeof *y);
    multiply(FP8_PASS_FPROP, &large.operands[0], &large.operands[1],
             (fp8_tensor){ exact_output.device, large.m, N, N, FP8_DTYPE_BF16, 0 });
    pull(y, exact_output.device, count * sizeof *y);
    for (int64_t i = 0; i < PERIOD; i++) {
        for (int64_t j = 0; j < N; j++)
            want[i][j] = fp8_float_to_bf16((float)exact_dot(
                large.x.values + i * large.k, 1, large.w.values + j * large.k, 1, large.k));
    }
    for (int64_t i = 0; i < large.m; i++) {
        if (memcmp(y + i * N, want[i % PERIOD], sizeof want[0]) != 0)
            fail_msg("row %lld of y", (long long)i);
    }
    free(y);
}

/* The contraction runs along the rows of the transposed copy. */
static void columns_of_an_operand(void **state)
{
    (void)state;
    const size_t count = (size_t)(N * large.k);
    float *dw = malloc(count * sizeof *dw);
    int32_t sums[N][PERIOD] = { 0 }; /* of dy over the tokens that have the same x */
    assert_non_null(dw);
    exact_need(&exact_output, count * sizeof *dw);
    multiply(
        FP8_PASS_WGRAD, &large.operands[2], &large.operands[0],
        (fp8_tensor){ exact_output.device, N, large.k, large.k, large.layer->info.dw_dtype, 0 });
    pull(dw, exact_output.device, count * fp8_dtype_bytes(large.layer->info.dw_dtype));
    for (int64_t i = 0; i < large.m; i++) {
        for (int64_t n = 0; n < N; n++)
            sums[n][i % PERIOD] += large.dy.values[i * N + n];
    }
    for (int64_t n = 0; n < N; n++) {
        for (int64_t k = 0; k < large.k; k++) {
            int32_t sum = 0;
            for (int64_t i = 0; i < PERIOD; i++)
                sum += sums[n][i] * large.x.values[i * large.k + k];
            uint32_t want = rig_rounded(large.layer->info.dw_dtype, (float)sum), is = 0;
            size_t element = fp8_dtype_bytes(large.layer->info.dw_dtype);
            memcpy(&is, (char *)dw + (size_t)(n * large.k + k) * element, element);
            if (is != want)
                fail_msg("dw [%lld, %lld]: 0x%X, not 0x%X", (long long)n, (long long)k, is, want);
        }
    }
    free(dw);
}

/* Around element 2^31, at both ends, and here and there. */
static void check_dx(const uint16_t *device)
{
    const int64_t middle = ((int64_t)1 << 31) / large.k;
    const int64_t rows[] = { 0, 1, 63, 8191, middle - 1, middle, middle + 1, large.m - 1 };
    uint16_t *row = malloc((size_t)large.k * sizeof *row);
    assert_non_null(row);
    for (size_t r = 0; r < sizeof rows / sizeof rows[0]; r++) {
        int64_t i = rows[r];
        if (i >= large.m)
            continue;
        pull(row, device + i * large.k, (size_t)large.k * sizeof *row);
        for (int64_t k = 0; k < large.k; k++) {
            int32_t sum = exact_dot(large.dy.values + i * N, 1, large.w.values + k, large.k, N);
            if (row[k] != fp8_float_to_bf16((float)sum))
                fail_msg("dx [%lld, %lld] is not %d", (long long)i, (long long)k, sum);
        }
    }
    free(row);
}

static void an_output(void **state)
{
    (void)state;
    uint16_t *dx;
    const size_t bytes = (size_t)(large.m * large.k + 1) * sizeof *dx;
    RIG_OK(fp8_memory_alloc(rig.context, bytes, (void **)&dx));
    for (int offset = 0; offset < 2; offset++) { /* an odd address is written by the threads */
        multiply(FP8_PASS_DGRAD, &large.operands[2], &large.operands[1],
                 (fp8_tensor){ dx + offset, large.m, large.k, large.k, FP8_DTYPE_BF16, 0 });
        check_dx(dx + offset);
    }
    fp8_memory_free(rig.context, dx);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(rows_of_an_operand, open_large),
        cmocka_unit_test(columns_of_an_operand),
        cmocka_unit_test_teardown(an_output, close_large),
    };
    return RIG_RUN(tests);
}
