"""The gradient of a step is that of the mean loss over the global batch, whatever ranks and units that is cut into."""

from __future__ import annotations

import functools
import io
import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree

from holdfast.training.gradients import Accumulated, Exact, Weights
from holdfast.training.units import Cut, Unit

sys.path.insert(0, str(Path(__file__).parents[1] / "exact"))

import leafworlds

WORLD = 3
BATCH = 16
# Samples of the global batch, and the micro batch: what divides nothing, two ranks of three without a sample, one
# without, several units of unequal size.
CASES = [(16, None), (13, None), (1, None), (5, None), (16, 2), (13, 3), (3, 1), (1, 2)]
GIVES = ["tensor", "tuple", "dict", "loss"]

Gradients = list[list[float]]


class Net(nn.Module):
    """Gives what models commonly give."""

    def __init__(self, gives: str) -> None:
        super().__init__()
        self.gives = gives
        self.body = nn.Sequential(nn.Linear(4, 7), nn.Tanh())
        self.head = nn.Linear(7, 2)

    def forward(self, x: torch.Tensor) -> Any:
        y = self.head(self.body(x))
        if self.gives == "loss":
            return y.square().sum(1).mean()
        return {"tensor": y, "tuple": (y, "more"), "dict": {"y": y, "more": None}}[self.gives]


def loss_of(output: Any, gives: str) -> torch.Tensor:
    if gives == "loss":
        return torch.as_tensor(output)
    y = {"tensor": lambda: output, "tuple": lambda: output[0], "dict": lambda: output["y"]}[gives]()
    return torch.as_tensor(y).square().sum(1).mean()


def samples(begin: int, end: int) -> torch.Tensor:
    return torch.stack([torch.sin(torch.arange(4) * float(at + 1)) for at in range(begin, end)])


def made(gives: str = "tensor") -> Net:
    torch.manual_seed(5)
    return Net(gives)


def gradients(module: nn.Module) -> Gradients:
    found = []
    for parameter in module.parameters():
        assert parameter.grad is not None
        full = getattr(parameter.grad, "full_tensor", lambda grad=parameter.grad: grad)()
        found.append(full.flatten().tolist())
    return found


def alone(count: int) -> Gradients:
    """In one process, in one go."""
    model = made()
    loss_of(model(samples(0, count)), "tensor").backward()  # type: ignore[no-untyped-call]
    return gradients(model)


def check_same(found: Gradients, expected: Gradients) -> None:
    for mine, right in zip(found, expected, strict=True):
        torch.testing.assert_close(torch.tensor(mine), torch.tensor(right), rtol=1e-6, atol=1e-7)


def wrapped(model: nn.Module, kind: str) -> nn.Module:
    if kind == "ddp":
        return DistributedDataParallel(model)
    for part in (model.get_submodule("body"), model):
        fully_shard(part)
    return model


def cut_of(micro: int | None = None, leaves: int | None = None) -> Cut:
    return Cut(BATCH, dist.get_rank(), dist.get_world_size(), micro, leaves)


def steps(kind: str) -> list[Gradients]:
    """On one rank: one model through all cases, as in a training."""
    torch.manual_seed(5)
    found = []
    for gives, accumulates in itertools.product(GIVES, (False, True)):
        model = wrapped(made(gives), kind)
        weights = Weights([model], Accumulated([model], lambda unit: False) if accumulates else None)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        for count, micro in CASES:
            if (micro is not None) != accumulates:
                continue
            for unit in cut_of(micro).units(0, count):
                weights.begin(unit)
                loss_of(model(samples(unit.begin, unit.end)), gives).backward()  # type: ignore[no-untyped-call]
                if unit.is_last:
                    found.append(gradients(model))
                elif kind == "ddp":
                    assert all(parameter.grad is None for parameter in model.parameters())
                optimizer.step()
                optimizer.zero_grad()
        weights.close()
    return found


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_the_gradient_is_that_of_the_global_mean(kind: str) -> None:
    expected = {count: alone(count) for count, _ in CASES}
    cases = [
        (gives, count, micro)
        for gives, accumulates in itertools.product(GIVES, (False, True))
        for count, micro in CASES
        if (micro is not None) == accumulates
    ]
    for found in leafworlds.run(WORLD, functools.partial(steps, kind)):
        assert len(found) == len(cases)
        for (gives, count, micro), one in zip(cases, found, strict=True):
            try:
                check_same(one, expected[count])
            except AssertionError as failure:
                raise AssertionError(f"{kind}, a {gives}, {count} samples, micro {micro}: {failure}") from None


# -- a step in two halves ---------------------------------------------------------------------------------------------


def half(kind: str, exact: bool, done: int, state: bytes | None) -> Any:
    """Up to the unit that is kept, and what there is then; or on from there, and the gradients."""
    model = wrapped(made(), kind)
    cut = Cut(64, dist.get_rank(), dist.get_world_size(), None if exact else 3, 64 if exact else None)
    halves: list[int] = []

    def keeps(unit: Unit) -> bool:
        return state is None and unit.closes and unit.done >= 24 and not halves

    sums = Exact([model], seed=0) if exact else Accumulated([model], keeps)
    weights = Weights([model], sums)
    if isinstance(sums, Exact):
        sums.step, sums.count = 5, cut.leaf_count(64)
    if state is not None:
        assert cut.can_go_on(64, done)
        sums.go_on(5, cut.leaf_count(64), torch.load(io.BytesIO(state)))
    for unit in cut.units(0, 64, done):
        weights.begin(unit)
        loss_of(model(samples(unit.begin, unit.end)), "tensor").backward()  # type: ignore[no-untyped-call]
        if keeps(unit):
            halves.append(unit.done)
            whole = pytree.tree_map(lambda one: getattr(one, "full_tensor", lambda: one)(), sums.so_far())
            torch.save(whole, packed := io.BytesIO())  # a tensor would be in memory that the processes share
            return unit.done, packed.getvalue()
    return gradients(model)


@pytest.mark.parametrize(("kind", "exact"), [("ddp", False), ("fsdp", False), ("ddp", True)])
def test_what_one_world_has_begun_another_one_ends(kind: str, exact: bool) -> None:
    parts = leafworlds.run(3 if not exact else 2, functools.partial(half, kind, exact, 0, None))
    done, state = parts[0]
    assert 24 <= done < 64 and all(part[0] == done for part in parts)
    assert all(part[1] == state for part in parts)  # the same on all ranks
    torch.save({"sums": {}, "firsts": []} if exact else {}, nothing := io.BytesIO())
    [right] = leafworlds.run(1, functools.partial(half, "ddp", exact, 0, nothing.getvalue()))
    for ranks in (1, 2):
        for found in leafworlds.run(ranks, functools.partial(half, kind, exact, done, state)):
            if exact:
                assert found == right
            else:
                check_same(found, right)


# -- several modules -------------------------------------------------------------------------------------------------


def chained() -> list[Gradients]:
    """The output of one module is the input of another, and of the loss; and a part of one is named by itself."""
    found = []
    for named_twice in (False, True):
        model = made()
        body, head = DistributedDataParallel(model.body), DistributedDataParallel(model.head)
        weights = Weights([body, head, *([model.body[0]] if named_twice else [])], None)
        for count in (13, 1):
            [unit] = cut_of().units(0, count)
            weights.begin(unit)
            hidden = body(samples(unit.begin, unit.end))
            (head(input=hidden).square().sum(1).mean() + hidden.mean()).backward()
            found.append(gradients(model))
            model.zero_grad()
        weights.close()
    return found


def test_what_goes_through_two_modules_is_weighted_once() -> None:
    expected = []
    for count in (13, 1):
        model = made()
        hidden = model.body(samples(0, count))
        (model.head(hidden).square().sum(1).mean() + hidden.mean()).backward()
        expected.append(gradients(model))
    for found in leafworlds.run(WORLD, chained):
        for one, right in zip(found, expected * 2, strict=True):
            check_same(one, right)


# -- rules -------------------------------------------------------------------------------------------------------------


def twice(sums: Callable[[nn.Module], Any], cut: Cut) -> str:
    model = made()
    summed = sums(model)
    weights = Weights([model], summed)
    unit = cut.units(0, 13)[0]
    if isinstance(summed, Exact):
        summed.step, summed.count = 1, cut.leaf_count(13)
    weights.begin(unit)
    x = samples(unit.begin, unit.end)
    model(x).sum().backward()
    with pytest.raises(RuntimeError) as raised:
        model(x).mean().backward()
    if isinstance(summed, Exact):
        summed.step = 2
    weights.begin(unit)  # nothing is left over from it
    model(x).sum().backward()
    weights.close()
    return str(raised.value)


@pytest.mark.parametrize(
    ("sums", "cut"),
    [
        (lambda model: Accumulated([model], lambda unit: False), Cut(BATCH, 0, 1, 4)),
        (lambda model: Exact([model], seed=0), Cut(BATCH, 0, 1, None, 8)),
    ],
    ids=["micro", "exact"],
)
def test_a_second_backward_of_a_unit_is_refused(sums: Callable[[nn.Module], Any], cut: Cut) -> None:
    said = twice(sums, cut)
    assert said.startswith("backward() was called twice for one batch") and "add the losses up" in said


def test_without_units_backward_may_be_called_as_often_as_one_likes() -> None:
    model = made()
    weights = Weights([model], None)
    weights.begin(Cut(BATCH, 0, 2).units(0, 13)[0])
    y = model(samples(0, 7))
    y[:, 0].square().mean().backward(retain_graph=True)
    y[:, 1].square().mean().backward()
    found = gradients(model)
    again = made()
    loss_of(again(samples(0, 7)), "tensor").backward()  # type: ignore[no-untyped-call]
    check_same(found, [[value * 14 / 13 for value in one] for one in gradients(again)])
    weights.close()


def clipped() -> tuple[list[float], Gradients]:
    """The norm that clipping finds at each unit of an exact step, and what it leaves."""
    model = DistributedDataParallel(made())
    exact = Exact([model], seed=0)
    weights = Weights([model], exact)
    exact.step, exact.count = 1, cut_of(leaves=8).leaf_count(13)
    norms = []
    for unit in cut_of(leaves=8).units(0, 13):
        weights.begin(unit)
        model(samples(unit.begin, unit.end)).square().sum(1).mean().backward()
        assert all((parameter.grad is None) is not unit.is_last for parameter in model.parameters())
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.1)))
    weights.close()
    return norms, gradients(model)


def test_clipping_in_exact_mode_sees_the_combined_gradient() -> None:
    expected = torch.cat([torch.tensor(one) for one in alone(13)])
    norm = float(expected.norm())
    assert norm > 0.1
    for norms, left in leafworlds.run(WORLD, clipped):
        assert norms[-1] == pytest.approx(norm, rel=1e-6) and not any(norms[:-1])
        found = torch.cat([torch.tensor(one) for one in left])
        torch.testing.assert_close(found, expected * (0.1 / norm), rtol=1e-4, atol=1e-7)
