/*
 * test_state_data.c - delayed scaling: states as plain data, and what is refused.
 */
#include "tests/runtime/rig_state.h"

/* ---- plain data ---- */

static void saved_states_continue_where_they_were(void **state)
{
    (void)state;
    static const char *const lengths[] = { "history_length = 3", "history_length = 5",
                                           "history_length = 2" };
    static const float before[] = { 1, 16, 2, 4 };
    for (int to = 0; to < 3; to++) {
        struct world a, b;
        struct seen saved, s;
        world_make(&a, 1, lengths[0]);
        world_make(&b, 1, lengths[to]);
        world_fill(&a.w, 1.0f, 1);
        world_fill(&b.w, 1.0f, 1);
        world_update(&a, 0, 1);
        world_update(&b, 0, 1);
        for (int i = 0; i < 4; i++)
            world_step_x(&a, before[i]);
        world_forward(&a, 0); /* in the middle of a step */
        world_look(&a, &saved);
        RIG_OK(fp8_state_load(b.state, saved.data, saved.bytes, rig.stream));
        world_look(&b, &s);
        int kept = to == 2 ? 2 : 3;
        assert_int_equal(s.entries[0], kept);
        for (int i = 0; i < kept; i++)
            EXPECT_FLOAT(s.history[0][i], before[4 - kept + i]);
        EXPECT_FLOAT(s.scale[0], saved.scale[0]);
        EXPECT_FLOAT(s.running[0], 4.0f);
        EXPECT_FLOAT(s.running[1], -1.0f);
        EXPECT_FLOAT(s.scale[1], 448.0f);
        world_advance(&b);
        world_step_x(&b, 0.25f);
        world_look(&b, &s);
        static const float amax[] = { 4, 16, 4 }; /* of the last 3, 5, 2 */
        EXPECT_FLOAT(s.scale[0], 448.0f / amax[to]);
        world_free(&a);
        world_free(&b);
    }
}

/* A run that goes on with gradients in E4M3: with E5M2's scale they would all saturate for a
 * step. */
static void a_scale_of_another_format_is_made_anew(void **state)
{
    (void)state;
    static const char *const fields[] = {
        "format = \"hybrid\", history_length = 2, margin = 1",
        "format = \"e4m3\", history_length = 2",
        "format = \"e4m3\", history_length = 2, power_of_two = true, margin = 2",
    };
    static const float want[] = { 57344.0f / 2 / 3, 448.0f / 3, 32.0f };
    struct world o[3];
    struct seen first, s;
    for (int i = 0; i < 3; i++)
        world_begin(&o[i], fields[i], 1.0f, 1.0f, 3.0f);
    world_forward(&o[0], 0);
    world_backward(&o[0], 0);
    world_advance(&o[0]);
    world_look(&o[0], &first);
    EXPECT_FLOAT(first.scale[2], want[0]);
    for (int i = 1; i < 3; i++) {
        RIG_OK(fp8_state_load(o[i].state, first.data, first.bytes, rig.stream));
        world_look(&o[i], &s);
        EXPECT_FLOAT(s.scale[2], want[i]);
        EXPECT_FLOAT(s.scale[0], first.scale[0]); /* of the same format, whatever the margin */
        EXPECT_FLOAT(s.history[2][0], 3.0f);
        RIG_OK(fp8_state_load(o[0].state, s.data, s.bytes, rig.stream)); /* fits E5M2 */
        world_look(&o[0], &s);
        EXPECT_FLOAT(s.scale[2], want[i]);
    }
    for (int i = 0; i < 3; i++)
        world_free(&o[i]);
}

static void altered_data_is_refused(void **state)
{
    (void)state;
    static const struct {
        size_t offset;
        uint32_t word;
    } changes[] = {
        { 0, 0 },            /* magic */
        { 8, 2 },            /* version */
        { 12, 1 },           /* reserved */
        { 16, 6 },           /* tensors */
        { 24, 3 },           /* length */
        { 32, 0 },           /* scale 0 */
        { 32, 0x7F800000u }, /* inf */
        { 36, 0x7FC00000u }, /* NaN */
        { 44, 0xC0000000u }, /* running -2 */
        { 56, 3 },           /* entries beyond the length */
        { 56, 0xFFFFFFFFu }, /* -1 */
        { 56, 0 },           /* fewer than there are: an amax lies behind them */
        { 68, 0xBF800000u }, /* history -1 */
    };
    struct world o;
    struct seen s;
    world_begin(&o, "history_length = 2", 1.0f, 1.0f, 1.0f);
    world_step_x(&o, 2.0f);
    world_look(&o, &s);
    for (size_t i = 0; i < sizeof changes / sizeof changes[0]; i++) {
        unsigned char data[MOST_BYTES];
        memcpy(data, s.data, s.bytes);
        memcpy(data + changes[i].offset, &changes[i].word, 4);
        RIG_REFUSED(FP8_ERR_ARGUMENT, fp8_state_load(o.state, data, s.bytes, rig.stream));
    }
    RIG_REFUSED(FP8_ERR_ARGUMENT, fp8_state_load(o.state, s.data, s.bytes - 4, rig.stream));
    RIG_REFUSED(FP8_ERR_ARGUMENT, fp8_state_load(o.state, s.data, 8, rig.stream));
    RIG_REFUSED(FP8_ERR_ARGUMENT, fp8_state_load(o.state, NULL, s.bytes, rig.stream));
    RIG_REFUSED(FP8_ERR_ARGUMENT, fp8_state_save(o.state, s.data, s.bytes - 1, rig.stream));
    world_expect_same(&o, &s);
    world_free(&o);
}

/* ---- refusals ---- */

static void wrong_states_are_refused(void **state)
{
    (void)state;
    struct world o;
    world_make(&o, 2, "history_length = 2");
    world_fill(&o.w, 1.0f, 1);
    world_fill(&o.x, 1.0f, 2);
    world_update(&o, 0, 1);
    fp8_fprop_args args = FP8_FPROP_ARGS_INIT;
    args.x = &o.x.t;
    args.weight = &o.weight.op;
    args.y = &o.y.t;
    args.call = world_call(&o, 0);
    args.call.state = NULL;
    RIG_REFUSED(FP8_ERR_ARGUMENT, fp8_layer_fprop(o.layer[0], &args));
    rig_expect_sentence("call.state is NULL");
    args.call = world_call(&o, 1);
    RIG_REFUSED(FP8_ERR_ARGUMENT, fp8_layer_fprop(o.layer[0], &args));
    rig_expect_sentence("another layer");
    args.call = world_call(&o, 2);
    RIG_REFUSED(FP8_ERR_ARGUMENT, fp8_layer_fprop(o.layer[0], &args));
    rig_expect_sentence("made for 2 layers");
    args.call.state_layer = INT32_MIN;
    RIG_REFUSED(FP8_ERR_ARGUMENT, fp8_layer_fprop(o.layer[0], &args));
    rig_expect_sentence("call.state_layer is -2147483648, but the state was made for 2 layers");
    args.call = world_call(&o, 0);
    RIG_OK(fp8_layer_fprop(o.layer[0], &args));
    /* x is quantised already, but the weight is to be made in the call */
    struct rig_operand x;
    rig_operand_make(&x, world_bytes(o.layer[0], FP8_BYTES_X), 0xFF);
    fp8_quantize_args quantize = FP8_QUANTIZE_ARGS_INIT;
    quantize.role = FP8_ROLE_X, quantize.source = &o.x.t, quantize.operand = &x.op;
    quantize.call = world_call(&o, 0);
    RIG_OK(fp8_quantize(o.layer[0], &quantize));
    args.x = NULL, args.x_quantized = &x.op;
    args.call.state = NULL;
    RIG_OK(fp8_layer_fprop(o.layer[0], &args));
    fp8_operand weight = o.weight.op;
    weight.version = 0;
    args.w = &o.w.t, args.weight = &weight;
    RIG_REFUSED(FP8_ERR_ARGUMENT, fp8_layer_fprop(o.layer[0], &args));
    rig_expect_sentence("call.state is NULL");
    args.call.state = o.state;
    RIG_OK(fp8_layer_fprop(o.layer[0], &args));
    rig_operand_free(&x);
    /* where nothing is quantised, a state that is given is looked at all the same */
    fp8_dgrad_args dgrad = FP8_DGRAD_ARGS_INIT;
    world_fill(&o.dy, 1.0f, 3);
    world_forward(&o, 0);
    world_backward(&o, 0);
    dgrad.grad = &o.grad.op;
    dgrad.weight = &o.weight.op;
    dgrad.dx = &o.dx.t;
    dgrad.call = world_call(&o, 1);
    RIG_REFUSED(FP8_ERR_ARGUMENT, fp8_layer_dgrad(o.layer[0], &dgrad));
    rig_expect_sentence("dgrad: call.state_layer is 1");
    dgrad.call = world_call(&o, 0);
    RIG_OK(fp8_layer_dgrad(o.layer[0], &dgrad));
    dgrad.call.state = NULL;
    dgrad.call.state_layer = INT32_MIN; /* not read */
    RIG_OK(fp8_layer_dgrad(o.layer[0], &dgrad));
    fp8_state *none = o.state;
    RIG_REFUSED(FP8_ERR_ARGUMENT, fp8_state_create(NULL, 1, &none));
    assert_null(none);
    const fp8_layer *holes[] = { o.layer[0], NULL };
    RIG_REFUSED(FP8_ERR_ARGUMENT, fp8_state_create(holes, 2, &none));
    RIG_REFUSED(FP8_ERR_ARGUMENT, fp8_state_create(holes, 0, &none));
    struct world other;
    world_make(&other, 1, "history_length = 3");
    holes[1] = other.layer[0];
    RIG_REFUSED(FP8_ERR_ARGUMENT, fp8_state_create(holes, 2, &none));
    rig_expect_sentence("another history_length");
    const fp8_layer *twice[] = { o.layer[0], o.layer[0] };
    RIG_OK(fp8_state_create(twice, 2, &none)); /* two weights of one layer */
    fp8_state_destroy(none);
    world_free(&other);
    world_free(&o);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(saved_states_continue_where_they_were),
        cmocka_unit_test(a_scale_of_another_format_is_made_anew),
        cmocka_unit_test(altered_data_is_refused),
        cmocka_unit_test(wrong_states_are_refused),
    };
    return RIG_RUN(tests);
}
