/*
 * rig_case.c - one layer at one M: tensors, forward and backward, all checks.
 *
 * Data are lopsided: rows and columns of every operand have sizes of their own, so swapped
 * operands, scales or indices cannot cancel.
 */
#include <math.h>

#include "tests/runtime/rig.h"

static const char *const names[RIG_TENSORS] = { "x",  "w",  "bias",  "y",        "dy",
                                                "dx", "dw", "dbias", "found_inf" };

void rig_case_init(struct rig_case *c, const struct rig_layer *layer, int64_t tokens, uint64_t seed)
{
    memset(c, 0, sizeof *c);
    c->layer = layer;
    c->tokens = tokens;
    c->seed = seed;
    c->poison = 0xFF;
    c->centred = true;
    c->version = 1;
    c->stream = rig.stream;
}

struct shape {
    fp8_dtype dtype;
    int64_t rows, cols;
};

static struct shape shape_of(const struct rig_case *c, int which)
{
    const fp8_layer_info *info = &c->layer->info;
    int64_t m = c->tokens, n = info->out_features, k = info->in_features;
    const struct shape shapes[RIG_TENSORS] = {
        [RIG_X] = { info->x_dtype, m, k },
        [RIG_W] = { info->w_dtype, n, k },
        [RIG_BIAS] = { FP8_DTYPE_BF16, 1, n },
        [RIG_Y] = { info->y_dtype, m, n },
        [RIG_DY] = { info->dy_dtype, m, n },
        [RIG_DX] = { info->dx_dtype, m, k },
        [RIG_DW] = { info->dw_dtype, n, k },
        [RIG_DBIAS] = { FP8_DTYPE_FP32, 1, n },
        [RIG_FOUND_INF] = { FP8_DTYPE_UINT32, 1, 1 },
    };
    return shapes[which];
}

/* Powers of two per row and column; `rows`, `cols`: how many sizes there are. */
static void fill(struct rig_tensor *tensor, uint64_t seed, bool centred, int rows, int cols)
{
    for (int64_t i = 0; i < tensor->t.rows; i++) {
        for (int64_t j = 0; j < tensor->t.cols; j++) {
            double value = rig_normal(seed, (uint64_t)(i * tensor->t.cols + j)) + (centred ? 0 : 1);
            int exponent = (int)(i % rows) - (int)(j % cols);
            rig_set(tensor, i, j, (float)ldexp(value, exponent));
        }
    }
}

void rig_case_make(struct rig_case *c)
{
    for (int i = 0; i < RIG_TENSORS; i++) {
        struct shape s = shape_of(c, i);
        rig_tensor_make(&c->tensor[i], names[i], s.dtype, s.rows, s.cols, c->gap[i], c->offset[i],
                        c->poison);
    }
    int one = c->level;
    fill(&c->tensor[RIG_X], c->seed * 8 + 0, c->centred, one ? 1 : 8, 1);
    fill(&c->tensor[RIG_W], c->seed * 8 + 1, c->centred, one ? 1 : 5, one ? 1 : 2);
    fill(&c->tensor[RIG_BIAS], c->seed * 8 + 2, true, 1, 1);
    fill(&c->tensor[RIG_DY], c->seed * 8 + 3, c->centred, one ? 1 : 3, one ? 1 : 4);
    if (c->accumulate) {
        fill(&c->tensor[RIG_DW], c->seed * 8 + 4, true, 1, 1);
        fill(&c->tensor[RIG_DBIAS], c->seed * 8 + 5, true, 1, 1);
    }
    rig_set_bits(&c->tensor[RIG_FOUND_INF], 0, 0, 0);
    if (c->layer->spec.recipe == RIG_DELAYED && !c->layer->spec.bf16) {
        const fp8_layer *list[] = { c->layer->handle };
        RIG_OK(fp8_state_create(list, 1, &c->state));
        for (int i = 0; i < 3; i++)
            c->known[i] = 1.0f;
    }
    rig_operand_make(&c->saved, rig_bytes(c->layer, c->tokens, FP8_BYTES_SAVED), c->poison);
    rig_operand_make(&c->weight, rig_bytes(c->layer, c->tokens, FP8_BYTES_WEIGHT), c->poison);
    rig_operand_make(&c->grad, rig_bytes(c->layer, c->tokens, FP8_BYTES_GRAD), c->poison);
    rig_scratch_make(&c->workspace, rig_bytes(c->layer, c->tokens, FP8_BYTES_WORKSPACE),
                     c->workspace_shift, c->poison);
}

void rig_case_push(struct rig_case *c)
{
    static const int added[] = { RIG_DW, RIG_DBIAS };
    for (int i = 0; i < RIG_TENSORS; i++)
        rig_tensor_push(&c->tensor[i]);
    for (int i = 0; i < 2 && c->accumulate; i++) {
        const struct rig_block *block = &c->tensor[added[i]].block;
        free(c->before[added[i]]);
        c->before[added[i]] = malloc(block->bytes + 1);
        assert_non_null(c->before[added[i]]);
        memcpy(c->before[added[i]], block->image, block->bytes);
    }
}

fp8_call rig_case_call(const struct rig_case *c)
{
    fp8_call call = rig_call(&c->workspace);
    call.state = c->state;
    call.stream = c->stream;
    return call;
}

static uint32_t *found_inf_of(struct rig_case *c)
{
    return c->tensor[RIG_FOUND_INF].t.data;
}

/* In bf16 nothing reads dy beside the products but the sums of dbias. */
static uint32_t *found_inf_of_dy(struct rig_case *c)
{
    return c->layer->spec.bf16 && !c->layer->info.has_bias ? NULL : found_inf_of(c);
}

/* The caller's own tensors, where a product reads them. */
static const fp8_tensor *plain(struct rig_case *c, bool read, int tensor)
{
    return read ? &c->tensor[tensor].t : NULL;
}

static bool wgrad_is_plain(const struct rig_case *c)
{
    const struct rig_spec *spec = &c->layer->spec;
    return spec->bf16 || spec->recipe == RIG_ROWWISE_HP_WGRAD;
}

void rig_case_weight(struct rig_case *c)
{
    if (c->layer->spec.bf16)
        return; /* there is nothing to quantise */
    fp8_weight_args args = FP8_WEIGHT_ARGS_INIT;
    args.w = &c->tensor[RIG_W].t;
    args.version = c->version;
    args.weight = &c->weight.op;
    args.found_inf = found_inf_of(c);
    args.call = rig_case_call(c);
    RIG_OK(fp8_weight_update(c->layer->handle, &args));
}

void rig_case_fprop(struct rig_case *c)
{
    fp8_fprop_args args = FP8_FPROP_ARGS_INIT;
    args.x = &c->tensor[RIG_X].t;
    args.weight = c->layer->spec.bf16 ? NULL : &c->weight.op;
    args.w = plain(c, c->layer->spec.bf16, RIG_W);
    args.bias = c->layer->info.has_bias ? &c->tensor[RIG_BIAS].t : NULL;
    args.y = &c->tensor[RIG_Y].t;
    args.saved = &c->saved.op;
    args.found_inf = c->layer->spec.bf16 ? NULL : found_inf_of(c);
    args.call = rig_case_call(c);
    RIG_OK(fp8_layer_fprop(c->layer->handle, &args));
}

static const fp8_tensor *dbias_of(struct rig_case *c)
{
    return c->layer->info.has_bias ? &c->tensor[RIG_DBIAS].t : NULL;
}

static void backward_in_parts(struct rig_case *c)
{
    fp8_quantize_dy_args quantize = FP8_QUANTIZE_DY_ARGS_INIT;
    quantize.dy = &c->tensor[RIG_DY].t;
    quantize.saved = &c->saved.op;
    quantize.grad = &c->grad.op;
    quantize.dbias = dbias_of(c);
    quantize.accumulate_dbias = c->accumulate && c->layer->info.has_bias;
    quantize.found_inf = found_inf_of_dy(c);
    quantize.call = rig_case_call(c);
    RIG_OK(fp8_layer_quantize_dy(c->layer->handle, &quantize));

    fp8_wgrad_args wgrad = FP8_WGRAD_ARGS_INIT;
    wgrad.accumulate = c->accumulate;
    wgrad.saved = &c->saved.op;
    wgrad.grad = &c->grad.op;
    wgrad.x = plain(c, wgrad_is_plain(c), RIG_X);
    wgrad.dy = plain(c, wgrad_is_plain(c), RIG_DY);
    wgrad.dw = &c->tensor[RIG_DW].t;
    wgrad.call = rig_case_call(c);
    RIG_OK(fp8_layer_wgrad(c->layer->handle, &wgrad));

    fp8_dgrad_args dgrad = FP8_DGRAD_ARGS_INIT;
    dgrad.grad = &c->grad.op;
    dgrad.weight = c->layer->spec.bf16 ? NULL : &c->weight.op;
    dgrad.dy = plain(c, c->layer->spec.bf16, RIG_DY);
    dgrad.w = plain(c, c->layer->spec.bf16, RIG_W);
    dgrad.dx = &c->tensor[RIG_DX].t;
    dgrad.call = rig_case_call(c);
    RIG_OK(fp8_layer_dgrad(c->layer->handle, &dgrad));
}

void rig_case_backward(struct rig_case *c)
{
    if (!c->one_backward) {
        backward_in_parts(c);
        return;
    }
    fp8_backward_args args = FP8_BACKWARD_ARGS_INIT;
    args.accumulate_dw = args.accumulate_dbias = c->accumulate;
    args.dy = &c->tensor[RIG_DY].t;
    args.saved = &c->saved.op;
    args.weight = c->layer->spec.bf16 ? NULL : &c->weight.op;
    args.x = plain(c, wgrad_is_plain(c), RIG_X);
    args.w = plain(c, c->layer->spec.bf16, RIG_W);
    args.grad = &c->grad.op;
    args.dbias = dbias_of(c);
    args.dw = &c->tensor[RIG_DW].t;
    args.dx = &c->tensor[RIG_DX].t;
    args.found_inf = found_inf_of_dy(c);
    args.call = rig_case_call(c);
    RIG_OK(fp8_layer_backward(c->layer->handle, &args));
}

static void run_once(struct rig_case *c)
{
    rig_case_push(c);
    rig_case_weight(c);
    rig_case_fprop(c);
    rig_case_backward(c);
    RIG_OK(fp8_stream_synchronize(rig.context, c->stream));
}

void rig_case_run(struct rig_case *c)
{
    if (c->state != NULL) {
        run_once(c);
        rig_case_advance(c);
        c->version++;
    }
    run_once(c);
}

/* ---- delayed ---- */

/* The scale that the images give the tensor of a role in the next step. */
static float next_scale(const struct rig_case *c, fp8_role role, int tensor)
{
    struct rig_quantized q;
    bool e4m3 = rig_is_e4m3(&c->layer->spec, role);
    rig_quantize(&q, &c->tensor[tensor], e4m3, c->layer->spec.power_of_two);
    float scale = q.amax > 0 ? q.scale : c->known[role - FP8_ROLE_X];
    rig_quantized_free(&q);
    return scale;
}

void rig_case_advance(struct rig_case *c)
{
    RIG_OK(fp8_state_advance(c->state, c->stream));
    if (c->tokens > 0) {
        c->known[0] = next_scale(c, FP8_ROLE_X, RIG_X);
        c->known[2] = next_scale(c, FP8_ROLE_DY, RIG_DY);
    }
    c->known[1] = next_scale(c, FP8_ROLE_W, RIG_W);
}

static void check_products(struct rig_case *c, const struct rig_quantized *x,
                           const struct rig_quantized *w, const struct rig_quantized *dy)
{
    const struct rig_spec *spec = &c->layer->spec;
    struct rig_product fprop = {
        .name = "y = x w^T",
        .a = x,
        .b = w,
        .bias = c->layer->info.has_bias ? &c->tensor[RIG_BIAS] : NULL,
        .out = &c->tensor[RIG_Y],
        .fast = rig_is_fast(spec, FP8_PASS_FPROP),
        .bf16 = spec->bf16,
        .centred = c->centred,
        .level = c->level,
    };
    struct rig_product dgrad = {
        .name = "dx = dy w",
        .a = dy,
        .b = w,
        .b_transposed = true,
        .out = &c->tensor[RIG_DX],
        .fast = rig_is_fast(spec, FP8_PASS_DGRAD),
        .bf16 = spec->bf16,
        .centred = c->centred,
        .level = c->level,
    };
    struct rig_product wgrad = {
        .name = "dw = dy^T x",
        .a = dy,
        .b = x,
        .a_transposed = true,
        .b_transposed = true,
        .out = &c->tensor[RIG_DW],
        .before = c->accumulate ? c->before[RIG_DW] : NULL,
        .fast = rig_is_fast(spec, FP8_PASS_WGRAD),
        .bf16 = spec->bf16 || spec->recipe == RIG_ROWWISE_HP_WGRAD,
        .centred = c->centred,
        .level = c->level,
    };
    c->error[0] = rig_check_product(&fprop);
    c->error[1] = rig_check_product(&dgrad);
    c->error[2] = rig_check_product(&wgrad);
}

void rig_case_check(struct rig_case *c)
{
    static const int inputs[] = { RIG_X, RIG_W, RIG_BIAS, RIG_DY };
    static const int outputs[] = { RIG_Y, RIG_DX, RIG_DW, RIG_DBIAS, RIG_FOUND_INF };
    const struct rig_layer *layer = c->layer;
    for (size_t i = 0; i < sizeof inputs / sizeof inputs[0]; i++)
        rig_tensor_unchanged(&c->tensor[inputs[i]]);
    if (!c->layer->info.has_bias)
        rig_tensor_unchanged(&c->tensor[RIG_DBIAS]);
    for (size_t i = 0; i < sizeof outputs / sizeof outputs[0]; i++)
        rig_tensor_pull(&c->tensor[outputs[i]]);
    rig_scratch_check(&c->workspace, "workspace");

    struct rig_quantized x, w, dy;
    const float *known = c->state != NULL ? c->known : NULL;
    rig_quantize_role(&x, layer, FP8_ROLE_X, &c->tensor[RIG_X], known);
    rig_quantize_role(&w, layer, FP8_ROLE_W, &c->tensor[RIG_W], known ? known + 1 : NULL);
    rig_quantize_role(&dy, layer, FP8_ROLE_DY, &c->tensor[RIG_DY], known ? known + 2 : NULL);
    rig_check_operand("saved", &c->saved, &x);
    if (!layer->spec.bf16)
        rig_check_operand("weight", &c->weight, &w);
    rig_check_operand("grad", &c->grad, &dy);
    assert_int_equal(c->saved.op.copies, rig_copies(layer, FP8_ROLE_X, FP8_COPY_TRANSPOSED));
    assert_int_equal(c->weight.op.copies, rig_copies(layer, FP8_ROLE_W, FP8_COPY_BOTH));
    assert_int_equal(c->grad.op.copies, rig_copies(layer, FP8_ROLE_DY, FP8_COPY_BOTH));
    if (!layer->spec.bf16) {
        assert_int_equal(c->saved.op.version, c->version);
        assert_int_equal(c->weight.op.version, c->version);
        assert_int_equal(c->grad.op.version, c->version);
    }
    check_products(c, &x, &w, &dy);
    if (c->layer->info.has_bias)
        rig_check_dbias(c);
    bool bad = x.found_inf || w.found_inf || dy.found_inf;
    if (layer->spec.bf16) /* only the sums of dbias read a tensor beside the products */
        bad = dy.found_inf && layer->info.has_bias;
    assert_int_equal(rig_bits(&c->tensor[RIG_FOUND_INF], 0, 0), bad ? 1 : 0);
    rig_quantized_free(&x);
    rig_quantized_free(&w);
    rig_quantized_free(&dy);
}

void rig_case_complete(struct rig_case *c)
{
    rig_case_make(c);
    rig_case_run(c);
    rig_case_check(c);
}

void rig_case_free(struct rig_case *c)
{
    for (int i = 0; i < RIG_TENSORS; i++) {
        rig_tensor_free(&c->tensor[i]);
        free(c->before[i]);
    }
    rig_operand_free(&c->saved);
    rig_operand_free(&c->weight);
    rig_operand_free(&c->grad);
    rig_scratch_free(&c->workspace);
    fp8_state_destroy(c->state);
    c->state = NULL;
}

void rig_case_all(const struct rig_layer *layer, int64_t tokens, uint64_t seed, uint8_t poison)
{
    struct rig_case c;
    rig_case_init(&c, layer, tokens, seed);
    c.poison = poison;
    rig_case_complete(&c);
    rig_case_free(&c);
}
