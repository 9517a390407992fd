"""Writing the record: each event is one line, written at once, and synced to the disk when that is asked for."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from holdfast.observe import record
from holdfast.observe.record import What

SYNC_S = 2.0  # so long a dead disk may hold up the end


class Event(msgspec.Struct, frozen=True):
    """Something that happened. `at_s` counts on a monotonic clock from the start of the job; `time` is for people."""

    name: str
    at_s: float
    time: str
    data: dict[str, Any]


class _Line(msgspec.Struct):
    v: int
    node: str
    seq: int
    name: str
    at_s: float
    time: str
    data: Any


Sink = Callable[[Event], None]

_MILLIS = tuple(f".{ms:03}Z" for ms in range(1000))
_encoder = msgspec.json.Encoder()
_foreign = msgspec.json.Decoder(record.Line)


class EventLog:
    """Writes events to `events.jsonl` and hands them to sinks. A sink that fails is told of once and left out. Nothing
    here ever fails a job."""

    def __init__(
        self, path: str | None, sinks: Sequence[Sink], complain: Callable[[str], None], node: str = ""
    ) -> None:
        self.start_s = time.monotonic()
        self.path = path
        self.forward: Callable[[int, bytes], None] | None = None  # each line, with its number
        self._node = node
        self._seq = -1
        self._sinks = list(sinks)
        self._complain = complain
        self._complained = False
        self._torn = False
        self._second, self._second_text = -1, ""
        self._syncing: threading.Thread | None = None
        self._sync_lock = threading.Lock()
        self._sync_asked = self._sync_runs = False
        self._fd = -1
        if path is not None:
            try:
                self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            except OSError as failure:
                self._lose(failure)

    def emit(self, what: What) -> bytes:
        """The line of it."""
        self._seq += 1
        at_s, told = int((time.monotonic() - self.start_s) * 1e6) / 1e6, self._time()  # round() is slow
        name = what.NAME
        line = _encoder.encode_lines((_Line(record.VERSION, self._node, self._seq, name, at_s, told, what),))
        self._write(line)
        if self.forward is not None:
            self.forward(self._seq, line)
        for sink in list(self._sinks):
            try:
                sink(Event(name, at_s, told, msgspec.to_builtins(what)))
            except Exception as failure:
                self._sinks.remove(sink)
                self._complain(f"the event sink {sink!r} failed and gets no more events: {failure!r}")
        return line

    def merge(self, lines: Sequence[bytes], later_s: float) -> None:
        """Lines of another node, whose times are that much earlier than on this one's clock."""
        for line in lines:
            with contextlib.suppress(msgspec.MsgspecError):
                found = _foreign.decode(line)
                moved = msgspec.structs.replace(found, at_s=round(found.at_s + later_s, 6))
                self._write(_encoder.encode_lines((moved,)))

    def since(self, seq: int) -> Iterator[tuple[int, bytes]]:
        """This node's own lines after that one, with their numbers, from the file."""
        if self.path is None:
            return
        with contextlib.suppress(OSError), open(self.path, "rb") as file:
            for line in file:
                with contextlib.suppress(msgspec.MsgspecError):
                    found = _foreign.decode(line)
                    if found.node == self._node and found.seq > seq:
                        yield found.seq, line

    def _time(self) -> str:
        now_s = time.time()
        second = int(now_s)
        if second != self._second:
            self._second, self._second_text = second, time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second))
        return self._second_text + _MILLIS[int((now_s - second) * 1000)]

    def _write(self, line: bytes) -> None:
        if self._fd < 0:
            return
        if self._torn:
            line = b"\n" + line  # what could not be written whole must not take the next one with it
        try:
            self._torn = os.write(self._fd, line) < len(line)
        except OSError as failure:
            self._lose(failure)

    def sync(self) -> None:
        """Beside the job: a slow disk must not keep a recovery waiting. One that is under way does not see what was
        written since: it is followed by another."""
        if self._fd < 0:
            return
        with self._sync_lock:
            self._sync_asked = True
            if self._sync_runs:
                return
            self._sync_runs = True
        self._syncing = threading.Thread(target=self._sync, daemon=True, name="holdfast-sync")
        self._syncing.start()

    def _sync(self) -> None:
        while True:
            with self._sync_lock:
                if not self._sync_asked:
                    self._sync_runs = False
                    return
                self._sync_asked = False
            with contextlib.suppress(OSError):
                os.fdatasync(self._fd)

    def _lose(self, failure: OSError) -> None:
        if not self._complained:
            self._complained = True
            self._complain(f"cannot write {record.NAME}: {failure.strerror}; training goes on without it")

    def close(self) -> None:
        if self._fd < 0:
            return
        self.sync()
        if self._syncing is not None:
            self._syncing.join(2 * SYNC_S)  # of one that is under way, and of the last
            if self._syncing.is_alive():
                return  # it needs the descriptor; the process is about to end
        with contextlib.suppress(OSError):
            os.close(self._fd)
        self._fd = -1


def iso(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
