/*
 * jit_private.c - bundles of this process alone, made where the cache cannot be written.
 *
 * In: the hash of a bundle's key. Out: a folder in memory (/dev/shm) or for temporary files, in
 * which jit.c builds it; it is found again by the hash and goes when this process ends by exit. A
 * forked child neither uses nor removes what its parent has made, and a folder that somebody else
 * removed is no hit.
 */
#include "gen/cache.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "runtime/bundle_format.h"

static struct gen_private_bundle *bundles; /* under gen_shared_lock */

__attribute__((destructor)) static void remove_all(void)
{
    for (const struct gen_private_bundle *at = bundles; at != NULL; at = at->next)
        if (at->owner == getpid())
            gen_remove_tree(AT_FDCWD, at->path);
}

static bool is_whole(const char *path)
{
    char manifest[sizeof(((struct gen_private_bundle *)0)->path) + 64];
    snprintf(manifest, sizeof(manifest), "%s/" GEN_BUNDLE_FOLDER "/" FP8_BUNDLE_MANIFEST, path);
    return access(manifest, R_OK) == 0;
}

bool gen_private_find(const char *hash, struct buf *path)
{
    bool found = false;
    gen_shared_lock();
    for (const struct gen_private_bundle *at = bundles; at != NULL && !found; at = at->next)
        if (strcmp(at->hash, hash) == 0 && at->owner == getpid() && is_whole(at->path)) {
            buf_printf(path, "%s/" GEN_BUNDLE_FOLDER, at->path);
            found = true;
        }
    gen_shared_unlock();
    return found;
}

static bool make_folder(char *path, size_t path_bytes)
{
    const char *temporary = getenv("TMPDIR");
    const char *const parents[] = { "/dev/shm", temporary != NULL ? temporary : "/tmp", "/tmp" };
    for (size_t i = 0; i < sizeof(parents) / sizeof(parents[0]); i++) {
        snprintf(path, path_bytes, "%s/fp8gen.XXXXXX", parents[i]);
        if (mkdtemp(path) != NULL)
            return true;
    }
    return false;
}

struct gen_private_bundle *gen_private_begin(const char *hash)
{
    struct gen_private_bundle *made = gen_realloc(NULL, sizeof(*made));
    if (made == NULL) {
        errno = ENOMEM;
        return NULL;
    }
    *made = (struct gen_private_bundle){ .owner = getpid() };
    memcpy(made->hash, hash, sizeof(made->hash));
    if (make_folder(made->path, sizeof(made->path)))
        return made;
    int error = errno;
    gen_free(made);
    errno = error;
    return NULL;
}

void gen_private_end(struct gen_private_bundle *made, bool keep)
{
    if (!keep) {
        gen_remove_tree(AT_FDCWD, made->path);
        gen_free(made);
        return;
    }
    gen_shared_lock();
    made->next = bundles;
    bundles = made;
    gen_shared_unlock();
}
