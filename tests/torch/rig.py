"""What the tests of the PyTorch package share: device, data, errors, ranks, the count."""

import logging
import os
import socket
import sys
import traceback
import unittest

import torch

DEVICE = (
    torch.device("cuda", 0) if os.environ.get("FP8_TEST_DEVICE") == "cuda" else torch.device("cpu")
)
CUDA = DEVICE.type == "cuda"
logging.getLogger("fp8gen").setLevel(logging.ERROR)  # not every new shape of a test


def randn(*shape, dtype=torch.bfloat16, seed=0, scale=1.0, device=DEVICE):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * scale).to(device=device, dtype=dtype)


def error(got, wanted):
    """Relative Frobenius error."""
    got, wanted = got.detach().double(), wanted.detach().double()
    return ((got - wanted).norm() / wanted.norm().clamp(min=1e-30)).item()


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _rank_main(rank, world, port, function, arguments):
    import torch.distributed as dist

    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        RANK=str(rank),
        WORLD_SIZE=str(world),
        LOCAL_RANK=str(rank),
    )
    torch.set_num_threads(1)
    if CUDA:
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if CUDA else "gloo", rank=rank, world_size=world)
    try:
        function(rank, world, *arguments)
        dist.barrier()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # a rank that waits in a collective is ended by the others' absence
    dist.destroy_process_group()


def ranks(function, world, *arguments):
    """Runs function(rank, world, ...) in so many processes; raises if one fails."""
    torch.multiprocessing.spawn(_rank_main, (world, free_port(), function, arguments), world)


def main():
    result = unittest.main(
        exit=False, verbosity=int(os.environ.get("FP8_TEST_VERBOSE", "1"))
    ).result
    failed = len(
        {getattr(test, "test_case", test).id() for test, _ in result.failures + result.errors}
    )
    for test, reason in result.skipped:
        print(f"skip: {test}: {reason}")
    print(f"[  PASSED  ] {result.testsRun - failed - len(result.skipped)} test(s).")
    if result.skipped:
        print(f"[  SKIPPED ] {len(result.skipped)} test(s), listed above:")
    if failed:
        print(f"[  FAILED  ] {failed} test(s), listed above:")
    sys.exit(1 if failed else 0)
