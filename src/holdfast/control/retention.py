"""Which checkpoints are kept.

Rules add up: the last k, the best k by a metric, every n-th, and what is pinned. Only what was read back whole counts:
k saves that failed must not push out the good ones. Epochs and steps are judged apart, by whoever asks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec


class Kept(msgspec.Struct, frozen=True):
    """A checkpoint, as far as the decision needs it."""

    name: str
    number: int  # of its step or epoch
    metric: float | None
    verified: bool
    pinned: bool
    superseded: bool  # training has gone on from before it


class Verdict(msgspec.Struct, frozen=True):
    keep: bool
    reason: str


def decide(
    checkpoints: Sequence[Kept], last: int = 3, best: int = 0, highest: bool = False, every: int = 0
) -> list[Verdict]:
    """One verdict for each, in their order, which is newest first. Without any rule everything is kept."""
    if not (last or best or every):
        return [Verdict(True, "everything is kept")] * len(checkpoints)
    line = [one for one in checkpoints if one.verified and not one.superseded]
    left_behind = [one for one in checkpoints if one.verified and one.superseded]
    # They go first. But whoever trains from the beginning again, perhaps by mistake, loses the old ones only as new
    # ones take their place.
    rest = left_behind[: max(0, last - len(line))] if last else left_behind[: max(0, 1 - len(line))]
    top = _best(line, best, highest)
    return [_judge(one, line, rest, top, last, every) for one in checkpoints]


def _judge(one: Kept, line: list[Kept], rest: list[Kept], top: dict[int, int], last: int, every: int) -> Verdict:
    if one.pinned:
        return Verdict(True, "it is pinned")
    if one.superseded:
        if any(one is other for other in rest):
            return Verdict(True, "training has gone on from before it, but has not replaced it yet")
        return Verdict(False, "training has gone on from before it")
    place = next((place for place, other in enumerate(line) if other is one), None)
    if place is None:
        return _judge_unverified(one, line, last)
    if place == 0:
        return Verdict(True, "it is the newest that was verified")
    if place < last:
        return Verdict(True, f"it is one of the last {last}")
    if id(one) in top:
        return Verdict(True, f"it is number {top[id(one)]} of the best")
    if every and one.number % every == 0:
        return Verdict(True, f"every {every} is kept")
    return Verdict(False, f"{place} newer ones were verified")


def _judge_unverified(one: Kept, line: list[Kept], last: int) -> Verdict:
    """It may be about to be verified, or its writer may be gone; both are so until enough newer ones are sure."""
    newer = sum(other.number > one.number for other in line)
    if newer >= max(1, last):
        return Verdict(False, f"it was never verified, and {newer} newer ones were")
    return Verdict(True, "it is not verified yet")


def _best(line: Sequence[Kept], count: int, highest: bool) -> dict[int, int]:
    """Their places, from 1. What has no number, or one that is none, is never among them; of equals the newer is."""
    valued = [(one.metric, one) for one in line if one.metric is not None and math.isfinite(one.metric)]
    valued.sort(key=lambda pair: pair[0], reverse=highest)
    return {id(one): place for place, (_, one) in enumerate(valued[:count], 1)}
