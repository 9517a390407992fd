"""How a global batch is cut: all of it once, with weights that make one mean of it, at any world size."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from holdfast.training.units import Cut, Unit

sizes = st.integers(1, 300)
worlds = st.integers(1, 17)
begins = st.integers(0, 10**12)
micros = st.none() | st.integers(1, 50)


def cut_up(
    begin: int, samples: int, batch_size: int, world: int, micro: int | None = None, leaves: int | None = None,
    done: int = 0,
) -> list[list[Unit]]:  # fmt: skip
    """Of each rank."""
    return [Cut(batch_size, rank, world, micro, leaves).units(begin, begin + samples, done) for rank in range(world)]


def real(ranks: list[list[Unit]]) -> list[Unit]:
    return [unit for units in ranks for unit in units if unit.weight > 0]


def check_cover(ranks: list[list[Unit]], begin: int, end: int) -> None:
    """Without a gap and without an overlap; and the ends are marked."""
    at = begin
    for unit in sorted(real(ranks)):
        assert unit.begin == at < unit.end
        at = unit.end
    assert at == end
    for units in ranks:
        assert [unit.is_last for unit in units] == [False] * (len(units) - 1) + [True]
        for unit in units:
            assert unit.weight >= 0 and unit.begin < unit.end <= end  # never empty, even if it counts nothing


@given(begins, sizes, st.data(), worlds, micros)
def test_ranks_share_a_batch_and_their_mean_is_that_of_the_batch(
    begin: int, batch_size: int, data: st.DataObject, world: int, micro: int | None
) -> None:
    samples = data.draw(st.integers(1, batch_size))
    ranks = cut_up(begin, samples, batch_size, world, micro)
    check_cover(ranks, begin, begin + samples)
    assert len({len(units) for units in ranks}) == 1  # each forward of a sharded model is a matter of all of them
    assert math.isclose(sum(unit.weight for unit in real(ranks)) / world, 1.0)
    for unit in real(ranks):
        assert math.isclose(unit.weight, (unit.end - unit.begin) * world / samples)
        assert micro is None or unit.end - unit.begin <= micro
    assert all([unit.number for unit in units] == list(range(len(units))) for units in ranks)
    if micro is None:
        assert len(ranks[0]) == 1


@given(begins, sizes, st.data(), worlds, st.integers(1, 40))
def test_leaves_are_the_same_at_any_world_size(
    begin: int, batch_size: int, data: st.DataObject, world: int, leaves: int
) -> None:
    samples = data.draw(st.integers(1, batch_size))
    ranks = cut_up(begin, samples, batch_size, world, leaves=leaves)
    check_cover(ranks, begin, begin + samples)
    found = [(unit.begin, unit.end, unit.weight, unit.number) for unit in sorted(real(ranks))]
    [alone] = cut_up(begin, samples, batch_size, 1, leaves=leaves)
    assert found == [(unit.begin, unit.end, unit.weight, unit.number) for unit in alone]
    assert [number for *_, number in found] == list(range(len(found)))
    assert math.isclose(sum(weight for _, _, weight, _ in found), 1.0)
    assert len(found) == Cut(batch_size, 0, world, None, leaves).leaf_count(samples) <= leaves


@given(begins, worlds, st.data())
def test_a_short_last_batch_leaves_nobody_with_a_single_sample(begin: int, world: int, data: st.DataObject) -> None:
    """BatchNorm can make nothing of one."""
    batch_size = data.draw(st.integers(2 * world, 2 * world + 100))
    samples = data.draw(st.integers(2, batch_size))
    for [unit] in cut_up(begin, samples, batch_size, world):
        assert unit.end - unit.begin >= 2


def test_who_has_no_samples_takes_some_along_that_count_nothing() -> None:
    assert cut_up(70, 1, 16, 3) == [
        [Unit(70, 71, 3.0, 0, True, 1)],
        [Unit(70, 71, 0.0, 0, True, 1)],
        [Unit(70, 71, 0.0, 0, True, 1)],
    ]
    assert cut_up(0, 3, 16, 2) == [[Unit(0, 3, 2.0, 0, True, 3)], [Unit(0, 2, 0.0, 0, True, 3)]]
    assert cut_up(0, 2, 2, 3, leaves=8)[2][0][:6] == (0, 2, 0.0, 0, True, 2)


@given(begins, sizes, st.data(), worlds, worlds, st.integers(1, 20))
def test_a_step_that_is_done_in_part_goes_on_in_any_world(
    begin: int, batch_size: int, data: st.DataObject, world: int, other: int, micro: int
) -> None:
    samples = data.draw(st.integers(1, batch_size))
    ranks = cut_up(begin, samples, batch_size, world, micro)
    for number, unit in enumerate(ranks[0]):
        before = [units[: number + 1] for units in ranks]
        assert {units[number].done for units in ranks} == {unit.done}
        covered = sorted((one.begin, one.end) for one in real(before))
        assert covered[0][0] == begin and covered[-1][1] == begin + unit.done
        if unit.is_last:
            break
        assert Cut(batch_size, 0, other, micro).can_go_on(samples, unit.done)
        rest = cut_up(begin, samples, batch_size, other, micro, done=unit.done)
        check_cover(rest, begin + unit.done, begin + samples)
        weights = sum(one.weight / world for one in real(before)) + sum(one.weight / other for one in real(rest))
        assert math.isclose(weights, 1.0)


@given(begins, st.integers(1, 2000), worlds, worlds, st.integers(1, 300))
def test_an_exact_step_goes_on_where_a_round_of_any_world_ends(
    begin: int, batch_size: int, world: int, other: int, leaves: int
) -> None:
    ranks = cut_up(begin, batch_size, batch_size, world, leaves=leaves)
    count = Cut(batch_size, 0, world, None, leaves).leaf_count(batch_size)
    for units in ranks:
        assert [unit.round for unit in units if unit.closes] == [unit.round for unit in ranks[0] if unit.closes]
        for unit in units:
            assert unit.number in unit.round.leaves(count)
    for unit in ranks[0]:
        if not unit.closes or unit.is_last:
            continue
        assert Cut(batch_size, 0, world, None, leaves).can_go_on(batch_size, unit.done)
        if Cut(batch_size, 0, other, None, leaves).can_go_on(batch_size, unit.done):
            rest = cut_up(begin, batch_size, batch_size, other, leaves=leaves, done=unit.done)
            check_cover(rest, begin + unit.done, begin + batch_size)
            assert min(one.number for one in real(rest)) == unit.round.leaves(count).stop
        else:
            assert other > world  # which has longer rounds
