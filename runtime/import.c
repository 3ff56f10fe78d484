/*
 * import.c - a weight that is FP8 already: its bytes and scales laid out as an operand.
 *
 * In: dense FP8 bytes on the device, scales on the host, one for each stretch of rows. Out: the row
 * copy of a weight. A weight of several parts with a scale each ([q; k; v]) is a weight of row
 * scaling whose vector of scales is constant along each part, so products need to know nothing of
 * it. Along the other dim such scales are no vector of a copy: only the row copy can be had, but
 * where a layer has scales by shard, whose parts end at multiples of 128 rows (fp8_transpose).
 */
#include <float.h>
#include <string.h>

#include "runtime/internal.h"

static fp8_status check_scales(const fp8_import_args *args)
{
    if (args->count < 1 || !args->scale_inv)
        return fp8_fail(FP8_ERR_ARGUMENT, "import: count is %d and scale_inv is %p; give a scale",
                        args->count, (const void *)args->scale_inv);
    for (int32_t i = 0; i < args->count; i++) {
        float scale = args->scale_inv[i];
        if (!(scale > 0.0f) || scale > FLT_MAX || 1.0f / scale > FLT_MAX)
            return fp8_fail(FP8_ERR_ARGUMENT,
                            "import: scale_inv[%d] is %g; every stretch of rows needs a positive, "
                            "finite scale with a finite inverse",
                            i, (double)scale);
    }
    return FP8_OK;
}

static fp8_status check_stretches(const struct fp8_layer_plan *plan, const fp8_import_args *args)
{
    int64_t sum = 0;
    if (args->count > 1 && !args->rows)
        return fp8_fail(FP8_ERR_ARGUMENT, "import: rows is NULL, but there are %d scales",
                        args->count);
    for (int32_t i = 0; args->rows && i < args->count; i++) {
        if (args->rows[i] < 1 || args->rows[i] > plan->out_features - sum)
            return fp8_fail(FP8_ERR_SHAPE,
                            "import: rows[%d] is %lld, after %lld of the %lld rows of layer '%s'",
                            i, (long long)args->rows[i], (long long)sum,
                            (long long)plan->out_features, plan->name);
        sum += args->rows[i];
        if (plan->shard.own_scales && sum % FP8_BLOCK != 0 && i < args->count - 1)
            return fp8_fail(
                FP8_ERR_SHAPE,
                "import: rows[%d] is %lld and ends at row %lld of layer '%s', but with "
                "weight_scale shard a scale begins at multiples of %d rows; fp8_transpose "
                "takes one for each of them; use recipe \"rowwise\"",
                i, (long long)args->rows[i], (long long)sum, plan->name, FP8_BLOCK);
    }
    if (args->rows && sum != plan->out_features)
        return fp8_fail(FP8_ERR_SHAPE,
                        "import: %d scales cover %lld rows, but the weight of layer '%s' has %lld; "
                        "a scale is missing",
                        args->count, (long long)sum, plan->name, (long long)plan->out_features);
    fp8_scaling scaling = plan->scalings[FP8_ROLE_W][FP8_ROW_COPY];
    if (scaling == FP8_SCALING_ROW || (scaling == FP8_SCALING_TENSOR && args->count == 1))
        return FP8_OK;
    return fp8_fail(FP8_ERR_UNSUPPORTED,
                    "import: layer '%s' has scaling %s for w, %d scales are given; several need "
                    "recipe \"rowwise\", \"rowwise_hp_wgrad\" or \"current\" with weight_scale = "
                    "\"shard\", one "
                    "also \"current\" or \"delayed\"",
                    plan->name, fp8_scaling_names[scaling], args->count);
}

static fp8_status check_import(const fp8_layer *layer, const fp8_import_args *args)
{
    const char *call = "import";
    FP8_TRY(fp8_check_args(call, layer, args, sizeof *args, args ? args->reserved : NULL, 0));
    const struct fp8_layer_plan *plan = layer->plan;
    const struct fp8_check check = { .call = call, .plan = plan };
    FP8_TRY(fp8_check_quantises(&check));
    FP8_TRY(check_scales(args));
    FP8_TRY(check_stretches(plan, args));
    FP8_TRY(fp8_check_matrix(&check, "q", args->q, plan->out_features, plan->in_features,
                             plan->formats[FP8_ROLE_W]));
    if (args->version == 0)
        return fp8_fail(FP8_ERR_ARGUMENT, "%s: version is 0, which means unknown; count from 1",
                        call);
    FP8_TRY(fp8_check_target(&check, "weight", FP8_ROLE_W, FP8_COPY_ROW, args->weight));
    return fp8_check_stream(call, &args->call);
}

static uint32_t bits_of(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static fp8_status write_scales(const fp8_layer *layer, const fp8_import_args *args,
                               const fp8_operand_view *view)
{
    const struct fp8_context *context = layer->context;
    fp8_stream stream = args->call.stream;
    float inverse = args->scale_inv[0];
    if (!view->row_scales) {
        FP8_TRY(fp8_fill_words(context, view->scales, 0, FP8_SCALES_COUNT, stream));
        FP8_TRY(fp8_fill_words(context, view->scales + FP8_SCALES_SCALE, bits_of(1.0f / inverse), 1,
                               stream));
        return fp8_fill_words(context, view->scales + FP8_SCALES_SCALE_INV, bits_of(inverse), 1,
                              stream);
    }
    FP8_TRY(fp8_fill_words(context, view->row_scales, 0, view->row_scales_ld, stream));
    int64_t first = 0;
    for (int32_t i = 0; i < args->count; i++) {
        int64_t rows = args->rows ? args->rows[i] : layer->plan->out_features;
        FP8_TRY(fp8_fill_words(context, view->row_scales + first, bits_of(args->scale_inv[i]), rows,
                               stream));
        first += rows;
    }
    return FP8_OK;
}

/* The bytes, and zeros where the row copy is padded. */
static fp8_status write_bytes(const fp8_layer *layer, const fp8_import_args *args,
                              const fp8_operand_view *view)
{
    const int64_t n = layer->plan->out_features, k = layer->plan->in_features;
    const fp8_tensor *q = args->q;
    FP8_TRY(fp8_zero_2d(layer->context, view->row, view->row_ld, view->row_ld,
                        fp8_round_up(n, FP8_PAD_ROWS), args->call.stream));
    return fp8_copy_2d(layer->context, view->row, view->row_ld, q->data, n > 1 ? q->ld : k, k, n,
                       args->call.stream);
}

fp8_status fp8_import(const fp8_layer *layer, const fp8_import_args *args)
{
    fp8_status status = check_import(layer, args);
    if (status != FP8_OK)
        return layer ? fp8_report(layer->context, status) : status;
    fp8_operand filled = *args->weight;
    fp8_operand_view view;
    fp8_operand_clear(args->weight);
    fp8_operand_fill(&filled, layer->plan, FP8_ROLE_W, 0, FP8_COPY_ROW, args->version);
    fp8_operand_layout(&filled, &view);
    bool pushed;
    status = fp8_context_enter(layer->context, &pushed);
    if (status == FP8_OK)
        status = write_scales(layer, args, &view);
    if (status == FP8_OK)
        status = write_bytes(layer, args, &view);
    fp8_context_leave(layer->context, pushed);
    if (status == FP8_OK)
        *args->weight = filled;
    return fp8_report(layer->context, status);
}
