"""Checks of what is written to: the disk of the run directories, and the checkpoint target as checkpoints use it."""

from __future__ import annotations

import contextlib
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from holdfast.doctor.finding import Asked, Finding, combine, fail, ok, size, skipped, warn

if TYPE_CHECKING:
    from holdfast.checkpoint.storage import Storage

BLOCK_BYTES = 8 << 20
BLOCKS = 8
FEW_BLOCKS = 2  # over a line of 20 Mbit/s that is some seconds, and enough to be sent in parts
SLOW_BYTES_S = 20e6
SLOW_SYNC_S = 0.1
LOW_BYTES = 1 << 30
SYNCS = 9
SYNC_BYTES = 4096  # as a line of the record

_SPACE = "free some space there, or name another place"


class _Wrong(Exception):
    """The target does something else than it says; with what that means."""


def disk(asked: Asked) -> Finding:
    if asked.log_dir == os.devnull:
        return skipped("nothing is written: the log directory is /dev/null")
    blocks = FEW_BLOCKS if asked.together else BLOCKS
    try:
        folder = _existing(os.path.abspath(asked.log_dir or tempfile.gettempdir()))
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            wrote_s = _time(lambda: _write(file.fileno(), blocks))
            syncs = [_time(lambda: _append(file.fileno())) for _ in range(SYNCS)]
    except OSError as failure:
        where = asked.log_dir or "the folder for temporary files"
        return fail(
            f"{where} does not take {size(blocks * BLOCK_BYTES)}: {failure.strerror}",
            f"{_SPACE} with --log-dir or TMPDIR",
        )
    sync_s = statistics.median(syncs)
    found = [_speed(folder, blocks * BLOCK_BYTES / wrote_s, "write"), _free(folder)]
    if sync_s > SLOW_SYNC_S:
        cure = "each incident waits for one of these; put run directories on a local disk with --log-dir"
        found.append(warn(f"to make a line durable takes {sync_s:.2g} s in {folder}", cure, sync_s=round(sync_s, 6)))
    else:
        found.append(ok(f"a line is durable in {sync_s * 1e3:.2g} ms", sync_s=round(sync_s, 6)))
    return combine(found)


def _write(fd: int, blocks: int) -> None:
    for block in _blocks(blocks):
        view = memoryview(block)
        while view:  # a disk that is nearly full takes a part of it, and says why at the next try
            view = view[os.write(fd, view) :]
    os.fsync(fd)


def _append(fd: int) -> None:
    os.write(fd, b"\n" * SYNC_BYTES)
    os.fdatasync(fd)


def _existing(folder: str) -> str:
    """What is there of a path. The rest is made by who needs it."""
    while not os.path.exists(folder):
        folder = os.path.dirname(folder)
    return folder


def _free(folder: str) -> Finding:
    space = os.statvfs(folder)
    free = space.f_bavail * space.f_frsize
    text = f"{size(free)} are free in {folder}"
    return warn(text, _SPACE, free_bytes=free) if free < LOW_BYTES else ok(text, free_bytes=free)


def _speed(where: str, bytes_s: float, doing: str) -> Finding:
    text = f"{doing} {bytes_s / 1e6:,.0f} MB/s"
    figures = {f"{doing}_bytes_s": round(bytes_s)}
    if bytes_s < SLOW_BYTES_S:
        return warn(f"{text} in {where}", "is it the disk that was meant, and does somebody else use it?", **figures)
    return ok(text, **figures)


def _blocks(count: int) -> Iterator[bytes]:
    """No two alike, so that a part in the wrong place is seen; and nothing that a disk could compress."""
    block = _noise()
    for index in range(count):
        yield block[index:] + block[:index]


_kept: list[bytes] = []


def _noise() -> bytes:
    if not _kept:
        _kept.append(os.urandom(BLOCK_BYTES))
    return _kept[0]


def _time(work: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    work()
    return max(time.perf_counter() - began_s, 1e-9)


# -- checkpoints ------------------------------------------------------------------------------------------------------


def checkpoint(asked: Asked) -> Finding:
    """All that a save relies on, under names that the next job sweeps away should this process be ended in between."""
    url = asked.checkpoint_dir
    if not url:
        return skipped("no checkpoint target was named; --checkpoint-dir names one")
    from holdfast.checkpoint.errors import CheckpointError
    from holdfast.checkpoint.storage import open_storage

    try:
        storage = open_storage(url)
        is_folder = "://" not in storage.url
        there = _existing(storage.url) if is_folder else ""
        try:
            found = _exercise(storage, BLOCKS if is_folder and not asked.together else FEW_BLOCKS)
            if is_folder:
                found.append(_free(storage.url))
        finally:
            if is_folder:
                _unmake(storage.url, there)
        return combine([ok(f"{url} keeps what it is given"), *found])
    except CheckpointError as failure:
        text, _, advice = str(failure).partition("; ")
        return fail(text, advice or "name another target, or see what is wrong with this one")
    except _Wrong as wrong:
        return fail(f"{url}: {wrong}", "checkpoints there can be lost; name another target, or another file system")
    except OSError as failure:
        return fail(f"{url}: {failure.strerror or failure}", "name another target, or see what is wrong with this one")


def _exercise(storage: Storage, blocks: int) -> list[Finding]:
    from holdfast.checkpoint import names

    small, large = names.passing(names.TEMPORARY), names.passing(names.TEMPORARY)
    try:
        _put_if_none(storage, small)
        storage.replace(small, [b"a third"])
        _expect(storage, small, b"a third", "what was written in its place is not there")
        wrote_s = _time(lambda: storage.publish(large, _blocks(blocks)))
        read_s = _time(lambda: _compare(storage, large, blocks))
    finally:
        _remove(storage, small, large)
    count = blocks * BLOCK_BYTES
    found = [_speed(storage.url, count / wrote_s, "write"), _speed(storage.url, count / read_s, "read")]
    if not getattr(storage, "conditional", True):
        text = f"{storage.url} has no conditional put: of two jobs at once both may think that they are first"
        found.append(warn(text, "run one job at a time there, or use a store that has it"))
    return found


def _put_if_none(storage: Storage, name: str) -> None:
    if not storage.create(name, b"the first"):
        raise _Wrong("a file that nobody has made is there already")
    if storage.create(name, b"a second"):
        raise _Wrong("a file was made twice, though it was there")
    _expect(storage, name, b"the first", "a file that was there was written over")


def _expect(storage: Storage, name: str, content: bytes, otherwise: str) -> None:
    into = memoryview(bytearray(len(content) + 1))
    if storage.size(name) != len(content) or bytes(into[: storage.read(name, 0, into)]) != content:
        raise _Wrong(otherwise)


def _compare(storage: Storage, name: str, blocks: int) -> None:
    into = memoryview(bytearray(BLOCK_BYTES))
    for index, block in enumerate(_blocks(blocks)):
        if storage.read(name, index * BLOCK_BYTES, into, once=True) != BLOCK_BYTES or into != block:
            raise _Wrong(f"block {index} of {blocks} was not read as it was written")


def _remove(storage: Storage, *names: str) -> None:
    from holdfast.checkpoint.errors import CheckpointError

    for name in names:
        with contextlib.suppress(CheckpointError, OSError):  # what went wrong before this says more
            storage.delete(name)


def _unmake(folder: str, there: str) -> None:
    """A directory that was only made for this goes again, with those above it."""
    with contextlib.suppress(OSError):
        while folder != there:
            os.rmdir(folder)
            folder = os.path.dirname(folder)
