"""Why ranks end: which exit came first, which merely followed, and what code that is."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from enum import StrEnum

import msgspec

from holdfast.control.stacks import MAX_RANKS, Group, merge, suspects, trimmed
from holdfast.wire.messages import Leaving, Raised
from holdfast.wire.symptoms import is_backend, is_hardware


class Kind(StrEnum):
    """What sort of thing ended a rank. The values are what incident files say."""

    ERROR = "error"  # the program's own: an exception, or an exit code of its choice
    BACKEND = "backend"  # torch's distributed layer: a peer, a network, a driver
    SIGNAL = "signal"  # a signal nobody of ours sent
    OUT_OF_MEMORY = "out-of-memory"
    HARDWARE = "hardware"  # a GPU that says so itself
    HANG = "hang"
    LOST_NODE = "lost-node"
    PREEMPTED = "preempted"  # the job itself was told to stop
    LAUNCHER = "launcher"  # a helper process of ours was killed
    REQUESTED = "requested"  # a rank asked for it
    MEMBERSHIP = "membership"  # a node joined; nothing failed


# Says to whoever requeues failed jobs that this one is not to be; the peers' code for it.
EXIT_DO_NOT_REQUEUE = 93

# With --exit-code-from-cause. The block 81-89 is free of shells' codes (126 and up) and of sysexits' (64 to 78).
EXIT_CODES = {
    Kind.ERROR: 81,
    Kind.BACKEND: 82,
    Kind.SIGNAL: 83,
    Kind.OUT_OF_MEMORY: 84,
    Kind.HANG: 85,
    Kind.LOST_NODE: 86,
    Kind.PREEMPTED: 87,
    Kind.LAUNCHER: 88,
    Kind.HARDWARE: 89,
    Kind.REQUESTED: EXIT_DO_NOT_REQUEUE,
    Kind.MEMBERSHIP: 86,  # as a lost node: the job wanted another size
}

# What another machine may cure. A program's error would come again there, and so would its want of memory: the other
# machine has no more of it. A rank that asked for the end knows why.
_CURED_ELSEWHERE = frozenset(Kind) - {Kind.ERROR, Kind.OUT_OF_MEMORY, Kind.REQUESTED}


def is_worth_rescheduling(kind: Kind | None, elsewhere: bool | None = None) -> bool:
    """Whether a job that ended so should run on another machine. `elsewhere`: what was decided beyond the kind."""
    return kind in _CURED_ELSEWHERE if elsewhere is None else elsewhere


class RankExit(msgspec.Struct, frozen=True):
    """One rank's end, with the evidence that was there."""

    rank: int
    pid: int
    status: int  # exit code, or minus the signal
    at_s: float
    steps: int | None = None  # None where they cannot be seen
    raised: Raised | None = None
    left: Leaving | None = None  # it had called `sys.exit`, and took until `at_s` to be gone
    stderr_tail: tuple[str, ...] = ()
    oom_killed: bool = False
    stopped: bool = False  # because we had told it to
    not_started: str = ""  # why it never had a process
    base: int = 0  # steps that its optimizer had done before
    drained: bool = False  # it was asked to end at a boundary

    @property
    def kind(self) -> Kind:
        if self.not_started:
            return Kind.LAUNCHER
        if self.oom_killed or (self.raised is not None and self.raised.out_of_memory):
            return Kind.OUT_OF_MEMORY
        if _is_hardware(self):
            return Kind.HARDWARE
        if self.raised is not None:
            return Kind.BACKEND if self.raised.distributed else Kind.ERROR
        if _ended_by_backend(self):
            return Kind.BACKEND
        return Kind.SIGNAL if self.status < 0 and self.left is None else Kind.ERROR

    @property
    def headline(self) -> str:
        return f"{self._headline}; it looks like the hardware" if self.kind is Kind.HARDWARE else self._headline

    @property
    def _headline(self) -> str:
        if self.not_started:
            return f"could not be started: {self.not_started}"
        if self.raised is not None:
            return self.raised.headline
        if self.oom_killed:
            return "killed by the kernel: out of memory (SIGKILL)"
        if self.left is not None:
            return f"exited with code {self.left.code}"
        if self.status < 0:
            return f"killed by {signal_name(-self.status)}"
        return f"exited with code {self.status}"

    @property
    def failed_at_s(self) -> float:
        if self.raised is not None:
            return self.raised.at_s
        return self.left.at_s if self.left is not None else self.at_s

    @property
    def is_failure(self) -> bool:
        """A rank that ends because it was told to is no failure."""
        return self.status != 0 and not self.stopped

    def cause(self) -> Cause:
        return Cause(
            kind=self.kind,
            headline=self.headline,
            failed_at_s=self.failed_at_s,
            rank=self.rank,
            pid=self.pid,
            status=self.status,
            raised=self.raised is not None,
            where=self.raised.where if self.raised is not None else "",
            traceback=self.raised.traceback if self.raised is not None else "",
            stderr_tail=self.stderr_tail,
        )


class Cause(msgspec.Struct, frozen=True):
    """One thing that may have ended a world: a rank's failure, a node's loss, a helper's end."""

    kind: Kind
    headline: str
    failed_at_s: float
    rank: int | None = None
    node: str = ""  # the node's name for people, where there are several
    pid: int | None = None
    status: int | None = None
    raised: bool = False  # an exception, rather than an exit code or a signal
    where: str = ""  # file and line of the exception
    traceback: str = ""
    stderr_tail: tuple[str, ...] = ()
    detected_at_s: float | None = None  # of a hang, which is found later than it began
    own_limit: bool = False  # of a hang: this rank passed a limit of its own, whatever the others do
    stuck: bool = False  # its processes cannot be ended
    suspects: tuple[int, ...] = ()  # of a hang: the ranks that the others seem to wait for
    groups: tuple[Group, ...] = ()  # of a hang: what the ranks were doing


class Blame(msgspec.Struct, frozen=True):
    """The first cause of a world's end, and those that only followed."""

    first: Cause
    followers: tuple[Cause, ...]


def blame(causes: Sequence[Cause]) -> Blame:
    """A rank whose collective broke is seldom the cause, however early it says so: its peer's death came first, and the
    peer may still be printing its traceback. So backend errors stand behind all others; among equals, time decides."""
    if not causes:
        raise ValueError("nothing failed")
    first = min(causes, key=lambda cause: (cause.kind is Kind.BACKEND, cause.failed_at_s, _order(cause)))
    rest = [cause for cause in causes if cause is not first]
    return Blame(first, tuple(sorted(rest, key=lambda cause: (cause.failed_at_s, _order(cause)))))


def explained(causes: Sequence[Cause], groups: Sequence[Group]) -> list[Cause]:
    """The causes, with what the ranks were doing as evidence for a hang. Whose monitor was first to notice is chance:
    in a world that waits for one rank, all are silent. The ones that wait in a collective are not to blame. Where
    stacks tell nothing, one that passed a limit of its own is. However many nodes have noticed, it is one hang."""
    hangs = [cause for cause in causes if cause.kind is Kind.HANG and not cause.stuck]
    others = [cause for cause in causes if cause not in hangs]
    if not hangs:
        return others
    hang = min(hangs, key=lambda cause: (cause.failed_at_s, _order(cause)))
    if merged := merge(groups):
        accused = suspects(merged)
        changes: dict[str, object] = {"suspects": accused[:MAX_RANKS], "groups": trimmed(merged)}
        if accused:
            node = next((group.node for group in groups if accused[0] in group.ranks), "")
            changes |= {"rank": accused[0], "node": node}
        elif sum(group.count for group in merged) > 1 and not hang.own_limit:
            changes |= {"rank": None, "node": ""}
        hang = msgspec.structs.replace(hang, **changes)
    return [hang, *others]


def _order(cause: Cause) -> tuple[int, str]:
    return (cause.rank if cause.rank is not None else -1, cause.node)


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _is_hardware(exit: RankExit) -> bool:
    """A rank that told of its exception has told all. Of one that a watchdog has ended, or that was started cold, the
    last words count."""
    if exit.raised is not None:
        return exit.raised.hardware
    return exit.status != 0 and is_hardware("\n".join(exit.stderr_tail))


# The last line of a traceback, perhaps behind what torch puts before it.
_RAISED = re.compile(r"^(?:\[rank\d+\]:\s?)?([A-Za-z_][\w.]*(?:Error|Exception))(?::|$)(.*)", re.M)


def _ended_by_backend(exit: RankExit) -> bool:
    """NCCL's watchdog ends a rank whose peer is gone with SIGABRT, after saying why. A program that was started cold
    tells of its exception on stderr alone."""
    text = "\n".join(exit.stderr_tail)
    if exit.status == -signal.SIGABRT:
        return "ProcessGroupNCCL" in text or "NCCL watchdog" in text
    raised = _RAISED.findall(text) if exit.status > 0 else []
    return bool(raised) and _is_backends(*raised[-1])


def _is_backends(name: str, text: str) -> bool:
    if name.startswith("torch.distributed.Dist"):
        return True
    return name in ("RuntimeError", "ConnectionError") and is_backend(text)
