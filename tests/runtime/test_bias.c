/*
 * test_bias.c - bias and dbias: dtypes, odd N, the end of an allocation, long columns.
 */
#include <math.h>

#include "tests/runtime/rig.h"

enum { BF16, FP32, E4M3, POW2, NONE, WIDE, LAYERS };

static int open_layers(void **state)
{
    (void)state;
    static const struct rig_spec specs[LAYERS] = {
        [BF16] = { .out_features = 129, .in_features = 70, .max_tokens = 1000, .bias = true },
        [FP32] = { .out_features = 129,
                   .in_features = 70,
                   .max_tokens = 1000,
                   .bias = true,
                   .output = FP8_DTYPE_FP32 },
        [E4M3] = { .out_features = 129,
                   .in_features = 33,
                   .max_tokens = 1000,
                   .bias = true,
                   .e4m3 = true },
        [POW2] = { .out_features = 129,
                   .in_features = 16,
                   .max_tokens = 1000,
                   .bias = true,
                   .power_of_two = true },
        [NONE] = { .out_features = 129, .in_features = 70 },
        [WIDE] = { .out_features = 2556, .in_features = 16, .max_tokens = 5000, .bias = true },
    };
    rig_layers_open(&rig_shared, specs, LAYERS);
    return 0;
}

/* The guards lie right behind bias and dbias. */
static void bias_of_odd_length(void **state)
{
    (void)state;
    static const int64_t tokens[] = { 1, 16, 127, 1000 };
    for (int which = 0; which < NONE; which++) {
        for (int t = 0; t < 4; t++) {
            struct rig_case c;
            rig_case_init(&c, &rig_shared.layer[which], tokens[t], (uint64_t)(which * 10 + t));
            c.offset[RIG_BIAS] = t;
            c.offset[RIG_DBIAS] = t;
            c.accumulate = t % 2 == 1;
            rig_case_complete(&c);
            rig_case_free(&c);
        }
    }
}

static void dbias_of_long_and_wide_gradients(void **state)
{
    (void)state;
    int64_t tokens = rig_cut("M", 5000, 700);
    for (int accumulate = 0; accumulate < 2; accumulate++) {
        struct rig_case c;
        rig_case_init(&c, &rig_shared.layer[WIDE], tokens, 50);
        c.accumulate = accumulate;
        c.centred = false;
        rig_case_complete(&c);
        rig_case_free(&c);
    }
}

/* dbias is of dy as given: a column far below the FP8 range of the tensor still has its sum. */
static void dbias_is_taken_before_quantisation(void **state)
{
    (void)state;
    struct rig_case c;
    rig_case_init(&c, &rig_shared.layer[E4M3], 200, 60);
    rig_case_make(&c);
    for (int64_t i = 0; i < 200; i++)
        rig_set(&c.tensor[RIG_DY], i, 128, 1e-9f);
    rig_case_run(&c);
    rig_case_check(&c);
    assert_true(fabsf(rig_get(&c.tensor[RIG_DBIAS], 0, 128) / (200 * 1e-9f) - 1) < 0.01f);
    for (int64_t j = 0; j < 33; j++) /* while its part of dw is lost in this recipe */
        assert_true(rig_get(&c.tensor[RIG_DW], 128, j) == 0.0f);
    rig_case_free(&c);
}

static fp8_status fprop_with(struct rig_case *c, const fp8_tensor *bias)
{
    fp8_fprop_args args = FP8_FPROP_ARGS_INIT;
    args.x = &c->tensor[RIG_X].t;
    args.weight = &c->weight.op;
    args.bias = bias;
    args.y = &c->tensor[RIG_Y].t;
    args.call = rig_case_call(c);
    return fp8_layer_fprop(c->layer->handle, &args);
}

static void wrong_bias_is_refused(void **state)
{
    (void)state;
    struct rig_case c;
    rig_case_init(&c, &rig_shared.layer[BF16], 40, 70);
    rig_case_make(&c);
    rig_case_push(&c);
    rig_case_weight(&c);
    fp8_tensor bias = c.tensor[RIG_BIAS].t;
    RIG_REFUSED(FP8_ERR_ARGUMENT, fprop_with(&c, NULL));
    rig_expect_sentence("bias");
    bias.dtype = FP8_DTYPE_FP32;
    RIG_REFUSED(FP8_ERR_DTYPE, fprop_with(&c, &bias));
    rig_expect_sentence("bf16");
    bias = c.tensor[RIG_BIAS].t;
    bias.cols = 128;
    RIG_REFUSED(FP8_ERR_SHAPE, fprop_with(&c, &bias));
    rig_expect_sentence("128");
    rig_tensor_unchanged(&c.tensor[RIG_Y]);
    rig_case_free(&c);

    rig_case_init(&c, &rig_shared.layer[NONE], 40, 71);
    rig_case_make(&c);
    rig_case_push(&c);
    rig_case_weight(&c);
    RIG_REFUSED(FP8_ERR_ARGUMENT, fprop_with(&c, &c.tensor[RIG_BIAS].t));
    rig_expect_sentence("bias");
    fp8_quantize_dy_args args = FP8_QUANTIZE_DY_ARGS_INIT;
    args.dy = &c.tensor[RIG_DY].t;
    args.grad = &c.grad.op;
    args.dbias = &c.tensor[RIG_DBIAS].t;
    args.call = rig_case_call(&c);
    RIG_REFUSED(FP8_ERR_ARGUMENT, fp8_layer_quantize_dy(c.layer->handle, &args));
    rig_expect_sentence("dbias");
    rig_case_free(&c);
}

/* A layer with a bias whose dbias nobody wants. */
static void dbias_may_be_left_out(void **state)
{
    (void)state;
    struct rig_case c;
    rig_case_init(&c, &rig_shared.layer[BF16], 130, 80);
    rig_case_make(&c);
    rig_case_push(&c);
    rig_case_weight(&c);
    rig_case_fprop(&c);
    fp8_quantize_dy_args args = FP8_QUANTIZE_DY_ARGS_INIT;
    args.dy = &c.tensor[RIG_DY].t;
    args.saved = &c.saved.op;
    args.grad = &c.grad.op;
    args.call = rig_case_call(&c);
    RIG_OK(fp8_layer_quantize_dy(c.layer->handle, &args));
    struct rig_quantized dy;
    rig_quantize(&dy, &c.tensor[RIG_DY], false, false);
    rig_check_operand("grad", &c.grad, &dy);
    rig_tensor_unchanged(&c.tensor[RIG_DBIAS]);
    rig_quantized_free(&dy);
    rig_case_free(&c);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(bias_of_odd_length, open_layers),
        cmocka_unit_test(dbias_of_long_and_wide_gradients),
        cmocka_unit_test(dbias_is_taken_before_quantisation),
        cmocka_unit_test(wrong_bias_is_refused),
        cmocka_unit_test_teardown(dbias_may_be_left_out, rig_shared_close),
    };
    return RIG_RUN(tests);
}
