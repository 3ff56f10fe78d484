/*
 * files.c - text that comes from outside a session: files, embedded files, templates; and how bytes
 * get to the disk.
 *
 * In: a path or a name; out: NUL-terminated text in the session's arena, or one error that says
 * what is wrong with the file. Only regular files are read (a FIFO or a terminal would hang,
 * /dev/zero never end), and never more than a limit. Nothing is known here of what the text means.
 */
#include "gen/internal.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

const struct embedded_file *gen_embedded(const char *name)
{
    for (const struct embedded_file *file = gen_embedded_files; file->name != NULL; file++)
        if (strcmp(file->name, name) == 0)
            return file;
    return NULL;
}

/* What stat or open says, in the words of a person who has to mend it. */
static fp8gen_status fail_file(struct fp8gen *gen, const char *path, const char *why,
                               const char *hint)
{
    gen_report(gen, &(struct gen_diag){
                        .file = *path != '\0' ? path : "''", .message = why, .hint = hint });
    return FP8GEN_ERR_MACHINE;
}

static fp8gen_status fail_errno(struct fp8gen *gen, const char *path, const char *verb, int error)
{
    const char *why = arena_printf(&gen->arena, "cannot %s: %s", verb, strerror(error));
    return why == NULL ? gen_out_of_memory(gen) : fail_file(gen, path, why, NULL);
}

int64_t gen_read_bytes(int fd, char *data, size_t capacity)
{
    size_t size = 0;
    while (size < capacity) {
        ssize_t got = read(fd, data + size, capacity - size);
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0)
            return -1;
        if (got == 0)
            break;
        size += (size_t)got;
    }
    return (int64_t)size;
}

static int write_all(int fd, const char *data, size_t size)
{
    while (size > 0) {
        ssize_t n = write(fd, data, size);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            return n < 0 ? errno : EIO;
        data += n;
        size -= (size_t)n;
    }
    return 0;
}

int gen_write_file(int folder, const char *name, unsigned mode, const void *data, size_t size)
{
    int fd = openat(folder, name, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, mode);
    if (fd < 0)
        return errno;
    int error = write_all(fd, data, size);
    if (error == 0 && fsync(fd) != 0)
        error = errno;
    if (close(fd) != 0 && error == 0)
        error = errno;
    return error;
}

int gen_sync_folder(int fd)
{
    /* Some file systems cannot sync a folder and say EINVAL: nothing more can be done there. */
    return fsync(fd) != 0 && errno != EINVAL ? errno : 0;
}

static fp8gen_status fail_large(struct fp8gen *gen, const char *path, long long size, size_t limit)
{
    const char *why = arena_printf(
        &gen->arena, "the file is too large: %lld bytes; at most %zu are read", size, limit);
    return why == NULL ? gen_out_of_memory(gen) : fail_file(gen, path, why, "is this a spec file?");
}

static fp8gen_status read_open_file(struct fp8gen *gen, const char *path, int fd, size_t limit,
                                    struct gen_text *text)
{
    struct stat info;
    if (fstat(fd, &info) != 0)
        return fail_errno(gen, path, "read the file", errno);
    if (S_ISDIR(info.st_mode))
        return fail_file(gen, path, "this is a directory, not a file",
                         "name the spec file inside it");
    if (!S_ISREG(info.st_mode))
        return fail_file(gen, path, "this is not a regular file", NULL);
    if (info.st_size > (off_t)limit)
        return fail_large(gen, path, (long long)info.st_size, limit);

    /* One byte more than expected: a file that grows meanwhile is met as too large. */
    size_t capacity = (size_t)info.st_size + 1;
    char *data = arena_alloc(&gen->arena, capacity + 1);
    char *name = arena_copy(&gen->arena, path, strlen(path));
    if (data == NULL || name == NULL)
        return gen_out_of_memory(gen);
    int64_t size = gen_read_bytes(fd, data, capacity);
    if (size < 0)
        return fail_errno(gen, path, "read the file", errno);
    if ((size_t)size == capacity)
        return fail_file(gen, path, "the file changes while it is read", NULL);
    data[size] = '\0';
    *text = (struct gen_text){ .name = name, .data = data, .size = (size_t)size };
    return FP8GEN_OK;
}

fp8gen_status gen_read_file(struct fp8gen *gen, const char *path, size_t limit,
                            struct gen_text *text)
{
    /* O_NONBLOCK: opening a FIFO without a writer must not hang; regular files do not care. */
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    if (fd < 0)
        return fail_errno(gen, path, "open the file", errno);
    fp8gen_status status = read_open_file(gen, path, fd, limit, text);
    close(fd);
    return status;
}

fp8gen_status gen_template(struct fp8gen *gen, const char *name, struct gen_text *text)
{
    enum { TEMPLATE_BYTES_MAX = 1 << 20 };
    if (gen->template_dir != NULL) {
        const char *path = arena_printf(&gen->arena, "%s/%s", gen->template_dir, name);
        if (path == NULL)
            return gen_out_of_memory(gen);
        return gen_read_file(gen, path, TEMPLATE_BYTES_MAX, text);
    }
    const struct embedded_file *file = gen_embedded(name);
    if (file == NULL)
        return gen_fail(gen, FP8GEN_ERR_INTERNAL, NULL, "there is no template '%s'", name);
    const char *shown = arena_printf(&gen->arena, "templates/%s", name);
    if (shown == NULL)
        return gen_out_of_memory(gen);
    *text =
        (struct gen_text){ .name = shown, .data = (const char *)file->data, .size = file->size };
    return FP8GEN_OK;
}
