/*
 * test_state.c - delayed scaling: what the state makes of amaxes, step by step.
 */
#include <float.h>
#include <math.h>

#include "tests/runtime/rig_state.h"

/* ---- what a step makes of amaxes ---- */

static void a_new_state_is_empty(void **state)
{
    (void)state;
    struct world o;
    struct seen s;
    world_make(&o, 2, "history_length = 4");
    world_look(&o, &s);
    assert_int_equal(s.length, 4);
    for (int t = 0; t < 6; t++) {
        EXPECT_FLOAT(s.scale[t], 1.0f);
        EXPECT_FLOAT(s.running[t], -1.0f);
        assert_int_equal(s.entries[t], 0);
    }
    world_advance(&o); /* nothing ran */
    world_expect_same(&o, &s);
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
        world_fill(&o.w, 2.0f, 1);
        world_update(&o, 0, 1);
        for (int i = 0; i < 4; i++) {
            world_fill(&o.x, amplitudes[order][i], 2 + (uint64_t)i);
            world_fill(&o.dy, amplitudes[order][i] / 4, 9 + (uint64_t)i);
            world_forward(&o, 0);
            world_backward(&o, 0);
        }
        world_look(&o, &s);
        EXPECT_FLOAT(s.running[0], 100.0f);
        EXPECT_FLOAT(s.running[1], 2.0f);
        EXPECT_FLOAT(s.running[2], 25.0f);
        EXPECT_FLOAT(s.scale[0], 1.0f);
        world_advance(&o);
        world_look(&o, &s);
        EXPECT_FLOAT(s.scale[0], 448.0f / 100.0f);
        EXPECT_FLOAT(s.scale[1], 448.0f / 2.0f);
        EXPECT_FLOAT(s.scale[2], 57344.0f / 25.0f);
        for (int t = 0; t < 3; t++)
            EXPECT_FLOAT(s.running[t], -1.0f);
        world_free(&o);
    }
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
        world_fill(&o.w, 1.0f, 1);
        world_update(&o, 0, 1);
        float scale = 1.0f;
        for (int i = 0; i < 6; i++) {
            world_step_x(&o, rows[row].amplitude[i]);
            if (rows[row].amax[i] > 0)
                scale = rows[row].over / rows[row].amax[i];
            world_look(&o, &s);
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
    world_begin(&o, "history_length = 2, power_of_two = true", 1.0f, 1.0f, 1.0f);
    world_step_x(&o, 3.0f);
    world_look(&o, &s);
    EXPECT_FLOAT(s.scale[0], 128.0f); /* 448 / 3 = 149.3 */
    EXPECT_FLOAT(s.scale[1], 256.0f);
    world_free(&o);
}

static void bytes_keep_the_scale_they_were_made_with(void **state)
{
    (void)state;
    struct world o;
    world_begin(&o, "history_length = 4", 0.5f, 4.0f, 1.0f);
    world_forward(&o, 0);
    world_advance(&o);
    world_update(&o, 0, 2); /* with the new scale */
    world_forward(&o, 0);
    rig_block_pull(&o.weight.block, "weight");
    rig_block_pull(&o.saved.block, "saved");
    const float *w = (const float *)(const void *)o.weight.block.image;
    const float *x = (const float *)(const void *)o.saved.block.image;
    EXPECT_FLOAT(w[0], 896.0f);
    EXPECT_FLOAT(w[4], 1.0f / 896.0f);
    EXPECT_FLOAT(x[0], 112.0f);
    world_fill(&o.x, 1.0f, 2);
    world_fill(&o.w, 2.0f, 1);
    world_update(&o, 0, 2); /* nothing: this version is there */
    world_forward(&o, 0);
    world_advance(&o);
    rig_block_pull(&o.weight.block, "weight");
    EXPECT_FLOAT(w[0], 896.0f);
    world_free(&o);
}

static void calibration_takes_the_tensors_own_amax_once(void **state)
{
    (void)state;
    struct world o;
    struct seen s;
    world_begin(&o, "history_length = 4, calibrate = true", 0.5f, 4.0f, 1.0f);
    world_forward(&o, 0);
    rig_block_pull(&o.saved.block, "saved");
    const float *x = (const float *)(const void *)o.saved.block.image;
    EXPECT_FLOAT(x[0], 112.0f);
    EXPECT_FLOAT(x[8], 4.0f);
    world_look(&o, &s);
    EXPECT_FLOAT(s.scale[0], 1.0f);
    EXPECT_FLOAT(s.running[0], 4.0f);
    world_fill(&o.x, 2.0f, 2); /* another micro-batch: its own, again */
    world_forward(&o, 0);
    rig_block_pull(&o.saved.block, "saved");
    EXPECT_FLOAT(x[0], 224.0f);
    world_advance(&o);
    world_forward(&o, 0); /* from the history */
    rig_block_pull(&o.saved.block, "saved");
    EXPECT_FLOAT(x[0], 112.0f);
    EXPECT_FLOAT(x[8], 0.0f);
    world_free(&o);
}

/* ---- amaxes that are handed over ---- */

/* The scale that quantising `role` gives with the amax of these bits; its inverse and the amax
 * taken are looked at here. */
static float scale_of_given(struct world *o, fp8_role role, float amax, float taken)
{
    struct rig_operand operand;
    struct rig_block word;
    rig_operand_make(&operand,
                     world_bytes(o->layer[0], role == FP8_ROLE_X   ? FP8_BYTES_X
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
    args.call = world_call(o, 0);
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
    world_begin(&o, "history_length = 4, calibrate = true, margin = 2", 0.5f, 3.0f, 5.0f);
    world_forward(&o, 0);
    world_backward(&o, 0);
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
    world_fill(&o.w, 0.5f, 1);
    world_fill(&o.x, 3.0f, 2);
    world_fill(&o.dy, 5.0f, 3);
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
    };
    return RIG_RUN(tests);
}
