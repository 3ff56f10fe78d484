"""Layers of the runtime for the shapes and dtypes that turn up: described, made once, kept.

A layer is asked for by what decides its kernels (features, dtypes, recipe, device). The runtime's
context finds it in the user's cache or has libfp8gen make it (fp8gen_jit_provider): at the first
use of a shape, or before the first step and collective by `prepare`. Contexts and layers live until
the process ends: there are few of them and all threads share them. The runtime's messages go to the
logger "fp8gen".

Must not know: autograd, modules, communicators.
"""

import ctypes
import dataclasses
import functools
import logging
import threading
from typing import Optional

import torch

from . import abi

CODE = {
    torch.bfloat16: abi.BF16,
    torch.float32: abi.FP32,
    torch.float16: abi.FP16,
    torch.float8_e4m3fn: abi.E4M3,
    torch.float8_e5m2: abi.E5M2,
    torch.uint8: abi.UINT8,
}
_SUMS = {None: 0, "fast": 1, "split": 2, "256": 3, "512": 4}
_T, _R, _B = abi.BY_TENSOR, abi.BY_ROW, abi.BY_BLOCK
# Recipe -> (row copy, transposed copy) of x and dy, and of w: what one scale is for.
_SCALINGS = {
    "current": ((_T, _T), (_T, _T)),
    "delayed": ((_T, _T), (_T, _T)),
    "rowwise": ((_R, _R), (_R, _R)),
    "rowwise_hp_wgrad": ((_R, abi.NO_COPY), (_R, _T)),
    "block": ((_B, _B), (abi.BY_TILE, abi.BY_TILE)),
}
_MIN_TOKENS = 8192
_logger = logging.getLogger("fp8gen")
_LEVELS = {1: logging.ERROR, 2: logging.WARNING, 3: logging.INFO, 4: logging.DEBUG}


@abi.LOG_CALLBACK
def _log(_, level, message):
    _logger.log(_LEVELS.get(level, logging.INFO), "%s", message.decode(errors="replace"))


@dataclasses.dataclass(frozen=True, repr=False)
class Recipe:
    """How a layer is scaled and summed; the fields of a spec's recipe and accumulation.

    None: the spec's default. name: "current", "delayed", "rowwise", "rowwise_hp_wgrad" or "block".
    A spec's weight_scale and amax_group are not among them: here a gathered weight has the scale of
    the whole (weight_scale = "shard", a scale for each rank's rows, is of a spec's models), and
    amaxes are shared over ranks by `advance_scales(group)`.
    """

    name: str = "current"
    format: Optional[str] = None  # "hybrid": x and w E4M3, dy E5M2; "e4m3": all E4M3
    power_of_two: Optional[bool] = None
    fprop: Optional[str] = None  # sums: "fast", "split", "256" or "512"
    dgrad: Optional[str] = None
    wgrad: Optional[str] = None
    history_length: int = 1024  # of "delayed", like the next three
    algo: str = "max"
    margin: int = 0
    calibrate: bool = False

    def __post_init__(self):
        if self.name not in _SCALINGS:
            raise ValueError(f"recipe is '{self.name}'; there are {', '.join(_SCALINGS)}")
        formats = ("hybrid", "e4m3") if self.by_tensor else ("e4m3",)
        if self.format not in (None, *formats):
            raise ValueError(
                f"format is '{self.format}'; recipe '{self.name}' takes {' or '.join(formats)}"
            )

    def __repr__(self):
        """The name, and the fields that are not the defaults."""
        given = [
            f"{field.name}={getattr(self, field.name)!r}"
            for field in dataclasses.fields(self)[1:]
            if getattr(self, field.name) != field.default
        ]
        return f"Recipe({', '.join([repr(self.name), *given])})"

    @property
    def by_tensor(self):
        """One scale for all of a tensor."""
        return self.name in ("current", "delayed")

    @property
    def by_row(self):
        """A scale for each row of an operand."""
        return self.name in ("rowwise", "rowwise_hp_wgrad")

    @property
    def dy_dtype(self):
        hybrid = self.by_tensor if self.format is None else self.format == "hybrid"
        return abi.E5M2 if hybrid else abi.E4M3

    def scalings(self, role):
        """(row copy, transposed copy) of an operand."""
        return _SCALINGS[self.name][role == abi.ROLE_W]


@dataclasses.dataclass(frozen=True)
class Key:
    """What decides the kernels of a layer."""

    out_features: int
    in_features: int
    bias: bool
    weight: torch.dtype  # bf16 or fp32
    output: torch.dtype  # of y
    grad_input: torch.dtype  # of dx
    grad_weight: torch.dtype  # of dw
    recipe: Recipe
    device: int  # CUDA ordinal, or -1: the host
    shards: bool = False  # with the kernels of FP8 shards that scaling by rows has

    def description(self, tokens):
        recipe = self.recipe
        delayed = recipe.name == "delayed"
        switch = abi.DEFAULT
        if recipe.power_of_two is not None:
            switch = abi.ON if recipe.power_of_two else abi.OFF
        return abi.LayerDescription(
            size=ctypes.sizeof(abi.LayerDescription),
            has_bias=self.bias,
            in_features=self.in_features,
            out_features=self.out_features,
            max_tokens=tokens,
            w_dtype=CODE[self.weight],
            y_dtype=CODE[self.output],
            dx_dtype=CODE[self.grad_input],
            dw_dtype=CODE[self.grad_weight],
            fprop=_SUMS[recipe.fprop],
            dgrad=_SUMS[recipe.dgrad],
            wgrad=_SUMS[recipe.wgrad],
            power_of_two=switch,
            recipe=recipe.name.encode(),
            format=recipe.format.encode() if recipe.format else None,
            history_length=recipe.history_length if delayed else 0,
            algo=recipe.algo.encode() if delayed else None,
            margin=recipe.margin if delayed else 0,
            calibrate=recipe.calibrate if delayed else 0,
            shards=self.shards,
        )


def device_index(device):
    """The runtime's number of a torch device."""
    if device.type == "cpu":
        return abi.HOST
    if device.type == "cuda":
        return torch.cuda.current_device() if device.index is None else device.index
    raise RuntimeError(f"fp8gen runs on cuda and cpu tensors, not on {device}")


class Context:
    """One device: the runtime's context and the streams' workspaces."""

    def __init__(self, index):
        options = abi.ContextOptions(size=ctypes.sizeof(abi.ContextOptions), device=index, log=_log)
        self.index = index
        self.device = torch.device("cpu") if index == abi.HOST else torch.device("cuda", index)
        self.handle = ctypes.c_void_p()
        abi.check(abi.runtime.fp8_context_create(options, self.handle))
        abi.check(
            abi.runtime.fp8_context_set_provider(
                self.handle, abi.generator().fp8gen_jit_provider, None
            )
        )
        info = abi.DeviceInfo(size=ctypes.sizeof(abi.DeviceInfo))
        abi.check(abi.runtime.fp8_context_info(self.handle, info))
        self.cublaslt_version = info.cublaslt_version
        self.workspaces = {}
        # C functions without arguments, for the host's sake: the current stream as the runtime
        # takes it, 0 on the host, and whether a graph captures it.
        self.stream, self.capturing = int, bool
        if index != abi.HOST:
            self.stream = functools.partial(torch._C._cuda_getCurrentRawStream, index)
            self.capturing = torch._C._cuda_isCurrentStreamCapturing

    def at(self, state=0, flags=0):
        """Where and how a pass runs: (the current stream, whether a graph captures it, address of
        the C state of delayed scaling or 0, flags)."""
        return self.stream(), self.capturing(), state, flags

    def workspace(self, stream, capturing, size):
        """(owner, address, bytes, lock) of scratch for one call on `stream`; a graph under capture
        gets memory of its own pool. The lock is held over the C call: it runs without the GIL, and
        the kernels of two threads on one stream must not take turns in its scratch."""
        if self.index == abi.HOST:
            stream = threading.get_ident()  # the host backend runs on the calling thread
        held = None if capturing else self.workspaces.get(stream)
        if held is None or held[2] < size:
            if not capturing:
                self.workspaces[stream] = None
            memory = torch.empty(size, dtype=torch.uint8, device=self.device)
            held = memory, memory.data_ptr(), size, threading.Lock()
            if not capturing:
                self.workspaces[stream] = held
        return held


class Layer:
    """A layer of the runtime for up to max_tokens tokens."""

    def __init__(self, context, key, tokens):
        self.context, self.key, self.max_tokens = context, key, tokens
        self.handle = ctypes.c_void_p()
        description = key.description(tokens)
        description.stream = context.stream()  # a layer is not begun while it is captured
        abi.check(abi.runtime.fp8_context_layer(context.handle, description, self.handle))
        self.plans = {}  # by the number of tokens; calls.py makes them
        self.cuts = {}  # by the rows of a shard; shards.py makes them

    def workspace_bytes(self, tokens):
        size = ctypes.c_size_t()
        abi.check(abi.runtime.fp8_layer_bytes(self.handle, tokens, abi.BYTES_WORKSPACE, size))
        return size.value

    def dispatch(self, which, tokens):
        """What a pass would run for so many tokens: backend, kernel, dtype, reason, launches."""
        out = abi.Dispatch(size=ctypes.sizeof(abi.Dispatch))
        abi.check(abi.runtime.fp8_layer_dispatch(self.handle, which, tokens, out))
        words = {
            name: getattr(out, name).decode() for name in ("backend", "kernel", "dtype", "reason")
        }
        return dict(words, launches=out.launches)


_contexts, _layers = {}, {}
_lock = threading.Lock()


def context_of(index):
    context = _contexts.get(index)
    if context is None:
        with _lock:
            context = _contexts.get(index)
            if context is None:
                context = _contexts[index] = Context(index)
    return context


def _limit(tokens):
    """max_tokens of the layer that runs so many: few different ones."""
    return max(_MIN_TOKENS, 1 << (max(tokens, 1) - 1).bit_length())


def layer_of(key, tokens):
    """The layer of `key` that takes at least `tokens`; made at the first use of a shape."""
    layer = _layers.get(key)
    if layer is None or layer.max_tokens < tokens:
        made = Layer(context_of(key.device), key, _limit(tokens))
        with _lock:  # of threads that make one at once, all take the first
            layer = _layers.get(key)
            if layer is None or layer.max_tokens < tokens:
                layer = _layers[key] = made
    return layer


def prepare(
    shapes,
    tokens,
    device,
    recipe=Recipe(),
    weight=torch.bfloat16,
    output=torch.bfloat16,
    grad_input=torch.bfloat16,
    grad_weight=torch.bfloat16,
    shards=False,
):
    """Makes the layers of all shapes (N, K, has bias) at once; before the first collective.

    tokens: the most of one call. grad_weight: fp32 where weights have an fp32 main_grad. shards:
    for FP8 gathers.
    """
    index = device_index(torch.device(device))
    shards = shards and recipe.by_row
    keys = [
        Key(n, k, bool(bias), weight, output, grad_input, grad_weight, recipe, index, shards)
        for n, k, bias in shapes
    ]
    context = context_of(index)
    descriptions = (abi.LayerDescription * len(keys))(
        *(k.description(_limit(tokens)) for k in keys)
    )
    abi.check(abi.runtime.fp8_context_prepare(context.handle, descriptions, len(keys)))
    for key in keys:
        layer_of(key, tokens)
