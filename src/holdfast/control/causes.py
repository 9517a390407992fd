"""Why ranks end: which exit came first, which merely followed, and what code that is."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from enum import StrEnum

import msgspec

from holdfast.wire.messages import Raised


class Kind(StrEnum):
    """What sort of thing ended a rank. The values are what incident files say."""

    ERROR = "error"  # the program's own: an exception, or an exit code of its choice
    BACKEND = "backend"  # torch's distributed layer: a peer, a network, a driver
    SIGNAL = "signal"  # a signal nobody of ours sent
    OUT_OF_MEMORY = "out-of-memory"
    HANG = "hang"
    LOST_NODE = "lost-node"
    PREEMPTED = "preempted"  # the job itself was told to stop
    LAUNCHER = "launcher"  # a helper process of ours was killed


# With --exit-code-from-cause. The block 81-88 is free of shells' codes (126 and up) and of sysexits' (64 to 78).
EXIT_CODES = {
    Kind.ERROR: 81,
    Kind.BACKEND: 82,
    Kind.SIGNAL: 83,
    Kind.OUT_OF_MEMORY: 84,
    Kind.HANG: 85,
    Kind.LOST_NODE: 86,
    Kind.PREEMPTED: 87,
    Kind.LAUNCHER: 88,
}


class RankExit(msgspec.Struct, frozen=True):
    """One rank's end, with the evidence that was there."""

    rank: int
    pid: int
    status: int  # exit code, or minus the signal
    at_s: float
    steps: int | None = None  # None where they cannot be seen
    raised: Raised | None = None
    stderr_tail: tuple[str, ...] = ()
    oom_killed: bool = False
    stopped: bool = False  # because we had told it to
    not_started: str = ""  # why it never had a process

    @property
    def kind(self) -> Kind:
        if self.not_started:
            return Kind.LAUNCHER
        if self.oom_killed or (self.raised is not None and self.raised.out_of_memory):
            return Kind.OUT_OF_MEMORY
        if self.raised is not None:
            return Kind.BACKEND if self.raised.distributed else Kind.ERROR
        if self.status < 0:
            return Kind.BACKEND if _aborted_by_backend(self) else Kind.SIGNAL
        return Kind.ERROR

    @property
    def headline(self) -> str:
        if self.not_started:
            return f"could not be started: {self.not_started}"
        if self.raised is not None:
            return self.raised.headline
        if self.oom_killed:
            return "killed by the kernel: out of memory (SIGKILL)"
        if self.status < 0:
            return f"killed by {signal_name(-self.status)}"
        return f"exited with code {self.status}"

    @property
    def failed_at_s(self) -> float:
        return self.raised.at_s if self.raised is not None else self.at_s

    @property
    def is_failure(self) -> bool:
        """A rank that ends because it was told to is no failure."""
        return self.status != 0 and not self.stopped


class Blame(msgspec.Struct, frozen=True):
    """The first cause of a world's end, and the ranks that only felt it."""

    first: RankExit
    followers: tuple[RankExit, ...]


def blame(exits: Sequence[RankExit]) -> Blame:
    """A rank whose collective broke is seldom the cause, however early it says so: its peer's death came first, and the
    peer may still be printing its traceback. So backend errors stand behind all others; among equals, time decides."""
    failures = [exit for exit in exits if exit.is_failure]
    if not failures:
        raise ValueError("no rank failed")
    first = min(failures, key=lambda exit: (exit.kind is Kind.BACKEND, exit.failed_at_s, exit.rank))
    return Blame(first, tuple(sorted((e for e in failures if e is not first), key=lambda e: (e.failed_at_s, e.rank))))


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _aborted_by_backend(exit: RankExit) -> bool:
    """NCCL's watchdog ends a rank whose peer is gone with SIGABRT, after saying why."""
    text = "\n".join(exit.stderr_tail)
    return exit.status == -signal.SIGABRT and ("ProcessGroupNCCL" in text or "NCCL watchdog" in text)
