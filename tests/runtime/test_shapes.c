/*
 * test_shapes.c - any M, N, K: forward, backward, exact buffers, both poisons.
 */
#include "tests/runtime/rig.h"

static const uint8_t poisons[] = { 0xFF, 0x7E };

/* Shapes that broke others: M, N, K. Large ones are cut on the host. */
static void odd_shapes_in_exact_buffers(void **state)
{
    (void)state;
    static const struct {
        int64_t tokens;
        struct rig_spec spec;
    } rows[] = {
        { 50, { .out_features = 1000, .in_features = 712, .bias = true } },
        { 17, { .out_features = 2556, .in_features = 1000 } },
        { 129, { .out_features = 272, .in_features = 1008, .bias = true } },
        { 8, { .out_features = 128, .in_features = 128 } },
        { 1, { .out_features = 5120, .in_features = 256, .bias = true } },
        { 1, { .out_features = 1, .in_features = 1, .bias = true } },
        { 7, { .out_features = 3, .in_features = 5, .output = FP8_DTYPE_FP32 } },
        { 33, { .out_features = 129, .in_features = 1, .grad_weight = FP8_DTYPE_BF16 } },
        { 65,
          { .out_features = 2557, .in_features = 31, .grad_input = FP8_DTYPE_FP32, .e4m3 = true } },
        { 128,
          { .out_features = 256,
            .in_features = 384,
            .output = FP8_DTYPE_FP32,
            .power_of_two = true } },
        { 127,
          { .out_features = 255,
            .in_features = 257,
            .weight = FP8_DTYPE_FP32,
            .fprop_split = true } },
        { 100,
          { .out_features = 200,
            .in_features = 321,
            .output = FP8_DTYPE_FP16,
            .grad_input = FP8_DTYPE_FP16,
            .grad_weight = FP8_DTYPE_FP16,
            .bias = true } },
        { 130,
          { .out_features = 99,
            .in_features = 136,
            .output = FP8_DTYPE_FP16,
            .grad_input = FP8_DTYPE_FP16,
            .e4m3 = true,
            .fprop_split = true } },
    };
    enum { COUNT = sizeof rows / sizeof rows[0] };
    struct rig_spec specs[COUNT];
    struct rig_layers layers;
    for (int i = 0; i < COUNT; i++)
        specs[i] = rows[i].spec;
    rig_layers_open(&layers, specs, COUNT);
    for (int i = 0; i < COUNT; i++) {
        for (int p = 0; p < 2; p++)
            rig_case_all(&layers.layer[i], rows[i].tokens, (uint64_t)i, poisons[p]);
    }
    rig_layers_close(&layers);
}

/* M is the contraction of wgrad. */
static void large_and_thin_shapes(void **state)
{
    (void)state;
    static const int64_t shapes[][3] = { { 50, 16384, 4096 }, { 18, 4096, 4096 },
                                         { 2048, 3072, 767 }, { 896, 4096, 712 },
                                         { 18432, 1, 6144 },  { 16, 128, 65536 } };
    enum { COUNT = sizeof shapes / sizeof shapes[0] };
    struct rig_spec specs[COUNT] = { { 0 } };
    struct rig_layers layers;
    int64_t tokens[COUNT];
    for (int i = 0; i < COUNT; i++) {
        tokens[i] = rig_cut("M", shapes[i][0], 600);
        specs[i].out_features = rig_cut("N", shapes[i][1], 1900);
        specs[i].in_features = rig_cut("K", shapes[i][2], i == 5 ? 65536 : 1800);
        specs[i].max_tokens = tokens[i];
        specs[i].bias = i % 2 == 0;
    }
    rig_layers_open(&layers, specs, COUNT);
    for (int i = 0; i < COUNT; i++)
        rig_case_all(&layers.layer[i], tokens[i], 100 + (uint64_t)i, 0xFF);
    rig_layers_close(&layers);
}

static void compare_images(const char *what, const struct rig_block *a, const struct rig_block *b)
{
    assert_int_equal(a->bytes, b->bytes);
    if (memcmp(a->image, b->image, a->bytes) != 0)
        fail_msg("%s is not bit-identical", what);
}

/* 129,272,1008, a larger shape, M = 1, then again: bits depend on neither poison nor history. */
static void bits_do_not_depend_on_what_was_there(void **state)
{
    (void)state;
    static const int outputs[] = { RIG_Y, RIG_DX, RIG_DW, RIG_DBIAS };
    struct rig_spec specs[] = {
        { .out_features = 272, .in_features = 1008, .bias = true },
        { .out_features = 1500, .in_features = 1100, .max_tokens = 700 },
    };
    struct rig_layers layers;
    rig_layers_open(&layers, specs, 2);
    static const int64_t tokens[] = { 129, 1 };
    for (int t = 0; t < 2; t++) {
        struct rig_case c[2];
        for (int p = 0; p < 2; p++) {
            rig_case_init(&c[p], &layers.layer[0], tokens[t], 200);
            c[p].poison = poisons[p];
            rig_case_make(&c[p]);
            rig_case_run(&c[p]);
            rig_case_check(&c[p]);
            rig_case_all(&layers.layer[1], 700, 201, poisons[p]);
        }
        for (int i = 0; i < 4; i++)
            compare_images(c[0].tensor[outputs[i]].name, &c[0].tensor[outputs[i]].block,
                           &c[1].tensor[outputs[i]].block);
        /* the same call once more, into what is there */
        struct rig_case *again = &c[0];
        rig_case_fprop(again);
        rig_case_backward(again);
        for (int i = 0; i < 4; i++) {
            rig_tensor_pull(&again->tensor[outputs[i]]);
            compare_images(c[1].tensor[outputs[i]].name, &again->tensor[outputs[i]].block,
                           &c[1].tensor[outputs[i]].block);
        }
        rig_case_free(&c[0]);
        rig_case_free(&c[1]);
    }
    rig_layers_close(&layers);
}

/* Any M up to max_tokens on one layer, in any order, over the borders of the dispatch table. */
static void tokens_change_from_call_to_call(void **state)
{
    (void)state;
    static const int64_t all[] = { 1,   2,   15,  16,  17,   63,   64,   65,   128, 129,
                                   255, 256, 257, 500, 1023, 1024, 1025, 1500, 3,   100 };
    struct rig_spec spec = {
        .out_features = 136, .in_features = 200, .max_tokens = 1500, .bias = true
    };
    struct rig_layers layers;
    rig_layers_open(&layers, &spec, 1);
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        rig_case_all(&layers.layer[0], all[i], 300 + i, poisons[i % 2]);
    size_t last = 0;
    for (int which = FP8_BYTES_WORKSPACE; which <= FP8_BYTES_GRAD_TRANSPOSED; which++) {
        last = 0;
        for (int64_t m = 0; m <= 1500; m++) { /* a buffer for max_tokens fits every call */
            size_t bytes = rig_bytes(&layers.layer[0], m, (fp8_bytes)which);
            assert_true(bytes >= last);
            last = bytes;
        }
    }
    size_t bytes = 0;
    RIG_REFUSED(FP8_ERR_TOKENS,
                fp8_layer_bytes(layers.layer[0].handle, 1501, FP8_BYTES_WORKSPACE, &bytes));
    rig_expect_sentence("1501");
    rig_expect_sentence("1500");
    RIG_REFUSED(FP8_ERR_TOKENS,
                fp8_layer_bytes(layers.layer[0].handle, 1501, FP8_BYTES_SAVED, &bytes));
    rig_layers_close(&layers);
}

/* Full buffers, sized for max_tokens, serve a smaller M. */
static void larger_operand_memory_is_fine(void **state)
{
    (void)state;
    struct rig_spec spec = { .out_features = 100, .in_features = 90, .max_tokens = 400 };
    struct rig_layers layers;
    struct rig_case c;
    rig_layers_open(&layers, &spec, 1);
    rig_case_init(&c, &layers.layer[0], 33, 400);
    rig_case_make(&c);
    rig_operand_free(&c.saved);
    rig_operand_free(&c.grad);
    rig_scratch_free(&c.workspace);
    rig_operand_make(&c.saved, rig_bytes(c.layer, 400, FP8_BYTES_SAVED), 0xFF);
    rig_operand_make(&c.grad, rig_bytes(c.layer, 400, FP8_BYTES_GRAD), 0xFF);
    rig_scratch_make(&c.workspace, rig_bytes(c.layer, 400, FP8_BYTES_WORKSPACE), 0, 0xFF);
    rig_case_run(&c);
    rig_case_check(&c);
    rig_case_free(&c);
    rig_layers_close(&layers);
}

static uint32_t launches_of(const struct rig_layer *layer, int64_t tokens)
{
    fp8_dispatch dispatch = FP8_DISPATCH_INIT;
    RIG_OK(fp8_layer_dispatch(layer->handle, FP8_PASS_FPROP, tokens, &dispatch));
    return dispatch.launches;
}

/* An x that fits on chip is quantised in one step, a larger one in two: the last and the first such
 * M give the same bytes by the rules. */
static void one_step_where_a_tensor_fits_on_chip(void **state)
{
    (void)state;
    struct rig_spec spec = { .out_features = 16, .in_features = 1024, .max_tokens = 1 << 17 };
    struct rig_layers layers;
    int64_t fits = 1, beyond = spec.max_tokens;
    rig_layers_open(&layers, &spec, 1);
    uint32_t launches = launches_of(&layers.layer[0], fits);
    assert_int_equal(launches_of(&layers.layer[0], beyond), launches + 1);
    while (beyond - fits > 1) {
        int64_t middle = (fits + beyond) / 2;
        if (launches_of(&layers.layer[0], middle) == launches)
            fits = middle;
        else
            beyond = middle;
    }
    rig_case_all(&layers.layer[0], fits, 500, 0xFF);
    rig_case_all(&layers.layer[0], beyond, 501, 0x7E);
    rig_layers_close(&layers);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(odd_shapes_in_exact_buffers),
        cmocka_unit_test(large_and_thin_shapes),
        cmocka_unit_test(bits_do_not_depend_on_what_was_there),
        cmocka_unit_test(tokens_change_from_call_to_call),
        cmocka_unit_test(larger_operand_memory_is_fine),
        cmocka_unit_test(one_step_where_a_tensor_fits_on_chip),
    };
    return RIG_RUN(tests);
}
