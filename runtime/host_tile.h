/*
 * host_tile.h - a matrix and its FP8 copies, 128 x 128 elements at a time.
 *
 * In: a bf16 or float32 matrix of any alignment and leading dim, scales that the caller has made
 * for the rows or the columns of a tile. Out: the tile's part of the row copy and of the transposed
 * copy. Every row of a tile is brought to 128 elements, zeros beyond the matrix, so the padding of
 * both copies comes out of the loop of the values. Knows no recipe and no layout of scales.
 */
#ifndef FP8_HOST_TILE_H
#define FP8_HOST_TILE_H

#include <string.h>

#include "runtime/check.h"
#include "runtime/fp8_format.h"
#include "runtime/host.h"
#include "runtime/host_simd.h"

enum { FP8_HOST_TILE = FP8_HOST_PIECE };

struct fp8_host_source {
    const struct fp8_host_simd *simd;
    const void *data;
    int64_t ld, rows, cols;
    fp8_dtype dtype;
    int from; /* FP8_HOST_FROM_* */
};

struct fp8_host_copies {
    int to;       /* FP8_HOST_TO_* */
    uint8_t *row; /* NULL: not wanted */
    int64_t row_ld, row_rows;
    uint8_t *transposed;
    int64_t transposed_ld, transposed_rows;
    int64_t tile_cols; /* tiles in a row of tiles that covers both copies */
};

struct fp8_host_tile {
    int64_t top, left;
    int64_t rows, cols; /* of the matrix inside the tile; both 0 where only padding is */
    uint8_t codes[FP8_HOST_TILE][FP8_HOST_TILE];
};

/* A row of a tile with zeros behind its end. */
union fp8_host_piece {
    char bytes[FP8_HOST_PIECE * sizeof(float)];
    float aligned;
};

/* `op` is for the message. FP8_ERR_UNSUPPORTED: neither bf16 nor float32. */
fp8_status fp8_host_source_init(struct fp8_host_source *source, const char *op, fp8_dtype dtype,
                                const fp8_value *data_ld_rows_cols);
/* FP8_ERR_UNSUPPORTED: not an FP8 format. */
fp8_status fp8_host_format(const char *op, fp8_dtype format, int *to);
/* Tiles that cover the matrix and the padding of its copies (of the transposed one, rows up to a
 * multiple of 128); sets copies->tile_cols. */
int64_t fp8_host_tile_count(struct fp8_host_copies *copies, int64_t rows, int64_t cols);

/* Where tile `index` lies in a matrix of rows x cols. */
void fp8_host_tile_place(const struct fp8_host_copies *copies, int64_t rows, int64_t cols,
                         int64_t index, struct fp8_host_tile *tile);
/* 128 elements of row `row` from column `left` on; `room` is used where the matrix ends earlier. */
const void *fp8_host_piece(const struct fp8_host_source *source, int64_t row, int64_t left,
                           union fp8_host_piece *room);

/* The finite amax of a whole row as float bits; *bad becomes 1 if the row has anything else. */
uint32_t fp8_host_amax_of_row(const struct fp8_host_source *source, int64_t row, uint32_t *bad);

/* Codes of the tile: row i with scales[i], or column j with scales[j]. */
void fp8_host_tile_encode_rows(const struct fp8_host_source *source, int to, const float *scales,
                               struct fp8_host_tile *tile);
void fp8_host_tile_encode_cols(const struct fp8_host_source *source, int to, const float *scales,
                               struct fp8_host_tile *tile);
/* The tile's part of a copy that is wanted, padding and all. */
void fp8_host_tile_put_row(const struct fp8_host_copies *copies, const struct fp8_host_tile *tile);
void fp8_host_tile_put_transposed(const struct fp8_host_copies *copies,
                                  const struct fp8_host_tile *tile);

/* dbias_partials[0 .. cols) of one strip of rows: column sums in float64, rounded once. */
void fp8_host_tile_sums(const struct fp8_host_source *source, int64_t left, int64_t first,
                        int64_t end, float *sums);

static inline float fp8_host_maximum(int to)
{
    return to == FP8_HOST_TO_E4M3 ? FP8_E4M3_MAXIMUM : FP8_E5M2_MAXIMUM;
}

static inline void fp8_host_report_bad(uint32_t *found_inf, uint32_t bad)
{
    if (bad != 0 && found_inf != NULL)
        __atomic_store_n(found_inf, 1u, __ATOMIC_RELAXED);
}

#endif
