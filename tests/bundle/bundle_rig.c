/*
 * bundle_rig.c - see bundle_rig.h.
 */
#include "tests/bundle/bundle_rig.h"

#include <dlfcn.h>
#include <ftw.h>
#include <inttypes.h>
#include <sys/stat.h>
#include <unistd.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "gen/fp8gen.h"
#include "runtime/bundle_format.h"
#include "runtime/host.h"

static const char spec[] =
    "return model \"bundle_tests\" {\n"
    "  tokens = 40, max_tokens = 300,\n"
    "  layers = {\n"
    "    linear \"plain\" { in_features = 72, out_features = 96 },\n"
    "    linear \"bias\" { in_features = 50, out_features = 37, bias = true },\n"
    "    linear \"wide\" { in_features = 33, out_features = 20, weight = \"fp32\", output = "
    "\"fp32\",\n"
    "                    grad_input = \"fp32\", grad_weight = \"bf16\" },\n"
    "    linear \"e4m3\" { in_features = 16, out_features = 128, bias = true,\n"
    "                    recipe = recipe.current { format = \"e4m3\", power_of_two = true } },\n"
    "    linear \"half\" { in_features = 48, out_features = 40, bias = true, output = \"fp16\",\n"
    "                    grad_input = \"fp16\", grad_weight = \"fp16\" },\n"
    "  },\n"
    "}\n";

const char bundle_recipes[] =
    "return model \"recipes\" { tokens = 40, max_tokens = 300, bias = true, layers = {\n"
    "  linear \"delayed\" { in_features = 72, out_features = 96,\n"
    "    recipe = recipe.delayed { calibrate = true, history_length = 4, margin = 2 } },\n"
    "  linear \"rowwise\" { in_features = 72, out_features = 96, recipe = recipe.rowwise {} },\n"
    "  linear \"hp\" { in_features = 72, out_features = 96, recipe = recipe.rowwise_hp_wgrad {} "
    "},\n"
    "  linear \"block\" { in_features = 72, out_features = 96, recipe = recipe.block {} },\n"
    "  linear \"bf16\" { in_features = 72, out_features = 96, compute = \"bf16\" },\n"
    "} }\n";

/* ---- folders and files ---- */

char *bundle_folder(void)
{
    const char *base = getenv("TMPDIR");
    char *folder = malloc(512);
    assert_non_null(folder);
    snprintf(folder, 512, "%s/fp8_bundle_XXXXXX", base && *base ? base : "/tmp");
    assert_non_null(mkdtemp(folder));
    return folder;
}

static int remove_one(const char *path, const struct stat *info, int type, struct FTW *walk)
{
    (void)info, (void)type, (void)walk;
    return remove(path);
}

void bundle_remove(char *folder)
{
    nftw(folder, remove_one, 8, FTW_DEPTH | FTW_PHYS);
    free(folder);
}

void bundle_write_file(const char *folder, const char *name, const void *data, size_t size)
{
    char path[1024];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *file = fopen(path, "wb");
    assert_non_null(file);
    assert_int_equal(fwrite(data, 1, size, file), size);
    fclose(file);
}

void *bundle_read_file(const char *folder, const char *name, size_t *size)
{
    char path[1024];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *file = fopen(path, "rb");
    assert_non_null(file);
    fseek(file, 0, SEEK_END);
    *size = (size_t)ftell(file);
    rewind(file);
    char *data = malloc(*size + 1);
    assert_non_null(data);
    assert_int_equal(fread(data, 1, *size, file), *size);
    data[*size] = '\0';
    fclose(file);
    return data;
}

/* ---- manifests ---- */

static char *make_manifest(const char *gemm, const char *text_of_spec, size_t *length)
{
    char *folder = bundle_folder();
    char path[600];
    fp8gen *gen;
    snprintf(path, sizeof path, "%s/made", folder);
    assert_int_equal(fp8gen_open(NULL, &gen), FP8GEN_OK);
    fp8gen_build_options options = FP8GEN_BUILD_OPTIONS_INIT;
    options.archs = "none";
    options.output_dir = path;
    if (fp8gen_override(gen, "gemm", gemm) != FP8GEN_OK ||
        fp8gen_load_text(gen, "bundle_tests.lua", text_of_spec, strlen(text_of_spec)) !=
            FP8GEN_OK ||
        fp8gen_build(gen, &options) != FP8GEN_OK)
        fail_msg("%s", fp8gen_diagnostics(gen));
    fp8gen_close(gen);
    char *text = bundle_read_file(path, FP8_BUNDLE_MANIFEST, length);
    bundle_remove(folder);
    return text;
}

json_t *bundle_manifest_by(const char *gemm)
{
    enum { KEPT = 64 };
    static struct {
        char gemm[64];
        char *text;
        size_t length;
    } kept[KEPT];
    int i = 0;
    while (kept[i].text && strcmp(kept[i].gemm, gemm) != 0)
        i++;
    assert_true(i < KEPT);
    if (!kept[i].text) {
        kept[i].text = make_manifest(gemm, spec, &kept[i].length);
        snprintf(kept[i].gemm, sizeof kept[i].gemm, "%s", gemm);
    }
    json_t *manifest = json_loadb(kept[i].text, kept[i].length, JSON_REJECT_DUPLICATES, NULL);
    assert_non_null(manifest);
    return manifest;
}

json_t *bundle_manifest_of(const char *text_of_spec, const char *gemm)
{
    size_t length;
    char *text = make_manifest(gemm, text_of_spec, &length);
    json_t *manifest = json_loadb(text, length, JSON_REJECT_DUPLICATES, NULL);
    assert_non_null(manifest);
    free(text);
    return manifest;
}

json_t *bundle_manifest(void)
{
    return bundle_manifest_by("cublaslt");
}

static void hash_text(const void *data, size_t size, char text[33])
{
    XXH128_hash_t hash = XXH3_128bits(data, size);
    snprintf(text, 33, "%016" PRIx64 "%016" PRIx64, hash.high64, hash.low64);
}

static bool exists_for(const json_t *kernel, const char *arch)
{
    size_t index;
    json_t *name;
    const json_t *archs = json_object_get(kernel, "archs");
    json_array_foreach((json_t *)archs, index, name)
    {
        if (strcmp(json_string_value(name), arch) == 0)
            return true;
    }
    return archs == NULL;
}

void bundle_add_arch(json_t *manifest, const char *folder, const char *arch)
{
    char path[1024];
    size_t index;
    json_t *kernel;
    json_array_append_new(json_object_get(manifest, "archs"), json_string(arch));
    snprintf(path, sizeof path, "%s/" FP8_BUNDLE_KERNEL_DIR, folder);
    mkdir(path, 0700);
    json_array_foreach(json_object_get(manifest, "kernels"), index, kernel)
    {
        const char *name = json_string_value(json_object_get(kernel, "name"));
        if (!exists_for(kernel, arch))
            continue;
        char file[256], cubin[256], hash[33];
        snprintf(file, sizeof file, FP8_BUNDLE_KERNEL_DIR "/%s.%s.cubin", name, arch);
        int size = snprintf(cubin, sizeof cubin, "fake cubin of %s for %s", name, arch);
        bundle_write_file(folder, file, cubin, (size_t)size);
        hash_text(cubin, (size_t)size, hash);
        json_array_append_new(json_object_get(kernel, "cubins"),
                              json_pack("{s:s, s:s, s:i, s:s}", "arch", arch, "file", file, "bytes",
                                        size, "xxh128", hash));
    }
}

void bundle_seal(json_t *manifest)
{
    char hash[33];
    json_object_del(manifest, "digest");
    char *compact = json_dumps(manifest, JSON_COMPACT | JSON_SORT_KEYS);
    assert_non_null(compact);
    hash_text(compact, strlen(compact), hash);
    free(compact);
    json_object_set_new(manifest, "digest", json_string(hash));
}

void bundle_write(const json_t *manifest, const char *folder)
{
    char *text = json_dumps(manifest, JSON_INDENT(2) | JSON_SORT_KEYS);
    assert_non_null(text);
    bundle_write_file(folder, FP8_BUNDLE_MANIFEST, text, strlen(text));
    free(text);
}

/* ---- paths in JSON ---- */

static json_t *child(json_t *parent, const char *key)
{
    return json_is_array(parent) ? json_array_get(parent, (size_t)atoi(key))
                                 : json_object_get(parent, key);
}

static json_t *walk(json_t *root, const char *path, char *last, size_t size)
{
    json_t *at = root;
    for (;;) {
        size_t length = strcspn(path, ".");
        snprintf(last, size, "%.*s", (int)length, path);
        if (!path[length])
            return at;
        at = child(at, last);
        path += length + 1;
    }
}

json_t *bundle_at(json_t *root, const char *path)
{
    char last[64];
    json_t *parent = walk(root, path, last, sizeof last);
    return parent ? child(parent, last) : NULL;
}

void bundle_set(json_t *root, const char *path, json_t *value)
{
    char last[64];
    json_t *parent = walk(root, path, last, sizeof last);
    assert_non_null(parent);
    if (json_is_array(parent)) {
        if (value)
            json_array_set_new(parent, (size_t)atoi(last), value);
        else
            json_array_remove(parent, (size_t)atoi(last));
    } else if (value) {
        json_object_set_new(parent, last, value);
    } else {
        json_object_del(parent, last);
    }
}

/* ---- the fakes ---- */

static void *open_fake(const char *name)
{
    char path[1024];
    const char *build = getenv("FP8_TEST_BUILD");
    snprintf(path, sizeof path, "%s/fake/%s", build ? build : "build", name);
    void *handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!handle)
        fail_msg("%s", dlerror());
    return handle;
}

struct fake_cuda *bundle_fake_cuda(void)
{
    static struct fake_cuda *state;
    if (!state) {
        fake_cuda_getter getter;
        *(void **)&getter = dlsym(open_fake("libcuda.so.1"), "fake_cuda_state");
        state = getter();
    }
    return state;
}

struct fake_lt *bundle_fake_lt(void)
{
    static struct fake_lt *state;
    if (!state) {
        fake_lt_getter getter;
        *(void **)&getter = dlsym(open_fake("libcublasLt.so.13"), "fake_lt_state");
        state = getter();
    }
    return state;
}

/* ---- execution ---- */

static json_t *executed; /* the kernels of a manifest */

#define ARG(name, type) #name,
#define X(NAME, name, ARGS) [FP8_OP_##NAME] = { name, { ARGS(ARG) }, FP8_##NAME##_ARG_COUNT },
static const struct {
    const char *name;
    const char *args[FP8_OP_MAX_ARGS];
    int count;
} op_table[] = { FP8_OPS(X) };
#undef X
#undef ARG

static fp8_dtype dtype_of(json_t *kernel, const char *key)
{
    const char *text =
        json_string_value(json_object_get(json_object_get(kernel, "semantics"), key));
    for (int dtype = FP8_DTYPE_E4M3; text && dtype <= FP8_DTYPE_FP16; dtype++) {
        if (strcmp(fp8_dtype_name((fp8_dtype)dtype), text) == 0)
            return (fp8_dtype)dtype;
    }
    return FP8_DTYPE_NONE;
}

static bool flag_of(json_t *kernel, const char *key)
{
    return json_is_true(json_object_get(json_object_get(kernel, "semantics"), key));
}

static int32_t margin_of(json_t *kernel)
{
    return (int32_t)json_integer_value(
        json_object_get(json_object_get(kernel, "semantics"), "margin"));
}

static fp8_scaling scaling_named(json_t *kernel, const char *key)
{
    static const char *const names[] = { [FP8_SCALING_TENSOR] = "tensor",
                                         [FP8_SCALING_ROW] = "row",
                                         [FP8_SCALING_BLOCK] = "block",
                                         [FP8_SCALING_TILE] = "tile",
                                         [FP8_SCALING_NONE] = "none" };
    json_t *semantics = json_object_get(kernel, "semantics");
    const char *text = json_string_value(json_object_get(semantics, key));
    const char *block = json_string_value(json_object_get(semantics, "block"));
    if (block)
        return strcmp(block, "128x128") == 0 ? FP8_SCALING_TILE : FP8_SCALING_BLOCK;
    for (int i = 0; text && i <= FP8_SCALING_NONE; i++) {
        if (strcmp(names[i], text) == 0)
            return (fp8_scaling)i;
    }
    return FP8_SCALING_TENSOR;
}

/* The tensor maps of a gemm kernel and what goes with them. */
struct maps {
    struct fake_map a, b, out;
    int out_by_map;
};

/* A parameter that is no argument of the op. */
static bool unpack_special(json_t *arg, const void *parameter, struct maps *maps)
{
    const char *name = json_string_value(json_object_get(arg, "name"));
    if (strcmp(name, "out_by_map") == 0) {
        maps->out_by_map = *(const int32_t *)parameter;
        return true;
    }
    if (!json_object_get(arg, "box"))
        return false;
    struct fake_map *map = name[0] == 'a' ? &maps->a : name[0] == 'b' ? &maps->b : &maps->out;
    assert_int_equal((uintptr_t)parameter % 64, 0);
    memcpy(map, parameter, sizeof *map);
    if (map->magic) {
        assert_int_equal(map->box_cols, json_integer_value(bundle_at(arg, "box.0")));
        assert_int_equal(map->box_rows, json_integer_value(bundle_at(arg, "box.1")));
        return true;
    }
    const unsigned char *bytes = parameter;
    for (int i = 0; i < FP8_TENSOR_MAP_BYTES; i++)
        assert_int_equal(bytes[i], 0);
    return true;
}

/* Unpacks the parameters in the order of the kernel record. */
static void unpack(json_t *kernel, int op, void **parameters, fp8_value *values, struct maps *maps)
{
    size_t index;
    json_t *arg;
    json_array_foreach(json_object_get(kernel, "args"), index, arg)
    {
        const char *name = json_string_value(json_object_get(arg, "name"));
        const char *type = json_string_value(json_object_get(arg, "type"));
        if (unpack_special(arg, parameters[index], maps))
            continue;
        int place = 0;
        while (place < op_table[op].count && strcmp(op_table[op].args[place], name) != 0)
            place++;
        assert_true(place < op_table[op].count);
        if (strcmp(type, "pointer") == 0)
            values[place].p = *(void **)parameters[index];
        else if (strcmp(type, "int64") == 0)
            values[place].i = *(int64_t *)parameters[index];
        else
            values[place].i = *(int32_t *)parameters[index];
    }
}

static json_t *kernel_of(const char *entry)
{
    size_t index;
    json_t *kernel;
    json_array_foreach(executed, index, kernel)
    {
        if (strcmp(json_string_value(json_object_get(kernel, "entry")), entry) == 0)
            return kernel;
    }
    fail_msg("the manifest has no kernel with the entry %s", entry);
    return NULL;
}

/* A kernel of op gemm reads its operands by their maps alone, and writes out by its map or by its
 * pointer. */
static void read_maps(const struct maps *maps, const fp8_semantics *how, fp8_value *values)
{
    const struct fake_map *a = &maps->a, *b = &maps->b, *out = &maps->out;
    const int64_t size = (int64_t)fp8_dtype_bytes(how->target_dtype);
    assert_true(a->magic == FAKE_MAP_MAGIC && b->magic == FAKE_MAP_MAGIC);
    assert_true(a->type == 0 && b->type == 0); /* uint8 */
    assert_int_equal(a->cols, values[FP8_GEMM_depth].i);
    assert_int_equal(b->cols, values[FP8_GEMM_depth].i);
    assert_int_equal(a->rows, values[FP8_GEMM_rows].i);
    assert_int_equal(b->rows, values[FP8_GEMM_cols].i);
    values[FP8_GEMM_a].p = a->data, values[FP8_GEMM_a_ld].i = a->pitch;
    values[FP8_GEMM_b].p = b->data, values[FP8_GEMM_b_ld].i = b->pitch;
    values[FP8_GEMM_accumulate].i = how->accumulate;
    if (values[FP8_GEMM_rows].i == 1)
        assert_int_equal(values[FP8_GEMM_out_ld].i, values[FP8_GEMM_cols].i);
    int64_t pitch = values[FP8_GEMM_out_ld].i * size;
    bool mappable = (uintptr_t)values[FP8_GEMM_out].p % 16 == 0 && pitch % 16 == 0 &&
                    values[FP8_GEMM_cols].i * size % 16 == 0;
    assert_int_equal(maps->out_by_map, mappable && !(how->accumulate && size == 2));
    assert_true((out->magic == FAKE_MAP_MAGIC) == (maps->out_by_map == 1));
    if (!maps->out_by_map)
        return;
    static const int types[] = { [FP8_DTYPE_BF16] = 9, [FP8_DTYPE_FP32] = 7, [FP8_DTYPE_FP16] = 6 };
    assert_int_equal(out->type, types[how->target_dtype]);
    assert_ptr_equal(out->data, values[FP8_GEMM_out].p);
    assert_int_equal(out->pitch, pitch);
    assert_int_equal(out->cols, values[FP8_GEMM_cols].i);
    assert_int_equal(out->rows, values[FP8_GEMM_rows].i);
}

static void execute_launch(const char *entry, unsigned grid, unsigned block, void **parameters)
{
    json_t *kernel = kernel_of(entry);
    const char *name = json_string_value(json_object_get(kernel, "op"));
    int op = 0;
    (void)grid, (void)block;
    while (strcmp(op_table[op].name, name) != 0)
        op++;
    const bool is_gemm = strcmp(name, "gemm") == 0;
    fp8_semantics how = { .source_dtype = dtype_of(kernel, "source_dtype"),
                          .second_dtype = dtype_of(kernel, "second_dtype"),
                          .target_dtype = dtype_of(kernel, "target_dtype"),
                          .scaling = scaling_named(kernel, is_gemm ? "a_scaling" : "scaling"),
                          .second_scaling = scaling_named(kernel, "b_scaling"),
                          .power_of_two = flag_of(kernel, "power_of_two"),
                          .margin = margin_of(kernel),
                          .accumulate = flag_of(kernel, "accumulate") };
    fp8_value values[FP8_OP_MAX_ARGS] = { { 0 } };
    struct maps maps = { 0 };
    unpack(kernel, op, parameters, values, &maps);
    if (op == FP8_OP_GEMM)
        read_maps(&maps, &how, values);
    if (fp8_op_arg(op, "e5m2") >= 0) { /* kernels of both formats have one entry */
        fp8_dtype *format = op == FP8_OP_DEQUANTIZE ? &how.source_dtype : &how.target_dtype;
        *format = values[fp8_op_arg(op, "e5m2")].i ? FP8_DTYPE_E5M2 : FP8_DTYPE_E4M3;
    }
    if (op == FP8_OP_STORE) /* so have those that add and those that do not */
        how.accumulate = values[FP8_STORE_accumulate].i != 0;
    assert_int_equal(fp8_host_run(NULL, (enum fp8_op)op, &how, values), FP8_OK);
}

static size_t parameter_bytes(const char *entry, size_t index)
{
    json_t *arg = json_array_get(json_object_get(kernel_of(entry), "args"), index);
    if (!arg)
        return 0;
    const char *type = json_string_value(json_object_get(arg, "type"));
    if (strcmp(type, "tensor_map") == 0)
        return FP8_TENSOR_MAP_BYTES;
    return strcmp(type, "int32") == 0 ? 4 : 8;
}

static fp8_dtype dtype_of_cuda(int type)
{
    switch (type) {
    case 28:
        return FP8_DTYPE_E4M3;
    case 29:
        return FP8_DTYPE_E5M2;
    case 14:
        return FP8_DTYPE_BF16;
    case 2:
        return FP8_DTYPE_FP16;
    default:
        return FP8_DTYPE_FP32;
    }
}

static fp8_scaling scaling_of(int type, int mode)
{
    static const fp8_scaling scalings[] = {
        [0] = FP8_SCALING_TENSOR, [4] = FP8_SCALING_BLOCK, [5] = FP8_SCALING_TILE
    };
    return dtype_of_cuda(type) == FP8_DTYPE_BF16 ? FP8_SCALING_NONE : scalings[mode];
}

/* The library works the leading dim of scales out from the extents. */
static void put_scales(fp8_value *scales, fp8_value *ld, fp8_scaling scaling, const float *from,
                       int64_t rows, int64_t depth)
{
    static const float one = 1.0f;
    int64_t blocks = (depth + 127) / 128;
    scales->p = (void *)(uintptr_t)from;
    if (scaling == FP8_SCALING_TENSOR)
        scales->p = (void *)(uintptr_t)((from != NULL ? from : &one) - FP8_SCALES_SCALE_INV);
    ld->i = scaling == FP8_SCALING_TILE ? (blocks + 3) / 4 * 4 : (rows + 3) / 4 * 4;
}

static void execute_product(const struct fake_product *p)
{
    const fp8_semantics how = { .source_dtype = dtype_of_cuda(p->b_type),
                                .second_dtype = dtype_of_cuda(p->a_type),
                                .target_dtype = dtype_of_cuda(p->d_type),
                                .scaling = scaling_of(p->b_type, p->b_mode),
                                .second_scaling = scaling_of(p->a_type, p->a_mode),
                                .transposed = p->b_across,
                                .second_transposed = p->a_across };
    fp8_value values[FP8_GEMM_ARG_COUNT] = {
        [FP8_GEMM_a].p = (void *)(uintptr_t)p->b,
        [FP8_GEMM_a_ld].i = p->ldb,
        [FP8_GEMM_b].p = (void *)(uintptr_t)p->a,
        [FP8_GEMM_b_ld].i = p->lda,
        [FP8_GEMM_bias].p = (void *)(uintptr_t)p->bias,
        [FP8_GEMM_out].p = p->d,
        [FP8_GEMM_out_ld].i = p->ldd,
        [FP8_GEMM_rows].i = p->n,
        [FP8_GEMM_cols].i = p->m,
        [FP8_GEMM_depth].i = p->k,
        [FP8_GEMM_accumulate].i = p->accumulate,
    };
    put_scales(&values[FP8_GEMM_a_scales], &values[FP8_GEMM_a_scales_ld], how.scaling, p->b_scale,
               p->n, p->k);
    put_scales(&values[FP8_GEMM_b_scales], &values[FP8_GEMM_b_scales_ld], how.second_scaling,
               p->a_scale, p->m, p->k);
    assert_int_equal(fp8_host_run(NULL, FP8_OP_GEMM, &how, values), FP8_OK);
}

void bundle_execute(const char *manifest)
{
    json_t *root = json_loads(manifest, 0, NULL);
    assert_non_null(root);
    json_decref(executed);
    executed = json_incref(json_object_get(root, "kernels"));
    json_decref(root);
    bundle_fake_cuda()->launch = execute_launch;
    bundle_fake_cuda()->parameter = parameter_bytes;
    bundle_fake_lt()->multiply = execute_product;
}

/* ---- contexts and expectations ---- */

fp8_context *bundle_context(int32_t device)
{
    fp8_context_options options = FP8_CONTEXT_OPTIONS_INIT;
    fp8_context *context;
    options.device = device;
    options.threads = 1;
    EXPECT_OK(fp8_context_create(&options, &context));
    return context;
}

void bundle_expect(fp8_status got, fp8_status want, const char *part, const char *file, int line)
{
    if (got != want)
        fail_msg("%s:%d: %s (%s), expected %s", file, line, fp8_status_name(got),
                 got == FP8_OK ? "" : fp8_last_error(), fp8_status_name(want));
    if (want != FP8_OK && !strstr(fp8_last_error(), part))
        fail_msg("%s:%d: the sentence \"%s\" does not say \"%s\"", file, line, fp8_last_error(),
                 part);
}
