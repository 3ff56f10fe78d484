/*
 * reference_operand.c - what a quantised operand must hold, by the rules, byte for byte.
 *
 * In: a tensor and its operand in host memory, and the recipe's rule. Out: how many scales and
 * bytes of it are wrong, pads included. Every scaling is a grid of groups over the source, of
 * height x width elements that share a scale; both copies of an operand are compared with the cast
 * of the source by the grid of that copy. A bf16 source under one scale has 65,536 values, so a
 * table of codes checks it at the speed of memory; under others each element is cast.
 */
#include <float.h>
#include <math.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "gen/cli/reference.h"

#define BLOCK 128
#define SIDE 64 /* of the tiles that are compared */

static int64_t ceil_div(int64_t a, int64_t b)
{
    return (a + b - 1) / b;
}

static int64_t round_up(int64_t value, int64_t step)
{
    return ceil_div(value, step) * step;
}

static int64_t min_of(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

/* ---- groups ---------------------------------------------------------------------------------- */

/* The groups of one copy over the source: `lines` x `count` of them. */
struct grid {
    int64_t height, width, lines, count;
    atomic_uint *amax; /* bits of float32, then of the scales */
};

static struct grid grid_of(const fp8_tensor *source, fp8_scaling scaling, bool transposed,
                           int64_t shard_rows)
{
    int64_t rows = source->rows > 0 ? source->rows : 1, cols = source->cols;
    struct grid g = { rows, cols, 1, 1, NULL };
    if (shard_rows > 0)
        g.height = shard_rows;
    else if (scaling == FP8_SCALING_TILE)
        g.height = g.width = BLOCK;
    else if (scaling == FP8_SCALING_ROW || scaling == FP8_SCALING_BLOCK) {
        int64_t along = scaling == FP8_SCALING_BLOCK ? BLOCK : transposed ? rows : cols;
        g.height = transposed ? along : 1;
        g.width = transposed ? 1 : along;
    }
    g.lines = ceil_div(rows, g.height);
    g.count = ceil_div(cols, g.width);
    return g;
}

struct scan {
    const fp8_tensor *source;
    struct grid *grid;
    atomic_bool failed;
};

static void raise_to(atomic_uint *place, uint32_t bits)
{
    unsigned seen = atomic_load(place);
    while (seen < bits && !atomic_compare_exchange_weak(place, &seen, bits))
        ;
}

/* The finite amax of columns [first, end) of a row, as bits. */
static uint32_t amax_of(const fp8_tensor *t, int64_t row, int64_t first, int64_t end)
{
    uint32_t amax = 0;
    int64_t at = row * (t->ld ? t->ld : t->cols);
    if (t->dtype == FP8_DTYPE_BF16) {
        const uint16_t *data = (const uint16_t *)t->data + at;
        uint16_t short_amax = 0;
        for (int64_t j = first; j < end; j++) {
            uint16_t bits = data[j] & 0x7fff, finite = bits < 0x7f80 ? bits : 0;
            short_amax = finite > short_amax ? finite : short_amax;
        }
        return (uint32_t)short_amax << 16;
    }
    const float *data = (const float *)t->data + at;
    for (int64_t j = first; j < end; j++) {
        uint32_t bits = ref_to_bits(data[j]) & 0x7fffffff, finite = bits < 0x7f800000 ? bits : 0;
        amax = finite > amax ? finite : amax;
    }
    return amax;
}

/* 128 rows, so that no group of blocks lies in two strips; whole columns meet in atomics. */
static void scan_strip(void *user, int64_t strip)
{
    struct scan *s = user;
    struct grid *g = s->grid;
    int64_t first = strip * BLOCK, end = min_of(first + BLOCK, s->source->rows);
    uint32_t *line = calloc((size_t)g->count, sizeof *line);
    if (!line) {
        atomic_store(&s->failed, true);
        return;
    }
    for (int64_t i = first; i < end; i++) {
        for (int64_t c = 0; c < g->count; c++) {
            int64_t left = c * g->width, right = min_of(left + g->width, s->source->cols);
            uint32_t amax = amax_of(s->source, i, left, right);
            line[c] = amax > line[c] ? amax : line[c];
        }
        if (i + 1 < end && (i + 1) / g->height == i / g->height)
            continue;
        for (int64_t c = 0; c < g->count; c++)
            raise_to(&g->amax[i / g->height * g->count + c], line[c]);
        memset(line, 0, (size_t)g->count * sizeof *line);
    }
    free(line);
}

static struct ref_scales scales_of(float amax, float maximum, const struct ref_rule *rule)
{
    struct ref_scales s = { amax, 1, 1 };
    if (amax > 0)
        s.scale = ldexpf(maximum, -rule->margin) / amax;
    if (isinf(s.scale))
        s.scale = FLT_MAX;
    if (rule->power_of_two)
        s.scale = ref_from_bits(ref_to_bits(s.scale) & 0xff800000u);
    s.scale_inv = 1.0f / s.scale;
    return s;
}

/* Fills the grid with scales. *whole: the scales of its first group. */
static bool make_scales(const fp8_tensor *source, fp8_dtype format, const struct ref_rule *rule,
                        struct grid *g, struct ref_scales *whole)
{
    float maximum = ref_maximum(format);
    struct scan scan = { source, g, false };
    g->amax = calloc((size_t)(g->lines * g->count), sizeof *g->amax);
    if (!g->amax)
        return false;
    cli_parallel(ceil_div(source->rows, BLOCK), scan_strip, &scan);
    for (int64_t i = 0; i < g->lines * g->count; i++) {
        struct ref_scales s = scales_of(ref_from_bits(g->amax[i]), maximum, rule);
        g->amax[i] = ref_to_bits(s.scale);
        if (i == 0)
            *whole = s;
    }
    return !scan.failed;
}

static float scale_at(const struct grid *g, int64_t i, int64_t j)
{
    return ref_from_bits(g->amax[i / g->height * g->count + j / g->width]);
}

/* ---- scales ---------------------------------------------------------------------------------- */

static bool same_bits(float a, float b)
{
    return ref_to_bits(a) == ref_to_bits(b);
}

/* Entries of a copy's scale part that are not what the grid says, pads (zero) included. */
static int64_t wrong_scales(const struct grid *g, fp8_scaling scaling, bool transposed,
                            const float *part, int64_t ld)
{
    int64_t rows = transposed ? g->count : g->lines, blocks = transposed ? g->lines : g->count;
    int64_t outer = scaling == FP8_SCALING_ROW ? 1 : scaling == FP8_SCALING_BLOCK ? blocks : rows;
    int64_t wrong = 0;
    for (int64_t o = 0; o < outer; o++) {
        for (int64_t i = 0; i < ld; i++) {
            int64_t row = scaling == FP8_SCALING_TILE ? o : i;
            int64_t block = scaling == FP8_SCALING_TILE ? i : o;
            int64_t line = transposed ? block : row, place = transposed ? row : block;
            bool inside = line < g->lines && place < g->count;
            float want = inside ? 1.0f / ref_from_bits(g->amax[line * g->count + place]) : 0.0f;
            wrong += !same_bits(part[o * ld + i], want);
        }
    }
    return wrong;
}

/* The same of a weight whose shards have one scale each: for every row, for every block of 128
 * rows. */
static int64_t wrong_shard_scales(const struct grid *g, const fp8_tensor *source, bool transposed,
                                  const float *part, int64_t ld)
{
    int64_t step = transposed ? BLOCK : 1, outer = transposed ? ceil_div(source->cols, BLOCK) : 1;
    int64_t wrong = 0;
    for (int64_t o = 0; o < outer; o++) {
        for (int64_t i = 0; i < ld; i++) {
            bool inside = i * step < source->rows;
            float want = inside ? 1.0f / ref_from_bits(g->amax[i * step / g->height]) : 0.0f;
            wrong += !same_bits(part[o * ld + i], want);
        }
    }
    return wrong;
}

/* ---- bytes ----------------------------------------------------------------------------------- */

struct comparison {
    const fp8_tensor *source;
    const struct grid *grid;
    const uint8_t *codes; /* of every bf16 value under the one scale; NULL: more scales, or fp32 */
    fp8_dtype format;
    const uint8_t *copy;
    int64_t copy_rows, ld; /* pads included */
    bool transposed;
    atomic_llong wrong;
};

/* What the copy must hold for SIDE x SIDE elements of the source from (i0, j0); zero outside. */
static void make_tile(const struct comparison *c, int64_t i0, int64_t j0, uint8_t tile[SIDE][SIDE])
{
    const fp8_tensor *t = c->source;
    int64_t ld = t->ld ? t->ld : t->cols, end = min_of(j0 + SIDE, t->cols);
    memset(tile, 0, SIDE * SIDE);
    for (int64_t i = i0; i < i0 + SIDE && i < t->rows; i++) {
        for (int64_t j = j0; j < end; j++) {
            int64_t at = i * ld + j;
            tile[i - i0][j - j0] = c->codes ? c->codes[((const uint16_t *)t->data)[at]]
                                            : ref_encode(ref_load(t->data, t->dtype, at),
                                                         scale_at(c->grid, i, j), c->format);
        }
    }
}

static void turn(uint8_t tile[SIDE][SIDE])
{
    for (int i = 0; i < SIDE; i++) {
        for (int j = 0; j < i; j++) {
            uint8_t byte = tile[i][j];
            tile[i][j] = tile[j][i];
            tile[j][i] = byte;
        }
    }
}

/* SIDE rows of the source in the copy, tile by tile. */
static void compare_strip(void *user, int64_t index)
{
    struct comparison *c = user;
    uint8_t tile[SIDE][SIDE];
    int64_t i0 = index * SIDE, wrong = 0;
    int64_t height = c->transposed ? c->ld : c->copy_rows,
            width = c->transposed ? c->copy_rows : c->ld;
    for (int64_t j0 = 0; j0 < width; j0 += SIDE) {
        make_tile(c, i0, j0, tile);
        if (c->transposed)
            turn(tile);
        int64_t top = c->transposed ? j0 : i0, left = c->transposed ? i0 : j0;
        int64_t rows = min_of(SIDE, (c->transposed ? width : height) - top);
        int64_t length = min_of(SIDE, c->ld - left);
        for (int64_t i = 0; i < rows; i++) {
            const uint8_t *line = c->copy + (top + i) * c->ld + left;
            if (memcmp(line, tile[i], (size_t)length) == 0)
                continue;
            for (int64_t j = 0; j < length; j++)
                wrong += line[j] != tile[i][j];
        }
    }
    atomic_fetch_add(&c->wrong, wrong);
}

static int64_t wrong_bytes(struct comparison *c)
{
    uint8_t *codes = NULL;
    if (c->source->dtype == FP8_DTYPE_BF16 && c->grid->lines * c->grid->count == 1) {
        codes = malloc(65536);
        for (uint32_t i = 0; codes && i < 65536; i++)
            codes[i] = ref_encode(ref_from_bits(i << 16), scale_at(c->grid, 0, 0), c->format);
    }
    c->codes = codes;
    int64_t height = c->transposed ? c->ld : c->copy_rows;
    cli_parallel(ceil_div(height, SIDE), compare_strip, c);
    free(codes);
    return c->wrong;
}

/* ---- operands -------------------------------------------------------------------------------- */

/* One copy against the rules. */
static bool check_copy(const fp8_tensor *source, const fp8_operand *operand,
                       const struct ref_rule *rule, bool transposed, struct ref_verdict *v)
{
    fp8_operand_view view;
    fp8_scaling scaling = transposed ? operand->transposed_scaling : operand->row_scaling;
    if (fp8_operand_parts(operand, &view) != FP8_OK)
        return false;
    const uint8_t *copy = transposed ? view.transposed : view.row;
    if (!copy)
        return true;
    struct grid grid = grid_of(source, scaling, transposed, rule->shard_rows);
    struct ref_scales whole;
    bool done = make_scales(source, operand->dtype, rule, &grid, &whole);
    if (done) {
        struct comparison c = { .source = source,
                                .grid = &grid,
                                .format = operand->dtype,
                                .copy = copy,
                                .copy_rows = round_up(transposed ? source->cols : source->rows, 16),
                                .ld = transposed ? view.transposed_ld : view.row_ld,
                                .transposed = transposed };
        v->wrong_bytes += wrong_bytes(&c);
        const float *part = transposed ? view.transposed_scales : view.row_scales;
        int64_t ld = transposed ? view.transposed_scales_ld : view.row_scales_ld;
        if (scaling == FP8_SCALING_TENSOR)
            v->whole = whole, v->has_whole = true;
        else if (rule->shard_rows > 0)
            v->wrong_scales += wrong_shard_scales(&grid, source, transposed, part, ld);
        else if (source->rows > 0)
            v->wrong_scales += wrong_scales(&grid, scaling, transposed, part, ld);
    }
    free(grid.amax);
    return done;
}

bool ref_check_operand(const fp8_tensor *source, const fp8_operand *operand,
                       const struct ref_rule *rule, struct ref_verdict *verdict)
{
    *verdict = (struct ref_verdict){ 0 };
    return check_copy(source, operand, rule, false, verdict) &&
           check_copy(source, operand, rule, true, verdict);
}
