/*
 * rig_reference.c - what the products and dbias of a layer must be, from images alone.
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

/* ---- products ---- */

enum { BLOCK = 128, SAMPLES = 1000 };

/* One operand: values along the contraction, without their scales; a bf16 product has none. */
struct side {
    const struct rig_copy *copy; /* NULL: bf16 */
    float *values;
    int64_t depth;
};

static struct side make_side(const struct rig_quantized *q, bool transposed, bool bf16)
{
    int64_t rows = transposed ? q->cols : q->rows;
    struct side side = { .depth = transposed ? q->rows : q->cols };
    side.values = malloc(((size_t)(rows * side.depth) + 1) * sizeof *side.values);
    assert_non_null(side.values);
    if (bf16) {
        for (int64_t i = 0; i < rows; i++) {
            for (int64_t k = 0; k < side.depth; k++)
                side.values[i * side.depth + k] =
                    transposed ? rig_get(q->source, k, i) : rig_get(q->source, i, k);
        }
        return side;
    }
    float table[256];
    for (int code = 0; code < 256; code++)
        table[code] = q->e4m3 ? fp8_decode_e4m3((uint8_t)code) : fp8_decode_e5m2((uint8_t)code);
    side.copy = transposed ? &q->transposed : &q->row;
    assert_int_not_equal(side.copy->scaling, FP8_SCALING_NONE);
    for (int64_t i = 0; i < rows * side.depth; i++)
        side.values[i] = table[side.copy->codes[i]];
    return side;
}

static double inverse_at(const struct side *side, int64_t row, int64_t k)
{
    return side->copy != NULL ? (double)rig_scale_inverse(side->copy, row, k) : 1.0;
}

struct dot {
    double sum, size, square; /* of the terms, of their absolute values, of their squares */
};

/* Products of two values of FP8 or bf16 are exact in float32, up to its range; sums need
 * float64. */
static struct dot dot_of(const float *a, const float *b, int64_t depth)
{
    enum { LANES = 16 };
    double sum[LANES] = { 0 }, square[LANES] = { 0 };
    float size[LANES] = { 0 };
    int64_t k = 0;
    for (; k + LANES <= depth; k += LANES) {
        for (int l = 0; l < LANES; l++) {
            float term = a[k + l] * b[k + l];
            sum[l] += (double)term;
            size[l] += fabsf(term);
            square[l] += (double)term * (double)term;
        }
    }
    for (int l = 0; k < depth; k++, l++) {
        float term = a[k] * b[k];
        sum[l] += (double)term;
        size[l] += fabsf(term);
        square[l] += (double)term * (double)term;
    }
    struct dot dot = { 0 };
    for (int l = 0; l < LANES; l++) {
        dot.sum += sum[l];
        dot.size += (double)size[l];
        dot.square += square[l];
    }
    return dot;
}

static bool changes_along_depth(const struct side *side)
{
    return side->copy != NULL &&
           (side->copy->scaling == FP8_SCALING_BLOCK || side->copy->scaling == FP8_SCALING_TILE);
}

/* Dequantised terms; flushed: the size of those whose two factors have a subnormal product. */
static struct dot scaled_dot(const struct side *a, const struct side *b, int64_t i, int64_t j,
                             double *flushed)
{
    struct dot dot = { 0 };
    bool by_block = changes_along_depth(a) || changes_along_depth(b);
    int64_t step = by_block ? BLOCK : a->depth;
    *flushed = 0;
    for (int64_t k = 0; k < a->depth; k += step) {
        int64_t depth = a->depth - k < step ? a->depth - k : step;
        struct dot part = dot_of(a->values + i * a->depth + k, b->values + j * b->depth + k, depth);
        double factor = inverse_at(a, i, k) * inverse_at(b, j, k);
        dot.sum += part.sum * factor;
        dot.size += part.size * factor;
        dot.square += part.square * factor * factor;
        if (factor < FLT_MIN)
            *flushed += part.size * factor;
    }
    return dot;
}

struct judgement {
    const struct rig_product *p;
    struct side a, b;
    double unit; /* of the sums of squares, which might vanish */
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
    double flushed;
    struct dot dot = scaled_dot(&judgement->a, &judgement->b, i, j, &flushed);
    int64_t depth = judgement->a.depth;
    double want = dot.sum;
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
        /* cuBLASLt may flush results, and all terms where the two factors' product is subnormal */
        rounding += FLT_MIN + flushed;
    } else {
        rounding += fp32 ? 0x1p-149 : 0x1p-133;
    }
    /* Of the terms' sizes, all added up. The numerics rules bound fast accumulation for centred
     * data only; on data of one sign it loses 0.17 in the mean and up to 0.41 in an element at K =
     * 65,536 (H200). */
    double share = !p->fast || p->centred ? 4e-3 : depth > 28672 ? 0.6 : 0.3;
    double bound = share * dot.size + rounding;
    double error = got - want;
    if (!(fabs(error) <= bound))
        fail_msg("%s [%lld,%lld] of %lld x %lld, depth %lld: %g, the reference is %g (bound %g)",
                 p->name, (long long)i, (long long)j, (long long)p->out->t.rows,
                 (long long)p->out->t.cols, (long long)depth, got, want, bound);
    judgement->count++;
    double tiny = fp16 ? 0x1p-14 : 2 * FLT_MIN; /* where the steps between results are one size */
    if ((fabs(error) < rounding && fabs(want) < tiny) || (rig.cuda && flushed > 0))
        error = 0;
    double unit = judgement->unit;
    judgement->error += (error / unit) * (error / unit);
    judgement->want += (want / unit) * (want / unit);
    judgement->terms += dot.square / unit / unit;
}

static double bound_of(const struct judgement *judgement)
{
    const struct rig_product *p = judgement->p;
    bool fp32 = p->out->t.dtype == FP8_DTYPE_FP32;
    if (p->fast && judgement->a.depth > 128)
        return !p->centred ? 0.5 : p->level ? 1e-2 : 3e-2;
    bool plain = p->centred && p->level;
    double bound = fp32 ? (plain ? 2e-4 : 1e-3) : (plain ? 2e-3 : 2.5e-3);
    return judgement->count < SAMPLES ? 2.5 * bound : bound; /* a few elements may all be unlucky */
}

/* Every element, or the corners, the last row and column and a random sample. */
static void judge_all(struct judgement *judgement)
{
    int64_t rows = judgement->p->out->t.rows, cols = judgement->p->out->t.cols;
    int64_t budget = (rig.cuda ? 25000000 : 8000000) / (judgement->a.depth + 1) + 64;
    if (rig.cuda && budget < SAMPLES)
        budget = SAMPLES;
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

static double largest_inverse(const struct side *side)
{
    double largest = 0;
    int64_t count = side->copy != NULL ? side->copy->lines * side->copy->ld : 0;
    for (int64_t i = 0; i < count; i++)
        largest = fmax(largest, (double)side->copy->inverse[i]);
    return largest > 0 ? largest : 1;
}

double rig_check_product(const struct rig_product *p)
{
    struct judgement judgement = { .p = p };
    if (p->out->t.rows == 0 || p->out->t.cols == 0)
        return 0;
    judgement.a = make_side(p->a, p->a_transposed, p->bf16);
    judgement.b = make_side(p->b, p->b_transposed, p->bf16);
    judgement.unit = largest_inverse(&judgement.a) * largest_inverse(&judgement.b);
    judge_all(&judgement);
    free(judgement.a.values);
    free(judgement.b.values);
    double size = fmax(judgement.want, judgement.terms);
    double error = size > 0 ? sqrt(judgement.error / size) : 0;
    if (getenv("FP8_TEST_VERBOSE") != NULL)
        print_message("%s %lld x %lld x %lld: relative error %.2e\n", p->name,
                      (long long)p->out->t.rows, (long long)p->out->t.cols,
                      (long long)judgement.a.depth, error);
    if (!(error <= bound_of(&judgement)))
        fail_msg("%s, %lld x %lld, depth %lld, %s accumulation: relative error %.3e, bound %.1e",
                 p->name, (long long)p->out->t.rows, (long long)p->out->t.cols,
                 (long long)judgement.a.depth, p->fast ? "fast" : "split", error,
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
