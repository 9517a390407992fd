"""Streams: where they go on after a restart, and what is said of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from torch.utils.data import IterableDataset

from holdfast.training.streams import Stream


class Count(IterableDataset[int]):
    def __init__(self, size: int) -> None:
        self.size = size
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.size))


class Stateful:
    """A loader with a position of its own."""

    def __init__(self) -> None:
        self.at = 0
        self.read = 0

    def __iter__(self) -> Iterator[int]:
        while self.at < 6:
            self.at += 1
            self.read += 1
            yield self.at
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def stream(source: Any, state: Any = None, epochs: int = 2) -> Stream:
    return Stream(source, 2, epochs, 1, state, {})


def steps(found: Stream, count: int | None = None) -> list[Any]:
    """Batches of so many steps that were done, or of all."""
    given = []
    for batch in found:
        given.append(batch.tolist() if hasattr(batch, "tolist") else batch)
        found.commit()
        if len(given) == count:
            break
    return given


@pytest.mark.parametrize("done", range(1, 6))
def test_an_iterable_dataset_is_read_again_up_to_where_it_was(done: int) -> None:
    whole = steps(stream(Count(5)))
    assert whole == [[0, 1], [2, 3], [4]] * 2
    first = stream(Count(5))
    before = steps(first, done)
    dataset = Count(5)
    second = stream(dataset, first.state_dict())
    assert before + steps(second) == whole
    assert dataset.epochs == [0, 1][done >= 3 :]


def test_a_loader_with_a_state_goes_on_by_it() -> None:
    first = stream(Stateful())
    before = steps(first, 4)
    loader = Stateful()
    second = stream(loader, first.state_dict())
    assert before + steps(second, 2) == [1, 2, 3, 4, 5, 6]
    assert loader.read <= 3  # what was used before was not read again
    assert "by its own state" in second.promise and "begins anew" in second.promise


def test_a_batch_whose_step_was_not_done_comes_again() -> None:
    first = stream(Stateful())
    for number, batch in enumerate(first):
        if number == 2:
            break  # as a rank that is killed in its third step
        assert batch == number + 1
        first.commit()
    assert steps(stream(Stateful(), first.state_dict()), 1) == [3]


def test_an_epoch_ends_with_its_last_step() -> None:
    found = stream(Count(5), epochs=1)
    ends = []
    for _ in found:
        ends.append(found.commit())
    assert ends == [False, False, True]
    state = found.state_dict()
    assert (state["epoch"], state["batches"]) == (1, 0)


def test_a_stream_without_a_batch_is_refused() -> None:
    with pytest.raises(ValueError, match="no batch at all"):
        steps(stream(Count(0)))
