"""One job on one node, as a state machine: an event goes in, the next state and what to do come out."""

from __future__ import annotations

import signal
from enum import StrEnum
from typing import Any, TypeVar

import msgspec

from holdfast.control import incidents
from holdfast.control.causes import Kind, RankExit, blame, signal_name
from holdfast.control.incidents import Incident
from holdfast.control.restarts import Decide, Failure, GiveUp, History, Restart, decide_unless_same_error

S = TypeVar("S", bound=msgspec.Struct)

# How long after SIGKILL a process may take to go before the job ends without it. Only one in an uninterruptible
# system call, state D, takes more than a moment, and it holds what a successor would need.
ABANDON_S = 10.0


class Phase(StrEnum):
    PREPARING = "preparing"  # the helpers are starting
    RUNNING = "running"
    STOPPING = "stopping"
    WAITING = "waiting"  # before a restart that backs off
    DONE = "done"


class Job(msgspec.Struct, frozen=True):
    ranks: tuple[int, ...]
    history: History
    grace_s: float
    phase: Phase = Phase.PREPARING
    generation: int = -1  # of the last world that was launched
    helpers: bool = False  # there is a zygote to fork from
    live: frozenset[int] = frozenset()
    stepped: frozenset[int] = frozenset()
    exits: tuple[RankExit, ...] = ()
    launched_at_s: float = 0.0
    stop_sent_at_s: float = 0.0
    sent: frozenset[int] = frozenset()  # signals that this world's ranks were sent
    stop_signal: int | None = None  # the job was told to end
    keeper_lost_at_s: float | None = None
    helpers_lost_steps: int | None = None  # known from the beacons of ranks that died with their zygote
    incident: Incident | None = None  # the open one
    incidents: int = 0
    steps: int = 0  # in worlds that have ended
    lost_s: float = 0.0


# -- events -----------------------------------------------------------------------------------------------------------


class HelpersReady(msgspec.Struct, frozen=True):
    """Workers can be forked."""


class HelpersLost(msgspec.Struct, frozen=True):
    """The zygote or the janitor was killed, and every worker with it."""

    what: str
    steps: int | None = None  # that its ranks had done


class KeeperLost(msgspec.Struct, frozen=True):
    """The store keeper of the generation was killed. What is connected goes on, but nothing new can start."""

    generation: int


class Started(msgspec.Struct, frozen=True):
    """All ranks of the generation have a process."""

    generation: int


class Stepped(msgspec.Struct, frozen=True):
    """A rank has done its first step."""

    rank: int
    generation: int
    at_s: float


class Exited(msgspec.Struct, frozen=True):
    generation: int
    exit: RankExit


class StopRequested(msgspec.Struct, frozen=True):
    signum: int


class TimerFired(msgspec.Struct, frozen=True):
    name: str
    generation: int


Event = HelpersReady | HelpersLost | KeeperLost | Started | Stepped | Exited | StopRequested | TimerFired


# -- actions ----------------------------------------------------------------------------------------------------------


class PrepareHelpers(msgspec.Struct, frozen=True):
    """Start a janitor and a zygote."""


class Launch(msgspec.Struct, frozen=True):
    generation: int
    restart_count: int


class Signal(msgspec.Struct, frozen=True):
    ranks: tuple[int, ...]
    signum: int
    why: str


class Timer(msgspec.Struct, frozen=True):
    name: str
    generation: int
    after_s: float


class ClearLeftovers(msgspec.Struct, frozen=True):
    """The world is over: end whatever its workers left running."""


class Opened(msgspec.Struct, frozen=True):
    """A failure was understood and answered."""

    incident: Incident


class Closed(msgspec.Struct, frozen=True):
    """What the failure cost is known."""

    incident: Incident


class Finish(msgspec.Struct, frozen=True):
    """The job is over; None is success."""

    kind: Kind | None
    reason: str = ""


Action = PrepareHelpers | Launch | Signal | Timer | ClearLeftovers | Opened | Closed | Finish
Outcome = tuple[Job, list[Action]]


def begin(ranks: int, max_restarts: int, grace_s: float) -> Outcome:
    return Job(tuple(range(ranks)), History(max_restarts), grace_s), [PrepareHelpers()]


def advance(job: Job, now_s: float, event: Event, decide: Decide = decide_unless_same_error) -> Outcome:
    if job.phase is Phase.DONE:
        return job, []
    match event:
        case HelpersReady() if job.phase is Phase.PREPARING:
            return _launch(_with(job, helpers=True), now_s)
        case HelpersLost(what=what, steps=steps):
            return _helpers_lost(_with(job, helpers_lost_steps=steps), now_s, what, decide)
        case KeeperLost(generation=generation) if generation == job.generation and job.phase is Phase.RUNNING:
            job = _with(job, phase=Phase.STOPPING, stop_sent_at_s=now_s, keeper_lost_at_s=now_s)
            return _stop(job, signal.SIGTERM, "the store keeper was killed")
        case Started(generation=generation) if generation == job.generation and job.incident is not None:
            return _with(job, incident=_with(job.incident, started_at_s=now_s)), []
        case Stepped(generation=generation) if generation == job.generation:
            return _stepped(job, event)
        case Exited(generation=generation) if generation == job.generation:
            return _exited(job, now_s, event.exit, decide)
        case StopRequested(signum=signum):
            return _stop_requested(job, now_s, signum)
        case TimerFired(generation=generation) if generation == job.generation:
            return _timer_fired(job, now_s, event.name)
    return job, []


def _launch(job: Job, now_s: float) -> Outcome:
    incident = job.incident
    if incident is not None:
        incident = _with(incident, launched_at_s=now_s)
    job = _with(
        job,
        phase=Phase.RUNNING,
        generation=job.generation + 1,
        live=frozenset(job.ranks),
        stepped=frozenset(),
        exits=(),
        launched_at_s=now_s,
        sent=frozenset(),
        keeper_lost_at_s=None,
        helpers_lost_steps=None,
        incident=incident,
    )
    return job, [Launch(job.generation, job.history.spent)]


def _stepped(job: Job, event: Stepped) -> Outcome:
    job = _with(job, stepped=job.stepped | {event.rank})
    if job.incident is None or job.stepped != frozenset(job.ranks) or job.phase is not Phase.RUNNING:
        return job, []
    return _close_incident(_with(job, incident=_with(job.incident, recovered_at_s=event.at_s)))


def _exited(job: Job, now_s: float, exit: RankExit, decide: Decide) -> Outcome:
    if exit.rank not in job.live:
        return job, []
    exit = _with(exit, stopped=_was_told(job, exit))
    job = _with(job, live=job.live - {exit.rank}, exits=(*job.exits, exit))
    if job.phase is Phase.RUNNING and exit.status != 0:
        if not job.live:
            return _settle(_with(job, stop_sent_at_s=now_s), now_s, decide)
        job = _with(job, phase=Phase.STOPPING, stop_sent_at_s=now_s)
        why = f"rank {exit.rank} failed: {exit.headline}"
        return _stop(job, signal.SIGTERM, why)
    if job.live:
        return job, []
    if job.phase is Phase.STOPPING:
        return _settle(job, now_s, decide)
    return _finish(_end_world(job), [], None)


def _was_told(job: Job, exit: RankExit) -> bool:
    """Whether a rank ended because we told it to. One that had raised before, or that was killed by a signal we never
    sent, did not, even if its end is seen only now."""
    if job.phase is not Phase.STOPPING or exit.failed_at_s < job.stop_sent_at_s:
        return False
    return exit.status >= 0 or -exit.status in job.sent


def _settle(job: Job, now_s: float, decide: Decide) -> Outcome:
    """The world is down: name the cause, then restart or give up."""
    job = _end_world(job)
    cleared: list[Action] = [ClearLeftovers()]
    if job.stop_signal is not None:
        return _finish(job, cleared, Kind.PREEMPTED, f"stopped by {signal_name(job.stop_signal)}")
    if job.keeper_lost_at_s is not None:
        opened = _of_launcher(job, "the store keeper was killed", job.keeper_lost_at_s)
        return _answer(job, now_s, opened, False, "", decide, cleared)
    blamed = blame(job.exits)
    opened = incidents.of_rank(job.incidents + 1, job.generation, blamed.first, blamed.followers)
    return _answer(job, now_s, opened, bool(blamed.first.raised), _where(blamed.first), decide, cleared)


def _answer(
    job: Job,
    now_s: float,
    opened: Incident,
    raised: bool,
    where: str,
    decide: Decide,
    actions: list[Action],
) -> Outcome:
    """Decide what an incident leads to, and set it going."""
    job, closed = _close_incident(job, opened.failed_at_s)  # its ranks never all stepped, so it is still open
    actions = actions + closed
    uptime_s = opened.failed_at_s - job.launched_at_s
    steps = _steps(job)
    failure = Failure(opened.kind, opened.rank or 0, opened.headline, where, raised, steps, uptime_s)
    history = job.history.seen(failure)
    decision = decide(history, failure)
    opened = _with(
        opened,
        steps=steps,
        uptime_s=uptime_s,
        stopped_at_s=now_s,
        action=decision.reason,
        restarted=isinstance(decision, Restart),
    )
    job = _with(job, history=history, incident=opened, incidents=opened.number)
    actions.append(Opened(opened))
    if isinstance(decision, GiveUp):
        return _finish(job, actions, opened.kind, decision.reason)
    job = _with(job, history=history.charged())
    if decision.after_s > 0:
        return _with(job, phase=Phase.WAITING), [*actions, Timer("backoff", job.generation, decision.after_s)]
    job, going = _go_on(job, now_s)
    return job, actions + going


def _go_on(job: Job, now_s: float) -> Outcome:
    """The next world; with new helpers first, where they were lost."""
    if job.helpers:
        return _launch(job, now_s)
    return _with(job, phase=Phase.PREPARING), [PrepareHelpers()]


def _helpers_lost(job: Job, now_s: float, what: str, decide: Decide) -> Outcome:
    lost = _with(_end_world(job), live=frozenset(), helpers=False)
    cleared: list[Action] = [ClearLeftovers()]
    if job.stop_signal is not None:
        return _finish(lost, cleared, Kind.PREEMPTED, f"stopped by {signal_name(job.stop_signal)}")
    if job.generation < 0:
        return _finish(lost, cleared, Kind.LAUNCHER, f"{what} while workers were about to start")
    if job.phase is Phase.WAITING:  # no world was lost with it
        return lost, cleared
    return _answer(lost, now_s, _of_launcher(job, what, now_s), False, "", decide, cleared)


def _of_launcher(job: Job, what: str, failed_at_s: float) -> Incident:
    return Incident(job.incidents + 1, job.generation, Kind.LAUNCHER, what, "", False, failed_at_s=failed_at_s)


def _stop_requested(job: Job, now_s: float, signum: int) -> Outcome:
    if job.stop_signal is not None:
        # A second Ctrl-C means now. Schedulers repeat SIGTERM while ranks save their state; that must not cut it short.
        again = signal.SIGKILL if signum == signal.SIGINT else signum
        return _send(job, again, f"holdfast got {signal_name(signum)} while stopping")
    job = _with(job, stop_signal=signum)
    if not job.live:
        return _finish(job, [], Kind.PREEMPTED, f"stopped by {signal_name(signum)}")
    if job.phase is Phase.STOPPING:
        return _send(job, signum, f"holdfast got {signal_name(signum)}")
    job = _with(job, phase=Phase.STOPPING, stop_sent_at_s=now_s)
    return _stop(job, signum, f"holdfast got {signal_name(signum)}")


def _timer_fired(job: Job, now_s: float, name: str) -> Outcome:
    if name == "backoff" and job.phase is Phase.WAITING:
        return _go_on(job, now_s)
    if name == "grace" and job.phase is Phase.STOPPING:
        job, sent = _send(job, signal.SIGKILL, f"still there {job.grace_s:g} s after being told to stop")
        return job, [*sent, Timer("abandon", job.generation, ABANDON_S)]
    if name == "abandon" and job.phase is Phase.STOPPING:
        ranks = ", ".join(map(str, sorted(job.live)))
        reason = (
            f"rank {ranks} does not end even by SIGKILL: it is stuck inside the kernel, and holds what a restart needs"
        )
        job, closed = _close_incident(_end_world(job), job.stop_sent_at_s)
        stuck = _stuck(job, now_s, reason)
        job = _with(job, incident=stuck, incidents=stuck.number)
        return _finish(job, [ClearLeftovers(), *closed, Opened(stuck)], Kind.HANG, reason)
    return job, []


def _stuck(job: Job, now_s: float, reason: str) -> Incident:
    """A world that cannot be ended: told with what made us end it, where a rank had failed."""
    if any(exit.is_failure for exit in job.exits):
        blamed = blame(job.exits)
        stuck = incidents.of_rank(job.incidents + 1, job.generation, blamed.first, blamed.followers)
        return _with(stuck, kind=Kind.HANG, action=reason, stopped_at_s=now_s)
    told = Incident(job.incidents + 1, job.generation, Kind.HANG, "a rank that cannot be ended", reason, False)
    return _with(told, failed_at_s=job.stop_sent_at_s, stopped_at_s=now_s)


def _stop(job: Job, signum: int, why: str) -> Outcome:
    job, sent = _send(job, signum, why)
    return job, [*sent, Timer("grace", job.generation, job.grace_s)]


def _send(job: Job, signum: int, why: str) -> Outcome:
    return _with(job, sent=job.sent | {signum}), [Signal(tuple(sorted(job.live)), signum, why)]


def _end_world(job: Job) -> Job:
    """Count the world's steps, once."""
    if job.phase not in (Phase.RUNNING, Phase.STOPPING):
        return job
    return _with(job, steps=job.steps + (_steps(job) or 0))


def _steps(job: Job) -> int | None:
    """The most that any rank of this world has done; None where that cannot be seen."""
    seen = [exit.steps for exit in job.exits if exit.steps is not None]
    if job.helpers_lost_steps is not None:
        seen.append(job.helpers_lost_steps)
    return max(seen, default=None)


def _close_incident(job: Job, failed_again_at_s: float | None = None) -> Outcome:
    if job.incident is None:
        return job, []
    closed = job.incident
    if closed.started_at_s is not None and closed.recovered_at_s is None:
        closed = _with(closed, failed_again_at_s=failed_again_at_s)
    return _with(job, incident=None, lost_s=job.lost_s + closed.lost_s), [Closed(closed)]


def _finish(job: Job, actions: list[Action], kind: Kind | None, reason: str = "") -> Outcome:
    job, closed = _close_incident(job)
    return _with(job, phase=Phase.DONE), [*actions, *closed, Finish(kind, reason)]


def _where(exit: RankExit) -> str:
    return exit.raised.where if exit.raised is not None else ""


def _with(value: S, **changes: Any) -> S:
    return msgspec.structs.replace(value, **changes)
