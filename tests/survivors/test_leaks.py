"""Many worlds in one process: it keeps nothing of those that are over."""

from __future__ import annotations

import os
import re
import signal
import time
from collections import Counter
from pathlib import Path

import pytest

from harness import WAIT_S, Job
from survivors.stories import SCRIPT

RECOVERIES = int(os.environ.get("HOLDFAST_RECOVERIES", "500"))


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

    def more_than(self, early: Held, mib: float) -> list[str]:
        """Of what it has grown by more than it may by chance."""
        slack = {"threads": 2, "descriptors": 2, "sockets": 2, "maps": 20, "mib": mib}
        return [name for name, most in slack.items() if getattr(self, name) > getattr(early, name) + most]


def recover(job: Job, survivor: int, worlds: range) -> None:
    """Rank 1 is killed in each of these worlds, and rank 0 stays. The next one comes to its second save: by then it has
    all that it will have."""
    for generation in worlds:
        os.kill(job.wait_step(1, 0, generation)["pid"], signal.SIGKILL)
        first = job.wait_step(0, 0, generation + 1)
        assert first["pid"] == survivor, job.err
    job.wait_step(0, first["step"] + 20, worlds.stop)


def check_growth(job: Job, pid: int, early: Held, mib: float) -> None:
    """What ends in a thread of its own may take a moment for it, while the job trains on."""
    until_s = time.monotonic() + WAIT_S / 2
    while (late := Held(pid)).more_than(early, mib) and time.monotonic() < until_s:
        job.news.wait(lambda line: "step" in line)
    print(early, "->", late)
    assert not late.more_than(early, mib), (late.more_than(early, mib), early, late)


@pytest.mark.parametrize(
    ("recoveries", "warm", "mib", "flags"),
    [
        (25, 5, 10.0, ()),
        pytest.param(25, 5, 10.0, ("--own", "--before", "--train"), marks=pytest.mark.long),
        pytest.param(RECOVERIES, RECOVERIES // 5, 20.0, (), marks=[pytest.mark.long, pytest.mark.timeout(1800)]),
    ],
    ids=["25", "25, a group of its own", "500"],
)
def test_memory_threads_descriptors_and_sockets_are_stable(
    job: Job, recoveries: int, warm: int, mib: float, flags: tuple[str, ...]
) -> None:
    env = {"CHECKPOINT_DIR": str(job.folder / "saved")}
    job.start(SCRIPT, "--steps=50000", "--pace=0.01", *flags, nproc=2, max_restarts=10_000, env=env)
    survivor = job.wait_step(0, 3)["pid"]
    job.wait_event("zygote.grown")  # from then on new ranks import nothing
    recover(job, survivor, range(warm))
    early = {pid: Held(pid) for pid in (survivor, job.pid)}
    recover(job, survivor, range(warm, recoveries))
    for pid, had in early.items():
        check_growth(job, pid, had, mib)
