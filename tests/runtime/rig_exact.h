/*
 * rig_exact.h - products that are exact, in every configuration of the generated GEMM.
 *
 * All values are small integers and the first element of every operand is 7, so that scales are
 * powers of two, casts and sums are exact in every order, whatever the accumulation: results are
 * compared bit for bit. Operands, references and memory are made once and serve many products.
 */
#ifndef RIG_EXACT_H
#define RIG_EXACT_H

#include "tests/runtime/rig.h"

/* ---- configurations, as the generator lists them ---- */

enum { EXACT_CONFIGURATIONS = 64 }; /* at most */

struct configuration {
    char name[64];
    bool fast;
};
extern struct configuration exact_configurations[EXACT_CONFIGURATIONS];
extern int exact_configuration_count;
int exact_read_configurations(void **state); /* a setup of cmocka */

/* rig_layers_open with this configuration for all products that it serves. */
void exact_open(const struct configuration *c, struct rig_layers *layers,
                const struct rig_spec *specs, int count);

/* ---- matrices ---- */

/* Integers as they are and as bf16 on the device. Rows of one are a prefix of those of a larger one
 * of the same seed, with the same scale. */
struct exact {
    int64_t rows, cols;
    int8_t *values;
    void *device;
};
void exact_make(struct exact *e, int64_t rows, int64_t cols, uint64_t seed);
void exact_free(struct exact *e);

int32_t exact_dot(const int8_t *a, int64_t a_step, const int8_t *b, int64_t b_step, int64_t depth);
/* sums[i][j] += a[k][i] b[k][j] for the rows k in [first, end) of both. */
void exact_add_rows(int32_t *sums, const struct exact *a, const struct exact *b, int64_t first,
                    int64_t end);

/* ---- memory that is used again and again ---- */

struct buffer {
    void *device;
    unsigned char *host; /* as many bytes */
    size_t bytes;
};
extern struct buffer exact_output, exact_workspace, exact_operands[3];
void exact_need(struct buffer *b, size_t bytes); /* what was there is lost if it must grow */
void exact_release(struct buffer *b);
int exact_release_all(void **state); /* a teardown of cmocka */

/* ---- calls ---- */

fp8_call exact_call(const struct rig_layer *layer, int64_t tokens, struct buffer *memory);
/* Both copies of the first `rows` rows, in `memory`. */
void exact_quantize(const struct rig_layer *layer, fp8_role role, const struct exact *source,
                    int64_t rows, struct buffer *memory, fp8_operand *operand);

#endif
