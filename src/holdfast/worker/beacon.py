"""A rank's beacon: one page of shared memory in which it leaves its progress, without a system call.

The agent makes one anonymous file (memfd) per world, a page for each of its ranks, and reads a page whenever it wants
to know. Every field is eight aligned bytes with a single writer, so a reader never sees half of one. All are the rank's
but the lease: the agent says there until when the rank may step, even if the agent should be stopped meanwhile.
"""

from __future__ import annotations

import mmap
import os
import time

PAGE_BYTES = 4096
_MAGIC = 0x484F4C4446415354  # HOLDFAST

# Positions of the eight-byte fields.
_MAGIC_AT, _GENERATION_AT, _STEPS_AT, _STEP_DONE_AT, _LEASE_AT = range(5)


def make(ranks: int) -> int:
    """A new file of pages. It has no name, so nothing can be left of it."""
    fd = os.memfd_create("holdfast-beacon", os.MFD_CLOEXEC)
    os.ftruncate(fd, PAGE_BYTES * ranks)
    return fd


class Beacon:
    """The writing end, in the rank."""

    def __init__(self, fd: int, slot: int, generation: int) -> None:
        page = mmap.mmap(fd, PAGE_BYTES, offset=slot * PAGE_BYTES)
        self._words = memoryview(page).cast("Q")
        self._times = memoryview(page).cast("d")
        self._words[_GENERATION_AT] = generation
        self._words[_MAGIC_AT] = _MAGIC

    def step_done(self) -> int:
        """Count a step; returns how many there are."""
        steps = self._words[_STEPS_AT] + 1
        self._words[_STEPS_AT] = steps
        self._times[_STEP_DONE_AT] = time.monotonic()
        return steps

    @property
    def has_lease(self) -> bool:
        return self._times[_LEASE_AT] != 0.0

    @property
    def lease_is_over(self) -> bool:
        return time.monotonic() > self._times[_LEASE_AT]


class Page:
    """The reading end, in the agent."""

    def __init__(self, fd: int, slot: int) -> None:
        page = mmap.mmap(fd, PAGE_BYTES, offset=slot * PAGE_BYTES)
        self._words = memoryview(page).cast("Q")
        self._times = memoryview(page).cast("d")

    @property
    def steps(self) -> int | None:
        """None while there is no one who writes here: a program that was started cold never does."""
        return self._words[_STEPS_AT] if self._words[_MAGIC_AT] == _MAGIC else None

    def lease(self, until_s: float) -> None:
        self._times[_LEASE_AT] = until_s

    @property
    def last_step_s(self) -> float:
        """When the last step was done, on this machine's monotonic clock; 0.0 before the first."""
        return self._times[_STEP_DONE_AT]
