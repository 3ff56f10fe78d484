/*
 * test_bad_specs.c - the words that a wrong spec is answered with.
 *
 * Every tests/bad_specs/<name>.lua must be refused with exactly the text in <name>.txt. After a
 * change of messages, FP8_UPDATE_GOLDEN=1 rewrites the texts; read the difference before it is
 * committed.
 */
#include "gen/internal.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <dirent.h>

#define FOLDER "tests/bad_specs"

static int is_spec(const struct dirent *entry)
{
    size_t length = strlen(entry->d_name);
    return length > 4 && strcmp(entry->d_name + length - 4, ".lua") == 0;
}

/* The golden text of a spec; NULL if there is none. */
static char *read_text(const char *path)
{
    FILE *file = fopen(path, "rb");
    if (file == NULL)
        return NULL;
    char *text = test_calloc(1, 1 << 16);
    size_t size = fread(text, 1, (1 << 16) - 1, file);
    assert_true(size < (1 << 16) - 1);
    fclose(file);
    return text;
}

static void write_text(const char *path, const char *text)
{
    FILE *file = fopen(path, "wb");
    assert_non_null(file);
    assert_true(fputs(text, file) >= 0);
    assert_int_equal(fclose(file), 0);
}

/* Counts what differs. */
static int check_spec(const char *name, bool update)
{
    char spec[512], golden[512];
    snprintf(spec, sizeof(spec), "%s/%s", FOLDER, name);
    snprintf(golden, sizeof(golden), "%s/%.*s.txt", FOLDER, (int)strlen(name) - 4, name);

    fp8gen *gen = NULL;
    assert_int_equal(fp8gen_open(NULL, &gen), FP8GEN_OK);
    gen->script.limits.wall_ms = 300 * 1000; /* the other limits stop the same spec everywhere */
    assert_int_equal(fp8gen_load_file(gen, spec), FP8GEN_ERR_SPEC);
    const char *got = fp8gen_diagnostics(gen);
    assert_non_null(strstr(got, "error: "));
    if (update)
        write_text(golden, got);
    char *expected = read_text(golden);
    int wrong = expected == NULL || strcmp(expected, got) != 0;
    if (wrong)
        print_error("%s: expected\n%s\ngot\n%s\n", spec, expected ? expected : "(nothing)", got);
    test_free(expected);
    fp8gen_close(gen);
    return wrong;
}

static void test_all(void **state)
{
    (void)state;
    const char *update = getenv("FP8_UPDATE_GOLDEN");
    struct dirent **list = NULL;
    int count = scandir(FOLDER, &list, is_spec, alphasort);
    int wrong = 0;
    assert_true(count > 50);
    for (int i = 0; i < count; i++) {
        wrong += check_spec(list[i]->d_name, update != NULL && strcmp(update, "1") == 0);
        free(list[i]);
    }
    free(list);
    print_message("%d bad specs\n", count);
    assert_int_equal(wrong, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(test_all) };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
