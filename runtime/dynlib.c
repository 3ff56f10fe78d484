/*
 * dynlib.c - opens shared libraries in one order everywhere; dynlib.h says which and why.
 *
 * Everything lives on the caller's stack: the attempts are written into the message as they fail,
 * so that the sentence at the end lists exactly what was tried. dlopen and dlerror are thread-safe
 * in the C libraries that this project runs on. Libraries are opened RTLD_LOCAL: their symbols must
 * not leak into a host program that may carry another version.
 */
#include "runtime/dynlib.h"

#include <dlfcn.h>
#include <link.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

enum { OPEN_FLAGS = RTLD_NOW | RTLD_LOCAL };

static const char *const toolkit_folders[] = {
    "/usr/local/cuda/lib64",
    "/usr/local/cuda/lib",
    "/opt/cuda/lib64",
};
enum { FOLDER_COUNT = sizeof(toolkit_folders) / sizeof(toolkit_folders[0]) };

/* The sentence under construction; text past the end is cut, never an error. */
struct sentence {
    char *text;
    size_t size;
    size_t length;
    int attempts;
};

__attribute__((format(printf, 2, 3))) static void say(struct sentence *s, const char *format, ...)
{
    if (s->length + 1 >= s->size)
        return;
    va_list args;
    va_start(args, format);
    int n = vsnprintf(s->text + s->length, s->size - s->length, format, args);
    va_end(args);
    if (n > 0)
        s->length += (size_t)n;
    if (s->length >= s->size)
        s->length = s->size - 1;
}

/* "libx.so: cannot open shared object file: No such file or directory": the part after the name. */
static const char *loader_reason(const char *name)
{
    const char *error = dlerror();
    if (!error)
        return "unknown reason";
    size_t length = strlen(name);
    if (strncmp(error, name, length) == 0 && strncmp(error + length, ": ", 2) == 0) {
        return error + length + 2;
    }
    return error;
}

static void *try_open(struct sentence *tried, const char *name)
{
    void *handle = dlopen(name, OPEN_FLAGS);
    if (!handle) {
        say(tried, "%s%s (%s)", tried->attempts++ ? ", " : "", name, loader_reason(name));
    }
    return handle;
}

static void *try_folder(struct sentence *tried, const struct fp8_dynlib_spec *spec,
                        const char *folder)
{
    for (const char *const *soname = spec->sonames; *soname; soname++) {
        char path[1024];
        int n = snprintf(path, sizeof(path), "%s/%s", folder, *soname);
        if (n < 0 || (size_t)n >= sizeof(path))
            continue;
        struct stat info;
        if (stat(path, &info) != 0)
            continue;
        void *handle = try_open(tried, path);
        if (handle)
            return handle;
    }
    return NULL;
}

static bool is_folder(const char *path)
{
    struct stat info;
    return stat(path, &info) == 0 && S_ISDIR(info.st_mode);
}

/* The variable names the library itself, the folder it lies in, or the toolkit's folder. */
static void *try_variable(struct sentence *tried, const struct fp8_dynlib_spec *spec)
{
    static const char *const below[] = { "", "/lib64", "/lib" };
    const char *value = getenv(spec->variable);
    if (!value || !*value) {
        say(tried, ", %s (not set)", spec->variable);
        return NULL;
    }
    say(tried, ", %s=", spec->variable);
    tried->attempts = 0; /* no comma after the sign */
    if (!is_folder(value))
        return try_open(tried, value);
    for (size_t i = 0; i < sizeof(below) / sizeof(below[0]); i++) {
        char folder[1024];
        int n = snprintf(folder, sizeof(folder), "%s%s", value, below[i]);
        if (n < 0 || (size_t)n >= sizeof(folder))
            continue;
        void *handle = try_folder(tried, spec, folder);
        if (handle)
            return handle;
    }
    if (tried->attempts == 0)
        say(tried, "%s (a folder without %s)", value, spec->sonames[0]);
    return NULL;
}

static void *search(const struct fp8_dynlib_spec *spec, struct sentence *tried)
{
    for (const char *const *soname = spec->sonames; *soname; soname++) {
        void *handle = dlopen(*soname, OPEN_FLAGS | RTLD_NOLOAD);
        if (handle)
            return handle;
        (void)dlerror();
    }
    for (const char *const *soname = spec->sonames; *soname; soname++) {
        void *handle = try_open(tried, *soname);
        if (handle)
            return handle;
    }
    void *handle = spec->variable ? try_variable(tried, spec) : NULL;
    for (size_t i = 0; !handle && spec->toolkit && i < FOLDER_COUNT; i++) {
        say(tried, ", the folder %s", toolkit_folders[i]);
        tried->attempts = 1;
        handle = try_folder(tried, spec, toolkit_folders[i]);
    }
    return handle;
}

static void remember_path(struct fp8_dynlib *lib)
{
    struct link_map *map = NULL;
    if (dlinfo(lib->handle, RTLD_DI_LINKMAP, &map) == 0 && map && map->l_name) {
        snprintf(lib->path, sizeof(lib->path), "%s", map->l_name);
    }
}

bool fp8_dynlib_open(const struct fp8_dynlib_spec *spec, struct fp8_dynlib *lib, char *message,
                     size_t message_size)
{
    memset(lib, 0, sizeof(*lib));
    char attempts[FP8_DYNLIB_MESSAGE_SIZE - 256] = "";
    struct sentence tried = { attempts, sizeof(attempts), 0, 0 };
    lib->handle = search(spec, &tried);
    if (lib->handle) {
        remember_path(lib);
        return true;
    }
    struct sentence out = { message, message ? message_size : 0, 0, 0 };
    say(&out, "%s was not found; searched: a copy in this process, %s", spec->name, attempts);
    if (spec->variable)
        say(&out, "; install it or set %s to the library or its folder", spec->variable);
    return false;
}

bool fp8_dynlib_symbols(const struct fp8_dynlib *lib, const struct fp8_dynlib_symbol *symbols,
                        size_t count, char *message, size_t message_size)
{
    for (size_t i = 0; i < count; i++) {
        void *symbol = dlsym(lib->handle, symbols[i].name);
        if (!symbol && !symbols[i].optional) {
            if (message && message_size) {
                snprintf(message, message_size,
                         "%s has no symbol %s: it is too old or another library", lib->path,
                         symbols[i].name);
            }
            return false;
        }
        memcpy(symbols[i].slot, &symbol, sizeof(symbol));
    }
    return true;
}

void fp8_dynlib_close(struct fp8_dynlib *lib)
{
    if (lib->handle)
        dlclose(lib->handle);
    memset(lib, 0, sizeof(*lib));
}
