/*
 * manifest_buffers.c - the buffers of one layer record: extents, dtypes, and what a layer must
 * have.
 *
 * In: the JSON array. Out: buffers in the plan, and where each caller's tensor and each part of an
 * operand is. The caller's tensors must have the shapes that the layer's numbers give, operands the
 * layout that fp8.h documents: what follows computes addresses from those numbers.
 */
#include <stdio.h>
#include <string.h>

#include "runtime/json_read.h"

const char *const fp8_slot_names[FP8_SLOT_COUNT] = { "x",         "w",    "bias", "y",
                                                     "dy",        "dx",   "dw",   "dbias",
                                                     "found_inf", "amax", "when" };
const char *const fp8_part_names[FP8_PART_COUNT] = { "scales", "row_scales", "row",
                                                     "transposed_scales", "transposed" };
const char *const fp8_place_names[FP8_PLACE_COUNT] = { "scale", "amax", "fresh" };
const char *const fp8_scaling_names[FP8_SCALING_COUNT + 1] = { "tensor", "row", "block", "tile",
                                                               "none" };

static const int64_t extent_limit = FP8_MANIFEST_EXTENT_LIMIT;
static const int64_t memory_limit = (int64_t)1 << 60; /* of one buffer */

static fp8_status read_dim(struct fp8_reader *reader, const json_t *record, const char *key,
                           struct fp8_dim *dim)
{
    static const char *const keys[] = { "of", "div", "pad", "max", NULL };
    const json_t *value = json_object_get(record, key);
    *dim = (struct fp8_dim){ .div = 1, .pad = 1, .max = INT64_MAX };
    if (json_is_integer(value))
        return fp8_read_integer(reader, record, key, 1, extent_limit, &dim->of);
    size_t mark = fp8_read_enter(reader, "%s", key);
    FP8_TRY(fp8_read_keys(reader, value, keys));
    const char *text = json_string_value(json_object_get(value, "of"));
    dim->of_tokens = text && strcmp(text, "M") == 0;
    if (!dim->of_tokens)
        FP8_TRY(fp8_read_integer(reader, value, "of", 1, extent_limit, &dim->of));
    if (json_object_get(value, "div"))
        FP8_TRY(fp8_read_integer(reader, value, "div", 1, extent_limit, &dim->div));
    if (json_object_get(value, "pad"))
        FP8_TRY(fp8_read_integer(reader, value, "pad", 1, extent_limit, &dim->pad));
    if (json_object_get(value, "max"))
        FP8_TRY(fp8_read_integer(reader, value, "max", 1, extent_limit, &dim->max));
    fp8_read_leave(reader, mark);
    return FP8_OK;
}

int fp8_manifest_find_buffer(const struct fp8_layer_plan *plan, const char *name, size_t length)
{
    for (int i = 0; i < plan->buffer_count; i++) {
        if (strlen(plan->buffers[i].name) == length &&
            memcmp(plan->buffers[i].name, name, length) == 0)
            return i;
    }
    return -1;
}

static fp8_status register_slot(struct fp8_reader *reader, struct fp8_layer_plan *plan, int index)
{
    struct fp8_buffer *buffer = &plan->buffers[index];
    for (int slot = 0; slot < FP8_SLOT_COUNT; slot++) {
        if (strcmp(buffer->name, fp8_slot_names[slot]) != 0)
            continue;
        buffer->slot = (enum fp8_slot)slot;
        plan->slots[slot] = (int8_t)index;
        return FP8_OK;
    }
    return fp8_read_bad(reader, "no pass has a caller's tensor '%.100s'", buffer->name);
}

static fp8_status register_part(struct fp8_reader *reader, const json_t *record,
                                struct fp8_layer_plan *plan, int index)
{
    struct fp8_buffer *buffer = &plan->buffers[index];
    int part = 0;
    FP8_TRY(fp8_read_word(reader, record, "part", fp8_part_names, FP8_PART_COUNT, &part));
    buffer->part = (enum fp8_part)part;
    int8_t *place = &plan->parts[buffer->role][part];
    if (*place >= 0)
        return fp8_read_bad(reader, "two buffers are the part '%s' of %s", fp8_part_names[part],
                            fp8_role_names[buffer->role]);
    *place = (int8_t)index;
    return FP8_OK;
}

/* The same place for all three tensors of the layer: which is for the pass to say. */
static fp8_status register_place(struct fp8_reader *reader, const json_t *record,
                                 struct fp8_layer_plan *plan, int index)
{
    struct fp8_buffer *buffer = &plan->buffers[index];
    int place = 0;
    FP8_TRY(fp8_read_word(reader, record, "part", fp8_place_names, FP8_PLACE_COUNT, &place));
    buffer->place = (enum fp8_place)place;
    fp8_dtype dtype = place == FP8_PLACE_FRESH ? FP8_DTYPE_UINT32 : FP8_DTYPE_FP32;
    if (plan->recipe.kind != FP8_RECIPE_DELAYED || plan->is_bf16)
        return fp8_read_bad(reader, "only recipe 'delayed' has a state");
    if (buffer->dtype != dtype || fp8_dim_at(&buffer->rows, plan->max_tokens) != 1 ||
        fp8_dim_at(&buffer->cols, plan->max_tokens) != 1)
        return fp8_read_bad(reader, "'%s' of the state is one element of %s",
                            fp8_place_names[place], fp8_dtype_name(dtype));
    if (plan->places[place] >= 0)
        return fp8_read_bad(reader, "two buffers are '%s' of the state", fp8_place_names[place]);
    plan->places[place] = (int8_t)index;
    return FP8_OK;
}

static fp8_status read_buffer(struct fp8_reader *reader, const json_t *record,
                              struct fp8_layer_plan *plan)
{
    static const char *const keys[] = { "name", "object", "part", "dtype", "rows", "cols", NULL };
    enum { CALLER, X, W, DY, STATE, WORKSPACE, OBJECTS };
    static const char *const objects[] = { "caller", "x", "w", "dy", "state", "workspace" };
    int index = plan->buffer_count, object = 0;
    struct fp8_buffer *buffer = &plan->buffers[index];
    FP8_TRY(fp8_read_keys(reader, record, keys));
    FP8_TRY(fp8_read_string(reader, record, "name", &buffer->name));
    if (fp8_manifest_find_buffer(plan, buffer->name, strlen(buffer->name)) >= 0)
        return fp8_read_bad(reader, "the name '%.100s' occurs twice", buffer->name);
    FP8_TRY(fp8_read_word(reader, record, "object", objects, OBJECTS, &object));
    FP8_TRY(fp8_read_dtype(reader, record, "dtype", &buffer->dtype));
    if (buffer->dtype == FP8_DTYPE_NONE)
        return fp8_read_bad(reader, "dtype is none");
    FP8_TRY(read_dim(reader, record, "rows", &buffer->rows));
    FP8_TRY(read_dim(reader, record, "cols", &buffer->cols));
    int64_t bytes;
    if (__builtin_mul_overflow(fp8_dim_at(&buffer->rows, plan->max_tokens),
                               fp8_dim_at(&buffer->cols, plan->max_tokens) * 4, &bytes) ||
        bytes > memory_limit)
        return fp8_read_bad(reader, "buffer '%.100s' is beyond 2^60 bytes", buffer->name);
    plan->buffer_count++;
    if ((object == CALLER || object == WORKSPACE) && json_object_get(record, "part"))
        return fp8_read_bad(reader, "'part' belongs to operands and the state only");
    switch (object) {
    case CALLER:
        buffer->object = FP8_OBJECT_CALLER;
        return register_slot(reader, plan, index);
    case WORKSPACE:
        buffer->object = FP8_OBJECT_WORKSPACE;
        return FP8_OK;
    case STATE:
        buffer->object = FP8_OBJECT_STATE;
        return register_place(reader, record, plan, index);
    default:
        buffer->object = FP8_OBJECT_OPERAND;
        buffer->role = (fp8_role)object;
        return register_part(reader, record, plan, index);
    }
}

/* min-less dim of the given extent (M if of_tokens): roundup(ceil(of / div), pad). */
static bool dim_is(const struct fp8_dim *dim, bool of_tokens, int64_t of, int64_t div, int64_t pad)
{
    if (of_tokens)
        return dim->of_tokens && dim->div == div && dim->pad == pad && dim->max == INT64_MAX;
    return !dim->of_tokens && fp8_dim_at(dim, 0) == fp8_round_up(fp8_ceil_div(of, div), pad);
}

/* One side of a tensor: M, or a number. */
struct side {
    bool is_tokens;
    int64_t of;
};

static bool side_is(const struct fp8_dim *dim, struct side side, int64_t div, int64_t pad)
{
    return dim_is(dim, side.is_tokens, side.of, div, pad);
}

static bool one_is(const struct fp8_dim *dim, int64_t of)
{
    return dim_is(dim, false, of, 1, 1);
}

/* The rows and cols of a role's tensor: x[M,K], w[N,K], dy[M,N]. */
static void sides_of(const struct fp8_layer_plan *plan, fp8_role role, struct side *rows,
                     struct side *cols)
{
    *rows = (struct side){ role != FP8_ROLE_W, plan->out_features };
    *cols = (struct side){ false, role == FP8_ROLE_DY ? plan->out_features : plan->in_features };
}

/* The scale part of a copy of `rows` rows and depth `depth`. */
static bool scales_fit(const struct fp8_buffer *scales, fp8_scaling scaling, struct side rows,
                       struct side depth)
{
    switch (scaling) {
    case FP8_SCALING_ROW:
        return one_is(&scales->rows, 1) && side_is(&scales->cols, rows, 1, FP8_PAD_ROW_SCALES);
    case FP8_SCALING_BLOCK:
        return side_is(&scales->rows, depth, FP8_BLOCK, 1) &&
               side_is(&scales->cols, rows, 1, FP8_PAD_BLOCK_SCALES);
    case FP8_SCALING_TILE:
        return side_is(&scales->rows, rows, FP8_BLOCK, 1) &&
               side_is(&scales->cols, depth, FP8_BLOCK, FP8_PAD_TILE_SCALES);
    case FP8_SCALING_TENSOR:
    case FP8_SCALING_NONE:
        break;
    }
    return false;
}

static const struct fp8_buffer *part_of(const struct fp8_layer_plan *plan, fp8_role role,
                                        enum fp8_part part)
{
    int index = plan->parts[role][part];
    return index < 0 ? NULL : &plan->buffers[index];
}

/* The parts that an operand of these scalings has, bit = part. */
static uint32_t wanted_parts(const fp8_scaling scalings[FP8_COPY_COUNT])
{
    static const enum fp8_part copies[] = { FP8_PART_ROW, FP8_PART_TRANSPOSED };
    static const enum fp8_part scales[] = { FP8_PART_ROW_SCALES, FP8_PART_TRANSPOSED_SCALES };
    uint32_t parts = 0;
    for (int copy = 0; copy < FP8_COPY_COUNT; copy++) {
        if (scalings[copy] == FP8_SCALING_NONE)
            continue;
        parts |= 1u << FP8_PART_SCALES | 1u << copies[copy];
        if (scalings[copy] != FP8_SCALING_TENSOR)
            parts |= 1u << scales[copy];
    }
    return parts;
}

static bool copy_fits(const struct fp8_layer_plan *plan, fp8_role role, enum fp8_copy copy)
{
    static const enum fp8_part copies[] = { FP8_PART_ROW, FP8_PART_TRANSPOSED };
    static const enum fp8_part scales[] = { FP8_PART_ROW_SCALES, FP8_PART_TRANSPOSED_SCALES };
    fp8_scaling scaling = plan->scalings[role][copy];
    struct side rows, cols;
    sides_of(plan, role, &rows, &cols);
    struct side across = copy == FP8_ROW_COPY ? rows : cols;
    struct side along = copy == FP8_ROW_COPY ? cols : rows;
    const struct fp8_buffer *bytes = part_of(plan, role, copies[copy]);
    if (!bytes)
        return true;
    if (!side_is(&bytes->rows, across, 1, FP8_PAD_ROWS) ||
        !side_is(&bytes->cols, along, 1, FP8_PAD_LD))
        return false;
    const struct fp8_buffer *factors = part_of(plan, role, scales[copy]);
    return !factors ||
           (factors->dtype == FP8_DTYPE_FP32 && scales_fit(factors, scaling, across, along));
}

static fp8_status check_formats(struct fp8_reader *reader, struct fp8_layer_plan *plan,
                                fp8_role role)
{
    const struct fp8_buffer *row = part_of(plan, role, FP8_PART_ROW);
    const struct fp8_buffer *transposed = part_of(plan, role, FP8_PART_TRANSPOSED);
    plan->formats[role] = row ? row->dtype : FP8_DTYPE_NONE;
    if (!row)
        return FP8_OK;
    if ((transposed && row->dtype != transposed->dtype) ||
        (row->dtype != FP8_DTYPE_E4M3 && row->dtype != FP8_DTYPE_E5M2))
        return fp8_read_bad(reader, "the copies of operand %s are not both e4m3 or both e5m2",
                            fp8_role_names[role]);
    fp8_dtype wanted =
        role == FP8_ROLE_DY && plan->recipe.is_hybrid ? FP8_DTYPE_E5M2 : FP8_DTYPE_E4M3;
    if (row->dtype != wanted)
        return fp8_read_bad(reader, "operand %s is %s, but the recipe's format says %s",
                            fp8_role_names[role], fp8_dtype_name(row->dtype),
                            fp8_dtype_name(wanted));
    return FP8_OK;
}

static fp8_status check_operand_buffers(struct fp8_reader *reader, struct fp8_layer_plan *plan,
                                        fp8_role role)
{
    uint32_t wanted = wanted_parts(plan->scalings[role]);
    for (int part = 0; part < FP8_PART_COUNT; part++) {
        bool given = plan->parts[role][part] >= 0;
        if (given != (wanted >> part & 1u))
            return fp8_read_bad(reader, "operand %s has %s part '%s'", fp8_role_names[role],
                                given ? "by its recipe no" : "no", fp8_part_names[part]);
    }
    const struct fp8_buffer *scales = part_of(plan, role, FP8_PART_SCALES);
    bool fits = !scales || (scales->dtype == FP8_DTYPE_FP32 && one_is(&scales->rows, 1) &&
                            one_is(&scales->cols, FP8_SCALES_COUNT));
    if (!fits || !copy_fits(plan, role, FP8_ROW_COPY) ||
        !copy_fits(plan, role, FP8_TRANSPOSED_COPY))
        return fp8_read_bad(reader, "the parts of operand %s are not laid out as fp8.h says",
                            fp8_role_names[role]);
    return check_formats(reader, plan, role);
}

static fp8_status check_caller_buffers(struct fp8_reader *reader, const struct fp8_layer_plan *plan)
{
    enum {
        BF16 = 1u << FP8_DTYPE_BF16,
        FP32 = 1u << FP8_DTYPE_FP32,
        INPUT = BF16 | FP32,
        OUTPUT = INPUT | 1u << FP8_DTYPE_FP16
    };
    static const struct {
        bool optional, tokens, cols_are_n;
        int64_t rows; /* 0: N */
        uint32_t dtypes;
    } wanted[FP8_SLOT_COUNT] = {
        [FP8_SLOT_X] = { false, true, false, 0, INPUT },
        [FP8_SLOT_W] = { false, false, false, 0, INPUT },
        [FP8_SLOT_BIAS] = { true, false, true, 1, BF16 },
        [FP8_SLOT_Y] = { false, true, true, 0, OUTPUT },
        [FP8_SLOT_DY] = { false, true, true, 0, INPUT },
        [FP8_SLOT_DX] = { false, true, false, 0, OUTPUT },
        [FP8_SLOT_DW] = { false, false, false, 0, OUTPUT },
        [FP8_SLOT_DBIAS] = { true, false, true, 1, FP32 },
        [FP8_SLOT_FOUND_INF] = { false, false, false, 1, 1u << FP8_DTYPE_UINT32 },
        [FP8_SLOT_AMAX] = { true, false, false, 1, FP32 },
        [FP8_SLOT_WHEN] = { true, false, false, 1, 1u << FP8_DTYPE_UINT32 },
    };
    for (int slot = 0; slot < FP8_SLOT_COUNT; slot++) {
        if (plan->slots[slot] < 0) {
            if (wanted[slot].optional && !(plan->has_bias && slot == FP8_SLOT_BIAS))
                continue;
            return fp8_read_bad(reader, "there is no caller's tensor '%s'", fp8_slot_names[slot]);
        }
        const struct fp8_buffer *buffer = &plan->buffers[plan->slots[slot]];
        int64_t rows = wanted[slot].rows ? wanted[slot].rows : plan->out_features;
        int64_t cols = slot >= FP8_SLOT_FOUND_INF ? 1
                       : wanted[slot].cols_are_n  ? plan->out_features
                                                  : plan->in_features;
        if (!dim_is(&buffer->rows, wanted[slot].tokens, rows, 1, 1) ||
            !one_is(&buffer->cols, cols) || !(wanted[slot].dtypes >> buffer->dtype & 1u))
            return fp8_read_bad(reader,
                                "the caller's tensor '%s' has another shape or dtype than its "
                                "layer",
                                fp8_slot_names[slot]);
    }
    return FP8_OK;
}

fp8_status fp8_manifest_buffers(struct fp8_reader *reader, const json_t *record,
                                struct fp8_layer_plan *plan)
{
    const json_t *array;
    memset(plan->slots, -1, sizeof plan->slots);
    memset(plan->parts, -1, sizeof plan->parts);
    memset(plan->places, -1, sizeof plan->places);
    FP8_TRY(fp8_read_array(reader, record, "buffers", FP8_MAX_BUFFERS, &array));
    for (size_t i = 0; i < json_array_size(array); i++) {
        size_t mark = fp8_read_enter(reader, "buffers[%zu]", i);
        FP8_TRY(read_buffer(reader, json_array_get(array, i), plan));
        fp8_read_leave(reader, mark);
    }
    FP8_TRY(check_operand_buffers(reader, plan, FP8_ROLE_X));
    FP8_TRY(check_operand_buffers(reader, plan, FP8_ROLE_W));
    FP8_TRY(check_operand_buffers(reader, plan, FP8_ROLE_DY));
    return check_caller_buffers(reader, plan);
}
