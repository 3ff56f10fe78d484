/*
 * test_host_path.c - what a pass costs on the host beside its launches, with a driver that does
 * nothing.
 *
 * Counted: no allocation, no question to the driver but the current context, one map for each
 * operand that TMA reads or writes, and as many launches as fp8_layer_dispatch says. Timed, for the
 * eye: the median nanoseconds of a call less those of its launches, with FP8_TEST_FULL=1 over
 * 1,000,000 calls.
 */
#include "tests/bundle/cuda_rig.h"

#include <cuda.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static struct fake_cuda *cuda;
static struct fake_lt *lt;

enum { TOKENS = 256, BATCH = 100 };

struct bench {
    struct side side;
    struct matrix x, w, y, dy, dx, dw;
    fp8_operand weight, saved, grad;
    fp8_weight_args update;
    fp8_fprop_args fprop;
    fp8_quantize_dy_args quantize_dy;
    fp8_wgrad_args wgrad;
    fp8_dgrad_args dgrad;
    fp8_backward_args backward;
    char *workspace;
};

static void open_bench(struct bench *b, const char *folder)
{
    b->side = cuda_open(0, folder, "plain");
    fp8_layer_info info = { .size = sizeof info };
    EXPECT_OK(fp8_layer_describe(b->side.layer, &info));
    int64_t n = info.out_features, k = info.in_features;
    b->x = cuda_tensor(TOKENS, k, k, FP8_DTYPE_BF16, 0);
    b->w = cuda_tensor(n, k, k, FP8_DTYPE_BF16, 0);
    b->y = cuda_tensor(TOKENS, n, n, FP8_DTYPE_BF16, 0);
    b->dy = cuda_tensor(TOKENS, n, n, FP8_DTYPE_BF16, 0);
    b->dx = cuda_tensor(TOKENS, k, k, FP8_DTYPE_BF16, 0);
    b->dw = cuda_tensor(n, k, k, FP8_DTYPE_FP32, 0);
    b->weight = cuda_operand(&b->side, 0, FP8_BYTES_WEIGHT);
    b->saved = cuda_operand(&b->side, TOKENS, FP8_BYTES_SAVED);
    b->grad = cuda_operand(&b->side, TOKENS, FP8_BYTES_GRAD);
    fp8_call call = cuda_call(&b->side, TOKENS, &b->workspace, 0);
    b->update = (fp8_weight_args)FP8_WEIGHT_ARGS_INIT;
    b->update.w = &b->w.tensor, b->update.weight = &b->weight, b->update.call = call;
    b->fprop = (fp8_fprop_args)FP8_FPROP_ARGS_INIT;
    b->fprop.x = &b->x.tensor, b->fprop.weight = &b->weight, b->fprop.y = &b->y.tensor;
    b->fprop.saved = &b->saved, b->fprop.call = call;
    b->quantize_dy = (fp8_quantize_dy_args)FP8_QUANTIZE_DY_ARGS_INIT;
    b->quantize_dy.dy = &b->dy.tensor, b->quantize_dy.saved = &b->saved;
    b->quantize_dy.grad = &b->grad, b->quantize_dy.call = call;
    b->wgrad = (fp8_wgrad_args)FP8_WGRAD_ARGS_INIT;
    b->wgrad.saved = &b->saved, b->wgrad.grad = &b->grad, b->wgrad.dw = &b->dw.tensor;
    b->wgrad.call = call;
    b->dgrad = (fp8_dgrad_args)FP8_DGRAD_ARGS_INIT;
    b->dgrad.grad = &b->grad, b->dgrad.weight = &b->weight, b->dgrad.dx = &b->dx.tensor;
    b->dgrad.call = call;
    b->backward = (fp8_backward_args)FP8_BACKWARD_ARGS_INIT;
    b->backward.dy = &b->dy.tensor, b->backward.saved = &b->saved;
    b->backward.weight = &b->weight, b->backward.dw = &b->dw.tensor;
    b->backward.dx = &b->dx.tensor, b->backward.grad = &b->grad, b->backward.call = call;
}

static void close_bench(struct bench *b)
{
    struct matrix *all[] = { &b->x, &b->w, &b->y, &b->dy, &b->dx, &b->dw };
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        free(all[i]->block);
    free(b->weight.data), free(b->saved.data), free(b->grad.data), free(b->workspace);
    cuda_close(&b->side);
}

/* ---- the calls ------------------------------------------------------------------------------- */

static fp8_status run_weight(struct bench *b)
{
    b->update.version++;
    return fp8_weight_update(b->side.layer, &b->update);
}
static fp8_status run_weight_again(struct bench *b)
{
    return fp8_weight_update(b->side.layer, &b->update);
}
static fp8_status run_fprop(struct bench *b)
{
    return fp8_layer_fprop(b->side.layer, &b->fprop);
}
static fp8_status run_quantize_dy(struct bench *b)
{
    return fp8_layer_quantize_dy(b->side.layer, &b->quantize_dy);
}
static fp8_status run_wgrad(struct bench *b)
{
    return fp8_layer_wgrad(b->side.layer, &b->wgrad);
}
static fp8_status run_dgrad(struct bench *b)
{
    return fp8_layer_dgrad(b->side.layer, &b->dgrad);
}
static fp8_status run_backward(struct bench *b)
{
    return fp8_layer_backward(b->side.layer, &b->backward);
}

static const struct {
    const char *name;
    fp8_status (*run)(struct bench *b);
    unsigned passes; /* bit = fp8_pass: what it launches */
    int maps;        /* with a generated kernel */
} calls[] = {
    { "weight_update", run_weight, 1u << FP8_PASS_WEIGHT, 0 },
    { "weight_update, same version", run_weight_again, 0, 0 },
    { "fprop", run_fprop, 1u << FP8_PASS_FPROP, 3 },
    { "quantize_dy", run_quantize_dy, 1u << FP8_PASS_QUANTIZE_DY, 0 },
    { "wgrad", run_wgrad, 1u << FP8_PASS_WGRAD, 3 },
    { "dgrad", run_dgrad, 1u << FP8_PASS_DGRAD, 3 },
    { "backward", run_backward,
      1u << FP8_PASS_QUANTIZE_DY | 1u << FP8_PASS_WGRAD | 1u << FP8_PASS_DGRAD, 6 },
};
enum { CALLS = sizeof calls / sizeof calls[0] };

static int64_t launches_of(const struct bench *b, unsigned passes)
{
    int64_t launches = 0;
    for (int pass = 0; pass < FP8_PASS_COUNT; pass++) {
        fp8_dispatch dispatch = FP8_DISPATCH_INIT;
        EXPECT_OK(fp8_layer_dispatch(b->side.layer, (fp8_pass)pass, TOKENS, &dispatch));
        if (passes >> pass & 1)
            launches += dispatch.launches;
    }
    return launches;
}

/* ---- counting -------------------------------------------------------------------------------- */

static int64_t enqueued(void)
{
    return cuda->launches + cuda->copies + cuda->memsets + lt->products;
}

static void count_calls(struct bench *b, bool generated)
{
    for (int i = 0; i < CALLS; i++) {
        EXPECT_OK(calls[i].run(b)); /* the first may start an algorithm */
        int64_t before = cuda->calls, work = enqueued(), maps = cuda->maps, products = lt->products;
        int64_t queries = lt->queries;
        (void)fp8_allocation_fail_at(0);
        EXPECT_OK(calls[i].run(b));
        assert_int_equal(fp8_allocation_fail_at(0), 0);
        work = enqueued() - work, maps = cuda->maps - maps, products = lt->products - products;
        assert_int_equal(work, launches_of(b, calls[i].passes));
        assert_int_equal(maps, generated ? calls[i].maps : 0);
        assert_int_equal(lt->queries, queries);
        /* Every other call of the driver: pushing the context, which this thread has not made
         * current. */
        int64_t pushes = cuda->calls - before - (work - products) - maps;
        assert_true(pushes == (calls[i].passes ? 1 : 0));
    }
}

/* ---- timing ---------------------------------------------------------------------------------- */

static double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec * 1e9 + (double)time.tv_nsec;
}

static int compare(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double time_call(struct bench *b, fp8_status (*run)(struct bench *b), int batches)
{
    double *samples = calloc((size_t)batches, sizeof *samples);
    assert_non_null(samples);
    for (int i = 0; i < batches; i++) {
        double start = now();
        for (int j = 0; j < BATCH; j++)
            EXPECT_OK(run(b));
        samples[i] = (now() - start) / BATCH;
    }
    qsort(samples, (size_t)batches, sizeof *samples, compare);
    double median = samples[batches / 2];
    free(samples);
    return median;
}

static CUresult (*launch_kernel)(CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned,
                                 unsigned, unsigned, CUstream, void **, void **);

static fp8_status launch_nothing(struct bench *b)
{
    (void)b;
    static char name[] = "nothing";
    return launch_kernel((CUfunction)(void *)name, 1, 1, 1, 32, 1, 1, 0, NULL, NULL, NULL)
               ? FP8_ERR_CUDA
               : FP8_OK;
}

/* As in a program that has its device current. */
static void make_current(void)
{
    CUresult (*retain)(CUcontext *, CUdevice);
    CUresult (*push)(CUcontext);
    CUcontext primary;
    void *address;
    EXPECT_OK(fp8_library_symbol(FP8_LIBRARY_CUDA, "cuDevicePrimaryCtxRetain", &address, NULL));
    memcpy(&retain, &address, sizeof address);
    EXPECT_OK(fp8_library_symbol(FP8_LIBRARY_CUDA, "cuCtxPushCurrent_v2", &address, NULL));
    memcpy(&push, &address, sizeof address);
    assert_int_equal(retain(&primary, 0), CUDA_SUCCESS);
    assert_int_equal(push(primary), CUDA_SUCCESS);
}

static void time_calls(struct bench *b, const char *gemm)
{
    const char *full = getenv("FP8_TEST_FULL");
    int batches = full && full[0] == '1' ? 1000000 / BATCH : 100;
    void *address;
    EXPECT_OK(fp8_library_symbol(FP8_LIBRARY_CUDA, "cuLaunchKernel", &address, NULL));
    memcpy(&launch_kernel, &address, sizeof address);
    double launch = time_call(b, launch_nothing, batches);
    print_message("products by %s; a launch of nothing: %.0f ns\n", gemm, launch);
    for (int i = 0; i < CALLS; i++) {
        int64_t launches = launches_of(b, calls[i].passes);
        double time = time_call(b, calls[i].run, batches);
        print_message("  %-28s %5.0f ns beside %lld launches\n", calls[i].name,
                      time - launch * (double)launches, (long long)launches);
    }
}

/* ---- both ways of computing a product -------------------------------------------------------- */

static void measure(const char *gemm, bool timed)
{
    json_t *manifest = bundle_manifest_by(gemm);
    char *folder = cuda_bundle(manifest);
    cuda->launch = NULL; /* nothing is computed */
    lt->multiply = NULL;
    struct bench b;
    open_bench(&b, folder);
    if (timed)
        time_calls(&b, gemm);
    else
        count_calls(&b, strcmp(gemm, "generated") == 0);
    close_bench(&b);
    bundle_remove(folder);
}

static void nothing_but_launches(void **state)
{
    (void)state;
    measure("generated", false);
    measure("cublaslt", false);
}

static void how_long_it_takes(void **state)
{
    (void)state;
    make_current();
    measure("generated", true);
    measure("cublaslt", true);
}

int main(void)
{
    cuda = bundle_fake_cuda();
    lt = bundle_fake_lt();
    if (!cuda || !lt)
        return 1;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(nothing_but_launches),
        cmocka_unit_test(how_long_it_takes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
