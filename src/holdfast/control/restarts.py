"""What to do when a world has failed: restart it, and how soon, or give up."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from holdfast.control.causes import Kind

SAME_ERROR_LIMIT = 3
# A world that dies this soon without a step is part of a crash loop; the second in a row waits, then twice as long.
EARLY_S = 10.0
FIRST_BACKOFF_S = 0.5
MAX_BACKOFF_S = 30.0


class Failure(msgspec.Struct, frozen=True):
    """A world's failure, as far as the decision needs it."""

    kind: Kind
    rank: int
    headline: str
    where: str  # file and line of an exception, or ''
    raised: bool  # an exception, rather than an exit code or a signal
    steps: int | None  # the most steps that any rank had done in this world; None where that cannot be seen
    uptime_s: float
    base: int = 0  # the steps that the optimizer had done before, in a world that resumed; 0 where it does not say


class History(msgspec.Struct, frozen=True):
    """What was spent so far, and what the last failures had in common."""

    limit: int
    spent: int = 0  # the job's restart count: it only grows
    refilled: int = 0  # of these, given back for good steps
    early_in_a_row: int = 0
    same_error: str = ""
    same_error_in_a_row: int = 0
    reached: int = 0  # the furthest step
    stalled: int = 0  # restarts in a row that did not get further

    @property
    def left(self) -> int:
        return self.limit - self.spent + self.refilled

    def seen(self, failure: Failure) -> History:
        """The history with this failure in it. What a restart costs is charged by whoever restarts."""
        early = not failure.steps and failure.uptime_s < EARLY_S
        error = _repeatable(failure)
        count = 0 if not error else self.same_error_in_a_row + 1 if error == self.same_error else 1
        return msgspec.structs.replace(
            self,
            early_in_a_row=self.early_in_a_row + 1 if early else 0,
            same_error=error,
            same_error_in_a_row=count,
            reached=max(self.reached, failure.base + (failure.steps or 0)),
            stalled=self._stalled(failure),
        )

    def got_to(self, base: int, steps: int) -> History:
        """The last failure's world had got further than was known then."""
        if base + steps <= self.reached:
            return self
        return msgspec.structs.replace(self, reached=base + steps, stalled=0)

    def _stalled(self, failure: Failure) -> int:
        """A world that resumed has to get past where an earlier one was; one that began anew has to take a step. Where
        steps cannot be seen, nothing is known, and a node's arrival is nobody's failure."""
        if failure.steps and (not failure.base or failure.base + failure.steps > self.reached):
            return 0
        if failure.steps is None or failure.kind is Kind.MEMBERSHIP:
            return self.stalled
        return self.stalled + 1 if self.spent else 0

    def charged(self) -> History:
        return msgspec.structs.replace(self, spent=self.spent + 1)

    def refunded(self, count: int = 1) -> History:
        """Restarts given back; never more than were spent."""
        return msgspec.structs.replace(self, refilled=min(self.spent, self.refilled + count))


class Restart(msgspec.Struct, frozen=True):
    reason: str
    after_s: float = 0.0


class GiveUp(msgspec.Struct, frozen=True):
    reason: str
    elsewhere: bool | None = None  # whether another machine may do better; None: the failure's kind says


Decide = Callable[[History, Failure], Restart | GiveUp]


def decide(history: History, failure: Failure) -> Restart | GiveUp:
    """Asking twice is free. `history` has this failure in it already."""
    if history.left <= 0:
        why = f"all {history.limit} are used" if history.limit else "--max-restarts is 0"
        return GiveUp(f"no restart: {why}")
    given = f" (and {history.refilled} given back)" if history.refilled else ""
    return Restart(f"restart {history.spent + 1} of {history.limit}{given}", after_s=backoff_s(history.early_in_a_row))


def decide_unless_same_error(history: History, failure: Failure) -> Restart | GiveUp:
    """A script that dies three times at the same line before its first step is broken; a retry wastes the cluster."""
    if history.same_error_in_a_row >= SAME_ERROR_LIMIT:
        return GiveUp(
            f"the same error {SAME_ERROR_LIMIT} times in a row before the first step is a bug in the program, "
            "not a fault of the machine (--retry-same-error goes on regardless)",
            elsewhere=False,
        )
    return decide(history, failure)


def backoff_s(early_in_a_row: int) -> float:
    if early_in_a_row < 2:
        return 0.0
    return min(FIRST_BACKOFF_S * 2.0 ** min(early_in_a_row - 2, 16), MAX_BACKOFF_S)


def _repeatable(failure: Failure) -> str:
    """The identity of an error that would come again on any machine; '' for what may be this machine's fault."""
    if not failure.raised or failure.kind is not Kind.ERROR or failure.steps:
        return ""
    return f"{failure.where} {failure.headline}"
