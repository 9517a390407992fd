"""The network between hosts: connections that keep their order, cuts that nobody is told of, frames that are tampered
with. As TCP under an authenticated counter: what is delivered is what was sent, or the connection ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from holdfast.simulate.timeline import Timeline

ETCD = "etcd"  # a host of its own


class End(Protocol):
    """What a process does with its end of a connection. Each is called inside the process, or later if it is frozen."""

    def opened(self, wire: Wire) -> None: ...

    def received(self, wire: Wire, message: object) -> None: ...

    def closed(self, wire: Wire) -> None: ...

    def post(self, call: Callable[..., None], *args: Any) -> None: ...


class Host(Protocol):
    name: str
    down: bool


class Wire:
    """One end of a connection, and the way from here to the other end."""

    def __init__(self, network: Network, here: Host, there: Host) -> None:
        self.network = network
        self.here = here
        self.there = there
        self.end: End | None = None
        self.find: Callable[[], End | None] = lambda: None  # who listens here
        self.other: Wire = self
        self.node = ""  # whose connection it is, once the far end has said so
        self.open = True
        self.refused = False
        self._last_s = 0.0
        self._held: list[tuple[str, object]] = []  # sent into a cut

    def send(self, message: object) -> None:
        if not self.open:
            return
        network = self.network
        kind = "message"
        if network.noise and network.timeline.chance(network.noise):
            kind = "twice" if network.hostile and network.timeline.chance(0.7) else "broken"
            network.tampered += 1
        self._push(kind, message)

    def close(self) -> None:
        """What was sent before still arrives."""
        if self.open:
            self.open = False
            self._push("fin", None)

    def vanish(self) -> None:
        """The machine is gone, and says nothing."""
        self.open = False
        self.end = None

    def _push(self, kind: str, message: object) -> None:
        timeline = self.network.timeline
        arrives_s = timeline.now_s + self.network.delay_s(self.here, self.there)
        self._last_s = max(self._last_s, arrives_s)
        timeline.at(self._last_s, self._arrive, kind, message)

    def _arrive(self, kind: str, message: object) -> None:
        if self._held or self.network.is_cut(self.here, self.there):
            if not self._held:
                self.network.stalled.append(self)
            self._held.append((kind, message))
            return
        self._deliver(kind, message)

    def flow(self) -> bool:
        """After a heal: deliver what was held up, in its order. False if there is another cut."""
        if self.network.is_cut(self.here, self.there):
            return False
        held, self._held = self._held, []
        for kind, message in held:
            self._deliver(kind, message)
        return True

    def _deliver(self, kind: str, message: object) -> None:
        far = self.other
        if kind == "syn":
            if far.here.down:
                return
            listener = far.find()
            if listener is None:
                far.open = False
                self.refused = True
                far._push("rst", None)
            else:
                far.end = listener
                listener.post(listener.opened, far)
                far._push("ack", None)
            return
        end = far.end
        if not far.open or end is None:
            # Nobody reads there any more. A kernel that is there says so; it needs no words for a connection that ends.
            if self.open and kind in ("message", "twice", "broken") and not far.here.down:
                far._push("rst", None)
            return
        if kind == "message":
            end.post(end.received, far, message)
        elif kind == "twice":
            end.post(end.received, far, message)
            end.post(end.received, far, message)
        elif kind == "ack":
            end.post(end.opened, far)
        elif kind == "broken":
            far.close()
            end.post(end.closed, far)
        elif kind == "rst" and far.open:
            far.open = False
            end.post(end.closed, far)
        elif kind == "fin":
            far.close()
            end.post(end.closed, far)


class Network:
    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        self.cuts: dict[tuple[str, str], int] = {}
        self.stalled: list[Wire] = []
        self.noise = 0.0  # how often a frame is tampered with
        self.hostile = False  # a duplicate gets through, as if there were no counter
        self.tampered = 0
        self.latency_s = 0.002
        self.spike_s = 0.0

    def connect(self, end: End, here: Host, there: Host, find: Callable[[], End | None]) -> Wire:
        near, far = Wire(self, here, there), Wire(self, there, here)
        far.find = find
        near.other, far.other = far, near
        near.end = end
        near._push("syn", None)
        return near

    def delay_s(self, here: Host, there: Host) -> float:
        random = self.timeline.random.random
        if here is there:
            return 0.0001 + 0.0001 * random()
        delay_s = self.latency_s * (0.5 + random())
        if self.spike_s and random() < 0.2:
            delay_s += self.spike_s * random()
        return delay_s

    def is_cut(self, here: Host, there: Host) -> bool:
        return bool(self.cuts) and here is not there and (here.name, there.name) in self.cuts

    def connected(self, one: Host, other: Host) -> bool:
        """Both ways, and both machines there."""
        return not (self.is_cut(one, other) or self.is_cut(other, one))

    def cut(self, pairs: list[tuple[str, str]]) -> None:
        for pair in pairs:
            self.cuts[pair] = self.cuts.get(pair, 0) + 1

    def heal(self, pairs: list[tuple[str, str]]) -> None:
        for pair in pairs:
            left = self.cuts.get(pair, 0) - 1
            if left > 0:
                self.cuts[pair] = left
            else:
                self.cuts.pop(pair, None)
        self.timeline.after(0.01 + 0.2 * self.timeline.random.random(), self._flow)

    def heal_all(self) -> None:
        self.cuts.clear()
        self.noise = self.spike_s = 0.0
        self._flow()

    def _flow(self) -> None:
        stalled, self.stalled = self.stalled, []
        self.stalled = [wire for wire in stalled if not wire.flow()] + self.stalled
