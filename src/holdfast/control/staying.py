"""Ranks that stay: they leave a world that is over, and are ranks of the next one, in the same process."""

from __future__ import annotations

import signal

from holdfast.control import protocol
from holdfast.control.acts import Action, Bequeathed, Leave, Left, Signal, Started, Stays, Stumbled, Timer
from holdfast.control.causes import Cause, Kind
from holdfast.control.standing import Phase, Standing

LEAVE_S = 5.0  # a rank that has not left its world by then is killed, and its place taken by another process
# A collective that fails has a reason, and whoever sees that says so first. If nobody does, it is a reason of its own.
STUMBLE_S = 1.0
TRIES = 2  # worlds of ranks that stayed, none of which came to a step; then all are started anew
LEAST_S = 30.0  # such a world may take so long to its first step, or LONGER times what it takes to start anew
LONGER = 3.0
# How long after SIGKILL a process may take to go before the node ends without it. Only one in an uninterruptible
# system call, state D, takes more than a moment, and it holds what a successor would need.
ABANDON_S = 10.0
ABANDON_WAITS = 5  # counted and not timed: a machine that slept has not waited


class Staying(Standing):
    """What a node decides about them."""

    stayed = False  # some of this world's ranks were in an earlier one
    leavers: frozenset[int] = frozenset()  # ranks of it that were told to leave it
    hindered = ""  # why some cannot
    tries = 0
    idle = ""  # that this world came to no step in time
    stumbles: tuple[Cause, ...] = ()
    started_at_s = 0.0
    start_s = 0.0  # what it takes from there to the first step of all

    def _begin_world(self) -> None:
        self.stayed, self.staying, self.outdated = self.staying and not self.outdated, False, False
        self.tries = self.tries + 1 if self.stayed else 0
        self.stays, self.left, self.stumbles, self.anew, self.all_stay = frozenset(), (), (), "", False
        self.as_they_are, self.idle = False, ""
        self.leavers, self.abandons, self.replaced, self.hindered = frozenset(), False, frozenset(), ""

    def _is_up(self, now_s: float, started: Started) -> list[Action]:
        """All ranks have a process."""
        self.started_at_s = now_s
        return [Timer("rejoin", started.generation, self._rejoin_s)] if self.stayed else []

    def _has_stepped(self) -> None:
        """All ranks have."""
        self.tries = 0
        if not self.stayed:
            self.start_s = max(self.start_s, self.stepped_at_s - self.started_at_s)

    @property
    def _rejoin_s(self) -> float:
        return max(LEAST_S, LONGER * self.start_s)

    # -- leaving ------------------------------------------------------------------------------------------------------

    def _stops(self, signum: int, why: str, drain: bool = False) -> list[Action]:
        """Those that can stay leave a world that is over, the others end. `drain`: at a boundary, all of them."""
        assert self.world is not None
        self.all_stay = self.all_stay or self.stays >= self.live
        if drain and self.stayed:
            self.tries = max(0, self.tries - 1)  # nothing is wrong with this world, stepped or not
        leaves = self.live & self.stays if self._may_stay and self.tries < TRIES else frozenset()
        self.leavers |= leaves
        if self.hung and self.stays:
            self.anew = "who hangs cannot be told to leave"
        elif self.tries >= TRIES and self.stays:
            self.anew = self.idle or f"ranks that stayed came to no step in {TRIES} worlds"
        elif not leaves and self._may_stay:
            self.anew = self.hindered
        actions: list[Action] = []
        if leaves:
            actions.append(Leave(tuple(sorted(leaves)), why, drain))
        if leaves and not drain:
            actions.append(Timer("leave", self.world.generation, LEAVE_S))
        if ends := self.live - leaves:
            self.sent |= {signum}
            actions.append(Signal(tuple(sorted(ends)), signum, why, drain))
        if ends or drain:
            actions.append(Timer("grace", self.world.generation, self.grace_s))
        return actions

    @property
    def _may_stay(self) -> bool:
        return self.over is None and self.stop_signal is None and not self.hung

    def _misses_boundary(self, rank: int, headline: str) -> list[Action]:
        assert self.world is not None
        why = f"rank {rank} failed while all were to end: {headline}"
        return [*self._tell(protocol.Failing(self.world.generation, why)), *self._give_up_drain(why)]

    def _give_up_drain(self, why: str) -> list[Action]:
        """A boundary needs all ranks. Once one has failed, the others would wait for it until the grace is over."""
        if not self.draining:
            return []
        self.draining = False
        # The time that they have does not begin anew.
        return [act for act in self._stops(signal.SIGTERM, why) if not isinstance(act, Timer) or act.name != "grace"]

    def _grace_is_over(self) -> list[Action]:
        """Who ends is killed. Who stays is in a long step: it leaves without a boundary, and keeps its state."""
        assert self.world is not None
        leaves = self.live & self.leavers if self._may_stay else frozenset()
        actions: list[Action] = []
        if leaves and self.draining:
            self.draining = False
            why = f"no boundary came within {self.grace_s:g} s"
            actions += [
                Leave(tuple(sorted(leaves)), why),
                Timer("leave", self.world.generation, LEAVE_S),
            ]
        return actions + self._kill(self.live - leaves, f"still there {self.grace_s:g} s after being told to stop")

    def _kill_late(self) -> list[Action]:
        late = self.live & self.leavers
        self.replaced |= late
        return self._kill(late, f"still in its world {LEAVE_S:g} s after being told to leave it")

    def _bequeathed(self, event: Bequeathed) -> list[Action]:
        if event.rank not in self.live or self.phase is not Phase.STOPPING:
            return []
        self.replaced |= {event.rank}
        why = "it cannot leave its world"
        why += ", and has left its state to whoever takes its place" if event.left else "; its shards are in a snapshot"
        return self._kill(frozenset({event.rank}), why)

    def _kill(self, ranks: frozenset[int], why: str) -> list[Action]:
        """Whom that does not end is waited for, but not for ever."""
        assert self.world is not None
        if not ranks:
            return []
        self.sent |= {signal.SIGKILL}
        waiting, self.abandons, self.waits = self.abandons, True, 0
        killed: list[Action] = [Signal(tuple(sorted(ranks)), signal.SIGKILL, why)]
        if not waiting:
            killed.append(Timer("abandon", self.world.generation, ABANDON_S / ABANDON_WAITS))
        return killed

    def _stays(self, event: Stays) -> None:
        self.stays -= {event.rank}
        self.hindered = event.why or self.hindered
        self.as_they_are = self.as_they_are or event.as_it_is
        if event.stays:
            self.stays |= {event.rank} & self.live

    def _left(self, event: Left) -> bool:
        """Whether it was the last of its world to go."""
        if event.rank not in self.live or self.phase is not Phase.STOPPING:
            return False
        self.live -= {event.rank}
        self.left += (event,)
        self.staying = True
        if event.steps:
            self.tries = 0  # that it has stepped may not have been heard of before its world was over
        return not self.live

    def _stumbled(self, event: Stumbled) -> list[Action]:
        if event.rank not in self.live:
            return []
        if self.phase is not Phase.RUNNING:
            ends = self.draining and event.rank not in self.leavers  # who leaves has been told already
            return self._misses_boundary(event.rank, event.headline) if ends else []
        first = not self.stumbles
        self.stumbles += (Cause(Kind.BACKEND, event.headline, event.at_s, rank=event.rank),)
        return [Timer("stumble", event.generation, STUMBLE_S)] if first else []
