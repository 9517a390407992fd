"""What a rank hears by its seat."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from holdfast.wire import channel, messages
from holdfast.worker.seat import Seat

Agent = channel.Channel[messages.Report]


@pytest.fixture
def agent_and_seat() -> Iterator[tuple[Agent, Seat]]:
    ours, theirs = channel.pair()
    agent: Agent = channel.Channel(ours, messages.Report)
    seat = Seat(theirs.detach())
    over = threading.Event()
    seat.watch(3, lambda steps: over.set(), lambda: None)
    yield agent, seat
    agent.close()


@pytest.mark.parametrize("boundary", [False, True])
def test_a_rank_whose_collective_failed_hears_that_its_world_is_over(
    agent_and_seat: tuple[Agent, Seat], boundary: bool
) -> None:
    """Also where all were asked to leave after the same step: the others have, and were faster."""
    agent, seat = agent_and_seat
    agent.send(messages.Leave(2, "of an earlier world", False, 0))
    agent.send(messages.Leave(3, "a node joined", boundary, 7))
    waits = threading.Thread(target=seat.wait_until_over, daemon=True)
    waits.start()
    waits.join(10)
    assert not waits.is_alive() and seat.over == "a node joined"
    seat.left()


def test_until_it_is_asked_a_rank_goes_on(agent_and_seat: tuple[Agent, Seat]) -> None:
    agent, seat = agent_and_seat
    waits = threading.Thread(target=seat.leave_at_boundary, daemon=True)
    waits.start()
    waits.join(0.05)
    assert waits.is_alive()
    agent.send(messages.Leave(3, "a node joined", True, 0))
    waits.join(10)
    assert not waits.is_alive() and seat.over == "a node joined"
