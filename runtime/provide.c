/*
 * provide.c - layers by description: from bundles given or open already, or a provider.
 *
 * In: descriptions. Out: layers that the context owns, one for each description, however many
 * threads ask. A description that is new is worked on by the first thread that brings it; others
 * that bring the same one wait, all else goes on: no lock is held while a provider compiles or a
 * bundle is opened. A failure is told to all who waited and then forgotten: the next call tries.
 * What is ready is found without any lock. A layer is not begun inside the capture of a graph.
 *
 * Knows nothing of specs or compilers: a provider gets the description and gives a path.
 */
#include <inttypes.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

#include "runtime/internal.h"

enum { PATH_BYTES = 4096, WORKERS_MAX = 8 };

struct open_bundle {
    struct open_bundle *next;
    fp8_bundle *bundle;
    bool given; /* by the caller; else by the provider */
};

enum state { WORKING, READY, FAILED };

struct record {
    struct record *next;
    struct record *next_ready;
    enum state state;
    int waiting;
    pthread_t worker;             /* while it is WORKING ... */
    const struct record *awaited; /* ... and what that thread waits for meanwhile; NULL = nothing */
    fp8_layer_description description; /* with defaults filled in; its texts are our own */
    fp8_layer *layer;
    fp8_status status;
    char message[1024];
};

/* A path that a thread is opening; on its stack. */
struct opening {
    struct opening *next;
    const char *path;
};

struct fp8_registry {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    fp8_provider provider;
    void *provider_user;
    struct open_bundle *bundles; /* in the order in which they came */
    struct opening *opening;
    struct record *records;
    _Atomic(struct record *)
        ready; /* those that are; they stay, so they are read without the lock */
};

/* ---- the registry itself ---- */

fp8_status fp8_registry_create(struct fp8_registry **registry)
{
    struct fp8_registry *made = fp8_allocate(sizeof *made);
    if (!made)
        return fp8_fail_memory("a context", sizeof *made);
    pthread_mutex_init(&made->lock, NULL);
    pthread_cond_init(&made->changed, NULL);
    *registry = made;
    return FP8_OK;
}

static void free_record(struct record *record)
{
    fp8_layer_destroy(record->layer);
    fp8_release((char *)record->description.recipe);
    fp8_release((char *)record->description.format);
    fp8_release((char *)record->description.compute);
    fp8_release((char *)record->description.algo);
    fp8_release((char *)record->description.spec);
    fp8_release((char *)record->description.layer);
    fp8_release(record);
}

void fp8_registry_destroy(struct fp8_registry *registry)
{
    if (!registry)
        return;
    while (registry->records) {
        struct record *next = registry->records->next;
        free_record(registry->records);
        registry->records = next;
    }
    while (registry->bundles) {
        struct open_bundle *next = registry->bundles->next;
        fp8_bundle_close(registry->bundles->bundle);
        fp8_release(registry->bundles);
        registry->bundles = next;
    }
    pthread_cond_destroy(&registry->changed);
    pthread_mutex_destroy(&registry->lock);
    fp8_release(registry);
}

/* Appends; the lock is held. */
static fp8_status add_bundle(struct fp8_registry *registry, fp8_bundle *bundle, bool given)
{
    struct open_bundle *made = fp8_allocate(sizeof *made);
    if (!made)
        return fp8_fail_memory("a bundle", sizeof *made);
    *made = (struct open_bundle){ .bundle = bundle, .given = given };
    struct open_bundle **end = &registry->bundles;
    while (*end)
        end = &(*end)->next;
    *end = made;
    return FP8_OK;
}

fp8_status fp8_context_add_bundle(fp8_context *context, fp8_bundle *bundle)
{
    if (!context || !bundle)
        return fp8_fail(FP8_ERR_ARGUMENT, "context_add_bundle: %s is NULL",
                        context ? "bundle" : "context");
    if (bundle->context != context)
        return fp8_fail(FP8_ERR_ARGUMENT,
                        "context_add_bundle: the bundle %s was opened on another context",
                        bundle->path);
    struct fp8_registry *registry = context->registry;
    pthread_mutex_lock(&registry->lock);
    fp8_status status = FP8_OK;
    for (struct open_bundle *at = registry->bundles; at && status == FP8_OK; at = at->next) {
        if (at->bundle == bundle)
            status = fp8_fail(FP8_ERR_ARGUMENT, "context_add_bundle: the context has the bundle %s",
                              bundle->path);
    }
    if (status == FP8_OK)
        status = add_bundle(registry, bundle, true);
    pthread_mutex_unlock(&registry->lock);
    return status;
}

fp8_status fp8_context_set_provider(fp8_context *context, fp8_provider provider, void *user)
{
    if (!context)
        return fp8_fail(FP8_ERR_ARGUMENT, "context_set_provider: context is NULL");
    pthread_mutex_lock(&context->registry->lock);
    context->registry->provider = provider;
    context->registry->provider_user = user;
    pthread_mutex_unlock(&context->registry->lock);
    return FP8_OK;
}

/* ---- records ---- */

static char *own_text(const char *text, bool *failed)
{
    size_t bytes = text ? strlen(text) + 1 : 0;
    char *copy = text ? fp8_allocate(bytes) : NULL;
    *failed = *failed || (text && !copy);
    return copy ? memcpy(copy, text, bytes) : NULL;
}

static struct record *new_record(const fp8_layer_description *description)
{
    struct record *record = fp8_allocate(sizeof *record);
    if (!record)
        return NULL;
    bool failed = false;
    record->description = *description;
    record->description.recipe = own_text(description->recipe, &failed);
    record->description.format = own_text(description->format, &failed);
    record->description.compute = own_text(description->compute, &failed);
    record->description.algo = own_text(description->algo, &failed);
    record->description.spec = own_text(description->spec, &failed);
    record->description.layer = own_text(description->layer, &failed);
    if (failed) {
        free_record(record);
        return NULL;
    }
    return record;
}

/* ---- which layer of a bundle ---- */

/* The name of the bundle's layer that the description means; NULL if there is none. */
static const char *layer_in(const fp8_bundle *bundle, const fp8_layer_description *d)
{
    const struct fp8_manifest *manifest = &bundle->manifest;
    for (int i = 0; i < manifest->layer_count; i++) {
        const struct fp8_layer_plan *plan = &manifest->layers[i];
        bool wanted =
            d->spec ? (d->layer ? strcmp(plan->name, d->layer) == 0 : manifest->layer_count == 1)
                    : fp8_description_fits(plan, d);
        if (wanted)
            return plan->name;
    }
    return NULL;
}

/* ---- making a layer ---- */

static fp8_status no_such_layer(const fp8_bundle *bundle, const fp8_layer_description *d)
{
    char name[128];
    if (d->spec && !d->layer)
        return fp8_fail(FP8_ERR_ARGUMENT,
                        "context_layer: the spec has %d layers; name one in description->layer",
                        bundle->manifest.layer_count);
    return fp8_fail(d->spec ? FP8_ERR_NOT_FOUND : FP8_ERR_BUNDLE,
                    "context_layer: the bundle %s has no such layer: %s", bundle->path,
                    fp8_description_name(d, name));
}

static fp8_status call_provider(fp8_context *context, const fp8_layer_description *d,
                                char path[PATH_BYTES])
{
    struct fp8_registry *registry = context->registry;
    pthread_mutex_lock(&registry->lock);
    fp8_provider provider = registry->provider;
    void *user = registry->provider_user;
    pthread_mutex_unlock(&registry->lock);
    char name[128];
    if (!provider)
        return fp8_fail(FP8_ERR_NOT_FOUND,
                        "context_layer: no bundle of the context has this %s, and the context has "
                        "no provider",
                        fp8_description_name(d, name));
    memset(path, 0, PATH_BYTES);
    fp8_status status = (fp8_status)provider(user, d, path, PATH_BYTES);
    path[PATH_BYTES - 1] = '\0';
    if (status != FP8_OK)
        return fp8_fail(status, "context_layer: no bundle for this %s: %s",
                        fp8_description_name(d, name), path[0] ? path : fp8_status_name(status));
    return FP8_OK;
}

/* The open bundle at this path, or NULL; the lock is held. */
static fp8_bundle *find_path(const struct fp8_registry *registry, const char *path)
{
    for (const struct open_bundle *at = registry->bundles; at; at = at->next) {
        if (!at->given && strcmp(at->bundle->path, path) == 0)
            return at->bundle;
    }
    return NULL;
}

static bool is_opening(const struct fp8_registry *registry, const char *path)
{
    const struct opening *at = registry->opening;
    while (at && strcmp(at->path, path) != 0)
        at = at->next;
    return at != NULL;
}

static void end_opening(struct fp8_registry *registry, const struct opening *mine)
{
    struct opening **at = &registry->opening;
    while (*at != mine)
        at = &(*at)->next;
    *at = mine->next;
    pthread_cond_broadcast(&registry->changed);
}

/* One thread opens a path, the others that want it wait. Where that fails each tries for itself. */
static fp8_status open_path(fp8_context *context, const char *path, fp8_bundle **bundle)
{
    struct fp8_registry *registry = context->registry;
    struct opening mine = { .path = path };
    pthread_mutex_lock(&registry->lock);
    while (!(*bundle = find_path(registry, path)) && is_opening(registry, path))
        pthread_cond_wait(&registry->changed, &registry->lock);
    if (*bundle) {
        pthread_mutex_unlock(&registry->lock);
        return FP8_OK;
    }
    mine.next = registry->opening;
    registry->opening = &mine;
    pthread_mutex_unlock(&registry->lock);
    fp8_bundle *opened = NULL;
    fp8_status status = fp8_bundle_open(context, path, &opened);
    pthread_mutex_lock(&registry->lock);
    if (status == FP8_OK)
        status = add_bundle(registry, opened, false);
    end_opening(registry, &mine);
    pthread_mutex_unlock(&registry->lock);
    if (status == FP8_OK)
        *bundle = opened;
    else
        fp8_bundle_close(opened);
    return status;
}

static void warn_unprepared(const fp8_context *context, const fp8_bundle *bundle,
                            const fp8_layer_description *d, int64_t milliseconds)
{
    char name[128], kernels[512] = "";
    size_t at = 0;
    for (int i = 0; i < bundle->manifest.kernel_count && at + 1 < sizeof kernels; i++) {
        int length = snprintf(kernels + at, sizeof kernels - at, "%s%s", i ? ", " : "",
                              bundle->manifest.kernels[i].name);
        at += length > 0 ? (size_t)length : 0;
    }
    fp8_log_write(&context->log, FP8_LOG_WARNING,
                  "%s: not prepared, its bundle took %" PRId64
                  " ms inside a step; fp8_context_prepare makes it beforehand",
                  fp8_description_name(d, name), milliseconds);
    fp8_log_write(&context->log, FP8_LOG_INFO, "%s: kernels %s", name, kernels);
}

/* A provider's bundle; a second time if the first was damaged or removed between its check and
 * ours. */
static fp8_status provide(fp8_context *context, const fp8_layer_description *d, bool preparing,
                          fp8_bundle **bundle)
{
    char path[PATH_BYTES];
    const double start = fp8_clock();
    fp8_status status = FP8_ERR_BUNDLE;
    for (int tries = 0; tries < 2 && status == FP8_ERR_BUNDLE; tries++) {
        FP8_TRY(call_provider(context, d, path));
        status = open_path(context, path, bundle);
    }
    if (status == FP8_OK && !preparing)
        warn_unprepared(context, *bundle, d, (int64_t)(1e3 * (fp8_clock() - start)));
    return status;
}

/* A bundle that was given and has the layer; NULL if none has. */
static fp8_bundle *find_given(struct fp8_registry *registry, const fp8_layer_description *d)
{
    fp8_bundle *found = NULL;
    pthread_mutex_lock(&registry->lock);
    for (struct open_bundle *at = registry->bundles; at && !found && !d->spec; at = at->next) {
        if (at->given && layer_in(at->bundle, d))
            found = at->bundle;
    }
    pthread_mutex_unlock(&registry->lock);
    return found;
}

static fp8_status make_layer(fp8_context *context, const fp8_layer_description *described,
                             bool preparing, fp8_layer **layer)
{
    fp8_layer_description d = *described;
    d.arch = context->arch;
    fp8_bundle *bundle = find_given(context->registry, &d);
    if (!bundle)
        FP8_TRY(provide(context, &d, preparing, &bundle));
    const char *name = layer_in(bundle, &d);
    if (!name)
        return no_such_layer(bundle, &d);
    return fp8_layer_create(bundle, name, layer);
}

/* ---- one record per description ---- */

static struct record *find_record(struct fp8_registry *registry, const fp8_layer_description *d)
{
    struct record *record = registry->records;
    while (record && !fp8_description_equal(&record->description, d))
        record = record->next;
    return record;
}

static const struct record *find_ready(struct fp8_registry *registry,
                                       const fp8_layer_description *d)
{
    const struct record *record = atomic_load_explicit(&registry->ready, memory_order_acquire);
    while (record && !fp8_description_equal(&record->description, d))
        record = record->next_ready;
    return record;
}

/* Takes a failed record out, so that the next call begins anew; whoever still waits frees it. */
static void unlink_record(struct fp8_registry *registry, struct record *record)
{
    struct record **at = &registry->records;
    while (*at != record)
        at = &(*at)->next;
    *at = record->next;
}

/* Not inside a capture; what another thread captures is not disturbed. */
static fp8_status make_uncaptured(fp8_context *context, const fp8_layer_description *d,
                                  bool preparing, fp8_layer **layer)
{
    struct fp8_uncaptured entered;
    FP8_TRY(fp8_uncaptured_enter(context, preparing ? "context_prepare" : "context_layer",
                                 d->stream, &entered));
    fp8_status status = make_layer(context, d, preparing, layer);
    fp8_uncaptured_leave(context, &entered);
    return status;
}

/* Makes the layer of a fresh record; the lock is held, but not meanwhile. */
static void work(fp8_context *context, struct record *record, bool preparing)
{
    struct fp8_registry *registry = context->registry;
    pthread_mutex_unlock(&registry->lock);
    fp8_layer *layer = NULL;
    fp8_status status = make_uncaptured(context, &record->description, preparing, &layer);
    pthread_mutex_lock(&registry->lock);
    record->layer = layer;
    record->status = status;
    record->state = status == FP8_OK ? READY : FAILED;
    if (status == FP8_OK) {
        record->next_ready = atomic_load_explicit(&registry->ready, memory_order_relaxed);
        atomic_store_explicit(&registry->ready, record, memory_order_release);
    } else {
        snprintf(record->message, sizeof record->message, "%s", fp8_last_error());
        unlink_record(registry, record);
    }
    pthread_cond_broadcast(&registry->changed);
}

/* A provider asks the context for layers itself: would this thread, at work on others, wait for a
 * record whose worker waits for one of these? The lock is held. */
static bool waits_for_itself(const struct record *record)
{
    while (record && record->state == WORKING && !pthread_equal(record->worker, pthread_self()))
        record = record->awaited;
    return record && record->state == WORKING;
}

static void note_waiting(struct fp8_registry *registry, const struct record *awaited)
{
    for (struct record *at = registry->records; at; at = at->next) {
        if (at->state == WORKING && pthread_equal(at->worker, pthread_self()))
            at->awaited = awaited;
    }
}

static fp8_status refuse_recursion(const struct record *record)
{
    char name[128];
    return fp8_fail(
        FP8_ERR_ARGUMENT,
        "context_layer: the provider, asked for a bundle with this %s, asks the context for "
        "that layer, which waits for the provider; it must make the bundle, or fail",
        fp8_description_name(&record->description, name));
}

/* Until a record of another thread is done; the lock is held, but not meanwhile. */
static void await(struct fp8_registry *registry, const struct record *record)
{
    note_waiting(registry, record);
    while (record->state == WORKING)
        pthread_cond_wait(&registry->changed, &registry->lock);
    note_waiting(registry, NULL);
}

static fp8_status get_layer(fp8_context *context, const fp8_layer_description *given,
                            bool preparing, const fp8_layer **layer)
{
    fp8_layer_description d = fp8_description_fill(given);
    struct fp8_registry *registry = context->registry;
    const struct record *ready = find_ready(registry, &d);
    if (ready) {
        *layer = ready->layer;
        return FP8_OK;
    }
    pthread_mutex_lock(&registry->lock);
    struct record *record = find_record(registry, &d);
    bool mine = record == NULL;
    if (mine) {
        record = new_record(&d);
        if (!record) {
            pthread_mutex_unlock(&registry->lock);
            return fp8_fail_memory("a layer", sizeof *record);
        }
        record->worker = pthread_self();
        record->next = registry->records;
        registry->records = record;
    } else if (waits_for_itself(record)) {
        fp8_status refused = refuse_recursion(record);
        pthread_mutex_unlock(&registry->lock);
        return refused;
    }
    record->waiting++;
    if (mine)
        work(context, record, preparing);
    else
        await(registry, record);
    record->waiting--;
    fp8_status status = record->status;
    *layer = record->layer;
    if (status != FP8_OK && !mine)
        (void)fp8_fail(status, "%s", record->message);
    if (status != FP8_OK && record->waiting == 0)
        free_record(record);
    pthread_mutex_unlock(&registry->lock);
    return status;
}

fp8_status fp8_context_layer(fp8_context *context, const fp8_layer_description *description,
                             const fp8_layer **layer)
{
    if (!layer)
        return fp8_fail(FP8_ERR_ARGUMENT, "context_layer: layer is NULL");
    *layer = NULL;
    if (!context)
        return fp8_fail(FP8_ERR_ARGUMENT, "context_layer: context is NULL");
    fp8_status status = fp8_description_check("context_layer", description);
    if (status == FP8_OK)
        status = get_layer(context, description, false, layer);
    return fp8_report(context, status);
}

/* ---- preparing many ---- */

struct preparation {
    fp8_context *context;
    const fp8_layer_description *descriptions;
    size_t count;
    atomic_size_t next;
    pthread_mutex_t lock;
    size_t failed; /* the first description that failed; count if none has */
    fp8_status status;
    char message[1024];
};

static void *prepare_thread(void *user)
{
    struct preparation *p = user;
    size_t index;
    while ((index = atomic_fetch_add(&p->next, 1)) < p->count) {
        const fp8_layer *layer;
        fp8_status status = get_layer(p->context, &p->descriptions[index], true, &layer);
        if (status == FP8_OK)
            continue;
        pthread_mutex_lock(&p->lock);
        if (index < p->failed) {
            p->failed = index;
            p->status = status;
            snprintf(p->message, sizeof p->message, "%s", fp8_last_error());
        }
        pthread_mutex_unlock(&p->lock);
    }
    return NULL;
}

static void run_preparation(struct preparation *p)
{
    pthread_t threads[WORKERS_MAX];
    int started = 0;
    while (started < WORKERS_MAX - 1 && (size_t)started + 1 < p->count &&
           fp8_thread_start(&threads[started], prepare_thread, p) == 0)
        started++;
    prepare_thread(p); /* this thread works too, so that all get done whatever could be started */
    for (int i = 0; i < started; i++)
        pthread_join(threads[i], NULL);
}

fp8_status fp8_context_prepare(fp8_context *context, const fp8_layer_description *descriptions,
                               size_t count)
{
    if (!context || (!descriptions && count > 0))
        return fp8_fail(FP8_ERR_ARGUMENT, "context_prepare: %s is NULL",
                        context ? "descriptions" : "context");
    for (size_t i = 0; i < count; i++) {
        char call[96];
        snprintf(call, sizeof call, "context_prepare: description %zu of %zu", i + 1, count);
        FP8_TRY(fp8_report(context, fp8_description_check(call, &descriptions[i])));
    }
    struct preparation p = { .context = context, .descriptions = descriptions, .count = count };
    p.failed = count;
    pthread_mutex_init(&p.lock, NULL);
    run_preparation(&p);
    pthread_mutex_destroy(&p.lock);
    if (p.failed == count)
        return FP8_OK;
    return fp8_report(
        context, fp8_fail(p.status, "description %zu of %zu: %s", p.failed + 1, count, p.message));
}
