"""FP8 without swapping modules: weights whose F.linear is FP8, and FSDP2 that gathers FP8.

    fp8_weights(model, match=..., min_features=...)   wraps the weights of any modules, in place
    with Fp8Mode(min_features=...): ...               or: every F.linear and 2-D matmul inside

`Fp8Weight` is a tensor subclass around the high-precision weight: all operators see that one, only
F.linear goes to fp8_linear. It implements FSDP2's all-gather extension: the shard is quantised with
the amax of the whole weight and FSDP2 gathers the FP8 bytes; the unsharded parameter is then a
`GatheredWeight`. The amax takes one all-reduce a weight, or, after `precompute_scales(model)`
behind the optimizer's step, one for the whole model.

Not obvious: an in-place operator on the wrapper runs on the inner tensor below autograd, where
torch does not count versions; it is counted here, so that the FP8 copies of a changed weight are
remade.
"""

import copy
import re

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from . import abi, shards
from .layers import Recipe
from .linear import fp8_linear
from .states import Identity, State, epoch, state_of

_aten = torch.ops.aten
# Operators after which the result is a weight again; what FSDP2 and modules do with parameters.
_SAME = {_aten.detach.default, _aten.alias.default}  # the same weight by another name
_PART = {  # its memory, or what FSDP2 puts a shard into
    _aten.view.default,
    _aten.as_strided.default,
    _aten.slice.Tensor,
    _aten.split.Tensor,
    _aten.new_zeros.default,
}
_OTHER = {
    _aten.clone.default,
    _aten.empty_like.default,
    _aten.new_empty.default,
    _aten._to_copy.default,
    _aten._pin_memory.default,
}
_KEEP = _SAME | _PART | _OTHER


class _Amax:
    """The amax of a whole sharded weight while it is known: until the shard is written, or a step.

    FSDP2 replaces uneven shards by padded copies at its first forward, on some ranks only; whether
    an all-reduce is needed must be the same on all. So those copies share this object, and writing
    them does not count as writing the shard.
    """

    __slots__ = ("value", "epoch", "shard")

    def __init__(self):
        self.value = self.epoch = self.shard = None

    def set(self, value, data):
        self.value, self.epoch, self.shard = value, epoch(), Identity(data)

    def get(self, data):
        if self.value is None or self.epoch != epoch():
            return None
        self.shard = Identity(data)
        return self.value

    def written(self, data):
        if self.value is not None and self.shard.same_memory(data):
            self.value = None


class _Wrapper(torch.Tensor):
    """What both subclasses share: F.linear is FP8, everything else is done by _plain."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is F.linear:
            x, weight, bias = _linear_arguments(*args, **kwargs)
            if isinstance(weight, _Wrapper) and not isinstance(x, _Wrapper):
                return fp8_linear(x, weight, bias, weight.fp8_state)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)


def _linear_arguments(input, weight, bias=None):
    return input, weight, bias


class Fp8Weight(_Wrapper):
    """A high-precision weight, or FSDP2's shard of one, whose F.linear runs in FP8."""

    @staticmethod
    def __new__(cls, data, recipe=Recipe(), state=None, amax=None):
        self = torch.Tensor._make_wrapper_subclass(
            cls,
            data.shape,
            strides=data.stride(),
            storage_offset=data.storage_offset(),
            dtype=data.dtype,
            layout=data.layout,
            device=data.device,
            requires_grad=data.requires_grad,
        )
        self._data, self.fp8_state = data, state or State(recipe)
        self._amax = amax or _Amax()
        return self

    def __tensor_flatten__(self):
        return ["_data"], (self.fp8_state.number, self.recipe)  # compared by value in guards

    @staticmethod
    def __tensor_unflatten__(inner, meta, outer_size, outer_stride):
        return Fp8Weight(inner["_data"], meta[1], State.by_number(meta[0]))

    @property
    def recipe(self):
        return self.fp8_state.recipe

    def __repr__(self):
        return f"Fp8Weight({self._data!r})"

    def __reduce_ex__(self, protocol):  # checkpoints hold plain tensors
        return self._data.detach().__reduce_ex__(protocol)

    def __deepcopy__(self, memo):
        twin = Fp8Weight(copy.deepcopy(self._data.detach(), memo), self.recipe)
        if isinstance(self, nn.Parameter):
            twin = nn.Parameter(twin, requires_grad=self.requires_grad)
        memo[id(self)] = twin
        return twin

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        first = next(w for w in tree_leaves((args, kwargs)) if isinstance(w, Fp8Weight))
        plain_args, plain_kwargs = tree_map_only(Fp8Weight, lambda w: w._data, (args, kwargs))
        out = func(*plain_args, **plain_kwargs)
        if func._schema.is_mutable:
            written = [
                a
                for a, spec in zip(args, func._schema.arguments)
                if spec.alias_info is not None and spec.alias_info.is_write
            ]
            for weight in tree_leaves(written):
                if isinstance(weight, Fp8Weight):
                    weight._amax.written(weight._data)
                    if not weight._data.is_inference():
                        torch.autograd.graph.increment_version(weight._data)
            return args[0] if isinstance(args[0], Fp8Weight) else out
        if func in _KEEP:
            state = first.fp8_state if func in _SAME else None
            amax = None if func in _OTHER else first._amax
            return tree_map_only(
                torch.Tensor, lambda t: Fp8Weight(t, first.recipe, state, amax), out
            )
        return out

    # ---- FSDP2 ----

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        if self.recipe.by_row:
            raise RuntimeError(
                f"Fp8Weight under FSDP2: recipe '{self.recipe.name}' needs other bytes in backward "
                "than in forward, and FSDP2 gathers the same ones; take 'current', 'delayed' or "
                "'block', or weight_parallel_linear"
            )
        plan = self.fp8_state.weight_plan(tuple(outer_size), self._data)
        cut = shards.cut_of(plan, -(-outer_size[0] // mesh.size()))
        at = plan.at()
        amax = self._amax.get(self._data)
        if amax is None and shards.needs_amax(self.recipe):
            amax = torch.empty(1, dtype=torch.float32, device=self._data.device)
            cut.amax(plan, self._data, at, amax)
            dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=mesh.get_group())
        header, rows = cut.quantize(plan, self._data, amax, at)[0]
        return (rows,), (header, cut.rows, self.fp8_state, outer_size)

    def fsdp_post_all_gather(self, outputs, metadata, param_dtype, *, out=None):
        (gathered,) = outputs
        header, rows, state, size = metadata
        if out is None:
            return GatheredWeight(gathered, header, rows, size, param_dtype, state), (gathered,)
        out = out._local_tensor if hasattr(out, "_local_tensor") else out
        assert isinstance(out, GatheredWeight)
        out._gathered, out._header = gathered, header


class GatheredWeight(_Wrapper):
    """A whole weight as the gathered FP8 shards; lives from gather to reshard.

    gathered, header: as shards.py has them; rows: of a shard; state: the shards' State.
    """

    @staticmethod
    def __new__(cls, gathered, header, rows, size, dtype, state):
        self = torch.Tensor._make_wrapper_subclass(cls, size, dtype=dtype, device=gathered.device)
        self._gathered, self._header, self._rows, self.fp8_state = gathered, header, rows, state
        return self

    def __repr__(self):
        return f"GatheredWeight({tuple(self.shape)}, {self.dtype})"

    def __tensor_flatten__(self):
        return ["_gathered", "_header"], (self._rows, self.shape, self.dtype, self.fp8_state.number)

    @staticmethod
    def __tensor_unflatten__(inner, meta, outer_size, outer_stride):
        tensors = inner["_gathered"], inner["_header"]
        return GatheredWeight(*tensors, *meta[:3], State.by_number(meta[3]))

    def fp8_operand(self, plan, copies, at):
        """(bytes, copies) of the operand, with the copies that a pass needs."""
        cut = shards.cut_of(plan, self._rows)
        return cut.assemble(plan, self._gathered, self._header, copies, at)

    def dequantize(self):
        plan = self.fp8_state.weight_plan(tuple(self.shape), self)
        at = plan.at()
        return shards.dequantize(plan, *self.fp8_operand(plan, abi.ROW, at), at).to(self.dtype)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        weight = args[0] if args and isinstance(args[0], GatheredWeight) else None
        if weight is not None and (
            func in (_aten.detach.default, _aten.alias.default)
            or (func is _aten.as_strided.default and tuple(args[1]) == tuple(weight.shape))
        ):
            return GatheredWeight(
                weight._gathered,
                weight._header,
                weight._rows,
                weight.shape,
                weight.dtype,
                weight.fp8_state,
            )
        args, kwargs = tree_map_only(GatheredWeight, lambda w: w.dequantize(), (args, kwargs))
        return func(*args, **kwargs)


# ---- for whole models ----------------------------------------------------------------------------


def fp8_weights(model, match=r"(^|\.)weight$", min_features=1, recipe=Recipe()):
    """Wraps the 2-D weights of `model` in place, whatever modules hold them; returns their names.

    match: a pattern searched in the parameter's full name, or a function (name, parameter) -> bool.
    min_features: both dims of a weight must be at least this. Embeddings are left as they are, tied
    weights stay tied. Works on the meta device, before or after nothing else has been done to them:
    before FSDP2 (`fully_shard`), before the optimizer is made.
    """
    wanted = match if callable(match) else lambda name, _: re.search(match, name)
    tables = {
        id(p)
        for m in model.modules()
        if isinstance(m, (nn.Embedding, nn.EmbeddingBag))
        for p in m.parameters(recurse=False)
    }
    wrapped, names = {}, []
    for prefix, module in model.named_modules():
        for name, parameter in list(module._parameters.items()):
            full = f"{prefix}.{name}" if prefix else name
            if (
                parameter is None
                or parameter.dim() != 2
                or isinstance(parameter, _Wrapper)
                or id(parameter) in tables
                or min(parameter.shape) < min_features
                or not wanted(full, parameter)
            ):
                continue
            if id(parameter) not in wrapped:
                wrapped[id(parameter)] = parameter, nn.Parameter(
                    Fp8Weight(parameter.detach(), recipe), requires_grad=parameter.requires_grad
                )
            module._parameters[name] = wrapped[id(parameter)][1]
            names.append(full)
    return names


@torch.no_grad()
def precompute_scales(model):
    """The amaxes of all FSDP2 shards of FP8 weights in one all-reduce; after optimizer.step().

    All ranks must call it. Without it every gather of a weight starts with an all-reduce of its
    own.
    """
    meshes = {}
    for parameter in model.parameters():
        local = getattr(parameter, "_local_tensor", None)
        if isinstance(local, Fp8Weight) and shards.needs_amax(local.recipe):
            group = _shard_group(parameter.device_mesh)
            meshes.setdefault(group, []).append((local, tuple(parameter.shape)))
    for group, locals_ in meshes.items():
        amaxes = torch.empty(len(locals_), dtype=torch.float32, device=locals_[0][0].device)
        for i, (shard, shape) in enumerate(locals_):
            plan = shard.fp8_state.weight_plan(shape, shard._data)
            cut = shards.cut_of(plan, -(-shape[0] // dist.get_world_size(group)))
            cut.amax(plan, shard._data, plan.at(), amaxes[i])
        dist.all_reduce(amaxes, op=dist.ReduceOp.MAX, group=group)
        for (shard, _), amax in zip(locals_, amaxes.unbind()):
            shard._amax.set(amax, shard._data)


def _shard_group(mesh):
    return mesh.get_group(mesh.ndim - 1)  # of (replicate, shard) the second


class Fp8Mode(TorchFunctionMode):
    """Inside, F.linear and matmuls with a 2-D right-hand side run in FP8, where all dims allow it.

    min_features: contraction and output features must be at least this; match: optional, a function
    (x, weight) -> bool. Covers what a custom autograd function computes in its backward too, if
    loss.backward() or torch.autograd.backward is called inside. Parameters keep their FP8 copies;
    other right-hand sides do not.
    """

    def __init__(self, min_features=256, match=None, recipe=Recipe()):
        super().__init__()
        self.min_features, self.match = min_features, match
        self.transient = State(recipe, keep=False)
        self.count = 0  # products that went to FP8

    def _takes(self, x, weight):
        dtypes = (torch.bfloat16, torch.float32, torch.float16)
        return (
            isinstance(x, torch.Tensor)
            and isinstance(weight, torch.Tensor)
            and weight.dim() == 2
            and x.dim() >= 1
            and x.shape[-1] == weight.shape[1]
            and x.dtype in dtypes
            and weight.dtype in dtypes
            and x.device == weight.device
            and min(weight.shape) >= self.min_features
            and (self.match is None or self.match(x, weight))
        )

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is F.linear:
            x, weight, bias = _linear_arguments(*args, **kwargs)
        elif (
            func in _MATMULS and len(args) == 2 and not kwargs and isinstance(args[1], torch.Tensor)
        ):
            x, weight, bias = args[0], args[1].t() if args[1].dim() == 2 else args[1], None
        elif func in _BACKWARDS:  # torch takes a mode off the stack while it is asked
            with self:
                return _BACKWARDS[func](*args, **kwargs)
        else:
            return func(*args, **kwargs)
        if not self._takes(x, weight):
            return func(*args, **kwargs)
        self.count += 1
        kept = isinstance(weight, nn.Parameter) and weight.is_leaf
        if isinstance(weight, _Wrapper):
            state = weight.fp8_state
        else:
            state = state_of(weight) if kept else self.transient
        return fp8_linear(x, weight, bias, state)


def _backward(
    tensors,
    grad_tensors=None,
    retain_graph=None,
    create_graph=False,
    grad_variables=None,
    inputs=None,
):
    """torch.autograd.backward without its question to modes, which would never end."""
    tensors = (tensors,) if isinstance(tensors, torch.Tensor) else tuple(tensors)
    grads = (grad_tensors,) if isinstance(grad_tensors, torch.Tensor) else grad_tensors
    grads = tuple(
        torch.ones_like(t) if g is None else g
        for t, g in zip(tensors, grads or (None,) * len(tensors))
    )
    inputs = (inputs,) if isinstance(inputs, torch.Tensor) else tuple(inputs or ())
    torch.autograd.Variable._execution_engine.run_backward(
        tensors,
        grads,
        create_graph if retain_graph is None else retain_graph,
        create_graph,
        inputs,
        allow_unreachable=True,
        accumulate_grad=True,
    )


def _tensor_backward(tensor, gradient=None, retain_graph=None, create_graph=False, inputs=None):
    _backward(tensor, gradient, retain_graph, create_graph, inputs=inputs)


_BACKWARDS = {torch.Tensor.backward: _tensor_backward, torch.autograd.backward: _backward}
_MATMULS = {torch.matmul, torch.mm, torch.Tensor.matmul, torch.Tensor.mm, torch.Tensor.__matmul__}
