"""fp8_linear: F.linear whose three products run in FP8, functional, with autograd.

    y = fp8_linear(x, weight, bias, state)

x has any rank and stride; dtypes and autocast are treated as F.linear treats them. What is kept for
backward is x's transposed FP8 copy and its scales: half of what bf16 keeps. A `State` belongs to one
weight and keeps its FP8 copies, made once for every version of the weight.

Two ways lead to the same C calls: an autograd.Function for eager mode (cheap on the host), and
torch.library operators with fake kernels wherever something traces (torch.compile, export, meta
tensors, dispatch modes). The operators are pure functions of their tensors; the state that they are
given by number only remembers the weight's copies.

Not obvious: the weight's copies are cached by the identity of its storage and by torch's version
counter, never by address. `weight.data.copy_()` does not count as a version; the step of any
torch.optim optimizer does, and `weights_changed()` is there for all others.
"""
import ctypes
import itertools
import weakref
from typing import Optional, Tuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_post_hook

from . import abi, operand
from .layers import CODE, Key, Recipe, device_index, layer_of

_runtime = abi.runtime
_address = ctypes.addressof
_SIZE = {struct: ctypes.sizeof(struct) for struct in abi.STRUCTS.values()}
_IO = (torch.bfloat16, torch.float32)  # what the runtime reads and writes

_epoch = 0


def weights_changed():
    """Tells all states that weights were written behind torch's version counters (`w.data.copy_`)."""
    global _epoch
    _epoch += 1


register_optimizer_step_post_hook(lambda *_: weights_changed())


# ---- state ----------------------------------------------------------------------------------------

_states = weakref.WeakValueDictionary()
_numbers = itertools.count(1)


class State:
    """What fp8_linear keeps for one weight: the recipe and the weight's FP8 copies.

    keep=False makes the copies anew in forward (row) and in backward (transposed) and keeps neither:
    for weights that are gathered for one call and given back.
    """

    def __init__(self, recipe=Recipe(), keep=True):
        self.recipe, self.keep = recipe, keep
        self.number = next(_numbers)
        _states[self.number] = self
        self._layers = {}
        self._data = None      # the operand's bytes
        self._copies = 0
        self._key = None       # of the weight that they were made from
        self._stream = None
        self._captured = False  # a graph has written the bytes: only graphs may trust them

    @staticmethod
    def by_number(number):
        """The living state of this number, or None."""
        return _states.get(number)

    def layer(self, x, weight, bias, y_dtype, dw_dtype, tokens):
        """The runtime's layer for these dtypes."""
        short = (x.dtype, weight.dtype, y_dtype, dw_dtype, bias, weight.shape, x.device)
        layer = self._layers.get(short)
        if layer is None or layer.max_tokens < tokens:
            n, k = weight.shape
            key = Key(n, k, bias, *(d if d in _IO else torch.float32 for d in (
                weight.dtype, y_dtype, x.dtype, dw_dtype)), self.recipe, device_index(x.device))
            layer = self._layers[short] = layer_of(key, tokens)
        return layer

    def weight(self, layer, weight, copies, forward):
        """(bytes, copies) of the weight's operand, quantised when it has changed."""
        if hasattr(weight, "fp8_operand"):
            return weight.fp8_operand(copies), copies
        if hasattr(weight, "fp8_source"):
            weight = weight.fp8_source()
        if not self.keep:
            return _quantize(layer, abi.ROLE_W, weight, copies, None), copies
        stream = layer.context.stream()
        capturing = stream is not None and torch.cuda.is_current_stream_capturing()
        key = identity(weight)
        same = key == self._key and self._copies & copies == copies
        if same and (not forward if capturing else not self._captured):
            if stream != self._stream and not capturing:
                torch.cuda.current_stream(weight.device).wait_stream(
                    torch.cuda.ExternalStream(self._stream, device=weight.device))
            return self._data, self._copies
        data = self._data
        if data is None or self._copies & copies != copies or data.device != weight.device:
            data = None
        else:
            copies = self._copies
        self._key = None
        self._data = _quantize(layer, abi.ROLE_W, weight, copies, data)
        self._copies, self._key, self._stream = copies, key, stream
        self._captured = self._captured or capturing
        return self._data, copies


class Storage:
    """The identity of a tensor's memory: a weak reference, so that the address is not used again."""
    __slots__ = ("reference",)

    def __init__(self, storage):
        self.reference = StorageWeakRef(storage)

    def __eq__(self, other):
        return self.reference.cdata == other.reference.cdata


def identity(tensor):
    """Equal for the same version of the same memory, seen in the same way; for comparing only."""
    if tensor.is_inference():
        return object()  # versions are not counted: never equal
    return (tensor._version, _epoch, tensor.storage_offset(), tensor.stride(), tensor.dtype,
            Storage(tensor.untyped_storage()))


def state_of(weight):
    """The state that belongs to a weight: its attribute, or one for the call if it is computed."""
    state = getattr(weight, "_fp8gen_state", None)
    if state is None:
        state = State(keep=weight.is_leaf)
        if weight.is_leaf:
            weight._fp8gen_state = state
    return state


# ---- the C calls ----------------------------------------------------------------------------------


def _matrix(tensor, dtype=None):
    """As a 2-D tensor with unit inner stride and no overlapping rows, in a dtype of the runtime."""
    if dtype is None:
        dtype = tensor.dtype if tensor.dtype in _IO else torch.float32
    if tensor.dtype is not dtype:
        tensor = tensor.to(dtype)
    if tensor.dim() != 2:
        tensor = tensor.reshape(-1, tensor.shape[-1])
    rows, cols = tensor.shape
    if (cols > 1 and tensor.stride(1) != 1) or (rows > 1 and tensor.stride(0) < cols):
        tensor = tensor.contiguous()
    return tensor


def _struct(tensor):
    rows, cols = tensor.shape
    return abi.Tensor(tensor.data_ptr(), rows, cols, tensor.stride(0) if rows > 1 else cols,
                      CODE[tensor.dtype])


def _quantize(layer, role, source, copies, data):
    """Bytes of the operand of a tensor; written into `data` if that is given."""
    source = _matrix(source.detach())
    rows, cols = source.shape
    if data is None:
        data = operand.empty(rows, cols, copies, source.device)
    call, _scratch = layer.call(rows if role != abi.ROLE_W else 0)
    tensor, out = _struct(source), operand.target(data)
    abi.check(_runtime.fp8_quantize(layer.handle, abi.QuantizeArgs(
        _SIZE[abi.QuantizeArgs], role, copies, 0, _address(tensor), _address(out), None, call)))
    return data


def _fprop(layer, x, weight, bias, y_dtype, save, lead):
    """(y, saved) of a 2-D x; weight is (bytes, copies); lead: y's dims but the last."""
    key = layer.key
    m, n, k = x.shape[0], key.out_features, key.in_features
    y = torch.empty(*lead, n, dtype=key.output, device=x.device)
    saved = operand.empty(m, k, abi.TRANSPOSED, x.device) if save else None
    call, _scratch = layer.call(m)
    tx, ty = _struct(x), abi.Tensor(y.data_ptr(), m, n, n, CODE[key.output])
    w = operand.filled(weight[0], abi.ROLE_W, abi.E4M3, n, k, weight[1])
    args = abi.FpropArgs(_SIZE[abi.FpropArgs], 0, _address(tx), None, _address(w), None,
                         _address(ty), None, None, call)
    if save:
        out = operand.target(saved)
        args.saved = _address(out)
    if bias is not None:
        tb = abi.Tensor(bias.data_ptr(), 1, n, n, abi.BF16)
        args.bias = _address(tb)
    abi.check(_runtime.fp8_layer_fprop(layer.handle, args))
    return (y if y_dtype is key.output else y.to(y_dtype)), saved


def _quantize_dy(layer, dy, copies, dbias):
    m, n = dy.shape
    grad = operand.empty(m, n, copies or abi.ROW, dy.device)
    call, _scratch = layer.call(m)
    tensor, out = _struct(dy), operand.target(grad)
    args = abi.QuantizeDyArgs(_SIZE[abi.QuantizeDyArgs], copies or abi.ROW, _address(tensor), None,
                              _address(out), None, 0, 0, None, call)
    if dbias is not None:
        tb = abi.Tensor(dbias.data_ptr(), 1, n, n, abi.FP32)
        args.dbias = _address(tb)
    abi.check(_runtime.fp8_layer_quantize_dy(layer.handle, args))
    return grad, copies


def _wgrad(layer, m, saved, grad, dw, accumulate):
    key = layer.key
    n, k = key.out_features, key.in_features
    saved = operand.aligned(saved)
    call, _scratch = layer.call(m)
    x = operand.filled(saved, abi.ROLE_X, abi.E4M3, m, k, abi.TRANSPOSED)
    dy = operand.filled(grad[0], abi.ROLE_DY, layer.dy_format, m, n, grad[1])
    out = abi.Tensor(dw.data_ptr(), n, k, dw.stride(0) if n > 1 else k, CODE[dw.dtype])
    abi.check(_runtime.fp8_layer_wgrad(layer.handle, abi.WgradArgs(
        _SIZE[abi.WgradArgs], accumulate, _address(x), _address(dy), _address(out), call)))


def _dgrad(layer, m, grad, weight, lead):
    key = layer.key
    n, k = key.out_features, key.in_features
    dx = torch.empty(*lead, k, dtype=key.grad_input, device=layer.context.device)
    call, _scratch = layer.call(m)
    dy = operand.filled(grad[0], abi.ROLE_DY, layer.dy_format, m, n, grad[1])
    w = operand.filled(weight[0], abi.ROLE_W, abi.E4M3, n, k, weight[1])
    out = abi.Tensor(dx.data_ptr(), m, k, k, CODE[key.grad_input])
    abi.check(_runtime.fp8_layer_dgrad(layer.handle, abi.DgradArgs(
        _SIZE[abi.DgradArgs], 0, _address(dy), _address(w), _address(out), call)))
    return dx


# ---- forward and backward of one call ---------------------------------------------------------------


def _forward(state, x, weight, bias, y_dtype, dw_dtype, save, want_dx):
    """(y in x's shape, saved or None)"""
    shape = x.shape
    tokens = x.numel() // shape[-1]
    layer = state.layer(x, weight, bias is not None, y_dtype, dw_dtype, tokens)
    copies = abi.BOTH if want_dx and state.keep else abi.ROW
    w = state.weight(layer, weight, copies, True)
    if bias is not None and bias.dtype is not torch.bfloat16:
        bias = bias.to(torch.bfloat16)
    if bias is not None:
        bias = bias.contiguous()
    return _fprop(layer, _matrix(x, torch.bfloat16), w, bias, y_dtype, save, shape[:-1])


def _backward(state, dy, saved, weight, like, want, main_grad):
    """(dx, dw, dbias), each None if not in `want`; dw is added to main_grad if that is given.

    like: (x's dtype, y's dtype, dw's dtype, has bias); it finds forward's layer again.
    """
    want_dx, want_dw, want_dbias = want
    x_dtype, y_dtype, dw_dtype, has_bias = like
    n, k = weight.shape
    shape = dy.shape
    dy = _matrix(dy, torch.bfloat16)
    m = dy.shape[0]
    example = torch.empty(0, dtype=x_dtype, device=dy.device)
    layer = state.layer(example, weight, has_bias, y_dtype, dw_dtype, m)
    dbias = torch.empty(n, dtype=torch.float32, device=dy.device) if want_dbias else None
    copies = (abi.ROW if want_dx else 0) | (abi.TRANSPOSED if want_dw else 0)
    grad = _quantize_dy(layer, dy, copies, dbias)
    dx = dw = None
    if want_dw and main_grad is not None:
        _wgrad(layer, m, saved, grad, main_grad, 1)
    elif want_dw:
        dw = torch.empty(n, k, dtype=layer.key.grad_weight, device=dy.device)
        _wgrad(layer, m, saved, grad, dw, 0)
        dw = dw if dw.dtype is dw_dtype else dw.to(dw_dtype)
    if want_dx:
        dx = _dgrad(layer, m, grad, state.weight(layer, weight, abi.TRANSPOSED, False), shape[:-1])
        dx = dx if dx.dtype is x_dtype else dx.to(x_dtype)
    return dx, dw, dbias


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, state, y_dtype, dw_dtype, main_grad):
        want_dx, want_dw = ctx.needs_input_grad[:2]
        y, saved = _forward(state, x, weight, bias, y_dtype, dw_dtype, want_dw, want_dx)
        ctx.save_for_backward(saved, weight)
        ctx.state, ctx.main_grad = state, main_grad
        ctx.like = x.dtype, y_dtype, dw_dtype, bias is not None
        ctx.bias_dtype = bias.dtype if bias is not None else None
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        saved, weight = ctx.saved_tensors
        dx, dw, dbias = _backward(ctx.state, dy, saved, weight, ctx.like, ctx.needs_input_grad[:3],
                                  ctx.main_grad)
        if dbias is not None:
            dbias = dbias.to(ctx.bias_dtype)
        if ctx.main_grad is not None:
            weight.grad_added_to_main_grad = True
        return dx, dw, dbias, None, None, None, None


# ---- operators for what traces ----------------------------------------------------------------------


@torch.library.custom_op("fp8gen::linear", mutates_args=())
def _linear_op(x: Tensor, weight: Tensor, bias: Optional[Tensor], main_grad: Optional[Tensor],
               state: int, y_dtype: torch.dtype, dw_dtype: torch.dtype, save: bool,
               want_dx: bool) -> Tuple[Tensor, Tensor]:
    y, saved = _forward(_states[state], x, weight, bias, y_dtype, dw_dtype, save, want_dx)
    return y, saved if save else x.new_empty(0, dtype=torch.uint8)


@_linear_op.register_fake
def _(x, weight, bias, main_grad, state, y_dtype, dw_dtype, save, want_dx):
    n, k = weight.shape
    tokens = x.numel() // k
    size = operand.operand_bytes(tokens, k, abi.TRANSPOSED) if save else 0
    return (x.new_empty(*x.shape[:-1], n, dtype=y_dtype), x.new_empty(size, dtype=torch.uint8))


def _backward_op(dy, saved, weight, main_grad, state, x_dtype, y_dtype, dw_dtype, has_bias, want):
    wants = bool(want & 1), bool(want & 2), bool(want & 4)
    dx, dw, dbias = _backward(_states[state], dy, saved, weight,
                              (x_dtype, y_dtype, dw_dtype, has_bias), wants, main_grad)
    none = dy.new_empty(0)
    return [none.clone() if t is None else t for t in (dx, dw, dbias)]


def _backward_fake(dy, saved, weight, main_grad, state, x_dtype, y_dtype, dw_dtype, has_bias, want):
    n, k = weight.shape
    dx = dy.new_empty(*dy.shape[:-1], k, dtype=x_dtype) if want & 1 else dy.new_empty(0)
    dw = (dy.new_empty(n, k, dtype=dw_dtype) if want & 2 and main_grad is None
          else dy.new_empty(0))
    dbias = dy.new_empty(n, dtype=torch.float32) if want & 4 else dy.new_empty(0)
    return [dx, dw, dbias]


@torch.library.custom_op("fp8gen::linear_backward", mutates_args=())
def _grad_op(dy: Tensor, saved: Tensor, weight: Tensor, state: int, x_dtype: torch.dtype,
             y_dtype: torch.dtype, dw_dtype: torch.dtype, has_bias: bool,
             want: int) -> Tuple[Tensor, Tensor, Tensor]:
    return tuple(_backward_op(dy, saved, weight, None, state, x_dtype, y_dtype, dw_dtype, has_bias,
                              want))


@_grad_op.register_fake
def _(dy, saved, weight, state, x_dtype, y_dtype, dw_dtype, has_bias, want):
    return tuple(_backward_fake(dy, saved, weight, None, state, x_dtype, y_dtype, dw_dtype,
                                has_bias, want))


@torch.library.custom_op("fp8gen::linear_backward_add", mutates_args=("main_grad",))
def _grad_add_op(dy: Tensor, saved: Tensor, weight: Tensor, main_grad: Tensor, state: int,
                 x_dtype: torch.dtype, y_dtype: torch.dtype, dw_dtype: torch.dtype, has_bias: bool,
                 want: int) -> Tuple[Tensor, Tensor]:
    dx, _, dbias = _backward_op(dy, saved, weight, main_grad, state, x_dtype, y_dtype, dw_dtype,
                                has_bias, want)
    return dx, dbias


@_grad_add_op.register_fake
def _(dy, saved, weight, main_grad, state, x_dtype, y_dtype, dw_dtype, has_bias, want):
    dx, _, dbias = _backward_fake(dy, saved, weight, main_grad, state, x_dtype, y_dtype, dw_dtype,
                                  has_bias, want)
    return dx, dbias


def _setup(ctx, inputs, output):
    x, weight, bias, main_grad, state, y_dtype, dw_dtype, _, _ = inputs
    saved = output[1]
    ctx.mark_non_differentiable(saved)
    ctx.save_for_backward(saved, weight)
    ctx.main_grad, ctx.number = main_grad, state
    ctx.like = x.dtype, y_dtype, dw_dtype, bias is not None
    ctx.bias_dtype = bias.dtype if bias is not None else None


def _op_backward(ctx, dy, _):
    saved, weight = ctx.saved_tensors
    want_dx, want_dw, want_dbias = ctx.needs_input_grad[:3]
    want = want_dx * 1 + want_dw * 2 + want_dbias * 4
    if ctx.main_grad is not None and want_dw:
        dx, dbias = _grad_add_op(dy, saved, weight, ctx.main_grad, ctx.number, *ctx.like, want)
        dw = None
    else:
        dx, dw, dbias = _grad_op(dy, saved, weight, ctx.number, *ctx.like, want)
    return (dx if want_dx else None, dw if want_dw else None,
            dbias.to(ctx.bias_dtype) if want_dbias else None, None, None, None, None, None, None)


_linear_op.register_autograd(_op_backward, setup_context=_setup)


# ---- the function -----------------------------------------------------------------------------------

_PLAIN = (Tensor, torch.nn.Parameter)


def _output_dtype(x):
    kind = x.device.type
    if kind != "meta" and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return x.dtype


def _check(x, weight, bias):
    if weight.dim() != 2 or x.dim() < 1 or x.shape[-1] != weight.shape[1]:
        raise RuntimeError(f"fp8_linear: x is {tuple(x.shape)} and weight {tuple(weight.shape)}; "
                           "x's last dim must be the weight's second of two")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise RuntimeError(f"fp8_linear: bias is {tuple(bias.shape)}, but the weight has "
                           f"{weight.shape[0]} rows")
    for name, tensor in (("x", x), ("weight", weight), ("bias", bias)):
        if tensor is not None and tensor.dtype not in (torch.bfloat16, torch.float32, torch.float16):
            raise TypeError(f"fp8_linear: {name} is {tensor.dtype}; it takes bf16, fp32 and fp16")
        if tensor is not None and tensor.device != x.device:
            raise RuntimeError(f"fp8_linear: {name} is on {tensor.device}, but x on {x.device}")


def fp8_linear(x, weight, bias=None, state=None):
    """y[..., N] = x[..., K] weight[N, K]^T + bias[N], with all three products in FP8.

    state: a `State`, kept by the caller for this weight; None: the one that the weight carries.
    Output dtype, autocast and gradient dtypes are F.linear's. A weight with an fp32 or bf16 attribute
    `main_grad` gets its gradient added there, in the product's epilogue; its .grad stays None and
    `weight.grad_added_to_main_grad` is set. A failed call raises Fp8Error; nothing falls back.
    """
    _check(x, weight, bias)
    if state is None:
        state = state_of(weight)
    y_dtype = _output_dtype(x)
    main_grad = getattr(weight, "main_grad", None)
    dw_dtype = weight.dtype if main_grad is None else main_grad.dtype
    if (torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0
            or type(x) not in _PLAIN or x.is_meta
            or not (type(weight) in _PLAIN or hasattr(weight, "fp8_state"))):
        grad = torch.is_grad_enabled()
        return _linear_op(x, weight, bias, main_grad, state.number, y_dtype, dw_dtype,
                          grad and weight.requires_grad, grad and x.requires_grad)[0]
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad
                                    or (bias is not None and bias.requires_grad)):
        return _Linear.apply(x, weight, bias, state, y_dtype, dw_dtype, main_grad)
    return _forward(state, x, weight, bias, y_dtype, dw_dtype, False, False)[0]


class Fp8Linear(torch.nn.Linear):
    """nn.Linear over fp8_linear: the same parameters and state dict."""

    def __init__(self, *args, recipe=Recipe(), **kwargs):
        super().__init__(*args, **kwargs)
        self.fp8_state = State(recipe)

    def forward(self, x):
        return fp8_linear(x, self.weight, self.bias, self.fp8_state)
