"""What the invariants' checker is told: small facts, which a simulation sees as they happen and a real run can log."""

from __future__ import annotations

import msgspec

from holdfast.control.causes import Kind
from holdfast.control.incidents import Incident
from holdfast.control.worlds import World


class Launched(msgspec.Struct, frozen=True):
    """A coordinator told a node its share of a world."""

    term: int
    coordinator: str
    node: str
    host: str
    world: World


class Stopped(msgspec.Struct, frozen=True):
    """A coordinator told a node to stop a world."""

    term: int
    coordinator: str
    node: str
    generation: int
    why: str


class Ran(msgspec.Struct, frozen=True):
    """A node forked its ranks, while it had so many older ones."""

    node: str
    world: World
    old_ranks: int


class Stepped(msgspec.Struct, frozen=True):
    generation: int
    step: int


class Committed(msgspec.Struct, frozen=True):
    """A checkpoint was acknowledged."""

    generation: int
    step: int


class Restored(msgspec.Struct, frozen=True):
    generation: int
    step: int
    held: int = 0  # by a rank of this world that was in an earlier one


class Discarded(msgspec.Struct, frozen=True):
    """A node ends a rank that could stay, and why that has to be, if it has."""

    node: str
    generation: int
    rank: int
    why: str


class IncidentOpened(msgspec.Struct, frozen=True):
    term: int
    incident: Incident


class IncidentClosed(msgspec.Struct, frozen=True):
    term: int
    incident: Incident


class SetAside(msgspec.Struct, frozen=True):
    host: str


class TakenBack(msgspec.Struct, frozen=True):
    host: str


class Left(msgspec.Struct, frozen=True):
    """The coordinator has heard that this node goes, when that was the newest generation."""

    node: str
    generation: int


class Renewed(msgspec.Struct, frozen=True):
    """All nodes were started anew, and the job with them; or it had ended, and another begins under its name."""

    restarts: int = 0  # that were counted until then, and are given back
    another_job: bool = False
    term: int = 0  # of that job's first coordinator


class Ended(msgspec.Struct, frozen=True):
    """A coordinator said that the job is over."""

    term: int
    kind: Kind | None
    reason: str
    fit: int  # nodes that were there and could have been used
    leaving: bool  # some node was told to go
    reached: tuple[str, ...] = ()  # nodes that must have heard it


class Hung(msgspec.Struct, frozen=True):
    """A rank does nothing from here on."""

    generation: int
    rank: int


class Quit(msgspec.Struct, frozen=True):
    """A rank has called `sys.exit` with a code, in a world in which nothing had failed."""

    generation: int
    rank: int


class FoundHung(msgspec.Struct, frozen=True):
    """A node's monitor has given a rank up, after so long without a sign of life."""

    node: str
    generation: int
    rank: int
    silent_s: float
    awake_s: float  # of these, if its machine slept for too long to be blamed for that
    limit_s: float
    least_s: float  # that the limit may be, after what this rank has shown


class Excluded(msgspec.Struct, frozen=True):
    """It is written down that this host is not to be used again."""

    host: str


class EndAsked(msgspec.Struct, frozen=True):
    """It is written down that the job ends, because a rank has asked for it."""

    term: int


class Released(msgspec.Struct, frozen=True):
    """A node was a spare beside a last world that was written down, and of which nobody heard."""

    node: str


class Finished(msgspec.Struct, frozen=True):
    """An agent has finished, by itself or because it was told to, with so many ranks alive."""

    node: str
    kind: Kind | None
    reason: str
    live_ranks: int


Event = (
    Launched | Stopped | Ran | Stepped | Committed | Restored | IncidentOpened | IncidentClosed | SetAside | TakenBack
    | Discarded | Left | Renewed | Hung | Quit | FoundHung | Excluded | EndAsked | Released | Ended | Finished
)  # fmt: skip
