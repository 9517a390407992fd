"""Watching the ranks of a world: asleep until the earliest moment at which one could be hung, then a look at it."""

from __future__ import annotations

import asyncio
import heapq
import math
import time
from collections.abc import Callable, Sequence
from operator import lt

from holdfast.agent.doorbell import Sign
from holdfast.agent.pages import Corrupt, Page
from holdfast.control.hangs import EVALUATING, SAVING, Busy, Hang, Mode, Watch

# A thousand ranks have a thousand deadlines; those that are this close to each other are looked at together.
TOGETHER_S = 0.01


class Watching:
    """The node's monitors, kept over worlds; `begin` gives them the beacons of a new one."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        watch: Watch,
        on_hang: Callable[[Hang, str], None],
        on_corrupt: Callable[[int, str], None],
    ) -> None:
        self._loop = loop
        self._watch = watch
        self._on_hang = on_hang
        self._on_corrupt = on_corrupt
        self._timer: asyncio.TimerHandle | None = None
        self._wake_s = math.inf
        self._busy, self._busy_s = Busy(), -math.inf  # and when that was
        self._known: object = None  # what the limits were made from
        self._said: tuple[float, ...] = ()  # the limits that are in the pages
        self._pages: dict[int, Page] = {}
        self._names: dict[tuple[int, int], str] = {}
        self._deadlines: list[tuple[float, int]] = []  # a heap; the latest entry of a rank counts
        self._deadline_of: dict[int, float] = {}
        self._poked: set[int] = set()
        self._generation, self._cold = -1, False

    def begin(self, generation: int, first_rank: int, pages: Sequence[Page], cold: bool) -> None:
        """A world's ranks have their processes. A program that was started cold may never write to its beacon."""
        self.end()
        if self._watch.rules.mode is Mode.OFF:
            return
        self._generation, self._cold = generation, cold
        self._pages = {first_rank + slot: page for slot, page in enumerate(pages)}
        self._known, self._said = None, ()
        self._watch.begin(time.monotonic())
        self.look_at_all()

    def look_at_all(self) -> None:
        for rank in list(self._pages):
            self._look(rank)
        self._sleep()

    def end(self) -> None:
        """Nothing is watched until the next world."""
        self._pages, self._names, self._deadlines, self._deadline_of = {}, {}, [], {}
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def exited(self, rank: int) -> None:
        self._pages.pop(rank, None)
        self._deadline_of.pop(rank, None)

    def name(self, rank: int, slot: int, names: Sequence[str]) -> None:
        """What a rank calls its sections."""
        self._names.update(((rank, slot + index), name) for index, name in enumerate(names))

    def signs(self) -> tuple[Sign, ...]:
        """For somebody who looks on."""
        now_s = time.monotonic()
        found = []
        for rank, page in self._pages.items():
            silent_s, opened = page.sign(now_s)
            slot, since_s = max(opened, key=lambda each: each[1], default=(-1, now_s))
            name = self._names.get((rank, slot), "") if slot >= 0 else ""
            found.append(Sign(rank, round(silent_s, 3), name[:64], round(now_s - since_s, 3)))
        return tuple(found)

    def poked(self, rank: int) -> None:
        """One look is enough for however many pokes came together."""
        if not self._poked:
            self._loop.call_soon(self._look_at_poked)
        self._poked.add(rank)

    def _look_at_poked(self) -> None:
        self._note_lateness()
        poked, self._poked = self._poked, set()
        for rank in poked & self._pages.keys():
            self._look(rank)
        self._sleep()

    def busy(self) -> Busy:
        """Whom of the ranks here the others may be waiting for."""
        now_s = time.monotonic()
        if now_s - self._busy_s < TOGETHER_S:
            return self._busy
        self._busy_s = now_s
        limits_s = self._watch.limits_s()
        evaluating_s = saving_s = done_s = 0.0
        for page in self._pages.values():
            phase, since_s, busy_s = page.phase
            if phase == EVALUATING:
                evaluating_s = max(evaluating_s, min(since_s, now_s) + limits_s[phase])
            elif phase == SAVING:
                saving_s = max(saving_s, min(since_s, now_s) + limits_s[phase])
            done_s = max(done_s, min(busy_s, now_s))
        stepped = any(page.steps for page in self._pages.values())
        self._busy = Busy(evaluating_s, saving_s, done_s, stepped)
        return self._busy

    # -- sleeping and looking -----------------------------------------------------------------------------------------

    def _sleep(self) -> None:
        while self._deadlines and self._deadline_of.get(self._deadlines[0][1]) != self._deadlines[0][0]:
            heapq.heappop(self._deadlines)  # of a rank that is gone, or that was looked at since
        earliest_s = self._deadlines[0][0] if self._deadlines else math.inf
        if self._timer is not None:
            if self._wake_s == earliest_s:
                return
            self._timer.cancel()
            self._timer = None
        self._wake_s = earliest_s
        if earliest_s < math.inf:
            self._timer = self._loop.call_at(earliest_s + TOGETHER_S, self._awake)

    def _note_lateness(self) -> None:
        now_s = time.monotonic()
        self._watch.late(now_s, now_s - self._wake_s)

    def _awake(self) -> None:
        self._note_lateness()
        now_s = time.monotonic()
        self._timer = None
        while self._deadlines and self._deadlines[0][0] <= now_s:
            deadline_s, rank = heapq.heappop(self._deadlines)
            if self._deadline_of.get(rank) == deadline_s:
                self._look(rank)
        self._sleep()

    def _look(self, rank: int) -> None:
        """Say when the next look will be, and only then look a last time. What a rank does after that look it compares
        with what was said; what it did before is seen."""
        page = self._pages[rank]
        deadline_s = self._judge(rank, page)
        while True:
            page.say_wake(deadline_s)
            if page.is_as_read():
                break
            again_s = self._judge(rank, page)
            if again_s >= deadline_s:
                break
            deadline_s = again_s
        if rank in self._pages and deadline_s < math.inf:
            self._deadline_of[rank] = deadline_s
            heapq.heappush(self._deadlines, (deadline_s, rank))
        else:
            self._deadline_of.pop(rank, None)

    def _judge(self, rank: int, page: Page) -> float:
        """Until when this rank cannot be hung; if it is, that is told."""
        if rank not in self._pages:
            return math.inf
        now_s = time.monotonic()
        try:
            vitals = page.read(now_s, self._generation)
        except Corrupt as why:
            del self._pages[rank]
            self._on_corrupt(rank, str(why))
            return math.inf
        if vitals is None and self._cold:
            return math.inf
        verdict = self._watch.look(now_s, rank, vitals, self.busy)
        self.say_limits()
        if isinstance(verdict, Hang):
            self._on_hang(verdict, verdict.headline(now_s, self._names.get((rank, verdict.slot), "")))
            return now_s + verdict.limit_s
        return verdict

    def say_limits(self) -> None:
        """Tell the ranks by which limits they are held, where that has changed."""
        known = (self._watch.gaps_s, self._watch.learned)
        if known == self._known:
            return
        self._known = known
        limits_s, said = self._watch.limits_s(), self._said
        if limits_s == said:
            return
        self._said = limits_s
        for page in self._pages.values():
            page.say_limits(limits_s)
        if any(map(lt, limits_s, said)):
            # Limits that nobody knew of count from now; and who was to be looked at later is looked at again.
            self._watch.late(time.monotonic(), math.inf)
            self._loop.call_soon(self.look_at_all)
