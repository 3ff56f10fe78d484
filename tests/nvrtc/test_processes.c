/*
 * test_processes.c - 16 processes, one empty cache and the real NVRTC, some of them killed; a full
 * disk; forks.
 *
 * Every process that is not killed must end with a bundle that opens, and the cache must be whole
 * after each round. 2 rounds with kernels that compile at once; FP8_TEST_FULL=1: 50 rounds with the
 * real ones, those of the products aside.
 * Kills happen at moments drawn from a seed that is printed.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "runtime/fp8.h"
#include "tests/nvrtc/rig.h"

enum { PROCESSES = 16 };

static char folder[RIG_PATH], templates[RIG_PATH + 32], cache[RIG_PATH + 32];
static bool full;

static double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

static void nap(double seconds)
{
    struct timespec time = { (time_t)seconds, (long)((seconds - (double)(time_t)seconds) * 1e9) };
    nanosleep(&time, NULL);
}

static bool opens(const char *path)
{
    fp8_context_options options = FP8_CONTEXT_OPTIONS_INIT;
    fp8_context *context;
    fp8_bundle *bundle;
    options.device = FP8_DEVICE_HOST;
    options.threads = 1;
    if (fp8_context_create(&options, &context) != FP8_OK)
        return false;
    bool good = fp8_bundle_open(context, path, &bundle) == FP8_OK;
    if (good)
        fp8_bundle_close(bundle);
    fp8_context_destroy(context);
    return good;
}

/* An exit code. */
static int make_bundle_in(const char *cache_dir)
{
    char path[RIG_PATH];
    fp8gen_jit_options options = FP8GEN_JIT_OPTIONS_INIT;
    options.archs = "sm_90a";
    options.jobs = 1;
    options.cache_dir = cache_dir;
    options.template_dir = templates;
    if (fp8gen_jit_bundle(&options, "small.lua", rig_small, strlen(rig_small), path,
                          sizeof(path)) != FP8GEN_OK) {
        fprintf(stderr, "%s", fp8gen_jit_error());
        return 11;
    }
    return opens(path) ? 0 : 12;
}

static int make_bundle(void)
{
    return make_bundle_in(cache);
}

/* Works when the other end of the pipe is closed by all. */
static pid_t start_one(const int ends[2])
{
    char byte;
    fflush(stdout);
    fflush(stderr);
    pid_t process = fork();
    if (process == 0) {
        close(ends[1]);
        exit(read(ends[0], &byte, 1) == 0 ? make_bundle() : 10);
    }
    assert_true(process > 0);
    return process;
}

static void count_damaged(void *user, const fp8gen_cache_entry *entry)
{
    *(int *)user += entry->damaged != 0;
}

static void check_cache(void)
{
    int damaged = 0;
    assert_int_equal(fp8gen_cache_list(cache, 1, count_damaged, &damaged), FP8GEN_OK);
    assert_int_equal(damaged, 0);
}

/* A quarter of the processes is killed within `seconds`. Returns how long the round took. */
static double play(int round, double seconds, unsigned *random, int *kills)
{
    pid_t children[PROCESSES];
    bool killed[PROCESSES] = { false };
    int ends[2], status;
    snprintf(cache, sizeof(cache), "%s/cache%d", folder, round);
    assert_int_equal(pipe(ends), 0);
    for (int i = 0; i < PROCESSES; i++)
        children[i] = start_one(ends);
    double begin = now();
    close(ends[0]);
    close(ends[1]);
    for (int i = 0; seconds > 0 && i < PROCESSES / 4; i++) {
        nap(seconds * 4 / PROCESSES * (rand_r(random) % 1000) / 1000);
        int victim = rand_r(random) % PROCESSES;
        if (!killed[victim])
            *kills += kill(children[victim], SIGKILL) == 0;
        killed[victim] = true;
    }
    for (int i = 0; i < PROCESSES; i++) {
        assert_int_equal(waitpid(children[i], &status, 0), children[i]);
        if (!killed[i] && status != 0)
            fail_msg("round %d: process %d ended with status %x", round, i, status);
    }
    double took = now() - begin;
    check_cache();
    assert_int_equal(make_bundle(), 0); /* whatever was left half done */
    rig_remove(cache);
    return took;
}

static void none_fails(void **state)
{
    (void)state;
    const char *given = getenv("FP8_TEST_SEED");
    unsigned seed = given != NULL ? (unsigned)atoi(given) : (unsigned)time(NULL), random = seed;
    int rounds = full ? 50 : 2, kills = 0;
    double took = play(0, 0, &random, &kills), worst = 0; /* nobody is killed: how long it takes */
    for (int i = 1; i <= rounds; i++) {
        double round = play(i, took, &random, &kills);
        worst = round > worst ? round : worst;
    }
    print_message(
        "%d processes, cold, %s kernels, %d rounds with %d kills, none failed; a round takes "
        "%.1f s, at most %.1f s; FP8_TEST_SEED=%u\n",
        PROCESSES, full ? "real" : "trivial", rounds, kills, took, worst, seed);
}

static void a_full_disk(void **state)
{
    (void)state;
    snprintf(cache, sizeof(cache), "%s/small", folder);
    assert_int_equal(mkdir(cache, 0700), 0);
    if (mount("tmpfs", cache, "tmpfs", 0, "size=16k,mode=0700") != 0) {
        print_message("skip: cannot mount a tmpfs: %s\n", strerror(errno));
        skip();
    }
    int good = 0, status;
    pid_t children[4];
    for (int i = 0; i < 4; i++) {
        fflush(stdout);
        children[i] = fork();
        if (children[i] == 0)
            exit(make_bundle());
    }
    for (int i = 0; i < 4; i++)
        good += waitpid(children[i], &status, 0) == children[i] && status == 0;
    umount2(cache, MNT_DETACH);
    assert_int_equal(good, 4);
}

static atomic_bool enough;

static void *compile_on(void *user)
{
    char fresh[RIG_PATH + 64];
    for (int i = 0; !atomic_load(&enough); i++) {
        snprintf(fresh, sizeof(fresh), "%s/thread%d", folder, i);
        if (make_bundle_in(fresh) != 0)
            return NULL;
    }
    return user;
}

/* NVRTC has locks of its own: children forked while threads compile with it compile, too. */
static void forks_inside_compilations(void **state)
{
    (void)state;
    enum { CHILDREN = 6, PATIENCE = 120 };
    pthread_t thread;
    void *good;
    int status;
    atomic_store(&enough, false);
    assert_int_equal(pthread_create(&thread, NULL, compile_on, folder), 0);
    for (int i = 0; i < CHILDREN; i++) {
        nap(0.07);
        snprintf(cache, sizeof(cache), "%s/child%d", folder, i);
        fflush(stdout);
        pid_t child = fork();
        if (child == 0) {
            alarm(PATIENCE);
            _exit(make_bundle());
        }
        assert_int_equal(waitpid(child, &status, 0), child);
        assert_int_equal(status, 0);
    }
    atomic_store(&enough, true);
    assert_int_equal(pthread_join(thread, &good), 0);
    assert_non_null(good);
}

static int begin(void **state)
{
    (void)state;
    rig_scratch(folder);
    snprintf(templates, sizeof(templates), "%s/templates", folder);
    if (mkdir(templates, 0700) != 0)
        return 1;
    char gemm[RIG_PATH + 64];
    rig_copy_templates(templates, full ? NULL : "");
    snprintf(gemm, sizeof(gemm), "%s/gemm_sm90.cu", templates);
    rig_write(gemm, "extern \"C\" __global__ void $entry() {}\n");
    return 0;
}

static int end(void **state)
{
    (void)state;
    rig_remove(folder);
    return 0;
}

int main(void)
{
    int missing = rig_nvrtc_missing();
    const char *wanted = getenv("FP8_TEST_FULL");
    if (missing != 0)
        return missing;
    full = wanted != NULL && wanted[0] == '1';
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(none_fails, begin, end),
        cmocka_unit_test_setup_teardown(a_full_disk, begin, end),
        cmocka_unit_test_setup_teardown(forks_inside_compilations, begin, end),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
