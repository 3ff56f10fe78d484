/*
 * test_local.c - communicators of threads: what they compute, and that nothing hangs when a rank
 * fails.
 */
#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/check.h"
#include "runtime/fp8_format.h"
#include "tests/ranks/rig.h"

/* ---- right ---- */

static unsigned char byte_of(int rank, size_t i)
{
    static const unsigned char odd[] = { 0x7f, 0x80, 0xff, 0x00 };
    return i < 4 ? odd[i] : (unsigned char)(rank * 31 + (int)i * 7);
}

static void gather_body(struct rank *rank)
{
    const size_t bytes = *(const size_t *)rank->user;
    const size_t ranks = (size_t)rank->ranks;
    unsigned char *all = malloc(ranks * bytes + 1), *mine = malloc(bytes + 1);
    unsigned char *place = malloc(ranks * bytes + 1);
    memset(all, 0xee, ranks * bytes + 1);
    for (size_t i = 0; i < bytes; i++)
        mine[i] = place[(size_t)rank->rank * bytes + i] = byte_of(rank->rank, i);
    for (int round = 0; round < 20; round++) {
        /* one part apart, one in place, one empty */
        const fp8_gather_part parts[] = {
            { mine, all, bytes },
            { place + (size_t)rank->rank * bytes, place, bytes },
            { NULL, NULL, 0 },
        };
        rank_check(rank, fp8_comm_all_gather(rank->comm, parts, 3, "w", NULL) == FP8_OK);
    }
    for (size_t r = 0; r < ranks; r++) {
        for (size_t i = 0; i < bytes; i++) {
            rank_check(rank, all[r * bytes + i] == byte_of((int)r, i));
            rank_check(rank, place[r * bytes + i] == byte_of((int)r, i));
        }
    }
    rank_check(rank, all[ranks * bytes] == 0xee);
    free(all);
    free(mine);
    free(place);
}

static void test_gather(void **state)
{
    (void)state;
    static const int32_t ranks[] = { 1, 2, 3, 4, 8, 17 };
    for (size_t i = 0; i < sizeof ranks / sizeof ranks[0]; i++) {
        for (size_t bytes = 0; bytes < 2000; bytes += 997)
            ranks_run(ranks[i], 20, gather_body, &bytes);
    }
}

static void exchange_body(struct rank *rank)
{
    const size_t bytes = *(const size_t *)rank->user, ranks = (size_t)rank->ranks;
    const size_t all = ranks * bytes;
    uint8_t *send = malloc(all + 1), *recv = malloc(all + 1);
    for (size_t i = 0; i < all; i++)
        send[i] = byte_of(rank->rank, i);
    recv[all] = 0xee;
    const fp8_exchange_part parts[] = { { send, recv, bytes }, { NULL, NULL, 0 } };
    rank_check(rank, fp8_comm_all_to_all(rank->comm, parts, 2, "dw", NULL) == FP8_OK);
    for (size_t r = 0; r < ranks; r++) {
        for (size_t i = 0; i < bytes; i++)
            rank_check(rank,
                       recv[r * bytes + i] == byte_of((int)r, (size_t)rank->rank * bytes + i));
    }
    rank_check(rank, recv[all] == 0xee);
    const fp8_exchange_part same = { send, send + bytes - (bytes > 0), bytes };
    rank_check(rank, bytes == 0 || ranks == 1 ||
                         fp8_comm_all_to_all(rank->comm, &same, 1, "dw", NULL) == FP8_ERR_ARGUMENT);
    rank_check(rank, bytes == 0 || ranks == 1 || says("all_to_all of dw", "do not overlap", NULL));
    free(send);
    free(recv);
}

static void test_exchange(void **state)
{
    (void)state;
    static const int32_t ranks[] = { 1, 2, 3, 8 };
    for (size_t i = 0; i < sizeof ranks / sizeof ranks[0]; i++) {
        for (size_t bytes = 0; bytes < 2000; bytes += 997)
            ranks_run(ranks[i], 20, exchange_body, &bytes);
    }
}

static float value_of(int rank, size_t i)
{
    return (float)(rank + 1) * 0.37f + (float)i * (rank % 2 ? -1.25f : 1.5f);
}

struct sum {
    fp8_dtype dtype;
    uint32_t average;
    size_t count;
};

static float get(const void *data, size_t i, fp8_dtype dtype)
{
    if (dtype == FP8_DTYPE_FP32)
        return ((const float *)data)[i];
    uint16_t half = ((const uint16_t *)data)[i];
    return dtype == FP8_DTYPE_BF16 ? fp8_bf16_to_float(half) : fp8_fp16_to_float(half);
}

static void set(void *data, size_t i, fp8_dtype dtype, float value)
{
    if (dtype == FP8_DTYPE_FP32)
        ((float *)data)[i] = value;
    else
        ((uint16_t *)data)[i] =
            dtype == FP8_DTYPE_BF16 ? fp8_float_to_bf16(value) : fp8_float_to_fp16(value);
}

static void sum_body(struct rank *rank)
{
    const struct sum *sum = rank->user;
    const size_t all = sum->count * (size_t)rank->ranks;
    float *send = calloc(all + 1, sizeof *send), *recv = calloc(sum->count + 1, sizeof *recv);
    for (size_t i = 0; i < all; i++)
        set(send, i, sum->dtype, value_of(rank->rank, i));
    const fp8_reduce_part part = { send, recv, sum->count, sum->dtype, sum->average };
    rank_check(rank, fp8_comm_reduce_scatter(rank->comm, &part, 1, "dw", NULL) == FP8_OK);
    for (size_t i = 0; i < sum->count; i++) {
        float exact = 0;
        for (int r = 0; r < rank->ranks; r++) {
            float one[1];
            set(one, 0, sum->dtype, value_of(r, i + sum->count * (size_t)rank->rank));
            exact = r == 0 ? get(one, 0, sum->dtype) : exact + get(one, 0, sum->dtype);
        }
        if (sum->average)
            exact *= 1.0f / (float)rank->ranks;
        float rounded[1];
        set(rounded, 0, sum->dtype, exact);
        rank_check(rank, get(recv, i, sum->dtype) == get(rounded, 0, sum->dtype));
    }
    free(send);
    free(recv);
}

static void test_reduce_scatter(void **state)
{
    (void)state;
    static const fp8_dtype dtypes[] = { FP8_DTYPE_FP32, FP8_DTYPE_BF16, FP8_DTYPE_FP16 };
    for (int i = 0; i < 12; i++) {
        struct sum sum = { dtypes[i % 3], (uint32_t)i % 2, (size_t)i * 211 };
        ranks_run(1 + i % 5, 20, sum_body, &sum);
    }
}

static void refuse_body(struct rank *rank)
{
    uint8_t data[64] = { 0 };
    static const fp8_dtype dtypes[] = { FP8_DTYPE_E4M3, FP8_DTYPE_E5M2, FP8_DTYPE_UINT8,
                                        FP8_DTYPE_UINT32, FP8_DTYPE_NONE };
    for (size_t i = 0; i < 5; i++) {
        const fp8_reduce_part part = { data, data, 4, dtypes[i], 0 };
        rank_check(rank,
                   fp8_comm_reduce_scatter(rank->comm, &part, 1, "dw", NULL) == FP8_ERR_DTYPE);
        rank_check(rank, says("reduce_scatter of dw", "bf16", NULL));
    }
    const fp8_gather_part part = { NULL, data, 4 };
    rank_check(rank, fp8_comm_all_gather(rank->comm, &part, 1, "w", NULL) == FP8_ERR_ARGUMENT);
    rank_check(rank, says("all_gather of w: send of part 0 is NULL", NULL));
    rank_check(rank, fp8_comm_all_reduce_max(rank->comm, NULL, 3, "x", NULL) == FP8_ERR_ARGUMENT);
    rank_check(rank, says("all_reduce_max of x: values is NULL", "3 numbers", NULL));
    rank_check(rank, fp8_comm_poll(rank->comm) == FP8_OK);
}

/* Four floats a rank, in memory for twice all of them. In place is this rank's piece and no
 * other. */
static void overlap_body(struct rank *rank)
{
    enum { COUNT = 4 };
    float memory[2 * 3 * COUNT] = { 0 };
    const int own = rank->rank * COUNT, all = rank->ranks * COUNT;
    for (int at = 0; at <= all; at++) {
        const bool fits = at == own || at == all; /* in place, or apart */
        const fp8_gather_part gather = { memory + at, memory, COUNT * sizeof *memory };
        const fp8_reduce_part sum = { memory, memory + at, COUNT, FP8_DTYPE_FP32, 0 };
        if (fits)
            continue;
        rank_check(rank,
                   fp8_comm_all_gather(rank->comm, &gather, 1, "w", NULL) == FP8_ERR_ARGUMENT);
        rank_check(rank,
                   says("all_gather of w: recv and send of part 0", "overlap", "rank * 16", NULL));
        rank_check(rank,
                   fp8_comm_reduce_scatter(rank->comm, &sum, 1, "dw", NULL) == FP8_ERR_ARGUMENT);
        rank_check(rank, says("reduce_scatter of dw: send and recv of part 0", "overlap", NULL));
    }
    for (int apart = 0; apart < 2; apart++) {
        const int at = apart ? all : own;
        const fp8_gather_part gather = { memory + at, memory, COUNT * sizeof *memory };
        const fp8_reduce_part sum = { memory, memory + at, COUNT, FP8_DTYPE_FP32, 0 };
        for (int i = 0; i < 2 * all; i++)
            memory[i] = (float)(rank->rank + 1);
        rank_check(rank, fp8_comm_all_gather(rank->comm, &gather, 1, "w", NULL) == FP8_OK);
        for (int i = 0; i < all; i++)
            rank_check(rank, memory[i] == (float)(i / COUNT + 1));
        rank_check(rank, fp8_comm_reduce_scatter(rank->comm, &sum, 1, "dw", NULL) == FP8_OK);
        for (int i = 0; i < COUNT; i++)
            rank_check(rank, memory[at + i] == (float)((rank->rank + 1) * rank->ranks));
    }
}

/* Bytes that no memory has, for one rank as for several. */
static void huge_body(struct rank *rank)
{
    float memory[2] = { 0 };
    for (int half = 0; half < 2; half++) {
        const size_t bytes = half ? (size_t)PTRDIFF_MAX + 1 : SIZE_MAX;
        const fp8_gather_part gather = { memory, memory + 1, bytes };
        const fp8_exchange_part exchange = { memory, memory + 1, bytes };
        const fp8_reduce_part sum = { memory, memory + 1, bytes / 4, FP8_DTYPE_FP32, 0 };
        rank_check(rank,
                   fp8_comm_all_gather(rank->comm, &gather, 1, "w", NULL) == FP8_ERR_ARGUMENT);
        rank_check(rank, says("more than memory has", NULL));
        rank_check(rank,
                   fp8_comm_all_to_all(rank->comm, &exchange, 1, "w", NULL) == FP8_ERR_ARGUMENT);
        rank_check(rank, says("more than memory has", NULL));
        rank_check(rank,
                   fp8_comm_reduce_scatter(rank->comm, &sum, 1, "w", NULL) == FP8_ERR_ARGUMENT);
        rank_check(rank, says("more than memory has", NULL));
    }
}

static void test_refused(void **state)
{
    (void)state;
    ranks_run(2, 20, refuse_body, NULL);
    ranks_run(3, 20, overlap_body, NULL);
    ranks_run(1, 20, huge_body, NULL);
    ranks_run(2, 20, huge_body, NULL);
}

static void max_body(struct rank *rank)
{
    float values[7];
    for (int i = 0; i < 7; i++)
        values[i] = i == 6 ? -1.0f : (float)((rank->rank * 5 + i * 3) % 11);
    if (rank->rank == 1)
        values[2] = NAN;
    rank_check(rank, fp8_comm_all_reduce_max(rank->comm, values, 7, "amax", NULL) == FP8_OK);
    for (int i = 0; i < 6; i++) {
        float most = -1;
        for (int r = 0; r < rank->ranks; r++) {
            float value = (float)((r * 5 + i * 3) % 11);
            if (!(r == 1 && i == 2) && value > most)
                most = value;
        }
        rank_check(rank, values[i] == most);
    }
    rank_check(rank, values[6] == -1.0f);
}

static void test_max(void **state)
{
    (void)state;
    for (int32_t ranks = 1; ranks < 10; ranks += 2)
        ranks_run(ranks, 20, max_body, NULL);
}

static void agree_body(struct rank *rank)
{
    rank_check(rank, fp8_comm_agree(rank->comm, "the spec", "abc") == FP8_OK);
    fp8_status status = fp8_comm_agree(rank->comm, "the spec", rank->rank == 2 ? "xyz" : "abc");
    rank_check(rank, status == FP8_ERR_COMM);
    rank_check(rank, says("differ in the spec", "rank 0 has abc", "rank 2 has xyz", NULL));
}

static void test_agree(void **state)
{
    (void)state;
    ranks_run(4, 20, agree_body, NULL);
}

/* ---- wrong ---- */

static void skip_body(struct rank *rank)
{
    float values[2] = { 1, 2 };
    unsigned char bytes[64] = { 0 };
    const fp8_gather_part part = { bytes, bytes + 8, 4 };
    rank_check(rank, fp8_comm_all_gather(rank->comm, &part, 1, "w of layer 'a'", NULL) == FP8_OK);
    if (rank->rank == 1) { /* leaves the layer out */
        rank_check(rank,
                   fp8_comm_all_reduce_max(rank->comm, values, 2, "amax", NULL) == FP8_ERR_COMM);
        rank_check(rank, says("rank 1 all_reduce_max of amax", "layer 'b'", NULL));
    } else {
        rank_check(rank, fp8_comm_all_gather(rank->comm, &part, 1, "w of layer 'b'", NULL) ==
                             FP8_ERR_COMM);
        rank_check(rank, says("rank 0 all_gather of w of layer 'b' (4 bytes", "rank 1", NULL));
    }
    rank_check(rank, fp8_comm_poll(rank->comm) == FP8_ERR_COMM);
    rank_check(rank, fp8_comm_all_gather(rank->comm, &part, 1, "w", NULL) == FP8_ERR_COMM);
}

static void test_another_order(void **state)
{
    (void)state;
    ranks_run(4, 20, skip_body, NULL);
}

static void other_shape_body(struct rank *rank)
{
    unsigned char bytes[64] = { 0 };
    const fp8_gather_part part = { bytes, bytes + 8, rank->rank == 2 ? 8 : 4 };
    rank_check(rank, fp8_comm_all_gather(rank->comm, &part, 1, "w", NULL) == FP8_ERR_COMM);
    rank_check(rank, says("rank 0 all_gather of w (4 bytes a rank)", "rank 2", "8 bytes", NULL));
}

static void test_another_shape(void **state)
{
    (void)state;
    ranks_run(3, 20, other_shape_body, NULL);
}

static void late_body(struct rank *rank)
{
    float value = 1;
    if (rank->rank == 1) { /* does not come, and does not end before the others have given up */
        while (fp8_comm_poll(rank->comm) == FP8_OK)
            ;
        rank_check(rank, says("waited 0.2 s for rank 1", NULL));
        return;
    }
    fp8_status status = fp8_comm_all_reduce_max(rank->comm, &value, 1, "amax of all layers", NULL);
    rank_check(rank, status == FP8_ERR_TIMEOUT);
    rank_check(rank, says("'test'", "all_reduce_max of amax of all layers", "for rank 1", NULL));
}

static void test_late(void **state)
{
    (void)state;
    ranks_run(3, 0.2, late_body, NULL);
}

static void leave_body(struct rank *rank)
{
    float value = 1;
    if (rank->rank == 0)
        return;
    rank_check(rank, fp8_comm_all_reduce_max(rank->comm, &value, 1, "amax", NULL) == FP8_ERR_COMM);
    rank_check(rank, says("rank 0", "left", NULL));
}

static void abort_body(struct rank *rank)
{
    float value = 1;
    if (rank->rank == 2)
        fp8_comm_abort(rank->comm, "no memory for layer 'c'");
    fp8_status status = fp8_comm_all_reduce_max(rank->comm, &value, 1, "amax", NULL);
    rank_check(rank, status == FP8_ERR_COMM);
    rank_check(rank, says("rank 2", "no memory for layer 'c'", NULL));
}

static void test_leaving_and_aborting(void **state)
{
    (void)state;
    for (int i = 0; i < 20; i++) {
        ranks_run(4, 20, leave_body, NULL);
        ranks_run(4, 20, abort_body, NULL);
    }
}

/* After a failure the next run starts clean. */
static void test_after_failure(void **state)
{
    (void)state;
    ranks_run(4, 20, abort_body, NULL);
    ranks_run(4, 20, max_body, NULL);
}

static void test_arguments(void **state)
{
    (void)state;
    fp8_comm_group *group = NULL;
    assert_int_equal(fp8_comm_group_create(0, 1, &group), FP8_ERR_ARGUMENT);
    assert_int_equal(fp8_comm_group_create(2, -1, &group), FP8_ERR_ARGUMENT);
    assert_int_equal(fp8_comm_group_create(2, NAN, &group), FP8_ERR_ARGUMENT);
    fp8_context_options host = FP8_CONTEXT_OPTIONS_INIT;
    fp8_context *context = NULL;
    fp8_comm *comm = NULL;
    host.device = FP8_DEVICE_HOST;
    assert_int_equal(fp8_context_create(&host, &context), FP8_OK);
    fp8_comm_options options = FP8_COMM_OPTIONS_INIT;
    options.ranks = 2;
    options.file = "/nowhere/at/all";
    assert_int_equal(fp8_comm_create(context, &options, &comm), FP8_ERR_UNSUPPORTED);
    assert_true(says("host", "fp8_comm_join", NULL));
    options.file = NULL;
    assert_int_equal(fp8_comm_create(context, &options, &comm), FP8_ERR_ARGUMENT);
    options.ranks = 1;
    options.rank = 1;
    assert_int_equal(fp8_comm_create(context, &options, &comm), FP8_ERR_ARGUMENT);
    options.rank = 0;
    assert_int_equal(fp8_comm_create(context, &options, &comm), FP8_OK);
    fp8_comm_info info = { .size = sizeof info };
    assert_int_equal(fp8_comm_describe(comm, &info), FP8_OK);
    assert_string_equal(info.transport, "local");
    assert_string_equal(info.name, "fsdp");
    assert_int_equal(info.ranks, 1);
    fp8_comm_destroy(comm);
    assert_int_equal(fp8_comm_group_create(2, 0.1, &group), FP8_OK);
    assert_int_equal(fp8_comm_join(group, context, 2, NULL, &comm), FP8_ERR_ARGUMENT);
    assert_int_equal(fp8_comm_join(group, context, 0, NULL, &comm), FP8_ERR_TIMEOUT);
    assert_true(says("for rank 1", NULL));
    fp8_comm_group_destroy(group);
    fp8_context_destroy(context);
}

static void test_no_memory(void **state)
{
    (void)state;
    fp8_context_options host = FP8_CONTEXT_OPTIONS_INIT;
    fp8_context *context = NULL;
    host.device = FP8_DEVICE_HOST;
    host.threads = 1;
    assert_int_equal(fp8_context_create(&host, &context), FP8_OK);
    fp8_comm_options options = FP8_COMM_OPTIONS_INIT;
    int failures = 0;
    for (int n = 1; n < 20; n++) {
        fp8_comm *comm = NULL;
        (void)fp8_allocation_fail_at(n);
        fp8_status status = fp8_comm_create(context, &options, &comm);
        if (status == FP8_OK)
            status = fp8_comm_agree(comm, "the spec", "abc");
        (void)fp8_allocation_fail_at(0);
        assert_true(status == FP8_OK || status == FP8_ERR_MEMORY);
        failures += status == FP8_ERR_MEMORY;
        fp8_comm_destroy(comm);
    }
    assert_true(failures >= 4);
    fp8_context_destroy(context);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_gather),
        cmocka_unit_test(test_exchange),
        cmocka_unit_test(test_reduce_scatter),
        cmocka_unit_test(test_refused),
        cmocka_unit_test(test_max),
        cmocka_unit_test(test_agree),
        cmocka_unit_test(test_another_order),
        cmocka_unit_test(test_another_shape),
        cmocka_unit_test(test_late),
        cmocka_unit_test(test_leaving_and_aborting),
        cmocka_unit_test(test_after_failure),
        cmocka_unit_test(test_arguments),
        cmocka_unit_test(test_no_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
