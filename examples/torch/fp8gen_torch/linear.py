"""fp8_linear: F.linear whose three products run in FP8, functional, with autograd.

    y = fp8_linear(x, weight, bias, state)

x has any rank and stride; dtypes and autocast are treated as F.linear treats them. What is kept for
backward is x's transposed FP8 copy and its scales: half of what bf16 keeps. A `State` belongs to
one weight and keeps its FP8 copies, made once for every version of the weight.

Two ways lead to the same C calls: an autograd.Function for eager mode (cheap on the host), and
torch.library operators with fake kernels wherever something traces (torch.compile, export, meta
tensors, dispatch modes). The operators are pure functions of their tensors; the state that they are
given by number only remembers the weight's copies.
"""

from typing import Optional, Tuple

import torch
from torch import Tensor

from . import abi, operand
from .layers import Recipe
from .states import Site, State, check, state_of

# Small layers wait for the host, and in a step its caches are cold: what is called in every one is
# looked up once, and the way from fp8_linear to the C call has few functions.
_grad_enabled, _compiling = torch.is_grad_enabled, torch.compiler.is_dynamo_compiling
_dispatch_modes = torch._C._len_torch_dispatch_stack
_transforms = torch._C._are_functorch_transforms_active
_any_autocast = torch._C._is_any_autocast_enabled
_PLAIN = (Tensor, torch.nn.Parameter)

# ---- autograd -----------------------------------------------------------------------------------


def once(backward):
    """A backward(ctx, dy) whose gradients are an error for whoever differentiates them: also where
    dy is a constant, of which torch's once_differentiable makes constants, though dx depends on the
    weight."""

    def run(ctx, dy):
        with torch.no_grad():
            grads = backward(ctx, dy)
        if not _grad_enabled():
            return grads
        error = torch._C._functions.DelayedError(
            b"trying to differentiate twice: FP8 products have no second derivative", len(grads)
        )
        return error(*(g if g is None else g.detach().requires_grad_() for g in grads))

    return run


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, call):
        state, site, _ = call
        y, saved, kept = state.forward(site, x, weight, bias, ctx.needs_input_grad)
        ctx.save_for_backward(saved, weight)
        ctx.call = call, kept
        return y

    @staticmethod
    def backward(ctx, dy):
        if _grad_enabled():  # create_graph
            return _once(ctx, dy)
        saved, weight = ctx.saved_tensors
        (state, site, main_grad), kept = ctx.call
        wants = ctx.needs_input_grad
        grads = state.backward(site, dy, saved, weight, wants, main_grad, kept)
        if main_grad is not None and wants[1]:
            weight.grad_added_to_main_grad = True
        return grads


_once = once(_Linear.backward)
# What the engine calls is a method of torch's that looks for `backward` every time: no need to.
_Linear._backward_cls.apply = _Linear.backward
# _Linear.apply without its look for functorch's wrappers, which costs as much as the call itself.
_apply = super(torch.autograd.Function, _Linear).apply


# ---- operators for what traces -------------------------------------------------------------------


def _wants(want):
    """Which gradients, as ctx.needs_input_grad has it, of the bits x 1, weight 2, bias 4."""
    return bool(want & 1), bool(want & 2), bool(want & 4), False


@torch.library.custom_op("fp8gen::linear", mutates_args=())
def _linear_op(
    x: Tensor,
    weight: Tensor,
    bias: Optional[Tensor],
    main_grad: Optional[Tensor],
    state: int,
    y_dtype: torch.dtype,
    dw_dtype: torch.dtype,
    want: int,
) -> Tuple[Tensor, Tensor]:
    state = State.by_number(state)
    site = state.site(x, weight, bias, y_dtype, dw_dtype)
    y, saved, _ = state.forward(site, x, weight, bias, _wants(want))
    if saved is None:
        return y, x.new_empty(0, dtype=torch.uint8)
    return y, saved.clone() if site.plan.saves_x else saved  # it gives nothing that it was given


@_linear_op.register_fake
def _(x, weight, bias, main_grad, state, y_dtype, dw_dtype, want):
    n, k = weight.shape
    save = want & 2
    tokens = x.numel() // k
    scalings = State.by_number(state).recipe.scalings(abi.ROLE_X)
    y = x.new_empty(*x.shape[:-1], n, dtype=y_dtype)
    if save and scalings[1] == abi.NO_COPY:
        return y, x.new_empty(tokens, k, dtype=torch.bfloat16)
    size = operand.operand_bytes(tokens, k, abi.TRANSPOSED, scalings) if save else 0
    return y, x.new_empty(size, dtype=torch.uint8)


def _backward_op(dy, saved, weight, main_grad, state, x_dtype, y_dtype, dw_dtype, has_bias, want):
    state = State.by_number(state)
    dtypes = x_dtype, y_dtype, dw_dtype, torch.float32 if has_bias else None
    m = dy.numel() // dy.shape[-1]
    plan = state.plan_of(m, dy.device, weight.shape, weight.dtype, dtypes)
    site = Site(plan, dy.shape[:-1], dtypes)
    dx, dw, dbias, _ = state.backward(site, dy, saved, weight, _wants(want), main_grad, None)
    none = dy.new_empty(0)
    return [none.clone() if t is None else t for t in (dx, dw, dbias)]


def _backward_fake(dy, saved, weight, main_grad, state, x_dtype, y_dtype, dw_dtype, has_bias, want):
    n, k = weight.shape
    dx = dy.new_empty(*dy.shape[:-1], k, dtype=x_dtype) if want & 1 else dy.new_empty(0)
    dw = dy.new_empty(n, k, dtype=dw_dtype) if want & 2 and main_grad is None else dy.new_empty(0)
    dbias = dy.new_empty(n, dtype=torch.float32) if want & 4 else dy.new_empty(0)
    return [dx, dw, dbias]


@torch.library.custom_op("fp8gen::linear_backward", mutates_args=())
def _grad_op(
    dy: Tensor,
    saved: Tensor,
    weight: Tensor,
    state: int,
    x_dtype: torch.dtype,
    y_dtype: torch.dtype,
    dw_dtype: torch.dtype,
    has_bias: bool,
    want: int,
) -> Tuple[Tensor, Tensor, Tensor]:
    return tuple(
        _backward_op(dy, saved, weight, None, state, x_dtype, y_dtype, dw_dtype, has_bias, want)
    )


@_grad_op.register_fake
def _(dy, saved, weight, state, x_dtype, y_dtype, dw_dtype, has_bias, want):
    return tuple(
        _backward_fake(dy, saved, weight, None, state, x_dtype, y_dtype, dw_dtype, has_bias, want)
    )


@torch.library.custom_op("fp8gen::linear_backward_add", mutates_args=("main_grad",))
def _grad_add_op(
    dy: Tensor,
    saved: Tensor,
    weight: Tensor,
    main_grad: Tensor,
    state: int,
    x_dtype: torch.dtype,
    y_dtype: torch.dtype,
    dw_dtype: torch.dtype,
    has_bias: bool,
    want: int,
) -> Tuple[Tensor, Tensor]:
    dx, _, dbias = _backward_op(
        dy, saved, weight, main_grad, state, x_dtype, y_dtype, dw_dtype, has_bias, want
    )
    return dx, dbias


@_grad_add_op.register_fake
def _(dy, saved, weight, main_grad, state, x_dtype, y_dtype, dw_dtype, has_bias, want):
    dx, _, dbias = _backward_fake(
        dy, saved, weight, main_grad, state, x_dtype, y_dtype, dw_dtype, has_bias, want
    )
    return dx, dbias


def _setup(ctx, inputs, output):
    x, weight, bias, main_grad, state, y_dtype, dw_dtype, _ = inputs
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
    return (
        dx if want_dx else None,
        dw if want_dw else None,
        dbias.to(ctx.bias_dtype) if want_dbias else None,
        None,
        None,
        None,
        None,
        None,
    )


_linear_op.register_autograd(_op_backward, setup_context=_setup)


# ---- the function --------------------------------------------------------------------------------


def output_dtype(x):
    """Of y: x's, or what autocast says."""
    kind = "cuda" if x.is_cuda else x.device.type
    if kind != "meta" and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return x.dtype


def fp8_linear(x, weight, bias=None, state=None):
    """y[..., N] = x[..., K] weight[N, K]^T + bias[N], with all three products in FP8.

    state: a `State`, kept by the caller for this weight; None: the one that the weight carries.
    Output dtype, autocast and gradient dtypes are F.linear's. A weight with an fp32 or bf16
    attribute `main_grad` gets its gradient added there, in the product's epilogue; its .grad stays
    None and, in eager mode, `weight.grad_added_to_main_grad` is set (a compiled backward sets no
    attributes). A failed call raises Fp8Error; nothing falls back.
    """
    if state is None:
        state = getattr(weight, "_fp8gen_state", None) or state_of(weight)
    elif type(state) is Recipe:
        raise TypeError("fp8_linear: state is a Recipe; pass State(recipe), one for each weight")
    x_dtype, w_dtype, device = x.dtype, weight.dtype, x.device
    y_dtype = output_dtype(x) if _any_autocast() else x_dtype
    main_grad = getattr(weight, "main_grad", None)
    dw_dtype = w_dtype if main_grad is None else main_grad.dtype
    site = None
    if not (
        _compiling()
        or _dispatch_modes() > 0
        or type(x) not in _PLAIN
        or not (type(weight) in _PLAIN or hasattr(weight, "fp8_state"))
    ):
        look = (  # as State.site has it
            x.shape,
            x_dtype,
            device,
            weight.shape,
            w_dtype,
            weight.device,
            None if bias is None else (bias.shape, bias.dtype, bias.device),
            y_dtype,
            dw_dtype,
        )
        site = state.sites.get(look) or state.site(x, weight, bias, y_dtype, dw_dtype)
    if site is None:
        check(x, weight, bias)
        want, dtypes = 0, (y_dtype, dw_dtype)
        if _grad_enabled():
            want = x.requires_grad * 1 + weight.requires_grad * 2
            want += (bias is not None and bias.requires_grad) * 4
        return _linear_op(x, weight, bias, main_grad, state.number, *dtypes, want)[0]
    if _grad_enabled() and (
        x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    ):
        if _transforms():
            raise NotImplementedError(
                "fp8_linear: transforms of torch.func (grad, vmap, jvp) are not served; use "
                "torch.autograd"
            )
        return _apply(x, weight, bias, (state, site, main_grad))
    return state.forward(site, x, weight, bias, (False, False, False))[0]


class Fp8Linear(torch.nn.Linear):
    """nn.Linear over fp8_linear: the same parameters and state dict."""

    def __init__(self, *args, recipe=Recipe(), **kwargs):
        super().__init__(*args, **kwargs)
        self.fp8_state = State(recipe)

    def forward(self, x):
        return fp8_linear(x, self.weight, self.bias, self.fp8_state)
