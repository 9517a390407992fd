"""What a process does once, the first time it trains: code that is loaded, memory that is touched, threads and handles
that are made. One that stands by does it while nobody waits for it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.utils.data import DataLoader, TensorDataset

from holdfast.checkpoint import randomness
from holdfast.data import fingerprint
from holdfast.data.order import Order
from holdfast.worker import kernels

ROWS = 1024
SHAPES = 16


def warm(modules: Sequence[nn.Module], others: Iterable[Any], nccl: bool = False) -> None:
    """On the devices and in the precisions of these. Random generators are left as they were."""
    before = randomness.capture()
    kinds = {(p.device, p.dtype) for module in modules for p in module.parameters() if p.dtype.is_floating_point}
    for device, dtype in sorted(kinds, key=str):
        kernels.compute(device, dtype)
    _multiply(modules)
    for optimizer in others:
        if isinstance(optimizer, torch.optim.Optimizer):
            _reserve(optimizer)
    data = TensorDataset(torch.ones(8, 8), torch.ones(8))
    fingerprint.of(data)
    Order(8, 0, 0, True).pick(torch.arange(8))
    for _ in DataLoader(data, batch_size=4):
        pass
    if nccl and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        _meet_nobody()
    randomness.put_back(before)


def _multiply(modules: Iterable[nn.Module]) -> None:
    """By the weights of layers on a GPU, one of each shape: a product has code of its own for shapes of its own."""
    layers = [part for module in modules for part in module.modules() if isinstance(part, nn.Linear)]
    shapes = {(each.weight.shape, each.weight.dtype): each for each in layers if each.weight.is_cuda}
    for layer in list(shapes.values())[:SHAPES]:
        weight = layer.weight
        with contextlib.suppress(RuntimeError):  # out of memory is one, too
            x = torch.ones(ROWS, weight.shape[1], device=weight.device, dtype=weight.dtype, requires_grad=True)
            torch.autograd.grad(nn.functional.linear(x, weight, layer.bias).sum(), [x, weight])


def _meet_nobody() -> None:
    """A group of one rank. The first that a process makes takes ten times as long as others."""
    with contextlib.suppress(RuntimeError):
        alone: Any = dist.ProcessGroupNCCL(HashStore(), 0, 1, dist.ProcessGroupNCCL.Options())
        alone.allreduce([torch.ones(1, device="cuda")]).wait()
        torch.cuda.synchronize()
        alone.abort()


def _reserve(optimizer: torch.optim.Optimizer) -> None:
    """Memory of a GPU for gradients and what an optimizer keeps of each parameter, so that it need not be asked for
    later. It goes back to torch, which has it then."""
    for group in optimizer.param_groups:
        kept = 2 if "betas" in group else 1 if group.get("momentum") else 0
        there = [each for each in group["params"] if each.is_cuda and each.requires_grad]
        with contextlib.suppress(torch.cuda.OutOfMemoryError):
            _ = [torch.empty_like(each) for each in there for _ in range(1 + kept)]
