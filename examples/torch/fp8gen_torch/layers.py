"""Layers of the runtime for the shapes and dtypes that turn up: described, built once, kept.

A layer is asked for by what decides its kernels (features, dtypes, recipe, device) and comes from a
bundle that the generator finds in the user's cache, or makes and puts there (fp8gen_jit_bundle).
Contexts, bundles and layers live until the process ends: there are few of them and they are shared by
all threads.

Must not know: autograd, modules, communicators.
"""
import ctypes
import dataclasses
import threading

import torch

from . import abi

CODE = {torch.bfloat16: abi.BF16, torch.float32: abi.FP32, torch.float16: abi.FP16,
        torch.float8_e4m3fn: abi.E4M3, torch.float8_e5m2: abi.E5M2, torch.uint8: abi.UINT8}
WORD = {torch.bfloat16: "bf16", torch.float32: "fp32"}
_ARCHS = {90: "sm_90a", 100: "sm_100a", 103: "sm_103a", 120: "sm_120a"}
_MIN_TOKENS = 8192


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How a layer is scaled and summed; the fields of a spec's recipe and accumulation."""
    name: str = "current"
    format: str = "hybrid"  # x and w E4M3, dy E5M2; "e4m3": all E4M3
    power_of_two: bool = False
    fprop: str = "fast"     # accumulation of each product: "fast" or "split"
    dgrad: str = "split"
    wgrad: str = "split"

    def spec(self):
        fields = f'format = "{self.format}"'
        if self.power_of_two:
            fields += ", power_of_two = true"
        sums = f'fprop = "{self.fprop}", dgrad = "{self.dgrad}", wgrad = "{self.wgrad}"'
        return f"recipe = recipe.{self.name} {{ {fields} }}, accumulation = {{ {sums} }}"

    @property
    def dy_dtype(self):
        return abi.E5M2 if self.format == "hybrid" else abi.E4M3


@dataclasses.dataclass(frozen=True)
class Key:
    """What decides the kernels of a layer."""
    out_features: int
    in_features: int
    bias: bool
    weight: torch.dtype       # bf16 or fp32
    output: torch.dtype       # of y
    grad_input: torch.dtype   # of dx
    grad_weight: torch.dtype  # of dw
    recipe: Recipe
    device: int               # CUDA ordinal, or -1: the host

    def spec(self, tokens):
        return (f'return model "torch" {{ layers = {{ linear "layer" {{ '
                f"in_features = {self.in_features}, out_features = {self.out_features}, "
                f"tokens = {tokens}, bias = {'true' if self.bias else 'false'}, "
                f'weight = "{WORD[self.weight]}", output = "{WORD[self.output]}", '
                f'grad_input = "{WORD[self.grad_input]}", grad_weight = "{WORD[self.grad_weight]}", '
                f"{self.recipe.spec()} }} }} }}\n")


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
        options = abi.ContextOptions(size=ctypes.sizeof(abi.ContextOptions), device=index)
        self.index = index
        self.device = torch.device("cpu") if index == abi.HOST else torch.device("cuda", index)
        self.handle = ctypes.c_void_p()
        abi.check(abi.runtime.fp8_context_create(options, self.handle))
        info = abi.DeviceInfo(size=ctypes.sizeof(abi.DeviceInfo))
        abi.check(abi.runtime.fp8_context_info(self.handle, info))
        self.arch = _ARCHS.get(info.arch, f"sm_{info.arch}") if index != abi.HOST else "none"
        self.workspaces = {}
        self.captured = []  # keeps the workspaces of captured graphs apart from the streams' own

    def stream(self):
        if self.index == abi.HOST:
            return None
        return torch._C._cuda_getCurrentRawStream(self.index)

    def workspace(self, stream, size):
        """Scratch for one call on `stream`; a graph under capture gets memory of its own pool."""
        if stream is None:
            stream = threading.get_ident()  # the host backend runs on the calling thread
        elif torch.cuda.is_current_stream_capturing():
            return torch.empty(size, dtype=torch.uint8, device=self.device)
        held = self.workspaces.get(stream)
        if held is None or held.numel() < size:
            self.workspaces[stream] = None
            held = torch.empty(size, dtype=torch.uint8, device=self.device)
            self.workspaces[stream] = held
        return held


class Layer:
    """A layer of the runtime for up to max_tokens tokens."""

    def __init__(self, context, key, tokens):
        self.context, self.key, self.max_tokens = context, key, tokens
        self.handle = _create(context, key, tokens)
        self.dy_format = key.recipe.dy_dtype
        self._workspace_bytes = {}

    def workspace_bytes(self, tokens):
        size = self._workspace_bytes.get(tokens)
        if size is None:
            got = ctypes.c_size_t()
            abi.check(abi.runtime.fp8_layer_bytes(self.handle, tokens, abi.BYTES_WORKSPACE, got))
            size = self._workspace_bytes[tokens] = got.value
        return size

    def call(self, tokens):
        """An fp8_call on the current stream, and the workspace that must outlive the launch."""
        context = self.context
        stream = context.stream()
        memory = context.workspace(stream, self.workspace_bytes(tokens))
        return abi.Call(memory.data_ptr(), memory.numel(), stream, 0, 0), memory

    def dispatch(self, which, tokens):
        """What a pass would run for so many tokens: backend, kernel, dtype, reason, launches."""
        out = abi.Dispatch(size=ctypes.sizeof(abi.Dispatch))
        abi.check(abi.runtime.fp8_layer_dispatch(self.handle, which, tokens, out))
        words = {name: getattr(out, name).decode() for name in ("backend", "kernel", "dtype", "reason")}
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


def layer_of(key, tokens):
    """The layer of `key` that takes at least `tokens`; made at the first use of a shape."""
    layer = _layers.get(key)
    if layer is None or layer.max_tokens < tokens:
        limit = max(_MIN_TOKENS, 1 << (max(tokens, 1) - 1).bit_length())
        context = context_of(key.device)
        with _lock:
            layer = _layers.get(key)
            if layer is None or layer.max_tokens < tokens:
                layer = _layers[key] = Layer(context, key, limit)
    return layer


# ---- bundles --------------------------------------------------------------------------------------


def _bundle(text, arch):
    """The folder of the bundle of a spec: from the user's cache, or compiled now and put there."""
    library = abi.generator()
    options = abi.JitOptions(size=ctypes.sizeof(abi.JitOptions), archs=arch.encode())
    path = ctypes.create_string_buffer(4096)
    spec = text.encode()
    if library.fp8gen_jit_bundle(options, b"torch.lua", spec, len(spec), path, len(path)):
        raise RuntimeError("fp8gen could not build the layer:\n" + library.fp8gen_jit_error().decode())
    return path.value


def _create(context, key, tokens):
    path = _bundle(key.spec(tokens), context.arch)
    bundle, layer = ctypes.c_void_p(), ctypes.c_void_p()
    abi.check(abi.runtime.fp8_bundle_open(context.handle, path, bundle))
    abi.check(abi.runtime.fp8_layer_create(bundle, b"layer", layer))
    return layer
