/*
 * test_spec_text.c - the ground that the spec front stands on: arena, buffer, hash, diagnostics.
 */
#include "gen/internal.h"

#include <setjmp.h>
#include <stdarg.h>
#include <string.h>

#include <cmocka.h>

static void test_arena(void **state)
{
    (void)state;
    struct arena arena = { 0 };
    char *small = arena_copy(&arena, "abc", 3);
    unsigned char *large = arena_alloc(&arena, 100000);
    char *after = arena_printf(&arena, "%s-%d", "x", 5);
    assert_non_null(large);
    assert_string_equal(small, "abc");
    assert_string_equal(after, "x-5");
    /* The large piece has a block of its own: the small ones stay together. */
    assert_true(after > small && after < small + 4096);
    for (size_t i = 0; i < 100000; i++)
        assert_int_equal(large[i], 0);
    for (size_t size = 0; size < 300; size++)
        assert_int_equal((uintptr_t)arena_alloc(&arena, size) % 16, 0);
    assert_null(arena_alloc(&arena, SIZE_MAX));
    assert_null(arena_copy(&arena, "", SIZE_MAX));
    arena_free(&arena);
    assert_null(arena.first);
    arena_free(&arena);
}

static void test_buf(void **state)
{
    (void)state;
    struct buf buf = { 0 };
    for (int i = 0; i < 1000; i++)
        buf_printf(&buf, "%d,", i);
    assert_int_equal(buf.size, 3890);
    assert_int_equal(strlen(buf.data), buf.size);
    buf_put(&buf, "\0", 1);
    assert_int_equal(buf.size, 3891);
    assert_false(buf.failed);
    gen_alloc_fail(1, false);
    buf_printf(&buf, "%*s", 10000, "");
    gen_alloc_fail(0, false);
    assert_true(buf.failed);
    assert_int_equal(buf.size, 3891); /* what was there stays */
    buf_puts(&buf, "lost");
    assert_int_equal(buf.size, 3891);
    buf_free(&buf);
}

static void test_clean(void **state)
{
    (void)state;
    static const char *const cases[][2] = {
        { "plain", "plain" },
        { "gr\xc3\xb6\xc3\x9f"
          "e \xe2\x82\xac \xf0\x9f\x98\x80",
          "gr\xc3\xb6\xc3\x9f"
          "e \xe2\x82\xac \xf0\x9f\x98\x80" },
        { "\x1b[31m\x7f\t\n", "\\x1b[31m\\x7f\\x09\\x0a" },
        { "\xc2\x9b"
          "31m",
          "\\xc2\\x9b31m" },                            /* a C1 control */
        { "\xc3", "\\xc3" },                            /* cut short */
        { "\xc0\xaf", "\\xc0\\xaf" },                   /* too long a form */
        { "\xed\xa0\x80", "\\xed\\xa0\\x80" },          /* a surrogate */
        { "\xf4\x90\x80\x80", "\\xf4\\x90\\x80\\x80" }, /* beyond Unicode */
        { "\xe2\x82", "\\xe2\\x82" },
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct buf buf = { 0 };
        buf_put_clean(&buf, cases[i][0], strlen(cases[i][0]));
        assert_string_equal(buf.data, cases[i][1]);
        buf_free(&buf);
    }
}

/* Values of the xxHash project's own program (xxhsum -H2). */
static void test_hash(void **state)
{
    (void)state;
    char hex[33];
    gen_hash("", 0, hex);
    assert_string_equal(hex, "99aa06d3014798d86001c324468d497f");
    gen_hash("abc", 3, hex);
    assert_string_equal(hex, "06b05ab6733a618578af5f94892f3950");
}

/* ---- diagnostics ----------------------------------------------------------------------------- */

static void assert_report(bool colors, const struct gen_diag *diag, const char *expected)
{
    fp8gen *gen = NULL;
    fp8gen_options options = FP8GEN_OPTIONS_INIT;
    options.color = colors;
    assert_int_equal(fp8gen_open(&options, &gen), FP8GEN_OK);
    gen_report(gen, diag);
    assert_string_equal(fp8gen_diagnostics(gen), expected);
    assert_int_equal(gen->errors, 1);
    fp8gen_close(gen);
}

static const char source[] = "first\n\t\xc3\xa4 = \"x\",\r\nlast";
static const struct gen_text text = { "f", source, sizeof(source) - 1 };

static void test_report(void **state)
{
    (void)state;
    assert_report(false, &(struct gen_diag){ .message = "m" }, "error: m\n");
    assert_report(false, &(struct gen_diag){ .message = "m", .file = "a b", .hint = "h\ni" },
                  "a b: error: m\n  hint: h\n  hint: i\n");
    assert_report(false, &(struct gen_diag){ .message = "m", .file = "f", .line = 7 },
                  "f:7: error: m\n");
    assert_report(false, &(struct gen_diag){ .message = "m", .file = "f", .line = 7, .column = 2 },
                  "f:7:2: error: m\n");
    /* Columns are characters; a tab is one cell wide; the line's end is not shown. */
    assert_report(false,
                  &(struct gen_diag){ .message = "m",
                                      .file = "f",
                                      .line = 2,
                                      .column = 7,
                                      .length = 3,
                                      .note = "n",
                                      .in = &text },
                  "f:2:6: error: m\n     \xc3\xa4 = \"x\",\n         ^~~\n  note: n\n");
    /* The last line; beyond the line; beyond the text. */
    assert_report(
        false,
        &(struct gen_diag){
            .message = "m", .file = "f", .line = 3, .column = 4, .length = 99, .in = &text },
        "f:3:4: error: m\n    last\n       ^\n");
    assert_report(
        false,
        &(struct gen_diag){ .message = "m", .file = "f", .line = 3, .column = 5, .in = &text },
        "f:3:5: error: m\n    last\n        ^\n");
    assert_report(
        false,
        &(struct gen_diag){ .message = "m", .file = "f", .line = 4, .column = 1, .in = &text },
        "f:4:1: error: m\n");
    assert_report(false, &(struct gen_diag){ .message = "\x1b]0;\xff", .file = "\n" },
                  "\\x0a: error: \\x1b]0;\\xff\n");
    assert_report(
        true,
        &(struct gen_diag){
            .message = "m", .file = "f", .line = 3, .column = 1, .hint = "h", .in = &text },
        "\033[1mf:3:1: \033[1;31merror:\033[0m\033[1m m\033[0m\n    last\n"
        "    \033[1;32m^\033[0m\n  \033[1;36mhint:\033[0m h\n");
}

/* Out of memory in the middle: no half diagnostic, and it says so. */
static void test_report_memory(void **state)
{
    (void)state;
    fp8gen *gen = NULL;
    assert_int_equal(fp8gen_open(NULL, &gen), FP8GEN_OK);
    gen_alloc_fail(1, true);
    assert_int_equal(gen_fail(gen, FP8GEN_ERR_SPEC, NULL, "%d", 5), FP8GEN_ERR_MACHINE);
    assert_string_equal(fp8gen_diagnostics(gen), GEN_OUT_OF_MEMORY);
    gen_alloc_fail(0, false);
    fp8gen_close(gen);

    assert_int_equal(fp8gen_open(NULL, &gen), FP8GEN_OK);
    gen_report(gen, &(struct gen_diag){ .message = "first" });
    char large[1000];
    memset(large, 'x', sizeof(large) - 1);
    large[sizeof(large) - 1] = '\0';
    gen_alloc_fail(1, true);
    gen_report(gen, &(struct gen_diag){ .message = large });
    gen_alloc_fail(0, false);
    assert_string_equal(fp8gen_diagnostics(gen), "error: first\n" GEN_OUT_OF_MEMORY);
    fp8gen_close(gen);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_arena),  cmocka_unit_test(test_buf),
        cmocka_unit_test(test_clean),  cmocka_unit_test(test_hash),
        cmocka_unit_test(test_report), cmocka_unit_test(test_report_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
