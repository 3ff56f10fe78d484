/*
 * shard.h - how a weight is cut over ranks, for the primitives and the model.
 *
 * shard.c cuts and quantises, shard_rows.c does so where rows have scales of their own,
 * shard_unpack.c makes an operand of what was gathered. Not public.
 */
#ifndef FP8_SHARD_H
#define FP8_SHARD_H

#include "runtime/fp8_model.h"
#include "runtime/internal.h"

/* One rank's part; rows or elements. */
struct fp8_shard_shape {
    fp8_shard_kind kind;
    int64_t all;   /* rows or elements of w */
    int64_t chunk; /* of every rank, pads included */
    int64_t first, count;
    int64_t row_ld; /* bytes from one row to the next: rows; bytes of a chunk: elements */
    bool is_tile;   /* scales of 128 x 128 */
    bool has_rows;  /* a scale a row */
    bool own_scale; /* one scale for each shard, written for each row; none: one for the tensor */
    bool is_turned; /* a transposed part beside the rows */
    int64_t amaxes; /* numbers that are reduced over the ranks, or with own_scale are the shard's */
    int64_t scales_ld;  /* of tile scales, in elements */
    size_t scale_bytes; /* of a chunk's scales of tiles or rows */
    size_t data_offset; /* of the FP8 bytes in a shard */
    size_t data_bytes;
    /* is_turned: [K][chunk] behind its scales, of which the first 256 bytes are as in an operand */
    size_t turned_offset, turned_head, turned_bytes;
    int64_t turned_ld;
    size_t bytes;
};

/* Whether the weights of this layer can be sharded, and how. FP8_ERR_ARGUMENT,
 * FP8_ERR_UNSUPPORTED. */
fp8_status fp8_shard_shape_of(const char *call, const fp8_layer *layer,
                              const fp8_sharding *sharding, struct fp8_shard_shape *shape);

/* ---- scales by row, transposed parts (shard_rows.c); the context is entered ---- */

bool fp8_shard_has_rows(const struct fp8_layer_plan *plan);
/* The numbers of the transposed part and of the amaxes; the chunk is there. */
void fp8_shard_shape_turned(const fp8_layer *layer, struct fp8_shard_shape *shape);
/* Of a shard that is not empty. */
fp8_status fp8_shard_amax_rows(const fp8_layer *layer, const fp8_shard_args *args);
/* *end: bytes of the rows that are written. */
fp8_status fp8_shard_quantize_rows(const fp8_layer *layer, const fp8_shard_args *args,
                                   const struct fp8_shard_shape *shape, size_t *end);

/* The transposed part of a shard that has arrived. */
struct fp8_turned_piece {
    const uint8_t *data;
    int64_t first, count; /* rows of w */
};
/* Into an operand with a transposed copy of w[.,k]; then the pads of w[n,k]. */
fp8_status fp8_shard_put_turned(const fp8_context *context, const struct fp8_shard_shape *shape,
                                const struct fp8_turned_piece *piece, const fp8_operand_view *view,
                                int64_t k, fp8_stream stream);
fp8_status fp8_shard_pad_turned(const fp8_context *context, const fp8_operand_view *view, int64_t n,
                                int64_t k, fp8_stream stream);

#endif
