"""What a sample looks like depends on its key, and not on who reads it or what was read before."""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from holdfast.exact.keyed import KeyedDataset, seed_all, seed_of


class Rolls(Dataset[tuple[int, float, float, float]]):
    """Draws from all three generators, and as often as the index says."""

    sides = 6

    def __getitem__(self, index: int) -> tuple[int, float, float, float]:
        for _ in range(index):
            torch.rand(1)
        return index, float(torch.rand(())), random.random(), float(numpy.random.rand())

    def __getitems__(self, indices: list[int]) -> Any:
        raise AssertionError("a batch was read past the keys")

    def __len__(self) -> int:
        return 8


def read(loader: DataLoader[Any]) -> dict[int, tuple[float, ...]]:
    return {sample[0]: sample[1:] for batch in loader for sample in batch}


def test_seeds_are_stable_and_keys_do_not_run_together() -> None:
    assert seed_of(0, 1, 2) == 5024631148389746228
    assert seed_of("dropout", 3) == 3057257027036963555
    keys: list[tuple[int | str, ...]] = [(), (1,), ("1",), (1, 2), (12,), (2, 1), ("1", "2"), ("12",), ("1;i2",), (-1,)]
    seeds = [seed_of(*key) for key in keys]
    assert len(set(seeds)) == len(keys) and all(0 <= seed < 2**63 for seed in seeds)
    assert seed_of(numpy.int64(7), torch.tensor(8)) == seed_of(7, 8)


def test_one_seed_sets_every_generator() -> None:
    drawn = []
    for _ in range(2):
        seed_all(seed_of(5))
        drawn.append((torch.rand(3).tolist(), random.random(), numpy.random.rand()))
    assert drawn[0] == drawn[1]


def test_a_sample_is_the_same_from_any_worker_in_any_order() -> None:
    dataset = KeyedDataset(Rolls(), seed=1)
    expected = {index: dataset[index][1:] for index in reversed(range(8))}
    assert len(set(expected.values())) == 8
    for workers, context in [(0, None), (2, "fork"), (1, "spawn")]:
        loader = DataLoader(
            dataset, batch_size=3, shuffle=True, num_workers=workers, multiprocessing_context=context, collate_fn=list
        )
        assert read(loader) == expected


def test_an_epoch_is_set_before_workers_start_or_comes_with_the_index() -> None:
    dataset = KeyedDataset(Rolls(), seed=1)
    before = {index: dataset[index][1:] for index in range(8)}
    dataset.epoch = 1
    after = {index: dataset[index][1:] for index in range(8)}
    assert not set(before.values()) & set(after.values())
    indices = [[(0, index) for index in range(8)], [(1, index) for index in range(8)]]
    loader = DataLoader(dataset, batch_sampler=indices, num_workers=1, persistent_workers=True, collate_fn=list)
    for _ in range(2):
        first, second = loader
        assert {sample[0]: sample[1:] for sample in first} == before
        assert {sample[0]: sample[1:] for sample in second} == after


def test_the_rest_of_the_dataset_shows_through() -> None:
    dataset = KeyedDataset(Rolls(), seed=1, epoch=4)
    assert len(dataset) == 8 and dataset.sides == 6 and not hasattr(dataset, "corners")
    copied = pickle.loads(pickle.dumps(dataset))
    assert copied[3] == dataset[3] and copied.epoch == 4


def test_a_stream_has_no_keys() -> None:
    class Stream(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            yield 1

    with pytest.raises(TypeError, match="Stream has no samples by index"):
        KeyedDataset(Stream(), seed=1)
