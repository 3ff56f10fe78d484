/*
 * test_values.c - values that break scaling: zeros, the smallest and largest numbers, NaN and inf,
 * ties.
 *
 * Most of it is in rig_case_check: FP8 bytes, scales and found_inf bit for bit, bad values exactly
 * where the reference has them.
 */
#include <float.h>
#include <math.h>

#include "runtime/fp8_format.h"
#include "runtime/fp8_state.h"
#include "tests/runtime/rig.h"

enum { PLAIN, E4M3, FP32, POW2, DELAYED, ROW, HP, BLOCK, BF16, LAYERS };

static int open_layers(void **state)
{
    (void)state;
    static const struct rig_spec specs[LAYERS] = {
        [PLAIN] = { .out_features = 80, .in_features = 72, .bias = true },
        [E4M3] = { .out_features = 37,
                   .in_features = 43,
                   .e4m3 = true,
                   .grad_weight = FP8_DTYPE_BF16 },
        [FP32] = { .out_features = 48,
                   .in_features = 67,
                   .weight = FP8_DTYPE_FP32,
                   .output = FP8_DTYPE_FP32,
                   .grad_input = FP8_DTYPE_FP32 },
        [POW2] = { .out_features = 64, .in_features = 50, .power_of_two = true },
        [DELAYED] = { .recipe = RIG_DELAYED,
                      .out_features = 40,
                      .in_features = 51,
                      .weight = FP8_DTYPE_FP32 },
        [ROW] = { .recipe = RIG_ROWWISE,
                  .out_features = 80,
                  .in_features = 67,
                  .power_of_two = true,
                  .bias = true },
        [HP] = { .recipe = RIG_ROWWISE_HP_WGRAD, .out_features = 72, .in_features = 70 },
        [BLOCK] = { .recipe = RIG_BLOCK, .out_features = 136, .in_features = 129, .bias = true },
        [BF16] = { .bf16 = true, .out_features = 48, .in_features = 35 },
    };
    rig_layers_open(&rig_shared, specs, LAYERS);
    return 0;
}

static void multiply_all(struct rig_tensor *tensor, float factor)
{
    for (int64_t i = 0; i < tensor->t.rows; i++) {
        for (int64_t j = 0; j < tensor->t.cols; j++)
            rig_set(tensor, i, j, rig_get(tensor, i, j) * factor);
    }
}

/* +value and -value in an irregular pattern, so that sums do not cancel. */
static void set_signed(struct rig_tensor *tensor, uint64_t seed, float value)
{
    for (int64_t i = 0; i < tensor->t.rows; i++) {
        for (int64_t j = 0; j < tensor->t.cols; j++)
            rig_set(tensor, i, j,
                    rig_hash(seed, (uint64_t)(i * 1000 + j)) % 4 == 0 ? -value : value);
    }
}

static void make(struct rig_case *c, int which, int64_t tokens, uint64_t seed)
{
    rig_case_init(c, &rig_shared.layer[which], tokens, seed);
    c->poison = seed % 2 ? 0xFF : 0x7E;
    rig_case_make(c);
}

static void finish(struct rig_case *c)
{
    rig_case_run(c);
    rig_case_check(c);
    rig_case_free(c);
}

static void expect_all(const struct rig_tensor *tensor, float value)
{
    for (int64_t i = 0; i < tensor->t.rows; i++) {
        for (int64_t j = 0; j < tensor->t.cols; j++) {
            if (rig_get(tensor, i, j) != value)
                fail_msg("%s[%lld,%lld] is %g, not %g", tensor->name, (long long)i, (long long)j,
                         (double)rig_get(tensor, i, j), (double)value);
        }
    }
}

/* ---- zeros ---- */

static void zeros_give_exact_zeros(void **state)
{
    (void)state;
    static const int inputs[] = { RIG_X, RIG_W, RIG_DY };
    static const float zeros[] = { 0.0f, -0.0f };
    for (int which = 0; which < LAYERS; which++) {
        for (int i = 0; i < 3; i++) {
            struct rig_case c;
            make(&c, which, 19, (uint64_t)(i + which));
            rig_set_all(&c.tensor[inputs[i]], zeros[(which + i) % 2]);
            rig_set_all(&c.tensor[RIG_BIAS], 0.0f);
            rig_case_run(&c);
            rig_case_check(&c);
            if (inputs[i] != RIG_DY)
                expect_all(&c.tensor[RIG_Y], 0.0f);
            if (inputs[i] != RIG_X)
                expect_all(&c.tensor[RIG_DX], 0.0f);
            if (inputs[i] != RIG_W)
                expect_all(&c.tensor[RIG_DW], 0.0f);
            rig_case_free(&c);
        }
    }
}

/* One row and one column of nothing, of +0 and -0, in each tensor: finite scales for them, too. */
static void rows_of_zeros_stay_zero(void **state)
{
    (void)state;
    static const int inputs[] = { RIG_X, RIG_W, RIG_DY };
    for (int which = 0; which < LAYERS; which++) {
        struct rig_case c;
        make(&c, which, 19, 300 + (uint64_t)which);
        rig_set_all(&c.tensor[RIG_BIAS], 0.0f);
        for (int i = 0; i < 3; i++) {
            struct rig_tensor *tensor = &c.tensor[inputs[i]];
            for (int64_t j = 0; j < tensor->t.cols; j++)
                rig_set(tensor, 7, j, j % 2 ? 0.0f : -0.0f);
            for (int64_t j = 0; j < tensor->t.rows; j++)
                rig_set(tensor, j, 5, 0.0f);
        }
        rig_case_run(&c);
        rig_case_check(&c);
        for (int64_t j = 0; j < c.tensor[RIG_Y].t.cols; j++)
            assert_true(rig_get(&c.tensor[RIG_Y], 7, j) == 0.0f);
        for (int64_t j = 0; j < c.tensor[RIG_DX].t.cols; j++)
            assert_true(rig_get(&c.tensor[RIG_DX], 7, j) == 0.0f &&
                        rig_get(&c.tensor[RIG_DW], 5, j) == 0.0f);
        rig_case_free(&c);
    }
}

/* ---- small and large ---- */

static void smallest_values_stay_finite_and_visible(void **state)
{
    (void)state;
    static const float sizes[] = { 2e-36f, 1.3e-36f, 1e-38f, 9.2e-41f, 1e-34f, 1.7e-34f };
    static const int inputs[] = { RIG_X, RIG_W, RIG_DY };
    for (int which = 0; which < LAYERS; which++) {
        for (size_t s = 0; s < sizeof sizes / sizeof sizes[0]; s++) {
            struct rig_case c;
            int input = inputs[(which + (int)s) % 3];
            make(&c, which, 33, 10 + s);
            rig_set_all(&c.tensor[RIG_BIAS], 0.0f);
            set_signed(&c.tensor[input], 50 + s, sizes[s]);
            finish(&c);
        }
    }
}

static void product_of_two_tiny_scales_does_not_vanish(void **state)
{
    (void)state;
    struct rig_case c;
    make(&c, FP32, 33, 20);
    multiply_all(&c.tensor[RIG_X], 1e-20f);
    multiply_all(&c.tensor[RIG_W], 1e-20f);
    rig_case_run(&c);
    rig_case_check(&c);
    if (!rig.cuda)
        assert_true(rig_get(&c.tensor[RIG_Y], 7, 7) != 0.0f);
    rig_case_free(&c);
}

static void largest_values_stay_right(void **state)
{
    (void)state;
    for (int which = 0; which < LAYERS; which++) {
        struct rig_case c;
        make(&c, which, 21, 30 + (uint64_t)which);
        multiply_all(&c.tensor[RIG_W], 0x1p-12f);
        multiply_all(&c.tensor[RIG_DY], 0x1p-12f);
        rig_set(&c.tensor[RIG_X], 2, 7, 3.3895e38f);
        rig_set_all(&c.tensor[RIG_BIAS], 0.0f);
        rig_case_run(&c);
        rig_case_check(&c);
        for (int64_t j = 0; j < c.tensor[RIG_Y].t.cols; j++)
            assert_true(isfinite(rig_get(&c.tensor[RIG_Y], 2, j)));
        rig_case_free(&c);
    }
}

static void expect_finite(const struct rig_tensor *tensor)
{
    for (int64_t i = 0; i < tensor->t.rows; i++) {
        for (int64_t j = 0; j < tensor->t.cols; j++)
            assert_true(isfinite(rig_get(tensor, i, j)));
    }
}

/* On CUDA wgrad of recipe "block" is cuBLASLt's, which multiplies sums of 128 by dy's scale before
 * x's: with a dy beyond 5e33 they overflow on the way. */
static float largest_value(int kind, int input)
{
    return rig.cuda && kind == RIG_BLOCK && input == RIG_DY ? 4e33f : 3.3895e38f;
}

/* No product of sums and scales on the way may overflow that the result does not. Outputs are fp32:
 * in bf16 the error of all would be that of few roundings. */
static void one_large_value_in_each_input(void **state)
{
    (void)state;
    static const int inputs[] = { RIG_X, RIG_W, RIG_DY };
    struct rig_spec specs[RIG_KINDS + 1];
    struct rig_layers wide;
    for (int kind = 0; kind <= RIG_KINDS; kind++) {
        specs[kind] = (struct rig_spec){ .out_features = 80,
                                         .in_features = 67,
                                         .output = FP8_DTYPE_FP32,
                                         .grad_input = FP8_DTYPE_FP32 };
        rig_set_kind(&specs[kind], kind < RIG_KINDS ? kind : RIG_ROWWISE);
        specs[kind].power_of_two = kind == RIG_KINDS || kind == RIG_BLOCK;
    }
    rig_layers_open(&wide, specs, RIG_KINDS + 1);
    for (int n = 0; n < 3 * (RIG_KINDS + 1); n++) {
        struct rig_case c;
        rig_case_init(&c, &wide.layer[n / 3], 21, 400 + (uint64_t)n);
        rig_case_make(&c);
        for (int i = 0; i < 3; i++) {
            if (i != n % 3)
                multiply_all(&c.tensor[inputs[i]], 0x1p-12f);
        }
        rig_set(&c.tensor[inputs[n % 3]], 2, 7, largest_value(n / 3, inputs[n % 3]));
        rig_case_run(&c);
        rig_case_check(&c);
        expect_finite(&c.tensor[RIG_Y]);
        expect_finite(&c.tensor[RIG_DX]);
        expect_finite(&c.tensor[RIG_DW]);
        rig_case_free(&c);
    }
    rig_layers_close(&wide);
}

static void scale_of_4_28125_is_not_made_in_bf16(void **state)
{
    (void)state;
    struct rig_case c;
    make(&c, PLAIN, 16, 40);
    set_signed(&c.tensor[RIG_X], 41, 1.0f);
    rig_set(&c.tensor[RIG_X], 15, 71, -4.28125f);
    rig_case_run(&c);
    rig_case_check(&c);
    uint32_t bits;
    memcpy(&bits, c.saved.block.image, sizeof bits);
    assert_int_equal(bits, 0x42D148E0);
    rig_case_free(&c);
}

/* ---- NaN and inf ---- */

static int bad_rows(const struct rig_tensor *tensor)
{
    int count = 0;
    for (int64_t i = 0; i < tensor->t.rows; i++) {
        bool bad = false;
        for (int64_t j = 0; j < tensor->t.cols; j++)
            bad = bad || !isfinite(rig_get(tensor, i, j));
        count += bad;
    }
    return count;
}

/* Each place: in the body of a vector, in its last partial one, first, last. */
static void bad_elements_stay_local(void **state)
{
    (void)state;
    static const uint32_t halves[] = { 0x7FC0, 0xFFC0, 0x7F80, 0xFF80, 0x7F81, 0xFFFF };
    static const int inputs[] = { RIG_X, RIG_W, RIG_DY };
    for (int which = 0; which < LAYERS; which++) {
        for (int n = 0; n < 18; n++) {
            struct rig_case c;
            int input = inputs[n % 3];
            make(&c, which, 23, 60 + (uint64_t)n);
            struct rig_tensor *tensor = &c.tensor[input];
            int64_t rows = tensor->t.rows, cols = tensor->t.cols;
            const int64_t places[4][2] = {
                { 3, 5 }, { rows - 1, cols - 1 }, { 0, 0 }, { rows / 2, cols - 2 }
            };
            uint32_t bits = halves[n / 3];
            if (tensor->t.dtype == FP8_DTYPE_FP32)
                bits = bits << 16;
            rig_set_bits(tensor, places[n % 4][0], places[n % 4][1], bits);
            rig_case_run(&c);
            rig_case_check(&c);
            assert_int_equal(bad_rows(&c.tensor[RIG_Y]), input == RIG_X   ? 1
                                                         : input == RIG_W ? 23
                                                                          : 0);
            assert_int_equal(bad_rows(&c.tensor[RIG_DX]), input == RIG_DY  ? 1
                                                          : input == RIG_W ? 23
                                                                           : 0);
            rig_case_free(&c);
        }
    }
}

static void a_tensor_of_nothing_finite_has_scale_one(void **state)
{
    (void)state;
    struct rig_case c;
    make(&c, PLAIN, 9, 90);
    rig_set_all(&c.tensor[RIG_X], NAN);
    rig_set_all(&c.tensor[RIG_DY], -INFINITY);
    rig_case_run(&c);
    rig_case_check(&c);
    float scale;
    memcpy(&scale, c.saved.block.image, sizeof scale);
    assert_true(scale == 1.0f);
    rig_case_free(&c);
}

static void weight_and_found_inf_of_each_call(void **state)
{
    (void)state;
    struct rig_case c;
    make(&c, PLAIN, 9, 91);
    rig_set(&c.tensor[RIG_DY], 8, 79, INFINITY);
    rig_case_push(&c);
    rig_case_weight(&c);
    rig_case_fprop(&c);
    rig_tensor_pull(&c.tensor[RIG_FOUND_INF]);
    assert_int_equal(rig_bits(&c.tensor[RIG_FOUND_INF], 0, 0), 0);
    rig_case_backward(&c);
    rig_tensor_pull(&c.tensor[RIG_FOUND_INF]);
    assert_int_equal(rig_bits(&c.tensor[RIG_FOUND_INF], 0, 0), 1);
    rig_case_free(&c);
}

/* ---- every cast ---- */

/* state: of recipe "delayed", without a history; its scales are 1. */
static void quantize_and_check(int which, fp8_role role, struct rig_tensor *source,
                               const fp8_state *state)
{
    static const float one = 1.0f;
    const struct rig_layer *layer = &rig_shared.layer[which];
    fp8_bytes bytes = role == FP8_ROLE_X   ? FP8_BYTES_X
                      : role == FP8_ROLE_W ? FP8_BYTES_WEIGHT
                                           : FP8_BYTES_GRAD;
    int64_t tokens = role == FP8_ROLE_W ? 0 : source->t.rows;
    struct rig_operand operand;
    struct rig_scratch workspace;
    struct rig_quantized want;
    rig_operand_make(&operand, rig_bytes(layer, tokens, bytes), 0x7E);
    rig_scratch_make(&workspace, rig_bytes(layer, tokens, FP8_BYTES_WORKSPACE), 0, 0x7E);
    rig_tensor_push(source);
    fp8_quantize_args args = FP8_QUANTIZE_ARGS_INIT;
    args.role = role;
    args.source = &source->t;
    args.operand = &operand.op;
    args.call.workspace = workspace.device;
    args.call.workspace_bytes = workspace.bytes;
    args.call.stream = rig.stream;
    args.call.state = state;
    RIG_OK(fp8_quantize(layer->handle, &args));
    rig_quantize_role(&want, layer, role, source, state != NULL ? &one : NULL);
    rig_check_operand("operand", &operand, &want);
    rig_tensor_unchanged(source);
    rig_scratch_check(&workspace, "workspace");
    rig_quantized_free(&want);
    rig_scratch_free(&workspace);
    rig_operand_free(&operand);
}

/* All 65,536 bf16 patterns: those beyond the limit are replaced, so that the scale takes many
 * values and the largest code is reached; every offset, so that every pattern passes vector body
 * and scalar tail. */
static void all_bf16_patterns_cast_alike(void **state)
{
    (void)state;
    static const float limits[] = { 3.4e38f,  448.0f, 57344.0f, 1.0f,
                                    4.28125f, 3e-20f, 1e-36f,   1e-40f };
    static const struct {
        int layer;
        fp8_role role;
    } casts[] = { { PLAIN, FP8_ROLE_X }, { PLAIN, FP8_ROLE_DY }, { POW2, FP8_ROLE_X },
                  { POW2, FP8_ROLE_DY }, { E4M3, FP8_ROLE_DY },  { ROW, FP8_ROLE_X },
                  { HP, FP8_ROLE_DY },   { BLOCK, FP8_ROLE_X },  { BLOCK, FP8_ROLE_DY } };
    for (size_t n = 0; n < sizeof casts / sizeof casts[0]; n++) {
        const fp8_layer_info *info = &rig_shared.layer[casts[n].layer].info;
        int64_t cols = casts[n].role == FP8_ROLE_X ? info->in_features : info->out_features;
        int64_t rows = 512;
        for (size_t l = 0; l < sizeof limits / sizeof limits[0]; l++) {
            uint32_t pattern = 0;
            while (pattern < 65536) {
                struct rig_tensor source;
                rig_tensor_make(&source, "source", FP8_DTYPE_BF16, rows, cols, (int64_t)l % 3,
                                (int64_t)l, 0xFF);
                for (int64_t i = 0; i < rows; i++) {
                    for (int64_t j = 0; j < cols; j++, pattern++) {
                        float value = fp8_bf16_to_float((uint16_t)pattern);
                        bool keep =
                            pattern < 65536 && !(fabsf(value) > limits[l] && isfinite(value));
                        rig_set_bits(&source, i, j, keep ? pattern : 0);
                    }
                }
                rig_set(&source, 0, 0, limits[l] < 3e38f ? limits[l] : 1.0f);
                quantize_and_check(casts[n].layer, casts[n].role, &source, NULL);
                rig_tensor_free(&source);
            }
        }
    }
}

/* float32 inputs (a weight in fp32) at scale 1: every value, every tie, one ulp to each side. */
static void float32_ties_round_to_even(void **state)
{
    (void)state;
    const fp8_layer_info *info = &rig_shared.layer[FP32].info;
    int64_t rows = info->out_features, cols = info->in_features;
    struct rig_tensor source;
    rig_tensor_make(&source, "source", FP8_DTYPE_FP32, rows, cols, 1, 1, 0xFF);
    assert_true(rows * cols >= 8 * 0x7E);
    for (int64_t n = 0; n < rows * cols; n++) {
        uint8_t code = (uint8_t)(n / 8 % 0x7E);
        float low = fp8_decode_e4m3(code), high = fp8_decode_e4m3((uint8_t)(code + 1));
        float middle = low / 2 + high / 2, below = nextafterf(middle, 0.0f);
        float above = nextafterf(middle, FLT_MAX);
        const float near[8] = { low, high, middle, below, above, -middle, -below, -above };
        rig_set(&source, n / cols, n % cols, near[n % 8]);
    }
    rig_set(&source, rows - 1, cols - 1, -448.0f);
    rig_set(&source, 0, 0, INFINITY);
    rig_set(&source, 0, 1, NAN);
    quantize_and_check(FP32, FP8_ROLE_W, &source, NULL);
    rig_tensor_free(&source);
}

/* With a scale that knows nothing of the tensor: what is beyond the largest value saturates, inf
 * and NaN stay visible, and what is below half the smallest value vanishes; every bf16 pattern, and
 * float32 on both sides of each limit. */
static void values_beyond_the_scale_saturate(void **state)
{
    (void)state;
    static const float edges[] = { 448.0f,  464.0f,   465.0f,   480.0f, 1e9f,     3.4e38f,
                                   0x1p-9f, 0x1p-10f, INFINITY, NAN,    57344.0f, 61439.0f };
    static const fp8_role roles[] = { FP8_ROLE_X, FP8_ROLE_DY };
    const struct rig_layer *layer = &rig_shared.layer[DELAYED];
    const fp8_layer *list[] = { layer->handle };
    fp8_state *fresh;
    struct rig_tensor source;
    RIG_OK(fp8_state_create(list, 1, &fresh));
    for (int n = 0; n < 2; n++) {
        int64_t cols = n == 0 ? layer->info.in_features : layer->info.out_features;
        for (uint32_t first = 0; first < 65536; first += (uint32_t)(512 * cols)) {
            rig_tensor_make(&source, "source", FP8_DTYPE_BF16, 512, cols, n, 1, 0xFF);
            for (int64_t i = 0; i < 512 * cols; i++)
                rig_set_bits(&source, i / cols, i % cols, (first + (uint32_t)i) & 0xFFFF);
            quantize_and_check(DELAYED, roles[n], &source, fresh);
            rig_tensor_free(&source);
        }
    }
    int64_t rows = layer->info.out_features, cols = layer->info.in_features;
    rig_tensor_make(&source, "w", FP8_DTYPE_FP32, rows, cols, 1, 1, 0xFF);
    for (int64_t i = 0; i < rows * cols; i++) {
        float edge = edges[i % 12], toward = i / 12 % 3 == 0 ? 0.0f : FLT_MAX;
        float value = i / 12 % 3 == 2 || !isfinite(edge) ? edge : nextafterf(edge, toward);
        rig_set(&source, i / cols, i % cols, i % 5 == 0 ? -value : value);
    }
    quantize_and_check(DELAYED, FP8_ROLE_W, &source, fresh);
    rig_tensor_free(&source);
    fp8_state_destroy(fresh);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(zeros_give_exact_zeros, open_layers),
        cmocka_unit_test(rows_of_zeros_stay_zero),
        cmocka_unit_test(smallest_values_stay_finite_and_visible),
        cmocka_unit_test(product_of_two_tiny_scales_does_not_vanish),
        cmocka_unit_test(largest_values_stay_right),
        cmocka_unit_test(one_large_value_in_each_input),
        cmocka_unit_test(scale_of_4_28125_is_not_made_in_bf16),
        cmocka_unit_test(bad_elements_stay_local),
        cmocka_unit_test(a_tensor_of_nothing_finite_has_scale_one),
        cmocka_unit_test(weight_and_found_inf_of_each_call),
        cmocka_unit_test(all_bf16_patterns_cast_alike),
        cmocka_unit_test(values_beyond_the_scale_saturate),
        cmocka_unit_test_teardown(float32_ties_round_to_even, rig_shared_close),
    };
    return RIG_RUN(tests);
}
