"""What another machine may cure ends a job with a code that asks for one. Hangs and signals have their own files."""

from __future__ import annotations

import signal

import pytest

from coordinator.etcd_cluster import wait_for
from harness import Job

FLAGS = ("--exit-code-from-cause", "--reschedule-exit-code=75")
SAID = "holdfast: worth rescheduling: exit code 75\n"
ECC = """
import torch
try:
    raise torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered")
except RuntimeError as failure:
    raise ValueError("the step failed") from failure
"""
NCCL = """
import torch.distributed as dist
raise dist.DistBackendError("NCCL error: remote process exited or there was a network error")
"""
ASSERTION = """
import torch
raise torch.AcceleratorError("CUDA error: device-side assert triggered")
"""


@pytest.mark.parametrize(
    ("text", "kind", "code"),
    [(ECC, "hardware", 75), (NCCL, "backend", 75), (ASSERTION, "error", 81)],
    ids=["hardware", "backend", "its own"],
)
def test_an_exception_is_worth_it_if_it_is_not_the_programs_own(job: Job, text: str, kind: str, code: int) -> None:
    script = job.folder / "raises.py"
    script.write_text(text)
    assert job.run(script, nproc=1, flags=FLAGS) == code
    [incident] = job.incidents()
    assert incident["kind"] == kind
    assert ("it looks like the hardware" in incident["headline"]) is (kind == "hardware")
    assert job.err.endswith(SAID) is (code == 75)


def test_a_kill_that_nobody_of_ours_sent_is_worth_it(job: Job) -> None:
    assert job.run("/bin/sh", "-c", "kill -9 $$", nproc=1, flags=("--reschedule-exit-code=75", "--no-python")) == 75
    assert job.err.endswith(SAID)


def test_a_job_that_is_stopped_before_its_devices_are_counted_has_to_run_elsewhere(job: Job) -> None:
    script = job.folder / "train.py"
    script.write_text("")
    job.start(script, nproc="gpu", flags=("--reschedule-exit-code=75",))
    wait_for(job.log_dir.exists)  # signals are taken by then, and torch is loading
    job.signal(signal.SIGTERM)
    assert job.wait() == 75
    assert job.err.startswith("holdfast: stopped by SIGTERM\nholdfast: next: ") and job.err.endswith(f"\n{SAID}")
