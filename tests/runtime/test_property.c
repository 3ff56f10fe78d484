/*
 * test_property.c - random layers, shapes, alignments and leading dims, all checks on each.
 *
 * FP8_TEST_SEED repeats a run, FP8_TEST_CASES changes its length; a failure prints the case.
 */
#include "tests/runtime/rig.h"

enum { LAYERS = 24 };

static uint64_t seed = 20250101;

static int64_t random_dim(int64_t limit)
{
    static const int64_t edges[] = { 1,  2,  15,  16,  17,  31,  32,  33, 63,
                                     64, 65, 127, 128, 129, 255, 256, 257 };
    if (rig_below(&seed, 3) == 0)
        return edges[rig_below(&seed, sizeof edges / sizeof edges[0])];
    return 1 + rig_below(&seed, limit);
}

static fp8_dtype random_dtype(void)
{
    return rig_below(&seed, 2) ? FP8_DTYPE_BF16 : FP8_DTYPE_FP32;
}

static fp8_dtype random_output(void)
{
    return rig_below(&seed, 3) ? random_dtype() : FP8_DTYPE_FP16;
}

static struct rig_spec random_spec(void)
{
    struct rig_spec spec = {
        .out_features = random_dim(rig.cuda ? 1500 : 400),
        .in_features = random_dim(rig.cuda ? 1500 : 400),
        .max_tokens = rig.cuda ? 1000 : 300,
        .bias = rig_below(&seed, 2),
        .weight = random_dtype(),
        .output = random_output(),
        .grad_input = random_output(),
        .grad_weight = random_output(),
        .e4m3 = rig_below(&seed, 2),
        .power_of_two = rig_below(&seed, 2),
        .fprop_split = rig_below(&seed, 2),
        .dgrad_fast = rig_below(&seed, 2),
        .wgrad_fast = rig_below(&seed, 2),
    };
    bool power_of_two = spec.power_of_two; /* of every recipe */
    rig_set_kind(&spec, (int)rig_below(&seed, RIG_KINDS));
    spec.power_of_two = power_of_two;
    return spec;
}

static void random_case(const struct rig_layer *layer, int number, uint64_t first)
{
    struct rig_case c;
    rig_case_init(&c, layer, rig_below(&seed, 20) == 0 ? 0 : random_dim(layer->info.max_tokens - 1),
                  rig_below(&seed, 1000000));
    for (int i = 0; i < RIG_FOUND_INF; i++) {
        if (rig_below(&seed, 2))
            c.offset[i] = rig_below(&seed, 40);
        if (rig_below(&seed, 2))
            c.gap[i] = rig_below(&seed, 40);
    }
    c.workspace_shift = (size_t)rig_below(&seed, 256);
    c.poison = rig_below(&seed, 2) ? 0xFF : 0x7E;
    c.accumulate = rig_below(&seed, 2);
    c.one_backward = rig_below(&seed, 2);
    c.centred = rig_below(&seed, 3) != 0;
    if (getenv("FP8_TEST_VERBOSE") != NULL)
        print_message("seed %llu, case %d: %s, M %lld, N %lld, K %lld\n", (unsigned long long)first,
                      number, layer->spec.bf16 ? "bf16" : rig_recipe_names[layer->spec.recipe],
                      (long long)c.tokens, (long long)layer->info.out_features,
                      (long long)layer->info.in_features);
    rig_case_complete(&c);
    rig_case_free(&c);
}

static void random_layers_and_shapes(void **state)
{
    (void)state;
    const char *given = getenv("FP8_TEST_SEED"), *length = getenv("FP8_TEST_CASES");
    if (given != NULL)
        seed = strtoull(given, NULL, 0);
    uint64_t first = seed;
    int cases = length != NULL ? atoi(length) : rig.cuda ? 300 : 600;
    print_message("FP8_TEST_SEED=%llu, %d cases (FP8_TEST_VERBOSE=1 prints each)\n",
                  (unsigned long long)first, cases);
    struct rig_spec specs[LAYERS];
    struct rig_layers layers;
    for (int i = 0; i < LAYERS; i++)
        specs[i] = random_spec();
    rig_layers_open(&layers, specs, LAYERS);
    for (int i = 0; i < cases; i++)
        random_case(&layers.layer[rig_below(&seed, LAYERS)], i, first);
    rig_layers_close(&layers);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(random_layers_and_shapes),
    };
    return RIG_RUN(tests);
}
