"""The job's account of its failures: the restart count, the open incident, and what each failure leads to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import msgspec

from holdfast.control import incidents, protocol
from holdfast.control.causes import Cause, Kind, blame
from holdfast.control.incidents import Incident
from holdfast.control.membership import Budget, Policy, Record, Settings
from holdfast.control.restarts import Decide, Failure, GiveUp, History, Restart, backoff_s

S = TypeVar("S", bound=msgspec.Struct)

_IF_AS_LARGE = ", if the next world is as large"


class Ended(msgspec.Struct, frozen=True):
    """A world that is down, as far as the account needs it."""

    generation: int
    launched_at_s: float
    steps: int | None  # None where they cannot be seen
    stepped: bool
    base: int = 0  # what the optimizer had done before this world
    stays: bool = False  # all its ranks could outlive it
    stayed: int = 0  # so many have
    replaced: int = 0  # so many could not get out of it
    as_they_are: bool = False  # whether they do depends on the size of the next one
    anew: str = ""  # why none has
    healthy: bool = False  # there are enough nodes without a new one


class Answer(msgspec.Struct, frozen=True):
    first: Cause
    decision: Restart | GiveUp


class Account:
    """Charged here and nowhere else: once per incident."""

    def __init__(self, settings: Settings, decide: Decide, record: Record | None) -> None:
        self._settings = settings
        self._decide = decide
        self.history = History(settings.max_restarts)
        self.incident: Incident | None = None  # the open one
        self._undated: Incident | None = None  # as it was taken up
        self.incidents = 0
        self.refill_mark = 0
        if record is not None:
            self.incidents = record.incidents
            if record.over is None:
                self.history = record.history

    # -- incidents ----------------------------------------------------------------------------------------------------

    def open(self, now_s: float, ended: Ended, causes: Sequence[Cause]) -> Answer:
        """Name the first cause, decide what it leads to, and charge for it."""
        blamed = blame(causes)
        first = blamed.first
        opened = incidents.of(self.incidents + 1, ended.generation, blamed)
        uptime_s = _uptime_s(opened, ended)
        rank = opened.rank if opened.rank is not None else 0
        failure = Failure(
            opened.kind, rank, opened.headline, first.where, first.raised, ended.steps, uptime_s, ended.base
        )
        self.history = self.history.seen(failure)
        charged = self._is_charged(first, ended)
        decision = self._decide(self.history, failure) if charged else self._uncounted(first)
        if 0 < self._settings.max_no_progress <= self.history.stalled:
            decision = self._stalled(opened.kind)
        if self._settings.alone and (stuck := next((c for c in causes if c.stuck), None)):
            # There is no other node, and this one holds ranks that cannot be ended.
            opened, decision = _with(opened, kind=Kind.HANG), GiveUp(stuck.headline)
        self.incident = _with(
            opened,
            steps=ended.steps,
            uptime_s=uptime_s,
            stopped_at_s=now_s,
            action=decision.reason + (_who_stays(ended) if isinstance(decision, Restart) else ""),
            restarted=isinstance(decision, Restart),
        )
        self.incidents = opened.number
        if charged and isinstance(decision, Restart):
            self.history = self.history.charged()
        return Answer(first, decision)

    def heard_late(self, base: int, steps: int) -> bool:
        """How far a world had got whose incident is open already: nodes that nobody could hear have trained on in it.
        Whether that is news."""
        known, self.history = self.history, self.history.got_to(base, steps)
        return self.history != known

    def set_aside(self, hosts: Sequence[str]) -> None:
        """By what the open incident is about."""
        if self.incident is not None and hosts:
            words = f"{', '.join(hosts)} {'are' if len(hosts) > 1 else 'is'} set aside"
            self.incident = _with(self.incident, action=f"{self.incident.action}; {words}")

    def _stalled(self, kind: Kind) -> GiveUp:
        """What comes again and again at one step may be the program's own doing, on whatever machine, however it ends.
        But no program makes a driver tell of failing hardware, and none sends us signals."""
        reason = (
            f"{self._settings.max_no_progress} restarts in a row got no further than step {self.history.reached} "
            "(--max-no-progress-restarts sets how many may)"
        )
        return GiveUp(reason, elsewhere=None if kind in (Kind.HARDWARE, Kind.PREEMPTED) else False)

    def _uncounted(self, first: Cause) -> Restart:
        """No budget ends a loop of these, so one that gets nowhere must slow down by itself. Nodes that join need not:
        each comes once."""
        after_s = 0.0 if first.kind is Kind.MEMBERSHIP else backoff_s(self.history.early_in_a_row)
        return Restart("restart that is not counted", after_s)

    def note(self, now_s: float, ended: Ended, causes: Sequence[Cause], action: str) -> Incident:
        """A failure that stops nobody else: it costs nothing, and is over at once."""
        self.incidents += 1
        noted = incidents.of(self.incidents, ended.generation, blame(causes))
        return _with(noted, steps=ended.steps, uptime_s=_uptime_s(noted, ended), stopped_at_s=now_s, action=action)

    def _is_charged(self, first: Cause, ended: Ended) -> bool:
        if first.kind is Kind.MEMBERSHIP and not ended.stepped:
            return False  # nodes of one start come one after the other; nothing was done that could be lost
        if first.kind in (Kind.MEMBERSHIP, Kind.PREEMPTED) and ended.stays:
            return False  # nobody had to be started again
        if self._settings.policy is Policy.MIN_HEALTHY and ended.stayed and ended.healthy and not ended.anew:
            return False  # the ranks see to it among themselves
        if first.kind is Kind.MEMBERSHIP and self.history.left <= 0:
            return False  # it was free when it began, and a step was done since; nobody's arrival ends a job
        membership = first.kind in (Kind.MEMBERSHIP, Kind.LOST_NODE, Kind.PREEMPTED)
        return not (membership and self._settings.budget is Budget.FAILURES)

    def launched(self, now_s: float, as_large: bool) -> None:
        self.refill_mark = 0
        if self.incident is not None:
            action = _who_stayed(self.incident.action, as_large)
            self.incident = _with(self.incident, launched_at_s=now_s, action=action)

    def started(self, now_s: float) -> None:
        if self.incident is not None and self.incident.started_at_s is None:
            self.incident = _with(self.incident, started_at_s=now_s)

    def recovered(self, at_s: float) -> None:
        if self.incident is None:
            return
        recovered_at_s = max(at_s, self.incident.launched_at_s or at_s)
        started_at_s = self.incident.started_at_s  # it may have been told to an earlier coordinator alone
        self.incident = _with(
            self.incident,
            started_at_s=recovered_at_s if started_at_s is None else started_at_s,
            recovered_at_s=recovered_at_s,
        )

    def close(self, failed_again_at_s: float | None = None) -> Incident | None:
        closed, self.incident = self.incident, None
        if closed is not None and closed.started_at_s is not None and closed.recovered_at_s is None:
            closed = _with(closed, failed_again_at_s=failed_again_at_s)
        return closed

    # -- the budget ---------------------------------------------------------------------------------------------------

    def refill(self, steps: int) -> bool:
        """Give restarts back for good steps of a world; whether one was."""
        each, given = self._settings.refill_steps, self.history.refilled
        earned = max(0, steps - self.refill_mark) // each if each else 0
        self.refill_mark += earned * each
        self.history = self.history.refunded(earned)
        return self.history.refilled > given

    def remember(self, restarts: int) -> None:
        """A node knows of more restarts than the ledger did."""
        self.history = _with(self.history, spent=max(self.history.spent, restarts))

    def begin_anew(self) -> None:
        """Another start of the job under the same name: all restarts are there again, but the count only grows."""
        spent = self.history.spent
        self.history = History(self._settings.max_restarts, spent, refilled=spent)

    def take_up(self, record: Record, now_s: float) -> None:
        self.refill_mark = record.refill_mark
        if record.incident is not None:
            self.incident = self._undated = protocol.shifted(record.incident, now_s)

    def date(self, which: tuple[int, int], failed_at_s: float) -> None:
        """By a node that knows when it began. A record says how long ago that was when it was written, and not for how
        long nobody has coordinated since."""
        incident = self._undated
        if incident is None or incident is not self.incident or which != (incident.generation, incident.number):
            return
        if failed_at_s < incident.failed_at_s:
            self.incident = self._undated = protocol.shifted(incident, failed_at_s - incident.failed_at_s)


def _with(value: S, **changes: object) -> S:
    return msgspec.structs.replace(value, **changes)


def _uptime_s(incident: Incident, ended: Ended) -> float:
    """A coordinator that took the world up knows of it since then, and what it hears of may have been before."""
    return max(0.0, incident.failed_at_s - ended.launched_at_s)


def _who_stayed(action: str, as_large: bool) -> str:
    """What became of it, where that hung on the next world, which is there now."""
    before, hangs, after = action.partition(_IF_AS_LARGE)
    if not hangs or as_large:
        return before + after
    decided = before.rpartition("; ")[0]
    return f"{decided}; all ranks are started anew: what they have does not fit a world of another size{after}"


def _who_stays(ended: Ended) -> str:
    """Which step of the ladder this is, and why it is not the first."""
    words = f"; all ranks are started anew: {ended.anew}" if ended.anew else ""
    if ended.stayed:
        words = f"; {ended.stayed} rank{'s stay' if ended.stayed > 1 else ' stays'}"
        words += _IF_AS_LARGE if ended.as_they_are else ""
    if ended.replaced > 1:
        words += f"; {ended.replaced} ranks are replaced, too: they did not leave their world"
    elif ended.replaced:
        words += "; 1 rank is replaced, too: it did not leave its world"
    return words
