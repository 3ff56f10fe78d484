/*
 * thread.c - see thread.h: the clock, deadlines on it, and threads without signals.
 *
 * Knows no other file. Of what pthreads offers here only the start of a thread can
 * fail on Linux; that is told to the caller, who has a sentence for it.
 */
#include "runtime/thread.h"

#include <signal.h>

static struct timespec to_timespec(double seconds)
{
    const time_t whole = (time_t)seconds;
    return (struct timespec){ whole, (long)((seconds - (double)whole) * 1e9) };
}

double fp8_clock(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

void fp8_sleep(double seconds)
{
    const struct timespec time = to_timespec(seconds);
    nanosleep(&time, NULL);
}

struct timespec fp8_deadline(double seconds)
{
    return to_timespec(fp8_clock() + seconds);
}

void fp8_condition_init(pthread_cond_t *condition)
{
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(condition, &monotonic);
    pthread_condattr_destroy(&monotonic);
}

int fp8_thread_start(pthread_t *thread, void *(*body)(void *), void *user)
{
    sigset_t all, old;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    const int error = pthread_create(thread, NULL, body, user);
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    return error;
}
