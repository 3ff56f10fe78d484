/*
 * test_memory.c - C38: device memory of eight layers of 1024 x 1024 over two ranks, by byte
 * accounting.
 *
 * The model's pool is all there is: it grows with a layer no faster than bf16 shards with two
 * gathered bf16 layers would, what fp8_model_measure says is what create allocates, and no step
 * allocates.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <malloc.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "gen/fp8gen.h"
#include "runtime/fp8_model.h"

enum { RANKS = 2, LAYERS = 8, SIDE = 1024, TOKENS = 16, STEPS = 4, PLACES = STEPS + 2 };

static const char spec[] =
    "return model 'm' { mesh = { fsdp = 2 }, tokens = 16, grad_weight = 'bf16', layers = {\n"
    "linear 'l' { in_features = 1024, out_features = 1024 } } }";

/* The heap's own books; a sanitizer's allocator keeps none, there only what the model says is
 * checked. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
enum { HAS_BOOKS = 0 };
#else
enum { HAS_BOOKS = 1 };
#endif

/* Heap in use, its large blocks among it. */
static size_t heap(void)
{
    struct mallinfo2 info = mallinfo2();
    return info.uordblks + info.hblkhd;
}

struct rank {
    pthread_t thread;
    pthread_barrier_t *together;
    fp8_comm_group *group;
    const char *path;
    int rank;
    size_t heap[PLACES]; /* before create, after it, after each step */
    fp8_model_bytes bytes[LAYERS + 1];
    const char *failure;
};

#define TRY(call)                                                                                  \
    if (!rank->failure && (call) != FP8_OK) {                                                      \
        rank->failure = strdup(fp8_last_error());                                                  \
    }

struct buffers {
    void *w, *x, *dy, *y, *dx, *dw, *saved, *grad, *workspace;
    size_t saved_bytes, grad_bytes, workspace_bytes;
};

static void *zeros(size_t bytes)
{
    void *memory = aligned_alloc(256, (bytes + 255) / 256 * 256);
    memset(memory, 0, bytes);
    return memory;
}

static void make_buffers(struct rank *rank, const fp8_layer *layer, struct buffers *b)
{
    size_t side = SIDE, tokens = TOKENS;
    TRY(fp8_layer_bytes(layer, TOKENS, FP8_BYTES_SAVED, &b->saved_bytes));
    TRY(fp8_layer_bytes(layer, TOKENS, FP8_BYTES_GRAD, &b->grad_bytes));
    TRY(fp8_layer_bytes(layer, TOKENS, FP8_BYTES_WORKSPACE, &b->workspace_bytes));
    b->w = zeros(side * side / RANKS * 2);
    b->dw = zeros(side * side / RANKS * 2);
    b->x = zeros(tokens * side * 2);
    b->dy = zeros(tokens * side * 2);
    b->y = zeros(tokens * side * 2);
    b->dx = zeros(tokens * side * 2);
    b->saved = zeros(b->saved_bytes * LAYERS);
    b->grad = zeros(b->grad_bytes);
    b->workspace = zeros(b->workspace_bytes);
}

static void free_buffers(struct buffers *b)
{
    void *all[] = { b->w, b->x, b->dy, b->y, b->dx, b->dw, b->saved, b->grad, b->workspace };
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        free(all[i]);
}

static fp8_tensor matrix(void *data, int64_t rows)
{
    return (fp8_tensor){ data, rows, SIDE, SIDE, FP8_DTYPE_BF16, 0 };
}

static void step(struct rank *rank, fp8_model *model, struct buffers *b, uint64_t version)
{
    fp8_model_update_args update = FP8_MODEL_UPDATE_ARGS_INIT;
    fp8_operand saved[LAYERS], grad = FP8_OPERAND_INIT;
    fp8_tensor w[LAYERS], x = matrix(b->x, TOKENS), y = matrix(b->y, TOKENS);
    fp8_tensor dy = matrix(b->dy, TOKENS), dx = matrix(b->dx, TOKENS);
    fp8_tensor dw = matrix(b->dw, SIDE / RANKS);
    fp8_call call = { .workspace = b->workspace, .workspace_bytes = b->workspace_bytes };
    for (int i = 0; i < LAYERS; i++)
        w[i] = matrix(b->w, SIDE / RANKS);
    update.w = w;
    update.version = version;
    update.call = call;
    TRY(fp8_model_update(model, &update));
    for (int i = 0; i < LAYERS; i++) {
        fp8_fprop_args args = FP8_FPROP_ARGS_INIT;
        saved[i] = (fp8_operand)FP8_OPERAND_INIT;
        saved[i].data = (char *)b->saved + (size_t)i * b->saved_bytes;
        saved[i].bytes = b->saved_bytes;
        args.x = &x;
        args.y = &y;
        args.saved = &saved[i];
        args.call = call;
        TRY(fp8_model_fprop(model, i, &args));
    }
    grad.data = b->grad;
    grad.bytes = b->grad_bytes;
    for (int i = LAYERS - 1; i >= 0; i--) {
        fp8_backward_args passes = FP8_BACKWARD_ARGS_INIT;
        fp8_model_backward_args args = FP8_MODEL_BACKWARD_ARGS_INIT;
        passes.dy = &dy;
        passes.dx = &dx;
        passes.saved = &saved[i];
        passes.grad = &grad;
        passes.call = call;
        args.backward = &passes;
        args.dw = &dw;
        TRY(fp8_model_backward(model, i, &args));
    }
    TRY(fp8_model_join(model, NULL));
}

/* Only one rank looks, while the others wait. */
static void look(struct rank *rank, int place)
{
    pthread_barrier_wait(rank->together);
    if (rank->rank == 0)
        rank->heap[place] = heap();
    pthread_barrier_wait(rank->together);
}

static void *run_rank(void *argument)
{
    struct rank *rank = argument;
    fp8_context_options host = FP8_CONTEXT_OPTIONS_INIT;
    fp8_model_options options = FP8_MODEL_OPTIONS_INIT;
    fp8_model_layer layers[LAYERS];
    fp8_context *context = NULL;
    fp8_bundle *bundle = NULL;
    fp8_layer *layer = NULL;
    fp8_comm *comm = NULL;
    fp8_model *model = NULL;
    struct buffers b = { 0 };
    host.device = FP8_DEVICE_HOST;
    host.threads = 1;
    TRY(fp8_context_create(&host, &context));
    TRY(fp8_bundle_open(context, rank->path, &bundle));
    TRY(fp8_layer_create(bundle, "l", &layer));
    TRY(fp8_comm_join(rank->group, context, rank->rank, "fsdp", &comm));
    make_buffers(rank, layer, &b);
    for (int i = 0; i < LAYERS; i++) {
        layers[i] = (fp8_model_layer)FP8_MODEL_LAYER_INIT;
        layers[i].layer = layer;
    }
    options.layers = layers;
    options.context = context;
    options.comm = comm;
    for (int i = 1; i <= LAYERS; i++) {
        rank->bytes[i].size = sizeof rank->bytes[i];
        options.layer_count = i;
        TRY(fp8_model_measure(&options, &rank->bytes[i]));
    }
    look(rank, 0);
    TRY(fp8_model_create(&options, &model));
    look(rank, 1);
    for (int i = 0; i < STEPS; i++) {
        if (model != NULL)
            step(rank, model, &b, (uint64_t)i + 1);
        look(rank, 2 + i);
    }
    fp8_model_destroy(model);
    fp8_comm_destroy(comm);
    fp8_layer_destroy(layer);
    fp8_bundle_close(bundle);
    fp8_context_destroy(context);
    free_buffers(&b);
    return NULL;
}

static void build(const char *path)
{
    fp8gen *gen = NULL;
    fp8gen_build_options options = FP8GEN_BUILD_OPTIONS_INIT;
    options.archs = "none";
    options.output_dir = path;
    assert_int_equal(fp8gen_open(NULL, &gen), FP8GEN_OK);
    assert_int_equal(fp8gen_load_text(gen, "memory.lua", spec, strlen(spec)), FP8GEN_OK);
    assert_int_equal(fp8gen_build(gen, &options), FP8GEN_OK);
    fp8gen_close(gen);
}

static void eight_layers_over_two_ranks(void **state)
{
    (void)state;
    char path[] = "/tmp/fp8gen_sim_XXXXXX", command[64];
    struct rank ranks[RANKS] = { { 0 } };
    pthread_barrier_t together;
    fp8_comm_group *group = NULL;
    assert_non_null(mkdtemp(path));
    snprintf(command, sizeof command, "%s/bundle", path);
    build(command);
    pthread_barrier_init(&together, NULL, RANKS);
    assert_int_equal(fp8_comm_group_create(RANKS, 60, &group), FP8_OK);
    for (int i = 0; i < RANKS; i++) {
        ranks[i] =
            (struct rank){ .together = &together, .group = group, .path = command, .rank = i };
        assert_int_equal(pthread_create(&ranks[i].thread, NULL, run_rank, &ranks[i]), 0);
    }
    for (int i = 0; i < RANKS; i++)
        pthread_join(ranks[i].thread, NULL);
    fp8_comm_group_destroy(group);
    pthread_barrier_destroy(&together);
    snprintf(command, sizeof command, "rm -rf %s", path);
    assert_int_equal(system(command), 0);
    for (int i = 0; i < RANKS; i++) {
        if (ranks[i].failure)
            fail_msg("rank %d: %s", i, ranks[i].failure);
    }

    /* a layer more: one FP8 shard, half of what its bf16 shard takes, and pads */
    const size_t bf16_shard = (size_t)SIDE * SIDE / RANKS * 2, slack = 8192;
    const fp8_model_bytes *bytes = ranks[0].bytes;
    for (int i = 3; i <= LAYERS; i++)
        assert_true(bytes[i].pool - bytes[i - 1].pool <= bf16_shard / 2 + slack);
    /* both gathered layers with both copies, and gradients: no more than bf16 ones */
    size_t bf16_gathered = 2 * (size_t)SIDE * SIDE * 2;
    assert_true(bytes[LAYERS].slots <= bf16_gathered + 4 * slack);
    assert_true(bytes[LAYERS].grads <= 2 * (size_t)SIDE * SIDE * 2 + 2 * bf16_shard + 4 * slack);
    if (!HAS_BOOKS)
        return;
    /* two ranks allocate what they said, and their books */
    size_t grown = ranks[0].heap[1] - ranks[0].heap[0];
    assert_true(grown <= RANKS * (bytes[LAYERS].pool + 8 * slack));
    assert_true(grown + 8 * slack >= RANKS * bytes[LAYERS].pool);
    /* the first step may open what is opened when first needed; then nothing more */
    for (int i = 3; i < PLACES; i++)
        assert_true(ranks[0].heap[i] <= ranks[0].heap[2]);
}

int main(void)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(eight_layers_over_two_ranks) };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
