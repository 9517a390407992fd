"""All four commands on a job that runs, fails, comes back and ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from harness import Job
from holdfast.cli import logs, ls, status

PRINTS = Path(__file__).parent / "scripts" / "prints.py"
FOLLOW = [sys.executable, "-m", "holdfast", "logs", "-f", "--only", "stdout"]


def test_a_job_that_fails_and_comes_back(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    hold = job.folder / "hold"
    hold.touch()
    job.start(PRINTS, flags=("--tee", "3"), max_restarts=1, env={"HOLD": str(hold)})
    victim = job.wait_step(1, 2)["pid"]
    with subprocess.Popen([*FOLLOW, str(job.pid)], stdout=subprocess.PIPE, text=True) as follower:
        assert follower.stdout is not None
        assert "generation 0" in follower.stdout.readline()
        os.kill(victim, signal.SIGKILL)
        job.wait_event("incident.closed")
        while (line := follower.stdout.readline()) and "[default1]:rank 1 generation 1 " not in line:
            assert "[default" in line
        assert line

        assert status.main([str(job.pid)]) == 0
        text = capsys.readouterr().out
        assert "prints.py, job " in text and ": training for " in text
        assert "  restarts    1 of 1\n" in text
        assert "signal: rank 1: killed by SIGKILL" in text and "back after" in text
        told: dict[str, Any] = {"answers": False}
        while not told["answers"]:  # a busy agent may take longer than is waited for
            job.news.wait(lambda line: "step" in line)
            assert status.main([str(job.run_dir), "--json"]) == 0
            told = json.loads(capsys.readouterr().out)
        assert (told["pid"], told["generation"]) == (job.pid, 1)
        assert told["step"] > 0 and told["ranks"]["1"]["state"] == "training"
        mine: list[dict[str, object]] = []
        while not mine:
            job.news.wait(lambda line: "step" in line)
            assert ls.main(["--json"]) == 0
            rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
            mine = [row for row in rows if row["pid"] == job.pid]
        assert [(row["standing"], row["restarts"]) for row in mine] == [("training", 1)]

        hold.unlink()
        assert job.wait() == 0
        follower.stdout.read()
        assert follower.wait(30) == 0
    assert status.main([str(job.run_dir)]) == 0
    assert ": succeeded " in capsys.readouterr().out
    assert logs.main([str(job.run_dir), "--rank", "1", "--generation", "0", "--only", "stderr", "-n", "1"]) == 0
    assert capsys.readouterr().out == "\x1b[31mloss of rank 1 falls\x1b[0m\n"
