#!/usr/bin/env python3
"""Measures the PyTorch package against bf16 and a compiled torch._scaled_mm, in one run.

    python bench_torch.py layers       forward + backward, kernels, memory, host time
    torchrun --nproc-per-node 2 bench_torch.py wire      weight parallel: bytes and time
    python bench_torch.py losses FP8_1.csv FP8_2.csv BF16_1.csv BF16_2.csv    of train_llama.py

Prints JSON lines: a header object, then one object a row with bench, case, M, N, K, pass, recipe,
value, unit, baseline, baseline_name, ratio (> 1: better than the baseline). --append leaves the
header out.
"""

import argparse
import gc
import hashlib
import json
import os
import re
import statistics
import subprocess
import sys
import time

import torch
import torch.nn.functional as F

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import fp8gen_torch as fp8  # noqa: E402
from fp8gen_torch import abi  # noqa: E402

SHAPES = ((8192, 28672, 4096), (8192, 4096, 14336), (8192, 8192, 8192), (2048, 2048, 2048))
CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
ROOT = os.path.normpath(os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", ".."))


def source_hash():
    """As tests/gpu/receipt.txt has it: of the sources as git lists them, or as they lie here."""
    if os.environ.get("FP8GEN_SOURCE_HASH"):
        return os.environ["FP8GEN_SOURCE_HASH"]
    folders = ("gen", "templates", "runtime")
    listed = subprocess.run(
        ["git", "-C", ROOT, "ls-files", *folders], capture_output=True, text=True
    )
    files = listed.stdout.split() or [
        os.path.relpath(os.path.join(path, name), ROOT)
        for folder in folders
        for path, _, names in os.walk(os.path.join(ROOT, folder))
        for name in names
    ]
    lines = []
    for name in sorted(files, key=lambda n: n.encode()):
        with open(os.path.join(ROOT, name), "rb") as file:
            lines.append(f"{hashlib.sha256(file.read()).hexdigest()}  {name}\n")
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def header():
    out = {
        "header": "torch",
        "gpu": "none",
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "fp8gen": abi.runtime.fp8_version().decode(),
        "source_hash": source_hash(),
    }
    if CUDA:
        driver = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True,
            text=True,
        ).stdout.split()
        out.update(
            gpu=torch.cuda.get_device_name(),
            driver=driver[0] if driver else "unknown",
            nccl=".".join(map(str, torch.cuda.nccl.version())),
            cublaslt=fp8.layers.context_of(0).cublaslt_version,
        )
    return out


def row(case, shape, what, value, unit, baseline, name, more=None, lower=True):
    m, n, k = shape
    ratio = (baseline / value if lower else value / baseline) if value and baseline else None
    print(
        json.dumps(
            dict(
                {
                    "bench": "torch",
                    "case": case,
                    "M": m,
                    "N": n,
                    "K": k,
                    "pass": what,
                    "recipe": "current",
                    "value": value,
                    "unit": unit,
                    "baseline": baseline,
                    "baseline_name": name,
                    "ratio": ratio,
                },
                **(more or {}),
            )
        ),
        flush=True,
    )


def synchronize():
    if CUDA:
        torch.cuda.synchronize()


def contest(functions, seconds=0.35, rounds=15):
    """Median microseconds of each function, measured in turns."""
    counts, times = {}, {name: [] for name in functions}
    for name, function in functions.items():
        for _ in range(3):
            function()
        synchronize()
        start = time.perf_counter()
        function()
        synchronize()
        counts[name] = max(3, min(200, int(seconds / rounds / (time.perf_counter() - start))))
    for _ in range(rounds):
        for name, function in functions.items():
            synchronize()
            start = time.perf_counter()
            for _ in range(counts[name]):
                function()
            synchronize()
            times[name].append((time.perf_counter() - start) / counts[name] * 1e6)
    return {name: statistics.median(values) for name, values in times.items()}


# ---- the baseline: tensorwise scaling over torch._scaled_mm --------------------------------------


def cast(tensor, dtype):
    limit = torch.finfo(dtype).max
    scale = limit / tensor.abs().amax().float().clamp(min=1e-12)
    return (tensor.float() * scale).clamp(-limit, limit).to(dtype), 1 / scale


def product(a, b, scales, fast):
    """a b with b column-major, as the hardware wants both along the contraction."""
    return torch._scaled_mm(
        a, b, scale_a=scales[0], scale_b=scales[1], out_dtype=torch.bfloat16, use_fast_accum=fast
    )


class ScaledMM(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        (x8, xs), (w8, ws) = cast(x, torch.float8_e4m3fn), cast(w, torch.float8_e4m3fn)
        ctx.save_for_backward(x8, xs, w8, ws)
        return product(x8, w8.t(), (xs, ws), True)

    @staticmethod
    def backward(ctx, dy):
        x8, xs, w8, ws = ctx.saved_tensors
        dy8, ds = cast(dy, torch.float8_e5m2)
        dx = product(dy8, w8.t().contiguous().t(), (ds, ws), False)
        dw = product(dy8.t().contiguous(), x8.t().contiguous().t(), (ds, xs), False)
        return dx, dw


# ---- layers --------------------------------------------------------------------------------------


def tensors(m, n, k):
    x = torch.randn(m, k, device=DEVICE, dtype=torch.bfloat16).requires_grad_()
    w = (torch.randn(n, k, device=DEVICE) * k**-0.5).bfloat16().requires_grad_()
    return x, w, torch.randn(m, n, device=DEVICE, dtype=torch.bfloat16)


def step(function, x, w, dy, fresh=False):
    def run():
        if fresh:  # as after an optimizer's step: the weight is quantised again
            fp8.weights_changed()
        function(x, w).backward(dy)
        x.grad = w.grad = None

    return run


def compiled():
    """(function, name) of the baseline; eager where nothing can be compiled, and said so."""
    function = torch.compile(lambda x, w: ScaledMM.apply(x, w))
    try:
        x, w, dy = tensors(256, 256, 256)
        function(x, w).backward(dy)
        synchronize()
        return function, "torch.compile'd torch._scaled_mm, tensorwise scales"
    except Exception as error:
        reason = (
            str(error).strip().splitlines()[0][:120] if str(error).strip() else type(error).__name__
        )
        print(
            f"bench_torch: torch.compile failed ({reason}); the baseline is eager", file=sys.stderr
        )
        return ScaledMM.apply, "torch._scaled_mm, tensorwise scales, eager (torch.compile failed)"


def layers(shapes):
    baseline, name = compiled()
    for shape in shapes:
        x, w, dy = tensors(*shape)
        torch._dynamo.reset()
        state = fp8.State(fp8.Recipe("delayed"))
        times = contest(
            {
                "fp8": step(fp8.fp8_linear, x, w, dy, fresh=True),
                "delayed": step(
                    lambda x, w: fp8.fp8_linear(x, w, None, state), x, w, dy, fresh=True
                ),
                "delayed kept": step(lambda x, w: fp8.fp8_linear(x, w, None, state), x, w, dy),
                "kept": step(fp8.fp8_linear, x, w, dy),
                "scaled_mm": step(baseline, x, w, dy),
                "bf16": step(F.linear, x, w, dy),
            }
        )
        for case, key in (
            ("linear", "fp8"),
            ("linear, weight kept", "kept"),
            ("linear", "delayed"),
            ("linear, weight kept", "delayed kept"),
        ):
            more = {"recipe": "delayed"} if key.startswith("delayed") else None
            for base, said in (("scaled_mm", name), ("bf16", "bf16 F.linear, eager")):
                row(case, shape, "fwd+bwd", times[key], "us", times[base], said, more)
        del x, w, dy


def kernels(shape):
    """The kernels of one forward and backward, as the profiler lists them."""
    x, w, dy = tensors(*shape)
    run = step(fp8.fp8_linear, x, w, dy, fresh=True)
    run()
    synchronize()
    activity = torch.profiler.ProfilerActivity
    with torch.profiler.profile(
        activities=[activity.CPU, activity.CUDA] if CUDA else [activity.CPU]
    ) as p:
        run()
        synchronize()
    names = [
        e.name
        for e in p.events()
        if e.device_type == torch.autograd.DeviceType.CUDA and not e.name.startswith("Mem")
    ]
    return names, [n for n in names if is_gemm(n)], [n for n in names if is_fp8(n)]


def is_gemm(name):
    return re.search(r"gemm|nvjet|cutlass|xmma", name, re.IGNORECASE) is not None


def is_fp8(name):
    """A GEMM over FP8 operands: ours say so by dtype, cuBLASLt's by dtype or nvjet letters."""
    return is_gemm(name) and re.search(r"e4m3|e5m2|nvjet_(sm\d+_)?[qr][qr]", name) is not None


def left_behind(function, shape):
    """Bytes that a forward leaves for its backward: read from the allocator; counted on the CPU."""
    x, w, _ = tensors(*shape)
    function(x, w)
    inputs = x * 1  # not a leaf: who keeps it is the layer alone
    if not CUDA:
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
            function(inputs, w)
        return sum(
            t.numel() * t.element_size() for t in kept if t.data_ptr() != w.data_ptr() and t.dim()
        )
    gc.collect()
    synchronize()
    before = torch.cuda.memory_allocated()
    y = function(inputs, w)
    given = x.numel() * x.element_size()
    inputs = None
    synchronize()
    return torch.cuda.memory_allocated() - before + given - y.numel() * y.element_size()


def memory(shape):
    fp8_bytes, bf16_bytes = left_behind(fp8.fp8_linear, shape), left_behind(F.linear, shape)
    row("saved activations", shape, "fprop", fp8_bytes, "bytes", bf16_bytes, "bf16 F.linear")


def host(shape):
    """Time to enqueue a call, of shapes so small that the GPU waits."""
    x, w, dy = tensors(*shape)

    def enqueue(function, backward):
        best = []
        for _ in range(7):
            synchronize()
            count, start = 40, time.perf_counter()
            for _ in range(count):
                y = function(x, w)
                if backward:
                    y.backward(dy)
                    x.grad = w.grad = None
            best.append((time.perf_counter() - start) / count * 1e6)
        return statistics.median(best)

    for what, backward in (("fprop", False), ("fwd+bwd", True)):
        enqueue(fp8.fp8_linear, backward), enqueue(F.linear, backward)
        row(
            "host time",
            shape,
            what,
            enqueue(fp8.fp8_linear, backward),
            "us",
            enqueue(F.linear, backward),
            "bf16 F.linear, eager",
        )


def main_layers(args):
    shapes = SHAPES if not args.small else ((64, 96, 128), (33, 40, 72))
    layers(shapes)
    names, gemms, fp8_gemms = kernels(shapes[0])
    row(
        "FP8 GEMM kernels in the profile",
        shapes[0],
        "fwd+bwd",
        len(fp8_gemms),
        "kernels",
        3,
        "all three products",
        {"kernels": names, "other_gemms": sorted(set(gemms) - set(fp8_gemms))},
        lower=False,
    )
    memory(shapes[0])
    host((256, 256, 256) if not args.small else shapes[1])


# ---- two ranks -----------------------------------------------------------------------------------


def main_wire(args):
    import torch.distributed as dist

    rank = int(os.environ["RANK"])
    if CUDA:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if CUDA else "gloo")
    shapes = SHAPES if not args.small else ((64, 128, 256),)
    for m, n, k in shapes:
        x, w, dy = tensors(m, n, k)
        runs, bytes_ = {}, {}
        for name, gather in (("fp8", True), ("bf16", False)):
            communicator = fp8.Communicator()
            shard = communicator.shard(w.detach()).requires_grad_()
            state = fp8.ShardState(n, fp8_gather=gather)
            fp8.weight_parallel_linear(x, shard, None, communicator, state)
            communicator.wire_bytes = 0
            fp8.weight_parallel_linear(x, shard, None, communicator, state)
            bytes_[name] = communicator.wire_bytes

            def run(shard=shard, state=state, communicator=communicator):
                fp8.weights_changed()
                fp8.precompute_amax([shard], [state], communicator)
                fp8.weight_parallel_linear(x, shard, None, communicator, state).backward(dy)
                x.grad = shard.grad = None

            runs[name] = run
        times = {}
        for name, run in runs.items():  # ranks must take equally many turns
            for _ in range(3):
                run()
            synchronize()
            dist.barrier()
            start = time.perf_counter()
            for _ in range(args.repeat):
                run()
            synchronize()
            times[name] = (time.perf_counter() - start) / args.repeat * 1e6
        if rank == 0:
            row(
                "bytes on the wire, weight gather",
                (m, n, k),
                "fprop",
                bytes_["fp8"],
                "bytes",
                bytes_["bf16"],
                "bf16 gather",
                {"ranks": dist.get_world_size()},
            )
            row(
                "weight parallel, FP8 gather",
                (m, n, k),
                "fwd+bwd",
                times["fp8"],
                "us",
                times["bf16"],
                "bf16 gather, FP8 products",
                {"ranks": dist.get_world_size()},
            )
    dist.destroy_process_group()


# ---- losses --------------------------------------------------------------------------------------


def main_losses(args):
    """FP8 runs of several seeds against bf16 runs of the same seeds, by three measures."""
    from train_llama import read_csv

    half = len(args.files) // 2
    runs, twins = args.files[:half], args.files[half:]
    steps = len(read_csv(runs[0]))

    def last(count):
        return lambda path: statistics.mean(read_csv(path)[-count:])

    for name, measure in (
        (f"mean loss of the last 50 of {steps} steps", last(50)),
        (f"mean loss of the last 200 of {steps} steps", last(200)),
        (f"loss on held-out text after {steps} steps", lambda p: read_csv(p, "held_out")[-1]),
    ):
        ours, theirs = [measure(p) for p in runs], [measure(p) for p in twins]
        mean, base = statistics.mean(ours), statistics.mean(theirs)
        row(
            f"train_llama, {name}",
            (0, 0, 0),
            "train",
            mean,
            "nats",
            base,
            f"bf16 twins, {half} seed(s)",
            {
                "difference": mean / base - 1,
                "difference_of_seeds": [a / b - 1 for a, b in zip(ours, theirs)],
                "spread_of_bf16_seeds": (max(theirs) - min(theirs)) / base,
                "recipe": args.recipe,
            },
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("layers", "wire", "losses"))
    parser.add_argument("files", nargs="*")
    parser.add_argument("--append", action="store_true", help="no header")
    parser.add_argument("--small", action="store_true", help="tiny shapes, to try the program")
    parser.add_argument("--repeat", type=int, default=10)
    parser.add_argument("--recipe", default="current", help="of the FP8 run whose losses these are")
    args = parser.parse_intermixed_args()
    if args.what == "losses" and (not args.files or len(args.files) % 2):
        parser.error("losses takes the CSV of FP8 runs and then those of as many bf16 runs")
    torch.manual_seed(0)
    if not args.append and os.environ.get("RANK", "0") == "0":
        print(json.dumps(header()), flush=True)
    {"layers": main_layers, "wire": main_wire, "losses": main_losses}[args.what](args)


if __name__ == "__main__":
    main()
