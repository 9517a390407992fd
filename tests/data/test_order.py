"""The order: a bijection, the same for ever, and as good a shuffle as one that draws."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.data.order import MAX_SIZE, Order

# Sizes that are listed, that are at the border to the network, and that are primes or squares or next to them.
SIZES = [0, 1, 2, 3, 5, 12, 100, 1023, 1024, 1025, 1089, 2047, 4096, 10007, 65537, 99856]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads that wait for one another on a busy machine take seconds for what one does in milliseconds."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def spread(counts: torch.Tensor) -> float:
    """By how many standard deviations chi-square is beyond what equally likely cells give."""
    expected = counts.sum().item() / counts.numel()
    chi = ((counts.double() - expected) ** 2).sum().item() / expected
    freedom = counts.numel() - 1
    return (chi - freedom) / math.sqrt(2 * freedom)


def binned(values: torch.Tensor, size: int, bins: int) -> torch.Tensor:
    return torch.bincount(values * bins // size, minlength=bins)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("shuffle", [True, False])
def test_every_index_is_there_once(size: int, shuffle: bool) -> None:
    indices = Order(size, 3, 1, shuffle).take(0, size)
    assert indices.dtype == torch.int64
    assert indices.sort().values.tolist() == list(range(size))
    if not shuffle:
        assert indices.tolist() == list(range(size))


@settings(derandomize=True, deadline=None, max_examples=150)
@given(st.data())
def test_one_by_one_is_the_same_as_many(data: st.DataObject) -> None:
    size = data.draw(st.one_of(st.integers(1, 5000), st.integers(1, MAX_SIZE)))
    order = Order(size, data.draw(st.integers(-(1 << 80), 1 << 80)), data.draw(st.integers(0, 1 << 70)))
    begin = data.draw(st.integers(0, size - 1))
    end = min(size, begin + data.draw(st.sampled_from([0, 1, 15, 16, 17, 40, 100])))
    one_by_one = [order.at(position) for position in range(begin, end)]
    assert order.take(begin, end).tolist() == one_by_one
    assert all(0 <= index < size for index in one_by_one)
    assert len(set(one_by_one)) == end - begin
    positions = torch.arange(begin, end).flip(0)
    assert order.pick(positions).tolist() == one_by_one[::-1]
    assert positions.tolist() == list(range(begin, end))[::-1]


def test_the_values_are_those_of_version_1() -> None:
    assert Order(10, 0, 0).take(0, 10).tolist() == [3, 8, 5, 0, 4, 9, 6, 2, 7, 1]
    assert Order(4, -1, 2).take(0, 4).tolist() == [2, 0, 1, 3]
    assert Order(4, 1 << 70, 0).take(0, 4).tolist() == [0, 3, 1, 2]
    assert Order(1009, 7, 3).take(0, 6).tolist() == [587, 504, 993, 27, 946, 35]
    assert Order(1025, 7, 3).take(0, 6).tolist() == [68, 831, 529, 292, 49, 52]
    assert Order(10**6 + 3, 0, 0).take(0, 4).tolist() == [641036, 83665, 353124, 556982]
    assert Order(10**10, 42, 7).take(7_654_321_987, 7_654_321_990).tolist() == [5902253332, 8019711055, 2911520322]
    assert Order(MAX_SIZE, -5, 10**6).at(MAX_SIZE - 1) == 949494170973274089


def test_all_values_of_an_epoch_are_those_of_version_1() -> None:
    text = ",".join(map(str, Order(100_003, 11, 5).take(0, 100_003).tolist()))
    assert (
        hashlib.sha256(text.encode()).hexdigest() == "7465b284783361af8a28c56fffaf210b4d072f4f5716e7100df5ae3f1ab55829"
    )


def test_it_does_not_depend_on_modes_or_default_devices() -> None:
    expected = Order(10**6, 1, 1).take(5, 300).tolist()
    with torch.inference_mode():
        order = Order(10**6, 1, 1)
        assert order.take(5, 300).tolist() == expected
    with torch.device("meta"):
        assert Order(10**6, 1, 1).take(5, 300).tolist() == expected
    taken = order.take(5, 300)
    assert not taken.is_inference()  # such a tensor could not index what needs a gradient
    assert taken.tolist() == expected


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_all_permutations_of_a_few_are_equally_frequent(size: int) -> None:
    seen: dict[tuple[int, ...], int] = {}
    for seed in range(60 * math.factorial(size)):
        permutation = tuple(Order(size, seed, 0).take(0, size).tolist())
        seen[permutation] = seen.get(permutation, 0) + 1
    assert len(seen) == math.factorial(size)
    assert abs(spread(torch.tensor(list(seen.values())))) < 4


@pytest.mark.parametrize("size", [6, 9, 12, 1280])
def test_any_position_has_any_index_equally_often(size: int) -> None:
    for position in (0, size // 2, size - 1):
        indices = torch.tensor([Order(size, seed, 2).at(position) for seed in range(3000)])
        assert abs(spread(binned(indices, size, min(size, 64)))) < 4


@pytest.mark.parametrize("size", [1536, 1 << 16, 640_000])
def test_indices_are_spread_evenly_over_the_positions(size: int) -> None:
    for seed in range(5):
        indices = Order(size, seed, 0).take(0, size)
        cells = torch.arange(size) * 16 // size * 16 + indices * 16 // size
        # Rows and columns of cells are full by construction, so the deviation can only be smaller than by chance.
        assert spread(torch.bincount(cells, minlength=256)) < 4


@pytest.mark.parametrize("size", [1 << 16, 256_000])
def test_neighbours_differ_by_anything(size: int) -> None:
    side = math.isqrt(size)  # both sides of the network are near it, and a position plus a side is its worst case
    indices = Order(size, 7, 0).take(0, size)
    for lag in [1, 2, 3, 64, *range(side - 40, side + 40)]:
        differences = (indices[lag:] - indices[:-lag]) % size
        assert abs(spread(binned(differences, size, 128))) < 4.5, lag
    second = (indices[2:] - 2 * indices[1:-1] + indices[:-2]) % size
    assert abs(spread(binned(second, size, 128))) < 4


def test_neighbours_are_no_more_often_neighbours_than_by_chance() -> None:
    size, runs = 10007, 200
    close = 0
    for seed in range(runs):
        indices = Order(size, seed, 0).take(0, size)
        close += int(((indices[1:] - indices[:-1]).abs() == 1).sum())
    assert abs(close - 2 * runs) < 4 * math.sqrt(2 * runs)  # two of them in a shuffle of any size


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Order(1 << 16, 0, 0), Order(1 << 16, 0, 1)),
        (Order(1 << 16, 0, 0), Order(1 << 16, 1, 0)),
        (Order(1 << 16, 5, 0), Order(1 << 16, -5, 0)),
        (Order(1 << 16, 0, 0), Order(1 << 16, 1 << 64, 0)),
        (Order(1 << 16, 1, 12), Order(1 << 16, 11, 2)),
        (Order(1 << 16, 0, 0), Order((1 << 16) - 1, 0, 0)),
    ],
)
def test_epochs_and_seeds_have_nothing_in_common(one: Order, other: Order) -> None:
    size = other.size
    first, second = one.take(0, size), other.take(0, size)
    assert abs(spread(binned((first - second) % one.size, one.size, 256))) < 4
    flipped = first ^ second
    shares = [(flipped >> bit & 1).double().mean().item() for bit in range(16)]
    assert all(abs(share - 0.5) < 4 * 0.5 / math.sqrt(size) for share in shares)
    assert int((first == second).sum()) < 8


def test_what_cannot_be_is_refused() -> None:
    order = Order(100, 0, 0)
    for refused in (
        lambda: Order(-1, 0, 0),
        lambda: Order(MAX_SIZE + 1, 0, 0),
        lambda: Order(1, 0, -1),
        lambda: order.at(-1),
        lambda: order.at(100),
        lambda: order.take(-1, 5),
        lambda: order.take(6, 5),
        lambda: order.take(0, 101),
        lambda: order.pick(torch.tensor([100])),
        lambda: order.pick(torch.tensor([-1, 3])),
    ):
        with pytest.raises(ValueError, match=r"order|epoch") as caught:
            refused()
        assert "\n" not in str(caught.value)


def test_an_order_is_a_value() -> None:
    order = Order(100, 0, 0)
    order.take(0, 100)
    assert order == Order(100, 0, 0)
    assert hash(order) == hash(Order(100, 0, 0))
    assert order != msgspec.structs.replace(order, epoch=1)
    with pytest.raises(AttributeError):
        order.size = 5  # type: ignore[misc]
