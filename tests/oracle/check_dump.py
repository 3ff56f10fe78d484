#!/usr/bin/env python3
"""Recomputes what `fp8gen run --dump DIR` wrote, with numpy and ml_dtypes only.

usage: check_dump.py DIR [--rows N]

For every layer: amax, scale and scale_inv of x, w and dy bit for bit from the dumped tensors; every FP8
byte of both copies and every pad byte; y, dx and dw against float64 products of the dequantised
operands (sampled rows where a product is large) and against products of the original tensors; dbias.
Shares no code with fp8gen. Prints one line per array, exits 0 if all agree, 1 if one differs, 2 for a
folder that is not a dump.
"""
import json
import os
import sys

import ml_dtypes
import numpy as np

MAXIMA = {"e4m3": 448.0, "e5m2": 57344.0}
TYPES = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
# relative Frobenius error on normal data, by accumulation and dtype of the output
BOUNDS = {("split", "fp32"): 2e-4, ("split", "bf16"): 2e-3, ("fast", "fp32"): 1e-2, ("fast", "bf16"): 1e-2}
BOUNDS_FEW = {("split", "fp32"): 1e-3, ("split", "bf16"): 2.5e-3, ("fast", "fp32"): 1e-2, ("fast", "bf16"): 1e-2}
FAST_MAX_DEPTH = 28672
FEW = 1000
JUDGED = 10000

failures = 0


def report(layer, what, good, text):
    global failures
    if not good:
        failures += 1
    print(f"{'ok    ' if good else 'FAILED'} {layer:16} {what:14} {text}")


class Layer:
    def __init__(self, folder, record):
        self.record = record
        self.name = record["name"]
        self.folder = os.path.join(folder, record["folder"])

    def dtype(self, name):
        return self.record["arrays"][name]["dtype"]

    def raw(self, name):
        entry = self.record["arrays"][name]
        array = np.load(os.path.join(self.folder, entry["file"]), mmap_mode="r", allow_pickle=False)
        if list(array.shape) != entry["shape"]:
            raise ValueError(f"{name}: shape {array.shape} differs from the index")
        return array

    def values(self, name, rows=slice(None)):
        """The array as float32 (exact for bf16, e4m3 and e5m2)."""
        array = np.ascontiguousarray(self.raw(name)[rows])
        dtype = self.dtype(name)
        if dtype == "bf16":
            return array.view(ml_dtypes.bfloat16).astype(np.float32)
        if dtype in TYPES:
            return array.view(TYPES[dtype]).astype(np.float32)
        return array


def scales_of(source, fmt, power_of_two):
    finite = np.abs(source[np.isfinite(source)])
    amax = np.float32(finite.max() if finite.size else 0)
    scale = np.float32(1)
    if amax > 0:
        with np.errstate(over="ignore"):
            scale = np.float32(MAXIMA[fmt]) / amax
    if np.isinf(scale):
        scale = np.finfo(np.float32).max
    if power_of_two:
        scale = (np.float32(scale).view(np.uint32) & np.uint32(0xFF800000)).view(np.float32)
    return amax, np.float32(scale), np.float32(1) / np.float32(scale)


def cast(source, scale, fmt):
    limit = np.float32(MAXIMA[fmt])
    with np.errstate(over="ignore", invalid="ignore"):
        scaled = np.clip(source * scale, -limit, limit)  # NaN stays NaN
    if fmt == "e5m2":
        scaled = np.where(np.isinf(source), source, scaled)
    else:
        scaled = np.where(np.isinf(source), np.float32(np.nan), scaled)
    return scaled.astype(np.float32).astype(TYPES[fmt]).view(np.uint8)


def check_operand(layer, name):
    arrays = layer.record["arrays"]
    source = layer.values(name)
    fmt = layer.dtype(f"{name}_row")
    scales = layer.raw(f"{name}_scales")[0]
    expected = scales_of(source, fmt, layer.record["power_of_two"])
    found = (scales[8], scales[0], scales[4])
    same = all(np.float32(a).view(np.uint32) == np.float32(b).view(np.uint32) for a, b in zip(expected, found))
    report(layer.name, f"{name}_scales", same,
           f"amax {found[0]:.6g} scale {found[1]:.6g}" + ("" if same else f", expected {expected}"))
    codes = cast(source, expected[1], fmt)
    for copy in ("row", "transposed"):
        key = f"{name}_{copy}"
        if key not in arrays:
            continue
        want = np.zeros(arrays[key]["shape"], np.uint8)
        body = codes if copy == "row" else codes.T
        want[: body.shape[0], : body.shape[1]] = body
        wrong = int(np.count_nonzero(np.asarray(layer.raw(key)) != want))
        report(layer.name, key, wrong == 0, f"{want.size} bytes {fmt}, {wrong} differ")


def sample(count, wanted, rng):
    if count <= wanted:
        return np.arange(count)
    return np.sort(rng.choice(count, wanted, replace=False))


def relative(value, exact, magnitude):
    norm = np.sum(exact * exact)
    if value.size < FEW:
        norm = max(norm, magnitude)
    difference = np.sum((value - exact) ** 2)
    if norm == 0:
        return 0.0 if difference == 0 else np.inf
    return float(np.sqrt(difference / norm))


def check_product(layer, out, pass_name, a, b, depth, bias, rows_wanted):
    """a and b: (original, by column?, quantised copy); out[i,j] = sum over depth of a[i] b[j]."""
    rng = np.random.default_rng(1)
    value_all = layer.raw(out)
    i = sample(value_all.shape[0], rows_wanted, rng)
    j = sample(value_all.shape[1], max(1, -(-JUDGED // max(1, len(i))) + 8), rng)

    def vectors(side, index, quantised):
        original, by_column, copy = side
        if quantised:
            scale_inv = float(layer.raw(f"{original}_scales")[0][4])
            return layer.values(copy, index)[:, :depth].astype(np.float64) * scale_inv
        source = layer.values(original) if by_column else layer.values(original, index)
        return (source[:, index].T if by_column else source).astype(np.float64)

    value = layer.values(out, i)[:, j].astype(np.float64)
    extra = layer.values("bias")[0, j].astype(np.float64) if bias else 0.0
    qa, qb = vectors(a, i, True), vectors(b, j, True)
    magnitude = float(np.sum((qa**2) @ (qb**2).T)) if value.size < FEW else 0.0
    error = relative(value, qa @ qb.T + extra, magnitude)
    noise = relative(value, vectors(a, i, False) @ vectors(b, j, False).T + extra, magnitude)
    accumulation = layer.record["accumulation"][pass_name]
    key = (accumulation, layer.dtype(out))
    bound = (BOUNDS_FEW if value.size < FEW else BOUNDS)[key]
    if accumulation == "fast" and depth > FAST_MAX_DEPTH:
        bound = np.inf
    e5m2 = "e5m2" in (layer.dtype(a[2]), layer.dtype(b[2]))
    decibel = -20 * np.log10(noise) if noise > 0 else np.inf
    needed = (24.0 if e5m2 else 28.0) if value.size >= JUDGED and depth > 0 else -np.inf
    good = error <= bound and (decibel >= needed or depth == 0)
    report(layer.name, out, bool(good),
           f"{value.size} outputs, error {error:.2e} (bound {bound:.0e}), SQNR {decibel:.1f} dB")


def check_layer(layer, rows_wanted):
    r = layer.record
    m, n, k = r["M"], r["N"], r["K"]
    shapes = {"x": [m, k], "w": [n, k], "dy": [m, n], "y": [m, n], "dx": [m, k], "dw": [n, k]}
    for name, shape in shapes.items():
        if r["arrays"][name]["shape"] != shape:
            report(layer.name, name, False, f"shape {r['arrays'][name]['shape']}, expected {shape}")
            return
    for name in ("x", "w", "dy"):
        check_operand(layer, name)
    check_product(layer, "y", "fprop", ("x", False, "x_row"), ("w", False, "w_row"), k, r["bias"], rows_wanted)
    check_product(layer, "dw", "wgrad", ("dy", True, "dy_transposed"), ("x", True, "x_transposed"), m, False,
                  rows_wanted)
    check_product(layer, "dx", "dgrad", ("dy", False, "dy_row"), ("w", True, "w_transposed"), n, False, rows_wanted)
    if r["bias"]:
        dy = layer.values("dy").astype(np.float64)
        sums = dy.sum(axis=0)
        norm = np.sum(dy * dy)
        difference = np.sum((layer.values("dbias")[0] - sums) ** 2)
        error = float(np.sqrt(difference / norm)) if norm > 0 else float(difference)
        report(layer.name, "dbias", error <= 1e-5, f"error {error:.1e} (bound 1e-05)")


def main(arguments):
    rows_wanted = 104
    if len(arguments) == 3 and arguments[1] == "--rows":
        rows_wanted = int(arguments[2])
        arguments = arguments[:1]
    if len(arguments) != 1:
        print(__doc__, file=sys.stderr)
        return 2
    try:
        with open(os.path.join(arguments[0], "index.json"), encoding="utf-8") as file:
            index = json.load(file)
    except (OSError, ValueError) as error:
        print(f"check_dump: {arguments[0]} is not a dump: {error}", file=sys.stderr)
        return 2
    if index.get("format") != "fp8gen-dump" or index.get("format_version") != 1:
        print(f"check_dump: {arguments[0]} is not a dump of format 1", file=sys.stderr)
        return 2
    for record in index["layers"]:
        check_layer(Layer(arguments[0], record), rows_wanted)
    print(f"{index['model']}: {len(index['layers'])} layers, {failures} differences")
    return 1 if failures or not index["layers"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
