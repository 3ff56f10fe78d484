"""fp8_linear against F.linear: values, dtypes, shapes, strides, autocast, gradients, versions."""

import copy
import gc
import io
import itertools
import threading
import unittest
import unittest.mock
import weakref

import torch
import torch.nn.functional as F

import rig
from rig import DEVICE, error, randn
from fp8gen_torch import (
    Fp8Linear,
    Recipe,
    ShardState,
    State,
    abi,
    fp8_linear,
    layers,
    operand,
    prepare,
    shards,
    states,
    weights_changed,
)
from fp8gen_torch.calls import quantize_weight

BOUND = {"y": 0.05, "dx": 0.09, "dw": 0.09}


def zeroed(size, device, memory=operand.memory):
    """Memory whose bytes between the parts of an operand can be compared."""
    return memory(size, device).zero_()


def leaf(tensor):
    return tensor.detach().clone().requires_grad_()


def both(x, w, b, run=fp8_linear, autocast=None):
    """(y, dx, dw, dbias) of a function."""
    x, w, b = leaf(x), leaf(w), None if b is None else leaf(b)
    with torch.autocast(DEVICE.type, autocast or torch.bfloat16, enabled=autocast is not None):
        y = run(x, w, b)
    y.backward(randn(*y.shape, dtype=y.dtype, seed=9))
    return y, x.grad, w.grad, None if b is None else b.grad


class Linear(unittest.TestCase):
    def compare(self, x, w, b, **how):
        got, wanted = both(x, w, b, **how), both(x, w, b, F.linear, **how)
        for name, a, c in zip(("y", "dx", "dw", "db"), got, wanted):
            if c is None:
                self.assertIsNone(a)
                continue
            self.assertEqual(a.dtype, c.dtype, name)
            self.assertEqual(a.shape, c.shape, name)
            self.assertLess(error(a, c), BOUND.get(name, 0.01), name)

    def test_dtypes_and_ranks(self):
        for dtype, shape in itertools.product(
            (torch.bfloat16, torch.float32, torch.float16), ((33, 72), (72,), (2, 3, 5, 72))
        ):
            with self.subTest(dtype=dtype, shape=shape):
                x, w = randn(*shape, dtype=dtype, seed=1), randn(40, 72, dtype=dtype, seed=2)
                self.compare(x, w, randn(40, dtype=dtype, seed=3))

    def test_odd_shapes(self):
        for m, n, k in ((17, 255, 100), (1, 512, 25), (129, 27, 1), (5, 1, 71)):
            with self.subTest(m=m, n=n, k=k):
                self.compare(randn(m, k, seed=1), randn(n, k, seed=2), None)

    def test_autocast(self):
        for xd, wd, ad in (
            (torch.float32, torch.float32, torch.bfloat16),
            (torch.bfloat16, torch.float32, torch.bfloat16),
            (torch.float32, torch.float32, torch.float16),
        ):
            with self.subTest(x=xd, w=wd, autocast=ad):
                x, w = randn(19, 72, dtype=xd, seed=1), randn(40, 72, dtype=wd, seed=2)
                self.compare(x, w, randn(40, dtype=wd, seed=3), autocast=ad)

    def test_strides(self):
        w = randn(40, 72, seed=2)
        wide = randn(6, 2, 100, seed=4)
        for name, x in (
            ("slice", wide[..., 3:75]),
            ("transposed", randn(72, 9, seed=1).t()),
            ("expanded", randn(1, 72, seed=1).expand(5, 72)),
            ("batch_first", randn(4, 3, 72, seed=1).transpose(0, 1)),
        ):
            with self.subTest(name):
                x = x.detach()
                got = fp8_linear(x, w)
                self.assertTrue(torch.equal(got, fp8_linear(x.contiguous(), w)))
        self.assertTrue(
            torch.equal(
                fp8_linear(randn(9, 72), w.t().contiguous().t()), fp8_linear(randn(9, 72), w)
            )
        )
        x = leaf(randn(9, 72))
        fp8_linear(x, leaf(w)).sum().backward()  # dy has strides of 0
        self.assertLess(error(x.grad, w.sum(0).expand(9, 72)), 0.09)

    def test_no_tokens(self):
        x, w, b = leaf(randn(0, 3, 72)), leaf(randn(40, 72)), leaf(randn(40))
        y = fp8_linear(x, w, b)
        self.assertEqual(y.shape, (0, 3, 40))
        y.sum().backward()
        self.assertEqual(x.grad.shape, (0, 3, 72))
        self.assertEqual(w.grad.abs().sum().item(), 0)
        self.assertEqual(b.grad.abs().sum().item(), 0)

    def test_what_is_wanted(self):
        x, w, b = randn(33, 72, seed=1), randn(40, 72, seed=2), randn(40, seed=3)
        full = both(x, w, b)
        for wants in itertools.product((False, True), repeat=3):
            tensors = [t.clone().requires_grad_(want) for t, want in zip((x, w, b), wants)]
            y = fp8_linear(*tensors)
            self.assertTrue(torch.equal(y, full[0]))
            self.assertEqual(y.requires_grad, any(wants))
            if any(wants):
                y.backward(randn(*y.shape, seed=9))
            for tensor, want, wanted in zip(tensors, wants, full[1:]):
                if want:
                    self.assertTrue(torch.equal(tensor.grad, wanted))
                else:
                    self.assertIsNone(tensor.grad)
        for guard in (torch.no_grad, torch.inference_mode):
            with guard():
                self.assertTrue(torch.equal(fp8_linear(leaf(x), leaf(w), leaf(b)), full[0]))
                self.assertTrue(torch.equal(fp8_linear(x.clone(), w.clone(), b.clone()), full[0]))

    def test_main_grad(self):
        x, w = randn(33, 72, seed=1), randn(40, 72, seed=2)
        _, dx, dw, _ = both(x, w.float(), None)
        for dtype in (torch.float32, torch.bfloat16):
            weight = leaf(w)
            weight.main_grad = torch.ones(40, 72, dtype=dtype, device=DEVICE)
            for _ in range(2):
                inputs = leaf(x)
                fp8_linear(inputs, weight).backward(randn(33, 40, seed=9))
                self.assertTrue(torch.equal(inputs.grad, dx))
            self.assertIsNone(weight.grad)
            self.assertTrue(weight.grad_added_to_main_grad)
            self.assertLess(
                error(weight.main_grad, 1 + 2 * dw), 1e-6 if dtype.itemsize == 4 else 5e-3
            )
        weight = leaf(w)
        weight.main_grad = torch.ones(72, 40, device=DEVICE).t()  # refused: nothing is added
        with self.assertRaisesRegex(RuntimeError, "side by side"):
            fp8_linear(x, weight).sum().backward()
        self.assertFalse(hasattr(weight, "grad_added_to_main_grad"))

    def test_saved_is_fp8(self):
        kept = []
        x, w = leaf(randn(256, 512)), leaf(randn(384, 512))
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
            fp8_linear(x, w)
        kept = [t for t in kept if t is not w and t.data_ptr() != w.data_ptr()]
        self.assertEqual([t.dtype for t in kept], [torch.uint8])
        self.assertEqual(kept[0].numel(), operand.operand_bytes(256, 512, abi.TRANSPOSED))
        self.assertLess(kept[0].numel(), 0.51 * x.numel() * 2)

    def test_offloaded_saved(self):
        x, w = randn(33, 72, seed=1), randn(40, 72, seed=2)
        wanted = both(x, w, None)
        x, w = leaf(x), leaf(w)

        def shift(t):
            return torch.empty(t.numel() + 64, dtype=t.dtype)[64:].copy_(t.view(-1)).view(t.shape)

        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: shift(t.cpu()) if t.dtype is torch.uint8 else t, lambda t: t.to(DEVICE)
        ):
            y = fp8_linear(x, w)
        y.backward(randn(33, 40, seed=9))
        self.assertTrue(torch.equal(w.grad, wanted[2]))

    def test_errors(self):
        x, w = randn(3, 72), randn(40, 72)
        for bad in ((x[:, :71], w, None), (x, w[0], None), (x, w, randn(39))):
            with self.assertRaises(RuntimeError):
                fp8_linear(*bad)
        with self.assertRaises(TypeError):
            fp8_linear(x.double(), w.double())
        with self.assertRaisesRegex(ValueError, "format is 'e5m2'"):
            Recipe(format="e5m2")
        with self.assertRaisesRegex(RuntimeError, "neither dim may be 0"):
            fp8_linear(x[:, :0], w[:, :0])
        for loss in (lambda y: y.square().sum(), lambda y: y.sum()):
            with self.assertRaisesRegex(RuntimeError, "differentiate twice"):
                x, w = leaf(x), leaf(w)
                y = fp8_linear(x, w)
                (g,) = torch.autograd.grad(loss(y), x, create_graph=True)
                (g.sum() + y.sum()).backward()
        with self.assertRaisesRegex(NotImplementedError, "torch.func"):
            torch.func.grad(lambda x: fp8_linear(x, w).sum())(x)

    def test_recipes(self):
        x, w = randn(33, 72, seed=1), randn(40, 72, seed=2)
        results = [
            both(x, w, None, lambda x, w, b, s=State(r): fp8_linear(x, w, b, s))
            for r in (Recipe(), Recipe(power_of_two=True), Recipe(format="e4m3"))
        ]
        reference = both(x, w, None, F.linear)
        for result in results:
            for a, c in zip(result[:3], reference):
                self.assertLess(error(a, c), 0.09)
        self.assertFalse(torch.equal(results[0][0], results[1][0]))
        self.assertFalse(torch.equal(results[0][1], results[2][1]))


class Versions(unittest.TestCase):
    """The weight is quantised once for every version of it, and never too seldom."""

    def setUp(self):
        self.count, made = 0, states.Copies

        def counted(*rest):
            self.count += 1
            return made(*rest)

        patch = unittest.mock.patch.object(states, "Copies", counted)
        patch.start()
        self.addCleanup(patch.stop)

    def fresh(self, x, w):
        return fp8_linear(x, w.detach().clone())

    def test_once(self):
        x, w = leaf(randn(33, 72)), leaf(randn(40, 72))
        for _ in range(3):
            fp8_linear(x, w).sum().backward()
        self.assertEqual(self.count, 1)
        with torch.no_grad():
            w.mul_(1.5)
        y = fp8_linear(x, w)
        self.assertEqual(self.count, 2)
        self.assertTrue(torch.equal(y, self.fresh(x, w)))

    def test_optimizer_and_data(self):
        x, w = randn(33, 72), leaf(randn(40, 72))
        optimizer = torch.optim.AdamW([w], lr=0.1)
        fp8_linear(x, w).sum().backward()
        optimizer.step()
        self.assertTrue(torch.equal(fp8_linear(x, w), self.fresh(x, w)))
        w.data.mul_(2)
        weights_changed()
        self.assertTrue(torch.equal(fp8_linear(x, w), self.fresh(x, w)))
        w.data = w.data * 3
        self.assertTrue(torch.equal(fp8_linear(x, w), self.fresh(x, w)))

    def test_same_address(self):
        state, x = State(), randn(33, 72)
        for i in range(20):  # freed and allocated again, most likely at the same place
            w = randn(40, 72, seed=i)
            self.assertTrue(torch.equal(fp8_linear(x, w, None, state), self.fresh(x, w)))
            del w

    def test_other_shape(self):
        """Copies serve the shape that they were made for, whatever else a state meets."""
        state, x = State(), randn(33, 72)
        for rows in (40, 400, 16):
            w = leaf(randn(rows, 72, seed=rows))
            y = fp8_linear(x, w, None, state)
            self.assertTrue(torch.equal(y, self.fresh(x, w)))
            y.sum().backward()
        w.data = w.data[:8]  # the same memory, version and strides
        self.assertTrue(torch.equal(fp8_linear(x, w, None, state), self.fresh(x, w)))

    def test_changed_before_backward(self):
        x, w = leaf(randn(33, 72)), leaf(randn(40, 72))
        y = fp8_linear(x, w)
        with torch.no_grad():
            w.add_(1)
        with self.assertRaisesRegex(RuntimeError, "modified by an inplace operation"):
            y.sum().backward()

    def test_micro_batches(self):
        x1, x2, w = leaf(randn(33, 72, seed=1)), leaf(randn(17, 72, seed=2)), leaf(randn(40, 72))
        y1, y2 = fp8_linear(x1, w), fp8_linear(x2, w)  # forwards first, then backwards
        y2.sum().backward()
        y1.sum().backward()
        self.assertEqual(self.count, 1)
        self.assertLess(error(w.grad, torch.cat([x1, x2]).sum(0).expand(40, 72)), 0.09)

    def test_bytes_of_graphs(self):
        """What a graph writes at every replay is not given back when more copies are wanted."""
        for captured in (False, True):
            state, x, w = State(), randn(33, 72), leaf(randn(40, 72))
            with torch.no_grad():
                fp8_linear(x, w, None, state)
            state._captured = captured  # as a capture leaves it
            first = weakref.ref(state.kept.data)
            fp8_linear(x, w, None, state).sum().backward()
            fp8_linear(leaf(x), w, None, state).sum().backward()
            gc.collect()
            self.assertEqual(first() is not None, captured)

    def test_copies_of_the_call(self):
        """Backward is given the copies that its forward read, whatever has come since."""
        x, w, dy = leaf(randn(33, 72)), leaf(randn(40, 72)), randn(33, 40, seed=9)
        other, state = leaf(randn(40, 72, seed=5)), State()
        wanted = both(x, w, None)

        class Meanwhile(State):  # another thread has come when forward returns
            def forward(self, *call):
                result = super().forward(*call)
                if call[2] is w:
                    fp8_linear(x, other, None, self)
                return result

        fp8_linear(x, w, None, Meanwhile()).backward(dy)
        self.assertTrue(torch.equal(x.grad, wanted[1]))

    @unittest.skipIf(DEVICE.type == "cuda", "with made-up streams; check_cuda.py has real ones")
    def test_bytes_of_streams(self):
        """Bytes that two streams use are read behind who made them, and written no more."""
        state, x, w = State(), randn(33, 72), randn(40, 72)
        plan = state.plan(x, w, None, w.dtype, w.dtype)

        def called(stream):
            with unittest.mock.patch.object(plan, "stream", lambda: stream):
                fp8_linear(x, w, None, state)
            return state.kept.data

        with (
            unittest.mock.patch.object(states, "_wait_for") as waits,
            unittest.mock.patch.object(states, "_reads") as reads,
        ):
            made = called(11)
            weights_changed()
            self.assertIs(called(11), made)  # one stream: in place
            weights_changed()
            other = called(22)
            self.assertIsNot(other, made)
            reads.assert_not_called()
            self.assertIs(called(11), other)
            waits.assert_called_once_with(22, DEVICE)
            reads.assert_called_once_with(other, DEVICE)
            weights_changed()
            self.assertIsNot(called(22), other)  # the first stream may still read them

        def taken(*_):  # by another thread, to be written, while this one looks
            state.kept = None
            return True

        with unittest.mock.patch.object(states.Identity, "is_of", taken):
            self.assertIsNone(state.current(plan, w, abi.ROW, True, (11, False, 0, 0)))

    def test_not_kept(self):
        state, x, w = State(keep=False), leaf(randn(33, 72)), leaf(randn(40, 72))
        wanted = both(x, w, None)
        fp8_linear(x, w, None, state).backward(randn(33, 40, seed=9))
        self.assertIsNone(state.kept)
        self.assertTrue(torch.equal(x.grad, wanted[1]))
        computed = w * 2
        self.assertTrue(torch.equal(fp8_linear(x, computed), self.fresh(x, computed)))
        self.assertFalse(hasattr(computed, "_fp8gen_state"))

    def test_state_is_freed(self):
        w = leaf(randn(40, 72))
        fp8_linear(randn(3, 72), w)
        state = weakref.ref(w._fp8gen_state)
        del w
        gc.collect()
        self.assertIsNone(state())


class Threads(unittest.TestCase):
    """Threads on one stream, which share its workspace."""

    def test_workspace(self):
        """A C call has the scratch for itself from its first kernel to its last."""
        w, dy = randn(128, 256), randn(96, 128, seed=9)
        inputs = [(leaf(randn(96, 256, seed=i)), leaf(w), State()) for i in range(4)]
        context = State().plan(inputs[0][0], w, None, w.dtype, w.dtype).context
        stream = context.stream()
        held = context.workspaces.get(stream)  # None on the host, where each thread has its own
        context.workspaces[stream] = context.workspace(stream, False, 1 << 22)
        results = [[] for _ in inputs]

        def work(x, w, state, out):
            for _ in range(40):
                y = fp8_linear(x, w, None, state)
                out.append((y.detach(), *torch.autograd.grad(y, (x, w), dy)))

        try:
            threads = [
                threading.Thread(target=work, args=(*call, out))
                for call, out in zip(inputs, results)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            del context.workspaces[stream]
            if held is not None:
                context.workspaces[stream] = held
        for (x, w, _), out in zip(inputs, results):
            y = fp8_linear(x, w, None, State())
            wanted = y, *torch.autograd.grad(y, (x, w), dy)
            self.assertEqual(len(out), 40)
            for got in out:
                self.assertTrue(all(map(torch.equal, got, wanted)))

    def test_lock(self):
        """Every way to the runtime holds the lock of the workspace that it passes."""
        lock = unittest.mock.MagicMock()
        x, w = leaf(randn(33, 72)), leaf(randn(40, 72))
        state = State()
        plan = state.plan(x, w, None, x.dtype, w.dtype)
        at, find = plan.at(), layers.Context.workspace
        grad = plan.quantize_dy(randn(33, 40), abi.BOTH, None, at)
        data = quantize_weight(plan, w, abi.BOTH, at)
        ways = {
            "forward": lambda: fp8_linear(x, w, None, state),
            "quantize_dy": lambda: plan.quantize_dy(randn(33, 40), abi.BOTH, None, at),
            "dgrad": lambda: plan.dgrad(grad, abi.BOTH, (data, abi.BOTH), plan.new_dx((33,)), at),
            "weight": lambda: quantize_weight(plan, w, abi.BOTH, at),
            "run": lambda: shards.dequantize(plan, data, abi.BOTH, at),
        }

        def shared(*call):
            found = find(*call)
            plan.workspaces.clear()  # so that the next one asks
            return *found[:3], lock

        held = dict(plan.workspaces)
        plan.workspaces.clear()
        with unittest.mock.patch.object(layers.Context, "workspace", shared):
            for name, way in ways.items():
                lock.reset_mock()
                way()
                lock.__enter__.assert_called_once()
                lock.__exit__.assert_called_once()
            y = fp8_linear(x, w, None, state)
            lock.reset_mock()
            y.sum().backward()
            lock.__enter__.assert_called_once()
        plan.workspaces.update(held)


class Prepared(unittest.TestCase):
    def test_prepare(self):
        """A prepared layer is not made again, and says nothing inside a step."""
        shapes = [(48, 80, False), (56, 80, True)]
        prepare(shapes, 100, DEVICE)
        with self.assertNoLogs("fp8gen", "WARNING"):
            for n, k, bias in shapes:
                w = leaf(randn(n, k))
                fp8_linear(randn(3, k), w, randn(n) if bias else None).sum().backward()


class Module(unittest.TestCase):
    def test_module(self):
        layer = Fp8Linear(72, 40, device=DEVICE, dtype=torch.bfloat16)
        twin = torch.nn.Linear(72, 40, device=DEVICE, dtype=torch.bfloat16)
        twin.load_state_dict(layer.state_dict())
        self.assertLess(error(layer(randn(9, 72)), twin(randn(9, 72))), 0.05)

    def test_copies(self):
        layer = Fp8Linear(72, 40, device=DEVICE, dtype=torch.bfloat16)
        x = randn(9, 72)
        wanted = layer(x)
        file = io.BytesIO()
        torch.save(layer, file)
        file.seek(0)
        for twin in (copy.deepcopy(layer), torch.load(file, weights_only=False)):
            self.assertNotEqual(twin.fp8_state.number, layer.fp8_state.number)
            with torch.no_grad():
                twin.weight.mul_(2)
                twin.bias.mul_(2)
            self.assertLess(error(twin(x), 2 * wanted), 1e-2)
            self.assertTrue(torch.equal(layer(x), wanted))

    @unittest.mock.patch.object(operand, "memory", zeroed)
    def test_shards(self):
        """Shards, quantised, put in a row and assembled, are the whole weight bit for bit."""
        for recipe, cuts in (
            (Recipe(), ((40, 72, 3), (129, 257, 2), (1, 5, 4))),
            (Recipe(power_of_two=True), ((129, 257, 2),)),
            (Recipe("block"), ((300, 200, 2), (257, 129, 3))),
            (Recipe("rowwise"), ((40, 72, 3), (129, 257, 2), (1, 5, 4), (256, 128, 2))),
            (Recipe("rowwise_hp_wgrad"), ((40, 72, 3), (129, 257, 2), (256, 128, 2))),
        ):
            for cut, scale in itertools.product(cuts, (1.0, 1e-30, 1e-39)):
                with self.subTest(recipe=recipe, cut=cut, scale=scale):
                    self.shards(recipe, cut, scale)

    def shards(self, recipe, cut, scale):
        n, k, ranks = cut
        w = randn(n, k, dtype=torch.float32, scale=scale, seed=n)
        w[0, 0], w[n // 2, k // 2], w[-1, -1] = torch.inf, torch.nan, -torch.inf
        rows = -(-n // ranks) if recipe.name != "block" else -(-n // ranks // 128) * 128
        state = ShardState(n, recipe, fp8_gather=True)
        plan = state.plan_of_shard(w)
        at = state.at(plan, True)
        cut = shards.cut_of(plan, rows)
        pieces = F.pad(w, (0, 0, 0, rows * ranks - n)).split(rows)
        amaxes = torch.empty(ranks, cut.amaxes, dtype=torch.float32, device=DEVICE)
        for piece, amax in zip(pieces, amaxes):
            cut.amax(plan, piece, at, amax)
        amax = amaxes.amax(0)
        quantised = [cut.quantize(plan, piece, amax, at) for piece in pieces]
        for turned, copies in enumerate((abi.ROW, abi.TRANSPOSED if recipe.by_row else abi.BOTH)):
            wanted = operand.empty(n, k, copies, DEVICE, plan.w_scalings).zero_()
            wanted = quantize_weight(plan, w, copies, at, wanted)
            full = torch.cat([part[turned][1] for part in quantised])
            got, has = cut.assemble(plan, full, quantised[0][turned][0], copies, at)
            self.assertEqual(has, copies)
            self.assertTrue(torch.equal(got[256:], wanted[256:]))
            if plan.w_scalings[turned] == abi.BY_TENSOR:
                self.assertTrue(torch.equal(got[:64], wanted[:64]))
            back = shards.dequantize(plan, got, copies, at)
            finite = torch.isfinite(w)
            if scale > 1e-35:
                self.assertLess(error(back[finite], w[finite]), 0.05)

    def test_refused_shards(self):
        w = randn(300, 200)
        plan = State(Recipe("block")).plan(w, w, None, torch.bfloat16, torch.bfloat16)
        with self.assertRaisesRegex(RuntimeError, "150 rows of 300.*have 256.*multiple of 128"):
            shards.cut_of(plan, 150)
        plan = ShardState(300, Recipe("rowwise"), fp8_gather=True).plan_of_shard(w)
        cut, at = shards.cut_of(plan, 150), plan.context.at()
        (header, rows), _ = cut.quantize(plan, w[:150], w.abs().amax(0).float(), at)
        with self.assertRaisesRegex(RuntimeError, "what is kept of one is not the other's"):
            cut.assemble(plan, torch.cat((rows, rows)), header, abi.TRANSPOSED, at)


if __name__ == "__main__":
    rig.main()
