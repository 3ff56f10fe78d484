/*
 * reference.c - the rules of quantisation written a second time, and float64 sums over samples.
 *
 * In: tensors and operands in host memory. Out: scales, counts of wrong bytes, sampled products. It
 * shares nothing with the runtime: an error there must not be repeated here. Casts work on integers
 * of the target's smallest step (value / step rounded to nearest even), which is another way than
 * the runtime's. A bf16 source has 65,536 values, so a table of codes checks whole tensors at the
 * speed of memory.
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

/* Both loops are free of branches, so that they run at the speed of memory. */
static uint32_t scan_bf16(const uint16_t *row, int64_t cols, int64_t *nonfinite)
{
    uint16_t amax = 0;
    int64_t bad = 0;
    for (int64_t start = 0; start < cols; start += 4096) { /* short counts stay in 16 bits */
        uint16_t count = 0;
        int64_t end = start + 4096 < cols ? start + 4096 : cols;
        for (int64_t j = start; j < end; j++) {
            uint16_t bits = row[j] & 0x7fff;
            uint16_t finite = bits < 0x7f80 ? bits : 0;
            count += bits >= 0x7f80;
            amax = finite > amax ? finite : amax;
        }
        bad += count;
    }
    *nonfinite += bad;
    return (uint32_t)amax << 16;
}

static uint32_t scan_fp32(const float *row, int64_t cols, int64_t *nonfinite)
{
    uint32_t amax = 0;
    int64_t bad = 0;
    for (int64_t j = 0; j < cols; j++) {
        uint32_t bits = to_bits(row[j]) & 0x7fffffff;
        uint32_t finite = bits < 0x7f800000 ? bits : 0;
        bad += bits >= 0x7f800000;
        amax = finite > amax ? finite : amax;
    }
    *nonfinite += bad;
    return amax;
}

/* fp16 is a dtype of outputs: they are looked through, their amax is never asked for. */
static void scan_fp16(const uint16_t *row, int64_t cols, int64_t *nonfinite)
{
    for (int64_t j = 0; j < cols; j++)
        *nonfinite += (row[j] & 0x7c00) == 0x7c00;
}

static void scan_rows(void *user, int64_t index)
{
    struct scan *scan = user;
    const fp8_tensor *t = scan->tensor;
    int64_t first = index * ROWS_PER_STEP, end = first + ROWS_PER_STEP, nonfinite = 0;
    uint32_t amax = 0;
    for (int64_t i = first; i < end && i < t->rows; i++) {
        int64_t at = i * ld_of(t);
        if (t->dtype == FP8_DTYPE_FP16) {
            scan_fp16((const uint16_t *)t->data + at, t->cols, &nonfinite);
            continue;
        }
        uint32_t row = t->dtype == FP8_DTYPE_BF16
                           ? scan_bf16((const uint16_t *)t->data + at, t->cols, &nonfinite)
                           : scan_fp32((const float *)t->data + at, t->cols, &nonfinite);
        amax = row > amax ? row : amax;
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
    int64_t row_rows, transposed_rows; /* lines of the copies, with their pads */
    float scale;
    fp8_dtype format;
    uint8_t codes[65536]; /* of every bf16 value */
    atomic_llong wrong;
};

static int64_t round_up(int64_t value, int64_t step)
{
    return (value + step - 1) / step * step;
}

/* What both copies must hold for 64 x 64 elements from (i0, j0); zero outside the source. */
static void make_tile(const struct comparison *c, int64_t i0, int64_t j0, uint8_t tile[64][64])
{
    const fp8_tensor *t = c->source;
    memset(tile, 0, 64 * 64);
    for (int64_t i = i0; i < i0 + 64 && i < t->rows; i++) {
        int64_t at = i * ld_of(t), end = j0 + 64 < t->cols ? j0 + 64 : t->cols;
        const uint16_t *bf16 = (const uint16_t *)t->data + at;
        const float *fp32 = (const float *)t->data + at;
        for (int64_t j = j0; j < end; j++)
            tile[i - i0][j - j0] = t->dtype == FP8_DTYPE_BF16
                                       ? c->codes[bf16[j]]
                                       : ref_encode(fp32[j], c->scale, c->format);
    }
}

/* Differences of a copy's lines first..first+count from the tile's. */
static int64_t compare_tile(const uint8_t *copy, int64_t ld, const uint8_t tile[64][64],
                            int64_t count, int64_t length)
{
    int64_t wrong = 0;
    for (int64_t i = 0; i < count; i++) {
        if (memcmp(copy + i * ld, tile[i], (size_t)length) == 0)
            continue;
        for (int64_t j = 0; j < length; j++)
            wrong += copy[i * ld + j] != tile[i][j];
    }
    return wrong;
}

static int64_t clamp64(int64_t value)
{
    return value < 0 ? 0 : value < 64 ? value : 64;
}

/* One strip of 64 source rows in both copies, tile by tile, so that all sides stay in cache. */
static void compare_strip(void *user, int64_t index)
{
    struct comparison *c = user;
    uint8_t tile[64][64], turned[64][64];
    int64_t i0 = index * 64, wrong = 0, rows = c->row_rows, cols = c->transposed_rows;
    int64_t width = c->view.row_ld > cols ? c->view.row_ld : cols;
    for (int64_t j0 = 0; j0 < width; j0 += 64) {
        make_tile(c, i0, j0, tile);
        if (c->view.row)
            wrong += compare_tile(c->view.row + i0 * c->view.row_ld + j0, c->view.row_ld, tile,
                                  clamp64(rows - i0), clamp64(c->view.row_ld - j0));
        if (!c->view.transposed)
            continue;
        for (int i = 0; i < 64; i++)
            for (int j = 0; j < 64; j++)
                turned[j][i] = tile[i][j];
        wrong += compare_tile(c->view.transposed + j0 * c->view.transposed_ld + i0,
                              c->view.transposed_ld, turned, clamp64(cols - j0),
                              clamp64(c->view.transposed_ld - i0));
    }
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
    c->row_rows = c->view.row ? round_up(source->rows, 16) : 0;
    c->transposed_rows = c->view.transposed ? round_up(source->cols, 16) : 0;
    int64_t height = c->view.transposed_ld > c->row_rows ? c->view.transposed_ld : c->row_rows;
    cli_parallel((height + 63) / 64, compare_strip, c);
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

static bool is_fp8(fp8_dtype dtype)
{
    return dtype == FP8_DTYPE_E4M3 || dtype == FP8_DTYPE_E5M2;
}

static void gather_row(void *user, int64_t s)
{
    const struct gathering *g = user;
    int64_t first = g->sample->index[s] * g->source->ld;
    float *out = g->out + s * g->depth, decoded[256];
    for (int code = 0; is_fp8(g->source->dtype) && code < 256; code++)
        decoded[code] = ref_decode((uint8_t)code, g->source->dtype);
    for (int64_t k = 0; k < g->depth; k++)
        out[k] = is_fp8(g->source->dtype) ? decoded[((const uint8_t *)g->source->data)[first + k]]
                                          : ref_load(g->source->data, g->source->dtype, first + k);
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
