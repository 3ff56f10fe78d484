"""train_llama.py, tiny: it learns, follows its bf16 twin, resumes bit for bit, halves the wire."""

import os
import tempfile
import unittest

import torch

import rig
from rig import CUDA
import train_llama

COMMON = [
    "--config",
    "tiny",
    "--device",
    "cuda" if CUDA else "cpu",
    "--tokens",
    "256",
    "--length",
    "64",
    "--lr",
    "3e-3",
    "--warmup",
    "3",
    "--every",
    "100",
]


def run(*arguments, steps=12):
    return train_llama.main([*COMMON, "--steps", str(steps), *arguments])


def resumes(folder, rank=0, recipe="current"):
    """A run that is saved and continued is the same run, bit for bit; so is one that recomputes."""
    same = "--micro-batches", "2", "--recipe", recipe
    whole, _ = run("--save", f"{folder}/a", "--save-at", "5", *same, steps=8)
    again, _ = run("--resume", f"{folder}/a", *same, steps=8)
    assert whole == again, (rank, recipe, whole, again)
    recomputed, _ = run("--recompute", *same, steps=8)
    assert whole == recomputed, (rank, recipe, whole, recomputed)


def ranks(rank, world, folder):
    resumes(folder, rank, "block")
    results = {
        p + g: run("--precision", p, "--gather", g, steps=4)
        for p, g in (("fp8", "fp8"), ("fp8", "bf16"), ("bf16", "bf16"))
    }
    losses = {name: result[0] for name, result in results.items()}
    assert losses["fp8fp8"] == losses["fp8bf16"], losses  # the gathered bytes are the same
    assert all(abs(a / b - 1) < 0.02 for a, b in zip(losses["fp8fp8"], losses["bf16bf16"])), losses
    wire = {name: result[1].wire for name, result in results.items()}
    # Forward and backward gather each linear weight; FP8 saves one byte of two, twice a step.
    linear = sum(
        2 * s.numel()
        for s, state in zip(results["fp8fp8"][1].shards, results["fp8fp8"][1].states)
        if state
    )
    assert wire["fp8bf16"] == wire["bf16bf16"], wire
    assert wire["fp8bf16"] - wire["fp8fp8"] == 4 * linear * (world - 1), (wire, linear)


class Train(unittest.TestCase):
    def test_one_rank(self):
        with tempfile.TemporaryDirectory() as folder:
            for recipe in ("current", "delayed"):
                resumes(folder, recipe=recipe)
            run("--recipe", "block", steps=2)  # its dims are no tiles of 128 x 128
            fp8, _ = run("--out", f"{folder}/fp8", steps=30)
            bf16, _ = run(
                "--precision",
                "bf16",
                "--out",
                f"{folder}/bf16",
                "--compare",
                f"{folder}/fp8.csv",
                steps=30,
            )
            self.assertLess(fp8[-1], 0.75 * fp8[0])
            self.assertLess(abs(sum(fp8[-5:]) / sum(bf16[-5:]) - 1), 0.02)
            self.assertEqual(train_llama.read_csv(f"{folder}/fp8.csv"), fp8)
            with open(f"{folder}/bf16.svg") as file:
                self.assertEqual(file.read().count("<polyline"), 2)
            self.assertEqual(
                sorted(os.listdir(folder)), ["a.0", "bf16.csv", "bf16.svg", "fp8.csv", "fp8.svg"]
            )

    @unittest.skipUnless(CUDA, "a CUDA graph needs a GPU and FP8_TEST_DEVICE=cuda")
    def test_graph(self):
        """Steps as a graph are the steps, bit for bit, the evaluation behind them too."""
        for recipe in ("current", "delayed", "rowwise", "block"):
            with tempfile.TemporaryDirectory() as folder:
                results = []
                for flags in ((), ("--graph",)):
                    out = f"{folder}/{len(flags)}"
                    flags = *flags, "--recipe", recipe, "--micro-batches", "2", "--held-out", "2"
                    losses, zero = run(*flags, "--out", out)
                    held_out = train_llama.read_csv(out + ".csv", "held_out")
                    results.append((losses, held_out, [m.tolist() for m in zero.master]))
                self.assertEqual(*results, recipe)

    def test_two_ranks(self):
        if CUDA and torch.cuda.device_count() < 2:
            self.skipTest(f"needs 2 GPUs, this machine has {torch.cuda.device_count()}")
        with tempfile.TemporaryDirectory() as folder:
            rig.ranks(ranks, 2, folder)


if __name__ == "__main__":
    rig.main()
