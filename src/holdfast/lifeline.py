"""A rank's lifeline: a lock in shared memory that it takes as it begins, and holds as long as it lives.

The kernel gives a dying process's locks away before it takes the process apart, which for one with gigabytes in memory
is a matter of tens of milliseconds, and with a GPU of hundreds. Its connections are closed only after that, and its
parent told last of all. So whoever waits for this lock hears of a death first.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
from typing import NamedTuple

from holdfast import linux

BYTES = 64  # glibc's lock has 40 of them, or 48
_SHARED = _ROBUST = 1
_EXITING = 0x4  # PF_EXITING: it will not run another instruction of its own

_libc = ctypes.CDLL(None)
_Lock = ctypes.c_byte * BYTES
_held: list[Lifeline] = []  # a thread's locks know each other: the memory of one that is held must not go


class Lifeline:
    """At `offset` of memory that both ends have. Held by one thread, the rank's first."""

    def __init__(self, memory: memoryview, offset: int) -> None:
        self._lock = _Lock.from_buffer(memory, offset)

    def make(self) -> None:
        """Once, before anybody has it."""
        kind = ctypes.create_string_buffer(BYTES)
        _libc.pthread_mutexattr_init(kind)
        _libc.pthread_mutexattr_setpshared(kind, _SHARED)
        _libc.pthread_mutexattr_setrobust(kind, _ROBUST)
        _libc.pthread_mutex_init(self._lock, kind)

    def take(self) -> None:
        if _libc.pthread_mutex_trylock(self._lock) == 0:
            _held.append(self)

    def let_go(self) -> None:
        if self in _held and _libc.pthread_mutex_unlock(self._lock) == 0:
            _held.remove(self)

    def wait(self) -> bool:
        """Until nobody holds it; whether that is because its holder died."""
        died: bool = _libc.pthread_mutex_lock(self._lock) == errno.EOWNERDEAD
        _libc.pthread_mutex_unlock(self._lock)
        return died


class Dying(NamedTuple):
    status: int  # exit code, or minus the signal
    parent: int


def look_at(pid: int) -> Dying | None:
    """How a process that is being taken apart has ended. None: it is not, or cannot be seen."""
    with contextlib.suppress(OSError, IndexError, ValueError):
        fields = linux.read(f"/proc/{pid}/stat").rpartition(")")[2].split()
        parent, flags, ended = int(fields[1]), int(fields[6]), int(fields[49])
        if flags & _EXITING:
            return Dying(-(ended & 0x7F) if ended & 0x7F else ended >> 8, parent)
    return None
