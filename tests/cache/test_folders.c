/*
 * test_folders.c - the cache's folder: one that cannot be used, and one that is kept within its
 * size.
 *
 * What cannot be written, read or removed costs one warning and never a bundle. Part of it runs as
 * user nobody, where the tests run as root.
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

static void forget_bundles(void)
{
    char bundles[RIG_PATH];
    snprintf(bundles, sizeof(bundles), "%s/bundles", getenv("FP8GEN_CACHE_DIR"));
    rig_remove(bundles);
}

enum { NOBODY = 65534 };

/* ---- folders that cannot be used ------------------------------------------------------------- */

/* In a child, as user `uid` (0: as we are): two specs get bundles that open and end with the
 * process, with one warning that says `why`. */
static void stays_in_memory(const char *cache, uid_t uid, const char *why)
{
    char path[RIG_PATH], first[RIG_PATH];
    fp8gen_jit_options warm = rig_logging;
    int ends[2];
    warm.cache_dir = rig_path("other");
    jit(&warm, 9, path); /* so that NVRTC is open: the child may not read the build folder */
    int before = rig_compiled("start");
    assert_int_equal(pipe(ends), 0);
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        fp8gen_jit_options options = rig_logging;
        options.cache_dir = cache;
        if (uid != 0 && setuid(uid) != 0)
            exit(10);
        if (rig_jit(&options, 1, first) != FP8GEN_OK || !rig_opens(first))
            exit(11);
        if (rig_jit(&options, 2, path) != FP8GEN_OK || !rig_opens(path))
            exit(12);
        if (rig_jit(&options, 1, path) != FP8GEN_OK || strcmp(path, first) != 0)
            exit(13);
        if (rig_logged("[2] ") != 1 || rig_logged(why) != 1)
            exit(14);
        if (write(ends[1], path, sizeof(path)) != sizeof(path))
            exit(15);
        exit(0);
    }
    int status;
    close(ends[1]);
    assert_int_equal(read(ends[0], path, sizeof(path)), sizeof(path));
    close(ends[0]);
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_int_equal(status, 0);
    assert_int_not_equal(access(path, F_OK), 0);
    /* Kernels were compiled once, though nothing could be kept on disk. */
    assert_true(uid != 0 || rig_compiled("start") <= 2 * before);
}

static void a_folder_that_cannot_be_made(void **state)
{
    (void)state;
    stays_in_memory("/dev/null/cache", 0, "Not a directory");
}

static void a_folder_that_is_read_only(void **state)
{
    (void)state;
    char cache[RIG_PATH], parent[RIG_PATH];
    snprintf(cache, sizeof(cache), "%s", rig_path("read_only"));
    snprintf(parent, sizeof(parent), "%s", rig_path(""));
    assert_int_equal(mkdir(cache, 0700), 0);
    bool root = geteuid() == 0;
    if (root) {
        assert_int_equal(chmod(parent, 0755), 0);
        assert_int_equal(chown(cache, NOBODY, NOBODY), 0);
    }
    assert_int_equal(chmod(cache, 0500), 0);
    stays_in_memory(cache, root ? NOBODY : 0, "Permission denied");
}

static void a_folder_of_somebody_else(void **state)
{
    (void)state;
    if (geteuid() != 0) {
        print_message("skip: only root can give a folder away\n");
        skip();
    }
    char cache[RIG_PATH];
    snprintf(cache, sizeof(cache), "%s", rig_path("foreign"));
    assert_int_equal(mkdir(cache, 0777), 0);
    assert_int_equal(chown(cache, 12345, 12345), 0);
    stays_in_memory(cache, 0, "Operation not permitted");
}

static void an_entry_of_somebody_else_is_replaced(void **state)
{
    (void)state;
    if (geteuid() != 0) {
        print_message("skip: only root can give a folder away\n");
        skip();
    }
    char path[RIG_PATH], file[3 * RIG_PATH];
    struct stat info;
    jit(NULL, 1, path);
    int compiled = rig_compiled("start");
    const char *entry = rig_entry("kernels", "amax_bf16.");
    snprintf(file, sizeof(file), "%s/kernel.cubin", rig_entry("kernels", "dequantize_tensor."));
    assert_int_equal(chown(file, 12345, 12345), 0);
    entry = rig_entry("kernels", "amax_bf16.");
    assert_int_equal(chown(entry, 12345, 12345), 0);
    forget_bundles();
    jit(NULL, 1, path);
    assert_int_equal(rig_compiled("start"), compiled + 2);
    assert_int_equal(stat(rig_entry("kernels", "amax_bf16."), &info), 0);
    assert_int_equal(info.st_uid, 0);
}

/* A folder that everybody may write into, and a file that is a link to an equal one. */
static void an_entry_that_others_can_change_is_replaced(void **state)
{
    (void)state;
    char path[RIG_PATH], file[3 * RIG_PATH], moved[RIG_PATH];
    jit(NULL, 1, path);
    int compiled = rig_compiled("start");
    assert_int_equal(chmod(rig_entry("kernels", "amax_bf16."), 0777), 0);
    forget_bundles();
    jit(NULL, 1, path);
    assert_int_equal(rig_compiled("start"), compiled + 1);
    snprintf(file, sizeof(file), "%s/kernel.cubin", rig_entry("kernels", "dequantize_tensor."));
    snprintf(moved, sizeof(moved), "%s", rig_path("moved.cubin"));
    assert_int_equal(rename(file, moved), 0);
    assert_int_equal(symlink(moved, file), 0);
    forget_bundles();
    jit(NULL, 1, path);
    assert_int_equal(rig_compiled("start"), compiled + 2);
}

/* Runs `child` with rig_logging as user nobody, where this is root; its exit code. */
static int as_nobody(int (*child)(const fp8gen_jit_options *options))
{
    int status;
    fflush(stdout);
    pid_t process = fork();
    if (process == 0) {
        if (geteuid() == 0 && setuid(NOBODY) != 0)
            _exit(10);
        _exit(child(&rig_logging));
    }
    assert_int_equal(waitpid(process, &status, 0), process);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

/* The cache of this test, given to nobody, with a folder or an entry that even its owner may not
 * look into. */
static void give_away(const char *locked)
{
    char command[3 * RIG_PATH];
    if (geteuid() == 0) {
        snprintf(command, sizeof(command), "chmod 755 %s && chown -R %d:%d %s", rig_path(""),
                 NOBODY, NOBODY, getenv("FP8GEN_CACHE_DIR"));
        assert_int_equal(system(command), 0);
    }
    assert_int_equal(chmod(locked, 0000), 0);
}

static int gets_it_and_says_why(const fp8gen_jit_options *options)
{
    char path[RIG_PATH];
    if (rig_jit(options, 1, path) != FP8GEN_OK || !rig_opens(path))
        return 11;
    if (rig_logged("is damaged") != 0)
        return 12;
    return rig_logged("cannot be read (Permission denied)") >= 1 ? 0 : 13;
}

static void what_cannot_be_read_is_not_called_damaged(void **state)
{
    (void)state;
    char path[RIG_PATH], locked[3 * RIG_PATH];
    jit(&rig_logging, 1, path);
    snprintf(locked, sizeof(locked), "%s/bundles", getenv("FP8GEN_CACHE_DIR"));
    give_away(locked);
    assert_int_equal(as_nobody(gets_it_and_says_why), 0);
    assert_int_equal(chmod(locked, 0700), 0);
    snprintf(locked, sizeof(locked), "%s/key.txt", rig_entry("bundles", "bundle."));
    assert_int_equal(chmod(locked, 0000), 0);
    assert_int_equal(as_nobody(gets_it_and_says_why), 0);
}

static void an_empty_folder_of_templates_is_refused(void **state)
{
    (void)state;
    char path[RIG_PATH];
    fp8gen_jit_options options = FP8GEN_JIT_OPTIONS_INIT;
    jit(&options, 1, path);
    options.template_dir = rig_path("empty");
    assert_int_equal(mkdir(options.template_dir, 0700), 0);
    assert_int_equal(rig_jit(&options, 1, path), FP8GEN_ERR_MACHINE);
    assert_string_equal(path, "");
    assert_non_null(strstr(fp8gen_jit_error(), "empty has no templates"));
}

static void a_full_disk(void **state)
{
    (void)state;
    char cache[RIG_PATH], fill[2 * RIG_PATH];
    snprintf(cache, sizeof(cache), "%s", rig_path("small"));
    assert_int_equal(mkdir(cache, 0700), 0);
    if (mount("tmpfs", cache, "tmpfs", 0, "size=1m,mode=0700") != 0) {
        print_message("skip: cannot mount a tmpfs: %s\n", strerror(errno));
        skip();
    }
    snprintf(fill, sizeof(fill), "dd if=/dev/zero of=%s/fill bs=1k count=800 2>/dev/null", cache);
    if (system(fill) == 0)
        stays_in_memory(cache, 0, "No space left on device");
    int damaged;
    setenv("FP8GEN_CACHE_DIR", cache, 1);
    rig_entries(&damaged);
    umount2(cache, MNT_DETACH);
    assert_int_equal(damaged, 0);
}

/* ---- trimming -------------------------------------------------------------------------------- */

static void set_age(const char *path, int hours)
{
    struct timespec times[2];
    clock_gettime(CLOCK_REALTIME, &times[0]);
    times[0].tv_sec -= 3600 * hours + 60;
    times[1] = times[0];
    assert_int_equal(utimensat(AT_FDCWD, path, times, AT_SYMLINK_NOFOLLOW), 0);
}

static void make_old(void *user, const fp8gen_cache_entry *entry)
{
    char path[3 * RIG_PATH];
    snprintf(path, sizeof(path), "%s/%s/%s/sums", getenv("FP8GEN_CACHE_DIR"), entry->kind,
             entry->name);
    set_age(path, strncmp(entry->name, "amax", 4) == 0 ? 1 : 5);
    *(uint64_t *)user += entry->bytes;
}

static void what_was_used_longest_ago_goes(void **state)
{
    (void)state;
    char path[RIG_PATH], text[32];
    uint64_t total = 0, removed, rest = 0;
    int damaged;
    jit(NULL, 1, path);
    fp8gen_cache_list(NULL, 0, make_old, &total);
    snprintf(text, sizeof(text), "%lluK", (unsigned long long)total / 2048);
    assert_int_equal(fp8gen_cache_trim(NULL, text, &removed), FP8GEN_OK);
    fp8gen_cache_list(NULL, 0, make_old, &rest);
    assert_int_equal(rest + removed, total);
    assert_true(rest <= total / 2 && rest > 0);
    rig_entry("kernels", "amax_bf16."); /* used last */
    jit(NULL, 1, path);
    assert_int_equal(rig_compiled("start amax.cu"), 1);
    assert_int_equal(fp8gen_cache_trim(NULL, "0", &removed), FP8GEN_OK);
    assert_int_equal(rig_entries(&damaged), 0);
    assert_int_equal(fp8gen_cache_trim(NULL, "1Q", &removed), FP8GEN_ERR_ARGUMENT);
    assert_non_null(strstr(fp8gen_jit_error(), "'1Q' is no size"));
}

static void a_build_keeps_the_size(void **state)
{
    (void)state;
    char path[RIG_PATH];
    uint64_t total = 0;
    int damaged, entries;
    jit(NULL, 1, path);
    int compiled = rig_compiled("start");
    fp8gen_cache_list(NULL, 0, make_old, &total);
    setenv("FP8GEN_CACHE_SIZE", "1K", 1);
    jit(NULL, 2, path); /* uses the kernels, so that they are not old any more */
    entries = rig_entries(&damaged);
    assert_int_equal(entries, compiled + 1); /* the first bundle is gone */
    setenv("FP8GEN_CACHE_SIZE", "much", 1);
    jit(&rig_logging, 3, path);
    assert_true(rig_logged("FP8GEN_CACHE_SIZE is 'much'") >= 1);
}

static int cannot_trim(const fp8gen_jit_options *options)
{
    uint64_t removed;
    (void)options;
    if (fp8gen_cache_trim(NULL, "0", &removed) != FP8GEN_ERR_MACHINE)
        return 11;
    if (strstr(fp8gen_jit_error(), "cannot remove ") == NULL ||
        strstr(fp8gen_jit_error(), "/kernels/amax_bf16.") == NULL ||
        strstr(fp8gen_jit_error(), "Permission denied") == NULL)
        return 12;
    return removed > 0 ? 0 : 13; /* the rest went */
}

static void what_cannot_be_removed_is_told(void **state)
{
    (void)state;
    char path[RIG_PATH], locked[RIG_PATH], command[4 * RIG_PATH];
    jit(NULL, 1, path);
    snprintf(locked, sizeof(locked), "%s/kernels", getenv("FP8GEN_CACHE_DIR"));
    snprintf(command, sizeof(command), "cd %s && rm -r $(ls | grep -v amax_bf16)", locked);
    assert_int_equal(system(command), 0);
    give_away(locked);
    assert_int_equal(chmod(locked, 0500), 0);
    assert_int_equal(as_nobody(cannot_trim), 0);
    assert_int_equal(chmod(locked, 0700), 0);
}

/* An entry that was used a moment ago stays, though its time of use was last written minutes
 * before. */
static void what_was_used_just_now_stays(void **state)
{
    (void)state;
    char first[RIG_PATH], path[RIG_PATH], sums[2 * RIG_PATH];
    struct timespec times[2];
    jit(NULL, 1, first);
    snprintf(sums, sizeof(sums), "%s/sums", rig_entry("bundles", "bundle."));
    clock_gettime(CLOCK_REALTIME, &times[0]);
    times[0].tv_sec -= 300;
    times[1] = times[0];
    assert_int_equal(utimensat(AT_FDCWD, sums, times, 0), 0);
    jit(NULL, 1, path);
    setenv("FP8GEN_CACHE_SIZE", "1", 1);
    jit(NULL, 2, path);
    assert_true(rig_opens(first));
}

static void what_killed_processes_left_goes(void **state)
{
    (void)state;
    char old[2 * RIG_PATH], young[2 * RIG_PATH], foreign[2 * RIG_PATH], file[3 * RIG_PATH];
    char path[RIG_PATH];
    uint64_t removed;
    const char *cache = getenv("FP8GEN_CACHE_DIR");
    jit(NULL, 1, path);
    snprintf(old, sizeof(old), "%s/kernels/.tmp.abcdef", cache);
    snprintf(young, sizeof(young), "%s/kernels/.tmp.ghijkl", cache);
    snprintf(foreign, sizeof(foreign), "%s/kernels/notes", cache);
    assert_int_equal(mkdir(old, 0700), 0);
    assert_int_equal(mkdir(young, 0700), 0);
    assert_int_equal(mkdir(foreign, 0700), 0);
    snprintf(file, sizeof(file), "%s/kernel.cubin", old);
    fclose(fopen(file, "w"));
    set_age(old, 2);
    set_age(foreign, 2);
    assert_int_equal(fp8gen_cache_trim(NULL, "0", &removed), FP8GEN_OK);
    assert_int_not_equal(access(old, F_OK), 0);
    assert_int_equal(access(young, F_OK), 0);
    assert_int_equal(access(foreign, F_OK), 0);
}

static void sizes(void **state)
{
    (void)state;
    static const struct {
        const char *text;
        bool good;
        uint64_t bytes;
    } table[] = {
        { "0", true, 0 },          { "1", true, 1 },         { "3K", true, 3072 },
        { "2M", true, 2097152 },   { "1G", true, 1u << 30 }, { "1T", true, 1ull << 40 },
        { "", false, 0 },          { "K", false, 0 },        { "-1", false, 0 },
        { "1k", false, 0 },        { "1KB", false, 0 },      { "99999999999999999999", false, 0 },
        { "99999999T", false, 0 },
    };
    for (size_t i = 0; i < sizeof(table) / sizeof(table[0]); i++) {
        uint64_t bytes = 0;
        assert_int_equal(gen_parse_size(table[i].text, &bytes), table[i].good);
        assert_int_equal(bytes, table[i].bytes);
    }
}

/* ---- the folder's name ----------------------------------------------------------------------- */

static void where_the_cache_is(void **state)
{
    (void)state;
    char path[RIG_PATH], tiny[4], saved[RIG_PATH];
    const char *home = getenv("HOME");
    snprintf(saved, sizeof(saved), "%s", home != NULL ? home : "/");
    assert_int_equal(fp8gen_cache_path("/a/b", path, sizeof(path)), FP8GEN_OK);
    assert_string_equal(path, "/a/b");
    assert_int_equal(fp8gen_cache_path(NULL, path, sizeof(path)), FP8GEN_OK);
    assert_string_equal(path, getenv("FP8GEN_CACHE_DIR"));
    assert_int_equal(fp8gen_cache_path(NULL, tiny, sizeof(tiny)), FP8GEN_ERR_ARGUMENT);
    unsetenv("FP8GEN_CACHE_DIR");
    setenv("XDG_CACHE_HOME", "/x", 1);
    setenv("HOME", "/h", 1);
    assert_int_equal(fp8gen_cache_path(NULL, path, sizeof(path)), FP8GEN_OK);
    assert_string_equal(path, "/x/fp8gen");
    unsetenv("XDG_CACHE_HOME");
    assert_int_equal(fp8gen_cache_path(NULL, path, sizeof(path)), FP8GEN_OK);
    assert_string_equal(path, "/h/.cache/fp8gen");
    unsetenv("HOME");
    assert_int_equal(fp8gen_cache_path(NULL, path, sizeof(path)), FP8GEN_ERR_MACHINE);
    assert_int_equal(rig_jit(&rig_logging, 1, path), FP8GEN_OK); /* in memory */
    assert_int_equal(rig_logged("[2] "), 1);
    assert_true(rig_opens(path));
    setenv("HOME", saved, 1);
}

int main(int argc, char **argv)
{
    (void)argc;
    static const struct CMUnitTest tests[] = {
        RIG_TEST(a_folder_that_cannot_be_made),
        RIG_TEST(a_folder_that_is_read_only),
        RIG_TEST(a_folder_of_somebody_else),
        RIG_TEST(an_entry_of_somebody_else_is_replaced),
        RIG_TEST(an_entry_that_others_can_change_is_replaced),
        RIG_TEST(what_cannot_be_read_is_not_called_damaged),
        RIG_TEST(an_empty_folder_of_templates_is_refused),
        RIG_TEST(a_full_disk),
        RIG_TEST(what_was_used_longest_ago_goes),
        RIG_TEST(a_build_keeps_the_size),
        RIG_TEST(what_cannot_be_removed_is_told),
        RIG_TEST(what_was_used_just_now_stays),
        RIG_TEST(what_killed_processes_left_goes),
        RIG_TEST(sizes),
        RIG_TEST(where_the_cache_is),
    };
    return RIG_RUN(argv, tests);
}
