#!/usr/bin/env python3
"""Recomputes what `fp8gen run --dump DIR` wrote, with numpy and ml_dtypes only.

usage: check_dump.py DIR [--rows N]

For every layer: the scales of x, w and dy bit for bit from the dumped tensors, one a tensor, row,
block of 128 or 128 x 128 as the recipe says; every FP8 byte of both copies and every pad byte; y,
dx and dw against float64 products of the dequantised operands (sampled rows where a product is
large) and against products of the original tensors; dbias. Shares no code with fp8gen. Prints one
line per array, exits 0 if all agree, 1 if one differs, 2 for a folder that is not a dump.
"""
import json
import os
import sys

import ml_dtypes
import numpy as np

MAXIMA = {"e4m3": 448.0, "e5m2": 57344.0}
TYPES = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
# relative Frobenius error on normal data, by accumulation and dtype of the output
# (fp16 rounds finer than bf16); what is not split may lose as much as fast
BOUNDS = {"fp32": 2e-4, "bf16": 2e-3, "fp16": 2e-3}
BOUNDS_FEW = {"fp32": 1e-3, "bf16": 2.5e-3, "fp16": 2.5e-3}
BOUND_FAST = 1e-2
# scaling of the row copy and of the transposed copy; None: no such copy, the product is of bf16
TENSOR, ROW, BLOCK, TILE = "tensor", "row", "block", "tile"
SCALINGS = {
    "current": {name: (TENSOR, TENSOR) for name in ("x", "w", "dy")},
    "delayed": {name: (TENSOR, TENSOR) for name in ("x", "w", "dy")},
    "rowwise": {name: (ROW, ROW) for name in ("x", "w", "dy")},
    "rowwise_hp_wgrad": {"x": (ROW, None), "w": (ROW, TENSOR), "dy": (ROW, None)},
    "block": {"x": (BLOCK, BLOCK), "w": (TILE, TILE), "dy": (BLOCK, BLOCK)},
    "bf16": {name: (None, None) for name in ("x", "w", "dy")},
}
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


def group_of(scaling, transposed, shape):
    """Height and width of the parts of the source that share a scale."""
    rows, cols = max(shape[0], 1), shape[1]
    if scaling == TENSOR:
        return rows, cols
    if scaling == TILE:
        return 128, 128
    along = 128 if scaling == BLOCK else rows if transposed else cols
    return (along, 1) if transposed else (1, along)


def scales_of(source, fmt, record, group):
    """Amaxes and scales of the groups, as arrays [lines, count]."""
    magnitude = np.where(np.isfinite(source), np.abs(source), np.float32(0))
    height, width = group
    lines, count = -(-max(source.shape[0], 1) // height), -(-source.shape[1] // width)
    padded = np.zeros((lines * height, count * width), np.float32)
    padded[: source.shape[0], : source.shape[1]] = magnitude
    amax = padded.reshape(lines, height, count, width).max(axis=(1, 3))
    maximum = np.float32(MAXIMA[fmt] / 2.0 ** record.get("margin", 0))
    with np.errstate(over="ignore", divide="ignore"):
        scale = np.where(amax > 0, maximum / amax, np.float32(1)).astype(np.float32)
    scale = np.minimum(scale, np.finfo(np.float32).max)
    if record["power_of_two"]:
        scale = (scale.view(np.uint32) & np.uint32(0xFF800000)).view(np.float32)
    return amax, scale


def spread(values, group, shape):
    """The value of its group for every element of the source."""
    height, width = group
    return np.repeat(np.repeat(values, height, axis=0), width, axis=1)[: shape[0], : shape[1]]


def scale_part(inverse, scaling, transposed, shape):
    """The part of scales as it lies in memory: pads are zero."""
    grid = inverse.T if transposed else inverse  # [rows or blocks of rows, blocks of the depth]
    if scaling == ROW:
        body, pad = grid.reshape(1, -1), 16
    elif scaling == BLOCK:
        body, pad = grid.T, 8
    else:
        body, pad = grid, 4
    part = np.zeros((body.shape[0], -(-body.shape[1] // pad) * pad), np.float32)
    part[:, : body.shape[1]] = body
    return part


def cast(source, scale, fmt):
    limit = np.float32(MAXIMA[fmt])
    with np.errstate(over="ignore", invalid="ignore"):
        scaled = np.clip(source * scale, -limit, limit)  # NaN stays NaN
    if fmt == "e5m2":
        scaled = np.where(np.isinf(source), source, scaled)
    else:
        scaled = np.where(np.isinf(source), np.float32(np.nan), scaled)
    return scaled.astype(np.float32).astype(TYPES[fmt]).view(np.uint8)


def same_bits(a, b):
    a, b = np.ascontiguousarray(a, np.float32), np.ascontiguousarray(b, np.float32)
    return a.shape == b.shape and bool(np.array_equal(a.view(np.uint32), b.view(np.uint32)))


def check_scales(layer, name, copy, scaling, amax, scale, shape):
    inverse = np.float32(1) / scale
    if scaling == TENSOR:
        found = layer.raw(f"{name}_scales")[0][[8, 0, 4]]
        known = layer.record["recipe"] == "delayed"
        want = np.array([0 if known else amax[0, 0], scale[0, 0], inverse[0, 0]], np.float32)
        same = same_bits(found, want)
        report(layer.name, f"{name}_scales", same,
               f"amax {found[0]:.6g} scale {found[1]:.6g}" + ("" if same else f", expected {want}"))
        return
    if shape[0] == 0:
        return  # nothing was launched, no scale of anything is read
    key = f"{name}_{copy}_scales"
    want = scale_part(inverse, scaling, copy == "transposed", shape)
    found = np.asarray(layer.raw(key))
    report(layer.name, key, same_bits(found, want), f"{want.size} scales by {scaling}")


def check_operand(layer, name):
    source = layer.values(name)
    for copy, scaling in zip(("row", "transposed"), SCALINGS[layer.record["recipe"]][name]):
        key = f"{name}_{copy}"
        if (key in layer.record["arrays"]) != (scaling is not None):
            report(layer.name, key, False, "is there" if scaling is None else "is missing")
        if scaling is None or key not in layer.record["arrays"]:
            continue
        fmt = layer.dtype(key)
        group = group_of(scaling, copy == "transposed", source.shape)
        amax, scale = scales_of(source, fmt, layer.record, group)
        check_scales(layer, name, copy, scaling, amax, scale, source.shape)
        codes = cast(source, spread(scale, group, source.shape), fmt)
        want = np.zeros(layer.record["arrays"][key]["shape"], np.uint8)
        body = codes if copy == "row" else codes.T
        want[: body.shape[0], : body.shape[1]] = body
        wrong = int(np.count_nonzero(np.asarray(layer.raw(key)) != want))
        report(layer.name, key, wrong == 0, f"{want.size} bytes {fmt}, {wrong} differ")


def inverse_scales(layer, copy, index, depth):
    """scale_inv of the elements of lines `index` of a copy, to multiply with."""
    name, which = copy.rsplit("_", 1)
    scaling = SCALINGS[layer.record["recipe"]][name][which == "transposed"]
    if scaling == TENSOR:
        return float(layer.raw(f"{name}_scales")[0][4])
    if len(index) == 0 or depth == 0:
        return 1.0
    part = np.asarray(layer.raw(f"{copy}_scales"), np.float64)
    if scaling == ROW:
        return part[0, index][:, None]
    blocks = part[:, index].T if scaling == BLOCK else part[np.asarray(index) // 128]
    return np.repeat(blocks, 128, axis=1)[:, :depth]


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
    plain = a[2] not in layer.record["arrays"]  # a product of bf16
    value_all = layer.raw(out)
    i = sample(value_all.shape[0], rows_wanted, rng)
    j = sample(value_all.shape[1], max(1, -(-JUDGED // max(1, len(i))) + 8), rng)

    def vectors(side, index, quantised):
        original, by_column, copy = side
        if quantised and not plain:
            return layer.values(copy, index)[:, :depth].astype(np.float64) * inverse_scales(
                layer, copy, index, depth)
        source = layer.values(original) if by_column else layer.values(original, index)
        return (source[:, index].T if by_column else source).astype(np.float64)

    value = layer.values(out, i)[:, j].astype(np.float64)
    extra = layer.values("bias")[0, j].astype(np.float64) if bias else 0.0
    qa, qb = vectors(a, i, True), vectors(b, j, True)
    magnitude = float(np.sum((qa**2) @ (qb**2).T)) if value.size < FEW else 0.0
    error = relative(value, qa @ qb.T + extra, magnitude)
    noise = relative(value, vectors(a, i, False) @ vectors(b, j, False).T + extra, magnitude)
    accumulation = layer.record["accumulation"][pass_name]
    bound = (BOUNDS_FEW if value.size < FEW else BOUNDS)[layer.dtype(out)]
    if accumulation != "split":
        bound = BOUND_FAST
    if accumulation == "fast" and depth > FAST_MAX_DEPTH:
        bound = np.inf
    e5m2 = not plain and "e5m2" in (layer.dtype(a[2]), layer.dtype(b[2]))
    decibel = -20 * np.log10(noise) if noise > 0 else np.inf
    judged = value.size >= JUDGED and depth > 0 and not plain
    needed = (24.0 if e5m2 else 28.0) if judged else -np.inf
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
    check_product(layer, "y", "fprop", ("x", False, "x_row"), ("w", False, "w_row"), k, r["bias"],
                  rows_wanted)
    check_product(layer, "dw", "wgrad", ("dy", True, "dy_transposed"), ("x", True, "x_transposed"),
                  m, False,
                  rows_wanted)
    check_product(layer, "dx", "dgrad", ("dy", False, "dy_row"), ("w", True, "w_transposed"), n,
                  False, rows_wanted)
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
    if index.get("format") != "fp8gen-dump" or index.get("format_version") != 2:
        print(f"check_dump: {arguments[0]} is not a dump of format 2", file=sys.stderr)
        return 2
    for record in index["layers"]:
        check_layer(Layer(arguments[0], record), rows_wanted)
    print(f"{index['model']}: {len(index['layers'])} layers, {failures} differences")
    return 1 if failures or not index["layers"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
