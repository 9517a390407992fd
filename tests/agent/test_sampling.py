"""What is written of the ranks' progress: real areas, written as ranks do, and a real loop."""

from __future__ import annotations

import asyncio
import os

import msgspec
import pytest

from holdfast.agent import pages, sampling
from holdfast.agent.sampling import Sampler
from holdfast.control.stragglers import SECTION, STEP, Window
from holdfast.observe.events import Event, EventLog
from holdfast.observe.record import Progress
from holdfast.worker.beacon import OWN_S, OWN_STEPS, SECTION_S, Beacon

GENERATION, FIRST_RANK = 3, 8


def look_twice(steps: int, **taken_s: tuple[float, ...]) -> tuple[dict[str, object], list[Window]]:
    """What is noted of ranks that do so many steps between two looks, and the windows that are told then."""
    ranks = len(next(iter(taken_s.values())))
    noted: list[Event] = []
    told: list[tuple[int, Window]] = []
    fd, areas = pages.make(ranks, b"")
    beacons = [Beacon(fd, slot, GENERATION) for slot in range(ranks)]

    async def scene() -> None:
        looked = asyncio.Event()

        def heard(event: Event) -> None:
            noted.append(event)
            looked.set()

        log = EventLog(None, [heard], print)
        sampler = Sampler(asyncio.get_running_loop(), log, lambda generation, window: told.append((generation, window)))
        for beacon in beacons:
            beacon.step_done()
        sampler.begin(GENERATION, FIRST_RANK, areas)
        await looked.wait()
        told.clear()
        for slot, beacon in enumerate(beacons):
            for field, each_s in taken_s.items():
                beacon.times[{"own": OWN_S, "sections": SECTION_S}[field]] += steps * each_s[slot]
            beacon.words[OWN_STEPS] += steps
            for _ in range(steps):
                beacon.step_done()
        sampler.end()

    asyncio.run(scene())
    os.close(fd)
    assert {generation for generation, _ in told} <= {GENERATION}
    return noted[-1].data, [window for _, window in told]


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "FIRST_S", 0.01)


def test_what_ranks_need_for_themselves_and_in_sections_is_noted_and_compared_for_each() -> None:
    noted, told = look_twice(4, own=(0.5, 0.25, 0.25), sections=(0.125, 0.125, 0.75))
    assert noted["own_us"] == (500_000, 250_000, 250_000) and noted["section_us"] == (125_000, 125_000, 750_000)
    assert [(window.by, window.slowest[0], window.others_s) for window in told] == [
        (STEP, (FIRST_RANK, 0.5), 0.25),
        (SECTION, (FIRST_RANK + 2, 0.75), 0.125),
    ]


def test_of_ranks_without_sections_nothing_is_written_of_them() -> None:
    noted, told = look_twice(2, own=(0.5, 0.25))
    assert "section_us" not in noted
    assert [window.by for window in told] == [STEP]
    older = msgspec.convert(noted, Progress)
    assert not older.section_us and older.steps == (3,)
