"""The split: all of a batch once, evenly, at any world size; and leaves that no world size moves."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.data.split import leaves, run_of, share

often = settings(derandomize=True, deadline=None, max_examples=200)
positions = st.integers(0, 1 << 62)


@often
@given(positions, st.integers(0, 300), st.integers(1, 40))
def test_shares_are_all_of_it_once_in_order(begin: int, size: int, world_size: int) -> None:
    shares = [share(begin, begin + size, rank, world_size) for rank in range(world_size)]
    assert [at for first, last in shares for at in range(first, last)] == list(range(begin, begin + size))
    sizes = [last - first for first, last in shares]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1


@often
@given(positions, st.integers(1, 300), st.integers(1, 40), st.data())
def test_leaves_are_all_of_it_once_and_a_short_batch_has_the_same(
    begin: int, batch_size: int, count: int, data: st.DataObject
) -> None:
    full = leaves(begin, begin + batch_size, batch_size, count)
    assert [at for first, last in full for at in range(first, last)] == list(range(begin, begin + batch_size))
    assert all(first < last for first, last in full)
    assert len(full) <= count
    end = begin + data.draw(st.integers(0, batch_size))
    short = leaves(begin, end, batch_size, count)
    assert [at for first, last in short for at in range(first, last)] == list(range(begin, end))
    assert short[:-1] == full[: max(0, len(short) - 1)]  # only the last may differ
    width = -(-batch_size // count)
    assert all(2 * (last - first) > width for first, last in short[1:])


@often
@given(st.integers(0, 100), st.integers(1, 40))
def test_runs_are_all_leaves_once_in_order(leaf_count: int, world_size: int) -> None:
    runs = [run_of(leaf_count, rank, world_size) for rank in range(world_size)]
    assert [leaf for run in runs for leaf in run] == list(range(leaf_count))


def test_by_example() -> None:
    assert [share(10, 17, rank, 3) for rank in range(3)] == [(10, 13), (13, 15), (15, 17)]
    assert [share(0, 2, rank, 4) for rank in range(4)] == [(0, 1), (1, 2), (2, 2), (2, 2)]
    assert leaves(100, 111, 11, 4) == [(100, 103), (103, 106), (106, 109), (109, 111)]
    assert leaves(100, 110, 10, 4) == [(100, 103), (103, 106), (106, 110)]
    assert leaves(100, 104, 10, 4) == [(100, 104)]
    assert leaves(100, 101, 10, 4) == [(100, 101)]
    assert run_of(5, 1, 2) == range(3, 5)


def test_what_cannot_be_is_refused() -> None:
    for refused in (
        lambda: share(5, 4, 0, 1),
        lambda: share(0, 4, 2, 2),
        lambda: share(0, 4, -1, 2),
        lambda: share(0, 4, 0, 0),
        lambda: leaves(0, 5, 4, 2),
        lambda: leaves(0, 4, 4, 0),
        lambda: leaves(0, 0, 0, 1),
        lambda: leaves(3, 2, 4, 1),
        lambda: run_of(-1, 0, 1),
    ):
        with pytest.raises(ValueError):
            refused()
