/*
 * rig_reference.c - what a layer must compute, from the images of its inputs alone.
 *
 * Bounds of a GEMM against float64 on the dequantised operands, from NUMERICS section 6: relative
 * Frobenius error 2e-4 (split, fp32 output), 2e-3 (split, bf16) and 1e-2 (fast) on plain normal
 * data; 1e-3 and 2.5e-3 on any other, where fast has no bound of its own: 3e-2 for zero-mean and
 * 0.5 for other data only find wrong results. Besides, every element is held to a looser bound, so
 * that one wrong element among millions is seen. Where an output has too many elements for float64,
 * a sample is taken that always has the corners and elements of the last row and column.
 *
 * The Frobenius error is taken over the larger of |want| and the size that zero-mean terms would
 * give, so that outputs of a few elements, which may cancel by chance, are judged by the same
 * bound.
 */
#include <float.h>
#include <math.h>

#include "runtime/fp8_format.h"
#include "tests/runtime/rig.h"

/* ---- quantisation ---- */

void rig_quantize(struct rig_quantized *q, const struct rig_tensor *source, bool e4m3,
                  bool power_of_two)
{
    memset(q, 0, sizeof *q);
    q->rows = source->t.rows;
    q->cols = source->t.cols;
    q->e4m3 = e4m3;
    q->codes = malloc((size_t)(q->rows * q->cols) + 1);
    assert_non_null(q->codes);
    for (int64_t i = 0; i < q->rows; i++) {
        for (int64_t j = 0; j < q->cols; j++) {
            float size = fabsf(rig_get(source, i, j));
            if (!isfinite(size))
                q->found_inf = true;
            else if (size > q->amax)
                q->amax = size;
        }
    }
    q->scale = fp8_scale_of_amax(q->amax, e4m3 ? 448.0f : 57344.0f, power_of_two);
    q->scale_inv = fp8_scale_inverse(q->scale);
    for (int64_t i = 0; i < q->rows; i++) {
        for (int64_t j = 0; j < q->cols; j++) {
            float x = rig_get(source, i, j);
            q->codes[i * q->cols + j] =
                e4m3 ? fp8_encode_e4m3(x, q->scale) : fp8_encode_e5m2(x, q->scale);
        }
    }
}

void rig_quantized_free(struct rig_quantized *q)
{
    free(q->codes);
    memset(q, 0, sizeof *q);
}

static size_t align256(size_t bytes)
{
    return (bytes + 255) / 256 * 256;
}

static int64_t round_up(int64_t value, int64_t to)
{
    return (value + to - 1) / to * to;
}

static void check_scales(const char *name, const unsigned char *image,
                         const struct rig_quantized *q)
{
    float want[16] = { 0 }, got[16];
    want[0] = q->scale;
    want[4] = q->scale_inv;
    want[8] = q->amax;
    memcpy(got, image, sizeof got);
    if (memcmp(got, want, sizeof got) != 0)
        fail_msg("%s: scale %a, scale_inv %a, amax %a; the recipe gives %a, %a, %a", name,
                 (double)got[0], (double)got[4], (double)got[8], (double)want[0], (double)want[4],
                 (double)want[8]);
}

/* One copy: `rows` x `cols` codes with strides, padded to full_rows x ld with zeros. */
struct copy {
    const unsigned char *bytes;
    int64_t full_rows, ld, rows, cols, row_step, col_step;
};

static void check_copy(const char *name, const char *which, const struct copy *copy,
                       const uint8_t *codes)
{
    for (int64_t i = 0; i < copy->full_rows; i++) {
        const unsigned char *got = copy->bytes + i * copy->ld;
        for (int64_t j = 0; j < copy->ld; j++) {
            bool inside = i < copy->rows && j < copy->cols;
            uint8_t want = inside ? codes[i * copy->row_step + j * copy->col_step] : 0;
            if (got[j] != want)
                fail_msg("%s, %s copy [%lld,%lld]: byte 0x%02X, the recipe gives 0x%02X%s", name,
                         which, (long long)i, (long long)j, got[j], want, inside ? "" : " (pad)");
        }
    }
}

void rig_check_operand(const char *name, struct rig_operand *operand, const struct rig_quantized *q)
{
    const fp8_operand *op = &operand->op;
    rig_block_pull(&operand->block, name);
    assert_int_equal(op->dtype, q->e4m3 ? FP8_DTYPE_E4M3 : FP8_DTYPE_E5M2);
    assert_int_equal(op->rows, q->rows);
    assert_int_equal(op->cols, q->cols);
    if (q->rows == 0 || q->cols == 0)
        return;
    const unsigned char *image = operand->block.image;
    check_scales(name, image, q);
    size_t at = align256(16 * sizeof(float));
    if (op->copies & FP8_COPY_ROW) {
        struct copy row = {
            image + at, round_up(q->rows, 16), round_up(q->cols, 128), q->rows, q->cols, q->cols, 1
        };
        check_copy(name, "row", &row, q->codes);
        at += align256((size_t)(row.full_rows * row.ld));
    }
    if (op->copies & FP8_COPY_TRANSPOSED) {
        struct copy turned = {
            image + at, round_up(q->cols, 16), round_up(q->rows, 128), q->cols, q->rows, 1, q->cols
        };
        check_copy(name, "transposed", &turned, q->codes);
        at += (size_t)(turned.full_rows * turned.ld);
    }
    assert_true(at <= operand->block.bytes);
}

/* ---- products ---- */

/* Codes as float values, contraction along rows of the result. */
static float *decode_along(const struct rig_quantized *q, bool transposed)
{
    float table[256];
    for (int code = 0; code < 256; code++)
        table[code] = q->e4m3 ? fp8_decode_e4m3((uint8_t)code) : fp8_decode_e5m2((uint8_t)code);
    float *values = malloc(((size_t)(q->rows * q->cols) + 1) * sizeof *values);
    assert_non_null(values);
    for (int64_t i = 0; i < q->rows; i++) {
        for (int64_t j = 0; j < q->cols; j++)
            values[transposed ? j * q->rows + i : i * q->cols + j] =
                table[q->codes[i * q->cols + j]];
    }
    return values;
}

struct dot {
    double sum, size, square; /* of the terms, of their absolute values, of their squares */
};

/* Products of two FP8 values are exact in float32; only the sum needs float64, the rest is for
 * bounds. */
static struct dot dot_of(const float *a, const float *b, int64_t depth)
{
    enum { LANES = 16 };
    double sum[LANES] = { 0 };
    float size[LANES] = { 0 }, square[LANES] = { 0 };
    int64_t k = 0;
    for (; k + LANES <= depth; k += LANES) {
        for (int l = 0; l < LANES; l++) {
            float term = a[k + l] * b[k + l];
            sum[l] += (double)term;
            size[l] += fabsf(term);
            square[l] += term * term;
        }
    }
    for (int l = 0; k < depth; k++, l++) {
        float term = a[k] * b[k];
        sum[l] += (double)term;
        size[l] += fabsf(term);
        square[l] += term * term;
    }
    struct dot dot = { 0 };
    for (int l = 0; l < LANES; l++) {
        dot.sum += sum[l];
        dot.size += (double)size[l];
        dot.square += (double)square[l];
    }
    return dot;
}

struct judgement {
    const struct rig_product *p;
    const float *a, *b;
    int64_t depth;
    double smaller, larger; /* scale_inv */
    int64_t count;
    double error, want, terms; /* sums of squares */
};

static float element_of(const struct rig_product *p, const unsigned char *image, int64_t i,
                        int64_t j)
{
    size_t at = (size_t)(i * p->out->t.ld + j);
    if (p->out->t.dtype == FP8_DTYPE_FP32) {
        float value;
        memcpy(&value, image + at * sizeof value, sizeof value);
        return value;
    }
    uint16_t half;
    memcpy(&half, image + at * sizeof half, sizeof half);
    return rig_value(p->out->t.dtype, half);
}

/* A bad element makes exactly the outputs bad that depend on it. */
static void judge_bad(const struct rig_product *p, int64_t i, int64_t j, double want, double got)
{
    bool right = isnan(want) ? isnan(got) : got == want;
    if (!right)
        fail_msg("%s [%lld,%lld]: %g, the reference is %g", p->name, (long long)i, (long long)j,
                 got, want);
}

static void judge(struct judgement *judgement, int64_t i, int64_t j)
{
    const struct rig_product *p = judgement->p;
    struct dot dot = dot_of(judgement->a + i * judgement->depth,
                            judgement->b + j * judgement->depth, judgement->depth);
    double factor = judgement->smaller * judgement->larger;
    double want = dot.sum * judgement->smaller * judgement->larger;
    if (p->bias != NULL)
        want += (double)rig_get(p->bias, 0, j);
    if (p->before != NULL)
        want += (double)element_of(p, p->before, i, j);
    double got = (double)rig_get(p->out, i, j);
    if (!isfinite(want)) {
        judge_bad(p, i, j, want, got);
        return;
    }
    bool fp32 = p->out->t.dtype == FP8_DTYPE_FP32, fp16 = p->out->t.dtype == FP8_DTYPE_FP16;
    double rounding = fabs(want) * (fp32 ? 0x1p-23 : fp16 ? 0x1p-11 : 0x1p-8);
    if (fp16)
        rounding += 0x1p-25;
    if (fp16 && fabs(want) > 65000) { /* near the largest, which is 65504, or beyond */
        if (!(fabs(got) >= 64000 && (got > 0) == (want > 0)))
            judge_bad(p, i, j, want, got);
        return;
    }
    if (rig.cuda) {
        /* cuBLASLt may flush results, and all of them where the two factors' product is
         * subnormal */
        rounding += FLT_MIN;
        if (factor < FLT_MIN)
            rounding += fabs(want);
    } else {
        rounding += fp32 ? 0x1p-149 : 0x1p-133;
    }
    /* Of the terms' sizes, all added up. The numerics rules bound fast accumulation for centred data only;
     * on data of one sign it loses 0.17 in the mean and up to 0.41 in an element at K = 65,536 (H200). */
    double share = !p->fast || p->centred ? 4e-3 : judgement->depth > 28672 ? 0.6 : 0.3;
    double bound = share * dot.size * factor + rounding;
    double error = got - want;
    if (!(fabs(error) <= bound))
        fail_msg("%s [%lld,%lld] of %lld x %lld, depth %lld: %g, the reference is %g (bound %g)",
                 p->name, (long long)i, (long long)j, (long long)p->out->t.rows,
                 (long long)p->out->t.cols, (long long)judgement->depth, got, want, bound);
    /* in units of the factors, whose squares would vanish */
    judgement->count++;
    double tiny = fp16 ? 0x1p-14 : 2 * FLT_MIN; /* where the steps between results are one size */
    error = error < rounding && fabs(want) < tiny ? 0 : error / factor;
    if (rig.cuda && factor < FLT_MIN)
        error = 0;
    judgement->error += error * error;
    judgement->want += (want / factor) * (want / factor);
    judgement->terms += dot.square;
}

static double bound_of(const struct judgement *judgement)
{
    const struct rig_product *p = judgement->p;
    bool fp32 = p->out->t.dtype == FP8_DTYPE_FP32;
    if (p->fast && judgement->depth > 128)
        return !p->centred ? 0.5 : p->level ? 1e-2 : 3e-2;
    bool plain = p->centred && p->level;
    double bound = fp32 ? (plain ? 2e-4 : 1e-3) : (plain ? 2e-3 : 2.5e-3);
    return judgement->count < 1000 ? 2.5 * bound : bound; /* a few elements may all be unlucky */
}

/* Every element, or the corners, the last row and column and a random sample. */
static void judge_all(struct judgement *judgement)
{
    int64_t rows = judgement->p->out->t.rows, cols = judgement->p->out->t.cols;
    int64_t budget = (rig.cuda ? 100000000 : 8000000) / (judgement->depth + 1) + 64;
    if (rows * cols <= budget) {
        for (int64_t i = 0; i < rows; i++) {
            for (int64_t j = 0; j < cols; j++)
                judge(judgement, i, j);
        }
        return;
    }
    uint64_t seed = (uint64_t)(rows * 31 + cols);
    for (int64_t n = 0; n < budget; n++) {
        int64_t i = rig_below(&seed, rows), j = rig_below(&seed, cols);
        if (n < 4) {
            i = n / 2 * (rows - 1);
            j = n % 2 * (cols - 1);
        } else if (n % 8 == 0) {
            i = rows - 1;
        } else if (n % 8 == 1) {
            j = cols - 1;
        }
        judge(judgement, i, j);
    }
}

double rig_check_product(const struct rig_product *p)
{
    struct judgement judgement = { .p = p };
    if (p->out->t.rows == 0 || p->out->t.cols == 0)
        return 0;
    float *a = decode_along(p->a, p->a_transposed), *b = decode_along(p->b, p->b_transposed);
    judgement.a = a;
    judgement.b = b;
    judgement.depth = p->a_transposed ? p->a->rows : p->a->cols;
    judgement.smaller = (double)fminf(p->a->scale_inv, p->b->scale_inv);
    judgement.larger = (double)fmaxf(p->a->scale_inv, p->b->scale_inv);
    judge_all(&judgement);
    free(a);
    free(b);
    double size = fmax(judgement.want, judgement.terms);
    double error = size > 0 ? sqrt(judgement.error / size) : 0;
    if (getenv("FP8_TEST_VERBOSE") != NULL)
        print_message("%s %lld x %lld x %lld: relative error %.2e\n", p->name,
                      (long long)p->out->t.rows, (long long)p->out->t.cols,
                      (long long)judgement.depth, error);
    if (!(error <= bound_of(&judgement)))
        fail_msg("%s, %lld x %lld, depth %lld, %s accumulation: relative error %.3e, bound %.1e",
                 p->name, (long long)p->out->t.rows, (long long)p->out->t.cols,
                 (long long)judgement.depth, p->fast ? "fast" : "split", error,
                 bound_of(&judgement));
    return error;
}

/* fp32 sums of the unquantised dy: 128 elements in a partial, then the partials in order. */
void rig_check_dbias(const struct rig_case *c)
{
    const struct rig_tensor *dy = &c->tensor[RIG_DY], *dbias = &c->tensor[RIG_DBIAS];
    for (int64_t j = 0; j < dy->t.cols; j++) {
        double want = 0, size = 0;
        if (c->accumulate) {
            float old;
            memcpy(&old, c->before[RIG_DBIAS] + (size_t)j * sizeof old, sizeof old);
            want = (double)old;
            size = fabs(want);
        }
        for (int64_t i = 0; i < dy->t.rows; i++) {
            want += (double)rig_get(dy, i, j);
            size += fabs((double)rig_get(dy, i, j));
        }
        double got = (double)rig_get(dbias, 0, j);
        double bound = size * 0x1p-24 * (40 + (double)dy->t.rows / 128) + FLT_MIN;
        if (!isfinite(want))
            assert_true(isnan(want) ? isnan(got) : got == want);
        else if (!(fabs(got - want) <= bound))
            fail_msg("dbias[%lld]: %g, the column sum of dy is %g", (long long)j, got, want);
    }
}
