/*
 * test_objects.c - weight, saved and grad as objects: versions, copies, sharing, moving, refusals.
 */
#include "tests/runtime/rig.h"

enum { Q, K, SQUARE, ONE, LAYERS };

static int open_layers(void **state)
{
    (void)state;
    static const struct rig_spec specs[LAYERS] = {
        [Q] = { .out_features = 130, .in_features = 90, .bias = true },
        [K] = { .out_features = 55, .in_features = 90, .grad_weight = FP8_DTYPE_BF16 },
        [SQUARE] = { .out_features = 256, .in_features = 256 },
        [ONE] = { .out_features = 1, .in_features = 40, .bias = true },
    };
    rig_layers_open(&rig_shared, specs, LAYERS);
    return 0;
}

static void begin(struct rig_case *c, int which, int64_t tokens, uint64_t seed)
{
    rig_case_init(c, &rig_shared.layer[which], tokens, seed);
    rig_case_make(c);
    rig_case_push(c);
}

static unsigned char *copy_of(const struct rig_block *block)
{
    unsigned char *copy = malloc(block->bytes + 1);
    assert_non_null(copy);
    memcpy(copy, block->image, block->bytes);
    return copy;
}

/* ---- one element moves one row or one column ---- */

static void only_what_depends_on_an_element_moves(void **state)
{
    (void)state;
    for (int which = RIG_X; which <= RIG_W; which++) {
        struct rig_case c;
        begin(&c, SQUARE, 256, 1);
        rig_case_weight(&c);
        rig_case_fprop(&c);
        rig_tensor_pull(&c.tensor[RIG_Y]);
        unsigned char *before = copy_of(&c.tensor[RIG_Y].block);
        float old = rig_get(&c.tensor[which], 0, 0);
        rig_set(&c.tensor[which], 0, 0, old < 0 ? 0.75f : -0.75f);
        c.version = 2;
        rig_tensor_push(&c.tensor[which]);
        rig_case_weight(&c);
        rig_case_fprop(&c);
        rig_tensor_pull(&c.tensor[RIG_Y]);
        int moved = 0;
        for (int64_t i = 0; i < 256; i++) {
            for (int64_t j = 0; j < 256; j++) {
                uint16_t was;
                memcpy(&was, before + (size_t)(i * 256 + j) * 2, 2);
                bool same = was == rig_bits(&c.tensor[RIG_Y], i, j);
                moved += !same;
                if (which == RIG_X ? i != 0 : j != 0)
                    assert_true(same);
            }
        }
        assert_true(moved > 128);
        free(before);
        rig_case_free(&c);
    }
}

/* The recipe comes from the spec, never from a shape: M = 1 and N = 1 are quantised like all
 * else. */
static void one_row_and_one_column_are_no_special_case(void **state)
{
    (void)state;
    rig_case_all(&rig_shared.layer[ONE], 1, 2, 0xFF);
    rig_case_all(&rig_shared.layer[ONE], 200, 3, 0x7E);
    rig_case_all(&rig_shared.layer[SQUARE], 1, 4, 0xFF);
}

/* ---- versions ---- */

static fp8_status dgrad(struct rig_case *c, uint32_t stale_ok)
{
    fp8_dgrad_args args = FP8_DGRAD_ARGS_INIT;
    args.stale_ok = stale_ok;
    args.grad = &c->grad.op;
    args.weight = &c->weight.op;
    args.dx = &c->tensor[RIG_DX].t;
    args.call = rig_case_call(c);
    return fp8_layer_dgrad(c->layer->handle, &args);
}

static fp8_status backward(struct rig_case *c, uint32_t stale_ok)
{
    fp8_backward_args args = FP8_BACKWARD_ARGS_INIT;
    args.stale_ok = stale_ok;
    args.dy = &c->tensor[RIG_DY].t;
    args.saved = &c->saved.op;
    args.weight = &c->weight.op;
    args.grad = &c->grad.op;
    args.dw = &c->tensor[RIG_DW].t;
    args.dx = &c->tensor[RIG_DX].t;
    args.call = rig_case_call(c);
    return fp8_layer_backward(c->layer->handle, &args);
}

static void backward_wants_the_weight_of_its_forward(void **state)
{
    (void)state;
    struct rig_case c;
    begin(&c, Q, 48, 10);
    rig_case_weight(&c);
    rig_case_fprop(&c);
    rig_case_backward(&c);
    c.version = 7;
    rig_case_weight(&c);
    assert_int_equal(c.weight.op.version, 7);
    RIG_REFUSED(FP8_ERR_VERSION, dgrad(&c, 0));
    rig_expect_sentence("1");
    rig_expect_sentence("7");
    RIG_REFUSED(FP8_ERR_VERSION, backward(&c, 0));
    RIG_OK(dgrad(&c, 1));
    RIG_OK(backward(&c, 1));
    rig_case_fprop(&c); /* with the new weight all is well again */
    RIG_OK(backward(&c, 0));
    rig_case_backward(&c);
    rig_case_check(&c);
    rig_case_free(&c);
}

static void an_equal_version_is_not_quantised_again(void **state)
{
    (void)state;
    struct rig_case c;
    begin(&c, Q, 16, 11);
    rig_case_weight(&c);
    rig_block_pull(&c.weight.block, "weight");
    unsigned char *before = copy_of(&c.weight.block);
    for (int64_t j = 0; j < 90; j++)
        rig_set(&c.tensor[RIG_W], 3, j, 1000.0f);
    rig_tensor_push(&c.tensor[RIG_W]);
    rig_case_weight(&c);
    rig_block_pull(&c.weight.block, "weight");
    assert_memory_equal(before, c.weight.block.image, c.weight.block.bytes);
    c.version = 2;
    rig_case_weight(&c);
    struct rig_quantized w;
    rig_quantize(&w, &c.tensor[RIG_W], true, false);
    rig_check_operand("weight", &c.weight, &w);
    rig_quantized_free(&w);

    fp8_weight_args args = FP8_WEIGHT_ARGS_INIT;
    args.w = &c.tensor[RIG_W].t;
    args.weight = &c.weight.op;
    args.call = rig_case_call(&c);
    RIG_REFUSED(FP8_ERR_ARGUMENT, fp8_weight_update(c.layer->handle, &args)); /* version 0 */
    free(before);
    rig_case_free(&c);
}

/* Three optimizer steps of two micro-batches; w changes in place between the steps. */
static void weight_follows_the_optimizer(void **state)
{
    (void)state;
    struct rig_case c;
    rig_case_init(&c, &rig_shared.layer[Q], 100, 12);
    rig_case_make(&c);
    for (int step = 0; step < 3; step++) {
        c.version = (uint64_t)step + 1;
        for (int batch = 0; batch < 2; batch++) {
            rig_case_run(&c);
            rig_case_check(&c);
        }
        for (int64_t i = 0; i < 130; i++) {
            for (int64_t j = 0; j < 90; j++)
                rig_set(&c.tensor[RIG_W], i, j, rig_get(&c.tensor[RIG_W], i, j) * -1.7f);
        }
    }
    rig_case_free(&c);
}

/* ---- only the copies that are wanted ---- */

static fp8_status wgrad(struct rig_case *c)
{
    fp8_wgrad_args args = FP8_WGRAD_ARGS_INIT;
    args.saved = &c->saved.op;
    args.grad = &c->grad.op;
    args.dw = &c->tensor[RIG_DW].t;
    args.call = rig_case_call(c);
    return fp8_layer_wgrad(c->layer->handle, &args);
}

static void use_operand(struct rig_operand *operand, const struct rig_case *c, fp8_bytes which)
{
    rig_operand_free(operand);
    rig_operand_make(operand, rig_bytes(c->layer, c->tokens, which), 0x7E);
}

static void weight_row_only(struct rig_case *c)
{
    fp8_weight_args args = FP8_WEIGHT_ARGS_INIT;
    args.copies = FP8_COPY_ROW;
    args.w = &c->tensor[RIG_W].t;
    args.version = 1;
    args.weight = &c->weight.op;
    args.call = rig_case_call(c);
    RIG_OK(fp8_weight_update(c->layer->handle, &args));
}

static void fprop_without_saved(struct rig_case *c)
{
    fp8_fprop_args args = FP8_FPROP_ARGS_INIT;
    args.x = &c->tensor[RIG_X].t;
    args.weight = &c->weight.op;
    args.bias = c->layer->info.has_bias ? &c->tensor[RIG_BIAS].t : NULL;
    args.y = &c->tensor[RIG_Y].t;
    args.call = rig_case_call(c);
    RIG_OK(fp8_layer_fprop(c->layer->handle, &args));
}

static void quantize_dy(struct rig_case *c, uint32_t copies)
{
    fp8_quantize_dy_args args = FP8_QUANTIZE_DY_ARGS_INIT;
    args.copies = copies;
    args.dy = &c->tensor[RIG_DY].t;
    args.grad = &c->grad.op;
    args.call = rig_case_call(c);
    RIG_OK(fp8_layer_quantize_dy(c->layer->handle, &args));
    struct rig_quantized dy;
    rig_quantize(&dy, &c->tensor[RIG_DY], false, false);
    rig_check_operand("grad", &c->grad, &dy);
    rig_quantized_free(&dy);
}

static void check_y(struct rig_case *c)
{
    struct rig_quantized x, w;
    rig_quantize(&x, &c->tensor[RIG_X], true, false);
    rig_quantize(&w, &c->tensor[RIG_W], true, false);
    rig_tensor_pull(&c->tensor[RIG_Y]);
    struct rig_product p = { .name = "y",
                             .a = &x,
                             .b = &w,
                             .bias = c->layer->info.has_bias ? &c->tensor[RIG_BIAS] : NULL,
                             .out = &c->tensor[RIG_Y],
                             .fast = true,
                             .centred = true };
    rig_check_product(&p);
    rig_quantized_free(&x);
    rig_quantized_free(&w);
}

static void no_wgrad_wanted(void **state)
{
    (void)state;
    struct rig_case c;
    begin(&c, Q, 37, 20);
    rig_case_weight(&c);
    fprop_without_saved(&c);
    check_y(&c);
    use_operand(&c.grad, &c, FP8_BYTES_GRAD_ROW);
    quantize_dy(&c, FP8_COPY_ROW);
    RIG_OK(dgrad(&c, 0));
    RIG_REFUSED(FP8_ERR_OPERAND, wgrad(&c)); /* saved is not filled */
    rig_case_fprop(&c);
    RIG_REFUSED(FP8_ERR_OPERAND, wgrad(&c)); /* grad has no transposed copy */
    rig_expect_sentence("transposed");
    rig_tensor_unchanged(&c.tensor[RIG_DW]);

    fp8_backward_args args = FP8_BACKWARD_ARGS_INIT;
    args.dy = &c.tensor[RIG_DY].t;
    args.weight = &c.weight.op;
    args.grad = &c.grad.op;
    args.dx = &c.tensor[RIG_DX].t;
    args.call = rig_case_call(&c);
    rig_tensor_pull(&c.tensor[RIG_DX]);
    RIG_OK(fp8_layer_backward(c.layer->handle, &args));
    rig_tensor_unchanged(&c.tensor[RIG_DX]); /* the same bits */
    rig_tensor_unchanged(&c.tensor[RIG_DW]);
    rig_case_free(&c);
}

static void no_dgrad_wanted(void **state)
{
    (void)state;
    struct rig_case c;
    begin(&c, Q, 37, 21);
    use_operand(&c.weight, &c, FP8_BYTES_WEIGHT_ROW);
    use_operand(&c.grad, &c, FP8_BYTES_GRAD_TRANSPOSED);
    weight_row_only(&c);
    rig_case_fprop(&c);
    check_y(&c);
    quantize_dy(&c, FP8_COPY_TRANSPOSED);
    RIG_OK(wgrad(&c));
    RIG_REFUSED(FP8_ERR_OPERAND, dgrad(&c, 0));
    rig_tensor_pull(&c.tensor[RIG_DW]);
    fp8_backward_args args = FP8_BACKWARD_ARGS_INIT;
    args.dy = &c.tensor[RIG_DY].t;
    args.saved = &c.saved.op;
    args.grad = &c.grad.op;
    args.dw = &c.tensor[RIG_DW].t;
    args.call = rig_case_call(&c);
    RIG_OK(fp8_layer_backward(c.layer->handle, &args));
    rig_tensor_unchanged(&c.tensor[RIG_DW]);
    rig_tensor_unchanged(&c.tensor[RIG_DX]);
    rig_case_free(&c);
}

static void neither_wanted(void **state)
{
    (void)state;
    struct rig_case c;
    begin(&c, Q, 37, 22);
    use_operand(&c.weight, &c, FP8_BYTES_WEIGHT_ROW);
    weight_row_only(&c);
    fprop_without_saved(&c);
    check_y(&c);
    rig_block_pull(&c.saved.block, "saved");
    for (size_t i = 0; i < c.saved.block.bytes; i++)
        assert_int_equal(c.saved.block.image[i], c.poison);
    fp8_backward_args args = FP8_BACKWARD_ARGS_INIT; /* dbias alone */
    args.dy = &c.tensor[RIG_DY].t;
    args.dbias = &c.tensor[RIG_DBIAS].t;
    args.call = rig_case_call(&c);
    RIG_OK(fp8_layer_backward(c.layer->handle, &args));
    rig_tensor_pull(&c.tensor[RIG_DBIAS]);
    rig_check_dbias(&c);
    rig_tensor_unchanged(&c.tensor[RIG_DW]);
    rig_tensor_unchanged(&c.tensor[RIG_DX]);
    rig_case_free(&c);
}

/* ---- shared and moved ---- */

static void an_x_is_quantised_once_for_several_layers(void **state)
{
    (void)state;
    struct rig_case c[2];
    struct rig_operand x;
    begin(&c[0], Q, 60, 30);
    begin(&c[1], K, 60, 30);
    rig_operand_make(&x, rig_bytes(c[0].layer, 60, FP8_BYTES_X), 0xFF);
    fp8_quantize_args quantize = FP8_QUANTIZE_ARGS_INIT;
    quantize.role = FP8_ROLE_X;
    quantize.source = &c[0].tensor[RIG_X].t;
    quantize.operand = &x.op;
    quantize.call = rig_case_call(&c[0]);
    RIG_OK(fp8_quantize(c[0].layer->handle, &quantize));
    assert_int_equal(x.op.version, 0);
    for (int i = 0; i < 2; i++) {
        rig_case_weight(&c[i]);
        rig_case_fprop(&c[i]); /* from x itself, to compare with */
        rig_tensor_pull(&c[i].tensor[RIG_Y]);
        fp8_operand view = FP8_OPERAND_INIT;
        fp8_fprop_args args = FP8_FPROP_ARGS_INIT;
        args.x_quantized = &x.op;
        args.weight = &c[i].weight.op;
        args.bias = c[i].layer->info.has_bias ? &c[i].tensor[RIG_BIAS].t : NULL;
        args.y = &c[i].tensor[RIG_Y].t;
        args.saved = &view;
        args.call = rig_case_call(&c[i]);
        RIG_OK(fp8_layer_fprop(c[i].layer->handle, &args));
        rig_tensor_unchanged(&c[i].tensor[RIG_Y]);
        assert_ptr_equal(view.data, x.op.data);
        assert_int_equal(view.version, 1);
        rig_case_backward(&c[i]);
        rig_tensor_pull(&c[i].tensor[RIG_DW]);
        fp8_operand saved = c[i].saved.op;
        c[i].saved.op = view;
        RIG_OK(wgrad(&c[i]));
        rig_tensor_unchanged(&c[i].tensor[RIG_DW]);
        c[i].saved.op = saved;
        rig_case_check(&c[i]);
    }
    /* a row copy alone cannot be saved */
    x.op.role = FP8_ROLE_NONE;
    quantize.copies = FP8_COPY_ROW;
    RIG_OK(fp8_quantize(c[0].layer->handle, &quantize));
    fp8_operand view = FP8_OPERAND_INIT;
    fp8_fprop_args args = FP8_FPROP_ARGS_INIT;
    args.x_quantized = &x.op;
    args.weight = &c[1].weight.op;
    args.y = &c[1].tensor[RIG_Y].t;
    args.saved = &view;
    args.call = rig_case_call(&c[1]);
    RIG_REFUSED(FP8_ERR_OPERAND, fp8_layer_fprop(c[1].layer->handle, &args));
    args.saved = NULL;
    RIG_OK(fp8_layer_fprop(c[1].layer->handle, &args));
    rig_tensor_unchanged(&c[1].tensor[RIG_Y]);
    args.found_inf = (uint32_t *)(void *)c[1].tensor[RIG_FOUND_INF].block.device;
    RIG_REFUSED(FP8_ERR_ARGUMENT, fp8_layer_fprop(c[1].layer->handle, &args));
    rig_expect_sentence("give found_inf to fp8_quantize");
    args.found_inf = NULL;
    args.x = &c[1].tensor[RIG_X].t; /* both */
    RIG_REFUSED(FP8_ERR_ARGUMENT, fp8_layer_fprop(c[1].layer->handle, &args));
    rig_operand_free(&x);
    rig_case_free(&c[0]);
    rig_case_free(&c[1]);
}

/* Moves the bytes through the host to another address; what was there is poisoned. */
static void move(struct rig_operand *operand)
{
    struct rig_operand old = *operand;
    rig_block_pull(&old.block, "operand");
    rig_operand_make(operand, old.block.bytes, 0xFF);
    memcpy(operand->block.image, old.block.image, old.block.bytes);
    rig_block_push(&operand->block);
    memset(old.block.image, 0x7E, old.block.bytes);
    rig_block_push(&old.block);
    void *data = operand->op.data;
    operand->op = old.op;
    operand->op.data = data;
    rig_operand_free(&old);
}

static void operands_may_move(void **state)
{
    (void)state;
    struct rig_case c;
    begin(&c, Q, 129, 40);
    rig_case_weight(&c);
    move(&c.weight);
    rig_case_fprop(&c);
    move(&c.saved);
    move(&c.weight);
    rig_case_backward(&c);
    rig_case_check(&c);
    move(&c.grad);
    move(&c.saved);
    RIG_OK(wgrad(&c));
    rig_tensor_unchanged(&c.tensor[RIG_DW]);
    RIG_OK(dgrad(&c, 0));
    rig_tensor_unchanged(&c.tensor[RIG_DX]);
    rig_case_free(&c);
}

/* Several forwards before their backwards, as in pipelines; the last first. */
static void saved_outlives_other_calls(void **state)
{
    (void)state;
    struct rig_case c[4];
    for (int i = 0; i < 4; i++) {
        begin(&c[i], i % 2 ? K : Q, 20 + 30 * i, 50 + (uint64_t)i);
        rig_case_weight(&c[i]);
        rig_case_fprop(&c[i]);
    }
    for (int i = 3; i >= 0; i--) {
        rig_case_backward(&c[i]);
        rig_case_check(&c[i]);
        rig_case_free(&c[i]);
    }
}

/* ---- refusals ---- */

static void operands_that_do_not_fit_are_refused(void **state)
{
    (void)state;
    struct rig_case c;
    begin(&c, Q, 64, 60);
    rig_case_weight(&c);
    rig_case_fprop(&c);
    rig_case_backward(&c);
    rig_case_check(&c);

    fp8_operand empty = FP8_OPERAND_INIT, weight = c.weight.op;
    c.weight.op = empty;
    RIG_REFUSED(FP8_ERR_OPERAND, dgrad(&c, 0));
    rig_expect_sentence("weight");
    c.weight.op = c.saved.op; /* an x for a w */
    RIG_REFUSED(FP8_ERR_OPERAND, dgrad(&c, 0));
    c.weight.op = weight;
    c.weight.op.bytes = 100;
    RIG_REFUSED(FP8_ERR_OPERAND, dgrad(&c, 0));
    rig_expect_sentence("100");
    c.weight.op = weight;
    c.weight.op.size = 8;
    RIG_REFUSED(FP8_ERR_ARGUMENT, dgrad(&c, 0));
    c.weight.op = weight;

    fp8_operand saved = c.saved.op; /* of another M than grad */
    c.saved.op.rows = 63;
    assert_int_not_equal(wgrad(&c), FP8_OK);
    c.saved.op = saved;

    struct rig_operand small; /* too small to be filled */
    rig_operand_make(&small, rig_bytes(c.layer, 64, FP8_BYTES_SAVED) - 1, 0xFF);
    fp8_fprop_args args = FP8_FPROP_ARGS_INIT;
    args.x = &c.tensor[RIG_X].t;
    args.weight = &c.weight.op;
    args.bias = &c.tensor[RIG_BIAS].t;
    args.y = &c.tensor[RIG_Y].t;
    args.saved = &small.op;
    args.call = rig_case_call(&c);
    RIG_REFUSED(FP8_ERR_OPERAND, fp8_layer_fprop(c.layer->handle, &args));
    rig_expect_sentence("saved");
    args.saved = NULL;
    args.call.workspace_bytes = 16;
    RIG_REFUSED(FP8_ERR_WORKSPACE, fp8_layer_fprop(c.layer->handle, &args));
    rig_expect_sentence("16");
    args.call = rig_case_call(&c);
    args.call.workspace = NULL;
    assert_int_not_equal(fp8_layer_fprop(c.layer->handle, &args), FP8_OK);
    args.call = rig_case_call(&c);
    args.size = 4;
    RIG_REFUSED(FP8_ERR_ARGUMENT, fp8_layer_fprop(c.layer->handle, &args));
    args.size = sizeof args;
    RIG_REFUSED(FP8_ERR_ARGUMENT, fp8_layer_fprop(NULL, &args));
    RIG_REFUSED(FP8_ERR_ARGUMENT, fp8_layer_fprop(c.layer->handle, NULL));
    rig_block_pull(&small.block, "saved");
    rig_operand_free(&small);

    rig_case_check(&c); /* nothing was touched */
    rig_case_free(&c);
}

static void struct_fields_are_what_the_header_says(void **state)
{
    (void)state;
    struct rig_case c;
    begin(&c, Q, 33, 70);
    fp8_operand_view view;
    RIG_REFUSED(FP8_ERR_OPERAND, fp8_operand_parts(&c.weight.op, &view));
    rig_case_weight(&c);
    rig_case_fprop(&c);
    unsigned char *data = c.weight.op.data;
    RIG_OK(fp8_operand_parts(&c.weight.op, &view));
    assert_ptr_equal(view.scales, data);
    assert_ptr_equal(view.row, data + 256);
    assert_int_equal(view.row_ld, 128);
    assert_ptr_equal(view.transposed, data + 256 + 144 * 128);
    assert_int_equal(view.transposed_ld, 256);
    RIG_OK(fp8_operand_parts(&c.saved.op, &view));
    assert_null(view.row);
    assert_ptr_equal(view.transposed, (unsigned char *)c.saved.op.data + 256);
    assert_int_equal(view.transposed_ld, 128);
    assert_int_equal(c.saved.op.role, FP8_ROLE_X);
    assert_int_equal(c.weight.op.role, FP8_ROLE_W);
    assert_int_equal(rig_bytes(c.layer, 33, FP8_BYTES_WEIGHT), 256 + 144 * 128 + 96 * 256);
    assert_int_equal(rig_bytes(c.layer, 33, FP8_BYTES_SAVED), 256 + 96 * 128);
    rig_case_free(&c);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(only_what_depends_on_an_element_moves, open_layers),
        cmocka_unit_test(one_row_and_one_column_are_no_special_case),
        cmocka_unit_test(backward_wants_the_weight_of_its_forward),
        cmocka_unit_test(an_equal_version_is_not_quantised_again),
        cmocka_unit_test(weight_follows_the_optimizer),
        cmocka_unit_test(no_wgrad_wanted),
        cmocka_unit_test(no_dgrad_wanted),
        cmocka_unit_test(neither_wanted),
        cmocka_unit_test(an_x_is_quantised_once_for_several_layers),
        cmocka_unit_test(operands_may_move),
        cmocka_unit_test(saved_outlives_other_calls),
        cmocka_unit_test(operands_that_do_not_fit_are_refused),
        cmocka_unit_test_teardown(struct_fields_are_what_the_header_says, rig_shared_close),
    };
    return RIG_RUN(tests);
}
