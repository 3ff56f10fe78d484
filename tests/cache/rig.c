/*
 * rig.c - see rig.h.
 */
#include "tests/cache/rig.h"

#include <dirent.h>
#include <ftw.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "gen/internal.h"

#define STARTED "FP8_TEST_FAKE_NVRTC"

static char folder[RIG_PATH];

/* ---- starting -------------------------------------------------------------------------------- */

static int remove_one(const char *path, const struct stat *info, int type, struct FTW *where)
{
    (void)info, (void)type, (void)where;
    chmod(path, 0700);
    return remove(path);
}

static int open_one(const char *path, const struct stat *info, int type, struct FTW *where)
{
    (void)info, (void)where;
    return type == FTW_D || type == FTW_DNR ? chmod(path, 0700) : 0;
}

void rig_remove(const char *path)
{
    nftw(path, open_one, 16, FTW_PHYS);
    nftw(path, remove_one, 16, FTW_DEPTH | FTW_PHYS);
}

/* Makes the library in the build folder, once for all programs of the group: written aside,
 * renamed. */
static int make_fake(char library[RIG_PATH])
{
    const char *build = getenv("FP8_TEST_BUILD");
    char command[4 * RIG_PATH];
    snprintf(library, RIG_PATH, "%s/tests/fake_nvrtc", build != NULL ? build : "/tmp");
    mkdir(library, 0700);
    snprintf(command, sizeof(command),
             "cc -shared -fPIC -O1 -w -Wl,-soname,libnvrtc.so.13 -o '%s/new.%d' "
             "tests/cache/fake/nvrtc.c && mv '%s/new.%d' '%s/libnvrtc.so.13'",
             library, (int)getpid(), library, (int)getpid(), library);
    return system(command);
}

/* This program again, with the fake in the loader's path; returns where that cannot be. */
static int start_again(char **argv)
{
    char library[RIG_PATH], search[8 * RIG_PATH];
    if (system("command -v cc >/dev/null") != 0) {
        printf("skip: no C compiler for the fake NVRTC\n");
        return 77;
    }
    if (make_fake(library) != 0)
        return 1;
    const char *before = getenv("LD_LIBRARY_PATH");
    snprintf(search, sizeof(search), "%s%s%s", library, before != NULL ? ":" : "",
             before != NULL ? before : "");
    setenv("LD_LIBRARY_PATH", search, 1);
    setenv(STARTED, "1", 1);
    execv("/proc/self/exe", argv);
    perror("execv");
    return 1;
}

int rig_main(char **argv, const char *name, const struct CMUnitTest *tests, size_t count)
{
    if (getenv(STARTED) == NULL)
        return start_again(argv);
    return _cmocka_run_group_tests(name, tests, count, NULL, NULL);
}

/* ---- one test -------------------------------------------------------------------------------- */

static pthread_mutex_t log_lock = PTHREAD_MUTEX_INITIALIZER;
static char log_text[1 << 16];
fp8gen_jit_options rig_logging = {
    sizeof(rig_logging), 2, NULL, NULL, NULL, rig_log, NULL, NULL, { 0 }
};

const char *rig_path(const char *name)
{
    static char paths[4][RIG_PATH + 64];
    static int next;
    char *path = paths[next++ % 4];
    snprintf(path, sizeof(paths[0]), "%.*s/%.50s", RIG_PATH, folder, name);
    return path;
}

int rig_begin(void **state)
{
    (void)state;
    const char *base = getenv("TMPDIR");
    snprintf(folder, sizeof(folder), "%s/fp8gen_test_XXXXXX",
             base != NULL && *base ? base : "/tmp");
    if (mkdtemp(folder) == NULL)
        fail_msg("cannot make %s", folder);
    unsetenv("FAKE_NVRTC_DELAY_MS");
    unsetenv("FAKE_NVRTC_MINOR");
    unsetenv("FP8GEN_CACHE_SIZE");
    setenv("FAKE_NVRTC_LOG", rig_path("log"), 1);
    setenv("FP8GEN_CACHE_DIR", rig_path("cache"), 1);
    log_text[0] = '\0';
    return 0;
}

int rig_end(void **state)
{
    (void)state;
    rig_remove(folder);
    return 0;
}

void rig_log(void *user, int level, const char *message)
{
    (void)user;
    pthread_mutex_lock(&log_lock);
    size_t used = strlen(log_text);
    snprintf(log_text + used, sizeof(log_text) - used, "[%d] %s\n", level, message);
    pthread_mutex_unlock(&log_lock);
}

static int count_lines(const char *text, const char *part)
{
    int count = 0;
    for (const char *at = text; (at = strstr(at, part)) != NULL; at++)
        count++;
    return count;
}

int rig_logged(const char *part)
{
    pthread_mutex_lock(&log_lock);
    int count = count_lines(log_text, part);
    pthread_mutex_unlock(&log_lock);
    return count;
}

static char *read_text(const char *path)
{
    FILE *file = fopen(path, "rb");
    if (file == NULL)
        return NULL;
    char *text = calloc(1, 1 << 20);
    size_t size = fread(text, 1, (1 << 20) - 1, file);
    text[size] = '\0';
    fclose(file);
    return text;
}

int rig_compiled(const char *word)
{
    char *text = read_text(rig_path("log"));
    int count = text != NULL ? count_lines(text, word) : 0;
    free(text);
    return count;
}

/* ---- specs and bundles ----------------------------------------------------------------------- */

const char *rig_spec(int number)
{
    static _Thread_local char specs[8][256];
    static _Thread_local int next;
    char *spec = specs[next++ % 8];
    snprintf(spec, sizeof(specs[0]),
             "return model \"m%d\" { layers = { linear \"a\" {\n"
             "    in_features = 64, out_features = %d, tokens = 32 } } }\n",
             number, 48 + number);
    return spec;
}

fp8gen_status rig_jit(const fp8gen_jit_options *options, int number, char path[RIG_PATH])
{
    char found[RIG_PATH];
    const char *spec = rig_spec(number);
    fp8gen_status status =
        fp8gen_jit_bundle(options, "test.lua", spec, strlen(spec), found, RIG_PATH);
    if (path != NULL)
        memcpy(path, found, RIG_PATH);
    return status;
}

bool rig_opens(const char *path)
{
    fp8_context_options options = FP8_CONTEXT_OPTIONS_INIT;
    fp8_context *context;
    fp8_bundle *bundle;
    options.device = FP8_DEVICE_HOST;
    options.threads = 1;
    if (fp8_context_create(&options, &context) != FP8_OK)
        return false;
    bool good = fp8_bundle_open(context, path, &bundle) == FP8_OK;
    if (good)
        fp8_bundle_close(bundle);
    else
        fprintf(stderr, "%s\n", fp8_last_error());
    fp8_context_destroy(context);
    return good;
}

/* ---- files ----------------------------------------------------------------------------------- */

static void write_text(const char *path, const void *data, size_t size)
{
    FILE *file = fopen(path, "wb");
    if (file == NULL || fwrite(data, 1, size, file) != size || fclose(file) != 0)
        fail_msg("cannot write %s", path);
}

void rig_templates(const char *into)
{
    mkdir(into, 0700);
    for (const struct embedded_file *file = gen_embedded_files; file->name != NULL; file++) {
        const char *dot = strrchr(file->name, '.');
        char path[2 * RIG_PATH];
        snprintf(path, sizeof(path), "%s/%s", into, file->name);
        if (strcmp(dot, ".cu") == 0 || strcmp(dot, ".cuh") == 0)
            write_text(path, file->data, file->size);
    }
}

void rig_edit(const char *path, const char *from, const char *to)
{
    char *text = read_text(path);
    char *at = text != NULL ? strstr(text, from) : NULL;
    if (at == NULL)
        fail_msg("%s has no '%s'", path, from);
    FILE *file = fopen(path, "wb");
    fprintf(file, "%.*s%s%s", (int)(at - text), text, to, at + strlen(from));
    fclose(file);
    free(text);
}

const char *rig_entry(const char *kind, const char *name)
{
    static char found[2 * RIG_PATH];
    char path[RIG_PATH];
    snprintf(path, sizeof(path), "%s/%s", getenv("FP8GEN_CACHE_DIR"), kind);
    DIR *dir = opendir(path);
    found[0] = '\0';
    struct dirent *entry;
    while (dir != NULL && (entry = readdir(dir)) != NULL)
        if (strncmp(entry->d_name, name, strlen(name)) == 0 && entry->d_name[0] != '.')
            snprintf(found, sizeof(found), "%s/%s", path, entry->d_name);
    if (dir != NULL)
        closedir(dir);
    if (found[0] == '\0')
        fail_msg("no %s/%s in the cache", kind, name);
    return found;
}

struct counts {
    int entries, damaged;
};

static void count_entry(void *user, const fp8gen_cache_entry *entry)
{
    struct counts *counts = user;
    counts->entries++;
    counts->damaged += entry->damaged != 0;
}

int rig_entries(int *damaged)
{
    struct counts counts = { 0, 0 };
    if (fp8gen_cache_list(NULL, 1, count_entry, &counts) != FP8GEN_OK)
        fail_msg("%s", fp8gen_jit_error());
    *damaged = counts.damaged;
    return counts.entries;
}
