/*
 * host_quantize_block.c - the op quantize_block: a scale for each 1x128 or 128x128 block.
 *
 * In: a bf16 or float32 matrix. Out: both copies, each with the scales of its own blocks, column
 * sums of every 128 rows, found_inf. "1x128": the row copy has a scale for every row of a tile, the
 * transposed copy, which is cast from the source once more, one for every column. "128x128": one
 * scale for both. The layouts of the scales are those that the products want: [block of k][row]
 * and [block of rows][block of k]; padding is 0.
 */
#include "runtime/host_tile.h"

enum { TILE = FP8_HOST_TILE };

/* The scales of one copy; NULL: not wanted. */
struct scale_grid {
    float *data;
    int64_t ld;
};

struct block_job {
    struct fp8_host_source source;
    struct fp8_host_copies copies;
    bool power_of_two;
    struct scale_grid row, transposed;
    uint32_t *found_inf;
    float *dbias_partials;
    int64_t dbias_ld;
};

static float scale_of(const struct block_job *job, uint32_t amax)
{
    return fp8_scale_of_amax(fp8_float_of_bits(amax), fp8_host_maximum(job->copies.to),
                             job->power_of_two);
}

/* scale_inv of the blocks in one line of a grid, [first, first + count), and zeros up to its end
 * if these are its last. */
static void put_line(const struct scale_grid *grid, int64_t line, int64_t first, int64_t count,
                     int64_t size, const float *scales)
{
    if (grid->data == NULL)
        return;
    float *at = grid->data + line * grid->ld;
    for (int64_t i = 0; i < count; i++)
        at[first + i] = fp8_scale_inverse(scales[i]);
    for (int64_t i = first + count; first + count == size && i < grid->ld; i++)
        at[i] = 0.0f;
}

struct amaxes {
    uint32_t rows[TILE], cols[TILE];
};

static void measure(const struct block_job *job, const struct fp8_host_tile *tile,
                    struct amaxes *found)
{
    const struct fp8_host_source *source = &job->source;
    union fp8_host_piece room;
    uint32_t bad = 0;
    memset(found, 0, sizeof *found);
    for (int64_t i = 0; i < tile->rows; i++) {
        const void *piece = fp8_host_piece(source, tile->top + i, tile->left, &room);
        found->rows[i] = source->simd->amax[source->from](piece, 1, &bad);
        source->simd->column_amax[source->from](piece, found->cols, &bad);
    }
    fp8_host_report_bad(job->found_inf, bad);
    if (job->dbias_partials != NULL)
        fp8_host_tile_sums(source, tile->left, tile->top, tile->top + tile->rows,
                           job->dbias_partials + tile->top / TILE * job->dbias_ld);
}

static bool is_inside(const struct fp8_host_tile *tile)
{
    return tile->rows > 0 && tile->cols > 0;
}

static void line_item(void *user, int64_t index)
{
    const struct block_job *job = user;
    struct fp8_host_tile tile;
    struct amaxes found;
    float scales[TILE];
    fp8_host_tile_place(&job->copies, job->source.rows, job->source.cols, index, &tile);
    measure(job, &tile, &found);
    for (int i = 0; i < TILE; i++)
        scales[i] = scale_of(job, found.rows[i]);
    if (job->copies.row != NULL)
        fp8_host_tile_encode_rows(&job->source, job->copies.to, scales, &tile);
    fp8_host_tile_put_row(&job->copies, &tile);
    if (is_inside(&tile))
        put_line(&job->row, tile.left / TILE, tile.top, tile.rows, job->source.rows, scales);
    for (int j = 0; j < TILE; j++)
        scales[j] = scale_of(job, found.cols[j]);
    if (job->copies.transposed != NULL)
        fp8_host_tile_encode_cols(&job->source, job->copies.to, scales, &tile);
    fp8_host_tile_put_transposed(&job->copies, &tile);
    if (is_inside(&tile))
        put_line(&job->transposed, tile.top / TILE, tile.left, tile.cols, job->source.cols, scales);
}

static void square_item(void *user, int64_t index)
{
    const struct block_job *job = user;
    struct fp8_host_tile tile;
    struct amaxes found;
    float scales[TILE];
    uint32_t largest = 0;
    fp8_host_tile_place(&job->copies, job->source.rows, job->source.cols, index, &tile);
    measure(job, &tile, &found);
    for (int i = 0; i < TILE; i++)
        largest = found.rows[i] > largest ? found.rows[i] : largest;
    for (int i = 0; i < TILE; i++)
        scales[i] = scale_of(job, largest);
    fp8_host_tile_encode_cols(&job->source, job->copies.to, scales, &tile);
    fp8_host_tile_put_row(&job->copies, &tile);
    fp8_host_tile_put_transposed(&job->copies, &tile);
    if (!is_inside(&tile))
        return;
    int64_t down = tile.top / TILE, along = tile.left / TILE;
    put_line(&job->row, down, along, 1, fp8_ceil_div(job->source.cols, TILE), scales);
    put_line(&job->transposed, along, down, 1, fp8_ceil_div(job->source.rows, TILE), scales);
}

fp8_status fp8_host_quantize_block(struct fp8_pool *pool, const fp8_semantics *semantics,
                                   const fp8_value *args)
{
    struct block_job job = {
        .copies = { .row = args[FP8_QUANTIZE_BLOCK_row].p,
                    .row_ld = args[FP8_QUANTIZE_BLOCK_row_ld].i,
                    .row_rows = args[FP8_QUANTIZE_BLOCK_row_rows].i,
                    .transposed = args[FP8_QUANTIZE_BLOCK_transposed].p,
                    .transposed_ld = args[FP8_QUANTIZE_BLOCK_transposed_ld].i,
                    .transposed_rows = args[FP8_QUANTIZE_BLOCK_transposed_rows].i },
        .power_of_two = semantics->power_of_two,
        .row = { args[FP8_QUANTIZE_BLOCK_row_scales].p, args[FP8_QUANTIZE_BLOCK_row_scales_ld].i },
        .transposed = { args[FP8_QUANTIZE_BLOCK_transposed_scales].p,
                        args[FP8_QUANTIZE_BLOCK_transposed_scales_ld].i },
        .found_inf = args[FP8_QUANTIZE_BLOCK_found_inf].p,
        .dbias_partials = args[FP8_QUANTIZE_BLOCK_dbias_partials].p,
        .dbias_ld = args[FP8_QUANTIZE_BLOCK_dbias_ld].i,
    };
    FP8_TRY(fp8_host_source_init(&job.source, "quantize_block", semantics->source_dtype,
                                 args + FP8_QUANTIZE_BLOCK_source));
    FP8_TRY(fp8_host_format("quantize_block", semantics->target_dtype, &job.copies.to));
    int64_t tiles = fp8_host_tile_count(&job.copies, job.source.rows, job.source.cols);
    fp8_pool_run(pool, tiles, semantics->scaling == FP8_SCALING_TILE ? square_item : line_item,
                 &job);
    return FP8_OK;
}
