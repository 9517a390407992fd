"""Which checkpoints are kept, and why."""

from __future__ import annotations

import random

import pytest

from holdfast.control.retention import Kept, decide


def kept(
    number: int, metric: float | None = None, verified: bool = True, pinned: bool = False, superseded: bool = False
) -> Kept:
    return Kept(f"step_{number}", number, metric, verified, pinned, superseded)


def numbers(checkpoints: list[Kept], last: int = 3, best: int = 0, highest: bool = False, every: int = 0) -> list[int]:
    """Of those that are kept."""
    verdicts = decide(checkpoints, last, best, highest, every)
    return [one.number for one, verdict in zip(checkpoints, verdicts, strict=True) if verdict.keep]


LINE = [kept(number) for number in (60, 50, 40, 30, 20, 10)]


def test_the_last_are_kept() -> None:
    assert numbers(LINE, last=3) == [60, 50, 40]
    assert numbers(LINE[:2], last=3) == [60, 50]
    assert numbers([], last=3) == []


def test_every_verdict_has_its_reason() -> None:
    line = [kept(40), kept(30, pinned=True), kept(20), kept(15, metric=1.0), kept(10), kept(7)]
    assert [verdict.reason for verdict in decide(line, last=2, best=1, every=10)] == [
        "it is the newest that was verified",
        "it is pinned",
        "every 10 is kept",
        "it is number 1 of the best",
        "every 10 is kept",
        "5 newer ones were verified",
    ]


def test_without_a_rule_everything_is_kept() -> None:
    line = [kept(30), kept(20, verified=False), kept(10, superseded=True)]
    assert numbers(line, last=0) == [30, 20, 10]


def test_the_best_are_kept_beside_the_last() -> None:
    line = [kept(50, 0.5), kept(40, 0.9), kept(30, 0.1), kept(20, 0.7), kept(10, 0.2)]
    assert numbers(line, last=1, best=2) == [50, 30, 10]
    assert numbers(line, last=1, best=2, highest=True) == [50, 40, 20]
    assert numbers(line, last=0, best=1) == [50, 30]


@pytest.mark.parametrize("value", [None, float("nan"), float("inf"), float("-inf")])
def test_what_has_no_value_is_never_the_best(value: float | None) -> None:
    line = [kept(40, 9.0), kept(30, value), kept(20, value), kept(10, 8.0)]
    assert numbers(line, last=1, best=2) == [40, 10]
    assert numbers(line, last=1, best=2, highest=True) == [40, 10]


def test_of_equals_the_newer_is_the_best() -> None:
    assert numbers([kept(40), kept(30, 1.0), kept(20, 1.0)], last=1, best=1) == [40, 30]


def test_every_nth_is_kept() -> None:
    assert numbers(LINE, last=1, every=20) == [60, 40, 20]


def test_saves_that_were_never_verified_do_not_push_out_good_ones() -> None:
    failed = [kept(number, verified=False) for number in (99, 98, 97, 96)]
    assert numbers([*failed, *LINE], last=2) == [99, 98, 97, 96, 60, 50]


def test_one_that_was_never_verified_goes_when_enough_newer_ones_are_sure() -> None:
    line = [kept(60), kept(50), kept(45, verified=False), kept(40), kept(35, verified=False)]
    assert numbers(line, last=2) == [60, 50]
    assert numbers(line, last=3) == [60, 50, 45, 40]


def test_the_newest_verified_one_stays_whatever_the_rules() -> None:
    assert numbers(LINE, last=0, best=1) == [60]
    assert numbers(LINE, last=0, every=7) == [60]


def test_superseded_ones_go_as_new_ones_take_their_place() -> None:
    old = [kept(number, superseded=True) for number in (90, 80, 70)]
    assert numbers([*old, kept(20), kept(10)], last=3) == [90, 20, 10]
    assert numbers([*old, kept(30), kept(20), kept(10)], last=3) == [30, 20, 10]
    assert numbers(old, last=3) == [90, 80, 70]
    assert numbers(old, last=0, best=1) == [90]
    assert numbers([kept(95, superseded=True, verified=False), *old], last=3) == [90, 80, 70]


def test_a_superseded_one_is_never_the_best_nor_the_newest() -> None:
    assert numbers([kept(90, 0.1, superseded=True), kept(20, 0.5), kept(10, 0.6)], last=1, best=1) == [20]


def test_pinned_ones_stay() -> None:
    line = [kept(30), kept(20, pinned=True, verified=False), kept(10, pinned=True, superseded=True)]
    assert numbers(line, last=1) == [30, 20, 10]


@pytest.mark.parametrize("seed", range(50))
def test_whatever_there_is(seed: int) -> None:
    dice = random.Random(seed)
    line = [
        kept(number, dice.choice([None, dice.random()]), dice.random() < 0.7, dice.random() < 0.1, dice.random() < 0.3)
        for number in range(dice.randrange(20), 0, -1)
    ]
    last, best, every = dice.randrange(4), dice.randrange(3), dice.choice([0, 0, 5])
    left = set(numbers(line, last, best, False, every))
    sure = [one.number for one in line if one.verified and not one.superseded]
    assert set(sure[: max(1, last)]) <= left
    assert {one.number for one in line if one.pinned} <= left
    if any(one.verified for one in line):
        assert any(one.verified for one in line if one.number in left)
    if last or best or every:
        again = [one for one in line if one.number in left]
        assert set(numbers(again, last, best, False, every)) == left  # what is kept is kept the next time
