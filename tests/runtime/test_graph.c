/*
 * test_graph.c - a stack of 32 layers, forward and backward, as a CUDA graph.
 *
 * The graph is captured before any of its passes ran in this process, so nothing may be left to be
 * loaded by a first call; then it is replayed with other inputs and weights each time, and every
 * output must have the bits that the same calls give without a graph. In every capture mode, by
 * every recipe. Whether a replay takes the weights anew is decided by a word on the device; scales
 * and history of delayed scaling advance once a replay.
 *
 * The host backend has no graphs: there a replay is the same calls again, which checks the rest.
 */
#include <math.h>

#include "runtime/fp8_state.h"
#include "tests/runtime/rig.h"
#include "tests/runtime/rig_driver.h"

enum { LEVELS = 32, REPLAYS = 4 };

/* ---- the driver's part ----------------------------------------------------------------------- */

static struct {
    CUresult (*begin)(CUstream, CUstreamCaptureMode);
    CUresult (*end)(CUstream, CUgraph *);
    CUresult (*instantiate)(CUgraphExec *, CUgraph, unsigned long long);
    CUresult (*launch)(CUgraphExec, CUstream);
    CUresult (*destroy_exec)(CUgraphExec);
    CUresult (*destroy)(CUgraph);
} cuda;

static void find_entries(void)
{
    rig_driver_entry("cuStreamBeginCapture_v2", &cuda.begin);
    rig_driver_entry("cuStreamEndCapture", &cuda.end);
    rig_driver_entry("cuGraphInstantiateWithFlags", &cuda.instantiate);
    rig_driver_entry("cuGraphLaunch", &cuda.launch);
    rig_driver_entry("cuGraphExecDestroy", &cuda.destroy_exec);
    rig_driver_entry("cuGraphDestroy", &cuda.destroy);
    rig_driver_make_current();
}

static const struct {
    const char *name;
    CUstreamCaptureMode mode;
} modes[] = {
    { "global", CU_STREAM_CAPTURE_MODE_GLOBAL },
    { "thread_local", CU_STREAM_CAPTURE_MODE_THREAD_LOCAL },
    { "relaxed", CU_STREAM_CAPTURE_MODE_RELAXED },
};
enum { MODES = sizeof modes / sizeof modes[0] };

/* ---- the stack ------------------------------------------------------------------------------- */

struct level {
    const struct rig_layer *layer;
    struct rig_tensor w, bias, y, dx, dw, dbias;
    struct rig_operand weight, saved, grad;
};

struct stack {
    struct rig_tensor x, dy;
    struct rig_tensor refresh; /* the word */
    struct rig_scratch workspace;
    fp8_state *state; /* recipe "delayed" */
    struct level level[LEVELS];
};

/* What becomes of the weights in a step. */
enum weights { BY_THE_WORD, TAKEN, KEPT };

/* Normal values; sigma keeps the activations of a deep stack of one size. */
static void fill(struct rig_tensor *tensor, uint64_t seed, double sigma)
{
    for (int64_t i = 0; i < tensor->t.rows; i++) {
        for (int64_t j = 0; j < tensor->t.cols; j++)
            rig_set(tensor, i, j,
                    (float)(sigma * rig_normal(seed, (uint64_t)(i * tensor->t.cols + j))));
    }
    rig_tensor_push(tensor);
}

/* Another batch and other weights, the same in every stack. */
static void refill(struct stack *s, uint64_t seed)
{
    fill(&s->x, seed * 1000, 1);
    fill(&s->dy, seed * 1000 + 1, 1);
    for (int i = 0; i < LEVELS; i++) {
        struct level *l = &s->level[i];
        fill(&l->w, seed * 1000 + 10 + 2 * (uint64_t)i, 1 / sqrt((double)l->w.t.cols));
        fill(&l->bias, seed * 1000 + 11 + 2 * (uint64_t)i, 0.1);
    }
}

static void make_level(struct level *l, const struct rig_layer *layer, int64_t m, uint8_t poison)
{
    int64_t n = layer->info.out_features, k = layer->info.in_features;
    l->layer = layer;
    rig_tensor_make(&l->w, "w", layer->info.w_dtype, n, k, 0, 0, poison);
    rig_tensor_make(&l->bias, "bias", FP8_DTYPE_BF16, 1, n, 0, 0, poison);
    rig_tensor_make(&l->y, "y", layer->info.y_dtype, m, n, 0, 0, poison);
    rig_tensor_make(&l->dx, "dx", layer->info.dx_dtype, m, k, 0, 0, poison);
    rig_tensor_make(&l->dw, "dw", layer->info.dw_dtype, n, k, 0, 0, poison);
    rig_tensor_make(&l->dbias, "dbias", FP8_DTYPE_FP32, 1, n, 0, 0, poison);
    rig_operand_make(&l->weight, rig_bytes(layer, m, FP8_BYTES_WEIGHT), poison);
    rig_operand_make(&l->saved, rig_bytes(layer, m, FP8_BYTES_SAVED), poison);
    rig_operand_make(&l->grad, rig_bytes(layer, m, FP8_BYTES_GRAD), poison);
}

/* layers: two, the one's output is the other's input. */
static void make_stack(struct stack *s, const struct rig_layers *layers, int64_t m, uint8_t poison)
{
    for (int i = 0; i < LEVELS; i++)
        make_level(&s->level[i], &layers->layer[i % 2], m, poison);
    rig_tensor_make(&s->x, "x", FP8_DTYPE_BF16, m, layers->layer[0].info.in_features, 0, 0, poison);
    rig_tensor_make(&s->dy, "dy", FP8_DTYPE_BF16, m,
                    layers->layer[(LEVELS - 1) % 2].info.out_features, 0, 0, poison);
    rig_tensor_make(&s->refresh, "refresh", FP8_DTYPE_UINT32, 1, 1, 0, 0, poison);
    rig_workspace_make(&s->workspace, layers, m, poison);
    if (layers->layer[0].spec.recipe == RIG_DELAYED) {
        const fp8_layer *list[LEVELS];
        for (int i = 0; i < LEVELS; i++)
            list[i] = s->level[i].layer->handle;
        RIG_OK(fp8_state_create(list, LEVELS, &s->state));
    }
}

static void free_stack(struct stack *s)
{
    for (int i = 0; i < LEVELS; i++) {
        struct level *l = &s->level[i];
        struct rig_tensor *tensors[] = { &l->w, &l->bias, &l->y, &l->dx, &l->dw, &l->dbias };
        struct rig_operand *operands[] = { &l->weight, &l->saved, &l->grad };
        for (int j = 0; j < 6; j++)
            rig_tensor_free(tensors[j]);
        for (int j = 0; j < 3; j++)
            rig_operand_free(operands[j]);
    }
    rig_tensor_free(&s->x);
    rig_tensor_free(&s->dy);
    rig_tensor_free(&s->refresh);
    rig_scratch_free(&s->workspace);
    fp8_state_destroy(s->state);
}

/* ---- a step ---------------------------------------------------------------------------------- */

static fp8_call call_of(const struct stack *s, int level)
{
    fp8_call call = rig_call(&s->workspace);
    call.state = s->state;
    call.state_layer = s->state ? level : 0;
    return call;
}

static void forward(struct stack *s, enum weights weights, uint64_t version)
{
    for (int i = 0; i < LEVELS; i++) {
        struct level *l = &s->level[i];
        fp8_weight_args update = FP8_WEIGHT_ARGS_INIT;
        update.w = &l->w.t, update.weight = &l->weight.op;
        update.version = version, update.call = call_of(s, i);
        if (weights == BY_THE_WORD)
            update.refresh = s->refresh.t.data;
        if (weights != KEPT)
            RIG_OK(fp8_weight_update(l->layer->handle, &update));
        fp8_fprop_args args = FP8_FPROP_ARGS_INIT;
        args.x = i ? &s->level[i - 1].y.t : &s->x.t;
        args.weight = &l->weight.op, args.bias = &l->bias.t, args.y = &l->y.t;
        args.saved = &l->saved.op, args.call = call_of(s, i);
        RIG_OK(fp8_layer_fprop(l->layer->handle, &args));
    }
}

static void backward(struct stack *s)
{
    for (int i = LEVELS - 1; i >= 0; i--) {
        struct level *l = &s->level[i];
        fp8_backward_args args = FP8_BACKWARD_ARGS_INIT;
        args.dy = i + 1 < LEVELS ? &s->level[i + 1].dx.t : &s->dy.t;
        args.saved = &l->saved.op, args.weight = &l->weight.op, args.grad = &l->grad.op;
        args.dbias = &l->dbias.t, args.dw = &l->dw.t, args.dx = &l->dx.t;
        args.call = call_of(s, i);
        if (l->layer->spec.recipe == RIG_ROWWISE_HP_WGRAD)
            args.x = i ? &s->level[i - 1].y.t : &s->x.t;
        RIG_OK(fp8_layer_backward(l->layer->handle, &args));
    }
}

static void step(struct stack *s, enum weights weights, uint64_t version)
{
    forward(s, weights, version);
    backward(s);
    if (s->state)
        RIG_OK(fp8_state_advance(s->state, rig.stream));
}

static void synchronize(void)
{
    RIG_OK(fp8_stream_synchronize(rig.context, rig.stream));
}

static void same(struct rig_tensor *a, struct rig_tensor *b, const char *mode, int replay,
                 int level)
{
    rig_tensor_pull(a);
    rig_tensor_pull(b);
    if (memcmp(a->block.image, b->block.image, a->block.bytes) != 0)
        fail_msg("%s of level %d differs in replay %d of a %s capture", a->name, level, replay,
                 mode);
    for (int64_t j = 0; j < a->t.cols; j++) /* not all poison: something was computed */
        assert_true(isfinite(rig_get(a, 0, j)));
}

static void compare(struct stack *a, struct stack *b, const char *mode, int replay)
{
    synchronize();
    for (int i = 0; i < LEVELS; i++) {
        struct level *one = &a->level[i], *two = &b->level[i];
        same(&one->y, &two->y, mode, replay, i);
        same(&one->dx, &two->dx, mode, replay, i);
        same(&one->dw, &two->dw, mode, replay, i);
        same(&one->dbias, &two->dbias, mode, replay, i);
    }
}

/* ---- a graph --------------------------------------------------------------------------------- */

struct graph {
    CUgraphExec exec;
    struct stack *stack; /* host: what a replay calls again */
};

static void capture(struct graph *g, struct stack *s, int mode)
{
    g->stack = s;
    if (!rig.cuda)
        return;
    CUgraph graph;
    synchronize();
    assert_int_equal(cuda.begin((CUstream)rig.stream, modes[mode].mode), CUDA_SUCCESS);
    step(s, BY_THE_WORD, 1);
    assert_int_equal(cuda.end((CUstream)rig.stream, &graph), CUDA_SUCCESS);
    assert_int_equal(cuda.instantiate(&g->exec, graph, 0), CUDA_SUCCESS);
    assert_int_equal(cuda.destroy(graph), CUDA_SUCCESS);
}

static void replay(struct graph *g, bool refresh)
{
    rig_set_bits(&g->stack->refresh, 0, 0, refresh);
    rig_tensor_push(&g->stack->refresh);
    if (rig.cuda)
        assert_int_equal(cuda.launch(g->exec, (CUstream)rig.stream), CUDA_SUCCESS);
    else
        step(g->stack, BY_THE_WORD, 1);
}

static void run_stack(const struct rig_spec specs[2], int64_t m, int mode)
{
    struct rig_layers layers;
    struct stack *graphed = calloc(1, sizeof *graphed), *eager = calloc(1, sizeof *eager);
    struct graph graph = { 0 };
    assert_true(graphed && eager);
    rig_layers_open(&layers, specs, 2);
    make_stack(graphed, &layers, m, 0xFF);
    make_stack(eager, &layers, m, 0x7E);
    refill(graphed, 99);
    capture(&graph, graphed, mode); /* before anything ran */
    for (int i = 0; i < REPLAYS; i++) {
        refill(graphed, (uint64_t)i);
        refill(eager, (uint64_t)i);
        bool refresh = i % 2 == 0; /* the weights are others each time, taken or not */
        replay(&graph, refresh);
        step(eager, refresh ? TAKEN : KEPT, 1 + (uint64_t)i);
        compare(graphed, eager, modes[mode].name, i);
    }
    if (rig.cuda)
        assert_int_equal(cuda.destroy_exec(graph.exec), CUDA_SUCCESS);
    free_stack(graphed);
    free_stack(eager);
    free(graphed);
    free(eager);
    rig_layers_close(&layers);
}

static void a_stack_of_32_layers(void **state)
{
    (void)state;
    const struct rig_spec specs[2] = {
        { .out_features = 384, .in_features = 256, .bias = true },
        { .out_features = 256, .in_features = 384, .bias = true },
    };
    if (rig.cuda)
        find_entries();
    for (int mode = 0; mode < (rig.cuda ? MODES : 1); mode++)
        run_stack(specs, rig_cut("tokens", 256, 16), mode);
}

/* Where nothing is a multiple of 16 cuBLASLt goes through the stage: more kernels, also copies. */
static void odd_sizes(void **state)
{
    (void)state;
    const struct rig_spec specs[2] = {
        { .out_features = 175, .in_features = 129, .bias = true },
        { .out_features = 129, .in_features = 175, .bias = true },
    };
    if (rig.cuda)
        find_entries();
    run_stack(specs, rig_cut("tokens", 203, 11), 0);
}

static void other_recipes(void **state)
{
    (void)state;
    static const enum rig_recipe recipes[] = { RIG_DELAYED, RIG_ROWWISE, RIG_ROWWISE_HP_WGRAD,
                                               RIG_BLOCK };
    if (rig.cuda)
        find_entries();
    for (size_t i = 0; i < sizeof recipes / sizeof recipes[0]; i++) {
        const struct rig_spec specs[2] = {
            { .recipe = recipes[i], .out_features = 256, .in_features = 128, .bias = true },
            { .recipe = recipes[i], .out_features = 128, .in_features = 256, .bias = true },
        };
        run_stack(specs, rig_cut("tokens", 200, 16), 0);
    }
}

/* ---- calls that build, load, allocate or wait, inside a capture ------------------------------ */

static void begin_capture(CUstream stream, int mode)
{
    assert_int_equal(cuda.begin(stream, modes[mode].mode), CUDA_SUCCESS);
}

static void end_capture(CUstream stream)
{
    CUgraph graph = NULL;
    assert_int_equal(cuda.end(stream, &graph), CUDA_SUCCESS); /* else it was broken */
    assert_int_equal(cuda.destroy(graph), CUDA_SUCCESS);
}

static void refused_where_seen(CUstream blocking, int mode)
{
    fp8_layer_description d = FP8_LAYER_DESCRIPTION_INIT;
    const fp8_layer *layer;
    void *memory;
    d.in_features = d.out_features = 64, d.max_tokens = 64;
    d.stream = rig.stream;
    begin_capture((CUstream)rig.stream, mode);
    RIG_REFUSED(FP8_ERR_CAPTURE, fp8_context_layer(rig.context, &d, &layer));
    RIG_REFUSED(FP8_ERR_CAPTURE, fp8_stream_synchronize(rig.context, rig.stream));
    end_capture((CUstream)rig.stream);
    begin_capture(blocking, mode);
    RIG_REFUSED(FP8_ERR_CAPTURE, fp8_memory_alloc(rig.context, 256, &memory));
    RIG_REFUSED(FP8_ERR_CAPTURE, fp8_stream_synchronize(rig.context, NULL));
    end_capture(blocking);
}

/* rig.stream does not block others, and these calls do not name it: nothing is seen, nothing
 * broken. */
static void made_where_not_seen(int mode)
{
    const struct rig_spec spec = { .out_features = 64, .in_features = 64 };
    struct rig_layers layers;
    void *memory;
    begin_capture((CUstream)rig.stream, mode);
    rig_layers_open(&layers, &spec, 1);
    RIG_OK(fp8_memory_alloc(rig.context, 1 << 20, &memory));
    fp8_memory_free(rig.context, memory);
    rig_layers_close(&layers);
    end_capture((CUstream)rig.stream);
}

static void a_capture_stays_whole(void **state)
{
    (void)state;
    if (!rig.cuda) {
        print_message(
            "the host backend has no graphs; test_capture.c has a driver that breaks them\n");
        skip();
    }
    CUresult (*create)(CUstream *, unsigned);
    CUresult (*destroy)(CUstream);
    CUstream blocking;
    find_entries();
    rig_driver_entry("cuStreamCreate", &create);
    rig_driver_entry("cuStreamDestroy_v2", &destroy);
    assert_int_equal(create(&blocking, 0), CUDA_SUCCESS);
    for (int mode = 0; mode < MODES; mode++) {
        refused_where_seen(blocking, mode);
        made_where_not_seen(mode);
    }
    assert_int_equal(destroy(blocking), CUDA_SUCCESS);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_stack_of_32_layers),
        cmocka_unit_test(odd_sizes),
        cmocka_unit_test(other_recipes),
        cmocka_unit_test(a_capture_stays_whole),
    };
    return RIG_RUN(tests);
}
