/*
 * test_state.c - histories of delayed scaling over ranks: with amax_group = "fsdp" those of one GPU
 * that saw the tokens of all, with "rank" each its own. A state goes on over another number of
 * ranks.
 *
 * Rank r of RANKS has tokens of amplitude 64^r; the last one has none in the first step, and
 * another comes late to the all-reduce of the second.
 */
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "runtime/fp8_format.h"
#include "runtime/fp8_model.h"
#include "runtime/fp8_state.h"
#include "tests/ranks/rig.h"

enum { RANKS = 3, STEPS = 3, TOKENS = 8, K = 64, BYTES = 1024 };

struct state_case {
    const char *bundle;
    const unsigned char *begin; /* saved data to begin with; NULL: empty histories */
    unsigned char saved[RANKS][STEPS][BYTES];
};

struct side {
    fp8_bundle *bundle;
    fp8_layer *layers[2];
    fp8_model *model;
    fp8_state *state;
};

static float amplitude_of(int rank)
{
    return rank == 0 ? 1.0f : rank == 1 ? 64.0f : 4096.0f;
}

static bool open_side(struct rank *rank, const char *path, struct side *side)
{
    fp8_model_layer layers[2] = { FP8_MODEL_LAYER_INIT, FP8_MODEL_LAYER_INIT };
    fp8_model_options options = FP8_MODEL_OPTIONS_INIT;
    if (fp8_bundle_open(rank->context, path, &side->bundle) != FP8_OK)
        return false;
    for (int i = 0; i < 2; i++) {
        if (fp8_layer_create(side->bundle, fp8_bundle_layer_name(side->bundle, i),
                             &side->layers[i]) != FP8_OK)
            return false;
        layers[i].layer = side->layers[i];
    }
    options.layer_count = 2;
    options.layers = layers;
    options.context = rank->context;
    options.comm = rank->comm;
    return fp8_model_create(&options, &side->model) == FP8_OK &&
           fp8_state_create((const fp8_layer *const *)side->layers, 2, &side->state) == FP8_OK;
}

static void close_side(struct side *side)
{
    fp8_state_destroy(side->state);
    fp8_model_destroy(side->model);
    for (int i = 0; i < 2; i++)
        fp8_layer_destroy(side->layers[i]);
    fp8_bundle_close(side->bundle);
}

/* x of the second layer, whose amax is the amplitude. */
static bool quantize(const struct side *side, float amplitude)
{
    uint16_t values[TOKENS * K];
    fp8_tensor x = { values, TOKENS, K, K, FP8_DTYPE_BF16, 0 };
    fp8_quantize_args args = FP8_QUANTIZE_ARGS_INIT;
    fp8_operand operand = FP8_OPERAND_INIT;
    for (int i = 0; i < TOKENS * K; i++)
        values[i] = fp8_float_to_bf16(amplitude * (float)(i % 9 - 4) / 4.0f);
    if (fp8_layer_bytes(side->layers[1], TOKENS, FP8_BYTES_X, &operand.bytes) != FP8_OK ||
        fp8_layer_bytes(side->layers[1], TOKENS, FP8_BYTES_WORKSPACE, &args.call.workspace_bytes) !=
            FP8_OK)
        return false;
    operand.data = aligned_alloc(256, (operand.bytes + 255) / 256 * 256);
    args.call.workspace = aligned_alloc(256, (args.call.workspace_bytes + 255) / 256 * 256);
    args.role = FP8_ROLE_X;
    args.source = &x;
    args.operand = &operand;
    args.call.state = side->state;
    args.call.state_layer = 1;
    bool good =
        operand.data && args.call.workspace && fp8_quantize(side->layers[1], &args) == FP8_OK;
    free(operand.data);
    free(args.call.workspace);
    return good;
}

static void body(struct rank *rank)
{
    struct state_case *c = rank->user;
    struct side side = { 0 };
    size_t bytes;
    rank_check(rank, open_side(rank, c->bundle, &side));
    rank_check(rank, fp8_state_bytes(side.state, &bytes) == FP8_OK && bytes <= BYTES);
    rank_check(rank, !c->begin || fp8_state_load(side.state, c->begin, bytes, NULL) == FP8_OK);
    for (int step = 0; step < STEPS; step++) {
        if (step > 0 || rank->rank < RANKS - 1)
            rank_check(rank, quantize(&side, amplitude_of(rank->rank)));
        if (step == 1 && rank->rank == 1)
            usleep(10000);
        rank_check(rank, fp8_model_advance(side.model, side.state, NULL) == FP8_OK);
        rank_check(rank, fp8_comm_wait(rank->comm, NULL) == FP8_OK);
        rank_check(rank,
                   fp8_state_save(side.state, c->saved[rank->rank][step], bytes, NULL) == FP8_OK);
    }
    rank_check(rank, fp8_model_advance(NULL, side.state, NULL) == FP8_ERR_ARGUMENT);
    rank_check(rank, fp8_model_advance(side.model, NULL, NULL) == FP8_ERR_ARGUMENT);
    close_side(&side);
}

static void run(const char *group, int ranks, const unsigned char *begin, struct state_case *c)
{
    char text[512], path[256];
    snprintf(text, sizeof text,
             "return model \"states\" { tokens = 16, mesh = { fsdp = %d },\n"
             "recipe = recipe.delayed { history_length = 4, amax_group = \"%s\" }, layers = {\n"
             "linear \"a\" { in_features = 32, out_features = 48 },\n"
             "linear \"b\" { in_features = %d, out_features = 40 } } }\n",
             ranks, group, K);
    ranks_bundle(text, "none", path);
    memset(c, 0, sizeof *c);
    c->bundle = path;
    c->begin = begin;
    ranks_run(ranks, 60, body, c);
    ranks_bundle_drop(path);
}

/* Of x of the second layer, from the saved data. */
static float scale_of(const struct state_case *c, int rank, int step)
{
    float scale;
    memcpy(&scale, c->saved[rank][step] + 32 + 3 * sizeof scale, sizeof scale);
    return scale;
}

static void test_shared(void **state)
{
    (void)state;
    static struct state_case c;
    static const float amaxes[STEPS] = { 64.0f, 4096.0f, 4096.0f };
    run("fsdp", RANKS, NULL, &c);
    for (int step = 0; step < STEPS; step++) {
        for (int rank = 0; rank < RANKS; rank++) {
            assert_true(scale_of(&c, rank, step) == 448.0f / amaxes[step]);
            assert_memory_equal(c.saved[rank][step], c.saved[0][step], BYTES);
        }
    }
}

static void test_alone(void **state)
{
    (void)state;
    static struct state_case c;
    run("rank", RANKS, NULL, &c);
    for (int step = 0; step < STEPS; step++) {
        for (int rank = 0; rank < RANKS; rank++) {
            bool ran = step > 0 || rank < RANKS - 1;
            assert_true(scale_of(&c, rank, step) == (ran ? 448.0f / amplitude_of(rank) : 1.0f));
        }
    }
}

static fp8_status no_weight(void *user, const fp8_hook_request *request, fp8_weight_view *view)
{
    (void)user, (void)request, (void)view;
    return FP8_ERR_UNSUPPORTED;
}

/* What three ranks saved goes on with two: their amaxes are in the history until it has rolled over
 * them. */
static void test_another_sharding(void **state)
{
    (void)state;
    static struct state_case three, two;
    static const float amaxes[STEPS] = { 4096.0f, 4096.0f, 4096.0f };
    run("fsdp", RANKS, NULL, &three);
    run("fsdp", 2, three.saved[1][STEPS - 1], &two);
    for (int step = 0; step < STEPS; step++) {
        for (int rank = 0; rank < 2; rank++) {
            assert_true(scale_of(&two, rank, step) == 448.0f / amaxes[step]);
            assert_memory_equal(two.saved[rank][step], two.saved[0][step], BYTES);
        }
    }
    run("fsdp", 2, two.saved[0][STEPS - 1], &three);
    assert_true(scale_of(&three, 0, 0) == 448.0f / 64.0f); /* a history of four */
}

/* Layers of two groups, a model without a communicator. */
static void refuse_body(struct rank *rank)
{
    struct state_case *c = rank->user;
    struct side side = { 0 };
    fp8_hooks hooks = FP8_HOOKS_INIT;
    fp8_model_layer only = FP8_MODEL_LAYER_INIT;
    fp8_model_options options = FP8_MODEL_OPTIONS_INIT;
    rank_check(rank, fp8_bundle_open(rank->context, c->bundle, &side.bundle) == FP8_OK);
    for (int i = 0; i < 2; i++)
        rank_check(rank, fp8_layer_create(side.bundle, i ? "shared" : "alone", &side.layers[i]) ==
                             FP8_OK);
    rank_check(rank, fp8_state_create((const fp8_layer *const *)side.layers, 2, &side.state) ==
                         FP8_ERR_ARGUMENT);
    rank_check(rank, says("amax_group", "'shared'", NULL) && !side.state);
    hooks.weight = no_weight;
    only.layer = side.layers[1];
    only.hooks = &hooks;
    options.layer_count = 1;
    options.layers = &only;
    options.context = rank->context;
    rank_check(rank, fp8_model_create(&options, &side.model) == FP8_OK);
    rank_check(rank, fp8_state_create((const fp8_layer *const *)&side.layers[1], 1, &side.state) ==
                         FP8_OK);
    rank_check(rank, fp8_model_advance(side.model, side.state, NULL) == FP8_ERR_ARGUMENT);
    rank_check(rank, says("no communicator", "fp8_state_running", NULL));
    close_side(&side);
}

static void test_refused(void **state)
{
    (void)state;
    char path[256];
    struct state_case c = { .bundle = path };
    ranks_bundle("return model \"groups\" { tokens = 16, mesh = { fsdp = 2 }, layers = {\n"
                 "linear \"alone\" { in_features = 32, out_features = 48,\n"
                 "    recipe = recipe.delayed {} },\n"
                 "linear \"shared\" { in_features = 32, out_features = 48,\n"
                 "    recipe = recipe.delayed { amax_group = \"fsdp\" } } } }\n",
                 "none", path);
    ranks_run(1, 60, refuse_body, &c);
    ranks_bundle_drop(path);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_shared),
        cmocka_unit_test(test_alone),
        cmocka_unit_test(test_another_sharding),
        cmocka_unit_test(test_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
