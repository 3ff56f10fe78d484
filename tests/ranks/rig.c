/*
 * rig.c - see rig.h.
 */
#include "tests/ranks/rig.h"

#include <ftw.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "gen/fp8gen.h"

struct seat {
    struct rank rank;
    fp8_comm_group *group;
    rank_body body;
    int32_t device;
    pthread_t thread;
};

void rank_fault(struct rank *rank, const char *file, int line, const char *condition)
{
    if (rank->fault[0])
        return;
    snprintf(rank->fault, sizeof rank->fault, "%s:%d: rank %d of %d: %s (last error: %s)", file,
             line, rank->rank, rank->ranks, condition, fp8_last_error());
    fprintf(stderr, "%s\n", rank->fault); /* now: the other ranks may never end */
}

int says(const char *first, ...)
{
    const char *text = fp8_last_error();
    int good = 1;
    va_list words;
    va_start(words, first);
    for (const char *word = first; word; word = va_arg(words, const char *)) {
        if (!strstr(text, word)) {
            fprintf(stderr, "the error does not say '%s': %s\n", word, text);
            good = 0;
        }
    }
    va_end(words);
    return good;
}

static void *run(void *user)
{
    struct seat *seat = user;
    struct rank *rank = &seat->rank;
    fp8_context_options options = FP8_CONTEXT_OPTIONS_INIT;
    options.device = seat->device;
    options.threads = 1;
    if (fp8_context_create(&options, &rank->context) != FP8_OK ||
        fp8_comm_join(seat->group, rank->context, rank->rank, "test", &rank->comm) != FP8_OK)
        rank_fault(rank, __FILE__, __LINE__, "joins");
    else
        seat->body(rank);
    fp8_comm_destroy(rank->comm);
    fp8_context_destroy(rank->context);
    return NULL;
}

static void run_all(int32_t ranks, double timeout, rank_body body, void *user, bool gpus)
{
    fp8_comm_group *group = NULL;
    struct seat *seats = calloc((size_t)ranks, sizeof *seats);
    assert_non_null(seats);
    assert_int_equal(fp8_comm_group_create(ranks, timeout, &group), FP8_OK);
    for (int32_t i = 0; i < ranks; i++) {
        seats[i] = (struct seat){ .rank = { .rank = i, .ranks = ranks, .user = user },
                                  .group = group,
                                  .body = body,
                                  .device = gpus ? i : FP8_DEVICE_HOST };
        assert_int_equal(pthread_create(&seats[i].thread, NULL, run, &seats[i]), 0);
    }
    for (int32_t i = 0; i < ranks; i++)
        pthread_join(seats[i].thread, NULL);
    fp8_comm_group_destroy(group);
    int faults = 0;
    for (int32_t i = 0; i < ranks; i++)
        faults += seats[i].rank.fault[0] != 0;
    free(seats);
    assert_int_equal(faults, 0);
}

void ranks_run(int32_t ranks, double timeout, rank_body body, void *user)
{
    run_all(ranks, timeout, body, user, false);
}

void ranks_run_gpus(int32_t ranks, double timeout, rank_body body, void *user)
{
    run_all(ranks, timeout, body, user, true);
}

int ranks_gpus(void)
{
    for (int count = 0;; count++) {
        fp8_context *context = NULL;
        fp8_context_options options = FP8_CONTEXT_OPTIONS_INIT;
        options.device = count;
        if (fp8_context_create(&options, &context) != FP8_OK)
            return count;
        fp8_context_destroy(context);
    }
}

/* ---- bundles ---- */

void ranks_bundle(const char *spec, const char *arch, char path[256])
{
    const char *temporary = getenv("TMPDIR");
    snprintf(path, 240, "%s/fp8gen-test-XXXXXX", temporary ? temporary : "/tmp");
    assert_non_null(mkdtemp(path));
    strcat(path, "/bundle");
    fp8gen *gen = NULL;
    fp8gen_build_options options = FP8GEN_BUILD_OPTIONS_INIT;
    options.archs = arch;
    options.output_dir = path;
    assert_int_equal(fp8gen_open(NULL, &gen), FP8GEN_OK);
    fp8gen_status status = fp8gen_load_text(gen, "test.lua", spec, strlen(spec));
    if (status == FP8GEN_OK)
        status = fp8gen_build(gen, &options);
    if (status != FP8GEN_OK)
        print_error("%s", fp8gen_diagnostics(gen));
    fp8gen_close(gen);
    assert_int_equal(status, FP8GEN_OK);
}

static int remove_entry(const char *path, const struct stat *status, int flag, struct FTW *place)
{
    (void)status, (void)flag, (void)place;
    return remove(path);
}

void ranks_bundle_drop(const char *path)
{
    char folder[256];
    snprintf(folder, sizeof folder, "%s", path);
    *strrchr(folder, '/') = 0;
    nftw(folder, remove_entry, 8, FTW_DEPTH | FTW_PHYS);
}
