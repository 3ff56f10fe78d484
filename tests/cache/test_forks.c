/*
 * test_forks.c - forks and the cache: a child holds no lock, waits for no thread, removes nothing
 * of its parent.
 *
 * The fake NVRTC is slow where a fork is to fall into a compilation. Whoever would hang is ended by
 * an alarm.
 */
#include "tests/cache/rig.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { PATIENCE = 30 }; /* seconds; a compilation here takes one or two */

static void nap(void)
{
    nanosleep(&(struct timespec){ 0, 10000000 }, NULL);
}

static int wait_for(pid_t process)
{
    int status;
    assert_int_equal(waitpid(process, &status, 0), process);
    return status;
}

static void *jit_thread(void *user)
{
    (void)user;
    return rig_jit(NULL, 1, NULL) == FP8GEN_OK ? jit_thread : NULL;
}

/* A thread that compiles, at work when this returns. */
static pthread_t start_slowly(void)
{
    pthread_t thread;
    int before = rig_compiled("start");
    setenv("FAKE_NVRTC_DELAY_MS", "100", 1);
    assert_int_equal(pthread_create(&thread, NULL, jit_thread, NULL), 0);
    while (rig_compiled("start") < before + 1)
        nap();
    return thread;
}

static void join(pthread_t thread)
{
    void *good;
    assert_int_equal(pthread_join(thread, &good), 0);
    assert_non_null(good);
}

/* A process that wants spec 1 and must have it before the alarm. */
static pid_t want(void)
{
    fflush(stdout);
    pid_t process = fork();
    if (process == 0) {
        char path[RIG_PATH];
        alarm(PATIENCE);
        _exit(rig_jit(NULL, 1, path) == FP8GEN_OK && rig_opens(path) ? 0 : 11);
    }
    assert_true(process > 0);
    return process;
}

static void a_fork_inside_a_compilation(void **state)
{
    (void)state;
    pthread_t thread = start_slowly();
    pid_t child = want();
    int status = wait_for(child);
    join(thread);
    assert_int_equal(status, 0);
}

/* A copy of this process that sleeps; raw: made without the handlers of fork. */
static pid_t sleeper(bool raw)
{
    pid_t process = raw ? (pid_t)syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0) : fork();
    while (process == 0)
        pause();
    assert_true(process > 0);
    return process;
}

static void a_sleeping_child_holds_no_lock(void **state)
{
    (void)state;
    for (int raw = 0; raw < 2; raw++) {
        rig_end(NULL);
        rig_begin(NULL);
        pthread_t thread = start_slowly();
        pid_t asleep = sleeper(raw), other = want();
        join(thread);
        int status = wait_for(other);
        kill(asleep, SIGKILL);
        wait_for(asleep);
        assert_int_equal(status, 0);
    }
}

/* The maker is killed, its child lives on: the lock is free all the same. */
static void the_lock_of_a_killed_maker_is_not_its_childs(void **state)
{
    (void)state;
    int ends[2];
    pid_t asleep;
    assert_int_equal(pipe(ends), 0);
    fflush(stdout);
    pid_t maker = fork();
    if (maker == 0) {
        start_slowly();
        asleep = sleeper(false);
        _exit(write(ends[1], &asleep, sizeof(asleep)) == sizeof(asleep) && pause() ? 1 : 2);
    }
    assert_int_equal(read(ends[0], &asleep, sizeof(asleep)), sizeof(asleep));
    kill(maker, SIGKILL);
    wait_for(maker);
    setenv("FAKE_NVRTC_DELAY_MS", "0", 1);
    int status = wait_for(want());
    kill(asleep, SIGKILL);
    close(ends[0]);
    close(ends[1]);
    assert_int_equal(status, 0);
}

/* Somebody holds the lock for ever; the entry comes all the same, and who waits sees it. */
static void who_waits_looks_for_the_entry(void **state)
{
    (void)state;
    char path[RIG_PATH], name[2 * RIG_PATH], aside[RIG_PATH], bundles[RIG_PATH];
    const char *cache = getenv("FP8GEN_CACHE_DIR");
    assert_int_equal(rig_jit(NULL, 1, path), FP8GEN_OK);
    snprintf(name, sizeof(name), "%s/locks/%s", cache,
             strstr(rig_entry("bundles", "bundle."), "/bundle.") + strlen("/bundle."));
    snprintf(bundles, sizeof(bundles), "%.400s/bundles", cache);
    snprintf(aside, sizeof(aside), "%s", rig_path("aside"));
    assert_int_equal(rename(bundles, aside), 0);
    int lock = open(name, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    assert_int_equal(flock(lock, LOCK_EX | LOCK_NB), 0);
    pid_t other = want();
    for (int i = 0; i < 20; i++)
        nap();
    assert_int_equal(waitpid(other, NULL, WNOHANG), 0); /* it waits */
    assert_int_equal(rename(aside, bundles), 0);
    int status = wait_for(other);
    close(lock);
    assert_int_equal(status, 0);
}

/* ---- bundles of one process ------------------------------------------------------------------ */

static void bundles_in_memory_are_their_process_s(void **state)
{
    (void)state;
    char first[RIG_PATH], path[RIG_PATH];
    fp8gen_jit_options options = FP8GEN_JIT_OPTIONS_INIT;
    options.cache_dir = "/dev/null/cache";
    assert_int_equal(rig_jit(&options, 1, first), FP8GEN_OK);
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        bool good = rig_jit(&options, 2, path) == FP8GEN_OK && rig_opens(path) &&
                    rig_jit(&options, 1, path) == FP8GEN_OK && strcmp(path, first) != 0 &&
                    rig_opens(path);
        exit(good ? 0 : 11); /* not _exit: what it made goes */
    }
    assert_int_equal(wait_for(child), 0);
    assert_true(rig_opens(first));
    assert_int_equal(rig_jit(&options, 1, path), FP8GEN_OK);
    assert_string_equal(path, first);
    rig_remove(first);
    assert_int_equal(rig_jit(&options, 1, path), FP8GEN_OK);
    assert_string_not_equal(path, first);
    assert_true(rig_opens(path));
}

int main(int argc, char **argv)
{
    (void)argc;
    static const struct CMUnitTest tests[] = {
        RIG_TEST(a_fork_inside_a_compilation),
        RIG_TEST(a_sleeping_child_holds_no_lock),
        RIG_TEST(the_lock_of_a_killed_maker_is_not_its_childs),
        RIG_TEST(who_waits_looks_for_the_entry),
        RIG_TEST(bundles_in_memory_are_their_process_s),
    };
    return RIG_RUN(argv, tests);
}
