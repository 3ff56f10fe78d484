/*
 * The README's list of spec fields is the text of fp8gen_schema: between the line "<!-- schema -->"
 * and the end of the code block that follows. FP8_TEST_UPDATE=1 writes it there (make golden).
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "gen/fp8gen.h"
#include "runtime/fp8.h"

static const char begin_mark[] = "<!-- schema -->\n```text\n";
static const char end_mark[] = "```\n";

static char *read_file(const char *path)
{
    FILE *file = fopen(path, "rb");
    assert_non_null(file);
    char *text = calloc(1, 1 << 20);
    assert_non_null(text);
    size_t size = fread(text, 1, (1 << 20) - 1, file);
    assert_true(size > 0);
    fclose(file);
    return text;
}

static void readme_lists_the_schema(void **state)
{
    (void)state;
    fp8gen *gen = NULL;
    const char *schema = NULL;
    assert_int_equal(fp8gen_open(NULL, &gen), FP8GEN_OK);
    assert_int_equal(fp8gen_schema(gen, &schema), FP8GEN_OK);

    char *readme = read_file("README.md");
    char *begin = strstr(readme, begin_mark);
    assert_non_null(begin);
    begin += strlen(begin_mark);
    char *end = strstr(begin, end_mark);
    assert_non_null(end);

    if (getenv("FP8_TEST_UPDATE")) {
        FILE *file = fopen("README.md", "wb");
        assert_non_null(file);
        fwrite(readme, 1, (size_t)(begin - readme), file);
        fputs(schema, file);
        fputs(end, file);
        assert_int_equal(fclose(file), 0);
    } else {
        *end = 0;
        assert_string_equal(begin, schema);
    }
    free(readme);
    fp8gen_close(gen);
}

static void versions_agree(void **state)
{
    (void)state;
    char numbers[32];
    snprintf(numbers, sizeof(numbers), "%d.%d.%d", FP8_VERSION_MAJOR, FP8_VERSION_MINOR,
             FP8_VERSION_PATCH);
    assert_string_equal(numbers, FP8_VERSION_STRING);
    assert_string_equal(fp8_version(), FP8_VERSION_STRING);
    assert_string_equal(fp8gen_version(), FP8_VERSION_STRING);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(readme_lists_the_schema),
        cmocka_unit_test(versions_agree),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
