"""The record of a job as it grows, for many watchers: what changed is worked out once, and each is sent the same bytes.

Every change has a number. A watcher that knows the newest it has seen gets those after it; one that was away for too
long, or that knew another server, has to begin anew.
"""

from __future__ import annotations

import contextlib
import gzip
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec

from holdfast.dashboard import rows
from holdfast.dashboard.acting import Agent
from holdfast.dashboard.rows import Row
from holdfast.observe.record import NAME, IncidentNoted, Noted, Progress, Reader
from holdfast.observe.state import Point, State

TICK_S = 0.25  # so often a watcher is told at most
PACE_S = 1.0  # and so often how far each rank is
STAND_S = 2.0  # between two looks whether the agent is there
KEPT = 240  # changes: a minute of a busy job

T = TypeVar("T")

_encode = msgspec.json.Encoder().encode


class _Told:
    """What the watchers know."""

    def __init__(self) -> None:
        self.head: dict[str, Any] = {}
        self.ranks: dict[int, Row] = {}
        self.nodes: dict[str, Row] = {}
        self.worlds: dict[int, Row] = {}
        self.incidents: dict[int, Row] = {}
        self.lost_s = 0.0
        self.paces: tuple[int, float] = (0, 0.0)  # how many points, and the time of the last
        self.losses: tuple[int, float] = (0, 0.0)


class Live:
    """`update` is for one thread; all else is for any."""

    def __init__(self, run_dir: str, record: str | None = None) -> None:
        """Raises OSError where there is no record."""
        self.agent = Agent(run_dir)
        self.watchers = 0
        self._reader = Reader(record or os.path.join(run_dir, NAME))
        self._state = State()
        self._told = _Told()
        self._epoch = secrets.token_hex(4)
        self._number = 0
        self._changes: deque[tuple[int, bytes]] = deque(maxlen=KEPT)
        self._changed = threading.Condition()
        self._touched: set[int] = set()  # generations
        self._incidents: set[int] = set()
        self._paced_s = self._stood_s = -PACE_S - STAND_S
        self._standing = ""  # not known yet
        self._there_s: float | None = None  # when the agent was last not known to be gone, by the wall clock
        self._snapshot: tuple[tuple[int, int], bytes, bytes] | None = None
        self._closed = False

    # -- one thread ---------------------------------------------------------------------------------------------------

    def update(self) -> bool:
        """Take what was written since the last time, and tell the watchers. True when the job has ended."""
        looked_s = time.time()
        now = self._progress()
        with self._changed:
            for noted in self._reader:
                self._take(noted)
            if self._standing not in ("", "gone"):
                self._there_s = looked_s
            if now is not None:
                self._take(Noted(now, self._now_s(), "", "", -1))
            if change := self._change():
                self._number += 1
                self._changes.append((self._number, _encode(change)))
                self._changed.notify_all()
            return self._state.ended is not None

    def close(self, wait_s: float) -> None:
        """Watchers get what they have not got yet, and go; those who do not are left after so long."""
        with contextlib.suppress(OSError):
            self.update()
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self.watchers == 0, wait_s)

    def _progress(self) -> Progress | None:
        """Between two lines of the record, and only if somebody looks. Asked without the lock: it may take a while."""
        now_s = time.monotonic()
        if self._state.ended is not None or not self._state.lead:
            return None
        if now_s - self._stood_s >= STAND_S:
            self._stood_s = now_s
            self._standing = self.agent.standing(self._state)
        if not self.watchers or self._standing != "here" or now_s - self._paced_s < PACE_S:
            return None
        return self.agent.progress(self._state)

    def _take(self, noted: Noted) -> None:
        what = noted.what
        if isinstance(what, IncidentNoted):
            self._incidents.add(what.number)
        if isinstance(generation := getattr(what, "generation", None), int):
            self._touched.add(generation)
        self._state.take(noted)

    def _change(self) -> dict[str, Any]:
        """What the watchers do not know yet; nothing in most moments."""
        state, told = self._state, self._told
        change: dict[str, Any] = {}
        if incidents := self._changed_incidents():
            change["incidents"] = incidents
        if worlds := self._changed_worlds():
            change["worlds"] = worlds
        nodes = {name: rows.of_node(node) for name, node in state.nodes.items()}
        if nodes != told.nodes:
            told.nodes, change["nodes"] = nodes, list(nodes.values())
        ranks = {number: rows.of_rank(rank) for number, rank in state.ranks.items()}
        if ranks.keys() != told.ranks.keys():
            change["all_ranks"] = [ranks[number] for number in sorted(ranks)]
        elif changed := [row for number, row in ranks.items() if row != told.ranks[number]]:
            change["ranks"] = changed
        told.ranks = ranks
        now_s = time.monotonic()
        if self._touched and (now_s - self._paced_s >= PACE_S or "all_ranks" in change):
            self._paced_s = now_s
            change["pace"] = self._pace()
            self._touched = set()
        for name, points in (("paces", state.paces), ("losses", state.losses)):
            if new := _new_points(points, getattr(told, name)):
                setattr(told, name, (len(points), points[-1].at_s))
                change[name] = new
        head = rows.head(state, self._standing or "elsewhere", self._now_s(), told.lost_s)
        if {**head, "now_s": 0} != {**told.head, "now_s": 0}:
            told.head, change["head"] = head, head
        return change

    def _changed_incidents(self) -> list[Row]:
        changed: list[Row] = []
        for number in sorted(self._incidents):
            if (incident := self._state.incidents.get(number)) is None:
                continue
            row, before = rows.of_incident(self._state, incident), self._told.incidents.get(number)
            if row != before:
                self._told.lost_s += row[7] - (before[7] if before is not None else 0.0)
                self._told.incidents[number] = row
                changed.append(row)
        self._incidents = set()
        return changed

    def _changed_worlds(self) -> list[Row]:
        """Only those that a line spoke of, and the last two: the end of one is the start of the next."""
        changed: list[Row] = []
        worlds = self._state.worlds
        oldest = min(self._touched, default=0)
        for at in range(len(worlds) - 1, -1, -1):
            if at < len(worlds) - 2 and (not self._touched or worlds[at].generation < oldest):
                break
            row = rows.of_world(worlds[at])
            if row != self._told.worlds.get(row[0]):
                changed.append(row)
        changed.reverse()  # by order of generation, as the page keeps them
        self._told.worlds |= {row[0]: row for row in changed}
        return changed

    def _pace(self) -> list[list[Any]]:
        """Of all ranks in order: steps, what one takes, what of it the rank needs for itself, and in sections."""
        ranks = [self._state.ranks[number] for number in sorted(self._state.ranks)]
        sections = [rank.section_s for rank in ranks]
        own = [rank.own_s for rank in ranks]
        return [[rank.steps for rank in ranks], [rank.step_s for rank in ranks], own, sections if any(sections) else []]

    def _now_s(self) -> float:
        """As the record counts. Another machine's clock says nothing here."""
        if self._state.ended is not None or self._standing != "here" or not self._state.clock_s:
            return self._state.at_s
        return max(self._state.at_s, time.monotonic() - self._state.clock_s)

    # -- any thread ---------------------------------------------------------------------------------------------------

    def snapshot(self) -> tuple[bytes, bytes]:
        """All that the page shows, as JSON, and the same compressed."""
        with self._changed:
            now = self._number, int(self._now_s())
            if self._snapshot is None or self._snapshot[0] != now:
                told = self._told
                body = _encode(
                    {
                        "id": self._id(self._number),
                        "head": {**told.head, "now_s": round(self._now_s(), 2)},
                        "nodes": list(told.nodes.values()),
                        "all_ranks": [told.ranks[number] for number in sorted(told.ranks)],
                        "pace": self._pace(),
                        "worlds": list(told.worlds.values()),
                        "incidents": list(told.incidents.values()),
                        "paces": [True, [rows.of_point(point) for point in self._state.paces]],
                        "losses": [True, [rows.of_point(point) for point in self._state.losses]],
                    }
                )
                self._snapshot = now, body, gzip.compress(body, 1)
            return self._snapshot[1:]

    @property
    def state(self) -> State:
        """For those who look at single values; it changes under their hands."""
        return self._state

    @property
    def closed(self) -> bool:
        return self._closed

    def watch(self, most: int) -> bool:
        """False where so many watch already."""
        with self._changed:
            if self.watchers >= most:
                return False
            self.watchers += 1
            return True

    def unwatch(self) -> None:
        with self._changed:
            self.watchers -= 1
            self._changed.notify_all()

    def incident(self, number: int) -> bytes | None:
        with self._changed:
            found = self._state.incidents.get(number)
            return None if found is None else _encode(rows.whole(self._state, found))

    def measure(self, use: Callable[[State, float | None, bool], T]) -> T:
        """With the state, to which nothing is written meanwhile, until when the job has run at least, by the wall
        clock, and whether its agent is gone. What was read until then is all in the state: its end cannot be earlier,
        so no counter goes back."""
        with self._changed:
            return use(self._state, self._there_s, self._standing == "gone")

    def follow(self, since: str) -> int | None:
        """The number that a watcher knows; None if it has to begin anew."""
        epoch, _, number = since.partition("-")
        with self._changed:
            if epoch != self._epoch or not number.isascii() or not number.isdecimal():
                return None
            oldest = self._changes[0][0] - 1 if self._changes else self._number
            return int(number) if oldest <= int(number) <= self._number else None

    def after(self, number: int, wait_s: float) -> list[tuple[str, int, bytes]] | None:
        """The changes after that one, each with its name and number, as soon as there are any; none after so long.
        None: there will be no more, or so many were missed that the watcher has to begin anew."""
        with self._changed:
            self._changed.wait_for(lambda: self._number > number or self._closed, wait_s)
            found = [(self._id(at), at, change) for at, change in self._changes if at > number]
            if (not found and self._closed) or (found and found[0][1] > number + 1):
                return None
            return found

    def _id(self, number: int) -> str:
        return f"{self._epoch}-{number}"


def _new_points(points: Sequence[Point], told: tuple[int, float]) -> list[Any]:
    """Whether they replace all that were told before, and the points; nothing where there are none."""
    count, last_s = told
    if len(points) == count and (not points or points[-1].at_s == last_s):
        return []
    if count and len(points) > count and points[count - 1].at_s == last_s:
        return [False, [rows.of_point(point) for point in points[count:]]]
    return [True, [rows.of_point(point) for point in points]]
