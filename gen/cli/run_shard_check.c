/*
 * run_shard_check.c - the verdicts of `fp8gen run --fsdp`: sharded against unsharded.
 *
 * In: a rank whose pass has ended. Every rank evaluates the unsharded layer on its own x and dy
 * with the whole weight, by the same library on the same device. Out: counts and shares per layer.
 * The FP8 bytes and scales of the gathered weight, y and dx must be the same bits, and the weight
 * what the rules of quantisation say. dw and dbias after the reduction must
 * be the sum (average) of all ranks' unsharded ones, taken in float64, within the roundings that
 * sums in their dtype may make: (terms + 2) half ulps of the sum of the terms' sizes for each
 * element.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "gen/cli/reference.h"
#include "gen/cli/run.h"
#include "gen/cli/run_shard.h"

static int no_memory(void)
{
    cli_error("out of memory for the reference");
    return CLI_MACHINE;
}

static int failed(const struct shard_rank *s, fp8_status status, const struct shard_layer *l,
                  const char *what)
{
    return cli_fp8_failed(status, "rank %d, layer '%s', %s", s->rank->rank, l->info.name, what);
}

static void worse(struct shard_layer *l, enum shard_result result, double value)
{
    if (!(value <= l->results[result])) /* NaN too */
        l->results[result] = value < 1e30 ? (float)value : 1e30f;
}

/* Bytes of two device regions that differ; -1 after an error was printed. */
static int64_t count_different(const struct shard_rank *s, const void *a, const void *b,
                               size_t bytes, int *code)
{
    const struct cli_device *device = &s->rank->device;
    unsigned char *copy = device->is_host ? NULL : malloc(2 * bytes + 1);
    const unsigned char *left = a, *right = b;
    int64_t different = 0;
    if (!device->is_host) {
        if (!copy) {
            *code = no_memory();
            return 0;
        }
        fp8_status status = fp8_memory_copy(device->context, copy, a, bytes, device->stream);
        if (!status)
            status = fp8_memory_copy(device->context, copy + bytes, b, bytes, device->stream);
        *code = status ? cli_fp8_failed(status, "copying from the device")
                       : cli_device_synchronize(device);
        left = copy;
        right = copy + bytes;
    }
    if (!*code && memcmp(left, right, bytes) != 0) {
        for (size_t i = 0; i < bytes; i++)
            different += left[i] != right[i];
    }
    free(copy);
    return different;
}

/* ---- weights --------------------------------------------------------------------------------- */

/* Delayed weights that are shared take their scale from the amax that the ranks agreed on. */
static int upload_amax(struct shard_rank *s, struct shard_layer *l)
{
    fp8_tensor w = shard_tensor(s, l, SHARD_W);
    float amax = 0;
    for (int64_t i = 0; i < w.rows * w.cols; i++)
        amax = fmaxf(amax, fabsf(ref_load(l->buffers[SHARD_W].host, w.dtype, i)));
    *(float *)l->buffers[SHARD_REF_AMAX].host = amax;
    return cli_buffer_upload(&s->rank->device, &l->buffers[SHARD_REF_AMAX]);
}

static int make_reference_weight(struct shard_rank *s, struct shard_layer *l)
{
    fp8_weight_args args = FP8_WEIGHT_ARGS_INIT;
    fp8_tensor w = shard_tensor(s, l, SHARD_W);
    int code = l->state ? upload_amax(s, l) : CLI_DONE;
    if (code)
        return code;
    args.w = &w;
    args.amax = l->state ? l->buffers[SHARD_REF_AMAX].device : NULL;
    args.version = s->version;
    args.weight = &l->ref_weight;
    args.call = shard_call(s, l);
    fp8_status status = fp8_weight_update(l->layer, &args);
    return status ? failed(s, status, l, "the unsharded weight")
                  : cli_device_synchronize(&s->rank->device);
}

/* The unsharded weight against the rules of quantisation, on one rank: all have the same. */
static int check_rules(struct shard_rank *s, struct shard_layer *l)
{
    const struct run_recipe recipe = run_read_recipe(s->run->manifest, l->info.name);
    const struct ref_rule rule = { recipe.power_of_two, recipe.margin, recipe.shard_rows };
    const fp8_tensor w = { .data = l->buffers[SHARD_W].host,
                           .rows = l->info.out_features,
                           .cols = l->info.in_features,
                           .ld = l->info.in_features,
                           .dtype = l->info.w_dtype };
    struct ref_verdict verdict;
    int code = s->rank->rank == 0
                   ? cli_buffer_download(&s->rank->device, &l->buffers[SHARD_REF_WEIGHT])
                   : CLI_DONE;
    if (code || s->rank->rank != 0)
        return code;
    fp8_operand weight = l->ref_weight;
    weight.data = l->buffers[SHARD_REF_WEIGHT].host;
    if (!ref_check_operand(&w, &weight, &rule, &verdict))
        return no_memory();
    worse(l, SHARD_W_WRONG, (double)(verdict.wrong_bytes + verdict.wrong_scales));
    return CLI_DONE;
}

static int64_t round_up(int64_t value, int64_t step)
{
    return (value + step - 1) / step * step;
}

/* A copy of the weight with its scales of tiles or rows, if it has any. */
struct copy {
    const uint8_t *data;
    const float *scales;
    int64_t ld, scales_ld;
};

static struct copy copy_of(const fp8_operand_view *view, bool row)
{
    return row ? (struct copy){ view->row, view->row_scales, view->row_ld, view->row_scales_ld }
               : (struct copy){ view->transposed, view->transposed_scales, view->transposed_ld,
                                view->transposed_scales_ld };
}

/* One copy of the gathered weight and its scales, pads included. */
static int compare_weight(struct shard_rank *s, struct shard_layer *l, const fp8_operand *gathered,
                          fp8_pass pass)
{
    fp8_operand_view got, want;
    int code = CLI_DONE;
    fp8_status status = fp8_operand_parts(gathered, &got);
    if (!status)
        status = fp8_operand_parts(&l->ref_weight, &want);
    if (status)
        return failed(s, status, l, "the gathered weight");
    bool row = pass == FP8_PASS_FPROP;
    struct copy a = copy_of(&got, row), b = copy_of(&want, row);
    int64_t rows = row ? l->info.out_features : l->info.in_features, wrong = 0;
    if (!a.data || a.ld != b.ld || !a.scales != !b.scales || a.scales_ld != b.scales_ld) {
        cli_error("rank %d, layer '%s': the gathered weight has no %s copy of that form",
                  s->rank->rank, l->info.name, row ? "row" : "transposed");
        return CLI_BUG;
    }
    const fp8_scaling scaling = row ? gathered->row_scaling : gathered->transposed_scaling;
    const int64_t scale_rows = scaling == FP8_SCALING_ROW ? 1 : (rows + 127) / 128;
    wrong += count_different(s, a.data, b.data, (size_t)(round_up(rows, 16) * a.ld), &code);
    if (!code && a.scales)
        wrong += count_different(s, a.scales, b.scales,
                                 (size_t)(scale_rows * a.scales_ld) * sizeof(float), &code);
    for (int i = 0; !code && !a.scales && i < 3; i++) /* scale, scale_inv, amax */
        wrong += count_different(s, got.scales + 4 * i, want.scales + 4 * i, 4, &code);
    worse(l, SHARD_W_WRONG, (double)wrong);
    return code;
}

static int check_weight(struct shard_rank *s, int index, fp8_pass pass)
{
    struct shard_layer *l = &s->layers[index];
    const fp8_operand *weight = NULL;
    fp8_call call = shard_call(s, l);
    fp8_status status = fp8_model_acquire(s->model, index, pass, &call, &weight);
    if (!status)
        status = fp8_comm_wait(s->rank->comm, s->rank->device.stream);
    if (status)
        return failed(s, status, l, "gathering the weight");
    int code = compare_weight(s, l, weight, pass);
    status = fp8_model_release(s->model, index, s->rank->device.stream);
    return status ? failed(s, status, l, "releasing the weight") : code;
}

int shard_check_weights(struct shard_rank *s)
{
    int code = CLI_DONE;
    for (int i = 0; !code && i < s->count; i++)
        code = make_reference_weight(s, &s->layers[i]);
    for (int i = 0; !code && i < s->count; i++)
        code = check_rules(s, &s->layers[i]);
    for (int i = 0; !code && i < s->count; i++)
        code = check_weight(s, i, FP8_PASS_FPROP);
    for (int i = s->count - 1; !code && i >= 0; i--)
        code = check_weight(s, i, FP8_PASS_DGRAD);
    return code;
}

/* ---- a micro-batch --------------------------------------------------------------------------- */

static fp8_status run_unsharded(struct shard_rank *s, struct shard_layer *l)
{
    fp8_fprop_args fprop = FP8_FPROP_ARGS_INIT;
    fp8_backward_args backward = FP8_BACKWARD_ARGS_INIT;
    fp8_tensor x = shard_tensor(s, l, SHARD_X), y = shard_tensor(s, l, SHARD_REF_Y);
    fp8_tensor dy = shard_tensor(s, l, SHARD_DY), dx = shard_tensor(s, l, SHARD_REF_DX);
    fp8_tensor dw = shard_tensor(s, l, SHARD_REF_DW), bias = shard_tensor(s, l, SHARD_BIAS);
    fp8_tensor dbias = shard_tensor(s, l, SHARD_REF_DBIAS);
    fprop.x = &x;
    fprop.weight = &l->ref_weight;
    fprop.bias = l->info.has_bias ? &bias : NULL;
    fprop.y = &y;
    fprop.saved = &l->ref_saved;
    fprop.call = shard_call(s, l);
    fprop.call.flags |= FP8_CALL_EVALUATE; /* the amaxes were noted by the sharded passes */
    fp8_status status = fp8_layer_fprop(l->layer, &fprop);
    if (status)
        return status;
    backward.dy = &dy;
    backward.x = l->ref_saved.bytes ? NULL : &x;
    backward.saved = &l->ref_saved;
    backward.weight = &l->ref_weight;
    backward.grad = &l->grad;
    backward.dbias = l->info.has_bias ? &dbias : NULL;
    backward.dw = &dw;
    backward.dx = &dx;
    backward.call = fprop.call;
    return fp8_layer_backward(l->layer, &backward);
}

static int compare_outputs(struct shard_rank *s, struct shard_layer *l)
{
    static const struct {
        enum shard_buffer got, want;
        enum shard_result result;
    } pairs[] = { { SHARD_Y, SHARD_REF_Y, SHARD_Y_WRONG },
                  { SHARD_DX, SHARD_REF_DX, SHARD_DX_WRONG } };
    int code = CLI_DONE;
    for (int i = 0; !code && i < 2; i++) {
        fp8_tensor got = shard_tensor(s, l, pairs[i].got), want = shard_tensor(s, l, pairs[i].want);
        size_t bytes = (size_t)got.rows * (size_t)got.cols * fp8_dtype_bytes(got.dtype);
        int64_t wrong = count_different(s, got.data, want.data, bytes, &code);
        worse(l, pairs[i].result, (double)wrong);
    }
    return code;
}

/* A block of a gradient as all ranks have it, of which this rank's rows are added to what they must
 * sum to. */
struct terms {
    const char *all; /* ranks * bytes */
    size_t bytes;
    fp8_dtype dtype;
    int ranks;
    double share;       /* of each rank */
    int64_t first, end; /* elements of the whole tensor: of the block, and of this rank */
    int64_t own_first, own_end;
    double *exact, *sizes; /* of this rank's first element */
};
enum { TERMS_BLOCK = 8 << 20, TERMS_STRIP = 1 << 16 };

static void add_strip(void *user, int64_t index)
{
    const struct terms *t = user;
    int64_t from = t->first + index * TERMS_STRIP;
    int64_t to = from + TERMS_STRIP < t->end ? from + TERMS_STRIP : t->end;
    from = from > t->own_first ? from : t->own_first;
    to = to < t->own_end ? to : t->own_end;
    for (int r = 0; r < t->ranks; r++) {
        for (int64_t i = from; i < to; i++) {
            double v = ref_load(t->all + (size_t)r * t->bytes, t->dtype, i - t->first) * t->share;
            t->exact[i - t->own_first] += v;
            t->sizes[i - t->own_first] += fabs(v);
        }
    }
}

/* Adds all ranks' values of this rank's rows to what they must sum up to, block by block: no rank
 * has the whole gradients of all. at: where in exact and sizes; row: elements of a row of the whole
 * tensor. */
static int add_terms(struct shard_rank *s, struct shard_layer *l, enum shard_buffer buffer,
                     size_t at, int64_t row)
{
    const int64_t count =
        (int64_t)(l->buffers[buffer].bytes / fp8_dtype_bytes(shard_tensor(s, l, buffer).dtype));
    struct terms t = { .dtype = shard_tensor(s, l, buffer).dtype,
                       .ranks = s->rank->ranks,
                       .share = s->run->average ? 1.0 / s->rank->ranks : 1.0,
                       .own_first = l->first * row,
                       .own_end = (l->first + l->rows) * row,
                       .exact = l->exact + at,
                       .sizes = l->sizes + at };
    const size_t element = fp8_dtype_bytes(t.dtype);
    const int64_t block = count < TERMS_BLOCK ? count : TERMS_BLOCK;
    char *all = malloc((size_t)t.ranks * (size_t)block * element);
    int code = all ? cli_buffer_download(&s->rank->device, &l->buffers[buffer]) : no_memory();
    t.all = all;
    for (t.first = 0; !code && t.first < count; t.first = t.end) {
        t.end = t.first + block < count ? t.first + block : count;
        t.bytes = (size_t)(t.end - t.first) * element;
        code = cli_rank_gather(s->rank, (char *)l->buffers[buffer].host + (size_t)t.first * element,
                               t.bytes, all);
        if (!code && t.end > t.own_first && t.first < t.own_end)
            cli_parallel((t.end - t.first + TERMS_STRIP - 1) / TERMS_STRIP, add_strip, &t);
    }
    free(all);
    return code;
}

int shard_check_batch(struct shard_rank *s)
{
    int code = CLI_DONE;
    for (int i = 0; !code && i < s->count; i++) {
        struct shard_layer *l = &s->layers[i];
        fp8_status status = run_unsharded(s, l);
        if (status)
            return failed(s, status, l, "unsharded");
        code = cli_device_synchronize(&s->rank->device);
        if (!code)
            code = compare_outputs(s, l);
        if (!code)
            code = add_terms(s, l, SHARD_REF_DW, 0, l->info.in_features);
        if (!code && l->info.has_bias)
            code =
                add_terms(s, l, SHARD_REF_DBIAS, (size_t)l->rows * (size_t)l->info.in_features, 1);
    }
    return code;
}

/* ---- gradients ------------------------------------------------------------------------------- */

/* One rounding to the dtype, as a share of the value. */
static double half_ulp(fp8_dtype dtype)
{
    return dtype == FP8_DTYPE_FP32 ? 0x1p-24 : dtype == FP8_DTYPE_FP16 ? 0x1p-11 : 0x1p-8;
}

/* Smallest step of numbers near zero: what subnormals lose. */
static double smallest(fp8_dtype dtype)
{
    return dtype == FP8_DTYPE_FP16 ? 0x1p-24 : 0x1p-126;
}

static int compare_rows(struct shard_rank *s, struct shard_layer *l, enum shard_buffer buffer,
                        size_t at, fp8_dtype summed)
{
    fp8_tensor t = shard_tensor(s, l, buffer);
    int64_t count = t.rows * t.cols;
    double terms = (s->rank->ranks + 1.0) * SHARD_MICRO_BATCHES + 2, worst = 0, norm = 0, off = 0;
    int code = cli_buffer_download(&s->rank->device, &l->buffers[buffer]);
    for (int64_t i = 0; !code && i < count; i++) {
        double got = ref_load(l->buffers[buffer].host, t.dtype, i);
        double exact = l->exact[at + (size_t)i], size = l->sizes[at + (size_t)i];
        double bound = terms * (half_ulp(summed) * size + smallest(summed));
        double share = fabs(got - exact) / bound;
        if (!(share <= worst))
            worst = share;
        off += (got - exact) * (got - exact);
        norm += exact * exact;
    }
    worse(l, buffer == SHARD_DW_ROWS ? SHARD_DW_SHARE : SHARD_DBIAS_SHARE, worst);
    if (buffer == SHARD_DW_ROWS && count > 0)
        worse(l, SHARD_DW_ERROR, norm > 0 ? sqrt(off / norm) : off == 0 ? 0 : INFINITY);
    return code;
}

int shard_check_gradients(struct shard_rank *s)
{
    int code = CLI_DONE;
    for (int i = 0; !code && i < s->count; i++) {
        struct shard_layer *l = &s->layers[i];
        code = compare_rows(s, l, SHARD_DW_ROWS, 0, l->info.dw_dtype);
        if (!code && l->info.has_bias)
            code = compare_rows(s, l, SHARD_DBIAS_ROWS,
                                (size_t)l->rows * (size_t)l->info.in_features, FP8_DTYPE_FP32);
    }
    return code;
}
