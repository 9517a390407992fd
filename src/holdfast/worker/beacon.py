"""A rank's beacon: shared memory in which it leaves how it fares, without a system call.

The agent makes one anonymous file (memfd) per world with an area for each of its ranks, and reads an area whenever it
wants to know. Every field is eight aligned bytes with a single writer, so a reader never sees half of one. A time is
always written before the phase that it belongs to: a reader in between sees a rank that is fresher than it is, never
staler.

The agent sleeps until the earliest moment at which a rank could be hung, and says in `WAKE_AT` when that is. Whatever a
rank does that could make it hung sooner, such as opening a section with a short limit, it compares with that, and pokes
the agent if need be. So a heartbeat is a store to memory, and nobody polls.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator
from enum import IntEnum

from holdfast.lifeline import Lifeline

MARK = 0x484F4C4446415354  # HOLDFAST
END_MARK = 0x4545524854_444E45

# Positions of the eight-byte fields. First those of the rank:
MAGIC, GENERATION, OWNER, STEPS, STEP_AT, PHASE, PHASE_AT, TRAINS, STEP_S = range(9)
GAPS = 9  # one a phase, but for the last
BASE, CLIENT_AT, HEARTBEAT_AT, FIRST_LIMIT, HEARTBEAT_LIMIT, OUTSIDE_AT, OUTSIDE_LIMIT, OPEN, KNOWN, END = range(13, 23)
RANKS_FIELDS = "=QQQQdQdQd4dQddddddQQQ"  # the same, for struct
BUSY_AT = 23  # when it was last done with an evaluation or a save
SAVED_S = 25  # so long saves have held it up
OWN_S, OWN_STEPS = 26, 27  # so long it took for itself, before it could wait for others, in so many steps
BASED = 28  # 1: its optimizer counts, so that BASE says something
SECTION_S = 29  # so long its sections took that are closed; one inside of another counts as well
DRAINS = 24  # 1: it looks at DRAIN after each step, saves when it is told to, and ends by itself; 2: it no longer does
# then those of the agent:
LEASE, WAKE_AT, CONFIG_AT, CONFIG_BYTES = range(32, 36)
LIMITS = 36  # one a phase
DRAIN = 48  # 1: the rank is to end at the next boundary
LIFELINE = 56  # eight of them

_KEPT = (TRAINS, *range(GAPS, GAPS + 4))  # by a rank that goes from one world to the next

_WORD = 0xFFFF_FFFF_FFFF_FFFF
HEADER_BYTES = 4096
MAX_SECTIONS = 16_384
SECTIONS = HEADER_BYTES // 8  # from here on two fields each: opened at (0.0: it is closed), and limit (0.0: none)
AREA_BYTES = HEADER_BYTES + 16 * MAX_SECTIONS  # memory is taken only for what is written


class Phase(IntEnum):
    """What a rank is at. Each has its own learned limit, the last one none."""

    STARTING = 0  # until its first step
    TRAINING = 1
    EVALUATING = 2
    SAVING = 3
    ENDING = 4


def make(ranks: int, config: bytes = b"") -> int:
    """A new file of areas, and what all ranks are to read behind them. It has no name, so nothing can be left of it."""
    fd = os.memfd_create("holdfast-beacon", os.MFD_CLOEXEC)
    os.ftruncate(fd, AREA_BYTES * ranks + len(config))
    if config:
        os.pwrite(fd, config, AREA_BYTES * ranks)
    return fd


class Beacon:
    """The writing end, in the rank. `poke` wakes the agent; it is a system call, and seldom needed."""

    def __init__(self, fd: int, slot: int, generation: int, poke: Callable[[], None] = lambda: None) -> None:
        self.poke = poke
        self._begin(fd, slot, generation, None)

    def _begin(self, fd: int, slot: int, generation: int, before: memoryview | None) -> None:
        area = mmap.mmap(fd, AREA_BYTES, offset=slot * AREA_BYTES)
        words = memoryview(area).cast("Q")
        times = memoryview(area).cast("d")
        self.config = os.pread(fd, words[CONFIG_BYTES], words[CONFIG_AT])
        words[GENERATION] = generation
        words[OWNER] = os.getpid()
        if before is not None:
            for field in _KEPT:
                words[field] = before[field]
        times[PHASE_AT] = time.monotonic()
        words[END] = END_MARK
        words[MAGIC] = MARK
        self.words, self.times = words, times
        self._lifeline = Lifeline(memoryview(area), 8 * LIFELINE)
        if threading.current_thread() is threading.main_thread():  # another may end long before the process
            self._lifeline.take()

    def move(self, fd: int, slot: int, generation: int) -> None:
        """The same rank, or another, in another world: what it has learned stays true. It starts again."""
        before = self._lifeline
        self._begin(fd, slot, generation, self.words)
        before.let_go()
        self.enter(Phase.STARTING)

    @property
    def intact(self) -> bool:
        return self.words[MAGIC] == MARK and self.words[END] == END_MARK

    def step_done(self) -> int:
        """Count a step; returns how many there are."""
        words, times = self.words, self.times
        now_s = time.monotonic()
        phase = words[PHASE]
        took_s = times[STEP_S] = now_s - times[PHASE_AT]
        first = False
        if phase < 4 and took_s > (longest_s := times[GAPS + phase]):
            times[GAPS + phase] = took_s
            first = longest_s == 0.0
        times[PHASE_AT] = times[STEP_AT] = now_s
        steps = words[STEPS] = (words[STEPS] + 1) & _WORD
        if phase != 1:
            times[BUSY_AT] = now_s
            words[PHASE] = 1
            if first:
                self.poke_if_due(0.0)  # the next of its kind has a limit, which the agent does not know of yet
            else:
                self.poke_if_due(now_s + times[LIMITS + 1])
        return steps

    def enter(self, phase: int) -> None:
        self.times[PHASE_AT] = now_s = time.monotonic()
        self.words[PHASE] = phase
        self.poke_if_due(now_s + self.times[LIMITS + phase])

    def leave(self, phase: int, back_to: int) -> None:
        """The end of a phase that is not ended by a step."""
        times = self.times
        took_s, longest_s = time.monotonic() - times[PHASE_AT], times[GAPS + phase]
        if self.words[PHASE] == phase and took_s > longest_s:
            times[GAPS + phase] = took_s
        if phase == Phase.SAVING:
            times[SAVED_S] += took_s
        times[BUSY_AT] = time.monotonic()
        self.enter(back_to)
        if longest_s == 0.0:
            self.poke_if_due(0.0)  # the next of its kind has a limit, which the agent does not know of yet

    @contextlib.contextmanager
    def within(self, phase: int) -> Iterator[None]:
        """A phase inside of training; one inside of another phase is that one's."""
        before = self.words[PHASE]
        if before not in (Phase.TRAINING, Phase.EVALUATING):
            yield
            return
        self.enter(phase)
        try:
            yield
        finally:
            self.leave(phase, before)

    def poke_if_due(self, deadline_s: float) -> None:
        """Wake the agent if it would look too late. It writes when it will look before it reads this area a last time;
        whichever of the two is first, the other is seen."""
        if deadline_s < self.times[WAKE_AT]:
            self.poke()

    def drains(self) -> None:
        """Say that this rank is to be asked, rather than signalled, where there is time to end in order."""
        self.words[DRAINS] = 1

    def drains_no_more(self) -> None:
        self.words[DRAINS] = 2

    @property
    def drain_requested(self) -> bool:
        return self.words[DRAIN] != 0

    @property
    def has_lease(self) -> bool:
        return self.times[LEASE] != 0.0

    @property
    def lease_is_over(self) -> bool:
        return time.monotonic() > self.times[LEASE]
