"""Ranks agree on a step without asking at every step. Threads stand in for ranks; the store and its lines are real."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torch._C._distributed_c10d import TCPStore

from holdfast.checkpoint.appointments import Appointments
from holdfast.checkpoint.together import Together


@pytest.fixture
def store() -> Iterator[Any]:
    yield TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def on_all(size: int, store: Any, work: Callable[[Together], Any]) -> list[Any]:
    """What each rank's work comes to."""
    results: list[Any] = [None] * size

    def run(rank: int) -> None:
        try:
            results[rank] = work(Together(rank, size, store.clone(), "test"))
        except BaseException as failure:
            results[rank] = failure

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def test_alone_it_is_the_next_step() -> None:
    appointments = Appointments(Together(0, 1))
    assert appointments.at(5) == []
    appointments.ask("save")
    appointments.ask("save")
    assert appointments.at(6) == ["save"]
    assert appointments.at(7) == []
    appointments.ask("save")
    assert appointments.at(8) == ["save"]


@pytest.mark.parametrize("asker", [0, 2])
def test_all_ranks_do_it_at_the_same_step(store: Any, asker: int) -> None:
    """Without a collective between them ranks run far apart, and still none misses it."""
    size = 3

    def work(together: Together) -> list[tuple[int, str]]:
        appointments = Appointments(together)
        uneven = random.Random(together.rank)
        seen = []
        for step in range(1, 4000):
            if together.rank == asker and step == 10:
                appointments.ask("save")
            seen += [(step, what) for what in appointments.at(step)]
            if uneven.random() < 0.01:
                threading.Event().wait(0.001)  # the pace of training
        appointments.close()
        return seen

    first, *others = on_all(size, store, work)
    assert [what for _, what in first] == ["save"]
    assert all(other == first for other in others)


def test_several_wishes_are_kept_in_the_same_order(store: Any) -> None:
    def work(together: Together) -> list[tuple[int, str]]:
        appointments = Appointments(together)
        seen = []
        for step in range(1, 3000):
            if step == 5:
                appointments.ask("stop")  # every rank has heard of it by itself
            if step == 6 and together.rank == 1:
                appointments.ask("save")
            seen += [(step, what) for what in appointments.at(step)]
            if step % 50 == 0:
                together.tell(b"")
        appointments.close()
        return seen

    first, *others = on_all(2, store, work)
    assert {what for _, what in first} == {"stop", "save"}
    assert all(other == first for other in others)


def test_an_agreement_is_rank_0s_and_leaves_nothing_in_the_store(store: Any) -> None:
    before = store.num_keys()

    def work(together: Together) -> list[bytes]:
        answers = [together.agree(str(together.rank * n).encode(), max) for n in range(20)]
        together.vote("v", together.rank != 1)
        assert together.verdict("v", together.rank != 1) is False
        together.vote("w", True)
        assert together.verdict("w", True) is True
        return answers

    first, *others = on_all(4, store, work)
    assert all(other == first for other in others)
    assert first[3] == b"9"
    assert store.num_keys() == before
