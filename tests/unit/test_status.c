/*
 * test_status.c - the status table, the thread's sentence, dtypes, operand arithmetic, the
 * allocator's hook.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <pthread.h>

#include "runtime/check.h"
#include "runtime/internal.h"

static void every_status_has_its_words(void **state)
{
    (void)state;
#define X(name, value, word, remedy)                                                               \
    assert_int_equal(name, value);                                                                 \
    assert_string_equal(fp8_status_name(name), word);                                              \
    assert_string_equal(fp8_status_remedy(name), remedy);                                          \
    assert_true(strlen(remedy) > 10);
    FP8_STATUS_MAP(X)
#undef X
    assert_string_equal(fp8_status_name((fp8_status)77), "unknown");
    assert_non_null(fp8_status_remedy((fp8_status)-1));
    assert_string_equal(fp8_version(), FP8_VERSION_STRING);
}

static void *other_thread(void *seen)
{
    *(int *)seen = fp8_last_error()[0] == '\0';
    (void)fp8_fail(FP8_ERR_SHAPE, "of the other thread");
    return NULL;
}

static void the_sentence_is_of_this_thread(void **state)
{
    (void)state;
    int was_empty = 0;
    pthread_t thread;
    assert_int_equal(fp8_fail(FP8_ERR_DTYPE, "x is %d", 7), FP8_ERR_DTYPE);
    assert_int_equal(pthread_create(&thread, NULL, other_thread, &was_empty), 0);
    pthread_join(thread, NULL);
    assert_true(was_empty);
    assert_string_equal(fp8_last_error(), "x is 7");
    char longer[4000];
    memset(longer, 'a', sizeof longer);
    longer[sizeof longer - 1] = '\0';
    (void)fp8_fail(FP8_ERR_DTYPE, "%s", longer);
    assert_true(strlen(fp8_last_error()) < sizeof longer);
}

static void dtypes(void **state)
{
    (void)state;
    static const size_t bytes[] = { 0, 1, 1, 2, 4, 4, 1, 2, 0 };
    static const char *const names[] = { "none",   "e4m3",  "e5m2", "bf16", "fp32",
                                         "uint32", "uint8", "fp16", "none" };
    for (int i = 0; i < 9; i++) {
        assert_int_equal(fp8_dtype_bytes((fp8_dtype)i), bytes[i]);
        assert_string_equal(fp8_dtype_name((fp8_dtype)i), names[i]);
    }
    assert_string_equal(fp8_pass_name(FP8_PASS_QUANTIZE_DY), "quantize_dy");
    assert_string_equal(fp8_pass_name((fp8_pass)5), "unknown");
    assert_string_equal(fp8_pass_name((fp8_pass)-1), "unknown");
}

static void operands_are_laid_out_as_documented(void **state)
{
    (void)state;
    static const int64_t sizes[] = { 0, 1, 15, 16, 17, 127, 128, 129, 1000, 65536 };
    static _Alignas(256) unsigned char base[256];
    const int count = sizeof sizes / sizeof sizes[0];
    for (int i = 0; i < count * count * 4; i++) {
        int64_t rows = sizes[i % count], cols = sizes[i / count % count];
        uint32_t copies = (uint32_t)(i / count / count);
        int64_t row = (rows + 15) / 16 * 16 * ((cols + 127) / 128 * 128);
        int64_t transposed = (cols + 15) / 16 * 16 * ((rows + 127) / 128 * 128);
        int64_t bytes = 256 + (copies & FP8_COPY_ROW ? (row + 255) / 256 * 256 : 0);
        fp8_operand operand = FP8_OPERAND_INIT;
        operand.role = FP8_ROLE_X;
        operand.data = base;
        operand.copies = copies;
        operand.rows = rows;
        operand.cols = cols;
        operand.bytes = (size_t)(bytes + (copies & FP8_COPY_TRANSPOSED ? transposed : 0)) + 255;
        fp8_operand_view view;
        assert_int_equal(fp8_operand_parts(&operand, &view), FP8_OK);
        assert_ptr_equal(view.scales, base);
        assert_int_equal(view.row_ld, (cols + 127) / 128 * 128);
        assert_int_equal(view.transposed_ld, (rows + 127) / 128 * 128);
        uintptr_t at = (uintptr_t)base;
        assert_int_equal((uintptr_t)view.row, copies & FP8_COPY_ROW ? at + 256 : 0);
        assert_int_equal((uintptr_t)view.transposed,
                         copies & FP8_COPY_TRANSPOSED ? at + (uintptr_t)bytes : 0);
        operand.bytes = 255;
        assert_int_equal(fp8_operand_parts(&operand, &view), FP8_ERR_OPERAND);
        assert_null(view.scales);
    }
    static const struct fp8_shape beyond[] = {
        { (int64_t)1 << 61, 1 << 30, FP8_COPY_BOTH, { FP8_SCALING_TENSOR, FP8_SCALING_TENSOR } },
        { (int64_t)1 << 61, 1 << 30, FP8_COPY_BOTH, { FP8_SCALING_BLOCK, FP8_SCALING_BLOCK } },
        { INT64_MAX, 1, FP8_COPY_ROW, { FP8_SCALING_TENSOR, FP8_SCALING_TENSOR } },
        { -1, 1, FP8_COPY_ROW, { FP8_SCALING_ROW, FP8_SCALING_ROW } },
    };
    for (size_t i = 0; i < sizeof beyond / sizeof beyond[0]; i++)
        assert_int_equal(fp8_operand_bytes(&beyond[i]), -1);
}

static void operands_that_hold_nothing_have_no_parts(void **state)
{
    (void)state;
    fp8_operand operand = FP8_OPERAND_INIT;
    fp8_operand_view view;
    assert_int_equal(fp8_operand_parts(&operand, &view), FP8_ERR_OPERAND);
    assert_int_equal(fp8_operand_parts(NULL, &view), FP8_ERR_ARGUMENT);
    assert_int_equal(fp8_operand_parts(&operand, NULL), FP8_ERR_ARGUMENT);
    static _Alignas(256) unsigned char base[256];
    operand = (fp8_operand)FP8_OPERAND_INIT;
    operand.role = FP8_ROLE_W, operand.data = base, operand.bytes = sizeof base;
    assert_int_equal(fp8_operand_parts(&operand, &view), FP8_OK);
    operand.copies = 0xf0; /* bits that mean nothing */
    assert_int_equal(fp8_operand_parts(&operand, &view), FP8_ERR_OPERAND);
    assert_non_null(strstr(fp8_last_error(), "copies is 240"));
    operand.copies = 0, operand.reserved[1] = 1;
    assert_int_equal(fp8_operand_parts(&operand, &view), FP8_ERR_ARGUMENT);
    operand.size = 8;
    assert_int_equal(fp8_operand_parts(&operand, &view), FP8_ERR_ARGUMENT);
}

static void a_chosen_allocation_fails(void **state)
{
    (void)state;
    (void)fp8_allocation_fail_at(2);
    void *first = fp8_allocate(8), *second = fp8_allocate(8), *third = fp8_allocate_aligned(256, 8);
    assert_non_null(first);
    assert_null(second);
    assert_non_null(third);
    assert_int_equal((uintptr_t)third % 256, 0);
    assert_int_equal(fp8_allocation_fail_at(0), 3);
    fp8_release(first);
    fp8_release(third);
}

static void dims_round_and_stop(void **state)
{
    (void)state;
    const struct fp8_dim dim = { .of_tokens = true, .div = 128, .pad = 4, .max = 10 };
    assert_int_equal(fp8_dim_at(&dim, 0), 0);
    assert_int_equal(fp8_dim_at(&dim, 1), 4);
    assert_int_equal(fp8_dim_at(&dim, 513), 8);
    assert_int_equal(fp8_dim_at(&dim, 100000), 10);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_status_has_its_words),
        cmocka_unit_test(the_sentence_is_of_this_thread),
        cmocka_unit_test(dtypes),
        cmocka_unit_test(operands_are_laid_out_as_documented),
        cmocka_unit_test(operands_that_hold_nothing_have_no_parts),
        cmocka_unit_test(a_chosen_allocation_fails),
        cmocka_unit_test(dims_round_and_stop),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
