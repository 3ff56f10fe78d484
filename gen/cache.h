/*
 * cache.h - kernels out of the cache, or compiled and put into it; one thread per key.
 *
 * build.c opens a store and compile.c calls gen_cached_compile where it would call gen_compile.
 */
#ifndef FP8GEN_CACHE_H
#define FP8GEN_CACHE_H

#include "gen/compile.h"
#include "gen/store.h"

/* As gen_compile, but out of the cache if the same text was compiled before by the same NVRTC with the same
 * options. Whatever is wrong with the cache, the job gets what gen_compile would give it. */
void gen_cached_compile(const struct gen_store *store, const struct gen_nvrtc *nvrtc,
                        struct gen_job *job);

/* jit.c: sets what fp8gen_jit_error returns to this thread, and returns status. */
fp8gen_status gen_jit_fail(fp8gen_status status, const char *format, ...) GEN_PRINTF(2, 3);

/* What is done for one key is done by one thread of this process at a time; the others wait in
 * gen_flight_enter until it leaves. false: no memory, go on without. */
bool gen_flight_enter(const char hash[33]);
void gen_flight_leave(const char hash[33]);

#endif
