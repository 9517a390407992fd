"""Shards: what a dead rank had of the state is in its last snapshot alone, after every second step here."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from harness import Job
from survivors.stories import STEPS, killed, pids, replaced, run, same, stayed, steps


def check(job: Job, expected: Any, stay: set[int]) -> None:
    """One that gloo does not let go of (see design.md) has no state of its own to leave, and is ended."""
    assert job.leftovers() == []
    stay = stay - replaced(job, "its shards are in a snapshot")
    assert same(torch.load(job.folder / "weights.pt"), expected, bits=False)
    assert stayed(job) == [[], sorted(stay)], job.err
    assert [len(pids(job, rank)) for rank in range(3)] == [1 if rank in stay else 2 for rank in range(3)]
    for rank, done in steps(job).items():
        again = len(done) - len(set(done))
        assert again <= 2 and done[-1] == STEPS, f"rank {rank} has done {again} steps twice"
    assert set().union(*steps(job).values()) == set(range(1, STEPS + 1))


@pytest.mark.parametrize(
    ("at", "how"),
    [
        ("forward", ("--train",)),
        pytest.param("backward", ("--train",), marks=pytest.mark.long),
        ("backward", ()),
        pytest.param("before step", ("--train",), marks=pytest.mark.long),
    ],
    ids=lambda value: value if isinstance(value, str) else "train" if value else "plain",
)
def test_a_rank_is_killed(job: Job, undisturbed: Any, at: str, how: tuple[str, ...]) -> None:
    """Nothing is raised by a backward, also in a plain loop."""
    assert run(job, [{"rank": 1, "step": 12, "at": at}], "--fsdp", *how) == 0, job.err
    check(job, undisturbed("--fsdp"), {0, 2})
    assert "could have gone on" not in job.err


@pytest.mark.long
def test_a_forward_that_fails_in_a_plain_loop_ends_its_rank_and_that_is_said(job: Job, undisturbed: Any) -> None:
    """Rank 1 dies while the others wait for it there: one that hears of a death elsewhere stays."""
    kills = [
        {"rank": 1, "step": 11, "at": "after step", "how": "soon", "s": 1.0},
        {"rank": 1, "step": 12, "at": "forward", "how": "stuck"},
    ]
    assert run(job, kills, "--fsdp") == 0, job.err
    check(job, undisturbed("--fsdp"), set())
    assert "rank 1 failed: killed by SIGKILL; in run.train() this rank could have gone on" in job.err


def test_one_that_does_not_get_out_is_not_waited_for(job: Job, undisturbed: Any) -> None:
    """Of what it has nothing is of use to anybody."""
    kills = [
        {"rank": 2, "step": 12, "at": "forward", "how": "stuck"},
        {"rank": 1, "step": 12, "at": "forward", "after": 0},
    ]
    assert run(job, kills, "--fsdp", "--train") == 0, job.err
    assert replaced(job, "its shards are in a snapshot") >= {2}
    check(job, undisturbed("--fsdp"), {0})


@pytest.mark.long
def test_two_at_once(job: Job, undisturbed: Any) -> None:
    kills = [
        {"rank": 0, "step": 12, "at": "backward", "after": 1},
        {"rank": 2, "step": 12, "at": "backward", "after": 0},
    ]
    assert run(job, kills, "--fsdp", "--train") == 0, job.err
    assert killed(job) == 2
    check(job, undisturbed("--fsdp"), {1})
