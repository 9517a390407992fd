"""What `holdfast run` says beside its ranks: what helps next, and nothing when it is asked to be quiet."""

from __future__ import annotations

import os
import pty
import shlex
import subprocess
import sys
from pathlib import Path

from harness import Job

DIES_ONCE = """
import os, signal
import torch
import holdfast

run = holdfast.init(checkpoints="checkpoints", stays=False)
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run.attach(model=model, optimizer=optimizer)
for batch in run.batches(torch.arange(12.0).unsqueeze(1), 3):
    loss = model(batch).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    run.step(loss=loss)
    if run.steps_done == 2 and run.generation == 0:
        os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_quiet_job_says_nothing_of_a_restart_and_its_record_has_the_progress(job: Job) -> None:
    script = job.folder / "dies_once.py"
    script.write_text(DIES_ONCE)
    assert job.run(script, nproc=1, max_restarts=1, flags=("--quiet", "--start-method=fork")) == 0
    assert job.err == ""
    assert [incident["headline"] for incident in job.incidents()] == ["killed by SIGKILL"]
    assert job.events("trained")[-1]["step"] == 4


def test_a_quiet_job_says_why_it_failed_and_nothing_else(job: Job) -> None:
    script = job.folder / "fails.py"
    script.write_text("raise ValueError('no data')\n")
    assert job.run(script, nproc=1, flags=("-q", "--redirects=2", "--reschedule-exit-code=75")) == 1
    first, *others = job.err.splitlines()
    assert first.startswith("holdfast: the job failed: rank 0: ValueError: no data (pid ")
    assert others[-2:] == ["holdfast:   no restart: --max-restarts is 0", f"holdfast:   more in {job.run_dir}"]


def test_at_the_end_it_says_what_helps_next_in_a_form_for_a_shell(job: Job) -> None:
    assert job.run("/bin/true", nproc=1, flags=("--no-python",), log_dir="the logs") == 0
    [run_dir] = (job.folder / "the logs").iterdir()
    assert job.err == f"holdfast: next: holdfast report 'the logs/{run_dir.name}'\n"


def test_without_a_run_directory_there_is_nothing_to_look_at_next(job: Job) -> None:
    assert job.run("/bin/true", nproc=1, flags=("--no-python",), log_dir="/dev/null") == 0
    assert job.err == ""


def test_on_a_terminal_it_says_at_once_how_to_look_at_the_job(tmp_path: Path) -> None:
    fd, theirs = pty.openpty()
    command = [sys.executable, "-m", "holdfast", "run", "--no-python", "--log-dir", str(tmp_path), "/bin/true"]
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    said = _read_to_end(fd)
    assert process.wait() == 0
    [run_dir] = tmp_path.iterdir()
    pid = process.pid
    assert said.replace("\r\x1b[K", "").splitlines() == [
        f"holdfast: next: holdfast status {pid}; holdfast top {pid}; holdfast stacks {pid}",
        f"holdfast: next: holdfast report {shlex.quote(str(run_dir))}",
    ]


def _read_to_end(fd: int) -> str:
    said = b""
    try:
        while some := os.read(fd, 4096):
            said += some
    except OSError:  # how Linux says that nobody has the terminal any more
        pass
    os.close(fd)
    return said.decode()


def test_what_a_check_before_the_world_warns_of_is_said_and_kept(job: Job) -> None:
    few = ("bash", "-c", 'ulimit -Sn 1024; exec "$@"', "bash", sys.executable, "-m", "holdfast", "run")
    assert job.run("/bin/true", nproc=1, flags=("--no-python", "--preflight"), program=few) == 0
    [found] = job.events("node.examined")
    assert found["fit"] and found["failed"] == []
    [warning] = [line for line in found["warned"] if line.startswith("limits: a process may open 1,024 files; ")]
    assert f"holdfast: this node is fit, but {warning}" in job.err.splitlines()
