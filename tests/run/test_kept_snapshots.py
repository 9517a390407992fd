"""Snapshots under `holdfast run`: they outlive their ranks, the writer serves them, and nothing outlives the agent."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness import SCRIPTS, Job

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "checkpoint"))

from desks import saved_steps, wait_for_end

KEEPS = SCRIPTS / "keeps.py"


def start(job: Job, mode: str = "", flags: tuple[str, ...] = (), max_restarts: int = 1) -> dict[int, dict[str, Any]]:
    """What each rank was given; both have steps 5 and 6 in memory then."""
    job.start(KEEPS, *filter(None, [mode]), flags=flags, max_restarts=max_restarts)
    stepped = wait_for_each(job, lambda line: "step" in line)
    assert stepped.keys() == {0, 1}
    return {line["rank"]: line for line in job.news.seen if "own" in line}


def wait_for_each(job: Job, wanted: Callable[[dict[str, Any]], bool]) -> dict[int, dict[str, Any]]:
    """Such a line of each rank, in whatever order they come."""
    found: dict[int, dict[str, Any]] = {}
    while len(found) < 2:
        line = job.news.wait(wanted)
        found.setdefault(line["rank"], line)
    return found


def url(job: Job) -> str:
    return str(job.folder / "checkpoints")


def test_what_a_killed_rank_left_in_memory_is_saved(job: Job) -> None:
    given = start(job, flags=("--resume=epoch:7",))
    assert {rank: line["own"] for rank, line in given.items()} == {0: [0, 1], 1: [2, 3]}
    os.kill(given[1]["pid"], signal.SIGKILL)
    again = list(wait_for_each(job, lambda line: line["generation"] == 1 and "own" in line).values())
    assert job.wait() == 0
    assert saved_steps(url(job)) == [6]
    [persisted] = job.events("checkpoint.persisted")
    assert (persisted["step"], persisted["checkpoint"], persisted["bytes"]) == (6, "step_00000006", 200_000)
    assert "step 6, which the ranks had left in memory, is saved: step_00000006" in job.err
    # The next world has the same memory, another name, the same job, and goes on from the latest.
    assert all(sorted(line["found"]) == [5, 5, 6, 6] for line in again)
    assert {line["job"] for line in [*given.values(), *again]} == {given[0]["job"]} and given[0]["job"]
    assert given[0]["world"] == given[1]["world"] != again[0]["world"] == again[1]["world"]
    assert [line["resume"] for line in [*given.values(), *again]] == ["epoch:7", "epoch:7", "", ""]
    assert job.leftovers() == []


def test_ranks_that_save_by_themselves_are_asked_and_not_signalled(job: Job) -> None:
    start(job, "drains", ("--reschedule-exit-code=75",))
    job.signal(signal.SIGTERM)
    assert job.wait() == 75  # all is saved, but not done
    assert saved_steps(url(job)) == [7]
    assert "holdfast: stopped by SIGTERM; all ranks saved and ended by themselves\n" in job.err
    assert [(event["step"], event["checkpoint"]) for event in job.events("checkpoint.saved")] == [(7, "step_00000007")]
    assert {event["status"] for event in job.events("rank.exited")} == {0}
    assert job.events("checkpoint.persisted") == []  # nothing in memory is newer
    assert job.leftovers() == []


def test_a_rank_that_does_not_end_when_it_is_asked_to_is_killed_after_its_grace(job: Job) -> None:
    start(job, "deaf", ("--shutdown-timeout=1",))
    job.signal(signal.SIGTERM)
    assert job.wait() == 1
    assert {event["status"] for event in job.events("rank.exited")} == {-signal.SIGKILL}
    assert saved_steps(url(job)) == [6]
    assert job.leftovers() == []


def test_a_rank_that_fails_then_is_not_waited_for_by_the_others(job: Job) -> None:
    """They would come to no boundary any more. With a grace of ten minutes, this ends only if they are signalled."""
    start(job, "fails", ("--shutdown-timeout=600",))
    job.signal(signal.SIGTERM)
    assert job.wait() == 1
    assert {event["rank"]: event["status"] for event in job.events("rank.exited")} == {0: -signal.SIGTERM, 1: 3}
    assert saved_steps(url(job)) == [6]


def test_nothing_outlives_a_killed_agent(job: Job) -> None:
    start(job, "child")
    [child] = {line["child"] for line in job.news.seen if "child" in line}
    assert child == "False"  # what a rank starts is no rank
    [started] = job.events("writer.started")
    job.signal(signal.SIGKILL)
    wait_for_end(started["pid"])
    assert job.leftovers() == []


def test_a_killed_writer_costs_one_save_at_most(job: Job) -> None:
    start(job, "saves")
    job.news.wait(lambda line: line.get("saved") is not None)
    [started] = job.events("writer.started")
    os.kill(started["pid"], signal.SIGKILL)
    while len(job.events("writer.started")) < 2:  # who was just not being served finds it out by its next save
        job.news.wait(lambda line: "saved" in line)
    last = max(line["saved"] or 0 for line in job.news.seen if "saved" in line)
    wait_for_each(job, lambda line: (line.get("saved") or 0) > last + 2)
    unsaved = [line["rank"] for line in job.news.seen if "saved" in line and line["saved"] is None]
    assert len(unsaved) == len(set(unsaved))  # one at most for each
    job.signal(signal.SIGKILL)
    assert job.leftovers() == []


@pytest.mark.parametrize(
    "flags", [("--cold-start",), ("--no-python", "/bin/sh", "-c", '"$@"; exit $?', "sh", sys.executable)]
)
def test_programs_that_are_started_by_exec_have_their_memory_too(job: Job, flags: tuple[str, ...]) -> None:
    given = start(job, flags=flags)
    assert {rank: line["own"] for rank, line in given.items()} == {0: [0, 1], 1: [2, 3]}
    os.kill(given[0]["pid"], signal.SIGKILL)
    assert job.wait() == 0
    assert saved_steps(url(job)) == [6]
