"""Beacons: what a rank writes into its area the agent reads, and the other way round; nonsense is not believed."""

from __future__ import annotations

import math
import os
import random
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from holdfast.agent import pages
from holdfast.agent.pages import Corrupt, Page
from holdfast.control.hangs import Section, Vitals
from holdfast.worker import beacon
from holdfast.worker.beacon import AREA_BYTES, MAX_SECTIONS, SECTIONS, Beacon, Phase


@pytest.fixture
def pages_fd() -> Iterator[int]:
    fd = beacon.make(ranks=3)
    yield fd
    os.close(fd)


def read(page: Page, generation: int = 0) -> Vitals:
    vitals = page.read(time.monotonic(), generation)
    assert vitals is not None
    return vitals


def test_a_world_has_an_area_for_each_rank(pages_fd: int) -> None:
    assert os.fstat(pages_fd).st_size == 3 * AREA_BYTES
    assert os.fstat(pages_fd).st_blocks == 0  # memory is taken only for what is written


def test_an_area_that_nobody_has_written_has_no_steps(pages_fd: int) -> None:
    page = Page(pages_fd, 1)
    assert (page.written, page.steps, page.last_step_s, page.base) == (False, None, 0.0, 0)
    assert page.read(time.monotonic(), 0) is None


def test_an_area_is_read_while_its_rank_steps(pages_fd: int) -> None:
    rank, page = Beacon(pages_fd, 0, generation=2), Page(pages_fd, 0)
    assert page.steps == 0
    assert [rank.step_done() for _ in range(3)] == [1, 2, 3]
    assert page.steps == 3
    rank.step_done()
    assert (page.steps, read(page, 2).steps) == (4, 4)


def test_the_time_of_the_last_step_is_on_this_machines_clock(pages_fd: int) -> None:
    rank, page = Beacon(pages_fd, 0, generation=0), Page(pages_fd, 0)
    before_s = time.monotonic()
    rank.step_done()
    first_s = page.last_step_s
    rank.step_done()
    assert before_s <= first_s <= page.last_step_s == read(page).alive_s <= time.monotonic()


def test_ranks_do_not_touch_each_others_areas(pages_fd: int) -> None:
    Beacon(pages_fd, 0, generation=0).step_done()
    last = Beacon(pages_fd, 2, generation=0)
    last.step_done()
    last.step_done()
    assert [Page(pages_fd, slot).steps for slot in range(3)] == [1, None, 2]


def test_what_all_ranks_are_to_read() -> None:
    fd, _ = pages.make(3, b"{config}")
    assert [Beacon(fd, slot, generation=0).config for slot in range(3)] == [b"{config}"] * 3
    os.close(fd)
    fd, _ = pages.make(1, b"")
    assert Beacon(fd, 0, generation=0).config == b""
    os.close(fd)


# -- phases -----------------------------------------------------------------------------------------------------------


def test_the_longest_gap_of_each_phase_is_kept(pages_fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    rank, page = Beacon(pages_fd, 0, generation=0), Page(pages_fd, 0)
    clock.passes(7)
    rank.step_done()
    for gap_s in (1, 3, 2):
        clock.passes(gap_s)
        rank.step_done()
    clock.passes(0.5)
    rank.enter(Phase.EVALUATING)
    clock.passes(20)
    rank.step_done()
    rank.enter(Phase.SAVING)
    clock.passes(9)
    rank.leave(Phase.SAVING, Phase.TRAINING)
    clock.passes(4)
    rank.step_done()
    vitals = page.read(clock.now_s, 0)
    assert vitals is not None
    assert vitals.gaps_s == (7, 4, 20, 9)
    assert (vitals.phase, vitals.steps, vitals.alive_s) == (Phase.TRAINING, 6, clock.now_s)
    assert page.phase == (Phase.TRAINING, clock.now_s, clock.now_s - 4)


def test_a_save_within_an_evaluation_goes_back_to_it(pages_fd: int) -> None:
    rank, page = Beacon(pages_fd, 0, generation=0), Page(pages_fd, 0)
    assert read(page).phase == Phase.STARTING
    rank.step_done()
    rank.enter(Phase.EVALUATING)
    rank.enter(Phase.SAVING)
    assert read(page).phase == Phase.SAVING
    rank.leave(Phase.SAVING, Phase.EVALUATING)
    assert read(page).phase == Phase.EVALUATING
    rank.step_done()
    assert read(page).phase == Phase.TRAINING
    rank.enter(Phase.ENDING)
    rank.step_done()  # in a handler at exit, say
    assert read(page).gaps_s[0] > 0


class Clock:
    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now_s = 1000.0
        patch.setattr("holdfast.worker.beacon.time.monotonic", lambda: self.now_s)

    def passes(self, by_s: float) -> None:
        self.now_s += by_s


# -- waking the agent -------------------------------------------------------------------------------------------------


def test_a_rank_pokes_only_where_the_agent_would_look_too_late(pages_fd: int) -> None:
    pokes: list[int] = []
    page = Page(pages_fd, 0)
    rank = Beacon(pages_fd, 0, 0, lambda: pokes.append(1))
    page.say_limits((math.inf, 30.0, 60.0, 3600.0, 3600.0))
    page.say_wake(math.inf)
    rank.step_done()
    assert len(pokes) == 1  # now steps have a limit
    page.say_wake(time.monotonic() + 30)
    for _ in range(1000):
        rank.step_done()
    rank.enter(Phase.EVALUATING)
    rank.enter(Phase.SAVING)
    assert len(pokes) == 1
    rank.leave(Phase.SAVING, Phase.EVALUATING)
    assert len(pokes) == 2  # now saves have a limit
    rank.enter(Phase.SAVING)
    rank.leave(Phase.SAVING, Phase.EVALUATING)
    assert len(pokes) == 2
    page.say_wake(time.monotonic() + 3600)
    rank.enter(Phase.TRAINING)
    assert len(pokes) == 3
    rank.poke_if_due(time.monotonic() + 3590)
    rank.poke_if_due(time.monotonic() + 3610)
    assert len(pokes) == 4
    rank.poke_if_due(math.inf)
    rank.poke_if_due(math.nan)
    assert len(pokes) == 4


def test_nobody_pokes_an_agent_that_never_said_when_it_looks(pages_fd: int) -> None:
    pokes: list[int] = []
    rank = Beacon(pages_fd, 0, 0, lambda: pokes.append(1))
    rank.step_done()
    rank.enter(Phase.SAVING)
    assert pokes == []


def test_the_agent_sees_whether_the_rank_has_gone_on(pages_fd: int) -> None:
    rank, page = Beacon(pages_fd, 0, generation=0), Page(pages_fd, 0)
    read(page)
    page.say_wake(1.0)
    page.say_limits((1.0,) * 5)
    page.lease(1.0)
    assert page.is_as_read()
    rank.step_done()
    assert not page.is_as_read()
    read(page)
    assert page.is_as_read()
    rank.words[beacon.KNOWN] = rank.words[beacon.OPEN] = 1
    read(page)
    assert not page.is_as_read()  # sections are elsewhere, so with one open nobody can tell


# -- the order of writes ----------------------------------------------------------------------------------------------


class Recorded:
    """A field's name for each write to it."""

    def __init__(self, inner: Any, log: list[int]) -> None:
        self._inner, self._log = inner, log

    def __getitem__(self, index: int) -> Any:
        return self._inner[index]

    def __setitem__(self, index: int, value: Any) -> None:
        self._log.append(index)
        self._inner[index] = value


@pytest.mark.parametrize(
    "act",
    [
        lambda rank: rank.step_done(),
        lambda rank: rank.enter(Phase.SAVING),
        lambda rank: rank.leave(Phase.STARTING, Phase.TRAINING),
    ],
    ids=["a step", "a phase begins", "a phase ends"],
)
def test_a_time_is_written_before_its_phase(pages_fd: int, act: Callable[[Beacon], None]) -> None:
    rank, log = Beacon(pages_fd, 0, generation=0), list[int]()
    rank.words = Recorded(rank.words, log)  # type: ignore[assignment]
    rank.times = Recorded(rank.times, log)  # type: ignore[assignment]
    act(rank)
    assert log.index(beacon.PHASE_AT) < log.index(beacon.PHASE)
    assert log.count(beacon.PHASE) == 1


def test_a_rank_that_has_begun_to_write_its_marks_is_not_there_yet(pages_fd: int) -> None:
    """The agent may look between the two, and what it takes for corrupt it never looks at again."""
    Beacon(pages_fd, 0, generation=0)
    os.pwrite(pages_fd, bytes(8), 8 * beacon.MAGIC)  # which is written last
    assert Page(pages_fd, 0).read(time.monotonic(), 0) is None


def test_whatever_a_rank_is_at_its_area_makes_sense(pages_fd: int) -> None:
    writes = """
import os, sys
from holdfast.worker.beacon import Beacon, Phase
beacon = Beacon(int(sys.argv[1]), 0, 3)
print(flush=True)
while os.getppid() == int(sys.argv[2]):
    beacon.step_done()
    beacon.enter(Phase.EVALUATING)
    beacon.enter(Phase.SAVING)
    beacon.leave(Phase.SAVING, Phase.TRAINING)
"""
    command = [sys.executable, "-c", writes, str(pages_fd), str(os.getpid())]
    page = Page(pages_fd, 0)
    with subprocess.Popen(command, pass_fds=[pages_fd], stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        writer.stdout.readline()
        last = read(page, 3)
        phases = set()
        for _ in range(20_000):
            now = read(page, 3)
            phases.add(now.phase)
            assert now.steps >= last.steps
            assert now.alive_s >= last.alive_s
            last = now
        writer.kill()
    assert last.steps > 100
    assert phases <= {Phase.TRAINING, Phase.EVALUATING, Phase.SAVING, Phase.STARTING}


# -- what must not be believed ----------------------------------------------------------------------------------------

NUMBERS = [
    (beacon.MAGIC, 1),
    (beacon.END, 0),
    (beacon.END, 1),
    (beacon.GENERATION, 1),
    (beacon.PHASE, 5),
    (beacon.PHASE, 2**64 - 1),
    (beacon.KNOWN, MAX_SECTIONS + 1),
    (beacon.OPEN, 1),
    (beacon.STEPS, 2**64 - 1),
    (beacon.STEPS, 2**60),
    (beacon.BASE, 2**64 - 1),
]
TIMES = [beacon.PHASE_AT, beacon.HEARTBEAT_AT, beacon.CLIENT_AT, beacon.OUTSIDE_AT]
LIMITS = [*range(beacon.GAPS, beacon.GAPS + 4), beacon.FIRST_LIMIT, beacon.HEARTBEAT_LIMIT, beacon.OUTSIDE_LIMIT]


@pytest.mark.parametrize(("field", "value"), NUMBERS)
def test_a_number_that_cannot_be_is_not_believed(pages_fd: int, field: int, value: int) -> None:
    page, rank = Page(pages_fd, 0), Beacon(pages_fd, 0, generation=0)
    rank.words[field] = value
    with pytest.raises(Corrupt):
        page.read(time.monotonic(), 0)


@pytest.mark.parametrize(("field", "value"), [(beacon.STEPS, 2**64 - 1), (beacon.BASE, 2**64 - 1)])
def test_a_count_that_cannot_be_is_not_told(pages_fd: int, field: int, value: int) -> None:
    page, rank = Page(pages_fd, 0), Beacon(pages_fd, 0, generation=0)
    rank.words[field] = value
    assert (page.steps or 0) + page.base < 2**48


@pytest.mark.parametrize("value", [math.nan, -1.0, math.inf, 1e18])
@pytest.mark.parametrize("field", TIMES)
def test_a_time_that_cannot_be_is_not_believed(pages_fd: int, field: int, value: float) -> None:
    page, rank = Page(pages_fd, 0), Beacon(pages_fd, 0, generation=0)
    rank.times[field] = value
    with pytest.raises(Corrupt):
        page.read(time.monotonic(), 0)


@pytest.mark.parametrize("value", [math.nan, -1.0, math.inf])
@pytest.mark.parametrize("field", LIMITS)
def test_a_limit_that_cannot_be_is_not_believed(pages_fd: int, field: int, value: float) -> None:
    page, rank = Page(pages_fd, 0), Beacon(pages_fd, 0, generation=0)
    rank.times[field] = value
    with pytest.raises(Corrupt):
        page.read(time.monotonic(), 0)


@pytest.mark.parametrize(
    "pair", [(math.nan, 1.0), (-1.0, 1.0), (1e18, 1.0), (1.0, math.nan), (1.0, -1.0), (1.0, math.inf)]
)
def test_a_section_that_cannot_be_is_not_believed(pages_fd: int, pair: tuple[float, float]) -> None:
    page, rank = Page(pages_fd, 0), Beacon(pages_fd, 0, generation=0)
    rank.words[beacon.KNOWN] = rank.words[beacon.OPEN] = 1
    rank.times[SECTIONS], rank.times[SECTIONS + 1] = pair
    with pytest.raises(Corrupt):
        page.read(time.monotonic(), 0)


def test_an_area_that_was_written_and_is_empty_now_is_corrupt(pages_fd: int) -> None:
    """Else its rank would be taken for one that has not started, for as long as the world is old."""
    page, _ = Page(pages_fd, 0), Beacon(pages_fd, 0, generation=0)
    read(page)
    os.pwrite(pages_fd, bytes(4096), 0)
    with pytest.raises(Corrupt):
        page.read(time.monotonic(), 0)


def test_noise_is_read_as_corrupt_and_nothing_else(pages_fd: int) -> None:
    chance = random.Random(4)
    page = Page(pages_fd, 0)
    whole = struct.calcsize(beacon.RANKS_FIELDS)
    Beacon(pages_fd, 0, generation=0)
    fresh = os.pread(pages_fd, 4096, 0)
    for _ in range(300):
        os.pwrite(pages_fd, fresh, 0)
        os.pwrite(pages_fd, chance.randbytes(chance.randrange(16, whole)), chance.randrange(whole))
        try:
            vitals = page.read(time.monotonic(), 0)
        except Corrupt as corrupt:
            assert str(corrupt)
        else:
            assert vitals is None or vitals.phase in set(Phase)


# -- sections ---------------------------------------------------------------------------------------------------------


def test_open_sections_that_have_a_limit_are_read(pages_fd: int) -> None:
    page, rank = Page(pages_fd, 0), Beacon(pages_fd, 0, generation=0)
    rank.words[beacon.KNOWN] = MAX_SECTIONS
    for slot, since_s, limit_s in ((0, 0.0, 5.0), (7, 2.0, 5.0), (8, 3.0, 0.0), (MAX_SECTIONS - 1, 4.0, 6.0)):
        rank.times[SECTIONS + 2 * slot], rank.times[SECTIONS + 2 * slot + 1] = since_s, limit_s
    assert read(page).sections == ()
    rank.words[beacon.OPEN] = 3
    assert read(page).sections == (Section(7, 2.0, 5.0), Section(MAX_SECTIONS - 1, 4.0, 6.0))
    assert Page(pages_fd, 1).read(time.monotonic(), 0) is None  # the last section is not the next rank's


# -- the lease --------------------------------------------------------------------------------------------------------


def test_a_rank_that_nobody_gave_a_lease_has_none(pages_fd: int) -> None:
    assert not Beacon(pages_fd, 0, generation=0).has_lease


def test_a_rank_sees_the_lease_that_the_agent_gives_it_and_when_it_is_over(pages_fd: int) -> None:
    rank, page = Beacon(pages_fd, 0, generation=0), Page(pages_fd, 0)
    page.lease(time.monotonic() + 1000.0)
    assert (rank.has_lease, rank.lease_is_over) == (True, False)
    page.lease(time.monotonic() - 0.001)
    assert (rank.has_lease, rank.lease_is_over) == (True, True)
    page.lease(time.monotonic() + 1000.0)
    assert not rank.lease_is_over


def test_a_lease_that_was_given_before_the_rank_was_there_is_kept(pages_fd: int) -> None:
    Page(pages_fd, 1).lease(time.monotonic() + 1000.0)
    rank = Beacon(pages_fd, 1, generation=3)
    assert rank.has_lease
    assert not rank.lease_is_over


def test_a_lease_is_its_ranks_own_and_touches_nothing_else(pages_fd: int) -> None:
    ranks = [Beacon(pages_fd, slot, generation=0) for slot in range(3)]
    ranks[1].step_done()
    Page(pages_fd, 1).lease(1.0)
    assert [rank.has_lease for rank in ranks] == [False, True, False]
    ranks[1].step_done()
    assert (Page(pages_fd, 1).steps, ranks[1].lease_is_over) == (2, True)


# -- the file ---------------------------------------------------------------------------------------------------------


def test_an_area_can_be_read_after_the_file_is_closed() -> None:
    fd = beacon.make(1)
    rank, page = Beacon(fd, 0, generation=0), Page(fd, 0)
    os.close(fd)
    rank.step_done()
    assert page.steps == 1


def test_the_file_has_no_name_and_does_not_survive_an_exec(pages_fd: int) -> None:
    assert os.fstat(pages_fd).st_nlink == 0
    assert not os.get_inheritable(pages_fd)


def test_the_steps_of_another_process_outlive_it(pages_fd: int) -> None:
    steps = """
import os, signal, sys
from holdfast.worker.beacon import Beacon
beacon = Beacon(int(sys.argv[1]), 1, 0)
for _ in range(1000):
    beacon.step_done()
os.kill(os.getpid(), signal.SIGKILL)
"""
    ended = subprocess.run([sys.executable, "-c", steps, str(pages_fd)], pass_fds=[pages_fd])
    assert ended.returncode == -9
    assert Page(pages_fd, 1).steps == 1000
