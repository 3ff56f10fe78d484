/*
 * bundle_dir.h - the folder of a bundle: written aside, then put in its place in one step.
 *
 * Between gen_bundle_begin and gen_bundle_commit everything lies in a temporary folder beside the
 * target. gen_bundle_abandon removes it and may be called at any time, also after a commit; it must
 * be called in the end. What a killed build of the same target left there is removed by the next
 * begin.
 */
#ifndef FP8GEN_BUNDLE_DIR_H
#define FP8GEN_BUNDLE_DIR_H

#include "gen/internal.h"

struct gen_bundle_dir {
    void (*guard)(void *user, int32_t hold, const char *path); /* of fp8gen_build_options */
    void *guard_user;
    struct fp8gen *gen;
    const char *target; /* as the caller named it, symbolic links resolved */
    const char *parent;
    const char *temporary; /* NULL = nothing to remove */
    bool locked;           /* by `lock`, a file descriptor */
    int lock;
};

/* guard is set (or NULL), the rest of *dir zero. Refuses a target that exists and is neither a
 * bundle with nothing else in it nor an empty folder. */
fp8gen_status gen_bundle_begin(struct fp8gen *gen, const char *target, struct gen_bundle_dir *dir);
/* Writes a file of the bundle ("kernels/x.cubin") down to the disk. */
fp8gen_status gen_bundle_write(struct gen_bundle_dir *dir, const char *name, const void *data,
                               size_t size);
fp8gen_status gen_bundle_commit(struct gen_bundle_dir *dir);
void gen_bundle_abandon(struct gen_bundle_dir *dir);

#endif
