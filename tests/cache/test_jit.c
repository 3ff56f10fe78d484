/*
 * test_jit.c - layers by description: where they come from, once each, whoever asks; and who waits
 * for whom.
 *
 * On the host context, with fp8gen_jit_provider behind a provider of the test that counts, holds
 * and fails. Runs clean under ThreadSanitizer.
 */
#include "tests/cache/rig.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <sys/stat.h>
#include <unistd.h>

enum { THREADS = 16 };

/* ---- a provider that can be watched ---------------------------------------------------------- */

static struct {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    int calls;
    int inside, most_inside;
    int64_t held;    /* descriptions of this many out_features wait ... */
    bool is_holding; /* ... and one does */
    int failures;    /* so many calls fail first */
    int damage;      /* so many bundles are damaged after they were made */
    int64_t refused; /* descriptions of this many out_features fail */
} seen = { PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, 0, 0, 0, 0, false, 0, 0, 0 };

static void damage_bundle(const char *path)
{
    char file[2 * RIG_PATH];
    snprintf(file, sizeof(file), "%s/manifest.json", path);
    if (truncate(file, 100) != 0)
        abort();
}

static int provider(void *user, const fp8_layer_description *d, char *path, size_t path_bytes)
{
    pthread_mutex_lock(&seen.lock);
    seen.calls++;
    if (++seen.inside > seen.most_inside)
        seen.most_inside = seen.inside;
    bool fails = (seen.failures > 0 && seen.failures-- > 0) ||
                 (seen.refused != 0 && seen.refused == d->out_features);
    while (seen.held != 0 && seen.held == d->out_features) {
        seen.is_holding = true;
        pthread_cond_broadcast(&seen.changed);
        pthread_cond_wait(&seen.changed, &seen.lock);
    }
    pthread_mutex_unlock(&seen.lock);
    int status = FP8_ERR_LIBRARY;
    if (fails)
        snprintf(path, path_bytes, "the compiler is on holiday");
    else
        status = fp8gen_jit_provider(user, d, path, path_bytes);
    pthread_mutex_lock(&seen.lock);
    if (status == FP8_OK && seen.damage > 0 && seen.damage-- > 0)
        damage_bundle(path);
    seen.inside--;
    pthread_mutex_unlock(&seen.lock);
    return status;
}

static void hold(int64_t out_features)
{
    pthread_mutex_lock(&seen.lock);
    seen.held = out_features;
    seen.is_holding = false;
    pthread_cond_broadcast(&seen.changed);
    pthread_mutex_unlock(&seen.lock);
}

static void wait_until_held(void)
{
    pthread_mutex_lock(&seen.lock);
    while (!seen.is_holding)
        pthread_cond_wait(&seen.changed, &seen.lock);
    pthread_mutex_unlock(&seen.lock);
}

/* ---- the context of a test ------------------------------------------------------------------- */

static fp8_context *context;
static fp8gen_jit_options options;

static void log_line(void *user, fp8_log_level level, const char *message)
{
    rig_log(user, (int)level, message);
}

static int begin(void **state)
{
    rig_begin(state);
    fp8_context_options host = FP8_CONTEXT_OPTIONS_INIT;
    host.device = FP8_DEVICE_HOST;
    host.threads = 1;
    host.log = log_line;
    options = (fp8gen_jit_options)FP8GEN_JIT_OPTIONS_INIT;
    options.archs = "sm_90a";
    seen.calls = seen.most_inside = seen.failures = seen.damage = 0;
    seen.held = seen.refused = 0;
    if (fp8_context_create(&host, &context) != FP8_OK)
        return 1;
    return fp8_context_set_provider(context, provider, &options) != FP8_OK;
}

static int end(void **state)
{
    fp8_context_destroy(context);
    return rig_end(state);
}

static fp8_layer_description describe(int64_t out_features)
{
    fp8_layer_description d = FP8_LAYER_DESCRIPTION_INIT;
    d.in_features = 64;
    d.out_features = out_features;
    d.max_tokens = 64;
    return d;
}

static const fp8_layer *get(const fp8_layer_description *d)
{
    const fp8_layer *layer;
    if (fp8_context_layer(context, d, &layer) != FP8_OK)
        fail_msg("%s", fp8_last_error());
    assert_non_null(layer);
    return layer;
}

static void refused(const fp8_layer_description *d, fp8_status wanted, const char *part)
{
    const fp8_layer *layer = (const fp8_layer *)&context;
    assert_int_equal(fp8_context_layer(context, d, &layer), wanted);
    assert_null(layer);
    if (strstr(fp8_last_error(), part) == NULL)
        fail_msg("'%s' is not in: %s", part, fp8_last_error());
}

/* ---- where layers come from ------------------------------------------------------------------ */

static void a_layer_is_what_was_described(void **state)
{
    (void)state;
    fp8_layer_description d = describe(80);
    d.has_bias = 1;
    d.tokens = 32;
    d.w_dtype = FP8_DTYPE_FP32;
    d.y_dtype = FP8_DTYPE_FP32;
    d.dx_dtype = FP8_DTYPE_FP32;
    d.dw_dtype = FP8_DTYPE_BF16;
    d.format = "e4m3";
    d.power_of_two = 1;
    d.fprop = FP8_ACCUMULATION_SPLIT;
    d.dgrad = FP8_ACCUMULATION_FAST;
    d.wgrad = FP8_ACCUMULATION_FAST;
    fp8_layer_info info = { .size = sizeof(info) };
    assert_int_equal(fp8_layer_describe(get(&d), &info), FP8_OK);
    assert_int_equal(info.in_features, 64);
    assert_int_equal(info.out_features, 80);
    assert_int_equal(info.tokens, 32);
    assert_int_equal(info.max_tokens, 64);
    assert_int_equal(info.has_bias, 1);
    assert_int_equal(info.w_dtype, FP8_DTYPE_FP32);
    assert_int_equal(info.y_dtype, FP8_DTYPE_FP32);
    assert_int_equal(info.dx_dtype, FP8_DTYPE_FP32);
    assert_int_equal(info.dw_dtype, FP8_DTYPE_BF16);
    assert_int_equal(info.dy_format, FP8_DTYPE_E4M3);
}

static void equal_descriptions_share(void **state)
{
    (void)state;
    fp8_layer_description a = describe(80), b = describe(80), c = describe(96);
    b.recipe = "current";
    b.format = "hybrid";
    b.tokens = 64;
    b.dw_dtype = FP8_DTYPE_FP32;
    b.wgrad = FP8_ACCUMULATION_SPLIT;
    assert_ptr_equal(get(&a), get(&b));
    assert_int_equal(seen.calls, 1);
    assert_ptr_not_equal(get(&a), get(&c));
    assert_int_equal(seen.calls, 2);
    c.has_bias = 1;
    get(&c);
    assert_int_equal(seen.calls, 3);
}

static fp8_bundle *open_spec(const char *spec)
{
    char path[RIG_PATH];
    fp8_bundle *bundle;
    if (fp8gen_jit_bundle(NULL, "t", spec, strlen(spec), path, sizeof(path)) != FP8GEN_OK)
        fail_msg("%s", fp8gen_jit_error());
    assert_int_equal(fp8_bundle_open(context, path, &bundle), FP8_OK);
    return bundle;
}

static void bundles_that_were_given_come_first(void **state)
{
    (void)state;
    fp8_bundle *bundle = open_spec(
        "return model \"m\" { layers = { linear \"a\" { in_features = 64, out_features = 80, "
        "tokens = 128,"
        " bias = true } , linear \"b\" { in_features = 64, out_features = 80, tokens = 128 } } }");
    assert_int_equal(fp8_context_add_bundle(context, bundle), FP8_OK);
    assert_int_equal(fp8_context_add_bundle(context, bundle), FP8_ERR_ARGUMENT);
    fp8_layer_description d = describe(80);
    fp8_layer_info info = { .size = sizeof(info) };
    assert_int_equal(fp8_layer_describe(get(&d), &info), FP8_OK);
    assert_string_equal(info.name, "b");
    assert_int_equal(info.max_tokens, 128); /* larger serves */
    assert_int_equal(seen.calls, 0);
    assert_int_equal(rig_logged("[2] "), 0);
    d.max_tokens = 129;
    get(&d);
    d.max_tokens = 64;
    d.power_of_two = 1;
    get(&d);
    d.power_of_two = 0;
    d.fprop = FP8_ACCUMULATION_SPLIT;
    get(&d);
    d.fprop = FP8_ACCUMULATION_DEFAULT;
    d.format = "e4m3";
    get(&d);
    d.format = NULL;
    d.dx_dtype = FP8_DTYPE_FP32;
    get(&d);
    d.dx_dtype = FP8_DTYPE_NONE;
    d.shards = 1; /* the bundle is of one rank */
    get(&d);
    assert_int_equal(seen.calls, 6);
}

static void layers_of_a_spec(void **state)
{
    (void)state;
    fp8_layer_description d = FP8_LAYER_DESCRIPTION_INIT;
    d.spec = "return model \"m\" { tokens = 16, layers = {\n"
             "  linear \"a\" { in_features = 64, out_features = 80 },\n"
             "  linear \"b\" { in_features = 80, out_features = 64 } } }";
    refused(&d, FP8_ERR_ARGUMENT, "2 layers");
    d.layer = "c";
    refused(&d, FP8_ERR_NOT_FOUND, "c of the spec");
    d.layer = "a";
    const fp8_layer *a = get(&d);
    d.layer = "b";
    const fp8_layer *b = get(&d);
    assert_ptr_not_equal(a, b);
    d.in_features = 64;
    refused(&d, FP8_ERR_ARGUMENT, "a spec or the fields");
    d.in_features = 0;
    d.fprop = FP8_ACCUMULATION_SPLIT;
    refused(&d, FP8_ERR_ARGUMENT, "a spec or the fields");
    d.fprop = FP8_ACCUMULATION_DEFAULT;
    d.spec = "return model \"m\" { layers = { linear \"a\" { in_feature = 64 } } }";
    refused(&d, FP8_ERR_ARGUMENT, "did you mean 'in_features'?");
    assert_non_null(strstr(fp8gen_jit_error(), "spec:1:"));
}

static void without_a_provider(void **state)
{
    (void)state;
    fp8_layer_description d = describe(80);
    assert_int_equal(fp8_context_set_provider(context, NULL, NULL), FP8_OK);
    refused(&d, FP8_ERR_NOT_FOUND, "no provider");
}

static void wrong_descriptions(void **state)
{
    (void)state;
    fp8_layer_description d = describe(80);
    refused(NULL, FP8_ERR_ARGUMENT, "description is NULL");
    d.size = 8;
    refused(&d, FP8_ERR_ARGUMENT, "FP8_LAYER_DESCRIPTION_INIT");
    d = describe(0);
    refused(&d, FP8_ERR_ARGUMENT, "out_features is 0");
    d = describe(80);
    d.max_tokens = 0;
    refused(&d, FP8_ERR_ARGUMENT, "tokens is 0");
    d.max_tokens = 8, d.tokens = 9;
    refused(&d, FP8_ERR_ARGUMENT, "tokens is 9");
    d = describe(80);
    d.arch = 90;
    refused(&d, FP8_ERR_ARGUMENT, "arch and reserved");
    d = describe(80);
    d.recipe = "current { } } os.exit()";
    char text[RIG_PATH];
    refused(&d, FP8_ERR_ARGUMENT, "recipe is \"current { } } os.exit()\"; pass one of the words");
    assert_int_equal(fp8gen_jit_provider(NULL, &d, text, sizeof(text)), FP8_ERR_ARGUMENT);
    assert_non_null(strstr(text, "are words"));
    d = describe(80);
    assert_int_equal(fp8_context_layer(context, &d, NULL), FP8_ERR_ARGUMENT);
    assert_int_equal(fp8_context_layer(NULL, &d, (const fp8_layer **)&d.spec), FP8_ERR_ARGUMENT);
    assert_int_equal(fp8_context_prepare(context, NULL, 1), FP8_ERR_ARGUMENT);
    assert_int_equal(fp8_context_prepare(context, NULL, 0), FP8_OK);
    assert_int_equal(fp8_context_add_bundle(context, NULL), FP8_ERR_ARGUMENT);
}

/* One field of a description that is good without it: refused at once, by its name, and no provider
 * is asked. */
static void wrong_fields(void **state)
{
    (void)state;
#define WRONG(field, wrong, part)                                                                  \
    do {                                                                                           \
        fp8_layer_description d = describe(80);                                                    \
        d.field = wrong;                                                                           \
        refused(&d, FP8_ERR_ARGUMENT, "context_layer: " part);                                     \
    } while (0)
#define WRONG_WITH(name, field, wrong, part)                                                       \
    do {                                                                                           \
        fp8_layer_description d = describe(80);                                                    \
        d.recipe = name;                                                                           \
        d.field = wrong;                                                                           \
        refused(&d, FP8_ERR_ARGUMENT, "context_layer: " part);                                     \
    } while (0)
    WRONG(in_features, (1 << 28) + 1, "in_features is 268435457, not in 1..268435456");
    WRONG(max_tokens, -1, "max_tokens is -1, not in 0..");
    WRONG(has_bias, 2, "has_bias is 2, not in 0..1; pass 0 or 1");
    WRONG(w_dtype, FP8_DTYPE_FP16, "w_dtype is 7 (fp16); pass FP8_DTYPE_BF16, _FP32");
    WRONG(y_dtype, FP8_DTYPE_E4M3, "y_dtype is 1 (e4m3); pass FP8_DTYPE_BF16, _FP16, _FP32");
    WRONG(dx_dtype, (fp8_dtype)-1, "dx_dtype is -1 (none)");
    WRONG(dw_dtype, (fp8_dtype)99, "dw_dtype is 99");
    WRONG(fprop, (fp8_accumulation)5, "fprop is 5, not in 0..4; pass FP8_ACCUMULATION_");
    WRONG(fprop, (fp8_accumulation)-1, "fprop is -1, not in 0..4; pass FP8_ACCUMULATION_");
    WRONG(has_bias, (uint32_t)-1, "has_bias is -1, not in 0..1");
    WRONG(dgrad, (fp8_accumulation)6, "dgrad is 6, not in 0..4");
    WRONG(wgrad, (fp8_accumulation)99, "wgrad is 99, not in 0..4");
    WRONG(power_of_two, (fp8_switch)3, "power_of_two is 3, not in 0..2");
    WRONG(calibrate, 2, "calibrate is 2, not in 0..1");
    WRONG(shards, 2, "shards is 2, not in 0..1");
    WRONG(compute, "fp4", "compute is \"fp4\"; pass one of the words \"fp8\", \"bf16\"");
    WRONG(recipe, "nothing",
          "recipe is \"nothing\"; pass one of the words \"current\", \"delayed\"");
    WRONG(format, "e5m2", "format is \"e5m2\"; pass one of the words \"hybrid\", \"e4m3\"");
    WRONG(layer, "a", "layer is \"a\", which names a layer of a spec, but spec is NULL");
    WRONG(history_length, 8, "history_length is given, but recipe \"current\" keeps no history");
    WRONG(algo, "max", "algo is given, but recipe");
    WRONG_WITH("delayed", history_length, 65537, "history_length is 65537, not in 0..65536");
    WRONG_WITH("delayed", margin, 9, "margin is 9, not in 0..8");
    WRONG_WITH("delayed", algo, "mean",
               "algo is \"mean\"; pass one of the words \"max\", \"most_recent\"");
    WRONG_WITH("block", format, "hybrid", "format is \"hybrid\", but recipe \"block\"");
    WRONG_WITH("block", dgrad, FP8_ACCUMULATION_FAST, "dgrad is 1, but with recipe \"block\"");
    WRONG_WITH("rowwise_hp_wgrad", wgrad, FP8_ACCUMULATION_256, "wgrad is 3, but with recipe");
    assert_int_equal(seen.calls, 0);
}

/* ---- failures -------------------------------------------------------------------------------- */

static void after_a_failure_the_next_call_tries_again(void **state)
{
    (void)state;
    fp8_layer_description d = describe(80);
    seen.failures = 1;
    refused(&d, FP8_ERR_LIBRARY, "the compiler is on holiday");
    get(&d);
    assert_int_equal(seen.calls, 2);
}

static void a_bundle_damaged_before_it_is_opened(void **state)
{
    (void)state;
    fp8_layer_description d = describe(80);
    seen.damage = 1;
    get(&d);
    assert_int_equal(seen.calls, 2);
}

/* ---- the log --------------------------------------------------------------------------------- */

static void what_was_not_prepared_is_logged(void **state)
{
    (void)state;
    fp8_layer_description d[2] = { describe(80), describe(96) };
    assert_int_equal(fp8_context_prepare(context, &d[0], 1), FP8_OK);
    get(&d[0]);
    assert_int_equal(rig_logged("not prepared"), 0);
    setenv("FAKE_NVRTC_DELAY_MS", "3", 1);
    options.archs = "sm_90";
    get(&d[1]);
    get(&d[1]);
    assert_int_equal(rig_logged("[2] layer of 64 in_features, 96 out_features: not prepared"), 1);
    assert_int_equal(rig_logged(" ms inside a step"), 1);
    assert_int_equal(rig_logged("amax_bf16"), 0); /* the kernels are of the level info */
}

/* ---- many threads ---------------------------------------------------------------------------- */

struct asking {
    pthread_t thread;
    fp8_layer_description d;
    const fp8_layer *layer;
    fp8_status status;
    char sentence[128];
};

static void *ask(void *user)
{
    struct asking *asking = user;
    asking->status = fp8_context_layer(context, &asking->d, &asking->layer);
    snprintf(asking->sentence, sizeof(asking->sentence), "%s", fp8_last_error());
    return NULL;
}

static void start(struct asking *asking, int64_t out_features)
{
    asking->d = describe(out_features);
    assert_int_equal(pthread_create(&asking->thread, NULL, ask, asking), 0);
}

static void join(struct asking *asking)
{
    pthread_join(asking->thread, NULL);
    assert_int_equal(asking->status, FP8_OK);
    assert_non_null(asking->layer);
}

static void threads_get_the_same(void **state)
{
    (void)state;
    struct asking all[THREADS];
    for (int i = 0; i < THREADS; i++)
        start(&all[i], 80 + 16 * (i % 2));
    for (int i = 0; i < THREADS; i++)
        join(&all[i]);
    for (int i = 2; i < THREADS; i++)
        assert_ptr_equal(all[i].layer, all[i % 2].layer);
    assert_int_equal(seen.calls, 2);
}

static void a_compile_holds_up_nobody_else(void **state)
{
    (void)state;
    struct asking held[2], other;
    hold(80);
    start(&held[0], 80);
    wait_until_held();
    start(&held[1], 80);
    start(&other, 96);
    join(&other);
    fp8_layer_description d = describe(96);
    assert_ptr_equal(get(&d), other.layer);
    hold(0);
    join(&held[0]);
    join(&held[1]);
    assert_ptr_equal(held[0].layer, held[1].layer);
    assert_int_equal(seen.calls, 2);
}

static void all_who_wait_hear_of_a_failure(void **state)
{
    (void)state;
    struct asking all[4];
    hold(80);
    seen.failures = 1;
    start(&all[0], 80);
    wait_until_held();
    for (int i = 1; i < 4; i++)
        start(&all[i], 80);
    usleep(20000); /* the others wait by now, or they come later and try again */
    hold(0);
    int failed = 0;
    for (int i = 0; i < 4; i++) {
        pthread_join(all[i].thread, NULL);
        failed += all[i].status == FP8_ERR_LIBRARY && strstr(all[i].sentence, "no bundle") != NULL;
        assert_true(all[i].status == FP8_OK || all[i].layer == NULL);
    }
    assert_true(failed >= 1);
    assert_int_equal(all[0].status, FP8_ERR_LIBRARY);
}

static void prepare_makes_all_at_once(void **state)
{
    (void)state;
    enum { COUNT = 6 };
    fp8_layer_description d[COUNT];
    const fp8_layer *layers[COUNT];
    setenv("FAKE_NVRTC_DELAY_MS", "10", 1);
    for (int i = 0; i < COUNT; i++)
        d[i] = describe(80 + 16 * (i % 4));
    assert_int_equal(fp8_context_prepare(context, d, COUNT), FP8_OK);
    assert_int_equal(seen.calls, 4);
    assert_true(seen.most_inside > 1);
    assert_int_equal(rig_logged("[2] "), 0);
    for (int i = 0; i < COUNT; i++)
        layers[i] = get(&d[i]);
    assert_int_equal(seen.calls, 4);
    assert_ptr_equal(layers[0], layers[4]);
    /* What the bundles share was compiled once. */
    assert_int_equal(rig_compiled("start amax.cu"), 1);
    assert_int_equal(rig_compiled("start quantize.cu"), 1);
    d[1].y_dtype = FP8_DTYPE_E5M2; /* before anything is made */
    d[3].in_features = 72;
    assert_int_equal(fp8_context_prepare(context, d, COUNT), FP8_ERR_ARGUMENT);
    assert_non_null(strstr(fp8_last_error(), "description 2 of 6: y_dtype is 2"));
    assert_int_equal(seen.calls, 4);
    seen.refused = 1000;
    d[1] = describe(1000); /* by the provider: all others are made */
    assert_int_equal(fp8_context_prepare(context, d, COUNT), FP8_ERR_LIBRARY);
    assert_non_null(strstr(fp8_last_error(), "description 2 of 6"));
    assert_int_equal(seen.calls, 6);
}

/* ---- ranks ----------------------------------------------------------------------------------- */

/* Two ranks, as threads with a context and a cache each, and collectives that wait for the other
 * rank, but not for ever. Rank 1 has an empty cache and a slow compiler. */
enum { RANKS = 2, STEPS = 3, COMPILE_MS = 100, PATIENCE_MS = 500 };

static struct {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    int entered; /* collectives, all ranks together */
    bool prepares;
} job = { .lock = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER };

struct rank {
    pthread_t thread;
    fp8gen_jit_options options;
    int timeouts;
};

/* patience 0: as long as it takes, like making a communicator. */
static bool collective(int patience_ms)
{
    struct timespec end;
    int error = 0;
    clock_gettime(CLOCK_REALTIME, &end);
    end.tv_nsec += patience_ms % 1000 * 1000000L;
    end.tv_sec += patience_ms / 1000 + end.tv_nsec / 1000000000;
    end.tv_nsec %= 1000000000;
    pthread_mutex_lock(&job.lock);
    int wanted = job.entered / RANKS * RANKS + RANKS;
    job.entered++;
    pthread_cond_broadcast(&job.changed);
    while (job.entered < wanted && error == 0)
        error = patience_ms ? pthread_cond_timedwait(&job.changed, &job.lock, &end)
                            : pthread_cond_wait(&job.changed, &job.lock);
    bool done = job.entered >= wanted;
    while (!done && job.entered < wanted) /* late, but so that the next one starts together */
        pthread_cond_wait(&job.changed, &job.lock);
    pthread_mutex_unlock(&job.lock);
    return done;
}

static void *run_rank(void *user)
{
    struct rank *rank = user;
    fp8_context_options host = FP8_CONTEXT_OPTIONS_INIT;
    fp8_context *own;
    fp8_layer_description d[2] = { describe(80), describe(96) };
    host.device = FP8_DEVICE_HOST, host.threads = 1, host.log = log_line;
    if (fp8_context_create(&host, &own) != FP8_OK)
        return NULL;
    bool good = fp8_context_set_provider(own, provider, &rank->options) == FP8_OK;
    if (job.prepares)
        good = fp8_context_prepare(own, d, 2) == FP8_OK && good;
    collective(0);
    for (int i = 0; i < STEPS; i++) {
        const fp8_layer *layer;
        good = fp8_context_layer(own, &d[i % 2], &layer) == FP8_OK && good;
        rank->timeouts += !collective(PATIENCE_MS);
    }
    fp8_context_destroy(own);
    return good ? rank : NULL;
}

/* Timeouts of all collectives. */
static int run_job(bool prepares, int number)
{
    struct rank ranks[RANKS];
    char caches[RANKS][RIG_PATH];
    int timeouts = 0;
    job.prepares = prepares;
    job.entered = 0;
    for (int i = 0; i < RANKS; i++) {
        ranks[i] = (struct rank){ .options = options };
        char name[32];
        snprintf(name, sizeof name, i ? "cold%d" : "warm", number);
        snprintf(caches[i], RIG_PATH, "%s", rig_path(name));
        ranks[i].options.cache_dir = caches[i];
        ranks[i].options.jobs = 1;
        assert_int_equal(pthread_create(&ranks[i].thread, NULL, run_rank, &ranks[i]), 0);
    }
    for (int i = 0; i < RANKS; i++) {
        void *good;
        pthread_join(ranks[i].thread, &good);
        assert_non_null(good);
        timeouts += ranks[i].timeouts;
    }
    return timeouts;
}

static void a_slow_compiler_of_one_rank(void **state)
{
    (void)state;
    char delay[16];
    run_job(true, 0); /* fills the cache of rank 0 */
    snprintf(delay, sizeof delay, "%d", COMPILE_MS);
    setenv("FAKE_NVRTC_DELAY_MS", delay, 1);
    int compiled = rig_compiled("start");
    assert_int_equal(run_job(true, 1), 0);
    assert_true(rig_compiled("start") > compiled);
    assert_int_equal(rig_logged("not prepared"), 0);
    /* Unprepared, the same compilations lie in a step: the other rank's patience ends, and the log
     * says why. */
    assert_true(run_job(false, 2) > 0);
    assert_true(rig_logged(" ms inside a step; fp8_context_prepare makes it beforehand") > 0);
}

/* The library's own calls, from threads: one compilation, one path, for each spec. */
static void *bundle_thread(void *user)
{
    int number = *(int *)user;
    char path[RIG_PATH];
    for (int i = 0; i < 4; i++) {
        if (rig_jit(NULL, (number + i) % 3, path) != FP8GEN_OK || !rig_opens(path))
            return user;
    }
    return NULL;
}

static void bundles_from_threads(void **state)
{
    (void)state;
    pthread_t threads[THREADS];
    int numbers[THREADS], damaged;
    void *failed;
    for (int i = 0; i < THREADS; i++) {
        numbers[i] = i;
        assert_int_equal(pthread_create(&threads[i], NULL, bundle_thread, &numbers[i]), 0);
    }
    for (int i = 0; i < THREADS; i++) {
        pthread_join(threads[i], &failed);
        assert_null(failed);
    }
    assert_int_equal(rig_compiled("start"), rig_entries(&damaged) - 3);
    assert_int_equal(damaged, 0);
}

static void arguments_of_the_library(void **state)
{
    (void)state;
    char path[RIG_PATH], tiny[8];
    fp8gen_jit_options wrong = FP8GEN_JIT_OPTIONS_INIT;
    const char *spec = rig_spec(1);
    size_t length = strlen(spec);
    assert_int_equal(fp8gen_jit_bundle(NULL, "t", spec, length, NULL, 0), FP8GEN_ERR_ARGUMENT);
    assert_int_equal(fp8gen_jit_bundle(NULL, NULL, spec, length, path, RIG_PATH),
                     FP8GEN_ERR_ARGUMENT);
    assert_int_equal(fp8gen_jit_bundle(NULL, "t", spec, length, tiny, sizeof(tiny)),
                     FP8GEN_ERR_ARGUMENT);
    assert_string_equal(tiny, "");
    wrong.size = 8;
    assert_int_equal(fp8gen_jit_bundle(&wrong, "t", spec, length, path, RIG_PATH),
                     FP8GEN_ERR_ARGUMENT);
    assert_non_null(strstr(fp8gen_jit_error(), "FP8GEN_JIT_OPTIONS_INIT"));
    wrong = (fp8gen_jit_options)FP8GEN_JIT_OPTIONS_INIT;
    wrong.archs = "sm_80";
    assert_int_equal(fp8gen_jit_bundle(&wrong, "t", spec, length, path, RIG_PATH),
                     FP8GEN_ERR_ARGUMENT);
    assert_non_null(strstr(fp8gen_jit_error(), "sm_80"));
    wrong.archs = NULL;
    wrong.template_dir = "/nonexistent";
    assert_int_equal(fp8gen_jit_bundle(&wrong, "t", spec, length, path, RIG_PATH),
                     FP8GEN_ERR_MACHINE);
    assert_non_null(strstr(fp8gen_jit_error(), "/nonexistent"));
    wrong.template_dir = NULL;
    wrong.tuning_file = "/nonexistent.json";
    assert_int_equal(fp8gen_jit_bundle(&wrong, "t", spec, length, path, RIG_PATH),
                     FP8GEN_ERR_MACHINE);
    assert_non_null(strstr(fp8gen_jit_error(), "/nonexistent.json"));
    assert_int_equal(fp8gen_jit_provider(NULL, NULL, path, RIG_PATH), FP8_ERR_ARGUMENT);
    assert_int_equal(fp8gen_jit_bundle(NULL, "t", spec, length, NULL, RIG_PATH),
                     FP8GEN_ERR_ARGUMENT);
    assert_non_null(strstr(fp8gen_jit_error(), "path is NULL"));
    assert_int_equal(fp8gen_jit_provider(NULL, NULL, path, 0), FP8_ERR_ARGUMENT);
    assert_non_null(strstr(fp8gen_jit_error(), "path_bytes is 0"));
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, begin, end)

int main(int argc, char **argv)
{
    (void)argc;
    static const struct CMUnitTest tests[] = {
        TEST(a_layer_is_what_was_described),
        TEST(equal_descriptions_share),
        TEST(bundles_that_were_given_come_first),
        TEST(layers_of_a_spec),
        TEST(without_a_provider),
        TEST(wrong_descriptions),
        TEST(wrong_fields),
        TEST(after_a_failure_the_next_call_tries_again),
        TEST(a_bundle_damaged_before_it_is_opened),
        TEST(what_was_not_prepared_is_logged),
        TEST(threads_get_the_same),
        TEST(a_compile_holds_up_nobody_else),
        TEST(all_who_wait_hear_of_a_failure),
        TEST(prepare_makes_all_at_once),
        TEST(a_slow_compiler_of_one_rank),
        TEST(bundles_from_threads),
        TEST(arguments_of_the_library),
    };
    return RIG_RUN(argv, tests);
}
