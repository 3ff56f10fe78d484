/*
 * bundle_dir.c - the folder of a bundle: written aside, synced, then renamed into its place.
 *
 * In: a target path, named files. Out: the whole new bundle, or the old state and a sentence. A
 * target that exists is exchanged with the new folder in one step (RENAME_EXCHANGE), so that a
 * reader sees the old bundle or the new one; where the file system cannot do that, the old one is
 * moved aside first.
 *
 * The new folder is locked while it is written (flock), so that the next build of the same target
 * can tell what a killed one left and removes it.
 *
 * What is removed is only ever what a bundle consists of: manifest.json and kernels/\*.cubin. A
 * folder with anything else in it is never replaced. Knows nothing of what the files mean beyond
 * "format".
 */
#include "gen/bundle_dir.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <libgen.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "runtime/bundle_format.h"

#define CUBIN_SUFFIX ".cubin"

enum { STRANGER_SIZE = 300 };

static fp8gen_status fail_system(struct fp8gen *gen, const char *what, const char *path, int error)
{
    const char *hint = NULL;
    if (error == ENOSPC || error == EDQUOT)
        hint = "free some space, or name a folder on another disk";
    else if (error == EACCES || error == EPERM || error == EROFS)
        hint = "name a folder that you may write to";
    return gen_fail(gen, FP8GEN_ERR_MACHINE, hint, "cannot %s '%s': %s", what, path,
                    strerror(error));
}

/* ---- what a folder holds --------------------------------------------------------------------- */

static bool has_suffix(const char *name, const char *suffix)
{
    size_t length = strlen(name), tail = strlen(suffix);
    return length > tail && strcmp(name + length - tail, suffix) == 0;
}

static bool belongs(const char *name, bool in_kernels)
{
    if (in_kernels)
        return has_suffix(name, CUBIN_SUFFIX);
    return strcmp(name, FP8_BUNDLE_MANIFEST) == 0 || strcmp(name, FP8_BUNDLE_KERNEL_DIR) == 0;
}

static bool is_dot(const char *name)
{
    return strcmp(name, ".") == 0 || strcmp(name, "..") == 0;
}

/* Counts the entries of a folder and copies the first that is no part of a bundle into stranger. */
static int survey(const char *path, bool in_kernels, int *entries, char stranger[STRANGER_SIZE])
{
    DIR *dir = opendir(path);
    if (dir == NULL)
        return errno;
    struct dirent *entry;
    while ((entry = readdir(dir)) != NULL) {
        if (is_dot(entry->d_name))
            continue;
        ++*entries;
        if (!belongs(entry->d_name, in_kernels) && stranger[0] == '\0')
            snprintf(stranger, STRANGER_SIZE, "%s%s", in_kernels ? FP8_BUNDLE_KERNEL_DIR "/" : "",
                     entry->d_name);
    }
    closedir(dir);
    return 0;
}

static bool has_manifest(struct fp8gen *gen, const char *path)
{
    const char *file = arena_printf(&gen->arena, "%s/%s", path, FP8_BUNDLE_MANIFEST);
    if (file == NULL)
        return false;
    json_t *manifest = json_load_file(file, 0, NULL);
    const char *format = json_string_value(json_object_get(manifest, "format"));
    bool good = format != NULL && strcmp(format, FP8_BUNDLE_FORMAT) == 0;
    json_decref(manifest);
    return good;
}

/* The target exists: may it be replaced? */
static fp8gen_status check_target(struct fp8gen *gen, const char *target)
{
    static const char hint[] = "name another folder, or remove this one yourself";
    struct stat info;
    if (stat(target, &info) != 0)
        return errno == ENOENT ? FP8GEN_OK : fail_system(gen, "look at", target, errno);
    if (!S_ISDIR(info.st_mode))
        return gen_fail(gen, FP8GEN_ERR_ARGUMENT, hint, "'%s' exists and is not a folder", target);
    int entries = 0, kernels = 0;
    char stranger[STRANGER_SIZE] = "";
    int error = survey(target, false, &entries, stranger);
    if (error != 0)
        return fail_system(gen, "look into", target, error);
    if (entries == 0)
        return FP8GEN_OK;
    if (!has_manifest(gen, target))
        return gen_fail(gen, FP8GEN_ERR_ARGUMENT, hint,
                        "'%s' exists and is not a bundle: it has no %s of format %s", target,
                        FP8_BUNDLE_MANIFEST, FP8_BUNDLE_FORMAT);
    const char *inner = arena_printf(&gen->arena, "%s/%s", target, FP8_BUNDLE_KERNEL_DIR);
    if (inner == NULL)
        return gen_out_of_memory(gen);
    error = survey(inner, true, &kernels, stranger);
    if (error != 0 && error != ENOENT)
        return fail_system(gen, "look into", inner, error);
    if (stranger[0] != '\0')
        return gen_fail(gen, FP8GEN_ERR_ARGUMENT, hint,
                        "'%s' holds '%s', which is no part of a bundle and would be lost", target,
                        stranger);
    return FP8GEN_OK;
}

/* ---- removing -------------------------------------------------------------------------------- */

static void remove_entries(int folder, bool in_kernels)
{
    int copy = dup(folder);
    DIR *dir = copy >= 0 ? fdopendir(copy) : NULL;
    if (dir == NULL) {
        if (copy >= 0)
            close(copy);
        return;
    }
    struct dirent *entry;
    while ((entry = readdir(dir)) != NULL)
        if (!is_dot(entry->d_name) && belongs(entry->d_name, in_kernels))
            unlinkat(folder, entry->d_name, 0);
    closedir(dir);
}

/* Removes a bundle's files and then the folders, which stay if anything else is in them. */
static void remove_bundle(const char *path)
{
    int flags = O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW;
    int top = open(path, flags);
    if (top < 0)
        return;
    int inner = openat(top, FP8_BUNDLE_KERNEL_DIR, flags);
    if (inner >= 0) {
        remove_entries(inner, true);
        close(inner);
        unlinkat(top, FP8_BUNDLE_KERNEL_DIR, AT_REMOVEDIR);
    }
    remove_entries(top, false);
    close(top);
    rmdir(path);
}

/* Before the temporary folder is made, renamed or removed, and after. */
static void hold(const struct gen_bundle_dir *dir)
{
    if (dir->guard != NULL)
        dir->guard(dir->guard_user, 1, NULL);
}

static void let_go(const struct gen_bundle_dir *dir)
{
    if (dir->guard != NULL)
        dir->guard(dir->guard_user, 0, dir->temporary);
}

/* ---- begin ----------------------------------------------------------------------------------- */

/* Splits the target into folder and name; resolves a symbolic link to where it points. */
static fp8gen_status split_target(struct fp8gen *gen, const char *target,
                                  struct gen_bundle_dir *dir, const char **base)
{
    char *real = realpath(target, NULL);
    const char *path = real != NULL ? real : target;
    dir->target = arena_copy(&gen->arena, path, strlen(path));
    char *for_parent = arena_copy(&gen->arena, path, strlen(path));
    char *for_base = arena_copy(&gen->arena, path, strlen(path));
    free(real);
    if (dir->target == NULL || for_parent == NULL || for_base == NULL)
        return gen_out_of_memory(gen);
    dir->parent = dirname(for_parent);
    *base = basename(for_base);
    if (strcmp(*base, "/") == 0 || is_dot(*base))
        return gen_fail(gen, FP8GEN_ERR_ARGUMENT, "name a folder of its own for the bundle",
                        "'%s' cannot be the folder of a bundle", target);
    return FP8GEN_OK;
}

/* ---- what killed builds left ----------------------------------------------------------------- */

enum { RANDOM_LENGTH = 6 }; /* of mkdtemp */

/* ".<base>.XXXXXX" */
static bool is_temporary(const char *name, const char *base)
{
    size_t length = strlen(base);
    return name[0] == '.' && strncmp(name + 1, base, length) == 0 && name[length + 1] == '.' &&
           strlen(name) == length + 2 + RANDOM_LENGTH;
}

/* An open and locked folder; -1 if another process holds it, or it is none of ours. */
static int lock_folder(int parent, const char *name)
{
    struct stat info;
    int fd = openat(parent, name, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
    if (fd < 0)
        return -1;
    if (fstat(fd, &info) == 0 && info.st_uid == geteuid() && flock(fd, LOCK_EX | LOCK_NB) == 0)
        return fd;
    close(fd);
    return -1;
}

static void remove_left(struct gen_bundle_dir *dir, const char *base)
{
    DIR *parent = opendir(dir->parent);
    struct dirent *entry;
    while (parent != NULL && (entry = readdir(parent)) != NULL) {
        if (!is_temporary(entry->d_name, base))
            continue;
        int fd = lock_folder(dirfd(parent), entry->d_name);
        const char *path = arena_printf(&dir->gen->arena, "%s/%s", dir->parent, entry->d_name);
        if (fd >= 0 && path != NULL)
            remove_bundle(path);
        if (fd >= 0)
            close(fd);
    }
    if (parent != NULL)
        closedir(parent);
}

static void unlock(struct gen_bundle_dir *dir)
{
    if (dir->locked) {
        (void)flock(dir->lock, LOCK_UN); /* a forked child may have a copy of the descriptor */
        close(dir->lock);
    }
    dir->locked = false;
}

/* False if another build has taken the new folder for left. A file system without locks locks
 * nothing, and then nothing can be told to be left either. */
static bool lock_temporary(struct gen_bundle_dir *dir)
{
    struct stat info;
    dir->lock = open(dir->temporary, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    dir->locked = dir->lock >= 0;
    bool taken = dir->locked && flock(dir->lock, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK;
    return !taken && stat(dir->temporary, &info) == 0;
}

static int make_temporary(struct gen_bundle_dir *dir, const char *base)
{
    for (int tries = 0; tries < 16; tries++) {
        char *path = arena_printf(&dir->gen->arena, "%s/.%s.XXXXXX", dir->parent, base);
        if (path == NULL)
            return ENOMEM;
        if (mkdtemp(path) == NULL)
            return errno;
        dir->temporary = path;
        if (lock_temporary(dir))
            return 0;
        unlock(dir);
        dir->temporary = NULL;
    }
    return EBUSY;
}

fp8gen_status gen_bundle_begin(struct fp8gen *gen, const char *target, struct gen_bundle_dir *dir)
{
    const char *base = NULL;
    dir->gen = gen;
    fp8gen_status status = split_target(gen, target, dir, &base);
    if (status == FP8GEN_OK)
        status = check_target(gen, dir->target);
    if (status != FP8GEN_OK)
        return status;
    remove_left(dir, base);
    hold(dir);
    int error = make_temporary(dir, base);
    let_go(dir);
    if (error == ENOMEM)
        return gen_out_of_memory(gen);
    if (error != 0)
        return fail_system(gen, "make a folder in", dir->parent, error);
    const char *inner = arena_printf(&gen->arena, "%s/%s", dir->temporary, FP8_BUNDLE_KERNEL_DIR);
    if (inner == NULL)
        return gen_out_of_memory(gen);
    if (mkdir(inner, 0777) != 0)
        return fail_system(gen, "make the folder", inner, errno);
    return FP8GEN_OK;
}

void gen_bundle_abandon(struct gen_bundle_dir *dir)
{
    unlock(dir);
    if (dir->temporary == NULL)
        return;
    hold(dir);
    remove_bundle(dir->temporary);
    dir->temporary = NULL;
    let_go(dir);
}

/* ---- write ----------------------------------------------------------------------------------- */

fp8gen_status gen_bundle_write(struct gen_bundle_dir *dir, const char *name, const void *data,
                               size_t size)
{
    const char *path = arena_printf(&dir->gen->arena, "%s/%s", dir->temporary, name);
    if (path == NULL)
        return gen_out_of_memory(dir->gen);
    int error = gen_write_file(AT_FDCWD, path, 0666, data, size);
    return error == 0 ? FP8GEN_OK : fail_system(dir->gen, "write", path, error);
}

/* ---- commit ---------------------------------------------------------------------------------- */

static int sync_folder(const char *path)
{
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0)
        return errno;
    int error = gen_sync_folder(fd);
    close(fd);
    return error;
}

/* mkdtemp made the folder private; a bundle has the rights that mkdir gives: those of the folder in
 * it. (To ask for the umask is to change it, for all threads.) */
static int open_rights(const char *path, const char *inner)
{
    struct stat info;
    return stat(inner, &info) != 0 || chmod(path, info.st_mode & 0777) != 0 ? errno : 0;
}

/* Without RENAME_EXCHANGE: moves the old one aside, and back if the new one cannot take its
 * place. */
static int replace_in_two_steps(struct gen_bundle_dir *dir)
{
    const char *aside = arena_printf(&dir->gen->arena, "%s.old", dir->temporary);
    if (aside == NULL)
        return ENOMEM;
    if (rename(dir->target, aside) != 0)
        return errno;
    if (rename(dir->temporary, dir->target) != 0) {
        int error = errno;
        (void)rename(aside, dir->target);
        return error;
    }
    dir->temporary = aside; /* the old one, to be removed */
    return 0;
}

/* Puts the new folder in place; what is in `temporary` afterwards is the old one, if there was
 * one. */
static int put_in_place(struct gen_bundle_dir *dir)
{
    for (int tries = 0; tries < 16; tries++) {
        if (rename(dir->temporary, dir->target) == 0) { /* nothing there, or an empty folder */
            dir->temporary = NULL;
            return 0;
        }
        if (errno != ENOTEMPTY && errno != EEXIST)
            return errno;
        if (renameat2(AT_FDCWD, dir->temporary, AT_FDCWD, dir->target, RENAME_EXCHANGE) == 0)
            return 0;
        if (errno == EINVAL || errno == ENOSYS)
            return replace_in_two_steps(dir);
        if (errno != ENOENT) /* else another build took it away meanwhile */
            return errno;
    }
    return EBUSY;
}

fp8gen_status gen_bundle_commit(struct gen_bundle_dir *dir)
{
    struct fp8gen *gen = dir->gen;
    const char *inner = arena_printf(&gen->arena, "%s/%s", dir->temporary, FP8_BUNDLE_KERNEL_DIR);
    if (inner == NULL)
        return gen_out_of_memory(gen);
    int error = open_rights(dir->temporary, inner);
    if (error == 0)
        error = sync_folder(inner);
    if (error == 0)
        error = sync_folder(dir->temporary);
    if (error != 0)
        return fail_system(gen, "finish", dir->temporary, error);
    fp8gen_status status = check_target(gen, dir->target); /* it may have changed meanwhile */
    if (status != FP8GEN_OK)
        return status;
    hold(dir);
    error = put_in_place(dir);
    let_go(dir);
    if (error != 0)
        return fail_system(gen, "put the bundle in place at", dir->target, error);
    error = sync_folder(dir->parent);
    return error == 0 ? FP8GEN_OK : fail_system(gen, "finish", dir->parent, error);
}
