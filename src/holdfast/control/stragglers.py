"""Ranks that hold the others up: found by the time that each needs for itself, window after window.

Ranks of a world step together, so how long a step takes says nothing of who is slow. What a rank needs before it can
wait for anybody does; so do the sections that a program names, if most ranks take less for theirs. A node tells the
coordinator of its few slowest ranks, and of what is usual there; the coordinator compares that with the other nodes, so
what is sent does not grow with the world.
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
MOST = 4  # slow ranks of one node that are told of in a window
WINDOWS = 3  # in a row, before a rank is called slow, or no longer so
RATIO = 1.3  # of what is usual
SPREADS = 4.0  # beyond what is usual, in robust standard deviations
LEAST_S = 0.001  # less than this is no matter
_ROBUST = 1.4826  # from a median deviation to a standard one


class Window(msgspec.Struct, frozen=True):
    """What the ranks of one node needed for themselves, lately."""

    ranks: int
    slowest: tuple[tuple[int, float], ...]  # the slowest first, and no more than MOST
    others_s: float  # the median of all but the slowest; 0: it is alone
    median_s: float  # of all of them
    spread_s: float = 0.0  # of all but the slowest: the median distance from their median
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
    known = [(rank, each_s) for rank, each_s in own_s.items() if each_s > 0]
    if not known:
        return None
    known.sort(key=lambda each: (-each[1], each[0]))
    all_s = [each_s for _, each_s in known]
    others_s = all_s[1:]
    return Window(
        ranks=len(known),
        slowest=tuple(known[:MOST]),
        others_s=statistics.median(others_s) if others_s else 0.0,
        median_s=_middle([(each_s, 1) for each_s in all_s], by),
        spread_s=_spread(others_s),
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
        self._told_of: dict[str, set[int]] = {}  # ranks, by node
        self.found: dict[int, Found] = {}

    def hear(self, node: str, window: Window) -> list[Found]:
        self._windows[node] = window
        usual_s, spread_s = self._usual(node)
        slow = {rank: own_s for rank, own_s in window.slowest if usual_s and _is_slow(own_s, usual_s, spread_s)}
        told_of = self._told_of.setdefault(node, set())
        told_of.update(slow)
        told: list[Found] = []
        # Where all that a window can name are slow, the others may be slow as well: nothing is known of them.
        calm = told_of - slow.keys() if len(slow) < MOST else ()
        for rank in sorted(calm):
            self._slow.pop(rank, None)
            told += self._calmed(rank)
        for rank, own_s in slow.items():
            self._calm.pop(rank, None)
            self._slow[rank] = self._slow.get(rank, 0) + 1
            if self._slow[rank] >= WINDOWS and rank not in self.found:
                self.found[rank] = Found(rank, own_s, usual_s, by=window.by)
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
        """What the others need, and how far apart they are. Each node counts by its ranks: where they are as many on
        each, what is usual is so elsewhere, and a node that is slow as a whole is not compared with itself."""
        here = self._windows[node]
        elsewhere = [other for name, other in self._windows.items() if name != node]
        all_ranks = here.ranks + sum(other.ranks for other in elsewhere)
        if all_ranks < self._least_ranks:
            return 0.0, 0.0
        # In sections half of the ranks may wait for the other half, so there a rank counts among what is usual itself.
        own = (here.others_s, here.ranks - 1) if here.by == STEP else (here.median_s, here.ranks)
        usual = [own, *((other.median_s, other.ranks) for other in elsewhere)]
        spreads = [(here.spread_s, own[1]), *((other.spread_s, other.ranks) for other in elsewhere)]
        spread_s = max(_middle(spreads, here.by), _spread([other.median_s for other in elsewhere]))
        return _middle(usual, here.by), spread_s


def _middle(values: Sequence[tuple[float, int]], by: By) -> float:
    """The median, where each value is that of so many ranks. Of sections the higher one of two: the ranks that take
    less must be more than half."""
    ordered = sorted(values)
    total = sum(count for _, count in ordered)
    low, high = (_at(ordered, at) for at in ((total - 1) // 2, total // 2))
    return (low + high) / 2 if by == STEP else high


def _at(ordered: Sequence[tuple[float, int]], at: int) -> float:
    for value, count in ordered:
        if at < count:
            return value
        at -= count
    raise IndexError(at)


def _is_slow(own_s: float, usual_s: float, spread_s: float) -> bool:
    more_s = own_s - usual_s
    return own_s > RATIO * usual_s and more_s > LEAST_S and more_s > SPREADS * _ROBUST * spread_s


def _spread(values: Sequence[float]) -> float:
    if len(values) < 2:
        return 0.0
    middle = statistics.median(values)
    return statistics.median(abs(value - middle) for value in values)
