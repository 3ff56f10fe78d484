/*
 * test_provider.c - providers that ask the context themselves: what would wait for itself is
 * refused.
 *
 * On the host context, with bundles for no arch, so that nothing is compiled.
 */
#include "tests/cache/rig.h"

#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum { PATIENCE = 60 }; /* seconds, until what hangs is ended */

static fp8_context *context;
static fp8gen_jit_options options;

static int begin(void **state)
{
    (void)state;
    rig_begin(NULL);
    alarm(PATIENCE);
    fp8_context_options host = FP8_CONTEXT_OPTIONS_INIT;
    host.device = FP8_DEVICE_HOST;
    host.threads = 1;
    options = (fp8gen_jit_options)FP8GEN_JIT_OPTIONS_INIT;
    options.archs = "none";
    return fp8_context_create(&host, &context) != FP8_OK;
}

static int end(void **state)
{
    (void)state;
    alarm(0);
    fp8_context_destroy(context);
    rig_end(NULL);
    return 0;
}

static fp8_layer_description describe(int64_t out_features)
{
    fp8_layer_description d = FP8_LAYER_DESCRIPTION_INIT;
    d.in_features = 64;
    d.out_features = out_features;
    d.max_tokens = 64;
    return d;
}

static void refuses(const fp8_layer_description *d)
{
    const fp8_layer *layer;
    assert_int_equal(fp8_context_layer(context, d, &layer), FP8_ERR_ARGUMENT);
    assert_null(layer);
    assert_non_null(
        strstr(fp8_last_error(), "asks the context for that layer, which waits for the provider"));
}

/* A provider that asks the context for the layer that it is to make; with `detour`, by way of
 * another one. */
static int detour;

static int asking_provider(void *user, const fp8_layer_description *d, char *path,
                           size_t path_bytes)
{
    const fp8_layer *layer;
    (void)user;
    fp8_layer_description other = describe(detour != 0 && d->out_features == 16 ? 32 : 16);
    fp8_status status = fp8_context_layer(context, &other, &layer);
    snprintf(path, path_bytes, "%s", fp8_last_error());
    return (int)status;
}

static void a_provider_that_waits_for_itself_is_refused(void **state)
{
    (void)state;
    fp8_layer_description d = describe(16);
    fp8_context_set_provider(context, asking_provider, NULL);
    for (detour = 0; detour < 2; detour++)
        refuses(&d);
    fp8_context_set_provider(context, fp8gen_jit_provider, &options);
    const fp8_layer *layer;
    assert_int_equal(fp8_context_layer(context, &d, &layer), FP8_OK);
}

/* Two threads, each in a provider that asks for what the other one makes: one of them is refused,
 * none hangs. */
static struct {
    pthread_barrier_t both;
    pthread_mutex_t lock;
    int refused;
} crossing = { .lock = PTHREAD_MUTEX_INITIALIZER };

static int crossing_provider(void *user, const fp8_layer_description *d, char *path,
                             size_t path_bytes)
{
    const fp8_layer *layer;
    (void)user;
    fp8_layer_description other = describe(d->out_features == 16 ? 32 : 16);
    pthread_barrier_wait(&crossing.both);
    fp8_status status = fp8_context_layer(context, &other, &layer);
    pthread_mutex_lock(&crossing.lock);
    crossing.refused += strstr(fp8_last_error(), "waits for the provider") != NULL;
    pthread_mutex_unlock(&crossing.lock);
    snprintf(path, path_bytes, "%s", fp8_last_error());
    return (int)status;
}

static void *ask_crossing(void *user)
{
    const fp8_layer *layer;
    return fp8_context_layer(context, user, &layer) == FP8_OK ? user : NULL;
}

static void providers_that_wait_for_each_other_are_refused(void **state)
{
    (void)state;
    pthread_t thread;
    void *made;
    const fp8_layer *layer;
    fp8_layer_description d[2] = { describe(16), describe(32) };
    fp8_context_set_provider(context, crossing_provider, NULL);
    crossing.refused = 0;
    pthread_barrier_init(&crossing.both, NULL, 2);
    assert_int_equal(pthread_create(&thread, NULL, ask_crossing, &d[1]), 0);
    assert_int_equal(fp8_context_layer(context, &d[0], &layer), FP8_ERR_ARGUMENT);
    assert_int_equal(pthread_join(thread, &made), 0);
    pthread_barrier_destroy(&crossing.both);
    assert_null(made);
    assert_true(crossing.refused >= 1);
}

/* What does not wait for itself is served: a provider that has another layer made first. */
static int nesting_provider(void *user, const fp8_layer_description *d, char *path,
                            size_t path_bytes)
{
    const fp8_layer *layer;
    fp8_layer_description other = describe(d->out_features - 16);
    if (d->out_features > 16 && fp8_context_layer(context, &other, &layer) != FP8_OK)
        return FP8_ERR_LIBRARY;
    return fp8gen_jit_provider(user, d, path, path_bytes);
}

static void a_provider_may_ask_for_other_layers(void **state)
{
    (void)state;
    const fp8_layer *layer;
    fp8_layer_description d = describe(48);
    fp8_context_set_provider(context, nesting_provider, &options);
    assert_int_equal(fp8_context_layer(context, &d, &layer), FP8_OK);
    assert_non_null(layer);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, begin, end)

int main(int argc, char **argv)
{
    (void)argc;
    static const struct CMUnitTest tests[] = {
        TEST(a_provider_that_waits_for_itself_is_refused),
        TEST(providers_that_wait_for_each_other_are_refused),
        TEST(a_provider_may_ask_for_other_layers),
    };
    return RIG_RUN(argv, tests);
}
