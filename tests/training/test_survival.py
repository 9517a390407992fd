"""Whether an optimizer may step where gradients come later than backward() returns, as with NCCL."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from holdfast.training.survival import Survival


def a_rank(monkeypatch: pytest.MonkeyPatch, when_waited_for: str) -> Any:
    """One that waits for its GPU; by then its world may be over, and the collective aborted."""
    rank: Any = Survival.__new__(Survival)
    rank._queues, rank.doomed, rank._seat = True, False, SimpleNamespace(over="")

    def synchronize() -> None:
        rank._seat.over = when_waited_for

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(synchronize=synchronize))
    return rank


def test_gradients_that_are_there_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = a_rank(monkeypatch, "")
    assert rank.may_step() and not rank.doomed


def test_those_of_a_collective_that_was_aborted_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = a_rank(monkeypatch, "rank 1 failed")
    assert not rank.may_step() and rank.doomed


def test_where_backward_returns_with_them_nothing_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = a_rank(monkeypatch, "never seen")
    rank._queues = False
    assert rank.may_step() and rank._seat.over == ""
