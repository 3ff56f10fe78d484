/*
 * shard_unpack.c - the weight of a layer from the quantised shards of all ranks.
 *
 * In: shards as shard.c and shard_rows.c wrote them, gathered by anybody as bytes, in pieces no
 * longer than a shard. Out: the operand that the passes read, the same bytes as on one GPU: rows
 * and scales copied to their places, pads zeroed, and the transposed copy brought along or made
 * from the rows.
 */
#include "runtime/shard.h"

/* ---- checks ---- */

static fp8_status check_pieces(const fp8_layer *layer, const fp8_unpack_args *args,
                               const struct fp8_shard_shape *shape)
{
    int64_t at = 0;
    const char *what = shape->kind == FP8_SHARD_ROWS ? "rows" : "elements";
    if (!args->pieces)
        return fp8_fail(FP8_ERR_ARGUMENT, "shard_unpack: pieces is NULL");
    for (size_t i = 0; i < args->piece_count; i++) {
        const fp8_shard_piece *piece = &args->pieces[i];
        if (piece->count == 0)
            continue;
        if (piece->first != at || piece->count < 0 || piece->count > shape->all - at)
            return fp8_fail(
                FP8_ERR_SHAPE,
                "shard_unpack: piece %zu is %lld %s from %lld, but the pieces before it "
                "end at %lld of %lld",
                i, (long long)piece->count, what, (long long)piece->first, (long long)at,
                (long long)shape->all);
        if (!piece->shard)
            return fp8_fail(FP8_ERR_ARGUMENT, "shard_unpack: shard of piece %zu is NULL", i);
        if ((shape->is_tile || shape->own_scale) && piece->first % FP8_BLOCK)
            return fp8_fail(FP8_ERR_SHAPE,
                            "shard_unpack: piece %zu begins at row %lld, inside a tile of 128 rows",
                            i, (long long)piece->first);
        if (piece->count > shape->chunk)
            return fp8_fail(FP8_ERR_SHAPE,
                            "shard_unpack: piece %zu is %lld %s, but a shard of layer '%s' over %d "
                            "ranks holds at most %lld",
                            i, (long long)piece->count, what, layer->plan->name,
                            args->sharding->ranks, (long long)shape->chunk);
        at += piece->count;
    }
    if (at != shape->all)
        return fp8_fail(
            FP8_ERR_SHAPE,
            "shard_unpack: the pieces hold %lld %s, but the weight of layer '%s' has %lld",
            (long long)at, what, layer->plan->name, (long long)shape->all);
    return FP8_OK;
}

static fp8_status check_unpack(const fp8_layer *layer, const fp8_unpack_args *args,
                               uint32_t *copies, struct fp8_shard_shape *shape)
{
    const char *call = "shard_unpack";
    FP8_TRY(fp8_check_args(call, layer, args, sizeof *args, args ? args->reserved : NULL, 0));
    FP8_TRY(fp8_shard_shape_of(call, layer, args->sharding, shape));
    const struct fp8_check check = { .call = call, .plan = layer->plan };
    *copies = args->copies;
    FP8_TRY(fp8_check_copies(&check, FP8_ROLE_W, copies));
    *copies |= FP8_COPY_ROW;
    FP8_TRY(check_pieces(layer, args, shape));
    if (args->version == 0)
        return fp8_fail(FP8_ERR_ARGUMENT, "%s: version is 0, which means unknown; count from 1",
                        call);
    FP8_TRY(fp8_check_target(&check, "weight", FP8_ROLE_W, *copies, args->weight));
    FP8_TRY(fp8_check_no_state(call, &args->call));
    return fp8_check_stream(call, &args->call);
}

/* ---- pieces into an operand ---- */

/* Elements [first, first + count) of dense rows of `cols` to rows `ld` bytes apart. */
static fp8_status spread(const fp8_layer *layer, const uint8_t *from, uint8_t *row, int64_t first,
                         int64_t count, const struct fp8_shard_shape *shape, fp8_stream stream)
{
    const int64_t cols = layer->plan->in_features, ld = shape->row_ld;
    while (count > 0) {
        int64_t i = first / cols, j = first % cols;
        int64_t rows = j == 0 ? fp8_max_i64(1, count / cols) : 1;
        int64_t width = fp8_min_i64(count, cols - j);
        FP8_TRY(fp8_copy_2d(layer->context, row + i * ld + j, ld, from, cols, width, rows, stream));
        from += width * rows;
        first += width * rows;
        count -= width * rows;
    }
    return FP8_OK;
}

/* The transposed part where it is wanted. */
static fp8_status put_turned(const fp8_layer *layer, const struct fp8_shard_shape *shape,
                             const fp8_shard_piece *piece, const fp8_operand_view *view,
                             fp8_stream stream)
{
    const uint8_t *shard = piece->shard;
    const struct fp8_turned_piece turned = { shard + shape->turned_offset, piece->first,
                                             piece->count };
    if (!view->transposed)
        return FP8_OK;
    return fp8_shard_put_turned(layer->context, shape, &turned, view, layer->plan->in_features,
                                stream);
}

static fp8_status put_pieces(const fp8_layer *layer, const fp8_unpack_args *args,
                             const struct fp8_shard_shape *shape, const fp8_operand_view *view)
{
    const fp8_context *context = layer->context;
    const int64_t k = layer->plan->in_features, n = layer->plan->out_features;
    const fp8_stream stream = args->call.stream;
    struct fp8_shard_shape rows = *shape;
    rows.row_ld = view->row_ld;
    bool has_scales = false;
    for (size_t i = 0; i < args->piece_count; i++) {
        const fp8_shard_piece *piece = &args->pieces[i];
        const uint8_t *data = (const uint8_t *)piece->shard + shape->data_offset;
        if (piece->count == 0)
            continue;
        if (!has_scales)
            FP8_TRY(fp8_copy_bytes(context, view->scales, piece->shard, FP8_PART_ALIGN, stream));
        has_scales = true;
        if (shape->is_turned)
            FP8_TRY(put_turned(layer, shape, piece, view, stream));
        if (shape->has_rows || shape->own_scale)
            FP8_TRY(fp8_copy_bytes(context, view->row_scales + piece->first,
                                   (const uint8_t *)piece->shard + FP8_PART_ALIGN,
                                   (size_t)piece->count * sizeof(float), stream));
        if (shape->is_tile)
            FP8_TRY(fp8_copy_bytes(
                context, view->row_scales + piece->first / FP8_BLOCK * shape->scales_ld,
                (const uint8_t *)piece->shard + FP8_PART_ALIGN,
                (size_t)(fp8_ceil_div(piece->count, FP8_BLOCK) * shape->scales_ld) * sizeof(float),
                stream));
        if (shape->kind == FP8_SHARD_ROWS)
            FP8_TRY(fp8_copy_bytes(context, view->row + piece->first * view->row_ld, data,
                                   (size_t)(piece->count * view->row_ld), stream));
        else
            FP8_TRY(spread(layer, data, view->row, piece->first, piece->count, &rows, stream));
    }
    if (shape->has_rows || shape->own_scale) {
        const int64_t pad = fp8_round_up(n, FP8_PAD_ROW_SCALES) - n;
        FP8_TRY(fp8_fill_words(context, view->row_scales + n, 0, pad, stream));
    }
    if (shape->is_turned && view->transposed)
        FP8_TRY(fp8_shard_pad_turned(context, view, n, k, stream));
    if (shape->kind == FP8_SHARD_ELEMENTS)
        FP8_TRY(fp8_zero_2d(context, view->row + k, view->row_ld, view->row_ld - k, n, stream));
    return fp8_zero_2d(context, view->row + n * view->row_ld, view->row_ld, view->row_ld,
                       fp8_round_up(n, FP8_PAD_ROWS) - n, stream);
}

static fp8_status run_unpack(const fp8_layer *layer, const fp8_unpack_args *args,
                             const struct fp8_shard_shape *shape, const fp8_operand *filled)
{
    fp8_operand_view view;
    bool pushed;
    FP8_TRY(fp8_operand_parts(filled, &view));
    FP8_TRY(fp8_context_enter(layer->context, &pushed));
    fp8_status status = put_pieces(layer, args, shape, &view);
    if (status == FP8_OK && filled->copies & FP8_COPY_TRANSPOSED && !shape->is_turned)
        status = fp8_transpose_operand(layer, filled, &args->call);
    fp8_context_leave(layer->context, pushed);
    return status;
}

fp8_status fp8_shard_unpack(const fp8_layer *layer, const fp8_unpack_args *args)
{
    uint32_t copies;
    struct fp8_shard_shape shape;
    fp8_status status = check_unpack(layer, args, &copies, &shape);
    if (status != FP8_OK)
        return layer ? fp8_report(layer->context, status) : status;
    fp8_operand filled = *args->weight;
    fp8_operand_clear(args->weight);
    fp8_operand_fill(&filled, layer->plan, FP8_ROLE_W, 0, copies, args->version);
    status = run_unpack(layer, args, &shape, &filled);
    if (status == FP8_OK)
        *args->weight = filled;
    return fp8_report(layer->context, status);
}
