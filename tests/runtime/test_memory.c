/*
 * test_memory.c - no allocation after create.
 *
 * Two counts: the runtime's own allocations (check.h), on both backends; and on the host every
 * allocation of the process, by taking malloc's place. The driver and cuBLASLt may allocate as they
 * like, so on a GPU the second is printed only. Sanitizers have taken malloc's place already; under
 * them the first count stands.
 */
#include <stdatomic.h>

#include "runtime/check.h"
#include "tests/runtime/rig.h"

#if defined(__GLIBC__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define COUNTS_MALLOC 1

void *__libc_malloc(size_t bytes);
void *__libc_calloc(size_t count, size_t bytes);
void *__libc_realloc(void *memory, size_t bytes);
void *__libc_memalign(size_t align, size_t bytes);

static atomic_llong allocations;

void *malloc(size_t bytes)
{
    atomic_fetch_add_explicit(&allocations, 1, memory_order_relaxed);
    return __libc_malloc(bytes);
}

void *calloc(size_t count, size_t bytes)
{
    atomic_fetch_add_explicit(&allocations, 1, memory_order_relaxed);
    return __libc_calloc(count, bytes);
}

void *realloc(void *memory, size_t bytes)
{
    atomic_fetch_add_explicit(&allocations, 1, memory_order_relaxed);
    return __libc_realloc(memory, bytes);
}

void *aligned_alloc(size_t align, size_t bytes)
{
    atomic_fetch_add_explicit(&allocations, 1, memory_order_relaxed);
    return __libc_memalign(align, bytes);
}

void *memalign(size_t align, size_t bytes);
void *memalign(size_t align, size_t bytes)
{
    atomic_fetch_add_explicit(&allocations, 1, memory_order_relaxed);
    return __libc_memalign(align, bytes);
}

int posix_memalign(void **memory, size_t align, size_t bytes)
{
    atomic_fetch_add_explicit(&allocations, 1, memory_order_relaxed);
    *memory = __libc_memalign(align, bytes);
    return *memory == NULL;
}

static long long count_allocations(void)
{
    return atomic_load(&allocations);
}
#else
static long long count_allocations(void)
{
    return 0;
}
#endif

static void one_round(struct rig_case *c)
{
    c->version++;
    rig_case_weight(c);
    rig_case_fprop(c);
    rig_case_backward(c);
    size_t bytes;
    RIG_OK(fp8_layer_bytes(c->layer->handle, c->tokens, FP8_BYTES_WORKSPACE, &bytes));
    fp8_dispatch dispatch = FP8_DISPATCH_INIT;
    RIG_OK(fp8_layer_dispatch(c->layer->handle, FP8_PASS_FPROP, c->tokens, &dispatch));
}

/* Odd shapes, so that stages are used, and every range of tokens. */
static void passes_allocate_nothing(void **state)
{
    (void)state;
    static const int64_t tokens[] = { 1, 17, 65, 257, 1025, 0, 500 };
    enum { COUNT = sizeof tokens / sizeof tokens[0] };
    struct rig_spec spec = {
        .out_features = 131, .in_features = 77, .max_tokens = 1025, .bias = true
    };
    struct rig_layers layers;
    struct rig_case c[COUNT];
    rig_layers_open(&layers, &spec, 1);
    for (int i = 0; i < COUNT; i++) {
        rig_case_init(&c[i], &layers.layer[0], tokens[i], (uint64_t)i);
        c[i].one_backward = i % 2;
        rig_case_make(&c[i]);
        rig_case_push(&c[i]);
    }
#ifdef COUNTS_MALLOC
    long long probe = count_allocations();
    void *volatile block = malloc(1);
    free(block);
    assert_true(count_allocations() == probe + 1); /* the counter counts */
#endif
    (void)fp8_allocation_fail_at(0);
    long long before = count_allocations();
    for (int i = 0; i < COUNT; i++)
        one_round(&c[i]);
    long long all = count_allocations() - before;
    int64_t own = fp8_allocation_fail_at(0);
    RIG_OK(fp8_stream_synchronize(rig.context, rig.stream));
    print_message(
        "allocations in %d rounds of all passes: %lld of the runtime, %lld in the process\n", COUNT,
        (long long)own, all);
    assert_int_equal(own, 0);
    if (!rig.cuda)
        assert_int_equal(all, 0);
    for (int i = 0; i < COUNT; i++) {
        rig_case_check(&c[i]);
        rig_case_free(&c[i]);
    }
    rig_layers_close(&layers);
}

/* An allocation that fails while objects are made gives FP8_ERR_MEMORY, NULL, and nothing left
 * over. */
static void failed_allocations_are_errors(void **state)
{
    (void)state;
    struct rig_spec spec = { .out_features = 8, .in_features = 8, .bias = true };
    struct rig_layers layers;
    rig_layers_open(&layers, &spec, 1);
    int refusals = 0;
    for (int64_t n = 1; n < 1000; n++) {
        fp8_layer *layer = NULL;
        (void)fp8_allocation_fail_at(n);
        fp8_status status = fp8_layer_create(layers.bundle, "l0", &layer);
        (void)fp8_allocation_fail_at(0);
        if (status == FP8_OK) {
            fp8_layer_destroy(layer);
            break;
        }
        assert_int_equal(status, FP8_ERR_MEMORY);
        assert_null(layer);
        refusals++;
    }
    assert_true(refusals >= 1 && refusals < 900);
    rig_case_all(&layers.layer[0], 9, 1, 0xFF);
    rig_layers_close(&layers);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(passes_allocate_nothing),
        cmocka_unit_test(failed_allocations_are_errors),
    };
    return RIG_RUN(tests);
}
