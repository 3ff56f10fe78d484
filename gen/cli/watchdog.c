/*
 * watchdog.c - ends the program if work on the device is not over in time.
 *
 * A kernel that never ends blocks every call that waits for the device, and no call can take it
 * back. So a thread of its own watches the clock: when the time is up it says what was running and
 * ends the process, which gives the device back. What was printed before stays.
 */
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#include "gen/cli/cli.h"

static struct {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    bool started, armed;
    const char *what;
    double seconds;
    struct timespec end;
} dog = { .lock = PTHREAD_MUTEX_INITIALIZER };

static void bark(void)
{
    cli_progress_end();
    cli_error("%s is not over after %.0f seconds: the device is stuck", dog.what, dog.seconds);
    cli_hint("report this as a bug of fp8gen; what was printed or written before is whole");
    fflush(stdout);
    _exit(CLI_BUG);
}

static void *watch(void *argument)
{
    (void)argument;
    pthread_mutex_lock(&dog.lock);
    for (;;) {
        if (!dog.armed)
            pthread_cond_wait(&dog.changed, &dog.lock);
        else if (pthread_cond_timedwait(&dog.changed, &dog.lock, &dog.end) == ETIMEDOUT) {
            struct timespec now;
            clock_gettime(CLOCK_MONOTONIC, &now);
            if (dog.armed && (now.tv_sec > dog.end.tv_sec ||
                              (now.tv_sec == dog.end.tv_sec && now.tv_nsec >= dog.end.tv_nsec)))
                bark();
        }
    }
    return NULL;
}

static int start(void)
{
    pthread_condattr_t attributes;
    pthread_t thread;
    bool failed = pthread_condattr_init(&attributes) != 0;
    if (!failed) {
        failed = pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC) != 0 ||
                 pthread_cond_init(&dog.changed, &attributes) != 0 ||
                 pthread_create(&thread, NULL, watch, NULL) != 0;
        pthread_condattr_destroy(&attributes);
    }
    if (failed) {
        cli_error("cannot start a thread");
        return CLI_MACHINE;
    }
    pthread_detach(thread);
    dog.started = true;
    return CLI_DONE;
}

int cli_watchdog_arm(const char *what, double seconds)
{
    int code = dog.started ? CLI_DONE : start();
    if (code)
        return code;
    pthread_mutex_lock(&dog.lock);
    clock_gettime(CLOCK_MONOTONIC, &dog.end);
    dog.end.tv_sec += (time_t)seconds;
    dog.what = what;
    dog.seconds = seconds;
    dog.armed = true;
    pthread_cond_signal(&dog.changed);
    pthread_mutex_unlock(&dog.lock);
    return CLI_DONE;
}

void cli_watchdog_disarm(void)
{
    if (!dog.started)
        return;
    pthread_mutex_lock(&dog.lock);
    dog.armed = false;
    pthread_mutex_unlock(&dog.lock);
}
