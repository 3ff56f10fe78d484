/*
 * jit.c - bundles made when a program asks for them: from the cache, or built into it.
 *
 * In: the text of a spec, or the runtime's description of a layer. Out: the path of a bundle, which
 * the runtime opens like any other. A bundle is a pure function of the spec, the generator with its
 * Lua and its templates, NVRTC's version and the archs; these are its key, so that a warm call
 * evaluates no Lua and expands no template. Kernels have keys of their own (cache.c): what two
 * bundles share is compiled once.
 *
 * Where the cache cannot be written, a bundle is this process's alone (jit_private.c). Opens no
 * device.
 */
#include "gen/cache.h"

#include <dirent.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/bundle_format.h"

#define STEM "bundle"

static const fp8gen_jit_options default_options = FP8GEN_JIT_OPTIONS_INIT;

/* ---- errors ---------------------------------------------------------------------------------- */

static _Thread_local char last_error[8192];

const char *fp8gen_jit_error(void)
{
    return last_error;
}

fp8gen_status gen_jit_fail(fp8gen_status status, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    vsnprintf(last_error, sizeof(last_error), format, args);
    va_end(args);
    return status;
}

static fp8gen_status fail_memory(void)
{
    return gen_jit_fail(FP8GEN_ERR_MACHINE, "%s", GEN_OUT_OF_MEMORY);
}

/* Closes a session and keeps what it said. */
static fp8gen_status close_session(fp8gen *gen, fp8gen_status status)
{
    if (status != FP8GEN_OK)
        (void)gen_jit_fail(status, "%s", gen != NULL ? fp8gen_diagnostics(gen) : GEN_OUT_OF_MEMORY);
    fp8gen_close(gen);
    return status;
}

/* ---- the key --------------------------------------------------------------------------------- */

struct request {
    const fp8gen_jit_options *options;
    const char *name;
    const char *spec;
    size_t length;
    const char *archs;
    struct gen_store store;
};

/* The version of this process's NVRTC, asked for once. */
static fp8gen_status nvrtc_version(char version[32])
{
    static char known[32];
    gen_shared_lock();
    memcpy(version, known, sizeof(known));
    gen_shared_unlock();
    if (version[0] != '\0')
        return FP8GEN_OK;
    fp8gen *gen = NULL;
    const char *path, *found;
    fp8gen_status status = fp8gen_open(NULL, &gen);
    if (status == FP8GEN_OK)
        status = fp8gen_nvrtc(gen, &path, &found);
    if (status == FP8GEN_OK) {
        snprintf(version, sizeof(known), "%s", found);
        gen_shared_lock();
        memcpy(known, version, sizeof(known));
        gen_shared_unlock();
    }
    return close_session(gen, status);
}

/* Of all built-in files, made once; false: no memory, the next call tries again. */
static bool hash_embedded(char hash[33])
{
    static char known[33];
    gen_shared_lock();
    memcpy(hash, known, sizeof(known));
    gen_shared_unlock();
    if (hash[0] != '\0')
        return true;
    struct buf all = { 0 };
    for (const struct embedded_file *file = gen_embedded_files; file->name != NULL; file++) {
        buf_printf(&all, "%s %zu\n", file->name, file->size);
        buf_put(&all, file->data, file->size);
    }
    const bool good = !all.failed;
    if (good)
        gen_hash(all.data, all.size, hash);
    buf_free(&all);
    gen_shared_lock();
    memcpy(known, hash, sizeof(known));
    gen_shared_unlock();
    return good;
}

static int is_template(const struct dirent *entry)
{
    const char *dot = strrchr(entry->d_name, '.');
    return dot != NULL && (strcmp(dot, ".cu") == 0 || strcmp(dot, ".cuh") == 0);
}

static fp8gen_status put_tuning(struct buf *key, const char *path)
{
    enum { TUNING_BYTES_MAX = 1 << 26 };
    struct fp8gen *gen = NULL;
    struct gen_text text;
    fp8gen_status status = fp8gen_open(NULL, &gen);
    if (status == FP8GEN_OK)
        status = gen_read_file(gen, path, TUNING_BYTES_MAX, &text);
    if (status == FP8GEN_OK) {
        buf_printf(key, "tuning, %zu bytes\n", text.size);
        buf_put(key, text.data, text.size);
    }
    return close_session(gen, status);
}

/* Every file of a folder of templates, by name, with the hash of its text. */
static fp8gen_status put_templates(struct buf *key, const char *folder)
{
    struct dirent **list = NULL;
    int count = scandir(folder, &list, is_template, alphasort);
    if (count < 0)
        return gen_jit_fail(FP8GEN_ERR_MACHINE, "error: cannot read the templates in %s: %s\n",
                            folder, strerror(errno));
    if (count == 0) {
        free(list);
        return gen_jit_fail(FP8GEN_ERR_MACHINE,
                            "error: the folder %s has no templates: it holds no *.cu and no *.cuh\n"
                            "  hint: template_dir = NULL takes the built-in ones\n",
                            folder);
    }
    struct fp8gen *gen = NULL;
    fp8gen_options options = FP8GEN_OPTIONS_INIT;
    options.template_dir = folder;
    fp8gen_status status = fp8gen_open(&options, &gen);
    for (int i = 0; i < count; i++) {
        struct gen_text text;
        char hash[33];
        if (status == FP8GEN_OK &&
            (status = gen_template(gen, list[i]->d_name, &text)) == FP8GEN_OK) {
            gen_hash(text.data, text.size, hash);
            buf_printf(key, "template %s %s\n", list[i]->d_name, hash);
        }
        free(list[i]);
    }
    free(list);
    return close_session(gen, status);
}

static fp8gen_status make_key(const struct request *request, struct buf *key)
{
    char version[32] = "none", embedded[33];
    fp8gen_status status = FP8GEN_OK;
    if (!hash_embedded(embedded))
        return fail_memory();
    if (strcmp(request->archs, "none") != 0)
        status = nvrtc_version(version);
    buf_printf(key, "fp8gen bundle cache %d, bundle format %d\nfp8gen %s, built-in files %s\n",
               GEN_CACHE_VERSION, FP8_BUNDLE_FORMAT_VERSION, fp8gen_version(), embedded);
    buf_printf(key, "NVRTC %s\narchs %s\noptions", version, request->archs);
    for (const char *const *option = gen_nvrtc_options(); *option != NULL; option++)
        buf_printf(key, " %s", *option);
    buf_puts(key, "\n");
    if (status == FP8GEN_OK && request->options->template_dir != NULL)
        status = put_templates(key, request->options->template_dir);
    if (status == FP8GEN_OK && request->options->tuning_file != NULL)
        status = put_tuning(key, request->options->tuning_file);
    buf_printf(key, "spec, %zu bytes\n", request->length);
    buf_put(key, request->spec, request->length);
    return status == FP8GEN_OK && key->failed ? fail_memory() : status;
}

/* ---- building -------------------------------------------------------------------------------- */

static fp8gen_status build(const struct request *request, const char *output)
{
    fp8gen_options open = FP8GEN_OPTIONS_INIT;
    fp8gen_build_options options = FP8GEN_BUILD_OPTIONS_INIT;
    fp8gen *gen = NULL;
    open.template_dir = request->options->template_dir;
    options.archs = request->archs;
    options.jobs = request->options->jobs;
    options.output_dir = output;
    options.cache_dir = request->store.path;
    options.log = request->options->log;
    options.log_user = request->options->log_user;
    fp8gen_status status = fp8gen_open(&open, &gen);
    if (status == FP8GEN_OK && request->options->tuning_file != NULL)
        status = fp8gen_tuning_file(gen, request->options->tuning_file);
    if (status == FP8GEN_OK)
        status = fp8gen_load_text(gen, request->name, request->spec, request->length);
    if (status == FP8GEN_OK)
        status = fp8gen_build(gen, &options);
    return close_session(gen, status);
}

/* All files of the bundle in a writer's folder. */
static int adopt_bundle(struct gen_writer *writer)
{
    struct buf kernels = { 0 };
    struct dirent **list = NULL;
    buf_printf(&kernels, "%s/" GEN_BUNDLE_FOLDER "/" FP8_BUNDLE_KERNEL_DIR, writer->path);
    int count = kernels.failed ? 0 : scandir(kernels.data, &list, NULL, alphasort);
    int error = kernels.failed ? ENOMEM : count < 0 ? errno : 0;
    for (int i = 0; i < count; i++) {
        char name[512];
        snprintf(name, sizeof(name), GEN_BUNDLE_FOLDER "/" FP8_BUNDLE_KERNEL_DIR "/%s",
                 list[i]->d_name);
        if (error == 0 && list[i]->d_name[0] != '.')
            error = gen_writer_adopt(writer, name);
        free(list[i]);
    }
    free(list);
    buf_free(&kernels);
    return error != 0 ? error : gen_writer_adopt(writer, GEN_BUNDLE_FOLDER "/" FP8_BUNDLE_MANIFEST);
}

/* Builds into the cache. *error: what the folder of the cache refuses; then the bundle may still be
 * built elsewhere. */
static fp8gen_status build_cached(const struct request *request, const struct gen_entry *entry,
                                  int *error)
{
    struct gen_writer writer;
    fp8gen_status status = FP8GEN_OK;
    *error = gen_writer_begin(&writer, &request->store, entry);
    if (*error == 0) {
        struct buf output = { 0 };
        buf_printf(&output, "%s/" GEN_BUNDLE_FOLDER, writer.path);
        status = output.failed ? fail_memory() : build(request, output.data);
        buf_free(&output);
        if (status == FP8GEN_OK)
            *error = adopt_bundle(&writer);
        if (status == FP8GEN_OK && *error == 0)
            *error = gen_writer_commit(&writer);
    }
    gen_writer_abandon(&writer);
    return status;
}

/* Builds where only this process finds it. */
static fp8gen_status build_private(const struct request *request, const struct gen_entry *entry,
                                   struct buf *path)
{
    struct gen_private_bundle *made = gen_private_begin(entry->hash);
    if (made == NULL && errno == ENOMEM)
        return fail_memory();
    if (made == NULL)
        return gen_jit_fail(FP8GEN_ERR_MACHINE,
                            "error: the cache %s cannot be written, and neither can /dev/shm, "
                            "$TMPDIR and /tmp: %s\n",
                            request->store.path != NULL ? request->store.path : "",
                            strerror(errno));
    struct buf output = { 0 };
    buf_printf(&output, "%s/" GEN_BUNDLE_FOLDER, made->path);
    fp8gen_status status = output.failed ? fail_memory() : build(request, output.data);
    if (status == FP8GEN_OK)
        buf_puts(path, output.data);
    gen_private_end(made, status == FP8GEN_OK);
    buf_free(&output);
    return status;
}

/* ---- one bundle ------------------------------------------------------------------------------ */

static enum gen_found find(const struct request *request, const struct gen_entry *entry,
                           struct buf *path)
{
    enum gen_found found = gen_entry_find(&request->store, entry, NULL, NULL);
    if (found != GEN_FOUND) {
        int error = errno; /* of a damaged one */
        found = gen_private_find(entry->hash, path) ? GEN_FOUND : found;
        errno = error;
        return found;
    }
    char *folder = gen_entry_path(&request->store, entry, GEN_BUNDLE_FOLDER);
    buf_puts(path, folder != NULL ? folder : "");
    path->failed = path->failed || folder == NULL;
    gen_free(folder);
    return GEN_FOUND;
}

/* In the cache. *error as of build_cached; path stays empty if the bundle is not there
 * afterwards. */
static fp8gen_status make_cached(const struct request *request, const struct gen_entry *entry,
                                 struct buf *path, int *error)
{
    gen_store_lock(&request->store, entry);
    fp8gen_status status = FP8GEN_OK;
    *error = 0;
    enum gen_found found = find(request, entry, path);
    if (found != GEN_FOUND) {
        if (found == GEN_DAMAGED)
            gen_entry_log_damage(&request->store, entry, errno);
        status = build_cached(request, entry, error);
        if (status == FP8GEN_OK && *error == 0 && find(request, entry, path) != GEN_FOUND)
            *error = EIO;
    }
    gen_store_unlock(&request->store, entry);
    return status;
}

static fp8gen_status make(const struct request *request, const struct gen_entry *entry,
                          struct buf *path)
{
    int error = 0;
    if (request->store.fd >= 0) {
        fp8gen_status status = make_cached(request, entry, path, &error);
        /* Of what the machine refuses, a full disk is worth another place. */
        if (error == 0 && status != FP8GEN_ERR_MACHINE)
            return status;
    }
    fp8gen_status status = build_private(request, entry, path);
    if (status == FP8GEN_OK && request->store.fd >= 0)
        gen_store_warn(&request->store, "cannot be written in", error != 0 ? error : ENOSPC);
    return status;
}

static fp8gen_status get(const struct request *request, struct buf *path)
{
    struct buf key = { 0 };
    fp8gen_status status = make_key(request, &key);
    if (status == FP8GEN_OK) {
        struct gen_entry entry = { GEN_BUNDLES, STEM, "", key.data, key.size };
        gen_hash(key.data, key.size, entry.hash);
        if (find(request, &entry, path) != GEN_FOUND) {
            bool entered = gen_flight_enter(entry.hash);
            if (find(request, &entry, path) != GEN_FOUND)
                status = make(request, &entry, path);
            if (entered)
                gen_flight_leave(entry.hash);
        }
    }
    buf_free(&key);
    return status;
}

static fp8gen_status check_arguments(const fp8gen_jit_options *options, const char *name,
                                     const char *spec)
{
    const char *problem =
        gen_options_problem(options->size, sizeof(*options), options->reserved, 3);
    if (problem != NULL)
        return gen_jit_fail(FP8GEN_ERR_ARGUMENT,
                            "error: the JIT options %s\n"
                            "  hint: start from FP8GEN_JIT_OPTIONS_INIT\n",
                            problem);
    if (name == NULL || spec == NULL)
        return gen_jit_fail(FP8GEN_ERR_ARGUMENT, "error: the %s of the spec is NULL\n",
                            name == NULL ? "name" : "text");
    return FP8GEN_OK;
}

static fp8gen_status copy_path(const struct buf *found, char *path, size_t path_bytes)
{
    if (found->failed)
        return fail_memory();
    if (found->size >= path_bytes)
        return gen_jit_fail(FP8GEN_ERR_ARGUMENT,
                            "error: the path of the bundle has %zu bytes, there is room for %zu\n",
                            found->size + 1, path_bytes);
    memcpy(path, found->data, found->size + 1);
    return FP8GEN_OK;
}

static fp8gen_status no_room(const char *path)
{
    return gen_jit_fail(
        FP8GEN_ERR_ARGUMENT,
        "error: %s\n  hint: pass an array and its size; 4096 bytes hold every path\n",
        path == NULL ? "path is NULL" : "path_bytes is 0");
}

fp8gen_status fp8gen_jit_bundle(const fp8gen_jit_options *options, const char *name,
                                const char *spec, size_t length, char *path, size_t path_bytes)
{
    if (options == NULL)
        options = &default_options;
    if (path == NULL || path_bytes == 0)
        return no_room(path);
    path[0] = '\0';
    fp8gen_status status = check_arguments(options, name, spec);
    if (status != FP8GEN_OK)
        return status;
    struct request request = { .options = options, .name = name, .spec = spec, .length = length };
    request.archs = options->archs != NULL ? options->archs : "sm_90a";
    gen_store_open(&request.store, options->cache_dir,
                   (struct gen_log){ options->log, options->log_user });
    struct buf found = { 0 };
    status = get(&request, &found);
    if (status == FP8GEN_OK)
        status = copy_path(&found, path, path_bytes);
    buf_free(&found);
    gen_store_close(&request.store);
    return status;
}
