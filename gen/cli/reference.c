/*
 * reference.c - the casts of quantisation written a second time, and float64 sums over samples.
 *
 * In: tensors and operands in host memory. Out: codes, sampled products. It shares nothing with the
 * runtime: an error there must not be repeated here. Casts work on integers of the target's
 * smallest step (value / step rounded to nearest even), which is another way than the runtime's.
 * What whole operands must hold is reference_operand.c's.
 */
#include <math.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "gen/cli/random.h"
#include "gen/cli/reference.h"

#define ROWS_PER_STEP 64
#define FEW 1000

/* ---- formats --------------------------------------------------------------------------------- */

struct format {
    int mantissa, min_exponent; /* of the smallest normal number */
    float max;
    uint8_t max_code, nan_code, inf_code;
};

static const struct format *format_of(fp8_dtype dtype)
{
    static const struct format e4m3 = { 3, -6, 448.0f, 0x7e, 0x7f, 0x7f };
    static const struct format e5m2 = { 2, -14, 57344.0f, 0x7b, 0x7f, 0x7c };
    return dtype == FP8_DTYPE_E5M2 ? &e5m2 : &e4m3;
}

float ref_maximum(fp8_dtype dtype)
{
    return format_of(dtype)->max;
}

float ref_decode(uint8_t code, fp8_dtype dtype)
{
    const struct format *f = format_of(dtype);
    int magnitude = code & 0x7f;
    float value;
    if (dtype == FP8_DTYPE_E5M2 && magnitude == 0x7c)
        value = INFINITY;
    else if (magnitude > f->max_code)
        value = NAN;
    else if (magnitude >> f->mantissa == 0)
        value = ldexpf((float)magnitude, f->min_exponent - f->mantissa);
    else
        value = ldexpf((float)((magnitude & ((1 << f->mantissa) - 1)) | 1 << f->mantissa),
                       f->min_exponent - f->mantissa + (magnitude >> f->mantissa) - 1);
    return code & 0x80 ? -value : value;
}

uint8_t ref_encode(float value, float scale, fp8_dtype dtype)
{
    const struct format *f = format_of(dtype);
    uint8_t sign = ref_to_bits(value) >> 31 ? 0x80 : 0;
    if (isnan(value))
        return f->nan_code | sign;
    if (isinf(value))
        return f->inf_code | sign;
    float magnitude = fabsf(value * scale);
    if (magnitude >= f->max)
        return f->max_code | sign;
    int exponent = (int)(ref_to_bits(magnitude) >> 23) - 127;
    if (exponent < f->min_exponent)
        exponent = f->min_exponent;
    /* magnitude in units of the last place, rounded to an integer, ties to even */
    float units = magnitude * ref_from_bits((uint32_t)(127 + f->mantissa - exponent) << 23);
    volatile float rounded = units + 0x1p23f;
    int code = (int)(rounded - 0x1p23f) + ((exponent - f->min_exponent) << f->mantissa);
    return (uint8_t)(code | sign);
}

/* ---- tensors --------------------------------------------------------------------------------- */

static int64_t ld_of(const fp8_tensor *tensor)
{
    return tensor->ld ? tensor->ld : tensor->cols;
}

static float decode_fp16(uint16_t bits)
{
    int exponent = bits >> 10 & 31, fraction = bits & 1023;
    float value = exponent == 31 ? (fraction ? NAN : INFINITY)
                  : exponent     ? ldexpf((float)(fraction | 1024), exponent - 25)
                                 : ldexpf((float)fraction, -24);
    return bits >> 15 ? -value : value;
}

float ref_load(const void *data, fp8_dtype dtype, int64_t at)
{
    switch (dtype) {
    case FP8_DTYPE_FP16:
        return decode_fp16(((const uint16_t *)data)[at]);
    case FP8_DTYPE_BF16:
        return ref_from_bits((uint32_t)((const uint16_t *)data)[at] << 16);
    case FP8_DTYPE_FP32:
        return ((const float *)data)[at];
    default:
        return ref_decode(((const uint8_t *)data)[at], dtype);
    }
}

struct scan {
    const fp8_tensor *tensor;
    atomic_llong nonfinite;
};

static void scan_rows(void *user, int64_t index)
{
    struct scan *scan = user;
    const fp8_tensor *t = scan->tensor;
    int64_t first = index * ROWS_PER_STEP, end = first + ROWS_PER_STEP, nonfinite = 0;
    for (int64_t i = first; i < end && i < t->rows; i++) {
        int64_t at = i * ld_of(t);
        const uint16_t *halves = (const uint16_t *)t->data + at;
        const float *floats = (const float *)t->data + at;
        uint16_t exponent = t->dtype == FP8_DTYPE_FP16 ? 0x7c00 : 0x7f80;
        for (int64_t j = 0; t->dtype != FP8_DTYPE_FP32 && j < t->cols; j++)
            nonfinite += (halves[j] & exponent) == exponent;
        for (int64_t j = 0; t->dtype == FP8_DTYPE_FP32 && j < t->cols; j++)
            nonfinite += !isfinite(floats[j]);
    }
    atomic_fetch_add(&scan->nonfinite, nonfinite);
}

int64_t ref_count_nonfinite(const fp8_tensor *tensor)
{
    struct scan scan = { .tensor = tensor };
    cli_parallel((tensor->rows + ROWS_PER_STEP - 1) / ROWS_PER_STEP, scan_rows, &scan);
    return scan.nonfinite;
}

/* ---- samples --------------------------------------------------------------------------------- */

bool ref_sample_create(struct ref_sample *sample, int64_t limit, int64_t count, uint64_t seed)
{
    if (count > limit)
        count = limit;
    sample->count = 0;
    sample->index = malloc(sizeof *sample->index * (size_t)(count ? count : 1));
    if (!sample->index)
        return false;
    for (int64_t i = 0; i < count; i++) {
        double u = (double)(cli_random_word(seed, 77, (uint64_t)i) >> 11) * 0x1p-53;
        int64_t low = i * limit / count, high = (i + 1) * limit / count;
        sample->index[i] = low + (int64_t)(u * (double)(high - low));
    }
    sample->count = count;
    return true;
}

void ref_sample_destroy(struct ref_sample *sample)
{
    free(sample->index);
    sample->index = NULL;
    sample->count = 0;
}

/* out[s * depth + k] = element k of the sampled vector s, in float32: exact, or with a scale of its
 * own within one rounding. */
struct gathering {
    const struct ref_source *source;
    const struct ref_sample *sample;
    int64_t depth;
    float *out;
};

static bool is_fp8(fp8_dtype dtype)
{
    return dtype == FP8_DTYPE_E4M3 || dtype == FP8_DTYPE_E5M2;
}

/* Where the scale of element k of line `line` of a copy stands. */
static int64_t scale_place(const struct ref_source *source, int64_t line, int64_t k)
{
    if (source->scaling == FP8_SCALING_BLOCK)
        return k / 128 * source->scales_ld + line;
    return source->scaling == FP8_SCALING_TILE ? line / 128 * source->scales_ld + k / 128 : line;
}

static void gather_row(void *user, int64_t s)
{
    const struct gathering *g = user;
    int64_t line = g->sample->index[s], first = line * g->source->ld;
    float *out = g->out + s * g->depth, decoded[256];
    for (int code = 0; is_fp8(g->source->dtype) && code < 256; code++)
        decoded[code] = ref_decode((uint8_t)code, g->source->dtype);
    for (int64_t k = 0; k < g->depth; k++)
        out[k] = is_fp8(g->source->dtype) ? decoded[((const uint8_t *)g->source->data)[first + k]]
                                          : ref_load(g->source->data, g->source->dtype, first + k);
    for (int64_t k = 0; g->source->scales && k < g->depth; k++)
        out[k] *= g->source->scales[scale_place(g->source, line, k)];
}

/* Columns are gathered for 16 rows at a time: a row's samples share its cache lines. */
static void gather_columns(void *user, int64_t block)
{
    const struct gathering *g = user;
    int64_t first = block * 16, end = first + 16 < g->depth ? first + 16 : g->depth;
    for (int64_t s = 0; s < g->sample->count; s++)
        for (int64_t k = first; k < end; k++)
            g->out[s * g->depth + k] = ref_load(g->source->data, g->source->dtype,
                                                k * g->source->ld + g->sample->index[s]);
}

static float *gather_vectors(const struct ref_source *source, int64_t depth)
{
    const struct ref_sample *sample = source->sample;
    float *out = calloc((size_t)(sample->count + 1), sizeof *out * (size_t)(depth + 1));
    struct gathering g = { source, sample, depth, out };
    if (out && source->by_column)
        cli_parallel((depth + 15) / 16, gather_columns, &g);
    else if (out)
        cli_parallel(sample->count, gather_row, &g);
    return out;
}

struct products {
    const float *a, *b;
    int64_t depth, b_count;
    double factor;
    double *out, *magnitude;
};

static void product_row(void *user, int64_t i)
{
    const struct products *p = user;
    const float *a = p->a + i * p->depth;
    for (int64_t j = 0; j < p->b_count; j++) {
        const float *b = p->b + j * p->depth;
        double sum[4] = { 0 }, squares = 0;
        int64_t k = 0;
        for (; k + 4 <= p->depth; k += 4)
            for (int l = 0; l < 4; l++)
                sum[l] += (double)a[k + l] * b[k + l];
        for (; k < p->depth; k++)
            sum[0] += (double)a[k] * b[k];
        p->out[i * p->b_count + j] = (sum[0] + sum[1] + (sum[2] + sum[3])) * p->factor;
        if (!p->magnitude)
            continue;
        for (k = 0; k < p->depth; k++)
            squares += (double)a[k] * b[k] * ((double)a[k] * b[k]);
        p->magnitude[i * p->b_count + j] = squares * p->factor * p->factor;
    }
}

bool ref_products(const struct ref_source *a, const struct ref_source *b, int64_t depth,
                  double *out, double *magnitude)
{
    float *av = gather_vectors(a, depth), *bv = gather_vectors(b, depth);
    bool done = av && bv;
    struct products p = { av, bv, depth, b->sample->count, a->factor * b->factor, out, magnitude };
    if (done)
        cli_parallel(a->sample->count, product_row, &p);
    free(av);
    free(bv);
    return done;
}

bool ref_sizes(const struct ref_source *a, const struct ref_source *b, int64_t depth, double *out)
{
    float *av = gather_vectors(a, depth), *bv = gather_vectors(b, depth);
    bool done = av && bv;
    for (int64_t i = 0; done && i < a->sample->count * depth; i++)
        av[i] = fabsf(av[i]);
    for (int64_t i = 0; done && i < b->sample->count * depth; i++)
        bv[i] = fabsf(bv[i]);
    struct products p = { av, bv, depth, b->sample->count, a->factor * b->factor, out, NULL };
    if (done)
        cli_parallel(a->sample->count, product_row, &p);
    free(av);
    free(bv);
    return done;
}

double ref_half_ulp(double value, fp8_dtype dtype)
{
    int bits = dtype == FP8_DTYPE_FP32 ? 23 : dtype == FP8_DTYPE_FP16 ? 10 : 7;
    int lowest = dtype == FP8_DTYPE_FP16 ? -14 : -126, exponent;
    (void)frexp(value, &exponent); /* value = 0.5 to 1 times 2^exponent */
    exponent = value != 0 && exponent - 1 > lowest ? exponent - 1 : lowest;
    return ldexp(1, exponent - bits - 1);
}

void ref_gather(const fp8_tensor *tensor, const struct ref_sample *rows,
                const struct ref_sample *cols, double *out)
{
    for (int64_t i = 0; i < rows->count; i++)
        for (int64_t j = 0; j < cols->count; j++)
            *out++ = ref_load(tensor->data, tensor->dtype,
                              rows->index[i] * ld_of(tensor) + cols->index[j]);
}

double ref_error(const double *value, const double *exact, const double *magnitude, int64_t count)
{
    double difference = 0, norm = 0, expected_norm = 0;
    for (int64_t i = 0; i < count; i++) {
        difference += (value[i] - exact[i]) * (value[i] - exact[i]);
        norm += exact[i] * exact[i];
        expected_norm += magnitude ? magnitude[i] : 0;
    }
    if (count < FEW && expected_norm > norm)
        norm = expected_norm;
    if (norm == 0)
        return difference == 0 ? 0 : INFINITY;
    return sqrt(difference / norm);
}

void ref_column_sums(const fp8_tensor *tensor, double *sums, double *magnitude)
{
    for (int64_t j = 0; j < tensor->cols; j++)
        sums[j] = magnitude[j] = 0;
    for (int64_t i = 0; i < tensor->rows; i++) {
        for (int64_t j = 0; j < tensor->cols; j++) {
            double v = ref_load(tensor->data, tensor->dtype, i * ld_of(tensor) + j);
            sums[j] += v;
            magnitude[j] += v * v;
        }
    }
}
