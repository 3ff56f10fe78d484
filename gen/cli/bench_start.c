/*
 * bench_start.c - how long a model takes to start: cold, warm, and the look-up of a layer.
 *
 * Cold: a process of its own (this program, `build`) with an empty cache, two compile threads: what
 * a node pays that has never seen the spec. Warm, with the GPU: a bundle opened and all its layers
 * made; and the same through the provider and the cache, which also finds the bundle. Look-up: a
 * layer that is ready, by its description. Medians of a few rounds, each in a context of its own.
 */
#include <errno.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "gen/cli/bench_host.h"
#include "runtime/fp8_jit.h"

extern char **environ;

enum { COLD_ROUNDS = 3, WARM_ROUNDS = 9, LAYERS_MAX = 64, LOOKUPS = 100000 };

struct start {
    struct bench *bench;
    const char *spec;
    char *text;   /* of the spec */
    char *folder; /* temporary */
    char *bundle;
    char *cache;
    int layers;
    char names[LAYERS_MAX][64];
    fp8_layer_description descriptions[LAYERS_MAX];
};

static void print_row(const struct start *s, const char *name, const char *pass, double value,
                      const char *unit)
{
    static const struct bench_shape none = { 0 };
    struct bench_result row = { .bench = "host",
                                .name = name,
                                .pass = pass,
                                .shape = &none,
                                .unit = unit,
                                .value = value,
                                .baseline = -1,
                                .lower_is_better = true,
                                .launches = -1 };
    bench_result_print(s->bench, &row);
}

/* ---- cold ------------------------------------------------------------------------------------ */

/* fp8gen build SPEC with an empty cache; the exit code. */
static int build_cold(const struct start *s, const char *cache, const char *bundle)
{
    char *arguments[] = {
        "fp8gen", "-q", "build", (char *)s->spec, "--arch", (char *)s->bench->device.arch,
        "-j",     "2",  "-o",    (char *)bundle,  NULL
    };
    pid_t process;
    int status = 0;
    if (setenv("FP8GEN_CACHE_DIR", cache, 1) != 0)
        return CLI_MACHINE;
    int error = posix_spawn(&process, "/proc/self/exe", NULL, NULL, arguments, environ);
    if (error != 0) {
        cli_error("starting a process: %s", strerror(error));
        return CLI_MACHINE;
    }
    while (waitpid(process, &status, 0) < 0 && errno == EINTR)
        continue;
    return WIFEXITED(status) ? WEXITSTATUS(status) : CLI_BUG;
}

static int measure_cold(struct start *s)
{
    double samples[COLD_ROUNDS];
    int64_t wanted = s->bench->values->rounds;
    int code = CLI_DONE, rounds = wanted < COLD_ROUNDS ? (int)wanted : COLD_ROUNDS;
    const char *before = cli_environment(CLI_ENV_CACHE_DIR);
    char *kept = before ? strdup(before) : NULL;
    for (int i = 0; !code && i < rounds; i++) {
        char name[32];
        free(s->cache);
        free(s->bundle);
        snprintf(name, sizeof name, "cache%d", i);
        s->cache = cli_path_join(s->folder, name);
        snprintf(name, sizeof name, "bundle%d", i);
        s->bundle = cli_path_join(s->folder, name);
        cli_progress("cold start [%d/%d]", i + 1, rounds);
        double begin = cli_seconds();
        code = s->cache && s->bundle ? build_cold(s, s->cache, s->bundle) : CLI_MACHINE;
        samples[i] = cli_seconds() - begin;
    }
    cli_progress_end();
    if (kept)
        setenv("FP8GEN_CACHE_DIR", kept, 1);
    else
        unsetenv("FP8GEN_CACHE_DIR");
    free(kept);
    if (!code)
        print_row(s, "cold start, an empty cache and two compile threads", "build",
                  1e3 * cli_median(samples, rounds), "ms");
    return code;
}

/* ---- warm ------------------------------------------------------------------------------------ */

static fp8_status open_context(const struct start *s, fp8_context **context)
{
    fp8_context_options options = FP8_CONTEXT_OPTIONS_INIT;
    options.device = s->bench->device.info.device;
    return fp8_context_create(&options, context);
}

/* Opens the bundle and makes its layers; the first time their names are kept. */
static int open_once(struct start *s, double *seconds)
{
    fp8_context *context = NULL;
    fp8_bundle *bundle = NULL;
    fp8_layer *layers[LAYERS_MAX] = { NULL };
    fp8_status status = open_context(s, &context);
    double begin = cli_seconds();
    if (!status)
        status = fp8_bundle_open(context, s->bundle, &bundle);
    int count = fp8_bundle_layer_count(bundle);
    count = count < LAYERS_MAX ? count : LAYERS_MAX;
    for (int i = 0; !status && i < count; i++)
        status = fp8_layer_create(bundle, fp8_bundle_layer_name(bundle, i), &layers[i]);
    *seconds = cli_seconds() - begin;
    int code = status ? cli_fp8_failed(status, "opening %s", s->bundle) : CLI_DONE;
    for (int i = 0; i < count; i++) {
        if (s->layers == 0)
            snprintf(s->names[i], sizeof s->names[i], "%s", fp8_bundle_layer_name(bundle, i));
        fp8_layer_destroy(layers[i]);
    }
    s->layers = count;
    fp8_bundle_close(bundle);
    fp8_context_destroy(context);
    return code;
}

static int look_up(const struct start *s, fp8_context *context, double *seconds)
{
    fp8_status status = FP8_OK;
    double begin = cli_seconds();
    for (int i = 0; !status && i < LOOKUPS; i++) {
        const fp8_layer *layer;
        status = fp8_context_layer(context, &s->descriptions[i % s->layers], &layer);
    }
    *seconds = (cli_seconds() - begin) / LOOKUPS;
    return status ? cli_fp8_failed(status, "looking a layer up") : CLI_DONE;
}

/* Through the provider and the cache. */
static int prepare_once(const struct start *s, double *seconds, double *lookup)
{
    fp8gen_jit_options options = FP8GEN_JIT_OPTIONS_INIT;
    options.cache_dir = s->cache;
    options.template_dir = s->bench->values->template_dir;
    fp8_context *context = NULL;
    fp8_status status = open_context(s, &context);
    if (!status)
        status = fp8_context_set_provider(context, fp8gen_jit_provider, &options);
    double begin = cli_seconds();
    if (!status)
        status = fp8_context_prepare(context, s->descriptions, (size_t)s->layers);
    *seconds = cli_seconds() - begin;
    int code = status ? cli_fp8_failed(status, "preparing the layers") : CLI_DONE;
    if (!code)
        code = look_up(s, context, lookup);
    fp8_context_destroy(context);
    return code;
}

static int measure_warm(struct start *s)
{
    double opened[WARM_ROUNDS], prepared[WARM_ROUNDS], lookups[WARM_ROUNDS], unused;
    int code = CLI_DONE;
    for (int i = 0; !code && i < WARM_ROUNDS; i++)
        code = open_once(s, &opened[i]);
    for (int i = 0; i < s->layers; i++) {
        s->descriptions[i] = (fp8_layer_description)FP8_LAYER_DESCRIPTION_INIT;
        s->descriptions[i].spec = s->text;
        s->descriptions[i].layer = s->names[i];
    }
    if (!code)
        code = prepare_once(s, &unused, &unused); /* puts the bundle into the cache */
    for (int i = 0; !code && i < WARM_ROUNDS; i++)
        code = prepare_once(s, &prepared[i], &lookups[i]);
    if (code)
        return code;
    print_row(s, "warm start, a bundle", "open", 1e3 * cli_median(opened, WARM_ROUNDS), "ms");
    print_row(s, "warm start, from the cache", "prepare", 1e3 * cli_median(prepared, WARM_ROUNDS),
              "ms");
    print_row(s, "look-up of a layer by its description", "layer",
              1e6 * cli_median(lookups, WARM_ROUNDS), "us");
    return CLI_DONE;
}

/* ---- all ------------------------------------------------------------------------------------- */

static int read_spec(struct start *s)
{
    enum { LIMIT = 1 << 24 };
    FILE *file = fopen(s->spec, "r");
    if (!file) {
        cli_error("cannot read '%s': %s", s->spec, strerror(errno));
        return CLI_MACHINE;
    }
    s->text = calloc(1, LIMIT + 1);
    size_t size = s->text ? fread(s->text, 1, LIMIT, file) : 0;
    fclose(file);
    if (size > 0)
        return CLI_DONE;
    cli_error("cannot read '%s'", s->spec);
    return CLI_MACHINE;
}

int bench_start(struct bench *bench, const char *spec)
{
    struct start *s = calloc(1, sizeof *s);
    if (!s) {
        cli_error("out of memory");
        return CLI_MACHINE;
    }
    s->bench = bench;
    s->spec = spec;
    int code = read_spec(s);
    if (!code)
        code = cli_temp_create(NULL, "fp8gen", &s->folder);
    if (!code)
        code = measure_cold(s);
    if (!code)
        code = measure_warm(s);
    if (s->folder)
        cli_temp_remove(s->folder);
    free(s->cache);
    free(s->bundle);
    free(s->text);
    free(s);
    return code;
}
