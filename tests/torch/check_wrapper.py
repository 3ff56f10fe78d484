"""Fp8Weight in modules of one's own, files, compile, meta; Fp8Mode and custom backwards."""

import copy
import io
import unittest

import torch
import torch.nn.functional as F
from torch import nn

import rig
from rig import DEVICE, error, randn
from fp8gen_torch import Fp8Weight, Fp8Mode, fp8_linear, fp8_weights


class Custom(nn.Module):
    """Modules of somebody's own: weights by other names, used through F.linear, some otherwise."""

    def __init__(self, dtype=torch.bfloat16):
        super().__init__()
        self.embedding = nn.Embedding(50, 64, dtype=dtype)
        self.norm = nn.LayerNorm(64, dtype=dtype)
        self.w_up = nn.Parameter(torch.randn(96, 64, dtype=dtype) * 0.1)
        self.down = nn.Linear(96, 64, dtype=dtype)
        self.head = nn.Linear(64, 50, bias=False, dtype=dtype)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.norm(self.embedding(tokens))
        return self.head(x + self.down(F.silu(F.linear(x, self.w_up))))


def made(dtype=torch.bfloat16):
    torch.manual_seed(0)
    return Custom(dtype).to(DEVICE)


TOKENS = torch.arange(34, device=DEVICE).view(2, 17)


def run(net, function=None):
    y = (net if function is None else function)(TOKENS)
    y.float().square().mean().backward()
    grads = {name: p.grad for name, p in net.named_parameters()}
    net.zero_grad()
    return y.detach(), grads


class Wrapper(unittest.TestCase):
    def test_filter(self):
        net = made()
        self.assertEqual(sorted(fp8_weights(net, r"w_|weight")), ["down.weight", "w_up"])
        self.assertIsInstance(net.w_up, Fp8Weight)
        self.assertIsInstance(net.w_up, nn.Parameter)
        self.assertIs(net.head.weight, net.embedding.weight)
        self.assertEqual(fp8_weights(made(), min_features=65), [])
        self.assertEqual(fp8_weights(made(), lambda name, p: p.shape[0] == 96), ["w_up"])
        self.assertEqual(
            [n for n, _ in net.named_parameters()], [n for n, _ in made().named_parameters()]
        )

    def test_values(self):
        for dtype in (torch.bfloat16, torch.float32):
            net, plain = made(dtype), made(dtype)
            fp8_weights(net, r"w_|weight")
            for step in range(3):
                (y, grads), (y2, grads2) = run(net), run(plain)
                self.assertLess(error(y, y2), 0.05)
                self.assertGreater(error(y, y2), 1e-3)
                for name in grads2:
                    self.assertEqual(grads[name].dtype, dtype)
                    self.assertIs(type(grads[name]), torch.Tensor)
                    self.assertLess(error(grads[name], grads2[name]), 0.2, name)
                with torch.no_grad():  # the FP8 copies follow
                    for p, q in zip(net.parameters(), plain.parameters()):
                        p.add_(0.05 * (step + 1))
                        q.add_(0.05 * (step + 1))
            self.assertTrue(
                torch.equal(
                    F.linear(randn(3, 64, dtype=dtype), net.w_up),
                    fp8_linear(randn(3, 64, dtype=dtype), plain.w_up),
                )
            )

    def test_optimizer(self):
        for foreach in (False, True):
            net = made()
            fp8_weights(net, r"w_|weight")
            optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, foreach=foreach)
            losses = []
            for _ in range(8):
                loss = F.cross_entropy(
                    net(TOKENS).flatten(0, 1).float(), (TOKENS.flatten() * 7 + 3) % 50
                )
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
            self.assertLess(losses[-1], 0.7 * losses[0])

    def test_checkpoint_file(self):
        net, plain = made(), made()
        fp8_weights(net, r"w_|weight")
        file = io.BytesIO()
        torch.save(net.state_dict(), file)
        file.seek(0)
        loaded = torch.load(file, weights_only=True)
        self.assertTrue(all(type(t) is torch.Tensor for t in loaded.values()))
        plain.load_state_dict(loaded)
        with torch.no_grad():
            net.w_up.zero_()
        net.load_state_dict(plain.state_dict())
        self.assertTrue(torch.equal(net.w_up._data, plain.w_up))
        self.assertTrue(torch.equal(run(net)[0], run(copy.deepcopy(net))[0]))

    def test_meta(self):
        with torch.device("meta"):
            net = Custom()
        fp8_weights(net, r"w_|weight")
        self.assertTrue(net.w_up.is_meta)
        self.assertEqual(net(TOKENS.to("meta")).shape, (2, 17, 50))
        net.to_empty(device=DEVICE)
        self.assertIsInstance(net.w_up, Fp8Weight)
        net.load_state_dict(made().state_dict())
        wanted = made()
        fp8_weights(wanted, r"w_|weight")
        self.assertTrue(torch.equal(run(net)[0], run(wanted)[0]))

    def test_to(self):
        net = made(torch.float32)
        fp8_weights(net, r"w_|weight")
        net = net.to(torch.bfloat16)
        self.assertIsInstance(net.w_up, Fp8Weight)
        self.assertEqual((net.w_up.dtype, net.w_up._data.dtype), (torch.bfloat16,) * 2)
        self.assertEqual(run(net)[0].dtype, torch.bfloat16)

    def test_compile(self):
        torch._dynamo.reset()
        net = made()
        fp8_weights(net, r"w_|weight")
        compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
        for _ in range(2):
            y, grads = run(net, compiled)
            y2, grads2 = run(net)
            self.assertTrue(torch.equal(y, y2))
            for name in grads:
                self.assertTrue(torch.equal(grads[name], grads2[name]), name)
            with torch.no_grad():
                net.w_up.mul_(1.3)


class Their(torch.autograd.Function):
    """A linear function as weight-parallel frameworks write it."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        return dy.matmul(weight), dy.reshape(-1, dy.shape[-1]).t() @ x.reshape(-1, x.shape[-1])


class Mode(unittest.TestCase):
    def test_module(self):
        net = made()
        plain = run(net)
        with Fp8Mode(min_features=50) as mode:
            y, _ = run(net)
        self.assertEqual(mode.count, 3)
        self.assertLess(error(y, plain[0]), 0.05)
        self.assertGreater(error(y, plain[0]), 1e-3)
        with Fp8Mode(min_features=65) as mode:
            self.assertTrue(torch.equal(run(net)[0], plain[0]))
        self.assertEqual(mode.count, 0)
        with Fp8Mode(1, lambda x, w: w.shape[0] == 96) as mode:
            run(net)
        self.assertEqual(mode.count, 1)

    def test_custom_function(self):
        w, x, dy = randn(40, 72, seed=2), randn(2, 17, 72, seed=1), randn(2, 17, 40, seed=3)
        results = []
        for mode in (None, Fp8Mode(min_features=16)):
            x1, w1 = x.clone().requires_grad_(), w.clone().requires_grad_()
            if mode:
                with mode:
                    y = Their.apply(x1, w1)
                    y.backward(dy)
                self.assertEqual(mode.count, 3)  # fprop, dgrad and wgrad
            else:
                y = Their.apply(x1, w1)
                y.backward(dy)
            results.append((y, x1.grad, w1.grad))
        for a, c in zip(*results):
            self.assertLess(error(a, c), 0.06)
            self.assertGreater(error(a, c), 1e-3)

    def test_left_alone(self):
        with Fp8Mode(min_features=1) as mode:
            a, b = randn(2, 3, 5, 8), randn(2, 3, 8, 5)
            torch.matmul(a, b)
            randn(4, 8).double() @ randn(8, 4).double()
        self.assertEqual(mode.count, 0)


if __name__ == "__main__":
    rig.main()
