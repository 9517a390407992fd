"""How a job ended, for whoever started it."""

from __future__ import annotations

import msgspec

from holdfast.control.causes import EXIT_CODES, Kind, RankExit, is_worth_rescheduling
from holdfast.control.incidents import Incident
from holdfast.observe import explain


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
    def ended_by(self) -> Incident | None:
        """The incident that ended the job, if one did."""
        is_last = self.kind is not None and self.incidents and not self.incidents[-1].restarted
        return self.incidents[-1] if is_last else None

    def failure(self) -> list[str]:
        """Why the job did not succeed, for a person."""
        if self.ended_by is not None:
            return explain.given_up(self.ended_by, self.run_dir)
        return [self.reason] if self.kind is not None else []

    @property
    def is_worth_rescheduling(self) -> bool:
        return is_worth_rescheduling(self.kind, self.elsewhere)

    @property
    def is_of_this_node(self) -> bool:
        """Whether what ended the job happened here. A job that was told to stop is nobody's fault."""
        last = self.incidents[-1] if self.incidents else None
        if self.kind is Kind.PREEMPTED:
            return False
        if last is None or last.kind is not self.kind:
            return True  # it ended without an incident, or in another way than the last one
        if last.rank is None:
            return last.kind is not Kind.LOST_NODE
        return any(exit.rank == last.rank for exit in self.exits)

    def exit_code(self, from_cause: bool, reschedule: int | None = None) -> int:
        """`reschedule`: the code that asks for another machine. A job that was stopped in order needs one too: its work
        is not done."""
        if reschedule is not None and self.is_worth_rescheduling:
            return reschedule
        if self.kind is None or (self.drained and not from_cause):
            return 0
        return EXIT_CODES[self.kind] if from_cause or self.kind is Kind.REQUESTED else 1
