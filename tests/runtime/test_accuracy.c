/*
 * test_accuracy.c - how far results may be from float64: against the dequantised operands at
 * growing K, and against the original tensors in decibels.
 */
#include <math.h>

#include "tests/runtime/rig.h"

/* ---- against the dequantised operands ---- */

static const int64_t depths[] = { 128, 512, 4096, 16384, 65536 };
enum { DEPTHS = sizeof depths / sizeof depths[0], DEEP = 16384 };

/* deepest: beyond DEEP with centred data only. */
struct mode {
    const char *name;
    enum rig_recipe recipe;
    bool split, fp32;
    int64_t deepest;
};

static const struct mode modes[] = {
    { "fast, bf16", RIG_CURRENT, false, false, 4096 },
    { "fast, fp32", RIG_CURRENT, false, true, 65536 },
    { "split, bf16", RIG_CURRENT, true, false, 4096 },
    { "split, fp32", RIG_CURRENT, true, true, 65536 },
    { "rows, fast", RIG_ROWWISE, false, true, 4096 },
    { "rows, split", RIG_ROWWISE, true, true, DEEP },
    { "blocks, bf16", RIG_BLOCK, true, false, 4096 },
    { "blocks, fp32", RIG_BLOCK, true, true, DEEP },
    { "bf16 wgrad", RIG_ROWWISE_HP_WGRAD, true, true, DEEP },
};
enum { MODES = sizeof modes / sizeof modes[0] };

/* The depth is K in fprop, N in dgrad, M in wgrad: each pass is met with each depth. */
static struct rig_spec spec_of(const struct mode *mode, int64_t out_features, int64_t in_features,
                               int64_t tokens)
{
    fp8_dtype dtype = mode->fp32 ? FP8_DTYPE_FP32 : FP8_DTYPE_BF16;
    return (struct rig_spec){
        .recipe = mode->recipe,
        .power_of_two = mode->recipe >= RIG_ROWWISE,
        .out_features = out_features,
        .in_features = in_features,
        .max_tokens = tokens,
        .output = dtype,
        .grad_input = dtype,
        .grad_weight = dtype,
        .fprop_split = mode->split,
        .dgrad_fast = !mode->split,
        .wgrad_fast = !mode->split,
    };
}

/* The three passes of one mode at one depth, on centred data, then on data of one sign. */
static void measure_depth(const struct rig_layer *layers, const char *name, int64_t depth)
{
    double error[2][3] = { { 0 } };
    for (int i = 0; i < (depth > DEEP ? 3 : 6); i++) {
        struct rig_case c;
        rig_case_init(&c, &layers[i % 3], layers[i % 3].info.max_tokens, 1000 + (uint64_t)i);
        c.level = true;
        c.centred = i < 3;
        rig_case_complete(&c);
        error[i / 3][i % 3] = c.error[i % 3];
        rig_case_free(&c);
    }
    print_message("%-12s depth %5lld: fprop %.1e (%.1e)  dgrad %.1e (%.1e)  wgrad %.1e (%.1e)\n",
                  name, (long long)depth, error[0][0], error[1][0], error[0][1], error[1][1],
                  error[0][2], error[1][2]);
}

/* Three shapes a depth; sides of 64, of 32 from DEEP on, keep the samples above 1,000 elements. */
static void error_does_not_grow_with_depth(void **state)
{
    (void)state;
    if (!rig.cuda)
        print_message("on the host depths end at 4096: its sums are in float64 at any depth\n");
    for (int m = 0; m < MODES; m++) {
        int64_t deepest = rig.cuda ? modes[m].deepest : modes[m].recipe == RIG_CURRENT ? 4096 : 512;
        int count = 0;
        struct rig_spec specs[3 * DEPTHS];
        struct rig_layers layers;
        for (int d = 0; d < DEPTHS && depths[d] <= deepest; d++, count++) {
            int64_t side = depths[d] >= DEEP ? 32 : 64;
            specs[3 * d] = spec_of(&modes[m], side, depths[d], side);
            specs[3 * d + 1] = spec_of(&modes[m], depths[d], side, side);
            specs[3 * d + 2] = spec_of(&modes[m], side, side, depths[d]);
        }
        rig_layers_open(&layers, specs, 3 * count);
        for (int d = 0; d < count; d++)
            measure_depth(&layers.layer[3 * d], modes[m].name, depths[d]);
        rig_layers_close(&layers);
    }
}

/* ---- against the original tensors ---- */

/* Rows of a (i) times rows of b (j) over `depth`, elements through strides. */
struct view {
    const struct rig_tensor *tensor;
    bool transposed;
};

static double element(const struct view *view, int64_t i, int64_t k)
{
    return (double)(view->transposed ? rig_get(view->tensor, k, i) : rig_get(view->tensor, i, k));
}

/* Signal to noise ratio over 10,000 sampled outputs, fewer of a great depth, in dB. */
static double sqnr(const struct rig_tensor *out, struct view a, struct view b, int64_t depth)
{
    double signal = 0, noise = 0;
    uint64_t seed = 5;
    int64_t samples = depth > 2000 ? 20000000 / depth : 10000;
    for (int64_t n = 0; n < samples; n++) {
        int64_t i = rig_below(&seed, out->t.rows), j = rig_below(&seed, out->t.cols);
        double want = 0;
        for (int64_t k = 0; k < depth; k++)
            want += element(&a, i, k) * element(&b, j, k);
        double error = (double)rig_get(out, i, j) - want;
        signal += want * want;
        noise += error * error;
    }
    return 10 * log10(signal / noise);
}

struct decibels {
    double y, dx, dw;
};

/* Column j of x times `outlier`, column j of w divided by it. */
static struct decibels measure(const struct rig_layer *layer, float outlier)
{
    struct rig_case c;
    int64_t m = layer->info.max_tokens, n = layer->info.out_features, k = layer->info.in_features;
    rig_case_init(&c, layer, m, 77);
    c.level = true;
    rig_case_make(&c);
    for (int64_t i = 0; i < m && outlier != 1.0f; i++)
        rig_set(&c.tensor[RIG_X], i, 5, rig_get(&c.tensor[RIG_X], i, 5) * outlier);
    if (outlier != 1.0f) /* the largest of some thousands of rows, of which there are few here */
        rig_set(&c.tensor[RIG_X], 0, 5, 3.6f * outlier);
    for (int64_t i = 0; i < n && outlier != 1.0f; i++)
        rig_set(&c.tensor[RIG_W], i, 5, rig_get(&c.tensor[RIG_W], i, 5) / outlier);
    rig_case_run(&c);
    rig_case_check(&c);
    const struct view x = { &c.tensor[RIG_X], false }, w = { &c.tensor[RIG_W], false };
    const struct view dy = { &c.tensor[RIG_DY], false }, xt = { &c.tensor[RIG_X], true };
    const struct view wt = { &c.tensor[RIG_W], true }, dyt = { &c.tensor[RIG_DY], true };
    struct decibels db = {
        .y = sqnr(&c.tensor[RIG_Y], x, w, k),
        .dx = sqnr(&c.tensor[RIG_DX], dy, wt, n),
        .dw = sqnr(&c.tensor[RIG_DW], dyt, xt, m),
    };
    rig_case_free(&c);
    return db;
}

/* Expected of normal data: 28.5 dB with E4M3 alone, 24.6 dB where an operand is E5M2; a float
 * format's relative error does not depend on the granularity of its scales. */
static void quantisation_costs_the_decibels_of_its_format(void **state)
{
    (void)state;
    enum { COUNT = RIG_KINDS + 2 };
    struct rig_spec specs[COUNT];
    struct rig_layers layers;
    for (int i = 0; i < COUNT; i++) {
        specs[i] = (struct rig_spec){ .out_features = 512, .in_features = 640, .max_tokens = 384 };
        rig_set_kind(&specs[i], i < RIG_KINDS ? i : RIG_CURRENT);
        specs[i].e4m3 = i >= RIG_KINDS;
        specs[i].power_of_two |= i == RIG_KINDS + 1;
    }
    rig_layers_open(&layers, specs, COUNT);
    for (int i = 0; i < COUNT; i++) {
        const struct rig_spec *spec = &specs[i];
        struct decibels db = measure(&layers.layer[i], 1.0f);
        bool e4m3 = rig_is_e4m3(spec, FP8_ROLE_DY);
        print_message("%s, %s%s: y %.2f dB, dx %.2f dB, dw %.2f dB\n",
                      spec->bf16 ? "bf16" : rig_recipe_names[spec->recipe],
                      e4m3 ? "e4m3" : "hybrid", spec->power_of_two ? ", power of two" : "", db.y,
                      db.dx, db.dw);
        double needed = spec->bf16 ? 45 : e4m3 ? 28 : 24;
        assert_true(db.y >= (spec->bf16 ? 45 : 28));
        assert_true(db.dx >= needed);
        assert_true(db.dw >= (spec->recipe == RIG_ROWWISE_HP_WGRAD ? 45 : needed));
    }
    rig_layers_close(&layers);
}

/* A column of x times F, the column of w that it meets divided by F. Of the blocks one in 32
 * loses. */
static void finer_scales_bear_larger_outliers(void **state)
{
    (void)state;
    static const float factors[] = { 100.0f, 1e4f, 1e5f };
    static const double expected[RIG_RECIPES][3] = {
        [RIG_CURRENT] = { 28.5, 25, 6 },    [RIG_DELAYED] = { 28.5, 25, 6 },
        [RIG_ROWWISE] = { 28.5, 28, 14.5 }, [RIG_ROWWISE_HP_WGRAD] = { 28.5, 28, 14.5 },
        [RIG_BLOCK] = { 28.5, 28.5, 26 },
    };
    struct rig_spec specs[RIG_RECIPES];
    struct rig_layers layers;
    for (int i = 0; i < RIG_RECIPES; i++) {
        specs[i] = (struct rig_spec){ .out_features = 128, .in_features = 4096, .max_tokens = 160 };
        rig_set_kind(&specs[i], i);
    }
    rig_layers_open(&layers, specs, RIG_RECIPES);
    for (int i = 0; i < RIG_RECIPES; i++) {
        for (int f = 0; f < 3; f++) {
            struct decibels db = measure(&layers.layer[i], factors[f]);
            print_message("%s, one column of x times %g: y %.2f dB, expected %.1f\n",
                          rig_recipe_names[i], (double)factors[f], db.y, expected[i][f]);
            assert_true(fabs(db.y - expected[i][f]) <= 1.5);
        }
    }
    rig_layers_close(&layers);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(error_does_not_grow_with_depth),
        cmocka_unit_test(quantisation_costs_the_decibels_of_its_format),
        cmocka_unit_test(finer_scales_bear_larger_outliers),
    };
    return RIG_RUN(tests);
}
