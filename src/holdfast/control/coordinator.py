"""The coordinator of a job, as a state machine: what nodes say goes in, what they are told comes out.

One place decides membership, so that there is one order of worlds and one restart count. It stops a world before it
starts the next, writes down what it decided before anybody hears of it, and never waits for a node for ever.
"""

from __future__ import annotations

import itertools
from typing import TypeVar

import msgspec

from holdfast.control import protocol, texts
from holdfast.control.account import Ended
from holdfast.control.causes import Cause, Kind, signal_name
from holdfast.control.forming import Forming, Phase
from holdfast.control.membership import (
    BEATS,
    Member,
    Policy,
    choose,
)
from holdfast.control.orders import Action, Drop, End, Event, From, Gone, Send, StepDown, Timer, TimerFired, Write
from holdfast.control.restarts import GiveUp

S = TypeVar("S", bound=msgspec.Struct)

# The cause of a world's end where the one who knew it is gone.
STOPPED_BEFORE = "the coordinator before this one had it stopped"
ENDED_BEFORE = "the job ended while this node was cut off from it"


# What speaks against a machine. A program's own error would come anywhere, and a broken collective is seldom the fault
# of the one who says so.
STRIKES = (Kind.SIGNAL, Kind.OUT_OF_MEMORY, Kind.HANG, Kind.LOST_NODE, Kind.LAUNCHER)
# Who was elected before has let its lease run out, or refused a connection. If it lives, it knows that it was replaced.
PREDECESSOR_S = 1.0


class Coordinator(Forming):
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
            return self._after_the_end(event)
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
                return [Send(node, protocol.Heard(message.now_s)), *self._progress(now_s, message)]
            case protocol.Started(generation=generation) if generation == self.generation:
                self.unstarted.discard(node)
                if not self.unstarted:
                    self.account.started(now_s)
            case protocol.Stepped(generation=generation) if generation == self.generation:
                return self._stepped(now_s, node, message.at_s + now_s - message.now_s)
            case protocol.Failing(generation=generation, why=why) if self._in_world(node, generation):
                return self._node_failed(now_s, node, why)
            case protocol.Down():
                return self._down(now_s, node, member, message)
            case protocol.Done(generation=generation) if self._in_world(node, generation):
                return self._done(now_s, node, message)
            case protocol.Ready(store_port=store_port):
                member.ready, member.store_port = True, store_port
                return self._consider(now_s)
            case protocol.Leaving(signum=signum):
                return self._leaving(now_s, node, member, signum)
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
            actions.append(Write(self._record(now_s)))
        self.remembered = self.remembered or hello.term >= 0
        known = self.members.get(node)
        arrival = hello.arrival if hello.arrival >= 0 else known.arrival if known else self.arrivals
        self.arrivals = max(self.arrivals, arrival + 1)
        member = self.members[node] = Member(hello, arrival, now_s)
        actions.append(Send(node, protocol.Welcome(self.term, arrival, hello.now_s)))
        if self.account.incident is not None:
            actions.append(Send(node, protocol.Opened(self.account.incident, now_s)))  # it may have missed it
        actions += self._note_settings(node, hello)
        actions += self._take_up(now_s, node, member)
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
        return self._node_failed(now_s, node, headline or f"node {host} has left")

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
        return self._node_failed(now_s, node, f"node {member.hello.host} leaves")

    # -- the world breaks ---------------------------------------------------------------------------------------------

    def _node_failed(self, now_s: float, node: str, why: str) -> list[Action]:
        """Something is wrong with the world at this node."""
        if self.phase is Phase.STOPPING:
            return self._settle_if_down(now_s)
        if self.phase is not Phase.RUNNING:
            return self._consider(now_s)
        self.undone.discard(node)
        healthy = len(self.undone & self.up) + len(self.done)
        if self.settings.policy is Policy.MIN_HEALTHY and healthy >= self.settings.min_nodes:
            return [] if node in self.up else self._go_on_without(now_s, why, healthy)
        return self._break(now_s, why)

    def _go_on_without(self, now_s: float, why: str, healthy: int) -> list[Action]:
        """With min-healthy the others are not stopped; the script has its own way to do without a node."""
        actions: list[Action] = []
        if self.causes:
            noted = self.account.note(now_s, self._ended(), self.causes, f"{healthy} healthy nodes go on")
            self.causes = []
            actions += self._broadcast(protocol.Opened(noted, now_s)) + self._broadcast(protocol.Closed(noted, now_s))
            actions += [Write(self._record(now_s)), *self._broadcast(protocol.Note(f"{noted.what}; {noted.action}"))]
        return actions + (self._succeed(now_s) if not self.undone and not self.up else [])

    def _break(self, now_s: float, why: str) -> list[Action]:
        self.broken_at_s = now_s
        self._enter(Phase.STOPPING)
        stop = protocol.Stop(self.generation, why)
        stops: list[Action] = [Send(node, stop) for node in self.seats if node in self.up and node in self.members]
        if self.absent:
            stops.append(Timer("return", self.epoch, self.settings.return_s))
        return stops + self._settle_if_down(now_s)

    def _down(self, now_s: float, node: str, member: Member, down: protocol.Down) -> list[Action]:
        member.ready, member.fit, member.store_port, member.busy = down.ready, down.fit, down.store_port, False
        if not self._in_world(node, down.generation) or node in self.done:
            return self._consider(now_s)
        self.unconfirmed.discard(node)
        by_s = now_s - down.now_s
        name = "" if self.settings.alone else member.hello.host
        if node in self.up:
            self.causes += [_with(protocol.shifted(cause, by_s), node=name) for cause in down.causes]
            self.world_steps = max(self.world_steps, down.steps or 0)
            self.steps_known = self.steps_known or down.steps is not None
            self.steps_seen = self.steps_seen or bool(down.steps)
            self.up.discard(node)
        return self._node_failed(now_s, node, f"the ranks of {member.hello.host} have ended")

    def _done(self, now_s: float, node: str, done: protocol.Done) -> list[Action]:
        self.world_steps = max(self.world_steps, done.steps or 0)
        self.unconfirmed.discard(node)
        self.up.discard(node)
        self.undone.discard(node)
        self.done.add(node)
        if self.phase is Phase.STOPPING:
            return self._settle_if_down(now_s)
        if self.phase is Phase.RUNNING and not self.undone and not self.up:
            return self._succeed(now_s)
        return []

    def _succeed(self, now_s: float) -> list[Action]:
        self.steps += self.world_steps
        return self._finish(now_s, None)

    def _settle_if_down(self, now_s: float) -> list[Action]:
        if self.phase is not Phase.STOPPING or self.up:
            return []
        return self._settle(now_s)

    def _settle(self, now_s: float) -> list[Action]:
        """The world is down: name the cause, then restart or give up."""
        self.steps += self.world_steps
        leavers = [member for member in self.members.values() if member.leaving is not None]
        if leavers and self._only_leavers:
            reason = f"stopped by {signal_name(leavers[-1].leaving or 0)}"
            return self._finish(now_s, Kind.PREEMPTED, reason)
        if self.joining:
            # Nodes stop one after the other, and ranks whose peers went first say that their backend broke. It did not.
            self.causes = [cause for cause in self.causes if cause.kind is not Kind.BACKEND]
        actions = self._close_incident(now_s, self.causes[0].failed_at_s if self.causes else self.broken_at_s)
        if not self.causes:
            headline = self.joining or (STOPPED_BEFORE if self.inherited else "the world was stopped")
            self.causes.append(Cause(Kind.MEMBERSHIP, headline, self.broken_at_s))
        answer = self.account.open(now_s, self._ended(), self.causes)
        assert self.account.incident is not None
        opened = protocol.Opened(self.account.incident, now_s)
        actions += [Write(self._record(now_s)), *self._broadcast(opened)]
        if isinstance(answer.decision, GiveUp):
            return actions + self._finish(now_s, opened.incident.kind, answer.decision.reason)
        actions += self._judge(now_s, answer.first)
        if answer.decision.after_s > 0:
            self._enter(Phase.WAITING)
            return [*actions, Timer("backoff", self.epoch, answer.decision.after_s)]
        return actions + self._gather(now_s)

    def _ended(self) -> Ended:
        steps = self.world_steps if self.steps_known else None
        return Ended(self.generation, self.launched_at_s, steps, self.steps_seen)

    def _judge(self, now_s: float, first: Cause) -> list[Action]:
        """Set a node aside that keeps failing, if the job can do without it."""
        if not first.node or first.kind not in STRIKES:
            return []
        others = sum(1 for m in self.members.values() if m.hello.host != first.node and m.fit and m.leaving is None)
        if others < self.settings.min_nodes:
            return []
        why = self.quarantine.blame(first.node, first.headline, now_s)
        if not why:
            return []
        text = f"{first.node} is set aside: {why}; holdfast nodes --lift {first.node} takes it back"
        left_s = self.quarantine.left_s(first.node, now_s)
        return [*self._broadcast(protocol.Note(text)), Timer("quarantine", 0, left_s)]

    # -- the world runs -----------------------------------------------------------------------------------------------

    def _progress(self, now_s: float, beat: protocol.Beat) -> list[Action]:
        if beat.generation != self.generation or beat.steps <= self.world_steps or self.phase is not Phase.RUNNING:
            return []
        self.world_steps = beat.steps
        self.steps_known = self.steps_seen = True
        return [Write(self._record(now_s))] if self.account.refill(self.world_steps) else []

    def _stepped(self, now_s: float, node: str, at_s: float) -> list[Action]:
        self.steps_known = self.steps_seen = True
        self.unstepped.discard(node)
        if self.unstepped or self.account.incident is None or self.phase is not Phase.RUNNING:
            return []
        self.account.recovered(at_s)
        closed = self._close_incident(now_s)
        return [*closed, Write(self._record(now_s))]  # a next coordinator must not close it again

    def _close_incident(self, now_s: float, failed_again_at_s: float | None = None) -> list[Action]:
        closed = self.account.close(failed_again_at_s)
        return [] if closed is None else self._broadcast(protocol.Closed(closed, now_s))

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
            self.up, self.absent, self.causes = set(), set(), []
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

    def _finish(self, now_s: float, kind: Kind | None, reason: str = "") -> list[Action]:
        actions = self._close_incident(now_s)
        over = self.over = protocol.Over(kind, reason, self.steps)
        # A spare has done its part, however the others fared.
        had_world = self.phase in (Phase.RUNNING, Phase.STOPPING)
        spares = {node for node in self.members if had_world and node not in self.seats}
        released = protocol.Over(None, reason, self.steps)
        told: list[Action] = [Send(node, released if node in spares else over) for node in self.members]
        self._enter(Phase.OVER)
        self.seats = {}
        return [*actions, Write(self._record(now_s)), *told, End()]

    def _after_the_end(self, event: Event) -> list[Action]:
        if isinstance(event, From) and isinstance(event.message, protocol.Hello) and self.over is not None:
            return [Send(event.node, self.over)]
        return []

    # -- what is known ------------------------------------------------------------------------------------------------

    def _in_world(self, node: str, generation: int) -> bool:
        return generation == self.generation and node in self.seats

    @property
    def _only_leavers(self) -> bool:
        return all(member.leaving is not None for member in self.members.values())

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
        return [Send(visitor, answer), *([Write(self._record(now_s)), *self._consider(now_s)] if lifted else [])]


def _with(value: S, **changes: object) -> S:
    return msgspec.structs.replace(value, **changes)
