"""The coordinator of a job, as a state machine: what nodes say goes in, what they are told comes out.

One place decides membership, so that there is one order of worlds and one restart count. It stops a world before it
starts the next, writes down what it decided before anybody hears of it, and never waits for a node for ever.
"""

from __future__ import annotations

import itertools
import math
from typing import TypeVar

import msgspec

from holdfast.control import protocol, texts
from holdfast.control.breaking import Breaking
from holdfast.control.causes import Cause, Kind, signal_name
from holdfast.control.forming import Phase
from holdfast.control.hangs import longest
from holdfast.control.membership import (
    BEATS,
    Member,
    choose,
)
from holdfast.control.orders import Action, Drop, Event, From, Gone, Send, StepDown, Timer, TimerFired, Write

S = TypeVar("S", bound=msgspec.Struct)

ENDED_BEFORE = "the job ended while this node was cut off from it"


# Who was elected before has let its lease run out, or refused a connection. If it lives, it knows that it was replaced.
PREDECESSOR_S = 1.0


class Coordinator(Breaking):
    """Changed by `handle` alone."""

    def begin(self, now_s: float) -> list[Action]:
        """Take up the job, where the record left it."""
        record = self.record
        actions: list[Action] = [] if self.settings.alone else [Timer("tick", 0, self.settings.beat_s)]
        if record is None:
            return [*actions, Write(self._record(now_s)), *self._gather(now_s)]
        if record.over is not None:
            # Another job, under the same name. Whoever missed the end of the last one is told when it comes.
            return [*actions, Write(self._record(now_s)), *self._gather(now_s)]
        self.quarantine.restore(record.quarantine, now_s)
        actions += [Timer("quarantine", 0, left_s) for _, _, left_s in record.quarantine]
        self.first_call_over = bool(record.seats)
        self.account.take_up(record, now_s)
        if record.settled or not record.seats:
            self._seat(record.seats, now_s)
            self.up = set()
            self.unconfirmed, self.heard_s = set() if record.confirmed else set(self.seats), now_s
            return [*actions, Write(self._record(now_s)), *self._gather(now_s)]
        # A world that may well be running: its nodes get the time to say so.
        self._seat(record.seats, now_s)
        self.absent = set(self.seats)
        self.refill_mark = record.refill_mark
        self.steps_seen = self.inherited = True
        self.heard_s = now_s
        self._enter(Phase.RUNNING)
        actions += [Write(self._record(now_s)), Timer("return", self.epoch, self.settings.return_s)]
        if record.ending is not None:
            self.ending = record.ending
            self.causes.append(Cause(Kind.REQUESTED, record.ending.reason, now_s))
            actions += self._break(now_s, record.ending.reason)
        if record.node in self.seats and self.settings.elected:
            actions.append(Timer("predecessor", 0, PREDECESSOR_S))
        elif record.node in self.seats:
            # We have the address that our predecessor served, so its process is gone, and its ranks with it.
            self.unconfirmed.discard(record.node)
            host = self.seats[record.node].host
            actions += self._lose(now_s, record.node, host, f"node {host} was restarted")
        return self._write_ahead(now_s, actions)

    def handle(self, now_s: float, event: Event) -> list[Action]:
        if self.phase is Phase.OVER:
            return self._after_the_end(now_s, event)
        match event:
            case From(node=node, message=message):
                return self._write_ahead(now_s, self._from(now_s, node, message))
            case Gone(node=node):
                return self._write_ahead(now_s, self._gone(now_s, node, "its connection closed"))
            case TimerFired():
                return self._write_ahead(now_s, self._timer_fired(now_s, event))
        return []

    def _write_ahead(self, now_s: float, actions: list[Action]) -> list[Action]:
        """What one event led to is written once, as it stands in the end, before anybody hears of any of it. Only what
        is written last of all is so on purpose: that something has been told."""
        writes = [index for index, action in enumerate(actions) if isinstance(action, Write)]
        if not writes or writes == [len(actions) - 1]:
            return actions
        return [Write(self._record(now_s)), *(action for action in actions if not isinstance(action, Write))]

    def _from(self, now_s: float, node: str, message: protocol.ToCoordinator) -> list[Action]:
        if isinstance(message, protocol.Hello):
            return self._hello(now_s, node, message)
        if isinstance(message, protocol.Look):
            return self._look(now_s, node, message)
        member = self.members.get(node)
        if member is None:
            return []
        member.missed, member.heard_s = 0, now_s
        match message:
            case protocol.Beat():
                return [Send(node, self._heard(now_s, member, message)), *self._progress(now_s, message)]
            case protocol.Started(generation=generation) if generation == self.generation:
                self.unstarted.discard(node)
                if not self.unstarted:
                    self.account.started(now_s)
            case protocol.Stepped(generation=generation) if generation == self.generation:
                if message.stays:
                    self._can_stay(node)
                return self._stepped(now_s, node, message.at_s + now_s - message.now_s)
            case protocol.Failing(generation=generation, why=why) if self._in_world(node, generation):
                return self._give_up_drain(why) + self._node_failed(now_s, node, why, message)
            case protocol.Down():
                return self._down(now_s, node, member, message)
            case protocol.Done(generation=generation) if self._in_world(node, generation):
                return self._done(now_s, node, message)
            case protocol.Ready(store_port=store_port):
                member.ready, member.store_port = True, store_port
                return self._consider(now_s)
            case protocol.Leaving(signum=signum):
                return self._leaving(now_s, node, member, signum)
            case protocol.Learned(state=state):
                self.learned = state
                return [Write(self._record(now_s))]
            case protocol.Paced(window=window) if self._in_world(node, message.generation):
                return self._paced(now_s, node, member, window)
            case protocol.Request() if self._in_world(node, message.generation):
                return self._requested(now_s, member, message)
            case protocol.Peek(visit=visit):
                asked = [other for other in self.seats if other in self.members] or [node]
                return [Send(other, protocol.Show(node, visit, len(asked))) for other in asked]
            case protocol.Shown(origin=origin) if origin in self.members:
                return [Send(origin, message)]
        return []

    # -- nodes come ---------------------------------------------------------------------------------------------------

    def _hello(self, now_s: float, node: str, hello: protocol.Hello) -> list[Action]:
        if hello.version != protocol.VERSION:
            ours = f"this job speaks version {protocol.VERSION} of the protocol, {hello.host} version {hello.version}"
            return [Send(node, protocol.Refused(f"{ours}; install the same holdfast everywhere"))]
        if 0 <= hello.term < self.since:
            return [Send(node, self.former or protocol.Over(Kind.LOST_NODE, ENDED_BEFORE))]
        if hello.term > self.term and self.settings.elected:
            return [StepDown()]
        if reason := self._seat_taken(node, hello):
            return [Send(node, protocol.Refused(reason))]
        actions: list[Action] = []
        if hello.term > self.term or hello.generation > self.generation or hello.restarts > self.account.history.spent:
            # The ledger was lost. What nodes remember is the next best thing.
            self.term = max(self.term, hello.term + 1)
            self.generation = max(self.generation, hello.generation)
            self.account.remember(hello.restarts)
            self.first_call_over = self.first_call_over or hello.generation >= 0
            self.job_id = hello.job_id or self.job_id
            actions.append(Write(self._record(now_s)))
        self.learned = self.learned or hello.learned
        self.remembered = self.remembered or hello.term >= 0
        known = self.members.get(node)
        arrival = hello.arrival if hello.arrival >= 0 else known.arrival if known else self.arrivals
        self.arrivals = max(self.arrivals, arrival + 1)
        member = self.members[node] = Member(hello, arrival, now_s)
        actions += [Send(node, protocol.Welcome(self.term, arrival, hello.now_s)), *self._tell_unheard(now_s, node)]
        self.account.date(hello.opened, hello.failed_at_s + now_s - hello.now_s)
        if self.account.incident is not None:
            actions.append(Send(node, protocol.Opened(self.account.incident, now_s)))  # it may have missed it
        actions += self._note_settings(node, hello)
        actions += self._take_up(now_s, node, member)
        if hello.asks is not None and self._in_world(node, hello.asks.generation):
            actions += self._requested(now_s, member, hello.asks)
        return actions + self._consider(now_s, node)

    def _seat_taken(self, node: str, hello: protocol.Hello) -> str:
        if not self.settings.static:
            return ""
        if hello.order is None or hello.order >= self.settings.max_nodes:
            return f"--node-rank {hello.order} is not below --nnodes {self.settings.max_nodes}"
        for other in self.members.values():
            if other.hello.order == hello.order and other.hello.node != node and other.leaving is None:
                return f"--node-rank {hello.order} is taken by {other.hello.host}; give each node its own"
        return ""

    def _note_settings(self, node: str, hello: protocol.Hello) -> list[Action]:
        ours = next(iter(self.members.values())).hello
        if hello.settings == ours.settings:
            return []
        text = (
            f"{hello.host} was started with {hello.settings}, but {ours.host} with {ours.settings}; the job runs with"
        )
        return self._broadcast(protocol.Note(f"{text} the coordinator's"))

    def _take_up(self, now_s: float, node: str, member: Member) -> list[Action]:
        """What a node that comes, or comes back, has of this world or of an older one."""
        hello = member.hello
        if hello.running >= 0 and (hello.running != self.generation or node not in self.seats):
            member.busy = True
            return [Send(node, protocol.Stop(hello.running, f"generation {hello.running} is over"))]
        if node not in self.seats:
            return []
        self.absent.discard(node)
        if hello.generation < self.generation and self.phase is Phase.RUNNING and node in self.up:
            return [Send(node, self._launch_of(node))]  # it was lost on the way
        if hello.running < 0:
            if hello.generation < self.generation:
                # It never had the world, and may not get it any more: as good as having stopped it.
                self.unconfirmed.discard(node)
                self.up.discard(node)
                return self._settle_if_down(now_s)
            self.unconfirmed.discard(node)  # how its ranks ended follows
            return []
        if self.phase is Phase.RUNNING and node in self.up:
            return []
        member.busy = True
        return [Send(node, protocol.Stop(self.generation, "the world has broken"))]

    # -- nodes go -----------------------------------------------------------------------------------------------------

    def _tick(self, now_s: float) -> list[Action]:
        """Beats are counted, not timed: after a pause of our own, every node gets the chance to be heard again."""
        actions: list[Action] = [Timer("tick", 0, self.settings.beat_s)]
        silent = []
        for node, member in self.members.items():
            member.missed += 1
            if member.missed > BEATS:
                silent.append(node)
        for node in silent:
            actions += [Drop(node), *self._gone(now_s, node, f"silent for {self.settings.node_timeout_s:g} s")]
        return actions

    def _gone(self, now_s: float, node: str, how: str) -> list[Action]:
        member = self.members.pop(node, None)
        if member is None:
            return []
        host = member.hello.host
        if node in self.up:
            self.heard_s = max(self.heard_s, member.heard_s)
            cause = "" if member.leaving is not None else f"node {host} is gone ({how})"
            return self._lose(now_s, node, host, cause)
        if node in self.seats and member.leaving is None and self.phase in (Phase.GATHERING, Phase.WAITING):
            self.missing.append(host)
        return self._consider(now_s)

    def _lose(self, now_s: float, node: str, host: str, headline: str) -> list[Action]:
        """A node of the world will not be heard of any more."""
        self.up.discard(node)
        self.absent.discard(node)
        self.missing.append(host)
        if headline:
            self.causes.append(Cause(Kind.LOST_NODE, headline, now_s, node=host))
        why = headline or f"node {host} has left"
        return self._give_up_drain(why) + self._node_failed(now_s, node, why)

    def _leaving(self, now_s: float, node: str, member: Member, signum: int) -> list[Action]:
        if member.leaving is not None:
            return []
        member.leaving = signum
        if node not in self.up:
            if self.settings.alone:
                return self._finish(now_s, Kind.PREEMPTED, f"stopped by {signal_name(signum)}")
            return self._consider(now_s)
        headline = f"node {member.hello.host} leaves: it got {signal_name(signum)}"
        self.causes.append(Cause(Kind.PREEMPTED, headline, now_s, node=member.hello.host))
        return self._node_failed(now_s, node, f"node {member.hello.host} leaves", drain=True)

    # -- the world runs -----------------------------------------------------------------------------------------------

    def _progress(self, now_s: float, beat: protocol.Beat) -> list[Action]:
        if beat.generation != self.generation or beat.steps <= self.world_steps or self.phase is not Phase.RUNNING:
            return []
        self.world_steps = beat.steps
        self.steps_known = self.steps_seen = True
        return [Write(self._record(now_s))] if self.account.refill(self.world_steps) else []

    def _heard(self, now_s: float, member: Member, beat: protocol.Beat) -> protocol.Heard:
        """The answer to a beat: what all nodes have learned, and whom of the others its ranks may be waiting for."""
        self.gaps_s = longest(self.gaps_s, beat.gaps_s)
        self.trained = self.trained or beat.trained
        member.busy_until_s = now_s + beat.busy_for_s
        member.calm_since_s = now_s - beat.calm_for_s if beat.calm_for_s >= 0 else -math.inf
        others = [other for other in self.members.values() if other is not member]
        busy_until_s = max((other.busy_until_s for other in others), default=now_s)
        calm_for_s = now_s - max((other.calm_since_s for other in others), default=-math.inf)
        return protocol.Heard(
            beat.now_s,
            self.gaps_s,
            self.trained,
            busy_for_s=max(0.0, busy_until_s - now_s),
            calm_for_s=calm_for_s if math.isfinite(calm_for_s) else -1.0,
            stepped=self.has_stepped or self.world_steps > 0,
        )

    def _stepped(self, now_s: float, node: str, at_s: float) -> list[Action]:
        self.steps_known = self.steps_seen = True
        self.has_stepped = True
        self.unstepped.discard(node)
        if self.unstepped or self.account.incident is None or self.phase is not Phase.RUNNING:
            return []
        self.account.recovered(at_s)
        closed = self._close_incident(now_s)
        return [*closed, Write(self._record(now_s))]  # a next coordinator must not close it again

    # -- time ---------------------------------------------------------------------------------------------------------

    def _timer_fired(self, now_s: float, timer: TimerFired) -> list[Action]:
        if timer.name == "tick":
            return self._tick(now_s)
        if timer.name == "quarantine":
            self.quarantine.expire(now_s)
            return self._consider(now_s)
        if timer.name == "predecessor":
            return self._predecessor_timed_out(now_s)
        if timer.key != self.epoch:
            return []
        match timer.name:
            case "backoff":
                return self._gather(now_s)
            case "last call":
                self.first_call_over = True
                return self._consider(now_s)
            case "fence":
                return self._consider(now_s)
            case "join":
                return self._join_timed_out(now_s)
            case "return":
                return self._return_timed_out(now_s)
        return []

    def _predecessor_timed_out(self, now_s: float) -> list[Action]:
        assert self.record is not None
        node = self.record.node
        if node not in self.absent:
            return []
        host = self.seats[node].host
        return self._lose(now_s, node, host, f"node {host}, which had the coordinator, is gone")

    def _return_timed_out(self, now_s: float) -> list[Action]:
        """Nodes that a new coordinator has not met by now are lost. If nobody at all remembers the job, all of its
        nodes were started anew, and it begins anew, but for its generations."""
        actions: list[Action] = []
        absent = [node for node in self.seats if node in self.absent]
        if not self.remembered and len(absent) == len(self.up):
            self.account.begin_anew()
            self.job_id, self.first_generation = self._new_job_id, self.generation + 1
            self.up, self.absent, self.causes, self.ending = set(), set(), [], None
            return self._gather(now_s)
        for node in absent:
            host = self.seats[node].host
            actions += self._lose(now_s, node, host, f"node {host} did not come back to a new coordinator")
        return actions

    def _join_timed_out(self, now_s: float) -> list[Action]:
        settings = self.settings
        _, available = self._available()
        if not self.confirmed and len(available) >= settings.min_nodes and (left_s := self._fence_left_s(now_s)) > 0:
            return [Timer("join", self.epoch, left_s + settings.node_timeout_s)]
        if chosen := choose(settings, available, tuple(self.seats.values())):
            return self._form(now_s, chosen)  # without those that were about to be available
        reason = texts.too_few(settings, len(available), self.missing)
        return self._finish(now_s, Kind.LOST_NODE, reason)

    # -- the end ------------------------------------------------------------------------------------------------------

    def _after_the_end(self, now_s: float, event: Event) -> list[Action]:
        if isinstance(event, From) and isinstance(event.message, protocol.Hello) and self.over is not None:
            return [*self._tell_unheard(now_s, event.node), Send(event.node, self.over)]
        return []

    # -- what is known ------------------------------------------------------------------------------------------------

    def _look(self, now_s: float, visitor: str, look: protocol.Look) -> list[Action]:
        lifted = bool(look.lift) and self.quarantine.lift(look.lift)
        has_world = self.phase in (Phase.RUNNING, Phase.STOPPING)
        seen = tuple(
            texts.seen(node, member, self.seats, has_world, self.quarantine)
            for node, member in itertools.islice(self.members.items(), protocol.MAX_NODES_SHOWN)
        )
        answer = protocol.Nodes(
            run_id=self.settings.run_id,
            term=self.term,
            generation=self.generation,
            restarts=self.account.history.spent,
            max_restarts=self.account.history.limit,
            phase=self.phase.value,
            nodes=seen,
            count=len(self.members),
            lifted=lifted,
        )
        if not lifted:
            return [Send(visitor, answer)]
        return [Write(self._record(now_s)), Send(visitor, answer), *self._consider(now_s)]


def _with(value: S, **changes: object) -> S:
    return msgspec.structs.replace(value, **changes)
