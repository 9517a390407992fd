"""A job of one node: its machine and the coordinator's wired together as `agent/link.py`'s `Alone` does."""

from __future__ import annotations

import signal
from collections import deque

from stories import every

from holdfast.control import acts, orders, protocol
from holdfast.control import coordinator as coordinators
from holdfast.control import node as nodes
from holdfast.control.acts import Exited, HelpersLost, HelpersReady, Started, Stepped, StopRequested
from holdfast.control.causes import Kind, RankExit
from holdfast.control.membership import Settings
from holdfast.control.worlds import World
from holdfast.wire.messages import Raised

GRACE_S = 30.0
FOREVER_S = 60.0  # longer than a crash loop's worlds live
ZYGOTE = "the zygote was killed"

Fired = acts.TimerFired | orders.TimerFired
Queued = acts.Event | orders.Event


class LoneJob:
    """Every event comes `after_s` the one before; nothing else moves time. What one says the other hears after all that
    was said before."""

    def __init__(self, ranks: int = 2, max_restarts: int = 3) -> None:
        self.now_s = 1000.0
        hello = protocol.Hello(protocol.VERSION, "n1", "host1", "127.0.0.1", ranks, 29500)
        self.node = nodes.Node(hello, GRACE_S)
        self.coordinator = coordinators.Coordinator(Settings(max_restarts=max_restarts, alone=True), 0, None, "n1")
        self.log: list[acts.Action] = []  # but for what is told to the coordinator
        self.timers: list[Fired] = []
        self._queue: deque[Queued] = deque()
        self._do(self.node.begin())
        self._order(self.coordinator.begin(self.now_s))
        self.hears(acts.Contact(), after_s=0.0)

    def hears(self, event: Queued, after_s: float = 1.0) -> list[acts.Action]:
        self.now_s += after_s
        before = len(self.log)
        self._queue.append(event)
        while self._queue:
            match self._queue.popleft():
                case orders.From() | orders.Gone() | orders.TimerFired() as said:
                    self._order(self.coordinator.handle(self.now_s, said))
                case happened:
                    self._do(self.node.handle(self.now_s, happened))
        return self.log[before:]

    def _do(self, actions: list[acts.Action]) -> None:
        for action in actions:
            match action:
                case acts.Tell(message=message):
                    self._queue.append(orders.From("n1", message))
                case acts.Timer(name=name, key=key):
                    self.timers.append(acts.TimerFired(name, key))
                    self.log.append(action)
                case _:
                    self.log.append(action)

    def _order(self, actions: list[orders.Action]) -> None:
        for action in actions:
            match action:
                case orders.Send(message=message):
                    self._queue.append(message)
                case orders.Timer(name=name, key=key):
                    self.timers.append(orders.TimerFired(name, key))

    # -- a story --------------------------------------------------------------------------------------------------

    @property
    def generation(self) -> int:
        return self.node.generation

    @property
    def spent(self) -> int:
        return self.coordinator.account.history.spent

    @property
    def worlds(self) -> list[World]:
        return [run.world for run in every(self.log, acts.Run)]

    @property
    def launches(self) -> list[tuple[int, int]]:
        """Generation and restart count of each world."""
        return [(world.generation, world.restart_count) for world in self.worlds]

    def starts(self) -> LoneJob:
        self.hears(HelpersReady())
        self.hears(Started(self.generation))
        return self

    def steps(self, *ranks: int, after_s: float = 1.0) -> list[acts.Action]:
        actions: list[acts.Action] = []
        for rank in ranks:
            actions += self.hears(Stepped(rank, self.generation, self.now_s + after_s), after_s)
        return actions

    def ends(
        self,
        rank: int,
        status: int = 0,
        after_s: float = 1.0,
        at_s: float | None = None,
        steps: int = 0,
        raised: Raised | None = None,
    ) -> list[acts.Action]:
        at_s = self.now_s + after_s if at_s is None else at_s
        return self.hears(Exited(self.generation, RankExit(rank, 100 + rank, status, at_s, steps, raised)), after_s)

    def fails(self, after_s: float = 1.0, steps: int = 0) -> list[acts.Action]:
        """Rank 0 is killed and rank 1 stopped."""
        self.ends(0, -signal.SIGKILL, after_s=after_s, steps=steps)
        return self.ends(1, -signal.SIGTERM)

    def is_told(self, signum: int = signal.SIGTERM) -> list[acts.Action]:
        return self.hears(StopRequested(signum))

    def loses_helpers(self, after_s: float = 1.0) -> list[acts.Action]:
        return self.hears(HelpersLost(ZYGOTE), after_s)

    def timer(self, name: str, after_s: float = 1.0) -> list[acts.Action]:
        """The last one of that name fires."""
        fired = [timer for timer in self.timers if timer.name == name][-1]
        self.timers.remove(fired)
        return self.hears(fired, after_s)

    def raises(
        self, rank: int, headline: str = "ValueError: bad", after_s: float = 1.0, distributed: bool = False
    ) -> Raised:
        """A rank's report of an exception `after_s` from now."""
        at_s = self.now_s + after_s
        return Raised(rank, self.generation, at_s, headline, headline, "train.py:7", distributed=distributed)

    def opened(self) -> list[int]:
        return [opened.incident.number for opened in every(self.log, acts.Opened)]

    def closed(self) -> list[int]:
        return [closed.incident.number for closed in every(self.log, acts.Closed)]

    @property
    def ended_as(self) -> Kind | None:
        (finish,) = every(self.log, acts.Finish)
        return finish.kind
