"""Weight parallel on two ranks against one rank: bytes, values, gradients, wire, hooks."""

import itertools
import unittest

import torch
import torch.distributed as dist

import rig
from rig import CUDA, error, randn
from fp8gen_torch import Recipe, State, fp8_linear
from fp8gen_torch.calls import Plan
from fp8gen_torch.weight_parallel import (
    Communicator,
    ShardState,
    precompute_amax,
    weight_parallel_linear,
)


def here():
    return torch.device("cuda", torch.cuda.current_device()) if CUDA else torch.device("cpu")


def data(n, k, rank, dtype):
    """x and dy differ by rank; w and b are the whole ones, with the largest element at the end."""
    w = randn(n, k, dtype=dtype, seed=2, device=here())
    w[-1, -1] = 9.5
    return (
        randn(3, 11, k, seed=10 + rank, device=here()),
        w,
        randn(n, seed=3, device=here()),
        randn(3, 11, n, seed=20 + rank, device=here()),
    )


def gathered_gradient(communicator, shard, n):
    return communicator.weight_hook(shard)[:n]


def values(rank, world):
    for n, k, dtype, fp8, bias in itertools.chain(
        itertools.product(
            (40, 37, 1), (72,), (torch.bfloat16, torch.float32), (False, True), (True,)
        ),
        [(129, 257, torch.bfloat16, True, False)],
    ):
        one(Recipe(), (n, k, dtype, fp8, bias), rank, world)


def recipes(rank, world):
    """Gathers of the other recipes, of FP8 shards and of bf16."""
    for name, fp8, shapes in (
        ("delayed", True, ((40, 72), (37, 72))),
        ("block", True, ((300, 200), (129, 72), (512, 128))),
        ("rowwise", True, ((40, 72), (37, 72), (300, 129))),
        ("rowwise", False, ((37, 72),)),
        ("rowwise_hp_wgrad", True, ((40, 72), (37, 72), (300, 129))),
        ("rowwise_hp_wgrad", False, ((37, 72),)),
    ):
        recipe = Recipe(name, calibrate=name == "delayed")  # the first scale is of the first amax
        for n, k in shapes:
            one(recipe, (n, k, torch.bfloat16, fp8, True), rank, world)


def one(recipe, case, rank, world):
    """A layer with a sharded weight against the same layer with the whole one."""
    n, k, dtype, fp8, bias = case
    x, w, b, dy = data(n, k, rank, dtype)
    communicator = Communicator(multiple=128 if recipe.name == "block" else 1)
    shard = communicator.shard(w).requires_grad_()
    bias_shard = communicator.shard(b).requires_grad_() if bias else None
    state = ShardState(n, recipe, fp8_gather=fp8)
    x1 = x.clone().requires_grad_()
    y = weight_parallel_linear(x1, shard, bias_shard, communicator, state)
    y.backward(dy)

    x2, w2, b2 = (
        x.clone().requires_grad_(),
        w.clone().requires_grad_(),
        b.clone().requires_grad_(),
    )
    y2 = fp8_linear(x2, w2, b2 if bias else None, State(recipe))
    y2.backward(dy)
    assert torch.equal(y, y2), (n, k, dtype, fp8, "y")
    assert torch.equal(x1.grad, x2.grad), (n, k, dtype, fp8, "dx")
    for got, full in ((shard.grad, w2.grad),) + (((bias_shard.grad, b2.grad),) if bias else ()):
        full = full.float()
        dist.all_reduce(full)
        wanted = communicator.shard(full / world)
        assert got.dtype in (dtype, torch.bfloat16)
        assert error(got, wanted) < 5e-3 or wanted.norm() == 0, (n, k, dtype, fp8, "dw")


def wire(rank, world):
    n, k = 256, 256  # no padding: FP8 is exactly half of bf16, and 4 bytes for the scale of a row
    others = (world - 1) / world
    for recipe, fp8, forward, backward in (
        ("current", False, 2 * n * k, 2 * n * k),
        ("current", True, n * k, n * k),
        ("rowwise", True, n * (k + 4), n * k),
    ):
        x, w, _, dy = data(n, k, rank, torch.bfloat16)
        communicator = Communicator()
        shard = communicator.shard(w).requires_grad_()
        state = ShardState(n, Recipe(recipe), fp8_gather=fp8)
        y = weight_parallel_linear(x.requires_grad_(), shard, None, communicator, state)
        after_forward = communicator.wire_bytes
        y.backward(dy)
        after_backward = communicator.wire_bytes - after_forward
        assert after_forward == forward * others, (recipe, fp8, after_forward)
        assert after_backward == (backward + 2 * n * k) * others, (recipe, fp8, after_backward)


def precomputed(rank, world):
    reduces = []

    class Counting(Communicator):
        def amax_hook(self, amax):
            reduces.append(amax.numel())
            return super().amax_hook(amax)

    communicator = Counting()
    weights = [communicator.shard(data(n, 72, rank, torch.bfloat16)[1]) for n in (40, 24)]
    states = [ShardState(n, fp8_gather=True) for n in (40, 24)]
    x = data(40, 72, rank, torch.bfloat16)[0]
    for step in range(2):
        precompute_amax(weights, states, communicator)
        for weight, state in zip(weights, states):
            for _ in range(2):
                y = weight_parallel_linear(x, weight, None, communicator, state)
            full = communicator.weight_hook(weight)[: state.out_features]
            assert torch.equal(y, fp8_linear(x, full, None, State(keep=False)))
            weight.mul_(1.7)
    assert reduces == [2, 2], reduces


def hooks(rank, world):
    """A communicator as a framework would write it: caches, records, returns tuples and handles."""
    log = []

    class Handle:
        def __init__(self, name):
            self.name = name

        def wait(self):
            log.append("wait " + self.name)

    class Framework:
        def weight_hook(self, tensor, async_op=False, module=None, is_bias=False):
            log.append(f"gather {'bias' if is_bias else 'weight'} {module}")
            return cached[is_bias]

        def grad_hook(self, tensor, async_op=False, module=None, reduce_op=None, is_bias=False):
            log.append(f"reduce {'bias' if is_bias else 'weight'} async={async_op}")
            return tensor[: tensor.shape[0] // 2], Handle("bias" if is_bias else "weight")

        def output_hook(self, tensor, async_op=False):
            log.append("output")
            return tensor * 2, None

        def grad_output_hook(self, tensor, async_op=False):
            log.append("grad_output")
            return tensor * 2, Handle("grad_output")

    x, w, b, dy = data(40, 72, rank, torch.bfloat16)
    cached = [w.clone(), b.clone()]
    shard, bias_shard = w[:20].clone().requires_grad_(), b[:20].clone().requires_grad_()
    original = Plan.dgrad
    Plan.dgrad = lambda *rest: log.append("dgrad") or original(*rest)
    try:
        x1 = x.clone().requires_grad_()
        y = weight_parallel_linear(x1, shard, bias_shard, Framework(), ShardState(40), "up")
        y.backward(dy)
    finally:
        Plan.dgrad = original
    assert log == [
        "gather weight up",
        "gather bias up",
        "output",
        "grad_output",
        "wait grad_output",
        "gather weight up",
        "reduce weight async=True",
        "reduce bias async=True",
        "dgrad",
        "wait weight",
        "wait bias",
    ], log
    assert torch.equal(cached[0], w) and torch.equal(cached[1], b), "a cached weight was written"
    x2, w2 = x.clone().requires_grad_(), w.clone().requires_grad_()
    y2 = fp8_linear(x2, w2, b) * 2
    y2.backward(dy)
    assert torch.equal(y, y2)
    assert error(x1.grad, x2.grad) < 1e-2 and error(shard.grad, w2.grad[:20]) < 1e-2


def main_grad(rank, world):
    n, k = 40, 72
    x, w, _, dy = data(n, k, rank, torch.bfloat16)
    communicator = Communicator()
    results = []
    for fp8 in (False, True):
        shard = communicator.shard(w).requires_grad_()
        shard.main_grad = torch.ones(shard.shape, device=here())
        for _ in range(2):
            weight_parallel_linear(
                x, shard, None, communicator, ShardState(n, fp8_gather=fp8)
            ).backward(dy)
        assert shard.grad is None and shard.grad_added_to_main_grad
        results.append(shard.main_grad)
    assert torch.equal(*results)
    w2 = w.clone().requires_grad_()
    w2.main_grad = torch.zeros(n, k, device=here())
    fp8_linear(x, w2).backward(dy)
    dist.all_reduce(w2.main_grad)
    assert error(results[0], 1 + 2 * communicator.shard(w2.main_grad / world)) < 1e-5


class Parallel(unittest.TestCase):
    def setUp(self):
        if CUDA and torch.cuda.device_count() < 2:
            self.skipTest(f"needs 2 GPUs, this machine has {torch.cuda.device_count()}")

    def test_functions(self):
        rig.ranks(every, 2)


def every(rank, world):
    for function in (values, recipes, wire, precomputed, hooks, main_grad):
        function(rank, world)
        dist.barrier()
        if rank == 0:
            print("ok", function.__name__, flush=True)


if __name__ == "__main__":
    rig.main()
