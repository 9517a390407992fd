"""A large file as chunks with a hash each: hashed while it is written, checked before a byte of it is used."""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import msgspec
import xxhash

from holdfast.checkpoint import direct
from holdfast.checkpoint.errors import Damaged
from holdfast.checkpoint.format import CHUNK_BYTES, hash_chunk
from holdfast.checkpoint.storage import Storage

MAX_CHUNK_BYTES = 64 * 1024 * 1024  # of what was written elsewhere; a few of these are held at once
CHECKERS = 1
AHEAD = 1  # chunk that is read, and not used yet; memory that is touched first is slow


class Hashed(msgspec.Struct, frozen=True):
    """A file as it was written."""

    name: str
    size_bytes: int
    chunk_bytes: int
    hashes: Sequence[str]

    def check(self) -> None:
        """That these belong together. Raises Damaged."""
        if not (self.size_bytes >= 0 and 0 < self.chunk_bytes <= MAX_CHUNK_BYTES):
            raise Damaged(f"{self.name}: its sizes make no sense")
        if len(self.hashes) != -(-self.size_bytes // self.chunk_bytes):
            raise Damaged(f"{self.name}: {len(self.hashes)} hashes do not fit {self.size_bytes} bytes")

    def check_size(self, storage: Storage) -> None:
        try:
            size = storage.size(self.name)
        except FileNotFoundError:
            raise Damaged(f"{self.name} is missing") from None
        if size != self.size_bytes:
            raise Damaged(f"{self.name}: it has {size} bytes, {self.size_bytes} were written")


# -- writing ----------------------------------------------------------------------------------------------------------


def hashing(data: memoryview, hashes: list[str]) -> Iterator[memoryview]:
    """The parts of `data`. Each is hashed in a thread while whoever asked for it writes it: hashing costs no time."""
    with ThreadPoolExecutor(1, thread_name_prefix="holdfast-hash") as pool:
        pending: list[Future[str]] = []
        for at in range(0, len(data), CHUNK_BYTES):
            chunk = data[at : at + CHUNK_BYTES]
            pending.append(pool.submit(hash_chunk, chunk))
            yield chunk
        hashes.extend(future.result() for future in pending)


class Stream:
    """Hashes of a stream whose parts have any size."""

    def __init__(self) -> None:
        self.size_bytes = 0
        self.hashes: list[str] = []
        self._hash = xxhash.xxh3_128()

    def add(self, part: memoryview | bytes) -> None:
        with memoryview(part) as view:
            done = 0
            while done < len(view):
                room = CHUNK_BYTES - self.size_bytes % CHUNK_BYTES
                piece = view[done : done + room]
                self._hash.update(piece)
                self.size_bytes += len(piece)
                done += len(piece)
                if self.size_bytes % CHUNK_BYTES == 0:
                    self._close()

    def finish(self) -> None:
        if self.size_bytes % CHUNK_BYTES:
            self._close()

    def _close(self) -> None:
        self.hashes.append(self._hash.hexdigest())
        self._hash.reset()


# -- reading ----------------------------------------------------------------------------------------------------------


def verified(
    storage: Storage, file: Hashed, wanted: Sequence[tuple[int, int]] | None = None, once: bool = True
) -> Iterator[tuple[int, memoryview]]:
    """The chunks that overlap the wanted ranges (all, without), in order, each with where it begins. One may be used
    until the next is asked for. `once` as for `Storage.read`. Raises Damaged."""
    for at, chunk, wrong in _fetched(storage, file, _touched(file, wanted), once):
        if wrong:
            raise Damaged(wrong)
        yield at, chunk


def damages(storage: Storage, file: Hashed) -> list[str]:
    """All that is wrong with a file, read from end to end."""
    return [wrong for _, _, wrong in _fetched(storage, file, _touched(file, None), True) if wrong]


def _touched(file: Hashed, wanted: Sequence[tuple[int, int]] | None) -> Iterator[int]:
    if wanted is None:
        yield from range(len(file.hashes))
        return
    last = -1
    for begin, end in sorted(wanted):
        if not 0 <= begin <= end <= file.size_bytes:
            raise ValueError(f"{file.name}: bytes {begin} to {end} of {file.size_bytes} are asked for")
        if begin < end:
            first = max(last + 1, begin // file.chunk_bytes)
            yield from range(first, (end - 1) // file.chunk_bytes + 1)
            last = max(last, (end - 1) // file.chunk_bytes)


def _fetched(
    storage: Storage, file: Hashed, numbers: Iterable[int], once: bool
) -> Iterator[tuple[int, memoryview, str]]:
    """Read ahead by threads, and checked by others: the disk never waits for a hash. Buffers are reused."""
    coming = iter(numbers)
    size = min(file.chunk_bytes, file.size_bytes)
    reading = ThreadPoolExecutor(storage.readers, thread_name_prefix="holdfast-read")
    checking = ThreadPoolExecutor(CHECKERS, thread_name_prefix="holdfast-check")
    pending: deque[Future[tuple[int, memoryview, str]]] = deque()

    def start(buffer: memoryview) -> None:
        number = next(coming, None)
        if number is not None:
            read = reading.submit(_read, storage, file, number, buffer, once)
            pending.append(checking.submit(_check, file, number, read))

    try:
        for _ in range(storage.readers + AHEAD):
            start(direct.buffer(size))
        spare = direct.buffer(size)  # for the one that is in use outside
        while pending:
            at, chunk, wrong = pending.popleft().result()
            start(spare)
            yield at, chunk, wrong
            spare = _whole(chunk)
    finally:
        for future in pending:
            future.cancel()
        reading.shutdown(wait=True, cancel_futures=True)
        checking.shutdown(wait=True, cancel_futures=True)


def _read(storage: Storage, file: Hashed, number: int, buffer: memoryview, once: bool) -> tuple[memoryview, str]:
    at = number * file.chunk_bytes
    view = buffer[: min(file.chunk_bytes, file.size_bytes - at)]
    try:
        got = storage.read(file.name, at, view, once)
    except FileNotFoundError:
        return view, f"{file.name} is missing"
    short = f"{file.name}: it ends after {at + got} bytes, {file.size_bytes} were written"
    return view, short if got != len(view) else ""


def _check(file: Hashed, number: int, read: Future[tuple[memoryview, str]]) -> tuple[int, memoryview, str]:
    at = number * file.chunk_bytes
    view, wrong = read.result()
    if not wrong and hash_chunk(view) != file.hashes[number]:
        wrong = f"{file.name}: bytes {at} to {at + len(view)} are not what was written"
    return at, view, wrong


def _whole(chunk: memoryview) -> memoryview:
    """The buffer that a chunk is in; the last one of a file does not fill it."""
    whole = chunk.obj
    assert isinstance(whole, mmap.mmap)
    return memoryview(whole)
