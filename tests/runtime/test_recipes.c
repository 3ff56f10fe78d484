/*
 * test_recipes.c - every recipe, and layers that compute in bf16: odd shapes in exact buffers, bits
 * that depend on nothing but the inputs, errors that stay in their row.
 *
 * rig_case_check does the looking: FP8 bytes, scales and pads of each granularity bit for bit,
 * products by the bounds of the numerics rules, dbias, found_inf, guards.
 */
#include <math.h>

#include "tests/runtime/rig.h"

static const uint8_t poisons[] = { 0xFF, 0x7E };

/* The same spec once for every kind of layer. */
static void open_kinds(struct rig_layers *layers, const struct rig_spec *specs, int count)
{
    struct rig_spec all[64];
    assert_true(count * RIG_KINDS <= 64);
    for (int i = 0; i < count * RIG_KINDS; i++) {
        all[i] = specs[i / RIG_KINDS];
        rig_set_kind(&all[i], i % RIG_KINDS);
    }
    rig_layers_open(layers, all, count * RIG_KINDS);
}

/* ---- shapes ---- */

static void odd_shapes_in_every_recipe(void **state)
{
    (void)state;
    static const struct {
        int64_t tokens;
        struct rig_spec spec;
    } rows[] = {
        { 50, { .out_features = 1000, .in_features = 712, .bias = true } },
        { 17, { .out_features = 2556, .in_features = 100 } },
        { 129, { .out_features = 272, .in_features = 1008, .bias = true } },
        { 1, { .out_features = 1, .in_features = 1, .bias = true } },
        { 7, { .out_features = 3, .in_features = 5, .output = FP8_DTYPE_FP32 } },
        { 130,
          { .out_features = 129,
            .in_features = 257,
            .bias = true,
            .grad_weight = FP8_DTYPE_BF16,
            .grad_input = FP8_DTYPE_FP32 } },
        { 264,
          { .out_features = 256, .in_features = 384, .output = FP8_DTYPE_FP32, .bias = true } },
        { 100,
          { .out_features = 200,
            .in_features = 321,
            .output = FP8_DTYPE_FP16,
            .grad_input = FP8_DTYPE_FP16,
            .grad_weight = FP8_DTYPE_FP16,
            .bias = true,
            .fprop_split = true } },
    };
    enum { COUNT = sizeof rows / sizeof rows[0] };
    struct rig_spec specs[COUNT];
    struct rig_layers layers;
    for (int i = 0; i < COUNT; i++)
        specs[i] = rows[i].spec;
    open_kinds(&layers, specs, COUNT);
    for (int i = 0; i < layers.count; i++) {
        for (int p = 0; p < 2; p++) {
            struct rig_case c;
            rig_case_init(&c, &layers.layer[i], rows[i / RIG_KINDS].tokens, (uint64_t)i);
            c.poison = poisons[p];
            c.accumulate = p == 1;
            c.one_backward = i % 2;
            for (int t = 0; t < RIG_FOUND_INF && p == 1; t++) {
                c.offset[t] = (i + t) % 9;
                c.gap[t] = (i * 3 + t) % 17;
            }
            rig_case_complete(&c);
            rig_case_free(&c);
        }
    }
    rig_layers_close(&layers);
}

/* M from one to beyond two bands and two blocks, in any order on one layer. */
static void tokens_change_in_every_recipe(void **state)
{
    (void)state;
    static const int64_t all[] = { 300, 0, 1, 7, 8, 9, 31, 32, 33, 64, 127, 128, 129, 136, 257, 3 };
    struct rig_spec spec = { .out_features = 136, .in_features = 72, .bias = true };
    struct rig_layers layers;
    open_kinds(&layers, &spec, 1);
    for (int i = 0; i < layers.count; i++) {
        for (size_t t = 0; t < sizeof all / sizeof all[0]; t++)
            rig_case_all(&layers.layer[i], all[t], 100 + t, poisons[t % 2]);
    }
    rig_layers_close(&layers);
}

static void large_and_thin_in_every_recipe(void **state)
{
    (void)state;
    /* max_tokens, tokens, N, K; at some 0.2 us an element of x, w and dy for each kind */
    static const int64_t shapes[][4] = { { 18, 18, 520, 4096 },   { 2048, 520, 1544, 767 },
                                         { 18432, 520, 1, 6144 }, { 65536, 16, 24, 65536 },
                                         { 18432, 18432, 1, 96 }, { 4104, 4104, 136, 264 } };
    enum { COUNT = sizeof shapes / sizeof shapes[0] };
    struct rig_spec specs[COUNT] = { { 0 } };
    struct rig_layers layers;
    int64_t tokens[COUNT];
    for (int i = 0; i < COUNT; i++) {
        tokens[i] = rig_cut("M", shapes[i][1], 300);
        specs[i].out_features = rig_cut("N", shapes[i][2], 600);
        specs[i].in_features = rig_cut("K", shapes[i][3], i == 3 ? 4096 : 600);
        specs[i].max_tokens = shapes[i][0];
        specs[i].bias = i % 2 == 0;
    }
    open_kinds(&layers, specs, COUNT);
    for (int i = 0; i < layers.count; i++)
        rig_case_all(&layers.layer[i], tokens[i / RIG_KINDS], 200 + (uint64_t)i, 0xFF);
    rig_layers_close(&layers);
}

/* ---- what results depend on ---- */

static void compare_images(const char *what, const struct rig_block *a, const struct rig_block *b)
{
    assert_int_equal(a->bytes, b->bytes);
    if (memcmp(a->image, b->image, a->bytes) != 0)
        fail_msg("%s is not bit-identical", what);
}

static void run_larger(const struct rig_layer *layer, uint8_t poison)
{
    struct rig_case c;
    rig_case_init(&c, layer, 400, 301);
    c.poison = poison;
    rig_case_make(&c);
    rig_case_run(&c);
    rig_case_free(&c);
}

/* A larger shape between, then the same once more: bits know neither poison nor history. */
static void bits_depend_on_the_inputs_alone(void **state)
{
    (void)state;
    static const int outputs[] = { RIG_Y, RIG_DX, RIG_DW, RIG_DBIAS };
    static const int64_t tokens[] = { 129, 1 };
    struct rig_spec spec = {
        .out_features = 272, .in_features = 336, .max_tokens = 400, .bias = true
    };
    struct rig_layers layers;
    open_kinds(&layers, &spec, 1);
    for (int i = 0; i < layers.count; i++) {
        for (int t = 0; t < 2; t++) {
            struct rig_case c[2];
            for (int p = 0; p < 2; p++) {
                rig_case_init(&c[p], &layers.layer[i], tokens[t], 300);
                c[p].poison = poisons[p];
                rig_case_make(&c[p]);
                rig_case_run(&c[p]);
                rig_case_check(&c[p]);
                run_larger(&layers.layer[i], poisons[p]);
            }
            for (int o = 0; o < 4; o++)
                compare_images(c[0].tensor[outputs[o]].name, &c[0].tensor[outputs[o]].block,
                               &c[1].tensor[outputs[o]].block);
            rig_case_free(&c[0]);
            rig_case_free(&c[1]);
        }
    }
    rig_layers_close(&layers);
}

static void run_with(struct rig_case *c, const struct rig_layer *layer, int64_t tokens, int tensor,
                     float factor)
{
    rig_case_init(c, layer, tokens, 400);
    rig_case_make(c);
    rig_set(&c->tensor[tensor], 0, 0, rig_get(&c->tensor[tensor], 0, 0) * factor);
    rig_case_run(c);
    rig_case_check(c);
}

/* An element of x moves its own row of y, one of w its own column, where scales are no coarser. A
 * tensor or a 128x128 block keeps its scale here, since its largest element does not change. */
static void only_the_row_of_an_element_moves(void **state)
{
    (void)state;
    static const int64_t tokens[] = { 256, 1 };
    static const int inputs[] = { RIG_X, RIG_W };
    struct rig_spec specs[] = { { .out_features = 256, .in_features = 256 },
                                { .out_features = 1, .in_features = 130 } };
    struct rig_layers layers;
    open_kinds(&layers, specs, 2);
    for (int i = 0; i < layers.count; i++) {
        for (int n = 0; n < 4; n++) {
            bool fine = layers.layer[i].spec.recipe == RIG_ROWWISE && !layers.layer[i].spec.bf16;
            struct rig_case a, b;
            int64_t m = tokens[n / 2];
            run_with(&a, &layers.layer[i], m, inputs[n % 2], 1.0f);
            run_with(&b, &layers.layer[i], m, inputs[n % 2], fine ? 64.0f : 0.5f);
            bool moved = false;
            for (int64_t r = 0; r < m; r++) {
                for (int64_t j = 0; j < a.tensor[RIG_Y].t.cols; j++) {
                    bool same =
                        rig_bits(&a.tensor[RIG_Y], r, j) == rig_bits(&b.tensor[RIG_Y], r, j);
                    bool may_move = n % 2 ? j == 0 : r == 0;
                    if (!same && !may_move)
                        fail_msg("y[%lld,%lld] moved with %s[0,0], %s", (long long)r, (long long)j,
                                 n % 2 ? "w" : "x", rig_recipe_names[a.layer->spec.recipe]);
                    moved = moved || !same;
                }
            }
            assert_true(moved);
            rig_case_free(&a);
            rig_case_free(&b);
        }
    }
    rig_layers_close(&layers);
}

/* ---- dbias ---- */

static void dbias_in_every_recipe(void **state)
{
    (void)state;
    static const int64_t tokens[] = { 1000, 1, 33 };
    struct rig_spec specs[] = {
        { .out_features = 129, .in_features = 33, .max_tokens = 1000, .bias = true },
        { .out_features = 2556, .in_features = 16, .max_tokens = 1000, .bias = true },
    };
    struct rig_layers layers;
    open_kinds(&layers, specs, 2);
    for (int i = 0; i < layers.count; i++) {
        for (int t = 0; t < 3; t++) {
            struct rig_case c;
            rig_case_init(&c, &layers.layer[i], i < RIG_KINDS ? tokens[t] : 70, 500 + (uint64_t)t);
            c.accumulate = t == 1;
            c.centred = t != 2;
            rig_case_make(&c);
            for (int64_t r = 0; r < c.tokens; r++) /* lost in the tensor's FP8, not in dbias */
                rig_set(&c.tensor[RIG_DY], r, 128, 1e-9f);
            rig_case_run(&c);
            rig_case_check(&c);
            if (!c.accumulate)
                assert_true(
                    fabsf(rig_get(&c.tensor[RIG_DBIAS], 0, 128) / ((float)c.tokens * 1e-9f) - 1) <
                    0.01f);
            rig_case_free(&c);
        }
    }
    rig_layers_close(&layers);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(odd_shapes_in_every_recipe),
        cmocka_unit_test(tokens_change_in_every_recipe),
        cmocka_unit_test(large_and_thin_in_every_recipe),
        cmocka_unit_test(bits_depend_on_the_inputs_alone),
        cmocka_unit_test(only_the_row_of_an_element_moves),
        cmocka_unit_test(dbias_in_every_recipe),
    };
    return RIG_RUN(tests);
}
