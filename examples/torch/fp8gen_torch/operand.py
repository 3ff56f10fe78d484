"""Quantised tensors: one uint8 tensor each, laid out as runtime/fp8.h documents fp8_operand.

    scales 256 bytes | its scales, row copy | its scales, transposed copy     (what is wanted)

Everything but the bytes follows from role, rows, cols and copies, so that only the tensor travels
through autograd, checkpointing and torch.compile; `struct` makes the C struct again when needed.
Also here, until the C API has calls for them: quantising with an amax that several ranks share, and
putting an operand together from gathered rows. Both are bit-equal to the runtime's own
quantisation.
"""

import ctypes

import torch

from . import abi

HEADER = 256
_FORMATS = {abi.E4M3: (torch.float8_e4m3fn, 448.0), abi.E5M2: (torch.float8_e5m2, 57344.0)}


def _up(n, step):
    return (n + step - 1) // step * step


def copy_bytes(rows, cols):
    """Bytes of one copy with `cols` along the contraction; also of a symbolic size."""
    return _up(_up(rows, 16) * _up(cols, 128), 256)


def _part_bytes(scaling, rows, cols):
    """A copy with the scales before it."""
    if scaling == abi.BY_ROW:
        count = _up(rows, 16)
    elif scaling == abi.BY_BLOCK:
        count = _up(cols, 128) // 128 * _up(rows, 8)
    elif scaling == abi.BY_TILE:
        count = _up(rows, 128) // 128 * _up(_up(cols, 128) // 128, 4)
    else:
        count = 0
    return _up(4 * count, 256) + copy_bytes(rows, cols)


def there(copies, scalings):
    """Those of the copies that a recipe has."""
    for copy, scaling in zip((abi.ROW, abi.TRANSPOSED), scalings):
        if scaling == abi.NO_COPY:
            copies &= ~copy
    return copies


def operand_bytes(rows, cols, copies, scalings=(abi.BY_TENSOR, abi.BY_TENSOR)):
    copies = there(copies, scalings)
    if not copies:
        return 0
    size = HEADER
    if copies & abi.ROW:
        size = size + _part_bytes(scalings[0], rows, cols)
    if copies & abi.TRANSPOSED:
        size = size + _part_bytes(scalings[1], cols, rows)
    return size


def memory(size, device):
    """uint8, 256-byte aligned. CUDA's allocator aligns to 512, the CPU's to 64: there the storage
    begins inside a larger buffer."""
    if device.type != "cpu":
        return torch.empty(size, dtype=torch.uint8, device=device)
    buffer = (ctypes.c_uint8 * (size + 255))()
    skip = -ctypes.addressof(buffer) % 256
    return torch.frombuffer(buffer, dtype=torch.uint8, count=size, offset=skip)


def empty(rows, cols, copies, device, scalings=(abi.BY_TENSOR, abi.BY_TENSOR)):
    """Memory for an operand, 256-byte aligned."""
    return memory(operand_bytes(rows, cols, copies, scalings), device)


def aligned(data):
    """`data` itself, or a copy where moving it (offload and back) has lost the alignment."""
    return data if data.data_ptr() % 256 == 0 else memory(data.numel(), data.device).copy_(data)


_SIZE = ctypes.sizeof(abi.Operand)


def filled(data, role, dtype, rows, cols, copies, version=0):
    """The C struct of a filled operand."""
    return abi.Operand(
        size=_SIZE,
        role=role,
        data=data.data_ptr(),
        bytes=data.numel(),
        dtype=dtype,
        copies=copies,
        rows=rows,
        cols=cols,
        version=version,
    )


def row_view(data, rows, cols):
    """The row copy [rows, padded cols] of an operand that has one."""
    ld = _up(cols, 128)
    return data[HEADER : HEADER + rows * ld].view(rows, ld)


def transposed_view(data, rows, cols, copies):
    """The transposed copy [cols, padded rows] of an operand that has one."""
    start = HEADER + (copy_bytes(rows, cols) if copies & abi.ROW else 0)
    ld = _up(rows, 128)
    return data[start : start + cols * ld].view(cols, ld)


# ---- quantise with a given amax; assemble from rows ----------------------------------------------


def amax_of(tensor):
    """max |x| over the finite elements, fp32, 0 for none; what several ranks reduce with MAX."""
    if tensor.numel() == 0:
        return torch.zeros((), dtype=torch.float32, device=tensor.device)
    magnitude = tensor.detach().abs()
    return torch.where(magnitude.isfinite(), magnitude, 0).amax().float()


def scales_of(amax, dtype=abi.E4M3, power_of_two=False):
    """(scale, scale_inv) of an amax, as recipe `current` defines them."""
    largest = torch.finfo(torch.float32).max
    limit = torch.full_like(amax, _FORMATS[dtype][1])
    scale = (limit / amax).clamp(
        max=largest
    )  # a Python number / tensor would be its reciprocal times it
    scale = torch.where(amax > 0, scale, torch.ones_like(scale))
    if power_of_two:
        scale = (scale.view(torch.int32) & 0x7F800000).view(torch.float32)
    return scale, 1.0 / scale


def header(amax, scale, scale_inv):
    """The first 256 bytes of an operand: float32 [0] scale, [4] scale_inv, [8] amax, else zero."""
    words = torch.zeros(HEADER // 4, dtype=torch.float32, device=amax.device)
    words[0], words[4], words[8] = scale, scale_inv, amax
    return words.view(torch.uint8)


def quantize_rows(tensor, scale, dtype=abi.E4M3):
    """A matrix as uint8, not padded, with a scale that is given."""
    kind, limit = _FORMATS[dtype]
    x = tensor.detach().float()
    q = (x * scale).clamp(-limit, limit)
    q = torch.where(x.isfinite(), q, x if dtype == abi.E5M2 else torch.nan)
    return q.to(kind).view(torch.uint8)


def assemble(rows, scales, n, k, copies):
    """An operand of n x k from gathered row bytes [>= n, k] and the 256 bytes of `header`."""
    data = empty(n, k, copies, rows.device)
    data[:HEADER] = scales
    if n % 128 or k % 128:
        data[HEADER:].zero_()  # pad bytes
    if copies & abi.ROW:
        row_view(data, n, k)[:, :k].copy_(rows[:n])
    if copies & abi.TRANSPOSED:
        transposed_view(data, n, k, copies)[:, :n].copy_(rows[:n].t())
    return data
