"""The FSDP2 example with its checkpoints in a bucket: a real S3 server, two jobs, and a rank that is killed."""

from __future__ import annotations

import io
import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest
import torch

from harness import WAIT_S, Job

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "checkpoint"))
import s3server

ELASTIC = Path(__file__).resolve().parents[2] / "examples" / "train_pytorch_fsdp_elastic.py"
GOES_ON = re.compile(r"holdfast: goes on from step (\d+)(?:, epoch (\d+))? \((\S+)\)")
STEPS = 8  # of an epoch


def start(job: Job, s3: s3server.S3, epochs: int) -> None:
    args = (f"--epochs={epochs}", f"--batch-size={1024 // STEPS}", f"--checkpoint-dir={s3.url}")
    job.start(ELASTIC, *args, flags=("--standalone",), max_restarts=1, env=s3.environment)


def kill_rank_1_after(job: Job, line: str) -> None:
    until_s = time.monotonic() + WAIT_S
    while line not in job.out:
        assert time.monotonic() < until_s and job.processes(), f"no {line!r}:\n{job.out}\n{job.err}"
        time.sleep(0.02)
    [pid] = [pid for pid, title in job.processes().items() if "holdfast rank 1/2" in title]
    os.kill(pid, signal.SIGKILL)


@pytest.mark.long
def test_an_epoch_then_three_more_with_a_kill(job: Job) -> None:
    with s3server.bucket() as s3:
        start(job, s3, epochs=1)
        assert job.wait() == 0, job.err
        assert "checkpoint_epoch_1.pt" in s3.stored() and not GOES_ON.search(job.err)

        start(job, s3, epochs=4)
        kill_rank_1_after(job, "epoch 2/4")
        assert job.wait() == 0, job.err
        first, second = GOES_ON.findall(job.err)
        assert first == (str(STEPS), "1", "checkpoint_epoch_1.pt")
        assert int(second[0]) > STEPS and second[2] == "memory"
        assert re.findall(r"(?m)^epoch (\d)/4 +step (\d+)", job.out)[-1] == ("4", str(4 * STEPS))
        assert job.leftovers() == []

        found = [name for name in s3.stored() if name.endswith(".pt")]
        assert found == [f"checkpoint_epoch_{epoch}.pt" for epoch in (2, 3, 4)] and s3.uploads() == 0
        checkpoint = torch.load(io.BytesIO(s3.content(found[-1]) or b""), weights_only=True)
        assert (checkpoint["epoch"], checkpoint["holdfast"]["step"]) == (4, 4 * STEPS)
        assert not (job.folder / "checkpoints").exists()
