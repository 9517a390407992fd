"""The shell around a `Coordinator`: nodes' messages become events, its actions become writes and messages."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from holdfast.control import orders, protocol
from holdfast.control.coordinator import Coordinator
from holdfast.coordinator.ledger import Deposed, Ledger

Deliver = Callable[[protocol.ToAgent], None]
Merge = Callable[[protocol.Recorded], None]

# How long the end of the job waits for nodes to take notice of it.
FAREWELL_S = 3.0


class Host:
    """Holds a coordinator in an agent. Nodes are attached by what delivers to them: a peer, or the agent itself."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        coordinator: Coordinator,
        ledger: Ledger,
        on_deposed: Callable[[str], None],
        merge: Merge | None = None,
    ) -> None:
        self.coordinator = coordinator
        self._loop = loop
        self._ledger = ledger
        self._on_deposed = on_deposed
        self._merge = merge
        self._recorded: dict[str, int] = {}  # the last line of each node's record that is in ours
        self._nodes: dict[str, tuple[Deliver, Callable[[], None]]] = {}
        self._events: deque[orders.Event] = deque()
        self._actions: deque[orders.Action] = deque()
        self._writing: asyncio.Future[Any] | None = None
        self._pumping = False
        self._closed = False
        self._ended = False
        self._timers: set[asyncio.TimerHandle] = set()
        self._deserted: asyncio.Event | None = None

    def begin(self) -> None:
        self._actions.extend(self.coordinator.begin(time.monotonic()))
        self._pump()

    @property
    def over(self) -> bool:
        return self._ended

    @property
    def closed(self) -> bool:
        return self._closed

    # -- nodes --------------------------------------------------------------------------------------------------------

    def attach(self, node: str, deliver: Deliver, hang_up: Callable[[], None]) -> None:
        """A node has a connection. It replaces an older one of the same node, which the node must have given up."""
        known = self._nodes.pop(node, None)
        self._nodes[node] = (deliver, hang_up)
        if known is not None and known[1] != hang_up:
            known[1]()

    def detach(self, node: str, deliver: Deliver) -> None:
        """The connection is gone. That of a node which has a newer one does not count."""
        known = self._nodes.get(node)
        if known is None or known[0] is not deliver:
            return
        del self._nodes[node]
        if self._deserted is not None and not self._nodes:
            self._deserted.set()
        self._post(orders.Gone(node))

    def receive(self, node: str, message: protocol.ToCoordinator) -> None:
        if isinstance(message, protocol.Recorded):
            if self._merge is not None and node in self._nodes and message.last > self._recorded.get(node, -1):
                self._recorded[node] = message.last
                self._merge(message)
            return
        self._post(orders.From(node, message))

    # -- events and actions -------------------------------------------------------------------------------------------

    def _post(self, event: orders.Event) -> None:
        if self._closed:
            return
        if not self._ledger.valid and not self._ended:
            # Asked before each event: after a pause of this machine, nodes' beats are heard before any timer fires, and
            # to answer one would prolong the leases of a world that has been succeeded.
            self.depose("its lease in etcd has run out")
            return
        self._events.append(event)
        self._pump()

    def _pump(self) -> None:
        """One event after the other, and actions in their order: what follows a write waits until it is written, while
        the machine hears further events and their actions queue behind."""
        if self._pumping:
            return
        self._pumping = True
        try:
            while not self._closed and (self._events or (self._actions and self._writing is None)):
                while self._actions and self._writing is None and not self._closed:
                    self._do(self._actions.popleft())
                if self._events and not self._closed:
                    self._actions.extend(self.coordinator.handle(time.monotonic(), self._events.popleft()))
        finally:
            self._pumping = False

    def _do(self, action: orders.Action) -> None:
        match action:
            case orders.Send(node=node, message=message):
                if (known := self._nodes.get(node)) is not None:
                    if isinstance(message, protocol.Welcome):
                        message = msgspec.structs.replace(message, recorded=self._recorded.get(node, -1))
                    known[0](message)
            case orders.Write(record=record):
                if (writing := self._ledger.write(record)) is not None:
                    self._write(writing)
            case orders.Drop(node=node):
                if (known := self._nodes.pop(node, None)) is not None:
                    known[1]()
            case orders.Timer(name=name, key=key, after_s=after_s):
                self._set_timer(after_s, orders.TimerFired(name, key))
                if name == "tick":
                    self._ledger.touch()
            case orders.StepDown():
                self.depose("a newer coordinator has taken over")
            case orders.End():
                self._ended = True

    def _write(self, writing: Awaitable[None]) -> None:
        self._writing = asyncio.ensure_future(writing)
        self._writing.add_done_callback(self._written)

    def _written(self, writing: asyncio.Future[Any]) -> None:
        self._writing = None
        if writing.cancelled() or self._closed:
            return
        failure = writing.exception()
        if isinstance(failure, Deposed):
            self.depose(str(failure) or "a newer coordinator has taken over")
        elif failure is not None:
            self.depose(f"the ledger failed: {failure}")
        elif not self._ledger.valid and self.coordinator.over is None:
            self.depose("its lease ran out while it wrote")  # and a newer coordinator may have decided otherwise
        else:
            self._pump()

    def depose(self, why: str) -> None:
        """Act no more, and let the nodes find the one who does."""
        if not self._closed:
            self.abandon()
            self._on_deposed(why)

    def _set_timer(self, after_s: float, event: orders.Event) -> None:
        def fire() -> None:
            self._timers.discard(handle)
            self._post(event)

        handle = self._loop.call_later(after_s, fire)
        self._timers.add(handle)

    # -- the end ------------------------------------------------------------------------------------------------------

    def abandon(self) -> None:
        """Stop at once, in the middle of whatever it is."""
        self._closed = True
        for handle in self._timers:
            handle.cancel()
        if self._writing is not None:
            self._writing.cancel()
        nodes, self._nodes = self._nodes, {}
        for _, hang_up in nodes.values():
            hang_up()

    async def close(self, local: str) -> None:
        """The agent ends. If the job has too, every other node gets the time to take notice, since one that finds its
        coordinator gone would wait for another."""
        self._nodes.pop(local, None)
        if self._ended and not self._closed:
            if self._writing is not None:
                await asyncio.wait([self._writing])
                self._pump()
            self._deserted = asyncio.Event()
            if self._nodes:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._deserted.wait(), FAREWELL_S)
        self.abandon()
        await self._ledger.close(self._ended)
