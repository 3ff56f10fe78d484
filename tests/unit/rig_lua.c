/*
 * rig_lua.c - see rig_lua.h.
 */
#include "tests/unit/rig_lua.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <lauxlib.h>
#include <string.h>

#include "gen/internal.h"

static int lua_body(lua_State *L)
{
    const char *text = lua_touserdata(L, 1);
    if (luaL_loadbufferx(L, text, strlen(text), "=test", "t") != LUA_OK)
        lua_error(L);
    lua_call(L, 0, 0);
    return 0;
}

void run_lua(const char *text)
{
    struct fp8gen *gen;
    assert_int_equal(fp8gen_open(NULL, &gen), FP8GEN_OK);
    if (script_run(gen, lua_body, (void *)text) != FP8GEN_OK)
        fail_msg("%s", fp8gen_diagnostics(gen));
    fp8gen_close(gen);
}
