"""What counts steps, and whether it is attached."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import SGD, Adam, Optimizer
from torch.optim import optimizer as optimizers
from torch.optim.lr_scheduler import ConstantLR, ReduceLROnPlateau, SequentialLR, StepLR

from holdfast.training import attached
from holdfast.worker import counters


@pytest.fixture(scope="module", autouse=True)
def installed() -> None:
    """For good: a class that has had a `__new__` of its own cannot be made as it was."""
    counters.wrap()


@pytest.fixture(autouse=True)
def noted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As in a rank."""
    monkeypatch.setattr(counters, "_on_schedule", None)
    monkeypatch.setattr(optimizers, "_global_optimizer_pre_hooks", OrderedDict())
    counters._made.clear()
    yield
    counters._made.clear()


class Bundle:
    """With a state of its own."""

    def __init__(self, *parts: Any) -> None:
        self.parts = {"all": list(parts)}

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def an_optimizer() -> Optimizer:
    return Adam(nn.Linear(1, 1).parameters())


def test_schedulers_and_scalers_that_are_left_out_are_named() -> None:
    optimizer = an_optimizer()
    assert attached.left_out([optimizer]) == ""
    scheduler = StepLR(optimizer, 1)
    assert attached.left_out([optimizer]) == (
        "StepLR is not attached, and would begin anew in a new rank; attach it, too"
    )
    assert attached.left_out([optimizer, scheduler]) == ""
    plateau = ReduceLROnPlateau(optimizer)  # which leaves out what it inherits
    assert attached.left_out([optimizer, scheduler]).startswith("ReduceLROnPlateau is not attached")
    off, on = GradScaler("cpu", enabled=False), GradScaler("cpu")
    known = [optimizer, scheduler, plateau]
    assert not off.is_enabled() and attached.left_out(known).startswith("GradScaler is not attached")
    assert attached.left_out([*known, on]) == ""


def test_what_nobody_has_any_more_is_not_left_out() -> None:
    optimizer = an_optimizer()
    scheduler: Any = StepLR(optimizer, 1)
    scheduler.itself = scheduler
    del scheduler
    assert attached.left_out([optimizer]) == ""


def test_one_that_is_made_of_others() -> None:
    optimizer = an_optimizer()
    whole = SequentialLR(optimizer, [ConstantLR(optimizer), StepLR(optimizer, 1)], [5])
    assert attached.left_out([optimizer]).startswith("SequentialLR"), "and not what it is made of"
    assert attached.left_out([optimizer, whole]) == ""
    assert attached.left_out([Bundle(optimizer, whole)]) == "", "an object is trusted with what it has"


def test_a_scheduler_keeps_nothing_of_its_optimizer() -> None:
    optimizer = an_optimizer()
    scheduler = StepLR(optimizer, 1)
    assert attached.within([scheduler]) == {id(scheduler): scheduler}
    assert attached.within([Bundle(scheduler)]) == {id(scheduler): scheduler}
    wrapper: Any = SGD(nn.Linear(1, 1).parameters())
    wrapper.inner = optimizer
    assert set(attached.within([wrapper])) == {id(wrapper), id(optimizer)}
    model: Any = nn.Linear(1, 1)
    model.optimizer = optimizer
    assert attached.within([model]) == {}, "it is not in a module's state"


def steps(optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def test_an_optimizer_that_is_not_attached_is_named_when_it_steps() -> None:
    mine, other = an_optimizer(), an_optimizer()
    said: list[str] = []
    attached.watch([mine], said.append)
    steps(mine)
    assert said == []
    steps(other)
    assert said == ["Adam steps and is not attached; a new rank would have an empty one; attach it, too"]


def test_a_scheduler_that_is_made_later_cannot_be_attached() -> None:
    optimizer = an_optimizer()
    said: list[str] = []
    attached.watch([optimizer], said.append)
    GradScaler("cpu", enabled=False)
    assert said == []
    StepLR(optimizer, 1)
    GradScaler("cpu")
    assert said == [
        f"{name} is made after run.attach(); make it before, and attach it, too" for name in ("StepLR", "GradScaler")
    ]
