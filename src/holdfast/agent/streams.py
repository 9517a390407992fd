"""A rank's output on its way through the agent: to the console, to its log, and its last lines into memory.

All bytes, never decoded: what a rank writes comes out unchanged. Standard error always comes through here, so that a
failure can be explained by what the rank said last.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import sys
import termios
import tty
from collections import deque
from collections.abc import Callable, Sequence

from holdfast.agent.console import Console

READ_BYTES = 1 << 18
PIPE_BYTES = 1 << 20
TAIL_LINES = 40
MAX_LINE_BYTES = 1 << 16


class LogFile:
    """A file that may become unwritable: it says so once, counts what is lost, and goes on when there is room."""

    def __init__(self, path: str, complain: Callable[[str], None]) -> None:
        self.path = path
        self._complain = complain
        self._lost_bytes = 0
        self._complained = False
        self._fd = -1
        self._closed = False
        self.write(b"")

    def write(self, data: bytes) -> None:
        if self._closed:
            return
        view = memoryview(data)
        try:
            if self._fd < 0:
                self._fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            if self._lost_bytes:
                os.write(self._fd, b"\n[holdfast: %d bytes are missing here]\n" % self._lost_bytes)
                self._lost_bytes = 0
            while view:
                view = view[os.write(self._fd, view) :]
        except OSError as failure:
            self._lose(len(view), failure)

    def close(self) -> None:
        self._closed = True
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                os.close(self._fd)
            self._fd = -1

    def _lose(self, size: int, failure: OSError) -> None:
        self._lost_bytes += size
        if not self._complained:
            self._complained = True
            hint = "free some space" if failure.errno == errno.ENOSPC else "see its directory"
            self._complain(f"cannot write {self.path}: {failure.strerror}; training goes on, {hint} to have logs again")


class Lines:
    """Whole lines out of chunks, for whoever needs them: prefixes, filters, the last lines."""

    def __init__(self, take: Callable[[bytes], None]) -> None:
        self._take = take
        self._rest = b""

    def feed(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._take(line + b"\n")
        if len(self._rest) > MAX_LINE_BYTES:
            self.flush()

    def flush(self) -> None:
        if self._rest:
            self._take(self._rest)
            self._rest = b""


class Tail:
    """The last lines, with progress bars (text that ends in a carriage return) kept only in their last form."""

    def __init__(self) -> None:
        self._lines: deque[bytes] = deque(maxlen=TAIL_LINES)

    def take(self, line: bytes) -> None:
        self._lines.append(line.rstrip(b"\r\n").rpartition(b"\r")[2][:2000])

    def text(self) -> tuple[str, ...]:
        lines = [line.decode(errors="replace").rstrip() for line in self._lines]
        while lines and not lines[0]:
            lines.pop(0)
        return tuple(lines)


class Stream:
    """The reading end of one rank's stdout or stderr."""

    def __init__(self, loop: asyncio.AbstractEventLoop, as_terminal: bool, like_fd: int) -> None:
        self._loop = loop
        self._fd, self.write_end = _open_terminal(like_fd) if as_terminal else _open_pipe()
        os.set_blocking(self._fd, False)
        self._sinks: list[Callable[[bytes], None]] = []
        self._lines: list[Lines] = []
        self._closers: list[Callable[[], None]] = []
        self._console: Console | None = None
        self._reading = False

    def to_console(self, console: Console, prefix: bytes) -> None:
        """Show on the console; line by line behind the prefix, or as it comes where there is none."""
        self._console = console
        if prefix:
            self._by_line(lambda line: console.write(prefix + (line if line.endswith(b"\n") else line + b"\n")))
        else:
            self._sinks.append(console.write)

    def to_file(self, file: LogFile) -> None:
        self._sinks.append(file.write)
        self._closers.append(file.close)

    def to_filtered(self, file: LogFile, prefix: bytes, filters: Sequence[bytes]) -> None:
        """Copy the lines in which any of the filters occurs. The file is shared and closed by its owner."""
        self._by_line(lambda line: file.write(prefix + line) if any(f in line for f in filters) else None)

    def to_tail(self, tail: Tail) -> None:
        self._by_line(tail.take)

    def start(self) -> None:
        """Begin to read; the other end belongs to the rank from now on."""
        os.close(self.write_end)
        self.write_end = -1
        self._resume()

    def drain(self) -> None:
        """Take what is there now, and no more: the rank has ended, but what it left running may write for ever."""
        there = fcntl.ioctl(self._fd, termios.FIONREAD, b"\0" * 4) if self._fd >= 0 else b""
        left = int.from_bytes(there, sys.byteorder)
        while left > 0 and self._fd >= 0 and (taken := self._read()):
            left -= taken
        for lines in self._lines:
            lines.flush()

    def close(self) -> None:
        if self.write_end >= 0:
            os.close(self.write_end)
            self.write_end = -1
        if self._fd >= 0:
            self.drain()
        self._close_read_end()
        for lines in self._lines:
            lines.flush()
        for close in self._closers:
            close()
        self._closers.clear()

    def _by_line(self, take: Callable[[bytes], None]) -> None:
        lines = Lines(take)
        self._lines.append(lines)
        self._sinks.append(lines.feed)

    def _resume(self) -> None:
        if self._fd >= 0 and not self._reading:
            self._reading = True
            self._loop.add_reader(self._fd, self._readable)

    def _pause(self) -> None:
        if self._reading:
            self._reading = False
            self._loop.remove_reader(self._fd)

    def _readable(self) -> None:
        if self._console is not None and self._console.is_full(self._resume):
            self._pause()
            return
        self._read()

    def _read(self) -> int:
        """One read; 0 when there is nothing, or nothing more."""
        try:
            data = os.read(self._fd, READ_BYTES)
        except BlockingIOError:
            return 0
        except OSError:  # EIO: a terminal whose last writer is gone
            data = b""
        if not data:
            self._close_read_end()
            return 0
        for sink in self._sinks:
            sink(data)
        return len(data)

    def _close_read_end(self) -> None:
        self._pause()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _open_pipe() -> tuple[int, int]:
    read_end, write_end = os.pipe2(os.O_CLOEXEC)
    with contextlib.suppress(OSError):  # over the user's quota for pipes; the default size works too
        fcntl.fcntl(write_end, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    return read_end, write_end


def _open_terminal(like_fd: int) -> tuple[int, int]:
    """A terminal that changes nothing on the way, so that progress bars and colours are as on the real one."""
    read_end, write_end = os.openpty()
    tty.setraw(write_end)
    with contextlib.suppress(OSError):
        size = fcntl.ioctl(like_fd, termios.TIOCGWINSZ, b"\0" * 8)
        fcntl.ioctl(write_end, termios.TIOCSWINSZ, size)
    return read_end, write_end
