"""Where a coordinator's record is kept. Memory suffices for one node; a file outlives the agent that wrote it."""

from __future__ import annotations

import asyncio
import contextlib
import glob
import os
import time
from collections.abc import Awaitable, Callable
from typing import Protocol

import msgspec

from holdfast.control.membership import Record
from holdfast.control.restarts import History

NAME = "ledger"


class Ledger(Protocol):
    """The whole of what a coordinator wants of it."""

    @property
    def valid(self) -> bool:
        """Whether its holder may act at this very moment."""

    def write(self, record: Record) -> Awaitable[None] | None:
        """None where it is done at once. Raises `Deposed` if another coordinator has taken over."""

    def touch(self) -> None:
        """The coordinator lives, and what it wrote last still holds."""

    async def close(self, over: bool) -> None:
        """No more will be written; `over` if the job has ended, and nobody will ever want to read it."""


class Deposed(Exception):
    """There is a newer coordinator, and this one has to stop acting."""


class Memory:
    valid = True

    def write(self, record: Record) -> None:
        return None

    def touch(self) -> None:
        return None

    async def close(self, over: bool) -> None:
        return None


class File:
    """One file in the run directory, replaced as a whole and synced, so that it is the old record or the new one."""

    valid = True

    def __init__(self, path: str, complain: Callable[[str], None]) -> None:
        self.path = path
        self._complain = complain
        self._complained = False
        self._touching: asyncio.Future[None] | None = None

    def write(self, record: Record) -> Awaitable[None]:
        return asyncio.get_running_loop().run_in_executor(None, self._write, msgspec.msgpack.encode(record))

    def _write(self, data: bytes) -> None:
        try:
            with open(self.path + ".part", "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(self.path + ".part", self.path)
            folder = os.open(os.path.dirname(self.path), os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        except OSError as failure:
            # A full disk must not stop a job that trains; only the next life of this agent would miss it.
            if not self._complained:
                self._complained = True
                self._complain(f"cannot write {self.path}: {failure.strerror}; a restarted agent will not find it")

    def touch(self) -> None:
        """Show the next life of this agent how old the record is. The file may be on a network's disk: never wait."""
        if self._touching is None or self._touching.done():
            self._touching = asyncio.get_running_loop().run_in_executor(None, self._touch)

    def _touch(self) -> None:
        with contextlib.suppress(OSError):
            os.utime(self.path)

    async def close(self, over: bool) -> None:
        if over:
            with contextlib.suppress(OSError):
                os.unlink(self.path)


def find(pattern: str, run_id: str, within_s: float) -> Record | None:
    """The newest record of a job, if this user wrote it. Of one so old that all of its nodes must have given up since,
    only the numbers count: the next job of that name goes on from there."""
    found: list[Record] = []
    for path in glob.glob(pattern):
        try:
            with open(path, "rb") as file:
                status = os.fstat(file.fileno())
                if status.st_uid != os.geteuid():
                    continue
                record = msgspec.msgpack.decode(file.read(), type=Record)
                if time.time() - status.st_mtime > within_s:
                    record = Record(run_id, record.term, record.generation, History(record.history.limit))
        except (OSError, msgspec.MsgspecError):
            continue
        if record.run_id == run_id:
            found.append(record)
    return max(found, key=lambda record: (record.term, record.generation), default=None)
