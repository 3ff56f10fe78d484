/*
 * cache.c - the kernels of the cache: the key of a compilation, hits, and what a miss puts there.
 *
 * In: a job. Out: the same job with its cubin and log, from disk or from NVRTC. The key is the
 * whole text that NVRTC would get, as a readable file: the cache's version, NVRTC's, the arch, the
 * options, every header, the expanded kernel. So whatever changes, exactly what depends on it is
 * compiled anew; where a template or NVRTC is installed does not matter.
 *
 * Equal kernels are compiled once: threads of this process wait for each other here (a flight),
 * processes at the lock of the entry. If nothing can be written, a kernel stays in memory as long
 * as the process. What does not compile is kept in failed/ with its log, to be looked at, and is
 * tried again next time.
 */
#include "gen/cache.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define CUBIN "kernel.cubin"
#define LOG "log.txt"

/* ---- keys ------------------------------------------------------------------------------------ */

static int by_name(const void *a, const void *b)
{
    const struct gen_source *const *first = a, *const *second = b;
    return strcmp((*first)->name, (*second)->name);
}

static int by_text(const void *a, const void *b)
{
    const char *const *first = a, *const *second = b;
    return strcmp(*first, *second);
}

/* The lengths make the text unambiguous. */
static void put_file(struct buf *key, const char *what, const char *name, const char *text)
{
    size_t size = strlen(text);
    buf_printf(key, "// %s %s, %zu bytes\n", what, name, size);
    buf_put(key, text, size);
    buf_puts(key, "\n");
}

static bool put_options(struct buf *key)
{
    const char *const *options = gen_nvrtc_options();
    size_t count = 0;
    while (options[count] != NULL)
        count++;
    const char **sorted = gen_realloc(NULL, (count + 1) * sizeof(*sorted));
    if (sorted == NULL)
        return false;
    memcpy(sorted, options, count * sizeof(*sorted));
    qsort(sorted, count, sizeof(*sorted), by_text);
    buf_puts(key, "// options");
    for (size_t i = 0; i < count; i++)
        buf_printf(key, " %s", sorted[i]);
    buf_puts(key, "\n");
    gen_free(sorted);
    return true;
}

static bool put_headers(struct buf *key, const struct gen_sources *sources)
{
    size_t count = (size_t)sources->count - 1;
    const struct gen_source **sorted = gen_realloc(NULL, (count + 1) * sizeof(*sorted));
    if (sorted == NULL)
        return false;
    for (size_t i = 0; i < count; i++)
        sorted[i] = &sources->files[i + 1];
    qsort(sorted, count, sizeof(*sorted), by_name);
    for (size_t i = 0; i < count; i++)
        put_file(key, "header", sorted[i]->name, sorted[i]->text.data);
    gen_free(sorted);
    return true;
}

/* false: no memory. */
static bool make_key(const struct gen_nvrtc *nvrtc, const struct gen_job *job, struct buf *key)
{
    buf_printf(key, "// fp8gen kernel cache %d\n// NVRTC %s\n// arch %s\n", GEN_CACHE_VERSION,
               gen_nvrtc_version(nvrtc), job->arch);
    bool good = put_options(key) && put_headers(key, job->sources);
    put_file(key, "source", job->kernel->template_name, job->kernel->body);
    return good && !key->failed;
}

/* ---- what stays in memory -------------------------------------------------------------------- */

struct kept {
    struct kept *next;
    char hash[33];
    char *key;
    size_t key_bytes;
    unsigned char *cubin;
    size_t cubin_bytes;
    char *log;
};

static struct kept *kept_kernels; /* under gen_shared_lock */

static void *copy(const void *data, size_t size)
{
    void *made = gen_realloc(NULL, size + 1);
    if (made != NULL) {
        memcpy(made, data, size);
        ((char *)made)[size] = '\0';
    }
    return made;
}

static bool find_kept(const struct gen_entry *entry, struct gen_job *job)
{
    bool found = false;
    gen_shared_lock();
    for (const struct kept *kept = kept_kernels; kept != NULL && !found; kept = kept->next) {
        if (strcmp(kept->hash, entry->hash) != 0 || kept->key_bytes != entry->key_bytes ||
            memcmp(kept->key, entry->key, entry->key_bytes) != 0)
            continue;
        job->cubin = copy(kept->cubin, kept->cubin_bytes);
        job->cubin_bytes = kept->cubin_bytes;
        job->log = copy(kept->log, strlen(kept->log));
        job->out_of_memory = job->cubin == NULL || job->log == NULL;
        found = true;
    }
    gen_shared_unlock();
    return found;
}

/* Without memory it is not kept, which costs time at most. */
static void keep(const struct gen_entry *entry, const struct gen_job *job)
{
    struct kept *kept = gen_realloc(NULL, sizeof(*kept));
    if (kept == NULL)
        return;
    const char *log = job->log != NULL ? job->log : "";
    *kept = (struct kept){ .key_bytes = entry->key_bytes, .cubin_bytes = job->cubin_bytes };
    memcpy(kept->hash, entry->hash, sizeof(kept->hash));
    kept->key = copy(entry->key, entry->key_bytes);
    kept->cubin = copy(job->cubin, job->cubin_bytes);
    kept->log = copy(log, strlen(log));
    if (kept->key == NULL || kept->cubin == NULL || kept->log == NULL) {
        gen_free(kept->key);
        gen_free(kept->cubin);
        gen_free(kept->log);
        gen_free(kept);
        return;
    }
    gen_shared_lock();
    kept->next = kept_kernels;
    kept_kernels = kept;
    gen_shared_unlock();
}

/* ---- hit and miss ---------------------------------------------------------------------------- */

static void take_file(void *user, const char *file, void *data, size_t size)
{
    struct gen_job *job = user;
    if (strcmp(file, CUBIN) == 0 && job->cubin == NULL) {
        job->cubin = data;
        job->cubin_bytes = size;
    } else if (strcmp(file, LOG) == 0 && job->log == NULL) {
        job->log = data;
    } else {
        gen_free(data);
    }
}

struct damage {
    bool found;
    int error; /* 0: not as it was written */
};

static bool load(const struct gen_store *store, const struct gen_entry *entry, struct gen_job *job,
                 struct damage *damage)
{
    enum gen_found found = gen_entry_find(store, entry, take_file, job);
    damage->error = found == GEN_DAMAGED ? errno : 0;
    if (found == GEN_FOUND && job->cubin != NULL && job->log != NULL)
        return true;
    gen_job_free(job);
    job->cubin_bytes = 0;
    damage->found = found != GEN_MISSING;
    return find_kept(entry, job);
}

static int store_files(const struct gen_store *store, const struct gen_entry *entry,
                       const struct gen_job *job)
{
    const char *log = job->log != NULL ? job->log : "";
    struct gen_writer writer;
    int error = gen_writer_begin(&writer, store, entry);
    if (error == 0 && entry->kind == GEN_KERNELS)
        error = gen_writer_put(&writer, CUBIN, job->cubin, job->cubin_bytes);
    if (error == 0)
        error = gen_writer_put(&writer, LOG, log, strlen(log));
    if (error == 0)
        error = gen_writer_commit(&writer);
    gen_writer_abandon(&writer);
    return error;
}

static void save(const struct gen_store *store, struct gen_entry entry, struct gen_job *job)
{
    if (job->out_of_memory)
        return;
    if (job->result != 0) {
        entry.kind = GEN_FAILED;
        if (store_files(store, &entry, job) == 0)
            job->kept_at = gen_entry_path(store, &entry, NULL);
        return;
    }
    int error = store_files(store, &entry, job);
    if (error == 0)
        return;
    if (store->fd >= 0)
        gen_store_warn(store, "cannot be written in", error);
    keep(&entry, job);
}

static void compile(const struct gen_store *store, const struct gen_nvrtc *nvrtc,
                    const struct gen_entry *entry, struct gen_job *job)
{
    gen_compile(nvrtc, job);
    gen_log(&store->log, GEN_LOG_INFO, "compiled %s for %s in %lld ms", job->kernel->unit,
            job->arch, (long long)job->milliseconds);
    save(store, *entry, job);
}

/* Not in the cache a moment ago: waits for whoever else makes it, then looks again. */
static void make(const struct gen_store *store, const struct gen_nvrtc *nvrtc,
                 const struct gen_entry *entry, struct gen_job *job)
{
    bool entered = gen_flight_enter(entry->hash);
    struct damage damage;
    if (!load(store, entry, job, &damage)) {
        gen_store_lock(store, entry);
        if (!load(store, entry, job, &damage)) {
            if (damage.found)
                gen_entry_log_damage(store, entry, damage.error);
            compile(store, nvrtc, entry, job);
        }
        gen_store_unlock(store, entry);
    }
    if (entered)
        gen_flight_leave(entry->hash);
}

void gen_cached_compile(const struct gen_store *store, const struct gen_nvrtc *nvrtc,
                        struct gen_job *job)
{
    struct buf key = { 0 };
    struct damage damage;
    if (make_key(nvrtc, job, &key)) {
        struct gen_entry entry = { GEN_KERNELS, job->kernel->unit, "", key.data, key.size };
        gen_hash(key.data, key.size, entry.hash);
        if (!load(store, &entry, job, &damage))
            make(store, nvrtc, &entry, job);
    } else {
        gen_compile(nvrtc, job);
    }
    buf_free(&key);
}
