"""What a coordinator hears, and what it orders."""

from __future__ import annotations

import msgspec

from holdfast.control import protocol
from holdfast.control.membership import Record

# -- events -----------------------------------------------------------------------------------------------------------


class From(msgspec.Struct, frozen=True):
    node: str
    message: protocol.ToCoordinator


class Gone(msgspec.Struct, frozen=True):
    """A node's connection closed."""

    node: str


class TimerFired(msgspec.Struct, frozen=True):
    name: str
    key: int


Event = From | Gone | TimerFired


# -- actions ----------------------------------------------------------------------------------------------------------


class Write(msgspec.Struct, frozen=True):
    """Put the record into the ledger. Nothing after it may be done before it is there."""

    record: Record


class Send(msgspec.Struct, frozen=True):
    node: str
    message: protocol.ToAgent


class Drop(msgspec.Struct, frozen=True):
    """Close a node's connection."""

    node: str


class Timer(msgspec.Struct, frozen=True):
    name: str
    key: int  # what it was set for; it comes back with it, and counts only if that is still so
    after_s: float


class StepDown(msgspec.Struct, frozen=True):
    """There is a newer coordinator: do nothing more."""


class End(msgspec.Struct, frozen=True):
    """The job is over, and everybody has been told."""


Action = Write | Send | Drop | Timer | StepDown | End
