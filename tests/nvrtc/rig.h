/*
 * rig.h - what the tests with NVRTC share: skipping with the true reason, scratch folders,
 * sessions.
 */
#ifndef TESTS_NVRTC_RIG_H
#define TESTS_NVRTC_RIG_H

#include <stddef.h>
#include <stdint.h>

#include "gen/compile.h"
#include "gen/internal.h"

enum { RIG_PATH = 512 };

/* 0 if NVRTC is there. Else prints why not and gives the exit code of a skipped test, or of a
 * failed one where FP8_TEST_REQUIRE names nvrtc. */
int rig_nvrtc_missing(void);

/* A folder of its own for a test, removed with all that is in it by rig_remove. */
void rig_scratch(char path[RIG_PATH]);
void rig_remove(const char *path);

/* A session with this spec; fails the test if the spec is wrong. template_dir may be NULL. */
struct fp8gen *rig_open(const char *spec, const char *template_dir);
/* The same with a forced choice of every GEMM: "cublaslt", or a configuration. */
struct fp8gen *rig_open_gemm(const char *spec, const char *template_dir, const char *gemm);

/* The jobs of a spec for these archs (NULL-terminated), planned and expanded, with NVRTC open. The
 * session is the caller's to close, the jobs to free by gen_jobs_free before that. gemm: as
 * above. */
struct fp8gen *rig_make_jobs(const char *spec, const char *gemm, const char *const *archs,
                             struct gen_plan **plan, struct gen_jobs *jobs);
/* Compiles them; the test fails with the compiler's words. */
void rig_compile(struct fp8gen *gen, struct gen_jobs *jobs);

/* The built-in templates as files. With `only`, the others are kernels that do nothing and compile
 * at once; NULL = all as they are. */
void rig_copy_templates(const char *folder, const char *only);

/* Whole files; the text is malloc'ed and ends in NUL. NULL if the file is not there. */
char *rig_read(const char *path, size_t *size);
void rig_write(const char *path, const char *text);

/* A spec whose kernels, those of generated GEMMs aside, are all that the planner can ask for. */
extern const char rig_every_variant[];
/* A spec of one small layer. */
extern const char rig_small[];

#endif
