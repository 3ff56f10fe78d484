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
    if tensor.dtype is torch.bfloat16 and tensor.is_contiguous():
        return tensor, cols
    tensor = matrix(tensor, torch.bfloat16)
    return tensor, tensor.stride(0)


def pattern(shape, dtype, device):
    """For `like`: one element that looks like a tensor of this shape."""
    return torch.empty((1,) * len(shape), dtype=dtype, device=device).expand(shape)


def like(pattern):
    """A new contiguous tensor; half of what torch.empty costs the host."""
    return torch.empty_like(pattern, memory_format=torch.contiguous_format)


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
        self.saved_bytes = operand.operand_bytes(m, self.k, abi.TRANSPOSED, self.x_scalings)
        cuda = self.device.type != "cpu"  # there memory() is torch.empty
        self._saved = pattern((self.saved_bytes,), torch.uint8, self.device) if cuda else None
        self._dw = pattern((self.n, self.k), self.grad_weight, self.device)
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

    def weight_struct(self, copies):
        return _operand(abi.ROLE_W, abi.E4M3, self.n, self.k, copies, self.w_scalings)

    def _dy(self, copies):
        return _operand(abi.ROLE_DY, self.dy_format, self.m, self.n, copies, self.x_scalings)

    def _empty(self, cols, copies):
        return _operand(0, 0, self.m, cols, copies, self.x_scalings)

    def run(self, function, args, at):
        """A call whose args struct is made for it."""
        call = args.call
        call.stream, capturing, call.state, call.flags = at
        memory, call.workspace = self.context.workspace(at[0], capturing, self.workspace_bytes)
        call.workspace_bytes = self.workspace_bytes
        abi.check(function(self.handle, args))

    def _run(self, function, prepared, at, scratch=None):
        """at: as State.at gives it. scratch: an operand struct that only this call uses; it lies
        behind the workspace."""
        call = prepared.call
        call.stream, capturing, call.state, call.flags = at
        size = self.workspace_bytes
        more = 0 if scratch is None else scratch.bytes + 255
        memory, address = self.context.workspace(at[0], capturing, size + more)
        call.workspace, call.workspace_bytes = address, size
        if more:
            scratch.data = (address + size + 255) & -256
        status = function(self.handle, prepared.ref)
        if status:
            abi.check(status)

    def new_y(self, lead):
        return torch.empty((*lead, self.n), dtype=self.output, device=self.device)

    def new_dx(self, lead):
        return torch.empty((*lead, self.k), dtype=self.grad_input, device=self.device)

    def new_dw(self):
        return like(self._dw)

    def fprop(self, x, weight, copies, bias, y, save, at):
        """Fills y[..., N]; x[..., K], weight: bytes with `copies`, bias[N] bf16. Returns what backward
        needs, if `save`: the bytes of x's transposed copy, or x where the recipe has none.
        """
        x, ld = placed(x, self.k)
        saved = None
        if save and self.saves_x:
            saved, save = matrix(x), False
        pool = self._pool(("fprop", copies, save, bias is None))
        p = pool.pop() if pool else self._fprop(copies, save, bias)
        tensor = p.x
        tensor.data, tensor.ld = x.data_ptr(), ld
        p.y.data, p.weight.data = y.data_ptr(), weight.data_ptr()
        if bias is not None:
            p.bias.data = bias.data_ptr()
        if save:
            if self._saved is None:
                saved = operand.memory(self.saved_bytes, self.device)
            else:
                saved = like(self._saved)
            p.saved.data = saved.data_ptr()
        self._run(_runtime.fp8_layer_fprop, p, at)
        pool.append(p)
        return saved

    def _fprop(self, copies, save, bias):
        return _Prepared(
            abi.FpropArgs,
            x=_tensor(self.m, self.k, torch.bfloat16),
            weight=self.weight_struct(copies),
            y=_tensor(self.m, self.n, self.output),
            bias=None if bias is None else _tensor(1, self.n, torch.bfloat16),
            saved=self._empty(self.k, abi.TRANSPOSED) if save else None,
        )

    def backward(self, dy, saved, weight, dx, dw, dbias, at):
        """Fills dx[..., K] of weight = (bytes, copies), dw = (tensor, 1: add to it), and dbias; each
        tensor, and weight with dx, may be None."""
        weight, copies = weight
        dw, accumulate = dw
        dy, ld = placed(dy, self.n)
        wants = dx is not None, dw is not None and dw.dtype, dbias is not None
        pool = self._pool(("backward", copies, wants))
        p = pool.pop() if pool else self._backward(copies, wants)
        p.args.accumulate_dw = accumulate
        tensor = p.dy
        tensor.data, tensor.ld = dy.data_ptr(), ld
        if dx is not None:
            p.weight.data, p.dx.data = weight.data_ptr(), dx.data_ptr()
        if dw is not None:
            if self.saves_x:
                p.x.data, p.x.ld = saved.data_ptr(), saved.stride(0)
            else:
                saved = operand.aligned(saved)
                p.saved.data = saved.data_ptr()
            p.dw.data, p.dw.ld = dw.data_ptr(), dw.stride(0)
        if dbias is not None:
            p.dbias.data = dbias.data_ptr()
        self._run(_runtime.fp8_layer_backward, p, at, p.grad)
        pool.append(p)

    def _backward(self, copies, wants):
        want_dx, dw, want_dbias = wants
        want = (abi.ROW if want_dx else 0) | (abi.TRANSPOSED if dw else 0)
        x = _tensor(self.m, self.k, torch.bfloat16) if dw and self.saves_x else None
        return _Prepared(
            abi.BackwardArgs,
            dy=_tensor(self.m, self.n, torch.bfloat16),
            saved=self._x() if dw and not self.saves_x else None,
            x=x,
            weight=self.weight_struct(copies) if want_dx else None,
            grad=self._empty(self.n, want or abi.ROW),
            dbias=_tensor(1, self.n, torch.float32) if want_dbias else None,
            dw=_tensor(self.n, self.k, dw) if dw else None,
            dx=_tensor(self.m, self.k, self.grad_input) if want_dx else None,
        )

    # The parts of backward, for those who put something between them.

    def quantize_dy(self, dy, copies, dbias, at):
        """Bytes of dy's operand; fills dbias[N] fp32 if that is given."""
        copies = copies or abi.ROW
        dy, ld = placed(dy, self.n)
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
        p.dy.data, p.dy.ld, p.grad.data = dy.data_ptr(), ld, grad.data_ptr()
        if dbias is not None:
            p.dbias.data = dbias.data_ptr()
        self._run(_runtime.fp8_layer_quantize_dy, p, at)
        pool.append(p)
        return grad

    def wgrad(self, saved, grad, copies, dw, dy, at):
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
            dy, ld = placed(dy, self.n)
            p.x.data, p.x.ld = saved.data_ptr(), saved.stride(0)
            p.dy.data, p.dy.ld = dy.data_ptr(), ld
        p.dw.data, p.dw.ld = dw.data_ptr(), dw.stride(0)
        self._run(_runtime.fp8_layer_wgrad, p, at)
        pool.append(p)

    def dgrad(self, grad, copies, weight, dx, at):
        """Fills dx[..., K] of dy's operand, which has `copies`, and of weight = (bytes, copies)."""
        weight, w_copies = weight
        pool = self._pool(("dgrad", copies, w_copies))
        p = (
            pool.pop()
            if pool
            else _Prepared(
                abi.DgradArgs,
                grad=self._dy(copies),
                weight=self.weight_struct(w_copies),
                dx=_tensor(self.m, self.k, self.grad_input),
            )
        )
        p.grad.data, p.weight.data, p.dx.data = grad.data_ptr(), weight.data_ptr(), dx.data_ptr()
        self._run(_runtime.fp8_layer_dgrad, p, at)
        pool.append(p)


def quantize_weight(plan, weight, copies, at, data=None):
    """Bytes of a weight's operand; written into `data` if that is given."""
    source, ld = weight, plan.k
    if weight.dtype not in _IO or not weight.is_contiguous():
        source = matrix(weight.detach())
        ld = source.stride(0)
    if data is None:
        data = operand.empty(plan.n, plan.k, copies, plan.device, plan.w_scalings)
    pool = plan._pool(("weight", copies, source.dtype))
    if pool:
        p = pool.pop()
    else:
        p = _Prepared(
            abi.QuantizeArgs,
            source=_tensor(plan.n, plan.k, source.dtype),
            operand=_operand(0, 0, plan.n, plan.k, copies, plan.w_scalings),
        )
        p.args.role, p.args.copies = abi.ROLE_W, copies
    p.source.data, p.source.ld = source.data_ptr(), ld
    p.operand.data = data.data_ptr()
    plan._run(_runtime.fp8_quantize, p, at)
    pool.append(p)
    return data


def plan_of(layer, m):
    plan = layer.plans.get(m)
    if plan is None:
        if len(layer.plans) > 4096:  # numbers of tokens that never come back
            layer.plans.clear()
        plan = layer.plans[m] = Plan(layer, m)
    return plan
