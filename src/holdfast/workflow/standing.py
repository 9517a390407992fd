"""How a workflow stands: plain values, which the runner keeps in a file, and what is decided from."""

from __future__ import annotations

import msgspec

# Of a task, in their order:
WAITING = "waiting"  # for other groups, for its turn, or for a node
QUEUED = "queued"  # with somebody else, who gives out nodes
PREPARING = "preparing"  # files are written and inputs fetched
READY = "ready"  # and waits for the rest of its group
RUNNING = "running"
STOPPING = "stopping"  # it was told to end
# and how it ends:
COMPLETED = "completed"
FAILED = "failed"
CANCELED = "canceled"

ENDED = (COMPLETED, FAILED, CANCELED)
ALIVE = (QUEUED, PREPARING, READY, RUNNING, STOPPING)


class Node(msgspec.Struct, frozen=True):
    name: str
    cpu: float
    gpus: tuple[str, ...] = ()
    memory_bytes: int = 0
    storage_bytes: int = 0


class TaskStands(msgspec.Struct):
    state: str = WAITING
    attempt: int = 0  # the how manieth life this is; 0 before the first
    node: str = ""
    gpus: tuple[str, ...] = ()
    rescheduled: int = 0  # since the last progress
    reschedules: int = 0  # in all
    code: int | None = None  # of its last end
    why: str = ""  # it is in this state
    checkpoint_at: str = ""  # wall clock, for people
    last_node: str = ""  # where it failed last
    after: str = ""  # a stop: what it becomes then


class GroupStands(msgspec.Struct):
    state: str = WAITING  # or RUNNING, or one of ENDED
    why: str = ""
    queued_s: float | None = None  # since when it could run, if it had nodes
    started_s: float | None = None
    not_before_s: float = 0.0  # its next start


class Standing(msgspec.Struct):
    groups: dict[str, GroupStands]
    tasks: dict[str, TaskStands]
    aside: dict[str, str]  # nodes on which a task failed, and how
