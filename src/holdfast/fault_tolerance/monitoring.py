"""Whether a rank is held to what it says about itself: since when, until when, and to which limits.

One comparison on the way of every call finds all that can be wrong with it. A client that may not write holds an empty
page, whose marks are not there, so that the fast path has to ask for nothing else.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import socket
import time
from collections.abc import Callable
from weakref import WeakSet

from holdfast.fault_tolerance import persistence, table
from holdfast.fault_tolerance.config import FaultToleranceConfig
from holdfast.fault_tolerance.timeouts import (
    HeartbeatTimeouts,
    Learned,
    RankInfo,
    RankMonitorClientError,
    SectionTimeouts,
)
from holdfast.worker import place as places
from holdfast.worker.beacon import (
    CLIENT_AT,
    END,
    END_MARK,
    FIRST_LIMIT,
    HEARTBEAT_AT,
    HEARTBEAT_LIMIT,
    MAGIC,
    MARK,
    OPEN,
    OUTSIDE_AT,
    OUTSIDE_LIMIT,
)

_NO_WORDS = memoryview(bytes(8 * (END + 1))).cast("Q")
_NO_TIMES = memoryview(bytes(8 * (END + 1))).cast("d")
_CHILD = "this is a child of the rank, not the rank; call it in the rank itself"
_clients: WeakSet[Monitoring] = WeakSet()


def _leave_all() -> None:
    for client in list(_clients):
        client._detach(_CHILD)


os.register_at_fork(after_in_child=_leave_all)


def _move_all() -> None:
    """The rank has a place in another world, and another page."""
    for client in list(_clients):
        client._move()


places.moved.append(_move_all)


@atexit.register
def _end_all() -> None:
    """What comes now, the interpreter's end, is not what the limits were made for."""
    for client in list(_clients):
        client.shutdown_workload_monitoring()


class Monitoring:
    """The part of `RankMonitorClient` that begins and ends it."""

    __slots__ = (
        *("cfg", "floor_s", "hb_timeouts", "rank_info", "section_timeouts", "__weakref__"),
        *("_required", "_place", "_why_not", "_learned", "_idle", "_index", "_opened", "_longest", "_words", "_times"),
        *("_poke", "_first", "_gap", "_outside", "_since", "_last", "_beat_limit", "_outside_limit"),
    )

    def __init__(self, *, required: bool = True) -> None:
        self.cfg: FaultToleranceConfig | None = None
        self.rank_info: RankInfo | None = None
        self.hb_timeouts = HeartbeatTimeouts()
        self.section_timeouts = SectionTimeouts()
        self.floor_s: float | None = None  # no limit is learned that is below it; None: a second
        self._required = required
        self._idle = False  # initialised, where there is nothing to do
        self._learned = Learned()
        self._place: places.Place | None = None
        self._poke: Callable[[], None] = lambda: None
        self._index: dict[str, int] = {}
        self._opened: dict[str, float] = {}  # since when; its length is the count, which no two threads can get wrong
        self._longest: dict[str, float] = {}
        self._first = self._gap = self._outside = self._since = self._last = 0.0
        self._beat_limit = self._outside_limit = math.inf
        self._detach("init_workload_monitoring() has not been called; call it first")

    @property
    def is_initialized(self) -> bool:
        return self._idle or self._words_are_ours

    def init_workload_monitoring(self, num_warmup_iters: int | None = None) -> None:
        """From here on this rank is held to what it says. `num_warmup_iters` is NVIDIA's, and has no effect."""
        if self.is_initialized:
            raise RankMonitorClientError("this client is initialized already; shut it down first")
        place = places.current()
        if place is None:
            self._init_outside()
            return
        beacon = place.beacon
        if not beacon.intact:
            raise _corrupt()
        if beacon.times[CLIENT_AT]:
            raise RankMonitorClientError("another client of this rank is initialized; use that one, or shut it down")
        self.cfg, inherited = persistence.unpack(beacon.config)
        self._learned = self._learned.over(inherited)
        self.rank_info = RankInfo(place.rank, int(os.environ.get("LOCAL_RANK", -1)), socket.gethostname(), os.getpid())
        self._place, self._poke, self._index = place, beacon.poke, table.of(place)
        self._opened, self._longest = {}, {}
        self._first = self._gap = self._outside = self._last = 0.0
        self._set_limits()
        times = beacon.times
        self._since = now_s = time.monotonic()
        times[HEARTBEAT_AT] = 0.0
        times[OUTSIDE_AT] = now_s
        times[CLIENT_AT] = now_s
        self._words, self._times = beacon.words, times
        _clients.add(self)
        first_s = times[FIRST_LIMIT] or math.inf
        beacon.poke_if_due(now_s + min(first_s, self._outside_limit))

    def _move(self) -> None:
        """What is open stays so."""
        if not self._words_are_ours or self._place is None:
            return
        opened = list(self._opened)
        self._detach("")
        table.tell_again(self._place)
        self.init_workload_monitoring()
        for name in opened:
            self.start_section(name)

    def start_section(self, section: str) -> None:
        raise NotImplementedError

    def _init_outside(self) -> None:
        self._not_a_rank()
        self.cfg = FaultToleranceConfig()
        self._set_limits()
        self._idle = True

    def _not_a_rank(self) -> None:
        if self._place is not None:
            raise RankMonitorClientError(_CHILD)
        if self._required:
            raise RankMonitorClientError(
                "this process is no rank of holdfast run; start it with that, or use RankMonitorClient(required=False)"
            )

    def shutdown_workload_monitoring(self) -> None:
        """What was learned is kept. Nothing is done where nothing was begun."""
        self._idle = False
        if not self._words_are_ours:
            return
        words, times = self._words, self._times
        self._detach("shutdown_workload_monitoring() has been called; call init_workload_monitoring() again")
        if words[MAGIC] == MARK and words[END] == END_MARK:
            times[CLIENT_AT] = times[OUTSIDE_AT] = 0.0
            for name in self._opened:
                times[self._index[name]] = 0.0
            words[OPEN] = 0
            times[HEARTBEAT_AT] = 0.0
        self._opened = {}
        self._poke()

    def __del__(self) -> None:
        # Nobody can send a heartbeat any more, so nobody may be held to one.
        with contextlib.suppress(Exception):
            self.shutdown_workload_monitoring()

    def _detach(self, why: str) -> None:
        self._words, self._times, self._why_not = _NO_WORDS, _NO_TIMES, why

    @property
    def _words_are_ours(self) -> bool:
        return self._words is not _NO_WORDS

    def _is_fit(self) -> bool:
        words = self._words
        if words[MAGIC] == MARK and words[END] == END_MARK:
            return True
        self._unfit()
        return False

    def _unfit(self) -> None:
        """A call that cannot be obeyed. Returns where it need not be."""
        if self._words_are_ours:
            raise _corrupt()
        if self._idle or (not self._required and not self._place and places.current() is None):
            return
        raise RankMonitorClientError(self._why_not)

    def _set_limits(self) -> None:
        """What was learned beats what was configured."""
        cfg, learned = self.cfg or FaultToleranceConfig(), self._learned
        initial_s, subsequent_s = learned.heartbeat or (cfg.first_heartbeat_s, cfg.rank_heartbeat_timeout)
        self.hb_timeouts = HeartbeatTimeouts(initial_s, subsequent_s, learned.heartbeat is not None)
        self.section_timeouts = SectionTimeouts(
            {**cfg.rank_section_timeouts, **learned.section},
            learned.out_of_section or cfg.rank_out_of_section_timeout,
            frozenset(learned.section),
            learned.out_of_section is not None,
        )
        self._beat_limit = subsequent_s or math.inf
        self._outside_limit = self.section_timeouts.out_of_section or math.inf
        if (place := self._place) is None:
            return
        limits = self.section_timeouts.section
        table.add(place, limits)
        times = place.beacon.times
        times[FIRST_LIMIT] = initial_s or 0.0
        times[HEARTBEAT_LIMIT] = subsequent_s or 0.0
        times[OUTSIDE_LIMIT] = self.section_timeouts.out_of_section or 0.0
        for name, index in self._index.items():
            times[index + 1] = limits.get(name) or 0.0


def _corrupt() -> RankMonitorClientError:
    return RankMonitorClientError(
        "the beacon page is corrupt and this rank is no longer watched; look for writes to memory that is not its own"
    )
