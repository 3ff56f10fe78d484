/*
 * test_shard_scale.c - recipe current with a scale for each shard of w (weight_scale = "shard"):
 * the unsharded layer with the same groups, against float64.
 *
 * rig_case_check does the looking: bytes and scales of both copies of w bit for bit, y and dx by
 * the bounds of the numerics rules. Over ranks the same is compared in tests/ranks and by `fp8gen
 * run --fsdp`.
 */
#include <math.h>

#include "tests/runtime/rig.h"

static const uint8_t poisons[] = { 0xFF, 0x7E };

/* ---- shapes ---- */

/* Shards of one row of 128 and of several, the last one short, some empty; no dim a multiple of
 * 16. */
static void odd_shapes(void **state)
{
    (void)state;
    static const struct {
        int64_t tokens;
        struct rig_spec spec;
    } rows[] = {
        { 50, { .out_features = 1000, .in_features = 712, .bias = true } },
        { 17, { .out_features = 2556, .in_features = 100, .power_of_two = true } },
        { 129, { .out_features = 272, .in_features = 1008, .bias = true, .e4m3 = true } },
        { 1, { .out_features = 1, .in_features = 1, .bias = true } },
        { 7, { .out_features = 3, .in_features = 5, .output = FP8_DTYPE_FP32 } },
        { 130,
          { .out_features = 129,
            .in_features = 257,
            .bias = true,
            .weight = FP8_DTYPE_FP32,
            .grad_weight = FP8_DTYPE_BF16,
            .grad_input = FP8_DTYPE_FP32 } },
        { 264,
          { .out_features = 256, .in_features = 384, .output = FP8_DTYPE_FP32, .bias = true } },
        { 100,
          { .out_features = 700,
            .in_features = 321,
            .output = FP8_DTYPE_FP16,
            .grad_input = FP8_DTYPE_FP16,
            .bias = true,
            .fprop_split = true } },
    };
    enum { COUNT = sizeof rows / sizeof rows[0] };
    static const int64_t shards[] = { 3, 8 };
    for (int s = 0; s < 2; s++) {
        struct rig_spec specs[COUNT];
        struct rig_layers layers;
        for (int i = 0; i < COUNT; i++) {
            specs[i] = rows[i].spec;
            specs[i].shards = shards[s];
        }
        rig_layers_open(&layers, specs, COUNT);
        for (int i = 0; i < COUNT; i++) {
            struct rig_case c;
            rig_case_init(&c, &layers.layer[i], rows[i].tokens, (uint64_t)(10 * s + i));
            c.poison = poisons[i % 2];
            c.accumulate = s == 1;
            c.one_backward = i % 2;
            for (int t = 0; t < RIG_FOUND_INF && s > 0; t++) {
                c.offset[t] = (i + t) % 9;
                c.gap[t] = (i * 3 + t) % 17;
            }
            rig_case_make(&c);
            rig_case_run(&c);
            rig_case_check(&c);
            rig_case_free(&c);
        }
        rig_layers_close(&layers);
    }
}

static void tokens_change(void **state)
{
    (void)state;
    static const int64_t all[] = { 300, 0, 1, 33, 128, 129, 3 };
    struct rig_spec spec = { .out_features = 400, .in_features = 72, .bias = true, .shards = 3 };
    struct rig_layers layers;
    rig_layers_open(&layers, &spec, 1);
    for (size_t t = 0; t < sizeof all / sizeof all[0]; t++)
        rig_case_all(&layers.layer[0], all[t], 100 + t, poisons[t % 2]);
    rig_layers_close(&layers);
}

/* Many tiles a CTA, and depths of dgrad with many blocks. */
static void large(void **state)
{
    (void)state;
    struct rig_spec specs[] = {
        { .out_features = rig_cut("N", 14336, 800), .in_features = rig_cut("K", 1000, 130) },
        { .out_features = rig_cut("N", 4097, 700), .in_features = rig_cut("K", 4096, 200) },
    };
    struct rig_layers layers;
    for (int i = 0; i < 2; i++) {
        specs[i].shards = 5;
        specs[i].max_tokens = rig_cut("M", 4100, 140);
        specs[i].grad_input = i ? FP8_DTYPE_FP32 : FP8_DTYPE_BF16;
    }
    rig_layers_open(&layers, specs, 2);
    for (int i = 0; i < 2; i++)
        rig_case_all(&layers.layer[i], specs[i].max_tokens, 200 + (uint64_t)i, 0xFF);
    rig_layers_close(&layers);
}

/* One of the two copies alone, as a weight hook in high precision asks for it: the bits of both. */
static void copies_by_themselves(void **state)
{
    (void)state;
    struct rig_spec spec = { .out_features = 300, .in_features = 200, .shards = 2 };
    struct rig_layers layers;
    struct rig_case c;
    rig_layers_open(&layers, &spec, 1);
    rig_case_init(&c, &layers.layer[0], 5, 7);
    rig_case_make(&c);
    rig_case_push(&c);
    for (uint32_t copies = FP8_COPY_ROW; copies <= FP8_COPY_TRANSPOSED; copies++) {
        struct rig_operand one;
        struct rig_quantized want;
        rig_operand_make(&one, c.weight.block.bytes, 0x7E);
        fp8_weight_args args = FP8_WEIGHT_ARGS_INIT;
        args.w = &c.tensor[RIG_W].t;
        args.copies = copies;
        args.version = 3;
        args.weight = &one.op;
        args.call = rig_case_call(&c);
        RIG_OK(fp8_weight_update(layers.layer[0].handle, &args));
        RIG_OK(fp8_stream_synchronize(rig.context, rig.stream));
        assert_int_equal(one.op.copies, copies);
        rig_quantize_role(&want, &layers.layer[0], FP8_ROLE_W, &c.tensor[RIG_W], NULL);
        rig_check_operand("w", &one, &want);
        rig_quantized_free(&want);
        rig_operand_free(&one);
    }
    rig_case_free(&c);
    rig_layers_close(&layers);
}

/* ---- what it is for ---- */

enum { SIDE = 256, HALF = 128, TOKENS = 64 };

/* Decibels of columns [first, end) of out = x w^T, or with transposed of out = dy w, against
 * float64 on the tensors as they were. */
static double decibels(const struct rig_case *c, bool backward, int64_t first, int64_t end)
{
    const struct rig_tensor *a = &c->tensor[backward ? RIG_DY : RIG_X];
    const struct rig_tensor *out = &c->tensor[backward ? RIG_DX : RIG_Y];
    double signal = 0, noise = 0;
    for (int64_t i = 0; i < c->tokens; i++) {
        for (int64_t j = first; j < end; j++) {
            double want = 0;
            for (int64_t k = 0; k < SIDE; k++)
                want += (double)rig_get(a, i, k) * (double)(backward
                                                                ? rig_get(&c->tensor[RIG_W], k, j)
                                                                : rig_get(&c->tensor[RIG_W], j, k));
            double error = (double)rig_get(out, i, j) - want;
            signal += want * want;
            noise += error * error;
        }
    }
    return 10 * log10(signal / noise);
}

/* w's second half is 1e-5 of its first, and dy weighs that up: y of the second half, dx. */
static void measure(const struct rig_layer *layer, double db[2])
{
    struct rig_case c;
    rig_case_init(&c, layer, TOKENS, 900);
    c.level = true;
    rig_case_make(&c);
    for (int64_t i = 0; i < SIDE; i++) {
        for (int64_t j = 0; j < SIDE; j++) {
            float w = (float)rig_normal(1, (uint64_t)(i * SIDE + j));
            rig_set(&c.tensor[RIG_W], i, j, i < HALF ? w : 1e-5f * w);
            if (i < TOKENS)
                rig_set(&c.tensor[RIG_DY], i, j,
                        (j < HALF ? 1e-5f : 1) * (float)rig_normal(2, (uint64_t)(i * SIDE + j)));
        }
    }
    rig_case_run(&c);
    rig_case_check(&c);
    db[0] = decibels(&c, false, HALF, SIDE);
    db[1] = decibels(&c, true, 0, SIDE);
    rig_case_free(&c);
}

static void small_shards_keep_their_precision(void **state)
{
    (void)state;
    double db[2][2];
    for (int by_shard = 0; by_shard < 2; by_shard++) {
        struct rig_spec spec = { .out_features = SIDE,
                                 .in_features = SIDE,
                                 .shards = by_shard * 2 };
        struct rig_layers layers;
        rig_layers_open(&layers, &spec, 1);
        measure(&layers.layer[0], db[by_shard]);
        rig_layers_close(&layers);
    }
    print_message(
        "a shard 1e5 smaller: y of it %.1f dB (one scale for w: %.1f), dx %.1f dB (%.1f)\n",
        db[1][0], db[0][0], db[1][1], db[0][1]);
    assert_true(db[1][0] >= 28 && db[1][1] >= 24);
    assert_true(db[0][0] < 15 && db[0][1] < 15);
}

/* All shards alike: nothing is lost beside one scale for all. */
static void equal_shards_are_one_tensor(void **state)
{
    (void)state;
    struct rig_case c[2];
    struct rig_layers layers[2];
    for (int i = 0; i < 2; i++) {
        struct rig_spec spec = { .out_features = SIDE, .in_features = SIDE, .shards = i * 2 };
        rig_layers_open(&layers[i], &spec, 1);
        rig_case_init(&c[i], &layers[i].layer[0], TOKENS, 901);
        rig_case_make(&c[i]);
        for (int64_t row = 0; row < SIDE; row += HALF)
            rig_set(&c[i].tensor[RIG_W], row, 0, 1e6f); /* the amax of both */
        rig_case_run(&c[i]);
        rig_case_check(&c[i]);
    }
    for (int64_t i = 0; i < TOKENS && !rig.cuda; i++) {
        for (int64_t j = 0; j < SIDE; j++) {
            assert_int_equal(rig_bits(&c[0].tensor[RIG_Y], i, j),
                             rig_bits(&c[1].tensor[RIG_Y], i, j));
            assert_int_equal(rig_bits(&c[0].tensor[RIG_DX], i, j),
                             rig_bits(&c[1].tensor[RIG_DX], i, j));
        }
    }
    for (int i = 0; i < 2; i++) {
        rig_case_free(&c[i]);
        rig_layers_close(&layers[i]);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(odd_shapes),
        cmocka_unit_test(tokens_change),
        cmocka_unit_test(large),
        cmocka_unit_test(copies_by_themselves),
        cmocka_unit_test(small_shards_keep_their_precision),
        cmocka_unit_test(equal_shards_are_one_tensor),
    };
    return RIG_RUN(tests);
}
