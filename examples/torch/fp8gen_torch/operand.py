"""Quantised tensors: one uint8 tensor each, laid out as runtime/fp8.h documents fp8_operand.

    scales 256 bytes | its scales, row copy | its scales, transposed copy     (what is wanted)

Everything but the bytes follows from role, rows, cols and copies, so that only the tensor travels
through autograd, checkpointing and torch.compile; calls.py makes the C structs.
"""

import ctypes

import torch

from . import abi

HEADER = 256


def up(n, step):
    return (n + step - 1) // step * step


def copy_bytes(rows, cols):
    """Bytes of one copy with `cols` along the contraction; also of a symbolic size."""
    return up(up(rows, 16) * up(cols, 128), 256)


def _part_bytes(scaling, rows, cols):
    """A copy with the scales before it."""
    if scaling == abi.BY_ROW:
        count = up(rows, 16)
    elif scaling == abi.BY_BLOCK:
        count = up(cols, 128) // 128 * up(rows, 8)
    elif scaling == abi.BY_TILE:
        count = up(rows, 128) // 128 * up(up(cols, 128) // 128, 4)
    else:
        count = 0
    return up(4 * count, 256) + copy_bytes(rows, cols)


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
