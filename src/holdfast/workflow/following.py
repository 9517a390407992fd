"""Look on while a workflow runs, from another process: what a task prints, and how all of it stands."""

from __future__ import annotations

import contextlib
import os
import select
import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from holdfast import linux
from holdfast.workflow import deciding, homes
from holdfast.workflow.record import LOCAL, Record
from holdfast.workflow.standing import ENDED, PREPARING, QUEUED

ELSEWHERE_S = 1.0  # how often is looked at what other machines write: they wake nobody here
PIECE_BYTES = 1024 * 1024


class Watch:
    """Wakes who waits when something in the workflow's folder has changed, or its runner has ended."""

    def __init__(self, folder: Path, often: bool) -> None:
        self._often = often
        self._folder = folder
        self._watched: set[Path] = set()
        self._changes: linux.Changes | None = None
        with contextlib.suppress(OSError):  # this user watches too much already
            self._changes = linux.Changes()
        self.add(folder)

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: object, trace: TracebackType | None) -> None:
        if self._changes is not None:
            self._changes.close()

    def add(self, folder: Path) -> None:
        if folder not in self._watched and self._changes is not None:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # it comes with the next life
                self._changes.add(str(folder))
                self._watched.add(folder)

    def wait(self, at_most_s: float | None = None) -> None:
        if self._often or self._changes is None:
            at_most_s = min(ELSEWHERE_S, at_most_s or ELSEWHERE_S)
        poll = select.poll()
        if self._changes is not None:
            poll.register(self._changes.fd, select.POLLIN)
        runner = _opened(homes.runner(self._folder)) if not homes.elsewhere(self._folder) else None
        try:
            if runner is not None:
                poll.register(runner, select.POLLIN)
            poll.poll(None if at_most_s is None else at_most_s * 1000)
        finally:
            if runner is not None:
                os.close(runner)
        if self._changes is not None:
            self._changes.forget()


def _opened(pid: int | None) -> int | None:
    try:
        return os.pidfd_open(pid) if pid is not None else None
    except OSError:
        return None  # it is gone by now, or on another machine


class Printed:
    """What one life of a task prints, so far as it was not shown."""

    def __init__(self, life: Path) -> None:
        self._streams: list[tuple[Path, BinaryIO]] = [
            (life / "stdout", sys.stdout.buffer),
            (life / "stderr", sys.stderr.buffer),
        ]
        self._shown = [0, 0]

    def show(self) -> None:
        for at, (path, out) in enumerate(self._streams):
            with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
                file.seek(self._shown[at])
                while piece := file.read(PIECE_BYTES):
                    out.write(piece)
                    out.flush()
                    self._shown[at] += len(piece)


def follow(folder: Path, task: str, attempt: int | None, say: Callable[[str], None]) -> None:
    """Until the task has ended; with `attempt`, until that life has. Nothing is missed: how it stands is read before
    what it has printed, and the folder is watched before both."""
    record = homes.read(folder)
    number = attempt or record.standing.tasks[task].attempt
    with Watch(folder, often=record.submitted.backend != LOCAL) as watch:
        printed: Printed | None = None
        while True:
            runner = homes.runner(folder)
            record = homes.read(folder)  # after that: one that has ended well has said so by then
            at = record.standing.tasks[task]
            if number and (at.attempt > number or at.state not in (QUEUED, PREPARING)):
                watch.add(life := folder / "tasks" / task / str(number))
                printed = printed or Printed(life)
                printed.show()
            if at.attempt > number and attempt is None:
                if number:
                    say(f"{task} is begun anew, attempt {at.attempt} on {at.node or 'a node to come'}")
                number, printed = at.attempt, None
                continue
            if at.attempt > number or at.state in ENDED:
                return
            if runner is None and _is_left(record, folder / "tasks" / task / str(number)):
                say(f"its runner is gone; go on with: holdfast workflow resume {record.id}")
                return
            watch.wait()


def _is_left(record: Record, life: Path) -> bool:
    """It has ended, or never begun, and there is nobody to do what comes next."""
    begun, ended = ("pid", "exit") if record.submitted.backend == LOCAL else ("node", "ended.json")
    return (life / ended).exists() or not (life / begun).exists()


def follow_table(folder: Path, draw: Callable[[Record], None], again_s: float | None) -> Record:
    """Until all of it is over, or nobody runs it."""
    with Watch(folder, often=homes.read(folder).submitted.backend != LOCAL) as watch:
        while True:
            runner = homes.runner(folder)
            draw(record := homes.read(folder))
            if runner is None or deciding.is_over(record.standing):
                return record
            watch.wait(again_s)
