/*
 * rig.c - the device, guarded memory, bundles and layers of the rig.
 *
 * One context and stream serve a whole test program. Bundles go into folders of their own under
 * TMPDIR and are removed when their layers are closed.
 */
#include "tests/runtime/rig.h"

#include <ftw.h>
#include <math.h>
#include <stdatomic.h>
#include <unistd.h>

#include "gen/fp8gen.h"
#include "runtime/fp8_format.h"

enum { GUARD = 4096, ALIGN = 256 };

struct rig rig;

/* The last workspace, kept for the next case: fresh pages for each would cost more than the
 * tests. */
static void *kept_memory;
static size_t kept_capacity;

/* ---- the device ---- */

static bool is_required(const char *what)
{
    const char *required = getenv("FP8_TEST_REQUIRE");
    return required != NULL && strstr(required, what) != NULL;
}

int rig_main(const char *name, const struct CMUnitTest *tests, size_t count)
{
    const char *device = getenv("FP8_TEST_DEVICE");
    fp8_context_options options = FP8_CONTEXT_OPTIONS_INIT;
    rig.cuda = device != NULL && strncmp(device, "cuda", 4) == 0;
    rig.gemm = getenv("FP8_TEST_GEMM");
    if (rig.gemm == NULL && rig.cuda && device[4] == '+')
        rig.gemm = device + 5;
    options.device = rig.cuda ? 0 : FP8_DEVICE_HOST;
    fp8_status status = fp8_context_create(&options, &rig.context);
    if (status != FP8_OK) {
        bool absent =
            status == FP8_ERR_LIBRARY || status == FP8_ERR_DEVICE || status == FP8_ERR_CUDA;
        bool skip = rig.cuda && absent && !is_required("gpu");
        printf("%s: %s\n", skip ? "skipped" : "no device", fp8_last_error());
        return skip ? 77 : 1;
    }
    rig.info.size = sizeof rig.info;
    RIG_OK(fp8_context_info(rig.context, &rig.info));
    RIG_OK(fp8_stream_create(rig.context, &rig.stream));
    printf("device: %s, products by %s\n", rig.info.name, rig.gemm ? rig.gemm : "choice");
    int failed = _cmocka_run_group_tests(name, tests, count, NULL, NULL);
    rig_release_kept();
    fp8_stream_destroy(rig.context, rig.stream);
    fp8_context_destroy(rig.context);
    return failed;
}

static _Thread_local bool in_thread;
static atomic_int thread_failures;

void rig_thread_begin(void)
{
    in_thread = true;
}

int rig_thread_failures(void)
{
    return atomic_exchange(&thread_failures, 0);
}

static void failed_at(const char *file, int line)
{
    if (!in_thread)
        _fail(file, line);
    atomic_fetch_add(&thread_failures, 1);
}

void rig_expect(fp8_status got, fp8_status want, const char *call, const char *file, int line)
{
    const char *sentence = fp8_last_error();
    if (got != want) {
        print_error("%s: %s (%s), expected %s\n", call, fp8_status_name(got),
                    got == FP8_OK ? "" : sentence, fp8_status_name(want));
        failed_at(file, line);
    }
    if (want != FP8_OK && sentence[0] == 0) {
        print_error("%s: refused without a sentence\n", call);
        failed_at(file, line);
    }
}

void rig_expect_sentence(const char *part)
{
    if (strstr(fp8_last_error(), part) == NULL)
        fail_msg("'%s' does not name '%s'", fp8_last_error(), part);
}

int64_t rig_cut(const char *what, int64_t full, int64_t on_host)
{
    if (rig.cuda || full <= on_host)
        return full;
    print_message(
        "on the host %s is cut from %lld to %lld: the full one takes minutes on few cores\n", what,
        (long long)full, (long long)on_host);
    return on_host;
}

/* ---- random numbers ---- */

uint64_t rig_hash(uint64_t seed, uint64_t index)
{
    uint64_t z = seed * 0x9E3779B97F4A7C15u + (index + 1) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

int64_t rig_below(uint64_t *seed, int64_t limit)
{
    *seed = rig_hash(*seed, 0);
    return (int64_t)(*seed % (uint64_t)limit);
}

/* The sum of eight uniform numbers: near enough to normal, and quick. */
double rig_normal(uint64_t seed, uint64_t index)
{
    uint64_t bits[2] = { rig_hash(seed, 2 * index), rig_hash(seed, 2 * index + 1) };
    int64_t sum = 0;
    for (int i = 0; i < 8; i++)
        sum += (int64_t)(bits[i / 4] >> 16 * (i % 4) & 0xFFFF);
    return ((double)sum / 65536.0 - 4.0 + 8.0 / 131072.0) * 1.2247448713915890;
}

/* ---- guarded memory ---- */

void rig_block_make(struct rig_block *block, size_t bytes, size_t shift, uint8_t poison)
{
    block->bytes = bytes;
    block->poison = poison;
    block->front = GUARD + shift % ALIGN;
    block->total = block->front + bytes + GUARD;
    RIG_OK(fp8_memory_alloc(rig.context, block->total, &block->memory));
    block->whole = malloc(block->total);
    assert_non_null(block->whole);
    memset(block->whole, poison, block->total);
    block->device = (unsigned char *)block->memory + block->front;
    block->image = block->whole + block->front;
    assert_int_equal((uintptr_t)block->memory % ALIGN, 0);
    rig_block_push(block);
}

void rig_block_push(struct rig_block *block)
{
    RIG_OK(fp8_memory_copy(rig.context, block->memory, block->whole, block->total, rig.stream));
    RIG_OK(fp8_stream_synchronize(rig.context, rig.stream));
}

void rig_block_pull(struct rig_block *block, const char *name)
{
    RIG_OK(fp8_memory_copy(rig.context, block->whole, block->memory, block->total, rig.stream));
    RIG_OK(fp8_stream_synchronize(rig.context, rig.stream));
    for (size_t i = 0; i < block->total; i++) {
        if (i == block->front)
            i += block->bytes;
        if (i < block->total && block->whole[i] != block->poison)
            fail_msg("%s: the byte %lld before or behind its %zu bytes was written (0x%02X)", name,
                     (long long)i - (long long)block->front, block->bytes, block->whole[i]);
    }
}

void rig_block_free(struct rig_block *block)
{
    fp8_memory_free(rig.context, block->memory);
    free(block->whole);
    memset(block, 0, sizeof *block);
}

void rig_scratch_make(struct rig_scratch *scratch, size_t bytes, size_t shift, uint8_t poison)
{
    size_t total = GUARD + shift % ALIGN + bytes + GUARD;
    scratch->bytes = bytes;
    scratch->memory = kept_memory;
    scratch->capacity = kept_capacity;
    kept_memory = NULL;
    kept_capacity = 0;
    if (scratch->capacity < total) {
        fp8_memory_free(rig.context, scratch->memory);
        RIG_OK(fp8_memory_alloc(rig.context, total, &scratch->memory));
        scratch->capacity = total;
    }
    scratch->device = (unsigned char *)scratch->memory + GUARD + shift % ALIGN;
    rig_scratch_poison(scratch, poison);
}

void rig_scratch_poison(struct rig_scratch *scratch, uint8_t poison)
{
    size_t total =
        (size_t)(scratch->device - (unsigned char *)scratch->memory) + scratch->bytes + GUARD;
    scratch->poison = poison;
    RIG_OK(fp8_memory_fill(rig.context, scratch->memory, poison, total, rig.stream));
    RIG_OK(fp8_stream_synchronize(rig.context, rig.stream));
}

void rig_scratch_check(struct rig_scratch *scratch, const char *name)
{
    unsigned char guards[2][GUARD];
    const unsigned char *before = scratch->device - GUARD;
    const unsigned char *behind = scratch->device + scratch->bytes;
    RIG_OK(fp8_memory_copy(rig.context, guards[0], before, GUARD, rig.stream));
    RIG_OK(fp8_memory_copy(rig.context, guards[1], behind, GUARD, rig.stream));
    RIG_OK(fp8_stream_synchronize(rig.context, rig.stream));
    for (int i = 0; i < 2 * GUARD; i++) {
        if (guards[i / GUARD][i % GUARD] != scratch->poison)
            fail_msg("%s: byte %d of the guard %s its %zu bytes was written", name, i % GUARD,
                     i < GUARD ? "before" : "behind", scratch->bytes);
    }
}

void rig_scratch_free(struct rig_scratch *scratch)
{
    if (scratch->capacity > kept_capacity) {
        fp8_memory_free(rig.context, kept_memory);
        kept_memory = scratch->memory;
        kept_capacity = scratch->capacity;
    } else {
        fp8_memory_free(rig.context, scratch->memory);
    }
    memset(scratch, 0, sizeof *scratch);
}

void rig_release_kept(void)
{
    fp8_memory_free(rig.context, kept_memory);
    kept_memory = NULL;
    kept_capacity = 0;
}

void rig_tensor_make(struct rig_tensor *tensor, const char *name, fp8_dtype dtype, int64_t rows,
                     int64_t cols, int64_t gap, int64_t offset, uint8_t poison)
{
    size_t element = fp8_dtype_bytes(dtype);
    int64_t ld = cols + gap;
    size_t bytes = rows == 0 ? 0 : (size_t)((rows - 1) * ld + cols) * element;
    tensor->name = name;
    rig_block_make(&tensor->block, bytes, (size_t)offset * element, poison);
    tensor->t = (fp8_tensor){ tensor->block.device, rows, cols, ld, dtype, 0 };
}

void rig_tensor_push(struct rig_tensor *tensor)
{
    rig_block_push(&tensor->block);
}

void rig_tensor_pull(struct rig_tensor *tensor)
{
    const fp8_tensor *t = &tensor->t;
    size_t element = fp8_dtype_bytes(t->dtype), gap = (size_t)(t->ld - t->cols) * element;
    rig_block_pull(&tensor->block, tensor->name);
    for (int64_t i = 0; i + 1 < t->rows && gap > 0; i++) {
        const unsigned char *at = tensor->block.image + (size_t)(i * t->ld + t->cols) * element;
        for (size_t j = 0; j < gap; j++) {
            if (at[j] != tensor->block.poison)
                fail_msg(
                    "%s: written between rows %lld and %lld, %zu bytes past the end of the row",
                    tensor->name, (long long)i, (long long)i + 1, j);
        }
    }
}

void rig_tensor_unchanged(struct rig_tensor *tensor)
{
    unsigned char *before = malloc(tensor->block.total);
    assert_non_null(before);
    memcpy(before, tensor->block.whole, tensor->block.total);
    rig_tensor_pull(tensor);
    bool same = memcmp(before, tensor->block.whole, tensor->block.total) == 0;
    free(before);
    if (!same)
        fail_msg("%s was changed", tensor->name);
}

void rig_tensor_free(struct rig_tensor *tensor)
{
    rig_block_free(&tensor->block);
}

uint32_t rig_bits(const struct rig_tensor *tensor, int64_t i, int64_t j)
{
    size_t at = (size_t)(i * tensor->t.ld + j);
    if (fp8_dtype_bytes(tensor->t.dtype) == 4)
        return ((const uint32_t *)tensor->block.image)[at];
    return ((const uint16_t *)tensor->block.image)[at];
}

void rig_set_bits(struct rig_tensor *tensor, int64_t i, int64_t j, uint32_t bits)
{
    size_t at = (size_t)(i * tensor->t.ld + j);
    if (fp8_dtype_bytes(tensor->t.dtype) == 4)
        ((uint32_t *)tensor->block.image)[at] = bits;
    else
        ((uint16_t *)tensor->block.image)[at] = (uint16_t)bits;
}

float rig_value(fp8_dtype dtype, uint32_t bits)
{
    if (dtype == FP8_DTYPE_BF16)
        return fp8_bf16_to_float((uint16_t)bits);
    return dtype == FP8_DTYPE_FP16 ? fp8_fp16_to_float((uint16_t)bits) : fp8_float_of_bits(bits);
}

uint32_t rig_rounded(fp8_dtype dtype, float value)
{
    if (dtype == FP8_DTYPE_BF16)
        return fp8_float_to_bf16(value);
    return dtype == FP8_DTYPE_FP16 ? fp8_float_to_fp16(value) : fp8_bits_of_float(value);
}

float rig_get(const struct rig_tensor *tensor, int64_t i, int64_t j)
{
    return rig_value(tensor->t.dtype, rig_bits(tensor, i, j));
}

void rig_set(struct rig_tensor *tensor, int64_t i, int64_t j, float value)
{
    rig_set_bits(tensor, i, j, rig_rounded(tensor->t.dtype, value));
}

void rig_set_all(struct rig_tensor *tensor, float value)
{
    for (int64_t i = 0; i < tensor->t.rows; i++) {
        for (int64_t j = 0; j < tensor->t.cols; j++)
            rig_set(tensor, i, j, value);
    }
}

void rig_operand_make(struct rig_operand *operand, size_t bytes, uint8_t poison)
{
    rig_block_make(&operand->block, bytes, 0, poison);
    operand->op = (fp8_operand)FP8_OPERAND_INIT;
    operand->op.data = operand->block.device;
    operand->op.bytes = bytes;
}

void rig_operand_free(struct rig_operand *operand)
{
    rig_block_free(&operand->block);
}

/* ---- bundles and layers ---- */

static int remove_entry(const char *path, const struct stat *status, int flag, struct FTW *place)
{
    (void)status;
    (void)flag;
    (void)place;
    return remove(path);
}

void rig_bundle_open(const char *spec_text, char path[256], fp8_bundle **bundle)
{
    char arch[32] = "none";
    if (rig.cuda)
        snprintf(arch, sizeof arch, "sm_%d%s", rig.info.arch, rig.info.arch >= 90 ? "a" : "");
    const char *temporary = getenv("TMPDIR");
    snprintf(path, 240, "%s/fp8gen-test-XXXXXX", temporary != NULL ? temporary : "/tmp");
    assert_non_null(mkdtemp(path));
    strcat(path, "/bundle");

    fp8gen *gen = NULL;
    fp8gen_build_options options = FP8GEN_BUILD_OPTIONS_INIT;
    options.archs = arch;
    options.output_dir = path;
    fp8gen_options session = FP8GEN_OPTIONS_INIT;
    session.template_dir = rig.templates;
    assert_int_equal(fp8gen_open(&session, &gen), FP8GEN_OK);
    fp8gen_status status = rig.gemm != NULL ? fp8gen_override(gen, "gemm", rig.gemm) : FP8GEN_OK;
    if (status == FP8GEN_OK)
        status = fp8gen_load_text(gen, "test.lua", spec_text, strlen(spec_text));
    if (status == FP8GEN_OK)
        status = fp8gen_build(gen, &options);
    if (status != FP8GEN_OK)
        print_error("%s", fp8gen_diagnostics(gen));
    fp8gen_close(gen);
    assert_int_equal(status, FP8GEN_OK);
    RIG_OK(fp8_bundle_open(rig.context, path, bundle));
}

void rig_bundle_drop(const char *path, fp8_bundle *bundle)
{
    char folder[256];
    fp8_bundle_close(bundle);
    snprintf(folder, sizeof folder, "%s", path);
    *strrchr(folder, '/') = 0;
    nftw(folder, remove_entry, 16, FTW_DEPTH | FTW_PHYS);
}

static const char *dtype_or(fp8_dtype dtype, const char *fallback)
{
    return dtype == FP8_DTYPE_NONE ? fallback : fp8_dtype_name(dtype);
}

const char *const rig_recipe_names[RIG_RECIPES] = {
    [RIG_CURRENT] = "current", [RIG_DELAYED] = "delayed",
    [RIG_ROWWISE] = "rowwise", [RIG_ROWWISE_HP_WGRAD] = "rowwise_hp_wgrad",
    [RIG_BLOCK] = "block",
};

bool rig_is_fast(const struct rig_spec *spec, fp8_pass pass)
{
    if (spec->bf16 || spec->recipe == RIG_BLOCK)
        return false;
    if (pass == FP8_PASS_WGRAD && spec->recipe == RIG_ROWWISE_HP_WGRAD)
        return false;
    if (spec->interval > 0)
        return true;
    return pass == FP8_PASS_FPROP   ? !spec->fprop_split
           : pass == FP8_PASS_DGRAD ? spec->dgrad_fast
                                    : spec->wgrad_fast;
}

void rig_set_kind(struct rig_spec *spec, int kind)
{
    spec->bf16 = kind == RIG_RECIPES;
    spec->recipe = spec->bf16 ? RIG_CURRENT : (enum rig_recipe)kind;
    spec->power_of_two = !spec->bf16 && kind >= RIG_ROWWISE;
    if (spec->bf16)
        spec->weight = FP8_DTYPE_BF16;
}

static const char *pace(const struct rig_spec *spec, fp8_pass pass)
{
    if (spec->interval > 0)
        return spec->interval == 256 ? "256" : "512";
    return rig_is_fast(spec, pass) ? "fast" : "split";
}

static void print_recipe(char *text, size_t room, const struct rig_spec *s)
{
    bool has_format = s->recipe == RIG_CURRENT || s->recipe == RIG_DELAYED;
    if (s->bf16)
        snprintf(text, room, "compute = \"bf16\"");
    else
        snprintf(text, room, "recipe = recipe.%s { %s%s%s%spower_of_two = %s }",
                 rig_recipe_names[s->recipe], has_format ? "format = \"" : "",
                 !has_format ? ""
                 : s->e4m3   ? "e4m3"
                             : "hybrid",
                 has_format ? "\", " : "", s->shards > 0 ? "weight_scale = \"shard\", " : "",
                 s->power_of_two ? "true" : "false");
}

static int print_layer(char *text, size_t room, const struct rig_spec *s, int index)
{
    long long max_tokens = s->max_tokens != 0 ? s->max_tokens : 512;
    char recipe[160];
    print_recipe(recipe, sizeof recipe, s);
    return snprintf(text, room,
                    "linear \"l%d\" { out_features = %lld, in_features = %lld, tokens = %lld, "
                    "max_tokens = %lld,\n"
                    "  bias = %s, weight = \"%s\", output = \"%s\", grad_input = \"%s\", "
                    "grad_weight = \"%s\",\n  %s,\n"
                    "  accumulation = { fprop = \"%s\", dgrad = \"%s\", wgrad = \"%s\" } },\n",
                    index, (long long)s->out_features, (long long)s->in_features, max_tokens,
                    max_tokens, s->bias ? "true" : "false", dtype_or(s->weight, "bf16"),
                    dtype_or(s->output, "bf16"), dtype_or(s->grad_input, "bf16"),
                    dtype_or(s->grad_weight, "fp32"), recipe, pace(s, FP8_PASS_FPROP),
                    pace(s, FP8_PASS_DGRAD), pace(s, FP8_PASS_WGRAD));
}

void rig_layers_open(struct rig_layers *layers, const struct rig_spec *specs, int count)
{
    size_t room = 256 + (size_t)count * 700;
    char *text = malloc(room);
    assert_non_null(text);
    const long long ranks = specs[0].shards > 0 ? specs[0].shards : 1;
    size_t at = (size_t)snprintf(
        text, room, "return model \"test\" { mesh = { fsdp = %lld }, layers = {\n", ranks);
    for (int i = 0; i < count; i++) /* one mesh for all */
        at += (size_t)print_layer(text + at, room - at, &specs[i], i);
    snprintf(text + at, room - at, "} }\n");
    rig_bundle_open(text, layers->path, &layers->bundle);
    free(text);

    layers->count = count;
    layers->layer = calloc((size_t)count, sizeof *layers->layer);
    assert_non_null(layers->layer);
    assert_int_equal(fp8_bundle_layer_count(layers->bundle), count);
    for (int i = 0; i < count; i++) {
        struct rig_layer *layer = &layers->layer[i];
        layer->spec = specs[i];
        layer->info.size = sizeof layer->info;
        RIG_OK(fp8_layer_create(layers->bundle, fp8_bundle_layer_name(layers->bundle, i),
                                &layer->handle));
        RIG_OK(fp8_layer_describe(layer->handle, &layer->info));
        assert_int_equal(layer->info.out_features, specs[i].out_features);
        assert_int_equal(layer->info.in_features, specs[i].in_features);
    }
}

void rig_layers_close(struct rig_layers *layers)
{
    for (int i = 0; i < layers->count; i++)
        fp8_layer_destroy(layers->layer[i].handle);
    free(layers->layer);
    rig_bundle_drop(layers->path, layers->bundle);
    memset(layers, 0, sizeof *layers);
}

struct rig_layers rig_shared;

int rig_shared_close(void **state)
{
    (void)state;
    rig_layers_close(&rig_shared);
    return 0;
}

size_t rig_bytes(const struct rig_layer *layer, int64_t tokens, fp8_bytes which)
{
    size_t bytes = 0;
    RIG_OK(fp8_layer_bytes(layer->handle, tokens, which, &bytes));
    return bytes;
}

void rig_workspace_make(struct rig_scratch *workspace, const struct rig_layers *layers,
                        int64_t tokens, uint8_t poison)
{
    size_t most = 0;
    for (int i = 0; i < layers->count; i++) {
        size_t bytes = rig_bytes(&layers->layer[i], tokens, FP8_BYTES_WORKSPACE);
        most = bytes > most ? bytes : most;
    }
    rig_scratch_make(workspace, most, 0, poison);
}

fp8_call rig_call(const struct rig_scratch *workspace)
{
    fp8_call call = FP8_CALL_INIT;
    call.workspace = workspace->device;
    call.workspace_bytes = workspace->bytes;
    call.stream = rig.stream;
    return call;
}
