/*
 * test_alignment.c - base pointers and leading dims of every kind; what cannot be is refused by
 * name.
 */
#include "tests/runtime/rig.h"

enum { BF16, FP32, FP16, LAYERS };

static const int moved[] = { RIG_X, RIG_W, RIG_BIAS, RIG_Y, RIG_DY, RIG_DX, RIG_DW, RIG_DBIAS };
enum { MOVED = sizeof moved / sizeof moved[0] };

static int open_layers(void **state)
{
    (void)state;
    static const struct rig_spec specs[LAYERS] = {
        [BF16] = { .out_features = 272,
                   .in_features = 144,
                   .bias = true,
                   .grad_weight = FP8_DTYPE_BF16 },
        [FP32] = { .out_features = 272,
                   .in_features = 144,
                   .bias = true,
                   .weight = FP8_DTYPE_FP32,
                   .output = FP8_DTYPE_FP32,
                   .grad_input = FP8_DTYPE_FP32 },
        [FP16] = { .out_features = 272,
                   .in_features = 144,
                   .bias = true,
                   .output = FP8_DTYPE_FP16,
                   .grad_input = FP8_DTYPE_FP16,
                   .grad_weight = FP8_DTYPE_FP16 },
    };
    rig_layers_open(&rig_shared, specs, LAYERS);
    return 0;
}

static void run(struct rig_case *c)
{
    rig_case_complete(c);
    rig_case_free(c);
}

static void every_base_pointer_may_be_odd(void **state)
{
    (void)state;
    static const int64_t offsets[] = { 1, 2, 4, 8, 16, 32, 128 };
    for (int which = 0; which < LAYERS; which++) {
        for (size_t o = 0; o < sizeof offsets / sizeof offsets[0]; o++) {
            for (int one = 0; one <= MOVED; one++) { /* one tensor, then all of them */
                struct rig_case c;
                rig_case_init(&c, &rig_shared.layer[which], 128, o * 10 + (uint64_t)one);
                for (int i = 0; i < MOVED; i++)
                    c.offset[moved[i]] = one == i || one == MOVED ? offsets[o] : 0;
                c.workspace_shift = 16 * o;
                c.accumulate = one % 2 == 1;
                run(&c);
            }
        }
    }
}

static void every_leading_dim_may_be_larger(void **state)
{
    (void)state;
    static const int64_t gaps[] = { 1, 2, 3, 8, 16, 112 };
    for (int which = 0; which < LAYERS; which++) {
        for (size_t g = 0; g < sizeof gaps / sizeof gaps[0]; g++) {
            for (int one = 0; one <= MOVED; one++) {
                struct rig_case c;
                rig_case_init(&c, &rig_shared.layer[which], 128, 100 + g * 10 + (uint64_t)one);
                for (int i = 0; i < MOVED; i++)
                    c.gap[moved[i]] = one == i || one == MOVED ? gaps[g] : 0;
                c.offset[moved[one % MOVED]] = (int64_t)g;
                c.accumulate = one % 2 == 0;
                run(&c);
            }
        }
    }
}

static void workspace_may_start_anywhere(void **state)
{
    (void)state;
    static const size_t shifts[] = { 1, 3, 4, 15, 16, 17, 100, 255 };
    for (size_t i = 0; i < sizeof shifts / sizeof shifts[0]; i++) {
        struct rig_case c;
        rig_case_init(&c, &rig_shared.layer[BF16], 77, 200 + i);
        c.workspace_shift = shifts[i];
        run(&c);
    }
}

/* A vector's ld is not read; 0 stands for cols. */
static void ld_of_a_single_row_is_not_read(void **state)
{
    (void)state;
    struct rig_case c;
    rig_case_init(&c, &rig_shared.layer[BF16], 1, 300);
    rig_case_make(&c);
    rig_case_push(&c);
    static const int vectors[] = { RIG_X, RIG_Y, RIG_DY, RIG_DX, RIG_BIAS, RIG_DBIAS };
    for (size_t i = 0; i < sizeof vectors / sizeof vectors[0]; i++)
        c.tensor[vectors[i]].t.ld = i % 2 ? 0 : 1;
    rig_case_weight(&c);
    rig_case_fprop(&c);
    rig_case_backward(&c);
    for (size_t i = 0; i < sizeof vectors / sizeof vectors[0]; i++)
        c.tensor[vectors[i]].t.ld = c.tensor[vectors[i]].t.cols;
    rig_case_check(&c);
    rig_case_free(&c);
}

static fp8_status try_fprop(struct rig_case *c, const fp8_tensor *x, const fp8_tensor *y)
{
    fp8_fprop_args args = FP8_FPROP_ARGS_INIT;
    args.x = x;
    args.weight = &c->weight.op;
    args.bias = &c->tensor[RIG_BIAS].t;
    args.y = y;
    args.call = rig_case_call(c);
    return fp8_layer_fprop(c->layer->handle, &args);
}

/* Expanded tensors, transposed ones, pointers inside an element: refused before anything is
 * written. */
static void what_cannot_be_is_refused_by_name(void **state)
{
    (void)state;
    struct rig_case c;
    rig_case_init(&c, &rig_shared.layer[BF16], 128, 400);
    rig_case_complete(&c);
    const fp8_tensor *x = &c.tensor[RIG_X].t, *y = &c.tensor[RIG_Y].t;

    fp8_tensor odd = *x;
    odd.ld = 0;
    RIG_REFUSED(FP8_ERR_SHAPE, try_fprop(&c, &odd, y));
    rig_expect_sentence("x");
    rig_expect_sentence("0");
    odd.ld = 143;
    RIG_REFUSED(FP8_ERR_SHAPE, try_fprop(&c, &odd, y));
    rig_expect_sentence("143");
    odd.ld = -144;
    RIG_REFUSED(FP8_ERR_SHAPE, try_fprop(&c, &odd, y));
    odd = *x;
    odd.data = (char *)x->data + 1;
    RIG_REFUSED(FP8_ERR_ALIGNMENT, try_fprop(&c, &odd, y));
    rig_expect_sentence("x");
    odd = *y;
    odd.data = (char *)y->data + 1;
    RIG_REFUSED(FP8_ERR_ALIGNMENT, try_fprop(&c, x, &odd));
    rig_expect_sentence("y");
    odd = *y;
    odd.rows = 127;
    RIG_REFUSED(FP8_ERR_SHAPE, try_fprop(&c, x, &odd));
    rig_expect_sentence("127");
    odd = *x;
    odd.rows = 513;
    RIG_REFUSED(FP8_ERR_TOKENS, try_fprop(&c, &odd, y));
    rig_expect_sentence("513");
    odd = *x;
    odd.rows = -1;
    assert_int_not_equal(try_fprop(&c, &odd, y), FP8_OK);

    /* w stored [K,N] */
    fp8_tensor w = c.tensor[RIG_W].t;
    w.rows = c.tensor[RIG_W].t.cols;
    w.cols = c.tensor[RIG_W].t.rows;
    w.ld = w.cols;
    fp8_weight_args weight = FP8_WEIGHT_ARGS_INIT;
    weight.w = &w;
    weight.version = 2;
    weight.weight = &c.weight.op;
    weight.call = rig_case_call(&c);
    RIG_REFUSED(FP8_ERR_SHAPE, fp8_weight_update(c.layer->handle, &weight));
    rig_expect_sentence("w");

    /* dy expanded over the rows */
    fp8_tensor dy = c.tensor[RIG_DY].t;
    dy.ld = 0;
    fp8_quantize_dy_args quantize = FP8_QUANTIZE_DY_ARGS_INIT;
    quantize.dy = &dy;
    quantize.grad = &c.grad.op;
    quantize.call = rig_case_call(&c);
    RIG_REFUSED(FP8_ERR_SHAPE, fp8_layer_quantize_dy(c.layer->handle, &quantize));
    rig_expect_sentence("dy");

    rig_case_check(&c); /* nothing was touched, and the layer goes on */
    rig_case_run(&c);
    rig_case_check(&c);
    rig_case_free(&c);
}

/* A column slice of a wider tensor, and a batch of sequences with one stride: both are a leading
 * dim. */
static void slices_of_larger_tensors(void **state)
{
    (void)state;
    for (int n = 0; n < 6; n++) {
        struct rig_case c;
        rig_case_init(&c, &rig_shared.layer[n % 2], 96, 500 + (uint64_t)n);
        c.gap[RIG_X] = n < 3 ? 16 : 1;
        c.gap[RIG_DX] = 144; /* dx into the second half of rows twice as long */
        c.offset[RIG_DX] = 144;
        c.gap[RIG_Y] = n;
        c.gap[RIG_DY] = n;
        c.poison = n % 2 ? 0x7E : 0xFF;
        run(&c);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(every_base_pointer_may_be_odd, open_layers),
        cmocka_unit_test(every_leading_dim_may_be_larger),
        cmocka_unit_test(workspace_may_start_anywhere),
        cmocka_unit_test(ld_of_a_single_row_is_not_read),
        cmocka_unit_test(what_cannot_be_is_refused_by_name),
        cmocka_unit_test_teardown(slices_of_larger_tensors, rig_shared_close),
    };
    return RIG_RUN(tests);
}
