"""The record of a job: `events.jsonl`, one line of JSON for each thing that happened, and a type for each of these.

A line is `{"v":1,"node":"n1","seq":7,"name":"rank.exited","at_s":12.5,"time":"2026-01-31T10:00:00.000Z","data":{..}}`.
`at_s` counts from the start of the record, on the monotonic clock of the node that writes it; lines of other nodes are
moved to that clock as they arrive. `seq` counts the lines of a node, so that nobody takes one twice.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, ClassVar

import msgspec

from holdfast.control.incidents import Incident

NAME = "events.jsonl"
VERSION = 1
MAX_LINE_BYTES = 1 << 20  # a longer one was not written by us
PIECE_BYTES = 1 << 20


class Happened(msgspec.Struct, frozen=True):
    """The `data` of a line. What a newer version adds is passed over, what an older one lacks has a default."""

    NAME: ClassVar[str] = ""


# -- the job and its nodes --------------------------------------------------------------------------------------------


class JobStarted(Happened, frozen=True):
    NAME: ClassVar[str] = "job.started"
    run_id: str
    node: str  # this agent's id
    nproc: int
    program: Any
    pid: int
    host: str = ""
    clock_s: float = 0.0  # what the node's monotonic clock showed when `at_s` was 0
    version: str = ""
    max_restarts: int = 0
    nodes: tuple[int, int] = (1, 1)  # at least, and at most


class JobSignalled(Happened, frozen=True):
    NAME: ClassVar[str] = "job.signalled"
    signal: str
    why: str = ""  # where nobody has sent it


class JobEnded(Happened, frozen=True):
    NAME: ClassVar[str] = "job.ended"
    outcome: str  # 'succeeded', or a kind of cause
    reason: str
    steps: int
    wall_s: float
    lost_s: float


class NodeHello(Happened, frozen=True):
    NAME: ClassVar[str] = "node.hello"
    addr: str
    generation: int


class NodeExamined(Happened, frozen=True):
    """By `--preflight`, before its first world."""

    NAME: ClassVar[str] = "node.examined"
    fit: bool  # it may take part
    failed: tuple[str, ...]  # a line for each check that has, with what to do next
    warned: tuple[str, ...]
    seconds: float


class CoordinatorSaid(Happened, frozen=True):
    NAME: ClassVar[str] = "coordinator.said"
    text: str


class CoordinatorGivenUp(Happened, frozen=True):
    NAME: ClassVar[str] = "coordinator.given_up"
    why: str


# -- worlds and ranks -------------------------------------------------------------------------------------------------


class WorldLaunched(Happened, frozen=True):
    NAME: ClassVar[str] = "world.launched"
    generation: int
    size: int
    restarts: int
    first_rank: int = 0
    group_rank: int = 0
    group_size: int = 1
    master: str = ""
    local_size: int = 0
    stayed: tuple[int, ...] = ()  # ranks whose processes were in an earlier world


class WorldStarted(Happened, frozen=True):
    NAME: ClassVar[str] = "world.started"
    generation: int
    pids: dict[int, int]


class RankFirstStep(Happened, frozen=True):
    NAME: ClassVar[str] = "rank.first_step"
    generation: int
    rank: int


class RankRaised(Happened, frozen=True):
    NAME: ClassVar[str] = "rank.raised"
    generation: int
    rank: int
    error: str


class RankExited(Happened, frozen=True):
    NAME: ClassVar[str] = "rank.exited"
    generation: int
    rank: int
    pid: int
    status: int


class RankHung(Happened, frozen=True):
    NAME: ClassVar[str] = "rank.hung"
    generation: int
    rank: int
    what: str
    limit_s: float


class RankAsked(Happened, frozen=True):
    NAME: ClassVar[str] = "rank.asked"
    rank: int
    action: str
    description: str


class RanksSignalled(Happened, frozen=True):
    NAME: ClassVar[str] = "ranks.signalled"
    ranks: tuple[int, ...]
    signal: str
    why: str
    drain: bool = False


class RanksLeave(Happened, frozen=True):
    """They are to leave their world, and stay."""

    NAME: ClassVar[str] = "ranks.leave"
    ranks: tuple[int, ...]
    why: str
    boundary: bool = False


class StandbyReady(Happened, frozen=True):
    """A process waits to take the place of a rank, and takes so much memory for that."""

    NAME: ClassVar[str] = "standby.ready"
    local_rank: int
    pid: int
    host_bytes: int
    gpu_bytes: int = 0


class StandbyEnded(Happened, frozen=True):
    """By itself, and not as a rank."""

    NAME: ClassVar[str] = "standby.ended"
    local_rank: int
    pid: int
    stderr_tail: tuple[str, ...] = ()


class BeaconCorrupt(Happened, frozen=True):
    NAME: ClassVar[str] = "beacon.corrupt"
    rank: int
    why: str


class TimeoutsLearned(Happened, frozen=True):
    NAME: ClassVar[str] = "timeouts.learned"
    rank: int
    state: str


class Progress(Happened, frozen=True):
    """How far the ranks of one node are, every few seconds. Of those that cannot be seen nothing is said. Steps and
    their times are a number for each rank, or one that is that of all."""

    NAME: ClassVar[str] = "progress"
    generation: int
    first_rank: int
    step: int  # the newest of any rank, counted over all worlds where its optimizer counts
    steps: tuple[int, ...]  # of each rank, in this world
    base: int = -1  # the steps that the optimizer had done before this world; -1: it does not count
    # Microseconds, as integers: of many ranks, numbers with a point take most of the time to write.
    step_us: tuple[int, ...] = ()  # what one took each rank lately; 0: it took none
    own_us: tuple[int, ...] = ()  # of these, what it needed for itself before it could wait for others
    saving_s: float = 0.0  # the most that any rank was held up by saves in this world
    phases: str = ""  # a digit for each rank: `worker.beacon.Phase`
    section_us: tuple[int, ...] | msgspec.UnsetType = msgspec.UNSET  # in sections, a step; where a rank has some


class Trained(Happened, frozen=True):
    """What a program that uses `holdfast.init` shows a person."""

    NAME: ClassVar[str] = "trained"
    step: int
    epoch: str = ""
    loss: float | None = None
    samples_per_s: float = 0.0
    steps_left: int | None = None


class StragglerFound(Happened, frozen=True):
    NAME: ClassVar[str] = "straggler.found"
    generation: int
    rank: int
    own_s: float
    typical_s: float
    score: float
    windows: int
    by: str = "step"  # or section: what of it takes so long


class StragglerGone(Happened, frozen=True):
    NAME: ClassVar[str] = "straggler.gone"
    generation: int
    rank: int


# -- incidents --------------------------------------------------------------------------------------------------------


class IncidentNoted(Incident, frozen=True):
    """An incident, with its times for people and what it has cost so far."""

    NAME: ClassVar[str] = ""
    failed_at: str = ""
    phases: dict[str, float] = msgspec.field(name="phases_s", default_factory=dict)
    cost_s: float = msgspec.field(name="lost_s", default=0.0)


class IncidentOpened(IncidentNoted, frozen=True):
    NAME: ClassVar[str] = "incident.opened"


class IncidentClosed(IncidentNoted, frozen=True):
    NAME: ClassVar[str] = "incident.closed"


# -- checkpoints, helpers and faults ----------------------------------------------------------------------------------


class CheckpointSaved(Happened, frozen=True):
    NAME: ClassVar[str] = "checkpoint.saved"
    step: int
    checkpoint: str = ""
    bytes: int = 0
    seconds: float = 0.0
    verified: bool = False


class CheckpointPersisted(Happened, frozen=True):
    NAME: ClassVar[str] = "checkpoint.persisted"
    step: int
    checkpoint: str = ""
    bytes: int = 0
    seconds: float = 0.0
    committed: bool = False
    note: str = ""


class CheckpointFailed(Happened, frozen=True):
    NAME: ClassVar[str] = "checkpoint.failed"
    step: int | None
    why: str
    checkpoint: str = ""
    rank: int | None = None


class CheckpointRestored(Happened, frozen=True):
    NAME: ClassVar[str] = "checkpoint.restored"
    generation: int
    rank: int
    step: int
    seconds: float
    source: str = ""


class WriterStarted(Happened, frozen=True):
    NAME: ClassVar[str] = "writer.started"
    pid: int


class WriterEnded(Happened, frozen=True):
    NAME: ClassVar[str] = "writer.ended"
    pid: int
    status: int | None


class ZygoteGrown(Happened, frozen=True):
    NAME: ClassVar[str] = "zygote.grown"
    pid: int
    refused: dict[str, str]


class ZygoteNotGrown(Happened, frozen=True):
    NAME: ClassVar[str] = "zygote.not_grown"
    refused: dict[str, str]


class FaultInjected(Happened, frozen=True):
    NAME: ClassVar[str] = "fault.injected"
    number: int
    kind: str
    rank: int | None = None
    node: str = ""
    step: int | None = None
    text: str = ""


What = Happened | IncidentNoted

_ALL: tuple[type[What], ...] = (
    JobStarted, JobSignalled, JobEnded, NodeHello, NodeExamined, CoordinatorSaid, CoordinatorGivenUp, WorldLaunched,
    WorldStarted, RankFirstStep, RankRaised, RankExited, RankHung, RankAsked, RanksSignalled, RanksLeave,
    StandbyReady, StandbyEnded, BeaconCorrupt, TimeoutsLearned, Progress, Trained, StragglerFound,
    StragglerGone, IncidentOpened, IncidentClosed, CheckpointSaved, CheckpointPersisted, CheckpointFailed,
    CheckpointRestored, WriterStarted, WriterEnded, ZygoteGrown, ZygoteNotGrown, FaultInjected,
)  # fmt: skip
TYPES: dict[str, type[What]] = {kind.NAME: kind for kind in _ALL}


# -- reading ----------------------------------------------------------------------------------------------------------


class Line(msgspec.Struct, frozen=True):
    """One line, with its data unread."""

    v: int = 0  # the first versions wrote none, nor the next two
    node: str = ""
    seq: int = -1
    name: str = ""
    at_s: float = 0.0
    time: str = ""
    data: msgspec.Raw = msgspec.Raw(b"{}")


class Noted(msgspec.Struct, frozen=True):
    """One line that was read and understood."""

    what: What
    at_s: float
    time: str
    node: str
    seq: int


_lines = msgspec.json.Decoder(Line)
_data = {name: msgspec.json.Decoder(kind) for name, kind in TYPES.items()}


def understood(line: bytes) -> Noted | None:
    """None for one that is torn, that somebody else wrote, or that a newer version invented."""
    try:
        found = _lines.decode(line)
        decoder = _data.get(found.name)
        return Noted(decoder.decode(found.data), found.at_s, found.time, found.node, found.seq) if decoder else None
    except msgspec.MsgspecError:
        return None


class Reader:
    """Reads a record from any place in it, as far as it is written, and goes on from there when asked again. What is
    not a whole line yet is left for the next time."""

    def __init__(self, path: str | os.PathLike[str], offset: int = 0) -> None:
        """Raises OSError."""
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115 - for as long as the reader lives
        self._rest = b""
        self._skips = offset > 0  # the middle of a line
        self._file.seek(max(0, offset - 1))
        self.passed_over = 0  # lines that were not understood

    def __iter__(self) -> Iterator[Noted]:
        while piece := self._file.read(PIECE_BYTES):
            *lines, self._rest = (self._rest + piece).split(b"\n")
            for line in lines:
                if self._skips:
                    self._skips = False
                elif (noted := understood(line)) is not None:
                    yield noted
                elif line:
                    self.passed_over += 1
            if len(self._rest) > MAX_LINE_BYTES:
                self._rest, self._skips = b"", True

    def close(self) -> None:
        self._file.close()


def read(path: str | os.PathLike[str]) -> list[Noted]:
    """All of it. Raises OSError."""
    reader = Reader(path)
    try:
        return list(reader)
    finally:
        reader.close()
