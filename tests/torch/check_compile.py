"""The operators: fake kernels, torch.compile with gradients, checkpointing, meta tensors."""

import unittest

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import rig
from rig import DEVICE, error, randn
from fp8gen_torch import Fp8Linear, State, fp8_linear
from fp8gen_torch import linear as module

BACKENDS = ("aot_eager", "inductor")


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up = Fp8Linear(64, 96, device=DEVICE, dtype=torch.bfloat16)
        self.down = Fp8Linear(96, 64, bias=False, device=DEVICE, dtype=torch.bfloat16)

    def forward(self, x):
        return x + self.down(torch.nn.functional.silu(self.up(x)))


def made(seed=0):
    torch.manual_seed(seed)
    return Net()


def run(net, function, x):
    x = x.clone().requires_grad_()
    y = function(x)
    y.float().square().sum().backward()
    grads = [x.grad] + [p.grad for p in net.parameters()]
    net.zero_grad()
    return [y.detach()] + grads


class Operators(unittest.TestCase):
    def test_opcheck(self):
        x, w, b = (
            randn(17, 72, seed=1).requires_grad_(),
            randn(40, 72, seed=2).requires_grad_(),
            randn(40, seed=3).requires_grad_(),
        )
        state = State()
        tests = ("test_schema", "test_autograd_registration", "test_faketensor")
        torch.library.opcheck(
            module._linear_op,
            (x, w, b, None, state.number, torch.bfloat16, torch.bfloat16, 7),
            test_utils=tests,
        )
        saved = module._linear_op(
            x, w, b, None, state.number, torch.bfloat16, torch.bfloat16, 7
        )[1].detach()
        like = (torch.bfloat16, torch.bfloat16, torch.bfloat16, True)
        for want in range(1, 8):
            torch.library.opcheck(
                module._grad_op,
                (randn(17, 40, seed=4), saved, w.detach(), state.number, *like, want),
                test_utils=tests,
            )
        main = torch.zeros(40, 72, device=DEVICE)
        torch.library.opcheck(
            module._grad_add_op,
            (
                randn(17, 40, seed=4),
                saved,
                w.detach(),
                main,
                state.number,
                torch.bfloat16,
                torch.bfloat16,
                torch.float32,
                True,
                7,
            ),
            test_utils=tests,
        )

    def test_meta(self):
        layer = Fp8Linear(72, 40, device="meta")
        y = layer(torch.empty(2, 9, 72, device="meta"))
        self.assertEqual((y.shape, y.device.type, y.dtype), ((2, 9, 40), "meta", torch.float32))
        with FakeTensorMode(allow_non_fake_inputs=True):
            y = Fp8Linear(72, 40)(torch.empty(9, 72))
            self.assertEqual(y.shape, (9, 40))


class Compile(unittest.TestCase):
    def check(self, got, wanted, exact):
        for a, c in zip(got, wanted):
            if exact:
                self.assertTrue(torch.equal(a, c))
            else:
                self.assertLess(error(a, c), 0.02)

    def test_model(self):
        for backend in BACKENDS:
            with self.subTest(backend):
                torch._dynamo.reset()
                net, x = made(), randn(48, 64, seed=5)
                compiled = torch.compile(net, backend=backend, fullgraph=True)
                self.check(run(net, compiled, x), run(net, net, x), backend == "aot_eager")
                optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
                before = net.up.weight.detach().clone()
                compiled(x).float().square().sum().backward()
                optimizer.step()
                self.assertFalse(torch.equal(before, net.up.weight))
                optimizer.zero_grad()
                self.check(run(net, compiled, x), run(net, net, x), backend == "aot_eager")
                with torch.no_grad():
                    self.check([compiled(x)], [net(x)], backend == "aot_eager")

    def test_dynamic_tokens(self):
        torch._dynamo.reset()
        net = made()
        compiled = torch.compile(net, backend="aot_eager", fullgraph=True, dynamic=True)
        for m in (48, 17, 129):
            x = randn(2, m, 64, seed=m)
            self.check(run(net, compiled, x), run(net, net, x), True)

    def test_main_grad(self):
        torch._dynamo.reset()
        w = randn(40, 72).requires_grad_()
        w.main_grad = torch.zeros(40, 72, device=DEVICE)
        state, x = State(), randn(17, 72, seed=1)  # x wants no gradient: dw is all there is
        compiled = torch.compile(
            lambda x: fp8_linear(x, w, None, state), backend="aot_eager", fullgraph=True
        )
        for _ in range(2):
            compiled(x).sum().backward()
        self.assertIsNone(w.grad)
        got, w.main_grad = w.main_grad, torch.zeros(40, 72, device=DEVICE)
        for _ in range(2):
            fp8_linear(x, w, None, state).sum().backward()
        self.assertTrue(torch.equal(got, w.main_grad))

    def test_autocast(self):
        torch._dynamo.reset()
        net = made().float()
        compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
        x = randn(17, 64, dtype=torch.float32)
        with torch.autocast(DEVICE.type, torch.bfloat16):
            got, wanted = compiled(x), net(x)
        self.assertEqual(got.dtype, wanted.dtype)
        self.assertTrue(torch.equal(got, wanted))


class Checkpoint(unittest.TestCase):
    def test_checkpoint(self):
        net, x = made(), randn(48, 64, seed=5)
        wanted = run(net, net, x)
        for reentrant in (False, True):
            got = run(net, lambda x, r=reentrant: checkpoint(net, x, use_reentrant=r), x)
            for a, c in zip(got, wanted):
                self.assertTrue(torch.equal(a, c))

    def test_selective(self):
        from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

        seen = []

        def policy(ctx, op, *args, **kwargs):
            if op is torch.ops.fp8gen.linear.default:
                seen.append(op)
                return CheckpointPolicy.MUST_SAVE
            return CheckpointPolicy.PREFER_RECOMPUTE

        net, x = made(), randn(48, 64, seed=5)
        got = run(
            net,
            lambda x: checkpoint(
                net,
                x,
                use_reentrant=False,
                context_fn=lambda: create_selective_checkpoint_contexts(policy),
            ),
            x,
        )
        self.assertTrue(seen)
        for a, c in zip(got, run(net, net, x)):
            self.assertTrue(torch.equal(a, c))


if __name__ == "__main__":
    rig.main()
