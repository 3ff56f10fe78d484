"""The passes of a layer on torch tensors: one function each, with the C structs prepared.

In: 2-D tensors as `matrix` makes them and operands as uint8 tensors; out: new tensors, or memory
that the caller gave. Everything runs on the current stream. Knows nothing of autograd or of states.

Not obvious: filling a dozen fields through ctypes costs more than the launch. A `Plan` (one layer,
one number of tokens) therefore keeps structs with all that does not change, pointers between them
included; a call takes one from the pool, sets addresses, and gives it back. Pops and appends of a
list are atomic, and two threads never hold the same one.
"""

import ctypes

import torch

from . import abi, operand
from .layers import CODE

_runtime = abi.runtime
_address = ctypes.addressof
_IO = (torch.bfloat16, torch.float32)  # what the runtime reads and writes
NO_HISTORY = (None, 0)


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


def _size(struct):
    return ctypes.sizeof(type(struct))


class _Prepared:
    """An args struct, the structs that it points to, and what ctypes passes to the call."""

    def __init__(self, args_type, **parts):
        self.args = args_type()
        self.args.size = _size(self.args)
        self.call = self.args.call
        self.ref = ctypes.byref(self.args)
        for name, part in parts.items():
            setattr(self, name, part)
            if part is not None:
                setattr(self.args, name, _address(part))


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
        self.output, self.grad_input, self.grad_weight = key.output, key.grad_input, key.grad_weight
        self.dy_format = key.recipe.dy_dtype
        self.x_scalings = key.recipe.scalings(abi.ROLE_X)  # dy's too
        self.w_scalings = key.recipe.scalings(abi.ROLE_W)
        # wgrad multiplies x and dy as they are: what forward saves for it is x
        self.saves_x = self.x_scalings[1] == abi.NO_COPY
        self.workspace_bytes = layer.workspace_bytes(m)
        self._pools = {}

    def _pool(self, code):
        pool = self._pools.get(code)
        if pool is None:
            pool = self._pools[code] = []
        return pool

    def _x(self):
        return _operand(
            abi.ROLE_X, abi.E4M3, self.m, self.k, abi.TRANSPOSED, self.x_scalings
        )

    def _w(self, copies):
        return _operand(abi.ROLE_W, abi.E4M3, self.n, self.k, copies, self.w_scalings)

    def _dy(self, copies):
        return _operand(abi.ROLE_DY, self.dy_format, self.m, self.n, copies, self.x_scalings)

    def _empty(self, cols, copies):
        return _operand(0, 0, self.m, cols, copies, self.x_scalings)

    def _run(self, function, prepared, history=NO_HISTORY, scratch=None):
        """history: of delayed scaling, as State.history gives it. scratch: an operand struct that
        only this call uses; it lies behind the workspace."""
        context, call = self.context, prepared.call
        stream = context.stream()
        size = self.workspace_bytes + (scratch.bytes + 255 if scratch is not None else 0)
        memory = context.workspace(stream, size)
        address = memory.data_ptr()
        call.workspace, call.workspace_bytes, call.stream = address, self.workspace_bytes, stream
        call.state, call.flags = history
        if scratch is not None:
            scratch.data = (address + self.workspace_bytes + 255) & -256
        status = function(self.handle, prepared.ref)
        if status:
            abi.check(status)

    def fprop(self, x, weight, copies, bias, lead, save, history=NO_HISTORY):
        """(y[*lead, N], saved or None); x[M,K] bf16, weight: bytes with `copies`, bias[N] bf16.

        saved: the bytes of x's transposed copy, or x where the recipe has none.
        """
        saved = x if save and self.saves_x else None
        save = save and not self.saves_x
        code = ("fprop", copies, save, bias is None)
        pool = self._pool(code)
        p = (
            pool.pop()
            if pool
            else _Prepared(
                abi.FpropArgs,
                x=_tensor(self.m, self.k, torch.bfloat16),
                weight=self._w(copies),
                y=_tensor(self.m, self.n, self.output),
                bias=None if bias is None else _tensor(1, self.n, torch.bfloat16),
                saved=self._empty(self.k, abi.TRANSPOSED) if save else None,
            )
        )
        y = torch.empty((*lead, self.n), dtype=self.output, device=self.device)
        p.x.data, p.x.ld = x.data_ptr(), x.stride(0)
        p.y.data, p.weight.data = y.data_ptr(), weight.data_ptr()
        if bias is not None:
            p.bias.data = bias.data_ptr()
        if save:
            saved = operand.memory(p.saved.bytes, self.device)
            p.saved.data = saved.data_ptr()
        self._run(_runtime.fp8_layer_fprop, p, history)
        pool.append(p)
        return y, saved

    def backward(self, dy, saved, weight, copies, dw, dbias, lead, history=NO_HISTORY):
        """dx[*lead, K], or None without a weight; fills dw = (tensor, 1: add to it) and dbias."""
        dw, accumulate = dw
        want = (abi.ROW if weight is not None else 0) | (abi.TRANSPOSED if dw is not None else 0)
        quantized = dw is not None and not self.saves_x
        code = ("backward", want, copies, dbias is None, dw is None or dw.dtype)
        pool = self._pool(code)
        p = (
            pool.pop()
            if pool
            else _Prepared(
                abi.BackwardArgs,
                dy=_tensor(self.m, self.n, torch.bfloat16),
                saved=self._x() if quantized else None,
                x=_tensor(self.m, self.k, torch.bfloat16) if dw is not None and self.saves_x else None,
                weight=self._w(copies) if weight is not None else None,
                grad=self._empty(self.n, want or abi.ROW),
                dbias=None if dbias is None else _tensor(1, self.n, torch.float32),
                dw=None if dw is None else _tensor(self.n, self.k, dw.dtype),
                dx=None if weight is None else _tensor(self.m, self.k, self.grad_input),
            )
        )
        dx = None
        p.args.accumulate_dw = accumulate
        p.dy.data, p.dy.ld = dy.data_ptr(), dy.stride(0)
        if quantized:
            saved = operand.aligned(saved)
            p.saved.data = saved.data_ptr()
        elif dw is not None:
            p.x.data, p.x.ld = saved.data_ptr(), saved.stride(0)
        if dw is not None:
            p.dw.data, p.dw.ld = dw.data_ptr(), dw.stride(0)
        if weight is not None:
            dx = torch.empty((*lead, self.k), dtype=self.grad_input, device=self.device)
            p.weight.data, p.dx.data = weight.data_ptr(), dx.data_ptr()
        if dbias is not None:
            p.dbias.data = dbias.data_ptr()
        self._run(_runtime.fp8_layer_backward, p, history, p.grad)
        pool.append(p)
        return dx

    # The parts of backward, for those who put something between them.

    def quantize_dy(self, dy, copies, dbias, history=NO_HISTORY):
        """Bytes of dy's operand; fills dbias[N] fp32 if that is given."""
        copies = copies or abi.ROW
        pool = self._pool(("quantize_dy", copies, dbias is None))
        p = (
            pool.pop()
            if pool
            else _Prepared(
                abi.QuantizeDyArgs,
                dy=_tensor(self.m, self.n, torch.bfloat16),
                grad=self._empty(self.n, copies),
                dbias=None if dbias is None else _tensor(1, self.n, torch.float32),
            )
        )
        grad = operand.memory(p.grad.bytes, self.device)
        p.args.copies = copies
        p.dy.data, p.dy.ld, p.grad.data = dy.data_ptr(), dy.stride(0), grad.data_ptr()
        if dbias is not None:
            p.dbias.data = dbias.data_ptr()
        self._run(_runtime.fp8_layer_quantize_dy, p, history)
        pool.append(p)
        return grad

    def wgrad(self, saved, grad, copies, dw, dy):
        """dw[N,K] of saved and of dy's operand, which has `copies`, or of dy itself."""
        pool = self._pool(("wgrad", copies, dw.dtype))
        quantized = not self.saves_x
        p = (
            pool.pop()
            if pool
            else _Prepared(
                abi.WgradArgs,
                saved=self._x() if quantized else None,
                grad=self._dy(copies) if quantized else None,
                x=None if quantized else _tensor(self.m, self.k, torch.bfloat16),
                dy=None if quantized else _tensor(self.m, self.n, torch.bfloat16),
                dw=_tensor(self.n, self.k, dw.dtype),
            )
        )
        if quantized:
            saved = operand.aligned(saved)
            p.saved.data, p.grad.data = saved.data_ptr(), grad.data_ptr()
        else:
            p.x.data, p.x.ld = saved.data_ptr(), saved.stride(0)
            p.dy.data, p.dy.ld = dy.data_ptr(), dy.stride(0)
        p.dw.data, p.dw.ld = dw.data_ptr(), dw.stride(0)
        self._run(_runtime.fp8_layer_wgrad, p)
        pool.append(p)

    def dgrad(self, grad, copies, weight, lead):
        """dx[*lead, K] of dy's operand, which has `copies`, and of a weight's transposed copy."""
        pool = self._pool(("dgrad", copies))
        p = (
            pool.pop()
            if pool
            else _Prepared(
                abi.DgradArgs,
                grad=self._dy(copies),
                weight=self._w(abi.TRANSPOSED),
                dx=_tensor(self.m, self.k, self.grad_input),
            )
        )
        dx = torch.empty((*lead, self.k), dtype=self.grad_input, device=self.device)
        p.grad.data, p.weight.data, p.dx.data = grad.data_ptr(), weight.data_ptr(), dx.data_ptr()
        self._run(_runtime.fp8_layer_dgrad, p)
        pool.append(p)
        return dx


def quantize_weight(plan, weight, copies, data=None, history=NO_HISTORY):
    """Bytes of a weight's operand; written into `data` if that is given."""
    source = matrix(weight.detach())
    if data is None:
        data = operand.empty(plan.n, plan.k, copies, plan.device, plan.w_scalings)
    tensor = abi.Tensor(source.data_ptr(), plan.n, plan.k, source.stride(0), CODE[source.dtype])
    out = abi.Operand(
        size=ctypes.sizeof(abi.Operand), data=data.data_ptr(), bytes=data.numel()
    )
    p = _Prepared(abi.QuantizeArgs, source=tensor, operand=out)
    p.args.role, p.args.copies = abi.ROLE_W, copies
    plan._run(_runtime.fp8_quantize, p, history)
    return data


def plan_of(layer, m):
    plan = layer.plans.get(m)
    if plan is None:
        if len(layer.plans) > 4096:  # numbers of tokens that never come back
            layer.plans.clear()
        plan = layer.plans[m] = Plan(layer, m)
    return plan
