"""This process's place in its job: which rank it is, its beacon, and its line to the agent."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable

import msgspec

from holdfast import linux
from holdfast.wire import messages
from holdfast.worker import stacks
from holdfast.worker.beacon import Beacon
from holdfast.worker.seat import Seat

moved: list[Callable[[], None]] = []  # to be called when this process has another place than before

VARIABLE = "HOLDFAST_PLACE"  # for programs that were started by exec: rank, generation, slot and the two descriptors


GONE_S = 15.0  # longer than the agent waits before it gives this machine up


class Place:
    """The descriptors stay their owner's. Without a seat there is no other place after this one."""

    def __init__(
        self, rank: int, generation: int, slot: int, report_fd: int, beacon_fd: int, seat: Seat | None = None
    ) -> None:
        self.seat = seat
        self.rank = rank
        self.generation = generation
        self.slot = slot
        self.failed = False  # whether its program has ended by an exception
        self._after: tuple[int, ...] = ()
        self._socket = socket.socket(fileno=os.dup(report_fd))
        self._identity = _identity(report_fd)
        self.beacon = Beacon(beacon_fd, slot, generation, self._poke)

    def move(self, request: messages.ForkWorker, fds: list[int]) -> None:
        """This process has another place from now on, in another world."""
        report_fd, beacon_fd, stacks_fd, *stdio = fds
        take_streams(request, stdio)
        os.environ.update(request.env)
        linux.set_title(request.title)
        stacks.install(stacks_fd)
        self._socket.close()
        self._socket = socket.socket(fileno=report_fd)
        self._identity = _identity(report_fd)
        self.rank, self.generation, self.slot = request.rank, request.generation, request.slot
        self.beacon.move(beacon_fd, request.slot, request.generation)
        os.close(beacon_fd)
        self._after = request.after
        for call in moved:
            call()

    def wait_for_others_end(self) -> None:
        """Those whose place this is hold what the program may want: ports, locks, a GPU's memory."""
        linux.wait_for_end(self._after, GONE_S)
        self._after = ()

    def report(self, report: messages.Report, flags: int = 0) -> bool:
        """Tell the agent. It may be gone, or far behind; neither is a reason to fail a rank. And the program may have
        closed all descriptors it does not know, so that this one is now a file of its own."""
        with contextlib.suppress(OSError):
            if _identity(self._socket.fileno()) == self._identity:
                self._socket.send(msgspec.msgpack.encode(report), flags)
                return True
        return False

    def _poke(self) -> None:
        """A rank never waits for its agent here. Where there is no room for this, the agent looks at all ranks once it
        has read what is there."""
        self.report(messages.Poke(self.rank, self.generation), socket.MSG_DONTWAIT)


def take_streams(request: messages.ForkWorker, stdio: list[int]) -> None:
    for target, fd in zip(request.stdio, stdio, strict=True):
        os.dup2(fd, target)
        os.close(fd)


_current: Place | None = None
_looked = False


def take(place: Place) -> None:
    """Called once, as the rank begins. A child of it is not the rank."""
    global _current, _looked
    _current, _looked = place, True
    os.register_at_fork(after_in_child=_leave)


def current() -> Place | None:
    """None outside of `holdfast run`, and in children of a rank."""
    global _looked
    if not _looked:
        _looked = True
        if (text := os.environ.get(VARIABLE)) is not None:
            with contextlib.suppress(OSError, ValueError):  # closed on the way, or another program's
                rank, generation, slot, report_fd, beacon_fd = map(int, text.split(":"))
                if _is_free(beacon_fd, slot):
                    take(Place(rank, generation, slot, report_fd, beacon_fd))
    return _current


def _is_free(fd: int, slot: int) -> bool:
    """Whether no process has this place yet: a program's children inherit the variable too."""
    from holdfast.worker.beacon import AREA_BYTES, OWNER

    if not os.readlink(f"/proc/self/fd/{fd}").startswith("/memfd:holdfast-beacon"):
        return False
    return int.from_bytes(os.pread(fd, 8, slot * AREA_BYTES + 8 * OWNER), "little") == 0


def _leave() -> None:
    global _current
    _current = None


def _identity(fd: int) -> tuple[int, int]:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino
