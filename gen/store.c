/*
 * store.c - the cache's folder and its entries: found, checked, written aside and renamed.
 *
 * In: keys and files as bytes. Out: entries on disk that are whole, owned by this user (or root)
 * and equal to their key, or the news that the folder cannot be used. Knows nothing of kernels,
 * specs or NVRTC.
 *
 * What is read is never trusted: folders and files of other users are passed over, links are not
 * followed, and every byte is covered by `sums`, which ends in a sum of its own. Reading goes
 * through the descriptor of the entry's folder, so that an entry replaced meanwhile is seen old or
 * new, not mixed.
 */
#include "gen/cache.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define SUMS "sums"
#define TEMPORARY ".tmp."

enum { FILE_BYTES_MAX = 1 << 28, FILE_NAME_MAX = 300 };
/* The time of an entry's last use is written if it is older than TOUCH; a build removes nothing
 * that was used within the last minute, whether or not that was written. */
enum { TOUCH_SECONDS = 30, KEEP_SECONDS = 60 + TOUCH_SECONDS };

static _Atomic int64_t commits; /* of this process, into any cache */

const char *const gen_kind_names[GEN_KIND_COUNT] = { "kernels", "bundles", "failed" };
static const char *const key_files[GEN_KIND_COUNT] = { "source.cu", "key.txt", "source.cu" };

void gen_log(const struct gen_log *log, int level, const char *format, ...)
{
    if (log->callback == NULL)
        return;
    char line[2048];
    va_list args;
    va_start(args, format);
    vsnprintf(line, sizeof(line), format, args);
    va_end(args);
    log->callback(log->user, level, line);
}

static char *join(const char *folder, const char *name)
{
    struct buf path = { 0 };
    buf_printf(&path, "%s%s%s", folder, *name != '\0' ? "/" : "", name);
    if (path.failed) {
        buf_free(&path);
        return NULL;
    }
    return path.data;
}

/* ---- the folder ------------------------------------------------------------------------------ */

char *gen_store_default(const char *dir)
{
    if (dir == NULL || *dir == '\0')
        dir = getenv("FP8GEN_CACHE_DIR");
    if (dir != NULL && *dir != '\0')
        return join(dir, "");
    const char *base = getenv("XDG_CACHE_HOME");
    if (base != NULL && base[0] == '/')
        return join(base, "fp8gen");
    base = getenv("HOME");
    if (base != NULL && base[0] == '/')
        return join(base, ".cache/fp8gen");
    errno = ENOENT;
    return NULL;
}

/* Makes a folder and those above it. */
static int make_folders(char *path)
{
    for (char *at = path + 1;; at++) {
        if (*at != '/' && *at != '\0')
            continue;
        char end = *at;
        *at = '\0';
        int error = mkdir(path, 0700) == 0 || errno == EEXIST ? 0 : errno;
        struct stat info;
        if (error != 0 && stat(path, &info) == 0 && S_ISDIR(info.st_mode))
            error = 0; /* a read-only system says EROFS of folders that are there */
        *at = end;
        if (error != 0 || end == '\0')
            return error;
    }
}

/* What root or this user owns and no one else may write is as safe as the program itself. */
static bool is_ours(const struct stat *info)
{
    return (info->st_uid == geteuid() || info->st_uid == 0) &&
           (S_ISREG(info->st_mode) || (info->st_mode & 0002) == 0);
}

static int open_folder(int parent, const char *name)
{
    int fd = openat(parent, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    struct stat info;
    if (fd >= 0 && (fstat(fd, &info) != 0 || !is_ours(&info))) {
        close(fd);
        errno = EPERM;
        return -1;
    }
    return fd;
}

void gen_store_warn(const struct gen_store *store, const char *what, int error)
{
    enum { WARNED_MAX = 32 };
    static char warned[WARNED_MAX][33];
    static int count;
    char hash[33];
    const char *path = store->path != NULL ? store->path : "";
    gen_hash(path, strlen(path), hash);
    gen_shared_lock();
    bool known = false;
    for (int i = 0; i < count && !known; i++)
        known = memcmp(warned[i], hash, sizeof(hash)) == 0;
    if (!known && count < WARNED_MAX)
        memcpy(warned[count++], hash, sizeof(hash));
    gen_shared_unlock();
    if (!known)
        gen_log(&store->log, GEN_LOG_WARNING,
                "the cache %s%s%s: %s; what is compiled stays in memory and is compiled again next "
                "time (FP8GEN_CACHE_DIR names another folder)",
                what, *path != '\0' ? " " : "", path, strerror(error));
}

/* Opens the folder at store->path and says whose it is if it is not ours. */
static int open_root(struct gen_store *store)
{
    int error = make_folders(store->path);
    if (error != 0)
        return error;
    struct stat info;
    int fd = open(store->path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0)
        return errno;
    if (fstat(fd, &info) != 0 || (info.st_uid != geteuid() && info.st_uid != 0)) {
        close(fd);
        gen_log(&store->log, GEN_LOG_INFO, "the cache %s belongs to user %u, not to user %u",
                store->path, (unsigned)info.st_uid, (unsigned)geteuid());
        return EPERM;
    }
    store->fd = fd;
    return 0;
}

void gen_store_open(struct gen_store *store, const char *dir, struct gen_log log)
{
    *store = (struct gen_store){ .fd = -1, .log = log, .commits = atomic_load(&commits) };
    char *path = gen_store_default(dir);
    const char *lacks = "has no folder, neither HOME nor FP8GEN_CACHE_DIR is set";
    if (path != NULL && path[0] != '/') {
        lacks = "has a relative path, which the working folder does not lead to";
        char *here = getcwd(NULL, 0);
        store->path = here != NULL ? join(here, path) : NULL;
        free(here);
        gen_free(path);
    } else {
        store->path = path;
    }
    if (store->path == NULL) {
        gen_store_warn(store, lacks, errno);
        return;
    }
    int error = open_root(store);
    if (error != 0)
        gen_store_warn(store, "cannot be used in", error);
}

void gen_store_close(struct gen_store *store)
{
    uint64_t removed;
    struct gen_refusal refusal = { 0 };
    if (store->fd >= 0 && store->commits != atomic_load(&commits))
        gen_store_trim(store, gen_store_limit(store), KEEP_SECONDS, &removed, &refusal);
    if (refusal.count > 0)
        gen_log(&store->log, GEN_LOG_WARNING,
                "the cache %s cannot be kept within its size: cannot %s %s: %s", store->path,
                refusal.what, refusal.name, strerror(refusal.error));
    if (store->fd >= 0)
        close(store->fd);
    gen_free(store->path);
    *store = (struct gen_store){ .fd = -1 };
}

char *gen_entry_path(const struct gen_store *store, const struct gen_entry *entry, const char *file)
{
    struct buf path = { 0 };
    buf_printf(&path, "%s/%s/%s.%s%s%s", store->path, gen_kind_names[entry->kind], entry->stem,
               entry->hash, file != NULL ? "/" : "", file != NULL ? file : "");
    if (path.failed) {
        buf_free(&path);
        return NULL;
    }
    return path.data;
}

bool gen_is_entry(const char *name)
{
    const char *dot = strrchr(name, '.');
    return dot != NULL && dot != name && strlen(dot) == 33 &&
           strspn(dot + 1, "0123456789abcdef") == 32;
}

/* ---- removing -------------------------------------------------------------------------------- */

static void remove_below(int parent, const char *name, int depth)
{
    if (unlinkat(parent, name, 0) == 0 || errno == ENOENT || depth == 0)
        return;
    int fd = openat(parent, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    DIR *dir = fd >= 0 ? fdopendir(fd) : NULL;
    if (dir == NULL) {
        if (fd >= 0)
            close(fd);
        return;
    }
    struct dirent *entry;
    while ((entry = readdir(dir)) != NULL)
        if (strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0)
            remove_below(fd, entry->d_name, depth - 1);
    closedir(dir);
    unlinkat(parent, name, AT_REMOVEDIR);
}

void gen_remove_tree(int parent, const char *name)
{
    remove_below(parent, name, 4);
}

/* ---- reading --------------------------------------------------------------------------------- */

/* The whole regular file, with a NUL behind it, as heap memory; NULL with errno set. */
static char *read_file(int folder, const char *name, size_t *size)
{
    int fd = openat(folder, name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    if (fd < 0)
        return NULL;
    struct stat info;
    char *data = NULL;
    int error = fstat(fd, &info) != 0 ? errno : 0;
    if (error == 0 && (!S_ISREG(info.st_mode) || !is_ours(&info) || info.st_size > FILE_BYTES_MAX))
        error = EPERM;
    if (error == 0 && (data = gen_realloc(NULL, (size_t)info.st_size + 1)) == NULL)
        error = ENOMEM;
    int64_t got = error == 0 ? gen_read_bytes(fd, data, (size_t)info.st_size) : 0;
    if (error == 0 && got != info.st_size)
        error = got < 0 ? errno : EIO;
    *size = error == 0 ? (size_t)got : 0;
    close(fd);
    if (error != 0) {
        gen_free(data);
        errno = error;
        return NULL;
    }
    data[*size] = '\0';
    return data;
}

static bool is_file_name(const char *name)
{
    return name[0] != '\0' && name[0] != '/' && name[0] != '.' && strstr(name, "..") == NULL;
}

/* Checks the file of one line of sums: "<hash> <bytes> <name>". This and the next two set errno if
 * they fail: 0 = not as it was written, else why it cannot be read. */
static bool check_line(int folder, const char *line, gen_take take, void *user)
{
    char hash[33], name[FILE_NAME_MAX], actual[33];
    unsigned long long bytes;
    errno = 0;
    if (sscanf(line, "%32s %llu %299s", hash, &bytes, name) != 3 || !is_file_name(name))
        return false;
    size_t size = 0;
    char *data = read_file(folder, name, &size);
    if (data == NULL)
        return false;
    gen_hash(data, size, actual);
    bool good = size == bytes && strcmp(hash, actual) == 0;
    if (good && take != NULL)
        take(user, name, data, size);
    else
        gen_free(data);
    errno = 0;
    return good;
}

/* Checks sums itself (its last line is "end <hash of the lines above>") and all files that it
 * names. */
static bool check_sums(int folder, gen_take take, void *user)
{
    size_t size = 0;
    char *text = read_file(folder, SUMS, &size);
    if (text == NULL)
        return false;
    char *last = text, hash[33], wanted[33];
    for (char *at = text; (at = strstr(at, "\nend ")) != NULL; at++)
        last = at + 1;
    gen_hash(text, (size_t)(last - text), hash);
    errno = 0;
    bool good = sscanf(last, "end %32s", wanted) == 1 && strcmp(hash, wanted) == 0;
    for (char *line = text; good && line < last;) {
        char *end = strchr(line, '\n');
        *end = '\0';
        good = check_line(folder, line, take, user);
        line = end + 1;
    }
    int error = errno;
    gen_free(text);
    errno = error;
    return good;
}

static bool equals_key(int folder, const struct gen_entry *entry)
{
    size_t size = 0;
    char *key = read_file(folder, key_files[entry->kind], &size);
    if (key == NULL)
        return false;
    bool equal = size == entry->key_bytes && memcmp(key, entry->key, entry->key_bytes) == 0;
    gen_free(key);
    errno = 0;
    return equal;
}

/* An entry counts as used when its sums was touched. */
static void touch(int folder)
{
    struct stat info;
    if (fstatat(folder, SUMS, &info, AT_SYMLINK_NOFOLLOW) == 0 &&
        time(NULL) - info.st_mtime >= TOUCH_SECONDS)
        (void)utimensat(folder, SUMS, NULL, AT_SYMLINK_NOFOLLOW);
}

/* The descriptor of an entry's folder; -1 with ENOENT: there is none. */
static int open_entry(const struct gen_store *store, enum gen_kind kind, const char *name)
{
    int parent = open_folder(store->fd, gen_kind_names[kind]);
    if (parent < 0)
        return -1;
    int fd = open_folder(parent, name), error = errno;
    close(parent);
    errno = error;
    return fd;
}

static void entry_name(const struct gen_entry *entry, char name[FILE_NAME_MAX])
{
    snprintf(name, FILE_NAME_MAX, "%s.%s", entry->stem, entry->hash);
}

/* An entry without a file that it should have is as damaged as one with a wrong one. */
static enum gen_found close_damaged(int fd, int error)
{
    close(fd);
    errno = error == ENOENT ? 0 : error;
    return GEN_DAMAGED;
}

enum gen_found gen_entry_find(const struct gen_store *store, const struct gen_entry *entry,
                              gen_take take, void *user)
{
    if (store->fd < 0)
        return GEN_MISSING;
    char name[FILE_NAME_MAX];
    entry_name(entry, name);
    int fd = open_entry(store, entry->kind, name);
    if (fd < 0)
        return errno == ENOENT ? GEN_MISSING : GEN_DAMAGED;
    if (!equals_key(fd, entry) || !check_sums(fd, take, user))
        return close_damaged(fd, errno);
    touch(fd);
    close(fd);
    return GEN_FOUND;
}

enum gen_found gen_entry_verify(const struct gen_store *store, enum gen_kind kind, const char *name)
{
    int fd = open_entry(store, kind, name);
    if (fd < 0)
        return errno == ENOENT ? GEN_MISSING : GEN_DAMAGED;
    if (!check_sums(fd, NULL, NULL))
        return close_damaged(fd, errno);
    close(fd);
    return GEN_FOUND;
}

void gen_entry_log_damage(const struct gen_store *store, const struct gen_entry *entry, int error)
{
    static const char *const words[GEN_KIND_COUNT] = { "kernel", "bundle", "failure" };
    if (error == 0)
        gen_log(&store->log, GEN_LOG_INFO, "the cached %s %s.%s is damaged: it is rebuilt",
                words[entry->kind], entry->stem, entry->hash);
    else
        gen_log(&store->log, GEN_LOG_INFO,
                "the cached %s %s/%s/%s.%s cannot be read (%s): it is built again",
                words[entry->kind], store->path, gen_kind_names[entry->kind], entry->stem,
                entry->hash, strerror(error));
}

/* ---- writing --------------------------------------------------------------------------------- */

static int make_inside(const struct gen_store *store, const char *name)
{
    return mkdirat(store->fd, name, 0700) == 0 || errno == EEXIST ? 0 : errno;
}

int gen_writer_begin(struct gen_writer *writer, const struct gen_store *store,
                     const struct gen_entry *entry)
{
    *writer = (struct gen_writer){ .store = store, .entry = entry, .fd = -1 };
    if (store->fd < 0)
        return ENOENT;
    int error = make_inside(store, gen_kind_names[entry->kind]);
    if (error != 0)
        return error;
    struct buf path = { 0 };
    buf_printf(&path, "%s/%s/" TEMPORARY "XXXXXX", store->path, gen_kind_names[entry->kind]);
    if (path.failed || mkdtemp(path.data) == NULL) {
        error = path.failed ? ENOMEM : errno;
        buf_free(&path);
        return error;
    }
    writer->path = path.data;
    writer->fd = open(writer->path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (writer->fd < 0)
        return errno;
    return gen_writer_put(writer, key_files[entry->kind], entry->key, entry->key_bytes);
}

static void add_sum(struct gen_writer *writer, const char *file, const void *data, size_t size)
{
    char hash[33];
    gen_hash(data, size, hash);
    buf_printf(&writer->sums, "%s %zu %s\n", hash, size, file);
}

int gen_writer_put(struct gen_writer *writer, const char *file, const void *data, size_t size)
{
    add_sum(writer, file, data, size);
    return gen_write_file(writer->fd, file, 0600, data, size);
}

int gen_writer_adopt(struct gen_writer *writer, const char *file)
{
    size_t size = 0;
    char *data = read_file(writer->fd, file, &size);
    if (data == NULL)
        return errno;
    add_sum(writer, file, data, size);
    gen_free(data);
    return 0;
}

/* Moves our folder to `name`, or, if something is there, exchanges the two: what was there is
 * removed with the temporary folder. */
static int replace(struct gen_writer *writer, int parent, const char *name)
{
    const char *temporary = strrchr(writer->path, '/') + 1;
    if (renameat2(parent, temporary, parent, name, RENAME_EXCHANGE) == 0)
        return 0;
    if (errno != EINVAL && errno != ENOSYS)
        return errno;
    char aside[64];
    snprintf(aside, sizeof(aside), TEMPORARY "old.%s", temporary + strlen(TEMPORARY));
    if (renameat(parent, name, parent, aside) != 0 && errno != ENOENT)
        return errno;
    int error = renameat(parent, temporary, parent, name) == 0 ? 0 : errno;
    gen_remove_tree(parent, aside);
    return error;
}

static int put_in_place(struct gen_writer *writer, int parent)
{
    char name[FILE_NAME_MAX];
    entry_name(writer->entry, name);
    const char *temporary = strrchr(writer->path, '/') + 1;
    int error = 0;
    for (int tries = 0; tries < 16; tries++) {
        if (renameat(parent, temporary, parent, name) == 0) {
            gen_free(writer->path);
            writer->path = NULL;
            return 0;
        }
        error = errno;
        if (error != ENOTEMPTY && error != EEXIST && error != ENOTDIR)
            return error;
        if (gen_entry_find(writer->store, writer->entry, NULL, NULL) == GEN_FOUND)
            return 0; /* the other's is as good as ours */
        error = replace(writer, parent, name);
        if (error != ENOENT) /* else it went away meanwhile */
            return error;
    }
    return error;
}

int gen_writer_commit(struct gen_writer *writer)
{
    char hash[33];
    if (!writer->sums.failed)
        gen_hash(writer->sums.data, writer->sums.size, hash);
    buf_printf(&writer->sums, "end %s\n", hash);
    if (writer->sums.failed)
        return ENOMEM;
    int error = gen_write_file(writer->fd, SUMS, 0600, writer->sums.data, writer->sums.size);
    if (error == 0)
        error = gen_sync_folder(writer->fd);
    if (error != 0)
        return error;
    int parent = open_folder(writer->store->fd, gen_kind_names[writer->entry->kind]);
    if (parent < 0)
        return errno;
    error = put_in_place(writer, parent);
    if (error == 0)
        error = gen_sync_folder(parent);
    if (error == 0)
        atomic_fetch_add(&commits, 1);
    close(parent);
    return error;
}

void gen_writer_abandon(struct gen_writer *writer)
{
    if (writer->fd >= 0)
        close(writer->fd);
    if (writer->path != NULL)
        gen_remove_tree(AT_FDCWD, writer->path);
    gen_free(writer->path);
    buf_free(&writer->sums);
    *writer = (struct gen_writer){ .fd = -1 };
}
