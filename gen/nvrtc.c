/*
 * nvrtc.c - NVRTC, opened when the first kernel is compiled: its entry points, and one compilation.
 *
 * In: an expanded kernel and its headers as text. Out: a cubin and a log in the job. The kernels
 * include nothing of the toolkit, so nothing but libnvrtc need be installed.
 *
 * The options are part of the product: IEEE arithmetic spelled out and no contraction, because the
 * numbers that kernels give are compared bit for bit. -v makes ptxas report spills, which
 * nvrtc_log.c refuses. Knows nothing of plans beyond the one kernel, and of no device.
 */
#include "gen/cache.h"

#include <nvrtc.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/dynlib.h"
#include "runtime/thread.h"

struct gen_nvrtc {
    struct fp8_dynlib library;
    char version[24];
    bool has_cache; /* of its own */
    int32_t arch_count;
    int *archs; /* 90 for sm_90 and sm_90a */
    nvrtcResult (*version_of)(int *, int *);
    nvrtcResult (*arch_count_of)(int *);
    nvrtcResult (*archs_of)(int *);
    const char *(*error_string)(nvrtcResult);
    nvrtcResult (*create)(nvrtcProgram *, const char *, const char *, int, const char *const *,
                          const char *const *);
    nvrtcResult (*destroy)(nvrtcProgram *);
    nvrtcResult (*compile)(nvrtcProgram, int, const char *const *);
    nvrtcResult (*cubin_size)(nvrtcProgram, size_t *);
    nvrtcResult (*cubin)(nvrtcProgram, char *);
    nvrtcResult (*log_size)(nvrtcProgram, size_t *);
    nvrtcResult (*log)(nvrtcProgram, char *);
};

/* ---- opening --------------------------------------------------------------------------------- */

static const char *const sonames[] = { "libnvrtc.so.13", "libnvrtc.so.12", NULL };
static const struct fp8_dynlib_spec nvrtc_spec = { "NVRTC", "FP8_NVRTC_PATH", sonames, true };

#define HINT_MISSING                                                                               \
    "install the CUDA toolkit's NVRTC (12.1 or newer); without it, --arch none builds a bundle "   \
    "for the host alone"

static fp8gen_status read_version(struct fp8gen *gen, struct gen_nvrtc *nvrtc)
{
    int major = 0, minor = 0;
    if (nvrtc->version_of(&major, &minor) != NVRTC_SUCCESS)
        return gen_fail(gen, FP8GEN_ERR_MACHINE, HINT_MISSING, "%s does not tell its version",
                        nvrtc->library.path);
    snprintf(nvrtc->version, sizeof(nvrtc->version), "%d.%d", major, minor);
    if (major < GEN_NVRTC_MAJOR_MIN ||
        (major == GEN_NVRTC_MAJOR_MIN && minor < GEN_NVRTC_MINOR_MIN))
        return gen_fail(
            gen, FP8GEN_ERR_MACHINE,
            "install a newer toolkit, or set FP8_NVRTC_PATH to its libnvrtc",
            "NVRTC %s (%s) is too old: %d.%d is the first that converts to FP8 on sm_90a",
            nvrtc->version, nvrtc->library.path, GEN_NVRTC_MAJOR_MIN, GEN_NVRTC_MINOR_MIN);
    nvrtc->has_cache = major > 12 || (major == 12 && minor >= 9);
    return FP8GEN_OK;
}

static fp8gen_status read_archs(struct fp8gen *gen, struct gen_nvrtc *nvrtc)
{
    int count = 0;
    if (nvrtc->arch_count_of(&count) != NVRTC_SUCCESS || count <= 0)
        return gen_fail(gen, FP8GEN_ERR_MACHINE, HINT_MISSING,
                        "NVRTC %s (%s) does not tell what it compiles for", nvrtc->version,
                        nvrtc->library.path);
    nvrtc->archs = arena_alloc(&gen->arena, (size_t)count * sizeof(int));
    if (nvrtc->archs == NULL)
        return gen_out_of_memory(gen);
    if (nvrtc->archs_of(nvrtc->archs) == NVRTC_SUCCESS)
        nvrtc->arch_count = count;
    return FP8GEN_OK;
}

fp8gen_status gen_nvrtc_open(struct fp8gen *gen)
{
    if (gen->nvrtc != NULL)
        return FP8GEN_OK;
    struct gen_nvrtc *nvrtc = arena_alloc(&gen->arena, sizeof(*nvrtc));
    if (nvrtc == NULL)
        return gen_out_of_memory(gen);
    const struct fp8_dynlib_symbol symbols[] = {
        { "nvrtcVersion", &nvrtc->version_of, false },
        { "nvrtcGetNumSupportedArchs", &nvrtc->arch_count_of, false },
        { "nvrtcGetSupportedArchs", &nvrtc->archs_of, false },
        { "nvrtcGetErrorString", &nvrtc->error_string, false },
        { "nvrtcCreateProgram", &nvrtc->create, false },
        { "nvrtcDestroyProgram", &nvrtc->destroy, false },
        { "nvrtcCompileProgram", &nvrtc->compile, false },
        { "nvrtcGetCUBINSize", &nvrtc->cubin_size, false },
        { "nvrtcGetCUBIN", &nvrtc->cubin, false },
        { "nvrtcGetProgramLogSize", &nvrtc->log_size, false },
        { "nvrtcGetProgramLog", &nvrtc->log, false },
    };
    char message[FP8_DYNLIB_MESSAGE_SIZE];
    if (!fp8_dynlib_open(&nvrtc_spec, &nvrtc->library, message, sizeof(message)) ||
        !fp8_dynlib_symbols(&nvrtc->library, symbols, sizeof(symbols) / sizeof(symbols[0]), message,
                            sizeof(message))) {
        fp8_dynlib_close(&nvrtc->library);
        return gen_fail(gen, FP8GEN_ERR_MACHINE, HINT_MISSING, "%s", message);
    }
    fp8gen_status status = read_version(gen, nvrtc);
    if (status == FP8GEN_OK)
        status = read_archs(gen, nvrtc);
    if (status == FP8GEN_OK)
        gen->nvrtc = nvrtc;
    return status;
}

/* The library stays open: it keeps threads and statics of its own, and the next session wants
 * it. */
void gen_nvrtc_free(struct fp8gen *gen)
{
    gen->nvrtc = NULL;
}

const char *gen_nvrtc_error(const struct gen_nvrtc *nvrtc, int result)
{
    return nvrtc->error_string((nvrtcResult)result);
}

const char *gen_nvrtc_version(const struct gen_nvrtc *nvrtc)
{
    return nvrtc->version;
}

fp8gen_status gen_nvrtc_check_arch(struct fp8gen *gen, const char *arch)
{
    const struct gen_nvrtc *nvrtc = gen->nvrtc;
    int number = atoi(arch + strlen("sm_")), newest = 0;
    for (int32_t i = 0; i < nvrtc->arch_count; i++) {
        if (nvrtc->archs[i] == number)
            return FP8GEN_OK;
        if (nvrtc->archs[i] > newest)
            newest = nvrtc->archs[i];
    }
    return gen_fail(gen, FP8GEN_ERR_MACHINE, "install a newer toolkit, or leave this arch out",
                    "NVRTC %s (%s) does not compile for %s; the newest it knows is sm_%d",
                    nvrtc->version, nvrtc->library.path, arch, newest);
}

fp8gen_status fp8gen_nvrtc(fp8gen *gen, const char **path, const char **version)
{
    fp8gen_status status = gen_require(gen, path != NULL && version != NULL);
    if (status != FP8GEN_OK)
        return status;
    *path = *version = NULL;
    status = gen_nvrtc_open(gen);
    if (status == FP8GEN_OK) {
        *path = gen->nvrtc->library.path;
        *version = gen->nvrtc->version;
    }
    return status;
}

/* ---- one compilation ------------------------------------------------------------------------- */

/* Fetches the log, whatever became of the compilation. */
static void take_log(const struct gen_nvrtc *nvrtc, nvrtcProgram program, struct gen_job *job)
{
    size_t size = 0;
    if (nvrtc->log_size(program, &size) != NVRTC_SUCCESS || size == 0)
        return;
    job->log = gen_realloc(NULL, size + 1);
    if (job->log == NULL) {
        job->out_of_memory = true;
        return;
    }
    job->log[0] = job->log[size] = '\0';
    if (nvrtc->log(program, job->log) != NVRTC_SUCCESS)
        job->log[0] = '\0';
}

static void take_cubin(const struct gen_nvrtc *nvrtc, nvrtcProgram program, struct gen_job *job)
{
    size_t size = 0;
    job->result = (int)nvrtc->cubin_size(program, &size);
    if (job->result != NVRTC_SUCCESS)
        return;
    job->cubin = gen_realloc(NULL, size + 1);
    if (job->cubin == NULL) {
        job->out_of_memory = true;
        return;
    }
    job->result = (int)nvrtc->cubin(program, (char *)job->cubin);
    if (job->result == NVRTC_SUCCESS)
        job->cubin_bytes = size;
}

/* Ends in NULL; the arch and no_cache come on top. */
static const char *const fixed_options[] = {
    "--std=c++17",          "--fmad=false",       "--ftz=false",
    "--prec-div=true",      "--prec-sqrt=true",   "--device-as-default-execution-space",
    "--generate-line-info", "--ptxas-options=-v", NULL,
};
/* Where a driver is, NVRTC 12.9 and newer keep what they compiled in the driver's cache. Ours is
 * the only one: what is to be compiled anew is, and every log is that of a compilation. */
static const char no_cache[] = "--no-cache";
enum { OPTION_COUNT = sizeof(fixed_options) / sizeof(fixed_options[0]) };

const char *const *gen_nvrtc_options(void)
{
    return fixed_options;
}

static void compile_with(const struct gen_nvrtc *nvrtc, struct gen_job *job, const char **names,
                         const char **texts)
{
    char arch[64];
    snprintf(arch, sizeof(arch), "--gpu-architecture=%s", job->arch);
    const char *options[OPTION_COUNT + 1] = { arch };
    memcpy(options + 1, fixed_options, (OPTION_COUNT - 1) * sizeof(options[0]));
    int option_count = OPTION_COUNT;
    if (nvrtc->has_cache)
        options[option_count++] = no_cache;
    int headers = job->sources->count - 1;
    for (int i = 0; i < headers; i++) {
        names[i] = job->sources->files[i + 1].name;
        texts[i] = job->sources->files[i + 1].text.data;
    }
    nvrtcProgram program = NULL;
    job->result = (int)nvrtc->create(&program, job->kernel->body, job->kernel->template_name,
                                     headers, texts, names);
    if (job->result != NVRTC_SUCCESS)
        return;
    job->result = (int)nvrtc->compile(program, option_count, options);
    take_log(nvrtc, program, job);
    if (job->result == NVRTC_SUCCESS)
        take_cubin(nvrtc, program, job);
    nvrtc->destroy(&program);
}

void gen_compile(const struct gen_nvrtc *nvrtc, struct gen_job *job)
{
    size_t count = (size_t)job->sources->count;
    const char **lists = gen_realloc(NULL, 2 * count * sizeof(*lists));
    if (lists == NULL) {
        job->out_of_memory = true;
        return;
    }
    gen_slot_take();
    const double start = fp8_clock();
    compile_with(nvrtc, job, lists, lists + count);
    job->milliseconds = (int64_t)(1e3 * (fp8_clock() - start));
    gen_slot_give();
    gen_free(lists);
}

void gen_job_free(struct gen_job *job)
{
    gen_free(job->cubin);
    gen_free(job->log);
    gen_free(job->kept_at);
    job->cubin = NULL;
    job->log = NULL;
    job->kept_at = NULL;
}
