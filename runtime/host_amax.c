/*
 * host_amax.c - the ops amax, column_sums and roll on the CPU: what is known before a cast.
 *
 * amax: in: a bf16 or float32 matrix; out: partial maxima as float bits, column sums of every 128
 * rows. Such a partial sum is rounded from float64 here; column_sums (and quantize) adds them in
 * ascending order in float32, as the kernels do. roll: the state of delayed scaling, one step
 * further.
 */
#include "runtime/host_tile.h"

enum { TILE = FP8_HOST_TILE };
enum { AMAX_GRAIN = 1 << 16 }; /* elements of one item, at least */

struct amax {
    struct fp8_host_source source;
    int64_t items;
    uint32_t *partials;
    uint32_t *found_inf;
    float *dbias_partials;
    int64_t dbias_ld;
};

/* `count` elements in a row. */
static uint32_t amax_of_run(const struct fp8_host_source *source, const char *run, int64_t count,
                            uint32_t *bad)
{
    size_t bytes = fp8_dtype_bytes(source->dtype);
    uint32_t largest = source->simd->amax[source->from](run, count / TILE, bad);
    int64_t rest = count % TILE;
    if (rest == 0)
        return largest;
    union fp8_host_piece padded = { .bytes = { 0 } };
    memcpy(padded.bytes, run + (size_t)(count - rest) * bytes, (size_t)rest * bytes);
    uint32_t last = source->simd->amax[source->from](padded.bytes, 1, bad);
    return largest > last ? largest : last;
}

uint32_t fp8_host_amax_of_row(const struct fp8_host_source *source, int64_t row, uint32_t *bad)
{
    return amax_of_run(source, fp8_host_at(source->data, source->dtype, source->ld, row, 0),
                       source->cols, bad);
}

/* Item i takes an equal share of the elements, counted row by row. */
static void amax_item(void *user, int64_t index)
{
    const struct amax *job = user;
    const struct fp8_host_source *source = &job->source;
    int64_t total = source->rows * source->cols;
    int64_t share = total / job->items, more = total % job->items;
    int64_t at = index * share + fp8_min_i64(index, more);
    int64_t end = at + share + (index < more);
    uint32_t largest = 0, bad = 0;
    while (at < end) {
        int64_t row = at / source->cols, col = at % source->cols;
        int64_t count = fp8_min_i64(end - at, source->cols - col);
        const char *run = fp8_host_at(source->data, source->dtype, source->ld, row, col);
        uint32_t part = amax_of_run(source, run, count, &bad);
        largest = largest > part ? largest : part;
        at += count;
    }
    job->partials[index] = largest;
    fp8_host_report_bad(job->found_inf, bad);
}

/* Column sums of one tile of 128 x 128. */
static void sums_item(void *user, int64_t index)
{
    const struct amax *job = user;
    int64_t tile_cols = fp8_ceil_div(job->source.cols, TILE);
    int64_t strip = index / tile_cols;
    fp8_host_tile_sums(&job->source, index % tile_cols * TILE, strip * TILE,
                       fp8_min_i64(strip * TILE + TILE, job->source.rows),
                       job->dbias_partials + strip * job->dbias_ld);
}

fp8_status fp8_host_amax(struct fp8_pool *pool, const fp8_semantics *semantics,
                         const fp8_value *args)
{
    struct amax job = {
        .partials = args[FP8_AMAX_partials].p,
        .found_inf = args[FP8_AMAX_found_inf].p,
        .dbias_partials = args[FP8_AMAX_dbias_partials].p,
        .dbias_ld = args[FP8_AMAX_dbias_ld].i,
    };
    FP8_TRY(
        fp8_host_source_init(&job.source, "amax", semantics->source_dtype, args + FP8_AMAX_source));
    int64_t n_partials = args[FP8_AMAX_n_partials].i;
    if (n_partials < 1)
        return fp8_fail(FP8_ERR_INTERNAL, "host backend: amax has %lld partials",
                        (long long)n_partials);
    if (job.source.rows == 1)
        job.source.ld = job.source.cols;
    job.items =
        fp8_min_i64(fp8_ceil_div(job.source.rows * job.source.cols, AMAX_GRAIN), n_partials);
    fp8_pool_run(pool, job.items, amax_item, &job);
    for (int64_t i = job.items; i < n_partials; i++)
        job.partials[i] = 0;
    if (job.dbias_partials != NULL)
        fp8_pool_run(pool,
                     fp8_ceil_div(job.source.rows, TILE) * fp8_ceil_div(job.source.cols, TILE),
                     sums_item, &job);
    return FP8_OK;
}

/* ---- column_sums ---- */

struct sums {
    const float *partials;
    int64_t ld, rows, cols;
    float *dbias;
    bool accumulate;
};

static void column_item(void *user, int64_t index)
{
    const struct sums *job = user;
    int64_t first = index * TILE, last = fp8_min_i64(first + TILE, job->cols);
    for (int64_t j = first; j < last; j++) {
        float sum = 0.0f;
        for (int64_t i = 0; i < job->rows; i++)
            sum += job->partials[i * job->ld + j];
        job->dbias[j] = job->accumulate ? job->dbias[j] + sum : sum;
    }
}

fp8_status fp8_host_column_maxima(const fp8_value *args)
{
    const float *partials = args[FP8_COLUMN_MAXIMA_partials].p;
    const int64_t ld = args[FP8_COLUMN_MAXIMA_partials_ld].i;
    float *maxima = args[FP8_COLUMN_MAXIMA_maxima].p;
    for (int64_t j = 0; j < args[FP8_COLUMN_MAXIMA_cols].i; j++) {
        maxima[j] = 0.0f;
        for (int64_t i = 0; i < args[FP8_COLUMN_MAXIMA_partial_rows].i; i++)
            maxima[j] = partials[i * ld + j] > maxima[j] ? partials[i * ld + j] : maxima[j];
    }
    return FP8_OK;
}

fp8_status fp8_host_column_sums(struct fp8_pool *pool, const fp8_value *args)
{
    struct sums job = {
        .partials = args[FP8_COLUMN_SUMS_partials].p,
        .ld = args[FP8_COLUMN_SUMS_partials_ld].i,
        .rows = args[FP8_COLUMN_SUMS_partial_rows].i,
        .cols = args[FP8_COLUMN_SUMS_cols].i,
        .dbias = args[FP8_COLUMN_SUMS_dbias].p,
        .accumulate = args[FP8_COLUMN_SUMS_accumulate].i != 0,
    };
    if (job.dbias != NULL)
        fp8_pool_run(pool, fp8_ceil_div(job.cols, TILE), column_item, &job);
    return FP8_OK;
}

/* ---- roll ---- */

/* Of the entries that there are: those of the last `length` steps in which the tensor ran. */
static float amax_of_history(const float *history, int64_t tensors, int64_t entries)
{
    float largest = 0.0f;
    for (int64_t i = 0; i < entries; i++)
        largest = history[i * tensors] > largest ? history[i * tensors] : largest;
    return largest;
}

fp8_status fp8_host_roll(const fp8_value *args)
{
    float *scale = args[FP8_ROLL_scale].p, *running = args[FP8_ROLL_running].p;
    float *history = args[FP8_ROLL_history].p;
    const float *maxima = args[FP8_ROLL_maxima].p;
    int32_t *counts = args[FP8_ROLL_counts].p;
    uint32_t *fresh = args[FP8_ROLL_fresh].p;
    int64_t tensors = args[FP8_ROLL_tensors].i, length = args[FP8_ROLL_length].i;
    if (length < 1)
        return fp8_fail(FP8_ERR_INTERNAL, "host backend: a history of %lld entries",
                        (long long)length);
    for (int64_t t = 0; t < tensors; t++) {
        if (!(running[t] >= 0.0f))
            continue;
        history[counts[t] % length * tensors + t] = running[t];
        counts[t]++;
        if (counts[t] >= 2 * length)
            counts[t] = (int32_t)length;
        float amax = args[FP8_ROLL_most_recent].i
                         ? running[t]
                         : amax_of_history(history + t, tensors, fp8_min_i64(counts[t], length));
        if (amax > 0.0f)
            scale[t] = fp8_scale_of_amax(amax, maxima[t], args[FP8_ROLL_power_of_two].i != 0);
        running[t] = -1.0f;
        fresh[t] = 0;
    }
    return FP8_OK;
}
