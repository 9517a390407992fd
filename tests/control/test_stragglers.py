"""Ranks that hold the others up."""

from __future__ import annotations

import random

import pytest

from holdfast.control.stragglers import MOST, SECTION, STEP, WINDOWS, By, Found, Stragglers, Window, window


def hear(stragglers: Stragglers, own_s: dict[str, dict[int, float]], times: int = 1, by: By = STEP) -> list[Found]:
    found: list[Found] = []
    for _ in range(times):
        for node, ranks in own_s.items():
            measured = window(ranks, by)
            assert measured is not None
            found += stragglers.hear(node, measured)
    return found


def test_a_window_says_who_is_slowest_and_what_is_usual() -> None:
    assert window({}) is None and window({0: 0.0}) is None
    assert window({3: 0.5}) == Window(1, ((3, 0.5),), 0.0, 0.5)
    slowest = ((1, 0.5), (2, 0.25), (0, 0.125), (3, 0.125))
    assert window({0: 0.125, 1: 0.5, 2: 0.25, 3: 0.125, 4: 0.125}) == Window(5, slowest, 0.125, 0.125, 0.0)


def test_what_a_node_tells_does_not_grow_with_it() -> None:
    measured = window(dict.fromkeys(range(1000), 0.1))
    assert measured is not None and len(measured.slowest) == MOST


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


def test_a_slow_node_of_several_ranks_is_not_compared_with_itself() -> None:
    """Of two nodes, half of what is known is its own."""
    stragglers = Stragglers()
    nodes = {"n1": dict.fromkeys(range(4), 0.1), "n2": dict.fromkeys(range(4, 8), 0.135)}
    found = hear(stragglers, nodes, WINDOWS)
    assert [(each.rank, each.usual_s) for each in found] == [(rank, 0.1) for rank in range(4, 8)]
    assert hear(stragglers, nodes, 10) == []


def test_most_ranks_are_no_stragglers_because_a_few_elsewhere_are_fast() -> None:
    assert hear(Stragglers(), {"n1": {0: 0.05}, "n2": dict.fromkeys(range(1, 8), 0.1)}, 10) == []


def test_two_slow_ranks_of_a_node_are_both_found_and_stay_so_while_they_take_turns() -> None:
    stragglers = Stragglers()
    for at in range(12):
        own_s = dict.fromkeys(range(8), 0.1) | {2: 0.2 + at % 2 / 10, 5: 0.3 - at % 2 / 10}
        told = hear(stragglers, {"n1": own_s})
        assert sorted(found.rank for found in told) == ([2, 5] if at == WINDOWS - 1 else [])
    [gone] = hear(stragglers, {"n1": dict.fromkeys(range(8), 0.1) | {5: 0.2}}, WINDOWS)
    assert (gone.rank, gone.gone) == (2, True) and list(stragglers.found) == [5]


def test_of_a_rank_that_slower_ones_hide_nothing_is_said() -> None:
    """A window names no more than so many."""
    stragglers = Stragglers()
    fast = {"n1": dict.fromkeys(range(20, 40), 0.1)}
    hear(stragglers, fast | {"n2": dict.fromkeys(range(MOST), 0.2)}, WINDOWS)
    assert sorted(stragglers.found) == list(range(MOST))
    hide = dict.fromkeys(range(MOST), 0.2) | dict.fromkeys(range(10, 10 + MOST), 0.3)
    assert [found.rank for found in hear(stragglers, fast | {"n2": hide}, 10)] == list(range(10, 10 + MOST))
    calm = dict.fromkeys(range(MOST), 0.1) | dict.fromkeys(range(10, 10 + MOST), 0.1)
    gone = hear(stragglers, fast | {"n2": calm}, WINDOWS)
    assert all(found.gone for found in gone) and len(gone) == 2 * MOST and stragglers.found == {}


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


# -- sections ---------------------------------------------------------------------------------------------------------


def test_a_rank_that_is_slow_in_its_sections_alone_is_found_by_them() -> None:
    stragglers = Stragglers()
    own, sections = {"n1": {0: 0.1, 1: 0.1, 2: 0.1}}, {"n1": {0: 0.02, 1: 0.02, 2: 0.05}}
    for _ in range(WINDOWS - 1):
        assert hear(stragglers, own) + hear(stragglers, sections, by=SECTION) == []
    [found] = hear(stragglers, own) + hear(stragglers, sections, by=SECTION)
    assert (found.rank, found.by, found.own_s, found.usual_s) == (2, SECTION, 0.05, 0.02)
    assert found.headline == "holds the others up: it needs 50 ms a step in its sections, the others 20 ms"


def test_a_rank_that_is_slow_by_both_is_told_once_and_is_fast_again_when_it_is_by_both() -> None:
    stragglers = Stragglers()
    slow, fast = {"n1": {0: 0.1, 1: 0.1, 2: 0.2}}, {"n1": {0: 0.1, 1: 0.1, 2: 0.1}}
    told = [*hear(stragglers, slow, WINDOWS), *hear(stragglers, slow, WINDOWS, SECTION)]
    assert [(found.rank, found.by, found.gone) for found in told] == [(2, STEP, False)]
    assert hear(stragglers, fast, WINDOWS) == [] and list(stragglers.found) == [2]
    [gone] = hear(stragglers, fast, WINDOWS, SECTION)
    assert (gone.rank, gone.gone) == (2, True) and stragglers.found == {}


def test_who_waits_for_a_slow_rank_in_a_section_is_not_taken_for_one() -> None:
    """Of two it cannot be known; of more the others wait as well."""
    for waiting in (1, 2, 7):
        sections = {"n1": dict.fromkeys(range(waiting), 0.2) | {waiting: 0.05}}
        assert hear(Stragglers(), sections, 10, SECTION) == []
    assert hear(Stragglers(), {"n1": {0: 0.2}, "n2": {1: 0.05}}, 10, SECTION) == []


def test_who_waits_in_a_section_for_half_of_the_ranks_is_not_taken_for_one() -> None:
    waits, slow = dict.fromkeys(range(4), 0.2), dict.fromkeys(range(4, 8), 0.05)
    assert hear(Stragglers(), {"n1": waits | slow}, 10, SECTION) == []
    assert hear(Stragglers(), {"n1": waits, "n2": slow}, 10, SECTION) == []
    assert hear(Stragglers(), {f"n{rank}": {rank: own_s} for rank, own_s in (waits | slow).items()}, 10, SECTION) == []
