"""On a GPU: all products are FP8 kernels, graphs follow the weight, streams, threads, memory."""

import threading
import unittest

import torch
import torch.nn.functional as F

import rig
from rig import CUDA, DEVICE, error, randn
import bench_torch
from fp8gen_torch import Fp8Linear, Fp8Mode, State, abi, fp8_linear
from check_wrapper import Their


@unittest.skipUnless(CUDA, "needs a GPU and FP8_TEST_DEVICE=cuda")
class Cuda(unittest.TestCase):
    def test_kernels(self):
        """Fails if any of the three products is not FP8; odd shapes too."""
        for shape in ((2048, 4096, 2048), (512, 2560, 1024), (384, 2556, 512), (100, 255, 333)):
            with self.subTest(shape=shape):
                names, gemms, fp8 = bench_torch.kernels(shape)
                self.assertEqual(len(fp8), 3, names)
                self.assertEqual(gemms, fp8, names)

    def test_dispatch_says_fp8(self):
        x, w = randn(256, 512), randn(384, 512)
        plan = State().plan(x, w, None, torch.bfloat16, torch.bfloat16)
        for which in (abi.PASS_FPROP, abi.PASS_WGRAD, abi.PASS_DGRAD):
            said = plan.layer.dispatch(which, 256)
            self.assertRegex(said["dtype"], r"^e[45]m[32] x e4m3", said)
            self.assertNotEqual(said["backend"], "host")

    def graph(self, net, x, dy, optimizer=None):
        x = x.clone().requires_grad_()

        def run():
            y = net(x)
            y.backward(dy)
            if optimizer:
                optimizer.step()
            return y

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                run()
                x.grad = None
                net.zero_grad(set_to_none=True)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = run()
        return graph, x, y

    def test_graph(self):
        """Replays follow new inputs and new weights, and equal eager bit for bit."""
        for mode in ("plain", "main_grad"):
            net = torch.nn.Sequential(Fp8Linear(256, 384), torch.nn.SiLU(), Fp8Linear(384, 128))
            net = net.to(device=DEVICE, dtype=torch.bfloat16)
            if mode == "main_grad":
                for layer in (net[0], net[2]):
                    layer.weight.main_grad = torch.zeros_like(layer.weight, dtype=torch.float32)
            dy = randn(64, 128, seed=5)
            graph, x, y = self.graph(net, randn(64, 256), dy)
            for turn in range(3):
                with torch.no_grad():
                    x.copy_(randn(64, 256, seed=turn + 7))
                    for p in net.parameters():
                        p.mul_(1.1)
                for p in net.parameters():
                    if hasattr(p, "main_grad"):
                        p.main_grad.zero_()
                graph.replay()
                got = [y.clone(), x.grad.clone()] + [
                    (p.main_grad if hasattr(p, "main_grad") else p.grad).clone()
                    for p in net.parameters()
                ]
                grads = [p.grad for p in net.parameters()]
                eager = x.detach().clone().requires_grad_()
                for p in net.parameters():
                    p.grad = None
                    if hasattr(p, "main_grad"):
                        p.main_grad.zero_()
                out = net(eager)
                out.backward(dy)
                wanted = [out, eager.grad] + [
                    p.main_grad if hasattr(p, "main_grad") else p.grad for p in net.parameters()
                ]
                for a, c in zip(got, wanted):
                    self.assertTrue(torch.equal(a, c), (mode, turn))
                for p, grad in zip(net.parameters(), grads):
                    p.grad = grad  # the graph writes there

    def test_graph_with_optimizer(self):
        net = Fp8Linear(256, 256, bias=False, device=DEVICE, dtype=torch.bfloat16)
        dy = randn(64, 256, seed=5)  # the graph reads it at every replay
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
        graph, x, y = self.graph(net, randn(64, 256), dy, optimizer)
        for _ in range(3):
            before = net.weight.detach().clone()
            graph.replay()
            torch.cuda.synchronize()
            self.assertTrue(torch.equal(y, fp8_linear(x, before)))
            self.assertFalse(torch.equal(before, net.weight))
        eager = net(x)  # no version counter has moved, but a graph has written
        self.assertTrue(torch.equal(eager, fp8_linear(x, net.weight.detach().clone())))

    def test_graphed_callables(self):
        net = torch.nn.Sequential(Fp8Linear(256, 384), Fp8Linear(384, 128)).to(
            DEVICE, torch.bfloat16
        )
        x = randn(64, 256).requires_grad_()
        wanted = net(x)
        wanted.sum().backward()
        wanted = wanted.detach()  # no graph of the default stream may live on into the capture
        grads = [p.grad.clone() for p in net.parameters()]
        net.zero_grad(set_to_none=True)
        graphed = torch.cuda.make_graphed_callables(net, (x,))
        y = graphed(x)
        y.sum().backward()
        self.assertTrue(torch.equal(y, wanted))
        for p, grad in zip(net.parameters(), grads):
            self.assertTrue(torch.equal(p.grad, grad))

    def test_streams(self):
        """A weight quantised on one stream is used on another, which waits."""
        w, x = randn(2048, 2048), randn(512, 2048)
        wanted = fp8_linear(x, w.clone())
        torch.cuda.synchronize()
        for turn in range(10):
            state, a, b = State(), torch.cuda.Stream(), torch.cuda.Stream()
            torch.cuda.synchronize()
            with torch.cuda.stream(a):
                torch.cuda._sleep(2_000_000)
                fp8_linear(x[:1], w, None, state)
            with torch.cuda.stream(b):
                y = fp8_linear(x, w, None, state)
            torch.cuda.synchronize()
            self.assertTrue(torch.equal(y, wanted), turn)

    def test_bytes_of_streams(self):
        """A weight's bytes are neither given away nor written while another stream reads them."""
        x, w = randn(512, 2048), randn(2048, 2048)
        wanted = fp8_linear(x, w.clone())
        for change in ("dropped", "written"):
            state, weight = State(), w.clone()
            a, b = torch.cuda.Stream(), torch.cuda.Stream()
            torch.cuda.synchronize()
            with torch.cuda.stream(a):
                fp8_linear(x, weight, None, state)
            with torch.cuda.stream(b):
                torch.cuda._sleep(50_000_000)
                y = fp8_linear(x, weight, None, state)
            with torch.cuda.stream(a):
                if change == "dropped":
                    size, state.kept = state.kept.data.numel(), None
                    torch.empty(size, dtype=torch.uint8, device=DEVICE).fill_(0)
                else:
                    weight.mul_(2)
                    fp8_linear(x, weight, None, state)
            torch.cuda.synchronize()
            self.assertTrue(torch.equal(y, wanted), change)

    def test_threads(self):
        w, x = randn(256, 512), randn(128, 512)
        wanted = fp8_linear(x, w)
        w = w.clone()  # quantised by whichever thread comes first
        failures = []

        def work():
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(50):
                    own = x.clone().requires_grad_()
                    y = fp8_linear(own, w)
                    y.sum().backward()
                    torch.cuda.current_stream().synchronize()
                    if not torch.equal(y, wanted):
                        failures.append("differs")

        torch.cuda.synchronize()
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(failures, [])

    def test_mode_in_backward(self):
        """Backward runs on autograd's own thread; the mode reaches it."""
        x, w = randn(2, 64, 256).requires_grad_(), randn(128, 256, seed=2).requires_grad_()
        with Fp8Mode(min_features=64) as mode:
            Their.apply(x, w).backward(randn(2, 64, 128, seed=3))
        self.assertEqual(mode.count, 3)

    def test_memory(self):
        """What forward leaves behind is half of bf16's; and it does not grow."""
        w = randn(4096, 4096).requires_grad_()
        left = {}
        for name, function in (("fp8", fp8_linear), ("bf16", F.linear)):
            function(randn(4096, 4096), w)
            x = randn(4096, 4096)
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            y = function(x, w)
            x = None
            torch.cuda.synchronize()
            left[name] = torch.cuda.memory_allocated() - before  # + y - x, the same for both
            del y
        saved = (left["fp8"] - left["bf16"]) / (4096 * 4096 * 2)
        self.assertAlmostEqual(saved, -0.5, delta=0.01)
        used = []
        for _ in range(6):
            fp8_linear(randn(4096, 4096), w).sum().backward()
            w.grad = None
            torch.cuda.synchronize()
            used.append(torch.cuda.memory_allocated())
        self.assertEqual(used[2], used[-1])

    def test_large(self):
        """Against bf16, at a size where real kernels run."""
        x, w, b = (
            randn(1000, 2048, seed=1).requires_grad_(),
            randn(2556, 2048, seed=2).requires_grad_(),
            randn(2556, seed=3).requires_grad_(),
        )
        results = []
        for function in (fp8_linear, F.linear):
            y = function(x, w, b)
            y.backward(randn(1000, 2556, seed=4))
            results.append((y, x.grad, w.grad, b.grad))
            x.grad = w.grad = b.grad = None
        for a, c, bound in zip(*results, (0.04, 0.07, 0.07, 0.01)):
            self.assertLess(error(a, c), bound)


if __name__ == "__main__":
    rig.main()
