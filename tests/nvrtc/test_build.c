/*
 * test_build.c - bundles with cubins: their records, the same bytes every time, progress, and what
 * a failed build leaves.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tests/nvrtc/rig.h"

static char folder[RIG_PATH];

static int make_folder(void **state)
{
    (void)state;
    rig_scratch(folder);
    return 0;
}

static int drop_folder(void **state)
{
    (void)state;
    rig_remove(folder);
    return 0;
}

static void path_of(char path[2 * RIG_PATH], const char *name)
{
    snprintf(path, 2 * RIG_PATH, "%s/%s", folder, name);
}

struct progress {
    int calls;
    int32_t total;
};

static void count_progress(void *user, const char *kernel, int32_t done, int32_t total)
{
    struct progress *progress = user;
    assert_non_null(kernel);
    assert_int_equal(done, ++progress->calls);
    progress->total = total;
}

/* Builds rig_small into the folder's `name`. */
static void build(const char *name, const char *archs, int32_t jobs, const char *template_dir,
                  fp8gen_status wanted)
{
    char output[2 * RIG_PATH];
    struct progress progress = { 0, 0 };
    fp8gen_build_options options = FP8GEN_BUILD_OPTIONS_INIT;
    struct fp8gen *gen = rig_open(rig_small, template_dir);
    path_of(output, name);
    options.output_dir = output;
    options.archs = archs;
    options.jobs = jobs;
    options.cache_dir = ""; /* equal bytes must be NVRTC's, not the cache's */
    options.progress = count_progress;
    options.progress_user = &progress;
    if (fp8gen_build(gen, &options) != wanted)
        fail_msg("%s", fp8gen_diagnostics(gen));
    assert_int_equal(progress.calls, progress.total);
    assert_true(progress.total > 0);
    fp8gen_close(gen);
}

static json_t *manifest_of(const char *name)
{
    char path[2 * RIG_PATH];
    size_t size;
    snprintf(path, sizeof(path), "%s/%s/manifest.json", folder, name);
    char *text = rig_read(path, &size);
    assert_non_null(text);
    json_t *manifest = json_loads(text, 0, NULL);
    assert_non_null(manifest);
    free(text);
    return manifest;
}

static void check_cubin(const char *bundle, const json_t *kernel, const json_t *record)
{
    char path[3 * RIG_PATH], wanted[RIG_PATH], hash[33];
    const char *arch = json_string_value(json_object_get(record, "arch"));
    const char *file = json_string_value(json_object_get(record, "file"));
    size_t size;
    snprintf(wanted, sizeof(wanted), "kernels/%s.%s.cubin",
             json_string_value(json_object_get(kernel, "entry")) + strlen("fp8_"), arch);
    assert_string_equal(file, wanted);
    snprintf(path, sizeof(path), "%s/%s/%s", folder, bundle, file);
    char *data = rig_read(path, &size);
    assert_non_null(data);
    assert_int_equal(size, json_integer_value(json_object_get(record, "bytes")));
    gen_hash(data, size, hash);
    assert_string_equal(hash, json_string_value(json_object_get(record, "xxh128")));
    /* Nothing of this machine in it. */
    char here[RIG_PATH];
    if (getcwd(here, sizeof(here)) != NULL && strlen(here) > 1)
        assert_null(memmem(data, size, here, strlen(here)));
    free(data);
}

static void test_records(void **state)
{
    (void)state;
    static const char *const archs[] = { "sm_90a", "sm_90" };
    char templates[RIG_PATH];
    rig_scratch(templates);
    rig_copy_templates(templates, "none");
    build("two", "sm_90a,sm_90", 0, templates, FP8GEN_OK);
    rig_remove(templates);
    json_t *manifest = manifest_of("two"), *kernel, *list = json_object_get(manifest, "archs");
    size_t i, gemms = 0;
    assert_int_equal(json_array_size(list), 2);
    for (size_t j = 0; j < 2; j++)
        assert_string_equal(json_string_value(json_array_get(list, j)), archs[j]);
    json_array_foreach(json_object_get(manifest, "kernels"), i, kernel)
    {
        json_t *cubins = json_object_get(kernel, "cubins");
        size_t count = json_object_get(kernel, "archs") != NULL ? 1 : 2; /* a GEMM: sm_90a alone */
        gemms += count == 1;
        assert_int_equal(json_array_size(cubins), count);
        for (size_t j = 0; j < count; j++) {
            json_t *record = json_array_get(cubins, j);
            assert_string_equal(json_string_value(json_object_get(record, "arch")), archs[j]);
            check_cubin("two", kernel, record);
        }
    }
    assert_true(gemms > 0);
    json_decref(manifest);
}

/* Same spec, same bytes: from another folder, with other threads. The manifest holds all hashes. */
static void test_same_bytes(void **state)
{
    (void)state;
    char here[RIG_PATH];
    assert_non_null(getcwd(here, sizeof(here)));
    build("one", "sm_90a", 1, NULL, FP8GEN_OK);
    assert_int_equal(chdir(folder), 0);
    build("other", "sm_90a", 4, NULL, FP8GEN_OK);
    assert_int_equal(chdir(here), 0);
    json_t *one = manifest_of("one"), *other = manifest_of("other"), *kernel;
    size_t i;
    assert_true(json_equal(one, other));
    json_array_foreach(json_object_get(one, "kernels"), i, kernel)
        check_cubin("one", kernel, json_array_get(json_object_get(kernel, "cubins"), 0));
    json_decref(one);
    json_decref(other);
}

/* The process's current folder is not ours to change. */
static void test_current_folder_stays(void **state)
{
    (void)state;
    char before[RIG_PATH], after[RIG_PATH];
    assert_non_null(getcwd(before, sizeof(before)));
    char templates[RIG_PATH];
    rig_scratch(templates);
    rig_copy_templates(templates, "none");
    build("one", "sm_90a", 2, templates, FP8GEN_OK);
    assert_non_null(getcwd(after, sizeof(after)));
    assert_string_equal(before, after);
    rig_remove(templates);
}

static void test_failed_build_keeps_the_old_one(void **state)
{
    (void)state;
    char templates[RIG_PATH], path[2 * RIG_PATH];
    rig_scratch(templates);
    rig_copy_templates(templates, "none");
    build("bundle", "sm_90a", 0, templates, FP8GEN_OK);
    json_t *before = manifest_of("bundle");
    snprintf(path, sizeof(path), "%s/store.cu", templates);
    rig_write(path, "#error planted by a test\n");
    build("bundle", "sm_90a", 0, templates, FP8GEN_ERR_SPEC);
    json_t *after = manifest_of("bundle");
    assert_true(json_equal(before, after));
    json_decref(before);
    json_decref(after);
    rig_remove(templates);
}

#define CASE(name) cmocka_unit_test_setup_teardown(name, make_folder, drop_folder)

int main(void)
{
    int missing = rig_nvrtc_missing();
    if (missing)
        return missing;
    const struct CMUnitTest tests[] = {
        CASE(test_records),
        CASE(test_same_bytes),
        CASE(test_current_folder_stays),
        CASE(test_failed_build_keeps_the_old_one),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
