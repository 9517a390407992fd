"""What a checkpointer writes to a disk and reads from it, beside a plain write and read of the same bytes."""

from __future__ import annotations

import ctypes
import mmap
import os
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import holdfast
from bench.launchers import table
from bench.savers import milliseconds, rate, verdict
from bench.training import Training

BLOCK_BYTES = 16 * 1024 * 1024
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]


def measure(
    training: Training, checkpointer: holdfast.Checkpointer, folder: Path, steps: Iterator[int], rounds: int
) -> None:
    rounds += rounds % 2
    size = training.size_bytes
    source = memoryview(bytearray(os.urandom(1 << 20)) * (size >> 20))
    size_of_source, target = len(source), memoryview(bytearray(BLOCK_BYTES))
    times: dict[str, list[float]] = {name: [] for name in ("write", "commit", "verified", "read", "restore", "memory")}
    for _ in range(2):  # each slot's memory is made by its first save
        checkpointer.save(next(steps), blocking=True)
    for number in range(rounds):
        for plain in (True, False) if number % 2 == 0 else (False, True):
            os.sync()
            if plain:
                times["write"].append(_plain_write(folder / "plain", source) * size / size_of_source)
            else:
                step = next(steps)
                asked_s, began_s = time.time(), time.perf_counter()
                checkpointer.save(step, blocking=True)
                times["verified"].append(time.perf_counter() - began_s)
                times["commit"].append(_shard(folder, step, "*.manifest.json").stat().st_ctime - asked_s)
        (folder / "plain").unlink()
        shard = _shard(folder, step, "*.bin")
        for plain in (True, False) if number % 2 == 0 else (False, True):
            _make_cold(folder)
            began_s = time.perf_counter()
            if plain:
                _plain_read(shard, target)
            else:
                checkpointer.restore(f"step:{step}")
            times["read" if plain else "restore"].append(time.perf_counter() - began_s)
        began_s = time.perf_counter()
        restored = checkpointer.restore()
        times["memory"].append(time.perf_counter() - began_s)
        assert restored is not None and restored.name == "memory", restored

    def row(what: str, name: str, beside: str | None) -> list[str]:
        taken_s = times[name]
        cells = [what, milliseconds(taken_s), rate(size, statistics.median(taken_s))]
        if beside is None:
            return [*cells, "", "", ""]
        # Each was the first in half of the rounds: what it finds in memory makes a plain read three times faster.
        share = sum(times[beside]) / sum(taken_s)
        return [*cells, f"{100 * share:.0f} %", "at least 90 %", verdict(share >= 0.9)]

    rows = [
        row("plain sequential write, fsync", "write", None),
        row("a save, from its call to the commit", "commit", "write"),
        row("the same until it was read back and verified", "verified", None),
        row("plain sequential read, cold", "read", None),
        row("restore from disk, cold, verified", "restore", "read"),
        row("restore from memory", "memory", None),
    ]
    columns = ["what", f"median of {rounds}", "", "of plain, all rounds", "asked", ""]
    print(table(columns, rows), "\n", flush=True)


def _shard(folder: Path, step: int, pattern: str) -> Path:
    (found,) = (folder / "ours" / f"step_{step:08d}").glob(pattern)
    return found


def _plain_write(path: Path, source: memoryview) -> float:
    began_s = time.perf_counter()
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for at in range(0, len(source), BLOCK_BYTES):
        os.write(fd, source[at : at + BLOCK_BYTES])
    os.fsync(fd)
    took_s = time.perf_counter() - began_s
    os.close(fd)
    return took_s


def _plain_read(path: Path, target: memoryview) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
    while os.readv(fd, [target]):
        pass
    os.close(fd)


def _make_cold(folder: Path) -> None:
    """Out of this machine's page cache. A virtual disk's host may still have it, for both alike."""
    os.sync()
    pages = resident = 0
    for path in folder.rglob("*"):
        if not path.is_file() or not path.stat().st_size:
            continue
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as mapped:
                count = -(-len(mapped) // mmap.PAGESIZE)
                there = ctypes.create_string_buffer(count)
                view = ctypes.c_char.from_buffer(mapped)
                if _libc.mincore(ctypes.addressof(view), len(mapped), there) != 0:
                    raise OSError(ctypes.get_errno(), "mincore")
                del view
        pages += count
        resident += sum(byte & 1 for byte in there.raw)
    if resident > 0.01 * pages:
        raise SystemExit(f"{resident} of {pages} pages are still in the page cache: nothing cold could be measured")
