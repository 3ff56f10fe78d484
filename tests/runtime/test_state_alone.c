/*
 * test_state_alone.c - delayed scaling: what leaves a state alone: evaluation, recompute, calls
 * without tokens, zeros, other layers.
 */
#include <math.h>

#include "tests/runtime/rig_state.h"

/* ---- what leaves a state alone ---- */

/* Nor does the amax that calibration begins with. */
static void a_weight_that_is_not_refreshed_is_not_looked_at(void **state)
{
    (void)state;
    struct world o;
    struct seen before;
    struct rig_block words; /* refresh, found_inf */
    world_make(&o, 1, "history_length = 4, calibrate = true");
    world_fill(&o.w, 1.0f, 1);
    rig_set(&o.w, 3, 5, INFINITY);
    rig_tensor_push(&o.w);
    rig_block_make(&words, 2 * sizeof(uint32_t), 0, 0xFF);
    rig_block_push(&o.weight.block);
    world_look(&o, &before);
    for (uint32_t refresh = 0; refresh < 2; refresh++) {
        uint32_t both[] = { refresh, 0 };
        memcpy(words.image, both, sizeof both);
        rig_block_push(&words);
        fp8_weight_args args = FP8_WEIGHT_ARGS_INIT;
        args.w = &o.w.t;
        args.version = 1;
        args.weight = &o.weight.op;
        args.refresh = (const uint32_t *)(const void *)words.device;
        args.found_inf = (uint32_t *)(void *)words.device + 1;
        args.call = world_call(&o, 0);
        RIG_OK(fp8_weight_update(o.layer[0], &args));
        rig_block_pull(&words, "words");
        memcpy(both, words.image, sizeof both);
        assert_int_equal(both[1], refresh);
        if (refresh == 0) {
            world_expect_same(&o, &before);
            rig_block_pull(&o.weight.block, "weight");
            for (size_t i = 0; i < o.weight.block.bytes; i++)
                assert_int_equal(o.weight.block.image[i], 0x7E);
        }
    }
    rig_block_free(&words);
    world_free(&o);
}

static void evaluation_changes_nothing(void **state)
{
    (void)state;
    struct world o;
    struct seen before;
    world_begin(&o, "history_length = 4", 1.0f, 2.0f, 1.0f);
    world_forward(&o, 0);
    world_advance(&o);
    world_forward(&o, 0);
    world_look(&o, &before);
    o.flags = FP8_CALL_EVALUATE;
    world_fill(&o.x, 2e4f, 2);
    world_update(&o, 0, 2);
    world_forward(&o, 0);
    world_expect_same(&o, &before);
    world_free(&o);
}

/* An evaluation that meets the weight of the next step first: that step trains as without it. */
static void training_after_evaluation_is_the_same(void **state)
{
    (void)state;
    struct seen after[2];
    unsigned char weights[2][MOST_WEIGHT];
    for (int evaluate = 0; evaluate < 2; evaluate++) {
        struct world o;
        world_make(&o, 1, "history_length = 4");
        for (int step = 1; step <= 4; step++) {
            world_fill(&o.w, 1.0f + (float)step, 1);
            for (int i = 0; i < 2 && evaluate && step > 1; i++) {
                o.flags = FP8_CALL_EVALUATE;
                world_fill(&o.x, 2e4f, 2);
                world_update(&o, 0, (uint64_t)step);
                assert_int_equal(o.weight.op.evaluated, 1);
                world_forward(&o, 0);
                o.flags = 0;
            }
            world_fill(&o.x, 2.0f * (float)step, 2);
            world_fill(&o.dy, 0.5f, 3);
            world_update(&o, 0, (uint64_t)step);
            assert_int_equal(o.weight.op.evaluated, 0);
            world_forward(&o, 0);
            world_backward(&o, 0);
            world_look(&o, &after[evaluate]);
            EXPECT_FLOAT(after[evaluate].running[1], 1.0f + (float)step);
            world_advance(&o);
        }
        world_look(&o, &after[evaluate]);
        rig_block_pull(&o.weight.block, "weight");
        assert_true(o.weight.block.bytes <= sizeof weights[0]);
        memcpy(weights[evaluate], o.weight.block.image, o.weight.block.bytes);
        if (evaluate)
            assert_memory_equal(weights[0], weights[1], o.weight.block.bytes);
        world_free(&o);
    }
    assert_memory_equal(after[0].data, after[1].data, after[0].bytes);
}

/* Evaluations among themselves, and one behind a training step, take the weight that is there. */
static void evaluation_takes_the_weight_that_is_there(void **state)
{
    (void)state;
    struct world o;
    world_make(&o, 1, "history_length = 4");
    for (int first = 0; first < 2; first++) {
        world_fill(&o.w, 1.0f, 1);
        o.flags = first ? FP8_CALL_EVALUATE : 0;
        world_update(&o, 0, 1 + (uint64_t)first);
        rig_block_pull(&o.weight.block, "weight");
        unsigned char before[MOST_WEIGHT];
        assert_true(o.weight.block.bytes <= sizeof before);
        memcpy(before, o.weight.block.image, o.weight.block.bytes);
        world_fill(&o.w, 3.0f, 7); /* would show */
        o.flags = FP8_CALL_EVALUATE;
        world_update(&o, 0, 1 + (uint64_t)first);
        rig_block_pull(&o.weight.block, "weight");
        assert_memory_equal(before, o.weight.block.image, o.weight.block.bytes);
    }
    world_free(&o);
}

static void recompute_changes_nothing(void **state)
{
    (void)state;
    unsigned char *outputs[2][3];
    struct seen after[2];
    for (int recompute = 0; recompute < 2; recompute++) {
        struct world o;
        world_make(&o, 1, "history_length = 4");
        for (int step = 0; step < 2; step++) {
            world_fill(&o.w, 1.0f, 1);
            world_fill(&o.x, 2.0f + (float)step, 2);
            world_fill(&o.dy, 0.5f, 3);
            world_update(&o, 0, 1 + (uint64_t)step);
            world_forward(&o, 0);
            if (recompute)
                world_forward(&o, 0);
            world_backward(&o, 0);
            world_advance(&o);
        }
        world_look(&o, &after[recompute]);
        struct rig_tensor *tensors[] = { &o.y, &o.dx, &o.dw };
        for (int i = 0; i < 3; i++) {
            rig_tensor_pull(tensors[i]);
            outputs[recompute][i] = malloc(tensors[i]->block.bytes);
            memcpy(outputs[recompute][i], tensors[i]->block.image, tensors[i]->block.bytes);
            if (recompute)
                assert_memory_equal(outputs[0][i], outputs[1][i], tensors[i]->block.bytes);
        }
        world_free(&o);
    }
    assert_memory_equal(after[0].data, after[1].data, after[0].bytes);
    for (int i = 0; i < 6; i++)
        free(outputs[i / 3][i % 3]);
}

static void a_call_without_tokens_does_not_run(void **state)
{
    (void)state;
    struct world o;
    struct seen s;
    world_begin(&o, "history_length = 4", 1.0f, 2.0f, 2.0f);
    world_forward(&o, 0);
    world_backward(&o, 0);
    world_advance(&o);
    world_set_rows(&o, 0);
    world_forward(&o, 0);
    world_backward(&o, 0);
    world_look(&o, &s);
    for (int t = 0; t < 3; t++)
        EXPECT_FLOAT(s.running[t], -1.0f);
    rig_tensor_pull(&o.dw);
    for (int64_t i = 0; i < N * K; i++)
        EXPECT_FLOAT(rig_get(&o.dw, i / K, i % K), 0.0f);
    world_advance(&o);
    struct seen after;
    world_look(&o, &after);
    assert_memory_equal(after.data, s.data, s.bytes);
    world_set_rows(&o, M);
    world_free(&o);
}

static void zeros_keep_the_scale(void **state)
{
    (void)state;
    struct world o;
    struct seen s;
    world_begin(&o, "history_length = 2", 1.0f, 0.0f, 1.0f);
    world_forward(&o, 0);
    rig_tensor_pull(&o.y);
    for (int64_t i = 0; i < M * N; i++)
        assert_int_equal(rig_bits(&o.y, i / N, i % N) & 0x7FFF, 0);
    world_advance(&o);
    world_look(&o, &s);
    EXPECT_FLOAT(s.scale[0], 1.0f);
    assert_int_equal(s.entries[0], 1);
    world_step_x(&o, 7.0f);
    world_look(&o, &s);
    EXPECT_FLOAT(s.scale[0], 64.0f);
    world_step_x(&o, 0.0f);
    world_step_x(&o, 0.0f); /* now the history holds nothing else */
    world_look(&o, &s);
    EXPECT_FLOAT(s.scale[0], 64.0f);
    world_free(&o);
}

static void layers_of_a_state_are_apart(void **state)
{
    (void)state;
    struct world o;
    struct seen s;
    world_make(&o, 2, "history_length = 2");
    world_fill(&o.w, 1.0f, 1);
    world_fill(&o.x, 7.0f, 2);
    world_update(&o, 1, 1);
    world_forward(&o, 1);
    world_advance(&o);
    world_look(&o, &s);
    const float scales[6] = { 1, 1, 1, 64, 448, 1 };
    const int entries[6] = { 0, 0, 0, 1, 1, 0 };
    for (int t = 0; t < 6; t++) {
        EXPECT_FLOAT(s.scale[t], scales[t]);
        assert_int_equal(s.entries[t], entries[t]);
    }
    float *running = NULL;
    int64_t count = 0;
    RIG_OK(fp8_state_running(o.state, &running, &count));
    assert_int_equal(count, 6);
    /* what an all-reduce brings: a rank that ran tells one that did not */
    const float reduced[6] = { -1, 2, -1, 3.5f, -1, -1 };
    RIG_OK(fp8_memory_copy(rig.context, running, reduced, sizeof reduced, rig.stream));
    world_advance(&o);
    world_look(&o, &s);
    EXPECT_FLOAT(s.scale[1], 224.0f);
    EXPECT_FLOAT(s.scale[3], 64.0f);
    EXPECT_FLOAT(s.history[3][1], 3.5f);
    assert_int_equal(s.entries[4], 1);
    world_free(&o);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_weight_that_is_not_refreshed_is_not_looked_at),
        cmocka_unit_test(evaluation_changes_nothing),
        cmocka_unit_test(training_after_evaluation_is_the_same),
        cmocka_unit_test(evaluation_takes_the_weight_that_is_there),
        cmocka_unit_test(recompute_changes_nothing),
        cmocka_unit_test(a_call_without_tokens_does_not_run),
        cmocka_unit_test(zeros_keep_the_scale),
        cmocka_unit_test(layers_of_a_state_are_apart),
    };
    return RIG_RUN(tests);
}
