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
    begin: int, samples: int, batch_size: int, world: int, micro: int | None = None, leaves: int | None = None
) -> list[list[Unit]]:
    """Of each rank."""
    return [Cut(batch_size, rank, world, micro, leaves).units(begin, begin + samples) for rank in range(world)]


def real(ranks: list[list[Unit]]) -> list[Unit]:
    return [unit for units in ranks for unit in units if unit.weight > 0]


def check_cover(ranks: list[list[Unit]], begin: int, end: int) -> None:
    """In the order of the ranks, without a gap and without an overlap; and the ends are marked."""
    at = begin
    for unit in real(ranks):
        assert unit.begin == at < unit.end
        at = unit.end
    assert at == end
    for units in ranks:
        assert [unit.is_last for unit in units] == [False] * (len(units) - 1) + [True]
        for unit in units:
            assert unit.weight >= 0 and begin <= unit.begin < unit.end <= end  # never empty, even if it counts nothing


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
    found = [(unit.begin, unit.end, unit.weight, unit.number) for unit in real(ranks)]
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
        [Unit(70, 71, 3.0, 0, True)],
        [Unit(70, 71, 0.0, 0, True)],
        [Unit(70, 71, 0.0, 0, True)],
    ]
    assert cut_up(0, 3, 16, 2) == [[Unit(0, 3, 2.0, 0, True)], [Unit(0, 2, 0.0, 0, True)]]
    assert cut_up(0, 2, 2, 3, leaves=8)[2] == [Unit(0, 2, 0.0, 0, True)]
