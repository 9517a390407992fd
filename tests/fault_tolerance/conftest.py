"""Fixtures for the tests of what runs inside a rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from fault_tolerance.pages import Rank, a_rank
from holdfast.agent.options import Options
from holdfast.fault_tolerance import FaultToleranceConfig
from holdfast.wire.messages import Command

MakeRank = Callable[..., Rank]


@pytest.fixture
def make_rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeRank]:
    """Makes this process a rank with that configuration."""
    with ExitStack() as stack:

        def make(learned: str = "", **config: Any) -> Rank:
            options = Options(program=Command(()), ft=FaultToleranceConfig(**config))
            given = options.ranks_config(learned) if config or learned else b""
            return stack.enter_context(a_rank(monkeypatch, given))

        yield make


@pytest.fixture
def rank(make_rank: MakeRank) -> Rank:
    return make_rank()
