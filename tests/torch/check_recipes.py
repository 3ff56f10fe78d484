"""Every recipe of a spec in fp8_linear: values, sizes, what is saved, the history of `delayed`."""

import ctypes
import threading
import time
import unittest
import unittest.mock
import weakref

import torch
import torch.nn.functional as F

import rig
from rig import DEVICE, error, randn
from fp8gen_torch import (
    Recipe,
    State,
    abi,
    advance_scales,
    fp8_linear,
    operand,
    states,
    weights_changed,
)

RECIPES = ("current", "delayed", "rowwise", "rowwise_hp_wgrad", "block")
SHAPE = (100, 136, 264)  # M, N, K


def inputs(m, n, k, seed=0):
    x = randn(m, k, seed=seed + 1).requires_grad_()
    w = (randn(n, k, seed=seed + 2).float() * k**-0.5).bfloat16().requires_grad_()
    return x, w, randn(n, seed=seed + 3).requires_grad_(), randn(m, n, seed=seed + 4)


def results(function, x, w, b, dy):
    y = function(x, w, b)
    y.backward(dy)
    grads = x.grad, w.grad, b.grad
    x.grad = w.grad = b.grad = None
    return (y.detach(), *grads)


class Recipes(unittest.TestCase):
    def test_values(self):
        """Against bf16, step after step: delayed has its scales from the second on."""
        for name in RECIPES:
            for shape in (SHAPE, (1, 5, 3), (257, 130, 1000)):
                x, w, b, dy = inputs(*shape)
                state = State(Recipe(name))
                for _ in range(3):
                    got = results(lambda *a: fp8_linear(*a, state), x, w, b, dy)
                    advance_scales()
                wanted = results(F.linear, x, w, b, dy)
                few = 2 if min(shape) == 1 else 1  # elements: their mean error scatters
                for a, c, bound in zip(got, wanted, (0.05, 0.08, 0.08, 0.01)):
                    self.assertLess(error(a, c), few * bound, (name, shape))

    def test_options(self):
        for recipe in (
            Recipe("block", power_of_two=False),
            Recipe("rowwise", power_of_two=False),
            Recipe("delayed", margin=1, history_length=2, algo="most_recent", calibrate=True),
            Recipe("delayed", format="e4m3", power_of_two=True),
        ):
            x, w, b, dy = inputs(*SHAPE)
            state = State(recipe)
            results(lambda *a: fp8_linear(*a, state), x, w, b, dy)
            advance_scales()
            got = results(lambda *a: fp8_linear(*a, state), x, w, b, dy)
            for a, c in zip(got, results(F.linear, x, w, b, dy)):
                self.assertLess(error(a, c), 0.08, recipe)
        with self.assertRaisesRegex(ValueError, "rowwise_hp_wgrad"):
            Recipe("tensorwise")
        with self.assertRaisesRegex(ValueError, "format is 'hybrid'; recipe 'block' takes e4m3"):
            Recipe("block", "hybrid")
        self.assertEqual(repr(Recipe("block")), "Recipe('block')")
        self.assertEqual(
            repr(Recipe("delayed", history_length=4)), "Recipe('delayed', history_length=4)"
        )

    def test_sizes(self):
        """The arithmetic of operand.py is the runtime's."""
        size = ctypes.c_size_t()
        which = {  # FP8_BYTES_*: role, copies
            1: (abi.ROLE_X, abi.BOTH),
            2: (abi.ROLE_X, abi.TRANSPOSED),
            3: (abi.ROLE_W, abi.BOTH),
            4: (abi.ROLE_W, abi.ROW),
            5: (abi.ROLE_DY, abi.BOTH),
            6: (abi.ROLE_DY, abi.ROW),
            7: (abi.ROLE_DY, abi.TRANSPOSED),
        }
        for name in RECIPES:
            for m, n, k in (SHAPE, (1, 1, 1), (129, 384, 1025)):
                x, w, _, _ = inputs(m, n, k)
                state = State(Recipe(name))
                layer = state.plan(x, w, None, torch.bfloat16, torch.bfloat16).layer
                dims = {abi.ROLE_X: (m, k), abi.ROLE_W: (n, k), abi.ROLE_DY: (m, n)}
                for number, (role, copies) in which.items():
                    abi.check(abi.runtime.fp8_layer_bytes(layer.handle, m, number, size))
                    mine = operand.operand_bytes(*dims[role], copies, Recipe(name).scalings(role))
                    self.assertEqual(mine, size.value, (name, (m, n, k), number))

    def test_saved(self):
        """rowwise_hp_wgrad keeps x itself, the others one FP8 copy of it."""
        for name in RECIPES:
            x, w, _, _ = inputs(*SHAPE)
            kept = []
            hooks = torch.autograd.graph.saved_tensors_hooks
            with hooks(lambda t: kept.append(t) or t, lambda t: t):
                fp8_linear(x, w, None, State(Recipe(name)))
            saved = kept[0]
            if name == "rowwise_hp_wgrad":
                self.assertEqual(saved.data_ptr(), x.data_ptr())
            else:
                self.assertEqual(saved.dtype, torch.uint8)

    def test_operators(self):
        """The operators that torch.compile sees, with their fake kernels."""
        for name in RECIPES:
            x, w, b, dy = inputs(*SHAPE)
            state = State(Recipe(name))
            with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
                fake = [mode.from_tensor(t.detach()).requires_grad_() for t in (x, w, b)]
                y = fp8_linear(*fake, state)
                y.backward(mode.from_tensor(dy))
                self.assertEqual(fake[1].grad.shape, w.shape)

    def test_history(self):
        """Micro-batches give a maximum, evaluation nothing; a state is saved and loaded."""
        x, w, _, dy = inputs(64, 128, 256)
        state = State(Recipe("delayed", history_length=4))
        for factor in (1.0, 8.0, 2.0):
            fp8_linear(x.detach() * factor, w, None, state).backward(dy)
        running = state.kept_history.running()
        amax = x.detach().abs().max().float() * 8
        self.assertEqual(running[0].item(), amax.item())
        with torch.no_grad():
            fp8_linear(x * 1000, w, None, state)
        self.assertEqual(running[0].item(), amax.item())
        advance_scales()
        self.assertEqual(running.tolist(), [-1.0] * 3)
        advance_scales()  # nothing ran: nothing rolls
        saved = state.save_history()
        twin = State(Recipe("delayed", history_length=2))
        twin.load_history(saved)
        for mine in (state, twin):
            y = fp8_linear(x, w, None, mine)
            y.backward(dy)
        self.assertTrue(torch.equal(y, fp8_linear(x, w, None, state)))
        optimizer = torch.optim.SGD([w], lr=0.0)
        optimizer.step()  # counts as a step of every history
        self.assertEqual(state.kept_history.running().tolist(), [-1.0] * 3)
        self.assertFalse(torch.equal(saved, state.save_history()))

    def test_only_the_bias(self):
        """A step of which only the bias is trained is told to the history, x, w and dy alike."""
        x, w, b, dy = inputs(64, 128, 256)
        x, w = x.detach(), w.detach()
        for trained, mode in ((True, None), (True, "eager"), (True, "aot_eager"), (False, None)):
            state = State(Recipe("delayed"))

            def step(x, b):
                return fp8_linear(x, w, b, state)

            function = torch.compile(step, backend=mode) if mode else step
            y = function(x, b if trained else b.detach())
            amaxes = [t.abs().max().item() for t in (x, w)]
            self.assertEqual(
                state.kept_history.running().tolist(),
                [*amaxes, -1.0] if trained else [-1.0] * 3,
                mode,
            )
            if trained:
                y.backward(dy)
                noted = state.kept_history.running().tolist()
                self.assertEqual(noted, [*amaxes, dy.abs().max().item()], mode)

    def test_history_of_threads(self):
        """Threads that use a new state at once share one history."""
        x, w, _, _ = inputs(64, 128, 256)
        made, make = [], states.History

        def slowly(*rest):
            made.append(make(*rest))
            time.sleep(0.2)  # the others come meanwhile
            return made[-1]

        state = State(Recipe("delayed"))
        fp8_linear(x, w, None, State(Recipe("delayed")))  # the layer is there
        call = x.detach(), w, None, state
        threads = [threading.Thread(target=fp8_linear, args=call) for _ in range(3)]
        with unittest.mock.patch.object(states, "History", slowly):
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        self.assertEqual(len(made), 1)

    def test_history_of_two_layers(self):
        """A history goes from layer to layer; none ends while another thread may be in a call."""
        x, w, _, dy = inputs(64, 128, 256)
        state, made = State(Recipe("delayed", history_length=4)), []

        class History(states.History):
            def __init__(self, *rest):
                super().__init__(*rest)
                made.append(weakref.ref(self))

        with unittest.mock.patch.object(states, "History", History):
            for step in range(1, 4):
                weights_changed()
                for dtype, factor in ((torch.bfloat16, 2.0), (torch.float32, 4.0)):
                    given = x.detach().to(dtype) * factor * step
                    fp8_linear(given, w, None, state).backward(dy.to(dtype))
                fp8_linear(x.detach(), w, None, state).backward(dy)
                amaxes = [4 * step * x.abs().max(), w.abs().max(), dy.abs().max()]
                noted = state.kept_history.running().tolist()
                self.assertEqual(noted, [amax.item() for amax in amaxes])
                advance_scales()
        self.assertEqual(len(made), 2)
        self.assertTrue(all(history() for history in made))

    def test_history_after_evaluation(self):
        """A weight that an evaluation quantises first still rolls in the next training step."""
        x, w, _, dy = inputs(64, 128, 256)
        histories = []
        for wants_dx in (True, False):
            for evaluate in (False, True):
                state = State(Recipe("delayed", history_length=4))
                for step in range(4):
                    weight = (w.detach() * (1 + step)).requires_grad_()
                    if evaluate and step >= 2:
                        with torch.no_grad():
                            fp8_linear(x.detach() * 1000, weight, None, state)
                    given = x if wants_dx else x.detach()
                    fp8_linear(given, weight, None, state).backward(dy)
                    self.assertNotEqual(state.kept_history.running()[1].item(), -1.0)
                    advance_scales()
                histories.append(state.save_history())
        for plain, evaluated in (histories[:2], histories[2:]):
            self.assertTrue(torch.equal(plain, evaluated))


if __name__ == "__main__":
    rig.main()
