/*
 * fp8gen.h - the generator's public C API: a layer spec in, CUDA text, a plan or a bundle out.
 *
 * libfp8gen makes text and cubins. It opens no device and needs no driver; NVRTC is opened when the
 * first kernel is compiled. Every stage is a pure function of its inputs: same spec, same options,
 * same bytes. A session (fp8gen) owns one spec and all strings it hands out; it serves one thread.
 *
 * Errors: a call that fails adds one or more diagnostics, as compilers print them, to the session.
 * NULL for a session or for the place of a result is FP8GEN_ERR_ARGUMENT. Structs of options are
 * set up by their _INIT: another size, or a reserved word that is not 0, is FP8GEN_ERR_ARGUMENT.
 */
#ifndef FP8GEN_H
#define FP8GEN_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(FP8GEN_BUILD) && defined(__GNUC__)
#define FP8GEN_API __attribute__((visibility("default")))
#else
#define FP8GEN_API
#endif

/* Values are also the exit codes of the fp8gen program. */
typedef enum fp8gen_status {
    FP8GEN_OK = 0,
    FP8GEN_ERR_SPEC = 1, /* the spec, a tuning file or a template is wrong; see the diagnostics */
    FP8GEN_ERR_ARGUMENT = 2, /* an argument or option is wrong */
    FP8GEN_ERR_MACHINE = 3,  /* no NVRTC, unreadable file, disk full, out of memory */
    FP8GEN_ERR_INTERNAL = 4, /* a bug of fp8gen */
} fp8gen_status;

typedef struct fp8gen fp8gen;

typedef struct fp8gen_options {
    uint32_t size;
    uint32_t color;           /* 1: diagnostics with terminal colours */
    const char *template_dir; /* templates from this folder; NULL = the built-in ones */
    uint64_t reserved[4];
} fp8gen_options;

#define FP8GEN_OPTIONS_INIT                                                                        \
    {                                                                                              \
        sizeof(fp8gen_options), 0, NULL,                                                           \
        {                                                                                          \
            0, 0, 0, 0                                                                             \
        }                                                                                          \
    }

/* "0.1.0" */
FP8GEN_API const char *fp8gen_version(void);

/* options may be NULL. On failure *gen is NULL: FP8GEN_ERR_MACHINE is out of memory; for
 * FP8GEN_ERR_ARGUMENT fp8gen_jit_error has the sentence. */
FP8GEN_API fp8gen_status fp8gen_open(const fp8gen_options *options, fp8gen **gen);
/* With all strings that it handed out. NULL: nothing to do. */
FP8GEN_API void fp8gen_close(fp8gen *gen);

/* All diagnostics so far, in order, as one text ending in a newline; "" if there are none,
 * or no session. Valid until the session's next call. */
FP8GEN_API const char *fp8gen_diagnostics(const fp8gen *gen);

/* Replaces a value of every layer before the spec is checked: field is "tokens", "max_tokens" or
 * "recipe" (a name: "current" stands for recipe.current {}, also in layers that have that recipe
 * with other fields); value as text. Field "fsdp" replaces the ranks of the mesh; "shrink" ("true")
 * cuts the dims of all layers for runs on the host, keeping remainders and uneven shards. Field
 * "gemm" forces the choice of every GEMM: "cublaslt", "generated" (the configuration predicted
 * fastest), or the name of a configuration, for the GEMMs that it serves. Call before loading
 * the spec. FP8GEN_ERR_ARGUMENT: unknown field or value. */
FP8GEN_API fp8gen_status fp8gen_override(fp8gen *gen, const char *field, const char *value);

/* Plans by the measurements of this tuning file (JSON, written by `fp8gen tune`); GEMMs that it
 * does not speak of are planned by prediction. A session takes one, before its plan is made. What a
 * forced "gemm" says goes first. FP8GEN_ERR_SPEC: the file is not right, all that is wrong is in
 * the diagnostics; FP8GEN_ERR_MACHINE: it cannot be read. */
FP8GEN_API fp8gen_status fp8gen_tuning_file(fp8gen *gen, const char *path);

/* The configurations of generated GEMMs, in a fixed order, as a JSON array of objects: "name"
 * ("pp128x192c2s4g8"), the numbers of the name "bm", "bn", "stages", "cluster", "group", "partials"
 * (0: fast accumulation, else split), "slices" (CTAs that share a contraction), "slabs" (of the
 * output in shared memory), "consumers" (warpgroups that multiply), the flags "pingpong" and
 * "swapped" (operands), "scheduler" ("static", "atomic"). Owned by the session. */
FP8GEN_API fp8gen_status fp8gen_gemm_configs(fp8gen *gen, const char **json);

/* Evaluates the spec in the sandbox and checks it against the schema; reports all its errors.
 * A session loads one spec, once. */
FP8GEN_API fp8gen_status fp8gen_load_file(fp8gen *gen, const char *path);
/* text need not end in NUL; name stands for the path in diagnostics. */
FP8GEN_API fp8gen_status fp8gen_load_text(fp8gen *gen, const char *name, const char *text,
                                          size_t length);

/* The plan as JSON (runtime/bundle_format.h without cubins and digest). For people, of a rank with
 * a full shard: "cost" of each pass of a layer (and of "transpose", of a gathered weight): bytes
 * moved, FLOPs, predicted seconds; "memory" of a layer: bytes of the quantised weight, of what x
 * leaves for backward (saved), of the quantised dy (grad), and of several ranks a rank's rows of w
 * (shard); "predicted": seconds of a training step over the mesh: alone (its compute), step,
 * exposed, all_gather, reduce (exchange and sum), by_collective (a step whose gradients NCCL sums),
 * update and update_alone (of the weights); null beyond one host. 2-space indent, keys sorted.
 * Owned by the session. */
FP8GEN_API fp8gen_status fp8gen_plan(fp8gen *gen, const char **json);

/* Predicted seconds of a collective between H200s of one host. op: "all_gather", "all_to_all",
 * "reduce_scatter", "all_reduce_max"; way: of a gather "copy_engine" or "kernels", of all_to_all
 * "copy_engine", of a sum its numbers' "bf16", "fp16" or "fp32"; bytes: a rank's piece,
 * which it sends to each of the others in a gather or an exchange, and receives of a
 * reduce_scatter; of all_reduce_max all numbers.
 * FP8GEN_ERR_ARGUMENT: not known (more than 8 ranks, another op or way). */
FP8GEN_API fp8gen_status fp8gen_collective_seconds(fp8gen *gen, const char *op, const char *way,
                                                   double bytes, int32_t ranks, double *seconds);

/* The expanded kernels, in manifest order. index from 0; *name is NULL past the end. Owned by the
 * session. */
FP8GEN_API fp8gen_status fp8gen_expand(fp8gen *gen, int32_t index, const char **name,
                                       const char **text);

typedef struct fp8gen_build_options {
    uint32_t size;
    int32_t jobs;      /* compile threads; 0 = all cores */
    const char *archs; /* "sm_90a", "sm_90a,sm_100a", or "none" for a bundle without cubins */
    const char *output_dir;
    void (*progress)(void *user, const char *kernel, int32_t done, int32_t total); /* may be NULL */
    void *progress_user;
    const char *cache_dir; /* kernels compiled before; NULL = the default folder, "" = no cache */
    void (*log)(void *user, int level,
                const char *message); /* may be NULL; see fp8gen_jit_options */
    void *log_user;
    /* Lets a program that is ended by a signal leave nothing. hold = 1: the build is about to make,
     * rename or remove its temporary folder; it waits for the return. hold = 0: that is done; path
     * is the folder that is there until the next call, NULL = none. May be NULL. */
    void (*guard)(void *user, int32_t hold, const char *path);
    void *guard_user;
    uint64_t reserved[2];
} fp8gen_build_options;

#define FP8GEN_BUILD_OPTIONS_INIT                                                                  \
    {                                                                                              \
        sizeof(fp8gen_build_options), 0, "sm_90a", NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, \
        {                                                                                          \
            0, 0                                                                                   \
        }                                                                                          \
    }

/* Compiles the kernels and writes the bundle: into a temporary folder beside output_dir, renamed at
 * the end, so that a failed build leaves nothing and an older bundle stays whole. An existing
 * output_dir is replaced only if it is empty or a bundle in which nothing else lies.
 * FP8GEN_ERR_ARGUMENT: unknown arch (the message lists the known ones), one on which nothing
 * computes a product of the spec, an output_dir that may not be replaced; FP8GEN_ERR_MACHINE: no
 * NVRTC, disk full; FP8GEN_ERR_INTERNAL: a kernel did not compile, spilled registers or was
 * otherwise refused (the NVRTC log with template lines is in the diagnostics); FP8GEN_ERR_SPEC:
 * the same, with templates of template_dir. */
FP8GEN_API fp8gen_status fp8gen_build(fp8gen *gen, const fp8gen_build_options *options);

/* One line for each field of the spec: name, type, range, default, doc; the README's table. Owned
 * by the session. */
FP8GEN_API fp8gen_status fp8gen_schema(fp8gen *gen, const char **text);

/* Opens NVRTC as a build would. *path and *version ("13.0") live as long as the session.
 * FP8GEN_ERR_MACHINE: not found; the diagnostics say what was searched. */
FP8GEN_API fp8gen_status fp8gen_nvrtc(fp8gen *gen, const char **path, const char **version);

/* ---- JIT: bundles made when they are needed -------------------------------------------------- */

typedef struct fp8gen_jit_options {
    uint32_t size;
    int32_t jobs;      /* compile threads; 0 = all cores */
    const char *archs; /* as fp8gen_build_options; NULL = "sm_90a", for a provider the device's */
    const char *cache_dir; /* NULL = $FP8GEN_CACHE_DIR, $XDG_CACHE_HOME/fp8gen or ~/.cache/fp8gen */
    const char *template_dir; /* templates from this folder; NULL = the built-in ones */
    /* One line at a time, from any thread; level 2 = warning (the cache cannot be used), 3 =
     * information (a kernel was compiled, in how many ms; a damaged entry is rebuilt). May be
     * NULL. */
    void (*log)(void *user, int level, const char *message);
    void *log_user;
    const char *tuning_file; /* as fp8gen_tuning_file; NULL = none */
    uint64_t reserved[3];
} fp8gen_jit_options;

#define FP8GEN_JIT_OPTIONS_INIT                                                                    \
    {                                                                                              \
        sizeof(fp8gen_jit_options), 0, NULL, NULL, NULL, NULL, NULL, NULL,                         \
        {                                                                                          \
            0, 0, 0                                                                                \
        }                                                                                          \
    }

/* The folder of a bundle of this spec, to be opened with fp8_bundle_open, in path[0..path_bytes):
 * from the cache, or built and put there. `spec` need not end in NUL; `name` stands for its path in
 * diagnostics. options may be NULL. Any thread of any process: equal bundles and equal kernels are
 * made once. Blocks while it compiles, other calls only where they want the same. Where the cache
 * cannot be written, the bundle lies in memory (/dev/shm, or a temporary folder) until this process
 * ends. A forked child may call this, too: it waits for no thread of its parent, and what is
 * private to a process is not shared. A fork waits for the kernels that other threads compile at
 * that moment (a second at most). Sessions and contexts stay the parent's.
 * On failure path is "" and fp8gen_jit_error says why. */
FP8GEN_API fp8gen_status fp8gen_jit_bundle(const fp8gen_jit_options *options, const char *name,
                                           const char *spec, size_t length, char *path,
                                           size_t path_bytes);

/* The diagnostics of this thread's last failed fp8gen_jit_* or fp8gen_cache_* call, or of
 * fp8gen_open's arguments (cut at 8 KiB); "" if there was none. Valid until its next one. */
FP8GEN_API const char *fp8gen_jit_error(void);

/* A provider for fp8_context_set_provider of runtime/fp8.h: layers that no bundle has are built by
 * fp8gen_jit_bundle. user: an fp8gen_jit_options that outlives the context, or NULL. Returns an
 * fp8_status; on failure path holds the first lines of the diagnostics. */
struct fp8_layer_description;
FP8GEN_API int fp8gen_jit_provider(void *user, const struct fp8_layer_description *description,
                                   char *path, size_t path_bytes);

/* ---- the cache on disk ----------------------------------------------------------------------- */
/* dir as fp8gen_jit_options.cache_dir. fp8gen_jit_error has what went wrong. */

/* Where the cache is, or would be, in path[0..path_bytes). FP8GEN_ERR_ARGUMENT: path is NULL or too
 * short; FP8GEN_ERR_MACHINE: there is no folder for it. */
FP8GEN_API fp8gen_status fp8gen_cache_path(const char *dir, char *path, size_t path_bytes);

typedef struct fp8gen_cache_entry {
    uint32_t size;
    /* 1: its files are not as they were written; it is rebuilt when next needed */
    uint32_t damaged;
    const char *kind; /* "kernels", "bundles", or "failed": sources and logs that did not compile */
    const char *name; /* "<kernel>.<128-bit hash of its key>", its folder in <cache>/<kind> */
    uint64_t bytes;
    int64_t used; /* the last time, within half a minute, in seconds since 1970 */
} fp8gen_cache_entry;

/* Calls each for every entry, by kind and name; with verify = 1 their files are read and compared
 * with the sums that were taken when they were written. */
FP8GEN_API fp8gen_status fp8gen_cache_list(const char *dir, uint32_t verify,
                                           void (*each)(void *user,
                                                        const fp8gen_cache_entry *entry),
                                           void *user);

/* Removes the entries used longest ago until at most max_size is left ("512M"; NULL:
 * $FP8GEN_CACHE_SIZE, or 1G), and what killed processes left. Every build that adds to the cache
 * does that by itself, but keeps what was used within the last minute. *removed: bytes.
 * FP8GEN_ERR_ARGUMENT: max_size, or the variable, is no size; FP8GEN_ERR_MACHINE: something may not
 * be removed (which, and why); the rest is removed all the same. */
FP8GEN_API fp8gen_status fp8gen_cache_trim(const char *dir, const char *max_size,
                                           uint64_t *removed);

#ifdef __cplusplus
}
#endif
#endif /* FP8GEN_H */
