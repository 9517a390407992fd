"""A rank that the kernel kills for memory, in a control group made for it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness import Job

HUNGRY = """
import os
if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    eaten = bytearray(4_000_000_000)
"""


@pytest.fixture
def small_group(job: Job) -> Iterator[Path]:
    """A control group of 1.5 GB, of whichever version this kernel has."""
    name = f"holdfast-{job.mark}"
    version_1, version_2 = Path("/sys/fs/cgroup/memory", name), Path("/sys/fs/cgroup", name)
    group, limit = (version_1, "memory.limit_in_bytes") if version_1.parent.is_dir() else (version_2, "memory.max")
    try:
        group.mkdir()
        (group / limit).write_text(str(1500 << 20))
    except OSError as refusal:
        if group.is_dir():
            group.rmdir()
        pytest.skip(f"no control group can be made here: {refusal}")
    yield group
    job.end()
    group.rmdir()


def test_the_kernels_oom_kill_is_told_from_other_kills(job: Job, small_group: Path) -> None:
    script = job.folder / "hungry.py"
    script.write_text(HUNGRY)
    enter = f'echo $$ > {small_group}/cgroup.procs; exec {sys.executable} -m holdfast run "$@"'
    assert job.run(script, max_restarts=1, program=("/bin/sh", "-c", enter, "sh")) == 0
    [incident] = job.incidents()
    assert (incident["kind"], incident["rank"]) == ("out-of-memory", 1)
    assert "out of memory" in incident["headline"]


def test_a_kill_in_a_group_without_such_a_kill_is_just_a_kill(job: Job) -> None:
    script = job.folder / "dies.py"
    script.write_text("import os\nos.kill(os.getpid(), 9)\n")
    assert job.run(script, nproc=1, flags=("--exit-code-from-cause",)) == 83
    assert job.incidents()[0]["kind"] == "signal"


def test_pythons_own_memory_error_has_the_same_code(job: Job) -> None:
    script = job.folder / "asks.py"
    script.write_text("eaten = bytearray(1 << 60)\n")
    assert job.run(script, nproc=1, flags=("--exit-code-from-cause", "--reschedule-exit-code=75")) == 84
    assert os.listdir(job.run_dir / "incidents") == ["0001.json"]
