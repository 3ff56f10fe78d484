"""FSDP2 gathers FP8 bytes of wrapped weights: values, wire, uneven shards, meta, scales."""

import copy
import unittest

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import rig
from rig import CUDA, error, randn
from fp8gen_torch import Fp8Weight, Recipe, fp8_weights, precompute_scales
from fp8gen_torch import wrapper

VOCABULARY = 2556 // 4 + 2  # 641: odd, so that shards are uneven


class Net(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.up = nn.Linear(64, 96, dtype=dtype)
        self.down = nn.Linear(96, 64, bias=False, dtype=dtype)
        self.head = nn.Linear(64, VOCABULARY, bias=False, dtype=dtype)

    def forward(self, x):
        return self.head(x + self.down(F.silu(self.up(x))))


def here():
    return torch.device("cuda", torch.cuda.current_device()) if CUDA else torch.device("cpu")


def made(dtype, device=None):
    torch.manual_seed(0)
    return Net(dtype).to(device or here())


def train(net, x, steps, optimizer, sharded):
    losses, precompute = [], sharded == "precompute"
    for _ in range(steps):
        loss = net(x).float().square().mean()
        loss.backward()
        if not sharded:
            for p in net.parameters():
                dist.all_reduce(p.grad)
                p.grad /= dist.get_world_size()
        optimizer.step()
        optimizer.zero_grad()
        if precompute:
            precompute_scales(net)
        losses.append(loss.detach())
    return torch.stack(losses)


def shard(net, mesh, **policy):
    policy = MixedPrecisionPolicy(**policy)
    for layer in (net.up, net.down, net.head):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    return fully_shard(net, mesh=mesh, mp_policy=policy)


def values(rank, world, mesh):
    """Sharded training follows the unsharded one with the same FP8 weights, step by step."""
    x = randn(2, 9, 64, seed=rank, device=here())
    for dtype, policy, sharded in (
        (torch.bfloat16, {}, "gather"),
        (torch.bfloat16, {}, "precompute"),
        (
            torch.float32,
            {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32},
            "precompute",
        ),
    ):
        net, twin = made(dtype), made(dtype)
        fp8_weights(net)
        fp8_weights(twin)
        shard(net, mesh, **policy)
        local = net.head.weight._local_tensor
        assert isinstance(local, Fp8Weight), type(local)
        rows = -(-VOCABULARY // world)
        assert local.shape[0] == (rows if rank + 1 < world else VOCABULARY - rows * (world - 1))
        losses = [
            train(
                n,
                x.to(torch.bfloat16 if policy else dtype),
                4,
                torch.optim.AdamW(n.parameters(), lr=1e-2),
                s,
            )
            for n, s in ((net, sharded), (twin, None))
            if n is net or not policy
        ]
        if not policy:  # the same forward: the gathered bytes are the unsharded ones
            assert torch.equal(losses[0][:1], losses[1][:1]), losses
            assert error(losses[0], losses[1]) < 2e-2, losses
        assert losses[0][-1] < 0.8 * losses[0][0], losses


class Gathers(TorchDispatchMode):
    """Bytes that come out of all-gathers."""

    bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "allgather" in func.__name__ or "all_gather" in func.__name__:
            self.bytes += sum(
                t.numel() * t.element_size()
                for t in torch.utils._pytree.tree_leaves(args[0])
                if isinstance(t, torch.Tensor)
            )
        return func(*args, **(kwargs or {}))


def wire(rank, world, mesh):
    totals = {}
    for fp8 in (False, True):
        net = nn.Linear(64, 128, bias=False, dtype=torch.bfloat16, device=here())
        if fp8:
            fp8_weights(net)
        fully_shard(net, mesh=mesh)
        with Gathers() as gathers:
            net(randn(3, 64, device=here()))
        totals[fp8] = gathers.bytes
    assert totals[False] == 2 * totals[True] > 0, totals


def reduces(rank, world, mesh):
    """precompute_scales leaves no all-reduce for the gathers, until the weights change."""
    net = made(torch.bfloat16)
    fp8_weights(net)
    shard(net, mesh)
    x = randn(2, 9, 64, seed=rank, device=here())
    calls = []
    original = wrapper.dist.all_reduce
    wrapper.dist.all_reduce = lambda t, *r, **k: (calls.append(t.numel()), original(t, *r, **k))[1]
    try:
        precompute_scales(net)
        assert calls == [3], calls
        net(x).sum().backward()
        assert calls == [3], calls
        with torch.no_grad():
            for p in net.parameters():
                p.mul_(1.5)
        net(x)
        assert calls == [3, 1, 1, 1], calls
    finally:
        wrapper.dist.all_reduce = original


def recipes(rank, world, mesh):
    """FP8 gathers of the other recipes: the forward is that of the unsharded weight."""
    for recipe in (Recipe("delayed", calibrate=True), Recipe("block")):
        torch.manual_seed(0)
        net = nn.Linear(200, 128 * world, dtype=torch.bfloat16, device=here())
        twin = copy.deepcopy(net)
        fp8_weights(net, recipe=recipe)
        fp8_weights(twin, recipe=recipe)
        fully_shard(net, mesh=mesh)
        x = randn(9, 200, seed=rank, device=here())
        y = net(x)
        assert torch.equal(y, twin(x)), recipe
        y.sum().backward()
        assert net.weight.grad is not None
        precompute_scales(net)
        net(x)
    for name, wanted in (("rowwise", "other bytes in backward"), ("block", "multiple of 128")):
        net = nn.Linear(200, 64, dtype=torch.bfloat16, device=here())
        fp8_weights(net, recipe=Recipe(name))
        fully_shard(net, mesh=mesh)
        try:
            net(randn(9, 200, device=here()))
        except RuntimeError as error:
            assert wanted in str(error), error
        else:
            raise AssertionError(f"{name} was gathered")


def meta(rank, world, mesh):
    with torch.device("meta"):
        net = Net(torch.bfloat16)
    fp8_weights(net)
    shard(net, mesh)
    net.to_empty(device=here())
    full = made(torch.bfloat16).state_dict()
    from torch.distributed.tensor import distribute_tensor

    with torch.no_grad():
        for name, parameter in net.named_parameters():
            parameter.copy_(distribute_tensor(full[name], mesh, parameter.placements))
    twin = made(torch.bfloat16)
    fp8_weights(twin)
    x = randn(2, 9, 64, seed=rank, device=here())
    assert torch.equal(net(x), twin(x))


class Fsdp(unittest.TestCase):
    def test_fsdp2(self):
        if CUDA and torch.cuda.device_count() < 2:
            self.skipTest(f"needs 2 GPUs, this machine has {torch.cuda.device_count()}")
        rig.ranks(every, 2)


def every(rank, world):
    mesh = init_device_mesh("cuda" if CUDA else "cpu", (world,))
    for function in (values, wire, reduces, recipes, meta):
        function(rank, world, mesh)
        dist.barrier()
        if rank == 0:
            print("ok", function.__name__, flush=True)


if __name__ == "__main__":
    rig.main()
