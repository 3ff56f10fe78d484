/*
 * test_generated.c - products by kernels of the bundle, without a GPU: what is refused in their
 * records, the tensor maps of every call, the choice at creation, grids, and what the dispatch
 * query says.
 */
#include "tests/bundle/cuda_rig.h"

#include "gen/fp8gen.h"
#include "runtime/bundle_format.h"

static struct fake_cuda *cuda;
static struct fake_lt *lt;

static const char *const layers[] = { "plain", "bias", "wide", "e4m3", "half" };
enum { LAYERS = sizeof layers / sizeof layers[0] };

/* ---- records ---- */

/* The first kernel of op gemm, accumulating or not. */
static int gemm_kernel(json_t *manifest, bool accumulate)
{
    size_t index;
    json_t *kernel;
    json_array_foreach(bundle_at(manifest, "kernels"), index, kernel)
    {
        if (strcmp(json_string_value(json_object_get(kernel, "op")), "gemm") == 0 &&
            json_is_true(bundle_at(kernel, "semantics.accumulate")) == accumulate)
            return (int)index;
    }
    fail_msg("the manifest has no kernel of op gemm");
    return -1;
}

/* A change of the first gemm kernel ("kernel.") or of the manifest; NULL value: removed. */
static const struct {
    const char *path;
    const char *value; /* JSON */
    const char *sentence;
} changes[] = {
    { "kernel.semantics.second_dtype", NULL, "semantics: 'second_dtype' is missing" },
    { "kernel.semantics.accumulate", NULL, "semantics: 'accumulate' is missing" },
    { "kernel.semantics.second_dtype", "\"bf16\"", "a gemm multiplies e4m3 and e5m2, not e4m3" },
    { "kernel.semantics.target_dtype", "\"e4m3\"", "a gemm gives bf16, fp16 or fp32, not e4m3" },
    { "kernel.semantics.target_dtype", "\"e5m2\"", "a gemm gives bf16, fp16 or fp32, not e5m2" },
    { "kernel.args.0.box", NULL, "'box' is missing" },
    { "kernel.args.0.box", "[128]", "'box' is not two extents" },
    { "kernel.args.0.box", "[128, 257]", "'box' is not two extents of 1..256" },
    { "kernel.args.0.box", "[128, 0]", "'box' is not two extents" },
    { "kernel.args.0.box", "[128, 64.0]", "'box' is not two extents" },
    { "kernel.args.0.box", "[64, 128]", "the boxes of a and b are not 128 bytes wide" },
    { "kernel.args.0.box", "[128, 8]", "do not make a tile" },
    { "kernel.args.1.box", "[128, 8]", "do not make a tile" },
    { "kernel.args.2.box", "[256, 64]", "the box of out" },
    { "kernel.args.2.box", "[3, 64]", "the box of out" },
    { "kernel.args.0.type", "\"pointer\"", "unknown field 'box'" },
    { "kernel.args.0.name", "\"bias\"", "argument 'bias' is tensor_map, op 'gemm' says pointer" },
    { "kernel.args.0", "{\"name\": \"a\", \"type\": \"pointer\"}",
      "take no argument 'a' by value" },
    { "kernel.args.0", NULL, "take the argument 'a' by value, as a tensor_map" },
    { "kernel.args.3", NULL, "take the argument 'a_scales' by value" },
    { "kernel.args.11", NULL, "take the argument 'out_by_map' by value" },
    { "kernel.args.11", "{\"name\": \"accumulate\", \"type\": \"int32\"}",
      "take no argument 'accumulate' by value" },
    { "kernel.args.11.type", "\"int64\"", "'out_by_map' is int64, op 'gemm' says int32" },
    { "kernel.args.11", "{\"name\": \"tiles\", \"type\": \"pointer\"}",
      "take the argument 'epoch' by value" },
    { "kernel.args.1.name", "\"a\"", "argument 'a' occurs twice" },
    { "kernel.grid.rule", "\"tiles\"", "grid: the rule 'tiles' is not for kernels of op 'gemm'" },
    { "kernel.grid.ctas_per_sm", "1", "unknown field 'ctas_per_sm'" },
    { "kernel.grid.tile_rows", "8", "do not make a tile" },
    { "kernel.cluster", "3", "do not make a tile" },
    { "kernel.op", "\"amax\"", "op 'amax' has no argument 'a'" },
    { "choice.kernel", "\"amax_bf16\"", "implements 'amax', not 'gemm'" },
    { "choice.kernel", "\"gemm_none\"", "there is no kernel 'gemm_none'" },
    { "choice.kernel", NULL, "'kernel' names no kernel" },
    { "choice.accumulate_kernel", "\"amax_bf16\"", "the pass never accumulates" },
    { "choice.algo", "\"00\"", "unknown field 'algo'" },
    { "choice.backend", "\"cublaslt\"", "unknown field" },
    { "layers.0.passes.fprop.2.dispatch.0.choices.1", NULL, "cublaslt is the last choice" },
    { "layers.0.passes.fprop.2.args.tiles", "null", "argument 'tiles': it may not be null" },
    { "layers.0.passes.fprop.2.args.tiles", "\"gemm_workspace\"",
      "argument 'tiles': the buffer has another dtype" },
    { "layers.0.passes.fprop.2.args.epoch", "0", "argument 'epoch': it is not 'epoch'" },
    { "layers.0.passes.wgrad.0.dispatch.0.choices.0.accumulate_kernel", "null",
      "'accumulate_kernel' names no kernel" },
};

/* "kernel.x" -> "kernels.3.x", "choice.x" -> the first choice of the first step. */
static void full_path(json_t *manifest, const char *path, char *full, size_t size)
{
    if (strncmp(path, "kernel.", 7) == 0)
        snprintf(full, size, "kernels.%d.%s", gemm_kernel(manifest, false), path + 7);
    else if (strncmp(path, "choice.", 7) == 0)
        snprintf(full, size, "layers.0.passes.fprop.2.dispatch.0.choices.0.%s", path + 7);
    else
        snprintf(full, size, "%s", path);
}

static void every_change_has_its_sentence(void **state)
{
    (void)state;
    char *folder = bundle_folder();
    fp8_context *host = bundle_context(FP8_DEVICE_HOST);
    int wrong = 0;
    for (size_t i = 0; i < sizeof changes / sizeof changes[0]; i++) {
        json_t *manifest = bundle_manifest_by("generated");
        char path[160];
        fp8_bundle *bundle;
        json_t *value =
            changes[i].value ? json_loads(changes[i].value, JSON_DECODE_ANY, NULL) : NULL;
        full_path(manifest, changes[i].path, path, sizeof path);
        assert_true(!changes[i].value || value);
        bundle_set(manifest, path, value);
        bundle_seal(manifest);
        bundle_write(manifest, folder);
        fp8_status status = fp8_bundle_open(host, folder, &bundle);
        if (status != FP8_ERR_BUNDLE || !strstr(fp8_last_error(), changes[i].sentence)) {
            print_error("%s = %s: %s: %s\n", path, changes[i].value, fp8_status_name(status),
                        status == FP8_OK ? "" : fp8_last_error());
            wrong++;
        }
        fp8_bundle_close(bundle);
        json_decref(manifest);
    }
    fp8_context_destroy(host);
    bundle_remove(folder);
    assert_int_equal(wrong, 0);
}

/* Kernels of other dtypes, or of the other way to write, than their step's. */
static void a_kernel_must_be_of_its_step(void **state)
{
    (void)state;
    static const struct {
        const char *to, *from, *sentence;
    } swaps[] = {
        { "layers.0.passes.fprop.2", "layers.2.passes.fprop.2", "e4m3 x e4m3 -> fp32, the step" },
        { "layers.0.passes.dgrad.0", "layers.0.passes.fprop.2", "the step e5m2 x e4m3 -> bf16" },
        { "layers.0.passes.wgrad.0", "layers.0.passes.dgrad.0", "the step e5m2 x e4m3 -> fp32" },
    };
    char *folder = bundle_folder();
    fp8_context *host = bundle_context(FP8_DEVICE_HOST);
    for (size_t i = 0; i < 3; i++) {
        json_t *manifest = bundle_manifest_by("generated");
        fp8_bundle *bundle;
        char path[160];
        snprintf(path, sizeof path, "%s.dispatch.0.choices.0.kernel", swaps[i].from);
        json_t *kernel = json_incref(bundle_at(manifest, path));
        snprintf(path, sizeof path, "%s.dispatch.0.choices.0.kernel", swaps[i].to);
        bundle_set(manifest, path, kernel);
        bundle_seal(manifest);
        bundle_write(manifest, folder);
        json_decref(manifest);
        EXPECT_REFUSED(FP8_ERR_BUNDLE, swaps[i].sentence, fp8_bundle_open(host, folder, &bundle));
    }
    json_t *manifest = bundle_manifest_by("generated");
    fp8_bundle *bundle;
    json_t *choice = bundle_at(manifest, "layers.0.passes.wgrad.0.dispatch.0.choices.0");
    json_object_set(choice, "accumulate_kernel", json_object_get(choice, "kernel"));
    bundle_seal(manifest);
    bundle_write(manifest, folder);
    EXPECT_REFUSED(FP8_ERR_BUNDLE, "does not accumulate", fp8_bundle_open(host, folder, &bundle));
    json_decref(manifest);
    fp8_context_destroy(host);
    bundle_remove(folder);
}

/* ---- calls ---- */

static void every_layer_gives_the_bits_of_the_host(void **state)
{
    (void)state;
    int64_t products = lt->products, queries = lt->queries;
    for (int i = 0; i < LAYERS; i++)
        cuda_run_shapes(bundle_manifest_by("generated"), layers[i]);
    assert_int_equal(lt->products, products);
    assert_int_equal(lt->queries, queries); /* not even asked */
    assert_true(cuda->maps > 0);
}

/* Each configuration that the generator knows; those of one accumulation leave the others' steps to
 * the rest. */
static void every_configuration(void **state)
{
    (void)state;
    fp8gen *gen;
    const char *text;
    assert_int_equal(fp8gen_open(NULL, &gen), FP8GEN_OK);
    assert_int_equal(fp8gen_gemm_configs(gen, &text), FP8GEN_OK);
    json_t *configurations = json_loads(text, 0, NULL);
    fp8gen_close(gen);
    assert_true(json_array_size(configurations) > 2);
    size_t index;
    json_t *configuration;
    json_array_foreach(configurations, index, configuration)
    {
        static const char *const two[] = { "bias", "wide" };
        const char *name = json_string_value(json_object_get(configuration, "name"));
        char *folder = cuda_bundle(bundle_manifest_by(name));
        for (int i = 0; i < 2; i++) {
            struct side host = cuda_open(FP8_DEVICE_HOST, folder, two[i]);
            struct side device = cuda_open(0, folder, two[i]);
            cuda_compare(&host, &device, (struct shape){ 129, 0, 0, true });
            cuda_compare(&host, &device, (struct shape){ 300, 8, 8, false });
            cuda_compare(&host, &device, (struct shape){ 17, 1, 1, true });
            cuda_close(&device);
            cuda_close(&host);
        }
        bundle_remove(folder);
    }
    json_decref(configurations);
}

/* The parameters may come in any order. */
static void parameters_are_packed_by_name(void **state)
{
    (void)state;
    json_t *manifest = bundle_manifest_by("generated");
    size_t index;
    json_t *kernel;
    json_array_foreach(bundle_at(manifest, "kernels"), index, kernel)
    {
        json_t *args = json_object_get(kernel, "args"), *turned = json_array();
        for (size_t i = json_array_size(args); i-- > 0;)
            json_array_append(turned, json_array_get(args, i));
        json_object_set_new(kernel, "args", turned);
    }
    cuda_run_shapes(manifest, "bias");
}

static void the_workspace_holds_no_stage(void **state)
{
    (void)state;
    static const char *const ways[] = { "generated", "cublaslt" };
    size_t bytes[2];
    for (int i = 0; i < 2; i++) {
        char *folder = cuda_bundle(bundle_manifest_by(ways[i]));
        struct side device = cuda_open(0, folder, "plain");
        EXPECT_OK(fp8_layer_bytes(device.layer, 300, FP8_BYTES_WORKSPACE, &bytes[i]));
        cuda_close(&device);
        bundle_remove(folder);
    }
    assert_true(bytes[0] < bytes[1]);
}

/* ---- choices ---- */

static fp8_dispatch dispatch_of(const struct side *side, fp8_pass pass, int64_t tokens)
{
    fp8_dispatch dispatch = FP8_DISPATCH_INIT;
    EXPECT_OK(fp8_layer_dispatch(side->layer, pass, tokens, &dispatch));
    return dispatch;
}

static void dispatch_names_the_kernel(void **state)
{
    (void)state;
    json_t *manifest = bundle_manifest_by("generated");
    char kernel[128], reason[512];
    const json_t *choice = bundle_at(manifest, "layers.1.passes.wgrad.0.dispatch.0.choices.0");
    snprintf(kernel, sizeof kernel, "%s", json_string_value(json_object_get(choice, "kernel")));
    snprintf(reason, sizeof reason, "%s", json_string_value(json_object_get(choice, "reason")));
    char *folder = cuda_bundle(manifest);
    struct side device = cuda_open(0, folder, "bias");
    fp8_dispatch dispatch = dispatch_of(&device, FP8_PASS_WGRAD, 1);
    assert_string_equal(dispatch.backend, "generated");
    assert_string_equal(dispatch.kernel, kernel);
    assert_string_equal(dispatch.reason, reason);
    assert_string_equal(dispatch.dtype, "e5m2 x e4m3 -> fp32");
    assert_int_equal(dispatch.launches, 1);
    assert_int_equal(dispatch_of(&device, FP8_PASS_FPROP, 40).launches, 2);
    assert_int_equal(dispatch_of(&device, FP8_PASS_FPROP, 0).launches, 0);
    cuda_close(&device);
    bundle_remove(folder);
}

static char log_text[16384];

static void keep_line(void *user, fp8_log_level level, const char *message)
{
    (void)user;
    size_t at = strlen(log_text);
    if (level == FP8_LOG_DISPATCH)
        snprintf(log_text + at, sizeof log_text - at, "%s\n", message);
}

static void open_logged(struct side *side, const char *folder)
{
    fp8_context_options options = FP8_CONTEXT_OPTIONS_INIT;
    options.log = keep_line;
    options.log_levels = 1u << FP8_LOG_DISPATCH;
    log_text[0] = 0;
    EXPECT_OK(fp8_context_create(&options, &side->context));
    EXPECT_OK(fp8_bundle_open(side->context, folder, &side->bundle));
    EXPECT_OK(fp8_layer_create(side->bundle, "plain", &side->layer));
}

/* sm_90 has no wgmma: the kernels exist for sm_90a only. */
static void without_a_cubin_the_next_choice_runs(void **state)
{
    (void)state;
    struct side device;
    char *folder = cuda_bundle_for(bundle_manifest_by("generated"), "sm_90");
    open_logged(&device, folder);
    fp8_dispatch dispatch = dispatch_of(&device, FP8_PASS_FPROP, 40);
    assert_string_equal(dispatch.backend, "cublaslt");
    assert_non_null(strstr(dispatch.kernel, "cublaslt algo 0"));
    assert_non_null(strstr(log_text, "passed over: the bundle has no cubin of it for this GPU"));
    struct side host = cuda_open(FP8_DEVICE_HOST, folder, "plain");
    int64_t products = lt->products;
    cuda_compare(&host, &device, (struct shape){ 40, 0, 0, true });
    assert_true(lt->products > products);
    cuda_close(&host);
    cuda_close(&device);
    bundle_remove(folder);
}

static void the_log_names_kernel_and_reason(void **state)
{
    (void)state;
    struct side device;
    json_t *manifest = bundle_manifest_by("generated");
    char wanted[1024];
    const json_t *choice = bundle_at(manifest, "layers.0.passes.wgrad.0.dispatch.0.choices.0");
    snprintf(wanted, sizeof wanted,
             "layer 'plain', wgrad, M 1..16: generated %s, accumulating %s: %s\n",
             json_string_value(json_object_get(choice, "kernel")),
             json_string_value(json_object_get(choice, "accumulate_kernel")),
             json_string_value(json_object_get(choice, "reason")));
    char *folder = cuda_bundle_for(manifest, "sm_90a");
    open_logged(&device, folder);
    if (!strstr(log_text, wanted))
        fail_msg("no line '%s' in\n%s", wanted, log_text);
    cuda_close(&device);
    bundle_remove(folder);
}

/* Ranges choose for themselves: generated up to 64 tokens of fprop, cuBLASLt beyond. */
static void ranges_choose_for_themselves(void **state)
{
    (void)state;
    json_t *manifest = bundle_manifest_by("generated");
    size_t index;
    json_t *range;
    json_array_foreach(bundle_at(manifest, "layers.0.passes.fprop.2.dispatch"), index, range)
    {
        if (json_integer_value(json_object_get(range, "min_tokens")) > 64)
            json_array_remove(json_object_get(range, "choices"), 0);
    }
    char *folder = cuda_bundle(manifest);
    struct side host = cuda_open(FP8_DEVICE_HOST, folder, "plain");
    struct side device = cuda_open(0, folder, "plain");
    static const int64_t tokens[] = { 64, 65, 17, 300 };
    for (int i = 0; i < 4; i++) {
        int64_t products = lt->products;
        const char *backend = dispatch_of(&device, FP8_PASS_FPROP, tokens[i]).backend;
        assert_string_equal(backend, tokens[i] > 64 ? "cublaslt" : "generated");
        cuda_compare(&host, &device, (struct shape){ tokens[i], 0, 0, false });
        assert_int_equal(lt->products - products, tokens[i] > 64);
    }
    cuda_close(&device);
    cuda_close(&host);
    bundle_remove(folder);
}

/* ---- a measured algorithm of cuBLASLt ---- */

static void set_algorithm(json_t *manifest, int algorithm, int version)
{
    size_t index;
    json_t *range;
    char hex[129];
    memset(hex, '0', sizeof hex - 1);
    hex[128] = 0;
    snprintf(hex, 3, "%02x", algorithm);
    hex[2] = '0';
    json_array_foreach(bundle_at(manifest, "layers.0.passes.fprop.2.dispatch"), index, range)
    {
        json_t *choice = bundle_at(range, "choices.0");
        json_object_set_new(choice, "algo", json_string(hex));
        json_object_set_new(choice, "version", json_integer(version));
    }
}

static void a_measured_algorithm_comes_first(void **state)
{
    (void)state;
    static const struct {
        int algorithm, version;
        const char *name;
    } cases[] = {
        { 37, FAKE_LT_VERSION, "cublaslt algo 37" },
        { 37, FAKE_LT_VERSION + 1, "cublaslt algo 0" },          /* of another library */
        { FAKE_ALGORITHMS, FAKE_LT_VERSION, "cublaslt algo 0" }, /* which it does not take */
    };
    for (int i = 0; i < 3; i++) {
        json_t *manifest = bundle_manifest();
        set_algorithm(manifest, cases[i].algorithm, cases[i].version);
        char *folder = cuda_bundle(manifest);
        struct side host = cuda_open(FP8_DEVICE_HOST, folder, "plain");
        struct side device = cuda_open(0, folder, "plain");
        fp8_dispatch dispatch = dispatch_of(&device, FP8_PASS_FPROP, 40);
        assert_non_null(strstr(dispatch.kernel, cases[i].name));
        assert_null(strstr(dispatch_of(&device, FP8_PASS_DGRAD, 40).kernel, "algo 37"));
        cuda_compare(&host, &device, (struct shape){ 40, 0, 0, false });
        lt->refusing =
            38; /* that one refuses, and the heuristic's do: the exact problem is asked for */
        lt->first = 38;
        cuda_compare(&host, &device, (struct shape){ 40, 0, 0, false });
        lt->refusing = 0;
        lt->first = 0;
        cuda_close(&device);
        cuda_close(&host);
        bundle_remove(folder);
    }
}

/* ---- grids ---- */

static unsigned fprop_grid(const struct side *side, int64_t tokens, int32_t max_sms, bool gemm_only)
{
    fp8_layer_info info = { .size = sizeof info };
    EXPECT_OK(fp8_layer_describe(side->layer, &info));
    struct matrix x = cuda_tensor(tokens, info.in_features, info.in_features, info.x_dtype, 0);
    struct matrix w =
        cuda_tensor(info.out_features, info.in_features, info.in_features, info.w_dtype, 0);
    struct matrix y = cuda_tensor(tokens, info.out_features, info.out_features, info.y_dtype, 0);
    fp8_operand weight = cuda_operand(side, 0, FP8_BYTES_WEIGHT);
    fp8_operand operand = cuda_operand(side, tokens, FP8_BYTES_X);
    cuda_fill(&x), cuda_fill(&w);
    char *workspace;
    fp8_call call = cuda_call(side, tokens, &workspace, 0);
    call.max_sms = max_sms;
    fp8_quantize_args quantize = FP8_QUANTIZE_ARGS_INIT;
    quantize.role = FP8_ROLE_W, quantize.source = &w.tensor, quantize.operand = &weight;
    quantize.call = call;
    EXPECT_OK(fp8_quantize(side->layer, &quantize));
    quantize.role = FP8_ROLE_X, quantize.source = &x.tensor, quantize.operand = &operand;
    EXPECT_OK(fp8_quantize(side->layer, &quantize));
    if (gemm_only) {
        fp8_gemm_args gemm = FP8_GEMM_ARGS_INIT;
        gemm.pass = FP8_PASS_FPROP, gemm.a = &operand, gemm.b = &weight, gemm.out = &y.tensor;
        gemm.call = call;
        EXPECT_OK(fp8_gemm(side->layer, &gemm));
    }
    free(x.block), free(w.block), free(y.block), free(weight.data), free(operand.data);
    free(workspace);
    return cuda->last_grid;
}

static void set_grid(json_t *manifest, const char *op, const char *key, json_t *value)
{
    size_t index;
    json_t *kernel;
    json_array_foreach(bundle_at(manifest, "kernels"), index, kernel)
    {
        if (strcmp(json_string_value(json_object_get(kernel, "op")), op) == 0)
            json_object_set(json_object_get(kernel, "grid"), key, value);
    }
    json_decref(value);
}

/* A cap on CTAs an SM that is not for persistent kernels holds only where the SMs are limited. */
static void grids_without_persistence(void **state)
{
    (void)state;
    for (int persistent = 0; persistent < 2; persistent++) {
        json_t *manifest = bundle_manifest_by("generated");
        json_object_del(bundle_at(manifest, "layers.0.passes.fprop.0"), "alternative");
        set_grid(manifest, "quantize", "tile_rows", json_integer(1)); /* 300 x 1 tiles */
        set_grid(manifest, "quantize", "ctas_per_sm", json_integer(2));
        set_grid(manifest, "quantize", "persistent", json_boolean(persistent));
        char *folder = cuda_bundle(manifest);
        struct side device = cuda_open(0, folder, "plain");
        assert_int_equal(fprop_grid(&device, 300, 0, false), persistent ? 264 : 300);
        assert_int_equal(fprop_grid(&device, 300, 131, false), 262);
        assert_int_equal(fprop_grid(&device, 300, 132, false), persistent ? 264 : 300);
        assert_int_equal(fprop_grid(&device, 300, 7, false), 14);
        assert_int_equal(fprop_grid(&device, 13, 7, false), 13);
        cuda_close(&device);
        bundle_remove(folder);
    }
}

/* The first gemm kernel of fprop with tiles of 16 x 16 that `cluster` CTAs share; all ranges take
 * it. */
static int64_t set_cluster(json_t *manifest, int cluster)
{
    static const char first[] = "layers.0.passes.fprop.2.dispatch.0.choices.0.kernel";
    static const char *const keys[] = { "cluster", "grid.tile_rows", "grid.tile_cols", "args.0.box",
                                        "args.1.box" };
    int kernel = 0;
    char path[160], box[32];
    const char *name = json_string_value(bundle_at(manifest, first));
    for (;; kernel++) {
        snprintf(path, sizeof path, "kernels.%d.name", kernel);
        if (strcmp(json_string_value(bundle_at(manifest, path)), name) == 0)
            break;
    }
    snprintf(box, sizeof box, "[128, %d]", 16 / cluster);
    for (int i = 0; i < 5; i++) {
        snprintf(path, sizeof path, "kernels.%d.%s", kernel, keys[i]);
        bundle_set(manifest, path,
                   i >= 3 ? json_loads(box, 0, NULL) : json_integer(i == 0 ? cluster : 16));
    }
    size_t index;
    json_t *range;
    json_array_foreach(bundle_at(manifest, "layers.0.passes.fprop.2.dispatch"), index, range)
        json_object_set(bundle_at(range, "choices.0"), "kernel", bundle_at(manifest, first));
    snprintf(path, sizeof path, "kernels.%d.shared_bytes", kernel);
    return json_integer_value(bundle_at(manifest, path));
}

static void grids_of_clusters(void **state)
{
    (void)state;
    for (int cluster = 2; cluster <= 4; cluster += 2) {
        json_t *manifest = bundle_manifest_by("generated");
        int64_t shared = set_cluster(manifest, cluster);
        char *folder = cuda_bundle(manifest);
        struct side device =
            cuda_open(0, folder, "plain"); /* 96 features: 6 tiles along the columns */
        int most =
            cluster == 2 ? 66 : 30; /* GPCs of 22 SMs: two are left over by clusters of four */
        assert_int_equal(fprop_grid(&device, 300, 0, true), cluster * most); /* of 19 x 6 */
        assert_int_equal(cuda->last_cluster, cluster);
        assert_true(cuda->last_overlaps);
        assert_int_equal(cuda->last_shared, shared);
        assert_int_equal(fprop_grid(&device, 17, 0, true), cluster * 12);
        assert_int_equal(fprop_grid(&device, 300, 9, true), cluster * (9 / cluster));
        assert_int_equal(fprop_grid(&device, 300, 1, true),
                         cluster);                           /* no fewer than one cluster */
        assert_true(fprop_grid(&device, 300, 0, false) > 0); /* ends with a quantise kernel */
        assert_false(cuda->last_overlaps);
        cuda_close(&device);
        bundle_remove(folder);
    }
}

/* ---- errors ---- */

static void a_map_that_fails_is_told(void **state)
{
    (void)state;
    char *folder = cuda_bundle(bundle_manifest_by("generated"));
    struct side device = cuda_open(0, folder, "plain");
    struct matrix w = cuda_tensor(96, 72, 72, FP8_DTYPE_BF16, 0);
    struct matrix x = cuda_tensor(8, 72, 72, FP8_DTYPE_BF16, 0);
    struct matrix y = cuda_tensor(8, 96, 96, FP8_DTYPE_BF16, 0);
    fp8_operand weight = cuda_operand(&device, 0, FP8_BYTES_WEIGHT);
    fp8_operand operand = cuda_operand(&device, 8, FP8_BYTES_X);
    char *workspace;
    cuda_fill(&x), cuda_fill(&w);
    fp8_quantize_args quantize = FP8_QUANTIZE_ARGS_INIT;
    quantize.call = cuda_call(&device, 8, &workspace, 0);
    quantize.role = FP8_ROLE_W, quantize.source = &w.tensor, quantize.operand = &weight;
    EXPECT_OK(fp8_quantize(device.layer, &quantize));
    quantize.role = FP8_ROLE_X, quantize.source = &x.tensor, quantize.operand = &operand;
    EXPECT_OK(fp8_quantize(device.layer, &quantize));
    fp8_gemm_args gemm = FP8_GEMM_ARGS_INIT;
    gemm.pass = FP8_PASS_FPROP, gemm.a = &operand, gemm.b = &weight, gemm.out = &y.tensor;
    gemm.call = quantize.call;
    int maps = 0;
    cuda->fail_code = 1; /* CUDA_ERROR_INVALID_VALUE */
    for (int at = 1; at <= 8; at++) {
        cuda->fail_at = cuda->calls + at;
        fp8_status status = fp8_gemm(device.layer, &gemm);
        maps += status == FP8_ERR_CUDA && strstr(fp8_last_error(), "the tensor map of") != NULL;
    }
    cuda->fail_at = 0;
    assert_int_equal(maps, 3);
    EXPECT_OK(fp8_gemm(device.layer, &gemm));
    assert_int_equal(cuda->depth, 0);
    free(w.block), free(x.block), free(y.block), free(weight.data), free(operand.data);
    free(workspace);
    cuda_close(&device);
    bundle_remove(folder);
}

int main(void)
{
    cuda = bundle_fake_cuda();
    lt = bundle_fake_lt();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_change_has_its_sentence),
        cmocka_unit_test(a_kernel_must_be_of_its_step),
        cmocka_unit_test(every_layer_gives_the_bits_of_the_host),
        cmocka_unit_test(every_configuration),
        cmocka_unit_test(parameters_are_packed_by_name),
        cmocka_unit_test(the_workspace_holds_no_stage),
        cmocka_unit_test(dispatch_names_the_kernel),
        cmocka_unit_test(without_a_cubin_the_next_choice_runs),
        cmocka_unit_test(the_log_names_kernel_and_reason),
        cmocka_unit_test(ranges_choose_for_themselves),
        cmocka_unit_test(a_measured_algorithm_comes_first),
        cmocka_unit_test(grids_without_persistence),
        cmocka_unit_test(grids_of_clusters),
        cmocka_unit_test(a_map_that_fails_is_told),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
