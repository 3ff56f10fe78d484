"""FP8 shards of a weight: the C calls fp8_shard_* on torch tensors.

In: this rank's rows of a weight and the amax of the whole one. Out: rows of uint8, which anybody
gathers along their first dim; and, of the rows of all ranks, the operand that the passes read: bit
for bit the one of the unsharded weight. Recipes "current", "delayed" (whose weights take their
scale from that amax too) and "block".

On the wire a row is its K bytes. What all ranks know (the scale of a whole tensor) is not sent; the
scales of 128 x 128 are spread over the rows of their tiles, some bytes behind each row.

Must not know: communicators, autograd, states.
"""

import ctypes

import torch
import torch.nn.functional as F

from . import abi, operand
from .calls import CODE, matrix

_runtime = abi.runtime
_address = ctypes.addressof
RECIPES = ("current", "delayed", "block")


def check_recipe(recipe, who):
    if recipe.name not in RECIPES:
        raise RuntimeError(
            f"{who}: recipe '{recipe.name}' scales the second copy of a weight along the sharded "
            "dim, and such shards are not gathered here (fp8_model does); gather it in bf16, or take "
            f"one of {', '.join(RECIPES)}"
        )


def needs_amax(recipe):
    """Whether the bytes of a shard depend on the other shards; scales of 128 x 128 do not."""
    return recipe.by_tensor


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
        self.scale_bytes = 4 * (-(-tiles // 4) * 4) if by_tile else 0  # of a row of tiles
        self.extra = -(-self.scale_bytes // 128)  # bytes behind a row
        self.ld = -(-plan.k // 128) * 128
        self.data = -(-self.scale_bytes * (rows // 128) // 256) * 256 + operand.HEADER

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
        """out[0] = max |w| over the finite elements of the shard; fp32."""
        args, held = self._args(shard, out)
        plan.run(_runtime.fp8_shard_amax, args, at)
        del held

    def quantize(self, plan, shard, amax, at):
        """(header, rows): 256 bytes alike on all ranks, and uint8 [rows, K + extra] to gather.

        amax: of the whole weight, fp32 on the device; None with "block".
        """
        data = operand.memory(self.bytes, plan.device)
        args, held = self._args(shard, amax)
        args.shard, args.shard_bytes = data.data_ptr(), self.bytes
        plan.run(_runtime.fp8_shard_quantize, args, at)
        del held
        end = self.data + self.rows * self.ld
        rows = data[self.data : end].view(self.rows, self.ld)[:, : plan.k]
        if self.extra:
            scales = data[operand.HEADER :][: self.rows // 128 * self.scale_bytes]
            scales = scales.view(-1, self.scale_bytes)
            spread = F.pad(scales, (0, 128 * self.extra - self.scale_bytes))
            rows = torch.cat((rows, spread.view(self.rows, self.extra)), 1)
        return data[: operand.HEADER], rows.contiguous()

    def assemble(self, plan, gathered, header, copies, at):
        """(bytes, copies) of the weight's operand; gathered: uint8 rows of all ranks, in a row."""
        n, k = plan.n, plan.k
        if gathered.dtype is not torch.uint8 or gathered[0].numel() != k + self.extra:
            raise RuntimeError(
                f"the gathered weight is {gathered.dtype} of {tuple(gathered.shape)}; the hook was "
                f"given uint8 rows of {k + self.extra} and returns those of all ranks"
            )
        copies |= abi.ROW  # the other one is made of it
        data = operand.empty(n, k, copies, plan.device, plan.w_scalings)
        data[: operand.HEADER] = header
        start = operand.HEADER
        if self.extra:
            bands = -(-n // 128)
            scales = gathered[: bands * 128, k:].reshape(bands, -1)[:, : self.scale_bytes]
            data[start : start + scales.numel()] = scales.reshape(-1)
            start += -(-scales.numel() // 256) * 256
        rows = data[start : start + -(-n // 16) * 16 * self.ld].view(-1, self.ld)
        if n % 16 or k % 128:
            rows.zero_()  # pad bytes
        rows[:n, :k] = gathered[:n, :k]
        if copies & abi.TRANSPOSED:
            out = plan.weight_struct(abi.ROW)
            out.data, out.bytes = data.data_ptr(), data.numel()
            args = abi.TransposeArgs(
                size=ctypes.sizeof(abi.TransposeArgs), operand=_address(out)
            )
            plan.run(_runtime.fp8_transpose, args, at)
        return data, copies


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
