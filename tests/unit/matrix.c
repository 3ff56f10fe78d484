/*
 * matrix.c - see matrix.h.
 */
#include "tests/unit/matrix.h"

#include <math.h>

#include "runtime/fp8_format.h"

enum { GUARD = 256 };

uint64_t random_state = 1;

uint32_t random_bits(void)
{
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(random_state >> 33);
}

int64_t random_below(int64_t limit)
{
    return (int64_t)(random_bits() % (uint32_t)limit);
}

/* Zero-mean, of mixed sizes. */
float random_value(void)
{
    float unit = (float)random_bits() / 1073741824.0f - 1.0f;
    return ldexpf(unit, (int)random_below(9) - 4);
}

struct matrix make(fp8_dtype dtype, int64_t rows, int64_t cols, int64_t ld, int64_t offset)
{
    size_t element = fp8_dtype_bytes(dtype);
    struct matrix m = { .dtype = dtype, .rows = rows, .cols = cols, .ld = ld };
    m.bytes = rows == 0 ? 0 : (size_t)((rows - 1) * ld + cols) * element;
    size_t total = m.bytes + 2 * GUARD + (size_t)offset * element;
    m.block = malloc(total);
    assert_non_null(m.block);
    memset(m.block, 0xFF, total);
    m.data = m.block + GUARD + (size_t)offset * element;
    return m;
}

/* Guards and the gaps between rows are whole. */
static void check_guards(const struct matrix *m)
{
    size_t element = fp8_dtype_bytes(m->dtype);
    for (const unsigned char *p = m->block; p < m->data; p++)
        assert_int_equal(*p, 0xFF);
    for (int i = 0; i < GUARD; i++)
        assert_int_equal(m->data[m->bytes + (size_t)i], 0xFF);
    for (int64_t i = 0; i + 1 < m->rows; i++) {
        const unsigned char *gap = m->data + (size_t)(i * m->ld + m->cols) * element;
        for (size_t j = 0; j < (size_t)(m->ld - m->cols) * element; j++)
            assert_int_equal(gap[j], 0xFF);
    }
}

void drop(struct matrix *m)
{
    check_guards(m);
    free(m->block);
}

float get(const struct matrix *m, int64_t i, int64_t j)
{
    size_t at = (size_t)(i * m->ld + j);
    if (m->dtype == FP8_DTYPE_FP32)
        return ((const float *)m->data)[at];
    uint16_t half = ((const uint16_t *)m->data)[at];
    return m->dtype == FP8_DTYPE_FP16 ? fp8_fp16_to_float(half) : fp8_bf16_to_float(half);
}

void put(struct matrix *m, int64_t i, int64_t j, float value)
{
    size_t at = (size_t)(i * m->ld + j);
    if (m->dtype == FP8_DTYPE_FP32)
        ((float *)m->data)[at] = value;
    else
        ((uint16_t *)m->data)[at] =
            m->dtype == FP8_DTYPE_FP16 ? fp8_float_to_fp16(value) : fp8_float_to_bf16(value);
}

struct matrix make_random(fp8_dtype dtype, int64_t rows, int64_t cols)
{
    struct matrix m =
        make(dtype, rows, cols, cols + random_below(3) * random_below(20), random_below(9));
    for (int64_t i = 0; i < rows; i++) {
        for (int64_t j = 0; j < cols; j++)
            put(&m, i, j, random_value());
    }
    return m;
}

void put_source(fp8_value *args, const struct matrix *m)
{
    args[0].p = m->data;
    args[1].i = m->ld;
    args[2].i = m->rows;
    args[3].i = m->cols;
}

void put_copy(fp8_value *args, const struct matrix *copy)
{
    args[0].p = copy->data;
    args[1].i = copy->ld;
    args[2].i = copy->rows;
}
