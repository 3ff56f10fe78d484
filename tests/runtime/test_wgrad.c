/*
 * test_wgrad.c - the weight gradient: empty batches, accumulation over micro-batches, dtypes of
 * main_grad.
 */
#include <math.h>

#include "tests/runtime/rig.h"

enum { FP32_GRAD, BF16_GRAD, EMPTY, EXACT, EXACT_E4M3, EXACT_POW2, LAYERS };

static int open_layers(void **state)
{
    (void)state;
    static const struct rig_spec specs[LAYERS] = {
        [FP32_GRAD] = { .out_features = 200, .in_features = 150, .bias = true },
        [BF16_GRAD] = { .out_features = 200,
                        .in_features = 151,
                        .bias = true,
                        .grad_weight = FP8_DTYPE_BF16 },
        [EMPTY] = { .out_features = 256, .in_features = 512, .bias = true },
        [EXACT] = { .out_features = 128, .in_features = 128, .grad_weight = FP8_DTYPE_BF16 },
        [EXACT_E4M3] = { .out_features = 128,
                         .in_features = 128,
                         .e4m3 = true,
                         .weight = FP8_DTYPE_FP32,
                         .output = FP8_DTYPE_FP32,
                         .grad_input = FP8_DTYPE_FP32 },
        [EXACT_POW2] = { .out_features = 128, .in_features = 128, .power_of_two = true },
    };
    rig_layers_open(&rig_shared, specs, LAYERS);
    return 0;
}

static void expect_all(const struct rig_tensor *tensor, float value, float tolerance)
{
    for (int64_t i = 0; i < tensor->t.rows; i++) {
        for (int64_t j = 0; j < tensor->t.cols; j++) {
            if (!(fabsf(rig_get(tensor, i, j) - value) <= tolerance))
                fail_msg("%s[%lld,%lld] is %.9g, not %g", tensor->name, (long long)i, (long long)j,
                         (double)rig_get(tensor, i, j), (double)value);
        }
    }
}

/* dy = 3, w = 2 I, x = 1: dx = 6 and dw = 384. E5M2 bytes read as E4M3 come out 163 times too
 * small. */
static void known_product_is_exact(void **state)
{
    (void)state;
    for (int which = EXACT; which <= EXACT_POW2; which++) {
        for (int fused = 0; fused < 2; fused++) {
            struct rig_case c;
            rig_case_init(&c, &rig_shared.layer[which], 128, 1);
            c.one_backward = fused;
            rig_case_make(&c);
            rig_set_all(&c.tensor[RIG_DY], 3.0f);
            rig_set_all(&c.tensor[RIG_X], 1.0f);
            rig_set_all(&c.tensor[RIG_W], 0.0f);
            for (int64_t i = 0; i < 128; i++)
                rig_set(&c.tensor[RIG_W], i, i, 2.0f);
            rig_case_run(&c);
            rig_case_check(&c);
            bool fp32 = which == EXACT_E4M3;
            expect_all(&c.tensor[RIG_DX], 6.0f, fp32 ? 1e-5f : 0.0f);
            expect_all(&c.tensor[RIG_DW], 384.0f, which == EXACT ? 0.0f : 1e-3f);
            expect_all(&c.tensor[RIG_Y], 2.0f, fp32 ? 1e-5f : 0.0f);
            rig_case_free(&c);
        }
    }
}

static void an_empty_batch_gives_zero_or_leaves_alone(void **state)
{
    (void)state;
    for (int fused = 0; fused < 2; fused++) {
        for (int accumulate = 0; accumulate < 2; accumulate++) {
            struct rig_case c;
            rig_case_init(&c, &rig_shared.layer[EMPTY], 0, 2);
            c.accumulate = accumulate;
            c.one_backward = fused;
            rig_case_make(&c);
            rig_set_all(&c.tensor[RIG_DW], accumulate ? 3.0f : NAN);
            rig_set_all(&c.tensor[RIG_DBIAS], accumulate ? -0.0f : NAN);
            c.tensor[RIG_X].t.data = NULL;
            c.tensor[RIG_Y].t.data = NULL;
            c.tensor[RIG_DY].t.data = NULL;
            c.tensor[RIG_DX].t.data = NULL;
            rig_case_run(&c);
            rig_case_check(&c);
            expect_all(&c.tensor[RIG_DW], accumulate ? 3.0f : 0.0f, 0.0f);
            expect_all(&c.tensor[RIG_DBIAS], 0.0f, 0.0f);
            rig_case_free(&c);
        }
    }
}

/* The same layer goes on working after an empty batch, and the empty one changes nothing of it. */
static void an_empty_batch_between_others(void **state)
{
    (void)state;
    static const int64_t tokens[] = { 40, 0, 17, 0, 0, 512 };
    for (size_t i = 0; i < sizeof tokens / sizeof tokens[0]; i++)
        rig_case_all(&rig_shared.layer[EMPTY], tokens[i], 10 + i, i % 2 ? 0x7E : 0xFF);
}

/* Three steps of four micro-batches into one main_grad; each addition is checked against
 * float64. */
static void micro_batches_add_up(void **state)
{
    (void)state;
    for (int which = FP32_GRAD; which <= BF16_GRAD; which++) {
        for (int step = 0; step < 3; step++) {
            struct rig_case c;
            rig_case_init(&c, &rig_shared.layer[which], 300, 20 + (uint64_t)step);
            c.accumulate = true;
            c.one_backward = step == 1;
            rig_case_make(&c);
            rig_set_all(&c.tensor[RIG_DW], 1.0f);
            for (int batch = 0; batch < 4; batch++) {
                for (int64_t i = 0; i < 300; i++) { /* other values, other scales */
                    for (int64_t j = 0; j < c.tensor[RIG_X].t.cols; j++)
                        rig_set(&c.tensor[RIG_X], i, j, rig_get(&c.tensor[RIG_X], i, j) * 1.5f);
                }
                rig_case_run(&c);
                rig_case_check(&c);
            }
            rig_case_free(&c);
        }
    }
}

/* 1 + a sum, without a bf16 rounding on the way: dw of one micro-batch is far below the steps of
 * bf16 at the size of main_grad. */
static void fp32_main_grad_keeps_small_gradients(void **state)
{
    (void)state;
    struct rig_case c;
    rig_case_init(&c, &rig_shared.layer[FP32_GRAD], 64, 30);
    c.accumulate = true;
    rig_case_make(&c);
    rig_set_all(&c.tensor[RIG_DW], 1.0f);
    rig_set_all(&c.tensor[RIG_X], 1.0f);
    rig_set_all(&c.tensor[RIG_DY], 0x1p-18f);
    for (int batch = 0; batch < 4; batch++) {
        rig_case_run(&c);
        rig_case_check(&c);
    }
    expect_all(&c.tensor[RIG_DW], 1.0f + 4 * 64 * 0x1p-18f, 1e-6f);
    rig_case_free(&c);
}

static void missing_or_wrong_main_grad_is_refused(void **state)
{
    (void)state;
    struct rig_case c;
    rig_case_init(&c, &rig_shared.layer[FP32_GRAD], 16, 40);
    rig_case_complete(&c);
    fp8_wgrad_args args = FP8_WGRAD_ARGS_INIT;
    args.saved = &c.saved.op;
    args.grad = &c.grad.op;
    args.call = rig_case_call(&c);
    RIG_REFUSED(FP8_ERR_ARGUMENT, fp8_layer_wgrad(c.layer->handle, &args));
    rig_expect_sentence("dw");
    fp8_tensor wrong = c.tensor[RIG_DW].t;
    args.dw = &wrong;
    wrong.data = NULL;
    RIG_REFUSED(FP8_ERR_ARGUMENT, fp8_layer_wgrad(c.layer->handle, &args));
    rig_expect_sentence("dw");
    wrong = c.tensor[RIG_DW].t;
    wrong.dtype = FP8_DTYPE_BF16;
    RIG_REFUSED(FP8_ERR_DTYPE, fp8_layer_wgrad(c.layer->handle, &args));
    rig_expect_sentence("fp32");
    wrong = c.tensor[RIG_DW].t;
    wrong.rows = c.tensor[RIG_DW].t.cols;
    wrong.cols = c.tensor[RIG_DW].t.rows;
    wrong.ld = wrong.cols;
    RIG_REFUSED(FP8_ERR_SHAPE, fp8_layer_wgrad(c.layer->handle, &args));
    rig_expect_sentence("200");
    rig_tensor_unchanged(&c.tensor[RIG_DW]);
    rig_case_free(&c);
}

static void dw_is_written_where_it_held_nan(void **state)
{
    (void)state;
    struct rig_case c;
    rig_case_init(&c, &rig_shared.layer[BF16_GRAD], 100, 50);
    rig_case_make(&c);
    rig_set_all(&c.tensor[RIG_DW], NAN);
    rig_set_all(&c.tensor[RIG_DBIAS], NAN);
    rig_case_run(&c);
    rig_case_check(&c);
    rig_case_free(&c);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(known_product_is_exact, open_layers),
        cmocka_unit_test(an_empty_batch_gives_zero_or_leaves_alone),
        cmocka_unit_test(an_empty_batch_between_others),
        cmocka_unit_test(micro_batches_add_up),
        cmocka_unit_test(fp32_main_grad_keeps_small_gradients),
        cmocka_unit_test(missing_or_wrong_main_grad_is_refused),
        cmocka_unit_test_teardown(dw_is_written_where_it_held_nan, rig_shared_close),
    };
    return RIG_RUN(tests);
}
