/*
 * matrix.h - exact matrices between guard bytes, for tests of the host backend's ops.
 *
 * All bytes start as 0xFF: guards, the gaps between rows and the elements. Random numbers come from
 * random_state, which a test sets first, so a failing round can be repeated.
 */
#ifndef TESTS_UNIT_MATRIX_H
#define TESTS_UNIT_MATRIX_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "runtime/fp8.h"
#include "runtime/ops.h"

extern uint64_t random_state;
uint32_t random_bits(void);
int64_t random_below(int64_t limit);
float random_value(void); /* zero-mean, of mixed sizes */

struct matrix {
    fp8_dtype dtype;
    int64_t rows, cols, ld;
    unsigned char *block, *data;
    size_t bytes; /* from data to the end of the last row */
};

/* offset: elements by which data is shifted from malloc's alignment. */
struct matrix make(fp8_dtype dtype, int64_t rows, int64_t cols, int64_t ld, int64_t offset);
struct matrix make_random(fp8_dtype dtype, int64_t rows, int64_t cols);
/* Checks the guards and the gaps between rows, and frees. */
void drop(struct matrix *m);
float get(const struct matrix *m, int64_t i, int64_t j);
void put(struct matrix *m, int64_t i, int64_t j, float value);

/* A tensor, and a copy with its padded rows, as arguments of an op: FP8_<OP>_source .. cols, row ..
 * row_rows and so on stand in the same order in every op. */
void put_source(fp8_value *args, const struct matrix *m);
void put_copy(fp8_value *args, const struct matrix *copy);

static inline int64_t round_up(int64_t value, int64_t to)
{
    return (value + to - 1) / to * to;
}

#endif
