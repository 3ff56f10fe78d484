/*
 * tuning.c - a tuning file on its way into the plan, and the configurations that one can name.
 *
 * In: a JSON file of `fp8gen tune`. Out: its entries in tuning.lua, its hash in the session, or
 * diagnostics. jansson reads the text, Lua knows what it must say. The hash is of a canonical form,
 * so that layout does not count.
 *
 * Lua errors are longjmps: the JSON lives outside of the protected body and is freed after it.
 */
#include "gen/internal.h"

#include <jansson.h>
#include <lauxlib.h>
#include <stdlib.h>
#include <string.h>

enum { TUNING_BYTES_MAX = 64 << 20 };

#define ARRAY_METATABLE "array"

/* ---- JSON to Lua ----------------------------------------------------------------------------- */

static void push_json(lua_State *L, const json_t *value);

static void push_array(lua_State *L, const json_t *value)
{
    size_t count = json_array_size(value);
    lua_createtable(L, (int)count, 0);
    luaL_setmetatable(L, ARRAY_METATABLE);
    for (size_t i = 0; i < count; i++) {
        push_json(L, json_array_get(value, i));
        lua_rawseti(L, -2, (lua_Integer)i + 1);
    }
}

static void push_object(lua_State *L, json_t *value)
{
    const char *key;
    json_t *member;
    lua_createtable(L, 0, (int)json_object_size(value));
    json_object_foreach(value, key, member)
    {
        push_json(L, member);
        lua_setfield(L, -2, key);
    }
}

static void push_json(lua_State *L, const json_t *value)
{
    luaL_checkstack(L, 4, "tuning file is too deep");
    switch (json_typeof(value)) {
    case JSON_OBJECT:
        push_object(L, (json_t *)value);
        break;
    case JSON_ARRAY:
        push_array(L, value);
        break;
    case JSON_STRING:
        lua_pushlstring(L, json_string_value(value), json_string_length(value));
        break;
    case JSON_INTEGER:
        lua_pushinteger(L, json_integer_value(value));
        break;
    case JSON_REAL:
        lua_pushnumber(L, json_real_value(value));
        break;
    case JSON_NULL:
        lua_pushlightuserdata(L, NULL);
        break;
    default:
        lua_pushboolean(L, json_is_true(value));
    }
}

/* ---- the file -------------------------------------------------------------------------------- */

struct tuning {
    const char *name;
    const json_t *root;
};

static int tuning_body(lua_State *L)
{
    const struct tuning *tuning = lua_touserdata(L, 1);
    luaL_newmetatable(L, ARRAY_METATABLE);
    script_push_function(L, "tuning", "load");
    lua_pushstring(L, tuning->name);
    push_json(L, tuning->root);
    lua_call(L, 2, 0);
    return 0;
}

static fp8gen_status parse(struct fp8gen *gen, const struct gen_text *text, json_t **root)
{
    json_error_t error;
    *root = json_loadb(text->data, text->size, JSON_REJECT_DUPLICATES, &error);
    if (*root != NULL)
        return FP8GEN_OK;
    if (json_error_code(&error) == json_error_out_of_memory)
        return gen_out_of_memory(gen);
    struct gen_diag diag = {
        .file = text->name,
        .line = error.line > 0 ? error.line : 0,
        .column = error.column > 0 ? error.column : 0,
        .message = arena_printf(&gen->arena, "not JSON: %s", error.text),
        .hint = "a tuning file is written by fp8gen tune",
    };
    if (diag.message == NULL)
        return gen_out_of_memory(gen);
    gen_report(gen, &diag);
    return FP8GEN_ERR_SPEC;
}

static fp8gen_status add_hash(struct fp8gen *gen, const json_t *root)
{
    char *text = json_dumps(root, JSON_COMPACT | JSON_SORT_KEYS);
    if (text == NULL)
        return gen_out_of_memory(gen);
    gen_hash(text, strlen(text), gen->tuning_hash);
    free(text);
    gen->tuned = true;
    return FP8GEN_OK;
}

fp8gen_status fp8gen_tuning_file(fp8gen *gen, const char *path)
{
    struct gen_text text = { 0 };
    json_t *root = NULL;
    if (gen == NULL)
        return FP8GEN_ERR_ARGUMENT;
    if (path == NULL)
        return gen_fail(gen, FP8GEN_ERR_ARGUMENT, NULL, "the path of the tuning file is NULL");
    if (gen->tuned || gen->plan != NULL)
        return gen_fail(gen, FP8GEN_ERR_ARGUMENT, "open another session for another tuning file",
                        gen->tuned ? "this session has a tuning file already"
                                   : "the plan is made already: a tuning file comes too late");
    fp8gen_status status = gen_read_file(gen, path, TUNING_BYTES_MAX, &text);
    if (status == FP8GEN_OK)
        status = parse(gen, &text, &root);
    if (status == FP8GEN_OK) {
        struct tuning tuning = { text.name, root };
        status = script_run(gen, tuning_body, &tuning);
    }
    if (status == FP8GEN_OK)
        status = add_hash(gen, root);
    json_decref(root);
    return status;
}

/* ---- configurations -------------------------------------------------------------------------- */

/* user: json_t **, a new array. */
static int configs_body(lua_State *L)
{
    static const char *const numbers[] = { "bm",       "bn",     "stages", "cluster",  "group",
                                           "partials", "slices", "slabs",  "consumers" };
    json_t *list = *(json_t **)lua_touserdata(L, 1);
    script_push_module(L, "tile");
    lua_getfield(L, -1, "configurations");
    lua_Integer count = luaL_len(L, -1);
    for (lua_Integer i = 1; i <= count; i++) {
        json_t *config = json_object();
        bool good = json_array_append_new(list, config) == 0; /* the list owns it from here */
        lua_geti(L, -1, i);
        lua_getfield(L, -1, "name");
        lua_getfield(L, -2, "pingpong");
        lua_getfield(L, -3, "swapped");
        lua_getfield(L, -4, "scheduler");
        good = good &&
               json_object_set_new(config, "name", json_string(luaL_checkstring(L, -4))) == 0 &&
               json_object_set_new(config, "pingpong", json_boolean(lua_toboolean(L, -3))) == 0 &&
               json_object_set_new(config, "swapped", json_boolean(lua_toboolean(L, -2))) == 0 &&
               json_object_set_new(config, "scheduler", json_string(luaL_checkstring(L, -1))) == 0;
        for (size_t j = 0; good && j < sizeof(numbers) / sizeof(numbers[0]); j++) {
            lua_getfield(L, -5, numbers[j]);
            good = json_object_set_new(config, numbers[j],
                                       json_integer(luaL_checkinteger(L, -1))) == 0;
            lua_pop(L, 1);
        }
        if (!good)
            script_throw(L, gen_out_of_memory(script_session(L)));
        lua_pop(L, 5);
    }
    return 0;
}

fp8gen_status fp8gen_gemm_configs(fp8gen *gen, const char **json)
{
    fp8gen_status status = gen_require(gen, json != NULL);
    if (status != FP8GEN_OK)
        return status;
    *json = NULL;
    if (gen->gemm_configs == NULL) {
        json_t *list = json_array();
        status = list != NULL ? script_run(gen, configs_body, &list) : gen_out_of_memory(gen);
        char *text = status == FP8GEN_OK ? json_dumps(list, JSON_INDENT(2) | JSON_SORT_KEYS) : NULL;
        json_decref(list);
        if (status != FP8GEN_OK)
            return status;
        gen->gemm_configs = text != NULL ? arena_copy(&gen->arena, text, strlen(text)) : NULL;
        free(text);
        if (gen->gemm_configs == NULL)
            return gen_out_of_memory(gen);
    }
    *json = gen->gemm_configs;
    return FP8GEN_OK;
}
