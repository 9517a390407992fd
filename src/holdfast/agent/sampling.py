"""How far the ranks are, for the record: a look at their beacons now and then, and at the end of a world."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

import msgspec

from holdfast.agent.pages import Page
from holdfast.control.stragglers import SECTION, STEP, Window, window
from holdfast.observe.events import EventLog
from holdfast.observe.record import Progress

FIRST_S = 1.0  # between two looks, at first
LAST_S = 10.0  # when it has trained for a while
PART = 0.1  # of the time since the first step, in between
TOGETHER = 0.01  # step times no further apart than that are one


class _Rank:
    """One rank, and how it was when it was last looked at."""

    def __init__(self, page: Page) -> None:
        self._page = page
        self._before: tuple[int, float, float, int, float] = (0, 0.0, 0.0, 0, 0.0)

    def look(self) -> tuple[int, float, float, float]:
        """Its steps, and what one took since the last look: in all, for itself, and in sections; 0.0 where there was
        none."""
        steps, at_s = self._page.steps or 0, self._page.last_step_s
        _, own_s, own_steps, section_s = self._page.paces
        before_steps, before_s, before_own_s, before_own_steps, before_section_s = self._before
        self._before = (steps, at_s, own_s, own_steps, section_s)
        done = steps - before_steps if before_steps else 0
        counted = own_steps - before_own_steps
        each_s = (at_s - before_s) / done if done > 0 else 0.0
        each_own_s = (own_s - before_own_s) / counted if counted > 0 else 0.0
        each_section_s = (section_s - before_section_s) / done if done > 0 else 0.0
        return steps, _short(each_s), _short(each_own_s), _short(each_section_s)


class Sampler:
    """Of one node; kept over worlds. Nothing is asked of the ranks."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, events: EventLog, on_window: Callable[[int, Window], None]
    ) -> None:
        self._loop = loop
        self._events = events
        self._on_window = on_window
        self._timer: asyncio.TimerHandle | None = None
        self._generation = self._first_rank = 0
        self._pages: Sequence[Page] = ()
        self._ranks: list[_Rank] = []  # as the record has them
        self._live: list[_Rank] = []  # as somebody who looks on was told
        self._began_s = 0.0
        self._last: Progress | None = None

    def begin(self, generation: int, first_rank: int, pages: Sequence[Page]) -> None:
        self.end()
        self._generation, self._first_rank, self._pages = generation, first_rank, pages
        self._ranks, self._live = [_Rank(page) for page in pages], [_Rank(page) for page in pages]
        self._began_s = time.monotonic()
        self._sleep()

    def end(self) -> None:
        """With a last look, so that no step is missing."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._pages:
            self._note()
        self._pages, self._ranks, self._live, self._last = (), [], [], None

    def now(self) -> Progress | None:
        """For somebody who asks. None before the first step."""
        return self._progress(self._live)

    def _progress(self, ranks: list[_Rank]) -> Progress | None:
        if not any(page.steps for page in self._pages):
            return None
        steps, step_s, own_s, section_s = zip(*(rank.look() for rank in ranks), strict=True)
        newest = max(page.base + (page.steps or 0) for page in self._pages)
        return Progress(
            generation=self._generation,
            first_rank=self._first_rank,
            step=newest,
            base=max((page.base for page in self._pages if page.is_based), default=-1),
            steps=_together(steps, 0),
            step_us=_together(_us(step_s), TOGETHER),
            own_us=_us(own_s) if any(own_s) else (),
            saving_s=_short(max(page.paces[0] for page in self._pages)),
            phases="".join(str(min(9, page.phase[0])) for page in self._pages),
            section_us=_us(section_s) if any(section_s) else msgspec.UNSET,
        )

    def _sleep(self) -> None:
        wait_s = min(LAST_S, max(FIRST_S, (time.monotonic() - self._began_s) * PART))
        self._timer = self._loop.call_later(wait_s, self._look)

    def _look(self) -> None:
        self._note()
        self._sleep()

    def _note(self) -> None:
        """Nothing new is not written: a job may evaluate, or hang, for hours."""
        found = self._progress(self._ranks)
        if found is not None and (self._last is None or _marks(found) != _marks(self._last)):
            self._last = found
            self._events.emit(found)
            for by, each in ((STEP, found.own_us), (SECTION, found.section_us or ())):
                taken_s = {found.first_rank + at: each_us / 1e6 for at, each_us in enumerate(each)}
                if (measured := window(taken_s, by)) is not None:
                    self._on_window(found.generation, measured)


def _marks(progress: Progress) -> object:
    return progress.steps, progress.phases, progress.saving_s


def _together(each: tuple[int, ...], apart: float) -> tuple[int, ...]:
    """One number for ranks that step together, as nearly all do: it halves the line."""
    most = max(each)
    return (most,) if most - min(each) <= most * apart else each


def _us(seconds: Sequence[float]) -> tuple[int, ...]:
    return tuple(round(each_s * 1e6) for each_s in seconds)


def _short(seconds: float) -> float:
    """As many digits as anybody reads."""
    return float(f"{seconds:.4g}")
