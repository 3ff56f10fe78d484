#!/usr/bin/env python3
"""Trains a Llama-style model in FP8 under ZeRO-3 of our own, in one file.

    python train_llama.py --steps 200                           one GPU, or the CPU
    torchrun --nproc-per-node 2 train_llama.py --steps 200      two GPUs (gloo on the CPU)
    python train_llama.py --precision bf16 ...                  the bf16 twin
    python train_llama.py --config 7b --tokens 4096 ...

The text is what every system with Python ships: the standard library's sources, as bytes. All
weights are sharded by rows over the ranks; linear layers gather FP8 bytes (--gather bf16 for
comparison) twice a step, and reduce-scatter their gradients beside dgrad. Prints loss, tokens/s,
memory and bytes on the wire; writes the losses as CSV and SVG; --save / --resume continue bit for
bit.
"""

import argparse
import csv
import dataclasses
import glob
import os
import sys
import sysconfig
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from fp8gen_torch import Recipe, ShardState, State, advance_scales, fp8_linear  # noqa: E402
from fp8gen_torch import precompute_amax, prepare, weight_parallel_linear  # noqa: E402


@dataclasses.dataclass
class Config:
    dim: int
    layers: int
    heads: int
    kv_heads: int
    hidden: int
    vocabulary: int = 256
    rope: float = 10000.0


CONFIGS = {
    "tiny": Config(64, 2, 4, 2, 176),
    "small": Config(512, 8, 8, 4, 1408),
    "1b": Config(2048, 16, 32, 8, 8192),
    "7b": Config(4096, 32, 32, 32, 11008, vocabulary=32000),
}


# ---- ZeRO-3 --------------------------------------------------------------------------------------


class Zero3:
    """Row shards of every weight on every rank: gather to use, reduce-scatter to give back.

    It is the communicator of weight_parallel_linear (weight_hook, grad_hook, amax_hook), and the
    optimizer: AdamW on fp32 master shards. Gradients are summed in fp32 over micro-batches.
    """

    def __init__(self, device, recipe, fp8_gather):
        self.world, self.rank = dist.get_world_size(), dist.get_rank()
        self.device, self.recipe, self.fp8_gather = device, recipe, fp8_gather
        self.shards, self.states, self.wire = [], [], 0

    def rows(self, full):
        """Rows of a shard; FP8 shards of recipe "block" hold whole tiles of 128 x 128."""
        tiles = self.world > 1 and full.dim() == 2 and self.recipe.name == "block"
        step = 128 if tiles else 1
        return -(-full.shape[0] // (self.world * step)) * step

    def shard(self, full, fp8):
        """This rank's rows of a weight, in bf16, with a ShardState where products are FP8."""
        rows = self.rows(full)
        mine = full.new_zeros(rows, *full.shape[1:], dtype=torch.bfloat16, device=self.device)
        part = full[self.rank * rows : (self.rank + 1) * rows]
        mine[: len(part)] = part
        shard = nn.Parameter(mine)
        shard.main_grad = torch.zeros_like(mine, dtype=torch.float32)
        self.shards.append(shard)
        whole = self.world == 1  # nothing to gather: the FP8 copies are kept for the whole step
        state = State(self.recipe) if whole else ShardState(len(full), self.recipe, self.fp8_gather)
        self.states.append(state if fp8 else None)
        return shard, self.states[-1]

    def weight_hook(self, tensor, async_op=False, module=None, is_bias=False):
        if self.world == 1:
            return tensor
        full = tensor.new_empty(self.world * tensor.shape[0], *tensor.shape[1:])
        dist.all_gather_into_tensor(full, tensor.contiguous())
        self.wire += (full.numel() - tensor.numel()) * full.element_size()
        return full

    def grad_hook(self, tensor, async_op=False, module=None, reduce_op=None, is_bias=False):
        rows = self.rows(tensor)
        if self.world == 1:
            return tensor, None
        if len(tensor) != rows * self.world:
            tensor = torch.cat(
                [tensor, tensor.new_zeros(rows * self.world - len(tensor), *tensor.shape[1:])]
            )
        self.wire += tensor.numel() // self.world * (self.world - 1) * tensor.element_size()
        if self.device.type == "cpu":  # gloo
            dist.all_reduce(tensor)
            return tensor[self.rank * rows : (self.rank + 1) * rows] / self.world, None
        mine = tensor.new_empty(rows, *tensor.shape[1:])
        return mine, dist.reduce_scatter_tensor(
            mine, tensor, op=dist.ReduceOp.AVG, async_op=async_op
        )

    def amax_hook(self, amax):
        if self.world > 1:
            dist.all_reduce(amax, op=dist.ReduceOp.MAX)
        return amax

    def adamw(self, betas, decay):
        self.master = [nn.Parameter(s.detach().float()) for s in self.shards]
        for master, shard in zip(self.master, self.shards):
            master.grad = shard.main_grad
        matrices = [m for m in self.master if m.dim() == 2]
        others = [m for m in self.master if m.dim() != 2]
        self.lr = torch.zeros((), device=self.device)
        self.optimizer = torch.optim.AdamW(
            [{"params": matrices}, {"params": others, "weight_decay": 0.0}],
            lr=self.lr,
            betas=betas,
            weight_decay=decay,
            fused=True,
            capturable=self.device.type == "cuda",
        )

    @torch.no_grad()
    def step(self, clip=1.0):
        """AdamW with the gradient's norm clipped, at rate self.lr; then all FP8 scales, in one
        reduce."""
        norm = nn.utils.get_total_norm([s.main_grad for s in self.shards])
        if self.world > 1:
            square = norm.square()
            dist.all_reduce(square)
            norm = square.sqrt()
            advance_scales(dist.group.WORLD)  # of "delayed"; on one rank the optimizer does it
        nn.utils.clip_grads_with_norm_(self.master, clip, norm)
        self.optimizer.step()
        torch._foreach_copy_(self.shards, self.master)
        torch._foreach_zero_([s.main_grad for s in self.shards])
        self.scales()
        return norm

    def scales(self):
        if self.fp8_gather and self.world > 1:
            pairs = [(shard, state) for shard, state in zip(self.shards, self.states) if state]
            precompute_amax([shard for shard, _ in pairs], [state for _, state in pairs], self)


class Gather(torch.autograd.Function):
    """A full weight from its shards, for what is no FP8 linear; its gradient is reduced."""

    @staticmethod
    def forward(ctx, shard, zero, rows):
        ctx.zero, ctx.shard = zero, shard
        return zero.weight_hook(shard.detach())[:rows].view(rows, *shard.shape[1:])

    @staticmethod
    def backward(ctx, grad):
        mine, handle = ctx.zero.grad_hook(grad.float().contiguous(), async_op=True)
        if handle:
            handle.wait()
        ctx.shard.main_grad.add_(mine)
        return None, None, None


class Bf16Linear(torch.autograd.Function):
    """The twin of weight_parallel_linear in bf16: gathers twice, wgrad before dgrad."""

    @staticmethod
    def forward(ctx, x, shard, zero, n):
        ctx.save_for_backward(x, shard)
        ctx.zero, ctx.n = zero, n
        return F.linear(x, zero.weight_hook(shard.detach())[:n])

    @staticmethod
    def backward(ctx, dy):
        x, shard = ctx.saved_tensors
        full = ctx.zero.weight_hook(shard.detach())[: ctx.n]
        dw = dy.flatten(0, -2).t().mm(x.flatten(0, -2)).float()
        dw, handle = ctx.zero.grad_hook(dw, async_op=True)
        dx = dy.matmul(full)
        if handle:
            handle.wait()
        shard.main_grad.add_(dw)
        return dx, None, None, None


# ---- the model -----------------------------------------------------------------------------------


class Linear(nn.Module):
    def __init__(self, zero, fp8, n, k, generator, scale=1.0):
        super().__init__()
        full = torch.randn(n, k, generator=generator) * (scale * k**-0.5)
        self.zero, self.n = zero, n
        self.weight, self.state = zero.shard(full, fp8)

    def forward(self, x):
        if self.state is None:
            return Bf16Linear.apply(x, self.weight, self.zero, self.n)
        if self.zero.world == 1:
            return fp8_linear(x, self.weight, None, self.state)
        return weight_parallel_linear(x, self.weight, None, self.zero, self.state, self)


class Norm(nn.Module):
    def __init__(self, zero, dim):
        super().__init__()
        self.zero, self.dim = zero, dim
        self.weight, _ = zero.shard(torch.ones(dim), False)

    def forward(self, x):
        return F.rms_norm(x, (self.dim,), Gather.apply(self.weight, self.zero, self.dim), 1e-5)


def rotate(x, cos, sin):
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1).to(x.dtype)


class Block(nn.Module):
    def __init__(self, c, zero, fp8, generator):
        super().__init__()
        self.c, self.head = c, c.dim // c.heads
        kv, depth = self.head * c.kv_heads, (2 * c.layers) ** -0.5
        self.norm1, self.norm2 = Norm(zero, c.dim), Norm(zero, c.dim)
        self.qkv = Linear(zero, fp8, c.dim + 2 * kv, c.dim, generator)
        self.o = Linear(zero, fp8, c.dim, c.dim, generator, depth)
        self.gate_up = Linear(zero, fp8, 2 * c.hidden, c.dim, generator)
        self.down = Linear(zero, fp8, c.dim, c.hidden, generator, depth)

    def forward(self, x, cos, sin):
        b, t, _ = x.shape
        c = self.c
        q, k, v = (
            self.qkv(self.norm1(x))
            .view(b, t, -1, self.head)
            .transpose(1, 2)
            .split((c.heads, c.kv_heads, c.kv_heads), 1)
        )
        repeat = c.heads // c.kv_heads
        k, v = (
            y.repeat_interleave(repeat, 1) if repeat > 1 else y for y in (rotate(k, cos, sin), v)
        )
        y = F.scaled_dot_product_attention(rotate(q, cos, sin), k, v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).reshape(b, t, c.dim))
        gate, up = self.gate_up(self.norm2(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Llama(nn.Module):
    def __init__(self, c, zero, fp8, seed, recompute):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.c, self.zero, self.recompute = c, zero, recompute
        self.embedding, _ = zero.shard(torch.randn(c.vocabulary, c.dim, generator=generator), False)
        self.blocks = nn.ModuleList(Block(c, zero, fp8, generator) for _ in range(c.layers))
        self.norm = Norm(zero, c.dim)
        self.head = Linear(zero, False, c.vocabulary, c.dim, generator)  # kept in bf16, as is usual

    def forward(self, text):
        """The loss of a text [batch, length + 1]."""
        tokens, targets = text[:, :-1], text[:, 1:]
        c = self.c
        x = F.embedding(tokens, Gather.apply(self.embedding, self.zero, c.vocabulary))
        head = c.dim // c.heads
        frequency = c.rope ** (-torch.arange(0, head, 2, device=x.device).float() / head)
        angles = torch.arange(tokens.shape[1], device=x.device).float()[:, None] * frequency
        cos, sin = angles.cos(), angles.sin()
        for block in self.blocks:
            x = (
                checkpoint(block, x, cos, sin, use_reentrant=False)
                if self.recompute
                else block(x, cos, sin)
            )
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


# ---- text, files ---------------------------------------------------------------------------------


def text(limit=32 << 20):
    """Python's own sources as bytes; the files mixed, in the same order everywhere."""
    files = sorted(
        glob.glob(os.path.join(sysconfig.get_paths()["stdlib"], "**", "*.py"), recursive=True)
    )
    files = [f for f in files if "site-packages" not in f and "/test" not in f]
    order = torch.randperm(len(files), generator=torch.Generator().manual_seed(7)).tolist()
    data = bytearray()
    for i in order:
        with open(files[i], "rb") as file:
            data += file.read()
    return torch.frombuffer(data[:limit], dtype=torch.uint8)


HELD_OUT = 1 << 20  # bytes at the end of the text that no step sees


def batch(data, seed, args, device):
    """[batch, length + 1]; depends on nothing but its arguments: a resumed run sees the same."""
    generator = torch.Generator().manual_seed(seed)
    start = torch.randint(len(data) - args.length - 1, (args.batch, 1), generator=generator)
    return data[start + torch.arange(args.length + 1)].long().to(device)


@torch.no_grad()
def held_out_loss(model, data, args, device):
    """Mean over args.held_out batches, the same in every run, spread over the ranks."""
    world, rank = model.zero.world, model.zero.rank
    total = torch.zeros((), device=device)
    for i in range(args.held_out):
        total += model(batch(data[-HELD_OUT:], i * world + rank, args, device))
    if world > 1:
        dist.all_reduce(total)
    return (total / (args.held_out * world)).item()


def write_svg(path, curves, title):
    """Loss curves, {name: [loss of each step]}, without anybody's plotting package."""
    width, height, left, bottom = 720, 400, 60, 40
    top = max(max(c) for c in curves.values())
    low = min(min(c) for c in curves.values())
    steps = max(len(c) for c in curves.values())
    span = (top - low) or 1.0
    colors = ("#1f6feb", "#d9480f", "#2b8a3e", "#862e9c", "#495057", "#c2255c")

    def at(i, value):
        return (
            left + (width - left - 20) * i / max(steps - 1, 1),
            20 + (height - bottom - 20) * (1 - (value - low) / span),
        )

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="white"/>'
        f'<text x="{left}" y="14">{title}</text>'
    ]
    for i in range(5):
        value = low + span * i / 4
        y = at(0, value)[1]
        out.append(
            f'<path d="M{left} {y:.1f}H{width - 20}" stroke="#dee2e6"/>'
            f'<text x="6" y="{y + 4:.1f}">{value:.3f}</text>'
        )
    out.append(
        f'<text x="{left}" y="{height - 12}">step 0</text>'
        f'<text x="{width - 90}" y="{height - 12}">step {steps - 1}</text>'
    )
    for index, (name, curve) in enumerate(curves.items()):
        points = " ".join("{:.1f},{:.1f}".format(*at(i, v)) for i, v in enumerate(curve))
        color = colors[index % len(colors)]
        out.append(
            f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="1.3"/>'
            f'<text x="{width - 200}" y="{40 + 16 * index}" fill="{color}">{name}: '
            f"{sum(curve[-20:]) / len(curve[-20:]):.4f}</text>"
        )
    with open(path, "w") as file:
        file.write("\n".join(out) + "\n</svg>\n")


def read_csv(path, column="loss"):
    with open(path) as file:
        return [float(row[column]) for row in csv.DictReader(file) if row[column]]


def save(path, zero, step, losses):
    torch.save(
        {
            "step": step,
            "losses": [float(loss) for loss in losses],
            "master": zero.master,
            "optimizer": zero.optimizer.state_dict(),
            "histories": [s and s.save_history() for s in zero.states],  # of recipe "delayed"
        },
        f"{path}.{zero.rank}",
    )


@torch.no_grad()
def resume(path, zero):
    saved = torch.load(f"{path}.{zero.rank}", map_location=zero.device, weights_only=True)
    for mine, theirs in zip(zero.master, saved["master"]):
        mine.copy_(theirs)
    zero.optimizer.load_state_dict(saved["optimizer"])
    for group in zero.optimizer.param_groups:
        group["lr"] = zero.lr
    for shard, master in zip(zero.shards, zero.master):
        shard.copy_(master)
    for state, history in zip(zero.states, saved["histories"]):
        if state:
            state.load_history(history)
    zero.scales()
    return saved["step"], saved["losses"]


class Step:
    """A step: forward and backward of micro-batches, and the optimizer; with `graphed`, from the
    fourth call on as one CUDA graph."""

    def __init__(self, model, graphed):
        self.model, self.graphed, self.calls, self.graph = model, graphed, 0, None

    def run(self):
        total = torch.zeros((), device=self.text.device)
        for text in self.text:
            loss = self.model(text) / len(self.text)
            loss.backward()
            total += loss.detach()
        self.norm = self.model.zero.step()
        if self.model.zero.world > 1:
            dist.all_reduce(total)
            total /= self.model.zero.world
        self.loss = total

    def capture(self):
        """Captures what the last calls have warmed up; nothing runs."""
        results = self.loss, self.norm
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.run()
        return results

    def __call__(self, text, lr):
        """(loss, gradient's norm), on the device; text: [micro-batches, batch, length + 1]."""
        self.model.zero.lr.fill_(lr)
        if self.graph:
            self.text.copy_(text)
            self.graph.replay()
            return self.loss.clone(), self.norm.clone()
        self.text, self.calls = text, self.calls + 1
        if not self.graphed:
            self.run()
            return self.loss, self.norm
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self.run()
        torch.cuda.current_stream().wait_stream(side)
        return self.capture() if self.calls == 3 else (self.loss, self.norm)


def options(arguments):
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--config", choices=CONFIGS, default="small")
    p.add_argument("--precision", choices=("fp8", "bf16"), default="fp8")
    p.add_argument("--gather", choices=("fp8", "bf16"), default="fp8", help="what the wire carries")
    p.add_argument("--recipe", default="current", help="scaling recipe, as in a spec")
    p.add_argument("--format", help="hybrid (dy in E5M2) or e4m3; the recipe's default")
    p.add_argument("--steps", type=int, default=100)
    p.add_argument("--tokens", type=int, default=8192, help="of one rank in one micro-batch")
    p.add_argument("--length", type=int, default=512)
    p.add_argument("--micro-batches", type=int, default=1)
    p.add_argument("--lr", type=float, default=1e-3)
    p.add_argument("--warmup", type=int, default=40)
    p.add_argument("--seed", type=int, default=1)
    p.add_argument(
        "--recompute", action="store_true", help="activation checkpointing of every block"
    )
    p.add_argument("--graph", action="store_true", help="steps as a CUDA graph, on one rank")
    p.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    p.add_argument("--save", metavar="FILE")
    p.add_argument("--save-at", type=int, default=0, help="after so many steps; 0: at the end")
    p.add_argument("--resume", metavar="FILE")
    p.add_argument("--out", metavar="PREFIX", help="writes PREFIX.csv and PREFIX.svg")
    p.add_argument(
        "--held-out", type=int, default=0, metavar="N", help="after the last step, the loss of N "
        "batches of a text that was held out"
    )
    p.add_argument(
        "--compare", nargs="*", default=[], metavar="CSV", help="further curves in the SVG"
    )
    p.add_argument("--every", type=int, default=10, help="steps from one printed line to the next")
    args = p.parse_args(arguments)
    if args.length < 1 or args.tokens < 1 or args.tokens % args.length:
        p.error(
            f"--tokens {args.tokens} is no multiple of --length {args.length}: "
            "a micro-batch is of whole sequences"
        )
    args.batch = args.tokens // args.length
    if args.graph and int(os.environ.get("WORLD_SIZE", 1)) > 1:
        p.error("--graph is for one rank: the counters of the wire are Python's")
    return args


def start(args):
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(
        True, warn_only=True
    )  # so that a resumed run is the same run
    torch.utils.deterministic.fill_uninitialized_memory = False
    cuda = args.device == "cuda" or (args.device == "auto" and torch.cuda.is_available())
    device = (
        torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else torch.device("cpu")
    )
    if cuda:
        torch.cuda.set_device(device)
    own = not dist.is_initialized()
    if own and "RANK" in os.environ:
        dist.init_process_group("nccl" if cuda else "gloo")
    elif own:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return device, own


def prepare_kernels(model, args, device):
    """All kernels, before the first collective."""
    linears = [m for m in model.modules() if isinstance(m, Linear) and m.state]
    zero, shapes = model.zero, {(m.n, m.weight.shape[1], False) for m in linears}
    dtypes = {"grad_weight": torch.float32, "shards": zero.fp8_gather and zero.world > 1}
    prepare(sorted(shapes), args.batch * args.length, device, zero.recipe, **dtypes)


def train(model, args, device, first, losses, say):
    """Runs the steps from `first` on; `losses` of those before gets theirs, on the device."""
    zero, step_of = model.zero, Step(model, args.graph)
    data, mark, wire = text(), time.perf_counter(), 0
    for step in range(first, args.steps):
        seeds = (
            args.seed * 1000003 + micro * zero.world + zero.rank
            for micro in range(step * args.micro_batches, (step + 1) * args.micro_batches)
        )
        batches = torch.stack([batch(data[:-HELD_OUT], seed, args, device) for seed in seeds])
        ramp = min(1.0, (step + 1) / args.warmup)
        loss, norm = step_of(batches, args.lr * ramp * (0.1 + 0.9 * (1 - step / args.steps)))
        losses.append(loss)
        if (step + 1) % args.every == 0 or step + 1 == args.steps:
            said = f"step {step + 1:5d}  loss {loss.item():.4f}  norm {norm.item():.3f}"
            now, count = time.perf_counter(), (step - first) % args.every + 1
            rate = args.tokens * args.micro_batches * zero.world * count / (now - mark)
            memory = ""
            if device.type == "cuda":
                memory = f"{torch.cuda.max_memory_allocated() / 2**30:6.2f} GiB  "
            say(
                f"{said}  {rate:9.0f} tokens/s  {memory}"
                f"{(zero.wire - wire) / count / 2**20:8.2f} MiB/step on the wire",
                flush=True,
            )
            mark, wire = now, zero.wire
        if args.save and args.save_at == step + 1:
            save(args.save, zero, step + 1, losses)
    if args.save and not args.save_at:
        save(args.save, zero, args.steps, losses)
    return held_out_loss(model, data, args, device) if args.held_out else None


def write(args, losses, held_out):
    """PREFIX.csv and PREFIX.svg."""
    rows = [[i, repr(loss), ""] for i, loss in enumerate(losses)]
    rows[-1][2] = "" if held_out is None else repr(held_out)
    with open(args.out + ".csv", "w", newline="") as file:
        csv.writer(file).writerows([("step", "loss", "held_out"), *rows])
    curves = {os.path.basename(args.out): losses}
    curves.update({os.path.splitext(os.path.basename(p))[0]: read_csv(p) for p in args.compare})
    title = f"{args.config}, loss (mean of the last 20 steps beside it)"
    write_svg(args.out + ".svg", curves, title)


def main(arguments=None):
    """(losses, the Zero3) of a run."""
    args = options(arguments)
    device, own = start(args)
    fp8 = args.precision == "fp8"
    zero = Zero3(device, Recipe(args.recipe, args.format), fp8 and args.gather == "fp8")
    model = Llama(CONFIGS[args.config], zero, fp8, args.seed, args.recompute)
    if fp8:
        prepare_kernels(model, args, device)
    zero.adamw((0.9, 0.95), 0.1)
    first, losses = resume(args.resume, zero) if args.resume else (0, [])
    if not args.resume:
        zero.scales()
    say = print if zero.rank == 0 else lambda *_, **__: None
    parameters = sum(s.numel() for s in zero.shards) * zero.world
    say(
        f"{args.config}: {parameters / 1e6:.1f} M parameters, {args.precision}, "
        f"{zero.world} rank(s) on {device.type}, "
        f"{args.batch * args.length * args.micro_batches * zero.world} tokens a step"
    )
    work = 6 * parameters * args.tokens * args.micro_batches
    if device.type == "cpu" and work > 1e11:
        say(
            f"note: {work / 1e12:.2g} TFLOP a step and rank take long on a CPU; "
            "--config tiny --tokens 512 is for trying"
        )
    held_out = train(model, args, device, first, losses, say)
    losses = [float(loss) for loss in losses]
    if held_out is not None:
        say(f"held-out loss {held_out:.5f}, of {args.held_out * args.tokens * zero.world} tokens")
    if args.out and zero.rank == 0:
        write(args, losses, held_out)
    if own:
        dist.destroy_process_group()
    return losses, zero


if __name__ == "__main__":
    main()
