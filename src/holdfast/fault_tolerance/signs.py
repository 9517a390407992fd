"""A rank's heartbeats and sections, left in its beacon page without a system call.

A time is written before whatever refers to it, and where a deadline may have come nearer, the agent is woken last.
"""

from __future__ import annotations

import time

from holdfast.fault_tolerance import table
from holdfast.fault_tolerance.monitoring import Monitoring
from holdfast.fault_tolerance.timeouts import RankMonitorClientError, check_name
from holdfast.worker.beacon import END, END_MARK, HEARTBEAT_AT, MAGIC, MARK, OPEN, OUTSIDE_AT, SECTION_S, WAKE_AT


class Signs(Monitoring):
    """The part of `RankMonitorClient` that is called all the time."""

    __slots__ = ()

    def send_heartbeat(self) -> None:
        words = self._words
        if words[MAGIC] != MARK or words[END] != END_MARK:
            return self._unfit()
        times = self._times
        last_s = self._last
        self._last = times[HEARTBEAT_AT] = now_s = time.monotonic()
        if now_s - last_s > self._gap:
            if last_s:
                self._gap = now_s - last_s
            else:
                self._first = now_s - self._since
        if now_s + self._beat_limit < times[WAKE_AT]:
            self._poke()
        return None

    def start_section(self, section: str) -> None:
        words = self._words
        if words[MAGIC] != MARK or words[END] != END_MARK:
            return self._unfit()
        try:
            index = self._index[section]
        except (KeyError, TypeError):
            index = self._know(section)
        times, opened = self._times, self._opened
        if section in opened:
            raise RankMonitorClientError(f"section {section!r} is open already; end it before it is started again")
        now_s = time.monotonic()
        if not opened:
            outside_s = now_s - times[OUTSIDE_AT]
            if outside_s > self._outside and times[OUTSIDE_AT]:
                self._outside = outside_s
        opened[section] = now_s
        times[OUTSIDE_AT] = 0.0
        times[index] = now_s
        words[OPEN] = len(opened)
        limit_s = times[index + 1]
        if limit_s and now_s + limit_s < times[WAKE_AT]:
            self._poke()
        return None

    def end_section(self, section: str) -> None:
        words = self._words
        if words[MAGIC] != MARK or words[END] != END_MARK:
            return self._unfit()
        opened, times = self._opened, self._times
        try:
            since_s = opened.pop(section)
        except (KeyError, TypeError):
            raise RankMonitorClientError(f"section {section!r} is not open; start it before it is ended") from None
        now_s = time.monotonic()
        took_s = now_s - since_s
        times[SECTION_S] += took_s
        if took_s > self._longest.get(section, 0.0):
            self._longest[section] = took_s
        if opened:
            times[self._index[section]] = 0.0
            words[OPEN] = len(opened)
            return None
        times[OUTSIDE_AT] = now_s
        times[self._index[section]] = 0.0
        words[OPEN] = 0
        if opened:  # by another thread, in between
            words[OPEN] = len(opened)
            times[OUTSIDE_AT] = 0.0
        if now_s + self._outside_limit < times[WAKE_AT]:
            self._poke()
        return None

    def end_all_sections(self) -> None:
        if self._is_fit():
            for name in list(self._opened):
                self.end_section(name)

    def _know(self, section: str) -> int:
        check_name(section)
        place = self._place
        assert place is not None
        table.add(place, [section])
        return self._index[section]
