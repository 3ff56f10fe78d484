/*
 * manifest.c - manifest.json as plain structs: version, digest, kernels; layers are in manifest_layer.c.
 *
 * In: the text of a manifest. Out: structs in the bundle's arena, in which every name has been resolved and
 * every number checked; JSON is not looked at again. Strict: a field that this version does not know is
 * refused, because leaving it out could change what a pass computes. The digest is taken over the compact
 * form, so it covers every value, whatever the white space.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "runtime/json_read.h"

/* ---- the ops' arguments ---- */

struct op_arg {
    const char *name;
    enum fp8_arg_type type;
};
#define X(name, type) { #name, FP8_ARG_##type },
static const struct op_arg amax_args[] = { FP8_OP_ARGS_AMAX(X) };
static const struct op_arg quantize_args[] = { FP8_OP_ARGS_QUANTIZE(X) };
static const struct op_arg store_args[] = { FP8_OP_ARGS_STORE(X) };
static const struct op_arg dequantize_args[] = { FP8_OP_ARGS_DEQUANTIZE(X) };
static const struct op_arg gemm_args[] = { FP8_OP_ARGS_GEMM(X) };
#undef X

static const struct {
    const struct op_arg *args;
    int count;
} ops[FP8_OP_COUNT] = {
    [FP8_OP_AMAX] = { amax_args, FP8_AMAX_ARG_COUNT },
    [FP8_OP_QUANTIZE] = { quantize_args, FP8_QUANTIZE_ARG_COUNT },
    [FP8_OP_STORE] = { store_args, FP8_STORE_ARG_COUNT },
    [FP8_OP_DEQUANTIZE] = { dequantize_args, FP8_DEQUANTIZE_ARG_COUNT },
    [FP8_OP_GEMM] = { gemm_args, FP8_GEMM_ARG_COUNT },
};
#define X(NAME, name, ARGS) name,
const char *const fp8_op_names[FP8_OP_COUNT] = { FP8_OPS(X) };
#undef X

int fp8_op_arg(enum fp8_op op, const char *name)
{
    for (int i = 0; i < ops[op].count; i++) {
        if (strcmp(ops[op].args[i].name, name) == 0)
            return i;
    }
    return -1;
}

int fp8_op_arg_count(enum fp8_op op)
{
    return ops[op].count;
}

const char *fp8_op_arg_name(enum fp8_op op, int index)
{
    return ops[op].args[index].name;
}

enum fp8_arg_type fp8_op_arg_type(enum fp8_op op, int index)
{
    return ops[op].args[index].type;
}

/* ---- kernels ---- */

static fp8_status read_kernel_args(struct fp8_reader *reader, const json_t *record,
                                   struct fp8_kernel *kernel)
{
    static const char *const keys[] = { "name", "type", NULL };
    static const char *const types[] = { "pointer", "int64", "int32" };
    const json_t *args;
    FP8_TRY(fp8_read_array(reader, record, "args", FP8_OP_MAX_ARGS, &args));
    uint32_t seen = 0;
    for (size_t i = 0; i < json_array_size(args); i++) {
        size_t mark = fp8_read_enter(reader, "args[%zu]", i);
        const json_t *arg = json_array_get(args, i);
        const char *name;
        int type = 0;
        FP8_TRY(fp8_read_keys(reader, arg, keys));
        FP8_TRY(fp8_read_string(reader, arg, "name", &name));
        FP8_TRY(fp8_read_word(reader, arg, "type", types, 3, &type));
        int index = fp8_op_arg(kernel->op, name);
        if (index < 0)
            return fp8_read_bad(reader, "op '%s' has no argument '%.100s'",
                                fp8_op_names[kernel->op], name);
        if (seen >> index & 1u)
            return fp8_read_bad(reader, "argument '%s' occurs twice", name);
        if (type != (int)fp8_op_arg_type(kernel->op, index))
            return fp8_read_bad(reader, "argument '%s' is %s, op '%s' says %s", name, types[type],
                                fp8_op_names[kernel->op],
                                types[fp8_op_arg_type(kernel->op, index)]);
        seen |= 1u << index;
        kernel->arg_index[kernel->arg_count++] = (uint8_t)index;
        fp8_read_leave(reader, mark);
    }
    return FP8_OK;
}

static fp8_status read_grid_arg(struct fp8_reader *reader, const json_t *grid, const char *key,
                                enum fp8_op op, int *index)
{
    const char *name;
    FP8_TRY(fp8_read_string(reader, grid, key, &name));
    *index = fp8_op_arg(op, name);
    if (*index < 0 || fp8_op_arg_type(op, *index) == FP8_ARG_POINTER)
        return fp8_read_bad(reader, "'%s' is '%.100s', which is no integer argument of op '%s'",
                            key, name, fp8_op_names[op]);
    return FP8_OK;
}

static fp8_status read_grid(struct fp8_reader *reader, const json_t *record,
                            struct fp8_kernel *kernel)
{
    static const char *const rules[] = { "tiles", "elements" };
    static const char *const tiles_keys[] = { "rule",      "rows",        "cols",     "tile_rows",
                                              "tile_cols", "ctas_per_sm", "max_ctas", NULL };
    static const char *const elements_keys[] = { "rule",        "rows",     "cols", "tile_elements",
                                                 "ctas_per_sm", "max_ctas", NULL };
    struct fp8_grid *grid = &kernel->grid;
    const json_t *object;
    int rule = 0;
    FP8_TRY(fp8_read_object(reader, record, "grid", &object));
    size_t mark = fp8_read_enter(reader, "grid");
    FP8_TRY(fp8_read_word(reader, object, "rule", rules, 2, &rule));
    grid->rule = (enum fp8_grid_rule)rule;
    bool tiles = grid->rule == FP8_GRID_TILES;
    FP8_TRY(fp8_read_keys(reader, object, tiles ? tiles_keys : elements_keys));
    FP8_TRY(read_grid_arg(reader, object, "rows", kernel->op, &grid->rows));
    FP8_TRY(read_grid_arg(reader, object, "cols", kernel->op, &grid->cols));
    if (tiles) {
        FP8_TRY(fp8_read_integer(reader, object, "tile_rows", 1, INT32_MAX, &grid->tile_rows));
        FP8_TRY(fp8_read_integer(reader, object, "tile_cols", 1, INT32_MAX, &grid->tile_cols));
    } else {
        FP8_TRY(
            fp8_read_integer(reader, object, "tile_elements", 1, INT32_MAX, &grid->tile_elements));
    }
    FP8_TRY(fp8_read_integer(reader, object, "ctas_per_sm", 0, 1024, &grid->ctas_per_sm));
    FP8_TRY(fp8_read_integer(reader, object, "max_ctas", 0, INT32_MAX, &grid->max_ctas));
    fp8_read_leave(reader, mark);
    return FP8_OK;
}

static fp8_status read_semantics(struct fp8_reader *reader, const json_t *record,
                                 struct fp8_kernel *kernel)
{
    static const char *const keys[] = { "source_dtype", "target_dtype", "power_of_two",
                                        "accumulate", NULL };
    const json_t *object;
    FP8_TRY(fp8_read_object(reader, record, "semantics", &object));
    size_t mark = fp8_read_enter(reader, "semantics");
    FP8_TRY(fp8_read_keys(reader, object, keys));
    FP8_TRY(fp8_read_dtype(reader, object, "source_dtype", &kernel->semantics.source_dtype));
    if (kernel->op != FP8_OP_AMAX || json_object_get(object, "target_dtype"))
        FP8_TRY(fp8_read_dtype(reader, object, "target_dtype", &kernel->semantics.target_dtype));
    if (json_object_get(object, "power_of_two"))
        FP8_TRY(fp8_read_bool(reader, object, "power_of_two", &kernel->semantics.power_of_two));
    if (json_object_get(object, "accumulate"))
        FP8_TRY(fp8_read_bool(reader, object, "accumulate", &kernel->semantics.accumulate));
    fp8_read_leave(reader, mark);
    return FP8_OK;
}

/* A name below the bundle's folder, never out of it. */
static bool is_inside(const char *file)
{
    return file[0] && file[0] != '/' && !strstr(file, "..");
}

static fp8_status read_cubins(struct fp8_reader *reader, const json_t *record,
                              const struct fp8_manifest *manifest, struct fp8_kernel *kernel)
{
    static const char *const keys[] = { "arch", "file", "bytes", "xxh128", NULL };
    const json_t *array;
    FP8_TRY(fp8_read_array(reader, record, "cubins", FP8_MAX_ARCHS, &array));
    if ((int)json_array_size(array) != manifest->arch_count)
        return fp8_read_bad(reader, "%zu cubins for %d archs", json_array_size(array),
                            manifest->arch_count);
    struct fp8_cubin *cubins;
    FP8_TRY(fp8_read_allocate(reader, json_array_size(array), sizeof *cubins, (void **)&cubins));
    kernel->cubins = cubins;
    for (int i = 0; i < manifest->arch_count; i++) {
        size_t mark = fp8_read_enter(reader, "cubins[%d]", i);
        const json_t *cubin = json_array_get(array, (size_t)i);
        FP8_TRY(fp8_read_keys(reader, cubin, keys));
        FP8_TRY(fp8_read_string(reader, cubin, "arch", &cubins[i].arch));
        FP8_TRY(fp8_read_string(reader, cubin, "file", &cubins[i].file));
        FP8_TRY(fp8_read_integer(reader, cubin, "bytes", 1, INT32_MAX, &cubins[i].bytes));
        FP8_TRY(fp8_read_string(reader, cubin, "xxh128", &cubins[i].xxh128));
        if (!is_inside(cubins[i].file))
            return fp8_read_bad(reader, "file '%.100s' leads out of the bundle", cubins[i].file);
        if (strcmp(cubins[i].arch, manifest->archs[i]) != 0)
            return fp8_read_bad(reader, "arch is '%.40s', but archs[%d] is '%.40s'", cubins[i].arch,
                                i, manifest->archs[i]);
        kernel->cubin_count++;
        fp8_read_leave(reader, mark);
    }
    return FP8_OK;
}

static fp8_status read_kernel(struct fp8_reader *reader, const json_t *record,
                              const struct fp8_manifest *manifest, struct fp8_kernel *kernel)
{
    static const char *const keys[] = { "name",   "op",      "entry", "template",     "parameters",
                                        "args",   "grid",    "block", "shared_bytes", "semantics",
                                        "cubins", "cluster", NULL };
    const json_t *parameters;
    const char *template_name;
    int64_t block = 0, cluster = 0, shared = 0;
    int op = 0;
    FP8_TRY(fp8_read_keys(reader, record, keys));
    FP8_TRY(fp8_read_string(reader, record, "name", &kernel->name));
    FP8_TRY(fp8_read_word(reader, record, "op", fp8_op_names, FP8_OP_COUNT, &op));
    kernel->op = (enum fp8_op)op;
    if (kernel->op == FP8_OP_GEMM)
        return fp8_read_bad(reader, "this version runs the op gemm through cuBLASLt only");
    FP8_TRY(fp8_read_string(reader, record, "entry", &kernel->entry));
    FP8_TRY(fp8_read_string(reader, record, "template", &template_name));
    FP8_TRY(fp8_read_object(reader, record, "parameters", &parameters));
    FP8_TRY(read_semantics(reader, record, kernel));
    FP8_TRY(read_kernel_args(reader, record, kernel));
    FP8_TRY(read_grid(reader, record, kernel));
    FP8_TRY(fp8_read_integer(reader, record, "block", 1, 1024, &block));
    FP8_TRY(fp8_read_integer(reader, record, "cluster", 1, 16, &cluster));
    FP8_TRY(fp8_read_integer(reader, record, "shared_bytes", 0, 1 << 20, &shared));
    kernel->block = (int32_t)block;
    kernel->cluster = (int32_t)cluster;
    kernel->shared_bytes = (int32_t)shared;
    return read_cubins(reader, record, manifest, kernel);
}

const struct fp8_kernel *fp8_manifest_kernel(const struct fp8_manifest *manifest, const char *name)
{
    for (int i = 0; i < manifest->kernel_count; i++) {
        if (strcmp(manifest->kernels[i].name, name) == 0)
            return &manifest->kernels[i];
    }
    return NULL;
}

/* ---- the whole ---- */

static fp8_status read_archs(struct fp8_reader *reader, const json_t *root,
                             struct fp8_manifest *manifest)
{
    const json_t *archs;
    FP8_TRY(fp8_read_array(reader, root, "archs", FP8_MAX_ARCHS, &archs));
    for (size_t i = 0; i < json_array_size(archs); i++) {
        const char *text = json_string_value(json_array_get(archs, i));
        if (!text)
            return fp8_read_bad(reader, "archs[%zu] is not a string", i);
        manifest->archs[i] = fp8_arena_copy(reader->arena, text);
        if (!manifest->archs[i])
            return fp8_fail_memory("a bundle", strlen(text));
        manifest->arch_count++;
    }
    return FP8_OK;
}

static fp8_status read_kernels(struct fp8_reader *reader, const json_t *root,
                               struct fp8_manifest *manifest)
{
    const json_t *kernels;
    FP8_TRY(fp8_read_array(reader, root, "kernels", 4096, &kernels));
    size_t count = json_array_size(kernels);
    FP8_TRY(
        fp8_read_allocate(reader, count, sizeof *manifest->kernels, (void **)&manifest->kernels));
    for (size_t i = 0; i < count; i++) {
        struct fp8_kernel *kernel = &manifest->kernels[i];
        size_t mark = fp8_read_enter(reader, "kernels[%zu]", i);
        FP8_TRY(read_kernel(reader, json_array_get(kernels, i), manifest, kernel));
        if (fp8_manifest_kernel(manifest, kernel->name))
            return fp8_read_bad(reader, "the name '%.100s' occurs twice", kernel->name);
        manifest->kernel_count++;
        fp8_read_leave(reader, mark);
    }
    return FP8_OK;
}

static fp8_status read_layers(struct fp8_reader *reader, const json_t *root,
                              struct fp8_manifest *manifest)
{
    const json_t *layers;
    FP8_TRY(fp8_read_array(reader, root, "layers", 4096, &layers));
    size_t count = json_array_size(layers);
    if (count == 0)
        return fp8_read_bad(reader, "'layers' is empty");
    FP8_TRY(fp8_read_allocate(reader, count, sizeof *manifest->layers, (void **)&manifest->layers));
    for (size_t i = 0; i < count; i++) {
        struct fp8_layer_plan *plan = &manifest->layers[i];
        size_t mark = fp8_read_enter(reader, "layers[%zu]", i);
        FP8_TRY(fp8_manifest_layer(reader, manifest, json_array_get(layers, i), plan));
        for (size_t j = 0; j < i; j++) {
            if (strcmp(manifest->layers[j].name, plan->name) == 0)
                return fp8_read_bad(reader, "the name '%.100s' occurs twice", plan->name);
        }
        manifest->layer_count++;
        fp8_read_leave(reader, mark);
    }
    return FP8_OK;
}

/* One rank: other meshes are refused rather than run as if they were this one. */
static fp8_status read_mesh(struct fp8_reader *reader, const json_t *root)
{
    static const char *const keys[] = { "tensor", "fsdp", NULL };
    const json_t *mesh;
    int64_t tensor, fsdp, rank;
    FP8_TRY(fp8_read_object(reader, root, "mesh", &mesh));
    size_t mark = fp8_read_enter(reader, "mesh");
    FP8_TRY(fp8_read_keys(reader, mesh, keys));
    FP8_TRY(fp8_read_integer(reader, mesh, "tensor", 1, 1, &tensor));
    FP8_TRY(fp8_read_integer(reader, mesh, "fsdp", 1, 1, &fsdp));
    fp8_read_leave(reader, mark);
    return fp8_read_integer(reader, root, "rank", 0, 0, &rank);
}

static fp8_status check_digest(const struct fp8_reader *reader, const json_t *root)
{
    const char *digest = json_string_value(json_object_get(root, "digest"));
    if (!digest)
        return fp8_read_bad(reader, "'digest' is missing");
    json_t *rest = json_copy((json_t *)root);
    if (!rest)
        return fp8_fail_memory("the digest of a manifest", 0);
    char *compact = NULL;
    if (json_object_del(rest, "digest") == 0)
        compact = json_dumps(rest, JSON_COMPACT | JSON_SORT_KEYS);
    json_decref(rest);
    if (!compact)
        return fp8_fail_memory("the digest of a manifest", 0);
    XXH128_hash_t hash = XXH3_128bits(compact, strlen(compact));
    free(compact);
    char text[33];
    snprintf(text, sizeof text, "%016" PRIx64 "%016" PRIx64, hash.high64, hash.low64);
    if (strcmp(text, digest) != 0)
        return fp8_read_bad(reader, "the manifest was altered: its digest is %s, it says %.40s",
                            text, digest);
    return FP8_OK;
}

static fp8_status read_header(struct fp8_reader *reader, const json_t *root)
{
    static const char *const keys[] = { "format",    "format_version", "generator", "model",
                                        "spec_hash", "tuning_hash",    "mesh",      "rank",
                                        "archs",     "kernels",        "layers",    "digest",
                                        NULL };
    if (!json_is_object(root))
        return fp8_read_bad(reader, "this is no JSON object");
    const char *format = json_string_value(json_object_get(root, "format"));
    if (!format || strcmp(format, FP8_BUNDLE_FORMAT) != 0)
        return fp8_read_bad(reader, "'format' is not \"" FP8_BUNDLE_FORMAT "\"");
    const json_t *version = json_object_get(root, "format_version");
    if (!json_is_integer(version))
        return fp8_read_bad(reader, "'format_version' is missing");
    if (json_integer_value(version) != FP8_BUNDLE_FORMAT_VERSION)
        return fp8_read_bad(
            reader, "the bundle has format version %lld, this libfp8 (%s) reads version %d",
            (long long)json_integer_value(version), fp8_version(), FP8_BUNDLE_FORMAT_VERSION);
    FP8_TRY(check_digest(reader, root));
    FP8_TRY(fp8_read_keys(reader, root, keys));
    const char *text;
    FP8_TRY(fp8_read_string(reader, root, "generator", &text));
    FP8_TRY(fp8_read_string(reader, root, "model", &text));
    FP8_TRY(fp8_read_string(reader, root, "spec_hash", &text));
    if (!json_is_null(json_object_get(root, "tuning_hash")))
        FP8_TRY(fp8_read_string(reader, root, "tuning_hash", &text));
    return read_mesh(reader, root);
}

fp8_status fp8_manifest_parse(const char *path, const char *text, size_t length,
                              struct fp8_arena *arena, struct fp8_manifest *manifest)
{
    struct fp8_reader reader = { .path = path, .arena = arena };
    json_error_t error;
    memset(manifest, 0, sizeof *manifest);
    json_t *root = json_loadb(text, length, JSON_REJECT_DUPLICATES, &error);
    if (!root) {
        if (json_error_code(&error) == json_error_out_of_memory)
            return fp8_fail_memory("reading a manifest", length);
        return fp8_read_bad(&reader, "no valid JSON at line %d, column %d (%s)", error.line,
                            error.column, error.text);
    }
    fp8_status status = read_header(&reader, root);
    if (status == FP8_OK)
        status = read_archs(&reader, root, manifest);
    if (status == FP8_OK)
        status = read_kernels(&reader, root, manifest);
    if (status == FP8_OK)
        status = read_layers(&reader, root, manifest);
    json_decref(root);
    return status;
}
