"""The sampler: every sample once in an epoch, whatever becomes of the world and of the batch size."""

from __future__ import annotations

import json
import multiprocessing
import random
from collections import Counter
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset

from holdfast.data import DataChanged, ElasticSampler
from holdfast.data.order import Order


class Numbers(Dataset[int]):
    def __init__(self, size: int, first: int = 0) -> None:
        self.size = size
        self.first = first

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, at: int) -> int:
        return self.first + at


def as_list(samples: list[int]) -> list[int]:
    """A collate function that takes the empty batch."""
    return samples


class World:
    """All ranks' samplers. They only know of one another what the state says, which has to be the same on all."""

    def __init__(self, size: int, batch_size: int, world_size: int, state: dict[str, Any] | None = None) -> None:
        self.samplers = [
            ElasticSampler(size, batch_size, seed=5, rank=rank, world_size=world_size) for rank in range(world_size)
        ]
        for sampler in self.samplers:
            if state is not None:
                sampler.load_state_dict(state)

    @property
    def state(self) -> dict[str, Any]:
        states = [sampler.state_dict() for sampler in self.samplers]
        assert all(state == states[0] for state in states)
        return states[0]

    def train(self, steps: int, read_ahead: int) -> list[list[int]]:
        """The samples of each committed step. All ranks read so many batches further, as a loader does."""
        loops = [iter(sampler) for sampler in self.samplers]
        steps = min(steps, len(self.samplers[0]))
        done = []
        for _ in range(steps):
            shares = [next(loop) for loop in loops]
            sizes = [len(share) for share in shares]
            assert max(sizes) - min(sizes) <= 1
            done.append([index for share in shares for index in share])
        for loop in loops:
            for _ in range(read_ahead):
                next(loop, None)
        for sampler in self.samplers:
            for _ in range(steps):
                sampler.commit()
        return done


stages = st.tuples(st.integers(1, 7), st.integers(0, 6), st.integers(1, 50), st.integers(0, 3))


@settings(derandomize=True, deadline=None, max_examples=150)
@given(st.integers(1, 211), st.lists(stages, max_size=8))
def test_any_change_of_the_world_leaves_each_sample_once(size: int, changes: list[tuple[int, int, int, int]]) -> None:
    state = World(size, 1, 1).state
    committed: dict[int, list[int]] = {0: []}
    for world_size, steps, batch_size, read_ahead in changes:
        world = World(size, batch_size, world_size, json.loads(json.dumps(state)))
        epoch = state["epoch"]
        committed.setdefault(epoch, [])
        for step in world.train(steps, read_ahead):
            committed[epoch] += step
        state = world.state
        assert state["position"] == (len(committed[epoch]) if state["epoch"] == epoch else 0)
    for epoch, samples in committed.items():
        if epoch == state["epoch"]:
            rest = World(size, 13, 3, state)
            samples += [index for step in rest.train(size, 0) for index in step]
        assert samples == Order(size, 5, epoch).take(0, size).tolist()
        assert Counter(samples) == Counter(range(size))


def test_a_failed_step_is_given_to_the_survivors() -> None:
    world = World(100, 16, 4)
    world.train(2, 0)
    failed = [next(iter(sampler)) for sampler in world.samplers]  # and no commit
    survivors = World(100, 16, 3, world.state)
    again = [next(iter(sampler)) for sampler in survivors.samplers]
    assert list(chain(*again)) == list(chain(*failed))
    assert [len(share) for share in again] == [6, 5, 5]


def test_worlds_grow_and_shrink_over_a_prime_number_of_samples() -> None:
    size, state, committed = 997, None, []
    for world_size, steps in [(1, 3), (4, 5), (3, 1), (2, 4), (1, 100)]:
        world = World(size, 64, world_size, state)
        committed += [index for step in world.train(steps, 2) for index in step]
        state = world.state
    assert state is not None and (state["epoch"], state["position"]) == (1, 0)
    assert sorted(committed) == list(range(size))


def test_few_samples_and_large_batches() -> None:
    world = World(3, 64, 5)
    assert len(world.samplers[0]) == 1
    assert [len(next(iter(sampler))) for sampler in world.samplers] == [1, 1, 1, 0, 0]
    assert sorted(world.train(1, 0)[0]) == [0, 1, 2]
    assert world.state["epoch"] == 1


def test_progress_is_told() -> None:
    sampler = ElasticSampler(10, 4, rank=0, world_size=1)
    seen = []
    for _ in range(4):
        seen.append((sampler.epoch, sampler.position, sampler.batches_done, len(sampler)))
        sampler.commit()
    assert seen == [(0, 0, 0, 3), (0, 4, 1, 2), (0, 8, 2, 1), (1, 0, 0, 3)]


def test_epochs_have_orders_of_their_own() -> None:
    sampler = ElasticSampler(50, 50, seed=3, rank=0, world_size=1)
    (first,) = sampler
    assert list(sampler) == [first]
    sampler.commit()
    (second,) = sampler
    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second != list(range(50))
    assert list(ElasticSampler(5, 2, shuffle=False, rank=0, world_size=1)) == [[0, 1], [2, 3], [4]]


def test_an_iteration_goes_on_where_it_began() -> None:
    sampler = ElasticSampler(10, 3, shuffle=False, rank=0, world_size=1)
    batches = []
    for batch in sampler:
        batches.append(batch)
        sampler.commit()
    assert batches == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]
    assert (sampler.epoch, sampler.position) == (1, 0)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_that_reads_ahead_loses_nothing(workers: int) -> None:
    dataset, state, committed = Numbers(101), None, []
    for stop_at in (4, 7, 100):
        sampler = ElasticSampler(dataset, 8, seed=1, rank=0, world_size=1)
        if state is not None:
            sampler.load_state_dict(state)
        context = multiprocessing.get_context("fork") if workers else None
        loader = DataLoader(
            dataset, batch_sampler=sampler, num_workers=workers, collate_fn=as_list, multiprocessing_context=context
        )
        assert len(loader) == len(sampler)
        for step, batch in enumerate(loader, 1):
            committed += batch
            sampler.commit()
            if step == stop_at:
                break
        state = sampler.state_dict()
    assert sorted(committed) == list(range(101))


def test_the_seed_of_the_save_is_taken_over() -> None:
    saved = ElasticSampler(20, 5, seed=-(1 << 90), rank=0, world_size=1)
    saved.commit()
    other = ElasticSampler(20, 5, seed=1, shuffle=False, rank=0, world_size=1)
    other.load_state_dict(saved.state_dict())
    assert list(other) == list(saved)
    assert other.state_dict() == saved.state_dict()


def test_the_state_is_a_few_plain_values() -> None:
    sampler = ElasticSampler(Numbers(20), 6, seed=9, rank=1, world_size=2)
    sampler.commit()
    state = sampler.state_dict()
    assert list(state) == ["version", "epoch", "position", "seed", "size", "batch_size", "shuffle", "fingerprint"]
    assert {type(value) for value in state.values()} == {int, bool, str}
    assert (state["position"], state["size"], state["batch_size"]) == (6, 20, 6)


def test_another_dataset_is_refused_with_both_named() -> None:
    state = ElasticSampler(Numbers(20), 6, rank=0, world_size=1).state_dict()
    with pytest.raises(DataChanged, match=r"had 20 samples and now has 21;.*or leave the sampler's state out"):
        ElasticSampler(Numbers(21), 6, rank=0, world_size=1).load_state_dict(state)
    changed = ElasticSampler(Numbers(20, first=7), 6, rank=0, world_size=1)
    with pytest.raises(DataChanged) as caught:
        changed.load_state_dict(state)
    assert state["fingerprint"] in str(caught.value)
    assert changed.state_dict()["fingerprint"] in str(caught.value)
    assert (changed.epoch, changed.position) == (0, 0)


def test_a_fingerprint_that_nobody_gave_is_not_compared() -> None:
    state = ElasticSampler(Numbers(20), 6, rank=0, world_size=1).state_dict()
    ElasticSampler(20, 6, rank=0, world_size=1).load_state_dict(state)
    ElasticSampler(Numbers(20, first=7), 6, rank=0, world_size=1, fingerprint="").load_state_dict(state)
    with pytest.raises(DataChanged, match="mine"):
        ElasticSampler(20, 6, rank=0, world_size=1, fingerprint="mine").load_state_dict(state)


@pytest.mark.parametrize(
    "broken",
    [
        {"version": 2},
        {"version": None},
        {"epoch": -1},
        {"epoch": "1"},
        {"position": 20},
        {"position": -1},
        {"position": 1.5},
        {"position": True},
        {"seed": None},
        {"shuffle": 1},
        {"fingerprint": None},
    ],
)
def test_what_no_sampler_saved_is_refused(broken: dict[str, Any]) -> None:
    sampler = ElasticSampler(20, 6, rank=0, world_size=1)
    before = sampler.state_dict()
    with pytest.raises(ValueError, match="state"):
        sampler.load_state_dict({**before, **broken})
    with pytest.raises(ValueError, match="state"):
        sampler.load_state_dict({})
    assert sampler.state_dict() == before


@pytest.mark.parametrize(
    "refused",
    [
        lambda: ElasticSampler(0, 1),
        lambda: ElasticSampler([], 1),
        lambda: ElasticSampler(5, 0),
        lambda: ElasticSampler(5, 1, rank=0),
        lambda: ElasticSampler(5, 1, world_size=2),
        lambda: ElasticSampler(5, 1, rank=2, world_size=2),
        lambda: ElasticSampler(5, 1, rank=-1, world_size=2),
    ],
)
def test_bad_arguments_are_refused(refused: Callable[[], object]) -> None:
    with pytest.raises(ValueError):
        refused()


def test_the_place_is_found_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert list(ElasticSampler(4, 4, shuffle=False)) == [[0, 1, 2, 3]]
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert list(ElasticSampler(4, 4, shuffle=False)) == [[2]]
    monkeypatch.setenv("RANK", "one")
    with pytest.raises(ValueError, match="RANK=one"):
        ElasticSampler(4, 4)


def test_the_place_is_found_in_the_process_group(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        assert list(ElasticSampler(4, 4, shuffle=False)) == [[0, 1, 2, 3]]
    finally:
        torch.distributed.destroy_process_group()


def test_it_draws_from_nobody_s_random_numbers() -> None:
    before = random.getstate(), torch.get_rng_state().tolist()
    for _ in ElasticSampler(Numbers(5000), 64, rank=0, world_size=1):
        pass
    assert (random.getstate(), torch.get_rng_state().tolist()) == before
