"""`holdfast top`: a running job on the terminal, drawn anew whenever something happens."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
import termios
import time
import tty
from collections.abc import Iterator, Sequence

from holdfast import linux
from holdfast.cli.flags import open_parser
from holdfast.observe import find, screen, screen_top
from holdfast.observe.screen_job import Watched

ASK_S = 1.0  # what the record does not have: how far the ranks are at this moment
DRAW_S = 0.25  # at most so often
PLAIN_S = 5.0  # between two lines, where there is no screen
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main(argv: Sequence[str]) -> int:
    parser = open_parser("holdfast top", "Watch a job until you press q. Not on a terminal: a line now and then.")
    parser.add_argument(
        "job", nargs="?", default="", metavar="JOB", help="as for holdfast status; nothing: the one that runs here"
    )
    args = parser.parse_args(list(argv))
    try:
        found = find.find(args.job)
        job = Watched(found)
    except find.NotFound as failure:
        return find.complain("top", failure)
    except OSError as failure:
        return find.complain("top", find.NotFound(f"cannot read {found.record}: {failure.strerror}"))
    is_screen = sys.stdin.isatty() and sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"
    try:
        with contextlib.closing(job), _changes(job) as changes:
            return _live(job, changes) if is_screen else _plain(job, changes)
    except KeyboardInterrupt:
        return 130
    except OSError as failure:  # the terminal is gone, or the record
        return find.complain("top", find.NotFound(f"cannot go on: {failure.strerror or failure}"))


@contextlib.contextmanager
def _changes(job: Watched) -> Iterator[list[int]]:
    """What to wait for beside the time: a descriptor that tells when the record grows, if there can be one. Of a file
    on another machine it tells nothing; then the time has to do."""
    try:
        changes = linux.Changes()
    except OSError:
        yield []
        return
    try:
        with contextlib.suppress(OSError):
            changes.add(str(job.found.record.parent))
        yield [changes.fd]
    finally:
        changes.close()


def _forget(fd: int) -> None:
    with contextlib.suppress(BlockingIOError):
        while os.read(fd, 65536):
            pass


# -- without a screen -------------------------------------------------------------------------------------------------


def _plain(job: Watched, changes: list[int]) -> int:
    while True:
        job.look()
        screen.show([screen_top.line(job)])
        until_s = time.monotonic() + PLAIN_S
        while not job.is_over and (left_s := until_s - time.monotonic()) > 0:
            for fd in select.select(changes, [], [], left_s)[0]:
                _forget(fd)
                job.read()
        if job.state.ended is not None or job.is_lost:
            screen.show([screen_top.line(job)])
            return job.exit_code


# -- with one ---------------------------------------------------------------------------------------------------------


class Terminal:
    """The other screen of the terminal, which leaves what was there as it was, and keys without a newline."""

    def __init__(self) -> None:
        self._before = termios.tcgetattr(0)
        self._plain = "NO_COLOR" in os.environ
        self._encoding = sys.stdout.encoding or "utf-8"

    def enter(self) -> None:
        tty.setcbreak(0)
        self._write("\x1b[?1049h\x1b[?25l\x1b[2J")

    def leave(self) -> None:
        with contextlib.suppress(OSError):
            self._write("\x1b[0m\x1b[H\x1b[J\x1b[?25h\x1b[?1049l")
        with contextlib.suppress(termios.error):
            termios.tcsetattr(0, termios.TCSADRAIN, self._before)

    def draw(self, job: Watched) -> None:
        size = os.get_terminal_size(1)
        columns, lines = size.columns or 80, size.lines or 24
        # The last column stays empty: what a terminal does after a character there differs.
        rows = [self._styled(row) for row in screen_top.frame(job, columns - 1, lines)]
        # Line by line: a screen that is wiped flickers.
        self._write("\x1b[H" + "\n".join(f"{row}\x1b[K" for row in rows) + "\x1b[J")

    def _styled(self, row: screen_top.Row) -> str:
        is_colour = row.style in (screen_top.BAD, screen_top.WARN)
        return f"\x1b[{row.style}m{row.text}\x1b[0m" if row.style and not (is_colour and self._plain) else row.text

    def _write(self, text: str) -> None:
        left = text.encode(self._encoding, "backslashreplace")
        while left:
            left = left[os.write(1, left) :]


class Signals:
    """As bytes to read, each the number of one."""

    def __init__(self, *wanted: signal.Signals) -> None:
        self._read, self._written = socket.socketpair()
        self._read.setblocking(False)
        self._written.setblocking(False)
        self.fd = self._read.fileno()
        self._old_fd = signal.set_wakeup_fd(self._written.fileno())
        self._old = {each: signal.signal(each, lambda *_: None) for each in wanted}

    def come(self) -> bytes:
        try:
            return self._read.recv(4096)
        except BlockingIOError:
            return b""

    def close(self) -> None:
        for each, handler in self._old.items():
            signal.signal(each, handler)
        signal.set_wakeup_fd(self._old_fd)
        self._read.close()
        self._written.close()


def _live(job: Watched, changes: list[int]) -> int:
    terminal = Terminal()
    signals = Signals(*ENDING, signal.SIGWINCH, signal.SIGTSTP)
    try:
        terminal.enter()
        _watch(job, changes, terminal, signals)
    finally:
        terminal.leave()
        signals.close()
    return 0


def _watch(job: Watched, changes: list[int], terminal: Terminal, signals: Signals) -> None:
    asked_s = drawn_s = 0.0
    is_new = True
    while True:
        now_s = time.monotonic()
        if now_s >= asked_s + ASK_S:
            job.look()
            asked_s, is_new = now_s, True
        if is_new and now_s >= drawn_s + DRAW_S:
            terminal.draw(job)
            drawn_s, is_new = now_s, False
        due_s = min(asked_s + ASK_S, drawn_s + DRAW_S) if is_new else asked_s + ASK_S
        ready, _, _ = select.select([0, signals.fd, *changes], [], [], max(0.0, due_s - time.monotonic()))
        if 0 in ready and os.read(0, 1024) in (b"", b"q", b"Q", b"\x03"):
            return
        for fd in changes:
            if fd in ready:
                _forget(fd)
                is_new |= job.read()
        if signals.fd in ready:
            come = signals.come()
            if any(each in come for each in ENDING):
                return
            if signal.SIGTSTP in come:
                terminal.leave()
                os.kill(os.getpid(), signal.SIGSTOP)
                terminal.enter()
            drawn_s, is_new = 0.0, True
