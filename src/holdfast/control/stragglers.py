"""Ranks that hold the others up: found by the time that each needs for itself, window after window.

Ranks of a world step together, so how long a step takes says nothing of who is slow. What a rank needs before it can
wait for anybody does; so do the sections that a program names, if most ranks take less for theirs. A node tells the
coordinator of its slowest rank, and of what is usual there; the coordinator compares that with the other nodes, so what
is sent does not grow with the world.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

By = Literal["step", "section"]  # what is measured
STEP: By = "step"
SECTION: By = "section"
LEAST_RANKS: dict[By, int] = {
    STEP: 2,
    SECTION: 3,
}  # a rank may wait in a section, and of two one cannot say which of them does
WINDOWS = 3  # in a row, before a rank is called slow, or no longer so
RATIO = 1.3  # of what is usual
SPREADS = 4.0  # beyond what is usual, in robust standard deviations
LEAST_S = 0.001  # less than this is no matter
_ROBUST = 1.4826  # from a median deviation to a standard one


class Window(msgspec.Struct, frozen=True):
    """What the ranks of one node needed for themselves, lately."""

    ranks: int
    slowest: int
    slowest_s: float
    others_s: float  # the median of the others here; 0: there are none
    median_s: float  # of all of them
    spread_s: float = 0.0  # of the others: the median distance from their median
    by: By = STEP


class Found(msgspec.Struct, frozen=True):
    rank: int
    own_s: float
    usual_s: float
    gone: bool = False  # it is as fast as the others again
    by: By = STEP

    @property
    def score(self) -> float:
        return self.own_s / self.usual_s if self.usual_s else 0.0

    @property
    def headline(self) -> str:
        own, usual = f"{self.own_s * 1000:.3g} ms", f"{self.usual_s * 1000:.3g} ms"
        where = "for itself" if self.by == STEP else "in its sections"
        return f"holds the others up: it needs {own} a step {where}, the others {usual}"


def window(own_s: Mapping[int, float], by: By = STEP) -> Window | None:
    """Of a node's ranks; None where none of them has been measured."""
    known = {rank: each_s for rank, each_s in own_s.items() if each_s > 0}
    if not known:
        return None
    slowest = max(known, key=lambda rank: (known[rank], -rank))
    others = [each_s for rank, each_s in known.items() if rank != slowest]
    return Window(
        ranks=len(known),
        slowest=slowest,
        slowest_s=known[slowest],
        others_s=statistics.median(others) if others else 0.0,
        median_s=statistics.median(known.values()),
        spread_s=_spread(others),
        by=by,
    )


class Stragglers:
    """What the coordinator knows of a world's paces. A rank is told of once, whatever it is slow by, and again when it
    is so by nothing any more."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """A new world."""
        self._by = {by: _Paces(least) for by, least in LEAST_RANKS.items()}

    @property
    def found(self) -> dict[int, Found]:
        return {rank: found for paces in self._by.values() for rank, found in paces.found.items()}

    def hear(self, node: str, window: Window) -> list[Found]:
        """Who is found to be slow, or no longer so, by this window of that node."""
        other = self._by[SECTION if window.by == STEP else STEP].found
        return [found for found in self._by[window.by].hear(node, window) if found.rank not in other]


class _Paces:
    """By one of the two."""

    def __init__(self, least_ranks: int) -> None:
        self._least_ranks = least_ranks
        self._windows: dict[str, Window] = {}
        self._slow: dict[int, int] = {}  # windows in a row
        self._calm: dict[int, int] = {}  # of those that were found, without being slow again
        self._node_of: dict[int, str] = {}
        self.found: dict[int, Found] = {}

    def hear(self, node: str, window: Window) -> list[Found]:
        self._windows[node] = window
        usual_s, spread_s = self._usual(node)
        rank, told = window.slowest, list[Found]()
        self._node_of[rank] = node
        slow = usual_s > 0 and _is_slow(window.slowest_s, usual_s, spread_s)
        for other in [known for known, where in self._node_of.items() if where == node and known != rank]:
            self._slow.pop(other, None)  # it is not the slowest of its node any more
            told += self._calmed(other)
        if not slow:
            self._slow.pop(rank, None)
            return [*told, *self._calmed(rank)]
        self._calm.pop(rank, None)
        self._slow[rank] = self._slow.get(rank, 0) + 1
        if self._slow[rank] >= WINDOWS and rank not in self.found:
            self.found[rank] = Found(rank, window.slowest_s, usual_s, by=window.by)
            told.append(self.found[rank])
        return told

    def _calmed(self, rank: int) -> list[Found]:
        if rank not in self.found:
            return []
        self._calm[rank] = self._calm.get(rank, 0) + 1
        if self._calm[rank] < WINDOWS:
            return []
        del self._calm[rank]
        return [msgspec.structs.replace(self.found.pop(rank), gone=True)]

    def _usual(self, node: str) -> tuple[float, float]:
        """What the others need, and how far apart they are."""
        here = self._windows[node]
        elsewhere = [other.median_s for name, other in self._windows.items() if name != node]
        known = [*elsewhere, *([here.others_s] if here.ranks > 1 else [])]
        if not known or sum(each.ranks for each in self._windows.values()) < self._least_ranks:
            return 0.0, 0.0
        return statistics.median(known), max(here.spread_s, _spread(elsewhere))


def _is_slow(own_s: float, usual_s: float, spread_s: float) -> bool:
    more_s = own_s - usual_s
    return own_s > RATIO * usual_s and more_s > LEAST_S and more_s > SPREADS * _ROBUST * spread_s


def _spread(values: Sequence[float]) -> float:
    if len(values) < 2:
        return 0.0
    middle = statistics.median(values)
    return statistics.median(abs(value - middle) for value in values)
