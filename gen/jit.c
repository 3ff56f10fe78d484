/*
 * jit.c - bundles made when a program asks for them: from the cache, or built into it.
 *
 * In: the text of a spec, or the runtime's description of a layer. Out: the path of a bundle, which
 * the runtime opens like any other. A bundle is a pure function of the spec, the generator with its
 * Lua and its templates, NVRTC's version and the archs; these are its key, so that a warm call
 * evaluates no Lua and expands no template. Kernels have keys of their own (cache.c): what two
 * bundles share is compiled once.
 *
 * One of the two places that know both public headers. Opens no device.
 */
#include "gen/cache.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "runtime/bundle_format.h"
#include "runtime/fp8.h"
#include "runtime/fp8_jit.h"

#define STEM "bundle"
#define FOLDER "bundle"

static const fp8gen_jit_options default_options = FP8GEN_JIT_OPTIONS_INIT;

/* ---- errors --------------------------------------------------------------------------------------------- */

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

/* ---- the key ---------------------------------------------------------------------------------------------- */

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
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    static char known[32];
    fp8gen_status status = FP8GEN_OK;
    pthread_mutex_lock(&lock);
    if (known[0] == '\0') {
        fp8gen *gen = NULL;
        const char *path, *found;
        status = fp8gen_open(NULL, &gen);
        if (status == FP8GEN_OK)
            status = fp8gen_nvrtc(gen, &path, &found);
        if (status == FP8GEN_OK)
            snprintf(known, sizeof(known), "%s", found);
        status = close_session(gen, status);
    }
    memcpy(version, known, sizeof(known));
    pthread_mutex_unlock(&lock);
    return status;
}

static char embedded_hash[33];

static void hash_embedded(void)
{
    struct buf all = { 0 };
    for (const struct embedded_file *file = gen_embedded_files; file->name != NULL; file++) {
        buf_printf(&all, "%s %zu\n", file->name, file->size);
        buf_put(&all, file->data, file->size);
    }
    if (!all.failed)
        gen_hash(all.data, all.size, embedded_hash);
    buf_free(&all);
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
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    char version[32] = "none";
    fp8gen_status status = FP8GEN_OK;
    pthread_once(&once, hash_embedded);
    if (embedded_hash[0] == '\0')
        return fail_memory();
    if (strcmp(request->archs, "none") != 0)
        status = nvrtc_version(version);
    buf_printf(key, "fp8gen bundle cache %d, bundle format %d\nfp8gen %s, built-in files %s\n",
               GEN_CACHE_VERSION, FP8_BUNDLE_FORMAT_VERSION, fp8gen_version(), embedded_hash);
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

/* ---- building ----------------------------------------------------------------------------------------------- */

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
    buf_printf(&kernels, "%s/" FOLDER "/" FP8_BUNDLE_KERNEL_DIR, writer->path);
    int count = kernels.failed ? 0 : scandir(kernels.data, &list, NULL, alphasort);
    int error = kernels.failed ? ENOMEM : count < 0 ? errno : 0;
    for (int i = 0; i < count; i++) {
        char name[512];
        snprintf(name, sizeof(name), FOLDER "/" FP8_BUNDLE_KERNEL_DIR "/%s", list[i]->d_name);
        if (error == 0 && list[i]->d_name[0] != '.')
            error = gen_writer_adopt(writer, name);
        free(list[i]);
    }
    free(list);
    buf_free(&kernels);
    return error != 0 ? error : gen_writer_adopt(writer, FOLDER "/" FP8_BUNDLE_MANIFEST);
}

/* Builds into the cache. *error: what the folder of the cache refuses; then the bundle may still be built
 * elsewhere. */
static fp8gen_status build_cached(const struct request *request, const struct gen_entry *entry,
                                  int *error)
{
    struct gen_writer writer;
    fp8gen_status status = FP8GEN_OK;
    *error = gen_writer_begin(&writer, &request->store, entry);
    if (*error == 0) {
        struct buf output = { 0 };
        buf_printf(&output, "%s/" FOLDER, writer.path);
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

/* ---- bundles of this process alone -------------------------------------------------------------------------- */

struct private_bundle {
    struct private_bundle *next;
    char hash[33];
    char path[512]; /* of the folder around the bundle */
};

static pthread_mutex_t private_lock = PTHREAD_MUTEX_INITIALIZER;
static struct private_bundle *private_bundles;
static pid_t private_owner;

__attribute__((destructor)) static void remove_private(void)
{
    for (struct private_bundle *at = private_bundles; at != NULL; at = at->next)
        if (private_owner == getpid())
            gen_remove_tree(AT_FDCWD, at->path);
}

static bool find_private(const char *hash, struct buf *path)
{
    bool found = false;
    pthread_mutex_lock(&private_lock);
    for (struct private_bundle *at = private_bundles; at != NULL && !found; at = at->next)
        if (strcmp(at->hash, hash) == 0 && private_owner == getpid()) {
            buf_printf(path, "%s/" FOLDER, at->path);
            found = true;
        }
    pthread_mutex_unlock(&private_lock);
    return found;
}

static bool make_private_folder(char path[512])
{
    const char *temporary = getenv("TMPDIR");
    const char *const parents[] = { "/dev/shm", temporary != NULL ? temporary : "/tmp", "/tmp" };
    for (size_t i = 0; i < sizeof(parents) / sizeof(parents[0]); i++) {
        snprintf(path, 512, "%s/fp8gen.XXXXXX", parents[i]);
        if (mkdtemp(path) != NULL)
            return true;
    }
    return false;
}

static fp8gen_status build_private(const struct request *request, const struct gen_entry *entry,
                                   struct buf *path)
{
    struct private_bundle *made = gen_realloc(NULL, sizeof(*made));
    if (made == NULL)
        return fail_memory();
    memcpy(made->hash, entry->hash, sizeof(made->hash));
    if (!make_private_folder(made->path)) {
        gen_free(made);
        return gen_jit_fail(FP8GEN_ERR_MACHINE,
                            "error: the cache %s cannot be written, and neither can /dev/shm, "
                            "$TMPDIR and /tmp: %s\n",
                            request->store.path != NULL ? request->store.path : "",
                            strerror(errno));
    }
    struct buf output = { 0 };
    buf_printf(&output, "%s/" FOLDER, made->path);
    fp8gen_status status = output.failed ? fail_memory() : build(request, output.data);
    if (status == FP8GEN_OK) {
        buf_puts(path, output.data);
        pthread_mutex_lock(&private_lock);
        private_owner = getpid();
        made->next = private_bundles;
        private_bundles = made;
        pthread_mutex_unlock(&private_lock);
    } else {
        gen_remove_tree(AT_FDCWD, made->path);
        gen_free(made);
    }
    buf_free(&output);
    return status;
}

/* ---- one bundle ----------------------------------------------------------------------------------------------- */

static enum gen_found find(const struct request *request, const struct gen_entry *entry,
                           struct buf *path)
{
    enum gen_found found = gen_entry_find(&request->store, entry, NULL, NULL);
    if (found != GEN_FOUND)
        return find_private(entry->hash, path) ? GEN_FOUND : found;
    char *folder = gen_entry_path(&request->store, entry, FOLDER);
    buf_puts(path, folder != NULL ? folder : "");
    path->failed = path->failed || folder == NULL;
    gen_free(folder);
    return GEN_FOUND;
}

/* In the cache. *error as of build_cached; path stays empty if the bundle is not there afterwards. */
static fp8gen_status make_cached(const struct request *request, const struct gen_entry *entry,
                                 struct buf *path, int *error)
{
    int lock = gen_store_lock(&request->store, entry);
    fp8gen_status status = FP8GEN_OK;
    *error = 0;
    enum gen_found found = find(request, entry, path);
    if (found != GEN_FOUND) {
        if (found == GEN_DAMAGED)
            gen_log(&request->store.log, GEN_LOG_INFO,
                    "the cached bundle %s is damaged: it is rebuilt", entry->hash);
        status = build_cached(request, entry, error);
        if (status == FP8GEN_OK && *error == 0 && find(request, entry, path) != GEN_FOUND)
            *error = EIO;
    }
    gen_store_unlock(&request->store, entry, lock);
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

/* ---- the provider of a context ---------------------------------------------------------------------------------- */

static const char *dtype_word(fp8_dtype dtype, char word[24])
{
    switch (dtype) {
    case FP8_DTYPE_BF16:
        return "bf16";
    case FP8_DTYPE_FP32:
        return "fp32";
    case FP8_DTYPE_FP16:
        return "fp16";
    default: /* the spec's own check names the choices */
        snprintf(word, 24, "dtype%d", (int)dtype);
        return word;
    }
}

static void put_dtype(struct buf *spec, const char *field, fp8_dtype dtype)
{
    char word[24];
    if (dtype != FP8_DTYPE_NONE)
        buf_printf(spec, "    %s = \"%s\",\n", field, dtype_word(dtype, word));
}

static void put_accumulation(struct buf *spec, const char *pass, fp8_accumulation accumulation)
{
    static const char *const words[] = { NULL, "\"fast\"", "\"split\"", "256", "512" };
    if (accumulation > FP8_ACCUMULATION_DEFAULT && accumulation <= FP8_ACCUMULATION_512)
        buf_printf(spec, " %s = %s,", pass, words[accumulation]);
}

/* Words enter the text of the spec: letters, digits and '_' alone. */
static bool is_word(const char *text)
{
    static const char letters[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_";
    return text == NULL || (text[0] != '\0' && strspn(text, letters) == strlen(text));
}

/* What is not said is the recipe's default. */
static void put_recipe(struct buf *spec, const fp8_layer_description *d)
{
    buf_printf(spec, "    recipe = recipe.%s { ", d->recipe != NULL ? d->recipe : "current");
    if (d->format != NULL)
        buf_printf(spec, "format = \"%s\", ", d->format);
    if (d->power_of_two != FP8_DEFAULT)
        buf_printf(spec, "power_of_two = %s, ", d->power_of_two == FP8_ON ? "true" : "false");
    if (d->history_length > 0)
        buf_printf(spec, "history_length = %" PRId64 ", ", d->history_length);
    if (d->algo != NULL)
        buf_printf(spec, "algo = \"%s\", ", d->algo);
    if (d->margin != 0)
        buf_printf(spec, "margin = %d, ", (int)d->margin);
    if (d->calibrate)
        buf_puts(spec, "calibrate = true, ");
    buf_puts(spec, "},\n    accumulation = {");
    put_accumulation(spec, "fprop", d->fprop);
    put_accumulation(spec, "dgrad", d->dgrad);
    put_accumulation(spec, "wgrad", d->wgrad);
    buf_puts(spec, " },\n");
}

static void put_spec(struct buf *spec, const fp8_layer_description *d)
{
    buf_printf(spec, "return model \"jit\" { layers = { linear \"layer\" {\n");
    buf_printf(spec, "    in_features = %" PRId64 ", out_features = %" PRId64 ",\n", d->in_features,
               d->out_features);
    buf_printf(spec, "    tokens = %" PRId64 ", max_tokens = %" PRId64 ", bias = %s,\n",
               d->tokens != 0 ? d->tokens : d->max_tokens,
               d->max_tokens != 0 ? d->max_tokens : d->tokens, d->has_bias ? "true" : "false");
    put_dtype(spec, "weight", d->w_dtype);
    put_dtype(spec, "output", d->y_dtype);
    put_dtype(spec, "grad_input", d->dx_dtype);
    put_dtype(spec, "grad_weight", d->dw_dtype);
    if (d->compute != NULL && strcmp(d->compute, "fp8") != 0)
        buf_printf(spec, "    compute = \"%s\",\n", d->compute);
    else
        put_recipe(spec, d);
    buf_puts(spec, "} } }\n");
}

static const char *device_archs(int32_t arch, char text[16])
{
    if (arch == 0)
        return "none";
    snprintf(text, 16, "sm_%da", (int)arch);
    return text;
}

static fp8_status to_fp8(fp8gen_status status)
{
    switch (status) {
    case FP8GEN_OK:
        return FP8_OK;
    case FP8GEN_ERR_SPEC:
    case FP8GEN_ERR_ARGUMENT:
        return FP8_ERR_ARGUMENT;
    case FP8GEN_ERR_MACHINE:
        return FP8_ERR_LIBRARY;
    case FP8GEN_ERR_INTERNAL:
        break;
    }
    return FP8_ERR_INTERNAL;
}

static fp8gen_status provide(const fp8gen_jit_options *given, const fp8_layer_description *d,
                             char *path, size_t path_bytes)
{
    if (d == NULL || d->size != sizeof(*d))
        return gen_jit_fail(
            FP8GEN_ERR_ARGUMENT,
            "error: the description of the layer is %s; libfp8 and libfp8gen are of "
            "different versions\n",
            d == NULL ? "NULL" : "of another size");
    if (given != NULL && given->size != sizeof(*given))
        return check_arguments(given, "", "");
    if (!is_word(d->recipe) || !is_word(d->format) || !is_word(d->compute) || !is_word(d->algo))
        return gen_jit_fail(FP8GEN_ERR_ARGUMENT,
                            "error: recipe, format, compute and algo of a layer are words\n");
    fp8gen_jit_options options = given != NULL ? *given : default_options;
    char archs[16];
    if (options.archs == NULL)
        options.archs = device_archs(d->arch, archs);
    if (d->spec != NULL)
        return fp8gen_jit_bundle(&options, "spec", d->spec, strlen(d->spec), path, path_bytes);
    struct buf spec = { 0 };
    put_spec(&spec, d);
    fp8gen_status status =
        spec.failed ? fail_memory()
                    : fp8gen_jit_bundle(&options, "layer", spec.data, spec.size, path, path_bytes);
    buf_free(&spec);
    return status;
}

int fp8gen_jit_provider(void *user, const struct fp8_layer_description *description, char *path,
                        size_t path_bytes)
{
    if (path == NULL || path_bytes == 0)
        return to_fp8(no_room(path));
    fp8gen_status status = provide(user, description, path, path_bytes);
    if (status != FP8GEN_OK)
        snprintf(path, path_bytes, "%s", last_error);
    return to_fp8(status);
}
