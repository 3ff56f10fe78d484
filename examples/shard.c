/*
 * shard.c - a training step of a layer whose weight is spread over ranks (FSDP, ZeRO-3).
 *
 *     fp8gen build specs/llama3_8b.lua --fsdp 2 -o shards
 *     example_shard shards qkv [RANKS]
 *
 * The ranks are threads: each takes a GPU of its own where there are enough (over NCCL), else all
 * run on the CPU; the calls are the same. A rank holds some rows of w, and tokens of its own. What
 * is worth seeing is in step(): FP8 rows are made once an optimizer step, the passes gather them,
 * and dw comes back averaged, this rank's rows alone. Ranks that are processes call fp8_comm_create
 * in place of fp8_comm_join. A model of many layers has all of them in one list, and gathers ahead.
 */
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <fp8.h>
#include <fp8_device.h>
#include <fp8_model.h>

#define CHECK(call)                                                                                \
    do {                                                                                           \
        fp8_status status_ = (call);                                                               \
        if (status_ != FP8_OK) {                                                                   \
            fprintf(stderr, "%s: %s\n  remedy: %s\n", #call, fp8_last_error(),                     \
                    fp8_status_remedy(status_));                                                   \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)

enum { TOKENS = 8, MOST_RANKS = 8, MOST_MEMORY = 16, SAMPLES = 16 };
enum { X, W, DY, NOTHING }; /* what a tensor holds */

struct rank {
    int32_t rank, ranks;
    fp8_context *context;
    fp8_bundle *bundle;
    fp8_layer *layer;
    fp8_comm_group *group;
    fp8_comm *comm;
    fp8_model *model;
    fp8_layer_info info;
    int64_t first, count;           /* this rank's rows of w */
    fp8_tensor x, y, dy, dx, w, dw; /* w, dw: these rows alone */
    void *memory[MOST_MEMORY];
    int memory_count;
    double off[3]; /* y, dx, dw: how far from the sums without FP8, as a share of them */
};

/* A number from -1 to 1 that bf16 holds; x and dy are others on every rank, w is one. */
static float value(int what, int32_t rank, int64_t row, int64_t col)
{
    uint32_t word = (uint32_t)(what + 4 * (what == W ? 0 : rank) + row * 7919 + col * 104729);
    word = (word ^ word >> 16) * 2246822519u;
    word = (word ^ word >> 13) * 3266489917u;
    return (float)(word >> 24) / 128.0f - 1.0f;
}

static void *allocate(struct rank *r, size_t bytes)
{
    void **memory = &r->memory[r->memory_count++];
    CHECK(fp8_memory_alloc(r->context, bytes, memory));
    return *memory;
}

static fp8_tensor make(struct rank *r, fp8_dtype dtype, int64_t rows, int64_t cols, int what)
{
    fp8_tensor t = { NULL, rows, cols, cols, dtype, 0 };
    const size_t size = fp8_dtype_bytes(dtype), bytes = (size_t)(rows * cols) * size;
    char *values = calloc(1, bytes + 1);
    for (int64_t i = 0; values && what != NOTHING && i < rows * cols; i++) {
        float number = value(what, r->rank, i / cols + (what == W ? r->first : 0), i % cols);
        memcpy(values + (size_t)i * size, (char *)&number + 4 - size, size); /* bf16: upper half */
    }
    t.data = allocate(r, bytes);
    CHECK(fp8_memory_copy(r->context, t.data, values, bytes, NULL));
    CHECK(fp8_stream_synchronize(r->context, NULL));
    free(values);
    return t;
}

static fp8_operand make_operand(struct rank *r, fp8_bytes which)
{
    fp8_operand operand = FP8_OPERAND_INIT;
    CHECK(fp8_layer_bytes(r->layer, TOKENS, which, &operand.bytes));
    operand.data = allocate(r, operand.bytes);
    return operand;
}

static void step(struct rank *r)
{
    fp8_call call = FP8_CALL_INIT; /* its stream: the default one */
    fp8_operand saved = make_operand(r, FP8_BYTES_SAVED);
    fp8_operand grad = make_operand(r, FP8_BYTES_GRAD);
    CHECK(fp8_layer_bytes(r->layer, TOKENS, FP8_BYTES_WORKSPACE, &call.workspace_bytes));
    call.workspace = allocate(r, call.workspace_bytes);

    fp8_model_update_args update = FP8_MODEL_UPDATE_ARGS_INIT;
    update.w = &r->w;   /* one for each layer of the model */
    update.version = 1; /* one more after each optimizer step */
    update.call = call;
    CHECK(fp8_model_update(r->model, &update));

    fp8_fprop_args forward = FP8_FPROP_ARGS_INIT; /* its weight is what the model gathers */
    forward.x = &r->x, forward.y = &r->y, forward.saved = &saved, forward.call = call;
    CHECK(fp8_model_fprop(r->model, 0, &forward));

    fp8_backward_args backward = FP8_BACKWARD_ARGS_INIT; /* the whole dw is the model's, too */
    backward.dy = &r->dy, backward.saved = &saved, backward.grad = &grad;
    backward.dx = &r->dx, backward.call = call;
    fp8_model_backward_args reduced = FP8_MODEL_BACKWARD_ARGS_INIT;
    reduced.backward = &backward, reduced.dw = &r->dw;
    CHECK(fp8_model_backward(r->model, 0, &reduced));

    CHECK(fp8_model_join(r->model, call.stream)); /* behind it the optimizer reads dw */
    CHECK(fp8_comm_wait(r->comm, call.stream));   /* ends with an error if a rank is lost */
}

/* Element [0,j] of y, dx or this rank's dw, summed without FP8. */
static double expected(const struct rank *r, int which, int64_t j)
{
    double sum = 0;
    for (int64_t i = 0; which == 0 && i < r->info.in_features; i++)
        sum += (double)value(X, r->rank, 0, i) * value(W, 0, j, i);
    for (int64_t i = 0; which == 1 && i < r->info.out_features; i++)
        sum += (double)value(DY, r->rank, 0, i) * value(W, 0, i, j);
    for (int32_t rank = 0; which == 2 && rank < r->ranks; rank++) /* over the tokens of all ranks */
        for (int64_t i = 0; i < TOKENS; i++)
            sum += (double)value(DY, rank, i, r->first) * value(X, rank, i, j) / r->ranks;
    return sum;
}

/* Root mean square of what FP8 changes in the first elements of a tensor. */
static double compare(const struct rank *r, int which, const fp8_tensor *t)
{
    const size_t size = fp8_dtype_bytes(t->dtype);
    const int64_t samples = t->cols < SAMPLES ? t->cols : SAMPLES;
    char values[4 * SAMPLES];
    double difference = 0, all = 0;
    CHECK(fp8_memory_copy(r->context, values, t->data, (size_t)samples * size, NULL));
    CHECK(fp8_stream_synchronize(r->context, NULL));
    for (int64_t j = 0; j < samples; j++) {
        const double wanted = expected(r, which, j);
        float got = 0;
        memcpy((char *)&got + 4 - size, values + (size_t)j * size, size);
        difference += (got - wanted) * (got - wanted);
        all += wanted * wanted;
    }
    return sqrt(difference / all);
}

static void *run(void *argument)
{
    struct rank *r = argument;
    fp8_model_layer listed = FP8_MODEL_LAYER_INIT;
    fp8_model_options options = FP8_MODEL_OPTIONS_INIT;
    CHECK(fp8_comm_join(r->group, r->context, r->rank, "fsdp", &r->comm));
    listed.layer = r->layer;
    options.context = r->context, options.comm = r->comm;
    options.layers = &listed, options.layer_count = 1;
    options.grads = FP8_GRADS_AVERAGE;
    CHECK(fp8_model_create(&options, &r->model)); /* all memory of gathers and gradients */
    CHECK(fp8_model_rows(r->model, 0, &r->first, &r->count));

    const int64_t n = r->info.out_features, k = r->info.in_features;
    r->x = make(r, r->info.x_dtype, TOKENS, k, X);
    r->dy = make(r, r->info.dy_dtype, TOKENS, n, DY);
    r->w = make(r, r->info.w_dtype, r->count, k, W);
    r->y = make(r, r->info.y_dtype, TOKENS, n, NOTHING);
    r->dx = make(r, r->info.dx_dtype, TOKENS, k, NOTHING);
    r->dw = make(r, r->info.dw_dtype, r->count, k, NOTHING);
    step(r);
    r->off[0] = compare(r, 0, &r->y), r->off[1] = compare(r, 1, &r->dx);
    if (r->count)
        r->off[2] = compare(r, 2, &r->dw);
    fp8_model_destroy(r->model);
    fp8_comm_destroy(r->comm);
    return NULL;
}

/* Every rank on a GPU of its own, or all on the host. */
static fp8_status open_all(struct rank *ranks, int32_t count, char **words, int32_t device)
{
    fp8_status status = FP8_OK;
    for (int32_t i = 0; i < count && status == FP8_OK; i++) {
        fp8_context_options options = FP8_CONTEXT_OPTIONS_INIT;
        options.device = device == FP8_DEVICE_HOST ? device : i;
        status = fp8_context_create(&options, &ranks[i].context);
        if (status == FP8_OK)
            status = fp8_bundle_open(ranks[i].context, words[0], &ranks[i].bundle);
        if (status == FP8_OK)
            status = fp8_layer_create(ranks[i].bundle, words[1], &ranks[i].layer);
        ranks[i].info.size = sizeof ranks[i].info;
        if (status == FP8_OK)
            status = fp8_layer_describe(ranks[i].layer, &ranks[i].info);
    }
    return status;
}

static void close_all(struct rank *ranks, int32_t count)
{
    for (int32_t i = 0; i < count; i++) {
        for (int m = 0; m < ranks[i].memory_count; m++)
            fp8_memory_free(ranks[i].context, ranks[i].memory[m]);
        fp8_layer_destroy(ranks[i].layer);
        fp8_bundle_close(ranks[i].bundle);
        fp8_context_destroy(ranks[i].context);
        memset(&ranks[i], 0, sizeof ranks[i]);
    }
}

int main(int argc, char **argv)
{
    static struct rank ranks[MOST_RANKS];
    static const char *const names[] = { "y", "dx", "dw" };
    pthread_t threads[MOST_RANKS];
    const int32_t count = argc > 3 ? atoi(argv[3]) : 2;
    int wrong = 0;
    if (argc < 3 || argc > 4 || count < 1 || count > MOST_RANKS) {
        fprintf(stderr, "usage: %s BUNDLE LAYER [RANKS, 1 to %d]\n", argv[0], MOST_RANKS);
        return 2;
    }
    if (open_all(ranks, count, argv + 1, 0) != FP8_OK) {
        printf("not on GPUs: %s\n", fp8_last_error());
        close_all(ranks, count);
        CHECK(open_all(ranks, count, argv + 1, FP8_DEVICE_HOST));
    }
    if (ranks[0].info.has_bias) {
        fprintf(stderr, "layer '%s' has a bias, for which this example has no tensors\n", argv[2]);
        close_all(ranks, count);
        return 2;
    }
    fp8_comm_group *group;
    CHECK(fp8_comm_group_create(count, 60, &group));
    for (int32_t i = 0; i < count; i++) {
        ranks[i].rank = i, ranks[i].ranks = count;
        ranks[i].group = group;
        if (pthread_create(&threads[i], NULL, run, &ranks[i]) != 0)
            exit(1);
    }
    for (int32_t i = 0; i < count; i++) {
        const struct rank *r = &ranks[i];
        pthread_join(threads[i], NULL);
        printf("rank %d of %d: %lld of the %lld rows of w\n", i, count, (long long)r->count,
               (long long)r->info.out_features);
        for (int v = 0; v < 3 && (v < 2 || r->count); v++) {
            const int good = r->off[v] < 0.2; /* what is wrong is off by more than all of it */
            printf("  %-2s is %4.1f %% off the sums without FP8   %s\n", names[v], 100 * r->off[v],
                   good ? "ok" : "WRONG");
            wrong += !good;
        }
    }
    close_all(ranks, count);
    fp8_comm_group_destroy(group);
    return wrong ? 1 : 0;
}
