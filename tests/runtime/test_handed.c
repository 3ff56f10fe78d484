/*
 * test_handed.c - what a caller hands over or asks for by itself: amaxes, transposed copies, the
 * tensors of layers that multiply no FP8; and what each recipe refuses. Weights that are FP8
 * already are test_import.c's.
 */
#include <math.h>

#include "tests/runtime/rig.h"

enum { M = 37, N = 48, K = 129 };

static const struct rig_spec specs[] = {
    { .out_features = N, .in_features = K, .bias = true },
    { .out_features = N, .in_features = K, .bias = true, .e4m3 = true, .power_of_two = true },
    { .out_features = N, .in_features = K, .weight = FP8_DTYPE_FP32 },
    { .out_features = N, .in_features = K, .recipe = RIG_ROWWISE, .power_of_two = true },
    { .out_features = N, .in_features = K, .recipe = RIG_ROWWISE_HP_WGRAD, .power_of_two = true },
    { .out_features = N, .in_features = K, .recipe = RIG_BLOCK, .power_of_two = true },
    { .out_features = N, .in_features = K, .bf16 = true, .bias = true },
    { .out_features = N, .in_features = K, .bf16 = true },
};
enum { CURRENT, POWERS, MASTER, ROWWISE, HP_WGRAD, BLOCK, BF16, BF16_WITHOUT_BIAS, LAYERS };

static struct rig_tensor source[4]; /* by role */
static struct rig_tensor master;    /* w in fp32, of values that bf16 has not */
static struct rig_scratch workspace;
static struct rig_block word;

static int open_all(void **state)
{
    (void)state;
    static const int64_t rows[] = { 0, M, N, M }, cols[] = { 0, K, K, N };
    rig_layers_open(&rig_shared, specs, LAYERS);
    for (int role = FP8_ROLE_X; role <= FP8_ROLE_DY; role++) {
        rig_tensor_make(&source[role], "source", FP8_DTYPE_BF16, rows[role], cols[role], 3, 1,
                        0xFF);
        for (int64_t i = 0; i < rows[role] * cols[role]; i++)
            rig_set(&source[role], i / cols[role], i % cols[role],
                    (float)rig_normal((uint64_t)role, (uint64_t)i));
        rig_set(&source[role], rows[role] - 1, 0, -6.0f - (float)role); /* the amax */
        rig_tensor_push(&source[role]);
    }
    rig_tensor_make(&master, "master", FP8_DTYPE_FP32, N, K, 1, 3, 0xFF);
    for (int64_t i = 0; i < N * K; i++)
        rig_set(&master, i / K, i % K, (float)rig_normal(9, (uint64_t)i));
    rig_set(&master, 3, 4, -8.0f); /* the amax, as of w in bf16 */
    rig_tensor_push(&master);
    rig_workspace_make(&workspace, &rig_shared, M, 0xFF);
    rig_block_make(&word, 4, 0, 0xFF);
    return 0;
}

static int close_all(void **state)
{
    (void)state;
    for (int role = FP8_ROLE_X; role <= FP8_ROLE_DY; role++)
        rig_tensor_free(&source[role]);
    rig_tensor_free(&master);
    rig_scratch_free(&workspace);
    rig_block_free(&word);
    rig_layers_close(&rig_shared);
    return 0;
}

static size_t both_bytes(int layer, fp8_role role)
{
    static const fp8_bytes sizes[] = { 0, FP8_BYTES_X, FP8_BYTES_WEIGHT, FP8_BYTES_GRAD };
    return rig_bytes(&rig_shared.layer[layer], M, sizes[role]);
}

static const fp8_tensor *source_of(int layer, fp8_role role)
{
    return layer == MASTER && role == FP8_ROLE_W ? &master.t : &source[role].t;
}

static void quantize(int layer, fp8_role role, uint32_t copies, const float *amax,
                     struct rig_operand *operand)
{
    fp8_quantize_args args = FP8_QUANTIZE_ARGS_INIT;
    rig_operand_make(operand, both_bytes(layer, role), 0x7E);
    rig_block_push(&operand->block);
    args.role = role;
    args.copies = copies;
    args.source = source_of(layer, role);
    args.operand = &operand->op;
    args.amax = amax;
    args.call = rig_call(&workspace);
    RIG_OK(fp8_quantize(rig_shared.layer[layer].handle, &args));
    rig_block_pull(&operand->block, "operand");
}

static float pull_word(void)
{
    float value;
    rig_block_pull(&word, "word");
    memcpy(&value, word.image, sizeof value);
    return value;
}

static void push_word(float value)
{
    memcpy(word.image, &value, sizeof value);
    rig_block_push(&word);
}

static fp8_status amax_of(int layer, fp8_role role, uint32_t accumulate)
{
    fp8_amax_args args = FP8_AMAX_ARGS_INIT;
    args.role = role;
    args.accumulate = accumulate;
    args.source = source_of(layer, role);
    args.amax = (float *)(void *)word.device;
    args.call = rig_call(&workspace);
    return fp8_amax(rig_shared.layer[layer].handle, &args);
}

/* ---- amaxes ---- */

static void a_given_amax_is_as_good_as_ones_own(void **state)
{
    (void)state;
    for (int layer = CURRENT; layer <= MASTER; layer++) {
        for (int role = FP8_ROLE_X; role <= FP8_ROLE_DY; role++) {
            struct rig_operand own, given;
            RIG_OK(amax_of(layer, (fp8_role)role, 0));
            assert_true(pull_word() == 6.0f + (float)role);
            quantize(layer, (fp8_role)role, 0, NULL, &own);
            quantize(layer, (fp8_role)role, 0, (const float *)(const void *)word.device, &given);
            assert_memory_equal(own.block.image, given.block.image, own.block.bytes);
            rig_operand_free(&own);
            rig_operand_free(&given);
        }
    }
}

static void amaxes_accumulate(void **state)
{
    (void)state;
    push_word(-1.0f);
    RIG_OK(amax_of(CURRENT, FP8_ROLE_X, 1));
    assert_true(pull_word() == 7.0f);
    RIG_OK(amax_of(CURRENT, FP8_ROLE_DY, 1));
    RIG_OK(amax_of(CURRENT, FP8_ROLE_W, 1));
    assert_true(pull_word() == 9.0f);
    RIG_OK(amax_of(CURRENT, FP8_ROLE_W, 0));
    assert_true(pull_word() == 8.0f);
    source[FP8_ROLE_X].t.rows = 0;
    RIG_OK(amax_of(CURRENT, FP8_ROLE_X, 1));
    assert_true(pull_word() == 8.0f);
    RIG_OK(amax_of(CURRENT, FP8_ROLE_X, 0));
    assert_true(pull_word() == 0.0f);
    source[FP8_ROLE_X].t.rows = M;
}

/* An amax of several ranks, larger than the tensor's own: of weights in bf16 and of fp32 masters,
 * whose bytes are casts of the fp32 values. */
static void weights_take_the_amax_of_an_optimizer(void **state)
{
    (void)state;
    static const int weights[] = { CURRENT, MASTER };
    for (int n = 0; n < 2; n++) {
        struct rig_operand weight;
        push_word(64.0f);
        fp8_weight_args args = FP8_WEIGHT_ARGS_INIT;
        rig_operand_make(&weight, both_bytes(weights[n], FP8_ROLE_W), 0x7E);
        rig_block_push(&weight.block);
        args.w = source_of(weights[n], FP8_ROLE_W);
        args.version = 1;
        args.weight = &weight.op;
        args.amax = (const float *)(const void *)word.device;
        args.call = rig_call(&workspace);
        RIG_OK(fp8_weight_update(rig_shared.layer[weights[n]].handle, &args));
        rig_block_pull(&weight.block, "weight");
        const float *scales = (const float *)(const void *)weight.block.image;
        assert_true(scales[0] == 7.0f && scales[8] == 64.0f);
        assert_int_equal(weight.op.version, 1);
        struct rig_quantized want;
        const float known = 7.0f;
        rig_quantize_role(&want, &rig_shared.layer[weights[n]], FP8_ROLE_W,
                          n == 0 ? &source[FP8_ROLE_W] : &master, &known);
        assert_memory_equal(weight.block.image + 256, want.row.codes, K);
        rig_quantized_free(&want);
        args.amax = (const float *)(const void *)(word.device + 2);
        RIG_REFUSED(FP8_ERR_ALIGNMENT,
                    fp8_weight_update(rig_shared.layer[weights[n]].handle, &args));
        rig_operand_free(&weight);
    }
}

static void only_tensor_scales_take_an_amax(void **state)
{
    (void)state;
    for (int layer = ROWWISE; layer < LAYERS; layer++) {
        RIG_REFUSED(FP8_ERR_ARGUMENT, amax_of(layer, FP8_ROLE_X, 0));
        rig_expect_sentence("no scale of the whole tensor");
    }
}

/* ---- transposed copies ---- */

static fp8_status transpose(int layer, fp8_operand *operand)
{
    fp8_transpose_args args = FP8_TRANSPOSE_ARGS_INIT;
    args.operand = operand;
    args.call.stream = rig.stream;
    return fp8_transpose(rig_shared.layer[layer].handle, &args);
}

static void a_transposed_copy_needs_no_tensor(void **state)
{
    (void)state;
    for (int layer = 0; layer < LAYERS; layer++) {
        for (int role = FP8_ROLE_X; role <= FP8_ROLE_DY; role++) {
            bool possible = layer <= MASTER || (layer == BLOCK && role == FP8_ROLE_W);
            struct rig_operand both, made;
            if (layer >= BF16)
                continue;
            quantize(layer, (fp8_role)role, 0, NULL, &both);
            quantize(layer, (fp8_role)role, FP8_COPY_ROW, NULL, &made);
            if (possible) {
                RIG_OK(transpose(layer, &made.op));
                rig_block_pull(&made.block, "operand");
                assert_int_equal(made.op.copies, FP8_COPY_BOTH);
                assert_memory_equal(made.block.image, both.block.image, both.block.bytes);
                made.op.copies = FP8_COPY_ROW;
                made.op.bytes -= 1;
                RIG_REFUSED(FP8_ERR_OPERAND, transpose(layer, &made.op));
            } else {
                RIG_REFUSED(FP8_ERR_UNSUPPORTED, transpose(layer, &made.op));
                rig_expect_sentence("scales of their own");
            }
            rig_operand_free(&both);
            rig_operand_free(&made);
        }
    }
}

/* ---- tensors ---- */

static void sizes_are_those_of_the_copies_there_are(void **state)
{
    (void)state;
    const struct rig_layer *hp = &rig_shared.layer[HP_WGRAD], *bf16 = &rig_shared.layer[BF16];
    assert_int_equal(rig_bytes(hp, M, FP8_BYTES_SAVED), 0);
    assert_int_equal(rig_bytes(hp, M, FP8_BYTES_GRAD_TRANSPOSED), 0);
    assert_int_equal(rig_bytes(hp, M, FP8_BYTES_X), 256 + 256 + 48 * 256);
    assert_int_equal(rig_bytes(hp, M, FP8_BYTES_WEIGHT), 256 + 256 + 48 * 256 + 144 * 128);
    for (int which = FP8_BYTES_X; which <= FP8_BYTES_GRAD_TRANSPOSED; which++)
        assert_int_equal(rig_bytes(bf16, M, (fp8_bytes)which), 0);
    /* scales: 2 blocks of 40 rows, then one block of 136 */
    assert_int_equal(rig_bytes(&rig_shared.layer[BLOCK], M, FP8_BYTES_X),
                     256 + 512 + 48 * 256 + 768 + 144 * 128);
    assert_int_equal(rig_bytes(&rig_shared.layer[BLOCK], M, FP8_BYTES_WEIGHT),
                     256 + 256 + 48 * 256 + 256 + 144 * 128);
}

static void layers_in_bf16_quantise_nothing(void **state)
{
    (void)state;
    const fp8_layer *layer = rig_shared.layer[BF16].handle;
    fp8_operand none = FP8_OPERAND_INIT;
    uint32_t *found_inf = (uint32_t *)(void *)word.device;
    fp8_quantize_args quantize_args = FP8_QUANTIZE_ARGS_INIT;
    quantize_args.role = FP8_ROLE_X;
    quantize_args.source = &source[FP8_ROLE_X].t;
    quantize_args.operand = &none;
    quantize_args.call = rig_call(&workspace);
    RIG_REFUSED(FP8_ERR_UNSUPPORTED, fp8_quantize(layer, &quantize_args));
    fp8_weight_args weight = FP8_WEIGHT_ARGS_INIT;
    weight.w = &source[FP8_ROLE_W].t;
    weight.version = 3;
    weight.weight = &none;
    weight.call = rig_call(&workspace);
    RIG_OK(fp8_weight_update(layer, &weight)); /* the version alone */
    assert_int_equal(none.version, 3);
    assert_int_equal(none.copies, 0);
    weight.version = 4;
    weight.found_inf = found_inf;
    RIG_REFUSED(FP8_ERR_ARGUMENT, fp8_weight_update(layer, &weight));
    rig_expect_sentence("quantises nothing");
    fp8_gemm_args gemm = FP8_GEMM_ARGS_INIT;
    gemm.a = gemm.b = &none;
    gemm.call = rig_call(&workspace);
    RIG_REFUSED(FP8_ERR_UNSUPPORTED, fp8_gemm(layer, &gemm));
    fp8_dequantize_args dequantize = FP8_DEQUANTIZE_ARGS_INIT;
    fp8_import_args import = FP8_IMPORT_ARGS_INIT;
    struct rig_operand other; /* even of another layer's operand */
    quantize(CURRENT, FP8_ROLE_W, FP8_COPY_ROW, NULL, &other);
    dequantize.operand = import.weight = &other.op;
    RIG_REFUSED(FP8_ERR_UNSUPPORTED, transpose(BF16, &other.op));
    rig_expect_sentence("computes in bf16");
    RIG_REFUSED(FP8_ERR_UNSUPPORTED, fp8_dequantize(layer, &dequantize));
    rig_expect_sentence("computes in bf16");
    RIG_REFUSED(FP8_ERR_UNSUPPORTED, fp8_import(layer, &import));
    rig_expect_sentence("computes in bf16");
    rig_operand_free(&other);
}

/* In bf16 the sums of dbias are all that reads dy beside the products. */
static void found_inf_of_dy_is_refused_where_nothing_looks(void **state)
{
    (void)state;
    uint32_t *found_inf = (uint32_t *)(void *)word.device;
    fp8_operand grad = FP8_OPERAND_INIT;
    fp8_quantize_dy_args args = FP8_QUANTIZE_DY_ARGS_INIT;
    args.dy = &source[FP8_ROLE_DY].t;
    args.grad = &grad;
    args.found_inf = found_inf;
    args.call = rig_call(&workspace);
    fp8_backward_args backward = FP8_BACKWARD_ARGS_INIT;
    backward.dy = &source[FP8_ROLE_DY].t;
    backward.found_inf = found_inf;
    backward.call = rig_call(&workspace);
    const fp8_layer *layer = rig_shared.layer[BF16_WITHOUT_BIAS].handle;
    RIG_REFUSED(FP8_ERR_ARGUMENT, fp8_layer_quantize_dy(layer, &args));
    rig_expect_sentence("quantize_dy: found_inf is given");
    RIG_REFUSED(FP8_ERR_ARGUMENT, fp8_layer_backward(layer, &backward));
    rig_expect_sentence("backward: found_inf is given");
    layer = rig_shared.layer[BF16].handle;
    for (int one = 0; one < 2; one++) {
        rig_set(&source[FP8_ROLE_DY], 1, 2, INFINITY);
        rig_tensor_push(&source[FP8_ROLE_DY]);
        memset(word.image, 0, 4);
        rig_block_push(&word);
        RIG_OK(one ? fp8_layer_backward(layer, &backward) : fp8_layer_quantize_dy(layer, &args));
        rig_block_pull(&word, "found_inf");
        assert_int_equal(word.image[0], 1);
        rig_set(&source[FP8_ROLE_DY], 1, 2, 0.5f);
        rig_tensor_push(&source[FP8_ROLE_DY]);
    }
    args.found_inf = backward.found_inf = NULL;
    layer = rig_shared.layer[BF16_WITHOUT_BIAS].handle;
    RIG_OK(fp8_layer_quantize_dy(layer, &args));
    RIG_OK(fp8_layer_backward(layer, &backward));
}

static void missing_tensors_are_named(void **state)
{
    (void)state;
    struct rig_tensor out;
    fp8_operand none = FP8_OPERAND_INIT;
    rig_tensor_make(&out, "dw", FP8_DTYPE_FP32, N, K, 0, 0, 0xFF);
    fp8_wgrad_args wgrad = FP8_WGRAD_ARGS_INIT;
    wgrad.dw = &out.t;
    wgrad.call = rig_call(&workspace);
    for (int layer = HP_WGRAD; layer <= BF16; layer += BF16 - HP_WGRAD) {
        wgrad.x = NULL, wgrad.dy = &source[FP8_ROLE_DY].t;
        RIG_REFUSED(FP8_ERR_ARGUMENT, fp8_layer_wgrad(rig_shared.layer[layer].handle, &wgrad));
        wgrad.x = &source[FP8_ROLE_X].t, wgrad.dy = NULL;
        RIG_REFUSED(FP8_ERR_ARGUMENT, fp8_layer_wgrad(rig_shared.layer[layer].handle, &wgrad));
        rig_expect_sentence("the tensor dy is NULL");
        wgrad.dy = &source[FP8_ROLE_DY].t;
        RIG_OK(fp8_layer_wgrad(rig_shared.layer[layer].handle, &wgrad)); /* operands are optional */
        wgrad.saved = &none;
        RIG_REFUSED(FP8_ERR_OPERAND, fp8_layer_wgrad(rig_shared.layer[layer].handle, &wgrad));
        wgrad.saved = NULL;
        source[FP8_ROLE_DY].t.rows--;
        RIG_REFUSED(FP8_ERR_SHAPE, fp8_layer_wgrad(rig_shared.layer[layer].handle, &wgrad));
        source[FP8_ROLE_DY].t.rows++;
    }
    rig_tensor_free(&out);
    rig_tensor_make(&out, "dx", FP8_DTYPE_BF16, M, K, 0, 0, 0xFF);
    fp8_dgrad_args dgrad = FP8_DGRAD_ARGS_INIT;
    dgrad.dx = &out.t;
    dgrad.dy = &source[FP8_ROLE_DY].t;
    dgrad.call = rig_call(&workspace);
    RIG_REFUSED(FP8_ERR_ARGUMENT, fp8_layer_dgrad(rig_shared.layer[BF16].handle, &dgrad));
    rig_expect_sentence("the tensor w is NULL");
    dgrad.w = &source[FP8_ROLE_W].t;
    RIG_OK(fp8_layer_dgrad(rig_shared.layer[BF16].handle, &dgrad));
    RIG_REFUSED(FP8_ERR_ARGUMENT, fp8_layer_dgrad(rig_shared.layer[CURRENT].handle, &dgrad));
    rig_tensor_free(&out);
}

/* A state belongs to "delayed" alone. */
static void other_recipes_keep_no_state(void **state)
{
    (void)state;
    struct rig_operand operand;
    rig_operand_make(&operand, both_bytes(CURRENT, FP8_ROLE_X), 0x7E);
    fp8_quantize_args args = FP8_QUANTIZE_ARGS_INIT;
    args.role = FP8_ROLE_X;
    args.source = &source[FP8_ROLE_X].t;
    args.operand = &operand.op;
    args.call = rig_call(&workspace);
    args.call.state = (const fp8_state *)(const void *)&args; /* not looked into */
    RIG_REFUSED(FP8_ERR_ARGUMENT, fp8_quantize(rig_shared.layer[CURRENT].handle, &args));
    rig_expect_sentence("keeps none");
    rig_operand_free(&operand);
}

/* The operands of one recipe are not those of another. */
static void operands_of_another_recipe_are_refused(void **state)
{
    (void)state;
    struct rig_operand operand;
    struct rig_tensor target;
    rig_tensor_make(&target, "target", FP8_DTYPE_FP32, M, K, 0, 0, 0xFF);
    quantize(BLOCK, FP8_ROLE_X, FP8_COPY_ROW, NULL, &operand);
    fp8_dequantize_args args = FP8_DEQUANTIZE_ARGS_INIT;
    args.operand = &operand.op;
    args.target = &target.t;
    args.call = rig_call(&workspace);
    RIG_OK(fp8_dequantize(rig_shared.layer[BLOCK].handle, &args));
    RIG_REFUSED(FP8_ERR_OPERAND, fp8_dequantize(rig_shared.layer[ROWWISE].handle, &args));
    rig_expect_sentence("is scaled by block");
    rig_operand_free(&operand);
    quantize(HP_WGRAD, FP8_ROLE_X, FP8_COPY_ROW, NULL, &operand);
    operand.op.copies = FP8_COPY_TRANSPOSED; /* which this recipe does not make of x */
    RIG_REFUSED(FP8_ERR_OPERAND, fp8_dequantize(rig_shared.layer[HP_WGRAD].handle, &args));
    rig_expect_sentence("makes no copy of x");
    rig_tensor_free(&target);
    rig_operand_free(&operand);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_given_amax_is_as_good_as_ones_own),
        cmocka_unit_test(amaxes_accumulate),
        cmocka_unit_test(weights_take_the_amax_of_an_optimizer),
        cmocka_unit_test(only_tensor_scales_take_an_amax),
        cmocka_unit_test(a_transposed_copy_needs_no_tensor),
        cmocka_unit_test(sizes_are_those_of_the_copies_there_are),
        cmocka_unit_test(layers_in_bf16_quantise_nothing),
        cmocka_unit_test(found_inf_of_dy_is_refused_where_nothing_looks),
        cmocka_unit_test(missing_tensors_are_named),
        cmocka_unit_test(other_recipes_keep_no_state),
        cmocka_unit_test(operands_of_another_recipe_are_refused),
    };
    struct CMUnitTest all[sizeof tests / sizeof tests[0]];
    memcpy(all, tests, sizeof tests);
    all[0].setup_func = open_all;
    all[sizeof tests / sizeof tests[0] - 1].teardown_func = close_all;
    return rig_main("tests", all, sizeof tests / sizeof tests[0]);
}
