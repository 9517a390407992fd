"""Streams as people have them, torchdata's among them: after restarts no sample comes twice in an epoch, or never."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schedules
import streamstory
import torch
from schedules import Training, World
from streamstory import BATCH, EPOCHS, SAMPLES, TOGETHER, TRICKIEST, Kept, Numbers, kinds, options
from torch import nn
from torch.utils.data import DataLoader

import holdfast
from holdfast.checkpoint import randomness, tree
from holdfast.checkpoint.errors import CheckpointError
from holdfast.training.streams import Stream

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata 0.11, with torch 2.13
STEPS = 6  # of an epoch
NAMES = list(kinds(0, 1))
# Its sampler draws twice when it is loaded, so the epoch after that has another order than it would have had.
REORDERED = ("torchdata", "torchdata, workers")


@pytest.fixture(autouse=True)
def own_randomness() -> Iterator[None]:
    before = randomness.capture()
    yield
    randomness.put_back(before)


class Lives:
    """One training on one stream, in processes that are stopped, as far as the stream can see."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.used: list[list[int]] = []
        self._left: tuple[Any, Any] | None = None  # with the last process: the stream's state, randomness

    def live(self, until: int | None = None) -> None:
        torch.manual_seed(3 if self._left is None else len(self.used))
        kind = kinds(0, 1)[self.name]
        state, drawn = self._left or (None, randomness.capture())
        stream = Stream(kind.source, BATCH, EPOCHS, 1, state, options(kind))
        assert kind.promise in stream.promise
        randomness.put_back(drawn)
        for batch in stream:
            torch.rand(1)  # as dropout does
            self.used.append(batch.tolist())
            stream.commit()
            if len(self.used) == until:
                break
        state = stream.state_dict()
        node, tensors = tree.flatten(state, "state")
        assert not tensors  # it is saved as plain values
        self._left = tree.unflatten(node, {}), randomness.capture()


def check_restarts(name: str, restarts: list[tuple[int, ...]]) -> None:
    whole = Lives(name)
    whole.live()
    assert len(whole.used) == EPOCHS * STEPS
    for epoch in range(EPOCHS):
        once(whole.used[epoch * STEPS :][:STEPS], (name, epoch))
    for stops in restarts:
        lives = Lives(name)
        for until in (*stops, None):
            lives.live(until)
        for epoch in range(EPOCHS):
            once(lives.used[epoch * STEPS :][:STEPS], (name, stops, epoch))
        assert len(lives.used) == len(whole.used)
        if name not in REORDERED:
            assert lives.used == whole.used, (name, stops)


def once(batches: list[list[int]], where: Any) -> None:
    counts = Counter(itertools.chain(*batches))
    assert counts == Counter(range(SAMPLES)), where


@pytest.mark.parametrize("name", [name for name in NAMES if "workers" not in name])
def test_after_any_two_restarts(name: str) -> None:
    check_restarts(name, list(itertools.combinations(range(1, EPOCHS * STEPS), 2)))


def test_workers_of_which_not_all_have_given_a_batch() -> None:
    check_restarts(TRICKIEST, [(3, 4), (6, 7, 9)])


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in NAMES if "workers" in name])
def test_with_workers_after_any_restart(name: str) -> None:
    check_restarts(name, [*((stop,) for stop in range(1, EPOCHS * STEPS)), (1, 2), (7, 8), (5, 6, 7)])


# -- in a world --------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_world_whose_ranks_are_killed_and_then_another_number_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the first epoch and in the second, and there once too often; another job goes on from the first one's file."""
    monkeypatch.setattr(schedules, "ELASTIC", Path(streamstory.__file__))
    training = Training(tmp_path)
    assert training.run(World(2, kills=((3, 1), (8, 0), (9, 1))), max_restarts=2) == 1, training.said
    promises = [kinds(0, 2)[name].promise for name in TOGETHER]
    assert [training.said.count(promise) for promise in promises] == [3 * promises.count(one) for one in promises]
    begins_anew(tmp_path, capsys)
    monkeypatch.setenv("HOLDFAST_RESUME", "epoch:1")
    assert training.run(World(2)) == 0, training.said
    assert training.restored() == [0, 3, 8, STEPS] and "(checkpoint_epoch_1.pt)" in training.said
    committed = training.committed()
    assert sorted(committed) == list(range(EPOCHS * STEPS))
    for name, epoch in itertools.product(TOGETHER, range(EPOCHS)):
        lines = [line for step in committed.values() for line in step if line["epochs"][name] == epoch]
        once([line["used"][name] for line in lines], (name, epoch))


def begins_anew(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With one rank where there were two, in the second epoch."""
    run = holdfast.init(checkpoints=folder / "checkpoints")
    model = nn.Sequential(nn.Linear(1, 1), nn.Dropout(0.5))
    restored = run.attach(model=model, optimizer=torch.optim.SGD(model.parameters()))
    assert restored is not None and (restored.step, restored.world_size, run.epochs_done) == (9, 2, 1)
    batches = run.batches(Kept(list(range(SAMPLES))), BATCH, epochs=EPOCHS)
    assert "with another number its epoch begins anew" in capsys.readouterr().err
    given = []
    for batch in batches:
        given.append(batch.tolist())
        run.step()
    once(given, "with another number of ranks")
    assert (run.steps_done, run.epochs_done) == (9 + STEPS, 2)
    run.close()


def test_an_iterable_dataset_that_knows_its_length_is_a_stream(tmp_path: Path) -> None:
    class Sized(Numbers):
        def __len__(self) -> int:
            return len(self.mine)

    run = holdfast.init(checkpoints=tmp_path)
    run.attach(model=nn.Linear(1, 1))
    for wrong in ({"per_rank": True}, {"micro_batch_size": 2}):
        with pytest.raises(ValueError, match="a stream has no order to go by"):
            run.batches(Sized([1]), BATCH, **wrong)
    assert sorted(next(run.batches(Sized([3, 4]), BATCH)).tolist()) == [3, 4]
    run.close()


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_data_that_has_become_shorter_is_refused() -> None:
    stream = Stream(Numbers(list(range(8))), BATCH, 1, 1, None, {})
    next(iter(stream))
    stream.commit()
    shorter = Stream(Numbers(list(range(4))), BATCH, 1, 1, stream.state_dict(), {})
    with pytest.raises(ValueError, match="no batch after the 1 of epoch 1 that were used before"):
        next(iter(shorter))


def test_options_for_a_loader_that_is_made_are_refused() -> None:
    with pytest.raises(ValueError, match="num_workers: a loader was given"):
        Stream(DataLoader(Numbers([1])), BATCH, 1, 1, None, {"num_workers": 2})


def test_a_state_that_cannot_be_saved_is_refused_with_the_first_batch() -> None:
    class Wrong(Kept):
        def state_dict(self) -> dict[str, Any]:
            return {"file": self}

    with pytest.raises(CheckpointError, match="stream/file: a Wrong cannot be saved"):
        next(iter(Stream(Wrong([1, 2]), BATCH, 1, 1, None, {})))
