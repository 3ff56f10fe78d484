/*
 * test_repeat.c - the same bits from every launch, beside other work, and in every process.
 */
#include <unistd.h>

#include "tests/runtime/rig_exact.h"

/* ---- the same bits from every launch ---- */

struct race {
    const struct rig_layer *layer;
    struct exact x, w, dy;
    fp8_operand x_operand, w_operand, dy_operand;
    int64_t side, depth;
    fp8_stream other; /* keeps the GPU busy beside the launches that are watched */
    struct buffer other_output, other_workspace;
    const char *name;
};

static void launch(const struct race *r, fp8_pass pass, bool accumulate, struct buffer *output,
                   struct buffer *workspace)
{
    const fp8_layer_info *info = &r->layer->info;
    bool fprop = pass == FP8_PASS_FPROP;
    const fp8_tensor tensor = {
        output->device, r->side, r->side, r->side, fprop ? info->y_dtype : info->dw_dtype, 0
    };
    fp8_gemm_args args = FP8_GEMM_ARGS_INIT;
    args.pass = pass;
    args.accumulate = accumulate;
    args.a = fprop ? &r->x_operand : &r->dy_operand;
    args.b = fprop ? &r->w_operand : &r->x_operand;
    args.out = &tensor;
    args.call = exact_call(r->layer, r->x.rows, workspace);
    if (workspace != &exact_workspace)
        args.call.stream = r->other;
    RIG_OK(fp8_gemm(r->layer->handle, &args));
}

static void pull(void *target, const void *source, size_t bytes)
{
    RIG_OK(fp8_memory_copy(rig.context, target, source, bytes, rig.stream));
    RIG_OK(fp8_stream_synchronize(rig.context, rig.stream));
}

/* y of many launches; of every stride-th all bits. */
static void watch_fprop(struct race *r, int launches)
{
    size_t bytes = (size_t)(r->side * r->side) * 2;
    int stride = launches / 25 > 0 ? launches / 25 : 1;
    unsigned char *first = malloc(bytes);
    assert_non_null(first);
    exact_need(&exact_output, bytes);
    for (int i = 0; i < launches; i++) {
        launch(r, FP8_PASS_FPROP, false, &exact_output, &exact_workspace);
        launch(r, FP8_PASS_FPROP, false, &r->other_output, &r->other_workspace);
        if (i % stride != 0)
            continue;
        pull(i == 0 ? first : exact_output.host, exact_output.device, bytes);
        if (i > 0 && memcmp(first, exact_output.host, bytes) != 0)
            fail_msg("%s: launch %d of fprop, depth %lld, differs from launch 0", r->name, i,
                     (long long)r->depth);
    }
    RIG_OK(fp8_stream_synchronize(rig.context, r->other));
    free(first);
}

/* dw adds up: each launch leaves its mark, and one wrong sum in any of them is seen at the end. */
static void watch_wgrad(struct race *r, int launches)
{
    size_t count = (size_t)(r->side * r->side), bytes = count * sizeof(float);
    float *first = malloc(bytes), *last = malloc(bytes);
    assert_true(first != NULL && last != NULL);
    exact_need(&exact_output, bytes);
    launch(r, FP8_PASS_WGRAD, false, &exact_output, &exact_workspace);
    pull(first, exact_output.device, bytes);
    for (int i = 1; i < launches; i++) {
        launch(r, FP8_PASS_WGRAD, true, &exact_output, &exact_workspace);
        launch(r, FP8_PASS_WGRAD, false, &r->other_output, &r->other_workspace);
    }
    pull(last, exact_output.device, bytes);
    RIG_OK(fp8_stream_synchronize(rig.context, r->other));
    for (size_t i = 0; i < count; i++) {
        if (last[i] != first[i] * (float)launches)
            fail_msg("%s: dw element %zu after %d launches of depth %lld: %.9g, one gives %.9g",
                     r->name, i, launches, (long long)r->depth, (double)last[i], (double)first[i]);
    }
    free(first), free(last);
}

/* fprop contracts over K, wgrad over M: 4096 x 4096 outputs of depth 128 and 64. */
static void race_once(const struct configuration *c, int64_t depth)
{
    struct race r = { .side = rig_cut("the output's side", 4096, 192), .depth = depth };
    int launches = (int)rig_cut("the number of launches", 2000, 20);
    struct rig_spec specs[2] = {
        { .out_features = r.side, .in_features = depth, .max_tokens = r.side },
        { .out_features = r.side, .in_features = r.side, .max_tokens = depth },
    };
    struct rig_layers layers;
    for (int i = 0; i < 2; i++)
        specs[i].fprop_split = !c->fast, specs[i].wgrad_fast = c->fast;
    exact_open(c, &layers, specs, 2);
    r.name = c->name;
    RIG_OK(fp8_stream_create(rig.context, &r.other));
    exact_need(&r.other_output, (size_t)(r.side * r.side) * 4);
    for (int i = 0; i < 2; i++) {
        r.layer = &layers.layer[i];
        int64_t tokens = r.layer->info.max_tokens;
        exact_make(&r.x, tokens, r.layer->info.in_features, 21);
        exact_make(&r.w, r.side, r.layer->info.in_features, 22);
        exact_make(&r.dy, tokens, r.side, 23);
        exact_quantize(r.layer, FP8_ROLE_X, &r.x, tokens, &exact_operands[0], &r.x_operand);
        exact_quantize(r.layer, FP8_ROLE_W, &r.w, r.side, &exact_operands[1], &r.w_operand);
        exact_quantize(r.layer, FP8_ROLE_DY, &r.dy, tokens, &exact_operands[2], &r.dy_operand);
        if (i == 0)
            watch_fprop(&r, launches);
        else
            watch_wgrad(&r, launches);
        exact_free(&r.x), exact_free(&r.w), exact_free(&r.dy);
    }
    exact_release(&r.other_output);
    exact_release(&r.other_workspace);
    fp8_stream_destroy(rig.context, r.other);
    rig_layers_close(&layers);
}

static void every_launch_gives_the_same_bits(void **state)
{
    (void)state;
    int count = (int)rig_cut("the number of configurations", exact_configuration_count, 1);
    for (int c = 0; c < count; c++) {
        race_once(&exact_configurations[c], 128);
        race_once(&exact_configurations[c], 64);
    }
}

/* ---- the same bits in every process ---- */

static uint64_t hash_bytes(uint64_t hash, const void *data, size_t bytes)
{
    const unsigned char *at = data;
    for (size_t i = 0; i < bytes; i++)
        hash = (hash ^ at[i]) * 0x100000001B3u;
    return hash;
}

/* 16, 128, 65536 forward, and a weight gradient over M = 65536, `runs` times each. */
static uint64_t long_contractions(const char *gemm, int runs)
{
    const int64_t depth = rig_cut("the contraction", 65536, 8192);
    struct rig_spec specs[2] = {
        { .out_features = 128, .in_features = depth, .max_tokens = 16 },
        { .out_features = 128, .in_features = 128, .max_tokens = depth },
    };
    const char *forced = rig.gemm;
    struct rig_layers layers;
    uint64_t hash = 0xCBF29CE484222325u;
    rig.gemm = gemm;
    rig_layers_open(&layers, specs, 2);
    rig.gemm = forced;
    for (int i = 0; i < 2; i++) {
        struct rig_case c;
        uint64_t first = 0;
        rig_case_init(&c, &layers.layer[i], layers.layer[i].info.max_tokens, 5);
        rig_case_complete(&c);
        for (int run = 0; run < runs; run++) {
            struct rig_tensor *outputs[] = { &c.tensor[RIG_Y], &c.tensor[RIG_DW] };
            uint64_t now = 0xCBF29CE484222325u;
            rig_case_fprop(&c);
            rig_case_backward(&c);
            for (int o = 0; o < 2; o++) {
                rig_tensor_pull(outputs[o]);
                now = hash_bytes(now, outputs[o]->block.image, outputs[o]->block.bytes);
            }
            if (run == 0)
                first = now;
            if (now != first)
                fail_msg("%s: run %d of layer %d differs from run 0", gemm, run, i);
        }
        hash = hash_bytes(hash, &first, sizeof first);
        rig_case_free(&c);
    }
    rig_layers_close(&layers);
    return hash;
}

static const char *const ways[] = { "generated", "cublaslt" };

/* The process that the next test starts: prints the hashes alone. */
static void print_hashes(void **state)
{
    (void)state;
    for (int i = 0; i < 2; i++)
        printf("hash %d %016llx\n", i, (unsigned long long)long_contractions(ways[i], 1));
}

static void a_new_process_gives_the_same_bits(void **state)
{
    (void)state;
    char line[256], path[1024];
    ssize_t length = readlink("/proc/self/exe", path, sizeof path - 1);
    assert_true(length > 0);
    path[length] = 0;
    uint64_t mine[2], others[2] = { 0 };
    for (int i = 0; i < 2; i++)
        mine[i] = long_contractions(ways[i], (int)rig_cut("the number of runs", 100, 3));
    setenv("FP8_TEST_HASHES", "1", 1);
    FILE *child = popen(path, "r");
    assert_non_null(child);
    while (fgets(line, sizeof line, child)) {
        int which;
        unsigned long long hash;
        if (sscanf(line, "hash %d %llx", &which, &hash) == 2 && (which == 0 || which == 1))
            others[which] = hash;
    }
    assert_int_equal(pclose(child), 0);
    unsetenv("FP8_TEST_HASHES");
    for (int i = 0; i < 2; i++)
        assert_true(mine[i] == others[i]);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(every_launch_gives_the_same_bits, exact_read_configurations),
        cmocka_unit_test_teardown(a_new_process_gives_the_same_bits, exact_release_all),
    };
    const struct CMUnitTest child[] = { cmocka_unit_test(print_hashes) };
    return getenv("FP8_TEST_HASHES") ? RIG_RUN(child) : RIG_RUN(tests);
}
