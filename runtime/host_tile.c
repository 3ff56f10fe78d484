/*
 * host_tile.c - see host_tile.h: pieces of a source, encoded tiles, both copies of a tile.
 */
#include "runtime/host_tile.h"

enum { TILE = FP8_HOST_TILE };

/* ---- the source ---- */

fp8_status fp8_host_source_init(struct fp8_host_source *source, const char *op, fp8_dtype dtype,
                                const fp8_value *data_ld_rows_cols)
{
    *source = (struct fp8_host_source){
        .simd = fp8_host_simd(),
        .data = data_ld_rows_cols[0].p,
        .ld = data_ld_rows_cols[1].i,
        .rows = data_ld_rows_cols[2].i,
        .cols = data_ld_rows_cols[3].i,
        .dtype = dtype,
        .from = dtype == FP8_DTYPE_BF16 ? FP8_HOST_FROM_BF16 : FP8_HOST_FROM_FP32,
    };
    if (dtype != FP8_DTYPE_BF16 && dtype != FP8_DTYPE_FP32)
        return fp8_fail(FP8_ERR_UNSUPPORTED, "host backend: no %s of %s", op,
                        fp8_dtype_name(dtype));
    return FP8_OK;
}

fp8_status fp8_host_format(const char *op, fp8_dtype format, int *to)
{
    *to = format == FP8_DTYPE_E4M3 ? FP8_HOST_TO_E4M3 : FP8_HOST_TO_E5M2;
    if (format != FP8_DTYPE_E4M3 && format != FP8_DTYPE_E5M2)
        return fp8_fail(FP8_ERR_UNSUPPORTED, "host backend: no %s to %s", op,
                        fp8_dtype_name(format));
    return FP8_OK;
}

const void *fp8_host_piece(const struct fp8_host_source *source, int64_t row, int64_t left,
                           union fp8_host_piece *room)
{
    const void *piece = fp8_host_at(source->data, source->dtype, source->ld, row, left);
    int64_t cols = source->cols - left;
    if (cols >= TILE)
        return piece;
    size_t used = (size_t)cols * fp8_dtype_bytes(source->dtype);
    memcpy(room->bytes, piece, used);
    memset(room->bytes + used, 0, sizeof room->bytes - used);
    return room->bytes;
}

void fp8_host_tile_sums(const struct fp8_host_source *source, int64_t left, int64_t first,
                        int64_t end, float *sums)
{
    union fp8_host_piece room;
    double wide[TILE] = { 0 };
    for (int64_t i = first; i < end; i++)
        source->simd->add[source->from](fp8_host_piece(source, i, left, &room), wide);
    for (int64_t j = 0; j < fp8_min_i64(TILE, source->cols - left); j++)
        sums[left + j] = (float)wide[j];
}

/* ---- tiles ---- */

int64_t fp8_host_tile_count(struct fp8_host_copies *copies, int64_t rows, int64_t cols)
{
    if (copies->row != NULL) {
        rows = fp8_max_i64(rows, copies->row_rows);
        cols = fp8_max_i64(cols, copies->row_ld);
    }
    if (copies->transposed != NULL) {
        cols = fp8_max_i64(cols, copies->transposed_rows);
    }
    copies->tile_cols = fp8_ceil_div(cols, TILE);
    return fp8_ceil_div(rows, TILE) * copies->tile_cols;
}

void fp8_host_tile_place(const struct fp8_host_copies *copies, int64_t rows, int64_t cols,
                         int64_t index, struct fp8_host_tile *tile)
{
    tile->top = index / copies->tile_cols * TILE;
    tile->left = index % copies->tile_cols * TILE;
    tile->rows = fp8_max_i64(0, fp8_min_i64(TILE, rows - tile->top));
    tile->cols = fp8_max_i64(0, fp8_min_i64(TILE, cols - tile->left));
    if (tile->rows == 0 || tile->cols == 0)
        tile->rows = tile->cols = 0;
}

static void clear_below(struct fp8_host_tile *tile)
{
    if (tile->rows < TILE)
        memset(tile->codes[tile->rows], 0, (size_t)(TILE - tile->rows) * TILE);
}

void fp8_host_tile_encode_rows(const struct fp8_host_source *source, int to, const float *scales,
                               struct fp8_host_tile *tile)
{
    union fp8_host_piece room;
    float same[TILE];
    for (int64_t i = 0; i < tile->rows; i++) {
        for (int j = 0; j < TILE; j++)
            same[j] = scales[i];
        source->simd->encode[source->from][to](
            fp8_host_piece(source, tile->top + i, tile->left, &room), same, tile->codes[i]);
    }
    clear_below(tile);
}

void fp8_host_tile_encode_cols(const struct fp8_host_source *source, int to, const float *scales,
                               struct fp8_host_tile *tile)
{
    union fp8_host_piece room;
    for (int64_t i = 0; i < tile->rows; i++)
        source->simd->encode[source->from][to](
            fp8_host_piece(source, tile->top + i, tile->left, &room), scales, tile->codes[i]);
    clear_below(tile);
}

/* ---- copies ---- */

void fp8_host_tile_put_row(const struct fp8_host_copies *copies, const struct fp8_host_tile *tile)
{
    if (copies->row == NULL)
        return;
    int64_t rows = fp8_min_i64(TILE, copies->row_rows - tile->top);
    int64_t cols = fp8_min_i64(TILE, copies->row_ld - tile->left);
    for (int64_t i = 0; i < rows && cols > 0; i++)
        memcpy(copies->row + (tile->top + i) * copies->row_ld + tile->left, tile->codes[i],
               (size_t)cols);
}

typedef uint8_t bytes16 __attribute__((vector_size(16)));

/* 16 x 16 bytes: four rounds of interleaving row i with row i + 8 make rows of columns. */
static void turn16(const uint8_t *source, uint8_t *target)
{
    bytes16 from[16], to[16];
    for (int i = 0; i < 16; i++)
        memcpy(&from[i], source + i * TILE, 16);
    for (int round = 0; round < 4; round++) {
        for (int i = 0; i < 8; i++) {
            to[2 * i] = __builtin_shufflevector(from[i], from[i + 8], 0, 16, 1, 17, 2, 18, 3, 19, 4,
                                                20, 5, 21, 6, 22, 7, 23);
            to[2 * i + 1] = __builtin_shufflevector(from[i], from[i + 8], 8, 24, 9, 25, 10, 26, 11,
                                                    27, 12, 28, 13, 29, 14, 30, 15, 31);
        }
        memcpy(from, to, sizeof from);
    }
    for (int i = 0; i < 16; i++)
        memcpy(target + i * TILE, &from[i], 16);
}

void fp8_host_tile_put_transposed(const struct fp8_host_copies *copies,
                                  const struct fp8_host_tile *tile)
{
    if (copies->transposed == NULL)
        return;
    int64_t rows = fp8_min_i64(TILE, copies->transposed_rows - tile->left);
    int64_t cols = fp8_min_i64(TILE, copies->transposed_ld - tile->top);
    for (int64_t j = 0; j < rows && cols > 0; j += 16) {
        uint8_t turned[16][TILE];
        for (int64_t i = 0; i < TILE; i += 16)
            turn16(&tile->codes[i][j], &turned[0][i]);
        for (int64_t k = 0; k < 16 && j + k < rows; k++)
            memcpy(copies->transposed + (tile->left + j + k) * copies->transposed_ld + tile->top,
                   turned[k], (size_t)cols);
    }
}
