"""What a campaign keeps of its job, and what it does to its files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from holdfast.chaos import disk, faults, job, weights
from holdfast.chaos.hands import Hands
from holdfast.chaos.kinds import KINDS
from holdfast.chaos.plan import Due
from holdfast.checkpoint.storage import open_storage
from holdfast.observe.state import State
from states import save


def test_output_is_kept_to_a_size_and_the_last_word_on_weights_counts(tmp_path: Path) -> None:
    output = job.Output(tmp_path / "out")
    reading, writing = os.pipe()
    reader = output.follow(os.fdopen(reading, "rb"))
    with os.fdopen(writing, "wb") as pipe:
        pipe.write(b"final weights: early\n")
        for number in range(3):
            pipe.write(b"%d" % number + b"x" * 99 + b"\n")
            pipe.write((b"y" * 99 + b"\n") * (job.MAX_OUTPUT_BYTES // 100))
        pipe.write(b"final weights: abc\n")
    reader.join(30)
    assert output.digest == "abc"
    kept = (tmp_path / "out").read_bytes()
    assert job.MAX_OUTPUT_BYTES // 2 < len(kept) <= job.MAX_OUTPUT_BYTES + 1000
    assert kept.endswith(b"y\nfinal weights: abc\n")
    assert kept.startswith((b"y" * 99 + b"\n", b"1x", b"2x"))  # a whole line


def test_nobody_elses_disk_is_filled(tmp_path: Path) -> None:
    with pytest.raises(disk.NotHere, match="is not on a disk of its own"):
        disk.fill(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_without_a_second_checkpoint_nothing_is_damaged(tmp_path: Path) -> None:
    with pytest.raises(disk.NotHere, match=r"there are 0 checkpoints in .*, and 2 are needed"):
        disk.damage(tmp_path, "bit-flip", 0.5)


def test_the_last_word_is_heard_before_an_agent_is_gone(tmp_path: Path) -> None:
    """However much of what it said is still in the pipe."""
    out, err = job.Output(tmp_path / "out"), job.Output(tmp_path / "err")
    said = "yes | head -c 60000; echo 'final weights: abc'"
    agent = job.Agent(["sh", "-c", said], os.environ, tmp_path / "logs", out, err)
    agent.process.wait(30)
    agent.kill()
    assert out.digest == "abc"


def test_weights_that_take_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "READ_S", 0.01)
    with pytest.raises(ValueError, match=r"the weights cannot be read: not done after 0\.01 s"):
        weights.digests(tmp_path)


class Lives:
    """A job that is killed and begun again, and nothing else."""

    def __init__(self) -> None:
        self.life = 0
        self.state = State()
        self.told: list[str] = []

    def kill(self) -> None:
        self.told.append("killed")

    def begin(self) -> None:
        self.life += 1
        self.told.append("begun")


def test_a_job_is_begun_again_though_its_files_could_not_be_damaged(tmp_path: Path) -> None:
    saved = tmp_path / "checkpoints"
    storage = open_storage(str(saved))
    for step in (1, 2):
        assert all(outcome.committed for outcome in save(storage, step))
    for part in saved.glob("step_*2/*.bin"):
        os.truncate(part, 0)
    lives: Any = Lives()
    hands = Hands(tmp_path, lives, saved)
    with pytest.raises(disk.NotHere, match=r"there is nothing in .*step_0*2 to damage"):
        hands.strike(Due(1, KINDS["bit-flip"], chance=0.5), 2, 2)
    assert lives.told == ["killed", "begun"]
    assert not (tmp_path / faults.NAME).exists()
