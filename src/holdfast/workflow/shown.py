"""What a runner shows while it runs: a table that is written over on a terminal, a line for each change elsewhere."""

from __future__ import annotations

import asyncio
import os
import sys

from holdfast.workflow import table
from holdfast.workflow.record import Record
from holdfast.workflow.standing import FAILED, TaskStands

DRAW_S = 0.1  # at most so often; and soon enough for a person
AGE_S = 1.0  # how long ago the last checkpoint was is told anew


class Screen:
    """The table on a terminal, which it never scrolls: of more tasks than there are lines, those that matter most."""

    def __init__(self) -> None:
        self._lines = 0
        self._seen: dict[str, tuple[str, int]] = {}
        self._changed: dict[str, int] = {}  # a number that is larger for who changed later
        self._count = 0

    def draw(self, record: Record) -> None:
        width, lines = size()
        for name, at in record.standing.tasks.items():
            if self._seen.get(name) != (at.state, at.attempt):
                self._seen[name] = at.state, at.attempt
                self._count += 1
                self._changed[name] = self._count
        table = self._text(record, lines - 1, width).split("\n")  # the cursor has a line, too
        back = f"\x1b[{self._lines}F" if self._lines else ""
        # Line by line: a screen that is wiped flickers, and some terminals keep what was on it.
        sys.stdout.write(back + "".join(f"{line}\x1b[K\n" for line in table) + "\x1b[J")
        sys.stdout.flush()
        self._lines = len(table)

    def _text(self, record: Record, lines: int, width: int) -> str:
        tasks = record.standing.tasks
        if len(tasks) + 1 <= lines:
            return table.text(record, width)
        ranked = sorted(tasks, key=lambda name: self._rank(name, tasks[name]), reverse=True)
        room = max(1, lines - 2)  # for the columns' names, and those that are left out
        left_out = table.counted(tasks[name].state for name in ranked[room:])
        more = f"... and {len(tasks) - room} more: {left_out}"
        return table.text(record, width, set(ranked[:room])) + "\n" + table.cut(more, width)

    def _rank(self, name: str, at: TaskStands) -> tuple[bool, int]:
        return at.state == FAILED or at.rescheduled > 0, self._changed[name]

    def clear(self) -> None:
        if self._lines:
            sys.stdout.write(f"\x1b[{self._lines}F\x1b[J")
        self._lines = 0


def size() -> tuple[int, int]:
    """Of the terminal: columns and lines. Some say nothing of it."""
    found = os.get_terminal_size(sys.stdout.fileno())
    return found.columns or 80, found.lines or 24


class Shown:
    def __init__(self, record: Record, quiet: bool, word: str) -> None:
        """Its methods are called in the runner's loop, but for `end`."""
        self._record, self._quiet = record, quiet
        self._screen = Screen() if sys.stdout.isatty() and not quiet else None
        self._due: asyncio.TimerHandle | None = None
        self._before: dict[str, tuple[str, int]] = {}
        if not quiet:
            self._print(f"{record.id} {word}; holdfast workflow status {record.id} shows how it stands")

    def changed(self) -> None:
        if self._screen is not None:
            self._draw_within(DRAW_S)
            return
        for name, at in self._record.standing.tasks.items():
            if not self._quiet and self._before.get(name) != (at.state, at.attempt):
                self._before[name] = at.state, at.attempt
                if at.attempt:
                    where = f" on {at.node}" if at.node else ""
                    why = f": {at.why}" if at.why else ""
                    self._print(f"{name} {at.state}{where}, attempt {at.attempt}{why}")

    def say(self, text: str) -> None:
        if self._screen is not None:
            self._screen.clear()
            self._print("", end="")
        try:
            print(f"holdfast: {text}", file=sys.stderr, flush=True)
        except OSError:
            _forget(2)
        if self._screen is not None:
            self._draw()

    def end(self) -> None:
        if self._due is not None:
            self._due.cancel()
        if self._screen is not None:
            self._draw()
        if not self._quiet:
            self._print(table.summary(self._record))

    def _draw_within(self, wait_s: float) -> None:
        loop = asyncio.get_running_loop()
        if self._due is not None:
            if self._due.when() <= loop.time() + wait_s:
                return
            self._due.cancel()
        self._due = loop.call_later(wait_s, self._drawn)

    def _drawn(self) -> None:
        self._due = None
        self._draw()
        if any(at.checkpoint_at for at in self._record.standing.tasks.values()):
            self._draw_within(AGE_S)

    def _draw(self) -> None:
        assert self._screen is not None
        try:
            self._screen.draw(self._record)
        except OSError:
            self._blind()

    def _print(self, text: str, end: str = "\n") -> None:
        try:
            print(text, end=end, flush=True)
        except OSError:
            self._blind()

    def _blind(self) -> None:
        """Nobody reads it any more. That is no reason to leave the tasks alone."""
        self._quiet, self._screen = True, None
        _forget(1)


def _forget(fd: int) -> None:
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, fd)
    os.close(null)
