"""The record of one failure: what happened, whose fault it was, what was done, and what it cost."""

from __future__ import annotations

import msgspec

from holdfast.control.causes import Blame, Kind
from holdfast.control.stacks import Group


class Follower(msgspec.Struct, frozen=True):
    """What failed because something else had."""

    rank: int | None
    headline: str
    node: str = ""


class Incident(msgspec.Struct, frozen=True):
    """Opened when a world fails, closed when its successor's ranks have all stepped, or when there is none."""

    number: int
    generation: int
    kind: Kind
    headline: str
    action: str  # what was decided, and why
    restarted: bool
    rank: int | None = None
    node: str = ""  # where there are several
    pid: int | None = None
    status: int | None = None
    steps: int | None = None  # that any rank had done in this world; None where that cannot be seen
    uptime_s: float = 0.0
    traceback: str = ""
    stderr_tail: tuple[str, ...] = ()
    followers: tuple[Follower, ...] = ()
    # When each phase ended, on the agent's monotonic clock; None while it has not.
    failed_at_s: float = 0.0
    stopped_at_s: float = 0.0
    launched_at_s: float | None = None
    started_at_s: float | None = None
    recovered_at_s: float | None = None
    failed_again_at_s: float | None = None  # instead of recovering
    detected_at_s: float | None = None  # of a hang, which is found later than it began
    suspects: tuple[int, ...] = ()  # of a hang: the ranks that the others seem to wait for
    groups: tuple[Group, ...] = ()  # of a hang: what the ranks were doing

    @property
    def what(self) -> str:
        on = f" on {self.node}" if self.node else ""
        if self.detected_at_s is not None:
            return f"{f'rank {self.rank}{on}' if self.rank is not None else 'the world'} hangs: {self.headline}"
        return self.headline if self.rank is None else f"rank {self.rank}{on}: {self.headline}"

    def phases_s(self) -> dict[str, float]:
        """Where the time went. The phases that have ended, in order; they add up to `lost_s`."""
        marks = [
            *([("detect", self.detected_at_s)] if self.detected_at_s is not None else []),
            ("stop", self.stopped_at_s),
            ("wait", self.launched_at_s),
            ("start", self.started_at_s),
            ("failed again", self.failed_again_at_s) if self.failed_again_at_s else ("first step", self.recovered_at_s),
        ]
        phases: dict[str, float] = {}
        since = self.failed_at_s
        for name, until in marks:
            if until is None:
                break
            phases[name] = until - since
            since = until
        return phases

    @property
    def lost_s(self) -> float:
        return sum(self.phases_s().values())


# More followers than anybody reads; a node's death can have thousands.
MAX_FOLLOWERS = 16


def of(number: int, generation: int, blamed: Blame) -> Incident:
    """The incident that something caused, before anything was decided."""
    first = blamed.first
    return Incident(
        number=number,
        generation=generation,
        kind=first.kind,
        headline=first.headline,
        action="",
        restarted=False,
        rank=first.rank,
        node=first.node,
        pid=first.pid,
        status=first.status,
        traceback=first.traceback,
        stderr_tail=first.stderr_tail,
        followers=tuple(Follower(c.rank, c.headline, c.node) for c in blamed.followers[:MAX_FOLLOWERS]),
        suspects=first.suspects,
        groups=first.groups,
        failed_at_s=first.failed_at_s,
        detected_at_s=first.detected_at_s,
    )
