"""What ranks of a world that could not leave it have left to the next one: see `holdfast.training.wills`."""

from __future__ import annotations

import contextlib
import os


class Will:
    """Of several the newest: two ranks of one world may be a step apart. It is kept until a later world has stepped,
    for that may fail before it has got so far."""

    def __init__(self) -> None:
        self._fd = self._step = self._generation = -1

    @property
    def path(self) -> str:
        """For those who are to read it; '' if there is none."""
        return f"/proc/{os.getpid()}/fd/{self._fd}" if self._fd >= 0 else ""

    def keep(self, pid: int, fd: int, generation: int, step: int) -> None:
        """A file of that process, and the step that is in it."""
        if self._fd >= 0 and (generation, step) <= (self._generation, self._step):
            return
        with contextlib.suppress(OSError):
            found = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
            self.forget()
            self._fd, self._generation, self._step = found, generation, step

    def world_over(self, generation: int, stepped: bool) -> None:
        """Ranks that have stepped have gone on from it, or from what is newer."""
        if stepped and generation != self._generation:
            self.forget()

    def forget(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
