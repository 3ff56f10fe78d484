/*
 * test_processes.c - many processes and one cache: all at once, on one spec or several, some of
 * them killed.
 *
 * The processes start at a barrier with an empty cache; every one must end with a bundle that
 * opens, and the cache must be whole afterwards. Equal kernels are compiled once, except what a
 * killed process was at. FP8_TEST_FULL=1: 50 rounds of kills instead of a few. Kills happen at
 * moments drawn from a seed that is printed.
 */
#include "tests/cache/rig.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { PROCESSES = 16, SPECS = 4 };

/* In a child: specs [0, specs), beginning with another one in each process. */
static int child(int barrier, int index, int specs)
{
    char byte, path[RIG_PATH];
    if (read(barrier, &byte, 1) != 0)
        return 10;
    for (int i = 0; i < specs; i++) {
        if (rig_jit(NULL, (index + i) % specs, path) != FP8GEN_OK) {
            fprintf(stderr, "process %d: %s", index, fp8gen_jit_error());
            return 11;
        }
        if (!rig_opens(path))
            return 12;
    }
    return 0;
}

static void start(pid_t children[PROCESSES], int specs, int *go)
{
    int ends[2];
    assert_int_equal(pipe(ends), 0);
    fflush(stdout);
    fflush(stderr);
    for (int i = 0; i < PROCESSES; i++) {
        children[i] = fork();
        assert_true(children[i] >= 0);
        if (children[i] == 0) {
            close(ends[1]);
            _exit(child(ends[0], i, specs));
        }
    }
    close(ends[0]);
    *go = ends[1];
}

static int wait_for(pid_t process)
{
    int status;
    assert_int_equal(waitpid(process, &status, 0), process);
    return status;
}

static void all_get_it(int specs)
{
    pid_t children[PROCESSES];
    int go, damaged;
    start(children, specs, &go);
    close(go);
    for (int i = 0; i < PROCESSES; i++)
        assert_int_equal(wait_for(children[i]), 0);
    int entries = rig_entries(&damaged);
    assert_int_equal(damaged, 0);
    assert_int_equal(rig_compiled("start"), entries - specs); /* each once */
}

static void one_spec(void **state)
{
    (void)state;
    all_get_it(1);
}

static void several_specs(void **state)
{
    (void)state;
    all_get_it(SPECS);
}

static void nap(double seconds)
{
    struct timespec time = { (time_t)seconds, (long)((seconds - (double)(time_t)seconds) * 1e9) };
    nanosleep(&time, NULL);
}

/* A quarter of the processes is killed while they work. */
static void round_of_kills(unsigned seed)
{
    pid_t children[PROCESSES];
    bool killed[PROCESSES] = { false };
    int go, damaged;
    unsigned random = seed;
    start(children, 1, &go);
    close(go);
    for (int i = 0; i < PROCESSES / 4; i++) {
        nap(rand_r(&random) % 1000 * 6e-5);
        int victim = rand_r(&random) % PROCESSES;
        if (!killed[victim])
            kill(children[victim], SIGKILL);
        killed[victim] = true;
    }
    for (int i = 0; i < PROCESSES; i++) {
        int status = wait_for(children[i]);
        if (!killed[i] && status != 0)
            fail_msg("seed %u: process %d ended with status %x", seed, i, status);
    }
    rig_entries(&damaged);
    assert_int_equal(damaged, 0);
    char path[RIG_PATH];
    assert_int_equal(rig_jit(NULL, 0, path), FP8GEN_OK);
    assert_true(rig_opens(path));
}

static void some_are_killed(void **state)
{
    (void)state;
    const char *full = getenv("FP8_TEST_FULL"), *given = getenv("FP8_TEST_SEED");
    int rounds = full != NULL && full[0] == '1' ? 50 : 5;
    unsigned seed = given != NULL ? (unsigned)atoi(given) : (unsigned)time(NULL);
    print_message("%d rounds, FP8_TEST_SEED=%u\n", rounds, seed);
    for (int i = 0; i < rounds; i++) {
        rig_end(NULL);
        rig_begin(NULL);
        setenv("FAKE_NVRTC_DELAY_MS", "4", 1);
        round_of_kills(seed + (unsigned)i);
    }
}

/* One process has the lock and is slow: the others wait for its kernel and do not compile it too. A
 * killed one's lock is free at once. */
static void a_killed_maker_holds_nobody_up(void **state)
{
    (void)state;
    char path[RIG_PATH];
    setenv("FAKE_NVRTC_DELAY_MS", "60000", 1);
    pid_t slow = fork();
    if (slow == 0)
        _exit(rig_jit(NULL, 0, path));
    while (rig_compiled("start") < 1)
        nap(0.005);
    nap(0.02);
    kill(slow, SIGKILL);
    wait_for(slow);
    int begun = rig_compiled("start");
    setenv("FAKE_NVRTC_DELAY_MS", "0", 1);
    time_t before = time(NULL);
    assert_int_equal(rig_jit(NULL, 0, path), FP8GEN_OK);
    assert_true(time(NULL) - before < 30);
    assert_true(rig_opens(path));
    assert_true(rig_compiled("start") > begun);
}

int main(int argc, char **argv)
{
    (void)argc;
    static const struct CMUnitTest tests[] = {
        RIG_TEST(one_spec),
        RIG_TEST(several_specs),
        RIG_TEST(some_are_killed),
        RIG_TEST(a_killed_maker_holds_nobody_up),
    };
    return RIG_RUN(argv, tests);
}
