/*
 * shard.c - how a weight is cut over ranks, and the quantised shard of one of them.
 *
 * In: a rank's rows (or a range of elements) of a weight in high precision, and the amax of the
 * whole weight. Out: FP8 bytes behind their scale in one piece of memory, to be gathered by anybody
 * as bytes. The kernels are those of the layer's own plan with the extents of the shard, so that
 * the bytes are those of one GPU. A range of elements is quantised as rows of 2048 and a rest: one
 * scale for all makes the shape of no matter.
 */
#include "runtime/shard.h"

#include <string.h>

enum { FLAT = 2048 };

/* ---- arithmetic ---- */

/* The step that quantises w: cast with an amax from elsewhere, or by tiles; NULL: w's copies cannot
 * be made from rows alone. */
static const struct fp8_step *find_step(const fp8_layer *layer, bool *is_tile)
{
    const struct fp8_layer_plan *plan = layer->plan;
    const fp8_scaling *scalings = plan->scalings[FP8_ROLE_W];
    *is_tile = scalings[FP8_ROW_COPY] == FP8_SCALING_TILE;
    const bool own = plan->shard.own_scales;
    if (plan->is_bf16 || (!own && scalings[FP8_ROW_COPY] != scalings[FP8_TRANSPOSED_COPY]) ||
        (!own && !*is_tile && scalings[FP8_ROW_COPY] != FP8_SCALING_TENSOR))
        return NULL;
    const enum fp8_op op = *is_tile ? FP8_OP_QUANTIZE_BLOCK : FP8_OP_CAST;
    const struct fp8_pass_plan *pass =
        &plan->passes[*is_tile || own ? FP8_PASS_WEIGHT : fp8_given_pass(FP8_ROLE_W)];
    for (int i = 0; i < pass->step_count; i++) {
        if (pass->steps[i].op == op)
            return &pass->steps[i];
    }
    return NULL;
}

static fp8_status check_sharding(const char *call, const fp8_layer *layer,
                                 const fp8_sharding *sharding)
{
    if (!layer || !sharding)
        return fp8_fail(FP8_ERR_ARGUMENT, "%s: %s is NULL", call, layer ? "sharding" : "layer");
    if (sharding->size != sizeof *sharding || sharding->reserved0 || sharding->reserved[0])
        return fp8_fail(
            FP8_ERR_ARGUMENT,
            "%s: sharding->size is %u, this library's is %zu, and its reserved words are "
            "0; start from FP8_SHARDING_INIT",
            call, sharding->size, sizeof *sharding);
    if (sharding->kind != FP8_SHARD_ROWS && sharding->kind != FP8_SHARD_ELEMENTS)
        return fp8_fail(FP8_ERR_ARGUMENT, "%s: sharding->kind is %d; pass FP8_SHARD_*", call,
                        (int)sharding->kind);
    if (sharding->ranks < 1 || sharding->ranks > 65536 || sharding->rank < 0 ||
        sharding->rank >= sharding->ranks)
        return fp8_fail(FP8_ERR_ARGUMENT, "%s: sharding->rank is %d of %d ranks; it counts from 0",
                        call, sharding->rank, sharding->ranks);
    bool is_tile;
    FP8_TRY(fp8_check_flag(call, "sharding->transposed", sharding->transposed));
    const bool has_rows = fp8_shard_has_rows(layer->plan);
    if (!has_rows && !find_step(layer, &is_tile)) {
        fp8_layer_info info = { .size = sizeof info };
        FP8_TRY(fp8_layer_describe(layer, &info));
        return fp8_fail(
            FP8_ERR_UNSUPPORTED,
            "%s: layer '%s' has recipe '%s'%s, which multiplies w itself; gather it in high "
            "precision and give it through a weight hook",
            call, layer->plan->name, info.recipe, layer->plan->is_bf16 ? " and compute bf16" : "");
    }
    if (sharding->transposed && sharding->kind == FP8_SHARD_ELEMENTS)
        return fp8_fail(
            FP8_ERR_ARGUMENT,
            "%s: sharding->transposed is 1, but a range of elements of layer '%s' has no "
            "transposed copy; shard whole rows (FP8_SHARD_ROWS)",
            call, layer->plan->name);
    const struct fp8_shard_plan *planned = &layer->plan->shard;
    if ((has_rows || is_tile || planned->own_scales) && sharding->kind == FP8_SHARD_ELEMENTS)
        return fp8_fail(FP8_ERR_UNSUPPORTED,
                        "%s: layer '%s' has scales %s, which a range of elements cuts; shard whole "
                        "rows (FP8_SHARD_ROWS)",
                        call, layer->plan->name,
                        has_rows  ? "of rows"
                        : is_tile ? "of 128 x 128"
                                  : "of shards of rows (weight_scale shard)");
    const int64_t fsdp = layer->bundle->manifest.fsdp;
    if (planned->own_scales && sharding->ranks != fsdp)
        return fp8_fail(
            FP8_ERR_ARGUMENT,
            "%s: layer '%s' has a scale for each of %lld shards (weight_scale shard), but "
            "sharding->ranks is %d; pass %lld, or build the bundle for a mesh of that many",
            call, layer->plan->name, (long long)fsdp, sharding->ranks, (long long)fsdp);
    return FP8_OK;
}

fp8_status fp8_shard_shape_of(const char *call, const fp8_layer *layer,
                              const fp8_sharding *sharding, struct fp8_shard_shape *shape)
{
    FP8_TRY(check_sharding(call, layer, sharding));
    const int64_t n = layer->plan->out_features, k = layer->plan->in_features;
    const int64_t ranks = sharding->ranks;
    memset(shape, 0, sizeof *shape);
    shape->kind = sharding->kind;
    (void)find_step(layer, &shape->is_tile);
    shape->has_rows = fp8_shard_has_rows(layer->plan);
    shape->own_scale = layer->plan->shard.own_scales;
    shape->amaxes = 1;
    int64_t data;
    if (sharding->kind == FP8_SHARD_ROWS) {
        const int64_t multiple = shape->is_tile ? FP8_BLOCK : layer->plan->shard.multiple;
        shape->all = n;
        shape->chunk = fp8_round_up(fp8_ceil_div(n, ranks), multiple);
        shape->row_ld = fp8_round_up(k, FP8_PAD_LD);
        data = shape->chunk * shape->row_ld;
    } else {
        shape->all = n * k;
        shape->chunk = fp8_ceil_div(n * k, ranks);
        shape->row_ld = data = shape->chunk;
    }
    if (shape->is_tile) {
        shape->scales_ld = fp8_round_up(fp8_ceil_div(k, FP8_BLOCK), FP8_PAD_TILE_SCALES);
        shape->scale_bytes = (size_t)(shape->chunk / FP8_BLOCK * shape->scales_ld) * sizeof(float);
    }
    if (shape->has_rows || shape->own_scale)
        shape->scale_bytes = (size_t)shape->chunk * sizeof(float);
    shape->is_turned =
        shape->has_rows || (sharding->transposed && !shape->is_tile && !shape->own_scale);
    if (shape->is_turned)
        fp8_shard_shape_turned(layer, shape);
    shape->first = fp8_min_i64(sharding->rank * shape->chunk, shape->all);
    shape->count = fp8_min_i64(shape->chunk, shape->all - shape->first);
    shape->data_offset = FP8_PART_ALIGN + fp8_align_up(shape->scale_bytes, FP8_PART_ALIGN);
    shape->data_bytes = fp8_align_up((size_t)data, FP8_PART_ALIGN);
    shape->turned_offset = shape->data_offset + shape->data_bytes;
    shape->bytes = shape->turned_offset + shape->turned_bytes;
    return FP8_OK;
}

fp8_status fp8_shard_range(const fp8_layer *layer, const fp8_sharding *sharding, int64_t *first,
                           int64_t *count, int64_t *chunk)
{
    struct fp8_shard_shape shape;
    FP8_TRY(fp8_shard_shape_of("shard_range", layer, sharding, &shape));
    if (first)
        *first = shape.first;
    if (count)
        *count = shape.count;
    if (chunk)
        *chunk = shape.chunk;
    return FP8_OK;
}

fp8_status fp8_shard_amaxes(const fp8_layer *layer, int64_t *count)
{
    fp8_sharding sharding = FP8_SHARDING_INIT;
    struct fp8_shard_shape shape;
    if (!count)
        return fp8_fail(FP8_ERR_ARGUMENT, "shard_amaxes: count is NULL");
    *count = 0;
    sharding.ranks = layer ? (int32_t)layer->bundle->manifest.fsdp : 1;
    FP8_TRY(fp8_shard_shape_of("shard_amaxes", layer, &sharding, &shape));
    *count = shape.amaxes;
    return FP8_OK;
}

fp8_status fp8_shard_bytes(const fp8_layer *layer, const fp8_sharding *sharding, size_t *bytes)
{
    struct fp8_shard_shape shape;
    if (!bytes)
        return fp8_fail(FP8_ERR_ARGUMENT, "shard_bytes: bytes is NULL");
    *bytes = 0;
    FP8_TRY(fp8_shard_shape_of("shard_bytes", layer, sharding, &shape));
    *bytes = shape.bytes;
    return FP8_OK;
}

/* ---- checks of quantise and amax ---- */

static fp8_status check_source(const struct fp8_check *check, const fp8_shard_args *args,
                               const struct fp8_shard_shape *shape)
{
    bool rows = shape->kind == FP8_SHARD_ROWS;
    if (args->count < 0 || args->count > shape->chunk)
        return fp8_fail(
            FP8_ERR_SHAPE,
            "%s: count is %lld, but a shard of layer '%s' over %d ranks has 0 to %lld %s",
            check->call, (long long)args->count, check->plan->name, args->sharding->ranks,
            (long long)shape->chunk, rows ? "rows" : "elements");
    if (args->count == 0)
        return FP8_OK;
    fp8_dtype dtype = fp8_slot_dtype(check->plan, FP8_SLOT_W);
    return rows ? fp8_check_matrix(check, "source", args->source, args->count,
                                   check->plan->in_features, dtype)
                : fp8_check_matrix(check, "source", args->source, 1, args->count, dtype);
}

static fp8_status check_args(const char *call, const fp8_layer *layer, const fp8_shard_args *args,
                             struct fp8_shard_shape *shape)
{
    FP8_TRY(fp8_check_args(call, layer, args, sizeof *args, args ? args->reserved : NULL,
                           args ? args->reserved0 : 0));
    FP8_TRY(fp8_shard_shape_of(call, layer, args->sharding, shape));
    const struct fp8_check check = { .call = call, .plan = layer->plan };
    FP8_TRY(check_source(&check, args, shape));
    if ((!args->amax && !shape->is_tile) || (uintptr_t)args->amax % sizeof(float))
        return fp8_fail(args->amax ? FP8_ERR_ALIGNMENT : FP8_ERR_ARGUMENT,
                        "%s: amax is %p; pass a float of the device, aligned to 4 bytes", call,
                        (void *)args->amax);
    FP8_TRY(fp8_check_no_state(call, &args->call));
    return fp8_check_call(&check, layer, &args->call);
}

/* ---- amax and quantise: one op, on the shard as a matrix or two ---- */

struct matrix {
    void *data;
    int64_t ld, rows, cols;
};

/* What the cast leaves; NULL: not wanted. */
struct target {
    float *scales, *row_scales;
    uint8_t *row;
    int64_t row_ld, row_rows;
    uint8_t *transposed;
    int64_t transposed_ld, transposed_rows;
    float *amax; /* the running maximum */
    uint32_t *found_inf;
};

static fp8_status cast(const fp8_layer *layer, const fp8_call *call, const float *amax,
                       const struct matrix *from, const struct target *to)
{
    bool is_tile;
    const struct fp8_step *step = find_step(layer, &is_tile);
    fp8_value values[FP8_OP_MAX_ARGS] = { 0 };
    values[FP8_CAST_source].p = from->data;
    values[FP8_CAST_source_ld].i = from->ld;
    values[FP8_CAST_rows].i = from->rows;
    values[FP8_CAST_cols].i = from->cols;
    values[FP8_CAST_known].p = (void *)(uintptr_t)amax;
    values[FP8_CAST_known_is_amax].i = 1;
    values[FP8_CAST_e5m2].i = step->kernel->semantics.target_dtype == FP8_DTYPE_E5M2;
    values[FP8_CAST_scales].p = to->scales;
    values[FP8_CAST_row_scales].p = to->row_scales;
    values[FP8_CAST_row].p = to->row;
    values[FP8_CAST_row_ld].i = to->row_ld;
    values[FP8_CAST_row_rows].i = to->row_rows;
    values[FP8_CAST_transposed].p = to->transposed;
    values[FP8_CAST_transposed_ld].i = to->transposed_ld;
    values[FP8_CAST_transposed_rows].i = to->transposed_rows;
    values[FP8_CAST_amax].p = to->amax;
    values[FP8_CAST_found_inf].p = to->found_inf;
    return fp8_kernel_run(layer->context, step->kernel, values, call->stream,
                          fp8_sms_of_call(layer->context, call->max_sms));
}

/* Rows as they are. Pads are zeroed up to the next 128 rows; *end: bytes written. */
static fp8_status cast_rows(const fp8_layer *layer, const fp8_shard_args *args, const float *amax,
                            const struct fp8_shard_shape *shape, struct target to, size_t *end)
{
    const fp8_tensor *source = args->source;
    const struct matrix from = { source->data, source->rows > 1 ? source->ld : source->cols,
                                 source->rows, source->cols };
    to.row_ld = shape->row_ld;
    to.row_rows = fp8_min_i64(shape->chunk, fp8_round_up(args->count, FP8_BLOCK));
    *end = (size_t)(to.row_rows * to.row_ld);
    return cast(layer, &args->call, amax, &from, &to);
}

static fp8_status cast_elements(const fp8_layer *layer, const fp8_shard_args *args,
                                const float *amax, struct target to, size_t *end)
{
    const size_t element = fp8_dtype_bytes(fp8_slot_dtype(layer->plan, FP8_SLOT_W));
    const int64_t rows = args->count / FLAT, rest = args->count % FLAT;
    struct matrix from = { args->source->data, FLAT, rows, FLAT };
    to.row_ld = FLAT;
    to.row_rows = rows;
    if (rows > 0)
        FP8_TRY(cast(layer, &args->call, amax, &from, &to));
    *end = (size_t)(rows * FLAT);
    if (rest == 0)
        return FP8_OK;
    from = (struct matrix){ (char *)args->source->data + *end * element, rest, 1, rest };
    to.row = to.row ? to.row + *end : NULL;
    to.row_ld = fp8_round_up(rest, FP8_PAD_LD);
    to.row_rows = 1;
    *end += (size_t)to.row_ld;
    return cast(layer, &args->call, amax, &from, &to);
}

static fp8_status cast_shard(const fp8_layer *layer, const fp8_shard_args *args, const float *amax,
                             const struct fp8_shard_shape *shape, const struct target *to,
                             size_t *end)
{
    *end = 0;
    if (args->count == 0) { /* an element that is written nowhere: the scales alone */
        const struct matrix any = { (void *)(uintptr_t)amax, 1, 1, 1 };
        const struct target scales = { .scales = to->scales };
        return cast(layer, &args->call, amax, &any, &scales);
    }
    if (shape->kind == FP8_SHARD_ROWS)
        return cast_rows(layer, args, amax, shape, *to, end);
    return cast_elements(layer, args, amax, *to, end);
}

/* The workspace: a zero, which stands for an amax, and scales that nobody wants. */
static fp8_status run_amax(const fp8_layer *layer, const fp8_shard_args *args,
                           const struct fp8_shard_shape *shape)
{
    const fp8_context *context = layer->context;
    float *zero = (float *)fp8_align_up((uintptr_t)args->call.workspace, FP8_PART_ALIGN);
    const struct target to = { .scales = zero + FP8_SCALES_COUNT,
                               .amax = args->amax,
                               .found_inf = args->found_inf };
    size_t end;
    if (args->amax)
        FP8_TRY(fp8_fill_words(context, args->amax, 0, shape->amaxes, args->call.stream));
    if (shape->is_tile || args->count == 0)
        return FP8_OK;
    if (shape->has_rows)
        return fp8_shard_amax_rows(layer, args);
    FP8_TRY(fp8_fill_words(context, zero, 0, 1, args->call.stream));
    return cast_shard(layer, args, zero, shape, &to, &end);
}

fp8_status fp8_shard_amax(const fp8_layer *layer, const fp8_shard_args *args)
{
    const char *call = "shard_amax";
    struct fp8_shard_shape shape;
    fp8_status status = check_args(call, layer, args, &shape);
    if (status == FP8_OK)
        status = fp8_check_word(call, "found_inf", args->found_inf);
    bool pushed;
    if (status == FP8_OK && (status = fp8_context_enter(layer->context, &pushed)) == FP8_OK) {
        status = run_amax(layer, args, &shape);
        fp8_context_leave(layer->context, pushed);
    }
    return layer ? fp8_report(layer->context, status) : status;
}

/* Every 128 x 128 has its own scale: nothing to know beforehand. */
static fp8_status run_tiles(const fp8_layer *layer, const fp8_shard_args *args,
                            const struct fp8_shard_shape *shape, size_t *end)
{
    bool is_tile;
    const struct fp8_step *step = find_step(layer, &is_tile);
    const fp8_tensor *source = args->source;
    uint8_t *shard = args->shard;
    const int64_t scales = (int64_t)(shape->data_offset);
    *end = 0;
    FP8_TRY(fp8_zero_2d(layer->context, shard, scales, scales, 1, args->call.stream));
    if (args->count == 0)
        return FP8_OK;
    fp8_value values[FP8_OP_MAX_ARGS] = { 0 };
    values[FP8_QUANTIZE_BLOCK_source].p = source->data;
    values[FP8_QUANTIZE_BLOCK_source_ld].i = source->rows > 1 ? source->ld : source->cols;
    values[FP8_QUANTIZE_BLOCK_rows].i = source->rows;
    values[FP8_QUANTIZE_BLOCK_cols].i = source->cols;
    values[FP8_QUANTIZE_BLOCK_row].p = shard + shape->data_offset;
    values[FP8_QUANTIZE_BLOCK_row_ld].i = shape->row_ld;
    values[FP8_QUANTIZE_BLOCK_row_rows].i = fp8_round_up(args->count, FP8_BLOCK);
    values[FP8_QUANTIZE_BLOCK_row_scales].p = shard + FP8_PART_ALIGN;
    values[FP8_QUANTIZE_BLOCK_row_scales_ld].i = shape->scales_ld;
    values[FP8_QUANTIZE_BLOCK_found_inf].p = args->found_inf;
    *end = (size_t)(values[FP8_QUANTIZE_BLOCK_row_rows].i * shape->row_ld);
    return fp8_kernel_run(layer->context, step->kernel, values, args->call.stream,
                          fp8_sms_of_call(layer->context, args->call.max_sms));
}

/* The scale before the transposed part too, and what of it the kernel's tiles do not cover. */
static fp8_status prepare_turned(const fp8_layer *layer, const fp8_shard_args *args,
                                 const struct fp8_shard_shape *shape, struct target *to)
{
    uint8_t *turned = (uint8_t *)args->shard + shape->turned_offset;
    const int64_t bytes = (int64_t)(shape->turned_bytes - shape->turned_head);
    to->transposed = turned + shape->turned_head;
    to->transposed_ld = shape->turned_ld;
    to->transposed_rows = fp8_round_up(layer->plan->in_features, FP8_PAD_ROWS);
    if (fp8_round_up(args->count, FP8_BLOCK) >= shape->turned_ld && args->count > 0)
        return FP8_OK;
    return fp8_zero_2d(layer->context, to->transposed, bytes, bytes, 1, args->call.stream);
}

/* The scale for every row there is, zeros behind. */
static fp8_status prepare_own(const fp8_layer *layer, const fp8_shard_args *args,
                              const struct fp8_shard_shape *shape, struct target *to)
{
    to->row_scales = (float *)(void *)((uint8_t *)args->shard + FP8_PART_ALIGN);
    const int64_t bytes = (int64_t)(shape->data_offset - FP8_PART_ALIGN);
    return fp8_zero_2d(layer->context, to->row_scales, bytes, bytes, 1, args->call.stream);
}

static fp8_status run_quantize(const fp8_layer *layer, const fp8_shard_args *args,
                               const struct fp8_shard_shape *shape)
{
    size_t end = 0;
    struct target to = { .scales = args->shard,
                         .row = (uint8_t *)args->shard + shape->data_offset };
    if (shape->is_tile)
        FP8_TRY(run_tiles(layer, args, shape, &end));
    else if (shape->has_rows)
        FP8_TRY(fp8_shard_quantize_rows(layer, args, shape, &end));
    else {
        if (shape->is_turned)
            FP8_TRY(prepare_turned(layer, args, shape, &to));
        if (shape->own_scale)
            FP8_TRY(prepare_own(layer, args, shape, &to));
        FP8_TRY(cast_shard(layer, args, args->amax, shape, &to, &end));
    }
    const int64_t rest = (int64_t)(shape->data_bytes - end);
    FP8_TRY(fp8_zero_2d(layer->context, to.row + end, rest, rest, 1, args->call.stream));
    if (shape->is_tile || shape->has_rows)
        return FP8_OK;
    const int64_t gap = FP8_PART_ALIGN - FP8_SCALES_COUNT * (int64_t)sizeof(float);
    FP8_TRY(
        fp8_zero_2d(layer->context, to.scales + FP8_SCALES_COUNT, gap, gap, 1, args->call.stream));
    if (!shape->is_turned)
        return FP8_OK;
    return fp8_copy_bytes(layer->context, (uint8_t *)args->shard + shape->turned_offset,
                          args->shard, FP8_PART_ALIGN, args->call.stream);
}

fp8_status fp8_shard_quantize(const fp8_layer *layer, const fp8_shard_args *args)
{
    const char *call = "shard_quantize";
    struct fp8_shard_shape shape;
    fp8_status status = check_args(call, layer, args, &shape);
    if (status == FP8_OK && (!args->shard || (uintptr_t)args->shard % 16))
        status = fp8_fail(args->shard ? FP8_ERR_ALIGNMENT : FP8_ERR_ARGUMENT,
                          "%s: shard is %p; pass memory aligned to 16 bytes", call, args->shard);
    if (status == FP8_OK && args->shard_bytes < shape.bytes)
        status = fp8_fail(FP8_ERR_SHAPE,
                          "%s: shard has %zu bytes, but one of layer '%s' over %d ranks takes %zu; "
                          "ask fp8_shard_bytes",
                          call, args->shard_bytes, layer->plan->name, args->sharding->ranks,
                          shape.bytes);
    bool pushed;
    if (status == FP8_OK && (status = fp8_context_enter(layer->context, &pushed)) == FP8_OK) {
        status = run_quantize(layer, args, &shape);
        fp8_context_leave(layer->context, pushed);
    }
    return layer ? fp8_report(layer->context, status) : status;
}
