/*
 * test_expand.c - every rule of the template language, and the lines at which its errors are
 * reported.
 *
 * Each case gives a template, its parameters as a Lua table, and the text or the diagnostic
 * expected.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <lauxlib.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gen/internal.h"

struct expansion {
    const char *text;
    const char *params; /* "source = 'bf16', n = 3" */
    const char *result; /* set by the body, in the arena */
};

static int expand_body(lua_State *L)
{
    struct expansion *expansion = lua_touserdata(L, 1);
    script_push_function(L, "expand", "expand");
    lua_pushstring(L, "t.cu");
    lua_pushstring(L, expansion->text);
    lua_pushfstring(L, "return { %s }", expansion->params);
    if (luaL_loadstring(L, lua_tostring(L, -1)) != LUA_OK)
        lua_error(L);
    lua_remove(L, -2);
    lua_call(L, 0, 1);
    lua_pushstring(L, "dir/t.cu");
    lua_call(L, 4, 1);
    const char *result = lua_tostring(L, -1);
    expansion->result = arena_copy(&script_session(L)->arena, result, strlen(result));
    return 0;
}

static void expect_text(const char *text, const char *params, const char *wanted)
{
    struct fp8gen *gen;
    struct expansion expansion = { text, params, NULL };
    assert_int_equal(fp8gen_open(NULL, &gen), FP8GEN_OK);
    fp8gen_status status = script_run(gen, expand_body, &expansion);
    if (status != FP8GEN_OK)
        fail_msg("%s", fp8gen_diagnostics(gen));
    assert_string_equal(expansion.result, wanted);
    fp8gen_close(gen);
}

/* The diagnostics begin with `first` and hold `part`. */
static void expect_error(const char *text, const char *params, const char *first, const char *part)
{
    struct fp8gen *gen;
    struct expansion expansion = { text, params, NULL };
    assert_int_equal(fp8gen_open(NULL, &gen), FP8GEN_OK);
    assert_int_equal(script_run(gen, expand_body, &expansion), FP8GEN_ERR_SPEC);
    const char *said = fp8gen_diagnostics(gen);
    if (strncmp(said, first, strlen(first)) != 0)
        fail_msg("expected '%s' first, got:\n%s", first, said);
    if (strstr(said, part) == NULL)
        fail_msg("'%s' is not in:\n%s", part, said);
    fp8gen_close(gen);
}

static void test_plain_text(void **state)
{
    (void)state;
    expect_text("", "", "");
    expect_text("int x;\n", "", "int x;\n");
    expect_text("int x;", "", "int x;\n");
    expect_text("\n\n\n", "", "\n\n\n");
    expect_text("a \"q\" \\ %d \\n 'c' [[ ]] -- //\n", "", "a \"q\" \\ %d \\n 'c' [[ ]] -- //\n");
    expect_text("tab\there\r\nnext\r\n", "", "tab\there\r\nnext\r\n");
    expect_text("// % no Lua\n x; //% no Lua either\n", "", "// % no Lua\n x; //% no Lua either\n");
}

static void test_values(void **state)
{
    (void)state;
    expect_text("using t = $source;\n", "source = 'bf16'", "using t = bf16;\n");
    expect_text("$a$b $(a)x $a.b\n", "a = 1, b = -2", "1-2 1x 1.b\n");
    expect_text("$(a * 2 + 1) $(('x'):rep(3)) $(\")\")\n", "a = 4", "9 xxx )\n");
    expect_text("$yes $no\n", "yes = true, no = false", "true false\n");
    expect_text("$_a1\n", "_a1 = 'x'", "x\n");
    expect_text("$(f((1 + 2)))\n", "f = math.abs", "3\n");
    expect_text("$big\n", "big = 1 << 40", "1099511627776\n");
    expect_text("$('a\\')b')\n", "", "a')b\n");
}

static void test_floats_are_exact(void **state)
{
    (void)state;
    expect_text("$x\n", "x = 448.0", "0x1.cp+8\n");
    expect_text("$x\n", "x = 0.1", "0x1.999999999999ap-4\n");
    expect_text("$x $y\n", "x = -0.0, y = 1e300", "-0x0p+0 0x1.7e43c8800759cp+996\n");
    expect_error("a\n$(0/0)\n", "", "dir/t.cu:2: error: $(0/0) is not finite", "");
    expect_error("a\n$(1/0)\n", "", "dir/t.cu:2: error: $(1/0) is not finite", "");
}

static void test_dollar(void **state)
{
    (void)state;
    expect_text("$$x $$$$ $$$x\n", "x = 1", "$x $$ $1\n");
    expect_error("a\n b $5\n", "", "dir/t.cu:2:4: error: '$' stands before", "write $$");
    expect_error("a $", "", "dir/t.cu:1:3: error: '$' stands before", "write $$");
    expect_error("x\n$(a + (b)\n", "", "dir/t.cu:2:1: error: '$(' is not closed", "");
    expect_error("$(')\n", "", "dir/t.cu:1:1: error: '$(' is not closed", "");
}

static void test_lua_lines(void **state)
{
    (void)state;
    expect_text("  //% local n = 2\nx$n\n", "", "#line 2 \"t.cu\"\nx2\n");
    expect_text("a\n//% if wide then\nb\n//% else\nc\n//% end\nd\n", "wide = false",
                "a\n#line 5 \"t.cu\"\nc\n#line 7 \"t.cu\"\nd\n");
    expect_text("//% for i = 0, 1 do\nr[$i] = $(i * i);\n//% end\n", "",
                "#line 2 \"t.cu\"\nr[0] = 0;\n#line 2 \"t.cu\"\nr[1] = 1;\n");
    /* Statements over several lines, and one that starts with a parenthesis. */
    expect_text("//% local t = {\n//%   'x',\n//% }\n$(t[1])\n//% (function() end)()\ny\n", "",
                "#line 4 \"t.cu\"\nx\n#line 6 \"t.cu\"\ny\n");
    /* A table comes in a fixed order. */
    expect_text("//% for k, v in pairs { b = 2, a = 1 } do\n$k=$v\n//% end\n", "",
                "#line 2 \"t.cu\"\na=1\n#line 2 \"t.cu\"\nb=2\n");
}

static void test_line_numbers(void **state)
{
    (void)state;
    /* In step: no #line at all. */
    expect_text("a\nb$x\nc\n", "x = 1", "a\nb1\nc\n");
    /* A value of several lines. */
    expect_text("$x\nnext\n", "x = 'p\\nq'", "p\nq\n#line 2 \"t.cu\"\nnext\n");
    /* Not inside a comment, not after a backslash: it would not be a #line there. */
    expect_text("/*\n//% local a\nin\n*/\nout\n", "", "/*\nin\n*/\n#line 5 \"t.cu\"\nout\n");
    expect_text("#define F \\\n//% local a\n x\nend\n", "",
                "#define F \\\n x\n#line 4 \"t.cu\"\nend\n");
    /* What only looks like a comment. */
    expect_text("s = \"/*\"; // /*\n//% local a\nx\n", "",
                "s = \"/*\"; // /*\n#line 3 \"t.cu\"\nx\n");
    expect_text("int a = 1'000; c = '\"'; /* x\n//% local a\n */ y\nz\n", "",
                "int a = 1'000; c = '\"'; /* x\n */ y\n#line 4 \"t.cu\"\nz\n");
}

static void test_unset_names(void **state)
{
    (void)state;
    expect_error("a\nb $missing\n", "source = 'x', n = 1",
                 "dir/t.cu:2:4: error: 'missing' is not set", "set by the plan: n, source");
    expect_error("//% if missing then\n//% end\n", "", "dir/t.cu:1:8: error: 'missing' is not set",
                 "");
    expect_error("a\n\n$(n + other)\n", "n = 1", "dir/t.cu:3:7: error: 'other' is not set", "");
    /* The line of the use, not of the call. */
    expect_error("//% local function f()\n//%   return zork\n//% end\n$(f())\n", "",
                 "dir/t.cu:2:14: error: 'zork' is not set", "");
    expect_error("//% x = 3\n$x\n", "", "dir/t.cu:1:5: error: 'x' is assigned to but not a local",
                 "");
    /* No doors to the machine, and nothing that changes from run to run. */
    expect_error("$(os.time())\n", "", "dir/t.cu:1:3: error: 'os' is not set", "");
    expect_error("$(io)\n", "", "dir/t.cu:1:3: error: 'io' is not set", "");
    expect_error("$(require)\n", "", "dir/t.cu:1:3: error: 'require' is not set", "");
    expect_error("$(math.random())\n", "", "dir/t.cu:1: error: attempt to call a nil value", "");
}

static void test_lua_errors(void **state)
{
    (void)state;
    expect_error("a\nb\n$(1 +)\n", "", "dir/t.cu:3:1: error: '$(1 +)' is not a Lua expression", "");
    expect_error("$(a -- b)\nc\n", "a = 1", "dir/t.cu:1:1: error: '$(a -- b)' is not", "");
    expect_error("$()\n", "", "dir/t.cu:1:1: error: '$()' is not a Lua expression", "");
    expect_error("$end\n", "", "dir/t.cu:1:1: error: 'end' is a word of Lua", "");
    expect_error("a\n//% if true\nb\n//% end\n", "", "dir/t.cu:2: error: 'then' expected",
                 "the CUDA text that follows");
    expect_error("a\n//% for i = 1, 2 do\nb\n", "", "dir/t.cu:3: error: 'end' expected",
                 "at line 2");
    expect_error("a\n//% end\nb\n", "", "dir/t.cu:2: error: ", "near 'end'");
    expect_error("a\nb\n//% error 'boo'\n", "", "dir/t.cu:3: error: boo", "");
    expect_error("a\nb\n//% assert(n < 3, 'n is too large')\n", "n = 3",
                 "dir/t.cu:3: error: n is too large", "");
    expect_error("a\n$(n.x.y)\n", "n = {}", "dir/t.cu:2: error: attempt to index a nil", "");
    expect_error("$t\n", "t = {}", "dir/t.cu:1: error: $t is a table, not a string", "");
    expect_error("$(nil)\n", "", "dir/t.cu:1: error: $(nil) is a nil, not a string", "");
}

static void test_line_count_stays(void **state)
{
    (void)state;
    /* A long template with a Lua line in the middle: the error below it has its own line. */
    struct buf text = { 0 };
    for (int i = 1; i <= 500; i++)
        buf_printf(&text, i == 250 ? "//%% local unused = 1\n" : "line %d;\n", i);
    buf_puts(&text, "$nothing\n");
    expect_error(text.data, "", "dir/t.cu:501:2: error: 'nothing' is not set", "");
    buf_free(&text);
}

/* The indented block that follows the words, without its indentation; ends before the next text. */
static void block_after(const char *text, const char *words, struct buf *block)
{
    const char *at = strstr(text, words);
    assert_non_null(at);
    at = strstr(at, "\n\n");
    assert_non_null(at);
    for (at += 2; strncmp(at, "    ", 4) == 0 || *at == '\n';) {
        size_t size = strcspn(at, "\n") + 1, indent = *at == '\n' ? 0 : 4;
        buf_put(block, at + indent, size - indent);
        at += size;
    }
    assert_true(block->size > 0);
    block->data[block->size - 1] = '\0'; /* the blank line before the text */
}

/* The example on the page of the syntax is true. */
static void test_readme(void **state)
{
    (void)state;
    static char page[16384];
    FILE *file = fopen("templates/README.md", "r");
    assert_non_null(file);
    size_t size = fread(page, 1, sizeof(page) - 1, file);
    fclose(file);
    assert_true(size > 1000 && size < sizeof(page) - 1);
    struct buf text = { 0 }, wanted = { 0 };
    block_after(page, "## An example", &text);
    block_after(page, "this becomes", &wanted);
    /* The result names the template after its own first comment. */
    struct buf named = { 0 };
    for (const char *at = wanted.data; *at != '\0';) {
        size_t line = strcspn(at, "\n") + 1;
        if (strncmp(at, "#line", 5) == 0)
            buf_printf(&named, "#line %ld \"t.cu\"\n", strtol(at + 5, NULL, 10));
        else
            buf_put(&named, at, line);
        at += line;
    }
    expect_text(text.data, "entry = 'fp8_scale', source = 'fp32', format = 'e4m3', steps = 2",
                named.data);
    buf_free(&text);
    buf_free(&wanted);
    buf_free(&named);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_plain_text),       cmocka_unit_test(test_values),
        cmocka_unit_test(test_floats_are_exact), cmocka_unit_test(test_dollar),
        cmocka_unit_test(test_lua_lines),        cmocka_unit_test(test_line_numbers),
        cmocka_unit_test(test_unset_names),      cmocka_unit_test(test_lua_errors),
        cmocka_unit_test(test_line_count_stays), cmocka_unit_test(test_readme),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
