"""Hundreds of worlds in one process: it keeps nothing of those that are over."""

from __future__ import annotations

import os
import re
import signal
import time
from collections import Counter
from pathlib import Path

import pytest

from harness import Job

SCRIPT = Path(__file__).parent / "scripts" / "survives.py"
RECOVERIES = int(os.environ.get("HOLDFAST_RECOVERIES", "500"))
WARM = RECOVERIES // 5


class Held:
    """What a process has."""

    def __init__(self, pid: int) -> None:
        folder = Path(f"/proc/{pid}")
        status = dict(line.split(":\t") for line in (folder / "status").read_text().splitlines() if ":\t" in line)
        descriptors = [os.readlink(path) for path in (folder / "fd").iterdir() if path.is_symlink()]
        self.mib = int(status["VmRSS"].split()[0]) / 1024
        self.threads = int(status["Threads"])
        self.descriptors = len(descriptors)
        self.sockets = sum(link.startswith("socket:") for link in descriptors)
        self.maps = (folder / "maps").read_text().count("\n")
        self.names = Counter(Path(task, "comm").read_text().strip() for task in (folder / "task").iterdir())
        self.links = Counter(re.sub(r"\d+", "N", link) for link in descriptors)

    def __repr__(self) -> str:
        counts = f"{self.mib:.0f} MiB, {self.threads} threads, {self.descriptors} descriptors, {self.maps} maps"
        return f"{counts}; {dict(self.names)}; {dict(self.links)}"


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_memory_threads_descriptors_and_sockets_are_stable(tmp_path: Path) -> None:
    job = Job(tmp_path)
    env = {"CHECKPOINT_DIR": str(tmp_path / "saved")}
    try:
        job.start(SCRIPT, "--steps=50000", "--pace=0.01", nproc=2, max_restarts=10_000, env=env)
        survivor = job.wait_step(0, 3)["pid"]
        job.wait_event("zygote.grown")  # from then on new ranks import nothing
        seen: dict[str, list[Held]] = {"rank": [], "agent": []}
        for generation in range(RECOVERIES):
            victim = job.wait_step(1, 0, generation)["pid"]
            os.kill(victim, signal.SIGKILL)
            assert job.wait_step(0, 0, generation + 1)["pid"] == survivor, job.err
            if generation in (WARM, RECOVERIES - 1):
                time.sleep(1.0)  # what ends in a thread of its own has ended
                seen["rank"].append(Held(survivor))
                seen["agent"].append(Held(job.pid))
        for name, (early, late) in seen.items():
            print(name, early, "->", late)
            assert late.threads <= early.threads + 2, (name, early, late)
            assert late.descriptors <= early.descriptors + 2, (name, early, late)
            assert late.sockets <= early.sockets + 2, (name, early, late)
            assert late.maps <= early.maps + 20, (name, early, late)
            assert late.mib <= early.mib + 20, (name, early, late)
    finally:
        job.end()
