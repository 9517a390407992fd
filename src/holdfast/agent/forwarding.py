"""This node's record, line by line, to the coordinator, whose record is that of the whole job."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

from holdfast.control import protocol
from holdfast.observe.events import EventLog

PAUSE_S = 0.05  # between two messages: a long record must not keep beats waiting
MAX_LINE = 100_000  # a longer one stays here


class Forwarder:
    """Begins with what the coordinator lacks: all of it, if that is a new one."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, events: EventLog, tell: Callable[[protocol.Recorded], None]
    ) -> None:
        self._loop = loop
        self._events = events
        self._tell = tell
        self._waiting: deque[tuple[int, bytes]] = deque()
        self._timer: asyncio.Handle | None = None

    def begin(self, recorded: int) -> None:
        """The line to a coordinator is there, and this is what it has."""
        self.end()
        self._waiting.extend(self._events.since(recorded))
        self._events.forward = self._forward
        self._send()

    def end(self) -> None:
        self._events.forward = None
        self._waiting.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _forward(self, seq: int, line: bytes) -> None:
        self._waiting.append((seq, line))
        if self._timer is None:
            self._timer = self._loop.call_soon(self._send)

    def _send(self) -> None:
        self._timer = None
        lines: list[bytes] = []
        size, last = 0, -1
        while self._waiting and size < protocol.MAX_RECORDED:
            last, line = self._waiting.popleft()
            if len(line) <= MAX_LINE:
                lines.append(line)
                size += len(line)
        if last >= 0:
            self._tell(protocol.Recorded(time.monotonic() - self._events.start_s, last, tuple(lines)))
        if self._waiting:
            self._timer = self._loop.call_later(PAUSE_S, self._send)
