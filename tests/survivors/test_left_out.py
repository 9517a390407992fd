"""What a program has that does not go along with ranks that stay: it is named, and all ranks are started anew."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness import Job

SCRIPT = Path(__file__).parent / "scripts" / "survives.py"
LEFT_OUT = Path(__file__).parent / "scripts" / "leaves_out.py"


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    made = Job(tmp_path)
    yield made
    made.end()


def run(job: Job, what: str, nproc: int = 2, max_restarts: int = 2) -> int:
    env = {"CHECKPOINT_DIR": str(job.folder / "saved")}
    return job.run(LEFT_OUT, what, nproc=nproc, max_restarts=max_restarts, env=env)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("optimizer", "AdamW steps and is not attached; a new rank would have an empty one; attach it, too"),
        ("scheduler", "StepLR is not attached, and would begin anew in a new rank; attach it, too"),
        ("shards", "an FSDPLinear that is not attached cannot be kept the same on all ranks; attach it, too"),
    ],
)
def test_replicas_are_the_same_after_a_rank_was_killed(job: Job, what: str, said: str) -> None:
    assert run(job, what) == 0, job.err
    assert job.err.count(f"ranks do not outlive their worlds: {said}") == 2, "once in each world"
    assert [event["stayed"] for event in job.events("world.launched")] == [[], []]
    [incident] = job.incidents()
    assert incident["action"] == f"restart 1 of 2; all ranks are started anew: {said}"
    first, second = ((job.folder / f"weights.{rank}").read_text() for rank in (0, 1))
    assert first == second


def test_the_step_in_which_that_is_seen_is_not_gone_on_from(job: Job) -> None:
    """It is the one in which its world ends: what is not attached has stepped on gradients that are none."""
    assert run(job, "first", max_restarts=3) == 0, job.err
    assert "goes on from step 0 (the memory" not in job.err
    first, second = ((job.folder / f"weights.{rank}").read_text() for rank in (0, 1))
    assert first == second


def test_shards_do_not_stand_by(job: Job) -> None:
    """They would be cut for a rank that there is not. The job says so, and goes on from the zygote."""
    env = {"CHECKPOINT_DIR": str(job.folder / "saved")}
    given = ("--steps=100000", "--pace=0.02", "--fsdp", "--train")
    job.start(SCRIPT, *given, nproc=1, flags=("--standby=1",), env=env)
    job.wait_event("standby.ended")
    job.signal(signal.SIGTERM)
    assert job.wait() == 0, job.err
    said = "holdfast: a program that stands by cannot take a rank's place: DeviceMesh() is called before run.attach()"
    assert f"no process stands by from now on: one ended before it was ready: {said}" in job.err
    assert job.events("standby.ready") == [] and job.leftovers() == []


def test_a_mistake_in_a_world_that_is_over_ends_the_job_in_the_next(job: Job) -> None:
    """It is taken for the end of the world, and its step done again. There it comes again, and has its name."""
    assert run(job, "mistake", max_restarts=1) == 1
    over, mistake = job.incidents()
    assert (over["kind"], over["rank"]) == ("signal", 1)
    assert (mistake["kind"], mistake["rank"], mistake["restarted"]) == ("error", 0, False)
    assert mistake["headline"] == "RuntimeError: of the program's own"
