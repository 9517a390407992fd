"""What lies in the folder of a workflow on Slurm, beside what every workflow has.

secret                        with which letters are signed
runner-address                of the runner
jobs/<number>/
  job.json                    which tasks it has, and what their next attempts are
  job.sh, out                 what sbatch was given, and what it said
  id                          its number in Slurm; who writes it first is the one
  restarts                    how often Slurm has begun it anew
tasks/<task>/<attempt>/
  stdout, stderr
  node                        where it is
  prepared                    its inputs are there
  checkpoint                  when the last was uploaded
  ended.json                  how it ended
  stop                        it was told to
  address                     where it listens
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from holdfast.workflow.deciding import Ended
from holdfast.workflow.record import write

ALLOCATION = "HOLDFAST_ALLOCATION"  # in the environment of tasks: the one they are part of


class Member(msgspec.Struct, frozen=True):
    task: str
    attempt: int  # the first in this job; each restart is one more


class Given(msgspec.Struct, frozen=True):
    """A job, as it was asked for."""

    number: int
    group: str
    members: tuple[Member, ...]


class Allocation(msgspec.Struct, frozen=True):
    """A job that Slurm has begun."""

    given: Given
    restart: int
    nodes: tuple[str, ...]  # of the members
    hosts: dict[str, str]  # addresses, also of tasks that are not of this job


class Places:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.runner = folder / "runner-address"

    def job(self, number: int) -> Path:
        return self.folder / "jobs" / str(number)

    def life(self, task: str, attempt: int) -> Path:
        return self.folder / "tasks" / task / str(attempt)

    # -- jobs ---------------------------------------------------------------------------------------------------------

    def add(self, group: str, members: tuple[Member, ...]) -> Given:
        numbers = [given.number for given in self.given()]
        given = Given(max(numbers, default=0) + 1, group, members)
        self.job(given.number).mkdir(parents=True, exist_ok=True)  # who made it may have been killed right there
        write(self.job(given.number) / "job.json", msgspec.json.encode(given))
        return given

    def given(self) -> list[Given]:
        """All jobs, in their order."""
        found = [self.read(int(path.name)) for path in (self.folder / "jobs").glob("*") if (path / "job.json").exists()]
        return sorted(found, key=lambda given: given.number)

    def read(self, number: int) -> Given:
        return msgspec.json.decode((self.job(number) / "job.json").read_bytes(), type=Given)

    def id(self, number: int) -> int | None:
        return read_number(self.job(number) / "id")

    def claim(self, number: int, job: int) -> bool:
        """This job is the one. False if another is: two were submitted by a runner that was killed in between."""
        try:
            fd = os.open(self.job(number) / "id", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        except FileExistsError:
            return self.id(number) in (job, None)
        with open(fd, "w") as file:
            file.write(str(job))
        return True

    def restarts(self, number: int) -> int:
        return read_number(self.job(number) / "restarts") or 0

    # -- lives --------------------------------------------------------------------------------------------------------

    def ended(self, task: str, attempt: int) -> Ended | None:
        try:
            return msgspec.json.decode((self.life(task, attempt) / "ended.json").read_bytes(), type=Ended)
        except FileNotFoundError:
            return None

    def ended_at_ns(self, task: str, attempt: int) -> int:
        return (self.life(task, attempt) / "ended.json").stat().st_mtime_ns

    def refresh(self, task: str, attempt: int) -> None:
        """A network filesystem may not know for a while what others have made in a folder, unless one makes something
        there oneself."""
        folder = self.life(task, attempt)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "looked").touch()
        (folder / "looked").unlink()


def read_number(path: Path) -> int | None:
    text = read_text(path)
    return int(text) if text.isdigit() else None


def read_text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except FileNotFoundError:
        return ""
