/*
 * test_parallel.c - the thread pool: every index once, nested loops, loops from many threads at
 * once.
 */
#include <fenv.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "runtime/parallel.h"

enum { ITEMS = 1000 };

struct marks {
    atomic_int count[ITEMS];
    struct fp8_pool *pool;
};

static void mark(void *user, int64_t index)
{
    struct marks *marks = user;
    atomic_fetch_add(&marks->count[index], 1);
}

static void check_marks(struct marks *marks, int64_t items, int times)
{
    for (int64_t i = 0; i < ITEMS; i++)
        assert_int_equal(atomic_load(&marks->count[i]), i < items ? times : 0);
}

static void runs_every_index_once(void **state)
{
    (void)state;
    static const int threads[] = { 1, 2, 3, 8 };
    static const int64_t items[] = { 0, 1, 2, 7, 8, 9, ITEMS };
    for (size_t t = 0; t < sizeof threads / sizeof threads[0]; t++) {
        struct fp8_pool *pool;
        assert_int_equal(fp8_pool_create(threads[t], &pool), FP8_OK);
        assert_int_equal(fp8_pool_threads(pool), threads[t]);
        for (size_t i = 0; i < sizeof items / sizeof items[0]; i++) {
            for (int repeat = 0; repeat < 50; repeat++) {
                struct marks marks = { .pool = pool };
                fp8_pool_run(pool, items[i], mark, &marks);
                check_marks(&marks, items[i], 1);
            }
        }
        fp8_pool_destroy(pool);
    }
}

static void needs_no_pool(void **state)
{
    (void)state;
    struct marks marks = { .pool = NULL };
    fp8_pool_run(NULL, ITEMS, mark, &marks);
    check_marks(&marks, ITEMS, 1);
    assert_int_equal(fp8_pool_threads(NULL), 1);
    fp8_pool_destroy(NULL);
}

static void refuses_a_wrong_count(void **state)
{
    (void)state;
    struct fp8_pool *pool = (struct fp8_pool *)&pool;
    assert_int_equal(fp8_pool_create(-1, &pool), FP8_ERR_ARGUMENT);
    assert_null(pool);
    assert_int_equal(fp8_pool_create(0, &pool), FP8_OK);
    assert_true(fp8_pool_threads(pool) >= 1);
    fp8_pool_destroy(pool);
}

static void nest(void *user, int64_t index)
{
    (void)index;
    struct marks *marks = user;
    fp8_pool_run(marks->pool, ITEMS, mark, marks);
}

static void nested_loops_run_inline(void **state)
{
    (void)state;
    struct marks marks = { .pool = NULL };
    assert_int_equal(fp8_pool_create(4, &marks.pool), FP8_OK);
    fp8_pool_run(marks.pool, 20, nest, &marks);
    check_marks(&marks, ITEMS, 20);
    fp8_pool_destroy(marks.pool);
}

static void *run_many(void *user)
{
    struct fp8_pool *pool = user;
    for (int repeat = 0; repeat < 200; repeat++) {
        struct marks marks = { .pool = pool };
        fp8_pool_run(pool, ITEMS, mark, &marks);
        for (int i = 0; i < ITEMS; i++) {
            if (atomic_load(&marks.count[i]) != 1)
                return user;
        }
    }
    return NULL;
}

static void serves_many_threads_at_once(void **state)
{
    (void)state;
    struct fp8_pool *pool;
    pthread_t callers[8];
    assert_int_equal(fp8_pool_create(4, &pool), FP8_OK);
    for (int i = 0; i < 8; i++)
        assert_int_equal(pthread_create(&callers[i], NULL, run_many, pool), 0);
    for (int i = 0; i < 8; i++) {
        void *bad;
        pthread_join(callers[i], &bad);
        assert_null(bad);
    }
    fp8_pool_destroy(pool);
}

struct rounding {
    pthread_t caller;
    atomic_int wrong;
};

static void see_rounding(void *user, int64_t index)
{
    (void)index;
    struct rounding *seen = user;
    if (!pthread_equal(seen->caller, pthread_self()) && fegetround() != FE_TONEAREST)
        atomic_fetch_add(&seen->wrong, 1);
}

/* Threads inherit their creator's mode. */
static void workers_round_to_nearest(void **state)
{
    (void)state;
    struct fp8_pool *pool;
    struct rounding seen = { .caller = pthread_self() };
    fesetround(FE_UPWARD);
    assert_int_equal(fp8_pool_create(4, &pool), FP8_OK);
    for (int i = 0; i < 20; i++)
        fp8_pool_run(pool, ITEMS, see_rounding, &seen);
    assert_int_equal(fegetround(), FE_UPWARD);
    fesetround(FE_TONEAREST);
    assert_int_equal(atomic_load(&seen.wrong), 0);
    fp8_pool_destroy(pool);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(runs_every_index_once),       cmocka_unit_test(needs_no_pool),
        cmocka_unit_test(refuses_a_wrong_count),       cmocka_unit_test(nested_loops_run_inline),
        cmocka_unit_test(serves_many_threads_at_once), cmocka_unit_test(workers_round_to_nearest),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
