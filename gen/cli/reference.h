/*
 * reference.h - what `fp8gen run` compares results with: the rules of quantisation, written a
 * second time, and sums in float64 over sampled rows and columns.
 */
#ifndef FP8GEN_CLI_REFERENCE_H
#define FP8GEN_CLI_REFERENCE_H

#include <string.h>

#include "gen/cli/cli.h"

static inline float ref_from_bits(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint32_t ref_to_bits(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

/* ---- quantisation ---------------------------------------------------------------------------- */

struct ref_scales {
    float amax, scale, scale_inv;
};

uint8_t ref_encode(float value, float scale, fp8_dtype format);
float ref_decode(uint8_t code, fp8_dtype format);
/* Its largest number. */
float ref_maximum(fp8_dtype format);
/* Element `at` of FP8, bf16, fp16 or fp32 data. */
float ref_load(const void *data, fp8_dtype dtype, int64_t at);

/* How a recipe makes a scale of the amax of a group. */
struct ref_rule {
    bool power_of_two;
    int margin;         /* delayed scaling; the amax is that of the same data, a step before */
    int64_t shard_rows; /* rows of w that share a scale (weight_scale shard); 0: none */
};

struct ref_verdict {
    int64_t wrong_bytes, wrong_scales; /* pads included; scales of scale parts */
    bool has_whole;                    /* a copy has one scale: */
    struct ref_scales whole;           /* what it must be */
};

/* Compares all copies of an operand (in host memory) and their scales with the rules. False: out of
 * memory, or the operand is not filled. */
bool ref_check_operand(const fp8_tensor *source, const fp8_operand *operand,
                       const struct ref_rule *rule, struct ref_verdict *verdict);
/* Elements that are inf or NaN. */
int64_t ref_count_nonfinite(const fp8_tensor *tensor);

/* ---- samples --------------------------------------------------------------------------------- */

/* Ascending, distinct indices below `limit`, spread over all of it. */
struct ref_sample {
    int64_t *index;
    int64_t count;
};

bool ref_sample_create(struct ref_sample *sample, int64_t limit, int64_t count, uint64_t seed);
void ref_sample_destroy(struct ref_sample *sample);

/* Where vectors along a contraction lie: vector i is row i of data, or column i. */
struct ref_source {
    const void *data;
    fp8_dtype dtype;
    int64_t ld;
    bool by_column;
    double factor;       /* multiplies every element: 1, or scale_inv */
    const float *scales; /* scale_inv of each group along rows of data; NULL: none */
    int64_t scales_ld;
    fp8_scaling scaling;             /* of `scales` */
    const struct ref_sample *sample; /* the vectors wanted */
};

/* out[i * b->sample->count + j] = sum over k < depth of a[i,k] b[j,k] in float64; magnitude, if not
 * NULL, receives sum (a b)^2. False: out of memory. */
bool ref_products(const struct ref_source *a, const struct ref_source *b, int64_t depth,
                  double *out, double *magnitude);

/* out[...] = sum over k < depth of |a[i,k] b[j,k]|: what an error of accumulation is a share of. */
bool ref_sizes(const struct ref_source *a, const struct ref_source *b, int64_t depth, double *out);

/* Half the distance of `value` to the next number of the dtype: the error of one correct
 * rounding. */
double ref_half_ulp(double value, fp8_dtype dtype);

/* The sampled elements of a tensor as float64. */
void ref_gather(const fp8_tensor *tensor, const struct ref_sample *rows,
                const struct ref_sample *cols, double *out);

/* Relative Frobenius error of value against exact. For few samples `magnitude` (may be NULL) keeps
 * a sum that happens to be near zero from looking like an error. */
double ref_error(const double *value, const double *exact, const double *magnitude, int64_t count);
/* Column sums in float64 and the sums of squares. */
void ref_column_sums(const fp8_tensor *tensor, double *sums, double *magnitude);

#endif
