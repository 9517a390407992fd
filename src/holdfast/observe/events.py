"""The event log: one line of JSON for everything that happened, in the order it did."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import msgspec


class Event(msgspec.Struct, frozen=True):
    """Something that happened. `at_s` counts on a monotonic clock from the start of the job; `time` is for people."""

    name: str
    at_s: float
    time: str
    data: dict[str, Any]


Sink = Callable[[Event], None]


class EventLog:
    """Writes events to `events.jsonl` and hands them to sinks. A sink that fails is told of once and left out."""

    def __init__(self, path: str | None, sinks: list[Sink], complain: Callable[[str], None]) -> None:
        self._start_s = time.monotonic()
        self._sinks = list(sinks)
        self._complain = complain
        self._complained = False
        self._fd = -1
        if path is not None:
            try:
                self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            except OSError as failure:
                self._lose(failure)

    def emit(self, name: str, **data: Any) -> None:
        event = Event(name, round(time.monotonic() - self._start_s, 6), iso(time.time()), data)
        if self._fd >= 0:
            line = msgspec.json.encode(event) + b"\n"
            try:
                os.write(self._fd, line)
            except OSError as failure:
                self._lose(failure)
        for sink in list(self._sinks):
            try:
                sink(event)
            except Exception as failure:
                self._sinks.remove(sink)
                self._complain(f"the event sink {sink!r} failed and gets no more events: {failure!r}")

    def _lose(self, failure: OSError) -> None:
        if not self._complained:
            self._complained = True
            self._complain(f"cannot write events.jsonl: {failure.strerror}; training goes on without it")

    def close(self) -> None:
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                os.close(self._fd)
            self._fd = -1


def iso(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
