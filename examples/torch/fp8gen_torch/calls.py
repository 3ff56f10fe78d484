"""The passes of a layer on torch tensors, with the C structs prepared: fprop and backward for
State.forward and State.backward to fill in, the others as a function each.

In: tensors as `placed` makes them and operands as uint8 tensors; out: new tensors, or memory that
the caller gave. Everything runs on the current stream. Knows nothing of autograd or of states.

A `Plan` (one layer, one number of tokens) keeps prepared calls in pools: a call takes one, sets
addresses, and gives it back. Pops and appends of a list are atomic, and two threads never hold the
same one.
"""

import collections
import ctypes

import torch

from . import abi, operand
from .layers import CODE
from .prepared import Layout

_runtime = abi.runtime
_BF16 = torch.bfloat16
_IO = (torch.bfloat16, torch.float32)  # what the runtime reads and writes
_T, _O = abi.Tensor, abi.Operand

# Words of the calls: FPROP_X is x->data, FPROP_X_LD x->ld; of the others the ld is _LD behind data.
_LD = _T.ld.offset // 8
FPROP = Layout(abi.FpropArgs, x=_T, weight=_O, bias=_T, y=_T, saved=_O, w=_T)
FPROP_X, FPROP_Y = FPROP.word("x", "data"), FPROP.word("y", "data")
FPROP_WEIGHT, FPROP_BIAS = FPROP.word("weight", "data"), FPROP.word("bias", "data")
FPROP_SAVED, FPROP_W = FPROP.word("saved", "data"), FPROP.word("w", "data")
FPROP_X_LD, FPROP_W_LD = FPROP.word("x", "ld"), FPROP.word("w", "ld")
FPROP_CALL = FPROP.call
BACKWARD = Layout(
    abi.BackwardArgs, dy=_T, saved=_O, weight=_O, grad=_O, dbias=_T, dw=_T, dx=_T, x=_T
)
BACKWARD_DY, BACKWARD_X = BACKWARD.word("dy", "data"), BACKWARD.word("x", "data")
BACKWARD_SAVED = BACKWARD.word("saved", "data")
BACKWARD_WEIGHT = BACKWARD.word("weight", "data")
BACKWARD_DX, BACKWARD_DW = BACKWARD.word("dx", "data"), BACKWARD.word("dw", "data")
BACKWARD_DBIAS, BACKWARD_GRAD = BACKWARD.word("dbias", "data"), BACKWARD.word("grad", "data")
BACKWARD_DY_LD, BACKWARD_DW_LD, BACKWARD_X_LD = (
    BACKWARD.word(name, "ld") for name in ("dy", "dw", "x")
)
BACKWARD_CALL = BACKWARD.call
_QUANTIZE = Layout(abi.QuantizeArgs, source=_T, operand=_O)
_QUANTIZE_SOURCE, _QUANTIZE_TO = _QUANTIZE.word("source", "data"), _QUANTIZE.word("operand", "data")
_QUANTIZE_DY = Layout(abi.QuantizeDyArgs, dy=_T, grad=_O, dbias=_T)
_QUANTIZE_DY_DY = _QUANTIZE_DY.word("dy", "data")
_QUANTIZE_DY_TO = _QUANTIZE_DY.word("grad", "data")
_QUANTIZE_DY_DBIAS = _QUANTIZE_DY.word("dbias", "data")
_WGRAD = Layout(abi.WgradArgs, saved=_O, grad=_O, dw=_T, x=_T, dy=_T)
_WGRAD_SAVED, _WGRAD_GRAD = _WGRAD.word("saved", "data"), _WGRAD.word("grad", "data")
_WGRAD_X, _WGRAD_DY, _WGRAD_DW = (_WGRAD.word(name, "data") for name in ("x", "dy", "dw"))
_DGRAD = Layout(abi.DgradArgs, grad=_O, weight=_O, dx=_T)
_DGRAD_GRAD, _DGRAD_WEIGHT = _DGRAD.word("grad", "data"), _DGRAD.word("weight", "data")
_DGRAD_DX = _DGRAD.word("dx", "data")


def matrix(tensor, dtype=None):
    """As a 2-D tensor with unit inner stride and no overlapping rows, in a dtype of the runtime."""
    if dtype is None:
        dtype = tensor.dtype if tensor.dtype in _IO else torch.float32
    if tensor.dtype is not dtype:
        tensor = tensor.to(dtype)
    if tensor.dim() != 2:
        tensor = tensor.reshape(-1, tensor.shape[-1])
    rows, cols = tensor.shape
    row, col = tensor.stride()
    if (cols > 1 and col != 1) or (rows > 1 and row < cols):
        tensor = tensor.contiguous()
    return tensor


def placed(tensor, cols):
    """(tensor, elements from one row to the next) of a bf16 matrix of so many columns; of any rank
    if it is contiguous, which saves a view."""
    if tensor.dtype is _BF16 and tensor.is_contiguous():
        return tensor, cols
    tensor = matrix(tensor, _BF16)
    return tensor, tensor.stride(0)


def pattern(shape, dtype, device):
    """For torch.empty_like, which costs the host less than torch.empty: a tensor of this shape
    whose memory has been given back."""
    tensor = torch.empty(shape, dtype=dtype, device=device)
    tensor.untyped_storage().resize_(0)
    return tensor


def _tensor(rows, cols, dtype):
    return abi.Tensor(None, rows, cols, cols, CODE[dtype])


def _operand(role, dtype, rows, cols, copies, scalings):
    """role = dtype = 0: memory that a call fills."""
    return abi.Operand(
        size=ctypes.sizeof(abi.Operand),
        role=role,
        bytes=operand.operand_bytes(rows, cols, copies, scalings),
        dtype=dtype,
        copies=operand.there(copies, scalings),
        row_scaling=scalings[0] if role else 0,
        transposed_scaling=scalings[1] if role else 0,
        rows=rows,
        cols=cols,
    )


class Plan:
    """A layer at a number of tokens."""

    def __init__(self, layer, m):
        key = layer.key
        self.layer, self.m, self.n, self.k = layer, m, key.out_features, key.in_features
        self.handle, self.context, self.device = layer.handle, layer.context, layer.context.device
        self.at, self.stream = self.context.at, self.context.stream
        self.capturing, self.workspaces = self.context.capturing, self.context.workspaces
        self.place = self.device, self.n, self.k  # what a weight's operand is laid out for
        self.output, self.w_dtype = key.output, key.weight
        self.grad_input, self.grad_weight = key.grad_input, key.grad_weight
        self.dy_format = key.recipe.dy_dtype
        self.x_scalings = key.recipe.scalings(abi.ROLE_X)  # dy's too
        self.w_scalings = key.recipe.scalings(abi.ROLE_W)
        # wgrad multiplies x and dy as they are: what forward saves for it is x
        self.saves_x = self.x_scalings[1] == abi.NO_COPY
        self.workspace_bytes = layer.workspace_bytes(m)
        self.saved_bytes = operand.operand_bytes(m, self.k, abi.TRANSPOSED, self.x_scalings)
        cuda = self.device.type != "cpu"  # there memory() is torch.empty
        self.saved = pattern((self.saved_bytes,), torch.uint8, self.device) if cuda else None
        self.dw = pattern((self.n, self.k), self.grad_weight, self.device)
        grad = operand.operand_bytes(m, self.n, abi.BOTH, self.x_scalings)
        self.pools = collections.defaultdict(list)  # of prepared calls, by their kind
        self.backward_bytes = self.workspace_bytes + grad + 255  # dy's operand lies behind it

    def weight_struct(self, copies):
        return _operand(abi.ROLE_W, abi.E4M3, self.n, self.k, copies, self.w_scalings)

    def _x(self):
        return _operand(abi.ROLE_X, abi.E4M3, self.m, self.k, abi.TRANSPOSED, self.x_scalings)

    def _dy(self, copies):
        return _operand(abi.ROLE_DY, self.dy_format, self.m, self.n, copies, self.x_scalings)

    def _empty(self, cols, copies):
        return _operand(0, 0, self.m, cols, copies, self.x_scalings)

    def _make(self, layout, values=(), **parts):
        call = abi.Call(workspace_bytes=self.workspace_bytes)
        return layout.make(dict(values, call=call), **parts)

    def run(self, function, args, at):
        """A call whose args struct is made for it, and which reads no state of delayed scaling."""
        call, (stream, capturing, _, _) = args.call, at
        size = self.workspace_bytes
        _memory, call.workspace, _, lock = self.context.workspace(stream, capturing, size)
        call.stream = stream
        call.workspace_bytes = size
        with lock:
            status = function(self.handle, args)
        abi.check(status)

    def _run(self, function, prepared, first, at):
        """A prepared call; its fp8_call begins at word `first`. at: as State.at gives it."""
        words, pointer = prepared
        stream, capturing, state, flags = at
        held = self.context.workspace(stream, capturing, self.workspace_bytes)
        words[first], words[first + 2], words[first + 3] = held[1], stream, flags << 32
        words[first + 4] = state
        with held[3]:
            status = function(self.handle, pointer)
        if status:
            abi.check(status)

    def new_dx(self, lead):
        return torch.empty((*lead, self.k), dtype=self.grad_input, device=self.device)

    def new_dw(self):
        return torch.empty_like(self.dw)

    def prepare_fprop(self, copies, save, makes):
        """A call for a weight of these copies; makes: they are made first."""
        key = self.layer.key
        return self._make(
            FPROP,
            x=_tensor(self.m, self.k, _BF16),
            weight=self.weight_struct(copies),
            y=_tensor(self.m, self.n, self.output),
            bias=_tensor(1, self.n, _BF16) if key.bias else None,
            saved=self._empty(self.k, abi.TRANSPOSED) if save else None,
            w=_tensor(self.n, self.k, key.weight) if makes else None,
        )

    def source(self, weight):
        """As fp8_quantize reads it: (tensor, elements from one row to the next)."""
        if weight.dtype is self.w_dtype and weight.is_contiguous():
            return weight, self.k
        weight = matrix(weight.detach(), self.w_dtype)
        return weight, weight.stride(0)

    def prepare_backward(self, copies, wants, accumulate):
        """A call that fills those of dx, dw and dbias that are wanted."""
        want_dx, want_dw, want_dbias, _ = wants
        grad = (abi.ROW if want_dx else 0) | (abi.TRANSPOSED if want_dw else 0)
        return self._make(
            BACKWARD,
            {"accumulate_dw": accumulate},
            dy=_tensor(self.m, self.n, _BF16),
            saved=self._x() if want_dw and not self.saves_x else None,
            weight=self.weight_struct(copies) if want_dx else None,
            grad=self._empty(self.n, grad or abi.ROW),
            dbias=_tensor(1, self.n, torch.float32) if want_dbias else None,
            dw=_tensor(self.n, self.k, self.grad_weight) if want_dw else None,
            dx=_tensor(self.m, self.k, self.grad_input) if want_dx else None,
            x=_tensor(self.m, self.k, _BF16) if want_dw and self.saves_x else None,
        )

    # The parts of backward, for those who put something between them.

    def quantize_dy(self, dy, copies, dbias, at):
        """Bytes of dy's operand; fills dbias[N] fp32 if that is given."""
        copies = copies or abi.ROW
        dy, ld = placed(dy, self.n)
        pool = self.pools[("quantize_dy", copies, dbias is None)]
        try:
            prepared = pool.pop()
        except IndexError:
            prepared = self._make(
                _QUANTIZE_DY,
                {"copies": copies},
                dy=_tensor(self.m, self.n, _BF16),
                grad=self._empty(self.n, copies),
                dbias=None if dbias is None else _tensor(1, self.n, torch.float32),
            )
        words = prepared[0]
        grad = operand.empty(self.m, self.n, copies, self.device, self.x_scalings)
        words[_QUANTIZE_DY_DY], words[_QUANTIZE_DY_DY + _LD] = dy.data_ptr(), ld
        words[_QUANTIZE_DY_TO] = grad.data_ptr()
        if dbias is not None:
            words[_QUANTIZE_DY_DBIAS] = dbias.data_ptr()
        self._run(_runtime.fp8_layer_quantize_dy, prepared, _QUANTIZE_DY.call, at)
        pool.append(prepared)
        return grad

    def wgrad(self, saved, grad, copies, dw, dy, at):
        """dw[N,K] of saved and of dy's operand, which has `copies`, or of dy itself."""
        pool = self.pools[("wgrad", copies, dw.dtype)]
        quantized = not self.saves_x
        try:
            prepared = pool.pop()
        except IndexError:
            prepared = self._make(
                _WGRAD,
                saved=self._x() if quantized else None,
                grad=self._dy(copies) if quantized else None,
                dw=_tensor(self.n, self.k, dw.dtype),
                x=None if quantized else _tensor(self.m, self.k, _BF16),
                dy=None if quantized else _tensor(self.m, self.n, _BF16),
            )
        words = prepared[0]
        if quantized:
            saved = operand.aligned(saved)
            words[_WGRAD_SAVED], words[_WGRAD_GRAD] = saved.data_ptr(), grad.data_ptr()
        else:
            dy, ld = placed(dy, self.n)
            words[_WGRAD_X], words[_WGRAD_X + _LD] = saved.data_ptr(), saved.stride(0)
            words[_WGRAD_DY], words[_WGRAD_DY + _LD] = dy.data_ptr(), ld
        words[_WGRAD_DW], words[_WGRAD_DW + _LD] = dw.data_ptr(), dw.stride(0)
        self._run(_runtime.fp8_layer_wgrad, prepared, _WGRAD.call, at)
        pool.append(prepared)

    def dgrad(self, grad, copies, weight, dx, at):
        """Fills dx[..., K] of dy's operand, which has `copies`, and of weight = (bytes, copies)."""
        weight, w_copies = weight
        pool = self.pools[("dgrad", copies, w_copies)]
        try:
            prepared = pool.pop()
        except IndexError:
            prepared = self._make(
                _DGRAD,
                grad=self._dy(copies),
                weight=self.weight_struct(w_copies),
                dx=_tensor(self.m, self.k, self.grad_input),
            )
        words = prepared[0]
        words[_DGRAD_GRAD], words[_DGRAD_WEIGHT] = grad.data_ptr(), weight.data_ptr()
        words[_DGRAD_DX] = dx.data_ptr()
        self._run(_runtime.fp8_layer_dgrad, prepared, _DGRAD.call, at)
        pool.append(prepared)


def quantize_weight(plan, weight, copies, at, data=None):
    """Bytes of a weight's operand; written into `data` if that is given."""
    source, ld = plan.source(weight)
    if data is None:
        data = operand.empty(plan.n, plan.k, copies, plan.device, plan.w_scalings)
    pool = plan.pools[("weight", copies)]
    try:
        prepared = pool.pop()
    except IndexError:
        prepared = plan._make(
            _QUANTIZE,
            {"role": abi.ROLE_W, "copies": copies},
            source=_tensor(plan.n, plan.k, source.dtype),
            operand=_operand(0, 0, plan.n, plan.k, copies, plan.w_scalings),
        )
    words = prepared[0]
    words[_QUANTIZE_SOURCE], words[_QUANTIZE_SOURCE + _LD] = source.data_ptr(), ld
    words[_QUANTIZE_TO] = data.data_ptr()
    plan._run(_runtime.fp8_quantize, prepared, _QUANTIZE.call, at)
    pool.append(prepared)
    return data


def plan_of(layer, m):
    plan = layer.plans.get(m)
    if plan is None:
        if len(layer.plans) > 4096:  # numbers of tokens that never come back
            layer.plans.clear()
        plan = layer.plans[m] = Plan(layer, m)
    return plan
