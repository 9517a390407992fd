"""Killing a rank and draining a job through the page, and whom it does not touch."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dashboard.conftest import Open, Page
from dashboard.fake_agent import HERE, answering, folded, told
from harness import TRAINS, Job
from holdfast.dashboard.acting import Agent, Refused
from holdfast.observe import record


def post(page: Page, path: str) -> tuple[int, dict[str, Any]]:
    status, body = page.ask(path, "POST", X_Holdfast_Control=page.control)
    return status, json.loads(body)


def test_a_rank_is_killed_and_then_the_job_is_drained(job: Job, open_page: Open, tmp_path: Path) -> None:
    hold = tmp_path / "hold"
    hold.touch()
    job.start(TRAINS, "1", max_restarts=1, env={"HOLD": str(hold), "PACE_S": "0.003"})
    killed = job.wait_step(rank=1, step=2)["pid"]
    page = open_page(job.run_dir)
    status, said = post(page, "/kill?rank=1")
    assert (status, said) == (200, {"done": f"rank 1 (pid {killed}) was sent SIGKILL"})
    job.wait_step(rank=1, step=1, generation=1)
    assert post(page, "/kill?rank=2") == (409, {"why": "there is no rank 2; see the grid"})
    status, said = post(page, "/drain")
    assert status == 200 and f"the agent (pid {job.pid}) was asked to stop" in said["done"]
    job.wait()
    assert [(found["kind"], found["rank"]) for found in job.incidents()] == [("signal", 1)]
    assert job.events("job.signalled") == [{"signal": "SIGTERM", "why": ""}]
    assert job.events("job.ended")[0]["outcome"] == "preempted"


def test_a_child_of_the_agent_is_its_rank(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    found = folded(tmp_path, sleeper.pid)
    with answering(told(tmp_path)):
        assert Agent(str(tmp_path)).standing(found) == "here"
        Agent(str(tmp_path)).kill(found, 0)
    assert sleeper.wait(30) == -signal.SIGKILL


def test_a_number_that_went_to_another_process_is_spared(tmp_path: Path) -> None:
    """The pid is in use, but its process is no child of the agent."""
    start = "import subprocess; print(subprocess.Popen(['sleep', '600'], stdout=subprocess.DEVNULL).pid)"
    orphan = int(subprocess.run([sys.executable, "-c", start], stdout=subprocess.PIPE, check=True).stdout)
    try:
        found = folded(tmp_path, orphan)
        with answering(told(tmp_path)), pytest.raises(Refused, match="is not rank 0 any more"):
            Agent(str(tmp_path)).kill(found, 0)
        os.kill(orphan, 0)
    finally:
        os.kill(orphan, signal.SIGKILL)


@pytest.mark.parametrize("run_id", ["llama-small", "another"])
def test_another_jobs_agent_is_spared(tmp_path: Path, sleeper: subprocess.Popen[bytes], run_id: str) -> None:
    """It has the number that this record names, but keeps another record, or is another job."""
    found = folded(tmp_path / "ours", sleeper.pid)
    (tmp_path / "theirs").mkdir()
    with answering(told(tmp_path / ("ours" if run_id == "another" else "theirs"), run_id)):
        agent = Agent(str(tmp_path / "ours"))
        for act in (agent.drain, lambda found: agent.kill(found, 0)):
            with pytest.raises(Refused, match="not on this machine, or has ended"):
                act(found)
    assert sleeper.poll() is None


def test_a_rank_of_another_machine_is_not_looked_for_here(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    """In containers, agents of several machines have the same pid, and so have their ranks."""
    found = folded(tmp_path, sleeper.pid, (HERE, f"there:{os.getpid()}"))
    with answering(told(tmp_path)), pytest.raises(Refused, match=f"it runs on there:{os.getpid()}; open the page on"):
        Agent(str(tmp_path)).kill(found, 1)
    assert sleeper.poll() is None


def test_what_has_ended_is_left_alone(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    found = folded(tmp_path, sleeper.pid)
    with answering(told(tmp_path)):
        agent = Agent(str(tmp_path))
        found.take(record.Noted(record.RankExited(0, 0, sleeper.pid, 0), 2.0, "", HERE, 9))
        with pytest.raises(Refused, match="rank 0 has no process now"):
            agent.kill(found, 0)
        found.take(record.Noted(record.JobEnded("succeeded", "", 1, 2.0, 0.0), 3.0, "", HERE, 10))
        with pytest.raises(Refused, match="the job has ended"):
            agent.drain(found)
    assert sleeper.poll() is None
