/*
 * test_dynlib.c - the opener of shared libraries: its order, and the sentence when nothing is
 * found.
 *
 * Uses libm and names that do not exist, so it needs no CUDA. cmocka itself is linked, so libcmocka
 * is the library that is "already in the process".
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "runtime/dynlib.h"

static const char *const missing[] = { "libfp8_missing.so.2", "libfp8_missing.so.1", NULL };
static const char *const present[] = { "libfp8_missing.so.2", "libm.so.6", NULL };
static const struct fp8_dynlib_spec absent = { "Absent", "FP8_ABSENT_PATH", missing, true };
static const struct fp8_dynlib_spec math = { "Math", "FP8_MATH_PATH", present, false };

static void test_soname_order(void **state)
{
    (void)state;
    struct fp8_dynlib lib;
    char message[FP8_DYNLIB_MESSAGE_SIZE] = "";
    unsetenv("FP8_MATH_PATH");
    assert_true(fp8_dynlib_open(&math, &lib, message, sizeof(message)));
    assert_non_null(strstr(lib.path, "libm.so.6"));
    double (*cosine)(double) = NULL;
    const struct fp8_dynlib_symbol table[] = { { "cos", &cosine, false } };
    assert_true(fp8_dynlib_symbols(&lib, table, 1, message, sizeof(message)));
    assert_true(cosine(0.0) == 1.0);
    fp8_dynlib_close(&lib);
    assert_null(lib.handle);
    fp8_dynlib_close(&lib);
}

static void test_missing_lists_everything(void **state)
{
    (void)state;
    struct fp8_dynlib lib;
    char message[FP8_DYNLIB_MESSAGE_SIZE] = "";
    unsetenv("FP8_ABSENT_PATH");
    assert_false(fp8_dynlib_open(&absent, &lib, message, sizeof(message)));
    assert_null(lib.handle);
    const char *const parts[] = {
        "Absent",          "libfp8_missing.so.2", "libfp8_missing.so.1", "/usr/local/cuda/lib64",
        "FP8_ABSENT_PATH", "No such file"
    };
    for (size_t i = 0; i < sizeof(parts) / sizeof(parts[0]); i++) {
        if (!strstr(message, parts[i]))
            fail_msg("'%s' is not in: %s", parts[i], message);
    }
    assert_null(strchr(message, '\n'));
    assert_false(fp8_dynlib_open(&absent, &lib, NULL, 0));
}

static void expect_failure(const struct fp8_dynlib_spec *spec, const char *part)
{
    struct fp8_dynlib lib;
    char message[FP8_DYNLIB_MESSAGE_SIZE] = "";
    assert_false(fp8_dynlib_open(spec, &lib, message, sizeof(message)));
    if (!strstr(message, part))
        fail_msg("'%s' is not in: %s", part, message);
}

static void test_variable(void **state)
{
    (void)state;
    struct fp8_dynlib lib;
    setenv("FP8_ABSENT_PATH", "/nonexistent/libx.so", 1);
    expect_failure(&absent, ", FP8_ABSENT_PATH=/nonexistent/libx.so (");

    char folder[] = "/tmp/fp8_dynlib_XXXXXX";
    assert_non_null(mkdtemp(folder));
    setenv("FP8_ABSENT_PATH", folder, 1);
    expect_failure(&absent, "(a folder without libfp8_missing.so.2)");

    char path[256];
    snprintf(path, sizeof(path), "%s/libfp8_missing.so.1", folder);
    FILE *file = fopen(path, "w");
    assert_non_null(file);
    fputs("not a library", file);
    fclose(file);
    expect_failure(&absent, path);

    /* A library of that name in the folder, and then by its own path. */
    unlink(path);
    struct fp8_dynlib known;
    assert_true(fp8_dynlib_open(&math, &known, NULL, 0));
    assert_int_equal(symlink(known.path, path), 0);
    assert_true(fp8_dynlib_open(&absent, &lib, NULL, 0));
    fp8_dynlib_close(&lib);
    setenv("FP8_ABSENT_PATH", path, 1);
    assert_true(fp8_dynlib_open(&absent, &lib, NULL, 0));
    fp8_dynlib_close(&lib);
    fp8_dynlib_close(&known);
    unlink(path);
    rmdir(folder);
    unsetenv("FP8_ABSENT_PATH");
}

static void test_copy_in_process_first(void **state)
{
    (void)state;
    static const char *const loaded[] = { "libcmocka.so.0", NULL };
    static const struct fp8_dynlib_spec spec = { "cmocka", "FP8_CMOCKA_PATH", loaded, false };
    struct fp8_dynlib lib;
    setenv("FP8_CMOCKA_PATH", "/nonexistent", 1);
    assert_true(fp8_dynlib_open(&spec, &lib, NULL, 0));
    unsetenv("FP8_CMOCKA_PATH");
    fp8_dynlib_close(&lib);
}

static void test_missing_symbol(void **state)
{
    (void)state;
    struct fp8_dynlib lib;
    char message[FP8_DYNLIB_MESSAGE_SIZE] = "";
    assert_true(fp8_dynlib_open(&math, &lib, message, sizeof(message)));
    void (*nothing)(void) = abort;
    const struct fp8_dynlib_symbol optional[] = { { "fp8_no_such_symbol", &nothing, true } };
    assert_true(fp8_dynlib_symbols(&lib, optional, 1, message, sizeof(message)));
    assert_null(nothing);
    const struct fp8_dynlib_symbol needed[] = { { "fp8_no_such_symbol", &nothing, false } };
    assert_false(fp8_dynlib_symbols(&lib, needed, 1, message, sizeof(message)));
    assert_non_null(strstr(message, "fp8_no_such_symbol"));
    assert_non_null(strstr(message, "libm"));
    fp8_dynlib_close(&lib);
}

static void *open_often(void *user)
{
    (void)user;
    char message[FP8_DYNLIB_MESSAGE_SIZE];
    for (int i = 0; i < 200; i++) {
        struct fp8_dynlib lib;
        if (!fp8_dynlib_open(&math, &lib, message, sizeof(message)))
            return (void *)1;
        fp8_dynlib_close(&lib);
        if (fp8_dynlib_open(&absent, &lib, message, sizeof(message)))
            return (void *)1;
        if (!strstr(message, "libfp8_missing.so.1"))
            return (void *)1;
    }
    return NULL;
}

static void test_many_threads(void **state)
{
    (void)state;
    pthread_t threads[8];
    for (size_t i = 0; i < 8; i++) {
        assert_int_equal(pthread_create(&threads[i], NULL, open_often, NULL), 0);
    }
    for (size_t i = 0; i < 8; i++) {
        void *result = NULL;
        pthread_join(threads[i], &result);
        assert_null(result);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_soname_order),   cmocka_unit_test(test_missing_lists_everything),
        cmocka_unit_test(test_variable),       cmocka_unit_test(test_copy_in_process_first),
        cmocka_unit_test(test_missing_symbol), cmocka_unit_test(test_many_threads),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
