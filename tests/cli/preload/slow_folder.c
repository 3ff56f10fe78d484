/*
 * slow_folder.c - work on folders that takes a second, as a preloaded library: what a signal meets
 * is then certain.
 *
 * SLOW=sync: every fsync takes that long, so that a build is met with its folder half filled.
 * SLOW=remove: what removes a tree goes on for a second after it is gone, so that its writer meets
 * that.
 */
#include <dlfcn.h>
#include <ftw.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int is(const char *what)
{
    const char *slow = getenv("SLOW");
    return slow && strcmp(slow, what) == 0;
}

int fsync(int fd)
{
    int (*real)(int) = NULL;
    *(void **)&real = dlsym(RTLD_NEXT, "fsync");
    if (is("sync"))
        sleep(1);
    return real(fd);
}

int nftw(const char *path, __nftw_func_t function, int descriptors, int flags)
{
    int (*real)(const char *, __nftw_func_t, int, int) = NULL;
    *(void **)&real = dlsym(RTLD_NEXT, "nftw");
    int result = real(path, function, descriptors, flags);
    if (is("remove"))
        sleep(1);
    return result;
}
