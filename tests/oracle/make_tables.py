#!/usr/bin/env python3
"""Writes tests/oracle/format_tables.h: what numpy and ml_dtypes say about casts, decoding and
scales.

The header is committed; tests/unit/test_formats.c compares the C codecs with it, so the codecs meet
an implementation that shares no line with them. Results that are too many to list are kept as
CRC-32 (zlib) of the bytes, in blocks. `make_tables.py --check` compares the committed header with a
fresh one.

The rules that ml_dtypes does not have are put around its cast here, written from NUMERICS section
2: the product is taken in float32, finite inputs saturate, NaN is 0x7F, infinities are judged on x.
"""
import pathlib
import sys
import zlib

import ml_dtypes
import numpy as np

FORMATS = {
    "e4m3": (ml_dtypes.float8_e4m3fn, np.float32(448.0), 0x7F),
    "e5m2": (ml_dtypes.float8_e5m2, np.float32(57344.0), 0x7C),
}
# 1, small and large powers of two, 448 / 4.28125, thirds, the limits of the scale itself
SCALE_BITS = [
    0x3F800000, 0x3F000000, 0x40000000, 0x3C000000, 0x42D148E0, 0x43155555, 0x46555555, 0x3EAAAAAB,
    0x7F7FFFFF, 0x7F000000, 0x03E06010, 0x07600000, 0x60AD78EC, 0x1E3CE508, 0x47600000, 0x43E00000,
]


def floats(bits):
    return np.asarray(bits, dtype=np.uint32).view(np.float32)


def cast(name, x, scale):
    """Codes of float32 x times float32 scale."""
    dtype, maximum, infinity = FORMATS[name]
    with np.errstate(all="ignore"):
        product = (x * np.float32(scale)).astype(np.float32)
    finite = np.isfinite(x)
    clipped = np.where(finite, np.clip(product, -maximum, maximum), np.float32(0))
    codes = clipped.astype(np.float32).astype(dtype).view(np.uint8).copy()
    codes[np.isposinf(x)] = infinity
    codes[np.isneginf(x)] = infinity | 0x80 if infinity != 0x7F else 0x7F
    codes[np.isnan(x)] = 0x7F
    return codes


def bf16_inputs():
    return floats(np.arange(65536, dtype=np.uint32) << 16)


def fp32_inputs(name):
    """Every code's value and every midpoint, with two float32 on each side, and the odd ones."""
    dtype, _, infinity = FORMATS[name]
    codes = np.arange(infinity, dtype=np.uint8)
    values = codes.view(dtype).astype(np.float64)
    step = values[-1] - values[-2]
    values = np.append(values, values[-1] + step)
    centres = np.empty(2 * len(values) - 1)
    centres[0::2] = values
    centres[1::2] = (values[:-1] + values[1:]) / 2
    bits = centres.astype(np.float32).view(np.uint32).astype(np.int64)
    near = (bits[:, None] + np.arange(-2, 3)).reshape(-1)
    near = near[near >= 0].astype(np.uint32)
    odd = np.array([0x7F800000, 0x7F800001, 0x7FC00000, 0x7FFFFFFF, 0x7F7FFFFF, 0x7F7FFFFE, 0x00000001,
                    0x007FFFFF, 0x00800000, 0x4E6E6B28, 0x461C4000, 0x3F800000], dtype=np.uint32)
    both = np.concatenate([near, odd])
    return floats(np.concatenate([both, both | np.uint32(0x80000000)]))


def scale_of(amax, maximum, power_of_two):
    with np.errstate(all="ignore"):
        scale = np.where(amax == 0, np.float32(1), (maximum / amax).astype(np.float32))
    scale = np.minimum(scale.astype(np.float32), np.finfo(np.float32).max)
    if power_of_two:
        # floor to a power of two by frexp, not by bits
        _, exponent = np.frexp(scale.astype(np.float64))
        scale = np.ldexp(np.float64(1), exponent - 1).astype(np.float32)
        scale = np.where(amax == 0, np.float32(1), scale)
    with np.errstate(all="ignore"):
        inverse = (np.float32(1) / scale).astype(np.float32)
    return scale.astype(np.float32), inverse


def amax_inputs():
    """The borders that NUMERICS lists, powers of two, every exponent, a fixed walk over the bits."""
    listed = [0.0, 4.28125, 1.0, 448.0, 464.0, 57344.0, 3.39e38, 3.4028234663852886e38, 2e-36, 1.3e-36,
              1.3166e-36, 1.3165e-36, 1.3167e-36, 1e-38, 9.2e-41, 1e-34, 1.6852e-34, 1.6851e-34,
              1.6853e-34, 5.266e-36, 5.265e-36, 5.267e-36, 6.741e-34, 6.740e-34, 6.742e-34, 1e-20, 3.0,
              7.0, 1e-45, 1.1754943508222875e-38, 1.1754942106924411e-38, 0.3]
    listed = np.array(listed, dtype=np.float32)
    exponents = floats(np.arange(0, 255, dtype=np.uint32) << 23 | 0x123456)
    walk = (np.arange(8192, dtype=np.uint64) * 2654435761 & 0x7FFFFFFF).astype(np.uint32)
    walk = floats(walk)
    return listed, np.concatenate([exponents, walk[np.isfinite(walk)]])


def crc(data):
    return zlib.crc32(np.ascontiguousarray(data).tobytes()) & 0xFFFFFFFF


def rows(numbers, per_line=8):
    words = [f"0x{int(n):08X}u" for n in numbers]
    lines = [", ".join(words[i:i + per_line]) for i in range(0, len(words), per_line)]
    return ",\n    ".join(lines)


def table(out, declaration, numbers):
    out.append(f"static const uint32_t {declaration} = {{\n    {rows(numbers)},\n}};\n")


def make():
    out = ["""/*
 * format_tables.h - written by make_tables.py from numpy and ml_dtypes; do not edit.
 *
 * Decoded values are float32 bits. CRC-32 (zlib) covers the codes, or the bits in little-endian order.
 */
#ifndef FORMAT_TABLES_H
#define FORMAT_TABLES_H

#include <stdint.h>
"""]
    out.append(f"enum {{ TABLE_SCALES = {len(SCALE_BITS)}, TABLE_BF16_BLOCKS = 16 }};\n")
    table(out, "table_scales[TABLE_SCALES]", SCALE_BITS)
    for name, (dtype, _, _) in FORMATS.items():
        decoded = np.arange(256, dtype=np.uint8).view(dtype).astype(np.float32)
        bits = decoded.view(np.uint32).copy()
        bits[np.isnan(decoded)] = 0x7FC00000
        table(out, f"table_decode_{name}[256]", bits)
        x = bf16_inputs()
        sums = []
        for scale in floats(SCALE_BITS):
            codes = cast(name, x, scale)
            sums += [crc(block) for block in np.split(codes, 16)]
        table(out, f"table_bf16_{name}[TABLE_SCALES * TABLE_BF16_BLOCKS]", sums)
        inputs = fp32_inputs(name)
        out.append(f"enum {{ TABLE_FP32_INPUTS_{name.upper()} = {len(inputs)} }};\n")
        table(out, f"table_fp32_inputs_{name}[1] /* CRC of the inputs */",
              [crc(inputs.view(np.uint32))])
        table(out, f"table_fp32_{name}[TABLE_SCALES]",
              [crc(cast(name, inputs, scale)) for scale in floats(SCALE_BITS)])
    listed, walk = amax_inputs()
    out.append(f"enum {{ TABLE_AMAXES = {len(listed)}, TABLE_WALK = {len(walk)} }};\n")
    table(out, "table_amaxes[TABLE_AMAXES]", listed.view(np.uint32))
    for name, (_, maximum, _) in FORMATS.items():
        for power_of_two in (False, True):
            suffix = name + ("_pow2" if power_of_two else "")
            scale, inverse = scale_of(listed, maximum, power_of_two)
            pairs = np.stack([scale.view(np.uint32), inverse.view(np.uint32)], axis=1).reshape(-1)
            table(out, f"table_scale_{suffix}[TABLE_AMAXES * 2] /* scale, scale_inv */", pairs)
            scale, inverse = scale_of(walk, maximum, power_of_two)
            pairs = np.stack([scale.view(np.uint32), inverse.view(np.uint32)], axis=1).reshape(-1)
            table(out, f"table_walk_{suffix}[1]", [crc(pairs)])
    # float32 to bf16, NaN apart: the upper halves of a fixed walk over all bits
    walk = (np.arange(1 << 20, dtype=np.uint64) * 2654435761 & 0xFFFFFFFF).astype(np.uint32)
    values = floats(walk[~np.isnan(floats(walk))])
    halves = values.astype(ml_dtypes.bfloat16).view(np.uint16)
    out.append(f"enum {{ TABLE_BF16_WALK = {1 << 20} }};\n")
    table(out, "table_bf16_rounding[1]", [crc(halves)])
    out.append("#endif\n")
    return "\n".join(out)


def main():
    path = pathlib.Path(__file__).with_name("format_tables.h")
    text = make()
    if "--check" in sys.argv[1:]:
        if path.read_text() != text:
            sys.exit(f"{path} differs from what make_tables.py writes now")
        return
    path.write_text(text)


if __name__ == "__main__":
    main()
