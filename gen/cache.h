/*
 * cache.h - kernels out of the cache, or compiled and put into it; one thread per key.
 *
 * build.c opens a store and compile.c calls gen_cached_compile where it would call gen_compile.
 */
#ifndef FP8GEN_CACHE_H
#define FP8GEN_CACHE_H

#include "gen/compile.h"
#include "gen/store.h"

#include <sys/types.h>

/* As gen_compile, but out of the cache if the same text was compiled before by the same NVRTC with
 * the same options. Whatever is wrong with the cache, the job gets what gen_compile would give
 * it. */
void gen_cached_compile(const struct gen_store *store, const struct gen_nvrtc *nvrtc,
                        struct gen_job *job);

/* jit.c: sets what fp8gen_jit_error returns to this thread, and returns status. */
fp8gen_status gen_jit_fail(fp8gen_status status, const char *format, ...) GEN_PRINTF(2, 3);

/* ---- jit_private.c --------------------------------------------------------------------------- */

#define GEN_BUNDLE_FOLDER "bundle"

/* A bundle of this process alone: in <path>/bundle until the process ends. */
struct gen_private_bundle {
    struct gen_private_bundle *next;
    pid_t owner;
    char hash[33];
    char path[512];
};

/* Appends "<path>/bundle" if there is one of this key. */
bool gen_private_find(const char *hash, struct buf *path);
/* Makes the folder for one; NULL with errno set. gen_private_end afterwards: kept, or removed. */
struct gen_private_bundle *gen_private_begin(const char *hash);
void gen_private_end(struct gen_private_bundle *made, bool keep);

/* ---- turns.c --------------------------------------------------------------------------------- */

/* The lock of all that the threads of this process share; held for a moment, never while another
 * lock is taken. A fork finds it free. */
void gen_shared_lock(void);
void gen_shared_unlock(void);

/* What is done for one key is done by one thread of this process at a time; the others wait in
 * gen_flight_enter until it leaves. false: no memory, go on without. */
bool gen_flight_enter(const char hash[33]);
void gen_flight_leave(const char hash[33]);

/* Around a compilation: at most one per core runs at a time, however many builds do, and none
 * during a fork. */
void gen_slot_take(void);
void gen_slot_give(void);

#endif
