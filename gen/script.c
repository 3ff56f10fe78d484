/*
 * script.c - the Lua host: our own modules, and behind a fence the spec.
 *
 * In: embedded modules, the text of a spec. Out: the checked model table (kept in the Lua
 * registry) or reported errors. It knows nothing of what a spec means; lua/spec.lua does.
 *
 * One state serves both. What keeps the spec in: its chunk is text and sees only the environment
 * that lua/sandbox.lua makes; while it runs, strings have a metatable with the few allowed
 * functions, the allocator has a limit, and a count hook checks instructions and time. C
 * functions of Lua that could work for long without a hook (table.move, sort of long strings) are
 * replaced in sandbox.lua. Lua reports errors by longjmp, so all work happens in bodies under
 * lua_pcall.
 */
#include "gen/internal.h"

#include <lauxlib.h>
#include <locale.h>
#include <lualib.h>
#include <string.h>

#include "runtime/thread.h"

enum {
    HOOK_INSTRUCTIONS = 100, /* between two looks at the clock */
    MEMORY_HITS_MAX = 8,     /* each makes Lua collect all garbage: a spec at the limit crawls */
    OWN_MEMORY_BYTES = 512 * 1024 * 1024
};

#define SPEC_CHUNK "=spec"
#define KEY_MODULES "fp8gen.modules"
#define KEY_MODEL "fp8gen.model"
#define KEY_STRING "fp8gen.string"

/* script_throw raises the address of its status's place. */
static const char throw_tags[FP8GEN_ERR_INTERNAL + 1];

/* ---- memory, time and place ------------------------------------------------------------------ */

/* The line of the innermost function of the spec that is running; 0 if none is. Needs no memory. */
static int spec_line(lua_State *L)
{
    lua_Debug info;
    for (int level = 0; lua_getstack(L, level, &info); level++)
        if (lua_getinfo(L, "Sl", &info) && strcmp(info.source, SPEC_CHUNK) == 0 &&
            info.currentline > 0)
            return info.currentline;
    return 0;
}

static void *script_alloc(void *user, void *memory, size_t old_size, size_t new_size)
{
    struct script *script = user;
    if (memory == NULL)
        old_size = 0; /* Lua passes the kind of object here */
    if (new_size == 0) {
        gen_free(memory);
        script->memory_used -= old_size;
        return NULL;
    }
    if (new_size > old_size && new_size - old_size > script->memory_limit - script->memory_used) {
        /* A memory error unwinds without a message handler: note the place now. */
        script->memory_hit = true;
        script->memory_hits++;
        if (script->running)
            script->line = spec_line(script->L);
        return NULL;
    }
    void *fresh = gen_realloc(memory, new_size);
    if (fresh == NULL && new_size <= old_size)
        fresh = memory; /* shrinking never fails */
    if (fresh == NULL) {
        script->memory_hit = false;
        return NULL;
    }
    script->memory_used += new_size - old_size;
    return fresh;
}

static void count_hook(lua_State *L, lua_Debug *info)
{
    (void)info;
    struct script *script = &script_session(L)->script;
    script->instructions -= HOOK_INSTRUCTIONS;
    if (script->instructions < 0)
        script->stop = "instructions";
    else if (fp8_clock() > script->deadline)
        script->stop = "time";
    else if (script->memory_hits > MEMORY_HITS_MAX)
        script->stop = "memory";
    if (script->stop != NULL)
        luaL_error(L, "%s", script->stop);
}

/* ---- what our modules are given -------------------------------------------------------------- */

struct fp8gen *script_session(lua_State *L)
{
    return *(struct fp8gen **)lua_getextraspace(L);
}

void script_throw(lua_State *L, fp8gen_status status)
{
    lua_pushlightuserdata(L, (void *)&throw_tags[status]);
    lua_error(L);
    __builtin_unreachable();
}

static int host_xxh128(lua_State *L)
{
    size_t size;
    const char *text = luaL_checklstring(L, 1, &size);
    char hex[33];
    gen_hash(text, size, hex);
    lua_pushstring(L, hex);
    return 1;
}

static int host_template(lua_State *L)
{
    struct gen_text text;
    fp8gen_status status = gen_template(script_session(L), luaL_checkstring(L, 1), &text);
    if (status != FP8GEN_OK)
        script_throw(L, status);
    lua_pushlstring(L, text.data, text.size);
    lua_pushstring(L, text.name);
    return 2;
}

static int host_less(lua_State *L)
{
    size_t a_size, b_size;
    const char *a = luaL_checklstring(L, 1, &a_size);
    const char *b = luaL_checklstring(L, 2, &b_size);
    int order = memcmp(a, b, a_size < b_size ? a_size : b_size);
    lua_pushboolean(L, order < 0 || (order == 0 && a_size < b_size));
    return 1;
}

/* Unlike a Lua function, a C function in tail position leaves the caller's frame in place. */
static int call_located(lua_State *L)
{
    int line = spec_line(L);
    lua_pushvalue(L, lua_upvalueindex(1));
    lua_insert(L, 1);
    if (line > 0)
        lua_pushinteger(L, line);
    else
        lua_pushnil(L);
    lua_insert(L, 2);
    lua_call(L, lua_gettop(L) - 1, LUA_MULTRET);
    return lua_gettop(L);
}

static int host_located(lua_State *L)
{
    luaL_checktype(L, 1, LUA_TFUNCTION);
    lua_settop(L, 1);
    lua_pushcclosure(L, call_located, 1);
    return 1;
}

void script_push_module(lua_State *L, const char *name)
{
    luaL_checkstack(L, 8, "module");
    lua_getfield(L, LUA_REGISTRYINDEX, KEY_MODULES);
    int type = lua_getfield(L, -1, name);
    if (type == LUA_TBOOLEAN)
        luaL_error(L, "module '%s' requires itself", name);
    if (type == LUA_TNIL) {
        lua_pop(L, 1);
        lua_pushboolean(L, 0);
        lua_setfield(L, -2, name);
        const char *file_name = lua_pushfstring(L, "%s.lua", name);
        const struct embedded_file *file = gen_embedded(file_name);
        if (file == NULL)
            luaL_error(L, "there is no module '%s'", name);
        const char *chunk = lua_pushfstring(L, "@gen/lua/%s", file_name);
        if (luaL_loadbufferx(L, (const char *)file->data, file->size, chunk, "t") != LUA_OK)
            lua_error(L);
        lua_call(L, 0, 1);
        if (!lua_istable(L, -1) && !lua_isfunction(L, -1))
            luaL_error(L, "module '%s' returns no table or function", name);
        lua_replace(L, -3); /* in place of the two names */
        lua_pop(L, 1);
        lua_pushvalue(L, -1);
        lua_setfield(L, -3, name);
    }
    lua_remove(L, -2);
}

static int host_require(lua_State *L)
{
    script_push_module(L, luaL_checkstring(L, 1));
    return 1;
}

void script_push_function(lua_State *L, const char *module, const char *field)
{
    script_push_module(L, module);
    if (!lua_istable(L, -1) || lua_getfield(L, -1, field) != LUA_TFUNCTION)
        luaL_error(L, "module '%s' has no function '%s'", module, field);
    lua_remove(L, -2);
}

void script_push_model(lua_State *L)
{
    luaL_checkstack(L, 1, "model");
    if (lua_getfield(L, LUA_REGISTRYINDEX, KEY_MODEL) != LUA_TTABLE)
        luaL_error(L, "there is no model");
}

/* ---- bodies and their errors ----------------------------------------------------------------- */

static int add_traceback(lua_State *L)
{
    if (lua_type(L, 1) == LUA_TSTRING)
        luaL_traceback(L, L, lua_tostring(L, 1), 1);
    return 1;
}

static const char *string_field(lua_State *L, int table, const char *name)
{
    /* Stays on the stack, so that the string lives as long as the body. */
    lua_getfield(L, table, name);
    return lua_type(L, -1) == LUA_TSTRING ? lua_tostring(L, -1) : NULL;
}

static int64_t integer_field(lua_State *L, int table, const char *name)
{
    lua_getfield(L, table, name);
    int64_t value = lua_tointeger(L, -1);
    lua_pop(L, 1);
    return value > 0 ? value : 0;
}

static void report_table(lua_State *L, int table)
{
    struct fp8gen *gen = script_session(L);
    int top = lua_gettop(L);
    luaL_checkstack(L, 8, "diagnostic");
    struct gen_diag diag = {
        .file = string_field(L, table, "file"),
        .line = integer_field(L, table, "line"),
        .column = integer_field(L, table, "column"),
        .length = integer_field(L, table, "length"),
        .message = string_field(L, table, "message"),
        .note = string_field(L, table, "note"),
        .hint = string_field(L, table, "hint"),
    };
    struct gen_text in = { .name = diag.file, .data = string_field(L, table, "source") };
    if (diag.message == NULL)
        luaL_error(L, "an error without a message");
    if (in.data != NULL) {
        in.size = lua_rawlen(L, -1);
        diag.in = &in;
    }
    gen_report(gen, &diag);
    lua_settop(L, top);
}

/* Index 1: user data, not used; index 2: what a module raised. */
static int report_raised(lua_State *L)
{
    luaL_checktype(L, 2, LUA_TTABLE);
    lua_Integer count = luaL_len(L, 2);
    if (count == 0)
        report_table(L, 2);
    for (lua_Integer i = 1; i <= count; i++) {
        if (lua_geti(L, 2, i) != LUA_TTABLE)
            luaL_error(L, "a list of errors holds a %s", luaL_typename(L, -1));
        report_table(L, lua_gettop(L));
        lua_pop(L, 1);
    }
    return 0;
}

static fp8gen_status fail_internal(struct fp8gen *gen)
{
    const char *message = lua_tostring(gen->script.L, -1);
    return gen_fail(gen, FP8GEN_ERR_INTERNAL,
                    "this is a bug of fp8gen; please report it with the spec", "%s",
                    message == NULL ? "an error without a message" : message);
}

/* Runs the function that lies below its `count` arguments on the stack. An error stays there. The
 * program's locale is put aside meanwhile, in this thread: numbers are written with a point. */
static int protected_call(lua_State *L, int count)
{
    locale_t plain = newlocale(LC_ALL_MASK, "C", (locale_t)0), callers = uselocale(plain);
    int base = lua_gettop(L) - count;
    lua_pushcfunction(L, add_traceback);
    lua_insert(L, base);
    int code = lua_pcall(L, count, 0, base);
    (void)uselocale(callers);
    if (plain != (locale_t)0)
        freelocale(plain);
    return code;
}

fp8gen_status script_run(struct fp8gen *gen, lua_CFunction body, void *user)
{
    lua_State *L = gen->script.L;
    fp8gen_status status = FP8GEN_OK;
    int top = lua_gettop(L);
    if (!lua_checkstack(L, 8))
        return gen_out_of_memory(gen);
    lua_pushcfunction(L, body);
    lua_pushlightuserdata(L, user);
    int code = protected_call(L, 1);
    if (code == LUA_ERRMEM) {
        status = gen_out_of_memory(gen);
    } else if (code != LUA_OK && lua_islightuserdata(L, -1)) {
        const char *tag = lua_touserdata(L, -1);
        status = (fp8gen_status)(tag - throw_tags);
    } else if (code != LUA_OK && lua_istable(L, -1)) {
        int raised = lua_gettop(L);
        status = FP8GEN_ERR_SPEC;
        lua_pushcfunction(L, report_raised);
        lua_pushlightuserdata(L, NULL);
        lua_pushvalue(L, raised);
        code = protected_call(L, 2);
        if (code == LUA_ERRMEM || gen->out_of_memory)
            status = gen_out_of_memory(gen);
        else if (code != LUA_OK)
            status = fail_internal(gen);
    } else if (code != LUA_OK) {
        status = fail_internal(gen);
    }
    lua_settop(L, top);
    return status;
}

/* ---- opening --------------------------------------------------------------------------------- */

static void push_host(lua_State *L)
{
    static const luaL_Reg functions[] = {
        { "xxh128", host_xxh128 },
        { "template", host_template },
        { "less", host_less },
        { "located", host_located },
        { NULL, NULL },
    };
    luaL_newlib(L, functions);
    lua_pushstring(L, fp8gen_version());
    lua_setfield(L, -2, "version");
}

static int open_body(lua_State *L)
{
    static const luaL_Reg libraries[] = {
        { LUA_GNAME, luaopen_base },       { LUA_STRLIBNAME, luaopen_string },
        { LUA_TABLIBNAME, luaopen_table }, { LUA_MATHLIBNAME, luaopen_math },
        { LUA_UTF8LIBNAME, luaopen_utf8 },
    };
    /* They read files or write to the terminal. */
    static const char *const removed[] = { "dofile", "loadfile", "print", "warn" };
    for (size_t i = 0; i < sizeof(libraries) / sizeof(libraries[0]); i++) {
        luaL_requiref(L, libraries[i].name, libraries[i].func, 1);
        lua_pop(L, 1);
    }
    for (size_t i = 0; i < sizeof(removed) / sizeof(removed[0]); i++) {
        lua_pushnil(L);
        lua_setglobal(L, removed[i]);
    }
    lua_newtable(L);
    lua_setfield(L, LUA_REGISTRYINDEX, KEY_MODULES);
    push_host(L);
    lua_setglobal(L, "host");
    lua_pushcfunction(L, host_require);
    lua_setglobal(L, "require");
    lua_pushliteral(L, "");
    lua_getmetatable(L, -1);
    lua_setfield(L, LUA_REGISTRYINDEX, KEY_STRING);
    return 0;
}

fp8gen_status script_open(struct fp8gen *gen)
{
    struct script *script = &gen->script;
    script->limits = (struct script_limits){ .instructions = 10 * 1000 * 1000,
                                             .memory_bytes = 64 * 1024 * 1024,
                                             .wall_ms = 5000 };
    script->memory_limit = OWN_MEMORY_BYTES;
    script->L = lua_newstate(script_alloc, script);
    if (script->L == NULL)
        return gen_out_of_memory(gen);
    *(struct fp8gen **)lua_getextraspace(script->L) = gen;
    return script_run(gen, open_body, NULL);
}

void script_close(struct fp8gen *gen)
{
    if (gen->script.L != NULL)
        lua_close(gen->script.L);
    gen->script.L = NULL;
}

/* ---- the spec -------------------------------------------------------------------------------- */

/* Message handler while the spec runs: the error goes on as it is, its place is kept. */
static int note_line(lua_State *L)
{
    struct script *script = &script_session(L)->script;
    if (script->stop == NULL || script->memory_hits == 0) /* else script_alloc noted the place */
        script->line = spec_line(L);
    return 1;
}

/* Pops a table and makes it the metatable of all strings. */
static void set_string_metatable(lua_State *L)
{
    lua_pushliteral(L, "");
    lua_insert(L, -2);
    lua_setmetatable(L, -2);
    lua_pop(L, 1);
}

/* Calls the chunk at the top with all fences up; index `strings`: the metatable of strings
 * meanwhile. What the chunk returns, or its error, takes its place. */
static int run_fenced(lua_State *L, int strings)
{
    struct script *script = &script_session(L)->script;
    int base = lua_gettop(L);
    lua_pushcfunction(L, note_line);
    lua_insert(L, base);
    lua_pushvalue(L, strings);
    set_string_metatable(L);

    script->stop = NULL;
    script->line = 0;
    script->instructions = script->limits.instructions;
    script->deadline = fp8_clock() + (double)script->limits.wall_ms * 1e-3;
    script->memory_limit = script->memory_used + script->limits.memory_bytes;
    script->memory_hit = false;
    script->memory_hits = 0;
    script->running = true;
    lua_sethook(L, count_hook, LUA_MASKCOUNT, HOOK_INSTRUCTIONS);
    int code = lua_pcall(L, 0, LUA_MULTRET, base);
    lua_sethook(L, NULL, 0, 0);
    script->running = false;
    script->memory_limit = OWN_MEMORY_BYTES;

    lua_getfield(L, LUA_REGISTRYINDEX, KEY_STRING);
    set_string_metatable(L);
    lua_remove(L, base);
    if (code == LUA_ERRMEM && !script->memory_hit)
        script_throw(L, gen_out_of_memory(script_session(L)));
    if (code == LUA_ERRMEM)
        script->stop = "memory";
    return code;
}

/* Pushes { name =, text =, instructions =, memory_bytes =, wall_ms = }: the spec and its limits. */
static void push_source(lua_State *L)
{
    const struct fp8gen *gen = script_session(L);
    const struct script_limits *limits = &gen->script.limits;
    lua_createtable(L, 0, 5);
    lua_pushinteger(L, limits->instructions);
    lua_setfield(L, -2, "instructions");
    lua_pushinteger(L, (lua_Integer)limits->memory_bytes);
    lua_setfield(L, -2, "memory_bytes");
    lua_pushinteger(L, limits->wall_ms);
    lua_setfield(L, -2, "wall_ms");
    lua_pushstring(L, gen->spec.name);
    lua_setfield(L, -2, "name");
    lua_pushlstring(L, gen->spec.data, gen->spec.size);
    lua_setfield(L, -2, "text");
}

/* In a call of its own without a message handler: what the loader says stays as it is. */
static int read_chunk(lua_State *L)
{
    const struct gen_text *spec = &script_session(L)->spec;
    if (luaL_loadbufferx(L, spec->data, spec->size, SPEC_CHUNK, "t") != LUA_OK)
        lua_error(L);
    return 1;
}

static int load_body(lua_State *L)
{
    struct fp8gen *gen = script_session(L);
    lua_settop(L, 0);
    script_push_function(L, "spec", "begin");
    push_source(L);
    lua_call(L, 1, 3); /* 1: the load, 2: its environment, 3: the metatable of its strings */
    lua_pushcfunction(L, read_chunk);
    int code = lua_pcall(L, 0, 1, 0);
    if (code == LUA_ERRMEM)
        script_throw(L, gen_out_of_memory(gen));
    if (code != LUA_OK) {
        script_push_function(L, "spec", "syntax_error");
        lua_pushvalue(L, 1);
        lua_pushvalue(L, 4);
        lua_call(L, 2, 1);
        lua_error(L);
    }
    lua_pushvalue(L, 2);
    if (lua_setupvalue(L, 4, 1) == NULL)
        luaL_error(L, "a chunk without an environment");

    if (run_fenced(L, 3) != LUA_OK) {
        script_push_function(L, "spec", "runtime_error");
        lua_pushvalue(L, 1);
        lua_pushvalue(L, 4);
        lua_pushinteger(L, gen->script.line);
        lua_pushstring(L, gen->script.stop);
        lua_call(L, 4, 1);
        lua_error(L);
    }
    int results = lua_gettop(L) - 3;
    script_push_function(L, "spec", "finish");
    lua_pushvalue(L, 1);
    lua_pushinteger(L, results);
    if (results > 0)
        lua_pushvalue(L, 4);
    else
        lua_pushnil(L);
    lua_call(L, 3, 2); /* the model, its canonical text */
    size_t size;
    const char *canonical = luaL_checklstring(L, -1, &size);
    gen_hash(canonical, size, gen->spec_hash);
    lua_pop(L, 1);
    lua_setfield(L, LUA_REGISTRYINDEX, KEY_MODEL);
    return 0;
}

fp8gen_status script_load_spec(struct fp8gen *gen)
{
    return script_run(gen, load_body, NULL);
}
