"""How often a snapshot may be taken so that it stays cheap."""

from __future__ import annotations

import math
import statistics
from collections import deque

BUDGET = 0.005  # of the training time
MAX_EVERY = 10_000
COLD = 2  # the first snapshot in each slot also makes its memory, and is not counted
SAMPLES = 3  # to choose by, and as often to choose again
FIRST = COLD + SAMPLES


def every(snapshot_s: float, step_s: float) -> int:
    """Steps between two snapshots: the fewest for which they take no more than the budget."""
    if step_s <= 0.0:
        return MAX_EVERY
    return max(1, min(MAX_EVERY, math.ceil(snapshot_s / (BUDGET * step_s))))


class Pace:
    """Costs as they are seen, for one rank."""

    def __init__(self) -> None:
        self._taken = 0
        self._costs_s: deque[float] = deque(maxlen=16)
        self.steps_s: deque[float] = deque(maxlen=32)  # what each took, to be told of all
        self._chosen_at = 0

    def snapshot(self, cost_s: float) -> None:
        self._taken += 1
        if self._taken > COLD:
            self._costs_s.append(cost_s)

    @property
    def snapshot_s(self) -> float:
        return statistics.median(self._costs_s)

    @property
    def step_s(self) -> float:
        return statistics.median(self.steps_s)

    def choose(self, now: int | None) -> int | None:
        """A better interval than the present one; None if that will do. Small changes are not worth a word."""
        if self._taken < max(FIRST, self._chosen_at + SAMPLES) or not self.steps_s:
            return None
        self._chosen_at = self._taken
        better = every(self.snapshot_s, self.step_s)
        return better if now is None or better > 1.5 * now or better < now / 3 else None
