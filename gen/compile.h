/*
 * compile.h - from an expanded kernel to a cubin: NVRTC, its log, and several threads.
 *
 * nvrtc.c opens NVRTC and compiles one job; nvrtc_log.c reads what it said; compile.c makes the
 * jobs of a plan and runs them. A job is plain memory that one thread works on at a time, so that
 * the session (one thread's) is touched only before and after.
 */
#ifndef FP8GEN_COMPILE_H
#define FP8GEN_COMPILE_H

#include "gen/plan.h"

/* NVRTC older than 12.1 is refused: it knows no conversion to FP8 for sm_90 (PTX 8.1). */
enum { GEN_NVRTC_MAJOR_MIN = 12, GEN_NVRTC_MINOR_MIN = 1 };

/* A template or a header as NVRTC knows it and as people do. */
struct gen_source {
    const char *name; /* "amax.cuh" */
    struct gen_text text;
};

/* The files of one template: [0] itself, then all that it includes, directly or not. */
struct gen_sources {
    struct gen_source *files;
    int32_t count;
};

struct gen_job {
    const struct gen_kernel *kernel;
    const struct gen_sources *sources;
    const char *arch; /* "sm_90a" */
    /* Set by gen_compile; the last three are heap memory, freed by gen_job_free. */
    bool out_of_memory;
    int result; /* nvrtcResult */
    int64_t milliseconds;
    size_t cubin_bytes;
    unsigned char *cubin;
    char *log;
    /* the folder with source and log of a kernel that did not compile; NULL = none */
    char *kept_at;
};

/* ---- nvrtc.c --------------------------------------------------------------------------------- */

/* Opens NVRTC once per session; reports what was searched, or that it is too old. */
fp8gen_status gen_nvrtc_open(struct fp8gen *gen);
/* Whether the opened NVRTC knows the arch; reports if not. */
fp8gen_status gen_nvrtc_check_arch(struct fp8gen *gen, const char *arch);
/* Compiles one job, when one of the slots is free. Touches nothing of the session; any thread. */
void gen_compile(const struct gen_nvrtc *nvrtc, struct gen_job *job);
const char *gen_nvrtc_error(const struct gen_nvrtc *nvrtc, int result);
const char *gen_nvrtc_version(const struct gen_nvrtc *nvrtc);
/* The options of every compilation but the arch; ends in NULL. */
const char *const *gen_nvrtc_options(void);
void gen_job_free(struct gen_job *job);

/* ---- nvrtc_log.c ----------------------------------------------------------------------------- */

/* FP8GEN_OK if the job has a good cubin; else reports its errors at the templates' lines, those in
 * `seen` left out and the others added. Spilled registers, C7508 (setmaxnreg ignored) and C7510
 * (wgmma serialised) are errors. */
fp8gen_status gen_check_job(struct fp8gen *gen, const struct gen_job *job, struct buf *seen);

/* ---- compile.c ------------------------------------------------------------------------------- */

struct gen_store;

struct gen_jobs {
    struct gen_job *list; /* kernels in manifest order, for each the archs in their order */
    int32_t count;
    const struct gen_store *cache; /* NULL: everything is compiled */
};

typedef void (*gen_progress)(void *user, const char *kernel, int32_t done, int32_t total);

bool gen_kernel_exists_for(const struct gen_kernel *kernel, const char *arch);
/* One job for each text (kernels of one entry share it) and each arch that it exists for; archs
 * ends in NULL. */
fp8gen_status gen_make_jobs(struct fp8gen *gen, const struct gen_plan *plan,
                            const char *const *archs, struct gen_jobs *jobs);
/* Compiles them on `threads` threads (0 = all cores); progress (may be NULL) is called on the
 * caller's thread. Then checks each, in order. gen_jobs_free afterwards in any case. */
fp8gen_status gen_run_jobs(struct fp8gen *gen, struct gen_jobs *jobs, int32_t threads,
                           gen_progress progress, void *user);
void gen_jobs_free(struct gen_jobs *jobs);

#endif
