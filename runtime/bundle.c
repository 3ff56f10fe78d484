/*
 * bundle.c - opening a bundle: files read and compared with the manifest, kernels loaded.
 *
 * Every file that the manifest lists is checked on every context, the host's too: a bundle that is
 * damaged says so where it is opened first. Kernels are loaded for this context's exact compute
 * capability and for none when the context is the host. After this nothing of the bundle is read
 * from disk again.
 */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "runtime/internal.h"

/* ---- arena ---- */

enum { ARENA_BLOCK = 256 * 1024, ARENA_ALIGN = 16 };

struct fp8_arena_block {
    struct fp8_arena_block *next;
    size_t used;
    size_t size;
    _Alignas(ARENA_ALIGN) unsigned char bytes[];
};

void *fp8_arena_allocate(struct fp8_arena *arena, size_t bytes)
{
    struct fp8_arena_block *block = arena->blocks;
    bytes = fp8_align_up(bytes ? bytes : 1, ARENA_ALIGN);
    if (!block || block->size - block->used < bytes) {
        size_t size = bytes > ARENA_BLOCK ? bytes : ARENA_BLOCK;
        struct fp8_arena_block *fresh = fp8_allocate(sizeof *fresh + size);
        if (!fresh)
            return NULL;
        fresh->size = size;
        fresh->next = block;
        arena->blocks = block = fresh;
    }
    void *memory = block->bytes + block->used;
    block->used += bytes;
    return memory;
}

char *fp8_arena_copy(struct fp8_arena *arena, const char *text)
{
    size_t size = strlen(text) + 1;
    char *copy = fp8_arena_allocate(arena, size);
    return copy ? memcpy(copy, text, size) : NULL;
}

void fp8_arena_release(struct fp8_arena *arena)
{
    while (arena->blocks) {
        struct fp8_arena_block *next = arena->blocks->next;
        fp8_release(arena->blocks);
        arena->blocks = next;
    }
}

/* ---- files ---- */

static const off_t file_limit = (off_t)1 << 30;

static char *join(const char *folder, const char *name)
{
    size_t size = strlen(folder) + strlen(name) + 2;
    char *path = fp8_allocate(size);
    if (path)
        snprintf(path, size, "%s/%s", folder, name);
    return path;
}

static fp8_status read_open_file(int file, const char *path, char **data, size_t *size)
{
    struct stat info;
    if (fstat(file, &info) != 0 || !S_ISREG(info.st_mode) || info.st_size > file_limit)
        return fp8_fail(FP8_ERR_BUNDLE, "%s is no readable file of a bundle", path);
    const size_t length = (size_t)info.st_size;
    *data = fp8_allocate(length + 1);
    if (!*data)
        return fp8_fail_memory(path, length + 1);
    for (*size = 0; *size < length;) {
        const ssize_t n = read(file, *data + *size, length - *size);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            return fp8_fail(FP8_ERR_BUNDLE, "%s could be read up to byte %zu of %zu only", path,
                            *size, length);
        *size += (size_t)n;
    }
    return FP8_OK;
}

/* The whole file, with a NUL behind it. *data is set even on failure: release it. */
static fp8_status read_file(const char *path, char **data, size_t *size)
{
    *data = NULL;
    /* Opening a FIFO without a writer must not hang; regular files do not care. */
    const int file = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    if (file < 0)
        return fp8_fail(FP8_ERR_BUNDLE, "%s cannot be opened: %s; is this the folder of a bundle?",
                        path, strerror(errno));
    fp8_status status = read_open_file(file, path, data, size);
    close(file);
    return status;
}

static fp8_status check_cubin(const char *path, const struct fp8_cubin *cubin, const char *data,
                              size_t size)
{
    if ((int64_t)size != cubin->bytes)
        return fp8_fail(FP8_ERR_BUNDLE,
                        "%s has %zu bytes, the manifest says %" PRId64
                        ": it is truncated or of another build; rebuild the bundle",
                        path, size, cubin->bytes);
    char text[33];
    fp8_hash_text(data, size, text);
    if (strcmp(text, cubin->xxh128) != 0)
        return fp8_fail(
            FP8_ERR_BUNDLE,
            "%s was altered: its xxh128 is %s, the manifest says %.40s; rebuild the bundle", path,
            text, cubin->xxh128);
    return FP8_OK;
}

/* ---- kernels ---- */

/* The manifest's arch for this device, NULL if it has none: "sm_90a" before "sm_90". */
static const char *choose_arch(const struct fp8_manifest *manifest, int32_t arch)
{
    for (int specific = 1; specific >= 0; specific--) {
        char wanted[32];
        snprintf(wanted, sizeof wanted, "sm_%d%s", arch, specific ? "a" : "");
        for (int i = 0; i < manifest->arch_count; i++) {
            if (strcmp(manifest->archs[i], wanted) == 0)
                return manifest->archs[i];
        }
    }
    return NULL;
}

static fp8_status no_arch(const struct fp8_bundle *bundle)
{
    const struct fp8_manifest *manifest = &bundle->manifest;
    const struct fp8_context *context = bundle->context;
    char list[160] = "";
    size_t at = 0;
    for (int i = 0; i < manifest->arch_count && at + 1 < sizeof list; i++) {
        int length =
            snprintf(list + at, sizeof list - at, "%s%s", i ? ", " : "", manifest->archs[i]);
        at += length > 0 ? (size_t)length : 0;
    }
    return fp8_fail(
        FP8_ERR_ARCH,
        "the bundle %s has kernels for %s, but device %d (%s) has compute capability %d.%d; "
        "rebuild it with --arch sm_%da",
        bundle->path, manifest->arch_count ? list : "no GPU", context->device, context->name,
        context->arch / 10, context->arch % 10, context->arch);
}

/* A driver that is older than the toolkit cannot load its cubins: the sentence gets both
 * versions. */
static fp8_status load_kernel(struct fp8_bundle *bundle, struct fp8_kernel *kernel,
                              const char *image)
{
    const struct fp8_context *context = bundle->context;
    fp8_status status = fp8_kernel_load(context, kernel, image);
    if (status != FP8_ERR_CUDA || !bundle->manifest.nvrtc)
        return status;
    char sentence[512];
    snprintf(sentence, sizeof sentence, "%s", fp8_last_error());
    int major = context->driver_version / 1000, minor = context->driver_version % 1000 / 10;
    return fp8_fail(
        status,
        "%s; the cubin was compiled by NVRTC %s, the driver is for CUDA %d.%d: where the "
        "driver is the older one, update it or build with an older NVRTC",
        sentence, bundle->manifest.nvrtc, major, minor);
}

static fp8_status open_cubin(struct fp8_bundle *bundle, struct fp8_kernel *kernel,
                             const struct fp8_cubin *cubin, bool load)
{
    char *data = NULL;
    size_t size = 0;
    char *path = join(bundle->path, cubin->file);
    if (!path)
        return fp8_fail_memory("a path", strlen(bundle->path));
    double start = fp8_clock();
    fp8_status status = read_file(path, &data, &size);
    if (status == FP8_OK)
        status = check_cubin(path, cubin, data, size);
    double read = fp8_clock();
    if (status == FP8_OK && load)
        status = load_kernel(bundle, kernel, data);
    bundle->seconds.files += read - start;
    bundle->seconds.kernels += fp8_clock() - read;
    fp8_release(data);
    fp8_release(path);
    return status;
}

/* The kernel before this one that has the same cubin and entry, NULL if there is none. */
static const struct fp8_kernel *find_twin(const struct fp8_manifest *manifest, int index,
                                          const struct fp8_cubin *cubin)
{
    const struct fp8_kernel *kernel = &manifest->kernels[index];
    for (int i = 0; i < index; i++) {
        const struct fp8_kernel *other = &manifest->kernels[i];
        for (int j = 0; j < other->cubin_count; j++) {
            const struct fp8_cubin *its = &other->cubins[j];
            if (strcmp(its->file, cubin->file) == 0 && strcmp(its->xxh128, cubin->xxh128) == 0 &&
                its->bytes == cubin->bytes && strcmp(other->entry, kernel->entry) == 0 &&
                other->shared_bytes == kernel->shared_bytes)
                return other;
        }
    }
    return NULL;
}

static fp8_status open_kernels(struct fp8_bundle *bundle)
{
    const struct fp8_manifest *manifest = &bundle->manifest;
    const char *arch = NULL;
    if (!bundle->context->is_host) {
        arch = choose_arch(manifest, bundle->context->arch);
        if (!arch)
            return no_arch(bundle);
    }
    for (int i = 0; i < manifest->kernel_count; i++) {
        struct fp8_kernel *kernel = &manifest->kernels[i];
        for (int j = 0; j < kernel->cubin_count; j++) {
            const struct fp8_cubin *cubin = &kernel->cubins[j];
            const struct fp8_kernel *twin = find_twin(manifest, i, cubin);
            bool load = arch && strcmp(cubin->arch, arch) == 0;
            if (!twin)
                FP8_TRY(open_cubin(bundle, kernel, cubin, load));
            else if (load)
                FP8_TRY(fp8_kernel_share(bundle->context, kernel, twin));
        }
    }
    return FP8_OK;
}

/* ---- the bundle ---- */

static fp8_status open_into(struct fp8_bundle *bundle, const char *path)
{
    size_t length = 0;
    const double start = fp8_clock();
    bundle->path = fp8_arena_copy(&bundle->arena, path);
    if (!bundle->path)
        return fp8_fail_memory("a bundle", strlen(path));
    char *file = join(path, FP8_BUNDLE_MANIFEST);
    if (!file)
        return fp8_fail_memory("a path", strlen(path));
    fp8_status status = read_file(file, &bundle->text, &length);
    if (status == FP8_OK)
        status = fp8_manifest_parse(file, bundle->text, length, &bundle->arena, &bundle->manifest);
    fp8_release(file);
    bundle->seconds.manifest = fp8_clock() - start;
    if (status != FP8_OK)
        return status;
    struct fp8_uncaptured entered;
    FP8_TRY(fp8_uncaptured_enter(bundle->context, "bundle_open", NULL, &entered));
    status = open_kernels(bundle);
    fp8_uncaptured_leave(bundle->context, &entered);
    return status;
}

fp8_status fp8_bundle_open(fp8_context *context, const char *path, fp8_bundle **bundle)
{
    if (!bundle)
        return fp8_fail(FP8_ERR_ARGUMENT, "bundle_open: bundle is NULL");
    *bundle = NULL;
    if (!context || !path)
        return fp8_fail(FP8_ERR_ARGUMENT, "bundle_open: %s is NULL", context ? "path" : "context");
    struct fp8_bundle *made = fp8_allocate(sizeof *made);
    if (!made)
        return fp8_report(context, fp8_fail_memory("a bundle", sizeof *made));
    made->context = context;
    fp8_status status = open_into(made, path);
    if (status != FP8_OK) {
        fp8_bundle_close(made);
        return fp8_report(context, status);
    }
    fp8_log_write(&context->log, FP8_LOG_INFO,
                  "bundle %s: %d layers, %d kernels (manifest %.2f ms, files %.2f ms, loading %.2f "
                  "ms)",
                  path, made->manifest.layer_count, made->manifest.kernel_count,
                  1e3 * made->seconds.manifest, 1e3 * made->seconds.files,
                  1e3 * made->seconds.kernels);
    *bundle = made;
    return FP8_OK;
}

void fp8_bundle_close(fp8_bundle *bundle)
{
    if (!bundle)
        return;
    struct fp8_uncaptured entered;
    if (!bundle->context->is_host && fp8_release_enter(bundle->context, &entered)) {
        for (int i = 0; i < bundle->manifest.kernel_count; i++)
            fp8_kernel_unload(bundle->context, &bundle->manifest.kernels[i]);
        fp8_uncaptured_leave(bundle->context, &entered);
    }
    fp8_release(bundle->text);
    fp8_arena_release(&bundle->arena);
    fp8_release(bundle);
}

int32_t fp8_bundle_layer_count(const fp8_bundle *bundle)
{
    return bundle ? bundle->manifest.layer_count : 0;
}

const char *fp8_bundle_layer_name(const fp8_bundle *bundle, int32_t index)
{
    if (!bundle || index < 0 || index >= bundle->manifest.layer_count)
        return NULL;
    return bundle->manifest.layers[index].name;
}

const char *fp8_bundle_manifest(const fp8_bundle *bundle)
{
    return bundle ? bundle->text : "";
}
