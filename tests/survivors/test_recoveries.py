"""Several die at once, or one in a recovery that is under way."""

from __future__ import annotations

from typing import Any

import pytest

from harness import Job
from survivors.stories import check, killed, run


def test_two_at_once(job: Job, undisturbed: Any) -> None:
    kills = [{"rank": rank, "step": 11, "at": "backward"} for rank in (0, 2)]
    assert run(job, kills) == 0, job.err
    check(job, undisturbed(), {0, 2})


@pytest.mark.parametrize(
    ("at", "soon"),
    [
        ("import", {}),
        ("load", {}),
        ("state", {}),
        pytest.param("state", {"how": "soon", "s": 0.001}, marks=pytest.mark.long),
    ],
    ids=["the new rank, early", "the new rank", "the one that has the state", "that one, a little later"],
)
def test_killed_in_the_recovery_itself(job: Job, undisturbed: Any, at: str, soon: dict[str, Any]) -> None:
    """Early: while the others wait for it to come."""
    rank = 0 if at == "state" else 1
    kills: list[dict[str, Any]] = [{"rank": 1, "step": 11, "at": "backward"}]
    kills.append({"rank": rank, "generation": 1, "at": at, **soon})
    assert run(job, kills) == 0, job.err
    check(job, undisturbed(), {rank, 1})
    assert ["stay" in incident["action"] for incident in job.incidents()] == [True, True]


@pytest.mark.parametrize("at", [pytest.param("state", marks=pytest.mark.long), "sent"])
def test_the_one_that_gives_its_state_to_several_is_killed(job: Job, undisturbed: Any, at: str) -> None:
    """Before they have any of it, and when they have a part. Another one has the state, too."""
    kills: list[dict[str, Any]] = [
        {"rank": 1, "step": 11, "at": "backward", "after": 1},
        {"rank": 3, "step": 11, "at": "backward", "after": 0},
    ]
    kills.append({"rank": 0, "generation": 1, "at": at})
    assert run(job, kills, nproc=4) == 0, job.err
    assert killed(job) == 3
    check(job, undisturbed(nproc=4), {0, 1, 3}, nproc=4)
    assert "goes on from step 10 (the memory of rank 2)" in job.err
