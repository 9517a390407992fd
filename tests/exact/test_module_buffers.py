"""Buffers start each leaf as the step began, and end as the leaves' mean."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from holdfast.exact.buffers import Flat
from holdfast.exact.modules import Buffers
from holdfast.exact.trees import Sums

INF = float("inf")


class Odd(nn.Module):
    """One buffer changed in place, one replaced, some never changed, one that is only a cache."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(3))
        self.register_buffer("least", torch.tensor([INF]))
        self.register_buffer("fixed", torch.tensor([0.1, 1e30, -INF, 3e-42]))
        self.register_buffer("calls", torch.tensor(0))
        self.register_buffer("nothing", None)
        self.register_buffer("cache", torch.zeros(1), persistent=False)

    def forward(self, x: torch.Tensor) -> None:
        self.get_buffer("seen").add_(x)
        self.least = torch.minimum(self.get_buffer("least"), x.min())
        self.calls = self.get_buffer("calls") + 1
        self.get_buffer("cache").add_(1)


def step(module: nn.Module, inputs: list[Any]) -> None:
    buffers, sums = Buffers(module), Sums()
    flat = Flat(buffers.floating)
    buffers.begin_step()
    sums.begin(len(inputs))
    for leaf, x in enumerate(inputs):
        buffers.begin_leaf()
        module(x)
        sums.add(leaf, flat.gather(buffers.after_leaf(leaf), sums.spare()))
    [(_, total)] = sums.partials()
    buffers.finish(flat.views(total), len(inputs))


def test_buffers_are_the_mean_of_the_leaves_and_constants_stay() -> None:
    module = Odd()
    held = module.get_buffer("seen")
    fixed = module.get_buffer("fixed").clone()
    inputs = [torch.tensor([1.0, 2.0, 0.0]), torch.tensor([3.0, 2.0, 6.0]), torch.tensor([5.0, 5.0, 3.0])]
    step(module, inputs)
    assert module.get_buffer("seen").tolist() == [3.0, 3.0, 3.0] and module.get_buffer("seen") is held
    assert module.get_buffer("least").item() == pytest.approx((0 + 2 + 3) / 3)
    assert module.get_buffer("calls").item() == 1 and module.get_buffer("cache").item() == 3
    for _ in range(20):
        step(module, inputs)
    assert torch.equal(module.get_buffer("fixed"), fixed)
    assert module.get_buffer("calls").item() == 21


def test_running_statistics_are_those_of_the_whole_batch() -> None:
    torch.manual_seed(0)
    leaves = [torch.randn(4, 3) for _ in range(5)]
    module, whole = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    step(module, leaves)
    whole(torch.cat(leaves))
    assert module.running_mean is not None and whole.running_mean is not None
    torch.testing.assert_close(module.running_mean, whole.running_mean)
    assert module.num_batches_tracked is not None and module.num_batches_tracked.item() == 1


def test_a_module_without_buffers_has_nothing_to_do() -> None:
    module = nn.Linear(2, 2)
    step(module, [torch.randn(1, 2)] * 2)
    assert Buffers(module).floating == [] and Buffers(module).firsts == []


def test_a_buffer_that_grows_is_refused_by_name() -> None:
    module = Odd()
    buffers = Buffers(module)
    buffers.begin_step()
    buffers.begin_leaf()
    module.seen = torch.zeros(4)
    with pytest.raises(ValueError, match=r"buffer 'seen' of Odd is no longer of shape \(3,\)"):
        buffers.after_leaf(0)
