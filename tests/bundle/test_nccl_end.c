/*
 * test_nccl_end.c - how communicators over the fake NCCL end: aborted once, by whoever has the
 * handle then, and a device on which an abort does not end is stuck for all contexts of the process
 * until it does.
 *
 * The moments that no timing hits are made here: the watcher tries the communicator's lock between
 * its look at a call and its decision, so pthread_mutex_trylock is ours; pthread_create is too, and
 * may have no thread to give.
 */
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <unistd.h>

#include "runtime/nccl_abi.h"
#include "tests/bundle/cuda_rig.h"
#include "tests/bundle/process_rig.h"

static char *folder; /* of the file of the id */

static void run(struct process start, process_body body, unsigned killed)
{
    start.folder = folder;
    process_run(2, start, body, 0, killed);
}

/* ---- a stuck device ---- */

/* Refused on every context of the device, at once; what is released stays, without a word. */
static int refuses(struct process *p, fp8_context *context, void *memory, fp8_stream stream)
{
    fp8_device_info info = { .size = sizeof info };
    fp8_context_options options = FP8_CONTEXT_OPTIONS_INIT;
    fp8_context *third = NULL;
    fp8_event *event = NULL;
    void *none = NULL;
    char word[64] = "";
    const int64_t live = bundle_fake_cuda()->live;
    CHECK(fp8_context_info(context, &info) == FP8_OK && info.is_stuck == 1);
    CHECK(fp8_stream_synchronize(context, stream) == FP8_ERR_COMM && process_says("device 0"));
    CHECK(fp8_memory_copy(context, memory, word, sizeof word, stream) == FP8_ERR_COMM);
    CHECK(fp8_memory_fill(context, memory, 0, 64, stream) == FP8_ERR_COMM);
    CHECK(fp8_memory_alloc(context, 64, &none) == FP8_ERR_COMM && !none);
    CHECK(fp8_event_create(context, &event) == FP8_ERR_COMM && !event);
    CHECK(fp8_stream_create(context, (fp8_stream *)&none) == FP8_ERR_COMM && !none);
    CHECK(fp8_context_create(&options, &third) == FP8_ERR_COMM && !third);
    CHECK(fp8_context_create(&options, NULL) == FP8_ERR_ARGUMENT);
    CHECK(bundle_fake_cuda()->live == live + 1); /* the primary context of the third */
    fp8_memory_free(context, memory);
    fp8_stream_destroy(context, stream);
    fp8_context_destroy(context);
    CHECK(process_says("context is NULL")); /* still the last failure */
    CHECK(bundle_fake_cuda()->live == live + 1);
    return 0;
}

/* As after a gather by copy engines: the stream stays busy, and NCCL's abort waits for it. */
static int stuck(struct process *p)
{
    void *memory = NULL, *other = NULL, *second_memory = NULL;
    fp8_stream stream = NULL, second_stream = NULL;
    fp8_context *second = NULL, *elsewhere = NULL;
    fp8_context_options options = FP8_CONTEXT_OPTIONS_INIT;
    bundle_fake_cuda()->device_count = 2;
    CHECK(process_join(p) == FP8_OK);
    CHECK(fp8_context_create(&options, &second) == FP8_OK);
    options.device = 1;
    CHECK(fp8_context_create(&options, &elsewhere) == FP8_OK);
    CHECK(fp8_comm_alloc(p->comm, 4096, &memory) == FP8_OK);
    CHECK(fp8_memory_alloc(p->context, 4096, &other) == FP8_OK);
    CHECK(fp8_memory_alloc(second, 4096, &second_memory) == FP8_OK);
    CHECK(fp8_stream_create(p->context, &stream) == FP8_OK);
    CHECK(fp8_stream_create(second, &second_stream) == FP8_OK);
    if (p->rank == 1)
        raise(SIGKILL);
    fake_nccl()->is_stuck = true;
    const double start = process_now();
    const fp8_gather_part part = { memory, memory, 8 };
    CHECK(fp8_comm_all_gather(p->comm, &part, 1, "w of layer 'qkv'", NULL) == FP8_OK);
    CHECK(fp8_comm_wait(p->comm, NULL) == FP8_ERR_TIMEOUT);
    for (int i = 0; i < 3; i++) { /* and again, from each call */
        CHECK(process_says("rank 0 of 2 ('fsdp')") &&
              process_says("all_gather of w of layer 'qkv'") && process_says("end this process"));
        CHECK((i == 0   ? fp8_comm_poll(p->comm)
               : i == 1 ? fp8_comm_wait(p->comm, NULL)
                        : fp8_comm_all_gather(p->comm, &part, 1, "w", NULL)) == FP8_ERR_TIMEOUT);
    }
    const int64_t live = bundle_fake_cuda()->live;
    fp8_comm_free(p->comm, memory);
    CHECK(bundle_fake_cuda()->live == live); /* CUDA would wait for the device */
    CHECK(refuses(p, second, second_memory, second_stream) == 0);
    fp8_comm_destroy(p->comm);
    CHECK(refuses(p, p->context, other, stream) == 0);
    void *still = NULL;
    CHECK(fp8_memory_alloc(elsewhere, 64, &still) == FP8_OK);
    fp8_memory_free(elsewhere, still);
    fp8_context_destroy(elsewhere);
    CHECK(process_now() - start < p->timeout * 2 + 3);
    CHECK(__atomic_load_n(&fake_nccl()->aborts, __ATOMIC_RELAXED) ==
          1);                      /* it is still under way, */
    CHECK(fake_nccl()->live == 2); /* with what it may use */
    return 0;
}

static bool is_stuck(const fp8_context *context)
{
    fp8_device_info info = { .size = sizeof info };
    return fp8_context_info(context, &info) == FP8_OK && info.is_stuck;
}

static bool wait_for_aborts(int64_t count)
{
    const double end = process_now() + 8;
    while (__atomic_load_n(&fake_nccl()->aborts, __ATOMIC_RELAXED) < count && process_now() < end)
        usleep(1000);
    return __atomic_load_n(&fake_nccl()->aborts, __ATOMIC_RELAXED) == count;
}

/* The aborts wait for long work, and the first for the second communicator as well: once they have
 * ended the device is free again, and what was released meanwhile is lost. */
static int late(struct process *p)
{
    struct process other = { .rank = p->rank, .ranks = 2, .timeout = 3.5, .folder = p->folder };
    float value = 1;
    void *memory = NULL, *lost = NULL;
    other.stage = 1;
    CHECK(process_join(p) == FP8_OK && process_join(&other) == FP8_OK);
    CHECK(fp8_comm_alloc(p->comm, 4096, &memory) == FP8_OK);
    CHECK(fp8_memory_alloc(p->context, 4096, &lost) == FP8_OK);
    if (p->rank == 1)
        raise(SIGKILL);
    __atomic_store_n(&fake_nccl()->is_stuck, true, __ATOMIC_RELAXED);
    CHECK(fp8_comm_all_reduce_max(other.comm, &value, 1, "amax", NULL) == FP8_OK);
    CHECK(fp8_comm_all_reduce_max(p->comm, &value, 1, "amax", NULL) == FP8_OK);
    CHECK(fp8_comm_wait(p->comm, NULL) == FP8_ERR_TIMEOUT && process_says("has not ended"));
    CHECK(is_stuck(p->context));
    fp8_memory_free(p->context, lost);
    CHECK(fp8_memory_alloc(p->context, 64, &lost) == FP8_ERR_COMM && process_says("call again"));
    CHECK(wait_for_aborts(2) && is_stuck(p->context));
    __atomic_store_n(&fake_nccl()->is_stuck, false, __ATOMIC_RELAXED);
    for (const double end = process_now() + 5; is_stuck(p->context) && process_now() < end;)
        usleep(1000);
    CHECK(!is_stuck(p->context) && !is_stuck(other.context));
    CHECK(fp8_memory_alloc(p->context, 64, &lost) == FP8_OK);
    fp8_memory_free(p->context, lost);
    CHECK(fp8_stream_synchronize(p->context, NULL) == FP8_OK);
    CHECK(fp8_comm_poll(p->comm) == FP8_ERR_TIMEOUT);
    CHECK(fp8_comm_poll(other.comm) == FP8_ERR_TIMEOUT);
    fp8_comm_free(p->comm, memory);
    process_leave(&other);
    process_leave(p);
    CHECK(wait_for_aborts(2) && fake_nccl()->live == 0 && bundle_fake_cuda()->live == 1);
    return 0;
}

static atomic_bool has_no_threads;

__attribute__((visibility("default"))) int pthread_create(pthread_t *thread,
                                                          const pthread_attr_t *attributes,
                                                          void *(*body)(void *), void *user)
{
    int (*next)(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *);
    *(void **)&next = dlsym(RTLD_NEXT, "pthread_create");
    return atomic_load(&has_no_threads) ? EAGAIN : next(thread, attributes, body, user);
}

/* NCCL could hang in an abort of ours: there is none. */
static int without_thread(struct process *p)
{
    CHECK(process_join(p) == FP8_OK);
    atomic_store(&has_no_threads, true);
    fp8_comm_abort(p->comm, "the loss is no number");
    CHECK(fp8_comm_poll(p->comm) == FP8_ERR_COMM && process_says("the loss is no number") &&
          process_says("end this process"));
    CHECK(is_stuck(p->context));
    process_leave(p);
    CHECK(fake_nccl()->aborts == 0 && fake_nccl()->live == 1);
    return 0;
}

static void test_stuck(void **state)
{
    (void)state;
    run((struct process){ .timeout = 0.5 }, stuck, 1u << 1);
    run((struct process){ .timeout = 0.5, .flags = FP8_COMM_NO_WATCHDOG }, stuck, 1u << 1);
    run((struct process){ .timeout = 0.5 }, late, 1u << 1);
    run((struct process){ .timeout = 0.5 }, without_thread, 0);
}

/* ---- who aborts ---- */

static struct {
    atomic_bool hangs, is_looked_at, is_back, is_aborting, is_called;
    double start, timeout;
    int result; /* of the call */
} moment;

static bool wait_for(atomic_bool *flag)
{
    const double end = process_now() + 5;
    while (!atomic_load(flag) && process_now() < end)
        usleep(200);
    return atomic_load(flag);
}

/* In the watcher, which looks at a call that is about to be late: it is so now, and comes back just
 * then. */
__attribute__((visibility("default"))) int pthread_mutex_trylock(pthread_mutex_t *mutex)
{
    int (*next)(pthread_mutex_t *);
    *(void **)&next = dlsym(RTLD_NEXT, "pthread_mutex_trylock");
    const int error = next(mutex);
    if (error == EBUSY && atomic_load(&moment.hangs) &&
        process_now() - moment.start > moment.timeout - 0.02) {
        usleep(50000); /* now it is late in any case */
        atomic_store(&moment.hangs, false);
        atomic_store(&moment.is_looked_at, true);
        (void)wait_for(&moment.is_back);
    }
    return error;
}

static int call_until_looked_at(void)
{
    moment.start = process_now();
    atomic_store(&moment.hangs, true);
    (void)wait_for(&moment.is_looked_at);
    return moment.result;
}

/* The call fails by itself (variant 0) or succeeds (1) after the watcher has found it late,
 * before it takes the handle. */
static int back_in_time(struct process *p)
{
    CHECK(process_join(p) == FP8_OK);
    float value = 1;
    moment.timeout = p->timeout;
    moment.result = p->variant == 0 ? 3 : FP8_NCCL_SUCCESS;
    fake_nccl()->call = call_until_looked_at;
    fp8_status status = fp8_comm_all_reduce_max(p->comm, &value, 1, "amax", NULL);
    fake_nccl()->call = NULL;
    atomic_store(&moment.is_back, true);
    CHECK(atomic_load(&moment.is_looked_at));
    CHECK(status == (p->variant == 0 ? FP8_ERR_COMM : FP8_OK));
    usleep((useconds_t)(p->timeout * 0.3e6)); /* the watcher goes on */
    const int64_t aborts = p->variant == 0;
    CHECK(__atomic_load_n(&fake_nccl()->aborts, __ATOMIC_RELAXED) == aborts);
    if (aborts)
        CHECK(fp8_comm_poll(p->comm) == FP8_ERR_COMM && process_says("all_reduce_max of amax") &&
              process_says("(3)"));
    else
        CHECK(fp8_comm_all_reduce_max(p->comm, &value, 1, "amax", NULL) == FP8_OK &&
              fp8_comm_wait(p->comm, NULL) == FP8_OK);
    process_leave(p);
    CHECK(fake_nccl()->aborts == 1 && fake_nccl()->live == 0 && bundle_fake_cuda()->live == 0);
    return 0;
}

static int call_until_aborted(void)
{
    return wait_for(&moment.is_aborting) ? moment.result : FP8_NCCL_SUCCESS;
}

static void slowly(void)
{
    atomic_store(&moment.is_aborting, true);
    usleep(300000); /* the call is back long before the abort is done */
}

/* The watcher has taken the handle: the call's own result no longer counts, and nobody else aborts;
 * when the call of ours returns, the abort is done. */
static int taken(struct process *p)
{
    CHECK(process_join(p) == FP8_OK);
    float value = 1;
    moment.result = p->variant == 0 ? 3 : FP8_NCCL_SUCCESS;
    fake_nccl()->call = call_until_aborted;
    fake_nccl()->aborting = slowly;
    CHECK(fp8_comm_all_reduce_max(p->comm, &value, 1, "amax", NULL) == FP8_ERR_TIMEOUT);
    CHECK(process_says("all_reduce_max of amax"));
    CHECK(fake_nccl()->aborts == 1 && fake_nccl()->live == 0);
    CHECK(fp8_comm_poll(p->comm) == FP8_ERR_TIMEOUT);
    process_leave(p);
    CHECK(fake_nccl()->aborts == 1 && bundle_fake_cuda()->live == 0);
    return 0;
}

static int call_and_stay(void)
{
    atomic_store(&moment.is_called, true);
    const int result = call_until_aborted();
    usleep((useconds_t)(moment.timeout * 1e6)); /* late as well by now */
    return result;
}

static void *give_up(void *user)
{
    const struct process *p = user;
    if (wait_for(&moment.is_called))
        fp8_comm_abort(p->comm, "the loss is no number");
    return NULL;
}

/* Another thread ends a call that hangs: it fails with that thread's words, long before it is late
 * (variant 0), or though it comes back when it is (1). */
static int given_up(struct process *p)
{
    pthread_t thread;
    float value = 1;
    CHECK(process_join(p) == FP8_OK);
    moment.timeout = p->variant == 0 ? 0 : p->timeout * 1.5;
    moment.result = FP8_NCCL_SUCCESS;
    fake_nccl()->call = call_and_stay;
    fake_nccl()->aborting = slowly;
    CHECK(pthread_create(&thread, NULL, give_up, p) == 0);
    const double start = process_now();
    CHECK(fp8_comm_all_reduce_max(p->comm, &value, 1, "amax", NULL) == FP8_ERR_COMM);
    CHECK(process_says("gave up after all_reduce_max of amax: the loss is no number"));
    CHECK(process_now() - start < 4);
    CHECK(pthread_join(thread, NULL) == 0);
    fp8_comm_abort(p->comm, "a second time");
    CHECK(fp8_comm_poll(p->comm) == FP8_ERR_COMM && process_says("the loss is no number"));
    process_leave(p);
    CHECK(fake_nccl()->aborts == 1 && fake_nccl()->live == 0 && bundle_fake_cuda()->live == 0);
    return 0;
}

static void test_given_up(void **state)
{
    (void)state;
    run((struct process){ .timeout = 10 }, given_up, 0);
    run((struct process){ .timeout = 0.8, .variant = 1 }, given_up, 0);
    run((struct process){ .timeout = 10, .flags = FP8_COMM_NO_WATCHDOG }, given_up, 0);
}

static void test_who_aborts(void **state)
{
    (void)state;
    for (int variant = 0; variant < 2; variant++) {
        run((struct process){ .timeout = 0.5, .variant = variant }, back_in_time, 0);
        run((struct process){ .timeout = 0.5, .variant = variant }, taken, 0);
    }
}

static int set_up(void **state)
{
    (void)state;
    (void)bundle_fake_cuda();
    (void)bundle_fake_lt();
    folder = bundle_folder();
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    bundle_remove(folder);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(test_stuck),
                                        cmocka_unit_test(test_who_aborts),
                                        cmocka_unit_test(test_given_up) };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
