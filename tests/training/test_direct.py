"""A state from the GPU memory of another process; and code that is loaded before it is needed."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import pytest
import torch
from torch import nn

from holdfast.training import direct
from holdfast.worker import kernels

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

TAKER = """
import sys, msgspec, torch
from holdfast.training import direct
given = msgspec.json.decode(open(sys.argv[1], "rb").read(), type=direct.Given)
targets = {
    "large": torch.zeros(3000, 1000, device="cuda", dtype=torch.bfloat16),
    "odd": torch.zeros(7, device="cuda", dtype=torch.uint8),
    "step": torch.zeros(()),
}
assert direct.take(given, targets)
assert targets["large"].float().sum().item() == 3000 * 1000 * 2
assert targets["odd"].tolist() == [0, 1, 2, 3, 4, 5, 6]
assert targets["step"].item() == 42.0
assert not direct.take(given, {"large": targets["large"].t()})
broken = msgspec.structs.replace(given, blocks=[bytes(64)] * len(given.blocks))
assert not direct.take(broken, targets)
"""


def state() -> dict[str, torch.Tensor]:
    return {
        "large": torch.full((3000, 1000), 2.0, device="cuda", dtype=torch.bfloat16),
        "odd": torch.arange(7, device="cuda", dtype=torch.uint8),
        "step": torch.tensor(42.0, device="cuda"),
        "strided": torch.zeros(8, 8, device="cuda").t(),
        "none": torch.zeros(0, device="cuda"),
        "on the host": torch.zeros(5),
    }


@needs_gpu
def test_another_process_takes_what_can_be_taken(tmp_path: Path) -> None:
    given = direct.give(tensors := state())
    assert given.pieces.keys() == {"large", "odd", "step"} and tensors
    (tmp_path / "given").write_bytes(msgspec.json.encode(given))
    done = subprocess.run([sys.executable, "-c", TAKER, str(tmp_path / "given")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@needs_gpu
def test_a_first_parameter_on_a_gpu_has_code_loaded() -> None:
    before = torch.cuda.get_rng_state()
    kernels.load_with_first_parameter()
    nn.Linear(4, 4)
    assert not loading()
    with torch.device("cuda"):
        nn.Linear(4, 4)
        found = loading()
        nn.Linear(4, 4)
    assert len(found) == 1
    found[0].join()
    assert not torch.equal(before, torch.cuda.get_rng_state())  # by the two layers
    again = torch.cuda.get_rng_state()
    kernels.compute(torch.device("cuda", 0), torch.bfloat16)
    assert torch.equal(again, torch.cuda.get_rng_state())


def test_a_process_that_uses_no_gpu_has_no_memory_to_open() -> None:
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        assert direct.machine() == ""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_what_is_computed_in_advance_leaves_no_trace(dtype: torch.dtype) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    kernels.compute(torch.device("cpu"), dtype)
    assert torch.equal(torch.rand(3), expected) and torch.get_default_dtype() == torch.float32


def loading() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "holdfast-kernels"]
