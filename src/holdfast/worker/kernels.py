"""A GPU's code is loaded when it is first used, which takes longer than a step. Here it is used beforehand."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

import torch
from torch import nn
from torch.nn import functional
from torch.nn.modules.module import register_module_parameter_registration_hook

WIDTH, HEADS, LENGTH = 256, (128, 64), 128

_enough = threading.Event()

Loss = tuple[Callable[[], torch.Tensor], list[torch.Tensor]]  # how to compute it, and from what


def load_with_first_parameter() -> None:
    """As soon as the program has a parameter on a GPU, in another thread while it goes on."""
    seen: list[nn.Parameter] = []

    def registered(_: nn.Module, __: str, parameter: nn.Parameter | None) -> None:
        if not seen and parameter is not None and parameter.is_cuda and parameter.is_floating_point():
            seen.append(parameter)
            kind = parameter.device, parameter.dtype, _enough.is_set
            threading.Thread(target=compute, args=kind, name="holdfast-kernels", daemon=True).start()

    register_module_parameter_registration_hook(registered)


def enough() -> None:
    """The program is about to compute, and loads what it needs sooner alone than beside what it may not need."""
    _enough.set()


def compute(device: torch.device, dtype: torch.dtype, enough: Callable[[], bool] = lambda: False) -> None:
    """What most models are made of, forward and backward, each by itself: a device or a setting may refuse some.
    Nothing is drawn at random, as the program may do in this moment."""
    for loss, leaves in _losses(device, dtype):
        if enough():
            return
        with contextlib.suppress(Exception):
            torch.autograd.grad(loss(), leaves, allow_unused=True)
    if device.type == "cuda":
        with contextlib.suppress(Exception):
            moved = [torch.ones(WIDTH, device=device, dtype=dtype)]
            torch._foreach_lerp_(moved, moved, 0.1)
            torch._foreach_addcdiv_(moved, moved, torch._foreach_sqrt(moved), value=0.0)


def _losses(device: torch.device, dtype: torch.dtype) -> Iterator[Loss]:
    def ones(*shape: int) -> torch.Tensor:
        return torch.ones(shape, device=device, dtype=dtype, requires_grad=True)

    x, weight, bias = ones(LENGTH, WIDTH), ones(WIDTH, WIDTH), ones(WIDTH)
    yield lambda: functional.gelu(functional.linear(x, weight, bias)).sum(), [x, weight, bias]
    yield lambda: functional.layer_norm(x, (WIDTH,), bias, bias).mean(), [x, bias]
    if device.type == "cuda":
        classes = torch.zeros(LENGTH, dtype=torch.long, device=device)
        yield lambda: functional.cross_entropy(functional.embedding(classes, weight), classes), [weight]
        queries = [ones(1, 2, LENGTH, head) for head in HEADS]
        attend = functional.scaled_dot_product_attention
        yield lambda: sum((attend(each, each, each, is_causal=True).sum() for each in queries), x.sum()), queries
    yield lambda: functional.mse_loss(functional.silu(x), x.detach()), [x]
