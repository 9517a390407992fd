"""A state that is left in memory by a rank that cannot leave its world."""

from __future__ import annotations

import os
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from holdfast.training import wills
from holdfast.training.handover import UNFIT, Offer
from holdfast.training.stuck import Look
from holdfast.training.survival import Survival
from holdfast.training.worlds import Worlds
from holdfast.wire import messages

MINE = Offer(generation=3, step=7, term=1, world_size=2)


def a_state(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = nn.Linear(5, 3)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(4, 5)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


def values(state: dict[str, Any]) -> list[torch.Tensor]:
    moments = [value for each in state["optimizer"].state_dict()["state"].values() for value in each.values()]
    return [each.detach().clone() for each in (*state["model"].parameters(), *moments)]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


def read(fd: int, state: dict[str, Any]) -> wills.Will | None:
    try:
        return wills.read(f"/proc/self/fd/{fd}", state)
    finally:
        os.close(fd)


def test_whoever_reads_it_has_the_same_bits() -> None:
    one, other = a_state(1), a_state(2)
    assert not same(values(one), values(other))
    found = read(wills.write(one, MINE, {"torch": "abc"}, {}), other)
    assert found is not None and (found.offer, found.randomness) == (MINE, {"torch": "abc"})
    assert same(values(one), values(other))


def test_what_the_step_has_changed_already_is_left_as_it_was_before() -> None:
    one, other = a_state(1), a_state(2)
    weight = one["model"].weight
    before = weight.detach().clone()
    with torch.no_grad():
        weight.add_(1)
    read(wills.write(one, MINE, {}, {weight.data_ptr(): before}), other)
    assert torch.equal(other["model"].weight, before)


def test_one_that_is_gone_changes_nothing() -> None:
    state = a_state(1)
    before = values(state)
    assert wills.read("/proc/self/fd/1000000", state) is None
    assert same(values(state), before)


# -- when it is left ---------------------------------------------------------------------------------------------------


def worlds(monkeypatch: pytest.MonkeyPatch, *offers: Offer) -> Any:
    """Of a rank that has these, one after the other."""
    made: Any = Worlds.__new__(Worlds)
    made._state = a_state(1)
    made.survival = SimpleNamespace(mark=None, randomness={})
    left = list(offers)
    monkeypatch.setattr(Worlds, "_offer", lambda self: left.pop(0))
    return made


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_whole_state_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    fd, step = worlds(monkeypatch, MINE, MINE)._bequeath()
    other = a_state(2)
    found = read(fd, other)
    assert found is not None and (found.offer, step) == (MINE, 7)


@pytest.mark.parametrize(
    "now", [Offer(generation=3, step=8, term=1, world_size=2), UNFIT], ids=["a step on", "in the middle of one"]
)
def test_one_that_has_changed_while_it_was_written_is_thrown_away(monkeypatch: pytest.MonkeyPatch, now: Offer) -> None:
    """The training's thread may have gone on. Half of it would be of one step, and half of the next."""
    before = open_files()
    assert worlds(monkeypatch, MINE, now)._bequeath() is None
    assert open_files() == before


def test_who_has_no_whole_state_leaves_none(monkeypatch: pytest.MonkeyPatch) -> None:
    before = open_files()
    assert worlds(monkeypatch, UNFIT)._bequeath() is None
    assert open_files() == before


# -- a rank leaves its world, or its state; not both -------------------------------------------------------------------


class Rank:
    """One that is late, in a world that is over. `report` is what the agent hears."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.heard: list[messages.Report] = []
        self.survival: Any = Survival.__new__(Survival)
        here = SimpleNamespace(rank=1, generation=3, report=self.heard.append)
        seat = SimpleNamespace(left=lambda: None)
        for name, value in {
            "_place": here, "_seat": seat, "_leaves": threading.Lock(), "_left": -1, "_gave_up": False, "_joins": False,
            "_watch": SimpleNamespace(look=lambda collectives: Look(late=False, stuck=True)), "_modules": [],
            "_beside": SimpleNamespace(possible=False),
            "hooks": {"abort": [], "aborted": [], "health": [], "rejoin": []},
        }.items():  # fmt: skip
            setattr(self.survival, name, value)
        monkeypatch.setattr("holdfast.training.survival.groups.abort", lambda **_: None)
        monkeypatch.setattr("holdfast.training.survival.groups.leave", lambda: None)

    @property
    def kinds(self) -> list[type]:
        return [type(each) for each in self.heard]


def test_one_that_gets_out_while_its_state_is_written_leaves_its_world(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(monkeypatch)
    before = open_files()

    def bequeath() -> tuple[int, int]:
        fd = os.memfd_create("will")
        rank.survival.leave()
        return fd, 7

    rank.survival.bequeath = bequeath
    rank.survival._is_late()
    assert rank.kinds == [messages.Left]
    assert open_files() == before


def test_one_whose_state_is_left_says_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its place is somebody else's from then on. It waits for its end."""
    rank = Rank(monkeypatch)
    fd = os.memfd_create("will")
    rank.survival.bequeath = lambda: (fd, 7)
    rank.survival._is_late()
    assert rank.heard == [messages.Bequeathed(1, 3, fd, 7)]
    rank.survival._is_late()
    assert len(rank.heard) == 1, "once"
    gets_out = threading.Thread(target=rank.survival.leave, daemon=True)
    gets_out.start()
    gets_out.join(0.2)
    assert gets_out.is_alive() and len(rank.heard) == 1
    os.close(fd)
