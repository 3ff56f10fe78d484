"""FP8 linear whose weight is sharded: an autograd function over the caller's own communicator.

    y = weight_parallel_linear(x, weight_shard, bias_shard, communicator, state, module)

The communicator is what weight-parallel frameworks define, any object with

    weight_hook(tensor, async_op, module, is_bias) -> the full tensor
    grad_hook(tensor, async_op, module, reduce_op, is_bias) -> (shard, handle)
    output_hook(tensor, async_op), grad_output_hook(tensor, async_op)   both optional,
        -> tensor or (tensor, handle): what is done to y, and to dy before backward reads it
    amax_hook(tensor) -> its maximum over the ranks; for fp8_gather with scales of tensors or rows

All are called with every argument, those after the tensor by name; reduce_op is None: as the
communicator sees fit.

A full tensor that weight_hook returns may be cached by its owner: it is read, never written.
Backward gathers again, computes wgrad first, starts its reduce-scatter and hides it behind dgrad.

fp8_gather=True gathers FP8 instead of bf16: the shard is quantised with the amax of the whole
weight (communicator.amax_hook(amax), one all-reduce(max), or the amax that precompute_amax left;
recipe "block" needs none), and weight_hook sees uint8 rows: half the bytes on the wire. The
gathered bytes are those of the unsharded weight, bit for bit. Shards are rows; where N does not
divide, they are padded with zeros to equal ones, with recipe "block" of a multiple of 128 rows.
Recipes with a scale a row gather rows in forward and their transposed copy in backward, so a hook
must not give backward what it kept of forward.
"""

import torch
import torch.distributed as dist

from . import abi, shards
from .calls import placed, quantize_weight
from .layers import Recipe
from .linear import once, output_dtype
from .states import Identity, Site, State


class Communicator:
    """The reference communicator, over torch.distributed: equal row shards of one group.

    multiple: shards have a multiple of so many rows; 128 for FP8 gathers of recipe "block".
    """

    def __init__(self, group=None, reduce_op=dist.ReduceOp.AVG, multiple=1):
        self.group, self.multiple = group, multiple
        self.world, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.reduce_op = reduce_op
        self.wire_bytes = 0  # received by this rank

    def rows(self, count):
        """Rows of a shard of so many."""
        rows = -(-count // self.world)
        return -(-rows // self.multiple) * self.multiple

    def shard(self, full):
        """This rank's rows of a full tensor, padded with zeros to equal shards."""
        rows = self.rows(full.shape[0])
        mine = full[self.rank * rows : (self.rank + 1) * rows]
        shard = full.new_zeros(rows, *full.shape[1:])
        shard[: mine.shape[0]] = mine
        return shard

    def weight_hook(self, tensor, async_op=False, module=None, is_bias=False):
        full = tensor.new_empty(self.world * tensor.shape[0], *tensor.shape[1:])
        dist.all_gather_into_tensor(full, tensor.contiguous(), group=self.group)
        self._count(full)
        return full

    def grad_hook(self, tensor, async_op=False, module=None, reduce_op=None, is_bias=False):
        rows = self.rows(tensor.shape[0])
        if rows * self.world != tensor.shape[0]:
            padded = tensor.new_zeros(rows * self.world, *tensor.shape[1:])
            padded[: tensor.shape[0]] = tensor
            tensor = padded
        shard = tensor.new_empty(rows, *tensor.shape[1:])
        self._count(tensor)
        reduce_op = reduce_op or self.reduce_op
        if dist.get_backend(self.group) == "gloo":  # no average, in places no reduce-scatter
            dist.all_reduce(tensor, group=self.group)
            shard.copy_(tensor[self.rank * rows : (self.rank + 1) * rows])
            return (shard / self.world if reduce_op == dist.ReduceOp.AVG else shard), None
        handle = dist.reduce_scatter_tensor(
            shard, tensor, op=reduce_op, group=self.group, async_op=async_op
        )
        return shard, handle

    def amax_hook(self, amax):
        dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=self.group)
        return amax

    def _count(self, full):
        self.wire_bytes += full.numel() * full.element_size() * (self.world - 1) // self.world


class ShardState(State):
    """A State of a weight of which this rank holds rows: with its full shape and FP8 shard."""

    def __init__(self, out_features, recipe=Recipe(), fp8_gather=False):
        super().__init__(recipe, keep=False)
        self._shards = fp8_gather and recipe.by_row
        self.out_features, self.fp8_gather = out_features, fp8_gather
        self.amax = None  # of the whole weight or its columns, and the shard that it belongs to
        self._amax_of = None
        self._shard = None  # (Identity, what Cut.quantize gave)

    def __reduce__(self):
        return ShardState, (self.out_features, self.recipe, self.fp8_gather)

    def plan_of_shard(self, weight):
        return self.weight_plan((self.out_features, weight.shape[1]), weight)

    def site_of_shard(self, x, weight, bias, y_dtype, main_grad):
        """The Site of a call; weight and bias: this rank's rows."""
        dw_dtype = weight.dtype if main_grad is None else main_grad.dtype
        like = x.dtype, y_dtype, dw_dtype, None if bias is None else bias.dtype
        look = x.shape, x.device, weight.shape, weight.dtype, like
        site = self.sites.get(look)
        if site is None:
            k = x.shape[-1]
            shape = self.out_features, k
            plan = self.plan_of(x.numel() // k, x.device, shape, weight.dtype, like)
            site = self.keep_site(look, Site(plan, x.shape[:-1], like))
        return site

    def shard(self, plan, weight, communicator, at):
        """This rank's part as Cut.quantize gives it, with the whole weight's amax."""
        if self._shard is None or not self._shard[0].is_of(weight):
            if not shards.needs_amax(self.recipe):
                self.amax = None
            elif self._amax_of is None or not self._amax_of.is_of(weight):
                precompute_amax([weight], [self], communicator)
            cut = shards.cut_of(plan, weight.shape[0])
            self._shard = Identity(weight), cut.quantize(plan, weight, self.amax, at)
        return self._shard[1]

    def set_amax(self, weight, amax):
        self.amax, self._amax_of = amax, Identity(weight)


@torch.no_grad()
def precompute_amax(weights, states, communicator):
    """One all-reduce for the amaxes of all weights; after the optimizer's step, on all ranks. None
    for those that need none (recipe "block")."""
    pairs = [(w, s) for w, s in zip(weights, states) if shards.needs_amax(s.recipe)]
    if not pairs:
        return
    plans = [state.plan_of_shard(weight) for weight, state in pairs]
    cuts = [shards.cut_of(plan, weight.shape[0]) for plan, (weight, _) in zip(plans, pairs)]
    counts = [cut.amaxes for cut in cuts]
    amaxes = torch.empty(sum(counts), dtype=torch.float32, device=pairs[0][0].device)
    for plan, cut, (weight, _), amax in zip(plans, cuts, pairs, amaxes.split(counts)):
        cut.amax(plan, weight, plan.at(), amax)
    if not hasattr(communicator, "amax_hook"):
        raise TypeError(
            f"{type(communicator).__name__} has no amax_hook(tensor) -> the maximum over the "
            f"ranks: an FP8 gather with recipe '{pairs[0][1].recipe.name}' scales by the whole "
            "weight's amax; write one (one all-reduce), or take recipe 'block' or fp8_gather=False"
        )
    amaxes = communicator.amax_hook(amaxes)
    for (weight, state), amax in zip(pairs, amaxes.split(counts)):
        state.set_amax(weight, amax)


def _gathered(plan, state, weight, hooks, copies, at):
    """(bytes, copies) of the full weight's operand, from shards on the wire in FP8 or as they are.

    hooks: (communicator, module)
    """
    communicator, module = hooks
    if state.fp8_gather:
        header, mine = state.shard(plan, weight, communicator, at)[copies == abi.TRANSPOSED]
        full = communicator.weight_hook(mine, async_op=False, module=module, is_bias=False)
        return shards.cut_of(plan, weight.shape[0]).assemble(plan, full, header, copies, at)
    full = communicator.weight_hook(weight.detach(), async_op=False, module=module, is_bias=False)
    return quantize_weight(plan, full[: plan.n], copies, at), copies


def _hooked(communicator, name, tensor):
    """What an optional hook makes of a tensor; its handle is waited for."""
    hook = getattr(communicator, name, None)
    if hook is None:
        return tensor
    result = hook(tensor, async_op=False)
    if isinstance(result, tuple):
        result, handle = result
        _wait(handle)
    return result


def _wait(handle):
    if handle is not None:
        handle.wait()


class _Full:
    """A gathered weight's operand, as State.forward takes it."""

    def __init__(self, data, copies):
        self.operand = data, copies

    def fp8_operand(self, plan, copies, at):
        return self.operand


class _WeightParallel(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, communicator, state, module, y_dtype, main_grad):
        n, k = state.out_features, x.shape[-1]
        if weight.dim() != 2 or weight.shape[1] != k:
            raise RuntimeError(
                f"weight_parallel_linear: x is {tuple(x.shape)} and the weight's shard "
                f"{tuple(weight.shape)}; x's last dim must be the shard's second of two"
            )
        site = state.site_of_shard(x, weight, bias, y_dtype, main_grad)
        plan = site.plan
        wants = ctx.needs_input_grad
        at = state.at(plan, True in wants)
        full = _Full(*_gathered(plan, state, weight, (communicator, module), abi.ROW, at))
        if bias is not None:
            ctx.bias_dtype = bias.dtype
            bias = communicator.weight_hook(
                bias.detach(), async_op=False, module=module, is_bias=True
            )[:n]
        y, saved, _ = state.forward(site, x, full, bias, wants)
        y = _hooked(communicator, "output_hook", y)
        ctx.save_for_backward(saved, weight)
        ctx.plan, ctx.state, ctx.communicator, ctx.module = plan, state, communicator, module
        ctx.main_grad, ctx.x_shape, ctx.x_dtype = main_grad, x.shape, x.dtype
        return y

    @staticmethod
    @once
    def backward(ctx, dy):
        saved, weight = ctx.saved_tensors
        plan, communicator, module = ctx.plan, ctx.communicator, ctx.module
        want_dx, want_dw, want_dbias = ctx.needs_input_grad[:3]
        dy = placed(_hooked(communicator, "grad_output_hook", dy), plan.n)[0]  # cast once
        at = ctx.state.at(plan, True)
        if want_dx:
            hooks = communicator, module
            full = _gathered(plan, ctx.state, weight, hooks, abi.TRANSPOSED, at)
        dbias = torch.empty(plan.n, device=dy.device) if want_dbias else None
        copies = (abi.ROW if want_dx else 0) | (abi.TRANSPOSED if want_dw else 0)
        grad = plan.quantize_dy(dy, copies, dbias, at)
        dx = dw = handle = bias_handle = None
        if want_dw:  # first, so that its reduce-scatter runs beside dgrad
            dw = plan.new_dw()
            plan.wgrad(saved, grad, copies, dw, dy, at)
            dw, handle = communicator.grad_hook(
                dw, async_op=True, module=module, reduce_op=None, is_bias=False
            )
        if want_dbias:
            dbias, bias_handle = communicator.grad_hook(
                dbias.to(ctx.bias_dtype), async_op=True, module=module, reduce_op=None, is_bias=True
            )
        if want_dx:
            dx = plan.new_dx(ctx.x_shape[:-1])
            plan.dgrad(grad, copies, full, dx, at)
            dx = dx.to(ctx.x_dtype)
        _wait(handle)
        _wait(bias_handle)
        if want_dw and ctx.main_grad is not None:
            ctx.main_grad.add_(dw)
            weight.grad_added_to_main_grad, dw = True, None
        elif want_dw:
            dw = dw.to(weight.dtype)
        return dx, dw, dbias, None, None, None, None, None


def weight_parallel_linear(x, weight, bias, communicator, state, module=None):
    """y = x W^T + b, where weight and bias are this rank's rows of W and b; see the file's head.

    state: a ShardState of this weight. Gradients come back as shards, or are added to
    weight.main_grad.
    """
    main_grad = getattr(weight, "main_grad", None)
    return _WeightParallel.apply(
        x, weight, bias, communicator, state, module, output_dtype(x), main_grad
    )
