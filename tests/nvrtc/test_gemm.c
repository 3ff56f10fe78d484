/*
 * test_gemm.c - every configuration of the generated GEMM, compiled for sm_90a: no error, spill,
 * warning, ignored setmaxnreg (C7508) or serialised wgmma (C7510), and 168 or 128 registers, which
 * is what three or four warpgroups share out. And how long a cold compilation takes. Needs no GPU.
 *
 * Each is compiled for E5M2 x E4M3 into bf16 and fp32, overwriting and adding, as far as it serves
 * them; every fourth one for fp16 and for E4M3 x E4M3 too, which differ in a conversion and a word
 * of wgmma; every second one, and those with the most accumulators, with a bias. With scales of
 * rows every second one, and with intervals of accumulation every one that serves them, into fp16;
 * with scales of shards every one that applies them along the contraction.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <jansson.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "gen/compile.h"
#include "tests/nvrtc/rig.h"

static const char *const archs[] = { "sm_90a", NULL };

/* One layer an output dtype of dw, which also covers y and dx. */
#define LAYER(name, dtype)                                                                         \
    " linear \"" name "\" { in_features = 64, out_features = 48, bias = true, output = \"" dtype   \
    "\", grad_input = \"" dtype "\", grad_weight = \"" dtype "\" },\n"
#define OPEN(accumulation)                                                                         \
    "return model \"gemm\" { tokens = 256, accumulation = { fprop = \"" accumulation               \
    "\", dgrad = \"" accumulation "\", wgrad = \"" accumulation "\" }, "
#define MODEL(accumulation)                                                                        \
    OPEN(accumulation)                                                                             \
    "layers = {\n" LAYER("a", "bf16") LAYER("b", "fp16") LAYER("c", "fp32") "} }\n"
#define NARROW(accumulation, recipe)                                                               \
    OPEN(accumulation) "recipe = recipe." recipe " {}, layers = {\n" LAYER("b", "fp16") "} }\n"

static bool is_gemm(const struct gen_kernel *kernel)
{
    return strcmp(kernel->template_name, "gemm_sm90.cu") == 0;
}

enum { SAMPLE = 4 };

static bool is_wanted(const struct gen_kernel *kernel, size_t index)
{
    if (!is_gemm(kernel))
        return false;
    if (strstr(kernel->name, "_bf16_bias_") != NULL)
        return index % 2 == 0 || strstr(kernel->name, "x192c") != NULL;
    return index % SAMPLE == 0 ||
           (strstr(kernel->name, "_e4m3_e4m3_") == NULL && strstr(kernel->name, "_fp16_") == NULL);
}

/* Leaves the wanted GEMMs alone in the jobs. */
static void keep_wanted(struct gen_jobs *jobs, size_t index)
{
    int32_t count = 0;
    for (int32_t i = 0; i < jobs->count; i++)
        if (is_wanted(jobs->list[i].kernel, index))
            jobs->list[count++] = jobs->list[i];
    jobs->count = count;
}

static void check_job(const struct gen_job *job)
{
    const char *at_start =
        strstr(job->kernel->name, "w3g") ? "Used 128 registers" : "Used 168 registers";
    const char *const wanted[] = { at_start, "0 bytes stack frame" };
    for (size_t i = 0; i < sizeof(wanted) / sizeof(wanted[0]); i++)
        if (strstr(job->log, wanted[i]) == NULL)
            fail_msg("%s: not '%s':\n%s", job->kernel->name, wanted[i], job->log);
    if (strstr(job->log, "warning") != NULL)
        fail_msg("%s:\n%s", job->kernel->name, job->log);
    if (memmem(job->cubin, job->cubin_bytes, job->kernel->entry, strlen(job->kernel->entry)) ==
        NULL)
        fail_msg("%s: no entry %s", job->kernel->name, job->kernel->entry);
}

/* Whether a kernel of the configuration writes this output this way. */
static bool has_output(const struct gen_plan *plan, const char *config, const char *output)
{
    for (int32_t i = 0; i < plan->count; i++)
        if (is_gemm(&plan->kernels[i]) && strstr(plan->kernels[i].name, config) != NULL &&
            strstr(plan->kernels[i].name, output) != NULL)
            return true;
    return false;
}

/* A configuration serves 16-bit outputs or fp32 or both. */
static void check_outputs(const struct gen_plan *plan, const char *config)
{
    char narrow[32], wide[32], add[32];
    snprintf(narrow, sizeof(narrow), "_bf16_%.2s", config);
    snprintf(wide, sizeof(wide), "_fp32_%.2s", config);
    snprintf(add, sizeof(add), "_fp32_add_%.2s", config);
    assert_true(has_output(plan, config, narrow) || has_output(plan, config, wide));
    assert_int_equal(has_output(plan, config, wide), has_output(plan, config, add));
}

/* Of the generator's list. */
struct config {
    const char *name;
    bool split;
    long long partials, consumers;
    size_t index;
};

/* compile: returns how many kernels it has compiled. */
static void each_configuration(int32_t (*compile)(const struct config *config))
{
    struct fp8gen *gen;
    const char *text;
    size_t i;
    json_t *item;
    int32_t kernels = 0;
    assert_int_equal(fp8gen_open(NULL, &gen), FP8GEN_OK);
    assert_int_equal(fp8gen_gemm_configs(gen, &text), FP8GEN_OK);
    json_t *configs = json_loads(text, 0, NULL);
    json_array_foreach(configs, i, item)
    {
        struct config config = {
            .name = json_string_value(json_object_get(item, "name")),
            .partials = json_integer_value(json_object_get(item, "partials")),
            .consumers = json_integer_value(json_object_get(item, "consumers")),
            .index = i,
        };
        config.split = config.partials > 0;
        kernels += compile(&config);
    }
    printf("%zu configurations, %d kernels compiled\n", json_array_size(configs), (int)kernels);
    assert_true(json_array_size(configs) > 8 && kernels > 8);
    json_decref(configs);
    fp8gen_close(gen);
}

static int32_t compile_config(const struct config *config)
{
    struct gen_plan *plan;
    struct gen_jobs jobs = { 0 };
    struct fp8gen *gen = rig_make_jobs(config->split ? MODEL("split") : MODEL("fast"), config->name,
                                       archs, &plan, &jobs);
    check_outputs(plan, config->name);
    keep_wanted(&jobs, config->index);
    rig_compile(gen, &jobs);
    for (int32_t i = 0; i < jobs.count; i++)
        check_job(&jobs.list[i]);
    int32_t count = jobs.count;
    gen_jobs_free(&jobs);
    fp8gen_close(gen);
    return count;
}

static void test_every_configuration(void **state)
{
    (void)state;
    each_configuration(compile_config);
}

/* The kernel of a configuration that writes fp16, if the configuration serves the spec. */
static int32_t compile_narrow(const char *config, const char *spec)
{
    struct gen_plan *plan;
    struct gen_jobs jobs = { 0 };
    struct fp8gen *gen = rig_make_jobs(spec, config, archs, &plan, &jobs);
    int32_t count = 0;
    for (int32_t i = 0; i < jobs.count && count == 0; i++)
        if (is_gemm(jobs.list[i].kernel) && strstr(jobs.list[i].kernel->name, "_fp16_"))
            jobs.list[count++] = jobs.list[i];
    jobs.count = count;
    rig_compile(gen, &jobs);
    if (count)
        check_job(&jobs.list[0]);
    gen_jobs_free(&jobs);
    fp8gen_close(gen);
    return count;
}

/* fprop is of the kind of rows; dgrad multiplies by the scale of each block of the contraction. */
#define SHARDS                                                                                     \
    "return model \"gemm\" { tokens = 256, mesh = { fsdp = 2 }, recipe = recipe.current { "        \
    "weight_scale = \"shard\" }, accumulation = { fprop = \"split\" }, layers = {\n" LAYER(        \
        "a", "bf16") LAYER("c", "fp32") "} }\n"

static int32_t compile_blocks(const struct config *config)
{
    if (!config->split)
        return 0;
    struct gen_plan *plan;
    struct gen_jobs jobs = { 0 };
    struct fp8gen *gen = rig_make_jobs(SHARDS, config->name, archs, &plan, &jobs);
    int32_t count = 0;
    for (int32_t i = 0; i < jobs.count; i++)
        if (strstr(jobs.list[i].kernel->name, "_btile_") &&
            strstr(jobs.list[i].kernel->name, config->name))
            jobs.list[count++] = jobs.list[i];
    jobs.count = count;
    rig_compile(gen, &jobs);
    for (int32_t i = 0; i < count; i++)
        check_job(&jobs.list[i]);
    gen_jobs_free(&jobs);
    fp8gen_close(gen);
    return count;
}

static void test_scales_along_the_contraction(void **state)
{
    (void)state;
    each_configuration(compile_blocks);
}

static int32_t compile_rows_and_intervals(const struct config *config)
{
    int32_t kernels = 0;
    if (config->index % 2 == 0)
        kernels += compile_narrow(config->name, config->split ? NARROW("split", "rowwise")
                                                              : NARROW("fast", "rowwise"));
    if (config->partials == 1 && config->consumers == 2) {
        kernels += compile_narrow(config->name, NARROW("256", "rowwise"));
        kernels += compile_narrow(config->name, NARROW("512", "current"));
    }
    return kernels;
}

static void test_rows_and_intervals(void **state)
{
    (void)state;
    each_configuration(compile_rows_and_intervals);
}

static double seconds_of(clockid_t clock)
{
    struct timespec time;
    clock_gettime(clock, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

/* A kernel that takes long to compile makes every first build slow. The limit is for loaded
 * machines; the aim is half a second alone. */
static void test_cold_compilation(void **state)
{
    (void)state;
    static const double limit = 5.0; /* of the processor's time */
    static const char spec[] = "return model \"m\" { layers = { linear \"a\" { in_features = 4096, "
                               "out_features = 4096 } } }";
    struct gen_plan *plan;
    struct gen_jobs jobs = { 0 };
    struct fp8gen *gen = rig_make_jobs(spec, "generated", archs, &plan, &jobs);
    for (int32_t i = 0; i < jobs.count; i++) {
        double wall = seconds_of(CLOCK_MONOTONIC), used = seconds_of(CLOCK_THREAD_CPUTIME_ID);
        gen_compile(gen->nvrtc, &jobs.list[i]);
        wall = seconds_of(CLOCK_MONOTONIC) - wall;
        used = seconds_of(CLOCK_THREAD_CPUTIME_ID) - used;
        printf("%-48s %.2f s, %.2f s of the processor\n", jobs.list[i].kernel->name, wall, used);
        assert_true(used < limit);
    }
    gen_jobs_free(&jobs);
    fp8gen_close(gen);
}

int main(void)
{
    int missing = rig_nvrtc_missing();
    if (missing)
        return missing;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_cold_compilation),
        cmocka_unit_test(test_every_configuration),
        cmocka_unit_test(test_scales_along_the_contraction),
        cmocka_unit_test(test_rows_and_intervals),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
