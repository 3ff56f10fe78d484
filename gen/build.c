/*
 * build.c - a bundle from a plan: the archs asked for, the compilations, the manifest, the folder.
 *
 * In: a session with a model, the options of fp8gen_build. Out: a bundle (runtime/bundle_format.h)
 * in its place, or diagnostics and nothing changed. What can fail early fails early: the options
 * and the output folder are checked before the first kernel is compiled.
 *
 * The bundle depends on nothing but the spec, the archs and NVRTC's version: no time, host or path.
 */
#include "gen/bundle_dir.h"
#include "gen/cache.h"
#include "gen/plan.h"

#include <stdlib.h>
#include <string.h>

#include "runtime/bundle_format.h"

/* ---- archs ----------------------------------------------------------------------------------- */

/* The kernels need cvt to FP8 and max.s16x2: compute capability 9.0 or newer. */
static const char *const known_archs[] = {
    "sm_90", "sm_90a", "sm_100", "sm_100a", "sm_103a", "sm_120", "sm_120a",
};
enum { ARCH_COUNT = sizeof(known_archs) / sizeof(known_archs[0]) };

struct archs {
    const char *list[ARCH_COUNT + 1]; /* ends in NULL */
    int32_t count;
};

static const char *find_arch(const char *name, size_t length)
{
    for (int i = 0; i < ARCH_COUNT; i++)
        if (strlen(known_archs[i]) == length && memcmp(known_archs[i], name, length) == 0)
            return known_archs[i];
    return NULL;
}

static fp8gen_status fail_arch(struct fp8gen *gen, const char *name, size_t length)
{
    if (length == 4 && memcmp(name, "none", 4) == 0)
        return gen_fail(gen, FP8GEN_ERR_ARGUMENT,
                        "leave 'none' out for kernels, or the archs out for a bundle of the host",
                        "arch 'none' stands alone: a bundle without kernels has no other archs");
    struct buf known = { 0 };
    for (int i = 0; i < ARCH_COUNT; i++)
        buf_printf(&known, "%s%s", i ? ", " : "", known_archs[i]);
    fp8gen_status status = known.failed ? gen_out_of_memory(gen) : FP8GEN_ERR_ARGUMENT;
    if (!known.failed)
        status =
            gen_fail(gen, FP8GEN_ERR_ARGUMENT,
                     "the kernels need compute capability 9.0 or newer; several archs are given as "
                     "sm_90a,sm_100a",
                     "cannot build for arch '%.*s'; the archs are %s, or none", (int)length, name,
                     known.data);
    buf_free(&known);
    return status;
}

static fp8gen_status parse_archs(struct fp8gen *gen, const char *text, struct archs *archs)
{
    if (strcmp(text, "none") == 0)
        return FP8GEN_OK;
    for (;;) {
        size_t length = strcspn(text, ",");
        const char *arch = find_arch(text, length);
        if (arch == NULL)
            return fail_arch(gen, text, length);
        for (int32_t i = 0; i < archs->count; i++)
            if (archs->list[i] == arch)
                return gen_fail(gen, FP8GEN_ERR_ARGUMENT, NULL, "arch %s is given twice", arch);
        archs->list[archs->count++] = arch;
        if (text[length] == '\0')
            return FP8GEN_OK;
        text += length + 1;
    }
}

/* ---- what is there for an arch --------------------------------------------------------------- */

static bool is_by_block(const char *scaling)
{
    return strcmp(scaling, "block") == 0 || strcmp(scaling, "tile") == 0;
}

/* What cuBLASLt lacks for the scales of a product on an arch; NULL if it computes it
 * (runtime/gemm_lt_problem.c has the same rules for the device at hand). */
static const char *cublaslt_lacks(const char *a, const char *b, const char *arch)
{
    if (!is_by_block(a) && !is_by_block(b))
        return NULL;
    if (!is_by_block(a) || !is_by_block(b))
        return "cuBLASLt has no product of one scale a tensor by scales along the contraction";
    return strncmp(arch, "sm_90", 5) == 0
               ? NULL
               : "cuBLASLt has scales of blocks on compute capability 9.0 alone";
}

static const struct gen_kernel *find_kernel(const struct gen_plan *plan, const char *name)
{
    for (int32_t i = 0; i < plan->count; i++)
        if (strcmp(plan->kernels[i].name, name) == 0)
            return &plan->kernels[i];
    return NULL;
}

/* Whether a generated kernel of a range's exists for an arch. */
static bool is_generated(const struct gen_plan *plan, const json_t *range, const char *arch)
{
    const json_t *choices = json_object_get(range, "choices");
    for (size_t i = 0; i < json_array_size(choices); i++) {
        const char *name = json_string_value(json_object_get(json_array_get(choices, i), "kernel"));
        const struct gen_kernel *kernel = name != NULL ? find_kernel(plan, name) : NULL;
        if (kernel != NULL && gen_kernel_exists_for(kernel, arch))
            return true;
    }
    return false;
}

/* Why nothing computes a step on an arch; NULL if something does, or if it multiplies nothing. */
static const char *unserved(const struct gen_plan *plan, const json_t *step, const char *arch)
{
    const json_t *ranges = json_object_get(step, "dispatch");
    if (ranges == NULL)
        return NULL;
    const char *lacks = cublaslt_lacks(json_string_value(json_object_get(step, "a_scaling")),
                                       json_string_value(json_object_get(step, "b_scaling")), arch);
    for (size_t i = 0; i < json_array_size(ranges) && lacks != NULL; i++)
        if (!is_generated(plan, json_array_get(ranges, i), arch))
            return lacks;
    return NULL;
}

/* The products of a layer on one arch. */
static fp8gen_status check_layer(struct fp8gen *gen, const struct gen_plan *plan,
                                 const json_t *layer, const char *arch)
{
    static const char *const passes[] = { "fprop", "wgrad", "dgrad" };
    for (size_t p = 0; p < sizeof(passes) / sizeof(passes[0]); p++) {
        const json_t *steps = json_object_get(json_object_get(layer, "passes"), passes[p]);
        for (size_t i = 0; i < json_array_size(steps); i++) {
            const char *why = unserved(plan, json_array_get(steps, i), arch);
            if (why != NULL)
                return gen_fail(gen, FP8GEN_ERR_ARGUMENT,
                                "leave that arch out, or take a recipe with scales of tensors or "
                                "rows",
                                "layer '%s': nothing computes %s on %s: %s, and the generated "
                                "kernels are for sm_90a",
                                json_string_value(json_object_get(layer, "name")), passes[p], arch,
                                why);
        }
    }
    return FP8GEN_OK;
}

static fp8gen_status check_served(struct fp8gen *gen, const struct gen_plan *plan,
                                  const struct archs *archs)
{
    const json_t *layers = json_object_get(plan->manifest, "layers");
    for (size_t i = 0; i < json_array_size(layers); i++)
        for (int32_t a = 0; a < archs->count; a++) {
            fp8gen_status status =
                check_layer(gen, plan, json_array_get(layers, i), archs->list[a]);
            if (status != FP8GEN_OK)
                return status;
        }
    return FP8GEN_OK;
}

/* ---- the manifest ---------------------------------------------------------------------------- */

static bool add_archs(const struct fp8gen *gen, json_t *manifest, const struct archs *archs)
{
    json_t *list = json_object_get(manifest, "archs");
    if (archs->count > 0 &&
        json_object_set_new(manifest, "nvrtc", json_string(gen_nvrtc_version(gen->nvrtc))) != 0)
        return false;
    for (int32_t i = 0; i < archs->count; i++)
        if (json_array_append_new(list, json_string(archs->list[i])) != 0)
            return false;
    return true;
}

static bool remove_figures(json_t *manifest)
{
    size_t index;
    json_t *layer;
    json_array_foreach(json_object_get(manifest, "layers"), index, layer)
    {
        if (json_object_del(layer, "cost") != 0 || json_object_del(layer, "memory") != 0)
            return false;
    }
    return json_object_del(manifest, "predicted") == 0;
}

/* "kernels/<unit>.<arch>.cubin"; NULL when out of memory. */
static const char *cubin_name(struct fp8gen *gen, const struct gen_job *job)
{
    return arena_printf(&gen->arena, "%s/%s.%s.cubin", FP8_BUNDLE_KERNEL_DIR, job->kernel->unit,
                        job->arch);
}

static bool add_cubin(struct fp8gen *gen, json_t *list, const struct gen_job *job)
{
    const char *file = cubin_name(gen, job);
    char hash[33];
    gen_hash(job->cubin, job->cubin_bytes, hash);
    json_t *record = file != NULL
                         ? json_pack("{s:s, s:s, s:I, s:s}", "arch", job->arch, "file", file,
                                     "bytes", (json_int_t)job->cubin_bytes, "xxh128", hash)
                         : NULL;
    return json_array_append_new(list, record) == 0;
}

static bool add_cubins(struct fp8gen *gen, json_t *manifest, const struct gen_jobs *jobs)
{
    size_t index;
    json_t *kernel;
    json_array_foreach(json_object_get(manifest, "kernels"), index, kernel)
    {
        const char *entry = json_string_value(json_object_get(kernel, "entry"));
        json_t *list = json_array();
        if (json_object_set_new(kernel, "cubins", list) != 0)
            return false;
        for (int32_t i = 0; i < jobs->count; i++)
            if (strcmp(jobs->list[i].kernel->entry, entry) == 0 &&
                !add_cubin(gen, list, &jobs->list[i]))
                return false;
    }
    return true;
}

static bool add_digest(json_t *manifest)
{
    char *compact = json_dumps(manifest, JSON_COMPACT | JSON_SORT_KEYS);
    if (compact == NULL)
        return false;
    char digest[33];
    gen_hash(compact, strlen(compact), digest);
    free(compact);
    return json_object_set_new(manifest, "digest", json_string(digest)) == 0;
}

static fp8gen_status write_manifest(struct fp8gen *gen, struct gen_bundle_dir *dir,
                                    const struct gen_jobs *jobs, const struct archs *archs)
{
    json_t *manifest = json_deep_copy(gen->plan->manifest);
    char *text = NULL;
    fp8gen_status status = FP8GEN_ERR_MACHINE;
    if (manifest != NULL && remove_figures(manifest) && add_archs(gen, manifest, archs) &&
        add_cubins(gen, manifest, jobs) && add_digest(manifest))
        text = json_dumps(manifest, JSON_INDENT(2) | JSON_SORT_KEYS);
    const char *whole = text != NULL ? arena_printf(&gen->arena, "%s\n", text) : NULL;
    if (whole == NULL)
        status = gen_out_of_memory(gen);
    else
        status = gen_bundle_write(dir, FP8_BUNDLE_MANIFEST, whole, strlen(whole));
    free(text);
    json_decref(manifest);
    return status;
}

/* ---- the build ------------------------------------------------------------------------------- */

static fp8gen_status check_options(struct fp8gen *gen, const fp8gen_build_options *options,
                                   struct archs *archs)
{
    const char *problem = "are missing";
    if (options != NULL)
        problem = gen_options_problem(options->size, sizeof(*options), options->reserved, 2);
    if (problem != NULL)
        return gen_fail(gen, FP8GEN_ERR_ARGUMENT, "start from FP8GEN_BUILD_OPTIONS_INIT",
                        "the build options %s", problem);
    if (options->output_dir == NULL || options->output_dir[0] == '\0')
        return gen_fail(gen, FP8GEN_ERR_ARGUMENT, NULL, "a build needs a folder to write to");
    if (options->jobs < 0)
        return gen_fail(gen, FP8GEN_ERR_ARGUMENT, "0 takes all cores",
                        "%d compile threads are not possible", (int)options->jobs);
    if (options->archs == NULL)
        return gen_fail(gen, FP8GEN_ERR_ARGUMENT, "\"none\" builds for the host alone",
                        "a build needs archs");
    return parse_archs(gen, options->archs, archs);
}

/* Opens NVRTC if a kernel is to be compiled, and asks it for every arch. */
static fp8gen_status check_nvrtc(struct fp8gen *gen, const struct archs *archs)
{
    fp8gen_status status = archs->count > 0 ? gen_nvrtc_open(gen) : FP8GEN_OK;
    for (int32_t i = 0; i < archs->count && status == FP8GEN_OK; i++)
        status = gen_nvrtc_check_arch(gen, archs->list[i]);
    return status;
}

/* Through the cache, unless the caller wants none. */
static fp8gen_status run_jobs(struct fp8gen *gen, struct gen_jobs *jobs,
                              const fp8gen_build_options *options)
{
    struct gen_store store = { .fd = -1 };
    if (jobs->count > 0 && (options->cache_dir == NULL || options->cache_dir[0] != '\0')) {
        struct gen_log log = { options->log, options->log_user };
        gen_store_open(&store, options->cache_dir, log);
        jobs->cache = &store;
    }
    fp8gen_status status =
        gen_run_jobs(gen, jobs, options->jobs, options->progress, options->progress_user);
    jobs->cache = NULL;
    gen_store_close(&store);
    return status;
}

static fp8gen_status write_bundle(struct fp8gen *gen, struct gen_bundle_dir *dir,
                                  const struct gen_jobs *jobs, const struct archs *archs)
{
    fp8gen_status status = FP8GEN_OK;
    for (int32_t i = 0; i < jobs->count && status == FP8GEN_OK; i++) {
        const struct gen_job *job = &jobs->list[i];
        const char *name = cubin_name(gen, job);
        status = name != NULL ? gen_bundle_write(dir, name, job->cubin, job->cubin_bytes)
                              : gen_out_of_memory(gen);
    }
    if (status == FP8GEN_OK)
        status = write_manifest(gen, dir, jobs, archs);
    if (status == FP8GEN_OK)
        status = gen_bundle_commit(dir);
    return status;
}

fp8gen_status fp8gen_build(fp8gen *gen, const fp8gen_build_options *options)
{
    struct archs archs = { 0 };
    struct gen_jobs jobs = { 0 };
    struct gen_bundle_dir dir = { 0 };
    struct gen_plan *plan = NULL;
    if (gen == NULL)
        return FP8GEN_ERR_ARGUMENT;
    fp8gen_status status = check_options(gen, options, &archs);
    if (status != FP8GEN_OK)
        return status;
    status = gen_expand_plan(gen, &plan);
    if (status == FP8GEN_OK)
        status = check_served(gen, plan, &archs);
    if (status == FP8GEN_OK)
        status = check_nvrtc(gen, &archs);
    if (status == FP8GEN_OK)
        status = gen_make_jobs(gen, plan, archs.list, &jobs);
    dir.guard = options->guard;
    dir.guard_user = options->guard_user;
    if (status == FP8GEN_OK)
        status = gen_bundle_begin(gen, options->output_dir, &dir);
    if (status == FP8GEN_OK)
        status = run_jobs(gen, &jobs, options);
    if (status == FP8GEN_OK)
        status = write_bundle(gen, &dir, &jobs, &archs);
    gen_bundle_abandon(&dir);
    gen_jobs_free(&jobs);
    return status;
}
