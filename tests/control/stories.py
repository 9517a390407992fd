"""A node's life as a story: each event with its time, and what the node did about it."""

from __future__ import annotations

import signal
from typing import Any, TypeVar

from holdfast.control import protocol
from holdfast.control.acts import Action, Contact, Event, Exited, HelpersLost, HelpersReady, Started, Tell, TimerFired
from holdfast.control.causes import RankExit
from holdfast.control.node import Node
from holdfast.control.worlds import World
from holdfast.wire.messages import Leaving, Raised

A = TypeVar("A")

GRACE_S = 30.0
JOIN_S = 600.0
CLOSE_S = 20.0
BEAT_S = 0.5
ZYGOTE = "the zygote was killed"


def a_world(generation: int = 0, ranks: int = 2, first_rank: int = 0, restarts: int = 0) -> World:
    return World("run", generation, restarts, 3, "10.0.0.1", 29500, ranks, first_rank=first_rank)


class Story:
    """A node and its clock. Every event comes `after_s` the one before; nothing else moves time."""

    def __init__(self, ranks: int = 2, join_timeout_s: float = JOIN_S, **more: Any) -> None:
        self.now_s = 1000.0
        self.ranks = ranks
        hello = protocol.Hello(protocol.VERSION, "n1", "host1", "10.0.0.1", ranks, 0)
        self.node = Node(hello, GRACE_S, join_timeout_s, CLOSE_S, BEAT_S, **more)
        self.log = self.node.begin()

    def hears(self, event: Event, after_s: float = 1.0) -> list[Action]:
        self.now_s += after_s
        actions = self.node.handle(self.now_s, event)
        self.log = [*self.log, *actions]
        return actions

    def meets(self, term: int = 0) -> list[Action]:
        return [*self.hears(Contact()), *self.hears(protocol.Welcome(term, 0, self.now_s))]

    def launched(self, generation: int = 0, first_rank: int = 0, restarts: int = 0) -> list[Action]:
        return self.hears(protocol.Launch(a_world(generation, self.ranks, first_rank, restarts)))

    def runs(self) -> Story:
        """Warm, welcome, and with all ranks of generation 0."""
        self.hears(HelpersReady())
        self.meets()
        self.launched()
        self.hears(Started(0))
        return self

    def ends(
        self,
        rank: int,
        status: int = 0,
        after_s: float = 1.0,
        at_s: float | None = None,
        steps: int = 0,
        raised: Raised | None = None,
        left: Leaving | None = None,
    ) -> list[Action]:
        at_s = self.now_s + after_s if at_s is None else at_s
        assert self.node.world is not None
        exit = RankExit(rank, 100 + rank, status, at_s, steps, raised, left)
        return self.hears(Exited(self.node.world.generation, exit), after_s)

    def timer(self, name: str, key: int = 0, after_s: float = 1.0) -> list[Action]:
        return self.hears(TimerFired(name, key), after_s)

    def raises(self, rank: int, headline: str = "ValueError: bad", distributed: bool = False) -> Raised:
        return Raised(rank, 0, self.now_s + 1.0, headline, headline, "train.py:7", distributed=distributed)


def every(actions: list[Action], kind: type[A]) -> list[A]:
    return [action for action in actions if isinstance(action, kind)]


def the(actions: list[Action], kind: type[A]) -> A:
    (found,) = every(actions, kind)
    return found


def told(actions: list[Action]) -> list[protocol.ToCoordinator]:
    return [tell.message for tell in every(actions, Tell)]


def the_told(actions: list[Action], kind: type[A]) -> A:
    (found,) = [message for message in told(actions) if isinstance(message, kind)]
    return found


def blamed(actions: list[Action]) -> list[tuple[int | None, str]]:
    return [(cause.rank, cause.headline) for cause in the_told(actions, protocol.Down).causes]


def preparing() -> Story:
    return Story()


def idle() -> Story:
    story = Story()
    story.hears(HelpersReady())
    story.meets()
    return story


def running() -> Story:
    return Story().runs()


def stopping() -> Story:
    """Rank 0 has failed, rank 1 is being stopped."""
    story = running()
    story.ends(0, 1, at_s=story.now_s + 0.5)
    return story


def between() -> Story:
    """The first world has failed and is down."""
    story = stopping()
    story.ends(1, -signal.SIGTERM)
    return story


def without_helpers() -> Story:
    story = running()
    story.hears(HelpersLost(ZYGOTE))
    return story
