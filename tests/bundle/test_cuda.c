/*
 * test_cuda.c - the CUDA path without a GPU: every pass on the fake driver gives the host context's bits.
 *
 * All values are small integers and every tensor holds one 7, so that scales are powers of two, casts and
 * sums are exact and each path, staged or not, must give the same bits. Tensors lie in blocks of exact size
 * at every alignment, so the sanitizer sees any access outside.
 */
#include "tests/bundle/bundle_rig.h"

#include "runtime/bundle_format.h"
#include "runtime/fp8.h"

static struct fake_cuda *cuda;
static struct fake_lt *lt;

/* ---- a pair of contexts with the same bundle ---- */

struct side {
    fp8_context *context;
    fp8_bundle *bundle;
    fp8_layer *layer;
};

static struct side open_side(int32_t device, const char *folder, const char *layer)
{
    struct side side;
    side.context = bundle_context(device);
    EXPECT_OK(fp8_bundle_open(side.context, folder, &side.bundle));
    EXPECT_OK(fp8_layer_create(side.bundle, layer, &side.layer));
    return side;
}

static void close_side(struct side *side)
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

static char *write_bundle(json_t *manifest)
{
    char *folder = bundle_folder();
    shrink_workspace(manifest);
    bundle_add_arch(manifest, folder, "sm_90a");
    bundle_seal(manifest);
    bundle_write(manifest, folder);
    char *text = json_dumps(manifest, 0);
    bundle_execute(text);
    free(text);
    json_decref(manifest);
    return folder;
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
    else
        *(uint16_t *)at = (uint16_t)(bits >> 16);
}

/* A tensor in a block of exactly its bytes, `shift` elements behind an aligned address. */
struct matrix {
    fp8_tensor tensor;
    char *block;
    size_t bytes;
};

static struct matrix make(int64_t rows, int64_t cols, int64_t ld, fp8_dtype dtype, int64_t shift)
{
    struct matrix m = {.tensor = {.rows = rows, .cols = cols, .ld = ld, .dtype = dtype}};
    size_t front = (size_t)shift * fp8_dtype_bytes(dtype);
    m.bytes = rows > 0 ? (size_t)((rows - 1) * ld + cols) * fp8_dtype_bytes(dtype) : 0;
    void *block = NULL;
    assert_int_equal(posix_memalign(&block, 256, front + m.bytes ? front + m.bytes : 1), 0);
    m.block = block;
    m.tensor.data = m.block + front;
    memset(m.block, 0x7b, front + m.bytes);
    return m;
}

static void fill(struct matrix *m)
{
    size_t element = fp8_dtype_bytes(m->tensor.dtype);
    for (int64_t i = 0; i < m->tensor.rows; i++) {
        for (int64_t j = 0; j < m->tensor.cols; j++)
            store((char *)m->tensor.data + (size_t)(i * m->tensor.ld + j) * element, m->tensor.dtype,
                  i + j == 0 ? 7.0f : (float)small_integer());
    }
}

static void *aligned_block(size_t bytes)
{
    void *memory = NULL;
    assert_int_equal(posix_memalign(&memory, 256, bytes ? bytes : 1), 0);
    memset(memory, 0xff, bytes);
    return memory;
}

/* ---- one run of everything ---- */

struct shape {
    int64_t tokens;
    int64_t gap;   /* ld = cols + gap */
    int64_t shift; /* elements */
    bool accumulate;
};

struct outputs {
    struct matrix y, dx, dw, dbias, x32;
    uint32_t found_inf;
};

static fp8_call call_of(const struct side *side, int64_t tokens, char **workspace, size_t offset)
{
    fp8_call call = FP8_CALL_INIT;
    EXPECT_OK(fp8_layer_bytes(side->layer, tokens, FP8_BYTES_WORKSPACE, &call.workspace_bytes));
    *workspace = aligned_block(call.workspace_bytes + offset);
    call.workspace = *workspace + offset;
    return call;
}

static fp8_operand operand_of(const struct side *side, int64_t tokens, fp8_bytes which)
{
    fp8_operand operand = FP8_OPERAND_INIT;
    EXPECT_OK(fp8_layer_bytes(side->layer, tokens, which, &operand.bytes));
    operand.data = aligned_block(operand.bytes);
    return operand;
}

static void run_all(const struct side *side, struct shape s, struct outputs *out)
{
    fp8_layer_info info = {.size = sizeof info};
    EXPECT_OK(fp8_layer_describe(side->layer, &info));
    const int64_t m = s.tokens, n = info.out_features, k = info.in_features;
    seed = 99;
    struct matrix x = make(m, k, k + s.gap, info.x_dtype, s.shift);
    struct matrix w = make(n, k, k + s.gap, info.w_dtype, s.shift);
    struct matrix dy = make(m, n, n + s.gap, info.dy_dtype, s.shift);
    struct matrix bias = make(1, n, n, FP8_DTYPE_BF16, s.shift);
    out->y = make(m, n, n + s.gap, info.y_dtype, s.shift);
    out->dx = make(m, k, k + s.gap, info.dx_dtype, s.shift);
    out->dw = make(n, k, k + s.gap, info.dw_dtype, s.shift);
    out->dbias = make(1, n, n, FP8_DTYPE_FP32, s.shift);
    out->x32 = make(m, k, k + s.gap, FP8_DTYPE_FP32, s.shift);
    out->found_inf = 0;
    fill(&x), fill(&w), fill(&dy), fill(&bias);
    if (s.accumulate) fill(&out->dw), fill(&out->dbias);
    fp8_operand weight = operand_of(side, 0, FP8_BYTES_WEIGHT);
    fp8_operand saved = operand_of(side, m, FP8_BYTES_SAVED), grad = operand_of(side, m, FP8_BYTES_GRAD);
    char *workspace;
    const fp8_call call = call_of(side, m, &workspace, (size_t)s.shift * 2);

    fp8_weight_args update = FP8_WEIGHT_ARGS_INIT;
    update.w = &w.tensor, update.version = 3, update.weight = &weight, update.call = call;
    update.found_inf = &out->found_inf;
    EXPECT_OK(fp8_weight_update(side->layer, &update));
    fp8_fprop_args fprop = FP8_FPROP_ARGS_INIT;
    fprop.x = &x.tensor, fprop.weight = &weight, fprop.y = &out->y.tensor, fprop.saved = &saved;
    fprop.bias = info.has_bias ? &bias.tensor : NULL, fprop.call = call;
    fprop.found_inf = &out->found_inf;
    EXPECT_OK(fp8_layer_fprop(side->layer, &fprop));
    assert_int_equal(saved.version, 3);
    fp8_backward_args backward = FP8_BACKWARD_ARGS_INIT;
    backward.dy = &dy.tensor, backward.saved = &saved, backward.weight = &weight;
    backward.grad = &grad, backward.dw = &out->dw.tensor, backward.dx = &out->dx.tensor;
    backward.dbias = info.has_bias ? &out->dbias.tensor : NULL, backward.accumulate = s.accumulate;
    backward.call = call;
    EXPECT_OK(fp8_layer_backward(side->layer, &backward));
    assert_int_equal(grad.version, 3);
    assert_int_equal(grad.role, FP8_ROLE_DY);
    fp8_dequantize_args dequantize = FP8_DEQUANTIZE_ARGS_INIT;
    dequantize.operand = &saved, dequantize.target = &out->x32.tensor;
    EXPECT_OK(fp8_dequantize(side->layer, &dequantize));
    free(weight.data), free(saved.data), free(grad.data), free(workspace);
    free(x.block), free(w.block), free(dy.block), free(bias.block);
}

static void same(struct matrix *a, struct matrix *b, const char *name, struct shape s)
{
    if (memcmp(a->tensor.data, b->tensor.data, a->bytes) != 0)
        fail_msg("%s differs: M %lld, gap %lld, shift %lld, accumulate %d", name, (long long)s.tokens,
                 (long long)s.gap, (long long)s.shift, s.accumulate);
    free(a->block);
    free(b->block);
}

static void compare(const struct side *host, const struct side *device, struct shape s)
{
    struct outputs a, b;
    run_all(host, s, &a);
    run_all(device, s, &b);
    same(&a.y, &b.y, "y", s);
    same(&a.dx, &b.dx, "dx", s);
    same(&a.dw, &b.dw, "dw", s);
    same(&a.dbias, &b.dbias, "dbias", s);
    same(&a.x32, &b.x32, "dequantised x", s);
    assert_int_equal(a.found_inf, b.found_inf);
    assert_int_equal(cuda->misuse, 0);
    assert_int_equal(cuda->depth, 0);
    assert_int_equal(lt->rules, 0);
}

static void run_shapes(json_t *manifest, const char *layer)
{
    static const int64_t tokens[] = {0, 1, 2, 17, 40, 129, 300};
    static const int64_t gaps[] = {0, 1, 8};
    static const int64_t shifts[] = {0, 1, 8};
    char *folder = write_bundle(manifest);
    struct side host = open_side(FP8_DEVICE_HOST, folder, layer);
    struct side device = open_side(0, folder, layer);
    for (int i = 0; i < 7; i++) {
        for (int j = 0; j < 9; j++) {
            struct shape s = {tokens[i], gaps[j % 3], shifts[j / 3], (i + j) % 2};
            compare(&host, &device, s);
        }
    }
    close_side(&device);
    close_side(&host);
    assert_int_equal(cuda->live, 0);
    assert_int_equal(lt->live, 0);
    bundle_remove(folder);
}

static void every_layer_gives_the_bits_of_the_host(void **state)
{
    (void)state;
    static const char *const layers[] = {"plain", "bias", "wide", "e4m3"};
    for (int i = 0; i < 4; i++) run_shapes(bundle_manifest(), layers[i]);
}

static int find_buffer(json_t *manifest, const char *name)
{
    size_t index;
    json_t *buffer;
    json_array_foreach(bundle_at(manifest, "layers.1.buffers"), index, buffer)
    {
        if (strcmp(json_string_value(json_object_get(buffer, "name")), name) == 0) return (int)index;
    }
    return -1;
}

static void small_stages_are_filled_in_chunks(void **state)
{
    (void)state;
    static const char *const stages[] = {"y_stage", "dx_stage", "dw_stage"};
    for (int rows = 1; rows <= 5; rows += 4) {
        json_t *manifest = bundle_manifest();
        for (int i = 0; i < 3; i++) {
            char path[80];
            snprintf(path, sizeof path, "layers.1.buffers.%d.rows", find_buffer(manifest, stages[i]));
            bundle_set(manifest, path,
                       i < 2 ? json_pack("{s:s, s:i}", "of", "M", "max", rows) : json_integer(rows));
        }
        run_shapes(manifest, "bias");
    }
}

/* Kernels may take their arguments in any order, and need not take all. */
static void arguments_are_packed_by_name(void **state)
{
    (void)state;
    json_t *manifest = bundle_manifest();
    size_t index;
    json_t *kernel;
    json_array_foreach(bundle_at(manifest, "kernels"), index, kernel)
    {
        json_t *args = json_object_get(kernel, "args"), *turned = json_array();
        for (size_t i = json_array_size(args); i-- > 0;) json_array_append(turned, json_array_get(args, i));
        json_object_set_new(kernel, "args", turned);
    }
    run_shapes(manifest, "bias");
}

/* ---- the choice of algorithms ---- */

static void run_once(const struct side *host, const struct side *device, int64_t tokens)
{
    compare(host, device, (struct shape){tokens, 0, 0, true});
}

static void a_refusing_algorithm_is_passed_over(void **state)
{
    (void)state;
    char *folder = write_bundle(bundle_manifest());
    struct side host = open_side(FP8_DEVICE_HOST, folder, "bias");
    struct side device = open_side(0, folder, "bias");
    lt->refusing = 2;
    lt->refusals = 0;
    int64_t queries = lt->queries;
    run_once(&host, &device, 40);
    assert_int_equal(lt->last_algorithm, 2);
    assert_true(lt->refusals > 0);
    assert_int_equal(lt->queries, queries);
    lt->refusals = 0;
    run_once(&host, &device, 40); /* the good ones are remembered */
    assert_int_equal(lt->refusals, 0);
    lt->refusing = 3; /* all that were offered at creation, and then some */
    lt->offered = 5;
    run_once(&host, &device, 40);
    assert_int_equal(lt->last_algorithm, 3);
    assert_true(lt->queries > queries);
    lt->refusing = 100;
    fp8_operand weight = operand_of(&device, 0, FP8_BYTES_WEIGHT);
    fp8_operand grad = operand_of(&device, 4, FP8_BYTES_GRAD);
    struct matrix w = make(37, 50, 50, FP8_DTYPE_BF16, 0), dy = make(4, 37, 37, FP8_DTYPE_BF16, 0);
    struct matrix dx = make(4, 50, 50, FP8_DTYPE_BF16, 0);
    char *workspace;
    fp8_call call = call_of(&device, 4, &workspace, 0);
    fp8_quantize_args quantize = FP8_QUANTIZE_ARGS_INIT;
    quantize.role = FP8_ROLE_W, quantize.source = &w.tensor, quantize.operand = &weight;
    quantize.call = call;
    EXPECT_OK(fp8_quantize(device.layer, &quantize));
    quantize.role = FP8_ROLE_DY, quantize.source = &dy.tensor, quantize.operand = &grad;
    EXPECT_OK(fp8_quantize(device.layer, &quantize));
    fp8_dgrad_args dgrad = FP8_DGRAD_ARGS_INIT;
    dgrad.grad = &grad, dgrad.weight = &weight, dgrad.dx = &dx.tensor, dgrad.call = call;
    EXPECT_REFUSED(FP8_ERR_CUBLASLT, "CUBLAS_STATUS_NOT_SUPPORTED", fp8_layer_dgrad(device.layer, &dgrad));
    lt->refusing = 0;
    lt->offered = 3;
    EXPECT_OK(fp8_layer_dgrad(device.layer, &dgrad));
    free(weight.data), free(grad.data), free(w.block), free(dy.block), free(dx.block), free(workspace);
    close_side(&device);
    close_side(&host);
    bundle_remove(folder);
}

static void a_layer_without_algorithms_is_refused_at_creation(void **state)
{
    (void)state;
    char *folder = write_bundle(bundle_manifest());
    struct side device = open_side(0, folder, "plain");
    fp8_layer *layer;
    lt->no_algorithm = true;
    EXPECT_REFUSED(FP8_ERR_CUBLASLT, "offers no algorithm", fp8_layer_create(device.bundle, "bias", &layer));
    assert_null(layer);
    lt->no_algorithm = false;
    lt->no_bias = true;
    EXPECT_REFUSED(FP8_ERR_CUBLASLT, "with bias", fp8_layer_create(device.bundle, "bias", &layer));
    lt->no_bias = false;
    close_side(&device);
    bundle_remove(folder);
}

static int lines;
static void count_line(void *user, fp8_log_level level, const char *message)
{
    (void)user;
    assert_true(level == FP8_LOG_DISPATCH);
    assert_non_null(strstr(message, "layer 'bias'"));
    lines++;
}

static void dispatch_is_told(void **state)
{
    (void)state;
    char *folder = write_bundle(bundle_manifest());
    fp8_context_options options = FP8_CONTEXT_OPTIONS_INIT;
    options.log = count_line;
    options.log_levels = 1u << FP8_LOG_DISPATCH;
    options.max_sms = 20;
    struct side side;
    EXPECT_OK(fp8_context_create(&options, &side.context));
    EXPECT_OK(fp8_bundle_open(side.context, folder, &side.bundle));
    EXPECT_OK(fp8_layer_create(side.bundle, "bias", &side.layer));
    assert_true(lines > 10);
    for (int pass = 0; pass < FP8_PASS_COUNT; pass++) {
        fp8_dispatch dispatch = FP8_DISPATCH_INIT;
        EXPECT_OK(fp8_layer_dispatch(side.layer, (fp8_pass)pass, 40, &dispatch));
        assert_true(dispatch.launches >= 2);
        assert_true(strlen(dispatch.kernel) > 4 && strlen(dispatch.dtype) > 4 && strlen(dispatch.reason) > 4);
        bool gemm = pass == FP8_PASS_FPROP || pass == FP8_PASS_DGRAD || pass == FP8_PASS_WGRAD;
        assert_string_equal(dispatch.backend, gemm ? "cublaslt" : "quantize");
        if (gemm) assert_non_null(strstr(dispatch.kernel, "cublaslt algo 0"));
    }
    fp8_dispatch dispatch = FP8_DISPATCH_INIT;
    EXPECT_REFUSED(FP8_ERR_TOKENS, "max_tokens = 300",
                   fp8_layer_dispatch(side.layer, FP8_PASS_FPROP, 301, &dispatch));
    EXPECT_REFUSED(FP8_ERR_ARGUMENT, "pass is 5",
                   fp8_layer_dispatch(side.layer, FP8_PASS_COUNT, 3, &dispatch));
    struct outputs out;
    run_all(&side, (struct shape){300, 0, 0, false}, &out);
    assert_true(cuda->last_grid <= 20 * 8);
    free(out.y.block), free(out.dx.block), free(out.dw.block), free(out.dbias.block), free(out.x32.block);
    close_side(&side);
    bundle_remove(folder);
}

/* ---- errors of the driver ---- */

static void prepared_pass(const struct side *side, fp8_weight_args *update, fp8_fprop_args *fprop,
                          fp8_backward_args *backward)
{
    fp8_status status = fp8_weight_update(side->layer, update);
    if (status != FP8_OK) {
        assert_int_equal(update->weight->role, FP8_ROLE_NONE);
        assert_int_equal(update->weight->version, 0);
        assert_int_equal(update->weight->copies, 0);
        return;
    }
    status = fp8_layer_fprop(side->layer, fprop);
    if (status != FP8_OK) {
        assert_int_equal(fprop->saved->role, FP8_ROLE_NONE);
        assert_int_equal(fprop->saved->copies, 0);
        return;
    }
    status = fp8_layer_backward(side->layer, backward);
    if (status != FP8_OK) {
        assert_int_equal(backward->grad->role, FP8_ROLE_NONE);
        assert_int_equal(backward->grad->copies, 0);
    }
}

static void a_failing_pass_claims_nothing(void **state)
{
    (void)state;
    char *folder = write_bundle(bundle_manifest());
    struct side side = open_side(0, folder, "bias");
    struct matrix x = make(17, 50, 50, FP8_DTYPE_BF16, 1), w = make(37, 50, 50, FP8_DTYPE_BF16, 1);
    struct matrix y = make(17, 37, 37, FP8_DTYPE_BF16, 1), dy = make(17, 37, 37, FP8_DTYPE_BF16, 1);
    struct matrix dx = make(17, 50, 50, FP8_DTYPE_BF16, 1), dw = make(37, 50, 50, FP8_DTYPE_FP32, 1);
    struct matrix bias = make(1, 37, 37, FP8_DTYPE_BF16, 1);
    fill(&x), fill(&w), fill(&dy), fill(&bias);
    char *workspace;
    fp8_call call = call_of(&side, 17, &workspace, 0);
    int64_t failures = 0;
    for (int64_t at = 1; at < 60; at++) {
        fp8_operand weight = operand_of(&side, 0, FP8_BYTES_WEIGHT);
        fp8_operand saved = operand_of(&side, 17, FP8_BYTES_SAVED);
        fp8_operand grad = operand_of(&side, 17, FP8_BYTES_GRAD);
        fp8_weight_args update = FP8_WEIGHT_ARGS_INIT;
        update.w = &w.tensor, update.version = 1, update.weight = &weight, update.call = call;
        fp8_fprop_args fprop = FP8_FPROP_ARGS_INIT;
        fprop.x = &x.tensor, fprop.weight = &weight, fprop.y = &y.tensor, fprop.saved = &saved;
        fprop.bias = &bias.tensor, fprop.call = call;
        fp8_backward_args backward = FP8_BACKWARD_ARGS_INIT;
        backward.dy = &dy.tensor, backward.saved = &saved, backward.weight = &weight;
        backward.grad = &grad, backward.dw = &dw.tensor, backward.dx = &dx.tensor, backward.call = call;
        cuda->fail_code = 719; /* CUDA_ERROR_LAUNCH_FAILED */
        cuda->fail_at = cuda->calls + at;
        int64_t end = cuda->fail_at;
        prepared_pass(&side, &update, &fprop, &backward);
        failures += cuda->calls >= end;
        cuda->fail_at = 0;
        assert_int_equal(cuda->depth, 0);
        prepared_pass(&side, &update, &fprop, &backward); /* the layer is usable again */
        assert_int_equal(grad.role, FP8_ROLE_DY);
        free(weight.data), free(saved.data), free(grad.data);
    }
    assert_true(failures > 10);
    free(x.block), free(w.block), free(y.block), free(dy.block), free(dx.block), free(dw.block);
    free(bias.block), free(workspace);
    close_side(&side);
    bundle_remove(folder);
}

static void every_failing_call_of_creation_is_survived(void **state)
{
    (void)state;
    char *folder = write_bundle(bundle_manifest());
    bool done = false;
    for (int64_t at = 1; !done; at++) {
        fp8_context_options options = FP8_CONTEXT_OPTIONS_INIT;
        fp8_context *context;
        fp8_bundle *bundle = NULL;
        fp8_layer *layer = NULL;
        fp8_event *event = NULL;
        fp8_stream stream = NULL;
        void *memory = NULL;
        cuda->fail_code = at % 2 ? 2 : 719; /* out of memory, or a failed launch */
        cuda->fail_at = cuda->calls + at;
        fp8_status status = fp8_context_create(&options, &context);
        if (status == FP8_OK) status = fp8_bundle_open(context, folder, &bundle);
        if (status == FP8_OK) status = fp8_layer_create(bundle, "bias", &layer);
        if (status == FP8_OK) status = fp8_memory_alloc(context, 100, &memory);
        if (status == FP8_OK) status = fp8_memory_fill(context, memory, 1, 100, NULL);
        if (status == FP8_OK) status = fp8_memory_copy(context, memory, memory, 100, NULL);
        if (status == FP8_OK) status = fp8_stream_create(context, &stream);
        if (status == FP8_OK) status = fp8_event_create(context, &event);
        if (status == FP8_OK) status = fp8_event_record(event, stream);
        double seconds;
        if (status == FP8_OK) status = fp8_event_seconds(event, event, &seconds);
        if (status == FP8_OK) status = fp8_stream_synchronize(context, stream);
        done = status == FP8_OK && cuda->calls < cuda->fail_at;
        if (status != FP8_OK) {
            assert_true(status == FP8_ERR_CUDA || status == FP8_ERR_MEMORY);
            assert_non_null(strstr(fp8_last_error(), "CUDA_ERROR"));
        }
        cuda->fail_at = 0;
        fp8_event_destroy(event);
        fp8_stream_destroy(context, stream);
        fp8_memory_free(context, memory);
        fp8_layer_destroy(layer);
        fp8_bundle_close(bundle);
        fp8_context_destroy(context);
        assert_int_equal(cuda->live, 0);
        assert_int_equal(cuda->depth, 0);
        assert_int_equal(lt->live, 0);
    }
    bundle_remove(folder);
}

/* ---- devices ---- */

static void devices_that_are_not_there(void **state)
{
    (void)state;
    fp8_context_options options = FP8_CONTEXT_OPTIONS_INIT;
    fp8_context *context;
    options.device = 1;
    EXPECT_REFUSED(FP8_ERR_DEVICE, "device is 1, but this process sees 1 device",
                   fp8_context_create(&options, &context));
    assert_null(context);
    options.device = -2;
    EXPECT_REFUSED(FP8_ERR_ARGUMENT, "device is -2", fp8_context_create(&options, &context));
    options.device = 0;
    options.max_sms = -1;
    EXPECT_REFUSED(FP8_ERR_ARGUMENT, "max_sms is -1", fp8_context_create(&options, &context));
    options.size = 3;
    EXPECT_REFUSED(FP8_ERR_ARGUMENT, "size is 3", fp8_context_create(&options, &context));
    EXPECT_REFUSED(FP8_ERR_ARGUMENT, "context is NULL", fp8_context_create(NULL, NULL));
    EXPECT_OK(fp8_context_create(NULL, &context));
    fp8_device_info info = {.size = sizeof info};
    EXPECT_OK(fp8_context_info(context, &info));
    assert_int_equal(info.arch, 90);
    assert_int_equal(info.sms, 132);
    assert_int_equal(info.driver_version, 13000);
    assert_int_equal(info.cublaslt_version, 130100);
    fp8_context_destroy(context);
}

static size_t four_parameters(const char *entry, size_t index)
{
    (void)entry;
    return index < 4 ? 8 : 0;
}

static size_t small_parameters(const char *entry, size_t index)
{
    (void)entry, (void)index;
    return 4;
}

static void a_parameter_list_that_does_not_match_is_refused(void **state)
{
    (void)state;
    char *folder = write_bundle(bundle_manifest());
    fp8_context *context = bundle_context(0);
    fp8_bundle *bundle;
    cuda->parameter = four_parameters;
    EXPECT_REFUSED(FP8_ERR_BUNDLE, "lists 9 parameters, but the cubin takes fewer",
                   fp8_bundle_open(context, folder, &bundle));
    cuda->parameter = small_parameters;
    EXPECT_REFUSED(FP8_ERR_BUNDLE, "parameter 0 of the cubin has 4 bytes",
                   fp8_bundle_open(context, folder, &bundle));
    cuda->parameter = NULL;
    EXPECT_OK(fp8_bundle_open(context, folder, &bundle));
    fp8_bundle_close(bundle);
    fp8_context_destroy(context);
    assert_int_equal(cuda->live, 0);
    bundle_remove(folder);
}

int main(void)
{
    cuda = bundle_fake_cuda();
    lt = bundle_fake_lt();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(devices_that_are_not_there),
        cmocka_unit_test(every_layer_gives_the_bits_of_the_host),
        cmocka_unit_test(small_stages_are_filled_in_chunks),
        cmocka_unit_test(arguments_are_packed_by_name),
        cmocka_unit_test(a_refusing_algorithm_is_passed_over),
        cmocka_unit_test(a_layer_without_algorithms_is_refused_at_creation),
        cmocka_unit_test(dispatch_is_told),
        cmocka_unit_test(a_failing_pass_claims_nothing),
        cmocka_unit_test(every_failing_call_of_creation_is_survived),
        cmocka_unit_test(a_parameter_list_that_does_not_match_is_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
