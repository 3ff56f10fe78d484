/*
 * json_read.h - reading a manifest field by field, strictly.
 *
 * Every getter takes an object and a key, and fails with one sentence that says where in the
 * manifest the field is, what was found and what is wanted. The place is a text that enter and
 * leave keep, so messages cost nothing until there is one. Used by manifest*.c only.
 */
#ifndef FP8_JSON_READ_H
#define FP8_JSON_READ_H

#include <jansson.h>

#include "runtime/internal.h"

struct fp8_reader {
    const char *path; /* of the manifest, for messages */
    struct fp8_arena *arena;
    size_t length; /* of where */
    char where[256];
};

/* "<path>: <where>: <sentence>", FP8_ERR_BUNDLE. */
fp8_status fp8_read_bad(const struct fp8_reader *reader, const char *format, ...)
    __attribute__((format(printf, 2, 3), cold));

/* Appends to the place ("layers[0]") and returns what leave takes. */
size_t fp8_read_enter(struct fp8_reader *reader, const char *format, ...)
    __attribute__((format(printf, 2, 3)));
void fp8_read_leave(struct fp8_reader *reader, size_t mark);

/* Refuses a value that is no object, and keys that are not in the list (ended by NULL). */
fp8_status fp8_read_keys(const struct fp8_reader *reader, const json_t *object,
                         const char *const *keys);
fp8_status fp8_read_string(const struct fp8_reader *reader, const json_t *object, const char *key,
                           const char **value); /* copied into the arena */
fp8_status fp8_read_integer(const struct fp8_reader *reader, const json_t *object, const char *key,
                            int64_t minimum, int64_t maximum, int64_t *value);
fp8_status fp8_read_bool(const struct fp8_reader *reader, const json_t *object, const char *key,
                         bool *value);
fp8_status fp8_read_array(const struct fp8_reader *reader, const json_t *object, const char *key,
                          size_t maximum, const json_t **value);
fp8_status fp8_read_object(const struct fp8_reader *reader, const json_t *object, const char *key,
                           const json_t **value);
/* The place of a string in a list of `count` words. */
fp8_status fp8_read_word(const struct fp8_reader *reader, const json_t *object, const char *key,
                         const char *const *words, int count, int *value);
fp8_status fp8_read_dtype(const struct fp8_reader *reader, const json_t *object, const char *key,
                          fp8_dtype *value);
/* A zeroed array in the arena. */
fp8_status fp8_read_allocate(const struct fp8_reader *reader, size_t count, size_t bytes,
                             void **array);

/* ---- between the manifest's own files ---- */

fp8_status fp8_manifest_read_kernel(struct fp8_reader *reader, const struct fp8_manifest *manifest,
                                    const json_t *record, struct fp8_kernel *kernel);
/* NULL if there is none of that name. */
const struct fp8_kernel *fp8_manifest_kernel(const struct fp8_manifest *manifest, const char *name);
/* Largest extent of anything: a product of two, times a dtype's bytes, still fits 64 bits. */
#define FP8_MANIFEST_EXTENT_LIMIT ((int64_t)1 << 40)
fp8_status fp8_manifest_buffers(struct fp8_reader *reader, const json_t *record,
                                struct fp8_layer_plan *plan);
/* -1 if there is none whose name is these `length` characters. */
int fp8_manifest_find_buffer(const struct fp8_layer_plan *plan, const char *name, size_t length);
/* Reads the mesh into the manifest, and how a layer's weight is spread over it into the plan. */
fp8_status fp8_manifest_mesh(struct fp8_reader *reader, const json_t *root,
                             struct fp8_manifest *manifest);
fp8_status fp8_manifest_shard(struct fp8_reader *reader, const struct fp8_manifest *manifest,
                              const json_t *record, struct fp8_layer_plan *plan);
fp8_status fp8_manifest_layer(struct fp8_reader *reader, const struct fp8_manifest *manifest,
                              const json_t *record, struct fp8_layer_plan *plan);
/* The kernel that `key` names, which must implement `op`. */
fp8_status fp8_manifest_kernel_named(struct fp8_reader *reader, const struct fp8_manifest *manifest,
                                     const json_t *record, const char *key, enum fp8_op op,
                                     const struct fp8_kernel **kernel);
/* The keys a_scaling, b_scaling, a_transposed, b_transposed of a gemm kernel's semantics or
 * step. */
fp8_status fp8_manifest_gemm_semantics(struct fp8_reader *reader, const json_t *object,
                                       fp8_semantics *how);
/* The steps of a list (manifest_steps.c): into the plan's pass. */
fp8_status fp8_manifest_steps(struct fp8_reader *reader, const struct fp8_manifest *manifest,
                              struct fp8_layer_plan *plan, const json_t *list, const char *key,
                              fp8_pass pass);
fp8_status fp8_manifest_dispatch(struct fp8_reader *reader, const struct fp8_manifest *manifest,
                                 const struct fp8_layer_plan *plan, const json_t *record,
                                 const struct fp8_step *step);

#endif
