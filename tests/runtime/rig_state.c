/*
 * rig_state.c - see rig_state.h.
 */
#include "tests/runtime/rig_state.h"

size_t world_bytes(const fp8_layer *layer, fp8_bytes which)
{
    size_t bytes = 0;
    RIG_OK(fp8_layer_bytes(layer, M, which, &bytes));
    return bytes;
}

void world_make(struct world *o, int layers, const char *fields)
{
    char text[1024];
    memset(o, 0, sizeof *o);
    int at = snprintf(text, sizeof text, "return model \"state\" { layers = {\n");
    for (int i = 0; i < layers; i++)
        at += snprintf(text + at, sizeof text - (size_t)at,
                       "linear \"l%d\" { in_features = %d, out_features = %d, tokens = %d,\n"
                       "  recipe = recipe.delayed { %s } },\n",
                       i, K, N, M, fields);
    snprintf(text + at, sizeof text - (size_t)at, "} }\n");
    rig_bundle_open(text, o->path, &o->bundle);
    o->layers = layers;
    for (int i = 0; i < layers; i++)
        RIG_OK(fp8_layer_create(o->bundle, fp8_bundle_layer_name(o->bundle, i), &o->layer[i]));
    RIG_OK(fp8_state_create((const fp8_layer *const *)o->layer, layers, &o->state));
    rig_tensor_make(&o->x, "x", FP8_DTYPE_BF16, M, K, 0, 0, 0xFF);
    rig_tensor_make(&o->w, "w", FP8_DTYPE_BF16, N, K, 0, 0, 0xFF);
    rig_tensor_make(&o->dy, "dy", FP8_DTYPE_BF16, M, N, 0, 0, 0xFF);
    rig_tensor_make(&o->y, "y", FP8_DTYPE_BF16, M, N, 0, 0, 0xFF);
    rig_tensor_make(&o->dx, "dx", FP8_DTYPE_BF16, M, K, 0, 0, 0xFF);
    rig_tensor_make(&o->dw, "dw", FP8_DTYPE_FP32, N, K, 0, 0, 0xFF);
    rig_operand_make(&o->weight, world_bytes(o->layer[0], FP8_BYTES_WEIGHT), 0x7E);
    rig_operand_make(&o->saved, world_bytes(o->layer[0], FP8_BYTES_SAVED), 0x7E);
    rig_operand_make(&o->grad, world_bytes(o->layer[0], FP8_BYTES_GRAD), 0x7E);
    rig_scratch_make(&o->workspace, world_bytes(o->layer[0], FP8_BYTES_WORKSPACE), 0, 0xFF);
}

void world_begin(struct world *o, const char *fields, float w, float x, float dy)
{
    world_make(o, 1, fields);
    world_fill(&o->w, w, 1);
    world_fill(&o->x, x, 2);
    world_fill(&o->dy, dy, 3);
    world_update(o, 0, 1);
}

void world_free(struct world *o)
{
    struct rig_tensor *tensors[] = { &o->x, &o->w, &o->dy, &o->y, &o->dx, &o->dw };
    for (size_t i = 0; i < sizeof tensors / sizeof tensors[0]; i++)
        rig_tensor_free(tensors[i]);
    rig_operand_free(&o->weight);
    rig_operand_free(&o->saved);
    rig_operand_free(&o->grad);
    rig_scratch_free(&o->workspace);
    fp8_state_destroy(o->state);
    for (int i = 0; i < o->layers; i++)
        fp8_layer_destroy(o->layer[i]);
    rig_bundle_drop(o->path, o->bundle);
}

void world_fill(struct rig_tensor *tensor, float amplitude, uint64_t seed)
{
    for (int64_t i = 0; i < tensor->t.rows; i++) {
        for (int64_t j = 0; j < tensor->t.cols; j++) {
            uint64_t bits = rig_hash(seed, (uint64_t)(i * tensor->t.cols + j));
            rig_set(tensor, i, j, amplitude * (float)((int)(bits % 129) - 64) / 64.0f);
        }
    }
    if (tensor->t.rows > 0)
        rig_set(tensor, tensor->t.rows - 1, tensor->t.cols - 1, -amplitude);
    rig_tensor_push(tensor);
}

fp8_call world_call(struct world *o, int layer)
{
    fp8_call call = rig_call(&o->workspace);
    call.state = o->state;
    call.state_layer = layer;
    call.flags = o->flags;
    return call;
}

void world_update(struct world *o, int layer, uint64_t version)
{
    fp8_weight_args args = FP8_WEIGHT_ARGS_INIT;
    args.w = &o->w.t;
    args.version = version;
    args.weight = &o->weight.op;
    args.call = world_call(o, layer);
    RIG_OK(fp8_weight_update(o->layer[layer], &args));
}

void world_forward(struct world *o, int layer)
{
    fp8_fprop_args args = FP8_FPROP_ARGS_INIT;
    args.x = &o->x.t;
    args.weight = &o->weight.op;
    args.y = &o->y.t;
    args.saved = &o->saved.op;
    args.call = world_call(o, layer);
    RIG_OK(fp8_layer_fprop(o->layer[layer], &args));
}

void world_backward(struct world *o, int layer)
{
    fp8_backward_args args = FP8_BACKWARD_ARGS_INIT;
    args.dy = &o->dy.t;
    args.saved = &o->saved.op;
    args.weight = &o->weight.op;
    args.grad = &o->grad.op;
    args.dw = &o->dw.t;
    args.dx = &o->dx.t;
    args.call = world_call(o, layer);
    RIG_OK(fp8_layer_backward(o->layer[layer], &args));
}

void world_set_rows(struct world *o, int64_t rows)
{
    o->x.t.rows = o->dy.t.rows = o->y.t.rows = o->dx.t.rows = rows;
}

/* ---- looking at a state ---- */

static const unsigned char *take(void *target, const unsigned char *at, size_t bytes)
{
    memcpy(target, at, bytes);
    return at + bytes;
}

void world_look(struct world *o, struct seen *s)
{
    memset(s, 0, sizeof *s);
    RIG_OK(fp8_state_bytes(o->state, &s->bytes));
    assert_true(s->bytes <= sizeof s->data);
    RIG_OK(fp8_state_save(o->state, s->data, s->bytes, rig.stream));
    assert_memory_equal(s->data, "fp8state\1\0\0\0\0\0\0\0", 16);
    const unsigned char *at = take(&s->tensors, s->data + 16, 8);
    at = take(&s->length, at, 8);
    assert_int_equal(s->tensors, 3 * o->layers);
    assert_true(s->length <= 64);
    size_t array = 4 * (size_t)s->tensors;
    assert_int_equal(s->bytes, 32 + array * (3 + (size_t)s->length));
    at = take(s->scale, at, array);
    at = take(s->running, at, array);
    at = take(s->entries, at, array);
    for (int64_t i = 0; i < s->length; i++) {
        for (int64_t t = 0; t < s->tensors; t++)
            at = take(&s->history[t][i], at, 4);
    }
}

void world_expect_same(struct world *o, const struct seen *before)
{
    struct seen now;
    world_look(o, &now);
    assert_int_equal(now.bytes, before->bytes);
    assert_memory_equal(now.data, before->data, now.bytes);
}

void world_expect_float(float value, float want, const char *what, int line)
{
    if (memcmp(&value, &want, sizeof value) != 0)
        fail_msg("line %d: %s is %.9g, not %.9g", line, what, (double)value, (double)want);
}

void world_advance(struct world *o)
{
    RIG_OK(fp8_state_advance(o->state, rig.stream));
}

void world_step_x(struct world *o, float amplitude)
{
    world_fill(&o->x, amplitude, 3);
    world_forward(o, 0);
    world_advance(o);
}
