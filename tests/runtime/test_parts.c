/*
 * test_parts.c - a tensor quantised in parts, as ranks do, against the same tensor whole: the bytes
 * and scales that are put together are those of one GPU.
 *
 * Where one scale serves all parts, its amax is reduced over them: by fp8_amax for recipe
 * "current", through the running maxima of the states for "delayed". Rows, and blocks that no cut
 * straddles, need nothing.
 */
#include "runtime/fp8_format.h"
#include "tests/runtime/rig.h"

enum { K = 144, PART = 128, PARTS = 3, MOST = PART * PARTS };

static int open_layers(void **state)
{
    (void)state;
    struct rig_spec specs[2 * RIG_RECIPES];
    for (int i = 0; i < 2 * RIG_RECIPES; i++) { /* of all features, of those of a part */
        specs[i] = (struct rig_spec){ .out_features = i % 2 ? PART : MOST, .in_features = K };
        rig_set_kind(&specs[i], i / 2);
    }
    rig_layers_open(&rig_shared, specs, 2 * RIG_RECIPES);
    return 0;
}

/* Rows [first, first + rows) of a matrix; part p is 100^p times as large as part 0. */
static void make_rows(struct rig_tensor *tensor, int64_t first, int64_t rows)
{
    static const float sizes[PARTS] = { 1.0f, 100.0f, 10000.0f };
    rig_tensor_make(tensor, "part", FP8_DTYPE_BF16, rows, K, first % 3, first % 5, 0xFF);
    for (int64_t i = 0; i < rows; i++) {
        for (int64_t k = 0; k < K; k++)
            rig_set(tensor, i, k,
                    (float)rig_normal(3, (uint64_t)((first + i) * K + k)) *
                        sizes[(first + i) / PART]);
    }
    rig_tensor_push(tensor);
}

struct quantised {
    struct rig_tensor source;
    struct rig_operand operand;
    fp8_operand_view view;
};

static fp8_call call_of(const struct rig_layer *layer, int64_t rows, struct rig_scratch *memory,
                        const fp8_state *state)
{
    rig_scratch_make(memory, rig_bytes(layer, rows, FP8_BYTES_WORKSPACE), 0, 0x7E);
    fp8_call call = rig_call(memory);
    call.state = state;
    return call;
}

/* amax: of all parts, in device memory, or NULL. */
static void quantise(struct quantised *q, const struct rig_layer *layer, fp8_role role,
                     const float *amax, const fp8_state *state)
{
    struct rig_scratch memory;
    fp8_quantize_args args = FP8_QUANTIZE_ARGS_INIT;
    int64_t rows = q->source.t.rows;
    fp8_bytes bytes = role == FP8_ROLE_X ? FP8_BYTES_X : FP8_BYTES_WEIGHT;
    rig_operand_make(&q->operand, rig_bytes(layer, rows, bytes), 0xFF);
    args.role = role;
    args.source = &q->source.t;
    args.operand = &q->operand.op;
    args.amax = amax;
    args.call = call_of(layer, rows, &memory, state);
    RIG_OK(fp8_quantize(layer->handle, &args));
    rig_block_pull(&q->operand.block, "operand");
    rig_scratch_check(&memory, "workspace");
    rig_scratch_free(&memory);
    RIG_OK(fp8_operand_parts(&q->operand.op, &q->view));
}

static void drop(struct quantised *q)
{
    rig_operand_free(&q->operand);
    rig_tensor_free(&q->source);
}

/* What lies at an address of the operand, in its image. */
static const unsigned char *image_of(const struct quantised *q, const void *address)
{
    return q->operand.block.image + ((const unsigned char *)address - q->operand.block.device);
}

static void same(const char *what, const void *a, const void *b, size_t bytes)
{
    if (memcmp(a, b, bytes) != 0)
        fail_msg("%s of a part differ from those of the whole", what);
}

/* The row copy of part `first`, and its scales, are those rows of the whole. */
static void compare_rows(const struct quantised *part, const struct quantised *whole, int64_t first)
{
    enum { LD = 256 };
    const fp8_operand *op = &part->operand.op;
    same("bytes", image_of(part, part->view.row), image_of(whole, whole->view.row) + first * LD,
         (size_t)(op->rows * LD));
    if (op->row_scaling == FP8_SCALING_TENSOR) {
        same("scales", image_of(part, part->view.scales), image_of(whole, whole->view.scales), 36);
        return;
    }
    const unsigned char *mine = image_of(part, part->view.row_scales);
    const unsigned char *all = image_of(whole, whole->view.row_scales);
    if (op->row_scaling == FP8_SCALING_ROW)
        same("scales", mine, all + first * 4, (size_t)op->rows * 4);
    for (int64_t b = 0; b < 2 && op->row_scaling == FP8_SCALING_BLOCK; b++)
        same("scales", mine + b * part->view.row_scales_ld * 4,
             all + (b * whole->view.row_scales_ld + first) * 4, (size_t)op->rows * 4);
    if (op->row_scaling == FP8_SCALING_TILE)
        same("scales", mine, all + first / 128 * whole->view.row_scales_ld * 4, 8);
}

/* The amax of all parts, one after another, in device memory. */
static float *amax_of_parts(const struct rig_layer *layer, fp8_role role,
                            const struct quantised *parts)
{
    void *amax;
    RIG_OK(fp8_memory_alloc(rig.context, sizeof(float), &amax));
    for (int p = 0; p < PARTS; p++) {
        struct rig_scratch memory;
        fp8_amax_args args = FP8_AMAX_ARGS_INIT;
        args.role = role;
        args.accumulate = p > 0;
        args.source = &parts[p].source.t;
        args.amax = amax;
        args.call = call_of(layer, PART, &memory, NULL);
        RIG_OK(fp8_amax(layer->handle, &args));
        RIG_OK(fp8_stream_synchronize(rig.context, rig.stream));
        rig_scratch_free(&memory);
    }
    return amax;
}

static void check_recipe(enum rig_recipe recipe, fp8_role role)
{
    const struct rig_layer *all = &rig_shared.layer[2 * recipe], *one = all + 1;
    const struct rig_layer *of_parts = role == FP8_ROLE_W ? one : all;
    struct quantised whole, parts[PARTS];
    float *amax = NULL;
    make_rows(&whole.source, 0, MOST);
    for (int p = 0; p < PARTS; p++)
        make_rows(&parts[p].source, p * PART, PART);
    if (recipe == RIG_CURRENT)
        amax = amax_of_parts(of_parts, role, parts);
    quantise(&whole, all, role, NULL, NULL);
    for (int p = 0; p < PARTS; p++) {
        quantise(&parts[p], of_parts, role, amax, NULL);
        compare_rows(&parts[p], &whole, p * PART);
    }
    for (int p = 0; p < PARTS; p++)
        drop(&parts[p]);
    drop(&whole);
    fp8_memory_free(rig.context, amax);
}

/* The tokens of x over ranks (sequence parallel), and the rows of a fused weight [q; k; v]. */
static void parts_are_rows_of_the_whole(void **state)
{
    (void)state;
    static const enum rig_recipe recipes[] = { RIG_CURRENT, RIG_ROWWISE, RIG_ROWWISE_HP_WGRAD,
                                               RIG_BLOCK };
    for (int i = 0; i < 4; i++) {
        check_recipe(recipes[i], FP8_ROLE_X);
        check_recipe(recipes[i], FP8_ROLE_W);
    }
}

/* Without the amax of the others each part has a scale of its own, and says so in its bytes. */
static void parts_by_themselves_have_scales_of_their_own(void **state)
{
    (void)state;
    struct quantised parts[PARTS];
    for (int p = 0; p < PARTS; p++) {
        make_rows(&parts[p].source, p * PART, PART);
        quantise(&parts[p], &rig_shared.layer[2 * RIG_CURRENT + 1], FP8_ROLE_W, NULL, NULL);
        struct rig_quantized want;
        rig_quantize(&want, &parts[p].source, true, false);
        rig_check_operand("part", &parts[p].operand, &want);
        rig_quantized_free(&want);
    }
    float scales[2];
    memcpy(&scales[0], image_of(&parts[0], parts[0].view.scales), sizeof(float));
    memcpy(&scales[1], image_of(&parts[1], parts[1].view.scales), sizeof(float));
    assert_true(scales[0] > 50 * scales[1]);
    for (int p = 0; p < PARTS; p++)
        drop(&parts[p]);
}

/* The larger of all running amaxes goes back to every state, as an all-reduce does. */
static void reduce_running(fp8_state *const *states)
{
    float largest[3], mine[3], *running;
    int64_t count;
    for (int p = 0; p < PARTS; p++) {
        RIG_OK(fp8_state_running(states[p], &running, &count));
        assert_int_equal(count, 3);
        RIG_OK(fp8_memory_copy(rig.context, mine, running, sizeof mine, rig.stream));
        RIG_OK(fp8_stream_synchronize(rig.context, rig.stream));
        for (int t = 0; t < 3; t++)
            largest[t] = p == 0 || mine[t] > largest[t] ? mine[t] : largest[t];
    }
    for (int p = 0; p < PARTS; p++) {
        RIG_OK(fp8_state_running(states[p], &running, &count));
        RIG_OK(fp8_memory_copy(rig.context, running, largest, sizeof largest, rig.stream));
        RIG_OK(fp8_state_advance(states[p], rig.stream));
    }
    RIG_OK(fp8_stream_synchronize(rig.context, rig.stream));
}

/* A rank's state after the all-reduce is that of one GPU, even of a rank that had no tokens. */
static void delayed_scales_agree_over_ranks(void **state)
{
    (void)state;
    const struct rig_layer *layer = &rig_shared.layer[2 * RIG_DELAYED];
    const fp8_layer *list[] = { layer->handle };
    fp8_state *states[PARTS], *one;
    struct quantised whole, parts[PARTS];
    RIG_OK(fp8_state_create(list, 1, &one));
    make_rows(&whole.source, 0, 2 * PART); /* the last rank has none */
    for (int p = 0; p < PARTS; p++) {
        RIG_OK(fp8_state_create(list, 1, &states[p]));
        make_rows(&parts[p].source, p * PART, p < 2 ? PART : 0);
    }
    for (int step = 0; step < 2; step++) {
        quantise(&whole, layer, FP8_ROLE_X, NULL, one);
        for (int p = 0; p < PARTS; p++) {
            quantise(&parts[p], layer, FP8_ROLE_X, NULL, states[p]);
            if (p < 2)
                compare_rows(&parts[p], &whole, p * PART);
        }
        reduce_running(states);
        RIG_OK(fp8_state_advance(one, rig.stream));
        for (int p = 0; p < PARTS && step == 0; p++)
            rig_operand_free(&parts[p].operand);
        if (step == 0)
            rig_operand_free(&whole.operand);
    }
    float scale;
    memcpy(&scale, image_of(&whole, whole.view.scales), sizeof scale);
    assert_true(scale != 1.0f); /* of the second step: it comes from the first */
    for (int p = 0; p < PARTS; p++) {
        drop(&parts[p]);
        fp8_state_destroy(states[p]);
    }
    drop(&whole);
    fp8_state_destroy(one);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(parts_are_rows_of_the_whole, open_layers),
        cmocka_unit_test(parts_by_themselves_have_scales_of_their_own),
        cmocka_unit_test_teardown(delayed_scales_agree_over_ranks, rig_shared_close),
    };
    return RIG_RUN(tests);
}
