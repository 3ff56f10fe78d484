/*
 * Preloaded, makes a machine of this one that has none of libcuda, NVRTC and cuBLASLt: dlopen
 * refuses them with the loader's own words.
 */
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

static __thread char message[512];

static int hidden(const char *name)
{
    static const char *const names[] = { "libcuda.", "libnvrtc", "libcublas" };
    for (size_t i = 0; name && i < sizeof(names) / sizeof(names[0]); ++i) {
        if (strstr(name, names[i]))
            return 1;
    }
    return 0;
}

void *dlopen(const char *name, int flags)
{
    static void *(*next)(const char *, int);
    if (!next)
        *(void **)&next = dlsym(RTLD_NEXT, "dlopen");
    if (!hidden(name))
        return next(name, flags);
    snprintf(message, sizeof(message),
             "%s: cannot open shared object file: No such file or directory", name);
    return NULL;
}

char *dlerror(void)
{
    static char *(*next)(void);
    static __thread char last[sizeof(message)];
    if (!next)
        *(void **)&next = dlsym(RTLD_NEXT, "dlerror");
    if (!message[0])
        return next();
    memcpy(last, message, sizeof(last));
    message[0] = 0;
    return last;
}
