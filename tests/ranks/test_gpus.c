/*
 * test_gpus.c - weight parallel over the GPUs of one process, through NCCL: two of them, and up to
 * eight.
 *
 * The model's steps are compared bit by bit with unsharded layers on the same GPU; sums over the
 * ranks have one value with two ranks, and with more lie within the roundings that an order may
 * make. Then what only real devices show: gathers by copy engines and by NCCL's kernels, contexts
 * of two devices used in turn by one thread, and a rank that does not come. Without two GPUs, or
 * without NCCL, all is skipped with the reason; FP8_TEST_REQUIRE=gpu makes that fail.
 */
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "tests/ranks/absent_rig.h"
#include "tests/ranks/graph_rig.h"
#include "tests/ranks/memory_rig.h"
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
    "linear \"g\" { in_features = 272, out_features = 515, bias = true,\n"
    "             recipe = recipe.rowwise {} },\n"
    "linear \"h\" { in_features = 256, out_features = 130, recipe = recipe.rowwise_hp_wgrad {} },\n"
    "linear \"i\" { in_features = 272, out_features = 515, bias = true,\n"
    "             recipe = recipe.current { weight_scale = \"shard\" } },\n"
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

/* ---- bundles: one for a number of ranks ---- */

static char bundles[8 + 1][256];

static const char *bundle_for(int ranks)
{
    char text[sizeof spec + 16];
    snprintf(text, sizeof text, spec, ranks);
    if (!bundles[ranks][0])
        ranks_bundle(text, "sm_90a", bundles[ranks]);
    return bundles[ranks];
}

static int drop_bundles(void **state)
{
    (void)state;
    for (int ranks = 0; ranks <= 8; ranks++) {
        if (bundles[ranks][0])
            ranks_bundle_drop(bundles[ranks]);
    }
    return 0;
}

/* ---- models: a test for each case ---- */

static struct {
    const char *name;
    struct model_case c;
} cases[] = {
    { "model: two steps", { .tokens = 256, .steps = 2, .give_bias = 1 } },
    { "model: weights kept, average", { .tokens = 77, .steps = 1, .keep = 1, .average = 1 } },
    { "model: one group", { .tokens = 130, .steps = 1, .group = 1, .give_bias = 1 } },
    { "model: hooks", { .tokens = 130, .steps = 1, .with_hooks = 1 } },
    { "model: a rank without tokens", { .tokens = -1, .steps = 1, .give_bias = 1 } },
    { "model: the caller's accumulators", { .tokens = 64, .steps = 1, .caller_dw = 1 } },
    { "model: sums by collectives",
      { .tokens = 130, .steps = 1, .give_bias = 1, .reduce_by = FP8_REDUCE_COLLECTIVE } },
    { "model: averages by collectives",
      { .tokens = 130, .steps = 1, .average = 1, .reduce_by = FP8_REDUCE_COLLECTIVE } },
    { "model: transposed shards", { .tokens = 130, .steps = 1, .transposed_shards = 1 } },
    { "model: averages by exchange",
      { .tokens = 130, .steps = 1, .average = 1, .reduce_by = FP8_REDUCE_EXCHANGE } },
};
enum { CASES = sizeof cases / sizeof cases[0] };

static void test_model(void **state)
{
    const int i = *(int *)*state;
    for (int ranks = 2; ranks <= gpus; ranks = next_ranks(ranks)) {
        if (i > 0 && ranks != 2 && ranks != gpus)
            continue;
        cases[i].c.bundle = bundle_for(ranks);
        run_limited(cases[i].name, ranks, 24, model_body, &cases[i].c);
    }
}

/* ---- graphs ---- */

static void test_graphs(void **state)
{
    (void)state;
    for (int ranks = 2; ranks <= gpus; ranks = next_ranks(ranks)) {
        for (uint32_t keep = 0; keep < 2; keep++) {
            struct graph_case c = { .bundle = bundle_for(ranks), .tokens = 130, .keep = keep };
            pthread_barrier_init(&c.meet, NULL, (unsigned)ranks);
            run_limited(keep ? "graphs, weights kept" : "graphs", ranks, 40, graph_body, &c);
            pthread_barrier_destroy(&c.meet);
        }
    }
}

/* ---- memory ---- */

static void test_memory(void **state)
{
    (void)state;
    char text[sizeof MEMORY_SPEC + 16], bundle[256];
    snprintf(text, sizeof text, MEMORY_SPEC, 2);
    ranks_bundle(text, "sm_90a", bundle);
    struct memory_case c = { .bundle = bundle };
    pthread_barrier_init(&c.meet, NULL, 2);
    run_limited("memory", 2, 30, memory_body, &c);
    pthread_barrier_destroy(&c.meet);
    ranks_bundle_drop(bundle);
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

/* ---- all devices in one thread, in turn ---- */

enum { N = 384, K = 256 }; /* of layer 'a' */
enum {
    DESK_X,
    DESK_DY,
    DESK_W,
    DESK_Y,
    DESK_DX,
    DESK_DW,
    DESK_DBIAS,
    DESK_WEIGHT,
    DESK_SAVED,
    DESK_GRAD,
    DESK_WORKSPACE,
    DESK_BUFFERS
};

/* A layer with its memory on one device. The same data on all. */
struct desk {
    fp8_context *context;
    fp8_bundle *bundle;
    fp8_layer *layer;
    void *memory[DESK_BUFFERS];
    size_t bytes[DESK_BUFFERS];
};

static fp8_operand operand_on(const struct desk *desk, int buffer)
{
    fp8_operand operand = FP8_OPERAND_INIT;
    operand.data = desk->memory[buffer];
    operand.bytes = desk->bytes[buffer];
    return operand;
}

static fp8_call call_on(const struct desk *desk)
{
    fp8_call call = FP8_CALL_INIT;
    call.workspace = desk->memory[DESK_WORKSPACE];
    call.workspace_bytes = desk->bytes[DESK_WORKSPACE];
    return call;
}

static fp8_tensor tensor_on(const struct desk *desk, int buffer, int64_t rows, int64_t cols)
{
    return (fp8_tensor){ desk->memory[buffer],
                         rows,
                         cols,
                         cols,
                         buffer == DESK_DW || buffer == DESK_DBIAS ? FP8_DTYPE_FP32
                                                                   : FP8_DTYPE_BF16,
                         0 };
}

static void open_desk(struct desk *desk, int device, const char *bundle, int64_t m)
{
    static const struct {
        int buffer;
        fp8_bytes which;
    } sized[] = { { DESK_WEIGHT, FP8_BYTES_WEIGHT },
                  { DESK_SAVED, FP8_BYTES_SAVED },
                  { DESK_GRAD, FP8_BYTES_GRAD },
                  { DESK_WORKSPACE, FP8_BYTES_WORKSPACE } };
    fp8_context_options options = FP8_CONTEXT_OPTIONS_INIT;
    options.device = device;
    assert_int_equal(fp8_context_create(&options, &desk->context), FP8_OK);
    assert_int_equal(fp8_bundle_open(desk->context, bundle, &desk->bundle), FP8_OK);
    assert_int_equal(fp8_layer_create(desk->bundle, "a", &desk->layer), FP8_OK);
    for (int i = 0; i < DESK_BUFFERS; i++)
        desk->bytes[i] = (size_t)N * K * 4;
    for (size_t i = 0; i < sizeof sized / sizeof sized[0]; i++)
        assert_int_equal(
            fp8_layer_bytes(desk->layer, m, sized[i].which, &desk->bytes[sized[i].buffer]), FP8_OK);
    uint16_t *image = malloc((size_t)N * K * 4);
    assert_non_null(image);
    for (int j = 0; j < N * K * 2; j++)
        image[j] = model_value(5, j);
    for (int i = 0; i < DESK_BUFFERS; i++) {
        assert_int_equal(fp8_memory_alloc(desk->context, desk->bytes[i], &desk->memory[i]), FP8_OK);
        if (i <= DESK_W)
            assert_int_equal(
                fp8_memory_copy(desk->context, desk->memory[i], image, desk->bytes[i], NULL),
                FP8_OK);
    }
    assert_int_equal(fp8_stream_synchronize(desk->context, NULL), FP8_OK);
    free(image);
}

/* Quantises w, forward, backward: all that a layer does. */
static void work_at(const struct desk *desk, uint64_t version, int64_t m)
{
    fp8_tensor w = tensor_on(desk, DESK_W, N, K), bias = tensor_on(desk, DESK_W, 1, N);
    fp8_tensor x = tensor_on(desk, DESK_X, m, K), y = tensor_on(desk, DESK_Y, m, N);
    fp8_tensor dy = tensor_on(desk, DESK_DY, m, N), dx = tensor_on(desk, DESK_DX, m, K);
    fp8_tensor dw = tensor_on(desk, DESK_DW, N, K), dbias = tensor_on(desk, DESK_DBIAS, 1, N);
    fp8_operand weight = operand_on(desk, DESK_WEIGHT), saved = operand_on(desk, DESK_SAVED);
    fp8_operand grad = operand_on(desk, DESK_GRAD);
    fp8_weight_args update = FP8_WEIGHT_ARGS_INIT;
    fp8_fprop_args fprop = FP8_FPROP_ARGS_INIT;
    fp8_backward_args backward = FP8_BACKWARD_ARGS_INIT;
    update.w = &w;
    update.version = version;
    update.weight = &weight;
    update.call = fprop.call = backward.call = call_on(desk);
    fprop.x = &x;
    fprop.weight = &weight;
    fprop.bias = &bias;
    fprop.y = &y;
    fprop.saved = &saved;
    backward.dy = &dy;
    backward.saved = &saved;
    backward.weight = &weight;
    backward.grad = &grad;
    backward.dbias = &dbias;
    backward.dw = &dw;
    backward.dx = &dx;
    assert_int_equal(fp8_weight_update(desk->layer, &update), FP8_OK);
    assert_int_equal(fp8_layer_fprop(desk->layer, &fprop), FP8_OK);
    assert_int_equal(fp8_layer_backward(desk->layer, &backward), FP8_OK);
}

static void close_desk(struct desk *desk)
{
    for (int i = 0; i < DESK_BUFFERS; i++)
        fp8_memory_free(desk->context, desk->memory[i]);
    fp8_layer_destroy(desk->layer);
    fp8_bundle_close(desk->bundle);
    fp8_context_destroy(desk->context);
}

/* One thread, a layer on each device, calls in turn: nobody changes the current device. */
static void test_two_contexts(void **state)
{
    (void)state;
    enum { M = 256 };
    static const int results[] = { DESK_Y, DESK_DX, DESK_DW, DESK_DBIAS };
    static const size_t sizes[] = { M * N * 2, M * K * 2, N * K * 4, N * 4 };
    struct desk desks[8] = { { 0 } };
    static unsigned char image[8][N * K * 4];
    for (int i = 0; i < gpus; i++)
        open_desk(&desks[i], i, bundle_for(2), M);
    for (int round = 0; round < 3 * gpus; round++)
        work_at(&desks[round % gpus], (uint64_t)(1 + round / gpus), M);
    for (int r = 0; r < 4; r++) {
        for (int i = 0; i < gpus; i++) {
            assert_int_equal(fp8_memory_copy(desks[i].context, image[i],
                                             desks[i].memory[results[r]], sizes[r], NULL),
                             FP8_OK);
            assert_int_equal(fp8_stream_synchronize(desks[i].context, NULL), FP8_OK);
            assert_memory_equal(image[i], image[0], sizes[r]);
        }
        int filled = 0;
        for (size_t j = 0; j < sizes[r]; j++)
            filled += image[0][j] != 0;
        assert_true(filled > (int)sizes[r] / 4);
    }
    for (int i = 0; i < gpus; i++)
        close_desk(&desks[i]);
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

static void test_absent_engine(void **state)
{
    (void)state;
    const int code = absent_run();
    if (code == 77)
        skip();
    assert_int_equal(code, 0);
}

int main(int count, char **arguments)
{
    const int child = absent_process(count, arguments);
    if (child >= 0)
        return child;
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
    struct CMUnitTest tests[CASES + 6] = { { .name = "gathers", .test_func = test_gathers } };
    int numbers[CASES];
    for (int i = 0; i < CASES; i++) {
        numbers[i] = i;
        tests[1 + i] = (struct CMUnitTest){ .name = cases[i].name,
                                            .test_func = test_model,
                                            .initial_state = &numbers[i] };
    }
    const struct CMUnitTest others[] = {
        { .name = "memory", .test_func = test_memory },
        { .name = "graphs", .test_func = test_graphs },
        { .name = "two contexts", .test_func = test_two_contexts },
        { .name = "absent", .test_func = test_absent },
        { .name = "absent from a copy engine", .test_func = test_absent_engine },
    };
    memcpy(tests + 1 + CASES, others, sizeof others);
    return cmocka_run_group_tests(tests, NULL, drop_bundles);
}
