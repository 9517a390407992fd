"""A simulated agent's coordinator: the real machine, in a shell like `coordinator.host.Host`."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from holdfast.control import coordinator as machine
from holdfast.control import orders, protocol
from holdfast.control.causes import Kind
from holdfast.control.forming import Phase
from holdfast.control.incidents import Incident
from holdfast.control.membership import Record
from holdfast.control.quarantine import FOREVER_S
from holdfast.simulate import observed as seen
from holdfast.simulate.ledgers import TTL_S, Etcd, File
from holdfast.simulate.network import Wire

if TYPE_CHECKING:
    from holdfast.simulate.agent import Agent

FAREWELL_S = 3.0
# Said every half second by everybody; a timeline is read for the rest.
QUIET = (protocol.Beat, protocol.Heard)


class Unheard(msgspec.Struct, frozen=True):
    """Not an action of the machine: an incident was closed, and nobody was there to be told."""

    incident: Incident


class Server:
    def __init__(self, agent: Agent, term: int, record: Record | None, ledger: File | Etcd) -> None:
        self.agent = agent
        self.ledger = ledger
        self.term = term  # that was given; the machine's own can be larger
        self.coordinator = machine.Coordinator(agent.settings, term, record, agent.node_id)
        self.nodes: dict[str, Wire | None] = {}  # None: the agent that this is in
        self.closed_down = False
        self.ended = False
        self._actions: deque[orders.Action | Unheard] = deque()
        self._events: deque[orders.Event] = deque()
        self._writing = False
        self._in_flight: Record | None = None  # what is being written
        self._pumping = False
        self._deserted: Callable[[], None] | None = None
        self._renewed_s = agent.host.clock_s()
        self._checker = agent.sim.checker
        self.name = f"coordinator {term} at {agent.node_id}"

    def begin(self) -> None:
        self._note(f"begins with {self.coordinator.record and self.coordinator.record.generation}")
        self.nodes[self.agent.node_id] = None
        record = self.coordinator.record
        known = self._checker.worlds or self._checker.ended
        if self._is_newest and ((record is None and known) or (record is not None and record.over is not None)):
            self._checker.saw(self.agent.timeline.now_s, seen.Renewed(another_job=True, term=self.term))
            self.agent.sim.training.begin_another_job()
        self._actions.extend(self.coordinator.begin(self.agent.host.clock_s()))
        if record is not None and record.incident is not None:
            self._note_closed(record.incident)
        self._pump()
        if isinstance(self.ledger, Etcd):
            self._keep_lease()

    @property
    def _is_newest(self) -> bool:
        """One that slept from its election on begins when others have long had the job, and changes nothing."""
        return isinstance(self.ledger, File) or self.ledger.term == self.term

    # -- connections --------------------------------------------------------------------------------------------------

    def post(self, call: Callable[..., None], *args: Any) -> None:
        self.agent.post(call, *args)

    def opened(self, wire: Wire) -> None:
        if self.closed_down:
            wire.close()

    def received(self, wire: Wire, message: object) -> None:
        if self.closed_down:
            return
        if isinstance(message, protocol.Hello) and message.node != wire.node:
            wire.node = message.node
            known = self.nodes.pop(wire.node, None)
            self.nodes[wire.node] = wire
            if known is not None:
                known.close()
        self.receive(wire.node, message)

    def closed(self, wire: Wire) -> None:
        if wire.node and self.nodes.get(wire.node) is wire:
            del self.nodes[wire.node]
            if self._deserted is not None and not self.nodes:
                self._deserted()
            self._note(f"lost the connection of {wire.node}")
            self._feed(orders.Gone(wire.node))

    def receive(self, node: str, message: Any) -> None:
        if not isinstance(message, QUIET):
            self.agent.timeline.note(self.name, ("from", node, message))
        self._feed(orders.From(node, message))

    def lift(self, host: str) -> None:
        """Somebody runs `holdfast nodes --lift`."""
        self._feed(orders.From("visitor", protocol.Look(host)))

    # -- events and actions -------------------------------------------------------------------------------------------

    def _feed(self, event: orders.Event) -> None:
        if not self.holds_term():
            # As after a pause. An answer to a beat would prolong a lease that a newer coordinator waits for.
            self.depose("its lease was not renewed in time")
        if not self.closed_down:
            self._events.append(event)
            self._pump()

    def _pump(self) -> None:
        if self._pumping:
            return
        self._pumping = True
        while not self.closed_down and (self._events or (self._actions and not self._writing)):
            while self._actions and not self._writing and not self.closed_down:
                self._do(self._actions.popleft())
            if self._events and not self.closed_down:
                self._handle(self._events.popleft())
        self._pumping = False

    def _handle(self, event: orders.Event) -> None:
        coordinator = self.coordinator
        incident = coordinator.account.incident
        match event:
            case orders.From(node=node, message=protocol.Leaving()) if node in coordinator.members:
                self._checker.saw(self.agent.timeline.now_s, seen.Left(node, coordinator.generation))
        if isinstance(event, orders.TimerFired) and event.name == "return":
            before = (coordinator.account.incidents, coordinator.epoch)
            actions = coordinator.handle(self.agent.host.clock_s(), event)
            went_on = coordinator.phase is Phase.STOPPING or before[1] == coordinator.epoch
            if before[0] == coordinator.account.incidents and not went_on:
                self._checker.saw(self.agent.timeline.now_s, seen.Renewed(coordinator.account.history.spent))
        else:
            actions = coordinator.handle(self.agent.host.clock_s(), event)
        self._actions.extend(actions)
        if incident is not None and not coordinator.members and coordinator.account.incident is not incident:
            self._note_closed(incident)

    def _note_closed(self, incident: Incident) -> None:
        """It may have been closed when nobody was there to hear of it."""
        now = self.coordinator.account.incident
        if now is None or now.number != incident.number:
            self._actions.append(Unheard(incident))

    def _do(self, action: orders.Action | Unheard) -> None:
        if isinstance(action, orders.Send):
            self._send(action.node, action.message)
        elif isinstance(action, orders.Timer):
            self.agent.after(action.after_s, self._feed, orders.TimerFired(action.name, action.key))
            if action.name == "tick" and isinstance(self.ledger, File):
                self.ledger.touch()
        elif isinstance(action, orders.Write):
            self._writing, self._in_flight = True, action.record
            self._write(action.record)
        elif isinstance(action, orders.Drop):
            self._note(f"drops {action.node}")
            if action.node == self.agent.node_id:
                self.agent.lose_local_contact()
            elif (wire := self.nodes.pop(action.node, None)) is not None:
                wire.close()
        elif isinstance(action, orders.StepDown):
            self.depose("a newer coordinator has taken over")
        elif isinstance(action, orders.End):
            self.ended = True
        elif action.incident.number in self._checker.incidents:
            closed = seen.IncidentClosed(self.coordinator.term, action.incident)
            self._checker.saw(self.agent.timeline.now_s, closed)

    def _send(self, node: str, message: protocol.ToAgent) -> None:
        if not isinstance(message, QUIET):
            self.agent.timeline.note(self.name, ("to", node, message))
            self._report(node, message)
        if node not in self.nodes:
            return
        wire = self.nodes[node]
        if wire is None:
            self.agent.timeline.after(0.0, self.agent.post, self.agent.feed, message)
        else:
            wire.send(message)

    def _report(self, node: str, message: protocol.ToAgent) -> None:
        """Tell the checker what was decided."""
        now_s, checker, coordinator = self.agent.timeline.now_s, self._checker, self.coordinator
        match message:
            case protocol.Launch(world=world):
                host = node.split(".")[0]
                checker.saw(now_s, seen.Launched(coordinator.term, self.agent.node_id, node, host, world))
            case protocol.Stop(generation=generation, why=why):
                checker.saw(now_s, seen.Stopped(coordinator.term, self.agent.node_id, node, generation, why))
            case protocol.Opened(incident=incident):
                checker.saw(now_s, seen.IncidentOpened(coordinator.term, incident))
            case protocol.Closed(incident=incident):
                checker.saw(now_s, seen.IncidentClosed(coordinator.term, incident))
            case protocol.Over() if (over := coordinator.over) is not None:
                if message.kind is None and over.kind is not None and coordinator.generation > checker.newest:
                    checker.saw(now_s, seen.Released(node))
                fit = sum(1 for member in coordinator.members.values() if member.available)
                leaving = any(m.leaving is not None for m in coordinator.members.values())
                checker.saw(now_s, seen.Ended(coordinator.term, over.kind, over.reason, fit, leaving, self._reached()))
            case protocol.Note(text=text) if " is set aside: " in text:
                checker.saw(now_s, seen.SetAside(text.split(" ")[0]))

    def _reached(self) -> tuple[str, ...]:
        """Nodes that hear what is sent now, as far as that is sure."""
        if not self.agent.sim.calm:
            return ()
        wires = [(node, wire) for node, wire in self.nodes.items() if node in self.coordinator.members]
        return tuple(node for node, wire in wires if wire is None or (wire.open and wire.other.open))

    # -- the ledger ---------------------------------------------------------------------------------------------------

    def _write(self, record: Record) -> None:
        if isinstance(self.ledger, File):
            self.ledger.write(self.agent, self.term, record, self._written)
            return
        etcd, term = self.ledger, self.term
        etcd.call(self.agent, lambda: etcd.put(term, record), lambda done: self._written(bool(done)))

    def _written(self, done: bool) -> None:
        self._writing = False
        if self.closed_down:
            return
        if done:
            self._report_written()
        if not done:
            self.depose("its write was refused: the term is over")
        elif not self.holds_term() and self.coordinator.over is None:
            self.depose("its lease ran out while it wrote")
        else:
            self._pump()

    def _report_written(self) -> None:
        """Tell the checker what a rank asked for, and can count on from now on."""
        record, self._in_flight = self._in_flight, None
        if record is None or not self._is_newest:
            return
        now_s, quarantine = self.agent.timeline.now_s, self.coordinator.quarantine
        for host, _, left_s in record.quarantine:
            # A lift may have been faster.
            if left_s > FOREVER_S / 2 and quarantine.holds(host) and quarantine.left_s(host, 0.0) > FOREVER_S / 2:
                self._checker.saw(now_s, seen.Excluded(host))
        if record.ending is not None and record.ending.kind is Kind.REQUESTED:
            self._checker.saw(now_s, seen.EndAsked(self.coordinator.term))

    def holds_term(self) -> bool:
        """By this machine's own clock."""
        return isinstance(self.ledger, File) or self.agent.host.clock_s() - self._renewed_s <= TTL_S

    def _keep_lease(self) -> None:
        etcd = self.ledger
        if self.closed_down or not isinstance(etcd, Etcd):
            return
        sent_s = self.agent.host.clock_s()
        if not self.holds_term():
            self.depose("its lease could not be renewed")
            return

        def answered(renewed: object) -> None:
            if renewed:
                self._renewed_s = sent_s
            else:
                self.depose("its lease is gone")

        etcd.call(self.agent, lambda: etcd.renew(self.term), answered)
        self.agent.after(TTL_S / 3, self._keep_lease)

    # -- the end ------------------------------------------------------------------------------------------------------

    def depose(self, why: str) -> None:
        if not self.closed_down:
            self._note(f"steps down: {why}")
            self.abandon()
            self.agent.deposed()

    def abandon(self) -> None:
        self.closed_down = True
        nodes, self.nodes = self.nodes, {}
        for wire in nodes.values():
            if wire is not None:
                wire.close()

    def close(self, then: Callable[[], None]) -> None:
        """The agent ends. After the end of the job, other nodes get the time to take notice."""
        self.nodes.pop(self.agent.node_id, None)

        def leave() -> None:
            if not self.agent.alive:
                return
            if not self.closed_down:
                self.abandon()
                self._leave_ledger()
            then()

        if self.ended and not self.closed_down and self.nodes:
            self._deserted = leave
            self.agent.after(FAREWELL_S, leave)
        else:
            leave()

    def _leave_ledger(self) -> None:
        etcd = self.ledger
        if isinstance(etcd, File):
            if self.ended:
                etcd.clear()
        elif self.ended:
            etcd.clear(self.term)
        else:
            etcd.resign(self.term)

    def _note(self, text: str) -> None:
        self.agent.timeline.note(self.name, text)
