#!/usr/bin/env python3
"""Writes tests/oracle/op_tables.h: what numpy and ml_dtypes make of whole matrices, by every
granularity.

The header is committed; tests/unit/test_host_tables.c runs the host backend's ops on the same
matrices and compares CRC-32 (zlib) of every output buffer, padding and all. `make_op_tables.py
--check` compares the committed header with a fresh one. Matrices are pure functions of kind, row
and column, written down in both languages. The rules of scales and casts are written here from
NUMERICS section 2, on arrays, sharing nothing with the C code but make_tables.py's cast of a
vector.
"""
import pathlib
import sys

import numpy as np

from make_tables import FORMATS, cast, crc, floats, scale_of

SHAPES = [(1, 1), (7, 5), (33, 130), (130, 257), (300, 129), (128, 128), (257, 384)]
# wild: any bits; level: a few binades, lopsided; tiny: near and below the smallest normal numbers;
# holes: rows and columns of zeros of both signs, a few inf and NaN; all: every bf16 in order
KINDS = ["WILD", "LEVEL", "TINY", "HOLES", "ALL"]


def hashed(rows, cols):
    index = np.arange(rows * cols, dtype=np.uint32).reshape(rows, cols)
    with np.errstate(over="ignore"):
        h = (index + np.uint32(1)) * np.uint32(2654435761)
        h ^= h >> np.uint32(15)
        h *= np.uint32(2246822519)
        h ^= h >> np.uint32(13)
    return h


def matrix(kind, rows, cols, bf16):
    """float32 bits; of bf16 only the upper halves are used."""
    h = hashed(rows, cols)
    i = np.arange(rows, dtype=np.uint32)[:, None]
    j = np.arange(cols, dtype=np.uint32)[None, :]
    keep = h & np.uint32(0x807FFFFF)
    if kind == "WILD":
        bits = h
    elif kind == "TINY":
        bits = keep | ((h >> np.uint32(23)) % np.uint32(14)) << np.uint32(23)
    elif kind == "ALL":
        bits = (i * np.uint32(cols) + j) << np.uint32(16)
    else:
        exponent = np.uint32(118) + ((h >> np.uint32(23)) & np.uint32(7))
        exponent = exponent + i % np.uint32(5) - j % np.uint32(3)
        bits = keep | exponent << np.uint32(23)
        if kind == "HOLES":
            zero = (i % 3 == 0) & (i < 60) | (j % 5 == 0)
            bits = np.where(zero, bits & np.uint32(0x80000000), bits)
            infinite = np.uint32(0x7F800000) | (i % 2) << np.uint32(31)
            bits = np.where((i % 7 == 3) & (i == j), infinite, bits)
            bits = np.where((i % 11 == 4) & (i + 1 == j), np.uint32(0xFFC00000), bits)
    bits = np.broadcast_to(bits, (rows, cols)).astype(np.uint32)
    return bits & np.uint32(0xFFFF0000) if bf16 else bits


def amax_of(x, axis):
    return np.where(np.isfinite(x), np.abs(x), np.float32(0)).max(axis=axis, keepdims=True)


def padded(array, rows, cols):
    out = np.zeros((rows, cols), array.dtype)
    out[: array.shape[0], : array.shape[1]] = array
    return out


def up(value, to):
    return -(-value // to) * to


def codes_of(fmt, x, scale):
    scale = np.broadcast_to(scale, x.shape)
    out = np.empty(x.shape, np.uint8)
    for value in np.unique(scale):
        where = scale == value
        out[where] = cast(fmt, x[where], value)
    return out


def scales_for(fmt, amax, power_of_two):
    return scale_of(amax, FORMATS[fmt][1], power_of_two)


def by_row(fmt, x, power_of_two):
    """Codes of a copy, padded, and its scales, for one scale a row."""
    scale, inverse = scales_for(fmt, amax_of(x, 1), power_of_two)
    rows, cols = x.shape
    codes = padded(codes_of(fmt, x, scale), up(rows, 16), up(cols, 128))
    return codes, padded(inverse.T, 1, up(rows, 16))


def by_block(fmt, x, power_of_two):
    rows, cols = x.shape
    blocks = up(cols, 128) // 128
    amax = np.concatenate([amax_of(x[:, 128 * b: 128 * b + 128], 1) for b in range(blocks)], axis=1)
    scale, inverse = scales_for(fmt, amax, power_of_two)
    codes = codes_of(fmt, x, np.repeat(scale, 128, axis=1)[:, :cols])
    return padded(codes, up(rows, 16), up(cols, 128)), padded(inverse.T, blocks, up(rows, 8))


def by_tile(fmt, x, power_of_two):
    rows, cols = x.shape
    down, along = up(rows, 128) // 128, up(cols, 128) // 128
    full = padded(np.where(np.isfinite(x), np.abs(x), np.float32(0)), 128 * down, 128 * along)
    amax = full.reshape(down, 128, along, 128).max(axis=(1, 3))
    scale, inverse = scales_for(fmt, amax, power_of_two)
    codes = codes_of(fmt, x, np.repeat(np.repeat(scale, 128, axis=0), 128, axis=1)[:rows, :cols])
    return padded(codes, up(rows, 16), up(cols, 128)), padded(inverse, down, up(along, 4))


def by_tensor(fmt, x, power_of_two):
    amax = amax_of(x, None)
    scale, inverse = scales_for(fmt, amax, power_of_two)
    scales = np.zeros((1, 16), np.float32)
    scales[0, [0, 4, 8]] = scale.item(), inverse.item(), amax.item()
    rows, cols = x.shape
    return padded(codes_of(fmt, x, scale), up(rows, 16), up(cols, 128)), scales


def case(kind, rows, cols, fmt, power_of_two, bf16):
    x = floats(matrix(kind, rows, cols, bf16))
    sums = []
    for quantise in (by_tensor, by_row, by_block, by_tile):
        for copy in (x, np.ascontiguousarray(x.T)):
            codes, scales = quantise(fmt, copy, power_of_two)
            sums += [crc(codes), crc(scales)]
    bands = [amax_of(x[b: b + 128], 0) for b in range(0, rows, 128)]
    sums.append(crc(np.concatenate(bands).astype(np.float32)))
    bad = int(not np.isfinite(x).all())
    numbers = ", ".join(f"0x{int(n):08X}u" for n in sums)
    return (f"    {{ OP_KIND_{kind}, {rows}, {cols}, {'true' if fmt == 'e4m3' else 'false'}, "
            f"{'true' if power_of_two else 'false'}, {'true' if bf16 else 'false'}, {bad},\n"
            f"      {{ {numbers} }} }},")


def cases():
    number = 0
    for kind in KINDS[:4]:
        for rows, cols in SHAPES:
            for bf16 in (False, True):
                # formats and powers of two in turn: every pair meets every kind
                fmt = "e4m3" if number % 3 else "e5m2"
                yield case(kind, rows, cols, fmt, number // 3 % 2 == 1, bf16)
                number += 1
    for fmt in FORMATS:
        for power_of_two in (False, True):
            for rows, cols in ((512, 128), (300, 257)):
                yield case("ALL", rows, cols, fmt, power_of_two, True)


def make():
    lines = list(cases())
    kinds = ", ".join(f"OP_KIND_{kind}" for kind in KINDS)
    return "\n".join(["""/*
 * op_tables.h - written by make_op_tables.py from numpy and ml_dtypes; do not edit.
 *
 * sums: CRC-32 (zlib) of codes and of scales, of the row copy and of the transposed copy, of one scale
 * for the tensor, a row, 1x128 and 128x128; last the column maxima of bands of 128 rows.
 */
#ifndef OP_TABLES_H
#define OP_TABLES_H

#include <stdbool.h>
#include <stdint.h>
""", f"enum op_kind {{ {kinds} }};", f"""enum {{ OP_CASES = {len(lines)}, OP_SUMS = 17 }};

struct op_case {{
    enum op_kind kind;
    int64_t rows, cols;
    bool e4m3, power_of_two, bf16;
    uint32_t found_inf;
    uint32_t sums[OP_SUMS];
}};

static const struct op_case op_cases[OP_CASES] = {{""", *lines, "};", "", "#endif", ""])


def main():
    path = pathlib.Path(__file__).with_name("op_tables.h")
    text = make()
    if "--check" in sys.argv[1:]:
        if path.read_text() != text:
            sys.exit(f"{path} differs from what make_op_tables.py writes now")
        return
    path.write_text(text)


if __name__ == "__main__":
    main()
