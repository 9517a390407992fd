"""One node of a job, as a state machine: what happens here and what the coordinator says goes in, what to do comes out.

It decides alone only what must not wait: a failed rank's neighbours are stopped at once, an older world before a newer
one starts, and everything when no coordinator was reached for too long. The rest is the coordinator's.
"""

from __future__ import annotations

import math
import signal
from enum import StrEnum

import msgspec

from holdfast.control import protocol
from holdfast.control.acts import (
    Action,
    ClearLeftovers,
    Closed,
    Contact,
    ContactLost,
    Event,
    Exited,
    Finish,
    HangUp,
    HelpersLost,
    HelpersReady,
    KeeperLost,
    Lease,
    Opened,
    PrepareHelpers,
    Run,
    Signal,
    Started,
    Stepped,
    StopRequested,
    Tell,
    Timer,
    TimerFired,
    Told,
)
from holdfast.control.causes import Cause, Kind, RankExit, signal_name
from holdfast.control.membership import BEATS
from holdfast.control.worlds import World

# How long after SIGKILL a process may take to go before the node ends without it. Only one in an uninterruptible
# system call, state D, takes more than a moment, and it holds what a successor would need.
ABANDON_S = 10.0
ABANDON_WAITS = 5  # counted and not timed: a machine that slept has not waited


class Phase(StrEnum):
    PREPARING = "preparing"  # the helpers are starting
    IDLE = "idle"  # a spare, or between two worlds
    RUNNING = "running"
    STOPPING = "stopping"
    DONE = "done"


class Node:
    """Changed by `handle` alone."""

    def __init__(
        self,
        hello: protocol.Hello,
        grace_s: float,
        join_timeout_s: float = math.inf,
        close_timeout_s: float = 30.0,
        beat_s: float = 0.5,
    ) -> None:
        self.hello = hello
        self.grace_s = grace_s
        self.join_timeout_s = join_timeout_s
        self.close_timeout_s = close_timeout_s
        self.beat_s = beat_s
        self.phase = Phase.PREPARING
        self.helpers = False  # there is a zygote to fork from
        self.contact = False
        self.greeted = False  # since this contact
        self.greeted_at_s = 0.0
        self.welcomed = False  # since this contact
        self.contacts = 0  # and losses of it, so that an old timer is known as such
        self.missed = 0  # beats without an answer
        self.term = -1
        self.arrival = -1
        self.generation = -1  # the newest that this node was told of
        self.restarts = 0
        self.world: World | None = None  # the last one that was run here
        self.pending: World | None = None  # waits until the old ranks are gone and helpers are there
        self.live: frozenset[int] = frozenset()
        self.stepped: frozenset[int] = frozenset()
        self.stepped_at_s = 0.0
        self.exits: tuple[RankExit, ...] = ()
        self.causes: tuple[Cause, ...] = ()  # of ours, not of a rank
        self.failing = ""
        self.sent: frozenset[int] = frozenset()  # signals that this world's ranks were sent
        self.stop_sent_at_s = 0.0
        self.stop_signal: int | None = None  # this node was told to end
        self.lost_steps: int | None = None  # known from the beacons of ranks that died with their zygote
        self.steps = 0  # in worlds that have ended
        self.over: Finish | None = None  # how to finish once the ranks are gone
        self.fit = True
        self.waits = 0  # since SIGKILL
        self.opened = self.closed = (-1, 0)  # generation and number of the last incident that this node heard of

    def begin(self) -> list[Action]:
        return [PrepareHelpers(), *self._wait_for_contact()]

    def handle(self, now_s: float, event: Event) -> list[Action]:
        match event:
            # What was decided is recorded even at the very end.
            case protocol.Opened(incident=incident, now_s=theirs_s):
                if (incident.generation, incident.number) == self.opened:
                    return []  # told again, by a coordinator that cannot know
                self.opened = (incident.generation, incident.number)
                return [Opened(protocol.shifted(incident, now_s - theirs_s))]
            case protocol.Closed(incident=incident, now_s=theirs_s):
                if (incident.generation, incident.number) == self.closed:
                    return []
                self.closed = (incident.generation, incident.number)
                return [Closed(protocol.shifted(incident, now_s - theirs_s))]
            case _ if self.phase is Phase.DONE:
                return []
            case Exited(generation=generation) if self.world is not None and generation == self.world.generation:
                return self._exited(now_s, event.exit)
            case Stepped(generation=generation) if self.world is not None and generation == self.world.generation:
                return self._stepped(now_s, event)
            case Started(generation=generation) if self.world is not None and generation == self.world.generation:
                return self._tell(protocol.Started(generation))
            case KeeperLost(generation=generation) if self._is_running(generation):
                cause = Cause(Kind.LAUNCHER, "the store keeper was killed", now_s)
                self.causes += (cause,)
                return self._fail(now_s, cause.headline)
            case HelpersReady():
                return self._helpers_ready(now_s)
            case HelpersLost():
                return self._helpers_lost(now_s, event)
            case StopRequested(signum=signum):
                return self._stop_requested(now_s, signum)
            case TimerFired():
                return self._timer_fired(now_s, event)
            case Contact():
                self.contact, self.greeted, self.welcomed, self.missed = True, False, False, 0
                self.contacts += 1
                return [*self._greet(now_s), *self._set_beat()]
            case ContactLost():
                if not self.contact:
                    return []  # the wait for one goes on
                self.contact = False
                self.contacts += 1
                return self._wait_for_contact()
        return self._from_coordinator(now_s, event)

    # -- the coordinator ----------------------------------------------------------------------------------------------

    def _from_coordinator(self, now_s: float, event: Event) -> list[Action]:
        self.missed = 0
        match event:
            case protocol.Welcome(term=term, arrival=arrival, said_s=said_s):
                if term < self.term:
                    return [HangUp("it has been replaced by a newer coordinator")]
                self.term, self.arrival = term, arrival
                self.welcomed = said_s == self.greeted_at_s  # else it is the answer to an earlier contact's greeting
                # Whether ranks that are there may go on is not known yet: a stop follows, or the answer to a beat.
                return [] if self.live else self._lease(said_s)
            case protocol.Heard(said_s=said_s):
                return self._lease(said_s)
            case protocol.Launch() if not self.welcomed:
                return []  # meant for an earlier contact, by a coordinator that had not yet heard what we said in this
            case protocol.Launch(world=world) if world.generation > self.generation:
                self.generation, self.restarts = world.generation, world.restart_count
                self.pending = world
                if self.live:
                    # Ranks of an older world: whatever they do now, nobody wants it.
                    return self._stop(now_s, signal.SIGTERM, f"generation {world.generation} has begun")
                return self._run_pending()
            case protocol.Stop(generation=generation, why=why):
                return self._told_to_stop(now_s, generation, why)
            case protocol.Over(kind=kind, reason=reason, steps=steps):
                self.steps = max(self.steps, steps)
                return self._finish_when_down(now_s, Finish(kind, reason), "the job has ended")
            case protocol.Refused(reason=reason):
                return self._finish_when_down(now_s, Finish(Kind.LAUNCHER, reason), reason)
            case protocol.Standby(why=text) | protocol.Waiting(why=text) | protocol.Note(text=text):
                return [Told(text)]
        return []

    def _wait_for_contact(self) -> list[Action]:
        if math.isinf(self.join_timeout_s):
            return []
        return [Timer("contact", self.contacts, self.close_timeout_s if self._succeeded else self.join_timeout_s)]

    def _set_beat(self) -> list[Action]:
        return [] if math.isinf(self.join_timeout_s) else [Timer("beat", self.contacts, self.beat_s)]

    def _beat(self, now_s: float) -> list[Action]:
        """Missed answers are counted, not timed, as the coordinator does with beats."""
        self.missed += self.greeted  # before that nothing was said that could be answered
        if self.missed > BEATS:
            return [HangUp("it has been silent")]
        return [*self._tell(protocol.Beat(now_s, self._running)), *self._set_beat()]

    def _lease(self, said_s: float) -> list[Action]:
        if math.isinf(self.join_timeout_s) or self.phase is Phase.STOPPING:
            return []
        return [Lease(said_s + self.join_timeout_s)]

    def _tell(self, message: protocol.ToCoordinator) -> list[Action]:
        """What is not heard now is told with the next greeting, which has all that still matters."""
        return [Tell(message)] if self.contact and self.greeted else []

    def _greet(self, now_s: float) -> list[Action]:
        if not self.contact or self.greeted or (not self.helpers and self.generation < 0):
            return []
        self.greeted, self.greeted_at_s = True, now_s
        hello = msgspec.structs.replace(
            self.hello,
            arrival=self.arrival,
            term=self.term,
            generation=self.generation,
            restarts=self.restarts,
            running=self._running,
            ready=self.helpers,
            now_s=now_s,
        )
        return [Tell(hello), *self._report(now_s)]

    def _report(self, now_s: float) -> list[Action]:
        """How the last world stands here."""
        leaving = self._tell(protocol.Leaving(self.stop_signal)) if self.stop_signal is not None else []
        if not self.live:
            told = self.generation >= 0 and not (self.world is None and self.pending)
            return leaving + self._tell(self._end_of_world(now_s)) if told else leaving
        assert self.world is not None
        generation = self.world.generation
        if self.failing:
            return leaving + self._tell(protocol.Failing(generation, self.failing))
        if self._all_stepped:
            return leaving + self._tell(protocol.Stepped(generation, self.stepped_at_s, now_s))
        return leaving

    def _end_of_world(self, now_s: float) -> protocol.Done | protocol.Down:
        if self.pending is None and (self.world is None or self.world.generation < self.generation):
            return protocol.Down(self.generation, now_s, ready=self.helpers)  # it never ran here, and never will
        assert self.world is not None
        if self._succeeded:
            return protocol.Done(self.world.generation, self._world_steps())
        causes = (*self.causes, *(exit.cause() for exit in self.exits if exit.is_failure))
        return protocol.Down(
            self.world.generation,
            now_s,
            protocol.trimmed(tuple(sorted(causes, key=lambda cause: cause.failed_at_s))),
            self._world_steps(),
            ready=self.helpers,
            fit=self.fit,
        )

    # -- worlds -------------------------------------------------------------------------------------------------------

    def _run_pending(self) -> list[Action]:
        if self.pending is None or self.live or not self.helpers:
            return []
        world = self.world = self.pending
        self.pending = None
        self.phase = Phase.RUNNING
        self.live = frozenset(range(world.first_rank, world.first_rank + world.local_size))
        self.stepped = self.sent = frozenset()
        self.exits, self.causes, self.failing, self.lost_steps = (), (), "", None
        return [Run(world)]

    def _told_to_stop(self, now_s: float, generation: int, why: str) -> list[Action]:
        if generation > self.generation or (self.pending is not None and self.pending.generation <= generation):
            # A world that never ran here, and never will.
            self.generation, self.pending = max(self.generation, generation), None
        if self.pending is not None or (self.world is not None and self.world.generation > generation):
            return []
        if not self.live:
            return self._tell(self._end_of_world(now_s))
        return self._stop(now_s, signal.SIGTERM, why) if self.phase is Phase.RUNNING else []

    def _stepped(self, now_s: float, event: Stepped) -> list[Action]:
        assert self.world is not None
        self.stepped |= {event.rank}
        self.stepped_at_s = max(self.stepped_at_s, event.at_s) if len(self.stepped) > 1 else event.at_s
        if not self._all_stepped or self.phase is not Phase.RUNNING:
            return []
        return self._tell(protocol.Stepped(self.world.generation, self.stepped_at_s, now_s))

    def _exited(self, now_s: float, exit: RankExit) -> list[Action]:
        if exit.rank not in self.live:
            return []
        exit = msgspec.structs.replace(exit, stopped=self._was_told(exit))
        self.live -= {exit.rank}
        self.exits += (exit,)
        if self.phase is Phase.RUNNING and exit.status != 0:
            return self._fail(now_s, f"rank {exit.rank} failed: {exit.headline}")
        if self.live:
            return []
        return self._down(now_s)

    def _was_told(self, exit: RankExit) -> bool:
        """Whether a rank ended because we told it to. One that had raised before, or that was killed by a signal we
        never sent, did not, even if its end is seen only now."""
        if self.phase is not Phase.STOPPING or exit.failed_at_s < self.stop_sent_at_s:
            return False
        return exit.status >= 0 or -exit.status in self.sent

    def _fail(self, now_s: float, why: str) -> list[Action]:
        """The world has failed here: say so at once, for the other nodes' sake, and stop what is left."""
        assert self.world is not None
        self.failing = why
        self.stop_sent_at_s = now_s
        self.phase = Phase.STOPPING
        telling = self._tell(protocol.Failing(self.world.generation, why))
        if not self.live:
            return telling + self._down(now_s)
        return telling + self._send_stop(signal.SIGTERM, why)

    def _down(self, now_s: float) -> list[Action]:
        """No rank is left."""
        assert self.world is not None
        self.steps += self._world_steps() or 0
        self.phase = Phase.IDLE if self.helpers else Phase.PREPARING
        cleared: list[Action] = [] if self._succeeded else [ClearLeftovers()]
        told = self._tell(self._end_of_world(now_s))
        if self.over is not None:
            return [*cleared, *told, *self._finish(self.over)]
        if self._succeeded and not self.contact:
            self.contacts += 1  # a shorter wait than before
            return [*cleared, *self._wait_for_contact()]
        return [*cleared, *told, *self._run_pending()]

    def _finish_when_down(self, now_s: float, finish: Finish, why: str) -> list[Action]:
        self.pending = None
        if not self.live:
            return self._finish(finish)
        self.over = self.over or finish
        return self._stop(now_s, signal.SIGTERM, why) if self.phase is Phase.RUNNING else []

    def _finish(self, finish: Finish) -> list[Action]:
        self.phase = Phase.DONE
        return [finish]

    # -- helpers ------------------------------------------------------------------------------------------------------

    def _helpers_ready(self, now_s: float) -> list[Action]:
        self.helpers = True
        if self.phase is Phase.PREPARING:
            self.phase = Phase.IDLE
        if not self.greeted:
            return self._greet(now_s) + self._run_pending()
        return self._tell(protocol.Ready(0)) + self._run_pending()

    def _helpers_lost(self, now_s: float, lost: HelpersLost) -> list[Action]:
        had_ranks = bool(self.live)
        self.helpers, self.live = False, frozenset()
        if had_ranks:
            self.lost_steps = lost.steps
            self.steps += self._world_steps() or 0
        if self.stop_signal is not None or self.over is not None:
            told = self._tell(self._end_of_world(now_s)) if had_ranks else []
            return [ClearLeftovers(), *told, *self._finish(self.over or self._preempted())]
        if self.generation < 0 and not self.greeted:
            # Before the first world: something is wrong with this node, and the next try would find the same.
            return [
                ClearLeftovers(),
                *self._finish(Finish(Kind.LAUNCHER, f"{lost.what} while workers were about to start")),
            ]
        self.phase = Phase.PREPARING
        preparing: list[Action] = [ClearLeftovers(), PrepareHelpers()]
        if not had_ranks:
            # A spare, or between two worlds: nothing was lost with it, but there is nothing to fork from now.
            return preparing + self._tell(self._hello_again(now_s))
        assert self.world is not None
        self.failing = lost.what
        self.causes += (Cause(Kind.LAUNCHER, lost.what, now_s),)
        failing = self._tell(protocol.Failing(self.world.generation, lost.what))
        return failing + preparing + self._tell(self._end_of_world(now_s))

    def _hello_again(self, now_s: float) -> protocol.ToCoordinator:
        return protocol.Down(self.world.generation if self.world is not None else -1, now_s, ready=False)

    # -- the end ------------------------------------------------------------------------------------------------------

    def _stop_requested(self, now_s: float, signum: int) -> list[Action]:
        if self.stop_signal is not None:
            # A second Ctrl-C means now. Schedulers repeat SIGTERM while ranks save their state; that must not cut it
            # short.
            again = signal.SIGKILL if signum == signal.SIGINT else signum
            return self._send(again, f"holdfast got {signal_name(signum)} while stopping")
        self.stop_signal = signum
        self.pending = None
        leaving = self._tell(protocol.Leaving(signum))
        if not self.live:
            return leaving + self._finish(self._preempted())
        self.over = self._preempted()
        why = f"holdfast got {signal_name(signum)}"
        if self.phase is Phase.STOPPING:
            return leaving + self._send(signum, why)
        return leaving + self._stop(now_s, signum, why)

    def _preempted(self) -> Finish:
        return Finish(Kind.PREEMPTED, f"stopped by {signal_name(self.stop_signal or 0)}")

    def _timer_fired(self, now_s: float, timer: TimerFired) -> list[Action]:
        if timer.name == "contact" and timer.key == self.contacts and not self.contact:
            if self._succeeded:
                return self._finish(Finish(None))
            reason = f"no coordinator could be reached for {self.join_timeout_s:g} s"
            return self._finish_when_down(now_s, Finish(Kind.LOST_NODE, reason), reason)
        if timer.name == "beat":
            return self._beat(now_s) if timer.key == self.contacts and self.contact else []
        if self.phase is not Phase.STOPPING or self.world is None or timer.key != self.world.generation:
            return []
        if timer.name == "grace":
            sent = self._send(signal.SIGKILL, f"still there {self.grace_s:g} s after being told to stop")
            self.waits = 0
            return [*sent, Timer("abandon", self.world.generation, ABANDON_S / ABANDON_WAITS)]
        if timer.name == "abandon":
            self.waits += 1
            if self.waits < ABANDON_WAITS:
                return [Timer("abandon", self.world.generation, ABANDON_S / ABANDON_WAITS)]
            return self._abandon(now_s)
        return []

    def _abandon(self, now_s: float) -> list[Action]:
        ranks = ", ".join(map(str, sorted(self.live)))
        reason = (
            f"rank {ranks} does not end even by SIGKILL: it is stuck inside the kernel, and holds what a restart needs"
        )
        self.causes += (Cause(Kind.HANG, reason, self.stop_sent_at_s),)
        self.live, self.fit = frozenset(), False
        self.over = Finish(Kind.HANG, reason)
        return self._down(now_s)

    # -- signals ------------------------------------------------------------------------------------------------------

    def _stop(self, now_s: float, signum: int, why: str) -> list[Action]:
        self.phase = Phase.STOPPING
        self.stop_sent_at_s = now_s
        return self._send_stop(signum, why)

    def _send_stop(self, signum: int, why: str) -> list[Action]:
        assert self.world is not None
        return [*self._send(signum, why), Timer("grace", self.world.generation, self.grace_s)]

    def _send(self, signum: int, why: str) -> list[Action]:
        self.sent |= {signum}
        return [Signal(tuple(sorted(self.live)), signum, why)]

    # -- what is known ------------------------------------------------------------------------------------------------

    @property
    def _running(self) -> int:
        """The generation that has ranks here, or will have as soon as there are helpers."""
        if self.world is not None and self.live:
            return self.world.generation
        return self.pending.generation if self.pending is not None else -1

    def _is_running(self, generation: int) -> bool:
        return self.phase is Phase.RUNNING and self.world is not None and self.world.generation == generation

    @property
    def _all_stepped(self) -> bool:
        return self.world is not None and len(self.stepped) == self.world.local_size

    @property
    def _succeeded(self) -> bool:
        """The last world's ranks have all ended here, and each with 0."""
        if self.world is None or self.live or self.causes or self.failing or self.sent:
            return False
        return len(self.exits) == self.world.local_size and all(exit.status == 0 for exit in self.exits)

    def _world_steps(self) -> int | None:
        """The most that any rank of the last world has done; None where that cannot be seen."""
        seen = [exit.steps for exit in self.exits if exit.steps is not None]
        if self.lost_steps is not None:
            seen.append(self.lost_steps)
        return max(seen, default=None)
