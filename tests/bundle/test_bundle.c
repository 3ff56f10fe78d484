/*
 * test_bundle.c - what opens, and what is refused with which sentence.
 */
#include "tests/bundle/bundle_rig.h"

#include <sys/stat.h>
#include <unistd.h>

#include "runtime/bundle_format.h"

static fp8_context *host;
static char *folder;

static int set_up(void **state)
{
    (void)state;
    host = bundle_context(FP8_DEVICE_HOST);
    folder = bundle_folder();
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    bundle_remove(folder);
    fp8_context_destroy(host);
    return 0;
}

/* Writes the sealed manifest and opens it. */
static fp8_status open_manifest(json_t *manifest, bool seal)
{
    fp8_bundle *bundle = (fp8_bundle *)folder;
    if (seal)
        bundle_seal(manifest);
    bundle_write(manifest, folder);
    fp8_status status = fp8_bundle_open(host, folder, &bundle);
    if (status != FP8_OK)
        assert_null(bundle);
    fp8_bundle_close(bundle);
    return status;
}

static void a_whole_bundle_opens(void **state)
{
    (void)state;
    static const char *const names[] = { "plain", "bias", "wide", "e4m3", "half" };
    json_t *manifest = bundle_manifest();
    fp8_bundle *bundle;
    fp8_layer *layer;
    bundle_write(manifest, folder);
    EXPECT_OK(fp8_bundle_open(host, folder, &bundle));
    assert_int_equal(fp8_bundle_layer_count(bundle), 5);
    for (int i = 0; i < 5; i++)
        assert_string_equal(fp8_bundle_layer_name(bundle, i), names[i]);
    assert_null(fp8_bundle_layer_name(bundle, 5));
    assert_null(fp8_bundle_layer_name(bundle, -1));
    json_t *again = json_loads(fp8_bundle_manifest(bundle), 0, NULL);
    assert_true(json_equal(again, manifest));
    json_decref(again);
    EXPECT_REFUSED(FP8_ERR_NOT_FOUND, "'plain', 'bias', 'wide', 'e4m3', 'half'",
                   fp8_layer_create(bundle, "Plain", &layer));
    assert_null(layer);
    EXPECT_OK(fp8_layer_create(bundle, "wide", &layer));
    fp8_layer_info info = { .size = sizeof info };
    EXPECT_OK(fp8_layer_describe(layer, &info));
    assert_int_equal(info.in_features, 33);
    assert_int_equal(info.out_features, 20);
    assert_int_equal(info.max_tokens, 300);
    assert_int_equal(info.w_dtype, FP8_DTYPE_FP32);
    assert_int_equal(info.dw_dtype, FP8_DTYPE_BF16);
    assert_int_equal(info.bias_dtype, FP8_DTYPE_NONE);
    assert_int_equal(info.dy_format, FP8_DTYPE_E5M2);
    assert_string_equal(info.name, "wide");
    assert_string_equal(info.recipe, "current");
    info.size = 4;
    EXPECT_REFUSED(FP8_ERR_ARGUMENT, "size is 4", fp8_layer_describe(layer, &info));
    fp8_layer_destroy(layer);
    fp8_bundle_close(bundle);
    json_decref(manifest);
}

static void wrong_calls(void **state)
{
    (void)state;
    fp8_bundle *bundle;
    fp8_layer *layer;
    EXPECT_REFUSED(FP8_ERR_ARGUMENT, "context is NULL", fp8_bundle_open(NULL, folder, &bundle));
    EXPECT_REFUSED(FP8_ERR_ARGUMENT, "path is NULL", fp8_bundle_open(host, NULL, &bundle));
    EXPECT_REFUSED(FP8_ERR_ARGUMENT, "bundle is NULL", fp8_bundle_open(host, folder, NULL));
    EXPECT_REFUSED(FP8_ERR_BUNDLE, "No such file",
                   fp8_bundle_open(host, "/nowhere/at/all", &bundle));
    EXPECT_REFUSED(FP8_ERR_ARGUMENT, "bundle is NULL", fp8_layer_create(NULL, "x", &layer));
    assert_int_equal(fp8_bundle_layer_count(NULL), 0);
    assert_null(fp8_bundle_layer_name(NULL, 0));
    fp8_bundle_close(NULL);
    fp8_layer_destroy(NULL);
    fp8_context_destroy(NULL);
    char path[600];
    snprintf(path, sizeof path, "%s/" FP8_BUNDLE_MANIFEST, folder);
    unlink(path);
    mkdir(path, 0700);
    EXPECT_REFUSED(FP8_ERR_BUNDLE, FP8_BUNDLE_MANIFEST, fp8_bundle_open(host, folder, &bundle));
    rmdir(path);
    assert_int_equal(mkfifo(path, 0600), 0); /* which nobody writes */
    EXPECT_REFUSED(FP8_ERR_BUNDLE, FP8_BUNDLE_MANIFEST " is no readable file",
                   fp8_bundle_open(host, folder, &bundle));
    unlink(path);
}

/* One change of the manifest, sealed again, and what the sentence must say. NULL value: removed. */
struct change {
    const char *path;
    const char *value; /* JSON */
    const char *sentence;
};

static const struct change changes[] = {
    { "format", "\"other\"", "'format' is not" },
    { "format_version", "1", "format version 1, this libfp8 (0.1.0) reads version 5" },
    { "format_version", NULL, "'format_version' is missing" },
    { "extra", "1", "unknown field 'extra'" },
    { "generator", "5", "'generator' is an integer, a string is wanted" },
    { "model", NULL, "'model' is missing" },
    { "spec_hash", NULL, "'spec_hash' is missing" },
    { "tuning_hash", "7", "'tuning_hash' is an integer" },
    { "mesh.tensor", "2", "mesh: 'tensor' is 2, outside 1..1" },
    { "mesh.fsdp", "4097", "mesh: 'fsdp' is 4097, outside 1..4096" },
    { "mesh.fsdp", "2", "shard: 'rows' is" },
    { "layers.0.shard", NULL, "'shard' is missing" },
    { "layers.0.shard.rows", "1", "shard: 'rows' is 1; " },
    { "layers.0.shard.multiple", "64", "'multiple' is 64, neither 1 nor 128" },
    { "layers.0.shard.gather_group", "7", "'gather_group' is an integer" },
    { "layers.0.shard.axis", "1", "shard: unknown field 'axis'" },
    { "shard", NULL, "'shard' is missing" },
    { "shard.backward", "\"forget\"", "shard: 'backward' is 'forget'" },
    { "shard.reduce", "\"max\"", "'reduce' is 'max'" },
    { "shard.dtype", "\"fp32\"", "shard: unknown field 'dtype'" },
    { "collectives", "7", "'collectives' is an integer" },
    { "mesh.pipeline", "1", "mesh: unknown field 'pipeline'" },
    { "rank", "1", "'rank' is 1" },
    { "archs", "[1]", "archs[0] is not a string" },
    { "archs", "[\"sm_90a\"]", "0 cubins for 1 archs" },
    { "layers", "[]", "'layers' is empty" },
    { "layers", "{}", "'layers' is an object, an array is wanted" },
    { "kernels.0.op", "\"amin\"", "kernels[0]: 'op' is 'amin', which this version does not know" },
    { "kernels.0.op", "\"gemm\"", "'second_dtype' is missing" },
    { "kernels.0.name", "\"quantize_bf16_e4m3\"", "occurs twice" },
    { "kernels.0.entry", NULL, "kernels[0]: 'entry' is missing" },
    { "kernels.0.block", "0", "'block' is 0, outside 1..1024" },
    { "kernels.0.block", "2.5", "'block' is a fraction" },
    { "kernels.0.cluster", "17", "'cluster' is 17" },
    { "kernels.0.shared_bytes", "-1", "'shared_bytes' is -1" },
    { "kernels.0.args.0.name", "\"sources\"", "op 'amax' has no argument 'sources'" },
    { "kernels.0.args.0.name", "\"rows\"", "is pointer, op 'amax' says int64" },
    { "kernels.0.args.0.type", "\"int64\"", "argument 'source' is int64, op 'amax' says pointer" },
    { "kernels.0.args.1", "{\"name\": \"source\", \"type\": \"pointer\"}",
      "'source' occurs twice" },
    { "kernels.0.args.1.size", "8", "kernels[0].args[1]: unknown field 'size'" },
    { "kernels.0.grid.rule", "\"spiral\"", "grid: 'rule' is 'spiral'" },
    { "kernels.0.grid.rows", "\"source\"", "no integer argument of op 'amax'" },
    { "kernels.0.grid.tile_elements", "0", "'tile_elements' is 0" },
    { "kernels.0.grid.persistent", NULL, "grid: 'persistent' is missing" },
    { "kernels.0.grid.persistent", "1", "grid: 'persistent' is an integer" },
    { "kernels.0.grid.rule", "\"clusters\"", "the rule 'clusters' is not for kernels" },
    { "kernels.0.archs", "[90]", "archs[0] is not a string" },
    { "kernels.0.archs", "\"sm_90a\"", "'archs' is a string, an array is wanted" },
    { "kernels.0.args.0.type", "\"tensor_map\"", "'source' is tensor_map, op 'amax' says pointer" },
    { "kernels.0.args.0.name", "\"out_by_map\"", "op 'amax' has no argument 'out_by_map'" },
    { "kernels.0.args.0.box", "[128, 64]", "unknown field 'box'" },
    { "kernels.0.semantics.source_dtype", "\"half\"", "semantics: 'source_dtype' is 'half'" },
    { "kernels.0.semantics.margin", "1", "'margin' is not for kernels of op 'amax'" },
    { "kernels.8.semantics.margin", "9", "'margin' is 9, outside 0..8" },
    { "kernels.8.semantics.margin", "1", "margin of the kernel is not the recipe's" },
    { "kernels.0.parameters", NULL, "'parameters' is missing" },
    { "layers.0.name", "\"bias\"", "occurs twice" },
    { "layers.0.in_features", "0", "layers[0]: 'in_features' is 0" },
    { "layers.0.in_features", "73", "another shape or dtype" },
    { "layers.0.max_tokens", "39", "'tokens' is 40, outside 1..39" },
    { "layers.0.compute", "\"int8\"", "'compute' is 'int8'" },
    { "layers.0.compute", "\"bf16\"", "operand x has by its recipe no part 'scales'" },
    { "layers.0.recipe.name", "\"tensorwise\"", "'name' is 'tensorwise'" },
    { "layers.0.recipe", "{\"name\": \"delayed\", \"format\": \"hybrid\", \"power_of_two\": false}",
      "recipe: 'history_length' is missing" },
    { "layers.0.recipe", "{\"name\": \"rowwise\", \"format\": \"hybrid\", \"power_of_two\": false}",
      "format 'hybrid' is not for recipe 'rowwise'" },
    { "layers.3.recipe", "{\"name\": \"rowwise\", \"format\": \"e4m3\", \"power_of_two\": true}",
      "operand x has no part 'row_scales'" },
    { "layers.3.recipe",
      "{\"name\": \"rowwise_hp_wgrad\", \"format\": \"e4m3\", \"power_of_two\": true}",
      "operand x has no part 'row_scales'" },
    { "layers.0.recipe.name", "\"rowwise\"", "unknown field 'weight_scale'" },
    { "layers.0.recipe.weight_scale", NULL, "'weight_scale' is missing" },
    { "layers.0.recipe.weight_scale", "\"rank\"", "'weight_scale' is 'rank'" },
    { "layers.0.recipe.weight_scale", "\"shard\"",
      "weight_scale is 'shard', but there is one shard" },
    { "layers.3.recipe.format", "\"hybrid\"", "dy is e4m3, but the recipe's format says e5m2" },
    { "layers.3.recipe.power_of_two", "false", "power_of_two of the kernel is not the recipe's" },
    { "layers.0.recipe",
      "{\"name\": \"delayed\", \"format\": \"hybrid\", \"power_of_two\": false, "
      "\"history_length\": "
      "0, \"algo\": \"max\", \"margin\": 0, \"calibrate\": false, \"amax_group\": \"rank\"}",
      "'history_length' is 0" },
    { "layers.0.recipe",
      "{\"name\": \"delayed\", \"format\": \"hybrid\", \"power_of_two\": false, "
      "\"history_length\": "
      "4, \"algo\": \"max\", \"margin\": 0, \"calibrate\": false, \"amax_group\": \"rank\"}",
      "'roll' names no kernel" },
    { "layers.0.roll", "\"amax_bf16\"", "'roll' belongs to recipe 'delayed'" },
    { "layers.0.transpose", "\"amax_bf16\"", "implements 'amax', not 'transpose'" },
    { "layers.0.given", "{\"x\": []}", "'w' is missing" },
    { "layers.0.given", "{\"z\": []}", "unknown field 'z'" },
    { "layers.0.passes.fprop.2.a_scaling", "\"row\"", "its scaling is not that of the recipe" },
    { "layers.0.passes.fprop.2.a_scaling", "\"none\"", "one operand is bf16" },
    { "layers.0.passes.fprop.2.a_scaling", NULL, "'a_scaling' is missing" },
    { "layers.0.passes.fprop.2.b_transposed", "true", "whether it is transposed" },
    { "layers.0.passes.fprop.0.args.when", "\"found_inf.ld\"", "'found_inf.ld' is no pointer" },
    { "layers.0.passes.fprop.0.args.n_partials", "1023", "may have more CTAs than that" },
    { "layers.0.passes.fprop.0.args.partials", "\"y_stage\"", "the buffer has another dtype" },
    { "layers.1.passes.quantize_dy.0.args.dbias_partials", "null",
      "no step before this one leaves them" },
    { "layers.0.passes.fprop.1.args.transposed", "null", "not that of the steps that this one" },
    { "layers.1.passes.quantize_dy.1.args.dbias", "null", "not that of the steps that this one" },
    { "layers.0.passes.fprop.0.alternative", "{}", "'elements_per_sm' is missing" },
    { "layers.0.passes.fprop.1.alternative", "{}", "belongs to steps of op 'amax'" },
    { "kernels.0.cooperative", "true", "kernels of op 'amax' are not cooperative" },
    { "layers.0.recipe.margin", "0", "unknown field 'margin'" },
    { "layers.0.accumulation.fprop", "\"exact\"", "'fprop' is 'exact'" },
    { "layers.0.buffers.0.name", "\"z\"", "no pass has a caller's tensor 'z'" },
    { "layers.0.buffers.0.object", "\"caller2\"", "'object' is 'caller2'" },
    { "layers.0.buffers.0.dtype", "\"e4m3\"", "another shape or dtype" },
    { "layers.0.buffers.0.dtype", "\"none\"", "dtype is none" },
    { "layers.0.buffers.0.dtype", "\"fp16\"", "another shape or dtype" },
    { "layers.0.buffers.2.dtype", "\"e4m3\"", "'y' has another shape or dtype" },
    { "layers.0.buffers.2.dtype", "\"e5m2\"", "'y' has another shape or dtype" },
    { "layers.0.buffers.0.part", "\"row\"", "'part' belongs to operands and the state only" },
    { "layers.0.buffers.0.rows", "40", "another shape or dtype" },
    { "layers.0.buffers.0.rows", "{\"of\": \"K\"}", "'of' is a string, an integer is wanted" },
    { "layers.0.buffers.0.rows", "{\"of\": \"M\", \"div\": 0}", "'div' is 0" },
    { "layers.0.buffers.0.rows", "{\"of\": \"M\", \"mod\": 2}", "unknown field 'mod'" },
    { "layers.0.buffers.0.cols", "1099511627777", "outside 1..1099511627776" },
    { "layers.0.passes.wgrad", "[]", "the pass has no gemm" },
    { "layers.0.passes.weight", "[]", "no step writes w_scales" },
    { "layers.0.passes.other", "[]", "unknown field 'other'" },
    { "layers.0.passes.fprop.0.kernel", "\"amax_int\"", "there is no kernel 'amax_int'" },
    { "layers.0.passes.fprop.0.kernel", "\"quantize_bf16_e4m3\"",
      "implements 'quantize', not 'amax'" },
    { "layers.0.passes.fprop.0.kernel", "\"amax_fp32\"", "the buffer has another dtype" },
    { "layers.0.passes.fprop.0.args.source", "\"w\"", "this pass has no such tensor" },
    { "layers.0.passes.fprop.0.args.source", "\"xx\"", "there is no buffer 'xx'" },
    { "layers.0.passes.fprop.0.args.source", "\"x.ld\"", "'x.ld' is no pointer" },
    { "layers.0.passes.fprop.0.args.source", "3", "a number is no pointer" },
    { "layers.0.passes.fprop.0.args.source", "null", "it may not be null" },
    { "layers.0.passes.fprop.0.args.rows", "null", "null is no integer" },
    { "layers.0.passes.fprop.0.args.rows", "\"x\"", "'x' is no integer" },
    { "layers.0.passes.fprop.0.args.rows", "\"x.width\"", "no value; buffers have .ld and .rows" },
    { "layers.0.passes.fprop.0.args.rows", "true", "this is no argument" },
    { "layers.0.passes.fprop.0.args.rows", "-4", "-4 is out of range" },
    { "layers.0.passes.fprop.0.args.rows", "41", "smaller than what the step touches" },
    { "layers.0.passes.fprop.0.args.cols", "73", "smaller than what the step touches" },
    { "layers.0.passes.fprop.0.args.n_partials", "1025", "smaller than what the step touches" },
    { "layers.0.passes.fprop.0.args.n_partials", "\"M\"", "beyond 32 bits" },
    { "layers.0.passes.fprop.0.args.source_ld", "72", "not the ld of its buffer" },
    { "layers.0.passes.fprop.0.args.rows", NULL, "args.rows: the argument is missing" },
    { "layers.0.passes.fprop.0.args.colour", "1", "op 'amax' has no argument 'colour'" },
    { "layers.0.passes.fprop.1.args.row_rows", "1", "smaller than what the step touches" },
    { "layers.0.passes.fprop.1.args.row", "\"w_row\"", "does not fill that operand" },
    { "layers.0.passes.fprop.2.args.a", "\"x_transposed\"", "it is not what this pass reads" },
    { "layers.0.passes.fprop.2.args.a", "\"dy_row\"", "this pass has no such operand" },
    { "layers.0.passes.fprop.2.args.a_scales", "\"w_scales\"", "not the scales of that operand" },
    { "layers.0.passes.fprop.2.args.depth", "129", "smaller than what the step touches" },
    { "layers.0.passes.fprop.2.args.accumulate", "\"accumulate\"", "'accumulate' is null" },
    { "layers.0.passes.fprop.2.a_dtype", "\"e5m2\"", "the buffer has another dtype" },
    { "layers.0.passes.fprop.2.out_dtype", "\"fp32\"", "stores other dtypes" },
    { "layers.0.passes.fprop.2.accumulation", "\"255\"", "'accumulation' is '255'" },
    { "layers.0.passes.fprop.2.stage", "\"y\"", "'stage' names no workspace buffer" },
    { "layers.0.passes.fprop.2.store.overwrite.stage_dtype", "\"fp32\"", "stores other dtypes" },
    { "layers.0.passes.fprop.2.dispatch.0.backend", "\"cublaslt\"", "unknown field 'backend'" },
    { "layers.0.passes.fprop.2.dispatch.0.choices", NULL, "'choices' is missing" },
    { "layers.0.passes.fprop.2.dispatch.0.choices", "[]", "'choices' is empty" },
    { "layers.0.passes.fprop.2.dispatch.0.choices.0", "3", "this is an integer" },
    { "layers.0.passes.fprop.2.dispatch.0.choices.0.backend", "\"cutlass\"",
      "choices[0]: 'backend' is 'cutlass'" },
    { "layers.0.passes.fprop.2.dispatch.0.choices.0.kernel", "\"x\"", "unknown field 'kernel'" },
    { "layers.0.passes.fprop.2.dispatch.0.choices.0.reason", NULL, "'reason' is missing" },
    { "layers.0.passes.fprop.2.dispatch.0.choices.0.seconds", "\"1\"", "'seconds' is no number" },
    { "layers.0.passes.fprop.2.dispatch.0.choices.0.algo", "\"00\"", "'version' is missing" },
    { "layers.0.passes.fprop.2.dispatch.0.choices.0.version", "1", "'algo' is missing" },
    { "layers.0.passes.fprop.2.dispatch.0.choices.0",
      "{\"backend\": \"cublaslt\", \"reason\": \"\", \"algo\": \"0g\", \"version\": 1}",
      "'algo' is not 128 hex digits" },
    { "layers.0.passes.fprop.2.dispatch.0.choices",
      "[{\"backend\": \"cublaslt\", \"reason\": \"\"}, {\"backend\": \"cublaslt\", \"reason\": "
      "\"\"}]",
      "cublaslt is the last choice, and no other" },
    { "layers.0.passes.fprop.2.dispatch.0.min_tokens", "2", "'min_tokens' is 2" },
    { "layers.0.passes.fprop.2.dispatch.0.max_tokens", "500", "'max_tokens' is 500" },
    { "layers.0.passes.fprop.2.dispatch", "[]", "'dispatch' ends at 0 tokens, max_tokens is 300" },
    { "layers.0.passes.wgrad.0.store.accumulate", "null", "'accumulate' is null" },
    { "layers.0.dequantize.e5m2_tensor", NULL, "'e5m2_tensor' names no kernel" },
    { "layers.0.dequantize.e5m2_tensor", "\"dequantize_e4m3_tensor\"",
      "does not turn e5m2 of scaling tensor into fp32" },
    { "layers.1.passes.fprop.2.stage_bias", "null", "there is no stage_bias" },
    { "layers.1.passes.quantize_dy.1.args.dbias_partials", "null", "it is null, but dbias is not" },
};

static void every_change_has_its_sentence(void **state)
{
    (void)state;
    int wrong = 0;
    for (size_t i = 0; i < sizeof changes / sizeof changes[0]; i++) {
        const struct change *change = &changes[i];
        json_t *manifest = bundle_manifest();
        json_t *value = change->value ? json_loads(change->value, JSON_DECODE_ANY, NULL) : NULL;
        assert_true(!change->value || value);
        bundle_set(manifest, change->path, value);
        fp8_status status = open_manifest(manifest, true);
        if (status != FP8_ERR_BUNDLE || !strstr(fp8_last_error(), change->sentence) ||
            !strstr(fp8_last_error(), folder)) {
            print_error("%s = %s: %s: %s\n", change->path, change->value, fp8_status_name(status),
                        fp8_last_error());
            wrong++;
        }
        json_decref(manifest);
    }
    assert_int_equal(wrong, 0);
}

static void parts_of_operands_must_be_laid_out_as_documented(void **state)
{
    (void)state;
    static const char *const paths[] = { "rows", "cols", "dtype", "part" };
    json_t *whole = bundle_manifest();
    size_t index;
    json_t *buffer;
    json_array_foreach(bundle_at(whole, "layers.0.buffers"), index, buffer)
    {
        const char *object = json_string_value(json_object_get(buffer, "object"));
        if (strcmp(object, "caller") == 0 || strcmp(object, "workspace") == 0)
            continue;
        for (int i = 0; i < 4; i++) {
            char path[64];
            json_t *manifest = bundle_manifest();
            snprintf(path, sizeof path, "layers.0.buffers.%zu.%s", index, paths[i]);
            bundle_set(manifest, path,
                       i < 2    ? json_integer(16 * 1024)
                       : i == 2 ? json_string("bf16")
                                : json_string(index % 2 ? "scales" : "row"));
            fp8_status status = open_manifest(manifest, true);
            if (status != FP8_OK)
                assert_int_equal(status, FP8_ERR_BUNDLE);
            else
                assert_true(json_equal(manifest, whole)); /* the part was that already */
            json_decref(manifest);
        }
        json_t *manifest = bundle_manifest();
        json_array_remove(bundle_at(manifest, "layers.0.buffers"), index);
        EXPECT_REFUSED(FP8_ERR_BUNDLE, "has no part", open_manifest(manifest, true));
        json_decref(manifest);
    }
    json_decref(whole);
}

static void an_unsealed_change_is_noticed(void **state)
{
    (void)state;
    json_t *manifest = bundle_manifest();
    bundle_set(manifest, "layers.0.count", json_integer(2));
    EXPECT_REFUSED(FP8_ERR_BUNDLE, "was altered", open_manifest(manifest, false));
    bundle_set(manifest, "digest", NULL);
    EXPECT_REFUSED(FP8_ERR_BUNDLE, "'digest' is missing", open_manifest(manifest, false));
    json_decref(manifest);
}

static void a_truncated_manifest_is_refused(void **state)
{
    (void)state;
    json_t *manifest = bundle_manifest();
    bundle_write(manifest, folder);
    json_decref(manifest);
    size_t size;
    char *text = bundle_read_file(folder, FP8_BUNDLE_MANIFEST, &size);
    for (size_t length = 0; length<size; length += length + 8> size ? 1 : length / 16 + 1) {
        fp8_bundle *bundle;
        bundle_write_file(folder, FP8_BUNDLE_MANIFEST, text, length);
        EXPECT_REFUSED(FP8_ERR_BUNDLE, "no valid JSON", fp8_bundle_open(host, folder, &bundle));
        assert_null(bundle);
    }
    free(text);
}

static void an_altered_byte_is_refused(void **state)
{
    (void)state;
    json_t *manifest = bundle_manifest();
    bundle_write(manifest, folder);
    size_t size;
    char *text = bundle_read_file(folder, FP8_BUNDLE_MANIFEST, &size);
    for (size_t at = 0; at < size; at += size / 100 + 1) {
        static const char bits[] = { 1, 4, 32, (char)128 };
        for (int i = 0; i < 4; i++) {
            fp8_bundle *bundle;
            text[at] ^= bits[i];
            bundle_write_file(folder, FP8_BUNDLE_MANIFEST, text, size);
            fp8_status status = fp8_bundle_open(host, folder, &bundle);
            if (status == FP8_OK) { /* white space turned into other white space */
                json_t *same = json_loadb(text, size, 0, NULL);
                assert_true(json_equal(same, manifest));
                json_decref(same);
                fp8_bundle_close(bundle);
            } else {
                assert_int_equal(status, FP8_ERR_BUNDLE);
            }
            text[at] ^= bits[i];
        }
    }
    free(text);
    json_decref(manifest);
}

static void every_cubin_is_checked(void **state)
{
    (void)state;
    json_t *manifest = bundle_manifest();
    bundle_add_arch(manifest, folder, "sm_90a");
    bundle_add_arch(manifest, folder, "sm_100a");
    EXPECT_OK(open_manifest(manifest, true));
    size_t index;
    json_t *kernel;
    json_array_foreach(bundle_at(manifest, "kernels"), index, kernel)
    {
        if (index % 4 != 1)
            continue;
        const char *file = json_string_value(bundle_at(kernel, "cubins.1.file"));
        size_t size;
        fp8_bundle *bundle;
        char *data = bundle_read_file(folder, file, &size);
        for (size_t length = 0; length < size; length += 9) {
            bundle_write_file(folder, file, data, length);
            EXPECT_REFUSED(FP8_ERR_BUNDLE, "truncated", fp8_bundle_open(host, folder, &bundle));
        }
        for (size_t at = 0; at < size; at += 9) {
            data[at] ^= 1;
            bundle_write_file(folder, file, data, size);
            EXPECT_REFUSED(FP8_ERR_BUNDLE, "was altered", fp8_bundle_open(host, folder, &bundle));
            assert_non_null(strstr(fp8_last_error(), file));
            data[at] ^= 1;
        }
        char path[800];
        snprintf(path, sizeof path, "%s/%s", folder, file);
        unlink(path);
        EXPECT_REFUSED(FP8_ERR_BUNDLE, "No such file", fp8_bundle_open(host, folder, &bundle));
        bundle_write_file(folder, file, data, size);
        free(data);
    }
    static const struct change cubins[] = {
        { "kernels.0.cubins.0.file", "\"../x\"", "leads out of the bundle" },
        { "kernels.0.cubins.0.file", "\"/etc/passwd\"", "leads out of the bundle" },
        { "kernels.0.cubins.0.file", "\"\"", "leads out of the bundle" },
        { "kernels.0.cubins.0.arch", "\"sm_80\"", "arch is 'sm_80', but 'sm_90a' is next" },
        { "kernels.0.cubins.0.bytes", "0", "'bytes' is 0" },
        { "kernels.0.cubins.1", NULL, "1 cubins for 2 archs" },
        { "kernels.0.cubins.1.md5", "1", "unknown field 'md5'" },
    };
    for (size_t i = 0; i < sizeof cubins / sizeof cubins[0]; i++) {
        json_t *changed = json_deep_copy(manifest);
        bundle_set(changed, cubins[i].path,
                   cubins[i].value ? json_loads(cubins[i].value, JSON_DECODE_ANY, NULL) : NULL);
        EXPECT_REFUSED(FP8_ERR_BUNDLE, cubins[i].sentence, open_manifest(changed, true));
        json_decref(changed);
    }
    json_decref(manifest);
}

static fp8_status open_with_arch(fp8_context *context, const char *arch)
{
    json_t *manifest = bundle_manifest();
    fp8_bundle *bundle;
    if (arch)
        bundle_add_arch(manifest, folder, arch);
    bundle_seal(manifest);
    bundle_write(manifest, folder);
    json_decref(manifest);
    fp8_status status = fp8_bundle_open(context, folder, &bundle);
    fp8_bundle_close(bundle);
    return status;
}

static void a_gpu_takes_its_own_arch_only(void **state)
{
    (void)state;
    struct fake_cuda *cuda = bundle_fake_cuda();
    (void)bundle_fake_lt();
    fp8_context *context = bundle_context(0);
    EXPECT_OK(open_with_arch(context, "sm_90a"));
    EXPECT_OK(open_with_arch(context, "sm_90"));
    EXPECT_REFUSED(FP8_ERR_ARCH, "kernels for sm_100a, but device 0",
                   open_with_arch(context, "sm_100a"));
    EXPECT_REFUSED(FP8_ERR_ARCH, "--arch sm_90a", open_with_arch(context, "sm_80"));
    EXPECT_REFUSED(FP8_ERR_ARCH, "kernels for no GPU", open_with_arch(context, NULL));
    EXPECT_OK(open_with_arch(host, "sm_80"));
    fp8_context_destroy(context);
    assert_int_equal(cuda->live, 0);
    assert_int_equal(cuda->depth, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_whole_bundle_opens),
        cmocka_unit_test(wrong_calls),
        cmocka_unit_test(every_change_has_its_sentence),
        cmocka_unit_test(parts_of_operands_must_be_laid_out_as_documented),
        cmocka_unit_test(an_unsealed_change_is_noticed),
        cmocka_unit_test(a_truncated_manifest_is_refused),
        cmocka_unit_test(an_altered_byte_is_refused),
        cmocka_unit_test(every_cubin_is_checked),
        cmocka_unit_test(a_gpu_takes_its_own_arch_only),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
