"""Looks at what the local ranks are doing, in milliseconds and without their help."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
import weakref
from collections.abc import Sequence

import msgspec

from holdfast import linux
from holdfast.agent import native_stacks
from holdfast.control import places, stacks
from holdfast.worker.stacks import STACK_SIGNAL, is_complete

RANK_S = 0.5  # a rank answers in a millisecond; on a machine with ten times more to do than cores, in a hundred
WORKERS_S = 0.5  # as much, for all of a rank's
MAX_WORKERS = 8
MAX_DUMP_BYTES = 1 << 20
QUIET_S = 0.02  # after which a dump is taken for complete
QUIET_AT_END_S = 0.002  # and after a last line: a program may have one like it in the middle of its stack
COLD = "started cold"
GONE = "gone"


class Target(msgspec.Struct, frozen=True):
    rank: int
    pid: int
    fd: int  # the read end of its pipe, or -1 where it has no handler: the signal would kill it


class Dump(msgspec.Struct, frozen=True):
    """What one rank wrote, and what that means."""

    target: Target
    stack: stacks.Stack
    text: str = ""
    workers: tuple[tuple[int, str], ...] = ()  # by pid


async def take(targets: Sequence[Target], folder: str | None, native: bool = True) -> tuple[stacks.Stack, ...]:
    """The stacks of these ranks, all taken at the same time; also as files below `folder`. A rank that is stopped is
    stopped again afterwards. With `native`, and where py-spy is installed, the files get C frames too: seconds."""
    async with _turn():
        dumps = await asyncio.gather(*map(_look, targets))
    taken = tuple(dump.stack for dump in dumps)
    if folder is not None and _write(dumps, folder) and native:
        suspected = stacks.suspects(stacks.group(taken))
        first = sorted(targets, key=lambda target: target.rank not in suspected)
        await native_stacks.append({target.pid: _path(folder, target.rank) for target in first})
    return taken


_turns: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = weakref.WeakKeyDictionary()


def _turn() -> asyncio.Lock:
    """Two looks at once would read each other's pipes."""
    return _turns.setdefault(asyncio.get_running_loop(), asyncio.Lock())


async def _look(target: Target) -> Dump:
    rank, pid, fd = target.rank, target.pid, target.fd
    before = linux.state(pid)
    if before in ("", "Z", "X"):
        return Dump(target, stacks.Stack(rank, note=GONE))
    state = {"T": stacks.STOPPED, "t": stacks.DEBUGGED}.get(before, "")
    if fd < 0:
        return Dump(target, stacks.Stack(rank, state=state or _in_kernel(before, before), note=COLD))
    if before == "t":  # the signal would go to the debugger
        return Dump(target, stacks.Stack(rank, state=state, note=stacks.DEBUGGED))
    if not _listens(pid, fd):
        return Dump(target, stacks.Stack(rank, state=state, note="it closed our pipe or took our signal"))
    text = await _ask(pid, fd, RANK_S)
    after = linux.state(pid)
    state = state or _in_kernel(before, after)
    frames = stacks.main_frames(stacks.parse(text))
    note = "" if frames else stacks.ENDING if text else GONE if not after else f"no answer in {RANK_S:g} s"
    workers = await _look_at_workers(target) if places.waits_for_loader(frames) else ()
    loading = tuple(stacks.main_frames(stacks.parse(text)) for _, text in workers)
    return Dump(target, stacks.Stack(rank, frames, state, loading, note), text, workers)


def _in_kernel(before: str, after: str) -> str:
    """A rank that reads a file is there at times; one that does not get out again is stuck."""
    return stacks.IN_KERNEL if before == after == "D" else ""


async def _look_at_workers(target: Target) -> tuple[tuple[int, str], ...]:
    """One after the other, as they all write into their rank's pipe."""
    until_s = time.monotonic() + WORKERS_S
    found: list[tuple[int, str]] = []
    for pid in linux.descendants(target.pid):
        left_s = until_s - time.monotonic()
        if left_s <= 0 or len(found) == MAX_WORKERS:
            break
        if _listens(pid, target.fd) and (text := await _ask(pid, target.fd, left_s)):
            found.append((pid, text))
    return tuple(found)


def _listens(pid: int, fd: int) -> bool:
    """Whether a signal makes that process write to our pipe. It may have another program by now, which the signal would
    kill, or have closed what it did not know, so that the dump would go into a file of its own."""
    try:
        status = linux.read(f"/proc/{pid}/status")
        caught = next(line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:"))
        if not int(caught, 16) >> (STACK_SIGNAL - 1) & 1:
            return False
        pipe = os.readlink(f"/proc/self/fd/{fd}")
        return any(_link(f"/proc/{pid}/fd/{name}") == pipe for name in os.listdir(f"/proc/{pid}/fd"))
    except (OSError, StopIteration, ValueError, IndexError):
        return False


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


async def _ask(pid: int, fd: int, limit_s: float) -> str:
    """Make the process dump its threads, and read that."""
    _empty(fd)
    stopped = linux.state(pid) == "T"
    reading = _Reading(asyncio.get_running_loop(), fd, pid)
    try:
        linux.signal_all([pid], STACK_SIGNAL)
        if stopped:
            linux.signal_all([pid], signal.SIGCONT)  # our signal is before it: taken before anything else goes on
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(reading.done, limit_s)
    finally:
        if stopped:
            linux.signal_all([pid], signal.SIGSTOP)  # whoever stopped it had a reason
        reading.close()
    return bytes(reading.dump).decode(errors="replace")


def _empty(fd: int) -> None:
    """Of what came too late for an earlier look."""
    with contextlib.suppress(OSError):
        while os.read(fd, 1 << 16):
            pass


class _Reading:
    """One dump out of one pipe. It comes in hundreds of small writes."""

    def __init__(self, loop: asyncio.AbstractEventLoop, fd: int, pid: int) -> None:
        self._loop = loop
        self._fd, self._pid = fd, pid
        self._quiet: asyncio.TimerHandle | None = None
        self.dump = bytearray()
        self.done: asyncio.Future[None] = loop.create_future()
        loop.add_reader(fd, self._read)

    def _read(self) -> None:
        try:
            chunk = os.read(self._fd, 1 << 16)
        except BlockingIOError:
            return
        except OSError:
            chunk = b""
        self.dump += chunk
        if not chunk or len(self.dump) > MAX_DUMP_BYTES:
            self._loop.remove_reader(self._fd)
            self._finish()
            return
        self._wait()

    def _wait(self) -> None:
        if self._quiet is not None:
            self._quiet.cancel()
        if is_complete(bytes(self.dump[-1024:])):
            self._quiet = self._loop.call_later(QUIET_AT_END_S, self._finish)
        else:
            self._quiet = self._loop.call_later(QUIET_S, self._finish_or_wait)

    def _finish_or_wait(self) -> None:
        """One that is quiet in the middle may only have to wait for a core."""
        if linux.state(self._pid) in ("R", "D"):
            self._wait()
        else:
            self._finish()

    def _finish(self) -> None:
        if not self.done.done():
            self.done.set_result(None)

    def close(self) -> None:
        self._loop.remove_reader(self._fd)
        if self._quiet is not None:
            self._quiet.cancel()


# -- files ------------------------------------------------------------------------------------------------------------


def _write(dumps: Sequence[Dump], folder: str) -> bool:
    """A disk without room costs the files, not the look."""
    groups = stacks.group(dump.stack for dump in dumps)
    try:
        os.makedirs(folder, exist_ok=True)
        for dump in dumps:
            with open(_path(folder, dump.target.rank), "w", errors="replace") as file:
                file.write(_page(dump))
        with open(os.path.join(folder, "summary.txt"), "w", errors="replace") as file:
            file.write(stacks.report(groups, stacks.suspects(groups)))
    except OSError:
        return False
    return True


def _path(folder: str, rank: int) -> str:
    return os.path.join(folder, f"rank_{rank}.txt")


def _page(dump: Dump) -> str:
    said = [f"rank {dump.target.rank}", f"pid {dump.target.pid}", dump.stack.state, dump.stack.note]
    parts = [", ".join(filter(None, said)), "", dump.text.rstrip("\n")]
    for pid, text in dump.workers:
        parts += ["", f"-- data loader worker, pid {pid}", "", text.rstrip("\n")]
    return "\n".join(parts).rstrip("\n") + "\n"
