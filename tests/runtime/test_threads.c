/*
 * test_threads.c - one layer used by many threads and streams at once, several contexts in one
 * process.
 */
#include <pthread.h>

#include "tests/runtime/rig.h"

enum { THREADS = 6, REPEATS = 8 };

static const struct rig_spec specs[] = {
    { .out_features = 200, .in_features = 144, .bias = true },
    { .out_features = 131, .in_features = 77, .bias = true, .grad_weight = FP8_DTYPE_BF16 },
};

/* ---- threads ---- */

struct worker {
    struct rig_case c;
    pthread_t thread;
    pthread_barrier_t *start;
};

/* Repeats give the same result: nothing accumulates. */
static void *work(void *user)
{
    struct worker *worker = user;
    rig_thread_begin();
    pthread_barrier_wait(worker->start);
    for (int i = 0; i < REPEATS; i++) {
        rig_case_fprop(&worker->c);
        rig_case_backward(&worker->c);
    }
    return NULL;
}

static void many_threads_share_a_layer(void **state)
{
    (void)state;
    static struct worker workers[THREADS];
    struct rig_layers layers;
    pthread_barrier_t start;
    rig_layers_open(&layers, specs, 2);
    pthread_barrier_init(&start, NULL, THREADS);
    for (int i = 0; i < THREADS; i++) {
        struct rig_case *c = &workers[i].c;
        rig_case_init(c, &layers.layer[i % 3 == 2], 1 + 61 * i, 10 + (uint64_t)i);
        c->one_backward = i % 2;
        rig_case_make(c);
        RIG_OK(fp8_stream_create(rig.context, &c->stream));
        rig_case_push(c);
        rig_case_weight(c);
        workers[i].start = &start;
    }
    for (int i = 0; i < THREADS; i++)
        assert_int_equal(pthread_create(&workers[i].thread, NULL, work, &workers[i]), 0);
    for (int i = 0; i < THREADS; i++)
        pthread_join(workers[i].thread, NULL);
    assert_int_equal(rig_thread_failures(), 0);
    for (int i = 0; i < THREADS; i++) {
        struct rig_case *c = &workers[i].c;
        RIG_OK(fp8_stream_synchronize(rig.context, c->stream));
        rig_case_check(c);
        fp8_stream_destroy(rig.context, c->stream);
        rig_case_free(c);
    }
    pthread_barrier_destroy(&start);
    rig_layers_close(&layers);
}

/* One weight, many readers: threads share the operand too. */
static void many_threads_share_a_weight(void **state)
{
    (void)state;
    static struct worker workers[THREADS];
    struct rig_layers layers;
    pthread_barrier_t start;
    rig_layers_open(&layers, specs, 1);
    pthread_barrier_init(&start, NULL, THREADS);
    for (int i = 0; i < THREADS; i++) {
        struct rig_case *c = &workers[i].c;
        rig_case_init(c, &layers.layer[0], 40, 20);
        rig_case_make(c);
        RIG_OK(fp8_stream_create(rig.context, &c->stream));
        rig_case_push(c);
        workers[i].start = &start;
    }
    rig_case_weight(&workers[0].c);
    RIG_OK(fp8_stream_synchronize(rig.context, workers[0].c.stream));
    fp8_operand own[THREADS];
    for (int i = 0; i < THREADS; i++) {
        own[i] = workers[i].c.weight.op;
        workers[i].c.weight.op = workers[0].c.weight.op;
        assert_int_equal(pthread_create(&workers[i].thread, NULL, work, &workers[i]), 0);
    }
    for (int i = 0; i < THREADS; i++)
        pthread_join(workers[i].thread, NULL);
    assert_int_equal(rig_thread_failures(), 0);
    static const int outputs[] = { RIG_Y, RIG_DX, RIG_DW, RIG_DBIAS };
    for (int i = 0; i < THREADS; i++) {
        struct rig_case *c = &workers[i].c;
        RIG_OK(fp8_stream_synchronize(rig.context, c->stream));
        for (int o = 0; o < 4; o++) {
            struct rig_tensor *tensor = &c->tensor[outputs[o]];
            rig_tensor_pull(tensor);
            if (i == 0)
                continue;
            assert_memory_equal(tensor->block.image, workers[0].c.tensor[outputs[o]].block.image,
                                tensor->block.bytes);
        }
    }
    rig_case_check(&workers[0].c);
    for (int i = 0; i < THREADS; i++) {
        if (i > 0)
            workers[i].c.weight.op = own[i];
        fp8_stream_destroy(rig.context, workers[i].c.stream);
        rig_case_free(&workers[i].c);
    }
    pthread_barrier_destroy(&start);
    rig_layers_close(&layers);
}

static void *create_layers(void *user)
{
    fp8_bundle *bundle = user;
    rig_thread_begin();
    for (int i = 0; i < 20; i++) {
        fp8_layer *layer = NULL;
        RIG_OK(fp8_layer_create(bundle, i % 2 ? "l0" : "l1", &layer));
        size_t bytes;
        RIG_OK(fp8_layer_bytes(layer, 10, FP8_BYTES_WORKSPACE, &bytes));
        fp8_layer_destroy(layer);
    }
    return NULL;
}

static void layers_come_and_go_in_threads(void **state)
{
    (void)state;
    struct rig_layers layers;
    pthread_t threads[THREADS];
    rig_layers_open(&layers, specs, 2);
    for (int i = 0; i < THREADS; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, create_layers, layers.bundle), 0);
    for (int i = 0; i < THREADS; i++)
        pthread_join(threads[i], NULL);
    assert_int_equal(rig_thread_failures(), 0);
    rig_layers_close(&layers);
}

/* ---- streams ---- */

/* One thread, three streams, calls alternating. */
static void streams_do_not_disturb_each_other(void **state)
{
    (void)state;
    struct rig_layers layers;
    struct rig_case c[3];
    rig_layers_open(&layers, specs, 2);
    for (int i = 0; i < 3; i++) {
        rig_case_init(&c[i], &layers.layer[i % 2], 500 - 100 * i, 30 + (uint64_t)i);
        rig_case_make(&c[i]);
        RIG_OK(fp8_stream_create(rig.context, &c[i].stream));
        rig_case_push(&c[i]);
    }
    for (int i = 0; i < 3; i++)
        rig_case_weight(&c[i]);
    for (int repeat = 0; repeat < REPEATS; repeat++) {
        for (int i = 0; i < 3; i++)
            rig_case_fprop(&c[i]);
        for (int i = 2; i >= 0; i--)
            rig_case_backward(&c[i]);
    }
    for (int i = 0; i < 3; i++) {
        RIG_OK(fp8_stream_synchronize(rig.context, c[i].stream));
        rig_case_check(&c[i]);
        fp8_stream_destroy(rig.context, c[i].stream);
        rig_case_free(&c[i]);
    }
    rig_layers_close(&layers);
}

/* ---- contexts and errors ---- */

/* Two contexts on the same device; objects of one live beside those of the other. */
static void two_contexts_in_one_process(void **state)
{
    (void)state;
    struct rig first = rig;
    fp8_context_options options = FP8_CONTEXT_OPTIONS_INIT;
    options.device = first.cuda ? 0 : FP8_DEVICE_HOST;
    options.threads = 1;
    struct rig_layers a, b;
    rig_layers_open(&a, specs, 1);
    RIG_OK(fp8_context_create(&options, &rig.context));
    RIG_OK(fp8_stream_create(rig.context, &rig.stream));
    struct rig second = rig;
    rig_layers_open(&b, specs, 1);
    struct rig_case ca, cb;
    rig = first;
    rig_case_init(&ca, &a.layer[0], 50, 40);
    rig_case_make(&ca);
    rig_case_run(&ca);
    rig = second;
    rig_case_init(&cb, &b.layer[0], 70, 41);
    rig_case_make(&cb);
    rig_case_run(&cb);
    rig = first;
    rig_case_check(&ca);
    rig = second;
    rig_case_check(&cb);
    rig_case_free(&cb);
    rig_layers_close(&b);
    rig_release_kept();
    fp8_stream_destroy(rig.context, rig.stream);
    fp8_context_destroy(rig.context);
    rig = first;
    rig_case_free(&ca);
    rig_case_all(&a.layer[0], 33, 42, 0xFF);
    rig_layers_close(&a);
}

static void *fail_elsewhere(void *user)
{
    size_t bytes;
    bool clean = fp8_last_error()[0] == 0;
    (void)fp8_layer_bytes(NULL, 1, FP8_BYTES_X, &bytes);
    return clean && fp8_last_error()[0] != 0 ? user : NULL;
}

static void sentences_belong_to_their_thread(void **state)
{
    (void)state;
    pthread_t thread;
    void *result = NULL;
    int mark;
    RIG_REFUSED(FP8_ERR_ARGUMENT, fp8_layer_bytes(NULL, 1, FP8_BYTES_X, NULL));
    char before[256];
    snprintf(before, sizeof before, "%s", fp8_last_error());
    assert_int_equal(pthread_create(&thread, NULL, fail_elsewhere, &mark), 0);
    pthread_join(thread, &result);
    assert_ptr_equal(result, &mark);
    assert_string_equal(before, fp8_last_error());
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(many_threads_share_a_layer),
        cmocka_unit_test(many_threads_share_a_weight),
        cmocka_unit_test(layers_come_and_go_in_threads),
        cmocka_unit_test(streams_do_not_disturb_each_other),
        cmocka_unit_test(two_contexts_in_one_process),
        cmocka_unit_test(sentences_belong_to_their_thread),
    };
    return RIG_RUN(tests);
}
