/*
 * test_cache.c - one process and its cache: hits, damage, what a change rebuilds, folders that
 * cannot be used, trimming.
 */
#include "tests/cache/rig.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "gen/store.h"

static void jit(const fp8gen_jit_options *options, int number, char path[RIG_PATH])
{
    if (rig_jit(options, number, path) != FP8GEN_OK)
        fail_msg("%s", fp8gen_jit_error());
    assert_true(rig_opens(path));
}

/* ---- hits ------------------------------------------------------------------------------------ */

static void what_is_there_is_not_made_again(void **state)
{
    (void)state;
    char first[RIG_PATH], second[RIG_PATH], other[RIG_PATH];
    int damaged;
    jit(NULL, 1, first);
    int compiled = rig_compiled("start");
    assert_true(compiled >= 9);
    jit(NULL, 1, second);
    assert_string_equal(first, second);
    assert_int_equal(rig_compiled("start"), compiled);
    jit(NULL, 2, other); /* the kernels are those of the first */
    assert_string_not_equal(first, other);
    assert_int_equal(rig_compiled("start"), compiled);
    assert_int_equal(rig_entries(&damaged), compiled + 2);
    assert_int_equal(damaged, 0);
}

static void folders_are_private(void **state)
{
    (void)state;
    char path[RIG_PATH];
    struct stat info;
    jit(NULL, 1, path);
    const char *entry = rig_entry("kernels", "amax_bf16.");
    assert_int_equal(stat(entry, &info), 0);
    assert_int_equal(info.st_mode & 07777, 0700);
    assert_int_equal(stat(getenv("FP8GEN_CACHE_DIR"), &info), 0);
    assert_int_equal(info.st_mode & 07777, 0700);
}

static void a_build_uses_it_or_not(void **state)
{
    (void)state;
    char command[4 * RIG_PATH], path[RIG_PATH];
    jit(NULL, 1, path);
    int compiled = rig_compiled("start");
    FILE *file = fopen(rig_path("spec.lua"), "w");
    fputs(rig_spec(1), file);
    fclose(file);
    snprintf(command, sizeof(command), "\"$FP8GEN\" build %s -o %s", rig_path("spec.lua"),
             rig_path("warm"));
    assert_int_equal(system(command), 0);
    assert_int_equal(rig_compiled("start"), compiled);
    snprintf(command, sizeof(command), "\"$FP8GEN\" build --no-cache %s -o %s",
             rig_path("spec.lua"), rig_path("cold"));
    assert_int_equal(system(command), 0);
    assert_int_equal(rig_compiled("start"), 2 * compiled);
    snprintf(command, sizeof(command), "diff -r %s %s && diff -r %s %s", rig_path("warm"),
             rig_path("cold"), rig_path("warm"), path);
    assert_int_equal(system(command), 0);
}

/* ---- damage ---------------------------------------------------------------------------------- */

static void cut(const char *path, off_t size)
{
    if (truncate(path, size) != 0)
        fail_msg("cannot cut %s", path);
}

static void forget_bundles(void)
{
    char bundles[RIG_PATH];
    snprintf(bundles, sizeof(bundles), "%s/bundles", getenv("FP8GEN_CACHE_DIR"));
    rig_remove(bundles);
}

/* Damages a file of one kernel's entry; the next build makes that kernel anew, and no other. */
static void damage_kernel(const char *file, off_t size)
{
    char path[RIG_PATH], damaged_file[3 * RIG_PATH];
    int damaged;
    jit(&rig_logging, 1, path);
    int compiled = rig_compiled("start");
    forget_bundles();
    snprintf(damaged_file, sizeof(damaged_file), "%s/%s", rig_entry("kernels", "amax_bf16."), file);
    if (size < 0)
        assert_int_equal(unlink(damaged_file), 0);
    else
        cut(damaged_file, size);
    rig_entries(&damaged);
    assert_int_equal(damaged, 1);
    jit(&rig_logging, 1, path);
    assert_int_equal(rig_compiled("start"), compiled + 1);
    assert_int_equal(rig_logged("damaged"), rig_compiled("start amax.cu") - 1);
    rig_entries(&damaged);
    assert_int_equal(damaged, 0);
}

static void a_damaged_kernel_is_made_again(void **state)
{
    (void)state;
    damage_kernel("kernel.cubin", 0);
    damage_kernel("kernel.cubin", 1500);
    damage_kernel("kernel.cubin", -1);
    damage_kernel("log.txt", 3);
    damage_kernel("sums", 0);
    damage_kernel("sums", 60);
    damage_kernel("sums", -1);
    damage_kernel("source.cu", 100);
}

static void a_flipped_byte_is_found(void **state)
{
    (void)state;
    char path[RIG_PATH], file[3 * RIG_PATH], byte;
    int damaged;
    jit(NULL, 1, path);
    snprintf(file, sizeof(file), "%s/kernel.cubin", rig_entry("kernels", "quantize_bf16."));
    int fd = open(file, O_RDWR);
    assert_int_equal(pread(fd, &byte, 1, 777), 1);
    byte ^= 1;
    assert_int_equal(pwrite(fd, &byte, 1, 777), 1);
    close(fd);
    rig_entries(&damaged);
    assert_int_equal(damaged, 1);
    forget_bundles();
    jit(NULL, 1, path);
    rig_entries(&damaged);
    assert_int_equal(damaged, 0);
}

static void a_damaged_bundle_is_put_together_again(void **state)
{
    (void)state;
    char path[RIG_PATH], again[RIG_PATH], file[2 * RIG_PATH];
    static const char *const files[] = { "kernels/amax_bf16.sm_90a.cubin", "manifest.json",
                                         "../key.txt", "../sums" };
    for (size_t i = 0; i < 2 * sizeof(files) / sizeof(files[0]); i++) {
        jit(&rig_logging, 1, path);
        int compiled = rig_compiled("start");
        snprintf(file, sizeof(file), "%s/%s", path, files[i / 2]);
        cut(file, i % 2 ? 40 : 0);
        jit(&rig_logging, 1, again);
        assert_string_equal(path, again);
        assert_int_equal(rig_compiled("start"), compiled);
        assert_int_equal(rig_logged("the cached bundle"), (int)i + 1);
    }
}

static void an_entry_of_another_key_is_no_hit(void **state)
{
    (void)state;
    struct gen_store store;
    struct gen_writer writer;
    struct gen_entry a = { GEN_KERNELS, "k", "", "key of a", 8 }, b = a;
    memset(a.hash, '0', 32);
    b = a;
    b.key = "key of b";
    gen_store_open(&store, NULL, (struct gen_log){ NULL, NULL });
    assert_int_equal(gen_entry_find(&store, &a, NULL, NULL), GEN_MISSING);
    assert_int_equal(gen_writer_begin(&writer, &store, &a), 0);
    assert_int_equal(gen_writer_put(&writer, "kernel.cubin", "x", 1), 0);
    assert_int_equal(gen_writer_commit(&writer), 0);
    gen_writer_abandon(&writer);
    assert_int_equal(gen_entry_find(&store, &a, NULL, NULL), GEN_FOUND);
    assert_int_equal(gen_entry_find(&store, &b, NULL, NULL), GEN_DAMAGED);
    for (int i = 0; i < 2; i++) { /* the second finds the first's and drops its own */
        assert_int_equal(gen_writer_begin(&writer, &store, &b), 0);
        assert_int_equal(gen_writer_commit(&writer), 0);
        gen_writer_abandon(&writer);
    }
    assert_int_equal(gen_entry_find(&store, &b, NULL, NULL), GEN_FOUND);
    assert_int_equal(gen_entry_find(&store, &a, NULL, NULL), GEN_DAMAGED);
    gen_store_close(&store);
}

/* ---- what a change rebuilds ------------------------------------------------------------------ */

static void exactly_what_changed_is_rebuilt(void **state)
{
    (void)state;
    char path[RIG_PATH], other[RIG_PATH], templates[RIG_PATH], moved[RIG_PATH], file[2 * RIG_PATH];
    fp8gen_jit_options options = FP8GEN_JIT_OPTIONS_INIT;
    snprintf(templates, sizeof(templates), "%s", rig_path("templates"));
    snprintf(moved, sizeof(moved), "%s", rig_path("moved"));
    rig_templates(templates);
    options.template_dir = templates;
    jit(NULL, 1, path);
    int all = rig_compiled("start");
    jit(&options, 1, other); /* the same texts from a folder */
    assert_int_equal(rig_compiled("start"), all);
    assert_int_equal(rename(templates, moved), 0);
    options.template_dir = moved;
    jit(&options, 1, path); /* ... installed elsewhere */
    assert_string_equal(path, other);
    assert_int_equal(rig_compiled("start"), all);

    snprintf(file, sizeof(file), "%s/amax.cu", moved);
    rig_edit(file, "\n\n", "\n\n\n"); /* one template */
    jit(&options, 1, other);
    assert_string_not_equal(path, other);
    assert_int_equal(rig_compiled("start"), all + 1);
    assert_int_equal(rig_compiled("start amax.cu"), 2);

    snprintf(file, sizeof(file), "%s/types.cuh", moved);
    rig_edit(file, "\n\n", "\n\n\n"); /* a header that every template includes */
    jit(&options, 1, other);
    assert_int_equal(rig_compiled("start amax.cu"), 3);
    assert_int_equal(rig_compiled("start quantize.cu"), 2);
}

static void another_arch_has_its_own(void **state)
{
    (void)state;
    char path[RIG_PATH], other[RIG_PATH], command[4 * RIG_PATH];
    fp8gen_jit_options options = FP8GEN_JIT_OPTIONS_INIT;
    jit(NULL, 1, path);
    options.archs = "sm_90";
    jit(&options, 1, other);
    assert_true(rig_compiled(" sm_90\n") > 8);
    snprintf(command, sizeof(command),
             "! cmp -s %s/kernels/amax_bf16.sm_90a.cubin %s/kernels/amax_bf16.sm_90.cubin && "
             "! ls %s/kernels | grep sm_90a",
             path, other, other);
    assert_int_equal(system(command), 0);
    int compiled = rig_compiled("start");
    options.archs = "sm_90,sm_90a";
    jit(&options, 1, other); /* both are there */
    assert_int_equal(rig_compiled("start"), compiled);
}

static void another_nvrtc_has_its_own(void **state)
{
    (void)state;
    char command[4 * RIG_PATH];
    FILE *file = fopen(rig_path("spec.lua"), "w");
    fputs(rig_spec(1), file);
    fclose(file);
    for (int i = 0; i < 4; i++) {
        setenv("FAKE_NVRTC_MINOR", i % 2 ? "9" : "8", 1);
        snprintf(command, sizeof(command),
                 "\"$FP8GEN\" build %s -o %s && grep -q '13.%d' %s/manifest.json",
                 rig_path("spec.lua"), rig_path("out"), i % 2 ? 9 : 8, rig_path("out"));
        assert_int_equal(system(command), 0);
        assert_int_equal(rig_compiled("start amax.cu"), i < 2 ? i + 1 : 2);
    }
}

static void what_does_not_compile_is_kept_to_be_looked_at(void **state)
{
    (void)state;
    char path[RIG_PATH], templates[RIG_PATH], file[2 * RIG_PATH];
    fp8gen_jit_options options = FP8GEN_JIT_OPTIONS_INIT;
    snprintf(templates, sizeof(templates), "%s", rig_path("templates"));
    rig_templates(templates);
    options.template_dir = templates;
    snprintf(file, sizeof(file), "%s/amax.cu", templates);
    rig_edit(file, "\n\n", "\n#error injected\n");
    for (int i = 1; i <= 2; i++) { /* a failure is not a hit */
        assert_int_equal(rig_jit(&options, 1, path), FP8GEN_ERR_SPEC);
        assert_string_equal(path, "");
        assert_int_equal(rig_compiled("start amax.cu"), i);
        assert_non_null(strstr(fp8gen_jit_error(), "#error directive: injected"));
        assert_non_null(strstr(fp8gen_jit_error(), "amax.cu:"));
        assert_non_null(strstr(fp8gen_jit_error(), "NVRTC 13."));
    }
    const char *kept = rig_entry("failed", "amax_bf16.");
    assert_non_null(strstr(fp8gen_jit_error(), kept));
    snprintf(file, sizeof(file),
             "grep -q injected %s/log.txt && grep -q '#error injected' %s/source.cu", kept, kept);
    assert_int_equal(system(file), 0);
    snprintf(file, sizeof(file), "%s/amax.cu", templates);
    rig_edit(file, "\n#error injected\n", "\n\n");
    jit(&options, 1, path);
}

int main(int argc, char **argv)
{
    (void)argc;
    static const struct CMUnitTest tests[] = {
        RIG_TEST(what_is_there_is_not_made_again),
        RIG_TEST(folders_are_private),
        RIG_TEST(a_build_uses_it_or_not),
        RIG_TEST(a_damaged_kernel_is_made_again),
        RIG_TEST(a_flipped_byte_is_found),
        RIG_TEST(a_damaged_bundle_is_put_together_again),
        RIG_TEST(an_entry_of_another_key_is_no_hit),
        RIG_TEST(exactly_what_changed_is_rebuilt),
        RIG_TEST(another_arch_has_its_own),
        RIG_TEST(another_nvrtc_has_its_own),
        RIG_TEST(what_does_not_compile_is_kept_to_be_looked_at),
    };
    return RIG_RUN(argv, tests);
}
