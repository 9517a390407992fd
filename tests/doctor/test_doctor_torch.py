"""torch, GPUs, products and collectives: well, and broken on purpose."""

from __future__ import annotations

import socket
import warnings
from pathlib import Path

import pytest
import torch
from doctoring import AFTER_TORCH, examine, hook, package

from holdfast.doctor import devices, ranks
from holdfast.doctor.finding import Asked, ok

HAS_GPU = torch.cuda.is_available()


BROKEN = {
    "raises": (
        "raise ImportError('libcudart.so.13: no such file')",
        "torch cannot be imported: ImportError: lib",
    ),
    "dies": ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "its process ended by SIGSEGV"),
    "exits": ("print('no licence', flush=True); raise SystemExit(3)", "its process ended with code 3: no licence"),
    "odd": ("raise ValueError('odd')", "ValueError: odd"),
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_torch_that_cannot_be_imported(tmp_path: Path, how: str) -> None:
    text, words = BROKEN[how]
    report = examine(tmp_path, "--only", "torch", "matmul", "nccl", env=package(tmp_path, "torch", text))
    assert (report["torch"].state, report["torch"].text.startswith(words)) == ("fail", True), report
    assert {report["matmul"].text, report["nccl"].text} == {"torch has failed, which this needs"}
    assert {report["matmul"].state, report["nccl"].state} == {"skipped"}


OLD = """
import sys, types
__version__ = "2.5.1+cpu"
sys.modules["torch.distributed"] = distributed = types.ModuleType("torch.distributed")
"""


def test_a_torch_that_is_too_old(tmp_path: Path) -> None:
    found = examine(tmp_path, "--only", "torch", env=package(tmp_path, "torch", OLD))["torch"]
    assert (found.state, found.text) == ("fail", "torch 2.5.1+cpu is too old")


without_gpu = pytest.mark.skipif(HAS_GPU, reason="for a machine without a GPU that is made to have one")


@without_gpu
def test_a_gpu_that_torch_cannot_use(monkeypatch: pytest.MonkeyPatch) -> None:
    def is_available() -> bool:
        warnings.warn("CUDA initialization: Unknown Error\nmore", stacklevel=1)
        return False

    monkeypatch.setattr(torch.cuda, "is_available", is_available)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(devices, "_DRIVERS", ("/dev/null",))
    found = devices.torch_here(Asked())
    assert found.state == "fail"
    assert found.text.endswith("cannot use: CUDA initialization: Unknown Error")
    monkeypatch.setattr(torch.version, "cuda", None)
    assert devices.torch_here(Asked()).state == "warn"  # a build without CUDA, and a machine with a GPU
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert devices.torch_here(Asked()).state == "ok"


@without_gpu
def test_gpus_that_are_full_or_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    def mem_get_info(index: int) -> tuple[int, int]:
        if index == 2:
            raise RuntimeError("CUDA error: uncorrectable ECC error encountered\nC++ stack")
        return (60 << 30, 1 << 30)[index], 80 << 30

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "mem_get_info", mem_get_info)
    found = devices.gpu(Asked())
    assert found.state == "fail"
    assert found.text == (
        "GPU 1: 1.0 GiB of 80 GiB are free; GPU 2: RuntimeError: CUDA error: uncorrectable ECC error encountered"
    )
    assert found.figures["gpu_0_free_bytes"] == 60 << 30


SMI = """#!/bin/sh
echo "0, 0, Not Active"
echo "1, 3, Not Active"
echo "2, [N/A], Active"
"""


def test_what_the_driver_has_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nvidia-smi").write_text(SMI)
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    texts = [finding.text for finding in devices._complaints()]
    assert texts[:2] == ["GPU 1 has had 3 memory errors that could not be corrected", "GPU 2 is slowed down by heat"]


WRONG = """
    product = torch.matmul
    def matmul(left, right):
        found = product(left, right)
        if left.dtype is torch.bfloat16:
            found[7, 11] += 1
        return found
    torch.matmul = matmul

    import torch.distributed as dist
    total = dist.all_reduce
    def all_reduce(tensor):
        total(tensor)
        tensor[5] += dist.get_rank()
    dist.all_reduce = all_reduce
"""


def test_wrong_results(tmp_path: Path) -> None:
    report = examine(tmp_path, "--only", "matmul", "collective", env=hook(tmp_path, AFTER_TORCH + WRONG))
    assert report["matmul"].state == report["collective"].state == "fail"
    assert "1 of 262,144 sums are wrong in a product of matrices (torch.bfloat16)" in report["matmul"].text
    wrong = "rank 1: RuntimeError: 1 of 1,048,576 sums of an all-reduce are wrong"
    assert report["collective"].text == f"gloo, 2 ranks: {wrong}"


def test_every_sum_of_the_product_is_exact() -> None:
    """Or a right result would be called wrong: bfloat16 has eight bits, so 256 is the last that it counts to."""
    generator = torch.Generator().manual_seed(0)
    side = devices.GPU_SIDE
    left, right = (torch.randint(-1, 2, (side, side), generator=generator).float() for _ in range(2))
    assert float((left @ right).abs().max()) < 256


def test_a_slow_gpu_among_others_is_named() -> None:
    found = [ok(f"GPU {i}", **{f"gpu_{i}_flops": rate}) for i, rate in enumerate((700, 690, 300, 710))]
    (slow,) = devices._laggards(found)
    assert (slow.state, slow.text) == ("warn", "GPU 2: less than half as fast as the others")
    assert devices._laggards(found[:2]) == []


# -- collectives ------------------------------------------------------------------------------------------------------


def test_an_interface_that_does_not_exist(tmp_path: Path) -> None:
    found = examine(tmp_path, "--only", "collective", env={"GLOO_SOCKET_IFNAME": "nosuch0"})["collective"]
    assert found.state == "fail"
    assert found.text.startswith("gloo, 2 ranks: rank ")
    assert found.cure == "GLOO_SOCKET_IFNAME is 'nosuch0': ip addr shows which interfaces there are"


DIES = """
    import os, signal
    import torch.distributed as dist
    total = dist.all_reduce
    def all_reduce(tensor):
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGBUS)
        total(tensor)
    dist.all_reduce = all_reduce
"""


def test_a_rank_that_dies_is_named_and_not_the_one_that_noticed(tmp_path: Path) -> None:
    found = examine(tmp_path, "--only", "collective", env=hook(tmp_path, AFTER_TORCH + DIES))["collective"]
    assert (found.state, found.text) == ("fail", "gloo, 2 ranks: rank 1: its process was ended by SIGBUS")


def test_gpus_between_which_nccl_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two GPUs are claimed to be there, and one of them does not come through."""

    def reduce(backend: str, rank: int, size: int, listener: socket.socket) -> float:
        assert (backend, size) == ("nccl", 2)
        if rank == 1:
            raise RuntimeError("NCCL error: unhandled system error\nmore")
        return 0.001

    monkeypatch.setattr(ranks, "_count_gpus", lambda: 2)
    monkeypatch.setattr(ranks, "_reduce", reduce)
    found = ranks.nccl(Asked())
    assert (found.state, found.text) == (
        "fail",
        "nccl, 2 ranks: rank 1: RuntimeError: NCCL error: unhandled system error",
    )
    assert found.cure.startswith("run it with NCCL_DEBUG=INFO")


def test_nothing_is_asked_of_gpus_that_are_not_there() -> None:
    if HAS_GPU:
        pytest.skip("there are some")
    assert devices.gpu(Asked()).state == "skipped"
