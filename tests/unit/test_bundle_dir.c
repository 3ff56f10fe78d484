/*
 * test_bundle_dir.c - builds without a compiler (--arch none): what is written, what is refused,
 * and that a build which fails leaves everything as it was.
 *
 * The C library's write, fsync and renameat2 are wrapped, so that a full disk and a file system
 * without RENAME_EXCHANGE can be had at will.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "gen/internal.h"
#include "runtime/bundle_format.h"

static bool disk_full, no_exchange;

ssize_t write(int fd, const void *data, size_t size)
{
    if (disk_full) {
        errno = ENOSPC;
        return -1;
    }
    return syscall(SYS_write, fd, data, size);
}

int renameat2(int from_dir, const char *from, int to_dir, const char *to, unsigned int flags)
{
    if (no_exchange) {
        errno = EINVAL;
        return -1;
    }
    return (int)syscall(SYS_renameat2, from_dir, from, to_dir, to, flags);
}

/* ---- the scratch folder ---------------------------------------------------------------------- */

static char scratch[64];

static int make_scratch(void **state)
{
    (void)state;
    disk_full = no_exchange = false;
    strcpy(scratch, "/tmp/fp8gen_test_XXXXXX");
    return mkdtemp(scratch) == NULL;
}

static int remove_entry(const char *path, const struct stat *info, int type, struct FTW *where)
{
    (void)info, (void)type, (void)where;
    return remove(path);
}

static int drop_scratch(void **state)
{
    (void)state;
    return nftw(scratch, remove_entry, 16, FTW_DEPTH | FTW_PHYS);
}

static const char *in_scratch(const char *name)
{
    static char paths[8][256];
    static int next;
    char *path = paths[next++ % 8];
    snprintf(path, sizeof(paths[0]), "%s/%s", scratch, name);
    return path;
}

static void put(const char *path, const char *text)
{
    FILE *file = fopen(path, "w");
    assert_non_null(file);
    fputs(text, file);
    fclose(file);
}

static bool exists(const char *path)
{
    struct stat info;
    return lstat(path, &info) == 0;
}

/* Entries of a folder, hidden ones too. */
static int entries(const char *path)
{
    DIR *dir = opendir(path);
    assert_non_null(dir);
    int count = -2;
    while (readdir(dir) != NULL)
        count++;
    closedir(dir);
    return count;
}

/* ---- building -------------------------------------------------------------------------------- */

static fp8gen *open_model(int in_features)
{
    char text[256];
    fp8gen *gen;
    int size = snprintf(text, sizeof(text),
                        "return model \"m\" { layers = { linear \"a\" { in_features = %d, "
                        "out_features = 8 } } }",
                        in_features);
    assert_int_equal(fp8gen_open(NULL, &gen), FP8GEN_OK);
    assert_int_equal(fp8gen_load_text(gen, "t.lua", text, (size_t)size), FP8GEN_OK);
    return gen;
}

static void build_features(int in_features, const char *output, fp8gen_status wanted,
                           const char *part)
{
    fp8gen *gen = open_model(in_features);
    fp8gen_build_options options = FP8GEN_BUILD_OPTIONS_INIT;
    options.archs = "none";
    options.output_dir = output;
    bool full = disk_full;
    fp8gen_status status = fp8gen_build(gen, &options);
    disk_full = false;
    if (status != wanted || strstr(fp8gen_diagnostics(gen), part) == NULL)
        fail_msg("status %d, '%s' wanted in:\n%s", (int)status, part, fp8gen_diagnostics(gen));
    disk_full = full;
    fp8gen_close(gen);
}

static void build(const char *output, fp8gen_status wanted, const char *part)
{
    build_features(64, output, wanted, part);
}

static json_t *manifest_of(const char *bundle)
{
    char path[300];
    json_error_t error;
    snprintf(path, sizeof(path), "%s/manifest.json", bundle);
    json_t *manifest = json_load_file(path, JSON_REJECT_DUPLICATES, &error);
    if (manifest == NULL)
        fail_msg("%s:%d: %s", path, error.line, error.text);
    return manifest;
}

static json_int_t features_of(const char *bundle)
{
    json_t *manifest = manifest_of(bundle);
    json_t *layer = json_array_get(json_object_get(manifest, "layers"), 0);
    json_int_t features = json_integer_value(json_object_get(layer, "in_features"));
    json_decref(manifest);
    return features;
}

/* ---- tests ----------------------------------------------------------------------------------- */

static void test_what_is_written(void **state)
{
    (void)state;
    const char *bundle = in_scratch("bundle");
    build(bundle, FP8GEN_OK, "");
    assert_int_equal(entries(bundle), 2);
    assert_int_equal(entries(in_scratch("bundle/kernels")), 0);
    assert_int_equal(entries(scratch), 1);
    json_t *manifest = manifest_of(bundle), *kernel;
    size_t i;
    assert_int_equal(json_array_size(json_object_get(manifest, "archs")), 0);
    json_array_foreach(json_object_get(manifest, "kernels"), i, kernel)
        assert_int_equal(json_array_size(json_object_get(kernel, "cubins")), 0);
    assert_null(json_object_get(json_array_get(json_object_get(manifest, "layers"), 0), "cost"));

    char *digest = strdup(json_string_value(json_object_get(manifest, "digest"))), hash[33];
    json_object_del(manifest, "digest");
    char *compact = json_dumps(manifest, JSON_COMPACT | JSON_SORT_KEYS);
    gen_hash(compact, strlen(compact), hash);
    assert_string_equal(digest, hash);
    free(compact);
    free(digest);
    json_decref(manifest);

    struct stat info;
    mode_t mask = umask(0);
    umask(mask);
    assert_int_equal(stat(bundle, &info), 0);
    assert_int_equal(info.st_mode & 0777, 0777 & ~mask);
}

static void test_replacing(void **state)
{
    (void)state;
    const char *bundle = in_scratch("bundle");
    for (int i = 0; i < 2; i++) {
        no_exchange = i == 1;
        build_features(16, bundle, FP8GEN_OK, "");
        assert_int_equal(features_of(bundle), 16);
        build_features(32, bundle, FP8GEN_OK, "");
        assert_int_equal(features_of(bundle), 32);
        assert_int_equal(entries(scratch), 1);
    }
    build_features(48, in_scratch("bundle/"), FP8GEN_OK, "");
    assert_int_equal(features_of(bundle), 48);
    /* An empty folder may be used; a link is followed. */
    assert_int_equal(mkdir(in_scratch("empty"), 0700), 0);
    build(in_scratch("empty"), FP8GEN_OK, "");
    assert_int_equal(symlink("bundle", in_scratch("link")), 0);
    build_features(80, in_scratch("link"), FP8GEN_OK, "");
    assert_int_equal(features_of(bundle), 80);
    assert_int_equal(entries(scratch), 3);
}

static void test_refused_targets(void **state)
{
    (void)state;
    const char *full = in_scratch("full"), *file = in_scratch("file");
    put(file, "precious");
    build(file, FP8GEN_ERR_ARGUMENT, "exists and is not a folder");
    mkdir(full, 0755);
    put(in_scratch("full/notes"), "precious");
    build(full, FP8GEN_ERR_ARGUMENT, "exists and is not a bundle: it has no manifest.json");
    assert_true(exists(in_scratch("full/notes")));
    put(in_scratch("full/manifest.json"), "{\"format\": \"another\"}");
    build(full, FP8GEN_ERR_ARGUMENT, "exists and is not a bundle");
    put(in_scratch("full/manifest.json"), "{\"format\": \"fp8gen-bun");
    build(full, FP8GEN_ERR_ARGUMENT, "exists and is not a bundle");
    assert_int_equal(entries(full), 2);

    /* A bundle in which something else lies. */
    build(in_scratch("bundle"), FP8GEN_OK, "");
    put(in_scratch("bundle/kernels/mine.txt"), "precious");
    build(in_scratch("bundle"), FP8GEN_ERR_ARGUMENT, "holds 'kernels/mine.txt'");
    unlink(in_scratch("bundle/kernels/mine.txt"));
    mkdir(in_scratch("bundle/mine"), 0755);
    build(in_scratch("bundle"), FP8GEN_ERR_ARGUMENT, "holds 'mine'");
    assert_int_equal(entries(scratch), 3);

    build("/", FP8GEN_ERR_ARGUMENT, "cannot be the folder of a bundle");
    build("", FP8GEN_ERR_ARGUMENT, "needs a folder");
    build(in_scratch("no/such/bundle"), FP8GEN_ERR_MACHINE, "No such file or directory");
    build(in_scratch("file/bundle"), FP8GEN_ERR_MACHINE, "Not a directory");
}

static void test_unwritable(void **state)
{
    (void)state;
    build("/proc/fp8gen_bundle", FP8GEN_ERR_MACHINE, "cannot make a folder in '/proc'");
    if (geteuid() == 0) {
        print_message("root may write anywhere: /proc alone was tried\n");
        return;
    }
    mkdir(in_scratch("locked"), 0555);
    build(in_scratch("locked/bundle"), FP8GEN_ERR_MACHINE, "Permission denied");
}

static void make_left(const char *name, const char *file)
{
    char path[64];
    mkdir(in_scratch(name), 0700);
    snprintf(path, sizeof(path), "%s/kernels", name);
    mkdir(in_scratch(path), 0700);
    snprintf(path, sizeof(path), "%s/%s", name, file);
    put(in_scratch(path), "half");
}

/* A killed build cannot tidy up: the next one of the same target does, and leaves what still lives
 * and what is no bundle's. */
static void test_left_by_killed_builds(void **state)
{
    (void)state;
    make_left(".out.aaaaaa", "kernels/x.cubin");
    make_left(".out.bbbbbb", "manifest.json");
    make_left(".out.living", "kernels/x.cubin");
    make_left(".out.other1", "thesis.tex");
    make_left(".out.toolong", "manifest.json");
    make_left(".another.aaaaaa", "manifest.json");
    int living = open(in_scratch(".out.living"), O_RDONLY | O_DIRECTORY);
    assert_int_equal(flock(living, LOCK_EX | LOCK_NB), 0);
    build(in_scratch("out"), FP8GEN_OK, "");
    assert_false(exists(in_scratch(".out.aaaaaa")));
    assert_false(exists(in_scratch(".out.bbbbbb")));
    assert_true(exists(in_scratch(".out.living/kernels/x.cubin")));
    assert_true(exists(in_scratch(".out.other1/thesis.tex")));
    assert_true(exists(in_scratch(".out.toolong/manifest.json")));
    assert_true(exists(in_scratch(".another.aaaaaa/manifest.json")));
    assert_int_equal(entries(scratch), 5);
    close(living);
    build(in_scratch("out"), FP8GEN_OK, "");
    assert_int_equal(entries(scratch), 4);
}

static void test_full_disk(void **state)
{
    (void)state;
    const char *bundle = in_scratch("bundle");
    disk_full = true;
    build(bundle, FP8GEN_ERR_MACHINE, "No space left on device");
    disk_full = false;
    assert_int_equal(entries(scratch), 0);
    /* The older bundle stays whole. */
    build_features(16, bundle, FP8GEN_OK, "");
    disk_full = true;
    build_features(32, bundle, FP8GEN_ERR_MACHINE, "free some space");
    disk_full = false;
    assert_int_equal(features_of(bundle), 16);
    assert_int_equal(entries(scratch), 1);
}

static void expect_archs(const char *archs, const char *part)
{
    fp8gen *gen = open_model(64);
    fp8gen_build_options options = FP8GEN_BUILD_OPTIONS_INIT;
    options.archs = archs;
    options.output_dir = in_scratch("bundle");
    assert_int_equal(fp8gen_build(gen, &options), FP8GEN_ERR_ARGUMENT);
    if (strstr(fp8gen_diagnostics(gen), part) == NULL)
        fail_msg("'%s' is not in:\n%s", part, fp8gen_diagnostics(gen));
    fp8gen_close(gen);
    assert_int_equal(entries(scratch), 0);
}

static void test_wrong_options(void **state)
{
    (void)state;
    static const char every[] = "sm_90, sm_90a, sm_100, sm_100a, sm_103a, sm_120, sm_120a, or none";
    expect_archs("sm_80", "cannot build for arch 'sm_80'");
    expect_archs("sm_80", every);
    expect_archs("sm_80", "compute capability 9.0 or newer");
    expect_archs("", "cannot build for arch ''");
    expect_archs("sm_90a,", "cannot build for arch ''");
    expect_archs("sm_90a, sm_100a", "cannot build for arch ' sm_100a'");
    expect_archs("SM_90A", "cannot build for arch 'SM_90A'");
    expect_archs("none,sm_90a", "arch 'none' stands alone");
    expect_archs("sm_90a,none", "arch 'none' stands alone");
    expect_archs("sm_90a,nonesuch", "cannot build for arch 'nonesuch'");
    expect_archs("sm_90a,sm_90,sm_90a", "sm_90a is given twice");
    expect_archs(NULL, "a build needs archs");
    fp8gen *gen = open_model(64);
    fp8gen_build_options options = FP8GEN_BUILD_OPTIONS_INIT;
    options.output_dir = in_scratch("bundle");
    options.jobs = -1;
    assert_int_equal(fp8gen_build(gen, &options), FP8GEN_ERR_ARGUMENT);
    options.size = 4;
    assert_int_equal(fp8gen_build(gen, &options), FP8GEN_ERR_ARGUMENT);
    assert_int_equal(fp8gen_build(gen, NULL), FP8GEN_ERR_ARGUMENT);
    fp8gen_close(gen);
}

/* Several processes build into one place: all succeed, and a whole bundle is there at the end. */
static void test_race(void **state)
{
    (void)state;
    enum { PROCESSES = 8, ROUNDS = 20 };
    pid_t children[PROCESSES];
    const char *bundle = in_scratch("bundle");
    for (int i = 0; i < PROCESSES; i++) {
        children[i] = fork();
        if (children[i] != 0)
            continue;
        int bad = 0;
        for (int j = 0; j < ROUNDS && !bad; j++) {
            fp8gen *gen = open_model(16 * (i + 1));
            fp8gen_build_options options = FP8GEN_BUILD_OPTIONS_INIT;
            options.archs = "none";
            options.output_dir = bundle;
            bad = fp8gen_build(gen, &options) != FP8GEN_OK;
            if (bad)
                fprintf(stderr, "%s", fp8gen_diagnostics(gen));
            fp8gen_close(gen);
        }
        _exit(bad);
    }
    for (int i = 0; i < PROCESSES; i++) {
        int status;
        assert_int_equal(waitpid(children[i], &status, 0), children[i]);
        assert_int_equal(status, 0);
    }
    assert_int_equal(features_of(bundle) % 16, 0);
    assert_int_equal(entries(scratch), 1);
}

/* Every request for memory fails once, from some point on: a clean error and nothing left
 * behind. */
static void test_out_of_memory(void **state)
{
    (void)state;
    fp8gen_status status = FP8GEN_ERR_MACHINE;
    for (int64_t n = 1; status != FP8GEN_OK; n += 1 + n / 16) {
        fp8gen *gen = open_model(64);
        fp8gen_build_options options = FP8GEN_BUILD_OPTIONS_INIT;
        options.archs = "none";
        options.output_dir = in_scratch("bundle");
        gen_alloc_fail(n, true);
        status = fp8gen_build(gen, &options);
        gen_alloc_fail(0, false);
        assert_true(status == FP8GEN_OK || status == FP8GEN_ERR_MACHINE);
        assert_int_equal(entries(scratch), status == FP8GEN_OK);
        fp8gen_close(gen);
    }
}

#define CASE(name) cmocka_unit_test_setup_teardown(name, make_scratch, drop_scratch)

int main(void)
{
    const struct CMUnitTest tests[] = {
        CASE(test_what_is_written),       CASE(test_replacing),
        CASE(test_refused_targets),       CASE(test_unwritable),
        CASE(test_left_by_killed_builds), CASE(test_full_disk),
        CASE(test_wrong_options),         CASE(test_race),
        CASE(test_out_of_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
