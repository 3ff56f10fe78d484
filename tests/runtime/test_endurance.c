/*
 * test_endurance.c - what is used long and often leaks nothing: calls, layers, threads.
 *
 * After a warm-up, the resident memory of the process, its file descriptors and the device's free
 * memory stay where they are over 100,000 calls, 1,000 layers and 64 threads that each call once.
 * And no call waits for the device: behind a backlog of work it returns while that is still being
 * done. FP8_TEST_FULL=1: this is the only program on the device, so its free memory is looked at
 * too.
 */
#include <dirent.h>
#include <pthread.h>
#include <unistd.h>

#include "tests/runtime/rig.h"
#include "tests/runtime/rig_driver.h"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
enum { SHARE = 20, RSS_SLACK_KIB = 65536 }; /* shadow memory and quarantines grow */
#else
enum { SHARE = 1, RSS_SLACK_KIB = 2048 };
#endif
enum { CALLS = 100000 / SHARE, LAYERS = 1000 / SHARE, THREADS = 64 };

static const struct rig_spec spec = { .out_features = 16, .in_features = 16, .bias = true };

/* ---- what must not grow ---------------------------------------------------------------------- */

struct usage {
    long rss_kib;
    int files;
    size_t device_bytes; /* free; 0 on the host */
};

static size_t free_on_device(void)
{
    CUresult (*info)(size_t *, size_t *);
    size_t left = 0, total;
    if (!rig.cuda)
        return 0;
    rig_driver_entry("cuMemGetInfo_v2", &info);
    rig_driver_make_current();
    assert_int_equal(info(&left, &total), CUDA_SUCCESS);
    return left;
}

static int open_files(void)
{
    DIR *dir = opendir("/proc/self/fd");
    int count = 0;
    while (dir && readdir(dir))
        count++;
    if (dir)
        closedir(dir);
    return count;
}

static struct usage measure(void)
{
    struct usage usage = { 0, open_files(), free_on_device() };
    long pages = 0;
    FILE *file = fopen("/proc/self/statm", "r");
    if (file && fscanf(file, "%*d %ld", &pages) == 1)
        usage.rss_kib = pages * (sysconf(_SC_PAGESIZE) / 1024);
    if (file)
        fclose(file);
    return usage;
}

static void compare(const char *what, struct usage before)
{
    struct usage after = measure();
    printf("%s: %ld KiB, then %ld KiB; %d files, then %d; device: %zu bytes free, then %zu\n", what,
           before.rss_kib, after.rss_kib, before.files, after.files, before.device_bytes,
           after.device_bytes);
    assert_int_equal(after.files, before.files);
    const char *full = getenv("FP8_TEST_FULL");
    if (full && full[0] == '1') /* else other tests may use the device now */
        assert_true(after.device_bytes >= before.device_bytes);
    assert_true(after.rss_kib <= before.rss_kib + RSS_SLACK_KIB);
}

/* ---- calls ----------------------------------------------------------------------------------- */

static void many_calls(void **state)
{
    (void)state;
    struct rig_layers layers;
    struct rig_case c;
    rig_layers_open(&layers, &spec, 1);
    rig_case_init(&c, &layers.layer[0], 2, 7);
    rig_case_make(&c);
    rig_case_push(&c);
    rig_case_weight(&c);
    struct usage before = { 0 };
    for (int i = 0; i < CALLS / 2; i++) { /* fprop and backward */
        if (i == CALLS / 20)
            before = measure();
        rig_case_fprop(&c);
        rig_case_backward(&c);
    }
    RIG_OK(fp8_stream_synchronize(rig.context, c.stream));
    rig_case_check(&c);
    compare("calls", before);
    rig_case_free(&c);
    rig_layers_close(&layers);
}

/* ---- layers ---------------------------------------------------------------------------------- */

static void many_layers(void **state)
{
    (void)state;
    struct rig_layers layers;
    struct usage before = { 0 };
    rig_layers_open(&layers, &spec, 1);
    const char *name = fp8_bundle_layer_name(layers.bundle, 0);
    for (int i = 0; i < LAYERS; i++) {
        fp8_layer *layer;
        if (i == LAYERS / 10)
            before = measure();
        RIG_OK(fp8_layer_create(layers.bundle, name, &layer));
        fp8_layer_destroy(layer);
    }
    compare("layers", before);
    rig_layers_close(&layers);
}

/* ---- threads --------------------------------------------------------------------------------- */

static void *call_once(void *user)
{
    rig_thread_begin();
    rig_case_fprop(user);
    return NULL;
}

static void many_threads_once(void **state)
{
    (void)state;
    struct rig_layers layers;
    struct rig_case c;
    struct usage before = { 0 };
    rig_layers_open(&layers, &spec, 1);
    rig_case_init(&c, &layers.layer[0], 2, 7);
    rig_case_make(&c);
    rig_case_push(&c);
    rig_case_weight(&c);
    for (int i = 0; i < 2 * THREADS; i++) { /* one after the other: they share their tensors */
        pthread_t thread;
        if (i == THREADS)
            before = measure();
        assert_int_equal(pthread_create(&thread, NULL, call_once, &c), 0);
        pthread_join(thread, NULL);
    }
    assert_int_equal(rig_thread_failures(), 0);
    compare("threads", before);
    RIG_OK(fp8_stream_synchronize(rig.context, c.stream));
    rig_case_free(&c);
    rig_layers_close(&layers);
}

/* ---- waiting --------------------------------------------------------------------------------- */

/* Milliseconds of work for the device, in few calls. */
static void enqueue_backlog(struct rig_block *block)
{
    for (int i = 0; i < 100; i++)
        RIG_OK(fp8_memory_fill(rig.context, block->device, (uint8_t)i, block->bytes, rig.stream));
}

static void no_call_waits(void **state)
{
    (void)state;
    if (!rig.cuda) {
        print_message("the host backend is done when it returns\n");
        skip();
    }
    CUresult (*query)(CUstream);
    struct rig_layers layers;
    struct rig_case c;
    struct rig_block block;
    rig_driver_entry("cuStreamQuery", &query);
    rig_driver_make_current();
    rig_block_make(&block, (size_t)256 << 20, 0, 0);
    rig_layers_open(&layers, &spec, 1);
    rig_case_init(&c, &layers.layer[0], 2, 7);
    rig_case_make(&c);
    rig_case_push(&c);
    for (int i = 0; i < 3; i++) { /* the first calls too */
        c.version = (uint64_t)i + 1;
        enqueue_backlog(&block);
        rig_case_weight(&c);
        rig_case_fprop(&c);
        rig_case_backward(&c);
        assert_int_equal(query((CUstream)rig.stream), CUDA_ERROR_NOT_READY);
        RIG_OK(fp8_stream_synchronize(rig.context, rig.stream));
    }
    rig_case_check(&c);
    rig_case_free(&c);
    rig_block_free(&block);
    rig_layers_close(&layers);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(many_calls),
        cmocka_unit_test(many_layers),
        cmocka_unit_test(many_threads_once),
        cmocka_unit_test(no_call_waits),
    };
    return RIG_RUN(tests);
}
