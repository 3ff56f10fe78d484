"""The state of delayed scaling for one weight: its x, w and dy, in memory of the runtime's.

Made at the first call of the weight's layer; the passes read scales there and note amaxes,
`advance` makes history of them once an optimizer step. Saved and loaded as bytes
(runtime/fp8_state.h). Must not know: autograd, weights, when a step is over.
"""

import ctypes

import torch
import torch.distributed as dist

from . import abi

_runtime = abi.runtime


class _Memory:
    """fp32 at an address of a CUDA device, for torch.as_tensor."""

    def __init__(self, address, count):
        self.__cuda_array_interface__ = {
            "shape": (count,),
            "typestr": "<f4",
            "data": (address, False),
            "version": 3,
        }


class History:
    """layer: a Layer of recipe "delayed"; saved: what `save` of another one gave, or None."""

    def __init__(self, layer, saved=None):
        self.layer, self.context = layer, layer.context
        layers, handle = (ctypes.c_void_p * 1)(layer.handle), ctypes.c_void_p()
        abi.check(_runtime.fp8_state_create(layers, 1, handle))
        self.handle = handle.value
        self._destroy = _runtime.fp8_state_destroy  # still there when modules are torn down
        if saved is not None:
            self.load(saved)

    def __del__(self):
        if getattr(self, "handle", None):
            self._destroy(self.handle)

    def advance(self):
        abi.check(_runtime.fp8_state_advance(self.handle, self.context.stream()))

    def running(self):
        """The amaxes of x, w, dy since the last step, -1 for what did not run; the runtime's own
        memory."""
        address, count = ctypes.c_void_p(), ctypes.c_int64()
        abi.check(_runtime.fp8_state_running(self.handle, address, count))
        if self.context.index == abi.HOST:
            array = (ctypes.c_float * count.value).from_address(address.value)
            return torch.frombuffer(array, dtype=torch.float32)
        return torch.as_tensor(_Memory(address.value, count.value), device=self.context.device)

    @staticmethod
    def reduce(histories, group):
        """Maxima over the ranks of a group; the same histories, in the same order, on all."""
        if group is None or not histories:
            return
        parts = [history.running() for history in histories]
        together = torch.cat(parts)
        dist.all_reduce(together, op=dist.ReduceOp.MAX, group=group)
        for part, reduced in zip(parts, together.split([len(p) for p in parts])):
            part.copy_(reduced)

    def save(self):
        size = ctypes.c_size_t()
        abi.check(_runtime.fp8_state_bytes(self.handle, size))
        data = torch.empty(size.value, dtype=torch.uint8)
        stream = self.context.stream()
        abi.check(_runtime.fp8_state_save(self.handle, data.data_ptr(), size.value, stream))
        return data

    def load(self, saved):
        saved = saved.cpu().contiguous()
        stream = self.context.stream()
        abi.check(_runtime.fp8_state_load(self.handle, saved.data_ptr(), saved.numel(), stream))
