/*
 * store_trim.c - what lies in the cache: listed, verified, and kept within its size.
 *
 * In: an opened folder. Out: its entries with their bytes and when they were last used (the time of
 * their `sums`), and fewer of them after a trim. An entry is renamed before its files go, so that
 * no one meets half of it; one that is in use by another process at that moment is a miss for it
 * and is made again. Only names of entries and of our temporary folders are ever touched.
 */
#include "gen/cache.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { STALE_SECONDS = 3600, SIZE_DEFAULT_MIB = 1024 };

/* ---- sizes ----------------------------------------------------------------------------------- */

bool gen_parse_size(const char *text, uint64_t *bytes)
{
    static const char units[] = "KMGT";
    char *end;
    if (text[0] < '0' || text[0] > '9')
        return false;
    errno = 0;
    unsigned long long number = strtoull(text, &end, 10);
    const char *unit = *end != '\0' ? strchr(units, *end) : NULL;
    if (errno != 0 || (*end != '\0' && (unit == NULL || end[1] != '\0')))
        return false;
    int shift = unit != NULL ? 10 * (int)(unit - units + 1) : 0;
    if (number > UINT64_MAX >> shift)
        return false;
    *bytes = (uint64_t)number << shift;
    return true;
}

uint64_t gen_store_limit(const struct gen_store *store)
{
    uint64_t bytes = (uint64_t)SIZE_DEFAULT_MIB << 20;
    const char *text = getenv("FP8GEN_CACHE_SIZE");
    if (text != NULL && *text != '\0' && !gen_parse_size(text, &bytes))
        gen_log(
            &store->log, GEN_LOG_WARNING,
            "FP8GEN_CACHE_SIZE is '%s'; a size is a number of bytes, with K, M, G or T behind it "
            "(512M); %d MiB is taken",
            text, SIZE_DEFAULT_MIB);
    return bytes;
}

/* ---- scanning -------------------------------------------------------------------------------- */

struct found {
    enum gen_kind kind;
    char *name;
    uint64_t bytes;
    int64_t used;
};

struct scan {
    struct found *list;
    size_t count;
    size_t capacity;
    bool failed; /* out of memory */
    struct gen_refusal *refusal;
};

/* Notes that a folder or an entry of the cache (entry NULL) is refused to us; the first reason
 * stays. */
static void note_refusal(struct gen_refusal *refusal, const char *what, enum gen_kind kind,
                         const char *entry, int error)
{
    if (refusal->count++ > 0)
        return;
    refusal->error = error;
    refusal->what = what;
    snprintf(refusal->name, sizeof(refusal->name), "%s%s%s", gen_kind_names[kind],
             entry != NULL ? "/" : "", entry != NULL ? entry : "");
}

static uint64_t bytes_below(int parent, const char *name, int depth)
{
    int fd = openat(parent, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    DIR *dir = fd >= 0 ? fdopendir(fd) : NULL;
    if (dir == NULL) {
        if (fd >= 0)
            close(fd);
        return 0;
    }
    uint64_t bytes = 0;
    struct dirent *entry;
    while ((entry = readdir(dir)) != NULL) {
        struct stat info;
        if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0 ||
            fstatat(fd, entry->d_name, &info, AT_SYMLINK_NOFOLLOW) != 0)
            continue;
        if (S_ISDIR(info.st_mode) && depth > 0)
            bytes += bytes_below(fd, entry->d_name, depth - 1);
        else if (S_ISREG(info.st_mode))
            bytes += (uint64_t)info.st_size;
    }
    closedir(dir);
    return bytes;
}

static void add_found(struct scan *scan, enum gen_kind kind, int folder, const char *name)
{
    struct buf sums = { 0 }, copy = { 0 };
    struct stat info = { 0 };
    buf_printf(&sums, "%s/sums", name);
    buf_puts(&copy, name);
    if (scan->count == scan->capacity) {
        size_t capacity = scan->capacity * 2 + 64;
        struct found *list = gen_realloc(scan->list, capacity * sizeof(*list));
        scan->failed = scan->failed || list == NULL;
        if (list != NULL) {
            scan->list = list;
            scan->capacity = capacity;
        }
    }
    if (scan->failed || sums.failed || copy.failed) {
        scan->failed = true;
        buf_free(&copy);
    } else {
        if (fstatat(folder, sums.data, &info, AT_SYMLINK_NOFOLLOW) != 0)
            (void)fstatat(folder, name, &info, AT_SYMLINK_NOFOLLOW);
        scan->list[scan->count++] = (struct found){ .kind = kind,
                                                    .name = copy.data,
                                                    .bytes = bytes_below(folder, name, 2),
                                                    .used = info.st_mtime };
    }
    buf_free(&sums);
}

static void scan_kind(const struct gen_store *store, enum gen_kind kind, struct scan *scan)
{
    int fd =
        openat(store->fd, gen_kind_names[kind], O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    DIR *dir = fd >= 0 ? fdopendir(fd) : NULL;
    if (dir == NULL) {
        if (errno != ENOENT)
            note_refusal(scan->refusal, "read", kind, NULL, errno);
        if (fd >= 0)
            close(fd);
        return;
    }
    struct dirent *entry;
    while ((entry = readdir(dir)) != NULL)
        if (gen_is_entry(entry->d_name) && entry->d_name[0] != '.')
            add_found(scan, kind, fd, entry->d_name);
    closedir(dir);
}

static void scan_all(const struct gen_store *store, struct scan *scan)
{
    for (int kind = 0; kind < GEN_KIND_COUNT; kind++)
        scan_kind(store, (enum gen_kind)kind, scan);
}

static void scan_free(struct scan *scan)
{
    for (size_t i = 0; i < scan->count; i++)
        gen_free(scan->list[i].name);
    gen_free(scan->list);
}

/* ---- trimming -------------------------------------------------------------------------------- */

static int by_use(const void *a, const void *b)
{
    const struct found *first = a, *second = b;
    if (first->used != second->used)
        return first->used < second->used ? -1 : 1;
    return strcmp(first->name, second->name);
}

/* 0, or why it could not be moved away, as an errno. */
static int remove_entry(const struct gen_store *store, const struct found *found)
{
    struct buf aside = { 0 };
    buf_printf(&aside, ".tmp.%s", found->name);
    int parent = openat(store->fd, gen_kind_names[found->kind],
                        O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    int error = aside.failed ? ENOMEM : parent < 0 ? errno : 0;
    if (error == 0 && renameat(parent, found->name, parent, aside.data) != 0) {
        gen_remove_tree(parent, aside.data); /* of a trim that was killed */
        error = renameat(parent, found->name, parent, aside.data) != 0 ? errno : 0;
    }
    if (error == 0)
        gen_remove_tree(parent, aside.data);
    if (parent >= 0)
        close(parent);
    buf_free(&aside);
    return error;
}

/* Removes what lies in a folder longer than an hour and has a name of ours: temporary folders and
 * locks of processes that were killed. */
static void remove_stale(const struct gen_store *store, const char *folder, const char *prefix)
{
    int fd = openat(store->fd, folder, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    DIR *dir = fd >= 0 ? fdopendir(fd) : NULL;
    if (dir == NULL) {
        if (fd >= 0)
            close(fd);
        return;
    }
    time_t now = time(NULL);
    struct dirent *entry;
    while ((entry = readdir(dir)) != NULL) {
        struct stat info;
        if (strncmp(entry->d_name, prefix, strlen(prefix)) == 0 &&
            strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0 &&
            fstatat(fd, entry->d_name, &info, AT_SYMLINK_NOFOLLOW) == 0 &&
            now - info.st_mtime > STALE_SECONDS)
            gen_remove_tree(fd, entry->d_name);
    }
    closedir(dir);
}

/* Of the entries, by use, what is too much. One that another process removes meanwhile is as good
 * as gone. */
static void remove_oldest(const struct gen_store *store, const struct scan *scan, uint64_t limit,
                          int64_t grace, uint64_t *removed)
{
    int64_t newest = (int64_t)time(NULL) - grace;
    uint64_t total = 0;
    for (size_t i = 0; i < scan->count; i++)
        total += scan->list[i].bytes;
    for (size_t i = 0; i < scan->count && total - *removed > limit; i++) {
        const struct found *found = &scan->list[i];
        if (grace != 0 && found->used >= newest)
            continue;
        int error = remove_entry(store, found);
        if (error == 0 || error == ENOENT)
            *removed += found->bytes;
        else
            note_refusal(scan->refusal, "remove", found->kind, found->name, error);
    }
}

void gen_store_trim(const struct gen_store *store, uint64_t limit, int64_t grace, uint64_t *removed,
                    struct gen_refusal *refusal)
{
    struct scan scan = { .refusal = refusal };
    *removed = 0;
    *refusal = (struct gen_refusal){ 0 };
    if (store->fd < 0)
        return;
    for (int kind = 0; kind < GEN_KIND_COUNT; kind++)
        remove_stale(store, gen_kind_names[kind], ".tmp.");
    remove_stale(store, GEN_LOCKS, "");
    scan_all(store, &scan);
    if (scan.count > 0)
        qsort(scan.list, scan.count, sizeof(*scan.list), by_use);
    remove_oldest(store, &scan, limit, grace, removed);
    scan_free(&scan);
}

/* ---- public ---------------------------------------------------------------------------------- */

/* Opens what is there; makes nothing. *store has fd = -1 if there is no cache yet. */
static fp8gen_status open_existing(const char *dir, struct gen_store *store)
{
    struct stat info;
    char *path = gen_store_default(dir);
    *store = (struct gen_store){ .fd = -1 };
    if (path == NULL)
        return gen_jit_fail(FP8GEN_ERR_MACHINE,
                            "error: the cache has no folder: neither HOME nor FP8GEN_CACHE_DIR is "
                            "set\n");
    fp8gen_status status = FP8GEN_OK;
    if (stat(path, &info) != 0 && errno != ENOENT)
        status = gen_jit_fail(FP8GEN_ERR_MACHINE, "error: cannot look at the cache %s: %s\n", path,
                              strerror(errno));
    else if (stat(path, &info) == 0) {
        gen_store_open(store, path, (struct gen_log){ NULL, NULL });
        if (store->fd < 0)
            status = gen_jit_fail(
                FP8GEN_ERR_MACHINE,
                "error: the cache %s cannot be used: it is no folder of this user\n", path);
    }
    gen_free(path);
    if (status != FP8GEN_OK)
        gen_store_close(store);
    return status;
}

static fp8gen_status fail_refusal(const struct gen_store *store, const struct gen_refusal *refusal)
{
    return gen_jit_fail(FP8GEN_ERR_MACHINE,
                        "error: cannot %s %s/%s: %s%s\n"
                        "  hint: the owner of the cache may; FP8GEN_CACHE_DIR names another one\n",
                        refusal->what, store->path, refusal->name, strerror(refusal->error),
                        refusal->count > 1 ? ", nor others in the cache" : "");
}

fp8gen_status fp8gen_cache_path(const char *dir, char *path, size_t path_bytes)
{
    if (path == NULL)
        return gen_jit_fail(FP8GEN_ERR_ARGUMENT, "error: there is no room for the path\n");
    char *found = gen_store_default(dir);
    if (path_bytes > 0)
        path[0] = '\0';
    fp8gen_status status = FP8GEN_OK;
    if (found == NULL)
        status =
            gen_jit_fail(FP8GEN_ERR_MACHINE,
                         "error: the cache has no folder: neither HOME nor FP8GEN_CACHE_DIR is "
                         "set\n");
    else if (strlen(found) >= path_bytes)
        status = gen_jit_fail(FP8GEN_ERR_ARGUMENT,
                              "error: the path of the cache has %zu bytes, there is room for %zu\n",
                              strlen(found) + 1, path_bytes);
    else
        memcpy(path, found, strlen(found) + 1);
    gen_free(found);
    return status;
}

static int by_name(const void *a, const void *b)
{
    const struct found *first = a, *second = b;
    if (first->kind != second->kind)
        return first->kind < second->kind ? -1 : 1;
    return strcmp(first->name, second->name);
}

fp8gen_status fp8gen_cache_list(const char *dir, uint32_t verify,
                                void (*each)(void *user, const fp8gen_cache_entry *entry),
                                void *user)
{
    struct gen_store store;
    struct gen_refusal refusal = { 0 };
    struct scan scan = { .refusal = &refusal };
    if (each == NULL)
        return gen_jit_fail(FP8GEN_ERR_ARGUMENT, "error: the function to call is NULL\n");
    fp8gen_status status = open_existing(dir, &store);
    if (status != FP8GEN_OK || store.fd < 0)
        return status;
    scan_all(&store, &scan);
    if (scan.count > 0)
        qsort(scan.list, scan.count, sizeof(*scan.list), by_name);
    for (size_t i = 0; i < scan.count; i++) {
        const struct found *found = &scan.list[i];
        fp8gen_cache_entry entry = { .size = sizeof(entry),
                                     .kind = gen_kind_names[found->kind],
                                     .name = found->name,
                                     .bytes = found->bytes,
                                     .used = found->used };
        entry.damaged =
            verify != 0 && gen_entry_verify(&store, found->kind, found->name) == GEN_DAMAGED;
        each(user, &entry);
    }
    if (scan.failed)
        status = gen_jit_fail(FP8GEN_ERR_MACHINE, "%s", GEN_OUT_OF_MEMORY);
    else if (refusal.count > 0)
        status = fail_refusal(&store, &refusal);
    scan_free(&scan);
    gen_store_close(&store);
    return status;
}

fp8gen_status fp8gen_cache_trim(const char *dir, const char *max_size, uint64_t *removed)
{
    struct gen_store store;
    uint64_t limit = 0;
    if (removed == NULL)
        return gen_jit_fail(FP8GEN_ERR_ARGUMENT, "error: the place for a result is NULL\n");
    *removed = 0;
    const char *text = max_size != NULL ? max_size : getenv("FP8GEN_CACHE_SIZE");
    if (text != NULL && (max_size != NULL || *text != '\0') && !gen_parse_size(text, &limit))
        return gen_jit_fail(FP8GEN_ERR_ARGUMENT,
                            "error: %s'%s' is no size\n"
                            "  hint: bytes, with K, M, G or T behind them: 512M\n",
                            max_size != NULL ? "" : "FP8GEN_CACHE_SIZE: ", text);
    fp8gen_status status = open_existing(dir, &store);
    if (status != FP8GEN_OK || store.fd < 0)
        return status;
    struct gen_refusal refusal;
    gen_store_trim(&store, max_size != NULL ? limit : gen_store_limit(&store), 0, removed,
                   &refusal);
    if (refusal.count > 0)
        status = fail_refusal(&store, &refusal);
    gen_store_close(&store);
    return status;
}
