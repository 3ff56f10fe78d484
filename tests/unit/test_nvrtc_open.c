/*
 * test_nvrtc_open.c - a machine without NVRTC, with a wrong one, with an old one: a sentence each.
 *
 * dlopen is wrapped: the real NVRTC is hidden, and only what FP8_NVRTC_PATH names can be opened.
 * The wrong ones are made by the C compiler here; without a compiler those cases are skipped.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "gen/internal.h"

void *dlopen(const char *name, int flags)
{
    static void *(*next)(const char *, int);
    if (next == NULL) {
        void *symbol = dlsym(RTLD_NEXT, "dlopen");
        memcpy(&next, &symbol, sizeof(next));
    }
    bool real =
        name != NULL && strstr(name, "libnvrtc.so") != NULL && strstr(name, "fp8gen_test") == NULL;
    return next(real ? "/nonexistent/hidden/libnvrtc.so" : name, flags);
}

static char folder[64];

static const char *in_folder(const char *name)
{
    static char path[256];
    snprintf(path, sizeof(path), "%s/%s", folder, name);
    return path;
}

static void expect_build(const char *archs, fp8gen_status wanted, const char *const *parts)
{
    static const char spec[] =
        "return model \"m\" { layers = { linear \"a\" { in_features = 8, out_features = 8 } } }";
    fp8gen *gen;
    fp8gen_build_options options = FP8GEN_BUILD_OPTIONS_INIT;
    assert_int_equal(fp8gen_open(NULL, &gen), FP8GEN_OK);
    assert_int_equal(fp8gen_load_text(gen, "t.lua", spec, sizeof(spec) - 1), FP8GEN_OK);
    options.archs = archs;
    options.output_dir = in_folder("bundle");
    fp8gen_status status = fp8gen_build(gen, &options);
    const char *said = fp8gen_diagnostics(gen);
    if (status != wanted)
        fail_msg("status %d:\n%s", (int)status, said);
    for (; *parts != NULL; parts++)
        if (strstr(said, *parts) == NULL)
            fail_msg("'%s' is not in:\n%s", *parts, said);
    fp8gen_close(gen);
    assert_int_equal(access(in_folder("bundle"), F_OK), -1);
}

static void test_no_nvrtc(void **state)
{
    (void)state;
    unsetenv("FP8_NVRTC_PATH");
    const char *const parts[] = { "error: NVRTC was not found; searched: ",
                                  "libnvrtc.so.13 (",
                                  "libnvrtc.so.12 (",
                                  "FP8_NVRTC_PATH (not set)",
                                  "/usr/local/cuda/lib64",
                                  "--arch none",
                                  NULL };
    expect_build("sm_90a", FP8GEN_ERR_MACHINE, parts);
    fp8gen *gen;
    const char *path, *version;
    assert_int_equal(fp8gen_open(NULL, &gen), FP8GEN_OK);
    assert_int_equal(fp8gen_nvrtc(gen, &path, &version), FP8GEN_ERR_MACHINE);
    assert_null(path);
    assert_null(version);
    fp8gen_close(gen);
}

static void test_wrong_path(void **state)
{
    (void)state;
    setenv("FP8_NVRTC_PATH", "/nonexistent/libnvrtc.so.13", 1);
    const char *const missing[] = { "FP8_NVRTC_PATH=/nonexistent/libnvrtc.so.13 (", NULL };
    expect_build("sm_90a", FP8GEN_ERR_MACHINE, missing);
    setenv("FP8_NVRTC_PATH", folder, 1);
    const char *const empty[] = { "(a folder without libnvrtc.so.13)", folder, NULL };
    expect_build("sm_90a", FP8GEN_ERR_MACHINE, empty);
    setenv("FP8_NVRTC_PATH", "/proc/self/status", 1);
    const char *const text[] = { "FP8_NVRTC_PATH=/proc/self/status (", NULL };
    expect_build("sm_90a", FP8GEN_ERR_MACHINE, text);
    setenv("FP8_NVRTC_PATH", "libm.so.6", 1);
    const char *const other[] = { "libm.so.6 has no symbol nvrtcVersion", NULL };
    expect_build("sm_90a", FP8GEN_ERR_MACHINE, other);
}

/* A library with NVRTC's entry points and this version, that compiles for sm_75 and sm_90. */
static bool make_fake(const char *name, int major, int minor)
{
    const char *compiler = getenv("FP8_TEST_CC");
    char source[300], command[1024];
    snprintf(source, sizeof(source), "%s.c", in_folder(name));
    FILE *file = fopen(source, "w");
    assert_non_null(file);
    fprintf(file,
            "int nvrtcVersion(int *a, int *b) { *a = %d; *b = %d; return 0; }\n"
            "int nvrtcGetNumSupportedArchs(int *n) { *n = 2; return 0; }\n"
            "int nvrtcGetSupportedArchs(int *a) { a[0] = 75; a[1] = 90; return 0; }\n"
            "const char *nvrtcGetErrorString(int e) { return \"out of order\"; }\n"
            "int nvrtcCreateProgram() { return 11; }\n"
            "void nvrtcDestroyProgram() {}\nvoid nvrtcCompileProgram() {}\n"
            "void nvrtcGetCUBINSize() {}\nvoid nvrtcGetCUBIN() {}\n"
            "void nvrtcGetProgramLogSize() {}\nvoid nvrtcGetProgramLog() {}\n",
            major, minor);
    fclose(file);
    snprintf(command, sizeof(command), "%s -w -shared -fPIC -o %s %s", compiler ? compiler : "cc",
             in_folder(name), source);
    return system(command) == 0;
}

static void test_old_and_broken(void **state)
{
    (void)state;
    if (!make_fake("old.so", 11, 8) || !make_fake("first.so", 12, 0) ||
        !make_fake("broken.so", 12, 8)) {
        print_message("skip: no C compiler for the stand-in libraries\n");
        skip();
    }
    setenv("FP8_NVRTC_PATH", in_folder("old.so"), 1);
    const char *const old[] = { "NVRTC 11.8 (", "old.so) is too old: 12.1 is the first", NULL };
    expect_build("sm_90a", FP8GEN_ERR_MACHINE, old);
    setenv("FP8_NVRTC_PATH", in_folder("first.so"), 1);
    const char *const first[] = { "NVRTC 12.0 (", "first.so) is too old: 12.1 is the first", NULL };
    expect_build("sm_90a", FP8GEN_ERR_MACHINE, first);
    setenv("FP8_NVRTC_PATH", in_folder("broken.so"), 1);
    const char *const arch[] = { "NVRTC 12.8 (", "does not compile for sm_100a",
                                 "the newest it knows is sm_90", NULL };
    expect_build("sm_90a,sm_100a", FP8GEN_ERR_MACHINE, arch);
    const char *const broken[] = { "the kernel does not compile: out of order", NULL };
    expect_build("sm_90a", FP8GEN_ERR_INTERNAL, broken);
}

static int make_folder(void **state)
{
    (void)state;
    strcpy(folder, "/tmp/fp8gen_test_XXXXXX");
    return mkdtemp(folder) == NULL;
}

static int drop_folder(void **state)
{
    (void)state;
    static const char *const names[] = { "old.so",     "old.so.c",  "first.so",
                                         "first.so.c", "broken.so", "broken.so.c" };
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++)
        unlink(in_folder(names[i]));
    return rmdir(folder);
}

#define CASE(name) cmocka_unit_test_setup_teardown(name, make_folder, drop_folder)

int main(void)
{
    const struct CMUnitTest tests[] = {
        CASE(test_no_nvrtc),
        CASE(test_wrong_path),
        CASE(test_old_and_broken),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
