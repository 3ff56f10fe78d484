/*
 * test_capture.c - the capture of a CUDA graph, with a driver that breaks it as the real one would.
 *
 * Passes of a layer that was made before are captured in every mode, also the first ones, in which
 * cuBLASLt loads its kernels. A call that would load, allocate or wait is refused where the capture
 * can be seen, and never breaks it.
 */
#include "tests/bundle/cuda_rig.h"

#include <cuda.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

static struct fake_cuda *cuda;
static struct fake_lt *lt;
static CUresult (*begin_capture)(CUstream, CUstreamCaptureMode);
static CUresult (*end_capture)(CUstream, CUgraph *);
static CUresult (*destroy_graph)(CUgraph);

static const CUstreamCaptureMode modes[] = { CU_STREAM_CAPTURE_MODE_GLOBAL,
                                             CU_STREAM_CAPTURE_MODE_THREAD_LOCAL,
                                             CU_STREAM_CAPTURE_MODE_RELAXED };
static char streams[2];
#define CAPTURED ((fp8_stream)(void *)&streams[0])
#define OTHER ((fp8_stream)(void *)&streams[1])

static void find_entries(void)
{
    void *address;
    EXPECT_OK(fp8_library_symbol(FP8_LIBRARY_CUDA, "cuStreamBeginCapture_v2", &address, NULL));
    memcpy(&begin_capture, &address, sizeof address);
    EXPECT_OK(fp8_library_symbol(FP8_LIBRARY_CUDA, "cuStreamEndCapture", &address, NULL));
    memcpy(&end_capture, &address, sizeof address);
    EXPECT_OK(fp8_library_symbol(FP8_LIBRARY_CUDA, "cuGraphDestroy", &address, NULL));
    memcpy(&destroy_graph, &address, sizeof address);
}

static void capture(CUstreamCaptureMode mode, bool blocking)
{
    cuda->captured_blocks = blocking;
    assert_int_equal(begin_capture(CAPTURED, mode), CUDA_SUCCESS);
}

static void finish(void)
{
    CUgraph graph;
    assert_int_equal(end_capture(CAPTURED, &graph), CUDA_SUCCESS);
    assert_int_equal(destroy_graph(graph), CUDA_SUCCESS);
    assert_int_equal(cuda->depth, 0);
}

/* ---- passes ---------------------------------------------------------------------------------- */

struct tensors {
    struct matrix x, w, y, dy, dx, dw, bias, dbias;
    fp8_operand weight, saved, grad;
    char *workspace;
    fp8_call call;
};

static void make(struct tensors *t, const struct side *side)
{
    *t = (struct tensors){
        .x = cuda_tensor(17, 50, 50, FP8_DTYPE_BF16, 1),
        .w = cuda_tensor(37, 50, 50, FP8_DTYPE_BF16, 1),
        .y = cuda_tensor(17, 37, 37, FP8_DTYPE_BF16, 1),
        .dy = cuda_tensor(17, 37, 37, FP8_DTYPE_BF16, 1),
        .dx = cuda_tensor(17, 50, 50, FP8_DTYPE_BF16, 1),
        .dw = cuda_tensor(37, 50, 50, FP8_DTYPE_FP32, 1),
        .bias = cuda_tensor(1, 37, 37, FP8_DTYPE_BF16, 1),
        .dbias = cuda_tensor(1, 37, 37, FP8_DTYPE_FP32, 1),
        .weight = cuda_operand(side, 0, FP8_BYTES_WEIGHT),
        .saved = cuda_operand(side, 17, FP8_BYTES_SAVED),
        .grad = cuda_operand(side, 17, FP8_BYTES_GRAD),
    };
    cuda_fill(&t->x), cuda_fill(&t->w), cuda_fill(&t->dy), cuda_fill(&t->bias);
    t->call = cuda_call(side, 17, &t->workspace, 0);
    t->call.stream = CAPTURED;
}

static void drop(struct tensors *t)
{
    struct matrix *all[] = { &t->x, &t->w, &t->y, &t->dy, &t->dx, &t->dw, &t->bias, &t->dbias };
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        free(all[i]->block);
    free(t->weight.data), free(t->saved.data), free(t->grad.data), free(t->workspace);
}

static void run_all(const struct side *side, struct tensors *t, uint64_t version)
{
    fp8_weight_args update = FP8_WEIGHT_ARGS_INIT;
    update.w = &t->w.tensor, update.version = version, update.weight = &t->weight;
    update.call = t->call;
    EXPECT_OK(fp8_weight_update(side->layer, &update));
    fp8_fprop_args fprop = FP8_FPROP_ARGS_INIT;
    fprop.x = &t->x.tensor, fprop.weight = &t->weight, fprop.y = &t->y.tensor;
    fprop.saved = &t->saved, fprop.bias = &t->bias.tensor, fprop.call = t->call;
    EXPECT_OK(fp8_layer_fprop(side->layer, &fprop));
    fp8_backward_args backward = FP8_BACKWARD_ARGS_INIT;
    backward.dy = &t->dy.tensor, backward.saved = &t->saved, backward.weight = &t->weight;
    backward.grad = &t->grad, backward.dw = &t->dw.tensor, backward.dx = &t->dx.tensor;
    backward.dbias = &t->dbias.tensor, backward.call = t->call;
    EXPECT_OK(fp8_layer_backward(side->layer, &backward));
}

static void capture_passes(const char *gemm)
{
    char *folder = cuda_bundle(bundle_manifest_by(gemm));
    for (size_t i = 0; i < sizeof modes / sizeof modes[0]; i++) {
        struct side side = cuda_open(0, folder, "bias");
        struct tensors t;
        make(&t, &side);
        lt->loaded = 0;
        for (uint64_t round = 0; round < 2; round++) {
            capture(modes[i], round == 0);
            run_all(&side, &t, 2 * i + round + 1);
            int64_t work = cuda->captured_work;
            finish();
            assert_true(work >= 6); /* three quantised tensors, three products */
        }
        drop(&t);
        cuda_close(&side);
    }
    bundle_remove(folder);
}

static void passes_can_be_captured(void **state)
{
    (void)state;
    capture_passes("generated");
    capture_passes("cublaslt");
}

/* ---- calls that cannot be -------------------------------------------------------------------- */

static char *jit_folder;
static int provided;

static int provide(void *user, const struct fp8_layer_description *d, char *path, size_t bytes)
{
    (void)user, (void)d;
    provided++;
    snprintf(path, bytes, "%s", jit_folder);
    return FP8_OK;
}

static fp8_layer_description plain(void)
{
    fp8_layer_description d = FP8_LAYER_DESCRIPTION_INIT;
    d.spec = "a spec of the provider's", d.layer = "plain";
    return d;
}

static void what_would_build_is_refused(void **state)
{
    (void)state;
    jit_folder = cuda_bundle(bundle_manifest_by("generated"));
    fp8_context *context = bundle_context(0);
    EXPECT_OK(fp8_context_set_provider(context, provide, NULL));
    const fp8_layer *layer;
    fp8_bundle *bundle;
    void *memory;
    provided = 0;
    for (size_t i = 0; i < sizeof modes / sizeof modes[0]; i++) {
        fp8_layer_description d = plain();
        capture(modes[i], false); /* seen because the call names the stream */
        d.stream = CAPTURED;
        EXPECT_REFUSED(FP8_ERR_CAPTURE, "context_layer: the stream is being captured",
                       fp8_context_layer(context, &d, &layer));
        EXPECT_REFUSED(FP8_ERR_CAPTURE, "fp8_context_prepare", fp8_context_prepare(context, &d, 1));
        EXPECT_REFUSED(FP8_ERR_CAPTURE, "stream_synchronize",
                       fp8_stream_synchronize(context, CAPTURED));
        finish();
        capture(modes[i], true); /* seen from the legacy stream */
        d.stream = NULL;
        EXPECT_REFUSED(FP8_ERR_CAPTURE, "a blocking stream",
                       fp8_context_layer(context, &d, &layer));
        EXPECT_REFUSED(FP8_ERR_CAPTURE, "bundle_open",
                       fp8_bundle_open(context, jit_folder, &bundle));
        EXPECT_REFUSED(FP8_ERR_CAPTURE, "memory_alloc", fp8_memory_alloc(context, 16, &memory));
        EXPECT_REFUSED(FP8_ERR_CAPTURE, "stream_synchronize",
                       fp8_stream_synchronize(context, NULL));
        finish();
    }
    assert_int_equal(provided, 0);
    fp8_layer_description d = plain();
    EXPECT_OK(fp8_context_layer(context, &d, &layer)); /* afterwards it works, and it stays */
    capture(CU_STREAM_CAPTURE_MODE_GLOBAL, true);
    const fp8_layer *again;
    d.stream = CAPTURED;
    EXPECT_OK(fp8_context_layer(context, &d, &again));
    assert_ptr_equal(again, layer);
    finish();
    assert_int_equal(provided, 1);
    fp8_context_destroy(context);
    bundle_remove(jit_folder);
}

/* What cannot be seen is not broken: a non-blocking stream that the calls do not name, and the
 * captures of other threads. */
static void make_everything(void)
{
    fp8_context *context = bundle_context(0);
    EXPECT_OK(fp8_context_set_provider(context, provide, NULL));
    fp8_layer_description d = plain();
    d.stream = OTHER;
    EXPECT_OK(fp8_context_prepare(context, &d, 1));
    void *memory;
    EXPECT_OK(fp8_memory_alloc(context, 16, &memory));
    fp8_memory_free(context, memory);
    EXPECT_OK(fp8_stream_synchronize(context, OTHER));
    fp8_context_destroy(context);
}

static void *make_in_thread(void *user)
{
    make_everything();
    return user;
}

static void no_capture_is_broken(void **state)
{
    (void)state;
    jit_folder = cuda_bundle(bundle_manifest_by("cublaslt"));
    for (size_t i = 0; i < sizeof modes / sizeof modes[0]; i++) {
        capture(modes[i], false);
        make_everything();
        finish();
        capture(modes[i], false);
        pthread_t thread;
        assert_int_equal(pthread_create(&thread, NULL, make_in_thread, NULL), 0);
        pthread_join(thread, NULL);
        finish();
    }
    bundle_remove(jit_folder);
}

int main(void)
{
    cuda = bundle_fake_cuda();
    lt = bundle_fake_lt();
    if (!cuda || !lt)
        return 1;
    find_entries();
    lt->load = cuda->may;
    lt->record = cuda->record;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(passes_can_be_captured),
        cmocka_unit_test(what_would_build_is_refused),
        cmocka_unit_test(no_capture_is_broken),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
