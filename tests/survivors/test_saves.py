"""A rank is killed in a save, or the writer with it: the others stay, no step is lost, and what is saved is whole."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

from harness import WAIT_S, Job
from holdfast.agent.vault import WAITS_S
from holdfast.checkpoint import catalogue, verify
from holdfast.checkpoint.storage import open_storage
from survivors.stories import check, killed, run, start, steps


def until(happens: Callable[[], bool]) -> None:
    end_s = time.monotonic() + WAIT_S
    while not happens():
        assert time.monotonic() < end_s
        time.sleep(0.01)


def saved(job: Job) -> set[int | None]:
    """The steps that are in the directory, every byte of which can be read."""
    storage = open_storage(str(job.folder / "saved"))
    there = catalogue.find(storage)
    assert not there.broken and not any(verify.verify(storage, found) for found in there.found)
    return {found.step for found in there.found}


@pytest.mark.parametrize(
    "at", [pytest.param("slot.filling", marks=pytest.mark.long), "slot.complete.before", "handed over"]
)
def test_a_rank_is_killed_in_a_save(job: Job, undisturbed: Any, at: str) -> None:
    """Before anything of the state is copied; when all of it is, in the thread that copies; and when the writer was
    asked for it. Nothing is copied but what is saved."""
    assert run(job, [{"rank": 1, "step": 10, "at": at}], "--memory-every=0") == 0, job.err
    assert killed(job) == 1
    check(job, undisturbed(), {1})
    assert {20} <= saved(job) <= {10, 20, 30}


def test_a_rank_and_the_writer_are_killed_in_one(job: Job, undisturbed: Any) -> None:
    """The writer before its commit: all parts of a checkpoint are there, and it is none. Then the rank, which has done
    nothing meanwhile."""
    env = {"HOLDFAST_FAULT": f"commit.before:1:{job.folder / 'struck'}"}
    kills: list[dict[str, Any]] = [
        {"rank": 1, "step": 10, "at": "handed over", "until": "struck"},
        {"rank": 1, "step": 11, "at": "forward", "how": "stuck"},
    ]
    assert run(job, kills, "--memory-every=0", env=env) == 0, job.err
    assert killed(job) == 2
    check(job, undisturbed(), {1})
    assert len(job.events("writer.started")) == 2
    assert {20} <= saved(job) <= {10, 20, 30}


@pytest.mark.parametrize("at", ["import", pytest.param("load", marks=pytest.mark.long)])
def test_a_job_that_is_stopped_while_a_rank_joins_saves_what_the_others_have_in_memory(job: Job, at: str) -> None:
    """No step of the new world was done, and nobody has looked whether all are to end: they will."""
    joins = {"rank": 1, "at": at, "generation": 1, "until": "told", "how": "waits"}
    start(job, [{"rank": 1, "step": 13, "at": "forward"}, joins], "--memory-every=5")
    until((job.folder / "killed.1").exists)
    job.signal(signal.SIGTERM)
    until(lambda: any(event["drain"] for event in job.events("ranks.signalled")))
    (job.folder / "told").touch()
    assert job.wait() == 0, job.err
    assert "stopped by SIGTERM; all ranks saved and ended by themselves" in job.err
    done = steps(job)
    newest = max(step for step in saved(job) if step is not None)
    assert 12 in done[0] and newest >= max(done[0][-1], done[1][-1])
    assert job.leftovers() == []


def test_what_a_world_has_left_is_written_when_the_next_one_trains(job: Job, undisturbed: Any) -> None:
    assert run(job, [{"rank": 1, "step": 13, "at": "forward"}], "--pace=0.2") == 0, job.err
    check(job, undisturbed(), {1})
    lines = [json.loads(line) for line in (job.run_dir / "events.jsonl").read_text().splitlines()]
    [written] = [line for line in lines if line["name"] == "checkpoint.persisted"]
    [launched_s] = [line["at_s"] for line in lines if line["name"] == "world.launched" and line["data"]["generation"]]
    steps_s = [line["at_s"] for line in lines if line["name"] == "rank.first_step" and line["data"]["generation"]]
    assert len(steps_s) == 3 and written["data"]["committed"]
    assert written["at_s"] > min(max(steps_s), launched_s + WAITS_S / 2)
