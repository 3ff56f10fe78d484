/*
 * shard.h - how a weight is cut over ranks, for the primitives (shard.c) and the model. Not public.
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
    int64_t row_ld;     /* bytes from one row to the next: rows; bytes of a chunk: elements */
    bool is_tile;       /* scales of 128 x 128; else one for the tensor */
    int64_t scales_ld;  /* of tile scales, in elements */
    size_t scale_bytes; /* of a chunk's tile scales */
    size_t data_offset; /* of the FP8 bytes in a shard */
    size_t data_bytes;
    size_t bytes;
};

/* Whether the weights of this layer can be sharded, and how. FP8_ERR_ARGUMENT, FP8_ERR_UNSUPPORTED. */
fp8_status fp8_shard_shape_of(const char *call, const fp8_layer *layer,
                              const fp8_sharding *sharding, struct fp8_shard_shape *shape);

/* The transposed copy of a weight from its row copy, both in `operand`'s memory. The workspace is not
 * used. Enters no context: the caller has. */
fp8_status fp8_shard_transpose(const fp8_layer *layer, const fp8_operand *operand,
                               const fp8_call *call);

#endif
