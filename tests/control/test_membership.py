"""Who is in a world and with which rank, for nodes of any number, size, role and order."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from holdfast.control.membership import Assignment, Member, Seat, Settings, choose, seat, shares, target
from holdfast.control.protocol import VERSION, Hello
from holdfast.control.worlds import World

DETERMINISTIC = Assignment.DETERMINISTIC


def settings(smallest: int = 1, largest: int = 99, **more: Any) -> Settings:
    return Settings(run_id="run", min_nodes=smallest, max_nodes=largest, **more)


def a_node(name: str, arrival: int = 0, order: int | None = None, local_size: int = 2, role: str = "default") -> Member:
    hello = Hello(VERSION, name, f"host-{name}", f"addr-{name}", local_size, 29000 + arrival, role=role, order=order)
    return Member(hello, arrival, 0.0)


def nodes(names: str, **more: Any) -> list[Member]:
    return [a_node(name, arrival, **more) for arrival, name in enumerate(names)]


def names(members: Sequence[Member]) -> str:
    return "".join(member.hello.node for member in members)


def seated(seats: Sequence[Seat]) -> str:
    return "".join(place.node for place in seats)


def seats_of(names: str, **more: Any) -> tuple[Seat, ...]:
    return seat(settings(**more), nodes(names), ())


def worlds_of(members: Sequence[Member], **more: Any) -> list[World]:
    wanted = settings(**more)
    return shares(wanted, seat(wanted, members, ()), generation=4, restarts=2)


# -- how many ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("smallest", "largest", "spares", "available", "wanted"),
    [
        (2, 4, 0, 1, 0),
        (2, 4, 0, 2, 2),
        (2, 4, 0, 3, 3),
        (2, 4, 0, 9, 4),
        (2, 4, 1, 4, 3),  # one is held back though there is room for it
        (2, 4, 1, 2, 2),  # but not where too few would be left
        (2, 2, 3, 2, 2),
        (1, 1, 0, 0, 0),
    ],
)
def test_a_world_has_as_many_nodes_as_there_are_and_as_it_may_but_for_the_spares(
    smallest: int, largest: int, spares: int, available: int, wanted: int
) -> None:
    assert target(settings(smallest, largest, spares=spares), available) == wanted


# -- which ------------------------------------------------------------------------------------------------------------


def test_the_first_to_come_are_chosen() -> None:
    late_first = [a_node("c", 2), a_node("a", 0), a_node("b", 1)]
    assert names(choose(settings(2, 2), late_first, ())) == "ab"


def test_nodes_with_a_place_by_the_infrastructure_are_chosen_before_those_without() -> None:
    assert names(choose(settings(2, 2), [a_node("a", 0), a_node("b", 1, order=7), a_node("c", 2, order=3)], ())) == "cb"


def test_who_was_in_the_last_world_stays() -> None:
    assert set(names(choose(settings(2, 2), nodes("abcd"), seats_of("cd")))) == set("cd")


def test_too_few_nodes_make_no_world() -> None:
    assert choose(settings(3, 4), nodes("ab"), ()) == []


def test_a_static_world_has_every_rank_or_does_not_begin() -> None:
    static = settings(2, 2, static=True)
    assert choose(static, [a_node("a", order=0)], ()) == []
    assert names(choose(static, [a_node("a", order=1), a_node("b", order=0)], ())) == "ab"


# -- with which rank --------------------------------------------------------------------------------------------------


def test_group_ranks_follow_the_infrastructure_then_the_arrival() -> None:
    members = [a_node("a", 0), a_node("b", 1, order=5), a_node("c", 2), a_node("d", 3, order=1)]
    assert seated(seat(settings(), members, ())) == "dbac"


def test_by_default_the_ranks_close_up_when_one_goes() -> None:
    assert seated(seat(settings(), nodes("abcd")[1:], seats_of("abcd"))) == "bcd"


def test_deterministic_ranks_are_kept_and_gaps_are_filled_by_who_has_none() -> None:
    later = [*nodes("abcd")[1:], a_node("e", 9)]
    assert seated(seat(settings(assignment=DETERMINISTIC), later, seats_of("abcd"))) == "ebcd"


def test_a_deterministic_rank_that_does_not_exist_any_more_fills_a_gap() -> None:
    assert seated(seat(settings(assignment=DETERMINISTIC), nodes("abcd")[1:], seats_of("abcd"))) == "dbc"


def test_a_static_rank_is_the_nodes_own_whatever_was() -> None:
    static = settings(2, 2, static=True, assignment=DETERMINISTIC)
    now = [a_node("x", 5, order=0), a_node("a", 0, order=1)]
    assert seated(seat(static, now, seats_of("ab"))) == "xa"


def test_a_seat_has_the_port_that_the_node_said_last() -> None:
    member = a_node("a")
    member.store_port = 31000
    assert seat(settings(), [member], ())[0].store_port == 31000


# -- each one's share -------------------------------------------------------------------------------------------------


def test_ranks_are_contiguous_over_nodes_of_different_sizes() -> None:
    members = [a_node("a", 0, local_size=3), a_node("b", 1, local_size=1), a_node("c", 2, local_size=4)]
    worlds = worlds_of(members)
    assert [(world.first_rank, world.local_size) for world in worlds] == [(0, 3), (3, 1), (4, 4)]
    assert {world.size for world in worlds} == {8}


def test_roles_count_their_own_ranks() -> None:
    members = [
        a_node("a", 0, role="trainer", local_size=2),
        a_node("b", 1, role="reader", local_size=1),
        a_node("c", 2, role="trainer", local_size=2),
        a_node("d", 3, role="reader", local_size=3),
    ]
    assert [(world.role, world.role_first_rank, world.role_size) for world in worlds_of(members)] == [
        ("trainer", 0, 4),
        ("reader", 0, 4),
        ("trainer", 2, 4),
        ("reader", 1, 4),
    ]


def test_everybody_is_told_the_store_of_group_rank_zero_and_the_same_count() -> None:
    worlds = worlds_of([a_node("a", 1), a_node("b", 0)], max_restarts=9)
    assert {(world.master_addr, world.master_port) for world in worlds} == {("addr-b", 29000)}
    assert {(world.generation, world.restart_count, world.max_restarts) for world in worlds} == {(4, 2, 9)}


# -- for any nodes ----------------------------------------------------------------------------------------------------


class Case:
    """A random world, its predecessor, and who is there now."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        smallest = rng.randint(1, 6)
        largest = rng.randint(smallest, 8)
        assignment = rng.choice(list(Assignment))
        self.settings = settings(smallest, largest, spares=rng.randint(0, 2), assignment=assignment)
        ordered = rng.random() < 0.5
        everybody = [
            a_node(str(i), i, rng.randint(0, 9) if ordered else None, rng.randint(1, 8), rng.choice("xyz"))
            for i in rng.sample(range(40), 14)
        ]
        self.former = seat(self.settings, choose(self.settings, rng.sample(everybody, 10), ()), ())
        self.here = rng.sample(everybody, rng.randint(0, 12))
        self.chosen = choose(self.settings, self.here, self.former)
        self.seats = seat(self.settings, self.chosen, self.former)
        self.worlds = shares(self.settings, self.seats, 1, 0) if self.seats else []
        shuffled = rng.sample(self.here, len(self.here))
        self.again = seat(self.settings, choose(self.settings, shuffled, self.former), self.former)


CASES = [Case(seed) for seed in range(500)]


def test_a_world_is_never_too_small_nor_too_large_and_has_nobody_twice() -> None:
    for case in CASES:
        size = len(case.seats)
        assert size == 0 or case.settings.min_nodes <= size <= case.settings.max_nodes
        assert (size == 0) == (len(case.here) < case.settings.min_nodes)
        assert len({place.node for place in case.seats}) == size
        assert {place.node for place in case.seats} <= {member.hello.node for member in case.here}


def test_it_does_not_matter_in_which_order_nodes_are_listed() -> None:
    for case in CASES:
        assert case.seats == case.again


def test_nobody_of_the_last_world_makes_room_for_a_new_one() -> None:
    for case in CASES:
        had, have = {place.node for place in case.former}, {place.node for place in case.seats}
        left_out = {member.hello.node for member in case.here} - have
        assert not (have - had and left_out & had)


def test_every_rank_from_zero_on_is_had_by_one_node_and_one_place_in_its_role() -> None:
    for case in CASES:
        ranks = [world.first_rank + local for world in case.worlds for local in range(world.local_size)]
        assert ranks == list(range(len(ranks)))
        assert all(world.size == len(ranks) for world in case.worlds)
        assert [world.group_rank for world in case.worlds] == list(range(len(case.worlds)))
        for role in "xyz":
            of_role = [world for world in case.worlds if world.role == role]
            places = [world.role_first_rank + local for world in of_role for local in range(world.local_size)]
            assert places == list(range(len(places)))
            assert all(world.role_size == len(places) for world in of_role)


def test_a_deterministic_rank_that_still_exists_is_kept() -> None:
    for case in CASES:
        if case.settings.assignment is not DETERMINISTIC:
            continue
        had = {place.node: place.group_rank for place in case.former}
        for place in case.seats:
            if had.get(place.node, 99) < len(case.seats):
                assert place.group_rank == had[place.node]
