/*
 * test_agree.c - a model of which one rank has something else: what every rank is told, at create.
 *
 * Two or three ranks are threads on the host. Their models differ in one field of one layer, or
 * their options in one; then all are told the field, the layer and both values, before anything is
 * gathered. What a rank may have to itself is no difference. And where one rank alone has no
 * memory, no rank gets a model.
 */
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

#include "runtime/check.h"
#include "runtime/fp8_model.h"
#include "tests/ranks/rig.h"

enum { LAYERS = 2, TIMEOUT = 30 };

/* Layers "l0", "l1", ... of one bundle: fields of a spec. Models have two layers: "a", which is the
 * first of these on all ranks, and "b", any of them. */
#define DELAYED(fields) "48, recipe = recipe.delayed { " fields " }"
enum variant {
    PLAIN,
    WIDE,
    BIAS,
    WEIGHT,
    OUTPUT,
    GRAD_INPUT,
    GRAD_WEIGHT,
    FORMAT,
    POWER_OF_TWO,
    SUMS,
    BATCH,
    HISTORY,
    MARGIN,
    LENGTH,
    ALGO,
    CALIBRATE,
    VARIANTS
};
static const char *const variants[VARIANTS] = {
    [PLAIN] = "48",
    [WIDE] = "64",
    [BIAS] = "48, bias = true",
    [WEIGHT] = "48, weight = 'fp32'",
    [OUTPUT] = "48, output = 'fp32'",
    [GRAD_INPUT] = "48, grad_input = 'fp16'",
    [GRAD_WEIGHT] = "48, grad_weight = 'bf16'",
    [FORMAT] = "48, recipe = recipe.current { format = 'e4m3' }",
    [POWER_OF_TWO] = "48, recipe = recipe.current { power_of_two = true }",
    [SUMS] = "48, accumulation = { wgrad = 'fast' }",
    [BATCH] = "48, tokens = 8, max_tokens = 64",
    [HISTORY] = DELAYED("history_length = 8"),
    [MARGIN] = DELAYED("history_length = 8, margin = 2"),
    [LENGTH] = DELAYED("history_length = 9"),
    [ALGO] = DELAYED("history_length = 8, algo = 'most_recent'"),
    [CALIBRATE] = DELAYED("history_length = 8, calibrate = true"),
};

static char bundle[256];

/* Of the first so many variants. */
static void make_bundle(int count)
{
    char text[4096];
    int at = snprintf(text, sizeof text, "return model \"m\" { tokens = 16, layers = {\n");
    for (int i = 0; i < count; i++)
        at += snprintf(text + at, sizeof text - (size_t)at,
                       "linear \"l%d\" { in_features = 32, out_features = %s },\n", i, variants[i]);
    snprintf(text + at, sizeof text - (size_t)at, "} }\n");
    ranks_bundle(text, "none", bundle);
}

struct creation {
    enum variant b[2]; /* of rank 0, of all others */
    void (*change)(fp8_model_options *options, fp8_model_layer *layers);
    const char *field; /* that is told; NULL: the models are made */
    const char *values[2];
};

struct made {
    fp8_bundle *bundle;
    fp8_layer *layers[LAYERS];
    fp8_model *model;
};

static bool open_layers(struct rank *rank, struct made *made, enum variant b)
{
    char name[16];
    snprintf(name, sizeof name, "l%d", (int)b);
    return fp8_bundle_open(rank->context, bundle, &made->bundle) == FP8_OK &&
           fp8_layer_create(made->bundle, "l0", &made->layers[0]) == FP8_OK &&
           fp8_layer_create(made->bundle, name, &made->layers[1]) == FP8_OK;
}

static fp8_status create(struct rank *rank, struct made *made, const struct creation *c)
{
    fp8_model_layer layers[LAYERS] = { FP8_MODEL_LAYER_INIT, FP8_MODEL_LAYER_INIT };
    fp8_model_options options = FP8_MODEL_OPTIONS_INIT;
    for (int i = 0; i < LAYERS; i++) {
        layers[i].layer = made->layers[i];
        layers[i].name = i ? "b" : "a";
    }
    options.layers = layers;
    options.layer_count = LAYERS;
    options.context = rank->context;
    options.comm = rank->comm;
    if (c->change && rank->rank > 0)
        c->change(&options, layers);
    return fp8_model_create(&options, &made->model);
}

static void drop(struct made *made)
{
    fp8_model_destroy(made->model);
    for (int i = 0; i < LAYERS; i++)
        fp8_layer_destroy(made->layers[i]);
    fp8_bundle_close(made->bundle);
}

/* ---- differences ---- */

static void body(struct rank *rank)
{
    const struct creation *c = rank->user;
    struct made made = { .model = NULL };
    char first[96], other[96];
    rank_check(rank, open_layers(rank, &made, c->b[rank->rank > 0]));
    fp8_status status = create(rank, &made, c);
    if (c->field) {
        snprintf(first, sizeof first, "rank 0 has %s", c->values[0]);
        snprintf(other, sizeof other, "rank 1 has %s", c->values[1]);
        rank_check(rank, status == FP8_ERR_COMM && !made.model);
        rank_check(rank, says("the ranks differ in", c->field, first, other, NULL));
        rank_check(rank, fp8_comm_poll(rank->comm) == FP8_OK); /* the communicator is well */
    } else {
        rank_check(rank, status == FP8_OK);
    }
    drop(&made);
}

static void test_layers(void **state)
{
    (void)state;
    static const struct creation all[] = {
        { .b = { PLAIN, WIDE },
          .field = "out_features of layer 1 ('b')",
          .values = { "48", "64" } },
        { .b = { PLAIN, BIAS }, .field = "bias of layer 1", .values = { "0", "1" } },
        { .b = { PLAIN, WEIGHT }, .field = "w_dtype of layer 1", .values = { "bf16", "fp32" } },
        { .b = { PLAIN, OUTPUT }, .field = "y_dtype of layer 1", .values = { "bf16", "fp32" } },
        { .b = { PLAIN, GRAD_INPUT },
          .field = "dx_dtype of layer 1",
          .values = { "bf16", "fp16" } },
        { .b = { PLAIN, GRAD_WEIGHT },
          .field = "dw_dtype of layer 1",
          .values = { "fp32", "bf16" } },
        { .b = { PLAIN, FORMAT }, .field = "dy_format of layer 1", .values = { "e5m2", "e4m3" } },
        { .b = { PLAIN, POWER_OF_TWO },
          .field = "power_of_two of layer 1",
          .values = { "0", "1" } },
        { .b = { PLAIN, SUMS },
          .field = "accumulation of wgrad of layer 1",
          .values = { "split", "fast" } },
        { .b = { PLAIN, HISTORY },
          .field = "recipe of layer 1",
          .values = { "current", "delayed" } },
        { .b = { HISTORY, MARGIN }, .field = "margin of layer 1", .values = { "0", "2" } },
        { .b = { HISTORY, LENGTH }, .field = "history_length of layer 1", .values = { "8", "9" } },
        { .b = { HISTORY, ALGO }, .field = "algo of layer 1", .values = { "max", "most_recent" } },
        { .b = { HISTORY, CALIBRATE }, .field = "calibrate of layer 1", .values = { "0", "1" } },
        { .b = { PLAIN, BATCH } }, /* a rank's own */
    };
    make_bundle(VARIANTS);
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) {
        struct creation c = all[i];
        ranks_run(2, TIMEOUT, body, &c);
    }
    ranks_bundle_drop(bundle);
}

static void set_slots(fp8_model_options *options, fp8_model_layer *layers)
{
    (void)layers;
    options->slots = 1;
}

/* Both slots are there all the same: kept groups have one each. */
static void set_ahead(fp8_model_options *options, fp8_model_layer *layers)
{
    set_slots(options, layers);
    options->backward = FP8_WEIGHTS_KEEP;
}

static void set_sum(fp8_model_options *options, fp8_model_layer *layers)
{
    (void)layers;
    options->grads = FP8_GRADS_SUM;
}

static void set_reduce(fp8_model_options *options, fp8_model_layer *layers)
{
    (void)layers;
    options->reduce_by = FP8_REDUCE_COLLECTIVE;
}

static void set_group(fp8_model_options *options, fp8_model_layer *layers)
{
    (void)options;
    layers[0].group = layers[1].group = 5;
}

static void set_name(fp8_model_options *options, fp8_model_layer *layers)
{
    (void)options;
    layers[0].name = "other";
}

static fp8_status take_grad(void *user, const fp8_hook_request *request, const fp8_tensor *grad,
                            fp8_event **done)
{
    (void)user, (void)request, (void)grad, (void)done;
    return FP8_OK;
}

static void set_hook(fp8_model_options *options, fp8_model_layer *layers)
{
    static fp8_hooks hooks = FP8_HOOKS_INIT;
    (void)options;
    if (!hooks.grad)
        hooks.grad = take_grad;
    layers[1].hooks = &hooks;
}

static void set_own(fp8_model_options *options, fp8_model_layer *layers)
{
    (void)layers;
    options->comm_sms = 8;
}

static void test_options(void **state)
{
    (void)state;
    static const struct creation all[] = {
        { .change = set_slots, .field = "slots of the model", .values = { "2", "1" } },
        { .change = set_ahead, .field = "gathered ahead of the model", .values = { "1", "0" } },
        { .change = set_sum, .field = "average of the model", .values = { "1", "0" } },
        { .change = set_reduce, .field = "reduce_by of the model", .values = { "0", "1" } },
        { .change = set_group, .field = "slots of the model", .values = { "2", "1" } },
        { .change = set_name, .field = "name of layer 0", .values = { "a", "other" } },
        { .change = set_hook, .field = "grad hook of layer 1 ('b')", .values = { "0", "1" } },
        { .change = set_own },
    };
    make_bundle(1);
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) {
        struct creation c = all[i];
        ranks_run(2, TIMEOUT, body, &c);
    }
    ranks_bundle_drop(bundle);
}

/* ---- memory ---- */

/* The n-th allocation of all ranks together fails: that of one rank. */
struct shortage {
    int64_t at;
    pthread_barrier_t meet;
    atomic_int made, refused;
};

static void short_body(struct rank *rank)
{
    struct shortage *s = rank->user;
    const struct creation c = { .field = NULL };
    struct made made = { .model = NULL };
    bool opened = open_layers(rank, &made, PLAIN);
    pthread_barrier_wait(&s->meet);
    if (rank->rank == 0)
        (void)fp8_allocation_fail_at(s->at);
    pthread_barrier_wait(&s->meet);
    fp8_status status = opened ? create(rank, &made, &c) : FP8_ERR_INTERNAL;
    atomic_fetch_add(status == FP8_OK ? &s->made : &s->refused, 1);
    drop(&made);
    rank_check(rank, status == FP8_OK || status == FP8_ERR_MEMORY || status == FP8_ERR_COMM);
}

static void test_shortage(void **state)
{
    (void)state;
    enum { RANKS = 3 };
    struct shortage s = { .at = 0 };
    int refused = 0;
    make_bundle(1);
    do {
        s.at++;
        atomic_store(&s.made, 0);
        atomic_store(&s.refused, 0);
        assert_int_equal(pthread_barrier_init(&s.meet, NULL, RANKS), 0);
        ranks_run(RANKS, TIMEOUT, short_body, &s);
        (void)fp8_allocation_fail_at(0);
        pthread_barrier_destroy(&s.meet);
        assert_int_equal(atomic_load(&s.made) + atomic_load(&s.refused), RANKS);
        if (atomic_load(&s.made) != 0 && atomic_load(&s.refused) != 0)
            fail_msg("allocation %lld fails: %d ranks have a model, %d have none", (long long)s.at,
                     atomic_load(&s.made), atomic_load(&s.refused));
        refused += atomic_load(&s.refused) != 0;
    } while (atomic_load(&s.made) == 0 && s.at < 1000);
    assert_in_range(refused, 5, 999); /* the pool is the last of them */
    ranks_bundle_drop(bundle);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_layers),
        cmocka_unit_test(test_options),
        cmocka_unit_test(test_shortage),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
