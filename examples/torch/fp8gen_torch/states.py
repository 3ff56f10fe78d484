"""What is kept for one weight: which layer runs it, and its FP8 copies, remade when it has changed;
and the two calls that every step makes for it, forward and backward, each from the tensors to the C
call in one piece (a function in between costs half a microsecond of a step's two hundred).

Versions: the copies belong to one version of one memory. torch's version counter tells most writes,
the step of any torch.optim optimizer counts as one, and `weights_changed()` tells the rest
(`weight.data.copy_()` by somebody's own optimizer). Nothing is keyed by address: a weak reference
pins the identity of the storage.

CUDA graphs: under capture every forward quantises, so that a replay follows the weight; the bytes
stay where they are. Once a graph has written them, eager calls quantise every time.
"""

import itertools
import threading
import weakref

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_post_hook

from . import abi, operand
from .calls import (
    BACKWARD_CALL,
    BACKWARD_DBIAS,
    BACKWARD_DW,
    BACKWARD_DW_LD,
    BACKWARD_DX,
    BACKWARD_DY,
    BACKWARD_DY_LD,
    BACKWARD_GRAD,
    BACKWARD_SAVED,
    BACKWARD_WEIGHT,
    BACKWARD_X,
    BACKWARD_X_LD,
    FPROP_BIAS,
    FPROP_CALL,
    FPROP_SAVED,
    FPROP_W,
    FPROP_W_LD,
    FPROP_WEIGHT,
    FPROP_X,
    FPROP_X_LD,
    FPROP_Y,
    matrix,
    pattern,
    placed,
    plan_of,
    quantize_weight,
)
from .delayed import History
from .layers import Key, Recipe, device_index, layer_of

_runtime = abi.runtime
_BF16 = torch.bfloat16
_IO = (torch.bfloat16, torch.float32)
_INPUTS = (torch.bfloat16, torch.float32, torch.float16)
_empty_like = torch.empty_like  # looked up once, like others of torch's in these modules
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_states = weakref.WeakValueDictionary()
_delayed = weakref.WeakValueDictionary()  # those of them that have a history
_numbers = itertools.count(1)
_taking = threading.Lock()
_epoch = 0


def weights_changed():
    """Tells that weights were written behind torch's version counters (`w.data.copy_`)."""
    global _epoch
    _epoch += 1


def epoch():
    return _epoch


def advance_scales(group=None):
    """An optimizer step for the histories of recipe "delayed": the amaxes since the last one become
    entries, and the next scales follow. Any torch.optim optimizer's step does it; call it behind
    another's, or before it with a torch.distributed `group`: then the amaxes are first reduced over
    its ranks, all in one all-reduce. All ranks of a group call it; tensors that did not run are
    left alone, so it may be called twice.
    """
    if not _delayed:
        return
    histories = [state.kept_history for _, state in sorted(_delayed.items())]
    History.reduce(histories, group)
    for history in histories:
        history.advance()


def _stepped(*_):
    weights_changed()
    advance_scales()


register_optimizer_step_post_hook(_stepped)


class Identity:
    """One version of one tensor's memory, seen in one way."""

    __slots__ = ("storage", "version", "epoch", "address", "stride", "dtype")

    def __init__(self, tensor, before=None):
        """before: the Identity of an earlier version, perhaps."""
        storage = tensor.untyped_storage()
        same = before is not None and before.storage.cdata == storage._cdata
        self.storage = before.storage if same else StorageWeakRef(storage)
        try:
            self.version = tensor._version
        except RuntimeError:  # inference tensors have none
            self.version = None
        self.epoch = _epoch
        self.address, self.stride, self.dtype = tensor.data_ptr(), tensor.stride(), tensor.dtype

    def is_of(self, tensor):
        try:
            return (
                self.epoch == _epoch
                and self.version == tensor._version
                and self.address == tensor.data_ptr()
                and self.storage.cdata == tensor.untyped_storage()._cdata
                and self.stride == tensor.stride()
                and self.dtype is tensor.dtype
            )
        except RuntimeError:
            return False

    def same_memory(self, tensor):
        return self.storage.cdata == tensor.untyped_storage()._cdata


class Site:
    """What the calls with one shape and one set of dtypes need: the Plan, what y and dx look like,
    and which results are cast behind the C calls.

    like: (x's dtype, y's dtype, dw's dtype, bias's or None).
    """

    __slots__ = ("plan", "y", "dx", "cast_y", "casts")

    def __init__(self, plan, lead, like):
        x, y, dw, bias = like
        self.plan = plan
        self.y = pattern((*lead, plan.n), plan.output, plan.device)
        self.dx = pattern((*lead, plan.k), plan.grad_input, plan.device)
        self.cast_y = y if y is not plan.output else None
        gives = plan.grad_input, plan.grad_weight, torch.float32 if bias else None
        self.casts = (x, dw, bias) if (x, dw, bias) != gives else None  # of dx, dw, dbias


class Copies:
    """A weight's FP8 copies that are kept: the operand's bytes and which copies they hold, the
    Plan.place that they are laid out for, the Identity of the weight that they were made from, on
    which stream, and whether by an evaluation; shared: another stream reads them too."""

    __slots__ = ("data", "copies", "place", "identity", "stream", "evaluated", "shared")

    def __init__(self, data, copies, place, identity, at):
        self.data, self.copies, self.place, self.identity = data, copies, place, identity
        self.stream, self.evaluated, self.shared = at[0], at[3] & abi.CALL_EVALUATE, False


class State:
    """What fp8_linear keeps for one weight: the recipe and the weight's FP8 copies.

    keep=False makes the copies anew in forward (row) and in backward (transposed) and keeps
    neither: for weights that are gathered for one call and given back.
    """

    def __init__(self, recipe=Recipe(), keep=True):
        self.recipe, self.keep = recipe, keep
        self._is_delayed = recipe.name == "delayed"
        self._shards = False  # whether a layer needs the kernels of FP8 shards
        self.number = next(_numbers)
        _states[self.number] = self
        self.sites = {}  # Sites by what a call looks like; `site` makes them
        self._layers = {}  # by the weight's whole shape, dtype and device
        self.kept = None  # the Copies; one object, so that threads see all of it or nothing
        self._captured = False  # a graph has written the bytes: only graphs may trust them
        self._of_graphs = []  # bytes that graphs write at every replay, but are kept no more
        self.kept_history = None  # of recipe "delayed", from the first call on
        self._histories = {}  # by the layer; a call of another thread may still be given one
        self._saved_history = None  # loaded before that

    def __reduce__(self):  # a copy, or one from a file, starts empty and has its own number
        return State, (self.recipe, self.keep)

    @staticmethod
    def by_number(number):
        """The living state of this number, or None."""
        return _states.get(int(number))  # a symbol where torch.compile has met several

    def plan(self, x, weight, bias, y_dtype, dw_dtype):
        """The checked Plan of a call."""
        return self.site(x, weight, bias, y_dtype, dw_dtype).plan

    def site(self, x, weight, bias, y_dtype, dw_dtype):
        """The Site of a call; None on the meta device, which has none."""
        look = (
            x.shape,
            x.dtype,
            x.device,
            weight.shape,
            weight.dtype,
            weight.device,
            None if bias is None else (bias.shape, bias.dtype, bias.device),
            y_dtype,
            dw_dtype,
        )
        site = self.sites.get(look)
        if site is None:
            if x.is_meta:
                return None
            check(x, weight, bias)
            like = x.dtype, y_dtype, dw_dtype, None if bias is None else bias.dtype
            m = x.numel() // x.shape[-1]
            plan = self.plan_of(m, x.device, weight.shape, weight.dtype, like)
            site = self.keep_site(look, Site(plan, x.shape[:-1], like))
        return site

    def keep_site(self, look, site):
        if len(self.sites) > 1024:  # shapes that never come back
            self.sites.clear()
        self.sites[look] = site
        return site

    def plan_of(self, m, device, shape, w_dtype, like):
        """The Plan for m tokens; like: (x's dtype, y's dtype, dw's dtype, bias's or None)."""
        x_dtype, y_dtype, dw_dtype, bias = like
        bias = bias is not None
        dtypes = (d if d in _IO else torch.float32 for d in (w_dtype, y_dtype, x_dtype, dw_dtype))
        index = device_index(device)
        layer = layer_of(Key(*shape, bias, *dtypes, self.recipe, index, self._shards), m)
        self._layers[tuple(shape), w_dtype, device] = layer
        return plan_of(layer, m)

    def weight_plan(self, shape, weight):
        """A Plan without tokens for a weight of this shape, of which `weight` is the whole or a
        part: for what is done to weights alone. Any layer serves; an earlier call's if there is."""
        layer = self._layers.get((shape, weight.dtype, weight.device))
        if layer is not None:
            return plan_of(layer, 0)
        main_grad = getattr(weight, "main_grad", None)
        dw_dtype = weight.dtype if main_grad is None else main_grad.dtype
        like = torch.bfloat16, torch.bfloat16, dw_dtype, None
        return self.plan_of(0, weight.device, shape, weight.dtype, like)

    def at(self, plan, training):
        """Context.at for a pass of this weight. The history goes with the weight from layer to
        layer (x in bf16 and in fp32 are two); that blocks."""
        if not self._is_delayed:
            return plan.at()
        kept = self.kept_history
        if kept is None or kept.layer is not plan.layer:
            with _taking:  # one for all threads: the last one to make it would end the others'
                kept = self.kept_history
                if kept is None or kept.layer is not plan.layer:
                    kept = self._move_history(plan.layer)
        return plan.at(kept.handle, 0 if training else abi.CALL_EVALUATE)

    def _move_history(self, layer):
        """Makes the layer's History the one that is kept, with what the last one held."""
        last, moved = self.kept_history, self._histories.get(layer)
        saved = self._saved_history if last is None else last.save()
        if moved is None:
            moved = self._histories[layer] = History(layer, saved)
            _delayed[self.number] = self
        else:
            moved.load(saved)
        self.kept_history = moved
        return moved

    def save_history(self):
        """The history of recipe "delayed" as a uint8 tensor on the CPU, None if there is none yet;
        fp8_state.h says how it is laid out. Blocks."""
        return self._saved_history if self.kept_history is None else self.kept_history.save()

    def load_history(self, saved):
        """Takes what save_history gave, also with another history_length. Blocks."""
        self._saved_history = saved
        if self.kept_history is not None and saved is not None:
            self.kept_history.load(saved)

    def current(self, plan, weight, copies, forward, at):
        """The kept Copies if they are those of the weight as it is, else None: quantise it. So too
        when training meets what an evaluation made, whose amax the history was not told."""
        kept = self.kept
        if kept is None or kept.copies & copies != copies or kept.place != plan.place:
            return None
        stream, capturing, _, flags = at
        if (self._captured if not capturing else forward) or (
            kept.evaluated and not flags & abi.CALL_EVALUATE
        ):
            return None
        if not kept.identity.is_of(weight):
            return None
        if stream != kept.stream and not capturing:
            with _taking:
                if self.kept is not kept:  # taken, to be written
                    return None
                kept.shared = True
            _wait_for(kept.stream, weight.device)
            _reads(kept.data, weight.device)
        return kept

    def forward(self, site, x, weight, bias, wants):
        """(y, saved or None, the weight's kept Copies or None) of one call. wants: which gradients,
        of x, weight and bias; of none: an evaluation. saved: for backward, the bytes of x's
        transposed copy, or x where the recipe has none. The weight is quantised in the same C call
        when it has changed.
        """
        plan, source, saved, kept = site.plan, None, None, None
        delayed, want_dx, save = self._is_delayed, wants[0], wants[1]
        at = self.at(plan, True in wants) if delayed else (plan.stream(), plan.capturing(), 0, 0)
        # The weight's bytes.
        if type(weight) not in _PLAIN and hasattr(weight, "fp8_operand"):
            data, copies = weight.fp8_operand(plan, abi.ROW, at)
        else:
            if type(weight) not in _PLAIN:
                weight = getattr(weight, "_data", weight)
            copies = abi.BOTH if want_dx and self.keep else abi.ROW
            kept = self.kept
            if kept is not None and kept.identity.epoch == _epoch:
                kept = self.current(plan, weight, copies, True, at)
            else:
                kept = None
            if kept is None:
                source = weight
                data, copies, identity = self._memory(plan, copies, at)
            else:
                data, copies = kept.data, kept.copies
        # The other tensors.
        ld = plan.k
        if not (plan.grad_input is _BF16 and x.is_contiguous()):
            x, ld = placed(x, ld)
        y = _empty_like(site.y)
        if save:
            if plan.saves_x:
                saved, save = matrix(x), False
            elif plan.saved is None:
                saved = operand.memory(plan.saved_bytes, plan.device)
            else:
                saved = _empty_like(plan.saved)
        # The call.
        kind = copies, save, source is not None
        pool = plan.pools[kind]
        try:
            prepared = pool.pop()
        except IndexError:
            prepared = plan.prepare_fprop(*kind)
        words, pointer = prepared
        words[FPROP_X], words[FPROP_X_LD] = x.data_ptr(), ld
        words[FPROP_Y], words[FPROP_WEIGHT] = y.data_ptr(), data.data_ptr()
        if save:
            words[FPROP_SAVED] = saved.data_ptr()
        if source is not None:
            ld = plan.k
            if not (source.dtype is plan.w_dtype and source.is_contiguous()):
                source, ld = plan.source(source)
            words[FPROP_W], words[FPROP_W_LD] = source.data_ptr(), ld
        if bias is not None:
            if not (bias.dtype is _BF16 and bias.is_contiguous()):
                bias = bias.to(_BF16).contiguous()
            words[FPROP_BIAS] = bias.data_ptr()
        stream, capturing, state, flags = at
        held = plan.workspaces.get(stream)
        if held is None or capturing or held[2] < plan.workspace_bytes:
            held = plan.context.workspace(stream, capturing, plan.workspace_bytes)
        words[FPROP_CALL], words[FPROP_CALL + 2] = held[1], stream
        words[FPROP_CALL + 3], words[FPROP_CALL + 4] = flags << 32, state
        with held[3]:
            status = _runtime.fp8_layer_fprop(plan.handle, pointer)
        pool.append(prepared)
        if status:
            abi.check(status)
        if source is not None and self.keep:
            self._captured = self._captured or capturing
            kept = Copies(data, copies, plan.place, Identity(weight, identity), at)
            self.kept = kept
        return (y if site.cast_y is None else y.to(site.cast_y)), saved, kept

    def backward(self, site, dy, saved, weight, wants, main_grad, kept):
        """(dx, dw, dbias, None), each None if not in `wants`, a tuple as long; dw is added to
        main_grad if that is given. kept: the weight's Copies of the forward, or None."""
        plan = site.plan
        at = self.at(plan, True) if self._is_delayed else (plan.stream(), plan.capturing(), 0, 0)
        stream, capturing, state, flags = at
        want_dx, want_dw, want_dbias, _ = wants
        dx = dw = dbias = None
        copies, add = 0, False
        if want_dx:
            dx = _empty_like(site.dx)
            if (
                kept is not None
                and kept is self.kept
                and kept.stream == stream
                and kept.copies & abi.TRANSPOSED
                and kept.identity.epoch == _epoch  # and its version: autograd looks
                and not (self._captured or kept.evaluated)
            ):
                data, copies = kept.data, kept.copies
            else:
                data, copies = self.weight(plan, weight, at)
        if want_dw:
            if main_grad is None:
                dw = _empty_like(plan.dw)
            else:
                dw, add = _checked_main_grad(plan, main_grad), True
        if want_dbias:
            dbias = torch.empty(plan.n, dtype=torch.float32, device=plan.device)
        ld = plan.n
        if not (plan.output is _BF16 and dy.is_contiguous()):
            dy, ld = placed(dy, ld)
        # The call.
        pool = plan.pools[copies, wants, add]
        try:
            prepared = pool.pop()
        except IndexError:
            prepared = plan.prepare_backward(copies, wants, add)
        words, pointer = prepared
        words[BACKWARD_DY], words[BACKWARD_DY_LD] = dy.data_ptr(), ld
        if want_dx:
            words[BACKWARD_WEIGHT], words[BACKWARD_DX] = data.data_ptr(), dx.data_ptr()
        if want_dw:
            words[BACKWARD_DW] = dw.data_ptr()
            if add:
                words[BACKWARD_DW_LD] = dw.stride(0)
            address = saved.data_ptr()
            if plan.saves_x:
                words[BACKWARD_X], words[BACKWARD_X_LD] = address, saved.stride(0)
            else:
                if address % 256:
                    saved = operand.aligned(saved)
                    address = saved.data_ptr()
                words[BACKWARD_SAVED] = address
        if want_dbias:
            words[BACKWARD_DBIAS] = dbias.data_ptr()
        held = plan.workspaces.get(stream)
        if held is None or capturing or held[2] < plan.backward_bytes:
            held = plan.context.workspace(stream, capturing, plan.backward_bytes)
        start = held[1]
        words[BACKWARD_GRAD] = (start + plan.workspace_bytes + 255) & -256
        words[BACKWARD_CALL], words[BACKWARD_CALL + 2] = start, stream
        words[BACKWARD_CALL + 3], words[BACKWARD_CALL + 4] = flags << 32, state
        with held[3]:
            status = _runtime.fp8_layer_backward(plan.handle, pointer)
        pool.append(prepared)
        if status:
            abi.check(status)
        if add:
            dw = None
        if site.casts is not None:
            dx, dw, dbias = (
                t if t is None or t.dtype is dtype else t.to(dtype)
                for t, dtype in zip((dx, dw, dbias), site.casts)
            )
        return dx, dw, dbias, None

    def weight(self, plan, weight, at):
        """(bytes, copies) of the weight's transposed copy, for a backward."""
        if type(weight) not in _PLAIN:
            if hasattr(weight, "fp8_operand"):
                return weight.fp8_operand(plan, abi.TRANSPOSED, at)
            weight = getattr(weight, "_data", weight)
        if not self.keep:
            return quantize_weight(plan, weight, abi.TRANSPOSED, at), abi.TRANSPOSED
        kept = self.current(plan, weight, abi.TRANSPOSED, False, at)
        if kept is None:
            data, copies, identity = self._memory(plan, abi.TRANSPOSED, at)
            quantize_weight(plan, weight, copies, at, data)
            kept = Copies(data, copies, plan.place, Identity(weight, identity), at)
            self._captured = self._captured or at[1]
            self.kept = kept
        return kept.data, kept.copies

    def _memory(self, plan, copies, at):
        """(bytes to write, which copies, the Identity that they had): those that are kept, taken so
        that no other thread writes them too, or new ones. New where another stream may still read
        those that are kept; what graphs write stays where it is."""
        if self.keep:
            with _taking:
                kept, self.kept = self.kept, None
            stream, capturing = at[:2]
            if (
                kept is not None
                and kept.copies & copies == copies
                and kept.place == plan.place
                and not kept.shared
                and (stream == kept.stream or capturing or self._captured)
            ):
                if stream != kept.stream and not capturing:
                    _wait_for(kept.stream, plan.device)
                return kept.data, kept.copies, kept.identity
            if kept is not None and self._captured:
                self._of_graphs.append(kept.data)
        return operand.empty(plan.n, plan.k, copies, plan.device, plan.w_scalings), copies, None


def _checked_main_grad(plan, main_grad):
    if main_grad.dtype is not plan.grad_weight or main_grad.shape != plan.dw.shape:
        raise TypeError(
            f"fp8_linear: main_grad is {main_grad.dtype} {tuple(main_grad.shape)}; of a weight of "
            f"{plan.n} x {plan.k} it has that shape and is bf16 or fp32"
        )
    if plan.k > 1 and main_grad.stride(1) != 1:
        raise RuntimeError("fp8_linear: main_grad's columns do not lie side by side")
    return main_grad


def _wait_for(stream, device):
    """The current stream waits for all that was enqueued on another one."""
    other = (
        torch.cuda.ExternalStream(stream, device=device)
        if stream
        else torch.cuda.default_stream(device)
    )
    torch.cuda.current_stream(device).wait_stream(other)


def _reads(data, device):
    """Memory of another stream is not given away before what is enqueued on the current one."""
    data.record_stream(torch.cuda.current_stream(device))


def check(x, weight, bias):
    if weight.dim() != 2 or x.dim() < 1 or x.shape[-1] != weight.shape[1]:
        raise RuntimeError(
            f"fp8_linear: x is {tuple(x.shape)} and weight {tuple(weight.shape)}; "
            "x's last dim must be the weight's second of two"
        )
    if 0 in weight.shape:
        raise RuntimeError(f"fp8_linear: weight is {tuple(weight.shape)}; neither dim may be 0")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise RuntimeError(
            f"fp8_linear: bias is {tuple(bias.shape)}, but the weight has "
            f"{weight.shape[0]} rows"
        )
    for name, tensor in (("x", x), ("weight", weight), ("bias", bias)):
        if tensor is not None and tensor.dtype not in _INPUTS:
            raise TypeError(f"fp8_linear: {name} is {tensor.dtype}; it takes bf16, fp32 and fp16")
        if tensor is not None and tensor.device != x.device:
            raise RuntimeError(f"fp8_linear: {name} is on {tensor.device}, but x on {x.device}")


def state_of(weight):
    """The state that belongs to a weight: its attribute, or one for the call if it is computed."""
    state = getattr(weight, "_fp8gen_state", None)
    if state is None:
        state = State(keep=weight.is_leaf)
        if weight.is_leaf:
            weight._fp8gen_state = state
    return state
