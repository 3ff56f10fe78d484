/*
 * compile.c - all compilations of a plan: which headers each template needs, and the threads.
 *
 * In: a plan with its kernels, a list of archs. Out: checked jobs, each with its cubin.
 *
 * NVRTC writes the current folder into the line table of a cubin, which would make equal kernels
 * differ from folder to folder. A worker therefore takes a current folder of its own (unshare) and
 * goes to "/"; the process's stays as it is. Where the kernel forbids that, only the bytes suffer.
 *
 * The longest text first: a large kernel that is begun last keeps one core busy while others idle.
 */
#include "gen/cache.h"

#include <ctype.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "runtime/thread.h"

/* ---- headers --------------------------------------------------------------------------------- */

enum { SOURCES_MAX = 64 };

/* The name in a line `#include "name"`, as a copy in the arena; NULL for any other line, and for a
 * name that is no plain file name, of which NVRTC then says that it cannot be opened. */
static const char *included_name(struct fp8gen *gen, const char *line)
{
    static const char word[] = "include";
    line += strspn(line, " \t");
    if (*line++ != '#')
        return NULL;
    line += strspn(line, " \t");
    if (strncmp(line, word, sizeof(word) - 1) != 0)
        return NULL;
    line += sizeof(word) - 1;
    line += strspn(line, " \t");
    if (*line++ != '"')
        return NULL;
    size_t length = 0;
    while (isalnum((unsigned char)line[length]) || strchr("_-.", line[length]) != NULL) {
        if (line[length] == '\0')
            return NULL;
        length++;
    }
    if (line[length] != '"' || length == 0 || line[0] == '.')
        return NULL;
    return arena_copy(&gen->arena, line, length);
}

static bool has_source(const struct gen_sources *sources, const char *name)
{
    for (int32_t i = 0; i < sources->count; i++)
        if (strcmp(sources->files[i].name, name) == 0)
            return true;
    return false;
}

static fp8gen_status add_source(struct fp8gen *gen, struct gen_sources *sources, const char *name)
{
    if (has_source(sources, name))
        return FP8GEN_OK;
    if (sources->count == SOURCES_MAX)
        return gen_fail(gen, FP8GEN_ERR_SPEC, NULL, "%s includes more than %d files",
                        sources->files[0].name, SOURCES_MAX - 1);
    struct gen_source *source = &sources->files[sources->count];
    source->name = name;
    fp8gen_status status = gen_template(gen, name, &source->text);
    if (status == FP8GEN_OK)
        sources->count++;
    return status;
}

/* Adds what one text includes. */
static fp8gen_status add_includes(struct fp8gen *gen, struct gen_sources *sources, const char *text)
{
    for (const char *line = text; line != NULL && *line != '\0';) {
        const char *name = included_name(gen, line);
        fp8gen_status status = name != NULL ? add_source(gen, sources, name) : FP8GEN_OK;
        if (status != FP8GEN_OK)
            return status;
        line = strchr(line, '\n');
        if (line != NULL)
            line++;
    }
    return FP8GEN_OK;
}

static fp8gen_status find_sources(struct fp8gen *gen, const struct gen_kernel *kernel,
                                  struct gen_sources *sources)
{
    sources->files = arena_alloc(&gen->arena, SOURCES_MAX * sizeof(*sources->files));
    if (sources->files == NULL)
        return gen_out_of_memory(gen);
    fp8gen_status status = add_source(gen, sources, kernel->template_name);
    if (status == FP8GEN_OK)
        status = add_includes(gen, sources, kernel->body);
    for (int32_t i = 1; status == FP8GEN_OK && i < sources->count; i++)
        status = add_includes(gen, sources, sources->files[i].text.data);
    return status;
}

/* ---- jobs ------------------------------------------------------------------------------------ */

bool gen_kernel_exists_for(const struct gen_kernel *kernel, const char *arch)
{
    if (kernel->archs == NULL)
        return true;
    for (size_t i = 0; i < json_array_size(kernel->archs); i++)
        if (strcmp(json_string_value(json_array_get(kernel->archs, i)), arch) == 0)
            return true;
    return false;
}

/* Kernels of one entry are one text, compiled for the first of them. */
static bool is_another(const struct gen_plan *plan, size_t index)
{
    for (size_t i = 0; i < index; i++)
        if (strcmp(plan->kernels[i].entry, plan->kernels[index].entry) == 0)
            return true;
    return false;
}

fp8gen_status gen_make_jobs(struct fp8gen *gen, const struct gen_plan *plan,
                            const char *const *archs, struct gen_jobs *jobs)
{
    size_t arch_count = 0, kernel_count = (size_t)plan->count;
    while (archs[arch_count] != NULL)
        arch_count++;
    jobs->list = arena_alloc(&gen->arena, kernel_count * arch_count * sizeof(*jobs->list) + 1);
    struct gen_sources *sources = arena_alloc(&gen->arena, kernel_count * sizeof(*sources) + 1);
    if (jobs->list == NULL || sources == NULL)
        return gen_out_of_memory(gen);
    for (size_t i = 0; i < kernel_count && arch_count > 0; i++) {
        if (is_another(plan, i))
            continue;
        fp8gen_status status = find_sources(gen, &plan->kernels[i], &sources[i]);
        if (status != FP8GEN_OK)
            return status;
        for (size_t j = 0; j < arch_count; j++)
            if (gen_kernel_exists_for(&plan->kernels[i], archs[j]))
                jobs->list[jobs->count++] = (struct gen_job){ .kernel = &plan->kernels[i],
                                                              .sources = &sources[i],
                                                              .arch = archs[j] };
    }
    return FP8GEN_OK;
}

void gen_jobs_free(struct gen_jobs *jobs)
{
    for (int32_t i = 0; i < jobs->count; i++)
        gen_job_free(&jobs->list[i]);
}

/* ---- threads --------------------------------------------------------------------------------- */

enum { THREADS_MAX = 64 };

struct work {
    const struct gen_nvrtc *nvrtc;
    struct gen_jobs *jobs;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    int32_t next;        /* to be taken ... */
    const int32_t *plan; /* ... and which that is */
    int32_t done;        /* finished ... */
    int32_t *order;      /* ... and which, in order */
};

struct weighed {
    size_t bytes;
    int32_t index;
};

static int heavier(const void *a, const void *b)
{
    const struct weighed *x = a, *y = b;
    if (x->bytes != y->bytes)
        return x->bytes < y->bytes ? 1 : -1;
    return x->index - y->index;
}

/* The jobs by the bytes of text that NVRTC reads, most first; NULL when out of memory. */
static const int32_t *plan_work(struct fp8gen *gen, const struct gen_jobs *jobs)
{
    size_t count = (size_t)jobs->count;
    struct weighed *list = arena_alloc(&gen->arena, count * sizeof(*list));
    int32_t *plan = arena_alloc(&gen->arena, count * sizeof(*plan));
    if (list == NULL || plan == NULL)
        return NULL;
    for (int32_t i = 0; i < jobs->count; i++) {
        const struct gen_job *job = &jobs->list[i];
        list[i] = (struct weighed){ strlen(job->kernel->body), i };
        for (int32_t j = 1; j < job->sources->count; j++)
            list[i].bytes += job->sources->files[j].text.size;
    }
    qsort(list, count, sizeof(*list), heavier);
    for (size_t i = 0; i < count; i++)
        plan[i] = list[i].index;
    return plan;
}

static void *work_thread(void *user)
{
    struct work *work = user;
    bool own_folder = unshare(CLONE_FS) == 0 && chdir("/") == 0;
    (void)own_folder;
    pthread_mutex_lock(&work->lock);
    while (work->next < work->jobs->count) {
        int32_t index = work->plan[work->next++];
        pthread_mutex_unlock(&work->lock);
        if (work->jobs->cache != NULL)
            gen_cached_compile(work->jobs->cache, work->nvrtc, &work->jobs->list[index]);
        else
            gen_compile(work->nvrtc, &work->jobs->list[index]);
        pthread_mutex_lock(&work->lock);
        work->order[work->done++] = index;
        pthread_cond_signal(&work->changed);
    }
    pthread_mutex_unlock(&work->lock);
    return NULL;
}

/* Tells of each finished job on this thread, until the last. */
static void follow(struct work *work, gen_progress progress, void *user)
{
    int32_t total = work->jobs->count;
    pthread_mutex_lock(&work->lock);
    for (int32_t told = 0; told < total; told++) {
        while (work->done <= told)
            pthread_cond_wait(&work->changed, &work->lock);
        const char *name = work->jobs->list[work->order[told]].kernel->unit;
        pthread_mutex_unlock(&work->lock);
        if (progress != NULL)
            progress(user, name, told + 1, total);
        pthread_mutex_lock(&work->lock);
    }
    pthread_mutex_unlock(&work->lock);
}

static int32_t thread_count(int32_t wanted, int32_t jobs)
{
    if (wanted == 0) {
        long cores = sysconf(_SC_NPROCESSORS_ONLN);
        wanted = cores > 0 && cores < THREADS_MAX ? (int32_t)cores : 1;
    }
    if (wanted > jobs)
        wanted = jobs;
    return wanted < THREADS_MAX ? wanted : THREADS_MAX;
}

/* Starts the threads; with at least one, all jobs get done. */
static fp8gen_status run_threads(struct fp8gen *gen, struct work *work, int32_t count,
                                 gen_progress progress, void *user)
{
    pthread_t threads[THREADS_MAX];
    int32_t started = 0;
    int error = 0;
    while (started < count && error == 0) {
        error = fp8_thread_start(&threads[started], work_thread, work);
        if (error == 0)
            started++;
    }
    if (started == 0)
        return gen_fail(gen, FP8GEN_ERR_MACHINE, NULL, "cannot start a thread: %s",
                        strerror(error));
    follow(work, progress, user);
    for (int32_t i = 0; i < started; i++)
        pthread_join(threads[i], NULL);
    return FP8GEN_OK;
}

fp8gen_status gen_run_jobs(struct fp8gen *gen, struct gen_jobs *jobs, int32_t threads,
                           gen_progress progress, void *user)
{
    if (jobs->count == 0)
        return FP8GEN_OK;
    struct work work = {
        .nvrtc = gen->nvrtc,
        .jobs = jobs,
        .lock = PTHREAD_MUTEX_INITIALIZER,
        .changed = PTHREAD_COND_INITIALIZER,
        .plan = plan_work(gen, jobs),
        .order = arena_alloc(&gen->arena, (size_t)jobs->count * sizeof(int32_t)),
    };
    if (work.order == NULL || work.plan == NULL)
        return gen_out_of_memory(gen);
    fp8gen_status status =
        run_threads(gen, &work, thread_count(threads, jobs->count), progress, user);
    if (status != FP8GEN_OK)
        return status;
    struct buf seen = { 0 };
    for (int32_t i = 0; i < jobs->count; i++) {
        fp8gen_status checked = gen_check_job(gen, &jobs->list[i], &seen);
        if (status == FP8GEN_OK)
            status = checked;
    }
    buf_free(&seen);
    return status;
}
