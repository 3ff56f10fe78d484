/*
 * test_spec_sandbox.c - what a spec can not do, and what stops it.
 *
 * Each line of Lua in the tables below runs as a spec of its own. Refusals must be located errors
 * of the spec (never a crash, never "a bug of fp8gen"); allowed lines must give the same model
 * every time.
 */
#include "gen/internal.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>
#include <time.h>

#define RETURN                                                                                     \
    " return model 'm' { layers = { linear 'a' { in_features = 16, out_features = 16 } } }"

static fp8gen *run(const char *text, const struct script_limits *limits, fp8gen_status expected)
{
    fp8gen *gen = NULL;
    assert_int_equal(fp8gen_open(NULL, &gen), FP8GEN_OK);
    if (limits != NULL)
        gen->script.limits = *limits;
    fp8gen_status status = fp8gen_load_text(gen, "s", text, strlen(text));
    if (status != expected)
        print_error("%s\nstatus %d\n%s", text, (int)status, fp8gen_diagnostics(gen));
    assert_int_equal(status, expected);
    return gen;
}

static void test_refused(void **state)
{
    (void)state;
    static const char *const lines[] = {
        "print(1)",
        "io.write('x')",
        "os.exit(0)",
        "os.execute('true')",
        "require 'plan'",
        "load('return 1')()",
        "dofile('x')",
        "loadfile('x')",
        "loadstring('x')",
        "pcall(print)",
        "xpcall(print, print)",
        "error('x')",
        "assert(false)",
        "coroutine.wrap(function() end)()",
        "setmetatable({}, {})",
        "getmetatable('')",
        "rawset({}, 1, 2)",
        "rawget({}, 1)",
        "rawequal(1, 1)",
        "rawlen({})",
        "debug.getinfo(1)",
        "collectgarbage()",
        "package.loaded.x = 1",
        "_G.x = 1",
        "next({})",
        "utf8.char(5)",
        "string.dump(model)",
        "string.gsub('a', 'a', 'b')",
        "string.find('a', 'a')",
        "string.match('a', 'a')",
        "string.gmatch('a', 'a')",
        "string.byte('a')",
        "string.char(1)",
        "string.pack('i', 1)",
        "('x'):gsub('x', 'y')",
        "('x'):find('x')",
        "('x'):match('x')",
        "('x'):dump()",
        "local s = 'x' s.y = 1",
        "('x').__index = 1",
        "math.random()",
        "math.randomseed(1)",
        "host.xxh128('x')",
        "string.format('%p', {})",
        "string.format('%-5p', {})",
        "string.format('%%%p', {})",
        "string.format(5)",
        "string.format(('x'):rep(5000))",
        "table.move(1, 2, 3, 4)",
        "table.sort(5)",
        "pairs(nil)",
        "pairs({ [{}] = 1 })",
        "pairs({ [true] = 1 })",
        "ipairs()",
        "model()",
        "linear.x = 1",
        "model.x = 1",
        "recipe.current.x = 1",
        "recipe.x.y.z = 1",
        "local a = linear 'a' {} a.b = 1",
        "local a = linear 'a' {} a[1] = 1",
        "string.rep('x', -1)()",
        "local x <close> = 5",
        "goto nowhere",
        "error = 5 error()",
        "_ENV = {} print()",
        "local _ENV = {} print()",
        "local x = 1 < 'a'",
        "x.y.z = 1",
        "math.tointeger({}).x = 1",
        "tostring().x = 1",
        "select(-5, 1)",
        "tonumber('z', 99)",
        "return function() end",
        "return model",
        "return linear",
        "return recipe",
        "return _ENV",
        "return model 'm'",
        "return recipe.current",
        "return recipe.current {}",
        "return ...",
        "local t = {} t[0/0] = 1",
        "local t = {} t[nil] = 1",
        "for i = 1, 10, 0 do end",
        "for i = 'a', 2 do end",
        "return model 'm' { layers = _ENV }",
        "return model(model)(model)",
        "return model {} {}",
        "return linear(linear)(linear)",
        "return model 'm' { layers = { recipe } }",
        "return model 'm' { [model] = linear }",
        "local t = {} t.layers = t return model 'm' (t)",
        "local t = {} t[1] = t return model 'm' { layers = t, mesh = t, accumulation = t }",
        "table.unpack({}, 1, 1e8)",
        "table.concat({ {} })",
        "table.insert({}, 5, 5)",
        "('x'):rep(1e10)",
        "string.rep('x', 1e9, 'y')",
        "local s = 'x' while true do s = s .. s end",
    };
    for (size_t i = 0; i < sizeof(lines) / sizeof(lines[0]); i++) {
        fp8gen *gen = run(lines[i], NULL, FP8GEN_ERR_SPEC);
        const char *text = fp8gen_diagnostics(gen);
        if (strncmp(text, "s:1:", 4) != 0 || strstr(text, "gen/lua") || strstr(text, "a bug of"))
            print_error("%s\n%s", lines[i], text);
        assert_int_equal(strncmp(text, "s:1:", 4), 0);
        assert_null(strstr(text, "gen/lua"));
        assert_null(strstr(text, "0x5"));
        fp8gen_close(gen);
    }
}

static void test_allowed(void **state)
{
    (void)state;
    static const char *const lines[] = {
        "local s = ('%d %s %5.2f %%p'):format(3, 'x', 2.5)",
        "local s = ('Ab'):upper() .. ('Ab'):lower() .. ('abc'):sub(2, -1) .. ('-'):rep(3)",
        "local t = { 3, 1, 2 } table.sort(t) local x = 1 // (t[1] == 1 and t[3] == 3 and 1 or 0)",
        "local t = { 'b', 'a' } table.sort(t, function(a, b) return a > b end)",
        "for i, v in ipairs({ 1, 2 }) do local x = i + v end",
        "local s = '' for k, v in pairs({ b = 1, a = 2, [2] = 3, [1] = 4 }) do s = s .. k end "
        "local x = 1 // (s == '12ab' and 1 or 0)",
        "local t = table.move({ 1, 2, 3 }, 1, 3, 2) local x = 1 // (t[4] == 3 and t[2] == 1 and 1 "
        "or 0)",
        "local t = table.pack(select(2, 1, 2, 3)) local x = 1 // (t.n == 2 and 1 or 0)",
        "local x = math.max(1, 2) + math.floor(2.5) + math.maxinteger + tonumber('5')",
        "local x = tostring({}) .. tostring(5) .. tostring(nil) .. tostring(true)",
        "local s = ('%s %s'):format({}, 5 == nil)",
        "globals = 5 local x = globals + 1",
        "string = nil math = nil table = nil",
        "local r = recipe.current { format = 'e4m3' } local x = r.format == 'e4m3'",
        "local function f(n) if n > 0 then return f(n - 1) end end f(1e5)",
        "local x <const> = 5 goto done do end ::done::",
    };
    for (size_t i = 0; i < sizeof(lines) / sizeof(lines[0]); i++) {
        char text[1024];
        snprintf(text, sizeof(text), "%s%s", lines[i], RETURN);
        fp8gen_close(run(text, NULL, FP8GEN_OK));
    }
}

/* The spec's own copies of libraries and the metatable of strings do not reach our modules. */
static void test_isolation(void **state)
{
    (void)state;
    fp8gen *gen = run("string.format = nil string.rep = 5 math.floor = nil table.sort = nil"
                      " ipairs = nil pairs = nil type = nil tostring = nil model2 = model" RETURN,
                      NULL, FP8GEN_OK);
    const char *text = NULL;
    assert_int_equal(fp8gen_schema(gen, &text), FP8GEN_OK); /* uses string methods */
    fp8gen_close(gen);
    gen = run("local x = nil + 1", NULL, FP8GEN_ERR_SPEC);
    assert_int_equal(fp8gen_schema(gen, &text), FP8GEN_OK);
    fp8gen_close(gen);
}

/* Time that this process worked: other work on the machine does not count. */
static int64_t now_ms(void)
{
    struct timespec time;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
    return (int64_t)time.tv_sec * 1000 + time.tv_nsec / 1000000;
}

/* Work that hides inside C functions or long strings still ends soon after the time limit. */
static void test_time_limit(void **state)
{
    (void)state;
    static const char *const lines[] = {
        "while true do end",
        "::a:: goto a",
        "local s = ('x'):rep(10000000) while true do local t = s .. 'y' end",
        "table.move({}, 1, math.maxinteger - 1, 2)",
        "local s, t = ('x'):rep(1000000), {} for i = 1, 5000 do t[i] = s end "
        "while true do table.sort(t) end",
        "local t = {} for i = 1, 3000 do t[i] = 1000000 end table.sort(t, string.rep) "
        "while true do table.sort(t, string.rep) end",
        "local t = {} for i = 1, 100000 do table.insert(t, 1, i) end while true do end",
        "local t = {} for i = 1, 100000 do t[i] = i end while true do for k in pairs(t) do end end",
    };
    const struct script_limits limits = { .instructions = INT64_MAX / 2,
                                          .memory_bytes = 64 << 20,
                                          .wall_ms = 200 };
    for (size_t i = 0; i < sizeof(lines) / sizeof(lines[0]); i++) {
        int64_t start = now_ms();
        fp8gen *gen = run(lines[i], &limits, FP8GEN_ERR_SPEC);
        int64_t took = now_ms() - start;
        if (took > 20000)
            print_error("%s took %lld ms\n", lines[i], (long long)took);
        assert_true(took < 20000); /* sanitizers are slow */
        fp8gen_close(gen);
    }
}

static void test_limit_messages(void **state)
{
    (void)state;
    struct script_limits limits = { .instructions = 5000,
                                    .memory_bytes = 4 << 20,
                                    .wall_ms = 60000 };
    fp8gen *gen = run("\nwhile true do end", &limits, FP8GEN_ERR_SPEC);
    assert_non_null(strstr(fp8gen_diagnostics(gen),
                           "s:2:1: error: the spec ran for more than 5000 instructions"));
    fp8gen_close(gen);
    gen = run("\n\nlocal s = ('x'):rep(5000000)", &limits, FP8GEN_ERR_SPEC);
    assert_non_null(
        strstr(fp8gen_diagnostics(gen), "s:3:1: error: the spec used more than 4 MiB of memory"));
    fp8gen_close(gen);
    limits = (struct script_limits){ INT64_MAX / 2, 4 << 20, 30 };
    gen = run("while true do\nend", &limits, FP8GEN_ERR_SPEC);
    assert_non_null(strstr(fp8gen_diagnostics(gen), "error: the spec ran for more than 30 ms"));
    fp8gen_close(gen);
}

/* Hostile sizes: all must end soon, whatever they say. */
static void test_hostile_sizes(void **state)
{
    (void)state;
    struct buf text = { 0 };
    buf_puts(&text, "return model 'm' { layers = {");
    for (int i = 0; i < 4000; i++)
        buf_printf(&text, "linear 'a%d' { in_features = %d, x%d = 1, y = 2, y = 3 },", i % 7, -i,
                   i);
    buf_puts(&text, "} }");
    assert_false(text.failed);
    int64_t start = now_ms();
    fp8gen_close(run(text.data, NULL, FP8GEN_ERR_SPEC));
    text.size = 0;
    buf_puts(&text, "return model 'm' { layers = {");
    for (int i = 0; i < 4000; i++)
        buf_printf(&text, "%d,", i);
    buf_puts(&text, "} }");
    fp8gen_close(run(text.data, NULL, FP8GEN_ERR_SPEC));
    text.size = 0;
    buf_puts(&text, "return model 'm' { layers = { linear 'a' {");
    for (int i = 0; i < 50000; i++)
        buf_printf(&text, "f%d = 1,", i);
    buf_puts(&text, "} } }");
    fp8gen_close(run(text.data, NULL, FP8GEN_ERR_SPEC));
    text.size = 0;
    for (int i = 0; i < 300000; i++)
        buf_puts(&text, "((");
    fp8gen_close(run(text.data, NULL, FP8GEN_ERR_SPEC));
    text.size = 0;
    for (int i = 0; i < 300000; i++)
        buf_puts(&text, "{{ ");
    fp8gen_close(run(text.data, NULL, FP8GEN_ERR_SPEC));
    print_message("hostile sizes: %lld ms\n", (long long)(now_ms() - start));
    assert_true(now_ms() - start < 60000);
    buf_free(&text);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_refused),        cmocka_unit_test(test_allowed),
        cmocka_unit_test(test_isolation),      cmocka_unit_test(test_time_limit),
        cmocka_unit_test(test_limit_messages), cmocka_unit_test(test_hostile_sizes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
