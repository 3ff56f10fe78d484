/*
 * test_gpus.c - weight parallel over the GPUs of one process, through NCCL: two of them, and up to eight.
 *
 * The model's steps are compared bit by bit with unsharded layers on the same GPU; sums over the ranks have one
 * value with two ranks, and with more lie within the roundings that an order may make. Then what only real devices show: gathers by copy engines and by NCCL's
 * kernels, contexts of two devices used in turn by one thread, and a rank that does not come.
 * Without two GPUs, or without NCCL, all is skipped with the reason; FP8_TEST_REQUIRE=gpu makes that fail.
 */
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "tests/ranks/graph_rig.h"
#include "tests/ranks/model_rig.h"

static int gpus; /* that take part */

static const char spec[] =
    "return model \"gpus\" { tokens = 256, mesh = { fsdp = %d }, layers = {\n"
    "linear \"a\" { in_features = 256, out_features = 384, bias = true },\n"
    "linear \"b\" { in_features = 300, out_features = 515 },\n"
    "linear \"c\" { in_features = 128, out_features = 1, bias = true },\n"
    "linear \"d\" { in_features = 256, out_features = 1025 },\n"
    "linear \"e\" { in_features = 384, out_features = 256, grad_weight = \"bf16\" },\n"
    "linear \"f\" { in_features = 384, out_features = 389, recipe = recipe.block {} },\n"
    "} }\n";

/* ---- limits: a rank that hangs in the driver is not freed by a communicator's timeout ---- */

static char limited[128];

static void too_late(int signal)
{
    (void)signal;
    for (int i = 0; i < 2; i++) {
        model_doing[i][strcspn(model_doing[i], "\n")] = '\n';
        (void)!write(STDERR_FILENO, model_doing[i], strcspn(model_doing[i], "\n") + 1);
    }
    (void)!write(STDERR_FILENO, limited, strlen(limited));
    _exit(1);
}

static void run_limited(const char *what, int ranks, unsigned seconds, rank_body body, void *user)
{
    const double timeout = seconds / 3.0;
    struct timespec start, end;
    snprintf(limited, sizeof limited, "%s over %d: not done after %u s: a rank hangs\n", what,
             ranks, seconds);
    signal(SIGALRM, too_late);
    alarm(seconds);
    clock_gettime(CLOCK_MONOTONIC, &start);
    ranks_run_gpus(ranks, timeout, body, user);
    clock_gettime(CLOCK_MONOTONIC, &end);
    alarm(0);
    printf("%s over %d: %.2f s\n", what, ranks,
           (double)(end.tv_sec - start.tv_sec) + 1e-9 * (double)(end.tv_nsec - start.tv_nsec));
    fflush(stdout);
}

/* Two ranks, three (chunks that no dim is a multiple of), and all. */
static int next_ranks(int ranks)
{
    return ranks < 3 ? ranks + 1 : ranks < gpus ? gpus : gpus + 1;
}

/* ---- models ---- */

static void test_model(void **state)
{
    (void)state;
    static struct {
        const char *name;
        struct model_case c;
    } cases[] = {
        { "two steps", { .tokens = 256, .steps = 2, .give_bias = 1 } },
        { "weights kept, average", { .tokens = 77, .steps = 1, .keep = 1, .average = 1 } },
        { "one group", { .tokens = 130, .steps = 1, .group = 1, .give_bias = 1 } },
        { "hooks", { .tokens = 130, .steps = 1, .with_hooks = 1 } },
        { "a rank without tokens", { .tokens = -1, .steps = 1, .give_bias = 1 } },
        { "the caller's accumulators", { .tokens = 64, .steps = 1, .caller_dw = 1 } },
        { "sums by collectives",
          { .tokens = 130, .steps = 1, .reduce_by = FP8_REDUCE_COLLECTIVE } },
        { "sums of an exchange",
          { .tokens = 130, .steps = 1, .average = 1, .reduce_by = FP8_REDUCE_EXCHANGE } },
    };
    for (int ranks = 2; ranks <= gpus; ranks = next_ranks(ranks)) {
        char text[sizeof spec + 16], bundle[256];
        snprintf(text, sizeof text, spec, ranks);
        ranks_bundle(text, "sm_90a", bundle);
        for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
            if (i > 0 && ranks != 2 && ranks != gpus)
                continue;
            cases[i].c.bundle = bundle;
            run_limited(cases[i].name, ranks, 24, model_body, &cases[i].c);
        }
        ranks_bundle_drop(bundle);
    }
}

/* ---- graphs ---- */

static void test_graphs(void **state)
{
    (void)state;
    for (int ranks = 2; ranks <= gpus; ranks = next_ranks(ranks)) {
        char text[sizeof spec + 16], bundle[256];
        snprintf(text, sizeof text, spec, ranks);
        ranks_bundle(text, "sm_90a", bundle);
        for (uint32_t keep = 0; keep < 2; keep++) {
            struct graph_case c = { .bundle = bundle, .tokens = 130, .keep = keep };
            pthread_barrier_init(&c.meet, NULL, (unsigned)ranks);
            run_limited(keep ? "graphs, weights kept" : "graphs", ranks, 40, graph_body, &c);
            pthread_barrier_destroy(&c.meet);
        }
        ranks_bundle_drop(bundle);
    }
}

/* ---- gathers: right, and by which way ---- */

enum { MIB = 1 << 20 };

static void gather_body(struct rank *rank)
{
    static const size_t sizes[] = { 256, 1000, 3 * MIB, 32 * MIB };
    fp8_comm_info info = { .size = sizeof info };
    static const unsigned char bytes[] = { 0x7f, 0x80, 0xff, 0x00, 0x01, 0x7e, 0xfe, 0x81 };
    const size_t largest = 32 * MIB, ranks = (size_t)rank->ranks;
    void *memory = NULL, *image = malloc(largest * ranks);
    fp8_stream stream = NULL;
    rank_check(rank, image && fp8_stream_create(rank->context, &stream) == FP8_OK);
    rank_check(rank, fp8_comm_alloc(rank->comm, largest * (ranks + 1), &memory) == FP8_OK);
    rank_check(rank, fp8_comm_describe(rank->comm, &info) == FP8_OK);
    if (rank->rank == 0)
        printf("NCCL %d at %s, gathers by %s\n", info.version, info.path,
               info.is_copy_engine ? "copy engines" : "kernels");
    char *send = memory, *recv = send + largest;
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        fp8_event *start = NULL, *finish = NULL;
        double seconds = 0;
        rank_check(rank, fp8_event_create(rank->context, &start) == FP8_OK &&
                             fp8_event_create(rank->context, &finish) == FP8_OK);
        memset(image, bytes[rank->rank], sizes[i]);
        rank_check(rank, fp8_memory_copy(rank->context, send, image, sizes[i], stream) == FP8_OK);
        const fp8_gather_part part = { send, recv, sizes[i] };
        for (int round = 0; round < 12; round++) {
            if (round == 2)
                rank_check(rank, fp8_event_record(start, stream) == FP8_OK);
            rank_check(rank, fp8_comm_all_gather(rank->comm, &part, 1, "w", stream) == FP8_OK);
        }
        rank_check(rank, fp8_event_record(finish, stream) == FP8_OK);
        rank_check(rank, fp8_comm_wait(rank->comm, stream) == FP8_OK);
        rank_check(rank, fp8_event_seconds(start, finish, &seconds) == FP8_OK);
        memset(image, 0x55, sizes[i] * ranks);
        rank_check(rank,
                   fp8_memory_copy(rank->context, image, recv, sizes[i] * ranks, stream) == FP8_OK);
        rank_check(rank, fp8_stream_synchronize(rank->context, stream) == FP8_OK);
        for (size_t j = 0; j < sizes[i] * ranks; j++)
            rank_check(rank, ((unsigned char *)image)[j] == bytes[j / sizes[i]]);
        if (rank->rank == 0)
            printf("all_gather of %zu bytes a rank over %zu: %.1f us, %.1f GB/s received\n",
                   sizes[i], ranks, seconds / 10 * 1e6,
                   (double)(sizes[i] * (ranks - 1)) / (seconds / 10) * 1e-9);
        fp8_event_destroy(start);
        fp8_event_destroy(finish);
    }
    fp8_comm_free(rank->comm, memory);
    fp8_stream_destroy(rank->context, stream);
    free(image);
}

static void test_gathers(void **state)
{
    (void)state;
    for (int ranks = 2; ranks <= gpus; ranks = next_ranks(ranks))
        run_limited("gathers", ranks, 60, gather_body, NULL);
}

/* ---- two devices in one thread, in turn ---- */

static void test_two_contexts(void **state)
{
    (void)state;
    char bundle[256], text[sizeof spec + 16];
    fp8_context *contexts[2];
    fp8_bundle *bundles[2];
    fp8_layer *layers[2];
    void *x[2], *y[2], *w[2], *workspace[2];
    fp8_operand weight[2];
    size_t bytes;
    static uint16_t image[2][256 * 384];
    snprintf(text, sizeof text, spec, 2);
    ranks_bundle(text, "sm_90a", bundle);
    for (int i = 0; i < 2; i++) {
        fp8_context_options options = FP8_CONTEXT_OPTIONS_INIT;
        options.device = i;
        assert_int_equal(fp8_context_create(&options, &contexts[i]), FP8_OK);
        assert_int_equal(fp8_bundle_open(contexts[i], bundle, &bundles[i]), FP8_OK);
        assert_int_equal(fp8_layer_create(bundles[i], "a", &layers[i]), FP8_OK);
    }
    for (int i = 0; i < 2; i++) {
        assert_int_equal(fp8_layer_bytes(layers[i], 256, FP8_BYTES_WORKSPACE, &bytes), FP8_OK);
        assert_int_equal(fp8_memory_alloc(contexts[i], bytes, &workspace[i]), FP8_OK);
        fp8_call call = FP8_CALL_INIT;
        call.workspace = workspace[i];
        call.workspace_bytes = bytes;
        weight[i] = (fp8_operand)FP8_OPERAND_INIT;
        assert_int_equal(fp8_layer_bytes(layers[i], 0, FP8_BYTES_WEIGHT, &weight[i].bytes), FP8_OK);
        assert_int_equal(fp8_memory_alloc(contexts[i], weight[i].bytes, &weight[i].data), FP8_OK);
        assert_int_equal(fp8_memory_alloc(contexts[i], sizeof image[0], &x[i]), FP8_OK);
        assert_int_equal(fp8_memory_alloc(contexts[i], sizeof image[0], &y[i]), FP8_OK);
        assert_int_equal(fp8_memory_alloc(contexts[i], sizeof image[0], &w[i]), FP8_OK);
        for (int j = 0; j < 256 * 384; j++)
            image[i][j] = model_value(5, j);
        assert_int_equal(fp8_memory_copy(contexts[i], x[i], image[i], sizeof image[0], NULL),
                         FP8_OK);
        assert_int_equal(fp8_memory_copy(contexts[i], w[i], image[i], sizeof image[0], NULL),
                         FP8_OK);
        const fp8_tensor tw = { w[i], 384, 256, 256, FP8_DTYPE_BF16, 0 };
        fp8_weight_args update = FP8_WEIGHT_ARGS_INIT;
        update.w = &tw;
        update.version = 1;
        update.weight = &weight[i];
        update.call = call;
        assert_int_equal(fp8_weight_update(layers[i], &update), FP8_OK);
    }
    for (int round = 0; round < 6; round++) {
        const int i = round % 2;
        fp8_call call = FP8_CALL_INIT;
        call.workspace = workspace[i];
        call.workspace_bytes = bytes;
        const fp8_tensor tx = { x[i], 256, 256, 256, FP8_DTYPE_BF16, 0 };
        const fp8_tensor ty = { y[i], 256, 384, 384, FP8_DTYPE_BF16, 0 };
        const fp8_tensor tb = { w[i], 1, 384, 384, FP8_DTYPE_BF16, 0 };
        fp8_fprop_args fprop = FP8_FPROP_ARGS_INIT;
        fprop.x = &tx;
        fprop.weight = &weight[i];
        fprop.bias = &tb;
        fprop.y = &ty;
        fprop.call = call;
        assert_int_equal(fp8_layer_fprop(layers[i], &fprop), FP8_OK);
    }
    for (int i = 0; i < 2; i++) {
        assert_int_equal(fp8_memory_copy(contexts[i], image[i], y[i], sizeof image[0], NULL),
                         FP8_OK);
        assert_int_equal(fp8_stream_synchronize(contexts[i], NULL), FP8_OK);
    }
    assert_memory_equal(image[0], image[1], sizeof image[0]);
    assert_int_not_equal(image[0][0], 0);
    for (int i = 0; i < 2; i++) {
        void *all[] = { x[i], y[i], w[i], workspace[i], weight[i].data };
        for (size_t j = 0; j < sizeof all / sizeof all[0]; j++)
            fp8_memory_free(contexts[i], all[j]);
        fp8_layer_destroy(layers[i]);
        fp8_bundle_close(bundles[i]);
        fp8_context_destroy(contexts[i]);
    }
    ranks_bundle_drop(bundle);
}

/* ---- a rank that does not come ---- */

static void absent_body(struct rank *rank)
{
    fp8_stream stream = NULL;
    void *memory = NULL;
    rank_check(rank, fp8_stream_create(rank->context, &stream) == FP8_OK);
    rank_check(rank, fp8_memory_alloc(rank->context, 4096, &memory) == FP8_OK);
    rank_check(rank, fp8_comm_all_reduce_max(rank->comm, memory, 4, "amax", stream) == FP8_OK);
    rank_check(rank, fp8_comm_wait(rank->comm, stream) == FP8_OK);
    if (rank->rank < rank->ranks - 1) {
        char who[32];
        snprintf(who, sizeof who, "rank %d of %d", rank->rank, rank->ranks);
        fp8_status status =
            fp8_comm_all_reduce_max(rank->comm, memory, 4, "amax of layer 'a'", stream);
        if (status == FP8_OK)
            status = fp8_comm_wait(rank->comm, stream);
        rank_check(rank, status == FP8_ERR_TIMEOUT || status == FP8_ERR_COMM);
        rank_check(rank, says(who, "all_reduce_max of amax of layer 'a'", NULL));
        rank_check(rank, fp8_stream_synchronize(rank->context, stream) == FP8_OK);
    } else {
        float pause;
        for (int i = 0; i < 45; i++) {
            (void)fp8_memory_copy(rank->context, &pause, memory, sizeof pause, stream);
            (void)fp8_comm_wait(rank->comm, stream);
            struct timespec time = { 0, 100000000 };
            nanosleep(&time, NULL);
        }
    }
    fp8_memory_free(rank->context, memory);
    fp8_stream_destroy(rank->context, stream);
}

static void test_absent(void **state)
{
    (void)state;
    for (int ranks = 2; ranks <= gpus; ranks = next_ranks(ranks))
        run_limited("a rank that does not come", ranks, 9, absent_body, NULL);
}

int main(int count, char **arguments)
{
    const char *require = getenv("FP8_TEST_REQUIRE");
    const int missing = require && strcmp(require, "gpu") == 0 ? 1 : 77;
    gpus = ranks_gpus();
    gpus = gpus > 8 ? 8 : gpus;
    if (gpus < 2) {
        printf("skip: two GPUs are needed, this process sees %d (%s)\n", gpus, fp8_last_error());
        return gpus == 1 ? 77 : missing;
    }
    const char *path = NULL;
    if (fp8_library_symbol(FP8_LIBRARY_NCCL, NULL, NULL, &path) != FP8_OK) {
        printf("skip: %s\n", fp8_last_error());
        return missing;
    }
    if (count > 1) /* tests by name, as cmocka's patterns */
        cmocka_set_test_filter(arguments[1]);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_gathers), cmocka_unit_test(test_model),
        cmocka_unit_test(test_graphs),  cmocka_unit_test(test_two_contexts),
        cmocka_unit_test(test_absent),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
