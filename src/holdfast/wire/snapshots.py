"""What ranks, agents and writers of one machine tell each other of snapshots. The bytes lie in memory files."""

from __future__ import annotations

import msgspec

from holdfast.wire.messages import Message

DOORBELL = "HOLDFAST_DOORBELL"  # in a rank's environment: the name, after a NUL, of its agent's socket

RESUME = "HOLDFAST_RESUME"  # which checkpoint the first world begins with; '' is the latest
STAYED = "HOLDFAST_STAYED"  # set in the environment of a world of which some ranks were in an earlier one
STANDBY = "HOLDFAST_STANDBY"  # set in that of a process that waits to be a rank
WILL = "HOLDFAST_WILL"  # where a rank of the last world has left its state, if one had to
JOB_ID = "HOLDFAST_JOB_ID"  # the same for all worlds of one start of a job on all nodes, and for no other


def world_name(job_id: str, generation: int) -> str:
    """As a snapshot names the world that it is of: no two starts of any job have the same."""
    return f"{job_id}.{generation}"


# -- a rank, to the agent's doorbell ----------------------------------------------------------------------------------


class Attach(msgspec.Struct, frozen=True, tag=True):
    """A rank wants a line to the writer, and its slots. Not the slots again where it has them: who closes a second
    descriptor of a file loses its locks on it."""

    slots: bool = True


class Attached(msgspec.Struct, frozen=True, tag=True):
    """Descriptors come with it: the line to the writer, then all slots of the node, two for each local rank."""

    local_rank: int
    slots: int  # how many come
    world: str


# -- to the writer ----------------------------------------------------------------------------------------------------


class Slots(Message, frozen=True):
    """Descriptors: the slots from this one on. As many as fit into one message; others follow."""

    first: int


class Client(Message, frozen=True):
    """Somebody whose snapshots are to be written. Descriptor: a line to it."""


class Save(Message, frozen=True):
    """The slot is complete and unlocked: make a checkpoint of it."""

    slot: int
    step: int


class Persist(Message, frozen=True):
    """A world is over: make a checkpoint of the newest step that all of its ranks here have in memory, unless there is
    one that is as new. `waits`: that is to be kept now, and written after `Proceed`."""

    token: int
    world: str
    first_rank: int
    local_size: int
    waits: bool = False


class Proceed(Message, frozen=True):
    """Nobody waits for the machine any more: write what was to be kept."""


class Finish(Message, frozen=True):
    """Write what was asked for, and end."""


ToWriter = Slots | Client | Save | Persist | Proceed | Finish


# -- from the writer --------------------------------------------------------------------------------------------------


class Saved(Message, frozen=True):
    """One rank's part is on storage, or why not. To who asked, and to the agent."""

    slot: int
    step: int
    ok: bool
    rank: int = -1
    committed: bool = False  # with it the checkpoint was whole
    verified: bool = False
    name: str = ""
    bytes: int = 0
    seconds: float = 0.0
    text: str = ""  # the failure, or what else a person should know; one line


class Persisted(Message, frozen=True):
    """The answer to `Persist`. None: there was nothing newer in memory."""

    token: int
    step: int | None
    ok: bool = True
    committed: bool = False  # else other nodes have to add theirs
    name: str = ""
    bytes: int = 0
    seconds: float = 0.0
    text: str = ""


FromWriter = Saved | Persisted
