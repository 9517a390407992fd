"""One node of a job, as a state machine: what happens here and what the coordinator says goes in, what to do comes out.

It decides alone only what must not wait: a failed rank's neighbours are stopped at once, an older world before a newer
one starts, and everything when no coordinator was reached for too long. The rest is the coordinator's.
"""

from __future__ import annotations

import signal

import msgspec

from holdfast.control import protocol
from holdfast.control.acts import (
    Action,
    Agree,
    Asked,
    Bequeathed,
    ClearLeftovers,
    Closed,
    Contact,
    ContactLost,
    Dumped,
    DumpStacks,
    Event,
    Exited,
    Finish,
    Gone,
    HangUp,
    HelpersLost,
    HelpersReady,
    Hung,
    KeeperLost,
    Learned,
    Left,
    Opened,
    Paced,
    PeekAsked,
    PrepareHelpers,
    Run,
    Shown,
    Signal,
    StandsBy,
    Started,
    Stays,
    Stepped,
    StopRequested,
    Straggles,
    Stumbled,
    Timer,
    TimerFired,
    Told,
)
from holdfast.control.causes import Cause, Kind, RankExit, signal_name
from holdfast.control.hangs import Mode
from holdfast.control.stacks import describe, trimmed
from holdfast.control.standing import Phase
from holdfast.control.staying import ABANDON_S, ABANDON_WAITS, TRIES, Staying

# How long the stacks of a hung world may take to write. They take milliseconds; py-spy, where it is installed, seconds.
DUMP_S = 5.0
# C frames cost a second. A hang that was found sooner than this does not wait for them.
NATIVE_S = 10.0


class Node(Staying):
    """Changed by `handle` alone."""

    def begin(self) -> list[Action]:
        return [PrepareHelpers(), *self._wait_for_contact()]

    def handle(self, now_s: float, event: Event) -> list[Action]:
        match event:
            # What was decided is recorded even at the very end.
            case protocol.Opened(incident=incident, now_s=theirs_s):
                if (incident.generation, incident.number) == self.opened:
                    return []  # told again, by a coordinator that cannot know
                self.opened = (incident.generation, incident.number)
                opened = protocol.shifted(incident, now_s - theirs_s)
                self.failed_at_s = opened.failed_at_s
                return [Opened(opened)]
            case protocol.Closed(incident=incident, now_s=theirs_s):
                if (incident.generation, incident.number) == self.closed:
                    return []
                self.closed = (incident.generation, incident.number)
                return [Closed(protocol.shifted(incident, now_s - theirs_s))]
            case _ if self.phase is Phase.DONE:
                return []
            case Exited(generation=generation) if self.world is not None and generation == self.world.generation:
                return [*self._outlasts(event), *self._exited(now_s, event.exit)]
            case Gone(generation=generation, rank=rank):
                self.undead.pop((generation, rank), None)
                return []
            case Stepped(generation=generation) if self.world is not None and generation == self.world.generation:
                return self._stepped(now_s, event)
            case Started(generation=generation) if self.world is not None and generation == self.world.generation:
                return self._is_up(now_s, event) + self._tell(protocol.Started(generation))
            case Stays(generation=generation) if self._is_running(generation):
                self._stays(event)
                return []
            case StandsBy(ready=ready):
                self.standby = ready
                return []
            case Stumbled(generation=generation) if self.world is not None and generation == self.world.generation:
                return self._stumbled(event)
            case Left(generation=generation) if self.world is not None and generation == self.world.generation:
                return self._down(now_s) if self._left(event) else []
            case Bequeathed(generation=generation) if self.world is not None and generation == self.world.generation:
                return self._bequeathed(event)
            case KeeperLost(generation=generation) if self._is_running(generation):
                cause = Cause(Kind.LAUNCHER, "the store keeper was killed", now_s)
                self.causes += (cause,)
                return self._fail(now_s, cause.headline)
            case Hung(generation=generation) if self._is_running(generation):
                return self._hung(now_s, event)
            case Dumped():
                return self._dumped(event)
            case Learned(state=state):
                return self._learned(state)
            case Asked(generation=generation) if self.world is not None and generation == self.world.generation:
                return self._asked(event)
            case Paced(generation=generation, window=window) if self._is_running(generation):
                return self._tell(protocol.Paced(generation, window))
            case PeekAsked(visit=visit):
                return self._peek(visit)
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
                return [*self._lease(said_s), *self._agree(event)]
            case protocol.Launch() if not self.welcomed:
                return []  # meant for an earlier contact, by a coordinator that had not yet heard what we said in this
            case protocol.Launch(world=world) if world.generation > self.generation:
                # There was a world without this node: what its ranks have may be behind what that one has committed.
                self.outdated = self.outdated or world.generation > self.generation + 1
                self.generation, self.restarts, self.job_id = world.generation, world.restart_count, world.job_id
                self.pending, self.learned = world, event.learned or self.learned
                if self.live:
                    # Ranks of an older world: whatever they do now, nobody wants it.
                    return self._stop(now_s, signal.SIGTERM, f"generation {world.generation} has begun")
                return self._run_pending()
            case protocol.Stop():
                return self._told_to_stop(now_s, event)
            case protocol.Show():
                generation = self.world.generation if self.world is not None else -1
                return [DumpStacks(generation, event, native=True)]
            case protocol.Shown():
                return [Shown(event)]
            case protocol.Straggles(generation=generation, found=found):
                return [Straggles(generation, found)]
            case protocol.Over(kind=kind, reason=reason, steps=steps, elsewhere=elsewhere):
                self.steps = max(self.steps, steps)
                if self.over is not None and self.over.kind is Kind.LOST_NODE:
                    self.over = None  # it had given the job up, and now hears how that ended
                return self._finish_when_down(now_s, Finish(kind, reason, elsewhere=elsewhere), "the job has ended")
            case protocol.Refused(reason=reason):
                return self._finish_when_down(now_s, Finish(Kind.LAUNCHER, reason, elsewhere=False), reason)
            case protocol.Standby(why=text) | protocol.Waiting(why=text) | protocol.Note(text=text):
                return [Told(text)]
        return []

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
        self.hung, self.dumping, self.groups, self.request = False, False, (), None
        self.draining = False
        outdated = self.outdated
        self._begin_world()
        return [Run(world, self.learned, outdated)]

    def _told_to_stop(self, now_s: float, stop: protocol.Stop) -> list[Action]:
        generation = stop.generation
        if generation > self.generation or (self.pending is not None and self.pending.generation <= generation):
            # A world that never ran here, and never will.
            self.generation, self.pending = max(self.generation, generation), None
        if self.pending is not None or (self.world is not None and self.world.generation > generation):
            return []
        if not self.live:
            return self._tell(self._end_of_world(now_s))
        if self.phase is not Phase.RUNNING:
            return self._give_up_drain(stop.why) if not stop.drain else []
        if stop.hang:
            return self._stop_hung(now_s, stop.why, stop.native)
        return self._stop(now_s, signal.SIGTERM, stop.why, drain=stop.drain)

    def _stepped(self, now_s: float, event: Stepped) -> list[Action]:
        assert self.world is not None
        self.stepped |= {event.rank}
        self.stepped_at_s = max(self.stepped_at_s, event.at_s) if len(self.stepped) > 1 else event.at_s
        if not self._all_stepped or self.phase is not Phase.RUNNING:
            return []
        self._has_stepped()
        return self._tell(protocol.Stepped(self.world.generation, self.stepped_at_s, now_s, self._all_stay))

    def _exited(self, now_s: float, exit: RankExit) -> list[Action]:
        if exit.rank not in self.live:
            return []
        exit = msgspec.structs.replace(exit, stopped=self._was_told(exit))
        self.live -= {exit.rank}
        self.exits += (exit,)
        if self.phase is Phase.RUNNING and exit.status != 0:
            return self._fail(now_s, f"rank {exit.rank} failed: {exit.headline}")
        if not self.live:
            return self._down(now_s)
        if exit.drained and exit.status != 0 and self.draining:
            return self._misses_boundary(exit.rank, exit.headline)
        return []

    def _was_told(self, exit: RankExit) -> bool:
        """Whether a rank ended because we told it to. One that had raised or left before, or that was killed by a
        signal we never sent, did not, even if its end is seen only now."""
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
            return [*cleared, *told, *self._finish(self._in_order(self.over))]
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

    def _in_order(self, finish: Finish) -> Finish:
        """Whoever told this node to end need not take it for a failure if all ranks did as they were asked."""
        ended = all(exit.status == 0 and exit.drained for exit in self.exits)
        if finish.kind is not Kind.PREEMPTED or not self.exits or not ended or self.causes or self.failing:
            return finish
        reason = f"{finish.reason}; all ranks saved and ended by themselves"
        return Finish(finish.kind, reason, drained=True)

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
        self.helpers, self.live, self.staying, self.standby = False, frozenset(), False, 0
        self.undead.clear()
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

    # -- hangs and requests -------------------------------------------------------------------------------------------

    def _hung(self, now_s: float, event: Hung) -> list[Action]:
        assert self.world is not None
        rank = event.hang.rank
        if rank not in self.live:
            return []
        if event.hang.phase >= 0 and not self.contact:
            return []  # it may be waiting for another node, which nobody could tell us, and nobody could cure it now
        if self.hang_mode is not Mode.RESTART:
            text = f"rank {rank} may hang: {event.headline}; --hang-detection={self.hang_mode} lets it be"
            return [Told(text), DumpStacks(event.generation, native=True)]
        cause = Cause(
            Kind.HANG,
            event.headline,
            event.hang.since_s,
            rank=rank,
            detected_at_s=now_s,
            own_limit=event.hang.phase < 0,
        )
        self.causes += (cause,)
        self.failing = f"rank {rank} hangs: {event.headline}"
        native = now_s - event.hang.since_s >= NATIVE_S
        telling = self._tell(protocol.Failing(event.generation, self.failing, hang=True, native=native))
        return telling + self._stop_hung(now_s, self.failing, native)

    def _stop_hung(self, now_s: float, why: str, native: bool) -> list[Action]:
        """What the ranks are doing is written down before they are ended: nobody can ask them afterwards."""
        assert self.world is not None
        self.phase = Phase.STOPPING
        self.stop_sent_at_s = now_s
        self.hung = self.dumping = True
        self.failing = self.failing or why
        generation = self.world.generation
        return [DumpStacks(generation, native=native), Timer("dump", generation, DUMP_S)]

    def _dumped(self, event: Dumped) -> list[Action]:
        if (show := event.show) is not None:
            shown = protocol.Shown(show.origin, show.visit, show.nodes, self.hello.host, trimmed(event.groups))
            return [Shown(shown)] if show.origin == self.hello.node else self._tell(shown)
        if self.world is None or event.generation != self.world.generation:
            return []
        if not self.dumping:
            return [Told(describe(event.groups))] if event.groups else []
        self.groups = event.groups
        return self._end_hung()

    def _peek(self, visit: int) -> list[Action]:
        """All nodes are asked by the coordinator. Without one, this node can at least tell of itself."""
        if self.contact and self.greeted:
            return self._tell(protocol.Peek(visit))
        generation = self.world.generation if self.world is not None else -1
        return [DumpStacks(generation, protocol.Show(self.hello.node, visit, 1), native=True)]

    def _end_hung(self) -> list[Action]:
        self.dumping = False
        return self._send_stop(self.hang_signal, self.failing) if self.live else []

    def _agree(self, heard: protocol.Heard) -> list[Action]:
        return [Agree(heard)] if heard != protocol.Heard(heard.said_s) else []

    def _learned(self, state: str) -> list[Action]:
        """All ranks know it, so one node tells it. Thousands of sections are too much to tell; they stay here."""
        if state == self.learned:
            return []
        self.learned = state
        tells = self.world is not None and self.world.first_rank == 0 and len(state) <= protocol.MAX_LEARNED
        return self._tell(protocol.Learned(state)) if tells else []

    def _asked(self, asked: Asked) -> list[Action]:
        if asked.action == "continue" or (self.request is not None and asked.action != "shutdown"):
            return []
        if self.request is not None and self.request.action == "shutdown":
            return []  # which goes beyond all else
        self.request = protocol.Request(asked.generation, asked.rank, asked.action, asked.description)
        return self._tell(self.request)

    # -- the end ------------------------------------------------------------------------------------------------------

    def _stop_requested(self, now_s: float, signum: int) -> list[Action]:
        if self.stop_signal is not None:
            # A second Ctrl-C means now. Schedulers repeat SIGTERM while ranks save their state; that must not cut it
            # short.
            again = signal.SIGKILL if signum == signal.SIGINT else signum
            return self._send(again, f"holdfast got {signal_name(signum)} while stopping", self.draining)
        self.stop_signal = signum
        self.pending = None
        leaving = self._tell(protocol.Leaving(signum))
        if not self.live:
            # Where another node was told first, the ranks here may have saved and ended with that one's.
            return leaving + self._finish(self._in_order(self._preempted()))
        self.over = self._preempted()
        why = f"holdfast got {signal_name(signum)}"
        if self.phase is Phase.STOPPING:
            return leaving + self._send(signum, why, self.draining)
        return leaving + self._stop(now_s, signum, why, drain=True)

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
        if timer.name == "gone":
            return self._still_there(now_s, timer.key)
        if timer.name in ("stumble", "rejoin"):
            return self._stumbled_long_ago(now_s, timer) if self._is_running(timer.key) else []
        if self.phase is not Phase.STOPPING or self.world is None or timer.key != self.world.generation:
            return []
        if timer.name == "dump":
            return self._end_hung() if self.dumping else []
        if timer.name == "leave":
            return self._kill_late()
        if timer.name == "grace":
            return self._grace_is_over()
        if timer.name == "abandon":
            self.waits += 1
            if self.waits < ABANDON_WAITS:
                return [Timer("abandon", self.world.generation, ABANDON_S / ABANDON_WAITS)]
            return self._abandon(now_s)
        return []

    def _stumbled_long_ago(self, now_s: float, timer: TimerFired) -> list[Action]:
        if timer.name == "stumble":
            self.causes += self.stumbles
            first = self.stumbles[0]
            return self._fail(now_s, f"rank {first.rank} failed: {first.headline}")
        if self._all_stepped:
            return []
        self.idle = why = f"ranks that stayed did no step within {self._rejoin_s:g} s"
        self.tries = TRIES
        self.causes += (Cause(Kind.LAUNCHER, why, now_s),)
        return self._fail(now_s, why)

    def _abandon(self, now_s: float) -> list[Action]:
        self.over = Finish(Kind.HANG, self._stuck(self.live, self.stop_sent_at_s))
        self.live = frozenset()
        return self._down(now_s)

    def _stuck(self, ranks: frozenset[int], since_s: float) -> str:
        reason = (
            f"rank {', '.join(map(str, sorted(ranks)))} does not end even by SIGKILL: it is stuck inside the kernel, "
            "and holds what a restart needs"
        )
        self.causes += (Cause(Kind.HANG, reason, since_s, stuck=True),)
        self.fit = False
        return reason

    def _outlasts(self, event: Exited) -> list[Action]:
        """The next world need not wait until the kernel is done with this one's dead. Whoever takes a dead one's place
        does."""
        if event.gone:
            return []
        known = any(generation == event.generation for generation, _ in self.undead)
        self.undead[event.generation, event.exit.rank] = 0
        return [] if known else [Timer("gone", event.generation, ABANDON_S / ABANDON_WAITS)]

    def _still_there(self, now_s: float, generation: int) -> list[Action]:
        waits = {key: waits + 1 for key, waits in self.undead.items() if key[0] == generation}
        self.undead |= waits
        stuck = frozenset(rank for (_, rank), number in waits.items() if number >= ABANDON_WAITS)
        if not stuck:
            return [Timer("gone", generation, ABANDON_S / ABANDON_WAITS)] if waits else []
        self.undead.clear()
        reason = self._stuck(stuck, now_s - ABANDON_S)
        return self._finish_when_down(now_s, Finish(Kind.HANG, reason), reason)

    # -- signals ------------------------------------------------------------------------------------------------------

    def _stop(self, now_s: float, signum: int, why: str, drain: bool = False) -> list[Action]:
        self.phase = Phase.STOPPING
        self.stop_sent_at_s = now_s
        self.draining = drain and not self.stumbles  # else it has no more boundaries
        return self._send_stop(signum, why, self.draining)

    def _send_stop(self, signum: int, why: str, drain: bool = False) -> list[Action]:
        if signum == signal.SIGKILL:
            return self._kill(self.live, why)
        return self._stops(signum, why, drain)

    def _send(self, signum: int, why: str, drain: bool = False) -> list[Action]:
        self.sent |= {signum}
        return [Signal(tuple(sorted(self.live)), signum, why, drain and signum != signal.SIGKILL)]
