/*
 * test_primitives.c - quantize, dequantize, gemm and the dispatch query: parts of passes by
 * themselves.
 */
#include <math.h>

#include "runtime/fp8_format.h"
#include "tests/runtime/rig.h"

enum { HYBRID, E4M3, LAYERS };

static int open_layers(void **state)
{
    (void)state;
    static const struct rig_spec specs[LAYERS] = {
        [HYBRID] = { .out_features = 100, .in_features = 75, .max_tokens = 300, .bias = true },
        [E4M3] = { .out_features = 33,
                   .in_features = 130,
                   .max_tokens = 300,
                   .e4m3 = true,
                   .power_of_two = true,
                   .weight = FP8_DTYPE_FP32 },
    };
    rig_layers_open(&rig_shared, specs, LAYERS);
    return 0;
}

static const struct {
    fp8_role role;
    int tensor;
    fp8_bytes bytes[4]; /* by FP8_COPY_* */
} roles[] = {
    { FP8_ROLE_X, RIG_X, { 0, FP8_BYTES_X, FP8_BYTES_SAVED, FP8_BYTES_X } },
    { FP8_ROLE_W, RIG_W, { 0, FP8_BYTES_WEIGHT_ROW, FP8_BYTES_WEIGHT, FP8_BYTES_WEIGHT } },
    { FP8_ROLE_DY, RIG_DY, { 0, FP8_BYTES_GRAD_ROW, FP8_BYTES_GRAD_TRANSPOSED, FP8_BYTES_GRAD } },
};

static void check_dequantize(struct rig_case *c, struct rig_operand *operand,
                             const struct rig_quantized *q, int64_t gap)
{
    struct rig_tensor target;
    rig_tensor_make(&target, "target", FP8_DTYPE_FP32, q->rows, q->cols, gap, gap, 0xFF);
    fp8_dequantize_args args = FP8_DEQUANTIZE_ARGS_INIT;
    args.operand = &operand->op;
    args.target = &target.t;
    args.call = rig_case_call(c);
    RIG_OK(fp8_dequantize(c->layer->handle, &args));
    rig_tensor_pull(&target);
    for (int64_t i = 0; i < q->rows; i++) {
        for (int64_t j = 0; j < q->cols; j++) {
            /* what has a row copy is dequantised from it */
            bool row = operand->op.copies & FP8_COPY_ROW;
            const struct rig_copy *copy = row ? &q->row : &q->transposed;
            int64_t line = row ? i : j, k = row ? j : i;
            uint8_t code = copy->codes[line * copy->cols + k];
            float want = (q->e4m3 ? fp8_decode_e4m3(code) : fp8_decode_e5m2(code)) *
                         rig_scale_inverse(copy, line, k);
            float got = rig_get(&target, i, j);
            if (isnan(want) ? !isnan(got) : fp8_bits_of_float(got) != fp8_bits_of_float(want))
                fail_msg("dequantize [%lld,%lld]: %a, not %a", (long long)i, (long long)j,
                         (double)got, (double)want);
        }
    }
    target.t.dtype = FP8_DTYPE_BF16;
    RIG_REFUSED(FP8_ERR_DTYPE, fp8_dequantize(c->layer->handle, &args));
    target.t.dtype = FP8_DTYPE_FP32;
    target.t.cols++;
    RIG_REFUSED(FP8_ERR_SHAPE, fp8_dequantize(c->layer->handle, &args));
    target.t.cols--;
    rig_tensor_free(&target);
}

static void quantize_and_dequantize_every_role(void **state)
{
    (void)state;
    for (int which = 0; which < LAYERS; which++) {
        for (int r = 0; r < 3; r++) {
            for (uint32_t copies = FP8_COPY_ROW; copies <= FP8_COPY_BOTH; copies++) {
                struct rig_case c;
                rig_case_init(&c, &rig_shared.layer[which], 131, (uint64_t)(r * 10) + copies);
                rig_case_make(&c);
                struct rig_tensor *source = &c.tensor[roles[r].tensor];
                bool bad = copies == FP8_COPY_BOTH;
                if (bad)
                    rig_set(source, 30, 30, r % 2 ? NAN : -INFINITY);
                rig_case_push(&c);
                struct rig_operand operand;
                rig_operand_make(&operand, rig_bytes(c.layer, 131, roles[r].bytes[copies]), 0x7E);
                fp8_quantize_args args = FP8_QUANTIZE_ARGS_INIT;
                args.role = roles[r].role;
                args.copies = copies == FP8_COPY_BOTH ? 0 : copies;
                args.source = &source->t;
                args.operand = &operand.op;
                args.found_inf = c.tensor[RIG_FOUND_INF].t.data;
                args.call = rig_case_call(&c);
                RIG_OK(fp8_quantize(c.layer->handle, &args));
                assert_int_equal(operand.op.copies, copies);
                assert_int_equal(operand.op.role, roles[r].role);
                struct rig_quantized q;
                bool e4m3 = roles[r].role != FP8_ROLE_DY || c.layer->spec.e4m3;
                rig_quantize(&q, source, e4m3, c.layer->spec.power_of_two);
                rig_check_operand("operand", &operand, &q);
                rig_tensor_pull(&c.tensor[RIG_FOUND_INF]);
                assert_int_equal(rig_bits(&c.tensor[RIG_FOUND_INF], 0, 0), bad);
                check_dequantize(&c, &operand, &q, (int64_t)copies - 1);
                rig_quantized_free(&q);
                rig_operand_free(&operand);
                rig_case_free(&c);
            }
        }
    }
}

/* Makes an operand of the case's x. copies: FP8_COPY_*, 0 = all that the recipe has. */
static void quantize_x(struct rig_case *c, uint32_t copies, struct rig_operand *x)
{
    fp8_quantize_args args = FP8_QUANTIZE_ARGS_INIT;
    rig_operand_make(x, rig_bytes(c->layer, c->tokens, FP8_BYTES_X), 0xFF);
    args.role = FP8_ROLE_X;
    args.copies = copies;
    args.source = &c->tensor[RIG_X].t;
    args.operand = &x->op;
    args.call = rig_case_call(c);
    RIG_OK(fp8_quantize(c->layer->handle, &args));
}

/* The gemm of a pass alone gives the bits of the pass. */
static void gemm_is_the_gemm_of_the_pass(void **state)
{
    (void)state;
    for (int which = 0; which < LAYERS; which++) {
        for (int accumulate = 0; accumulate < 2; accumulate++) {
            struct rig_case c;
            struct rig_operand x;
            rig_case_init(&c, &rig_shared.layer[which], 140, 50 + (uint64_t)which);
            c.accumulate = accumulate;
            rig_case_complete(&c);
            quantize_x(&c, 0, &x);

            fp8_gemm_args args = FP8_GEMM_ARGS_INIT;
            args.call = rig_case_call(&c);
            args.pass = FP8_PASS_FPROP;
            args.a = &x.op;
            args.b = &c.weight.op;
            args.bias = c.layer->info.has_bias ? &c.tensor[RIG_BIAS].t : NULL;
            args.out = &c.tensor[RIG_Y].t;
            RIG_OK(fp8_gemm(c.layer->handle, &args));
            rig_tensor_unchanged(&c.tensor[RIG_Y]);
            args.bias = NULL;
            args.pass = FP8_PASS_DGRAD;
            args.a = &c.grad.op;
            args.out = &c.tensor[RIG_DX].t;
            RIG_OK(fp8_gemm(c.layer->handle, &args));
            rig_tensor_unchanged(&c.tensor[RIG_DX]);

            unsigned char *after = malloc(c.tensor[RIG_DW].block.bytes);
            assert_non_null(after);
            memcpy(after, c.tensor[RIG_DW].block.image, c.tensor[RIG_DW].block.bytes);
            if (accumulate)
                memcpy(c.tensor[RIG_DW].block.image, c.before[RIG_DW],
                       c.tensor[RIG_DW].block.bytes);
            rig_tensor_push(&c.tensor[RIG_DW]);
            args.pass = FP8_PASS_WGRAD;
            args.accumulate = accumulate;
            args.b = &c.saved.op;
            args.out = &c.tensor[RIG_DW].t;
            RIG_OK(fp8_gemm(c.layer->handle, &args));
            rig_tensor_pull(&c.tensor[RIG_DW]);
            assert_memory_equal(after, c.tensor[RIG_DW].block.image, c.tensor[RIG_DW].block.bytes);
            free(after);

            args.pass = FP8_PASS_WEIGHT;
            RIG_REFUSED(FP8_ERR_ARGUMENT, fp8_gemm(c.layer->handle, &args));
            args.pass = FP8_PASS_WGRAD;
            args.b = &c.weight.op;
            RIG_REFUSED(FP8_ERR_OPERAND, fp8_gemm(c.layer->handle, &args));
            rig_operand_free(&x);
            rig_case_free(&c);
        }
    }
}

/* A forward that makes its weight's bytes gives the bits of the weight that was made before. */
static void fprop_makes_the_weight(void **state)
{
    (void)state;
    for (int which = 0; which < LAYERS; which++) {
        struct rig_case c;
        struct rig_operand weight;
        struct rig_quantized q;
        rig_case_init(&c, &rig_shared.layer[which], 140, 70 + (uint64_t)which);
        rig_case_complete(&c);
        rig_operand_make(&weight, rig_bytes(c.layer, 0, FP8_BYTES_WEIGHT), 0x7E);
        void *data = weight.op.data;
        weight.op = c.weight.op;
        weight.op.data = data;
        weight.op.version = 0;
        fp8_fprop_args args = FP8_FPROP_ARGS_INIT;
        args.x = &c.tensor[RIG_X].t;
        args.weight = &weight.op;
        args.w = &c.tensor[RIG_W].t;
        args.bias = c.layer->info.has_bias ? &c.tensor[RIG_BIAS].t : NULL;
        args.y = &c.tensor[RIG_Y].t;
        args.call = rig_case_call(&c);
        RIG_OK(fp8_layer_fprop(c.layer->handle, &args));
        rig_tensor_unchanged(&c.tensor[RIG_Y]);
        rig_quantize(&q, &c.tensor[RIG_W], true, c.layer->spec.power_of_two);
        rig_check_operand("weight", &weight, &q);
        weight.op.version = 1;
        RIG_REFUSED(FP8_ERR_ARGUMENT, fp8_layer_fprop(c.layer->handle, &args));
        weight.op.version = 0;
        weight.op.scales = data; /* whoever has set them does not expect others */
        RIG_REFUSED(FP8_ERR_ARGUMENT, fp8_layer_fprop(c.layer->handle, &args));
        rig_expect_sentence("weight->scales");
        rig_quantized_free(&q);
        rig_operand_free(&weight);
        rig_case_free(&c);
    }
}

/* A gemm without the layer's bias is the product alone. */
static void gemm_may_leave_the_bias_out(void **state)
{
    (void)state;
    struct rig_case c;
    rig_case_init(&c, &rig_shared.layer[HYBRID], 70, 60);
    rig_case_make(&c);
    for (int64_t j = 0; j < 100; j++)
        rig_set(&c.tensor[RIG_BIAS], 0, j, 0.0f);
    rig_case_run(&c);
    rig_case_check(&c);
    struct rig_operand x;
    quantize_x(&c, FP8_COPY_ROW, &x);
    fp8_gemm_args args = FP8_GEMM_ARGS_INIT;
    args.call = rig_case_call(&c);
    args.pass = FP8_PASS_FPROP;
    args.a = &x.op;
    args.b = &c.weight.op;
    args.out = &c.tensor[RIG_Y].t;
    RIG_OK(fp8_gemm(c.layer->handle, &args));
    struct rig_quantized qx, qw;
    rig_quantize(&qx, &c.tensor[RIG_X], true, false);
    rig_quantize(&qw, &c.tensor[RIG_W], true, false);
    rig_tensor_pull(&c.tensor[RIG_Y]);
    struct rig_product p = {
        .name = "y", .a = &qx, .b = &qw, .out = &c.tensor[RIG_Y], .fast = true, .centred = true
    };
    rig_check_product(&p);
    rig_quantized_free(&qx);
    rig_quantized_free(&qw);
    rig_operand_free(&x);
    rig_case_free(&c);
}

/* On a GPU: the forced backend if there is one, else either. */
static void check_backend(const fp8_dispatch *dispatch)
{
    bool generated = strcmp(dispatch->backend, "generated") == 0;
    assert_true(generated || strcmp(dispatch->backend, "cublaslt") == 0);
    assert_int_equal(generated, strncmp(dispatch->kernel, "gemm_", 5) == 0);
    if (rig.gemm != NULL && strcmp(rig.gemm, "cublaslt") == 0)
        assert_false(generated);
    if (rig.gemm != NULL && strcmp(rig.gemm, "generated") == 0)
        assert_true(generated);
}

static void dispatch_tells_what_would_run(void **state)
{
    (void)state;
    static const int64_t tokens[] = { 0, 1, 16, 17, 128, 300 };
    for (int which = 0; which < LAYERS; which++) {
        const fp8_layer *layer = rig_shared.layer[which].handle;
        for (int pass = 0; pass < FP8_PASS_COUNT; pass++) {
            for (size_t t = 0; t < sizeof tokens / sizeof tokens[0]; t++) {
                fp8_dispatch dispatch = FP8_DISPATCH_INIT;
                RIG_OK(fp8_layer_dispatch(layer, (fp8_pass)pass, tokens[t], &dispatch));
                bool gemm =
                    pass == FP8_PASS_FPROP || pass == FP8_PASS_WGRAD || pass == FP8_PASS_DGRAD;
                if (!gemm || !rig.cuda)
                    assert_string_equal(dispatch.backend, gemm ? "host" : "quantize");
                else
                    check_backend(&dispatch);
                assert_true(strlen(dispatch.kernel) > 0 && strlen(dispatch.reason) > 0);
                bool e5m2_alone = which == HYBRID && pass == FP8_PASS_QUANTIZE_DY;
                assert_non_null(strstr(dispatch.dtype, e5m2_alone ? "e5m2" : "e4m3"));
                bool hybrid = which == HYBRID && (pass == FP8_PASS_WGRAD || pass == FP8_PASS_DGRAD);
                assert_int_equal(strstr(dispatch.dtype, "e5m2") != NULL && gemm, hybrid);
                const bool runs = tokens[t] > 0 || pass == FP8_PASS_WEIGHT;
                assert_int_equal(dispatch.launches >= 1, runs);
            }
        }
        fp8_dispatch dispatch = FP8_DISPATCH_INIT;
        RIG_REFUSED(FP8_ERR_TOKENS, fp8_layer_dispatch(layer, FP8_PASS_FPROP, 301, &dispatch));
        rig_expect_sentence("301");
        assert_int_not_equal(fp8_layer_dispatch(layer, FP8_PASS_FPROP, -1, &dispatch), FP8_OK);
        RIG_REFUSED(FP8_ERR_ARGUMENT, fp8_layer_dispatch(layer, (fp8_pass)9, 1, &dispatch));
        dispatch.size = 0;
        RIG_REFUSED(FP8_ERR_ARGUMENT, fp8_layer_dispatch(layer, FP8_PASS_FPROP, 1, &dispatch));
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(quantize_and_dequantize_every_role, open_layers),
        cmocka_unit_test(gemm_is_the_gemm_of_the_pass),
        cmocka_unit_test(fprop_makes_the_weight),
        cmocka_unit_test(gemm_may_leave_the_bias_out),
        cmocka_unit_test_teardown(dispatch_tells_what_would_run, rig_shared_close),
    };
    return RIG_RUN(tests);
}
