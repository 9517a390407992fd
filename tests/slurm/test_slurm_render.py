"""The file of `holdfast render slurm`, run by a real Slurm."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from slurm.slurm_cluster import Slurm

# A step is one line of a file. Each start goes on where the last one ended, because it was told to in time.
TRAIN = """#!/bin/bash
trap 'echo ends >> "$1.$RANK"; exit 0' TERM
echo "begins $WORLD_SIZE" >> "$1.$RANK"
while [ $(grep -c step "$1.$RANK") -lt 30 ]; do
    echo step >> "$1.$RANK"
    sleep 0.2 & wait $!
done
"""


@pytest.mark.long
def test_a_job_whose_time_is_over_goes_on(cluster: Slurm, tmp_path: Path) -> None:
    path = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"
    env = {**cluster.environment, "PATH": path}
    (tmp_path / "train.sh").write_text(TRAIN)
    (tmp_path / "train.sh").chmod(0o755)
    said = tmp_path / "said with spaces"
    words = ["--nnodes=2", "--nproc-per-node=1", "--no-python", f"{tmp_path}/train.sh", str(said)]
    command = [sys.executable, "-m", "holdfast", "render", "slurm", "--gpus=0", "--cpus=1", "--", *words]
    file = subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=60).stdout
    # The nodes of this Slurm have names that nobody resolves.
    file, count = re.subn(r"(?m)^first=.*$", "first=127.0.0.1", file)
    assert count == 1
    (tmp_path / "job.sbatch").write_text(file)
    job = subprocess.run(
        ["sbatch", "--parsable", "job.sbatch"], cwd=tmp_path, env=env, capture_output=True, text=True, check=True
    ).stdout.strip()
    first = Path(f"{said}.0")
    try:
        until(lambda: first.exists() and first.read_text().count("step") > 4)
        cluster.run("scancel", "--batch", "--signal=USR1", job)
        until(lambda: first.read_text().count("begins") == 2)
        until(lambda: "JobState=COMPLETED" in cluster.run("scontrol", "show", "job", job))
    except AssertionError:
        raise AssertionError((tmp_path / f"holdfast-{job}.log").read_text()) from None
    finally:
        cluster.clear()
    for rank in (0, 1):
        lines = Path(f"{said}.{rank}").read_text().split("\n")
        assert lines.count("begins 2") == 2 and lines.count("ends") == 1 and lines.count("step") == 30
    assert "Restarts=1" in cluster.run("scontrol", "show", "job", job)


def until(happens: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 60.0
    while not happens():
        assert time.monotonic() < end_s
        time.sleep(0.1)
