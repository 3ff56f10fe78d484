/*
 * reference.c - the rules of quantisation written a second time, and float64 sums over samples.
 *
 * In: tensors and operands in host memory. Out: scales, counts of wrong bytes, sampled products. It
 * shares nothing with the runtime: an error there must not be repeated here. Casts work on integers
 * of the target's smallest step (value / step rounded to nearest even), which is another way than the
 * runtime's. A bf16 source has 65,536 values, so a table of codes checks whole tensors at the speed of
 * memory.
 */
#include <float.h>
#include <math.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "gen/cli/random.h"
#include "gen/cli/reference.h"

#define ROWS_PER_STEP 64
#define FEW 1000

static float from_bits(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static uint32_t to_bits(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

/* ---- formats -------------------------------------------------------------------------------------------- */

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
    uint8_t sign = to_bits(value) >> 31 ? 0x80 : 0;
    if (isnan(value))
        return f->nan_code | sign;
    if (isinf(value))
        return f->inf_code | sign;
    float magnitude = fabsf(value * scale);
    if (magnitude >= f->max)
        return f->max_code | sign;
    int exponent = (int)(to_bits(magnitude) >> 23) - 127;
    if (exponent < f->min_exponent)
        exponent = f->min_exponent;
    /* magnitude in units of the last place, rounded to an integer, ties to even */
    float units = magnitude * from_bits((uint32_t)(127 + f->mantissa - exponent) << 23);
    volatile float rounded = units + 0x1p23f;
    int code = (int)(rounded - 0x1p23f) + ((exponent - f->min_exponent) << f->mantissa);
    return (uint8_t)(code | sign);
}

/* ---- tensors -------------------------------------------------------------------------------------------- */

static int64_t ld_of(const fp8_tensor *tensor)
{
    return tensor->ld ? tensor->ld : tensor->cols;
}

static float load(const void *data, fp8_dtype dtype, int64_t at)
{
    switch (dtype) {
    case FP8_DTYPE_BF16:
        return from_bits((uint32_t)((const uint16_t *)data)[at] << 16);
    case FP8_DTYPE_FP32:
        return ((const float *)data)[at];
    default:
        return ref_decode(((const uint8_t *)data)[at], dtype);
    }
}

struct scan {
    const fp8_tensor *tensor;
    atomic_uint amax_bits;
    atomic_llong nonfinite;
};

static void scan_rows(void *user, int64_t index)
{
    struct scan *scan = user;
    const fp8_tensor *t = scan->tensor;
    int64_t first = index * ROWS_PER_STEP, end = first + ROWS_PER_STEP, nonfinite = 0;
    uint32_t amax = 0;
    for (int64_t i = first; i < end && i < t->rows; i++) {
        for (int64_t j = 0; j < t->cols; j++) {
            uint32_t bits = to_bits(load(t->data, t->dtype, i * ld_of(t) + j)) & 0x7fffffff;
            bool finite = bits < 0x7f800000;
            nonfinite += !finite;
            amax = finite && bits > amax ? bits : amax;
        }
    }
    unsigned seen = atomic_load(&scan->amax_bits);
    while (seen < amax && !atomic_compare_exchange_weak(&scan->amax_bits, &seen, amax))
        ;
    atomic_fetch_add(&scan->nonfinite, nonfinite);
}

static void scan_tensor(struct scan *scan, const fp8_tensor *tensor)
{
    scan->tensor = tensor;
    cli_parallel((tensor->rows + ROWS_PER_STEP - 1) / ROWS_PER_STEP, scan_rows, scan);
}

int64_t ref_count_nonfinite(const fp8_tensor *tensor)
{
    struct scan scan = { 0 };
    scan_tensor(&scan, tensor);
    return scan.nonfinite;
}

struct ref_scales ref_make_scales(const fp8_tensor *source, fp8_dtype format, bool power_of_two)
{
    struct scan scan = { 0 };
    struct ref_scales s = { 0, 1, 1 };
    scan_tensor(&scan, source);
    s.amax = from_bits(scan.amax_bits);
    if (s.amax > 0)
        s.scale = format_of(format)->max / s.amax;
    if (isinf(s.scale))
        s.scale = FLT_MAX;
    if (power_of_two)
        s.scale = from_bits(to_bits(s.scale) & 0xff800000u);
    s.scale_inv = 1.0f / s.scale;
    return s;
}

/* ---- bytes ---------------------------------------------------------------------------------------------- */

struct comparison {
    const fp8_tensor *source;
    fp8_operand_view view;
    float scale;
    fp8_dtype format;
    uint8_t codes[65536]; /* of every bf16 value */
    atomic_llong wrong;
};

static uint8_t expected(const struct comparison *c, int64_t i, int64_t j)
{
    const fp8_tensor *t = c->source;
    if (i >= t->rows || j >= t->cols)
        return 0;
    int64_t at = i * ld_of(t) + j;
    if (t->dtype == FP8_DTYPE_BF16)
        return c->codes[((const uint16_t *)t->data)[at]];
    return ref_encode(((const float *)t->data)[at], c->scale, c->format);
}

static int64_t round_up(int64_t value, int64_t step)
{
    return (value + step - 1) / step * step;
}

static void compare_rows(void *user, int64_t index)
{
    struct comparison *c = user;
    int64_t rows = round_up(c->source->rows, 16), wrong = 0;
    int64_t first = index * ROWS_PER_STEP, end = first + ROWS_PER_STEP;
    for (int64_t i = first; i < end && i < rows; i++)
        for (int64_t j = 0; j < c->view.row_ld; j++)
            wrong += c->view.row[i * c->view.row_ld + j] != expected(c, i, j);
    atomic_fetch_add(&c->wrong, wrong);
}

/* One step is a strip of 64 source rows: their columns in blocks, so that both sides stay in cache. */
static void compare_transposed(void *user, int64_t index)
{
    struct comparison *c = user;
    int64_t cols = round_up(c->source->cols, 16), ld = c->view.transposed_ld, wrong = 0;
    int64_t first = index * ROWS_PER_STEP, end = first + ROWS_PER_STEP;
    if (end > ld)
        end = ld;
    for (int64_t block = 0; block < cols; block += 64)
        for (int64_t i = first; i < end; i++)
            for (int64_t j = block; j < block + 64 && j < cols; j++)
                wrong += c->view.transposed[j * ld + i] != expected(c, i, j);
    atomic_fetch_add(&c->wrong, wrong);
}

int64_t ref_count_wrong_bytes(const fp8_tensor *source, const fp8_operand *operand, float scale)
{
    struct comparison *c = calloc(1, sizeof *c);
    int64_t wrong = -1;
    if (!c || fp8_operand_parts(operand, &c->view) != FP8_OK)
        goto done;
    c->source = source;
    c->scale = scale;
    c->format = operand->dtype;
    for (uint32_t i = 0; i < 65536; i++)
        c->codes[i] = ref_encode(from_bits(i << 16), scale, c->format);
    if (c->view.row)
        cli_parallel((round_up(source->rows, 16) + ROWS_PER_STEP - 1) / ROWS_PER_STEP, compare_rows,
                     c);
    if (c->view.transposed)
        cli_parallel((c->view.transposed_ld + ROWS_PER_STEP - 1) / ROWS_PER_STEP,
                     compare_transposed, c);
    wrong = c->wrong;
done:
    free(c);
    return wrong;
}

/* ---- samples -------------------------------------------------------------------------------------------- */

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

/* out[s * depth + k] = element k of the sampled vector s, exact in float32. */
struct gathering {
    const struct ref_source *source;
    const struct ref_sample *sample;
    int64_t depth;
    float *out;
};

static void gather_vector(void *user, int64_t s)
{
    const struct gathering *g = user;
    int64_t i = g->sample->index[s], ld = g->source->ld;
    float *out = g->out + s * g->depth, decoded[256];
    bool is_fp8 = g->source->dtype == FP8_DTYPE_E4M3 || g->source->dtype == FP8_DTYPE_E5M2;
    for (int code = 0; is_fp8 && code < 256; code++)
        decoded[code] = ref_decode((uint8_t)code, g->source->dtype);
    for (int64_t k = 0; k < g->depth; k++) {
        int64_t at = g->source->by_column ? k * ld + i : i * ld + k;
        out[k] = is_fp8 ? decoded[((const uint8_t *)g->source->data)[at]]
                        : load(g->source->data, g->source->dtype, at);
    }
}

static float *gather_vectors(const struct ref_source *source, const struct ref_sample *sample,
                             int64_t depth)
{
    float *out = calloc((size_t)(sample->count + 1), sizeof *out * (size_t)(depth + 1));
    struct gathering g = { source, sample, depth, out };
    if (out)
        cli_parallel(sample->count, gather_vector, &g);
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

bool ref_products(const struct ref_source *a, const struct ref_sample *a_sample,
                  const struct ref_source *b, const struct ref_sample *b_sample, int64_t depth,
                  double *out, double *magnitude)
{
    float *av = gather_vectors(a, a_sample, depth), *bv = gather_vectors(b, b_sample, depth);
    bool done = av && bv;
    struct products p = { av, bv, depth, b_sample->count, a->factor * b->factor, out, magnitude };
    if (done)
        cli_parallel(a_sample->count, product_row, &p);
    free(av);
    free(bv);
    return done;
}

void ref_gather(const fp8_tensor *tensor, const struct ref_sample *rows,
                const struct ref_sample *cols, double *out)
{
    for (int64_t i = 0; i < rows->count; i++)
        for (int64_t j = 0; j < cols->count; j++)
            *out++ =
                load(tensor->data, tensor->dtype, rows->index[i] * ld_of(tensor) + cols->index[j]);
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
            double v = load(tensor->data, tensor->dtype, i * ld_of(tensor) + j);
            sums[j] += v;
            magnitude[j] += v * v;
        }
    }
}
