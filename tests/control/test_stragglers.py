"""Ranks that hold the others up."""

from __future__ import annotations

import random

import pytest

from holdfast.control.stragglers import WINDOWS, Found, Stragglers, Window, window


def hear(stragglers: Stragglers, own_s: dict[str, dict[int, float]], times: int = 1) -> list[Found]:
    found: list[Found] = []
    for _ in range(times):
        for node, ranks in own_s.items():
            measured = window(ranks)
            assert measured is not None
            found += stragglers.hear(node, measured)
    return found


def test_a_window_says_who_is_slowest_and_what_is_usual() -> None:
    assert window({}) is None and window({0: 0.0}) is None
    assert window({3: 0.5}) == Window(1, 3, 0.5, 0.0, 0.5)
    assert window({0: 0.125, 1: 0.5, 2: 0.25, 3: 0.125}) == Window(4, 1, 0.5, 0.125, 0.1875, 0.0)


def test_a_slow_rank_of_two_is_found_after_some_windows_and_told_once() -> None:
    stragglers = Stragglers()
    slow = {"n1": {0: 0.1, 1: 0.2}}
    assert hear(stragglers, slow, WINDOWS - 1) == []
    [found] = hear(stragglers, slow)
    assert (found.rank, found.own_s, found.usual_s, found.score) == (1, 0.2, 0.1, 2.0)
    assert hear(stragglers, slow, 10) == []


def test_one_slow_window_is_nothing() -> None:
    stragglers = Stragglers()
    for _ in range(10):
        assert hear(stragglers, {"n1": {0: 0.1, 1: 0.2}}, WINDOWS - 1) == []
        assert hear(stragglers, {"n1": {0: 0.1, 1: 0.1}}) == []


def test_it_is_told_when_a_rank_is_as_fast_as_the_others_again() -> None:
    stragglers = Stragglers()
    hear(stragglers, {"n1": {0: 0.1, 1: 0.2}}, WINDOWS)
    assert hear(stragglers, {"n1": {0: 0.1, 1: 0.1}}, WINDOWS - 1) == []
    [gone] = hear(stragglers, {"n1": {0: 0.1, 1: 0.1}})
    assert (gone.rank, gone.gone) == (1, True) and stragglers.found == {}


def test_a_slow_node_of_one_rank_is_found_by_the_others() -> None:
    stragglers = Stragglers()
    nodes = {f"n{rank}": {rank: 0.1} for rank in range(8)} | {"n3": {3: 0.15}}
    [found] = hear(stragglers, nodes, WINDOWS)
    assert found.rank == 3 and found.usual_s == pytest.approx(0.1)


def test_a_rank_alone_is_compared_with_nobody() -> None:
    assert hear(Stragglers(), {"n1": {0: 0.5}}, 10) == []


def test_ranks_that_differ_among_themselves_are_no_stragglers() -> None:
    """Of many that are far apart, one is always the slowest."""
    dice = random.Random(1)
    stragglers = Stragglers()
    for _ in range(200):
        own_s = {rank: dice.uniform(0.05, 0.15) for rank in range(8)}
        assert hear(stragglers, {"n1": own_s}) == []


def test_tiny_differences_are_no_matter() -> None:
    assert hear(Stragglers(), {"n1": {0: 0.0001, 1: 0.0009}}, 10) == []


def test_a_new_world_begins_anew() -> None:
    stragglers = Stragglers()
    hear(stragglers, {"n1": {0: 0.1, 1: 0.2}}, WINDOWS)
    stragglers.begin()
    assert stragglers.found == {}
    assert hear(stragglers, {"n1": {0: 0.1, 1: 0.2}}, WINDOWS - 1) == []
