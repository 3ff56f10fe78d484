/*
 * test_state.c - delayed scaling: what the state makes of amaxes, step by step, and what leaves it
 * alone.
 *
 * One small world: a layer (or two), a state, tensors of one amplitude each, so that every amax and
 * every scale is known in advance. The state is looked at as its saved data.
 */
#include <float.h>
#include <math.h>

#include "runtime/fp8_state.h"
#include "tests/runtime/rig.h"

enum { M = 40, N = 48, K = 80, MOST_LAYERS = 2, MOST_BYTES = 4096, MOST_WEIGHT = 32768 };

struct world {
    char path[256];
    fp8_bundle *bundle;
    fp8_layer *layer[MOST_LAYERS];
    int layers;
    fp8_state *state;
    struct rig_tensor x, w, dy, y, dx, dw;
    struct rig_operand weight, saved, grad;
    struct rig_scratch workspace;
    uint32_t flags;
};

static size_t bytes_of(const fp8_layer *layer, fp8_bytes which)
{
    size_t bytes = 0;
    RIG_OK(fp8_layer_bytes(layer, M, which, &bytes));
    return bytes;
}

/* fields: of recipe.delayed. */
static void world_make(struct world *o, int layers, const char *fields)
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
    rig_operand_make(&o->weight, bytes_of(o->layer[0], FP8_BYTES_WEIGHT), 0x7E);
    rig_operand_make(&o->saved, bytes_of(o->layer[0], FP8_BYTES_SAVED), 0x7E);
    rig_operand_make(&o->grad, bytes_of(o->layer[0], FP8_BYTES_GRAD), 0x7E);
    rig_scratch_make(&o->workspace, bytes_of(o->layer[0], FP8_BYTES_WORKSPACE), 0, 0xFF);
}

static void world_free(struct world *o)
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

/* Values of either sign up to the amplitude, which the last one has. */
static void fill(struct rig_tensor *tensor, float amplitude, uint64_t seed)
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

static fp8_call call_of(struct world *o, int layer)
{
    fp8_call call = FP8_CALL_INIT;
    call.workspace = o->workspace.device;
    call.workspace_bytes = o->workspace.bytes;
    call.stream = rig.stream;
    call.state = o->state;
    call.state_layer = layer;
    call.flags = o->flags;
    return call;
}

static void update(struct world *o, int layer, uint64_t version)
{
    fp8_weight_args args = FP8_WEIGHT_ARGS_INIT;
    args.w = &o->w.t;
    args.version = version;
    args.weight = &o->weight.op;
    args.call = call_of(o, layer);
    RIG_OK(fp8_weight_update(o->layer[layer], &args));
}

static void forward(struct world *o, int layer)
{
    fp8_fprop_args args = FP8_FPROP_ARGS_INIT;
    args.x = &o->x.t;
    args.weight = &o->weight.op;
    args.y = &o->y.t;
    args.saved = &o->saved.op;
    args.call = call_of(o, layer);
    RIG_OK(fp8_layer_fprop(o->layer[layer], &args));
}

static void backward(struct world *o, int layer)
{
    fp8_backward_args args = FP8_BACKWARD_ARGS_INIT;
    args.dy = &o->dy.t;
    args.saved = &o->saved.op;
    args.weight = &o->weight.op;
    args.grad = &o->grad.op;
    args.dw = &o->dw.t;
    args.dx = &o->dx.t;
    args.call = call_of(o, layer);
    RIG_OK(fp8_layer_backward(o->layer[layer], &args));
}

static void set_rows(struct world *o, int64_t rows)
{
    o->x.t.rows = o->dy.t.rows = o->y.t.rows = o->dx.t.rows = rows;
}

/* ---- looking at a state ---- */

struct seen {
    unsigned char data[MOST_BYTES];
    size_t bytes;
    int64_t tensors, length;
    float scale[3 * MOST_LAYERS], running[3 * MOST_LAYERS];
    int32_t entries[3 * MOST_LAYERS];
    float history[3 * MOST_LAYERS][64]; /* oldest first */
};

static const unsigned char *take(void *target, const unsigned char *at, size_t bytes)
{
    memcpy(target, at, bytes);
    return at + bytes;
}

static void look(struct world *o, struct seen *s)
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

static void expect_same(struct world *o, const struct seen *before)
{
    struct seen now;
    look(o, &now);
    assert_int_equal(now.bytes, before->bytes);
    assert_memory_equal(now.data, before->data, now.bytes);
}

#define EXPECT_FLOAT(value, want) expect_float((value), (want), #value, __LINE__)
static void expect_float(float value, float want, const char *what, int line)
{
    if (memcmp(&value, &want, sizeof value) != 0)
        fail_msg("line %d: %s is %.9g, not %.9g", line, what, (double)value, (double)want);
}

static void advance(struct world *o)
{
    RIG_OK(fp8_state_advance(o->state, rig.stream));
}

/* ---- what a step makes of amaxes ---- */

static void a_new_state_is_empty(void **state)
{
    (void)state;
    struct world o;
    struct seen s;
    world_make(&o, 2, "history_length = 4");
    look(&o, &s);
    assert_int_equal(s.length, 4);
    for (int t = 0; t < 6; t++) {
        EXPECT_FLOAT(s.scale[t], 1.0f);
        EXPECT_FLOAT(s.running[t], -1.0f);
        assert_int_equal(s.entries[t], 0);
    }
    advance(&o); /* nothing ran */
    expect_same(&o, &s);
    world_free(&o);
}

static void the_largest_micro_batch_decides(void **state)
{
    (void)state;
    static const float amplitudes[2][4] = { { 100, 1, 1, 1 }, { 1, 1, 1, 100 } };
    for (int order = 0; order < 2; order++) {
        struct world o;
        struct seen s;
        world_make(&o, 1, "history_length = 1");
        fill(&o.w, 2.0f, 1);
        update(&o, 0, 1);
        for (int i = 0; i < 4; i++) {
            fill(&o.x, amplitudes[order][i], 2 + (uint64_t)i);
            fill(&o.dy, amplitudes[order][i] / 4, 9 + (uint64_t)i);
            forward(&o, 0);
            backward(&o, 0);
        }
        look(&o, &s);
        EXPECT_FLOAT(s.running[0], 100.0f);
        EXPECT_FLOAT(s.running[1], 2.0f);
        EXPECT_FLOAT(s.running[2], 25.0f);
        EXPECT_FLOAT(s.scale[0], 1.0f);
        advance(&o);
        look(&o, &s);
        EXPECT_FLOAT(s.scale[0], 448.0f / 100.0f);
        EXPECT_FLOAT(s.scale[1], 448.0f / 2.0f);
        EXPECT_FLOAT(s.scale[2], 57344.0f / 25.0f);
        for (int t = 0; t < 3; t++)
            EXPECT_FLOAT(s.running[t], -1.0f);
        world_free(&o);
    }
}

/* One step of x alone. */
static void step_x(struct world *o, float amplitude)
{
    fill(&o->x, amplitude, 3);
    forward(o, 0);
    advance(o);
}

static void histories_are_as_long_as_they_say(void **state)
{
    (void)state;
    static const struct {
        const char *fields;
        float amplitude[6], amax[6]; /* 0: the scale stays */
        float over;
    } rows[] = {
        { "history_length = 3", { 8, 4, 2, 1, 0.5f, 16 }, { 8, 8, 8, 4, 2, 16 }, 448.0f },
        { "history_length = 3, algo = \"most_recent\"",
          { 8, 4, 2, 1, 0.5f, 16 },
          { 8, 4, 2, 1, 0.5f, 16 },
          448.0f },
        { "history_length = 1", { 8, 4, 2, 1, 0.5f, 16 }, { 8, 4, 2, 1, 0.5f, 16 }, 448.0f },
        { "history_length = 2, margin = 2", { 3, 5, 1, 1, 0, 0 }, { 3, 5, 5, 1, 1, 0 }, 112.0f },
    };
    for (size_t row = 0; row < sizeof rows / sizeof rows[0]; row++) {
        struct world o;
        struct seen s;
        world_make(&o, 1, rows[row].fields);
        fill(&o.w, 1.0f, 1);
        update(&o, 0, 1);
        float scale = 1.0f;
        for (int i = 0; i < 6; i++) {
            step_x(&o, rows[row].amplitude[i]);
            if (rows[row].amax[i] > 0)
                scale = rows[row].over / rows[row].amax[i];
            look(&o, &s);
            EXPECT_FLOAT(s.scale[0], scale);
            assert_int_equal(s.entries[0], i + 1 < s.length ? i + 1 : s.length);
            EXPECT_FLOAT(s.history[0][s.entries[0] - 1], rows[row].amplitude[i]);
            assert_int_equal(s.entries[1], 1); /* the weight was quantised once */
            assert_int_equal(s.entries[2], 0); /* dy never */
        }
        world_free(&o);
    }
}

static void powers_of_two(void **state)
{
    (void)state;
    struct world o;
    struct seen s;
    world_make(&o, 1, "history_length = 2, power_of_two = true");
    fill(&o.w, 1.0f, 1);
    update(&o, 0, 1);
    step_x(&o, 3.0f);
    look(&o, &s);
    EXPECT_FLOAT(s.scale[0], 128.0f); /* 448 / 3 = 149.3 */
    EXPECT_FLOAT(s.scale[1], 256.0f);
    world_free(&o);
}

static void bytes_keep_the_scale_they_were_made_with(void **state)
{
    (void)state;
    struct world o;
    world_make(&o, 1, "history_length = 4");
    fill(&o.w, 0.5f, 1);
    fill(&o.x, 4.0f, 2);
    update(&o, 0, 1);
    forward(&o, 0);
    advance(&o);
    update(&o, 0, 2); /* with the new scale */
    forward(&o, 0);
    rig_block_pull(&o.weight.block, "weight");
    rig_block_pull(&o.saved.block, "saved");
    const float *w = (const float *)(const void *)o.weight.block.image;
    const float *x = (const float *)(const void *)o.saved.block.image;
    EXPECT_FLOAT(w[0], 896.0f);
    EXPECT_FLOAT(w[4], 1.0f / 896.0f);
    EXPECT_FLOAT(x[0], 112.0f);
    fill(&o.x, 1.0f, 2);
    fill(&o.w, 2.0f, 1);
    update(&o, 0, 2); /* nothing: this version is there */
    forward(&o, 0);
    advance(&o);
    rig_block_pull(&o.weight.block, "weight");
    EXPECT_FLOAT(w[0], 896.0f);
    world_free(&o);
}

static void calibration_takes_the_tensors_own_amax_once(void **state)
{
    (void)state;
    struct world o;
    struct seen s;
    world_make(&o, 1, "history_length = 4, calibrate = true");
    fill(&o.w, 0.5f, 1);
    fill(&o.x, 4.0f, 2);
    update(&o, 0, 1);
    forward(&o, 0);
    rig_block_pull(&o.saved.block, "saved");
    const float *x = (const float *)(const void *)o.saved.block.image;
    EXPECT_FLOAT(x[0], 112.0f);
    EXPECT_FLOAT(x[8], 4.0f);
    look(&o, &s);
    EXPECT_FLOAT(s.scale[0], 1.0f);
    EXPECT_FLOAT(s.running[0], 4.0f);
    fill(&o.x, 2.0f, 2); /* another micro-batch: its own, again */
    forward(&o, 0);
    rig_block_pull(&o.saved.block, "saved");
    EXPECT_FLOAT(x[0], 224.0f);
    advance(&o);
    forward(&o, 0); /* from the history */
    rig_block_pull(&o.saved.block, "saved");
    EXPECT_FLOAT(x[0], 112.0f);
    EXPECT_FLOAT(x[8], 0.0f);
    world_free(&o);
}

/* ---- amaxes that are handed over ---- */

/* The scale that quantising `role` gives with the amax of these bits; its inverse and the amax taken
 * are looked at here. */
static float scale_of_given(struct world *o, fp8_role role, float amax, float taken)
{
    struct rig_operand operand;
    struct rig_block word;
    rig_operand_make(&operand,
                     bytes_of(o->layer[0], role == FP8_ROLE_X   ? FP8_BYTES_X
                                           : role == FP8_ROLE_W ? FP8_BYTES_WEIGHT
                                                                : FP8_BYTES_GRAD),
                     0x7E);
    rig_block_make(&word, sizeof amax, 0, 0xFF);
    memcpy(word.image, &amax, sizeof amax);
    rig_block_push(&word);
    rig_block_push(&operand.block);
    fp8_quantize_args args = FP8_QUANTIZE_ARGS_INIT;
    args.role = role;
    args.source = role == FP8_ROLE_X ? &o->x.t : role == FP8_ROLE_W ? &o->w.t : &o->dy.t;
    args.operand = &operand.op;
    args.amax = (const float *)(const void *)word.device;
    args.call = call_of(o, 0);
    RIG_OK(fp8_quantize(o->layer[0], &args));
    rig_block_pull(&operand.block, "operand");
    const float *scales = (const float *)(const void *)operand.block.image;
    float scale = scales[0];
    EXPECT_FLOAT(scales[4], 1.0f / scale);
    EXPECT_FLOAT(scales[8], taken);
    rig_operand_free(&operand);
    rig_block_free(&word);
    return scale;
}

static void a_margin_is_in_every_scale(void **state)
{
    (void)state;
    struct world o;
    world_make(&o, 1, "history_length = 4, calibrate = true, margin = 2");
    fill(&o.w, 0.5f, 1);
    fill(&o.x, 3.0f, 2);
    fill(&o.dy, 5.0f, 3);
    update(&o, 0, 1);
    forward(&o, 0);
    backward(&o, 0);
    struct rig_operand *made[] = { &o.saved, &o.weight, &o.grad };
    const float wanted[] = { 112.0f / 3.0f, 112.0f / 0.5f, 14336.0f / 5.0f };
    for (int i = 0; i < 3; i++) { /* calibrated */
        rig_block_pull(&made[i]->block, "operand");
        EXPECT_FLOAT(((const float *)(const void *)made[i]->block.image)[0], wanted[i]);
    }
    EXPECT_FLOAT(scale_of_given(&o, FP8_ROLE_X, 7.0f, 7.0f), 112.0f / 7.0f);
    EXPECT_FLOAT(scale_of_given(&o, FP8_ROLE_W, 6.0f, 6.0f), 112.0f / 6.0f);
    EXPECT_FLOAT(scale_of_given(&o, FP8_ROLE_DY, 7.0f, 7.0f), 14336.0f / 7.0f);
    world_free(&o);
}

static void a_given_amax_may_be_no_amax(void **state)
{
    (void)state;
    struct world o;
    world_make(&o, 1, "history_length = 4");
    fill(&o.w, 0.5f, 1);
    fill(&o.x, 3.0f, 2);
    fill(&o.dy, 5.0f, 3);
    for (int role = FP8_ROLE_X; role <= FP8_ROLE_DY; role++) {
        float maximum = role == FP8_ROLE_DY ? 57344.0f : 448.0f;
        EXPECT_FLOAT(scale_of_given(&o, (fp8_role)role, INFINITY, FLT_MAX), maximum / FLT_MAX);
        EXPECT_FLOAT(scale_of_given(&o, (fp8_role)role, FLT_MAX, FLT_MAX), maximum / FLT_MAX);
        EXPECT_FLOAT(scale_of_given(&o, (fp8_role)role, NAN, 0.0f), 1.0f);
        EXPECT_FLOAT(scale_of_given(&o, (fp8_role)role, -NAN, 0.0f), 1.0f);
        EXPECT_FLOAT(scale_of_given(&o, (fp8_role)role, -3.0f, 0.0f), 1.0f);
        EXPECT_FLOAT(scale_of_given(&o, (fp8_role)role, -INFINITY, 0.0f), 1.0f);
    }
    world_free(&o);
}

/* ---- what leaves a state alone ---- */

/* Nor does the amax that calibration begins with. */
static void a_weight_that_is_not_refreshed_is_not_looked_at(void **state)
{
    (void)state;
    struct world o;
    struct seen before;
    struct rig_block words; /* refresh, found_inf */
    world_make(&o, 1, "history_length = 4, calibrate = true");
    fill(&o.w, 1.0f, 1);
    rig_set(&o.w, 3, 5, INFINITY);
    rig_tensor_push(&o.w);
    rig_block_make(&words, 2 * sizeof(uint32_t), 0, 0xFF);
    rig_block_push(&o.weight.block);
    look(&o, &before);
    for (uint32_t refresh = 0; refresh < 2; refresh++) {
        uint32_t both[] = { refresh, 0 };
        memcpy(words.image, both, sizeof both);
        rig_block_push(&words);
        fp8_weight_args args = FP8_WEIGHT_ARGS_INIT;
        args.w = &o.w.t;
        args.version = 1;
        args.weight = &o.weight.op;
        args.refresh = (const uint32_t *)(const void *)words.device;
        args.found_inf = (uint32_t *)(void *)words.device + 1;
        args.call = call_of(&o, 0);
        RIG_OK(fp8_weight_update(o.layer[0], &args));
        rig_block_pull(&words, "words");
        memcpy(both, words.image, sizeof both);
        assert_int_equal(both[1], refresh);
        if (refresh == 0) {
            expect_same(&o, &before);
            rig_block_pull(&o.weight.block, "weight");
            for (size_t i = 0; i < o.weight.block.bytes; i++)
                assert_int_equal(o.weight.block.image[i], 0x7E);
        }
    }
    rig_block_free(&words);
    world_free(&o);
}

static void evaluation_changes_nothing(void **state)
{
    (void)state;
    struct world o;
    struct seen before;
    world_make(&o, 1, "history_length = 4");
    fill(&o.w, 1.0f, 1);
    fill(&o.x, 2.0f, 2);
    update(&o, 0, 1);
    forward(&o, 0);
    advance(&o);
    forward(&o, 0);
    look(&o, &before);
    o.flags = FP8_CALL_EVALUATE;
    fill(&o.x, 2e4f, 2);
    update(&o, 0, 2);
    forward(&o, 0);
    expect_same(&o, &before);
    world_free(&o);
}

/* An evaluation that meets the weight of the next step first: that step trains as without it. */
static void training_after_evaluation_is_the_same(void **state)
{
    (void)state;
    struct seen after[2];
    unsigned char weights[2][MOST_WEIGHT];
    for (int evaluate = 0; evaluate < 2; evaluate++) {
        struct world o;
        world_make(&o, 1, "history_length = 4");
        for (int step = 1; step <= 4; step++) {
            fill(&o.w, 1.0f + (float)step, 1);
            for (int i = 0; i < 2 && evaluate && step > 1; i++) {
                o.flags = FP8_CALL_EVALUATE;
                fill(&o.x, 2e4f, 2);
                update(&o, 0, (uint64_t)step);
                assert_int_equal(o.weight.op.evaluated, 1);
                forward(&o, 0);
                o.flags = 0;
            }
            fill(&o.x, 2.0f * (float)step, 2);
            fill(&o.dy, 0.5f, 3);
            update(&o, 0, (uint64_t)step);
            assert_int_equal(o.weight.op.evaluated, 0);
            forward(&o, 0);
            backward(&o, 0);
            look(&o, &after[evaluate]);
            EXPECT_FLOAT(after[evaluate].running[1], 1.0f + (float)step);
            advance(&o);
        }
        look(&o, &after[evaluate]);
        rig_block_pull(&o.weight.block, "weight");
        assert_true(o.weight.block.bytes <= sizeof weights[0]);
        memcpy(weights[evaluate], o.weight.block.image, o.weight.block.bytes);
        if (evaluate)
            assert_memory_equal(weights[0], weights[1], o.weight.block.bytes);
        world_free(&o);
    }
    assert_memory_equal(after[0].data, after[1].data, after[0].bytes);
}

/* Evaluations among themselves, and one behind a training step, take the weight that is there. */
static void evaluation_takes_the_weight_that_is_there(void **state)
{
    (void)state;
    struct world o;
    world_make(&o, 1, "history_length = 4");
    for (int first = 0; first < 2; first++) {
        fill(&o.w, 1.0f, 1);
        o.flags = first ? FP8_CALL_EVALUATE : 0;
        update(&o, 0, 1 + (uint64_t)first);
        rig_block_pull(&o.weight.block, "weight");
        unsigned char before[MOST_WEIGHT];
        assert_true(o.weight.block.bytes <= sizeof before);
        memcpy(before, o.weight.block.image, o.weight.block.bytes);
        fill(&o.w, 3.0f, 7); /* would show */
        o.flags = FP8_CALL_EVALUATE;
        update(&o, 0, 1 + (uint64_t)first);
        rig_block_pull(&o.weight.block, "weight");
        assert_memory_equal(before, o.weight.block.image, o.weight.block.bytes);
    }
    world_free(&o);
}

static void recompute_changes_nothing(void **state)
{
    (void)state;
    unsigned char *outputs[2][3];
    struct seen after[2];
    for (int recompute = 0; recompute < 2; recompute++) {
        struct world o;
        world_make(&o, 1, "history_length = 4");
        for (int step = 0; step < 2; step++) {
            fill(&o.w, 1.0f, 1);
            fill(&o.x, 2.0f + (float)step, 2);
            fill(&o.dy, 0.5f, 3);
            update(&o, 0, 1 + (uint64_t)step);
            forward(&o, 0);
            if (recompute)
                forward(&o, 0);
            backward(&o, 0);
            advance(&o);
        }
        look(&o, &after[recompute]);
        struct rig_tensor *tensors[] = { &o.y, &o.dx, &o.dw };
        for (int i = 0; i < 3; i++) {
            rig_tensor_pull(tensors[i]);
            outputs[recompute][i] = malloc(tensors[i]->block.bytes);
            memcpy(outputs[recompute][i], tensors[i]->block.image, tensors[i]->block.bytes);
            if (recompute)
                assert_memory_equal(outputs[0][i], outputs[1][i], tensors[i]->block.bytes);
        }
        world_free(&o);
    }
    assert_memory_equal(after[0].data, after[1].data, after[0].bytes);
    for (int i = 0; i < 6; i++)
        free(outputs[i / 3][i % 3]);
}

static void a_call_without_tokens_does_not_run(void **state)
{
    (void)state;
    struct world o;
    struct seen s;
    world_make(&o, 1, "history_length = 4");
    fill(&o.w, 1.0f, 1);
    fill(&o.x, 2.0f, 2);
    fill(&o.dy, 2.0f, 3);
    update(&o, 0, 1);
    forward(&o, 0);
    backward(&o, 0);
    advance(&o);
    set_rows(&o, 0);
    forward(&o, 0);
    backward(&o, 0);
    look(&o, &s);
    for (int t = 0; t < 3; t++)
        EXPECT_FLOAT(s.running[t], -1.0f);
    rig_tensor_pull(&o.dw);
    for (int64_t i = 0; i < N * K; i++)
        EXPECT_FLOAT(rig_get(&o.dw, i / K, i % K), 0.0f);
    advance(&o);
    struct seen after;
    look(&o, &after);
    assert_memory_equal(after.data, s.data, s.bytes);
    set_rows(&o, M);
    world_free(&o);
}

static void zeros_keep_the_scale(void **state)
{
    (void)state;
    struct world o;
    struct seen s;
    world_make(&o, 1, "history_length = 2");
    fill(&o.w, 1.0f, 1);
    fill(&o.x, 0.0f, 2);
    update(&o, 0, 1);
    forward(&o, 0);
    rig_tensor_pull(&o.y);
    for (int64_t i = 0; i < M * N; i++)
        assert_int_equal(rig_bits(&o.y, i / N, i % N) & 0x7FFF, 0);
    advance(&o);
    look(&o, &s);
    EXPECT_FLOAT(s.scale[0], 1.0f);
    assert_int_equal(s.entries[0], 1);
    step_x(&o, 7.0f);
    look(&o, &s);
    EXPECT_FLOAT(s.scale[0], 64.0f);
    step_x(&o, 0.0f);
    step_x(&o, 0.0f); /* now the history holds nothing else */
    look(&o, &s);
    EXPECT_FLOAT(s.scale[0], 64.0f);
    world_free(&o);
}

static void layers_of_a_state_are_apart(void **state)
{
    (void)state;
    struct world o;
    struct seen s;
    world_make(&o, 2, "history_length = 2");
    fill(&o.w, 1.0f, 1);
    fill(&o.x, 7.0f, 2);
    update(&o, 1, 1);
    forward(&o, 1);
    advance(&o);
    look(&o, &s);
    const float scales[6] = { 1, 1, 1, 64, 448, 1 };
    const int entries[6] = { 0, 0, 0, 1, 1, 0 };
    for (int t = 0; t < 6; t++) {
        EXPECT_FLOAT(s.scale[t], scales[t]);
        assert_int_equal(s.entries[t], entries[t]);
    }
    float *running = NULL;
    int64_t count = 0;
    RIG_OK(fp8_state_running(o.state, &running, &count));
    assert_int_equal(count, 6);
    /* what an all-reduce brings: a rank that ran tells one that did not */
    const float reduced[6] = { -1, 2, -1, 3.5f, -1, -1 };
    RIG_OK(fp8_memory_copy(rig.context, running, reduced, sizeof reduced, rig.stream));
    advance(&o);
    look(&o, &s);
    EXPECT_FLOAT(s.scale[1], 224.0f);
    EXPECT_FLOAT(s.scale[3], 64.0f);
    EXPECT_FLOAT(s.history[3][1], 3.5f);
    assert_int_equal(s.entries[4], 1);
    world_free(&o);
}

/* ---- plain data ---- */

static void saved_states_continue_where_they_were(void **state)
{
    (void)state;
    static const char *const lengths[] = { "history_length = 3", "history_length = 5",
                                           "history_length = 2" };
    static const float before[] = { 1, 16, 2, 4 };
    for (int to = 0; to < 3; to++) {
        struct world a, b;
        struct seen saved, s;
        world_make(&a, 1, lengths[0]);
        world_make(&b, 1, lengths[to]);
        fill(&a.w, 1.0f, 1);
        fill(&b.w, 1.0f, 1);
        update(&a, 0, 1);
        update(&b, 0, 1);
        for (int i = 0; i < 4; i++)
            step_x(&a, before[i]);
        forward(&a, 0); /* in the middle of a step */
        look(&a, &saved);
        RIG_OK(fp8_state_load(b.state, saved.data, saved.bytes, rig.stream));
        look(&b, &s);
        int kept = to == 2 ? 2 : 3;
        assert_int_equal(s.entries[0], kept);
        for (int i = 0; i < kept; i++)
            EXPECT_FLOAT(s.history[0][i], before[4 - kept + i]);
        EXPECT_FLOAT(s.scale[0], saved.scale[0]);
        EXPECT_FLOAT(s.running[0], 4.0f);
        EXPECT_FLOAT(s.running[1], -1.0f);
        EXPECT_FLOAT(s.scale[1], 448.0f);
        advance(&b);
        step_x(&b, 0.25f);
        look(&b, &s);
        static const float amax[] = { 4, 16, 4 }; /* of the last 3, 5, 2 */
        EXPECT_FLOAT(s.scale[0], 448.0f / amax[to]);
        world_free(&a);
        world_free(&b);
    }
}

static void altered_data_is_refused(void **state)
{
    (void)state;
    static const struct {
        size_t offset;
        uint32_t word;
    } changes[] = {
        { 0, 0 },            /* magic */
        { 8, 2 },            /* version */
        { 12, 1 },           /* reserved */
        { 16, 6 },           /* tensors */
        { 24, 3 },           /* length */
        { 32, 0 },           /* scale 0 */
        { 32, 0x7F800000u }, /* inf */
        { 36, 0x7FC00000u }, /* NaN */
        { 44, 0xC0000000u }, /* running -2 */
        { 56, 3 },           /* entries beyond the length */
        { 56, 0xFFFFFFFFu }, /* -1 */
        { 68, 0xBF800000u }, /* history -1 */
    };
    struct world o;
    struct seen s;
    world_make(&o, 1, "history_length = 2");
    fill(&o.w, 1.0f, 1);
    update(&o, 0, 1);
    step_x(&o, 2.0f);
    look(&o, &s);
    for (size_t i = 0; i < sizeof changes / sizeof changes[0]; i++) {
        unsigned char data[MOST_BYTES];
        memcpy(data, s.data, s.bytes);
        memcpy(data + changes[i].offset, &changes[i].word, 4);
        RIG_REFUSED(FP8_ERR_ARGUMENT, fp8_state_load(o.state, data, s.bytes, rig.stream));
    }
    RIG_REFUSED(FP8_ERR_ARGUMENT, fp8_state_load(o.state, s.data, s.bytes - 4, rig.stream));
    RIG_REFUSED(FP8_ERR_ARGUMENT, fp8_state_load(o.state, s.data, 8, rig.stream));
    RIG_REFUSED(FP8_ERR_ARGUMENT, fp8_state_load(o.state, NULL, s.bytes, rig.stream));
    RIG_REFUSED(FP8_ERR_ARGUMENT, fp8_state_save(o.state, s.data, s.bytes - 1, rig.stream));
    expect_same(&o, &s);
    world_free(&o);
}

/* ---- refusals ---- */

static void wrong_states_are_refused(void **state)
{
    (void)state;
    struct world o;
    world_make(&o, 2, "history_length = 2");
    fill(&o.w, 1.0f, 1);
    fill(&o.x, 1.0f, 2);
    update(&o, 0, 1);
    fp8_fprop_args args = FP8_FPROP_ARGS_INIT;
    args.x = &o.x.t;
    args.weight = &o.weight.op;
    args.y = &o.y.t;
    args.call = call_of(&o, 0);
    args.call.state = NULL;
    RIG_REFUSED(FP8_ERR_ARGUMENT, fp8_layer_fprop(o.layer[0], &args));
    rig_expect_sentence("call.state is NULL");
    args.call = call_of(&o, 1);
    RIG_REFUSED(FP8_ERR_ARGUMENT, fp8_layer_fprop(o.layer[0], &args));
    rig_expect_sentence("another layer");
    args.call = call_of(&o, 2);
    RIG_REFUSED(FP8_ERR_ARGUMENT, fp8_layer_fprop(o.layer[0], &args));
    rig_expect_sentence("made for 2 layers");
    fp8_state *none = o.state;
    RIG_REFUSED(FP8_ERR_ARGUMENT, fp8_state_create(NULL, 1, &none));
    assert_null(none);
    const fp8_layer *holes[] = { o.layer[0], NULL };
    RIG_REFUSED(FP8_ERR_ARGUMENT, fp8_state_create(holes, 2, &none));
    RIG_REFUSED(FP8_ERR_ARGUMENT, fp8_state_create(holes, 0, &none));
    struct world other;
    world_make(&other, 1, "history_length = 3");
    holes[1] = other.layer[0];
    RIG_REFUSED(FP8_ERR_ARGUMENT, fp8_state_create(holes, 2, &none));
    rig_expect_sentence("another history_length");
    const fp8_layer *twice[] = { o.layer[0], o.layer[0] };
    RIG_OK(fp8_state_create(twice, 2, &none)); /* two weights of one layer */
    fp8_state_destroy(none);
    world_free(&other);
    world_free(&o);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_new_state_is_empty),
        cmocka_unit_test(the_largest_micro_batch_decides),
        cmocka_unit_test(histories_are_as_long_as_they_say),
        cmocka_unit_test(powers_of_two),
        cmocka_unit_test(bytes_keep_the_scale_they_were_made_with),
        cmocka_unit_test(calibration_takes_the_tensors_own_amax_once),
        cmocka_unit_test(a_margin_is_in_every_scale),
        cmocka_unit_test(a_given_amax_may_be_no_amax),
        cmocka_unit_test(a_weight_that_is_not_refreshed_is_not_looked_at),
        cmocka_unit_test(evaluation_changes_nothing),
        cmocka_unit_test(training_after_evaluation_is_the_same),
        cmocka_unit_test(evaluation_takes_the_weight_that_is_there),
        cmocka_unit_test(recompute_changes_nothing),
        cmocka_unit_test(a_call_without_tokens_does_not_run),
        cmocka_unit_test(zeros_keep_the_scale),
        cmocka_unit_test(layers_of_a_state_are_apart),
        cmocka_unit_test(saved_states_continue_where_they_were),
        cmocka_unit_test(altered_data_is_refused),
        cmocka_unit_test(wrong_states_are_refused),
    };
    return RIG_RUN(tests);
}
