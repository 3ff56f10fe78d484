/*
 * rig_quantize.c - a tensor as the recipe quantises it, group by group, and operands against that.
 *
 * Works on images with the scalar codec of fp8_format.h, one element at a time, and knows groups by
 * an element's coordinates alone: nothing here is shared with the host backend's tiles, bands and
 * vectors. A transposed copy is quantised from the source, like the row copy.
 */
#include <math.h>

#include "runtime/fp8_format.h"
#include "tests/runtime/rig.h"

enum { BLOCK = 128 };

static size_t align256(size_t bytes)
{
    return (bytes + 255) / 256 * 256;
}

static int64_t round_up(int64_t value, int64_t to)
{
    return (value + to - 1) / to * to;
}

/* ---- what a recipe does ---- */

fp8_scaling rig_scaling(const struct rig_spec *spec, fp8_role role, bool transposed)
{
    switch (spec->recipe) {
    case RIG_ROWWISE:
        return FP8_SCALING_ROW;
    case RIG_ROWWISE_HP_WGRAD:
        if (!transposed)
            return FP8_SCALING_ROW;
        return role == FP8_ROLE_W ? FP8_SCALING_TENSOR : FP8_SCALING_NONE;
    case RIG_BLOCK:
        return role == FP8_ROLE_W ? FP8_SCALING_TILE : FP8_SCALING_BLOCK;
    default:
        if (spec->shards > 0 && role == FP8_ROLE_W)
            return transposed ? FP8_SCALING_TILE : FP8_SCALING_ROW;
        return FP8_SCALING_TENSOR;
    }
}

uint32_t rig_copies(const struct rig_layer *layer, fp8_role role, uint32_t wanted)
{
    const struct rig_spec *spec = &layer->spec;
    uint32_t copies = 0;
    if (!spec->bf16 && rig_scaling(spec, role, false) != FP8_SCALING_NONE)
        copies |= FP8_COPY_ROW;
    if (!spec->bf16 && rig_scaling(spec, role, true) != FP8_SCALING_NONE)
        copies |= FP8_COPY_TRANSPOSED;
    return copies & wanted;
}

bool rig_is_e4m3(const struct rig_spec *spec, fp8_role role)
{
    bool hybrid = !spec->e4m3 && (spec->recipe == RIG_CURRENT || spec->recipe == RIG_DELAYED);
    return role != FP8_ROLE_DY || !hybrid;
}

/* ---- groups ---- */

/* Where the scale of a copy's element (row, k) lies in the grid of its scales. */
static int64_t group_of(const struct rig_copy *copy, int64_t row, int64_t k)
{
    switch (copy->scaling) {
    case FP8_SCALING_ROW:
        return row;
    case FP8_SCALING_BLOCK:
        return k / BLOCK * copy->ld + row;
    case FP8_SCALING_TILE:
        return row / BLOCK * copy->ld + k / BLOCK;
    default:
        return 0;
    }
}

/* Extents of the grid with its padding. */
static void make_grid(struct rig_copy *copy)
{
    copy->lines = 1;
    copy->ld = 1;
    if (copy->scaling == FP8_SCALING_ROW) {
        copy->ld = round_up(copy->rows, 16);
    } else if (copy->scaling == FP8_SCALING_BLOCK) {
        copy->lines = round_up(copy->cols, BLOCK) / BLOCK;
        copy->ld = round_up(copy->rows, 8);
    } else if (copy->scaling == FP8_SCALING_TILE) {
        copy->lines = round_up(copy->rows, BLOCK) / BLOCK;
        copy->ld = round_up(round_up(copy->cols, BLOCK) / BLOCK, 4);
    }
    copy->inverse = calloc((size_t)(copy->lines * copy->ld) + 1, sizeof *copy->inverse);
    assert_non_null(copy->inverse);
}

static float value_of(const struct rig_tensor *source, bool transposed, int64_t row, int64_t k)
{
    return transposed ? rig_get(source, k, row) : rig_get(source, row, k);
}

float rig_scale_inverse(const struct rig_copy *copy, int64_t row, int64_t k)
{
    return copy->inverse[group_of(copy, row, k)];
}

/* The groups of one shard of the source's rows get the largest of their amaxes. */
static void share_in_shards(const struct rig_copy *copy, int64_t shard_rows, float *amax)
{
    const int64_t rows = copy->scaling == FP8_SCALING_ROW ? 1 : BLOCK; /* of a group */
    const int64_t per_line = shard_rows / rows;
    for (int64_t first = 0; first < copy->ld; first += per_line) {
        const int64_t end = first + per_line < copy->ld ? first + per_line : copy->ld;
        float largest = 0;
        for (int64_t line = 0; line < copy->lines; line++) {
            for (int64_t i = first; i < end; i++)
                largest = fmaxf(largest, amax[line * copy->ld + i]);
        }
        for (int64_t line = 0; line < copy->lines; line++) {
            for (int64_t i = first; i < end; i++)
                amax[line * copy->ld + i] = largest;
        }
    }
}

/* known: the scale of the tensor, or NULL. */
static void quantize_copy(struct rig_quantized *q, struct rig_copy *copy,
                          const struct rig_tensor *source, bool transposed, bool power_of_two,
                          const float *known)
{
    if (copy->scaling == FP8_SCALING_NONE)
        return;
    copy->rows = transposed ? q->cols : q->rows;
    copy->cols = transposed ? q->rows : q->cols;
    make_grid(copy);
    copy->codes = malloc((size_t)(copy->rows * copy->cols) + 1);
    float *amax = calloc((size_t)(copy->lines * copy->ld) + 1, sizeof *amax);
    bool *used = calloc((size_t)(copy->lines * copy->ld) + 1, sizeof *used);
    float *scale = calloc((size_t)(copy->lines * copy->ld) + 1, sizeof *scale);
    assert_true(copy->codes != NULL && amax != NULL && used != NULL && scale != NULL);
    for (int64_t i = 0; i < copy->rows; i++) {
        if (copy->scaling == FP8_SCALING_ROW)
            used[i] = true; /* also a row of nothing */
        for (int64_t k = 0; k < copy->cols; k++) {
            float size = fabsf(value_of(source, transposed, i, k));
            int64_t group = group_of(copy, i, k);
            used[group] = true;
            if (isfinite(size) && size > amax[group])
                amax[group] = size;
        }
    }
    if (q->shard_rows > 0)
        share_in_shards(copy, q->shard_rows, amax);
    used[0] = used[0] || copy->scaling == FP8_SCALING_TENSOR;
    for (int64_t g = 0; g < copy->lines * copy->ld; g++) {
        if (!used[g])
            continue;
        scale[g] = known != NULL && q->rows > 0 /* of nothing it is 1 */
                       ? *known
                       : fp8_scale_of_amax(amax[g], q->e4m3 ? 448.0f : 57344.0f, power_of_two);
        copy->inverse[g] = fp8_scale_inverse(scale[g]);
    }
    for (int64_t i = 0; i < copy->rows; i++) {
        for (int64_t k = 0; k < copy->cols; k++) {
            float x = value_of(source, transposed, i, k), s = scale[group_of(copy, i, k)];
            copy->codes[i * copy->cols + k] =
                q->e4m3 ? fp8_encode_e4m3(x, s) : fp8_encode_e5m2(x, s);
        }
    }
    if (copy->scaling == FP8_SCALING_TENSOR) {
        q->amax = amax[0];
        q->scale = scale[0];
        q->scale_inv = copy->inverse[0];
        q->scale_is_known = known != NULL;
    }
    free(amax);
    free(used);
    free(scale);
}

static void quantize(struct rig_quantized *q, const struct rig_tensor *source, bool power_of_two,
                     const float *known)
{
    q->rows = source->t.rows;
    q->cols = source->t.cols;
    q->source = source;
    for (int64_t i = 0; i < q->rows; i++) {
        for (int64_t j = 0; j < q->cols; j++)
            q->found_inf = q->found_inf || !isfinite(rig_get(source, i, j));
    }
    quantize_copy(q, &q->row, source, false, power_of_two, known);
    quantize_copy(q, &q->transposed, source, true, power_of_two, known);
}

void rig_quantize(struct rig_quantized *q, const struct rig_tensor *source, bool e4m3,
                  bool power_of_two)
{
    memset(q, 0, sizeof *q); /* tensor scaling */
    q->e4m3 = e4m3;
    quantize(q, source, power_of_two, NULL);
}

void rig_quantize_role(struct rig_quantized *q, const struct rig_layer *layer, fp8_role role,
                       const struct rig_tensor *source, const float *known)
{
    const struct rig_spec *spec = &layer->spec;
    memset(q, 0, sizeof *q);
    q->e4m3 = rig_is_e4m3(spec, role);
    q->row.scaling = spec->bf16 ? FP8_SCALING_NONE : rig_scaling(spec, role, false);
    q->transposed.scaling = spec->bf16 ? FP8_SCALING_NONE : rig_scaling(spec, role, true);
    if (role == FP8_ROLE_W && spec->shards > 0)
        q->shard_rows = round_up((spec->out_features + spec->shards - 1) / spec->shards, BLOCK);
    quantize(q, source, spec->power_of_two, known);
}

void rig_quantized_free(struct rig_quantized *q)
{
    free(q->row.codes);
    free(q->row.inverse);
    free(q->transposed.codes);
    free(q->transposed.inverse);
    memset(q, 0, sizeof *q);
}

/* ---- operands ---- */

/* With a known scale the amax is not part of the operand. */
static void check_tensor_scales(const char *name, const unsigned char *image,
                                const struct rig_quantized *q)
{
    float want[16] = { 0 }, got[16];
    want[0] = q->scale;
    want[4] = q->scale_inv;
    want[8] = q->scale_is_known ? 0 : q->amax;
    memcpy(got, image, sizeof got);
    if (memcmp(got, want, sizeof got) != 0)
        fail_msg("%s: scale %a, scale_inv %a, amax %a; the recipe gives %a, %a, %a", name,
                 (double)got[0], (double)got[4], (double)got[8], (double)want[0], (double)want[4],
                 (double)want[8]);
}

/* The copy's scales, if they are its own, then its codes, padding and all; returns the bytes. */
static size_t check_copy(const char *name, const char *which, const unsigned char *at,
                         const struct rig_copy *copy)
{
    size_t bytes = 0;
    if (copy->scaling != FP8_SCALING_TENSOR) {
        int64_t count = copy->lines * copy->ld;
        for (int64_t i = 0; i < count; i++) {
            float got;
            memcpy(&got, at + (size_t)i * sizeof got, sizeof got);
            if (fp8_bits_of_float(got) != fp8_bits_of_float(copy->inverse[i]))
                fail_msg("%s, %s copy: scale [%lld,%lld] is %a, the recipe gives %a", name, which,
                         (long long)(i / copy->ld), (long long)(i % copy->ld), (double)got,
                         (double)copy->inverse[i]);
        }
        bytes = align256((size_t)count * sizeof(float));
    }
    int64_t full_rows = round_up(copy->rows, 16), ld = round_up(copy->cols, 128);
    for (int64_t i = 0; i < full_rows; i++) {
        const unsigned char *got = at + bytes + i * ld;
        for (int64_t k = 0; k < ld; k++) {
            bool inside = i < copy->rows && k < copy->cols;
            uint8_t want = inside ? copy->codes[i * copy->cols + k] : 0;
            if (got[k] != want)
                fail_msg("%s, %s copy [%lld,%lld]: byte 0x%02X, the recipe gives 0x%02X%s", name,
                         which, (long long)i, (long long)k, got[k], want, inside ? "" : " (pad)");
        }
    }
    return bytes + align256((size_t)(full_rows * ld));
}

void rig_check_operand(const char *name, struct rig_operand *operand, const struct rig_quantized *q)
{
    const fp8_operand *op = &operand->op;
    uint32_t made =
        (q->row.scaling != FP8_SCALING_NONE ? (uint32_t)FP8_COPY_ROW : 0u) |
        (q->transposed.scaling != FP8_SCALING_NONE ? (uint32_t)FP8_COPY_TRANSPOSED : 0u);
    rig_block_pull(&operand->block, name);
    assert_int_equal(op->rows, q->rows);
    assert_int_equal(op->cols, q->cols);
    assert_int_equal(op->copies & ~made, 0);
    if (made == 0)
        return;
    assert_int_equal(op->dtype, q->e4m3 ? FP8_DTYPE_E4M3 : FP8_DTYPE_E5M2);
    assert_int_equal(op->row_scaling, q->row.scaling);
    assert_int_equal(op->transposed_scaling, q->transposed.scaling);
    const unsigned char *image = operand->block.image;
    bool row = op->copies & FP8_COPY_ROW, turned = op->copies & FP8_COPY_TRANSPOSED;
    if ((row && q->row.scaling == FP8_SCALING_TENSOR) ||
        (turned && q->transposed.scaling == FP8_SCALING_TENSOR))
        check_tensor_scales(name, image, q);
    size_t at = align256(16 * sizeof(float));
    if (row)
        at += check_copy(name, "row", image + at, &q->row);
    if (turned)
        at += check_copy(name, "transposed", image + at, &q->transposed);
    assert_true(row + turned == 0 || at <= align256(operand->block.bytes));
}
