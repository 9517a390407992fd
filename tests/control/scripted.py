"""A coordinator whose nodes are played by the test: each says what it is told to, and its post is kept."""

from __future__ import annotations

import signal
from typing import Any, TypeVar

from holdfast.control import protocol
from holdfast.control.causes import Cause, Kind
from holdfast.control.coordinator import Coordinator
from holdfast.control.forming import Phase
from holdfast.control.incidents import Incident
from holdfast.control.membership import Record, Settings
from holdfast.control.orders import Action, Drop, End, Event, From, Gone, Send, StepDown, Timer, TimerFired, Write
from holdfast.control.worlds import World

A = TypeVar("A")
M = TypeVar("M", bound=protocol.Message)

JOIN_S = 600.0
FOREVER_S = 60.0  # longer than a crash loop's worlds live


def killed(rank: int = 0, at_s: float = 0.0) -> Cause:
    return Cause(Kind.SIGNAL, "killed by SIGKILL", at_s, rank=rank, status=-signal.SIGKILL)


class Job:
    """Every event comes `after_s` the one before; nothing else moves time. Node `a` is on `host-a`."""

    def __init__(
        self,
        nodes: int | tuple[int, int] = 2,
        record: Record | None = None,
        term: int = 0,
        node: str = "",
        now_s: float = 1000.0,
        **more: Any,
    ) -> None:
        smallest, largest = nodes if isinstance(nodes, tuple) else (nodes, nodes)
        more = {"max_restarts": 3, "join_timeout_s": JOIN_S, "last_call_s": 30.0, **more}
        settings = Settings(run_id="run", min_nodes=smallest, max_nodes=largest, **more)
        self.now_s = now_s
        self.coordinator = Coordinator(settings, term, record, node)
        self.post: dict[str, list[protocol.ToAgent]] = {}
        self.written: Record | None = None
        self.log: list[Action] = []
        self._do(self.coordinator.begin(self.now_s))

    def hears(self, event: Event, after_s: float = 1.0) -> list[Action]:
        self.now_s += after_s
        return self._do(self.coordinator.handle(self.now_s, event))

    def _do(self, actions: list[Action]) -> list[Action]:
        for action in actions:
            match action:
                case Write(record=record):
                    self.written = record
                case Send(node=node, message=message):
                    self.post.setdefault(node, []).append(message)
        self.log += actions
        return actions

    # -- what nodes do ------------------------------------------------------------------------------------------------

    def says(self, node: str, message: protocol.ToCoordinator, after_s: float = 1.0) -> list[Action]:
        return self.hears(From(node, message), after_s)

    def comes(self, *nodes: str, local_size: int = 2, **more: Any) -> list[Action]:
        actions: list[Action] = []
        for node in nodes:
            hello = protocol.Hello(
                protocol.VERSION, node, f"host-{node}", f"10.0.0.{node}", local_size, 29500, now_s=5.0, **more
            )
            actions += self.says(node, hello)
        return actions

    def steps(self, *nodes: str) -> None:
        for node in nodes:
            self.says(node, protocol.Stepped(self.coordinator.generation, at_s=9.0, now_s=10.0))

    def runs(self, *nodes: str) -> Job:
        """They come, and the world that they make has stepped, a good while ago."""
        self.comes(*nodes)
        if self.coordinator.phase is Phase.GATHERING:
            self.timer("last call")
        for node in self.seated:
            self.says(node, protocol.Started(self.coordinator.generation))
        self.steps(*self.seated)
        self.now_s += FOREVER_S
        return self

    def fails(self, node: str, *causes: Cause, steps: int | None = 1, **more: Any) -> list[Action]:
        """A rank there is killed, unless something else happens, and its neighbours on the node are stopped."""
        generation = self.coordinator.generation
        actions = self.says(node, protocol.Failing(generation, "rank 0 failed"))
        return actions + self.down(node, *(causes or (killed(at_s=8.0),)), steps=steps, **more)

    def down(self, *nodes_and_causes: str | Cause, steps: int | None = 1, **more: Any) -> list[Action]:
        causes = tuple(cause for cause in nodes_and_causes if isinstance(cause, Cause))
        actions: list[Action] = []
        for node in [node for node in nodes_and_causes if isinstance(node, str)]:
            down = protocol.Down(self.coordinator.generation, 10.0, causes, steps, store_port=29501, **more)
            actions += self.says(node, down)
        return actions

    def gone(self, node: str) -> list[Action]:
        return self.hears(Gone(node))

    def leaves(self, node: str, signum: int = signal.SIGTERM) -> list[Action]:
        return self.says(node, protocol.Leaving(signum))

    def timer(self, name: str) -> list[Action]:
        """The last one of that name fires, in its time."""
        found = [action for action in self.log if isinstance(action, Timer) and action.name == name][-1]
        return self.hears(TimerFired(name, found.key), found.after_s)

    # -- what can be seen ---------------------------------------------------------------------------------------------

    def got(self, node: str, kind: type[M]) -> list[M]:
        return [message for message in self.post.get(node, []) if isinstance(message, kind)]

    def world(self, node: str) -> World:
        """The last one that the node was told to run."""
        return self.got(node, protocol.Launch)[-1].world

    @property
    def seated(self) -> list[str]:
        return list(self.coordinator.seats)

    @property
    def spent(self) -> int:
        return self.coordinator.account.history.spent

    @property
    def over(self) -> protocol.Over | None:
        return self.coordinator.over

    def opened(self, node: str) -> list[Incident]:
        return [opened.incident for opened in self.got(node, protocol.Opened)]


def sent(actions: list[Action], kind: type[M]) -> list[tuple[str, M]]:
    return [
        (action.node, action.message)
        for action in actions
        if isinstance(action, Send) and isinstance(action.message, kind)
    ]


def told(actions: list[Action], kind: type[M]) -> list[str]:
    """Which nodes."""
    return [node for node, _ in sent(actions, kind)]


def every(actions: list[Action], kind: type[A]) -> list[A]:
    return [action for action in actions if isinstance(action, kind)]


__all__ = [
    "FOREVER_S", "JOIN_S", "Drop", "End", "Job", "StepDown", "Timer", "Write", "every", "killed", "sent", "told",
]  # fmt: skip
