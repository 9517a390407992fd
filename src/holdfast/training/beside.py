"""Whether there can be two of this process for a moment.

One that has used a GPU takes hundreds of milliseconds to die. Whoever has its place next waits for that, unless there
is nothing that both could want: the GPUs of a machine are used alike, and what survives is like what died.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat

import torch

from holdfast import linux

_PORTS = "/proc/sys/net/ipv4/ip_local_port_range"
LOOKS_AT = 10  # steps
_CONTEXT_BYTES = 1 << 30  # what CUDA takes for itself, with room to spare


class Beside:
    """Looks while all is well: a GPU that a process is just dying on answers late."""

    def __init__(self) -> None:
        self._steps = 0
        self.looked = False  # in this world
        self._free = self._reserved = 0  # of its memory, and by this process

    def begin_world(self) -> None:
        self._steps = self._free = 0
        self.looked = False

    def step(self) -> None:
        """By then a process has what it will have."""
        self._steps += 1
        self.looked = self._steps >= LOOKS_AT
        if self.looked and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            with contextlib.suppress(OSError, RuntimeError):
                if not holds_alone():
                    self._free, self._reserved = torch.cuda.mem_get_info()[0], torch.cuda.memory_reserved()

    @property
    def possible(self) -> bool:
        """Without a GPU a process is gone at once, and there is nothing to be won."""
        if not self._free:
            return False
        grown = torch.cuda.memory_reserved() - self._reserved
        return self._free - grown >= torch.cuda.max_memory_reserved() + _CONTEXT_BYTES


def holds_alone() -> bool:
    """Whether it listens at a port that was chosen and not given by the system, or has a file locked for itself."""
    low, high = map(int, linux.read(_PORTS).split())
    ports = filter(None, map(_listens_at, linux.open_descriptors()))
    if any(not low <= port <= high for port in ports):
        return True
    return any(_is_own_lock(line.split()) for line in linux.read("/proc/locks").splitlines())


def _listens_at(fd: int) -> int:
    """A port; 0: at none."""
    with contextlib.suppress(OSError):
        if stat.S_ISSOCK(os.fstat(fd).st_mode):
            with socket.socket(fileno=os.dup(fd)) as found:
                listens = found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                if listens and found.family in (socket.AF_INET, socket.AF_INET6):
                    return int(found.getsockname()[1])
    return 0


def _is_own_lock(fields: list[str]) -> bool:
    """As the kernel lists them: `1: FLOCK ADVISORY WRITE 4711 08:01:123 0 EOF`. A file in memory that has no name
    (00:01) is nobody else's."""
    return len(fields) > 5 and fields[3:5] == ["WRITE", str(os.getpid())] and not fields[5].startswith("00:01:")
