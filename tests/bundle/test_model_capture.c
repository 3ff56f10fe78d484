/*
 * test_model_capture.c - a model's step as a CUDA graph, over two ranks with the fake driver and
 * NCCL.
 *
 * The fake keeps captured work and does it when the graph is launched, and it breaks a capture as
 * the real driver would: streams that are not joined, events of outside, calls that ask or wait.
 * What a replay gives is compared with the same calls without a graph, with other inputs and
 * weights in each. In every mode.
 */
#include <cuda.h>

#include "runtime/fp8_format.h"
#include "runtime/fp8_model.h"
#include "tests/bundle/cuda_rig.h"
#include "tests/bundle/process_rig.h"

enum { WEIGHTS = 3, TOKENS = 17, MODES = 3 };

static struct {
    CUresult (*begin)(CUstream, CUstreamCaptureMode);
    CUresult (*end)(CUstream, CUgraph *);
    CUresult (*launch)(CUgraph, CUstream); /* the fake needs no executable graph */
    CUresult (*destroy)(CUgraph);
    CUresult (*retain)(CUcontext *, CUdevice);
    CUresult (*push)(CUcontext);
} cuda;

static const CUstreamCaptureMode modes[MODES] = { CU_STREAM_CAPTURE_MODE_GLOBAL,
                                                  CU_STREAM_CAPTURE_MODE_THREAD_LOCAL,
                                                  CU_STREAM_CAPTURE_MODE_RELAXED };
static char streams[2];
#define CAPTURED ((fp8_stream)(void *)&streams[0])
#define EAGER ((fp8_stream)(void *)&streams[1])

static char *folder;

static void find_entries(void)
{
    const struct {
        const char *name;
        void *entry;
    } list[] = { { "cuStreamBeginCapture_v2", &cuda.begin },
                 { "cuStreamEndCapture", &cuda.end },
                 { "cuGraphLaunch", &cuda.launch },
                 { "cuGraphDestroy", &cuda.destroy },
                 { "cuDevicePrimaryCtxRetain", &cuda.retain },
                 { "cuCtxPushCurrent_v2", &cuda.push } };
    for (size_t i = 0; i < sizeof list / sizeof list[0]; i++) {
        void *address;
        EXPECT_OK(fp8_library_symbol(FP8_LIBRARY_CUDA, list[i].name, &address, NULL));
        memcpy(list[i].entry, &address, sizeof address);
    }
}

/* ---- a model and the buffers of its step ---- */

static const char *const layer_names[WEIGHTS] = { "bias", "plain", "bias" };

struct level {
    fp8_layer *layer;
    fp8_layer_info info;
    struct matrix w, bias, x, y, dy, dx, dw, dbias; /* w, bias, dw, dbias: this rank's rows */
    fp8_operand saved, grad;
};

struct stage {
    struct process *p;
    fp8_bundle *bundle;
    fp8_model *model;
    struct level level[WEIGHTS];
    fp8_call call;
    uint64_t version;
};

static fp8_operand operand_of(const struct level *l, fp8_bytes which)
{
    fp8_operand operand = FP8_OPERAND_INIT;
    if (fp8_layer_bytes(l->layer, TOKENS, which, &operand.bytes) == FP8_OK)
        operand.data = cuda_block(operand.bytes);
    return operand;
}

static bool make_level(struct stage *s, int i)
{
    struct level *l = &s->level[i];
    int64_t first, count;
    if (fp8_model_rows(s->model, i, &first, &count) != FP8_OK)
        return false;
    const int64_t k = l->info.in_features, n = l->info.out_features;
    l->w = cuda_tensor(count, k, k, l->info.w_dtype, 0);
    l->bias = cuda_tensor(1, count, count, FP8_DTYPE_BF16, 0);
    l->x = cuda_tensor(TOKENS, k, k, l->info.x_dtype, 0);
    l->y = cuda_tensor(TOKENS, n, n, l->info.y_dtype, 0);
    l->dy = cuda_tensor(TOKENS, n, n, l->info.dy_dtype, 0);
    l->dx = cuda_tensor(TOKENS, k, k, l->info.dx_dtype, 0);
    l->dw = cuda_tensor(count, k, k, FP8_DTYPE_FP32, 0);
    l->dbias = cuda_tensor(1, count, count, FP8_DTYPE_FP32, 0);
    l->saved = operand_of(l, FP8_BYTES_SAVED);
    l->grad = operand_of(l, FP8_BYTES_GRAD);
    return true;
}

/* variant 1: groups stay gathered. */
static bool make_stage(struct stage *s, struct process *p)
{
    fp8_model_layer layers[WEIGHTS];
    size_t workspace = 0, bytes;
    s->p = p;
    if (fp8_bundle_open(p->context, folder, &s->bundle) != FP8_OK)
        return false;
    for (int i = 0; i < WEIGHTS; i++) {
        struct level *l = &s->level[i];
        l->info.size = sizeof l->info;
        if (fp8_layer_create(s->bundle, layer_names[i], &l->layer) != FP8_OK ||
            fp8_layer_describe(l->layer, &l->info) != FP8_OK ||
            fp8_layer_bytes(l->layer, TOKENS, FP8_BYTES_WORKSPACE, &bytes) != FP8_OK)
            return false;
        workspace = bytes > workspace ? bytes : workspace;
        layers[i] = (fp8_model_layer)FP8_MODEL_LAYER_INIT;
        layers[i].layer = l->layer;
    }
    fp8_model_options options = FP8_MODEL_OPTIONS_INIT;
    options.layer_count = WEIGHTS;
    options.layers = layers;
    options.context = p->context;
    options.comm = p->comm;
    options.backward = p->variant ? FP8_WEIGHTS_KEEP : FP8_WEIGHTS_GATHER;
    options.reduce_by = FP8_REDUCE_COLLECTIVE; /* of which layer 'bias' has 19 and 18 rows */
    if (fp8_model_create(&options, &s->model) != FP8_OK)
        return false;
    s->call = (fp8_call)FP8_CALL_INIT;
    s->call.workspace = cuda_block(workspace);
    s->call.workspace_bytes = workspace;
    for (int i = 0; i < WEIGHTS; i++) {
        if (!make_level(s, i))
            return false;
    }
    return true;
}

static void drop_stage(struct stage *s)
{
    fp8_model_destroy(s->model);
    for (int i = 0; i < WEIGHTS; i++) {
        struct level *l = &s->level[i];
        struct matrix *all[] = { &l->w, &l->bias, &l->x, &l->y, &l->dy, &l->dx, &l->dw, &l->dbias };
        for (size_t j = 0; j < sizeof all / sizeof all[0]; j++)
            free(all[j]->block);
        free(l->saved.data), free(l->grad.data);
        fp8_layer_destroy(l->layer);
    }
    free(s->call.workspace);
    fp8_bundle_close(s->bundle);
}

/* Other inputs and weights for every seed, and outputs that nobody has written. */
static void fill_stage(struct stage *s, int seed)
{
    for (int i = 0; i < WEIGHTS; i++) {
        struct level *l = &s->level[i];
        struct matrix *in[] = { &l->w, &l->bias, &l->x, &l->dy };
        struct matrix *out[] = { &l->y, &l->dx, &l->dw, &l->dbias };
        for (size_t j = 0; j < 4; j++) {
            const size_t count = in[j]->bytes / 2;
            for (size_t at = 0; at < count; at++)
                ((uint16_t *)in[j]->tensor.data)[at] = fp8_float_to_bf16(
                    (float)((int)(at * 7 + (size_t)(seed * 5 + i * 3 + s->p->rank + (int)j)) % 13 -
                            6) *
                    (float)seed);
            memset(out[j]->tensor.data, 0x5a, out[j]->bytes);
        }
    }
}

static uint64_t hash_stage(const struct stage *s)
{
    uint64_t hash = 0xcbf29ce484222325u;
    for (int i = 0; i < WEIGHTS; i++) {
        const struct level *l = &s->level[i];
        const struct matrix *out[] = { &l->y, &l->dx, &l->dw, &l->dbias };
        for (size_t j = 0; j < 4; j++) {
            for (size_t at = 0; at < out[j]->bytes; at++)
                hash = (hash ^ ((const uint8_t *)out[j]->tensor.data)[at]) * 0x100000001b3u;
        }
    }
    return hash;
}

/* ---- the step ---- */

static fp8_status update(struct stage *s, fp8_stream stream, uint64_t version)
{
    fp8_tensor w[WEIGHTS], bias[WEIGHTS];
    for (int i = 0; i < WEIGHTS; i++)
        w[i] = s->level[i].w.tensor, bias[i] = s->level[i].bias.tensor;
    fp8_model_update_args args = FP8_MODEL_UPDATE_ARGS_INIT;
    args.w = w;
    args.bias = bias;
    args.version = version;
    args.call = s->call;
    args.call.stream = stream;
    return fp8_model_update(s->model, &args);
}

static fp8_status forward(struct stage *s, fp8_stream stream, int i)
{
    struct level *l = &s->level[i];
    fp8_fprop_args args = FP8_FPROP_ARGS_INIT;
    args.x = &l->x.tensor;
    args.y = &l->y.tensor;
    args.saved = &l->saved;
    args.call = s->call;
    args.call.stream = stream;
    return fp8_model_fprop(s->model, i, &args);
}

static fp8_status backward(struct stage *s, fp8_stream stream, int i)
{
    struct level *l = &s->level[i];
    fp8_backward_args passes = FP8_BACKWARD_ARGS_INIT;
    passes.dy = &l->dy.tensor;
    passes.saved = &l->saved;
    passes.grad = &l->grad;
    passes.dx = &l->dx.tensor;
    passes.call = s->call;
    passes.call.stream = stream;
    fp8_model_backward_args args = FP8_MODEL_BACKWARD_ARGS_INIT;
    args.backward = &passes;
    args.dw = &l->dw.tensor;
    args.dbias = l->info.has_bias ? &l->dbias.tensor : NULL;
    return fp8_model_backward(s->model, i, &args);
}

static fp8_status passes(struct stage *s, fp8_stream stream)
{
    for (int i = 0; i < WEIGHTS; i++) {
        fp8_status status = forward(s, stream, i);
        if (status != FP8_OK)
            return status;
    }
    for (int i = WEIGHTS - 1; i >= 0; i--) {
        fp8_status status = backward(s, stream, i);
        if (status != FP8_OK)
            return status;
    }
    return fp8_model_join(s->model, stream);
}

/* Graphs are launched in it. */
static bool make_current(void)
{
    CUcontext context = NULL;
    return cuda.retain(&context, 0) == CUDA_SUCCESS && cuda.push(context) == CUDA_SUCCESS;
}

/* ---- right ---- */

static void capture(CUstreamCaptureMode mode)
{
    bundle_fake_cuda()->captured_blocks = true;
    if (cuda.begin(CAPTURED, mode) != CUDA_SUCCESS)
        abort();
}

static int replay(struct process *p, struct stage *s, CUgraph graph, const uint64_t *wanted,
                  bool updates)
{
    static const int order[] = { 1, 0, 1 };
    for (size_t i = 0; i < sizeof order / sizeof order[0]; i++) {
        fill_stage(s, order[i] + 1);
        if (updates) /* outside the graph */
            CHECK(update(s, EAGER, ++s->version) == FP8_OK &&
                  fp8_model_join(s->model, EAGER) == FP8_OK);
        CHECK(cuda.launch(graph, EAGER) == CUDA_SUCCESS);
        CHECK(hash_stage(s) == wanted[order[i]]);
    }
    return 0;
}

/* One mode: the whole step, then passes alone. */
static int graphs(struct process *p, struct stage *s, CUstreamCaptureMode mode,
                  const uint64_t *wanted)
{
    CUgraph graph = NULL;
    for (int updates = 0; updates < 2; updates++) {
        fill_stage(s, 9);
        const uint64_t untouched = hash_stage(s);
        const int64_t collectives = fake_nccl()->collectives;
        capture(mode);
        CHECK(fp8_model_join(s->model, CAPTURED) == FP8_OK);
        CHECK(fp8_model_gather(s->model, 0, FP8_PASS_FPROP) == FP8_OK);
        /* with the version that the model has: outside nothing would be done */
        CHECK(updates || update(s, CAPTURED, s->version) == FP8_OK);
        CHECK(passes(s, CAPTURED) == FP8_OK);
        CHECK(cuda.end(CAPTURED, &graph) == CUDA_SUCCESS);
        CHECK(hash_stage(s) == untouched && fake_nccl()->collectives == collectives);
        if (replay(p, s, graph, wanted, updates) != 0)
            return 1;
        CHECK(cuda.destroy(graph) == CUDA_SUCCESS);
        /* and without a graph again, its events and slots forgotten */
        CHECK(fp8_model_join(s->model, EAGER) == FP8_OK);
        fill_stage(s, 1);
        CHECK(update(s, EAGER, ++s->version) == FP8_OK && passes(s, EAGER) == FP8_OK);
        CHECK(hash_stage(s) == wanted[0]);
    }
    return 0;
}

/* An update of the newest version, captured; its graph. */
static int capture_update(struct process *p, struct stage *s, CUstreamCaptureMode mode,
                          CUgraph *graph)
{
    capture(mode);
    CHECK(fp8_model_join(s->model, CAPTURED) == FP8_OK);
    CHECK(update(s, CAPTURED, s->version) == FP8_OK);
    CHECK(fp8_model_join(s->model, CAPTURED) == FP8_OK);
    CHECK(cuda.end(CAPTURED, graph) == CUDA_SUCCESS);
    return 0;
}

/* What an update and passes outside of graphs give for these inputs. */
static int eager_gives(struct process *p, struct stage *s, int seed, uint64_t wanted)
{
    fill_stage(s, seed);
    CHECK(update(s, EAGER, s->version) == FP8_OK && passes(s, EAGER) == FP8_OK);
    CHECK(hash_stage(s) == wanted);
    return 0;
}

/* A version that a capture has brought is no reason to skip one outside: the graph was dropped, or
 * launched with other weights, once or often, or there are two of it. */
static int versions(struct process *p, struct stage *s, CUstreamCaptureMode mode,
                    const uint64_t *wanted)
{
    CUgraph first = NULL, second = NULL;
    fill_stage(s, 1);
    CHECK(update(s, EAGER, ++s->version) == FP8_OK);
    s->version++;
    if (capture_update(p, s, mode, &first) != 0)
        return 1;
    CHECK(cuda.destroy(first) == CUDA_SUCCESS);
    if (eager_gives(p, s, 2, wanted[1]) != 0)
        return 1;
    s->version++;
    if (capture_update(p, s, mode, &first) != 0 || capture_update(p, s, mode, &second) != 0)
        return 1;
    CUgraph launches[] = { first, second, first };
    for (int i = 0; i < 3; i++) {
        fill_stage(s, 1);
        CHECK(cuda.launch(launches[i], EAGER) == CUDA_SUCCESS);
        CHECK(fp8_model_join(s->model, EAGER) == FP8_OK);
        if (eager_gives(p, s, 2, wanted[1]) != 0)
            return 1;
    }
    CHECK(cuda.destroy(first) == CUDA_SUCCESS && cuda.destroy(second) == CUDA_SUCCESS);
    return 0;
}

static int steps(struct process *p)
{
    struct stage s = { .version = 0 };
    uint64_t wanted[2];
    CHECK(process_join(p) == FP8_OK && make_stage(&s, p));
    CHECK(make_current());
    for (int i = 0; i < 2; i++) {
        fill_stage(&s, i + 1);
        CHECK(update(&s, EAGER, ++s.version) == FP8_OK && passes(&s, EAGER) == FP8_OK);
        wanted[i] = hash_stage(&s);
    }
    CHECK(wanted[0] != wanted[1]);
    for (int i = 0; i < MODES; i++) {
        if (graphs(p, &s, modes[i], wanted) != 0 || versions(p, &s, modes[i], wanted) != 0)
            return 1;
    }
    CHECK(fp8_comm_wait(p->comm, EAGER) == FP8_OK);
    drop_stage(&s);
    process_leave(p);
    CHECK(fake_nccl()->live == 0 && bundle_fake_cuda()->live == 1 &&
          bundle_fake_cuda()->misuse == 0);
    return 0;
}

static void a_step_can_be_captured(void **state)
{
    (void)state;
    for (int keep = 0; keep < 2; keep++)
        process_run(2, (struct process){ .timeout = 10, .variant = keep, .folder = folder }, steps,
                    0, 0);
}

/* ---- wrong ---- */

static int end_whole(struct process *p, struct stage *s)
{
    CUgraph graph = NULL;
    CHECK(fp8_model_join(s->model, CAPTURED) == FP8_OK);
    CHECK(cuda.end(CAPTURED, &graph) == CUDA_SUCCESS && cuda.destroy(graph) == CUDA_SUCCESS);
    return 0;
}

/* While the model's stream is captured, its calls are of that capture. */
static int outside(struct process *p, struct stage *s)
{
    const fp8_operand *weight;
    fp8_call call = s->call;
    call.stream = EAGER;
    CHECK(forward(s, EAGER, 0) == FP8_ERR_CAPTURE && process_says("that goes on"));
    CHECK(backward(s, EAGER, 0) == FP8_ERR_CAPTURE && process_says("model_backward: the model"));
    CHECK(update(s, EAGER, s->version + 1) == FP8_ERR_CAPTURE && process_says("that goes on"));
    CHECK(fp8_model_join(s->model, EAGER) == FP8_ERR_CAPTURE && process_says("that goes on"));
    CHECK(fp8_model_acquire(s->model, 1, FP8_PASS_FPROP, &call, &weight) == FP8_ERR_CAPTURE);
    CHECK(fp8_model_release(s->model, 1, EAGER) == FP8_ERR_CAPTURE && process_says("that goes on"));
    return 0;
}

/* Refused with a sentence, and the capture goes on. */
static int refusals(struct process *p, struct stage *s, CUstreamCaptureMode mode)
{
    const fp8_operand *weight;
    fp8_call call = s->call;
    fp8_model *other;
    fp8_comm *comm;
    void *memory;
    fp8_model_options options = FP8_MODEL_OPTIONS_INIT;
    fp8_model_layer layer = FP8_MODEL_LAYER_INIT;
    layer.layer = s->level[0].layer;
    options.layers = &layer, options.layer_count = 1, options.context = p->context;
    options.comm = p->comm;
    call.stream = EAGER;
    CHECK(fp8_model_acquire(s->model, 1, FP8_PASS_FPROP, &call, &weight) == FP8_OK);
    capture(mode);
    CHECK(forward(s, CAPTURED, 0) == FP8_ERR_CAPTURE && process_says("of layer 'plain' was"));
    CHECK(fp8_model_release(s->model, 1, CAPTURED) == FP8_ERR_CAPTURE);
    CHECK(fp8_model_release(s->model, 1, EAGER) == FP8_OK);
    CHECK(fp8_model_create(&options, &other) == FP8_ERR_CAPTURE);
    CHECK(fp8_comm_wait(p->comm, CAPTURED) == FP8_ERR_CAPTURE && process_says("comm_wait"));
    CHECK(fp8_comm_alloc(p->comm, 16, &memory) == FP8_ERR_CAPTURE && process_says("comm_alloc"));
    CHECK(process_says("before the capture begins"));
    fp8_comm_options create = FP8_COMM_OPTIONS_INIT;
    char file[512];
    snprintf(file, sizeof file, "%s/second", folder);
    create.rank = p->rank, create.ranks = p->ranks, create.file = file;
    CHECK(fp8_comm_create(p->context, &create, &comm) == FP8_ERR_CAPTURE);
    CHECK(forward(s, NULL, 0) == FP8_ERR_CAPTURE && process_says("legacy stream"));
    CHECK(fp8_model_join(s->model, CAPTURED) == FP8_OK);
    CHECK(forward(s, EAGER, 0) == FP8_ERR_CAPTURE && process_says("that goes on"));
    call.stream = CAPTURED;
    CHECK(fp8_model_acquire(s->model, 1, FP8_PASS_FPROP, &call, &weight) == FP8_OK);
    if (outside(p, s) != 0 || end_whole(p, s) != 0)
        return 1;
    CHECK(forward(s, EAGER, 0) == FP8_ERR_CAPTURE && process_says("in the capture"));
    CHECK(fp8_model_release(s->model, 1, EAGER) == FP8_OK);
    CHECK(forward(s, EAGER, 0) == FP8_OK && fp8_model_join(s->model, EAGER) == FP8_OK);
    return 0;
}

/* Without the join at its end the capture has a stream too many. */
static int unjoined(struct process *p, struct stage *s, CUstreamCaptureMode mode)
{
    CUgraph graph = NULL;
    capture(mode);
    CHECK(forward(s, CAPTURED, 0) == FP8_OK && backward(s, CAPTURED, 0) == FP8_OK);
    CHECK(cuda.end(CAPTURED, &graph) == CUDA_ERROR_STREAM_CAPTURE_UNJOINED && !graph);
    CHECK(fp8_model_join(s->model, EAGER) == FP8_OK);
    return 0;
}

/* A rank that does not launch the graph: the others' wait ends. */
static int alone(struct process *p)
{
    struct stage s = { .version = 0 };
    CUgraph graph = NULL;
    CHECK(process_join(p) == FP8_OK && make_stage(&s, p) && make_current());
    fill_stage(&s, 1);
    capture(CU_STREAM_CAPTURE_MODE_GLOBAL);
    CHECK(update(&s, CAPTURED, 1) == FP8_OK && passes(&s, CAPTURED) == FP8_OK);
    CHECK(cuda.end(CAPTURED, &graph) == CUDA_SUCCESS);
    if (p->rank == 0)
        CHECK(cuda.launch(graph, EAGER) == CUDA_SUCCESS &&
              fp8_comm_wait(p->comm, EAGER) == FP8_ERR_TIMEOUT &&
              process_says("a CUDA graph with collectives") && fake_nccl()->aborts == 1);
    CHECK(cuda.destroy(graph) == CUDA_SUCCESS);
    return 0;
}

static void a_launch_on_one_rank_ends(void **state)
{
    (void)state;
    process_run(2, (struct process){ .timeout = 3, .folder = folder }, alone, 0, 0);
}

static int wrong(struct process *p)
{
    struct stage s = { .version = 0 };
    CHECK(process_join(p) == FP8_OK && make_stage(&s, p));
    fill_stage(&s, 1);
    CHECK(update(&s, EAGER, ++s.version) == FP8_OK && passes(&s, EAGER) == FP8_OK);
    for (int i = 0; i < MODES; i++) {
        if (refusals(p, &s, modes[i]) != 0 || unjoined(p, &s, modes[i]) != 0)
            return 1;
    }
    drop_stage(&s);
    process_leave(p);
    CHECK(fake_nccl()->live == 0 && bundle_fake_cuda()->live == 0);
    return 0;
}

static void refusals_leave_the_capture_whole(void **state)
{
    (void)state;
    process_run(2, (struct process){ .timeout = 10, .folder = folder }, wrong, 0, 0);
}

int main(void)
{
    if (!bundle_fake_cuda() || !bundle_fake_lt())
        return 1;
    find_entries();
    folder = cuda_bundle(bundle_manifest_by("generated"));
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_step_can_be_captured),
        cmocka_unit_test(refusals_leave_the_capture_whole),
        cmocka_unit_test(a_launch_on_one_rank_ends),
    };
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    bundle_remove(folder);
    return failed;
}
