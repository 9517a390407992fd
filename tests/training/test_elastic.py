"""Every sample exactly once in every epoch, whatever happens to the world."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from schedules import Training, World

PRIME = 53


@pytest.mark.long
def test_a_world_that_grows_and_shrinks_and_is_killed(tmp_path: Path) -> None:
    """1 to 4 to 3 to 2 to 1, with samples that divide nothing; each world ends in the middle of an epoch."""
    training = Training(tmp_path)
    schedule = [
        World(1, stop_after=4),
        World(4, stop_after=9, kills=((6, 2),)),
        World(3, stop_after=13, kills=((10, 0), (12, 2))),
        World(2, stop_after=17, kills=((15, 1),)),
        World(0),
    ]
    for world in schedule:
        flags = (f"--samples={PRIME}", "--batch=7", "--epochs=3", "--save-steps=1", "--plain")
        assert training.run(world, *flags) == 0, training.said
    training.check_exactly_once(PRIME, epochs=3)
    assert training.restored() == [0, 4, 6, 9, 10, 12, 13, 15, 17]  # every step is saved, and none is lost
    assert {len(lines) for lines in training.committed().values()} == {1, 2, 3, 4}


@pytest.mark.long
def test_a_global_batch_larger_than_the_dataset(tmp_path: Path) -> None:
    training = Training(tmp_path)
    flags = ("--samples=11", "--batch=64", "--epochs=3", "--memory-every=1")
    assert training.run(World(3, kills=((2, 1),)), *flags) == 0, training.said
    training.check_exactly_once(11, epochs=3)
    assert len(training.committed()) == 3
    # At an epoch's end there is a file, too; what is still in memory comes before it.
    assert [line["name"] for line in training.lines if line.get("restored")] == ["memory"] * 3
    first, second = training.restored()
    assert first == 0 and second in (1, 2)  # the copy of its last step may not have been whole when it killed itself


@pytest.mark.long
def test_fewer_samples_than_ranks(tmp_path: Path) -> None:
    training = Training(tmp_path)
    assert training.run(World(4), "--samples=3", "--batch=4", "--epochs=2", "--plain") == 0, training.said
    training.check_exactly_once(3, epochs=2)


@pytest.mark.parametrize("stays", [1, pytest.param(0, marks=pytest.mark.long)])
def test_loader_workers_one_of_which_is_killed_and_then_a_rank(tmp_path: Path, stays: int) -> None:
    """What was read ahead by a world that died is read again by the next."""
    training = Training(tmp_path)
    flags = (f"--samples={PRIME}", "--batch=6", "--epochs=2", "--workers=2", "--save-steps=1", "--kill-worker=17")
    assert training.run(World(2, kills=((-1, 0), (11, 1))), *flags, f"--stays={stays}") == 0, training.said
    assert (tmp_path / "killed").exists() and "DataLoader worker" in training.said
    training.check_exactly_once(PRIME, epochs=2)
    assert len(training.restored()) == 3


@pytest.mark.long
def test_the_weights_are_those_of_one_process(tmp_path: Path) -> None:
    """Up to rounding, with sizes that divide nothing: units on three ranks, shards on two, and one process."""
    found = {}
    ways: dict[str, tuple[int, list[str]]] = {
        "alone": (0, []),
        "ddp": (3, ["--micro=2"]),
        "fsdp": (2, ["--micro=3", "--fsdp"]),
    }
    for name, (ranks, flags) in ways.items():
        folder = tmp_path / name
        folder.mkdir()
        training = Training(folder)
        assert training.run(World(ranks), "--samples=37", "--batch=10", "--plain", *flags) == 0, training.said
        training.check_exactly_once(37, epochs=2)
        found[name] = torch.load(folder / "weights.pt")
    for name, weights in found.items():
        for key, value in found["alone"].items():
            assert torch.allclose(weights[key], value, rtol=1e-3, atol=1e-4), (name, key)
