"""Large files past the page cache, where the filesystem lets one.

A gigabyte through the page cache takes one to two seconds of a core, for pages that are allocated, filled and thrown
away, which training needs for itself; and it is slower than a fast disk. Past it, the disk reads a snapshot's memory by
itself. For that, memory, size and place in the file must be multiples of a block: what is not goes the other way.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os

BLOCK_BYTES = 4096  # of most disks, and a multiple of those of the others
WORTH_BYTES = 1024 * 1024  # a system call's wait for the disk is nothing, from there on

_MADV_HUGEPAGE = 14


def buffer(size_bytes: int) -> memoryview:
    """Memory that begins at a page. It is given back with its last view."""
    memory = mmap.mmap(-1, max(1, size_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared ones stay small
    with contextlib.suppress(OSError):
        memory.madvise(_MADV_HUGEPAGE)  # a first touch is a page fault, and there are 2000 small pages in a chunk
    return memoryview(memory)[:size_bytes]


def blocks(view: memoryview, at: int) -> int:
    """How many bytes of it, from its begin, may go straight to that place of a file, or come from there."""
    size = len(view) - len(view) % BLOCK_BYTES
    return size if size >= WORTH_BYTES and at % BLOCK_BYTES == 0 and _is_aligned(view) else 0


def begin(fd: int) -> bool:
    """From here on past the page cache. False where that cannot be had."""
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_DIRECT)
    except OSError:
        return False
    return True


def end(fd: int) -> None:
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_DIRECT)


def is_refused(failure: OSError) -> bool:
    """Not the disk's failure: it wants larger blocks, or the flag was taken and is of no use."""
    return failure.errno in (errno.EINVAL, errno.ENOTSUP)


def _is_aligned(view: memoryview) -> bool:
    """A view of bytes that may not be written has no address to be had; it is small, or not ours."""
    try:
        return ctypes.addressof(ctypes.c_char.from_buffer(view)) % BLOCK_BYTES == 0
    except (TypeError, ValueError):
        return False
