/*
 * memory_rig.c - see memory_rig.h. What forward saves is allocated before each layer and freed
 * behind its backward, as a framework does it, while all ranks stand still: an allocation beside a
 * collective of the other rank could wait for it. Memory in use is what the driver says of the
 * whole device.
 */
#include "tests/ranks/memory_rig.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/fp8_device.h"
#include "runtime/fp8_model.h"
#include "runtime/internal.h"

enum { LAYERS = 8, SIDE = 1024, TOKENS = 4096, STEPS = 3, GRAIN = 2 << 20 };

struct stand {
    struct rank *rank;
    fp8_stream stream;
    fp8_layer *layer;
    fp8_model *model;
    void *w, *x, *dy, *y, *dx, *dw, *grad, *workspace;
    size_t saved_bytes, grad_bytes, workspace_bytes;
    fp8_operand saved[LAYERS];
    size_t after[LAYERS], peak;
};

static bool take(struct stand *s, size_t bytes, void **memory)
{
    return fp8_memory_alloc(s->rank->context, bytes, memory) == FP8_OK &&
           fp8_memory_fill(s->rank->context, *memory, 0, bytes, s->stream) == FP8_OK;
}

/* All ranks have enqueued all they will, and the device is done with it. */
static bool stand_still(struct stand *s)
{
    const struct memory_case *c = s->rank->user;
    pthread_barrier_wait((pthread_barrier_t *)&c->meet);
    const bool good = fp8_model_join(s->model, s->stream) == FP8_OK &&
                      fp8_comm_wait(s->rank->comm, s->stream) == FP8_OK;
    pthread_barrier_wait((pthread_barrier_t *)&c->meet);
    return good;
}

static size_t in_use(struct stand *s)
{
    int (*info)(size_t *, size_t *);
    size_t left = 0, all = 0;
    void *address = NULL;
    bool pushed;
    if (fp8_library_symbol(FP8_LIBRARY_CUDA, "cuMemGetInfo_v2", &address, NULL) != FP8_OK ||
        fp8_context_enter(s->rank->context, &pushed) != FP8_OK)
        return 0;
    memcpy(&info, &address, sizeof address);
    (void)info(&left, &all);
    fp8_context_leave(s->rank->context, pushed);
    s->peak = all - left > s->peak ? all - left : s->peak;
    return all - left;
}

static bool open_stand(struct stand *s, fp8_bundle *bundle)
{
    const size_t side = SIDE, tokens = TOKENS, rows = side / (size_t)s->rank->ranks;
    fp8_model_layer layers[LAYERS];
    fp8_model_options options = FP8_MODEL_OPTIONS_INIT;
    if (fp8_stream_create(s->rank->context, &s->stream) != FP8_OK ||
        fp8_layer_create(bundle, "l", &s->layer) != FP8_OK ||
        fp8_layer_bytes(s->layer, TOKENS, FP8_BYTES_SAVED, &s->saved_bytes) != FP8_OK ||
        fp8_layer_bytes(s->layer, TOKENS, FP8_BYTES_GRAD, &s->grad_bytes) != FP8_OK ||
        fp8_layer_bytes(s->layer, TOKENS, FP8_BYTES_WORKSPACE, &s->workspace_bytes) != FP8_OK)
        return false;
    for (int i = 0; i < LAYERS; i++) {
        layers[i] = (fp8_model_layer)FP8_MODEL_LAYER_INIT;
        layers[i].layer = s->layer;
    }
    options.layers = layers;
    options.layer_count = LAYERS;
    options.context = s->rank->context;
    options.comm = s->rank->comm;
    return take(s, rows * side * 2, &s->w) && take(s, rows * side * 2, &s->dw) &&
           take(s, tokens * side * 2, &s->x) && take(s, tokens * side * 2, &s->y) &&
           take(s, tokens * side * 2, &s->dy) && take(s, tokens * side * 2, &s->dx) &&
           take(s, s->grad_bytes, &s->grad) && take(s, s->workspace_bytes, &s->workspace) &&
           fp8_model_create(&options, &s->model) == FP8_OK;
}

static void close_stand(struct stand *s)
{
    void *all[] = { s->w, s->x, s->dy, s->y, s->dx, s->dw, s->grad, s->workspace };
    fp8_model_destroy(s->model);
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        fp8_memory_free(s->rank->context, all[i]);
    fp8_layer_destroy(s->layer);
    fp8_stream_destroy(s->rank->context, s->stream);
}

static fp8_tensor matrix(void *data, int64_t rows)
{
    return (fp8_tensor){ data, rows, SIDE, SIDE, FP8_DTYPE_BF16, 0 };
}

static bool forward(struct stand *s, int i, fp8_call call)
{
    const fp8_tensor x = matrix(s->x, TOKENS), y = matrix(s->y, TOKENS);
    fp8_fprop_args args = FP8_FPROP_ARGS_INIT;
    s->saved[i] = (fp8_operand)FP8_OPERAND_INIT;
    s->saved[i].bytes = s->saved_bytes;
    if (!take(s, s->saved_bytes, &s->saved[i].data))
        return false;
    args.x = &x;
    args.y = &y;
    args.saved = &s->saved[i];
    args.call = call;
    if (fp8_model_fprop(s->model, i, &args) != FP8_OK || !stand_still(s))
        return false;
    s->after[i] = in_use(s);
    return true;
}

static bool backward(struct stand *s, int i, fp8_call call)
{
    const fp8_tensor dy = matrix(s->dy, TOKENS), dx = matrix(s->dx, TOKENS);
    const fp8_tensor dw = matrix(s->dw, SIDE / s->rank->ranks);
    fp8_operand grad = FP8_OPERAND_INIT;
    fp8_backward_args passes = FP8_BACKWARD_ARGS_INIT;
    fp8_model_backward_args args = FP8_MODEL_BACKWARD_ARGS_INIT;
    grad.data = s->grad;
    grad.bytes = s->grad_bytes;
    passes.dy = &dy;
    passes.dx = &dx;
    passes.saved = &s->saved[i];
    passes.grad = &grad;
    passes.call = call;
    args.backward = &passes;
    args.dw = &dw;
    if (fp8_model_backward(s->model, i, &args) != FP8_OK || !stand_still(s))
        return false;
    (void)in_use(s);
    fp8_memory_free(s->rank->context, s->saved[i].data);
    return true;
}

static bool step(struct stand *s, int number)
{
    fp8_call call = FP8_CALL_INIT;
    fp8_tensor w[LAYERS];
    fp8_model_update_args update = FP8_MODEL_UPDATE_ARGS_INIT;
    call.workspace = s->workspace;
    call.workspace_bytes = s->workspace_bytes;
    call.stream = s->stream;
    for (int i = 0; i < LAYERS; i++)
        w[i] = matrix(s->w, SIDE / s->rank->ranks);
    update.w = w;
    update.version = (uint64_t)number + 1;
    update.call = call;
    s->peak = 0;
    bool good = fp8_model_update(s->model, &update) == FP8_OK && stand_still(s);
    for (int i = 0; i < LAYERS && good; i++)
        good = forward(s, i, call);
    for (int i = LAYERS - 1; i >= 0 && good; i--)
        good = backward(s, i, call);
    return good;
}

void memory_body(struct rank *rank)
{
    const struct memory_case *c = rank->user;
    struct stand *s = calloc(1, sizeof *s);
    fp8_bundle *bundle = NULL;
    size_t peaks[STEPS];
    s->rank = rank;
    rank_check(rank, fp8_bundle_open(rank->context, c->bundle, &bundle) == FP8_OK);
    rank_check(rank, open_stand(s, bundle));
    for (int i = 0; i < STEPS; i++) {
        rank_check(rank, step(s, i));
        peaks[i] = s->peak;
        /* the driver hands memory out in grains; bf16 would keep x for wgrad */
        const size_t grown = s->after[LAYERS - 1] - s->after[0];
        rank_check(rank, grown <= (LAYERS - 1) * (size_t)TOKENS * SIDE * 2 + GRAIN);
        rank_check(rank, grown > 0);
        if (rank->rank == 0)
            printf("step %d: %.1f MiB in use at most, %.2f MiB more after each layer; bf16 inputs: "
                   "%.2f\n",
                   i + 1, (double)s->peak / (1 << 20), (double)grown / (LAYERS - 1) / (1 << 20),
                   (double)TOKENS * SIDE * 2 / (1 << 20));
    }
    rank_check(rank, peaks[2] == peaks[1]);
    close_stand(s);
    fp8_bundle_close(bundle);
    free(s);
}
