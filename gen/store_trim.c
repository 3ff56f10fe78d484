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

/* ---- sizes ---------------------------------------------------------------------------------------- */

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

/* ---- scanning ------------------------------------------------------------------------------------- */

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
    bool failed;
};

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

/* ---- trimming ------------------------------------------------------------------------------------- */

static int by_use(const void *a, const void *b)
{
    const struct found *first = a, *second = b;
    if (first->used != second->used)
        return first->used < second->used ? -1 : 1;
    return strcmp(first->name, second->name);
}

static bool remove_entry(const struct gen_store *store, const struct found *found)
{
    int parent = openat(store->fd, gen_kind_names[found->kind],
                        O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (parent < 0)
        return false;
    struct buf aside = { 0 };
    buf_printf(&aside, ".tmp.%s", found->name);
    bool moved = !aside.failed;
    if (moved && renameat(parent, found->name, parent, aside.data) != 0) {
        gen_remove_tree(parent, aside.data); /* of a trim that was killed */
        moved = renameat(parent, found->name, parent, aside.data) == 0;
    }
    if (moved)
        gen_remove_tree(parent, aside.data);
    close(parent);
    buf_free(&aside);
    return moved;
}

/* Removes what lies in a folder longer than an hour and has a name of ours: temporary folders and locks of
 * processes that were killed. */
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

void gen_store_trim(const struct gen_store *store, uint64_t limit, int64_t grace, uint64_t *removed)
{
    struct scan scan = { 0 };
    uint64_t total = 0;
    int64_t newest = (int64_t)time(NULL) - grace;
    *removed = 0;
    if (store->fd < 0)
        return;
    for (int kind = 0; kind < GEN_KIND_COUNT; kind++)
        remove_stale(store, gen_kind_names[kind], ".tmp.");
    remove_stale(store, "locks", "");
    scan_all(store, &scan);
    for (size_t i = 0; i < scan.count; i++)
        total += scan.list[i].bytes;
    if (scan.count > 0)
        qsort(scan.list, scan.count, sizeof(*scan.list), by_use);
    for (size_t i = 0; i < scan.count && total - *removed > limit; i++)
        if ((grace == 0 || scan.list[i].used < newest) && remove_entry(store, &scan.list[i]))
            *removed += scan.list[i].bytes;
    scan_free(&scan);
}

/* ---- public ---------------------------------------------------------------------------------------- */

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
    struct scan scan = { 0 };
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
    gen_store_trim(&store, max_size != NULL ? limit : gen_store_limit(&store), 0, removed);
    gen_store_close(&store);
    return status;
}
