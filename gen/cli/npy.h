/*
 * npy.h - arrays in NumPy's file format.
 */
#ifndef FP8GEN_CLI_NPY_H
#define FP8GEN_CLI_NPY_H

#include "gen/cli/cli.h"

/* Writes rows x cols elements (row-major, ld elements from row to row) as `path`. bf16 has no type
 * in NumPy and is written as uint16, FP8 as uint8: the bytes as they are. */
int cli_npy_write(const char *path, const void *data, fp8_dtype dtype, int64_t rows, int64_t cols,
                  int64_t ld);
/* "<f4", "<u2", "|u1", ...: the dtype in the file. */
const char *cli_npy_dtype(fp8_dtype dtype);

#endif
