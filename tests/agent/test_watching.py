"""Watching ranks: a real loop, real areas, and another process that writes them as ranks do."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest

from holdfast.agent.pages import Page
from holdfast.agent.watching import Watching
from holdfast.control.hangs import STEPS_TO_LEARN, Hang, Mode, Rules, Vitals, Watch
from holdfast.worker import beacon
from holdfast.worker.beacon import AREA_BYTES, LIMITS, WAKE_AT

GENERATION = 4
FIRST_RANK = 8  # of this node's
FLOOR_S = 2.0  # the writer steps for ranks that must not hang: it has to get a core that often
PLAIN = {"floor_s": 0.5, "safety_factor": 0.01}  # a limit that no gap, however long, makes longer
WAIT_S = 30.0

WRITER = """
import os, select, sys, time
from holdfast.worker.beacon import *
from holdfast.worker.phases import STEPS_TO_LEARN
fd, ranks, generation, first_rank = map(int, sys.argv[1:])
beacons, stepping = {}, set()

def begin(rank):
    beacons[rank] = Beacon(fd, rank, generation, lambda: os.write(1, b"poke %d\\n" % rank))

def begin_all():
    for rank in range(ranks):
        begin(rank)

def step(*ranks, times=1):
    # as the hooks do it
    for rank in ranks:
        for _ in range(times):
            if beacons[rank].step_done() == STEPS_TO_LEARN:
                beacons[rank].poke()

def go_on(steps):
    for _ in range(steps):
        step(*stepping)
        time.sleep(0.02)

def open_section(rank, slot, limit_s):
    words, times = beacons[rank].words, beacons[rank].times
    now_s = time.monotonic()
    words[KNOWN] = max(words[KNOWN], slot + 1)
    times[SECTIONS + 2 * slot + 1] = limit_s
    times[SECTIONS + 2 * slot] = now_s
    words[OPEN] += 1
    beacons[rank].poke_if_due(now_s + limit_s)

def close_section(rank, slot):
    beacons[rank].times[SECTIONS + 2 * slot] = 0.0
    beacons[rank].words[OPEN] -= 1

os.write(1, b"ready\\n")
rest = b""
while True:
    if select.select([0], [], [], 0.02)[0]:
        if not (chunk := os.read(0, 1 << 16)):
            break
        *lines, rest = (rest + chunk).split(b"\\n")
        for line in lines:
            exec(line)
            os.write(1, b"done\\n")
    step(*stepping)
"""


class Counted(Page):
    """An area that knows how often it was read."""

    def __init__(self, fd: int, slot: int, more: asyncio.Event) -> None:
        super().__init__(fd, slot)
        self.reads = 0
        self._more = more

    def read(self, now_s: float, generation: int) -> Vitals | None:
        self.reads += 1
        self._more.set()
        return super().read(now_s, generation)


class Scene:
    """One node's ranks and their monitors."""

    def __init__(self, ranks: int, rules: Rules) -> None:
        self.fd = beacon.make(ranks)
        self.hangs: list[tuple[Hang, str]] = []
        self.corrupt: list[tuple[int, str]] = []
        self.pokes: list[int] = []
        self.more = asyncio.Event()
        self.pages = [Counted(self.fd, slot, self.more) for slot in range(ranks)]
        self._answers = asyncio.Semaphore(0)
        self._rest = b""
        self.watch = Watch(rules)
        self.loop = asyncio.get_running_loop()
        self.watching = Watching(self.loop, self.watch, self._hung, self._is_corrupt)
        command = [sys.executable, "-c", WRITER, *map(str, (self.fd, ranks, GENERATION, FIRST_RANK))]
        self.writer = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=[self.fd])
        assert self.writer.stdout is not None
        self.loop.add_reader(self.writer.stdout.fileno(), self._read)

    def begin(self, cold: bool = False) -> None:
        self.watching.begin(GENERATION, FIRST_RANK, self.pages, cold)

    async def do(self, *lines: str) -> None:
        """Have the ranks do something, and wait until they have."""
        assert self.writer.stdin is not None
        for line in lines:
            self.writer.stdin.write(line.encode() + b"\n")
            self.writer.stdin.flush()
        for _ in lines:
            await self.answered()

    async def answered(self) -> None:
        await asyncio.wait_for(self._answers.acquire(), WAIT_S)

    async def until(self, ready: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not ready():
                self.more.clear()
                await self.more.wait()

    @property
    def hung(self) -> set[int]:
        return {hang.rank for hang, _ in self.hangs}

    def _hung(self, hang: Hang, headline: str) -> None:
        assert time.monotonic() >= hang.since_s + hang.limit_s
        self.hangs.append((hang, headline))
        self.more.set()

    def _is_corrupt(self, rank: int, why: str) -> None:
        self.corrupt.append((rank, why))
        self.more.set()

    def _read(self) -> None:
        assert self.writer.stdout is not None
        *lines, self._rest = (self._rest + os.read(self.writer.stdout.fileno(), 1 << 16)).split(b"\n")
        for line in lines:
            word, _, rank = line.partition(b" ")
            if word == b"poke":
                self.pokes.append(FIRST_RANK + int(rank))
                self.watching.poked(FIRST_RANK + int(rank))
                self.more.set()
            else:
                self._answers.release()

    def close(self) -> None:
        self.watching.end()
        assert self.writer.stdout is not None
        self.loop.remove_reader(self.writer.stdout.fileno())
        self.writer.kill()
        self.writer.communicate()
        os.close(self.fd)


@asynccontextmanager
async def scene(ranks: int, **rules: Any) -> AsyncIterator[Scene]:
    made = Scene(ranks, Rules(**({"floor_s": FLOOR_S} | rules)))
    try:
        await made.answered()
        yield made
    finally:
        made.close()


def run(story: Coroutine[Any, Any, None]) -> None:
    asyncio.run(story)


TRAINED = f"step(*range(ranks), times={STEPS_TO_LEARN})"


# -- steps ------------------------------------------------------------------------------------------------------------


def test_a_silent_rank_is_found_and_the_others_are_not() -> None:
    async def story() -> None:
        async with scene(3, safety_factor=1.0) as world:
            await world.do("begin_all()")
            world.begin()
            await world.do(TRAINED, "stepping.update([0, 2])")
            await world.until(lambda: bool(world.hangs))
            [(hang, headline)] = world.hangs
            assert (hang.rank, hang.what, hang.limit_s) == (FIRST_RANK + 1, "no step", FLOOR_S)
            assert headline.startswith("no step for ")
            assert headline.endswith(f" s (limit {FLOOR_S:g} s)")

    run(story())


def test_nobody_is_looked_at_before_a_deadline() -> None:
    async def story() -> None:
        async with scene(2, floor_s=60.0) as world:
            await world.do("begin_all()")
            world.begin()
            await world.do(TRAINED, "stepping.update([0, 1])")
            await world.do("pass")  # limits that are learned make for one more look, after what else is there to do
            reads = [page.reads for page in world.pages]
            await world.do("go_on(50)")
            assert [page.reads for page in world.pages] == reads
            assert world.hangs == []

    run(story())


def test_a_poke_brings_a_deadline_nearer() -> None:
    """Before the first step a rank that has no optimizer may take for ever: nobody has a reason to wake up."""

    async def story() -> None:
        async with scene(1, **PLAIN) as world:
            await world.do("begin_all()")
            world.begin()
            assert world.pages[0]._times[WAKE_AT] == math.inf
            await world.do(f"step(0, times={STEPS_TO_LEARN - 1})")
            assert world.pokes
            assert world.pages[0]._times[WAKE_AT] < math.inf  # 120 floors
            await world.do("step(0)")
            await world.until(lambda: bool(world.hangs))
            assert world.hangs[0][0].limit_s == PLAIN["floor_s"]
            pokes = len(world.pokes)
            await world.do("step(0)")
            assert len(world.pokes) == pokes

    run(story())


def test_what_was_learned_of_one_rank_holds_for_all_and_is_written_to_their_areas() -> None:
    async def story() -> None:
        async with scene(3, **PLAIN) as world:
            await world.do("begin_all()")
            world.begin()
            unseen_s = world.watch.limits_s()[1]
            assert [page._times[LIMITS + 1] for page in world.pages] == [unseen_s] * 3
            await world.do(f"step(0, times={STEPS_TO_LEARN})", "step(1)")
            assert [page._times[LIMITS + 1] for page in world.pages] == [PLAIN["floor_s"]] * 3
            await world.until(lambda: world.hung >= {FIRST_RANK, FIRST_RANK + 1})
            assert world.hung == {FIRST_RANK, FIRST_RANK + 1}

    run(story())


def test_warnings_are_told_once_until_the_rank_goes_on_and_hangs_again() -> None:
    async def story() -> None:
        async with scene(1, mode=Mode.WARN, floor_s=0.1) as world:
            await world.do("begin_all()")
            world.begin()
            await world.do(TRAINED)
            await world.until(lambda: bool(world.hangs))
            reads = world.pages[0].reads
            await world.until(lambda: world.pages[0].reads >= reads + 2)
            assert len(world.hangs) == 1
            await world.do("step(0)")
            await world.until(lambda: len(world.hangs) > 1)
            first, second = (hang for hang, _ in world.hangs)
            assert second.since_s > first.since_s
            assert second.limit_s >= 2 * first.limit_s

    run(story())


@pytest.mark.parametrize("mode", [Mode.OFF, Mode.RESTART])
def test_off_looks_at_nothing(mode: Mode) -> None:
    async def story() -> None:
        async with scene(1, mode=mode) as world:
            await world.do("begin_all()", TRAINED)
            world.begin()
            assert bool(world.pages[0].reads) == (mode is Mode.RESTART)
            world.watching.poked(FIRST_RANK)
            assert bool(world.pages[0].reads) == (mode is Mode.RESTART)

    run(story())


# -- ranks that have not begun, or have ended -------------------------------------------------------------------------


@pytest.mark.parametrize("cold", [False, True])
def test_a_rank_that_never_writes_is_hung_only_where_it_should_have(cold: bool) -> None:
    async def story() -> None:
        async with scene(2, first_s=0.4) as world:
            await world.do("begin(0)", "step(0)", "stepping.add(0)")
            world.begin(cold)
            if cold:
                await world.do("go_on(50)")
                assert world.hangs == []
            else:
                await world.until(lambda: bool(world.hangs))
                assert (world.hung, world.hangs[0][0].what) == ({FIRST_RANK + 1}, "not started")

    run(story())


def test_a_rank_that_has_exited_is_not_told_of() -> None:
    async def story() -> None:
        async with scene(3, floor_s=0.2) as world:
            await world.do("begin_all()")
            world.begin()
            await world.do(TRAINED)
            world.watching.exited(FIRST_RANK)
            world.watching.exited(FIRST_RANK)
            await world.until(lambda: len(world.hung) == 2)
            assert world.hung == {FIRST_RANK + 1, FIRST_RANK + 2}
            world.watching.poked(FIRST_RANK)

    run(story())


def test_a_new_world_is_not_blamed_for_the_old_one() -> None:
    async def story() -> None:
        async with scene(2) as world:
            await world.do("begin_all()")
            world.begin()
            world.watching.name(FIRST_RANK, 0, ["old"])
            await world.do(TRAINED, "open_section(0, 0, 0.3)")
            await world.until(lambda: bool(world.hangs))
            world.watching.end()
            old = len(world.hangs)
            os.pwrite(world.fd, bytes(4096), 0)
            os.pwrite(world.fd, bytes(4096), AREA_BYTES)
            world.pages = [Counted(world.fd, slot, world.more) for slot in range(2)]
            world.begin()
            await world.do("begin_all()", TRAINED, "stepping.update([0, 1])")
            assert world.pages[0]._times[LIMITS + 1] > 0  # learned in the old one
            await world.do("go_on(150)")  # past every deadline of the old one
            assert len(world.hangs) == old

    run(story())


# -- sections ---------------------------------------------------------------------------------------------------------


def test_the_longest_open_of_ten_thousand_sections_is_named() -> None:
    async def story() -> None:
        async with scene(1) as world:
            await world.do("begin_all()")
            world.begin()
            for first in range(0, 10_000, 1000):
                world.watching.name(FIRST_RANK, first, [f"section {slot}" for slot in range(first, first + 1000)])
            await world.do("open_section(0, 0, 3600.0)", "stepping.add(0)")
            await world.do(f"go_on({STEPS_TO_LEARN + 1})")  # of which the first and the sixth poke
            pokes = len(world.pokes)
            await world.do("[open_section(0, slot, 3600.0) for slot in range(1, 10_000) if slot != 7_777]")
            assert len(world.pokes) == pokes  # a look was due before that anyway
            assert world.hangs == []
            await world.do("open_section(0, 7_777, 0.3)")
            await world.until(lambda: bool(world.hangs))
            hang, headline = world.hangs[0]
            assert (hang.rank, hang.slot, hang.limit_s) == (FIRST_RANK, 7_777, 0.3)
            assert headline.startswith("section 'section 7777' open for ")

    run(story())


def test_a_section_that_is_closed_in_time_is_none() -> None:
    async def story() -> None:
        async with scene(1) as world:
            await world.do("begin_all()")
            world.begin()
            await world.do("open_section(0, 0, 2.5)")
            await world.do("close_section(0, 0)", "open_section(0, 1, 3600.0)")
            reads = world.pages[0].reads
            await world.until(lambda: world.pages[0].reads > reads)  # when the first would have been a hang
            assert world.hangs == []

    run(story())


def test_an_outer_section_counts_whatever_is_open_inside() -> None:
    async def story() -> None:
        async with scene(1) as world:
            await world.do("begin_all()")
            world.begin()
            world.watching.name(FIRST_RANK, 0, ["outer", "inner"])
            await world.do("open_section(0, 0, 0.3)")
            while not world.hangs:
                await world.do("open_section(0, 1, 0.3)", "close_section(0, 1)")
            assert world.hangs[0][1].startswith("section 'outer' open for ")

    run(story())


# -- areas that something else wrote to -------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["from the start", "later"])
def test_a_corrupt_area_is_told_once_and_never_a_hang(where: str) -> None:
    async def story() -> None:
        async with scene(3) as world:
            scribble = f"os.pwrite(fd, b'\\xff' * 256, {AREA_BYTES})"
            await world.do("begin_all()", TRAINED)
            if where == "from the start":
                await world.do(scribble)
            world.begin()
            await world.do("stepping.add(0)", scribble)
            await world.until(lambda: FIRST_RANK + 2 in world.hung)
            world.watching.poked(FIRST_RANK + 1)
            assert world.corrupt == [(FIRST_RANK + 1, "its marks are gone")]
            assert world.hung == {FIRST_RANK + 2}

    run(story())


# -- late -------------------------------------------------------------------------------------------------------------


def fall_asleep() -> None:
    """As a machine does: the loop with it."""
    time.sleep(FLOOR_S + 1.5)


def test_ranks_that_were_stopped_together_with_the_agent_begin_afresh() -> None:
    async def story() -> None:
        async with scene(2) as world:
            await world.do("begin_all()")
            world.begin()
            await world.do(TRAINED, "stepping.update([0, 1])")
            os.kill(world.writer.pid, signal.SIGSTOP)
            fall_asleep()
            os.kill(world.writer.pid, signal.SIGCONT)
            await world.do("go_on(40)")
            assert world.hangs == []

    run(story())


# -- many -------------------------------------------------------------------------------------------------------------


def test_hundreds_of_ranks_are_watched_by_few_looks() -> None:
    async def story() -> None:
        async with scene(300) as world:
            await world.do("begin_all()")
            world.begin()
            await world.do(TRAINED, "stepping.update(range(300))")
            begun_s, before = time.monotonic(), sum(page.reads for page in world.pages)
            await world.do("go_on(100)")
            passed = math.ceil(time.monotonic() - begun_s) + 1
            assert sum(page.reads for page in world.pages) - before <= 4 * 300 * passed  # each when it may be late
            assert world.hangs == []
            await world.do("stepping.difference_update([7, 277])")
            await world.until(lambda: len(world.hung) >= 2)
            assert world.hung == {FIRST_RANK + rank for rank in (7, 277)}

    run(story())


def test_a_rank_that_pokes_all_the_time_costs_only_looks() -> None:
    async def story() -> None:
        async with scene(1) as world:
            await world.do("begin_all()")
            world.begin()
            await world.do("[beacons[0].poke() for _ in range(2_000)]")
            await world.until(lambda: len(world.pokes) >= 2_000)
            assert world.hangs == []

    run(story())
