"""How a job ended, for whoever started it."""

from __future__ import annotations

import msgspec

from holdfast.control.causes import EXIT_CODES, Kind, RankExit, is_worth_rescheduling
from holdfast.control.incidents import Incident


class Result(msgspec.Struct, frozen=True):
    """How a job ended."""

    kind: Kind | None  # None is success
    reason: str
    incidents: tuple[Incident, ...]
    exits: tuple[RankExit, ...]  # of the last world
    run_dir: str | None
    drained: bool = False  # it was told to end, and did so in order
    elsewhere: bool | None = None  # whether another machine may do better; None: the kind says

    @property
    def is_worth_rescheduling(self) -> bool:
        return is_worth_rescheduling(self.kind, self.elsewhere)

    def exit_code(self, from_cause: bool, reschedule: int | None = None) -> int:
        """`reschedule`: the code that asks for another machine. A job that was stopped in order needs one too: its work
        is not done."""
        if reschedule is not None and self.is_worth_rescheduling:
            return reschedule
        if self.kind is None or (self.drained and not from_cause):
            return 0
        return EXIT_CODES[self.kind] if from_cause or self.kind is Kind.REQUESTED else 1
