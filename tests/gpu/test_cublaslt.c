/*
 * test_cublaslt.c - what the installed cuBLASLt computes in the modes that the runtime asks it for,
 * without layers or plans: every algorithm that it offers for a product, against the host backend.
 *
 * Scales differ from row to row and from block to block, so that a layout of scales that is not the
 * library's own gives errors of the size of the result. A row is printed for each product; some
 * products are only asked for, to know whether the library has them: their lines end in "asked".
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "runtime/fp8_format.h"
#include "runtime/gemm_lt.h"
#include "runtime/host.h"

enum { ALGORITHMS = 8, WORKSPACE = 64 << 20 };
#define MUST(call) assert_int_equal((call), FP8_OK)

static fp8_context *context;
static int failures; /* counted, so that all lines are printed */
static struct fp8_pool *pool;

struct product {
    fp8_dtype a, b, out;
    fp8_scaling a_scaling, b_scaling;
    int64_t rows, cols, depth;
    bool a_turned, b_turned, fast, bias, accumulate;
    bool unscaled;              /* scales of 1, of which the library is told nothing */
    int a_exponent, b_exponent; /* not 0: all scales are this power of two */
    int64_t shift;   /* elements by which bf16 operands and out are off an aligned address */
    bool asked_only; /* the library may have no such product */
};

/* ---- data ---- */

static uint32_t random_bits(void)
{
    static uint64_t state = 7;
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(state >> 33);
}

struct memory {
    char *host, *device;
    size_t bytes;
};

static struct memory make_memory(size_t bytes)
{
    struct memory m = { .host = calloc(1, bytes + 256), .bytes = bytes };
    void *device = NULL;
    assert_non_null(m.host);
    MUST(fp8_memory_alloc(context, bytes + 256, &device));
    m.device = device;
    return m;
}

static void push(const struct memory *m)
{
    MUST(fp8_memory_copy(context, m->device, m->host, m->bytes, NULL));
    MUST(fp8_stream_synchronize(context, NULL));
}

static void drop(struct memory *m)
{
    fp8_memory_free(context, m->device);
    free(m->host);
}

struct side {
    struct memory data, scales;
    int64_t ld, scales_ld;
};

static int64_t up(int64_t value, int64_t to)
{
    return (value + to - 1) / to * to;
}

/* As the runtime's buffers: rows to 16, depth to 128, zeros; scales as fp8.h lays them out. */
static struct side make_side(const struct product *p, bool is_b)
{
    fp8_dtype dtype = is_b ? p->b : p->a;
    fp8_scaling scaling = is_b ? p->b_scaling : p->a_scaling;
    int exponent = is_b ? p->b_exponent : p->a_exponent;
    bool turned = is_b ? p->b_turned : p->a_turned;
    int64_t rows = is_b ? p->cols : p->rows, depth = p->depth, shift = p->shift;
    struct side side = { .scales_ld = 16 };
    if (dtype == FP8_DTYPE_BF16) {
        int64_t lines = turned ? depth : rows;
        side.ld = (turned ? rows : depth) + shift;
        side.data = make_memory((size_t)(lines * side.ld + shift) * 2);
        for (int64_t i = 0; i < lines * side.ld; i++)
            ((uint16_t *)side.data.host)[i + shift] =
                fp8_float_to_bf16((float)(random_bits() % 2001) / 1000 - 1);
        push(&side.data);
        return side;
    }
    side.ld = up(depth, 128);
    side.data = make_memory((size_t)(up(rows, 16) * side.ld));
    for (int64_t i = 0; i < rows; i++) {
        for (int64_t k = 0; k < depth; k++)
            side.data.host[i * side.ld + k] =
                (char)(random_bits() % (dtype == FP8_DTYPE_E4M3 ? 0x60 : 0x50) | (random_bits() % 2)
                                                                                     << 7);
    }
    int64_t lines = 1, blocks = (depth + 127) / 128;
    if (scaling == FP8_SCALING_BLOCK)
        lines = blocks, side.scales_ld = up(rows, 8);
    if (scaling == FP8_SCALING_TILE)
        lines = (rows + 127) / 128, side.scales_ld = up(blocks, 4);
    side.scales = make_memory((size_t)(lines * side.scales_ld) * 4);
    for (int64_t i = 0; i < lines * side.scales_ld; i++)
        ((float *)side.scales.host)[i] =
            p->unscaled ? 1.0f
            : exponent != 0
                ? ldexpf(1.0f, exponent)
                : ldexpf(1 + (float)(random_bits() % 100) / 100, (int)(random_bits() % 6) - 6);
    push(&side.data);
    push(&side.scales);
    return side;
}

static void drop_side(struct side *side)
{
    drop(&side->data);
    if (side->scales.host != NULL)
        drop(&side->scales);
}

/* ---- one product ---- */

static float value_at(fp8_dtype dtype, const char *data, int64_t i)
{
    if (dtype == FP8_DTYPE_FP32)
        return ((const float *)data)[i];
    uint16_t half = ((const uint16_t *)data)[i];
    return dtype == FP8_DTYPE_BF16 ? fp8_bf16_to_float(half) : fp8_fp16_to_float(half);
}

static double error_of(const struct product *p, const char *got, const float *want, int64_t ld)
{
    double error = 0, size = 0;
    for (int64_t i = 0; i < p->rows; i++) {
        for (int64_t j = 0; j < p->cols; j++) {
            double exact = (double)want[i * ld + j];
            double difference = (double)value_at(p->out, got, i * ld + j) - exact;
            error += difference * difference;
            size += exact * exact;
        }
    }
    return sqrt(error / size);
}

static void reference(const struct product *p, const struct side *a, const struct side *b,
                      const struct memory *bias, float *want, int64_t ld)
{
    int64_t shift = p->a == FP8_DTYPE_BF16 ? p->shift * 2 : 0;
    const fp8_semantics how = { .source_dtype = p->a,
                                .second_dtype = p->b,
                                .target_dtype = FP8_DTYPE_FP32,
                                .scaling = p->a_scaling,
                                .second_scaling = p->b_scaling,
                                .transposed = p->a_turned,
                                .second_transposed = p->b_turned };
    const fp8_value args[FP8_GEMM_ARG_COUNT] = {
        [FP8_GEMM_a].p = a->data.host + shift,
        [FP8_GEMM_a_ld].i = a->ld,
        [FP8_GEMM_b].p = b->data.host + shift,
        [FP8_GEMM_b_ld].i = b->ld,
        [FP8_GEMM_a_scales].p = a->scales.host,
        [FP8_GEMM_a_scales_ld].i = a->scales_ld,
        [FP8_GEMM_b_scales].p = b->scales.host,
        [FP8_GEMM_b_scales_ld].i = b->scales_ld,
        [FP8_GEMM_bias].p = bias->host,
        [FP8_GEMM_out].p = want,
        [FP8_GEMM_out_ld].i = ld,
        [FP8_GEMM_rows].i = p->rows,
        [FP8_GEMM_cols].i = p->cols,
        [FP8_GEMM_depth].i = p->depth,
        [FP8_GEMM_accumulate].i = p->accumulate,
    };
    MUST(fp8_host_run(pool, FP8_OP_GEMM, &how, args));
}

static struct fp8_lt_operand operand_of(const struct side *side, fp8_dtype dtype,
                                        fp8_scaling scaling, bool turned, int64_t shift)
{
    const float *scales = (const float *)side->scales.device;
    return (struct fp8_lt_operand){
        .dtype = dtype,
        .transposed = turned,
        .scaling = scaling,
        .ld = side->ld,
        .data = side->data.device + (dtype == FP8_DTYPE_BF16 ? shift * 2 : 0),
        .scales = scaling == FP8_SCALING_TENSOR ? scales + FP8_SCALES_SCALE_INV : scales,
    };
}

static void run_all(const struct product *p, struct fp8_lt_problem *problem,
                    const struct memory *out, const struct memory *before, const float *want)
{
    struct fp8_lt_choice choices[ALGORITHMS];
    int count = fp8_lt_ask(context->lt, problem, choices, ALGORITHMS), ran = 0;
    double worst = 0;
    const char *reason = "";
    int64_t offset = (char *)problem->out - out->device;
    for (int i = 0; i < count; i++) {
        MUST(fp8_memory_copy(context, out->device, before->host, out->bytes, NULL));
        if (!fp8_lt_try(context->lt, problem, &choices[i], &reason))
            continue;
        MUST(fp8_memory_copy(context, out->host, out->device, out->bytes, NULL));
        MUST(fp8_stream_synchronize(context, NULL));
        double error = error_of(p, out->host + offset, want, problem->out_ld);
        worst = error <= worst ? worst : error; /* and NaN */
        ran++;
    }
    print_message("%-5s x %-5s -> %-5s scaling %d %d, %5lld %5lld %5lld%s%s%s%s%s: %d of %d ran, "
                  "error %.1e %s%s\n",
                  fp8_dtype_name(p->a), fp8_dtype_name(p->b), fp8_dtype_name(p->out),
                  (int)p->a_scaling, (int)p->b_scaling, (long long)p->rows, (long long)p->cols,
                  (long long)p->depth, p->fast ? " fast" : "", p->bias ? " bias" : "",
                  p->accumulate ? " add" : "", p->a_turned ? " a turned" : "",
                  p->b_turned ? " b turned" : "", ran, count, worst, ran < count ? reason : "",
                  p->asked_only ? " asked" : "");
    bool good = ran > 0 && worst <= (p->fast ? 1e-2 : p->out == FP8_DTYPE_FP32 ? 1e-3 : 3e-3);
    failures += !p->asked_only && !good;
}

static void check(const struct product *p)
{
    bool bf16 = p->a == FP8_DTYPE_BF16;
    struct side a = make_side(p, false), b = make_side(p, true);
    size_t element = fp8_dtype_bytes(p->out);
    int64_t ld = up(p->cols, 16) + p->shift;
    struct memory out = make_memory((size_t)(up(p->rows, 16) * ld + p->shift) * element);
    struct memory before = make_memory(out.bytes), bias = make_memory((size_t)up(p->cols, 16) * 2);
    struct memory workspace = make_memory(WORKSPACE);
    float *want = calloc((size_t)(p->rows * ld), sizeof *want);
    assert_non_null(want);
    memset(before.host, p->accumulate ? 0x3F : 0xFF, before.bytes); /* 0.747 as float, as bf16 */
    for (int64_t i = 0; i < p->rows * ld && p->accumulate; i++)
        want[i] = value_at(p->out, before.host, 0);
    for (int64_t j = 0; j < p->cols; j++)
        ((uint16_t *)bias.host)[j] = fp8_float_to_bf16((float)(j % 7) - 3);
    push(&bias);
    struct memory none = { 0 };
    reference(p, &a, &b, p->bias ? &bias : &none, want, ld);
    bool block = p->a_scaling == FP8_SCALING_BLOCK;
    struct fp8_lt_problem problem = {
        .a = operand_of(&a, p->a, p->a_scaling, p->a_turned, p->shift),
        .b = operand_of(&b, p->b, p->b_scaling, p->b_turned, p->shift),
        .out_dtype = p->out,
        .fast = p->fast,
        .has_bias = p->bias,
        .accumulate = p->accumulate,
        .unaligned = bf16 && (p->shift != 0 || a.ld % 8 != 0 || b.ld % 8 != 0),
        .rows = p->rows,
        .cols = p->cols,
        .depth = bf16 ? p->depth : up(p->depth, block && !p->asked_only ? 128 : 16),
        .out_ld = ld,
        .bias = p->bias ? bias.device : NULL,
        .out = out.device + (size_t)p->shift * element,
        .workspace = workspace.device,
        .workspace_bytes = WORKSPACE,
    };
    if (p->unscaled)
        problem.a.scales = problem.b.scales = NULL;
    run_all(p, &problem, &out, &before, want);
    drop_side(&a);
    drop_side(&b);
    drop(&out);
    drop(&before);
    drop(&bias);
    drop(&workspace);
    free(want);
}

/* ---- what the runtime relies on ---- */

#define E4M3 FP8_DTYPE_E4M3
#define E5M2 FP8_DTYPE_E5M2
#define BF16 FP8_DTYPE_BF16
#define FP16 FP8_DTYPE_FP16
#define FP32 FP8_DTYPE_FP32
#define TENSOR FP8_SCALING_TENSOR
#define BLOCK FP8_SCALING_BLOCK
#define TILE FP8_SCALING_TILE
#define NONE FP8_SCALING_NONE

#define PRODUCT(a_, b_, out_, a_scaling_, b_scaling_, rows_, cols_, depth_, ...)                   \
    {                                                                                              \
        .a = a_, .b = b_, .out = out_, .a_scaling = a_scaling_, .b_scaling = b_scaling_,           \
        .rows = rows_, .cols = cols_, .depth = depth_, __VA_ARGS__                                 \
    }

/* With scales far apart no factor on the way may overflow; the product of the two may vanish. */
static void one_scale_a_tensor(void **state)
{
    (void)state;
    failures = 0;
    static const struct product list[] = {
        PRODUCT(E4M3, E4M3, BF16, TENSOR, TENSOR, 256, 384, 512, .fast = true),
        PRODUCT(E4M3, E4M3, FP32, TENSOR, TENSOR, 256, 384, 512, .a_exponent = 120,
                .b_exponent = -40),
        PRODUCT(E4M3, E4M3, FP32, TENSOR, TENSOR, 256, 384, 512, .a_exponent = -40,
                .b_exponent = 120),
        PRODUCT(E4M3, E5M2, FP32, TENSOR, TENSOR, 16, 384, 512, .a_exponent = 120,
                .b_exponent = -40, .fast = true),
        PRODUCT(E4M3, E4M3, FP32, TENSOR, TENSOR, 256, 384, 512, .a_exponent = -70,
                .b_exponent = -70, .asked_only = true),
        PRODUCT(E4M3, E4M3, FP32, TENSOR, TENSOR, 256, 384, 512, .unscaled = true),
        PRODUCT(E4M3, E4M3, FP32, TENSOR, TENSOR, 17, 4096, 4096, .unscaled = true, .fast = true),
        PRODUCT(E4M3, E4M3, FP32, TENSOR, TENSOR, 129, 144, 1000, .unscaled = true),
        PRODUCT(E4M3, E4M3, FP32, TENSOR, TENSOR, 1, 16, 16, .unscaled = true),
        PRODUCT(E4M3, E4M3, FP32, TENSOR, TENSOR, 1024, 16, 6144, .unscaled = true),
    };
    for (size_t i = 0; i < sizeof list / sizeof list[0]; i++)
        check(&list[i]);
    assert_int_equal(failures, 0);
}

static void scales_by_block(void **state)
{
    (void)state;
    failures = 0;
    static const struct product list[] = {
        PRODUCT(E4M3, E4M3, BF16, BLOCK, TILE, 256, 384, 512, .fast = false),
        PRODUCT(E4M3, E4M3, BF16, BLOCK, TILE, 256, 384, 512, .bias = true),
        PRODUCT(E4M3, E4M3, FP32, BLOCK, TILE, 136, 144, 1000, .fast = false),
        PRODUCT(E4M3, E4M3, BF16, BLOCK, TILE, 8, 16, 16, .fast = false),
        PRODUCT(E4M3, E4M3, BF16, BLOCK, TILE, 24, 4096, 4096, .fast = false),
        PRODUCT(E4M3, E4M3, FP32, BLOCK, BLOCK, 256, 384, 512, .fast = false),
        PRODUCT(E4M3, E4M3, FP32, BLOCK, BLOCK, 256, 384, 512, .accumulate = true),
        PRODUCT(E4M3, E4M3, FP32, BLOCK, BLOCK, 136, 40, 300, .accumulate = true),
        PRODUCT(E4M3, E4M3, FP32, BLOCK, BLOCK, 8, 8, 1, .fast = false),
        PRODUCT(E4M3, E4M3, FP32, BLOCK, TILE, 1024, 16, 6144, .fast = false),
        PRODUCT(E4M3, E4M3, BF16, BLOCK, BLOCK, 264, 520, 4100, .fast = false),
        /* in which order are the two scales applied? */
        PRODUCT(E4M3, E4M3, FP32, BLOCK, TILE, 256, 384, 512, .a_exponent = 120, .b_exponent = -40,
                .asked_only = true),
        PRODUCT(E4M3, E4M3, FP32, BLOCK, TILE, 256, 384, 512, .a_exponent = -40, .b_exponent = 120,
                .asked_only = true),
        PRODUCT(E4M3, E4M3, FP32, BLOCK, BLOCK, 256, 384, 512, .a_exponent = 120, .b_exponent = -40,
                .asked_only = true),
        PRODUCT(E4M3, E4M3, FP32, BLOCK, BLOCK, 256, 384, 512, .a_exponent = -40, .b_exponent = 120,
                .asked_only = true),
        /* would they go without padding? */
        PRODUCT(E4M3, E4M3, BF16, BLOCK, TILE, 132, 384, 512, .asked_only = true),
        PRODUCT(E4M3, E4M3, BF16, BLOCK, TILE, 129, 384, 512, .asked_only = true),
        PRODUCT(E4M3, E4M3, BF16, BLOCK, TILE, 256, 384, 528, .asked_only = true),
        PRODUCT(E4M3, E4M3, FP32, BLOCK, BLOCK, 256, 388, 512, .asked_only = true),
        PRODUCT(E4M3, E4M3, FP16, BLOCK, TILE, 256, 384, 512, .asked_only = true),
        PRODUCT(E5M2, E4M3, BF16, BLOCK, TILE, 256, 384, 512, .asked_only = true),
        PRODUCT(E4M3, E4M3, BF16, TILE, TILE, 256, 384, 512, .asked_only = true),
    };
    for (size_t i = 0; i < sizeof list / sizeof list[0]; i++)
        check(&list[i]);
    assert_int_equal(failures, 0);
}

/* Stored by rows or by columns, at any address and leading dim. */
static void bf16_in_any_layout(void **state)
{
    (void)state;
    failures = 0;
    for (int turned = 0; turned < 4; turned++) {
        for (int64_t shift = 0; shift < 3; shift++) {
            struct product p = PRODUCT(BF16, BF16, FP32, NONE, NONE, 130, 257, 300, .fast = false);
            p.a_turned = turned & 1;
            p.b_turned = turned >> 1;
            p.shift = shift * shift; /* 0, 1, 4 */
            p.accumulate = shift == 1;
            check(&p);
            p.out = BF16;
            p.accumulate = false;
            p.bias = shift == 0;
            p.rows = 1;
            check(&p);
        }
    }
    static const struct product refused[] = {
        PRODUCT(BF16, BF16, FP32, NONE, NONE, 16, 256, 384, .bias = true, .asked_only = true),
        PRODUCT(BF16, BF16, FP16, NONE, NONE, 16, 256, 384, .asked_only = true),
    };
    for (size_t i = 0; i < sizeof refused / sizeof refused[0]; i++)
        check(&refused[i]);
    assert_int_equal(failures, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(one_scale_a_tensor),
        cmocka_unit_test(scales_by_block),
        cmocka_unit_test(bf16_in_any_layout),
    };
    fp8_context_options options = FP8_CONTEXT_OPTIONS_INIT;
    fp8_status status = fp8_context_create(&options, &context);
    if (status != FP8_OK) {
        const char *required = getenv("FP8_TEST_REQUIRE");
        bool skip = required == NULL || strstr(required, "gpu") == NULL;
        printf("%s: %s\n", skip ? "skipped" : "no device", fp8_last_error());
        return skip ? 77 : 1;
    }
    bool pushed; /* as a call of the runtime has it; FP8 needs a current context */
    if (fp8_pool_create(0, &pool) != FP8_OK || fp8_context_enter(context, &pushed) != FP8_OK)
        return 1;
    printf("cuBLASLt %llu\n", (unsigned long long)fp8_lt_version(context->lt));
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    fp8_context_leave(context, pushed);
    fp8_pool_destroy(pool);
    fp8_context_destroy(context);
    return failed;
}
