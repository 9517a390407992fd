"""Exact mode ends with the same bits as a run that nothing disturbed: Dropout, BatchNorm, jitter, AdamW's moments."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import NamedTuple

import pytest
from schedules import Training, World

SCHEDULES = int(os.environ.get("HOLDFAST_SCHEDULES", "1"))
STAYED = max(3, SCHEDULES)  # these have one job each, not two
FLAGS = ("--exact", "--samples=37", "--batch=10", "--epochs=2")
STEPS = 8


class Schedule(NamedTuple):
    worlds: tuple[World, ...]
    flags: tuple[str, ...]


def scheduled(seed: int) -> Schedule:
    """Two worlds of any size, the first one of which ends before the training does. A rank is killed in each."""
    chance = random.Random(seed)
    first, second = chance.randint(1, 4), chance.randint(1, 4)
    stop = chance.randint(2, STEPS - 2)
    worlds = (
        World(first, stop, ((chance.randrange(stop), chance.randrange(first)),)),
        World(second, 0, ((chance.randrange(stop, STEPS), chance.randrange(second)),)),
    )
    every = chance.choice([[], ["--save-steps=1"], ["--save-steps=3"]])
    return Schedule(worlds, (*every, f"--memory-every={chance.randint(1, 3)}", f"--workers={chance.choice([0, 0, 2])}"))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """In one process, without a launcher."""
    training = Training(tmp_path_factory.mktemp("undisturbed"))
    assert training.run(World(0), *FLAGS) == 0, training.said
    training.check_exactly_once(37, epochs=2)
    assert len(training.committed()) == STEPS
    return training.digest


@pytest.mark.parametrize("seed", range(SCHEDULES))
def test_any_schedule_of_worlds_and_kills_ends_with_the_same_bits(tmp_path: Path, undisturbed: str, seed: int) -> None:
    schedule = scheduled(seed)
    training = Training(tmp_path)
    for world in schedule.worlds:
        assert training.run(world, *FLAGS, *schedule.flags) == 0, (schedule, training.said)
    training.check_exactly_once(37, epochs=2)
    assert len(training.restored()) == 4, schedule  # both kills came to pass
    assert training.digest == undisturbed, schedule


def stayed(seed: int) -> Schedule:
    """One job, in which ranks are killed, one after the other, and the others stay."""
    chance = random.Random(seed)
    ranks = chance.randint(2, 4)
    steps = sorted(chance.choices(range(STEPS), k=chance.randint(1, 4)))
    steps = steps[: 3 if len(set(steps)) == 1 else None]  # a fourth at the same step is one too many for any job
    kills = tuple((step, chance.randrange(ranks)) for step in steps)
    return Schedule((World(ranks, 0, kills),), (f"--memory-every={chance.randint(0, 3)}", "--stays=1"))


@pytest.mark.parametrize("seed", range(STAYED))
def test_any_schedule_of_kills_that_the_others_outlive_ends_with_the_same_bits(
    tmp_path: Path, undisturbed: str, seed: int
) -> None:
    schedule = stayed(seed)
    training = Training(tmp_path)
    [world] = schedule.worlds
    assert training.run(world, *FLAGS, *schedule.flags) == 0, (schedule, training.said)
    training.check_exactly_once(37, epochs=2)
    generations = {line["generation"] for line in training.lines if "step" in line}
    assert max(generations) == len(world.kills), schedule  # all came to pass
    assert training.digest == undisturbed, schedule
