/*
 * cuda_rig.h - every pass run on two contexts, the host's and the fake GPU's, with outputs that
 * must be equal.
 *
 * All values are small integers and every tensor holds one 7, so that scales are powers of two,
 * casts and sums are exact and each path, staged or not, must give the same bits. Tensors lie in
 * blocks of exact size at every alignment, so the sanitizer sees any access outside.
 */
#ifndef CUDA_RIG_H
#define CUDA_RIG_H

#include "tests/bundle/bundle_rig.h"

#include "runtime/fp8.h"

struct side {
    fp8_context *context;
    fp8_bundle *bundle;
    fp8_layer *layer;
};

/* A tensor in a block of exactly its bytes, `shift` elements behind an aligned address. */
struct matrix {
    fp8_tensor tensor;
    char *block;
    size_t bytes;
};

struct shape {
    int64_t tokens;
    int64_t gap;   /* ld = cols + gap */
    int64_t shift; /* elements */
    bool accumulate;
};

struct outputs {
    struct matrix y, dx, dw, dbias, x32;
    uint32_t found_inf;
};

struct side cuda_open(int32_t device, const char *folder, const char *layer);
void cuda_close(struct side *side);
/* A bundle of the manifest, which it takes, with kernels that the fakes execute; its folder, which
 * bundle_remove removes. cuda_bundle: for sm_90a, with a workspace that every stage overflows. */
char *cuda_bundle_for(json_t *manifest, const char *arch);
char *cuda_bundle(json_t *manifest);
struct matrix cuda_tensor(int64_t rows, int64_t cols, int64_t ld, fp8_dtype dtype, int64_t shift);
void cuda_fill(struct matrix *m);
void *cuda_block(size_t bytes);
fp8_call cuda_call(const struct side *side, int64_t tokens, char **workspace, size_t offset);
fp8_operand cuda_operand(const struct side *side, int64_t tokens, fp8_bytes which);
void cuda_run_all(const struct side *side, struct shape s, struct outputs *out);
void cuda_compare(const struct side *host, const struct side *device, struct shape s);
/* Compares a layer of the manifest over tokens, gaps and alignments; takes the reference. */
void cuda_run_shapes(json_t *manifest, const char *layer);

#endif
