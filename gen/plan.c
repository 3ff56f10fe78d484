/*
 * plan.c - the plan and the expanded kernels: Lua decides (plan.lua, expand.lua), C keeps.
 *
 * In: the checked model. Out: the manifest as JSON (jansson) and the kernels' texts in the
 * session's arena. C adds to the manifest what it alone knows: the format's version, the
 * generator's, hashes. The facts of runtime/bundle_format.h reach Lua through push_format, so each
 * stands in one place.
 *
 * Lua errors are longjmps: while a table becomes JSON, every new value is at once attached to the
 * root, which make_plan frees. Knows nothing of NVRTC or of files.
 */
#include "gen/plan.h"

#include <lauxlib.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/bundle_format.h"

#define KEY_PLAN "fp8gen.plan"

/* ---- Lua to JSON ----------------------------------------------------------------------------- */

struct slot {
    json_t **root;      /* where a value without a parent goes */
    json_t *parent;     /* array or object, or NULL */
    const char *member; /* of an object */
};

/* Puts a new value into its place, which owns it from then on. */
static json_t *attach(lua_State *L, struct slot slot, json_t *value)
{
    bool good = value != NULL;
    if (good && slot.parent == NULL)
        *slot.root = value;
    else if (good && json_is_array(slot.parent))
        good = json_array_append_new(slot.parent, value) == 0;
    else if (good)
        good = json_object_set_new(slot.parent, slot.member, value) == 0;
    if (!good)
        script_throw(L, gen_out_of_memory(script_session(L)));
    return value;
}

static void convert(lua_State *L, int index, struct slot slot);

/* A table with an element 1 is an array, and so is one with a metatable (an empty array); any other
 * an object. */
static void convert_table(lua_State *L, int index, struct slot slot)
{
    luaL_checkstack(L, 4, "plan is too deep");
    lua_Integer length = (lua_Integer)lua_rawlen(L, index);
    int top = lua_gettop(L);
    bool array = length > 0 || lua_getmetatable(L, index) != 0;
    json_t *value = attach(L, slot, array ? json_array() : json_object());
    for (lua_Integer i = 1; i <= length; i++) {
        lua_rawgeti(L, index, i);
        convert(L, lua_gettop(L), (struct slot){ slot.root, value, NULL });
        lua_pop(L, 1);
    }
    if (array) {
        lua_settop(L, top);
        return;
    }
    lua_pushnil(L);
    while (lua_next(L, index)) {
        if (lua_type(L, -2) != LUA_TSTRING)
            luaL_error(L, "an object of the plan has a %s as key", luaL_typename(L, -2));
        convert(L, lua_gettop(L), (struct slot){ slot.root, value, lua_tostring(L, -2) });
        lua_pop(L, 1);
    }
}

static void convert(lua_State *L, int index, struct slot slot)
{
    size_t size;
    const char *text;
    switch (lua_type(L, index)) {
    case LUA_TTABLE:
        convert_table(L, index, slot);
        break;
    case LUA_TSTRING:
        text = lua_tolstring(L, index, &size);
        attach(L, slot, json_stringn(text, size));
        break;
    case LUA_TBOOLEAN:
        attach(L, slot, json_boolean(lua_toboolean(L, index)));
        break;
    case LUA_TNUMBER:
        if (lua_isinteger(L, index))
            attach(L, slot, json_integer(lua_tointeger(L, index)));
        else
            attach(L, slot, json_real(lua_tonumber(L, index)));
        break;
    case LUA_TLIGHTUSERDATA: /* format.null */
        attach(L, slot, json_null());
        break;
    default:
        luaL_error(L, "the plan holds a %s", luaL_typename(L, index));
    }
}

/* ---- the facts of the bundle format ---------------------------------------------------------- */

static const char type_pointer[] = "pointer";
static const char type_int64[] = "int64";
static const char type_int32[] = "int32";

struct op_arg {
    const char *name;
    const char *type;
};

#define TYPE_POINTER type_pointer
#define TYPE_INT64 type_int64
#define TYPE_INT32 type_int32
#define ARG(name, type) { #name, TYPE_##type },
#define OP(NAME, name, ARGS) { name, { ARGS(ARG) } },
static const struct {
    const char *name;
    struct op_arg args[FP8_OP_MAX_ARGS + 1];
} ops[] = { FP8_OPS(OP) };
#undef OP
#undef ARG

static void push_args(lua_State *L, const struct op_arg *args)
{
    lua_newtable(L);
    for (lua_Integer i = 0; args[i].name != NULL; i++) {
        lua_createtable(L, 0, 2);
        lua_pushstring(L, args[i].name);
        lua_setfield(L, -2, "name");
        lua_pushstring(L, args[i].type);
        lua_setfield(L, -2, "type");
        lua_rawseti(L, -2, i + 1);
    }
}

static void push_format(lua_State *L)
{
    static const struct {
        const char *name;
        lua_Integer value;
    } numbers[] = {
        { "pad_ld", FP8_PAD_LD },
        { "pad_rows", FP8_PAD_ROWS },
        { "part_align", FP8_PART_ALIGN },
        { "scales_count", FP8_SCALES_COUNT },
        { "pad_row_scales", FP8_PAD_ROW_SCALES },
        { "pad_block_scales", FP8_PAD_BLOCK_SCALES },
        { "pad_tile_scales", FP8_PAD_TILE_SCALES },
        { "block", FP8_BLOCK },
        { "dbias_rows", FP8_DBIAS_ROWS },
        { "line_elements", FP8_LINE_ELEMENTS },
    };
    lua_newtable(L);
    lua_pushlightuserdata(L, NULL);
    lua_setfield(L, -2, "null");
    for (size_t i = 0; i < sizeof(numbers) / sizeof(numbers[0]); i++) {
        lua_pushinteger(L, numbers[i].value);
        lua_setfield(L, -2, numbers[i].name);
    }
    lua_newtable(L);
    for (size_t i = 0; i < sizeof(ops) / sizeof(ops[0]); i++) {
        push_args(L, ops[i].args);
        lua_setfield(L, -2, ops[i].name);
    }
    lua_setfield(L, -2, "ops");
}

/* ---- the plan -------------------------------------------------------------------------------- */

/* What plan.lua takes besides the model: { force =, tuning = }. */
static void push_options(lua_State *L)
{
    lua_createtable(L, 0, 2);
    script_push_function(L, "spec", "forced_gemm");
    lua_call(L, 0, 1);
    lua_setfield(L, -2, "force");
    script_push_module(L, "tuning");
    lua_getfield(L, -1, "entries");
    lua_setfield(L, -3, "tuning");
    lua_pop(L, 1);
}

/* user: json_t **, the root. Leaves the plan's table in the registry for the expansion. */
static int plan_body(lua_State *L)
{
    json_t **root = lua_touserdata(L, 1);
    script_push_function(L, "plan", "plan");
    script_push_model(L);
    push_format(L);
    push_options(L);
    lua_call(L, 3, 1);
    luaL_checktype(L, -1, LUA_TTABLE);
    convert(L, lua_gettop(L), (struct slot){ root, NULL, NULL });
    lua_setfield(L, LUA_REGISTRYINDEX, KEY_PLAN);
    return 0;
}

static bool add_header(const struct fp8gen *gen, json_t *manifest)
{
    return json_object_set_new(manifest, "format", json_string(FP8_BUNDLE_FORMAT)) == 0 &&
           json_object_set_new(manifest, "format_version",
                               json_integer(FP8_BUNDLE_FORMAT_VERSION)) == 0 &&
           json_object_set_new(manifest, "generator", json_string(fp8gen_version())) == 0 &&
           json_object_set_new(manifest, "spec_hash", json_string(gen->spec_hash)) == 0 &&
           json_object_set_new(manifest, "tuning_hash",
                               gen->tuned ? json_string(gen->tuning_hash) : json_null()) == 0 &&
           json_object_set_new(manifest, "archs", json_array()) == 0;
}

/* The manifest's text in the arena; NULL when out of memory. */
static const char *plan_text(struct fp8gen *gen, const json_t *manifest)
{
    char *text = json_dumps(manifest, JSON_INDENT(2) | JSON_SORT_KEYS | JSON_REAL_PRECISION(6));
    const char *copy = text ? arena_printf(&gen->arena, "%s\n", text) : NULL;
    free(text);
    return copy;
}

fp8gen_status gen_make_plan(struct fp8gen *gen, struct gen_plan **plan)
{
    fp8gen_status status = gen_require_model(gen);
    if (status != FP8GEN_OK)
        return status;
    if (gen->plan == NULL) {
        json_t *manifest = NULL;
        status = script_run(gen, plan_body, &manifest);
        struct gen_plan *fresh = arena_alloc(&gen->arena, sizeof(*fresh));
        if (status == FP8GEN_OK && (fresh == NULL || !add_header(gen, manifest)))
            status = gen_out_of_memory(gen);
        if (status == FP8GEN_OK && (fresh->json = plan_text(gen, manifest)) == NULL)
            status = gen_out_of_memory(gen);
        if (status != FP8GEN_OK) {
            json_decref(manifest);
            return status;
        }
        fresh->manifest = manifest;
        fresh->count = (int32_t)json_array_size(json_object_get(manifest, "kernels"));
        gen->plan = fresh;
    }
    *plan = gen->plan;
    return FP8GEN_OK;
}

void gen_plan_free(struct fp8gen *gen)
{
    if (gen->plan != NULL)
        json_decref(gen->plan->manifest);
    gen->plan = NULL;
}

/* ---- the kernels ----------------------------------------------------------------------------- */

static const char *copy_field(lua_State *L, const char *name)
{
    size_t size;
    lua_getfield(L, -1, name);
    const char *text = luaL_checklstring(L, -1, &size);
    const char *copy = arena_copy(&script_session(L)->arena, text, size);
    if (copy == NULL)
        script_throw(L, gen_out_of_memory(script_session(L)));
    lua_pop(L, 1);
    return copy;
}

/* user: struct gen_kernel *, as many as the plan has. */
static int expand_body(lua_State *L)
{
    struct gen_kernel *kernels = lua_touserdata(L, 1);
    const json_t *records = json_object_get(script_session(L)->plan->manifest, "kernels");
    int32_t count = script_session(L)->plan->count;
    script_push_function(L, "emit", "kernels");
    lua_getfield(L, LUA_REGISTRYINDEX, KEY_PLAN);
    lua_call(L, 1, 1);
    for (int32_t i = 0; i < count; i++) {
        lua_geti(L, -1, i + 1);
        kernels[i].name = copy_field(L, "name");
        kernels[i].template_name = copy_field(L, "template");
        kernels[i].entry = copy_field(L, "entry");
        kernels[i].unit = kernels[i].entry + strlen("fp8_");
        kernels[i].body = copy_field(L, "body");
        kernels[i].written = copy_field(L, "written");
        kernels[i].archs = json_object_get(json_array_get(records, (size_t)i), "archs");
        lua_pop(L, 1);
    }
    return 0;
}

fp8gen_status gen_expand_plan(struct fp8gen *gen, struct gen_plan **plan)
{
    fp8gen_status status = gen_make_plan(gen, plan);
    if (status != FP8GEN_OK || (*plan)->kernels != NULL)
        return status;
    struct gen_kernel *kernels =
        arena_alloc(&gen->arena, (size_t)(*plan)->count * sizeof(*kernels) + 1);
    if (kernels == NULL)
        return gen_out_of_memory(gen);
    status = script_run(gen, expand_body, kernels);
    if (status == FP8GEN_OK)
        (*plan)->kernels = kernels;
    return status;
}

/* ---- public ---------------------------------------------------------------------------------- */

fp8gen_status fp8gen_plan(fp8gen *gen, const char **json)
{
    struct gen_plan *plan;
    fp8gen_status status = gen_require(gen, json != NULL);
    if (status != FP8GEN_OK)
        return status;
    *json = NULL;
    status = gen_make_plan(gen, &plan);
    if (status == FP8GEN_OK)
        *json = plan->json;
    return status;
}

fp8gen_status fp8gen_expand(fp8gen *gen, int32_t index, const char **name, const char **text)
{
    struct gen_plan *plan;
    fp8gen_status status = gen_require(gen, name != NULL && text != NULL);
    if (status != FP8GEN_OK)
        return status;
    *name = *text = NULL;
    if (index < 0)
        return gen_fail(gen, FP8GEN_ERR_ARGUMENT, NULL, "there is no kernel %d: they count from 0",
                        (int)index);
    status = gen_expand_plan(gen, &plan);
    if (status == FP8GEN_OK && index < plan->count) {
        *name = plan->kernels[index].name;
        *text = plan->kernels[index].written;
    }
    return status;
}

struct collective {
    const char *op, *way;
    double bytes, seconds; /* < 0: not known */
    int32_t ranks;
};

static int collective_body(lua_State *L)
{
    struct collective *asked = lua_touserdata(L, 1);
    script_push_function(L, "step", "collective");
    lua_pushstring(L, asked->op);
    lua_pushnumber(L, asked->bytes);
    lua_pushinteger(L, asked->ranks);
    lua_pushstring(L, asked->way);
    lua_call(L, 4, 1);
    asked->seconds = lua_isnumber(L, -1) ? lua_tonumber(L, -1) : -1;
    return 0;
}

fp8gen_status fp8gen_collective_seconds(fp8gen *gen, const char *op, const char *way, double bytes,
                                        int32_t ranks, double *seconds)
{
    struct collective asked = { .op = op, .way = way, .bytes = bytes, .ranks = ranks };
    fp8gen_status status = gen_require(gen, seconds != NULL);
    if (status != FP8GEN_OK)
        return status;
    *seconds = 0;
    if (!op || !way || !(bytes >= 0) || ranks < 1)
        return gen_fail(gen, FP8GEN_ERR_ARGUMENT, NULL,
                        "a collective has an op, a way, bytes from 0 and ranks from 1");
    status = script_run(gen, collective_body, &asked);
    if (status == FP8GEN_OK && asked.seconds < 0)
        return gen_fail(gen, FP8GEN_ERR_ARGUMENT, NULL,
                        "the seconds of %s by %s over %d ranks are not known", op, way, (int)ranks);
    *seconds = asked.seconds;
    return status;
}
