"""What is kept of a workflow: what was asked for, which never changes, and how it stands."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from holdfast.workflow.spec import Workflow
from holdfast.workflow.standing import Node, Standing

LOCAL, SLURM = "local", "slurm"


class Submitted(msgspec.Struct, frozen=True):
    """What was asked for: `workflow.json`."""

    id: str
    workflow: Workflow
    at: str
    backend: str = LOCAL
    nodes: tuple[Node, ...] = ()  # of this machine
    private: bool = False  # tasks have a /tmp of their own, on this machine
    sbatch: dict[str, str] = {}  # what sbatch reads of the environment


class Record(msgspec.Struct):
    """All of a workflow. How it stands is in `standing.json`."""

    submitted: Submitted
    standing: Standing

    @property
    def id(self) -> str:
        return self.submitted.id

    @property
    def workflow(self) -> Workflow:
        return self.submitted.workflow


def save(folder: Path, what: Submitted | Standing) -> None:
    """Whole or not at all, and on disk: what follows is done because of it."""
    write(folder / ("standing.json" if isinstance(what, Standing) else "workflow.json"), msgspec.json.encode(what))


def write(path: Path, content: bytes) -> None:
    with open(path.with_suffix(".part"), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(path.with_suffix(".part"), path)


def load(folder: Path) -> Record:
    standing = msgspec.json.decode((folder / "standing.json").read_bytes(), type=Standing)
    return Record(load_submitted(folder), standing)


def load_submitted(folder: Path) -> Submitted:
    return msgspec.json.decode((folder / "workflow.json").read_bytes(), type=Submitted)
