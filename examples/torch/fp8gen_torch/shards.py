"""FP8 shards of a weight: the C calls fp8_shard_* on torch tensors.

In: this rank's rows of a weight and the amax of the whole one. Out: uint8 matrices, which anybody
gathers along their first dim; and, of those of all ranks, the operand that the passes read: bit for
bit the one of the unsharded weight. All recipes; with "delayed" the weight's scale is taken from
that amax too.

On the wire a row is its K bytes. What all ranks know (the scale of a whole tensor) is not sent; the
scales of 128 x 128 are spread over the rows of their tiles, some bytes behind each row; a scale of
its own lies behind its row. "rowwise" and "rowwise_hp_wgrad" scale the transposed copy differently,
so that neither copy is made of the other: forward gathers rows, backward their transposed copy.

Must not know: communicators, autograd, states.
"""

import ctypes

import torch
import torch.nn.functional as F

from . import abi, operand
from .calls import CODE, matrix
from .operand import up

_runtime = abi.runtime
_address = ctypes.addressof


def needs_amax(recipe):
    """Whether the bytes of a shard depend on the other shards; scales of 128 x 128 do not."""
    return recipe.name != "block"


class Cut:
    """How a weight of a plan's layer is cut into shards of so many rows."""

    def __init__(self, plan, rows):
        n = plan.n
        self.rows = rows
        self.ranks = max(1, -(-n // rows)) if rows else 1
        self.sharding = abi.Sharding(size=ctypes.sizeof(abi.Sharding), ranks=self.ranks)
        chunk, size = ctypes.c_int64(), ctypes.c_size_t()
        where = _address(self.sharding)
        abi.check(_runtime.fp8_shard_range(plan.handle, where, None, None, chunk))
        if chunk.value != rows:
            raise RuntimeError(
                f"a shard has {rows} rows of {n}, but FP8 shards of recipe "
                f"'{plan.layer.key.recipe.name}' have {chunk.value} with {self.ranks} rank(s): "
                "ceil(rows / ranks), for 'block' a multiple of 128; pad the shards to that, or "
                "gather in bf16"
            )
        abi.check(_runtime.fp8_shard_bytes(plan.handle, where, size))
        self.bytes = size.value
        tiles = -(-plan.k // 128)
        by_tile = plan.w_scalings[0] == abi.BY_TILE
        self.by_row = plan.w_scalings[0] == abi.BY_ROW
        self.scale_bytes = 4 * up(tiles, 4) if by_tile else 0  # of a row of tiles
        self.extra = 4 if self.by_row else -(-self.scale_bytes // 128)  # bytes behind a row
        self.ld = up(plan.k, 128)
        scales = 4 * rows if self.by_row else self.scale_bytes * (rows // 128)
        self.data = operand.HEADER + up(scales, 256)
        self.turned = self.data + up(rows * self.ld, 256)  # of by_row: the transposed copy
        scales = 4 * up(plan.k, 16) if plan.w_scalings[1] == abi.BY_ROW else 0
        self.turned_head = operand.HEADER + up(scales, 256)
        self.amaxes = plan.k if scales else 1

    def _args(self, shard, amax):
        """(args, what must live until the call returns)"""
        source = matrix(shard.detach())
        tensor = abi.Tensor(
            source.data_ptr(), *source.shape, source.stride(0), CODE[source.dtype], 0
        )
        args = abi.ShardArgs(
            size=ctypes.sizeof(abi.ShardArgs),
            count=source.shape[0],
            sharding=_address(self.sharding),
            source=_address(tensor) if source.shape[0] else None,
            amax=None if amax is None else amax.data_ptr(),
        )
        return args, (source, tensor)

    def amax(self, plan, shard, at, out):
        """out[amaxes] = max |w| over the finite elements of the shard, or of its columns; fp32."""
        args, held = self._args(shard, out)
        plan.run(_runtime.fp8_shard_amax, args, at)
        del held

    def quantize(self, plan, shard, amax, at):
        """What forward and what backward need: (header, matrix) each. header: bytes alike on all
        ranks; matrix: uint8 to gather, [rows, K + extra], or of by_row in backward [K, rows].

        amax: of the whole weight, fp32 on the device; None with "block".
        """
        data = operand.memory(self.bytes, plan.device)
        args, held = self._args(shard, amax)
        args.shard, args.shard_bytes = data.data_ptr(), self.bytes
        plan.run(_runtime.fp8_shard_quantize, args, at)
        del held
        end = self.data + self.rows * self.ld
        rows = data[self.data : end].view(self.rows, self.ld)[:, : plan.k]
        scales, header = data[operand.HEADER : self.data], data[: operand.HEADER]
        if self.by_row:
            rows = torch.cat((rows, scales[: 4 * self.rows].view(-1, 4)), 1)
            ld, start = up(self.rows, 128), self.turned + self.turned_head
            columns = data[start : start + plan.k * ld].view(-1, ld)[:, : self.rows]
            turned = data[self.turned : start], columns.contiguous()
            return (header, rows), turned
        if self.extra:
            scales = scales[: self.rows // 128 * self.scale_bytes].view(-1, self.scale_bytes)
            spread = F.pad(scales, (0, 128 * self.extra - self.scale_bytes))
            rows = torch.cat((rows, spread.view(self.rows, self.extra)), 1)
        return ((header, rows.contiguous()),) * 2

    def assemble(self, plan, gathered, header, copies, at):
        """(bytes, copies) of the weight's operand; gathered: the matrices of all ranks in a row, of
        forward or (copies TRANSPOSED alone) of backward."""
        if self.by_row and copies == abi.TRANSPOSED:
            return self._assemble_turned(plan, gathered, header), copies
        n, k = plan.n, plan.k
        _check_gathered(gathered, k + self.extra)
        if not self.by_row:
            copies |= abi.ROW  # the other one is made of it
        data = operand.empty(n, k, copies, plan.device, plan.w_scalings)
        data[: operand.HEADER] = header
        start = operand.HEADER
        if self.by_row:
            scales = data[start : start + 4 * up(n, 16)].view(-1, 4)
            scales[:n], scales[n:] = gathered[:n, k:], 0
            start += up(scales.numel(), 256)
        elif self.extra:
            bands = -(-n // 128)
            scales = gathered[: bands * 128, k:].reshape(bands, -1)[:, : self.scale_bytes]
            data[start : start + scales.numel()] = scales.reshape(-1)
            start += up(scales.numel(), 256)
        rows = data[start : start + up(n, 16) * self.ld].view(-1, self.ld)
        if n % 16 or k % 128:
            rows.zero_()  # pad bytes
        rows[:n, :k] = gathered[:n, :k]
        if not self.by_row and copies & abi.TRANSPOSED:
            out = plan.weight_struct(abi.ROW)
            out.data, out.bytes = data.data_ptr(), data.numel()
            args = abi.TransposeArgs(
                size=ctypes.sizeof(abi.TransposeArgs), operand=_address(out)
            )
            plan.run(_runtime.fp8_transpose, args, at)
        return data, copies

    def _assemble_turned(self, plan, gathered, header):
        """Of [K, rows] of each rank."""
        n, k, ld = plan.n, plan.k, up(plan.n, 128)
        _check_gathered(gathered, self.rows)
        data = operand.empty(n, k, abi.TRANSPOSED, plan.device, plan.w_scalings)
        data[: self.turned_head] = header
        columns = data[self.turned_head :][: up(k, 16) * ld].view(-1, ld)
        if k % 16 or n % 128:
            columns.zero_()
        for rank, part in enumerate(gathered.view(-1, k, self.rows)):
            place = columns[:k, rank * self.rows : min(n, (rank + 1) * self.rows)]
            place.copy_(part[:, : place.shape[1]])
        return data


def _check_gathered(gathered, cols):
    if gathered.dtype is not torch.uint8 or gathered[0].numel() != cols:
        raise RuntimeError(
            f"the gathered weight is {gathered.dtype} of {tuple(gathered.shape)}; the hook was "
            f"given uint8 rows of {cols} and returns those of all ranks (recipes with a scale a "
            "row gather other bytes in backward than in forward: what is kept of one is not the "
            "other's)"
        )


def cut_of(plan, rows):
    """The Cut of a plan's layer, kept with the layer."""
    cuts = plan.layer.cuts
    cut = cuts.get(rows)
    if cut is None:
        cut = cuts[rows] = Cut(plan, rows)
    return cut


def dequantize(plan, data, copies, at):
    """fp32 [N, K] of a weight's operand."""
    out = torch.empty((plan.n, plan.k), dtype=torch.float32, device=plan.device)
    source = plan.weight_struct(copies)
    source.data = data.data_ptr()
    target = abi.Tensor(out.data_ptr(), plan.n, plan.k, plan.k, abi.FP32, 0)
    args = abi.DequantizeArgs(
        size=ctypes.sizeof(abi.DequantizeArgs),
        operand=_address(source),
        target=_address(target),
    )
    plan.run(_runtime.fp8_dequantize, args, at)
    return out
