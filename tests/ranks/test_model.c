/*
 * test_model.c - weight parallel against unsharded layers, on the host, for every way to run a
 * model.
 */
#include <malloc.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/comm.h"
#include "tests/ranks/graph_rig.h"
#include "tests/ranks/model_rig.h"

static char bundle[256];

/* Uneven shards, empty ones, dims that are no multiple of anything, both dtypes of dw, scales of
 * tiles. */
static const char spec[] = "return model \"shards\" { tokens = 16, layers = {\n"
                           "linear \"a\" { in_features = 72, out_features = 200, bias = true },\n"
                           "linear \"b\" { in_features = 128, out_features = 10 },\n"
                           "linear \"c\" { in_features = 64, out_features = 5, bias = true },\n"
                           "linear \"d\" { in_features = 130, out_features = 257 },\n"
                           "linear \"e\" { in_features = 48, out_features = 1,\n"
                           "               grad_weight = \"bf16\" },\n"
                           "linear \"f\" { in_features = 200, out_features = 260, bias = true,\n"
                           "               recipe = recipe.block {} },\n"
                           "} }\n";

static int set_up(void **state)
{
    (void)state;
    (void)mallopt(M_PERTURB, 0x81); /* fresh memory holds 0x7e */
    ranks_bundle(spec, "none", bundle);
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    ranks_bundle_drop(bundle);
    return 0;
}

static void run(int32_t ranks, struct model_case c)
{
    c.bundle = bundle;
    ranks_run(ranks, 60, model_body, &c);
}

static void test_ranks(void **state)
{
    (void)state;
    static const int32_t ranks[] = { 1, 2, 3, 4, 5, 8 };
    for (size_t i = 0; i < sizeof ranks / sizeof ranks[0]; i++)
        run(ranks[i], (struct model_case){ .tokens = 16, .steps = 2, .give_bias = 1 });
}

static void test_kept(void **state)
{
    (void)state;
    run(3, (struct model_case){ .tokens = 9, .steps = 2, .keep = 1 });
}

static void test_groups(void **state)
{
    (void)state;
    run(3, (struct model_case){ .tokens = 9, .steps = 2, .group = 1, .give_bias = 1 });
    run(2, (struct model_case){ .tokens = 9, .steps = 2, .group = 1, .keep = 1 });
}

static void test_slots(void **state)
{
    (void)state;
    for (int32_t slots = 1; slots < 8; slots++)
        run(2, (struct model_case){ .tokens = 5, .steps = 1, .slots = slots, .give_bias = 1 });
}

/* Two slots, six layers, twice forward and backward: six gathers, then always the four whose
 * weights are not there at the turn; with three slots three. */
static void test_gathers(void **state)
{
    (void)state;
    run(2, (struct model_case){ .tokens = 5, .steps = 2, .slots = 2, .gathers = 6 + 4 + 4 + 4 });
    run(2, (struct model_case){ .tokens = 5, .steps = 1, .slots = 3, .gathers = 6 + 3 + 3 + 3 });
}

static void test_without_prefetch(void **state)
{
    (void)state;
    run(3, (struct model_case){ .tokens = 5, .steps = 1, .no_prefetch = 1 });
}

static void test_average(void **state)
{
    (void)state;
    run(3, (struct model_case){
               .tokens = 16, .steps = 1, .average = 1, .give_bias = 1, .comm_sms = 2 });
}

/* Gradients that are exchanged and summed here: the same bits. */
static void test_exchange(void **state)
{
    (void)state;
    struct model_case c = { .tokens = 9, .steps = 2, .give_bias = 1 };
    c.reduce_by = FP8_REDUCE_EXCHANGE;
    for (int32_t ranks = 1; ranks < 6; ranks++)
        run(ranks, c);
    c.average = 1;
    run(3, c);
    c.tokens = -1;
    run(2, c);
    c.caller_dw = 1;
    c.tokens = 9;
    run(3, c);
    c.with_hooks = 1;
    run(3, c);
}

/* Transposed copies made by each rank of its rows, gathered and put side by side: the same bits. */
static void test_transposed_shards(void **state)
{
    (void)state;
    struct model_case c = { .tokens = 9, .steps = 2, .give_bias = 1, .transposed_shards = 1 };
    for (int32_t ranks = 1; ranks < 6; ranks++)
        run(ranks, c);
    c.keep = 1;
    run(3, c);
    c.keep = 0;
    c.group = 1;
    run(3, c);
    c.slots = 3;
    run(2, c);
}

/* Ranks without tokens still take part in everything. */
static void test_no_tokens(void **state)
{
    (void)state;
    run(3, (struct model_case){ .tokens = 2, .steps = 1 });
    run(2, (struct model_case){ .tokens = -1, .steps = 1, .give_bias = 1 });
    run(2, (struct model_case){ .tokens = 0, .steps = 1 });
}

static void test_callers_accumulators(void **state)
{
    (void)state;
    run(3, (struct model_case){ .tokens = 16, .steps = 2, .caller_dw = 1 });
}

/* What the model cannot gather, hooks give: recipes whose copies need the whole w, compute bf16. */
static void test_hooked_recipes(void **state)
{
    (void)state;
    static const char other[] =
        "return model \"hooked\" { tokens = 16, layers = {\n"
        "linear \"a\" { in_features = 72, out_features = 200, bias = true },\n"
        "linear \"b\" { in_features = 130, out_features = 70, recipe = recipe.rowwise {} },\n"
        "linear \"c\" { in_features = 64, out_features = 5, bias = true },\n"
        "linear \"d\" { in_features = 100, out_features = 257, bias = true,\n"
        "               recipe = recipe.rowwise_hp_wgrad {} },\n"
        "linear \"e\" { in_features = 48, out_features = 10 },\n"
        "linear \"f\" { in_features = 96, out_features = 50, bias = true, compute = \"bf16\" },\n"
        "} }\n";
    char path[256];
    ranks_bundle(other, "none", path);
    struct model_case c = { .bundle = path, .tokens = 16, .steps = 2, .with_hooks = 1 };
    ranks_run(2, 60, model_body, &c);
    ranks_bundle_drop(path);
}

/* Rows of w have scales of their own, columns those of all ranks' rows: two copies, gathered each
 * for its pass. */
static void test_scales_by_row(void **state)
{
    (void)state;
    static const char other[] =
        "return model \"rows\" { tokens = 16, layers = {\n"
        "linear \"a\" { in_features = 72, out_features = 200, bias = true,\n"
        "               recipe = recipe.rowwise {} },\n"
        "linear \"b\" { in_features = 130, out_features = 257, recipe = recipe.rowwise {} },\n"
        "linear \"c\" { in_features = 64, out_features = 96 },\n"
        "linear \"d\" { in_features = 100, out_features = 257, bias = true,\n"
        "               recipe = recipe.rowwise_hp_wgrad {} },\n"
        "linear \"e\" { in_features = 300, out_features = 5, recipe = recipe.rowwise {} },\n"
        "linear \"f\" { in_features = 33, out_features = 3, recipe = recipe.rowwise_hp_wgrad {} "
        "},\n"
        "} }\n";
    char path[256];
    ranks_bundle(other, "none", path);
    struct model_case c = { .bundle = path, .tokens = 16, .steps = 2, .give_bias = 1 };
    static const int32_t ranks[] = { 1, 2, 3, 5, 8 };
    for (size_t i = 0; i < sizeof ranks / sizeof ranks[0]; i++)
        ranks_run(ranks[i], 60, model_body, &c);
    c.keep = 1;
    ranks_run(3, 60, model_body, &c);
    c.keep = 0;
    c.group = 1;
    ranks_run(3, 60, model_body, &c);
    c.group = 0;
    c.gathers =
        6 + 6 + 6 + 6; /* what backward comes back to it has not; but "c" has one copy for both */
    ranks_run(2, 60, model_body, &c);
    ranks_bundle_drop(path);
}

/* Every shard has a scale of its own: nothing is reduced before weights are cast, and the unsharded
 * layers have the same groups. "c" beside them has one scale that all agree on. */
static void test_scales_by_shard(void **state)
{
    (void)state;
    static const char other[] =
        "return model \"own\" { tokens = 16, mesh = { fsdp = %d },\n"
        "recipe = recipe.current { weight_scale = \"shard\" }, layers = {\n"
        "linear \"a\" { in_features = 72, out_features = 200, bias = true },\n"
        "linear \"b\" { in_features = 130, out_features = 257 },\n"
        "linear \"c\" { in_features = 64, out_features = 96, recipe = recipe.current {} },\n"
        "linear \"d\" { in_features = 100, out_features = 700, bias = true,\n"
        "               recipe = recipe.current { weight_scale = \"shard\", power_of_two = true } "
        "},\n"
        "linear \"e\" { in_features = 300, out_features = 5, grad_weight = \"bf16\" },\n"
        "} }\n";
    static const int32_t ranks[] = { 2, 3, 8 };
    for (size_t i = 0; i < sizeof ranks / sizeof ranks[0]; i++) {
        char path[256], text[2048];
        snprintf(text, sizeof text, other, (int)ranks[i]);
        ranks_bundle(text, "none", path);
        struct model_case c = { .bundle = path, .tokens = 16, .steps = 2, .give_bias = 1 };
        ranks_run(ranks[i], 60, model_body, &c);
        c.group = 1;
        c.transposed_shards = 1; /* of no effect where the scales are the shards' own */
        if (ranks[i] == 3)
            ranks_run(ranks[i], 60, model_body, &c);
        c.group = 0;
        c.keep = 1;
        c.with_hooks = 1;
        if (ranks[i] == 3)
            ranks_run(ranks[i], 60, model_body, &c);
        ranks_bundle_drop(path);
    }
}

/* Whether an update reduces amaxes over the ranks: of a bundle with one layer of one size. */
struct agreement {
    const char *bundle;
    bool wanted;
};

static void agreement_body(struct rank *rank)
{
    const struct agreement *a = rank->user;
    static const uint16_t w[130 * 64];
    fp8_bundle *own = NULL;
    fp8_layer *layer = NULL;
    fp8_model *model = NULL;
    int64_t first, count;
    fp8_model_layer listed = FP8_MODEL_LAYER_INIT;
    fp8_model_options options = FP8_MODEL_OPTIONS_INIT;
    fp8_model_update_args update = FP8_MODEL_UPDATE_ARGS_INIT;
    rank_check(rank, fp8_bundle_open(rank->context, a->bundle, &own) == FP8_OK);
    rank_check(rank, fp8_layer_create(own, "a", &layer) == FP8_OK);
    listed.layer = layer;
    options.layers = &listed;
    options.layer_count = 1;
    options.context = rank->context;
    options.comm = rank->comm;
    rank_check(rank, fp8_model_create(&options, &model) == FP8_OK);
    rank_check(rank, fp8_model_rows(model, 0, &first, &count) == FP8_OK);
    const fp8_tensor rows = { (void *)(uintptr_t)w, count, 64, 64, FP8_DTYPE_BF16, 0 };
    update.w = &rows;
    update.version = 1;
    rank_check(rank, fp8_layer_bytes(layer, 0, FP8_BYTES_WORKSPACE, &update.call.workspace_bytes) ==
                         FP8_OK);
    rank_check(rank, fp8_memory_alloc(rank->context, update.call.workspace_bytes,
                                      &update.call.workspace) == FP8_OK);
    rank_check(rank, fp8_model_update(model, &update) == FP8_OK);
    rank_check(rank, (strstr(rank->comm->label, "amax of w") != NULL) == a->wanted);
    fp8_memory_free(rank->context, update.call.workspace);
    fp8_model_destroy(model);
    fp8_layer_destroy(layer);
    fp8_bundle_close(own);
}

static void test_what_ranks_agree_on(void **state)
{
    (void)state;
    static const struct {
        const char *recipe;
        bool wanted;
    } recipes[] = { { "current {}", true },
                    { "current { weight_scale = \"shard\" }", false },
                    { "rowwise {}", true },
                    { "block {}", false } };
    for (size_t i = 0; i < sizeof recipes / sizeof recipes[0]; i++) {
        char path[256], text[512];
        snprintf(text, sizeof text,
                 "return model \"one\" { tokens = 16, mesh = { fsdp = 2 }, recipe = recipe.%s,\n"
                 "layers = { linear \"a\" { in_features = 64, out_features = 130 } } }\n",
                 recipes[i].recipe);
        ranks_bundle(text, "none", path);
        struct agreement a = { path, recipes[i].wanted };
        ranks_run(2, 60, agreement_body, &a);
        ranks_bundle_drop(path);
    }
}

static void test_hooks(void **state)
{
    (void)state;
    run(2, (struct model_case){ .tokens = 16, .steps = 2, .with_hooks = 1, .give_bias = 1 });
    run(3, (struct model_case){ .tokens = 7, .steps = 2, .with_hooks = 1, .slots = 1 });
}

/* Without graphs, which the host has not: the same calls again. */
static void test_repeated_steps(void **state)
{
    (void)state;
    for (uint32_t keep = 0; keep < 2; keep++) {
        struct graph_case c = { .bundle = bundle, .tokens = 16, .keep = keep };
        pthread_barrier_init(&c.meet, NULL, 2);
        ranks_run(2, 60, graph_body, &c);
        pthread_barrier_destroy(&c.meet);
    }
}

static fp8_status no_weight(void *user, const fp8_hook_request *request, fp8_weight_view *view)
{
    (void)user, (void)request, (void)view;
    return FP8_ERR_INTERNAL;
}

/* Extents that a layer may have, but no memory: refused before any size of them is summed. */
static void test_too_large(void **state)
{
    (void)state;
    static const char text[] = "return model \"m\" { tokens = 16, layers = {"
                               "linear \"l\" { in_features = 1 << 28, out_features = 1 << 28 } } }";
    char path[256];
    fp8_context_options options = FP8_CONTEXT_OPTIONS_INIT;
    fp8_context *context = NULL;
    fp8_bundle *bundle_ = NULL;
    fp8_layer *layer = NULL;
    fp8_comm *comm = NULL;
    fp8_comm_options alone = FP8_COMM_OPTIONS_INIT;
    ranks_bundle(text, "none", path);
    options.device = FP8_DEVICE_HOST;
    assert_int_equal(fp8_context_create(&options, &context), FP8_OK);
    assert_int_equal(fp8_bundle_open(context, path, &bundle_), FP8_OK);
    assert_int_equal(fp8_layer_create(bundle_, "l", &layer), FP8_OK);
    assert_int_equal(fp8_comm_create(context, &alone, &comm), FP8_OK);
    for (int is_hooked = 0; is_hooked < 2; is_hooked++) {
        fp8_hooks hooks = FP8_HOOKS_INIT;
        hooks.weight = no_weight;
        fp8_model_layer layers[] = { FP8_MODEL_LAYER_INIT };
        layers[0].layer = layer;
        layers[0].hooks = is_hooked ? &hooks : NULL;
        fp8_model_options model = FP8_MODEL_OPTIONS_INIT;
        model.context = context;
        model.layers = layers;
        model.layer_count = 1;
        model.comm = is_hooked ? NULL : comm;
        fp8_model_bytes bytes = { .size = sizeof bytes };
        assert_int_equal(fp8_model_measure(&model, &bytes), FP8_ERR_ARGUMENT);
        assert_non_null(strstr(fp8_last_error(), "layer 'l' has 268435456 rows of 268435456"));
    }
    fp8_comm_destroy(comm);
    fp8_layer_destroy(layer);
    fp8_bundle_close(bundle_);
    fp8_context_destroy(context);
    ranks_bundle_drop(path);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_ranks),
        cmocka_unit_test(test_kept),
        cmocka_unit_test(test_groups),
        cmocka_unit_test(test_slots),
        cmocka_unit_test(test_gathers),
        cmocka_unit_test(test_without_prefetch),
        cmocka_unit_test(test_average),
        cmocka_unit_test(test_exchange),
        cmocka_unit_test(test_transposed_shards),
        cmocka_unit_test(test_no_tokens),
        cmocka_unit_test(test_callers_accumulators),
        cmocka_unit_test(test_scales_by_row),
        cmocka_unit_test(test_scales_by_shard),
        cmocka_unit_test(test_what_ranks_agree_on),
        cmocka_unit_test(test_hooks),
        cmocka_unit_test(test_hooked_recipes),
        cmocka_unit_test(test_repeated_steps),
        cmocka_unit_test(test_too_large),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
