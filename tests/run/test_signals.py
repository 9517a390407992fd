"""Ending a job from outside: what its ranks hear, how long they have, and the code that is left."""

from __future__ import annotations

import os
import signal
import sys

import pytest

from harness import Job

HEARS = """
import json, os, signal, sys, time
import torch
rank = int(os.environ["RANK"])
def tell(**news):
    with open(os.environ["NEWS"], "a") as fifo:
        fifo.write(json.dumps({"rank": rank, "generation": 0, "pid": os.getpid(), **news}) + "\\n")
def hear(number, frame):
    tell(heard=signal.Signals(number).name)
    if sys.argv[1] == "leave":
        sys.exit(0)
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
    signal.signal(number, hear)
tell(step=0)
while True:
    signal.pause()
"""


HOLDFAST = (sys.executable, "-m", "holdfast", "run")


def start(job: Job, how: str, *flags: str, program: tuple[str, ...] = HOLDFAST) -> None:
    script = job.folder / "hears.py"
    script.write_text(HEARS)
    job.start(script, how, flags=flags, program=program)
    for _ in range(2):
        job.news.wait(lambda line: "step" in line)


def heard(job: Job, signame: str) -> None:
    for _ in range(2):
        job.news.wait(lambda line: line.get("heard") == signame)


@pytest.mark.parametrize("signame", ["SIGTERM", "SIGINT"])
def test_ranks_hear_the_signal_and_may_end_in_peace(job: Job, signame: str) -> None:
    start(job, "leave", "--shutdown-timeout=30", program=("nohup", *HOLDFAST))
    job.signal(signal.SIGHUP)  # which nobody hears under nohup
    job.signal(signal.Signals[signame])
    heard(job, signame)
    assert job.wait() == 1
    assert f"stopped by {signame}" in job.err
    assert job.leftovers() == []


def test_a_signal_of_the_users_choice(job: Job) -> None:
    start(job, "leave", "--signals-to-handle=SIGUSR1", "--exit-code-from-cause")
    job.signal(signal.SIGUSR1)
    heard(job, "SIGUSR1")
    assert job.wait() == 87


def test_ranks_that_stay_are_killed_after_the_shutdown_timeout(job: Job) -> None:
    start(job, "stay", "--shutdown-timeout=1")
    job.signal(signal.SIGTERM)
    heard(job, "SIGTERM")
    assert job.wait() == 1
    assert [sent["signal"] for sent in job.events("ranks.signalled")] == ["SIGTERM", "SIGKILL"]
    assert job.leftovers() == []


def test_a_second_interrupt_kills_at_once(job: Job) -> None:
    start(job, "stay", "--shutdown-timeout=600")
    job.signal(signal.SIGINT)
    heard(job, "SIGINT")
    job.signal(signal.SIGINT)
    assert job.wait(10) == 1
    assert job.leftovers() == []


def test_a_repeated_sigterm_does_not_cut_the_grace_short(job: Job) -> None:
    start(job, "stay", "--shutdown-timeout=600")
    for _ in range(2):
        job.signal(signal.SIGTERM)
        heard(job, "SIGTERM")
    for rank_pid in {line["pid"] for line in job.news.seen}:
        os.kill(rank_pid, signal.SIGKILL)
    assert job.wait(10) == 1


def test_a_signal_before_any_worker_has_started(job: Job) -> None:
    script = job.folder / "hears.py"
    script.write_text(HEARS)
    job.start(script, "stay", flags=("--shutdown-timeout=600",))
    while not (job.log_dir.exists() and any(job.log_dir.iterdir())):
        os.sched_yield()
    job.signal(signal.SIGTERM)
    assert job.wait(10) == 1
    assert job.leftovers() == []
