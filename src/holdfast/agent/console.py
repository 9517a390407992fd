"""The user's terminal or pipe: written by a thread, so that a slow reader never stalls the agent."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable

# Above this much unread output the ranks that produce it are made to wait, as they would on the console itself.
HIGH_WATER_BYTES = 4 << 20
LOW_WATER_BYTES = 1 << 20


class Console:
    """One of the agent's own output streams. Chunks come out whole and in order."""

    def __init__(self, fd: int, loop: asyncio.AbstractEventLoop) -> None:
        self._fd = fd
        self._loop = loop
        self._chunks: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._wake = threading.Condition()
        self._closed = False
        self._broken = False
        self._thread: threading.Thread | None = None
        self._on_drained: list[Callable[[], None]] = []

    @property
    def is_terminal(self) -> bool:
        return os.isatty(self._fd)

    def write(self, data: bytes) -> None:
        with self._wake:
            if self._closed or self._broken or not data:
                return
            self._chunks.append(data)
            self._waiting_bytes += len(data)
            self._wake.notify()
        if self._thread is None:
            self._thread = threading.Thread(target=self._write_all, name=f"console-{self._fd}", daemon=True)
            self._thread.start()

    def is_full(self, when_drained: Callable[[], None]) -> bool:
        """Whether to hold back; if so, `when_drained` is called in the loop once there is room."""
        with self._wake:
            if self._waiting_bytes < HIGH_WATER_BYTES:
                return False
            self._on_drained.append(when_drained)
            return True

    def close(self) -> None:
        """Write what is left, and end."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        if self._thread is not None:
            self._thread.join()

    def _write_all(self) -> None:
        while True:
            with self._wake:
                while not self._chunks and not self._closed:
                    self._wake.wait()
                if not self._chunks:
                    return
                chunk = b"".join(self._chunks)
                self._chunks.clear()
            self._write(chunk)
            with self._wake:
                self._waiting_bytes -= len(chunk)
                drained = self._on_drained if self._waiting_bytes <= LOW_WATER_BYTES else []
                if drained:
                    self._on_drained = []
            for callback in drained:
                with contextlib.suppress(RuntimeError):  # the loop has ended
                    self._loop.call_soon_threadsafe(callback)

    def _write(self, chunk: bytes) -> None:
        view = memoryview(chunk)
        while view and not self._broken:
            try:
                view = view[os.write(self._fd, view) :]
            except BlockingIOError:
                # Somebody made the shared terminal non-blocking; wait until it takes more.
                import select

                select.select([], [self._fd], [])
            except OSError:
                self._broken = True  # the reader is gone; training goes on without it
