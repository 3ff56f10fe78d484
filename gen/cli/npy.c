/*
 * npy.c - arrays in NumPy's file format, version 1.0.
 *
 * The format: magic, two version bytes, a header length in little-endian uint16, a Python dict as
 * text padded with spaces to a multiple of 64 bytes, then the elements. Pads between rows are left
 * out. The caller writes into a temporary folder, so a file that could not be finished is never
 * seen.
 */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "gen/cli/npy.h"

const char *cli_npy_dtype(fp8_dtype dtype)
{
    switch (dtype) {
    case FP8_DTYPE_BF16:
        return "<u2";
    case FP8_DTYPE_FP16:
        return "<f2";
    case FP8_DTYPE_FP32:
        return "<f4";
    case FP8_DTYPE_UINT32:
        return "<u4";
    default:
        return "|u1";
    }
}

static bool write_header(FILE *file, fp8_dtype dtype, int64_t rows, int64_t cols)
{
    char text[128];
    unsigned char start[10] = { 0x93, 'N', 'U', 'M', 'P', 'Y', 1, 0, 0, 0 };
    int length =
        snprintf(text, sizeof text,
                 "{'descr': '%s', 'fortran_order': False, 'shape': (%" PRId64 ", %" PRId64 "), }",
                 cli_npy_dtype(dtype), rows, cols);
    if (length < 0 || length >= (int)sizeof text - 1)
        return false;
    int padded = (10 + length + 1 + 63) / 64 * 64 - 10;
    start[8] = (unsigned char)(padded & 255);
    start[9] = (unsigned char)(padded >> 8);
    return fwrite(start, 1, sizeof start, file) == sizeof start &&
           fprintf(file, "%-*s\n", padded - 1, text) == padded;
}

int cli_npy_write(const char *path, const void *data, fp8_dtype dtype, int64_t rows, int64_t cols,
                  int64_t ld)
{
    size_t element = fp8_dtype_bytes(dtype), row_bytes = element * (size_t)cols;
    FILE *file = fopen(path, "wb");
    bool good = file && write_header(file, dtype, rows, cols);
    if (good && ld == cols)
        good = fwrite(data, row_bytes, (size_t)rows, file) == (row_bytes ? (size_t)rows : 0);
    for (int64_t i = 0; good && ld != cols && i < rows; i++) {
        const char *row = (const char *)data + (size_t)(i * ld) * element;
        good = fwrite(row, 1, row_bytes, file) == row_bytes;
    }
    int reason = errno;
    if (file && fclose(file) != 0 && good) {
        good = false;
        reason = errno;
    }
    if (good)
        return CLI_DONE;
    cli_error("cannot write '%s': %s", path, strerror(reason));
    return CLI_MACHINE;
}
