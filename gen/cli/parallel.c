/*
 * parallel.c - a loop over all cores, for random data and reference sums.
 *
 * Threads are started for each loop: the program runs a few hundred loops of milliseconds, so a
 * pool would save nothing that can be seen. The indices are handed out one by one, results must not
 * depend on which thread ran them. If a thread cannot be started, the others do its share.
 */
#include <pthread.h>
#include <stdatomic.h>
#include <unistd.h>

#include "gen/cli/cli.h"

#define MAX_THREADS 64

struct loop {
    atomic_llong next;
    int64_t count;
    void (*run)(void *user, int64_t index);
    void *user;
};

int cli_cores(void)
{
    long cores = sysconf(_SC_NPROCESSORS_ONLN);
    return cores < 1 ? 1 : (int)cores;
}

static void *work(void *argument)
{
    struct loop *loop = argument;
    for (;;) {
        int64_t index = atomic_fetch_add(&loop->next, 1);
        if (index >= loop->count)
            return NULL;
        loop->run(loop->user, index);
    }
}

void cli_parallel(int64_t count, void (*run)(void *user, int64_t index), void *user)
{
    pthread_t threads[MAX_THREADS];
    struct loop loop = { .count = count, .run = run, .user = user };
    int wanted = cli_cores() < MAX_THREADS ? cli_cores() : MAX_THREADS, started = 0;
    if (wanted > count)
        wanted = (int)count;
    for (int i = 1; i < wanted; i++) {
        if (pthread_create(&threads[started], NULL, work, &loop) == 0)
            started++;
    }
    work(&loop);
    for (int i = 0; i < started; i++)
        pthread_join(threads[i], NULL);
}
