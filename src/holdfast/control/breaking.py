"""Breaking worlds: what goes wrong in one, how it is stopped, and what that leads to."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from holdfast.control import protocol
from holdfast.control.account import Ended
from holdfast.control.causes import Cause, Kind, explained, is_worth_rescheduling, signal_name
from holdfast.control.forming import Forming, Phase
from holdfast.control.membership import Member, Policy
from holdfast.control.orders import Action, End, Send, Timer, Write
from holdfast.control.restarts import GiveUp, Restart
from holdfast.control.stragglers import Found, Window

S = TypeVar("S", bound=msgspec.Struct)

# The cause of a world's end where the one who knew it is gone.
STOPPED_BEFORE = "the coordinator before this one had it stopped"
# What speaks against a machine. A program's own error would come anywhere, and a broken collective is seldom the fault
# of the one who says so.
STRIKES = (Kind.SIGNAL, Kind.OUT_OF_MEMORY, Kind.HARDWARE, Kind.HANG, Kind.LOST_NODE, Kind.LAUNCHER)


class Breaking(Forming):
    """The half of a coordinator that ends worlds, and the job."""

    def _requested(self, now_s: float, member: Member, request: protocol.Request) -> list[Action]:
        """A rank asked for it, and knows why. It is done at once, not when something fails."""
        host = member.hello.host
        if request.action == "shutdown":
            headline = f"asked to end the job: {request.description}"
            reason = f"rank {request.rank} {headline}; it is not to be requeued"
            self.ending = protocol.Over(Kind.REQUESTED, reason)
        else:
            headline = f"asked to exclude its node: {request.description}"
            if self.settings.alone:
                reason = f"rank {request.rank} {headline}; there is no other node to go on with"
                self.ending = protocol.Over(Kind.LOST_NODE, reason)
            else:
                self.quarantine.exclude(host, f"rank {request.rank} {headline}")
        written: list[Action] = [Write(self._record(now_s))]
        if self.quarantine.holds(host):
            text = f"{host} is set aside: {self.quarantine.why(host)}; holdfast nodes --lift {host} takes it back"
            written += self._broadcast(protocol.Note(text))
        if self.phase in (Phase.RUNNING, Phase.STOPPING):
            kind = Kind.REQUESTED if request.action == "shutdown" else Kind.LOST_NODE
            name = "" if self.settings.alone else host
            if not any((cause.rank, cause.headline) == (request.rank, headline) for cause in self.causes):
                self.causes.append(Cause(kind, headline, now_s, rank=request.rank, node=name))
        if self.phase is Phase.RUNNING:
            return written + self._break(now_s, f"rank {request.rank} {headline}")
        if self.phase is Phase.STOPPING:
            return written
        if self.ending is not None:
            return self._finish(now_s, self.ending.kind, self.ending.reason)  # its world was down already
        return written + self._consider(now_s)

    def _paced(self, now_s: float, node: str, member: Member, window: Window) -> list[Action]:
        """A node has measured its ranks."""
        actions: list[Action] = []
        for found in self.stragglers.hear(node, window):
            actions.append(Send(node, protocol.Straggles(self.generation, found)))
            if not found.gone and self.settings.replaces_stragglers and self._can_do_without(node):
                return actions + self._replace(now_s, member, found)
        return actions

    def _can_do_without(self, node: str) -> bool:
        """A slow node is better than none."""
        others = [
            name
            for name, other in self.members.items()
            if name != node and other.ready and other.leaving is None and not self.quarantine.holds(other.hello.host)
        ]
        return self.phase is Phase.RUNNING and not self.settings.alone and len(others) >= len(self.seats)

    def _replace(self, now_s: float, member: Member, found: Found) -> list[Action]:
        host = member.hello.host
        headline = found.headline
        self.quarantine.exclude(host, f"rank {found.rank} {headline}")
        self.causes.append(Cause(Kind.LOST_NODE, headline, now_s, rank=found.rank, node=host))
        text = f"{host} is set aside: {self.quarantine.why(host)}; holdfast nodes --lift {host} takes it back"
        told = [Write(self._record(now_s)), *self._broadcast(protocol.Note(text))]
        return told + self._break(now_s, f"rank {found.rank} {headline}", drain=True)

    def _node_failed(
        self, now_s: float, node: str, why: str, failing: protocol.Failing | None = None, drain: bool = False
    ) -> list[Action]:
        """Something is wrong with the world at this node. `drain`: not with its ranks."""
        if self.phase is Phase.STOPPING:
            return self._settle_if_down(now_s)
        if self.phase is not Phase.RUNNING:
            return self._consider(now_s)
        self.undone.discard(node)
        healthy = len(self.undone & self.up) + len(self.done)
        # Ranks that stay have a way of ours to do without one, for which the world has to end.
        goes_on = self.settings.policy is Policy.MIN_HEALTHY and not self._stays
        if goes_on and healthy >= self.settings.min_nodes:
            return [] if node in self.up else self._go_on_without(now_s, why, healthy)
        return self._break(now_s, why, failing, drain)

    def _go_on_without(self, now_s: float, why: str, healthy: int) -> list[Action]:
        """With min-healthy the others are not stopped; the script has its own way to do without a node."""
        actions: list[Action] = []
        if self.causes:
            causes = explained(self.causes, self.groups)
            noted = self.account.note(now_s, self._ended(), causes, f"{healthy} healthy nodes go on")
            self.causes, self.groups = [], []
            actions += self._broadcast(protocol.Opened(noted, now_s)) + self._broadcast(protocol.Closed(noted, now_s))
            actions += [Write(self._record(now_s)), *self._broadcast(protocol.Note(f"{noted.what}; {noted.action}"))]
        return actions + (self._succeed(now_s) if not self.undone and not self.up else [])

    def _break(
        self, now_s: float, why: str, failing: protocol.Failing | None = None, drain: bool = False
    ) -> list[Action]:
        self.broken_at_s = now_s
        self._enter(Phase.STOPPING)
        # Ranks of nodes that are not here cannot be asked, and without them nobody gets to a boundary.
        self.draining = drain and self.up <= set(self.members)
        stop = protocol.Stop(self.generation, why, drain=self.draining)
        if failing is not None:
            stop = protocol.Stop(self.generation, why, failing.hang, failing.native)
        stops = self._to_world(stop)
        if self.absent:
            stops.append(Timer("return", self.epoch, self.settings.return_s))
        return stops + self._settle_if_down(now_s)

    def _to_world(self, stop: protocol.Stop) -> list[Action]:
        return [Send(node, stop) for node in self.seats if node in self.up and node in self.members]

    def _give_up_drain(self, why: str) -> list[Action]:
        """Ranks of one node will not get to the boundary. So the others need not wait for them there."""
        if not self.draining or self.phase is not Phase.STOPPING:
            return []
        self.draining = False
        return self._to_world(protocol.Stop(self.generation, why))

    def _down(self, now_s: float, node: str, member: Member, down: protocol.Down) -> list[Action]:
        member.ready, member.fit, member.store_port, member.busy = down.ready, down.fit, down.store_port, False
        member.staying = down.staying
        if not self._in_world(node, down.generation) or node in self.done:
            return self._consider(now_s)
        self.unconfirmed.discard(node)
        by_s = now_s - down.now_s
        name = "" if self.settings.alone else member.hello.host
        if node in self.up:
            self.causes += [_with(protocol.shifted(cause, by_s), node=name) for cause in down.causes]
            self.groups += [_with(group, node=name) for group in down.groups]
            self.world_steps = max(self.world_steps, down.steps or 0)
            self.world_base = max(self.world_base, down.base)
            self.stayers += down.stay
            self.replaced += down.replaced
            self.as_they_are = self.as_they_are or down.as_they_are
            if down.stays:
                self._can_stay(node)
            self.anew = self.anew or down.anew
            self.steps_known = self.steps_known or down.steps is not None
            self.steps_seen = self.steps_seen or bool(down.steps)
            self.up.discard(node)
        elif self._is_settled and self.account.heard_late(down.base, down.steps or 0):
            return [Write(self._record(now_s)), *self._consider(now_s)]
        elif self.phase is Phase.RUNNING and node not in self.undone:
            return self._consider(now_s)  # the others have long been going on without it
        why = f"the ranks of {member.hello.host} have ended"
        given_up = self._give_up_drain(why) if down.causes else []
        return given_up + self._node_failed(now_s, node, why)

    @property
    def _is_settled(self) -> bool:
        """The last world is down, and its incident open."""
        return self.phase in (Phase.GATHERING, Phase.WAITING)

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
        if leavers and self._only_leavers and self.ending is None:
            reason = f"stopped by {signal_name(leavers[-1].leaving or 0)}"
            return self._finish(now_s, Kind.PREEMPTED, reason)
        if self.joining:
            # Nodes stop one after the other, and ranks whose peers went first say that their backend broke. It did not.
            self.causes = [cause for cause in self.causes if cause.kind is not Kind.BACKEND]
        actions = self._close_incident(now_s, self.causes[0].failed_at_s if self.causes else self.broken_at_s)
        if not self.causes:
            headline = self.joining or (STOPPED_BEFORE if self.inherited else "the world was stopped")
            self.causes.append(Cause(Kind.MEMBERSHIP, headline, self.broken_at_s))
        self.causes = explained(self.causes, self.groups)
        if self.ending is not None:
            return actions + self._end_as_asked(now_s, self.ending)
        answer = self.account.open(now_s, self._ended(), self.causes)
        judged = self._judge(now_s, answer.first) if isinstance(answer.decision, Restart) else []
        # Those of a world are not set aside when it is formed.
        self.account.set_aside(sorted({s.host for s in self.seats.values() if self.quarantine.holds(s.host)}))
        assert self.account.incident is not None
        opened = protocol.Opened(self.account.incident, now_s)
        actions += [Write(self._record(now_s)), *self._broadcast(opened), *judged]
        if isinstance(answer.decision, GiveUp):
            given_up = answer.decision
            return actions + self._finish(now_s, opened.incident.kind, given_up.reason, given_up.elsewhere)
        if answer.decision.after_s > 0:
            self._enter(Phase.WAITING)
            return [*actions, Timer("backoff", self.epoch, answer.decision.after_s)]
        return actions + self._gather(now_s)

    def _end_as_asked(self, now_s: float, over: protocol.Over) -> list[Action]:
        # Who asks often raises right after, and that is dated earlier; but the request is why the job ends.
        first_s = min(cause.failed_at_s for cause in self.causes)
        causes = [_with(c, failed_at_s=first_s - 1e-6) if c.kind is over.kind else c for c in self.causes]
        noted = self.account.note(now_s, self._ended(), causes, "the job ends")
        if not self.members:
            self.unheard.append(noted)
        told = self._broadcast(protocol.Opened(noted, now_s)) + self._broadcast(protocol.Closed(noted, now_s))
        return told + self._finish(now_s, over.kind, over.reason)

    def _ended(self) -> Ended:
        steps = max(self.world_steps, int(self.has_stepped)) if self.steps_known else None
        fit = [
            m for m in self.members.values() if m.fit and m.leaving is None and not self.quarantine.holds(m.hello.host)
        ]
        return Ended(
            self.generation,
            self.launched_at_s,
            steps,
            self.steps_seen,
            self.world_base,
            stays=self.stay >= self.seats.keys(),
            stayed=self.stayers,
            replaced=self.replaced,
            as_they_are=self.as_they_are,
            anew=self.anew,
            healthy=len(fit) >= self.settings.min_nodes,
        )

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

    def _close_incident(self, now_s: float, failed_again_at_s: float | None = None) -> list[Action]:
        closed = self.account.close(failed_again_at_s)
        if closed is None:
            return []
        if not self.members:
            self.unheard.append(closed)
        return self._broadcast(protocol.Closed(closed, now_s))

    def _tell_unheard(self, now_s: float, node: str) -> list[Action]:
        """To the first node that comes: it may have missed the beginning, too."""
        unheard, self.unheard = self.unheard, []
        kinds = (protocol.Opened, protocol.Closed)
        return [Send(node, kind(incident, now_s)) for incident in unheard for kind in kinds]

    # -- the end ------------------------------------------------------------------------------------------------------

    def _finish(self, now_s: float, kind: Kind | None, reason: str = "", elsewhere: bool | None = None) -> list[Action]:
        actions = self._close_incident(now_s)
        over = self.over = protocol.Over(kind, reason, self.steps, elsewhere)
        # A spare has done its part, however the others fared. But it goes where they go.
        had_world = self.phase in (Phase.RUNNING, Phase.STOPPING)
        spares = {node for node in self.members if had_world and node not in self.seats}
        released = protocol.Over(None, reason, self.steps, is_worth_rescheduling(kind, elsewhere) or None)
        told: list[Action] = [Send(node, released if node in spares else over) for node in self.members]
        self._enter(Phase.OVER)
        self.seats = {}
        return [*actions, Write(self._record(now_s)), *told, End()]

    # -- what is known ------------------------------------------------------------------------------------------------

    def _in_world(self, node: str, generation: int) -> bool:
        return generation == self.generation and node in self.seats

    @property
    def _only_leavers(self) -> bool:
        return all(member.leaving is not None for member in self.members.values())


def _with(value: S, **changes: object) -> S:
    return msgspec.structs.replace(value, **changes)
