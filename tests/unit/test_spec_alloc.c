/*
 * test_spec_alloc.c - every allocation of a load may fail.
 *
 * The n-th request for memory fails, alone (Lua collects its garbage and asks again) or with all
 * after it, for n = 1, 2, ... until a whole load passes. Every time the calls return a status
 * (the right one or FP8GEN_ERR_MACHINE with "out of memory"), and all memory is given back. Past
 * the first requests only every STRIDE-th n is tried; FP8_TEST_FULL=1 tries all.
 */
#include "gen/internal.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { FIRST = 100, STRIDE = 101 };

static const char good[] =
    "local n = 16\n"
    "return model 'm' { tokens = 100, recipe = recipe.current { format = 'e4m3' }, layers = {\n"
    "  linear 'a' { in_features = n, out_features = 33, bias = true },\n"
    "  linear(('b'):rep(2)) { in_features = 1, out_features = 2, accumulation = { fprop = 'split' "
    "} },\n"
    "} }";
static const char wrong[] = "return model 'm' { tokns = 5, recipe = recipe.Current {}, layers = {\n"
                            "  linear 'a' { in_features = -1, out_features = 'x', bia = true },\n"
                            "  linear 'a' { in_features = 1 }, 5 } }";
static const char syntax[] = "return model 'm' { tokens = 5 layers = {} }";
static const char raises[] = "local x = liner";

/* One session under failing memory: true if nothing failed. */
static bool run_once(const char *text, fp8gen_status expected)
{
    fp8gen *gen = NULL;
    const char *schema = NULL;
    fp8gen_status status = fp8gen_open(NULL, &gen);
    if (status != FP8GEN_OK) {
        assert_int_equal(status, FP8GEN_ERR_MACHINE);
        assert_null(gen);
        return false;
    }
    fp8gen_status override = fp8gen_override(gen, "max_tokens", "8192");
    assert_true(override == FP8GEN_OK || override == FP8GEN_ERR_MACHINE);
    status = fp8gen_load_text(gen, "some/spec.lua", text, strlen(text));
    if (status != expected && status != FP8GEN_ERR_MACHINE)
        print_error("status %d\n%s", (int)status, fp8gen_diagnostics(gen));
    assert_true(status == expected || status == FP8GEN_ERR_MACHINE);
    if (status == FP8GEN_ERR_MACHINE)
        assert_non_null(strstr(fp8gen_diagnostics(gen), "error: out of memory\n"));
    else if (status == FP8GEN_ERR_SPEC)
        assert_non_null(strstr(fp8gen_diagnostics(gen), "some/spec.lua:"));
    fp8gen_status listed = fp8gen_schema(gen, &schema);
    assert_true(listed == FP8GEN_OK || listed == FP8GEN_ERR_MACHINE);
    assert_true((schema != NULL) == (listed == FP8GEN_OK));
    bool whole = status == expected && override == FP8GEN_OK && listed == FP8GEN_OK;
    fp8gen_close(gen);
    return whole;
}

static void check(const char *text, fp8gen_status expected)
{
    const char *full = getenv("FP8_TEST_FULL");
    bool all = full != NULL && strcmp(full, "1") == 0;
    gen_alloc_fail(0, false);
    int64_t start = gen_alloc_count();
    assert_true(run_once(text, expected));
    int64_t total = gen_alloc_count() - start;
    assert_true(total > FIRST);
    for (int64_t n = 1; n <= total; n += all || n < FIRST ? 1 : STRIDE) {
        gen_alloc_fail(n, true);
        run_once(text, expected);
        gen_alloc_fail(n, false);
        run_once(text, expected);
    }
    gen_alloc_fail(0, false);
    assert_true(run_once(text, expected));
    print_message("%lld requests\n", (long long)total);
}

static void test_good(void **state)
{
    (void)state;
    check(good, FP8GEN_OK);
}

static void test_wrong(void **state)
{
    (void)state;
    check(wrong, FP8GEN_ERR_SPEC);
}

static void test_syntax(void **state)
{
    (void)state;
    check(syntax, FP8GEN_ERR_SPEC);
}

static void test_raises(void **state)
{
    (void)state;
    check(raises, FP8GEN_ERR_SPEC);
}

/* A file's text is asked for as well. */
static void test_file(void **state)
{
    (void)state;
    for (int64_t n = 1; n < 40; n++) {
        fp8gen *gen = NULL;
        assert_int_equal(fp8gen_open(NULL, &gen), FP8GEN_OK);
        gen_alloc_fail(n, true);
        fp8gen_status status = fp8gen_load_file(gen, "specs/debug_vocab2556.lua");
        gen_alloc_fail(0, false);
        assert_true(status == FP8GEN_ERR_MACHINE);
        assert_string_equal(fp8gen_diagnostics(gen), "error: out of memory\n");
        fp8gen_close(gen);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_good),   cmocka_unit_test(test_wrong), cmocka_unit_test(test_syntax),
        cmocka_unit_test(test_raises), cmocka_unit_test(test_file),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
