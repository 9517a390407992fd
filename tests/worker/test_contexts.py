"""What a rank tells of the GPU it is on, and the context that the next one in its place has before its program begins.
A library of four lines is CUDA here: what is called, and in which order, is what matters."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from holdfast.worker import contexts


@pytest.fixture(autouse=True)
def as_begun(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(contexts, "_given", {})
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_MODULE_LOADING", "CUDA_DEVICE_MAX_CONNECTIONS"):
        monkeypatch.delenv(name, raising=False)
    contexts.given()
    yield


def on(*devices: str) -> list[Any]:
    parameters = [SimpleNamespace(device=torch.device(device)) for device in devices]
    return [SimpleNamespace(parameters=lambda: parameters)]


def test_the_gpu_of_all_parameters_is_told() -> None:
    assert contexts.in_use(on("cuda:3", "cuda:3", "cpu")) == 3


def test_none_is_told_of_several_or_of_none() -> None:
    assert contexts.in_use(on("cuda:3", "cuda:1")) == contexts.NO_GPU
    assert contexts.in_use([nn.Linear(2, 2)]) == contexts.NO_GPU
    assert contexts.in_use([]) == contexts.NO_GPU


@pytest.mark.parametrize("name", ["CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_MAX_CONNECTIONS"])
def test_a_program_that_sets_what_cuda_reads_once_is_first(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "1")
    assert contexts.in_use(on("cuda:0")) == contexts.NO_GPU
    contexts.given()
    assert contexts.in_use(on("cuda:0")) == 0


def test_what_torch_sets_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_MODULE_LOADING", "LAZY")
    assert contexts.in_use(on("cuda:0")) == 0
    monkeypatch.setenv("CUDA_MODULE_LOADING", "EAGER")
    assert contexts.in_use(on("cuda:0")) == contexts.NO_GPU


class Cuda:
    def __init__(self, gpus: int = 8) -> None:
        self.called: list[Any] = []
        self._gpus = gpus

    def cuInit(self, flags: int) -> int:
        self.called.append(("init", flags))
        return 0

    def cuDeviceGet(self, found: Any, number: int) -> int:
        self.called.append(("get", number))
        found._obj.value = 100 + number
        return 0 if number < self._gpus else 101

    def cuDevicePrimaryCtxRetain(self, found: Any, device: ctypes.c_int) -> int:
        self.called.append(("retain", device.value))
        return 0


def test_the_context_of_that_gpu_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Cuda()
    monkeypatch.setattr(ctypes, "CDLL", {contexts.LIBRARY: cuda}.__getitem__)
    contexts.open_ahead(2).join()
    assert cuda.called == [("init", 0), ("get", 2), ("retain", 102)]


def test_a_gpu_that_is_not_there_is_left_to_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Cuda(gpus=1)
    monkeypatch.setattr(ctypes, "CDLL", {contexts.LIBRARY: cuda}.__getitem__)
    contexts.open_ahead(2).join()
    assert cuda.called == [("init", 0), ("get", 2)]


def test_nothing_is_said_where_there_is_no_cuda() -> None:
    code = "from holdfast.worker import contexts; contexts.LIBRARY = 'libnowhere.so.1'; contexts.open_ahead(0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_context_is_the_one_that_torch_has() -> None:
    code = """
import torch
from torch import nn
from holdfast.worker import contexts
contexts.given()
contexts.open_ahead(0).join()
assert not torch.cuda.is_initialized()
model = nn.Linear(4, 4, device="cuda")
assert model(torch.ones(4, device="cuda")).shape == (4,)
assert contexts.in_use([model]) == 0
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
