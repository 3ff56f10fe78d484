/*
 * test_agree.c - a model of which one rank has something else: what every rank is told, at create.
 *
 * Two or three ranks are threads on the host. Their bundles differ in one field of one layer, or their
 * options in one; then all are told the field, the layer and both values, before anything is gathered. What
 * a rank may have to itself is no difference. And where one rank alone has no memory, no rank gets a model.
 */
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

#include "runtime/check.h"
#include "runtime/fp8_model.h"
#include "tests/ranks/rig.h"

enum { LAYERS = 2, TIMEOUT = 30 };

/* Layer "a" is the same everywhere, "b" has these fields. */
#define SPEC                                                                                       \
    "return model \"m\" { tokens = 16, layers = {\n"                                               \
    "linear \"a\" { in_features = 32, out_features = 48 },\n"                                      \
    "linear \"b\" { in_features = 32, out_features = %s },\n"                                      \
    "} }\n"

struct creation {
    const char *bundles[2]; /* of rank 0, of all others */
    void (*change)(fp8_model_options *options, fp8_model_layer *layers);
    const char *field; /* that is told; NULL: the models are made */
    const char *values[2];
};

struct made {
    fp8_bundle *bundle;
    fp8_layer *layers[LAYERS];
    fp8_model *model;
};

static bool open_layers(struct rank *rank, struct made *made, const char *bundle)
{
    if (fp8_bundle_open(rank->context, bundle, &made->bundle) != FP8_OK)
        return false;
    for (int i = 0; i < LAYERS; i++) {
        if (fp8_layer_create(made->bundle, i ? "b" : "a", &made->layers[i]) != FP8_OK)
            return false;
    }
    return true;
}

static fp8_status create(struct rank *rank, struct made *made, const struct creation *c)
{
    fp8_model_layer layers[LAYERS] = { FP8_MODEL_LAYER_INIT, FP8_MODEL_LAYER_INIT };
    fp8_model_options options = FP8_MODEL_OPTIONS_INIT;
    for (int i = 0; i < LAYERS; i++)
        layers[i].layer = made->layers[i];
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
    rank_check(rank, open_layers(rank, &made, c->bundles[rank->rank > 0]));
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

static void differ(const char *one, const char *two, const char *field, const char *value,
                   const char *other)
{
    char text[1024], bundles[2][256];
    const char *const fields[] = { one, two };
    struct creation c = { .field = field, .values = { value, other } };
    for (int i = 0; i < 2; i++) {
        snprintf(text, sizeof text, SPEC, fields[i]);
        ranks_bundle(text, "none", bundles[i]);
        c.bundles[i] = bundles[i];
    }
    ranks_run(2, TIMEOUT, body, &c);
    for (int i = 0; i < 2; i++)
        ranks_bundle_drop(bundles[i]);
}

static void test_layers(void **state)
{
    (void)state;
#define DELAYED(fields) "48, recipe = recipe.delayed { " fields " }"
    differ("48", "64", "out_features of layer 1 ('b')", "48", "64");
    differ("48", "48, bias = true", "bias of layer 1", "0", "1");
    differ("48", "48, weight = 'fp32'", "w_dtype of layer 1", "bf16", "fp32");
    differ("48", "48, output = 'fp32'", "y_dtype of layer 1", "bf16", "fp32");
    differ("48", "48, grad_input = 'fp16'", "dx_dtype of layer 1", "bf16", "fp16");
    differ("48", "48, grad_weight = 'bf16'", "dw_dtype of layer 1", "fp32", "bf16");
    differ("48", "48, recipe = recipe.current { format = 'e4m3' }", "dy_format of layer 1", "e5m2",
           "e4m3");
    differ("48", "48, recipe = recipe.current { power_of_two = true }", "power_of_two of layer 1",
           "0", "1");
    differ("48", DELAYED(""), "recipe of layer 1", "current", "delayed");
    differ(DELAYED("margin = 1"), DELAYED("margin = 2"), "margin of layer 1", "1", "2");
    differ(DELAYED("history_length = 8"), DELAYED("history_length = 9"),
           "history_length of layer 1", "8", "9");
    differ(DELAYED(""), DELAYED("algo = 'most_recent'"), "algo of layer 1", "max", "most_recent");
    differ(DELAYED(""), DELAYED("calibrate = true"), "calibrate of layer 1", "0", "1");
    differ("48", "48, accumulation = { wgrad = 'fast' }", "accumulation of wgrad of layer 1",
           "split", "fast");
    /* a rank's own batch */
    differ("48", "48, tokens = 8, max_tokens = 64", NULL, NULL, NULL);
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
    options->keep = 1;
}

static void set_average(fp8_model_options *options, fp8_model_layer *layers)
{
    (void)layers;
    options->average = 1;
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
        { .change = set_average, .field = "average of the model", .values = { "0", "1" } },
        { .change = set_reduce, .field = "reduce_by of the model", .values = { "0", "1" } },
        { .change = set_group, .field = "slots of the model", .values = { "2", "1" } },
        { .change = set_name, .field = "name of layer 0", .values = { "a", "other" } },
        { .change = set_hook, .field = "grad hook of layer 1 ('b')", .values = { "0", "1" } },
        { .change = set_own },
    };
    char text[1024], bundle[256];
    snprintf(text, sizeof text, SPEC, "48");
    ranks_bundle(text, "none", bundle);
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) {
        struct creation c = all[i];
        c.bundles[0] = c.bundles[1] = bundle;
        ranks_run(2, TIMEOUT, body, &c);
    }
    ranks_bundle_drop(bundle);
}

/* ---- memory ---- */

/* The n-th allocation of all ranks together fails: that of one rank. */
struct shortage {
    const char *bundle;
    int64_t at;
    pthread_barrier_t meet;
    atomic_int made, refused;
};

static void short_body(struct rank *rank)
{
    struct shortage *s = rank->user;
    const struct creation c = { .field = NULL };
    struct made made = { .model = NULL };
    bool opened = open_layers(rank, &made, s->bundle);
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
    char text[1024];
    char bundle[256];
    struct shortage s = { .bundle = bundle };
    snprintf(text, sizeof text, SPEC, "48");
    ranks_bundle(text, "none", bundle);
    int refused = 0;
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
