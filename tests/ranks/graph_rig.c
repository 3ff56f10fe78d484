/*
 * graph_rig.c - see graph_rig.h.
 */
#include "tests/ranks/graph_rig.h"

#include <cuda.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/fp8_model.h"
#include "runtime/internal.h"
#include "tests/ranks/model_rig.h"

enum { LAYERS = 12, INS = 4, OUTS = 4, SEEDS = 2 };

/* w, bias, dw and dbias are this rank's rows. */
enum { X, DY, W, BIAS, Y, DX, DW, DBIAS, TENSORS };

struct level {
    fp8_layer *layer;
    fp8_layer_info info;
    fp8_tensor t[TENSORS];
    fp8_operand saved, grad;
    void *wanted[SEEDS][TENSORS]; /* of the outputs */
};

struct stage {
    struct rank *rank;
    const struct graph_case *c;
    fp8_bundle *bundle;
    fp8_model *model;
    int count;
    struct level level[LAYERS];
    fp8_call call;
    fp8_stream stream;
    uint64_t version;
    void *image; /* of the largest tensor */
};

static struct {
    CUresult (*begin)(CUstream, CUstreamCaptureMode);
    CUresult (*end)(CUstream, CUgraph *);
    CUresult (*instantiate)(CUgraphExec *, CUgraph, unsigned long long);
    CUresult (*launch)(CUgraphExec, CUstream);
    CUresult (*destroy_exec)(CUgraphExec);
    CUresult (*destroy)(CUgraph);
} cuda;

static bool find_entries(void)
{
    const struct {
        const char *name;
        void *entry;
    } list[] = {
        { "cuStreamBeginCapture_v2", &cuda.begin },           { "cuStreamEndCapture", &cuda.end },
        { "cuGraphInstantiateWithFlags", &cuda.instantiate }, { "cuGraphLaunch", &cuda.launch },
        { "cuGraphExecDestroy", &cuda.destroy_exec },         { "cuGraphDestroy", &cuda.destroy }
    };
    for (size_t i = 0; i < sizeof list / sizeof list[0]; i++) {
        void *address;
        if (fp8_library_symbol(FP8_LIBRARY_CUDA, list[i].name, &address, NULL) != FP8_OK)
            return false;
        memcpy(list[i].entry, &address, sizeof address);
    }
    return true;
}

/* ---- buffers ---- */

static size_t bytes_of(const fp8_tensor *t)
{
    return (size_t)(t->rows * t->cols) * fp8_dtype_bytes(t->dtype);
}

static bool make_tensor(struct stage *s, fp8_tensor *t, int64_t rows, int64_t cols, fp8_dtype dtype)
{
    *t = (fp8_tensor){ NULL, rows, cols, cols, dtype, 0 };
    const size_t bytes = bytes_of(t);
    return fp8_memory_alloc(s->rank->context, bytes ? bytes : 1, &t->data) == FP8_OK;
}

static bool make_operand(struct stage *s, const fp8_layer *layer, fp8_bytes which, fp8_operand *o)
{
    *o = (fp8_operand)FP8_OPERAND_INIT;
    return fp8_layer_bytes(layer, s->c->tokens, which, &o->bytes) == FP8_OK &&
           fp8_memory_alloc(s->rank->context, o->bytes ? o->bytes : 1, &o->data) == FP8_OK;
}

static bool make_level(struct stage *s, int i)
{
    struct level *l = &s->level[i];
    const int64_t m = s->c->tokens, k = l->info.in_features, n = l->info.out_features;
    int64_t first, rows;
    return fp8_model_rows(s->model, i, &first, &rows) == FP8_OK &&
           make_tensor(s, &l->t[X], m, k, l->info.x_dtype) &&
           make_tensor(s, &l->t[DY], m, n, l->info.dy_dtype) &&
           make_tensor(s, &l->t[W], rows, k, l->info.w_dtype) &&
           make_tensor(s, &l->t[BIAS], 1, rows, FP8_DTYPE_BF16) &&
           make_tensor(s, &l->t[Y], m, n, l->info.y_dtype) &&
           make_tensor(s, &l->t[DX], m, k, l->info.dx_dtype) &&
           make_tensor(s, &l->t[DW], rows, k, FP8_DTYPE_FP32) &&
           make_tensor(s, &l->t[DBIAS], 1, rows, FP8_DTYPE_FP32) &&
           make_operand(s, l->layer, FP8_BYTES_SAVED, &l->saved) &&
           make_operand(s, l->layer, FP8_BYTES_GRAD, &l->grad);
}

static bool make_model(struct stage *s)
{
    fp8_model_layer layers[LAYERS];
    size_t bytes, workspace = 0;
    for (int i = 0; i < s->count; i++) {
        struct level *l = &s->level[i];
        l->info.size = sizeof l->info;
        if (fp8_layer_create(s->bundle, fp8_bundle_layer_name(s->bundle, i), &l->layer) != FP8_OK ||
            fp8_layer_describe(l->layer, &l->info) != FP8_OK ||
            fp8_layer_bytes(l->layer, s->c->tokens, FP8_BYTES_WORKSPACE, &bytes) != FP8_OK)
            return false;
        workspace = bytes > workspace ? bytes : workspace;
        layers[i] = (fp8_model_layer)FP8_MODEL_LAYER_INIT;
        layers[i].layer = l->layer;
    }
    fp8_model_options options = FP8_MODEL_OPTIONS_INIT;
    options.layer_count = s->count;
    options.layers = layers;
    options.context = s->rank->context;
    options.comm = s->rank->comm;
    options.backward = s->c->keep ? FP8_WEIGHTS_KEEP : FP8_WEIGHTS_GATHER;
    options.grads = FP8_GRADS_SUM;
    s->call = (fp8_call)FP8_CALL_INIT;
    s->call.workspace_bytes = workspace;
    return fp8_memory_alloc(s->rank->context, workspace, &s->call.workspace) == FP8_OK &&
           fp8_stream_create(s->rank->context, &s->stream) == FP8_OK &&
           fp8_model_create(&options, &s->model) == FP8_OK;
}

static bool make_stage(struct stage *s, struct rank *rank)
{
    size_t largest = 0;
    s->rank = rank;
    s->c = rank->user;
    if (fp8_bundle_open(rank->context, s->c->bundle, &s->bundle) != FP8_OK)
        return false;
    s->count = fp8_bundle_layer_count(s->bundle);
    if (!make_model(s))
        return false;
    s->call.stream = s->stream;
    for (int i = 0; i < s->count; i++) {
        if (!make_level(s, i))
            return false;
        for (int j = 0; j < TENSORS; j++)
            largest = bytes_of(&s->level[i].t[j]) > largest ? bytes_of(&s->level[i].t[j]) : largest;
    }
    s->image = malloc(largest);
    return s->image != NULL;
}

static void drop_stage(struct stage *s)
{
    fp8_context *context = s->rank->context;
    fp8_model_destroy(s->model);
    for (int i = 0; i < s->count; i++) {
        struct level *l = &s->level[i];
        for (int j = 0; j < TENSORS; j++) {
            fp8_memory_free(context, l->t[j].data);
            for (int seed = 0; seed < SEEDS; seed++)
                free(l->wanted[seed][j]);
        }
        fp8_memory_free(context, l->saved.data);
        fp8_memory_free(context, l->grad.data);
        fp8_layer_destroy(l->layer);
    }
    fp8_memory_free(context, s->call.workspace);
    fp8_stream_destroy(context, s->stream);
    fp8_bundle_close(s->bundle);
    free(s->image);
}

/* Inputs and weights of a seed; outputs that nobody has written. */
static bool fill_stage(struct stage *s, int seed)
{
    for (int i = 0; i < s->count; i++) {
        for (int j = 0; j < TENSORS; j++) {
            const fp8_tensor *t = &s->level[i].t[j];
            const uint64_t what = (uint64_t)(((seed + 1) * 64 + i) * 64 + j * 8 + s->rank->rank);
            if (j < INS) {
                for (size_t at = 0; at < bytes_of(t) / 2; at++)
                    ((uint16_t *)s->image)[at] = model_value(what, (int64_t)at);
            } else {
                memset(s->image, 0x7e, bytes_of(t));
            }
            if (fp8_memory_copy(s->rank->context, t->data, s->image, bytes_of(t), s->stream) !=
                    FP8_OK ||
                fp8_stream_synchronize(s->rank->context, s->stream) != FP8_OK)
                return false;
        }
    }
    return true;
}

/* Keeps the outputs as those of a seed, or compares with them. */
static bool look(struct stage *s, int seed, bool keep)
{
    if (fp8_comm_wait(s->rank->comm, s->stream) != FP8_OK)
        return false;
    for (int i = 0; i < s->count; i++) {
        for (int j = INS; j < TENSORS; j++) {
            const fp8_tensor *t = &s->level[i].t[j];
            void **wanted = &s->level[i].wanted[seed][j];
            if (keep)
                *wanted = malloc(bytes_of(t) + 1);
            void *to = keep ? *wanted : s->image;
            if (!to ||
                fp8_memory_copy(s->rank->context, to, t->data, bytes_of(t), s->stream) != FP8_OK ||
                fp8_stream_synchronize(s->rank->context, s->stream) != FP8_OK)
                return false;
            if (!keep && memcmp(to, *wanted, bytes_of(t)) != 0) {
                fprintf(stderr, "rank %d, layer %d, output %d of seed %d differs\n", s->rank->rank,
                        i, j, seed);
                return false;
            }
        }
    }
    return true;
}

/* ---- the step ---- */

static bool update(struct stage *s, uint64_t version)
{
    fp8_tensor w[LAYERS], bias[LAYERS];
    for (int i = 0; i < s->count; i++)
        w[i] = s->level[i].t[W], bias[i] = s->level[i].t[BIAS];
    fp8_model_update_args args = FP8_MODEL_UPDATE_ARGS_INIT;
    args.w = w;
    args.bias = bias;
    args.version = version;
    args.call = s->call;
    return fp8_model_update(s->model, &args) == FP8_OK;
}

static bool forward(struct stage *s, int i)
{
    struct level *l = &s->level[i];
    fp8_fprop_args args = FP8_FPROP_ARGS_INIT;
    args.x = &l->t[X];
    args.y = &l->t[Y];
    args.saved = &l->saved;
    args.call = s->call;
    return fp8_model_fprop(s->model, i, &args) == FP8_OK;
}

static bool backward(struct stage *s, int i)
{
    struct level *l = &s->level[i];
    fp8_backward_args passes = FP8_BACKWARD_ARGS_INIT;
    passes.dy = &l->t[DY];
    passes.x = l->saved.bytes ? NULL : &l->t[X]; /* wgrad in bf16 */
    passes.saved = &l->saved;
    passes.grad = &l->grad;
    passes.dx = &l->t[DX];
    passes.call = s->call;
    fp8_model_backward_args args = FP8_MODEL_BACKWARD_ARGS_INIT;
    args.backward = &passes;
    args.dw = &l->t[DW];
    args.dbias = l->info.has_bias ? &l->t[DBIAS] : NULL;
    return fp8_model_backward(s->model, i, &args) == FP8_OK;
}

static bool passes(struct stage *s)
{
    bool good = true;
    for (int i = 0; good && i < s->count; i++)
        good = forward(s, i);
    for (int i = s->count - 1; good && i >= 0; i--)
        good = backward(s, i);
    return good && fp8_model_join(s->model, s->stream) == FP8_OK;
}

/* ---- graphs ---- */

struct graph {
    CUgraph made;
    CUgraphExec exec;
    bool has_update;
};

/* Not beside another rank's calls that wait or allocate: in the global mode they would break it. */
static bool record(struct stage *s, struct graph *g, CUstreamCaptureMode mode)
{
    if (s->rank->context->is_host)
        return true;
    pthread_barrier_wait(&((struct graph_case *)s->rank->user)->meet);
    bool good = cuda.begin(s->stream, mode) == CUDA_SUCCESS &&
                fp8_model_join(s->model, s->stream) == FP8_OK &&
                (!g->has_update || update(s, s->version)) && passes(s);
    if (!good)
        fprintf(stderr, "rank %d: in the capture: %s\n", s->rank->rank, fp8_last_error());
    good = fp8_comm_wait(s->rank->comm, s->stream) == FP8_ERR_CAPTURE && good;
    CUresult ended = cuda.end(s->stream, &g->made);
    pthread_barrier_wait(&((struct graph_case *)s->rank->user)->meet);
    if (!good || ended != CUDA_SUCCESS)
        fprintf(stderr, "rank %d: the capture ended with %d\n", s->rank->rank, (int)ended);
    return good && ended == CUDA_SUCCESS && cuda.instantiate(&g->exec, g->made, 0) == CUDA_SUCCESS;
}

static bool launch(struct stage *s, const struct graph *g)
{
    if (!s->rank->context->is_host)
        return cuda.launch(g->exec, s->stream) == CUDA_SUCCESS;
    return (!g->has_update || update(s, ++s->version)) && passes(s);
}

static void one_graph(struct stage *s, CUstreamCaptureMode mode, bool has_update)
{
    static const int order[] = { 1, 0, 1 };
    struct rank *rank = s->rank;
    struct graph g = { .has_update = has_update };
    rank_check(rank, fill_stage(s, 7));
    rank_check(rank, record(s, &g, mode));
    for (size_t i = 0; i < sizeof order / sizeof order[0]; i++) {
        rank_check(rank, fill_stage(s, order[i]));
        rank_check(rank, has_update || (update(s, ++s->version) &&
                                        fp8_model_join(s->model, s->stream) == FP8_OK));
        rank_check(rank, launch(s, &g));
        rank_check(rank, look(s, order[i], false));
    }
    if (g.exec)
        rank_check(rank, cuda.destroy_exec(g.exec) == CUDA_SUCCESS &&
                             cuda.destroy(g.made) == CUDA_SUCCESS);
    /* and without a graph again */
    rank_check(rank, fp8_model_join(s->model, s->stream) == FP8_OK);
    rank_check(rank, fill_stage(s, 0) && update(s, ++s->version) && passes(s) && look(s, 0, false));
}

static void all_graphs(struct stage *s)
{
    static const CUstreamCaptureMode modes[] = { CU_STREAM_CAPTURE_MODE_GLOBAL,
                                                 CU_STREAM_CAPTURE_MODE_THREAD_LOCAL,
                                                 CU_STREAM_CAPTURE_MODE_RELAXED };
    struct rank *rank = s->rank;
    for (int seed = 0; seed < SEEDS; seed++) {
        rank_check(rank, fill_stage(s, seed));
        rank_check(rank, update(s, ++s->version) && passes(s));
        rank_check(rank, look(s, seed, true));
    }
    for (size_t i = 0; i < sizeof modes / sizeof modes[0] && !rank->fault[0]; i++) {
        one_graph(s, modes[i], true);
        if (!rank->fault[0])
            one_graph(s, modes[i], false);
    }
}

void graph_body(struct rank *rank)
{
    struct stage *s = calloc(1, sizeof *s);
    bool pushed;
    rank_check(rank, s && make_stage(s, rank));
    rank_check(rank, rank->context->is_host || find_entries());
    rank_check(rank, fp8_context_enter(rank->context, &pushed) == FP8_OK);
    all_graphs(s);
    fp8_context_leave(rank->context, pushed);
    if (!rank->fault[0])
        drop_stage(s);
    free(s);
}
