"""A step of several batches, interrupted: what it has summed so far is kept, and gone on from."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

from holdfast.training.gradients import Sums
from holdfast.training.units import Cut, Unit

_NOTHING: dict[str, Any] = {"done": 0}

KEEP_S = 10.0  # of work is what a failure may cost; a step that is shorter than that is done again


class Accumulation:
    """A part of the training's state: nothing between two steps. Within one, how many of its samples are done, and what
    their gradients add up to. That is the same on all ranks and at any number of them."""

    def __init__(self, ask: Callable[[str], None]) -> None:
        self._ask = ask  # all ranks, to keep every so many units
        self._sums: Sums | None = None
        self._kept: dict[str, Any] = _NOTHING  # of the step that is being done
        self._now: dict[str, Any] = _NOTHING
        self._saved: dict[str, Any] = _NOTHING
        self._every = 0  # units; 0: no step is long enough
        self._asked = 0
        self._began_s = time.monotonic()

    # -- as a part of the state ---------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return self._now

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._now = self._saved = self._kept = state

    # -- from one world to the next -----------------------------------------------------------------------------------

    @property
    def done(self) -> int:
        """Samples of the step that is being done, in what was kept of it last."""
        return int(self._kept["done"])

    def offer(self) -> None:
        """The step is interrupted, and this rank has what the next world goes on from."""
        self._now = self._saved = self._kept

    def lack(self) -> None:
        """Another one has."""
        self._now = self._saved = self._kept = _NOTHING

    # -- a training that begins ---------------------------------------------------------------------------------------

    def go_on(self, sums: Sums, cut: Cut, step: int, samples: int) -> int:
        """How many samples of the first step are in its sums already."""
        self._sums = sums
        self._every, self._asked, self._began_s = 0, 0, time.monotonic()  # as it is for a rank that is new
        saved, self._saved, self._now, self._kept = self._saved, _NOTHING, _NOTHING, _NOTHING
        done = int(saved["done"])
        if not done or saved["samples"] != samples or not cut.can_go_on(samples, done):
            return 0
        sums.go_on(step, cut.leaf_count(samples), saved["sums"])
        self._kept = {**saved, "sums": sums.so_far()}
        return done

    # -- units --------------------------------------------------------------------------------------------------------

    def keeps(self, unit: Unit) -> bool:
        """Whether what is summed up to this one is kept. The same on all ranks."""
        if not self._every or unit.is_last or not unit.closes:
            return False
        number, every = (unit.number, self._every) if not unit.round.level else _rounds(unit, self._every)
        return (number + 1) % every == 0

    def keep(self, unit: Unit, samples: int, snapshot: Callable[[int], None]) -> None:
        assert self._sums is not None
        self._now = self._kept = {"done": unit.done, "samples": samples, "sums": self._sums.so_far()}
        try:
            snapshot(unit.done)
        finally:
            self._now = _NOTHING

    def step_done(self) -> None:
        self._kept = self._now = _NOTHING

    def learn(self, units: int) -> None:
        """One rank for all finds out how often is right."""
        now_s = time.monotonic()
        unit_s, self._began_s = (now_s - self._began_s) / units, now_s
        every = math.ceil(KEEP_S / max(unit_s, 1e-6))
        every = every if every < units else 0
        if every != self._asked and not (every and self._asked and 0.5 < every / self._asked < 2.0):
            self._asked = every
            self._ask(f"keep:{every}")

    def told(self, what: str) -> None:
        self._every = int(what.removeprefix("keep:"))


def _rounds(unit: Unit, every: int) -> tuple[int, int]:
    """In exact mode sums are known where a round ends, and all ranks count these."""
    return unit.round.place, max(1, every >> unit.round.level)
