"""How a node stands: what it knows of its coordinator and of its ranks, and how it tells the one of the other."""

from __future__ import annotations

import math
import signal
from enum import StrEnum

import msgspec

from holdfast.control import protocol, stacks
from holdfast.control.acts import Action, Finish, HangUp, Lease, Left, Tell, Timer
from holdfast.control.causes import Cause, RankExit
from holdfast.control.hangs import Mode
from holdfast.control.membership import BEATS
from holdfast.control.stacks import Group
from holdfast.control.worlds import World


class Phase(StrEnum):
    PREPARING = "preparing"  # the helpers are starting
    IDLE = "idle"  # a spare, or between two worlds
    RUNNING = "running"
    STOPPING = "stopping"
    DONE = "done"


class Standing:
    """The half of a node that speaks with its coordinator. The other half runs ranks."""

    def __init__(
        self,
        hello: protocol.Hello,
        grace_s: float,
        join_timeout_s: float = math.inf,
        close_timeout_s: float = 30.0,
        beat_s: float = 0.5,
        hang_mode: Mode = Mode.RESTART,
        hang_signal: int = signal.SIGKILL,
    ) -> None:
        self.hello = hello
        self.grace_s = grace_s
        self.hang_mode = hang_mode
        self.hang_signal = hang_signal
        self.join_timeout_s = join_timeout_s
        self.close_timeout_s = close_timeout_s
        self.beat_s = beat_s
        self.phase = Phase.PREPARING
        self.helpers = False  # there is a zygote to fork from
        self.contact = False
        self.greeted = False  # since this contact
        self.greeted_at_s = 0.0
        self.welcomed = False  # since this contact
        self.contacts = 0  # and losses of it, so that an old timer is known as such
        self.missed = 0  # beats without an answer
        self.term = -1
        self.arrival = -1
        self.generation = -1  # the newest that this node was told of
        self.restarts = 0
        self.job_id = ""
        self.world: World | None = None  # the last one that was run here
        self.pending: World | None = None  # waits until the old ranks are gone and helpers are there
        self.live: frozenset[int] = frozenset()
        self.undead: dict[tuple[int, int], int] = {}  # generation and rank, ended and not gone yet: waits for that
        self.stepped: frozenset[int] = frozenset()
        self.stepped_at_s = 0.0
        self.exits: tuple[RankExit, ...] = ()
        self.stays: frozenset[int] = frozenset()  # ranks of this world that can
        self.left: tuple[Left, ...] = ()  # those that have
        self.staying = False  # some have left the last world, and wait
        self.outdated = False  # there was another one since
        self.all_stay = False  # all ranks of this world could, when they were told to stop
        self.anew = ""  # why those that could do so do not
        self.replaced: frozenset[int] = frozenset()  # ranks that did not get out, and are killed
        self.as_they_are = False  # some can, but in a world of the same size only
        self.standby = 0  # processes that have started, and wait
        self.causes: tuple[Cause, ...] = ()  # of ours, not of a rank
        self.failing = ""
        self.hung = False  # so the ranks' stacks are wanted
        self.dumping = False  # they are being written; the ranks are stopped when they are
        self.groups: tuple[Group, ...] = ()
        self.learned = ""  # the timeouts that ranks have agreed on
        self.request: protocol.Request | None = None  # of one of this world's ranks
        self.sent: frozenset[int] = frozenset()  # signals that this world's ranks were sent
        self.draining = False  # they were asked to end at a boundary
        self.stop_sent_at_s = 0.0
        self.stop_signal: int | None = None  # this node was told to end
        self.lost_steps: int | None = None  # known from the beacons of ranks that died with their zygote
        self.steps = 0  # in worlds that have ended
        self.over: Finish | None = None  # how to finish once the ranks are gone
        self.fit = True
        self.waits = 0  # since SIGKILL
        self.abandons = False  # who is not gone by then is given up
        self.opened = self.closed = (-1, 0)  # generation and number of the last incident that this node heard of
        self.failed_at_s = 0.0  # when that began

    # -- contact ------------------------------------------------------------------------------------------------------

    def _wait_for_contact(self) -> list[Action]:
        if math.isinf(self.join_timeout_s):
            return []
        return [Timer("contact", self.contacts, self.close_timeout_s if self._succeeded else self.join_timeout_s)]

    def _set_beat(self) -> list[Action]:
        return [] if math.isinf(self.join_timeout_s) else [Timer("beat", self.contacts, self.beat_s)]

    def _beat(self, now_s: float) -> list[Action]:
        """Missed answers are counted, not timed, as the coordinator does with beats."""
        self.missed += self.greeted  # before that nothing was said that could be answered
        if self.missed > BEATS:
            return [HangUp("it has been silent")]
        return [*self._tell(protocol.Beat(now_s, self._running)), *self._set_beat()]

    def _lease(self, said_s: float) -> list[Action]:
        if math.isinf(self.join_timeout_s) or self.phase is Phase.STOPPING:
            return []
        return [Lease(said_s + self.join_timeout_s)]

    def _tell(self, message: protocol.ToCoordinator) -> list[Action]:
        """What is not heard now is told with the next greeting, which has all that still matters."""
        return [Tell(message)] if self.contact and self.greeted else []

    def _greet(self, now_s: float) -> list[Action]:
        if not self.contact or self.greeted or (not self.helpers and self.generation < 0):
            return []
        self.greeted, self.greeted_at_s = True, now_s
        hello = msgspec.structs.replace(
            self.hello,
            arrival=self.arrival,
            term=self.term,
            generation=self.generation,
            restarts=self.restarts,
            running=self._running,
            ready=self.helpers,
            learned=self.learned if len(self.learned) <= protocol.MAX_LEARNED else "",
            asks=self.request,
            job_id=self.job_id,
            staying=self._has_ranks_to_be,
            opened=self.opened,
            failed_at_s=self.failed_at_s,
            now_s=now_s,
        )
        return [Tell(hello), *self._report(now_s)]

    def _report(self, now_s: float) -> list[Action]:
        """How the last world stands here."""
        leaving = self._tell(protocol.Leaving(self.stop_signal)) if self.stop_signal is not None else []
        if not self.live:
            told = self.generation >= 0 and not (self.world is None and self.pending)
            return leaving + self._tell(self._end_of_world(now_s)) if told else leaving
        assert self.world is not None
        generation = self.world.generation
        if self.failing:
            return leaving + self._tell(protocol.Failing(generation, self.failing, self.hung))
        if self._all_stepped:
            return leaving + self._tell(protocol.Stepped(generation, self.stepped_at_s, now_s, self._all_stay))
        return leaving

    def _end_of_world(self, now_s: float) -> protocol.Done | protocol.Down:
        if self.pending is None and (self.world is None or self.world.generation < self.generation):
            # It never ran here, and never will.
            return protocol.Down(self.generation, now_s, ready=self.helpers, staying=self._has_ranks_to_be)
        assert self.world is not None
        if self._succeeded:
            return protocol.Done(self.world.generation, self._world_steps())
        causes = (*self.causes, *(exit.cause() for exit in self.exits if exit.is_failure))
        return protocol.Down(
            self.world.generation,
            now_s,
            protocol.trimmed(tuple(sorted(causes, key=lambda cause: cause.failed_at_s))),
            self._world_steps(),
            ready=self.helpers,
            fit=self.fit,
            base=max((*(exit.base for exit in self.exits), *(left.base for left in self.left)), default=0),
            groups=stacks.trimmed(self.groups),
            staying=self._has_ranks_to_be,
            stay=len(self.left),
            stays=self.all_stay,
            anew=self.anew,
            replaced=len(self.replaced),
            as_they_are=self.as_they_are,
        )

    # -- what is known ------------------------------------------------------------------------------------------------

    @property
    def _running(self) -> int:
        """The generation that has ranks here, or will have as soon as there are helpers."""
        if self.world is not None and self.live:
            return self.world.generation
        return self.pending.generation if self.pending is not None else -1

    def _is_running(self, generation: int) -> bool:
        return self.phase is Phase.RUNNING and self.world is not None and self.world.generation == generation

    @property
    def trains(self) -> bool:
        """All ranks have stepped, and the world is not over."""
        return self.phase is Phase.RUNNING and self._all_stepped

    @property
    def _all_stepped(self) -> bool:
        return self.world is not None and len(self.stepped) == self.world.local_size

    @property
    def _has_ranks_to_be(self) -> bool:
        return self.staying or self.standby > 0

    @property
    def _all_stay(self) -> bool:
        return self.stays >= self.live

    @property
    def _succeeded(self) -> bool:
        """The last world's ranks have all ended here, and each with 0."""
        if self.world is None or self.live or self.causes or self.failing or self.sent:
            return False
        return len(self.exits) == self.world.local_size and all(exit.status == 0 for exit in self.exits)

    def _world_steps(self) -> int | None:
        """The most that any rank of the last world has done; None where that cannot be seen."""
        found = [*(exit.steps for exit in self.exits), *(left.steps for left in self.left)]
        seen = [steps for steps in found if steps is not None]
        if self.lost_steps is not None:
            seen.append(self.lost_steps)
        return max(seen, default=None)
