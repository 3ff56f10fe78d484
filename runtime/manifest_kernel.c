/*
 * manifest_kernel.c - one kernel record of a manifest: parameters, grid, semantics, cubins.
 *
 * In: the JSON record. Out: a fp8_kernel whose parameter list is indices, so that a launch looks up
 * no name. What a launch relies on is checked here: a gemm kernel whose boxes do not fill its tiles
 * would wait for bytes that never come.
 */
#include <stdio.h>
#include <string.h>

#include "runtime/json_read.h"

/* ---- parameters ---- */

static const char *const map_names[FP8_MAP_COUNT] = { "a", "b", "out" };

static fp8_status read_box(struct fp8_reader *reader, const json_t *arg, struct fp8_box *box)
{
    const json_t *array;
    FP8_TRY(fp8_read_array(reader, arg, "box", 2, &array));
    int64_t sides[2] = { 0 };
    for (size_t i = 0; i < 2; i++) {
        const json_t *side = json_array_get(array, i);
        sides[i] = json_integer_value(side);
        if (!json_is_integer(side) || sides[i] < 1 || sides[i] > FP8_BOX_ROWS)
            return fp8_read_bad(reader, "'box' is not two extents of 1..%d", FP8_BOX_ROWS);
    }
    *box = (struct fp8_box){ (int32_t)sides[0], (int32_t)sides[1] };
    return FP8_OK;
}

/* The place in arg_index of a parameter that is no argument of the op, -1 if there is none such. */
static int special_parameter(enum fp8_op op, const char *name, bool is_map)
{
    if (op != FP8_OP_GEMM)
        return -1;
    if (!is_map)
        return strcmp(name, FP8_ARG_OUT_BY_MAP) == 0 ? FP8_PARAMETER_OUT_BY_MAP : -1;
    for (int i = 0; i < FP8_MAP_COUNT; i++) {
        if (strcmp(name, map_names[i]) == 0)
            return FP8_PARAMETER_MAP_A + i;
    }
    return -1;
}

static fp8_status read_arg(struct fp8_reader *reader, const json_t *arg, struct fp8_kernel *kernel,
                           uint32_t *seen)
{
    enum { MAP = 3 }; /* behind the types of enum fp8_arg_type */
    static const char *const types[] = { "pointer", "int64", "int32", "tensor_map" };
    static const char *const value_keys[] = { "name", "type", NULL };
    static const char *const map_keys[] = { "name", "type", "box", NULL };
    const char *name;
    int type = 0;
    if (!json_is_object(arg))
        return fp8_read_keys(reader, arg, value_keys);
    FP8_TRY(fp8_read_word(reader, arg, "type", types, 4, &type));
    FP8_TRY(fp8_read_keys(reader, arg, type == MAP ? map_keys : value_keys));
    FP8_TRY(fp8_read_string(reader, arg, "name", &name));
    int index = special_parameter(kernel->op, name, type == MAP), wanted = type;
    if (index == FP8_PARAMETER_OUT_BY_MAP) {
        wanted = FP8_ARG_INT32;
    } else if (index >= 0) {
        FP8_TRY(read_box(reader, arg, &kernel->boxes[index - FP8_PARAMETER_MAP_A]));
    } else {
        index = fp8_op_arg(kernel->op, name);
        if (index >= 0)
            wanted = (int)fp8_op_arg_type(kernel->op, index);
    }
    if (index < 0)
        return fp8_read_bad(reader, "op '%s' has no argument '%.100s'", fp8_op_names[kernel->op],
                            name);
    if (*seen >> index & 1u)
        return fp8_read_bad(reader, "argument '%s' occurs twice", name);
    if (type != wanted)
        return fp8_read_bad(reader, "argument '%s' is %s, op '%s' says %s", name, types[type],
                            fp8_op_names[kernel->op], types[wanted]);
    *seen |= 1u << index;
    kernel->arg_index[kernel->arg_count++] = (uint8_t)index;
    return FP8_OK;
}

/* What every gemm kernel takes; tiles and epoch come together or not at all. */
static const uint8_t gemm_parameters[] = {
    FP8_PARAMETER_MAP_A, FP8_PARAMETER_MAP_B, FP8_PARAMETER_MAP_OUT, FP8_GEMM_a_scales,
    FP8_GEMM_b_scales,   FP8_GEMM_bias,       FP8_GEMM_out,          FP8_GEMM_out_ld,
    FP8_GEMM_rows,       FP8_GEMM_cols,       FP8_GEMM_depth,        FP8_PARAMETER_OUT_BY_MAP,
};

static const char *parameter_name(int index)
{
    if (index == FP8_PARAMETER_OUT_BY_MAP)
        return FP8_ARG_OUT_BY_MAP;
    return index >= FP8_PARAMETER_MAP_A ? map_names[index - FP8_PARAMETER_MAP_A]
                                        : fp8_op_arg_name(FP8_OP_GEMM, index);
}

static fp8_status check_gemm_args(const struct fp8_reader *reader, uint32_t seen)
{
    uint32_t wanted = 0;
    for (size_t i = 0; i < sizeof gemm_parameters; i++)
        wanted |= 1u << gemm_parameters[i];
    if (seen >> FP8_GEMM_tiles & 1u || seen >> FP8_GEMM_epoch & 1u)
        wanted |= 1u << FP8_GEMM_tiles | 1u << FP8_GEMM_epoch;
    for (int i = 0; i < FP8_PARAMETER_END; i++) {
        if ((seen ^ wanted) >> i & 1u)
            return fp8_read_bad(
                reader, "kernels of op 'gemm' take %s '%s' by value%s",
                wanted >> i & 1u ? "the argument" : "no argument", parameter_name(i),
                i >= FP8_PARAMETER_MAP_A && i <= FP8_PARAMETER_MAP_OUT ? ", as a tensor_map" : "");
    }
    return FP8_OK;
}

static fp8_status read_args(struct fp8_reader *reader, const json_t *record,
                            struct fp8_kernel *kernel)
{
    const json_t *args;
    uint32_t seen = 0;
    FP8_TRY(fp8_read_array(reader, record, "args", FP8_OP_MAX_ARGS, &args));
    for (size_t i = 0; i < json_array_size(args); i++) {
        size_t mark = fp8_read_enter(reader, "args[%zu]", i);
        FP8_TRY(read_arg(reader, json_array_get(args, i), kernel, &seen));
        fp8_read_leave(reader, mark);
    }
    return kernel->op == FP8_OP_GEMM ? check_gemm_args(reader, seen) : FP8_OK;
}

/* ---- grid ---- */

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

static fp8_status read_caps(struct fp8_reader *reader, const json_t *object, struct fp8_grid *grid)
{
    FP8_TRY(fp8_read_integer(reader, object, "ctas_per_sm", 0, 1024, &grid->ctas_per_sm));
    FP8_TRY(fp8_read_integer(reader, object, "max_ctas", 0, INT32_MAX, &grid->max_ctas));
    return fp8_read_bool(reader, object, "persistent", &grid->persistent);
}

static fp8_status read_grid(struct fp8_reader *reader, const json_t *record,
                            struct fp8_kernel *kernel)
{
    static const char *const rules[] = { "tiles", "elements", "clusters" };
    static const char *const tiles_keys[] = { "rule",      "rows",       "cols",
                                              "tile_rows", "tile_cols",  "ctas_per_sm",
                                              "max_ctas",  "persistent", NULL };
    static const char *const elements_keys[] = { "rule",          "rows",        "cols",
                                                 "tile_elements", "ctas_per_sm", "max_ctas",
                                                 "persistent",    NULL };
    static const char *const clusters_keys[] = { "rule",      "rows",   "cols", "tile_rows",
                                                 "tile_cols", "slices", NULL };
    static const char *const *const keys[] = { tiles_keys, elements_keys, clusters_keys };
    struct fp8_grid *grid = &kernel->grid;
    const json_t *object;
    int rule = 0;
    FP8_TRY(fp8_read_object(reader, record, "grid", &object));
    size_t mark = fp8_read_enter(reader, "grid");
    FP8_TRY(fp8_read_word(reader, object, "rule", rules, 3, &rule));
    grid->rule = (enum fp8_grid_rule)rule;
    if ((grid->rule == FP8_GRID_CLUSTERS) != (kernel->op == FP8_OP_GEMM))
        return fp8_read_bad(reader, "the rule '%s' is not for kernels of op '%s'", rules[rule],
                            fp8_op_names[kernel->op]);
    FP8_TRY(fp8_read_keys(reader, object, keys[rule]));
    FP8_TRY(read_grid_arg(reader, object, "rows", kernel->op, &grid->rows));
    FP8_TRY(read_grid_arg(reader, object, "cols", kernel->op, &grid->cols));
    if (grid->rule == FP8_GRID_ELEMENTS) {
        FP8_TRY(
            fp8_read_integer(reader, object, "tile_elements", 1, INT32_MAX, &grid->tile_elements));
    } else {
        FP8_TRY(fp8_read_integer(reader, object, "tile_rows", 1, INT32_MAX, &grid->tile_rows));
        FP8_TRY(fp8_read_integer(reader, object, "tile_cols", 1, INT32_MAX, &grid->tile_cols));
    }
    if (grid->rule == FP8_GRID_CLUSTERS)
        FP8_TRY(fp8_read_integer(reader, object, "slices", 1, 16, &grid->slices));
    else
        FP8_TRY(read_caps(reader, object, grid));
    fp8_read_leave(reader, mark);
    return FP8_OK;
}

/* ---- semantics ---- */

enum { SOURCE = 1, TARGET = 2, GEMM = 4, SCALING = 8, BLOCK = 16 };

/* What the semantics of an op's kernels must say. */
static const uint8_t said[FP8_OP_COUNT] = {
    [FP8_OP_AMAX] = SOURCE,
    [FP8_OP_QUANTIZE] = SOURCE | TARGET,
    [FP8_OP_FUSED] = SOURCE | TARGET,
    [FP8_OP_CAST] = SOURCE | TARGET,
    [FP8_OP_QUANTIZE_ROW] = SOURCE | TARGET,
    [FP8_OP_LINE_AMAX] = SOURCE,
    [FP8_OP_LINE_SCALES] = TARGET,
    [FP8_OP_QUANTIZE_LINES] = SOURCE | TARGET,
    [FP8_OP_QUANTIZE_BLOCK] = SOURCE | TARGET | BLOCK,
    [FP8_OP_STORE] = SOURCE | TARGET,
    [FP8_OP_SUM] = SOURCE | TARGET,
    [FP8_OP_DEQUANTIZE] = SOURCE | TARGET | SCALING,
    [FP8_OP_GEMM] = SOURCE | TARGET | GEMM,
};

static fp8_status read_dtype_of(struct fp8_reader *reader, const json_t *object, const char *key,
                                bool needed, fp8_dtype *dtype)
{
    if (!needed && !json_object_get(object, key))
        return FP8_OK;
    return fp8_read_dtype(reader, object, key, dtype);
}

static fp8_status read_flag(struct fp8_reader *reader, const json_t *object, const char *key,
                            bool needed, bool *flag)
{
    if (!needed && !json_object_get(object, key))
        return FP8_OK;
    return fp8_read_bool(reader, object, key, flag);
}

static fp8_status read_scaling(struct fp8_reader *reader, const json_t *object, const char *key,
                               fp8_scaling *scaling)
{
    int word = 0;
    FP8_TRY(fp8_read_word(reader, object, key, fp8_scaling_names, FP8_SCALING_COUNT + 1, &word));
    *scaling = (fp8_scaling)word;
    return FP8_OK;
}

fp8_status fp8_manifest_gemm_semantics(struct fp8_reader *reader, const json_t *object,
                                       fp8_semantics *how)
{
    FP8_TRY(read_scaling(reader, object, "a_scaling", &how->scaling));
    FP8_TRY(read_scaling(reader, object, "b_scaling", &how->second_scaling));
    FP8_TRY(read_flag(reader, object, "a_transposed", false, &how->transposed));
    return read_flag(reader, object, "b_transposed", false, &how->second_transposed);
}

static fp8_status read_block(struct fp8_reader *reader, const json_t *object, fp8_semantics *how)
{
    static const char *const blocks[] = { "1x128", "128x128" };
    int word = 0;
    FP8_TRY(fp8_read_word(reader, object, "block", blocks, 2, &word));
    how->scaling = word == 0 ? FP8_SCALING_BLOCK : FP8_SCALING_TILE;
    return FP8_OK;
}

static fp8_status read_margin(struct fp8_reader *reader, const json_t *object,
                              struct fp8_kernel *kernel)
{
    int64_t margin = 0;
    if (!json_object_get(object, "margin"))
        return FP8_OK;
    if (kernel->op != FP8_OP_CAST)
        return fp8_read_bad(reader, "'margin' is not for kernels of op '%s'",
                            fp8_op_names[kernel->op]);
    FP8_TRY(fp8_read_integer(reader, object, "margin", 0, FP8_MOST_MARGIN, &margin));
    kernel->semantics.margin = (int32_t)margin;
    return FP8_OK;
}

static fp8_status read_semantics(struct fp8_reader *reader, const json_t *record,
                                 struct fp8_kernel *kernel)
{
    static const char *const keys[] = { "source_dtype",
                                        "target_dtype",
                                        "power_of_two",
                                        "accumulate",
                                        "second_dtype",
                                        "scaling",
                                        "block",
                                        "a_scaling",
                                        "b_scaling",
                                        "a_transposed",
                                        "b_transposed",
                                        "margin",
                                        NULL };
    const json_t *object;
    fp8_semantics *how = &kernel->semantics;
    const unsigned needs = said[kernel->op];
    FP8_TRY(fp8_read_object(reader, record, "semantics", &object));
    size_t mark = fp8_read_enter(reader, "semantics");
    FP8_TRY(fp8_read_keys(reader, object, keys));
    FP8_TRY(read_dtype_of(reader, object, "source_dtype", needs & SOURCE, &how->source_dtype));
    FP8_TRY(read_dtype_of(reader, object, "second_dtype", needs & GEMM, &how->second_dtype));
    FP8_TRY(read_dtype_of(reader, object, "target_dtype", needs & TARGET, &how->target_dtype));
    FP8_TRY(read_flag(reader, object, "power_of_two", false, &how->power_of_two));
    FP8_TRY(read_flag(reader, object, "accumulate", needs & GEMM, &how->accumulate));
    FP8_TRY(read_margin(reader, object, kernel));
    if (needs & SCALING)
        FP8_TRY(read_scaling(reader, object, "scaling", &how->scaling));
    if (needs & BLOCK)
        FP8_TRY(read_block(reader, object, how));
    if (needs & GEMM)
        FP8_TRY(fp8_manifest_gemm_semantics(reader, object, how));
    fp8_read_leave(reader, mark);
    return FP8_OK;
}

static bool is_fp8(fp8_dtype dtype)
{
    return dtype == FP8_DTYPE_E4M3 || dtype == FP8_DTYPE_E5M2;
}

/* The boxes are what TMA brings for a tile; the kernel waits for all bytes of its tiles. */
static fp8_status check_gemm(const struct fp8_reader *reader, const struct fp8_kernel *kernel)
{
    const struct fp8_box *a = &kernel->boxes[0], *b = &kernel->boxes[1], *out = &kernel->boxes[2];
    const fp8_semantics *how = &kernel->semantics;
    fp8_dtype target = how->target_dtype;
    if (!is_fp8(how->source_dtype) || !is_fp8(how->second_dtype))
        return fp8_read_bad(reader, "semantics: a gemm multiplies e4m3 and e5m2, not %s and %s",
                            fp8_dtype_name(how->source_dtype), fp8_dtype_name(how->second_dtype));
    if (how->scaling == FP8_SCALING_NONE || how->second_scaling == FP8_SCALING_NONE ||
        how->transposed || how->second_transposed)
        return fp8_read_bad(reader, "semantics: operands of a gemm kernel have scales and are not "
                                    "transposed");
    if (target != FP8_DTYPE_BF16 && target != FP8_DTYPE_FP16 && target != FP8_DTYPE_FP32)
        return fp8_read_bad(reader, "semantics: a gemm gives bf16, fp16 or fp32, not %s",
                            fp8_dtype_name(target));
    if (a->inner != FP8_BOX_ROW_BYTES || b->inner != FP8_BOX_ROW_BYTES)
        return fp8_read_bad(reader, "the boxes of a and b are not %d bytes wide",
                            FP8_BOX_ROW_BYTES);
    int64_t sharing = kernel->cluster / kernel->grid.slices; /* CTAs that share a tile's operands */
    if (kernel->cluster % kernel->grid.slices != 0)
        return fp8_read_bad(reader, "grid: 'slices' is %lld, which does not divide a cluster of %d",
                            (long long)kernel->grid.slices, kernel->cluster);
    if (a->outer * sharing != kernel->grid.tile_rows ||
        b->outer * sharing != kernel->grid.tile_cols)
        return fp8_read_bad(reader,
                            "%lld boxes of %d rows of a and %d of b do not make a tile of "
                            "%lld x %lld",
                            (long long)sharing, a->outer, b->outer,
                            (long long)kernel->grid.tile_rows, (long long)kernel->grid.tile_cols);
    size_t bytes = (size_t)out->inner * fp8_dtype_bytes(target);
    if (bytes > FP8_BOX_ROW_BYTES || bytes % FP8_MAP_ALIGN != 0)
        return fp8_read_bad(reader,
                            "rows of %zu bytes of the box of out: at most %d, in steps of %d",
                            bytes, FP8_BOX_ROW_BYTES, FP8_MAP_ALIGN);
    return FP8_OK;
}

/* CTAs that wait for each other must all be there: their number may not depend on the tensor. */
static fp8_status check_cooperative(const struct fp8_reader *reader,
                                    const struct fp8_kernel *kernel)
{
    const struct fp8_grid *grid = &kernel->grid;
    if (kernel->cooperative != (kernel->op == FP8_OP_FUSED))
        return fp8_read_bad(reader, "kernels of op '%s' are %scooperative",
                            fp8_op_names[kernel->op], kernel->cooperative ? "not " : "");
    if (kernel->cooperative && (!grid->persistent || grid->ctas_per_sm < 1 || grid->max_ctas < 1))
        return fp8_read_bad(reader, "a cooperative grid is persistent, with ctas_per_sm and "
                                    "max_ctas");
    return FP8_OK;
}

/* ---- cubins ---- */

/* Which of the bundle's archs the kernel exists for, bit = arch. */
static fp8_status read_archs(struct fp8_reader *reader, const json_t *record,
                             const struct fp8_manifest *manifest, uint32_t *archs)
{
    const json_t *array;
    *archs = (1u << manifest->arch_count) - 1;
    if (!json_object_get(record, "archs"))
        return FP8_OK;
    *archs = 0;
    FP8_TRY(fp8_read_array(reader, record, "archs", FP8_MAX_ARCHS, &array));
    for (size_t i = 0; i < json_array_size(array); i++) {
        const char *name = json_string_value(json_array_get(array, i));
        if (!name)
            return fp8_read_bad(reader, "archs[%zu] is not a string", i);
        for (int j = 0; j < manifest->arch_count; j++) {
            if (strcmp(manifest->archs[j], name) == 0)
                *archs |= 1u << j;
        }
    }
    return FP8_OK;
}

/* A name below the bundle's folder, never out of it. */
static bool is_inside(const char *file)
{
    return file[0] && file[0] != '/' && !strstr(file, "..");
}

static fp8_status read_cubin(struct fp8_reader *reader, const json_t *cubin, const char *arch,
                             struct fp8_cubin *read)
{
    static const char *const keys[] = { "arch", "file", "bytes", "xxh128", NULL };
    FP8_TRY(fp8_read_keys(reader, cubin, keys));
    FP8_TRY(fp8_read_string(reader, cubin, "arch", &read->arch));
    FP8_TRY(fp8_read_string(reader, cubin, "file", &read->file));
    FP8_TRY(fp8_read_integer(reader, cubin, "bytes", 1, INT32_MAX, &read->bytes));
    FP8_TRY(fp8_read_string(reader, cubin, "xxh128", &read->xxh128));
    if (!is_inside(read->file))
        return fp8_read_bad(reader, "file '%.100s' leads out of the bundle", read->file);
    if (strcmp(read->arch, arch) != 0)
        return fp8_read_bad(reader, "arch is '%.40s', but '%.40s' is next", read->arch, arch);
    return FP8_OK;
}

static fp8_status read_cubins(struct fp8_reader *reader, const json_t *record,
                              const struct fp8_manifest *manifest, struct fp8_kernel *kernel)
{
    const json_t *array;
    uint32_t archs;
    FP8_TRY(read_archs(reader, record, manifest, &archs));
    FP8_TRY(fp8_read_array(reader, record, "cubins", FP8_MAX_ARCHS, &array));
    if ((int)json_array_size(array) != __builtin_popcount(archs))
        return fp8_read_bad(reader, "%zu cubins for %d archs", json_array_size(array),
                            __builtin_popcount(archs));
    struct fp8_cubin *cubins;
    FP8_TRY(fp8_read_allocate(reader, json_array_size(array), sizeof *cubins, (void **)&cubins));
    kernel->cubins = cubins;
    for (int arch = 0; arch < manifest->arch_count; arch++) {
        if (!(archs >> arch & 1u))
            continue;
        int i = kernel->cubin_count;
        size_t mark = fp8_read_enter(reader, "cubins[%d]", i);
        FP8_TRY(read_cubin(reader, json_array_get(array, (size_t)i), manifest->archs[arch],
                           &cubins[i]));
        kernel->cubin_count++;
        fp8_read_leave(reader, mark);
    }
    return FP8_OK;
}

/* ---- the record ---- */

fp8_status fp8_manifest_read_kernel(struct fp8_reader *reader, const struct fp8_manifest *manifest,
                                    const json_t *record, struct fp8_kernel *kernel)
{
    static const char *const keys[] = { "name",         "op",          "entry",    "template",
                                        "parameters",   "args",        "grid",     "block",
                                        "shared_bytes", "semantics",   "cubins",   "cluster",
                                        "archs",        "cooperative", "overlaps", NULL };
    const json_t *parameters;
    const char *template_name;
    int64_t block = 0, cluster = 0, shared = 0;
    int op = 0;
    FP8_TRY(fp8_read_keys(reader, record, keys));
    FP8_TRY(fp8_read_string(reader, record, "name", &kernel->name));
    FP8_TRY(fp8_read_word(reader, record, "op", fp8_op_names, FP8_OP_COUNT, &op));
    kernel->op = (enum fp8_op)op;
    FP8_TRY(fp8_read_string(reader, record, "entry", &kernel->entry));
    FP8_TRY(fp8_read_string(reader, record, "template", &template_name));
    FP8_TRY(fp8_read_object(reader, record, "parameters", &parameters));
    FP8_TRY(read_semantics(reader, record, kernel));
    FP8_TRY(read_args(reader, record, kernel));
    FP8_TRY(read_grid(reader, record, kernel));
    FP8_TRY(fp8_read_integer(reader, record, "block", 1, 1024, &block));
    FP8_TRY(fp8_read_integer(reader, record, "cluster", 1, 16, &cluster));
    FP8_TRY(fp8_read_integer(reader, record, "shared_bytes", 0, 1 << 20, &shared));
    kernel->block = (int32_t)block;
    kernel->cluster = (int32_t)cluster;
    kernel->shared_bytes = (int32_t)shared;
    if (json_object_get(record, "cooperative"))
        FP8_TRY(fp8_read_bool(reader, record, "cooperative", &kernel->cooperative));
    FP8_TRY(check_cooperative(reader, kernel));
    if (json_object_get(record, "overlaps"))
        FP8_TRY(fp8_read_bool(reader, record, "overlaps", &kernel->overlaps));
    if (kernel->op == FP8_OP_GEMM)
        FP8_TRY(check_gemm(reader, kernel));
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
