/*
 * cuda_rig.c - see cuda_rig.h.
 */
#include "tests/bundle/cuda_rig.h"

#include "runtime/bundle_format.h"
#include "runtime/fp8_format.h"

/* ---- a pair of contexts with the same bundle ---- */

struct side cuda_open(int32_t device, const char *folder, const char *layer)
{
    struct side side;
    side.context = bundle_context(device);
    EXPECT_OK(fp8_bundle_open(side.context, folder, &side.bundle));
    EXPECT_OK(fp8_layer_create(side.bundle, layer, &side.layer));
    return side;
}

void cuda_close(struct side *side)
{
    fp8_layer_destroy(side->layer);
    fp8_bundle_close(side->bundle);
    fp8_context_destroy(side->context);
}

/* The fake needs little gemm workspace, and filling 64 MiB with poison for each run takes long. */
static void shrink_workspace(json_t *manifest)
{
    size_t i, j;
    json_t *layer, *buffer;
    json_array_foreach(bundle_at(manifest, "layers"), i, layer)
    {
        json_array_foreach(json_object_get(layer, "buffers"), j, buffer)
        {
            if (strcmp(json_string_value(json_object_get(buffer, "name")), "gemm_workspace") == 0)
                json_object_set_new(buffer, "cols", json_integer(4096));
        }
    }
}

char *cuda_bundle_for(json_t *manifest, const char *arch)
{
    char *folder = bundle_folder();
    bundle_add_arch(manifest, folder, arch);
    bundle_seal(manifest);
    bundle_write(manifest, folder);
    char *text = json_dumps(manifest, 0);
    bundle_execute(text);
    free(text);
    json_decref(manifest);
    return folder;
}

char *cuda_bundle(json_t *manifest)
{
    shrink_workspace(manifest);
    return cuda_bundle_for(manifest, "sm_90a");
}

/* ---- data ---- */

static uint64_t seed;

static int small_integer(void)
{
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    return (int)(seed >> 60) % 8 * (seed >> 40 & 1 ? 1 : -1);
}

static void store(void *at, fp8_dtype dtype, float value)
{
    uint32_t bits;
    memcpy(&bits, &value, 4);
    if (dtype == FP8_DTYPE_FP32)
        memcpy(at, &bits, 4);
    else if (dtype == FP8_DTYPE_FP16)
        *(uint16_t *)at = fp8_float_to_fp16(value);
    else
        *(uint16_t *)at = (uint16_t)(bits >> 16);
}

struct matrix cuda_tensor(int64_t rows, int64_t cols, int64_t ld, fp8_dtype dtype, int64_t shift)
{
    struct matrix m = { .tensor = { .rows = rows, .cols = cols, .ld = ld, .dtype = dtype } };
    size_t front = (size_t)shift * fp8_dtype_bytes(dtype);
    m.bytes = rows > 0 ? (size_t)((rows - 1) * ld + cols) * fp8_dtype_bytes(dtype) : 0;
    void *block = NULL;
    assert_int_equal(posix_memalign(&block, 256, front + m.bytes ? front + m.bytes : 1), 0);
    m.block = block;
    m.tensor.data = m.block + front;
    memset(m.block, 0x7b, front + m.bytes);
    return m;
}

void cuda_fill(struct matrix *m)
{
    size_t element = fp8_dtype_bytes(m->tensor.dtype);
    for (int64_t i = 0; i < m->tensor.rows; i++) {
        for (int64_t j = 0; j < m->tensor.cols; j++)
            store((char *)m->tensor.data + (size_t)(i * m->tensor.ld + j) * element,
                  m->tensor.dtype, i + j == 0 ? 7.0f : (float)small_integer());
    }
}

void *cuda_block(size_t bytes)
{
    void *memory = NULL;
    assert_int_equal(posix_memalign(&memory, 256, bytes ? bytes : 1), 0);
    memset(memory, 0xff, bytes);
    return memory;
}

/* ---- one run of everything ---- */

fp8_call cuda_call(const struct side *side, int64_t tokens, char **workspace, size_t offset)
{
    fp8_call call = FP8_CALL_INIT;
    EXPECT_OK(fp8_layer_bytes(side->layer, tokens, FP8_BYTES_WORKSPACE, &call.workspace_bytes));
    *workspace = cuda_block(call.workspace_bytes + offset);
    call.workspace = *workspace + offset;
    return call;
}

fp8_operand cuda_operand(const struct side *side, int64_t tokens, fp8_bytes which)
{
    fp8_operand operand = FP8_OPERAND_INIT;
    EXPECT_OK(fp8_layer_bytes(side->layer, tokens, which, &operand.bytes));
    operand.data = cuda_block(operand.bytes);
    return operand;
}

void cuda_run_all(const struct side *side, struct shape s, struct outputs *out)
{
    fp8_layer_info info = { .size = sizeof info };
    EXPECT_OK(fp8_layer_describe(side->layer, &info));
    const int64_t m = s.tokens, n = info.out_features, k = info.in_features;
    seed = 99;
    struct matrix x = cuda_tensor(m, k, k + s.gap, info.x_dtype, s.shift);
    struct matrix w = cuda_tensor(n, k, k + s.gap, info.w_dtype, s.shift);
    struct matrix dy = cuda_tensor(m, n, n + s.gap, info.dy_dtype, s.shift);
    struct matrix bias = cuda_tensor(1, n, n, FP8_DTYPE_BF16, s.shift);
    out->y = cuda_tensor(m, n, n + s.gap, info.y_dtype, s.shift);
    out->dx = cuda_tensor(m, k, k + s.gap, info.dx_dtype, s.shift);
    out->dw = cuda_tensor(n, k, k + s.gap, info.dw_dtype, s.shift);
    out->dbias = cuda_tensor(1, n, n, FP8_DTYPE_FP32, s.shift);
    out->x32 = cuda_tensor(m, k, k + s.gap, FP8_DTYPE_FP32, s.shift);
    out->found_inf = 0;
    cuda_fill(&x), cuda_fill(&w), cuda_fill(&dy), cuda_fill(&bias);
    if (s.accumulate)
        cuda_fill(&out->dw), cuda_fill(&out->dbias);
    fp8_operand weight = cuda_operand(side, 0, FP8_BYTES_WEIGHT);
    fp8_operand saved = cuda_operand(side, m, FP8_BYTES_SAVED),
                grad = cuda_operand(side, m, FP8_BYTES_GRAD);
    char *workspace;
    const fp8_call call = cuda_call(side, m, &workspace, (size_t)s.shift * 2);

    const bool bf16 = info.x_format == FP8_DTYPE_NONE;
    const bool plain_wgrad = bf16 || strcmp(info.recipe, "rowwise_hp_wgrad") == 0;
    fp8_weight_args update = FP8_WEIGHT_ARGS_INIT;
    update.w = &w.tensor, update.version = 3, update.weight = &weight, update.call = call;
    update.found_inf = &out->found_inf;
    if (!bf16)
        EXPECT_OK(fp8_weight_update(side->layer, &update));
    fp8_fprop_args fprop = FP8_FPROP_ARGS_INIT;
    fprop.x = &x.tensor, fprop.weight = &weight, fprop.y = &out->y.tensor, fprop.saved = &saved;
    fprop.bias = info.has_bias ? &bias.tensor : NULL, fprop.call = call;
    fprop.found_inf = &out->found_inf;
    if (bf16)
        fprop.weight = NULL, fprop.w = &w.tensor, fprop.found_inf = NULL;
    EXPECT_OK(fp8_layer_fprop(side->layer, &fprop));
    if (!bf16)
        assert_int_equal(saved.version, 3);
    fp8_backward_args backward = FP8_BACKWARD_ARGS_INIT;
    backward.dy = &dy.tensor, backward.saved = &saved, backward.weight = &weight;
    backward.grad = &grad, backward.dw = &out->dw.tensor, backward.dx = &out->dx.tensor;
    backward.dbias = info.has_bias ? &out->dbias.tensor : NULL,
    backward.accumulate_dw = backward.accumulate_dbias = s.accumulate;
    backward.call = call;
    if (plain_wgrad)
        backward.x = &x.tensor;
    if (bf16)
        backward.weight = NULL, backward.w = &w.tensor;
    EXPECT_OK(fp8_layer_backward(side->layer, &backward));
    if (!bf16) {
        assert_int_equal(grad.version, 3);
        assert_int_equal(grad.role, FP8_ROLE_DY);
    }
    fp8_dequantize_args dequantize = FP8_DEQUANTIZE_ARGS_INIT;
    dequantize.operand = &saved, dequantize.target = &out->x32.tensor;
    if (!plain_wgrad) /* else saved has no copies */
        EXPECT_OK(fp8_dequantize(side->layer, &dequantize));
    free(weight.data), free(saved.data), free(grad.data), free(workspace);
    free(x.block), free(w.block), free(dy.block), free(bias.block);
}

static void same(struct matrix *a, struct matrix *b, const char *name, struct shape s)
{
    if (memcmp(a->tensor.data, b->tensor.data, a->bytes) != 0)
        fail_msg("%s differs: M %lld, gap %lld, shift %lld, accumulate %d", name,
                 (long long)s.tokens, (long long)s.gap, (long long)s.shift, s.accumulate);
    free(a->block);
    free(b->block);
}

void cuda_compare(const struct side *host, const struct side *device, struct shape s)
{
    struct outputs a, b;
    cuda_run_all(host, s, &a);
    cuda_run_all(device, s, &b);
    same(&a.y, &b.y, "y", s);
    same(&a.dx, &b.dx, "dx", s);
    same(&a.dw, &b.dw, "dw", s);
    same(&a.dbias, &b.dbias, "dbias", s);
    same(&a.x32, &b.x32, "dequantised x", s);
    assert_int_equal(a.found_inf, b.found_inf);
    assert_int_equal(bundle_fake_cuda()->misuse, 0);
    assert_int_equal(bundle_fake_cuda()->depth, 0);
    assert_int_equal(bundle_fake_cuda()->rules, 0);
    assert_int_equal(bundle_fake_lt()->rules, 0);
}

void cuda_run_shapes(json_t *manifest, const char *layer)
{
    static const int64_t tokens[] = { 0, 1, 2, 17, 40, 129, 300 };
    static const int64_t gaps[] = { 0, 1, 8 };
    static const int64_t shifts[] = { 0, 1, 8 };
    char *folder = cuda_bundle(manifest);
    struct side host = cuda_open(FP8_DEVICE_HOST, folder, layer);
    struct side device = cuda_open(0, folder, layer);
    for (int i = 0; i < 7; i++) {
        for (int j = 0; j < 9; j++) {
            struct shape s = { tokens[i], gaps[j % 3], shifts[j / 3], (i + j) % 2 };
            cuda_compare(&host, &device, s);
        }
    }
    cuda_close(&device);
    cuda_close(&host);
    assert_int_equal(bundle_fake_cuda()->live, 0);
    assert_int_equal(bundle_fake_lt()->live, 0);
    bundle_remove(folder);
}
