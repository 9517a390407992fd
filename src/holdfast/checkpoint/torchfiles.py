"""`.pt` files: written as a stream of parts, and opened as what they are, a file from anybody.

A `.pt` is a zip of a pickle and raw bytes. Only torch's restricted unpickler ever sees the pickle, and only of a plain
zip: the older forms, which torch would also take, have been a way around that restriction.
"""

from __future__ import annotations

import contextlib
import io
import os
import queue
import threading
import zipfile
from collections.abc import Iterator
from typing import IO, Any, cast

from holdfast.checkpoint import chunks
from holdfast.checkpoint.chunks import Hashed
from holdfast.checkpoint.errors import CheckpointError, Damaged
from holdfast.checkpoint.folder import Folder
from holdfast.checkpoint.format import CHUNK_BYTES, hash_chunk
from holdfast.checkpoint.storage import Storage

_SMALL_BYTES = 256 * 1024
_STEP_BYTES = 1024 * 1024
_HELD = 3  # chunks


# -- writing ----------------------------------------------------------------------------------------------------------


def saved(value: Any) -> Iterator[memoryview | bytes]:
    """What `torch.save` makes of it, part by part. A part may be used until the next is asked for, and tensors' bytes
    are never copied."""
    import torch

    pipe = _Pipe()

    def save() -> None:
        try:
            torch.save(value, cast(IO[bytes], pipe))
            pipe.end(None)
        except BaseException as failure:  # it is raised again in the other thread
            pipe.end(failure)

    thread = threading.Thread(target=save, daemon=True, name="holdfast-save")
    thread.start()
    try:
        yield from pipe.parts()
    finally:
        pipe.close()
        thread.join()


class _Pipe:
    """From the thread that saves to the one that asks. One part is under way at a time: it is the saver's memory."""

    def __init__(self) -> None:
        self._small = bytearray()
        self._queue: queue.SimpleQueue[memoryview | bytes | None] = queue.SimpleQueue()
        self._taken = threading.Semaphore(0)
        self._failure: BaseException | None = None
        self._closed = False

    def write(self, part: memoryview | bytes) -> int:
        with memoryview(part).cast("B") as view:
            if len(view) <= _SMALL_BYTES:
                self._small += view
                if len(self._small) >= _STEP_BYTES:
                    self.flush()
                return len(view)
            self.flush()
            for at in range(0, len(view), CHUNK_BYTES):
                with view[at : at + CHUNK_BYTES] as piece:
                    self._hand_over(piece)
            return len(view)

    def flush(self) -> None:
        if self._small:
            small, self._small = bytes(self._small), bytearray()
            self._hand_over(small)

    def _hand_over(self, part: memoryview | bytes) -> None:
        if not self._closed:
            self._queue.put(part)
            self._taken.acquire()
        if self._closed:
            raise BrokenPipeError("nobody asks for the rest")

    def end(self, failure: BaseException | None) -> None:
        self._failure = failure
        with contextlib.suppress(BrokenPipeError):
            if failure is None:
                self.flush()
        self._queue.put(None)

    def parts(self) -> Iterator[memoryview | bytes]:
        while (part := self._queue.get()) is not None:
            yield part
            self._taken.release()
        if self._failure is not None:
            raise CheckpointError(f"torch.save: {self._failure}") from self._failure

    def close(self) -> None:
        self._closed = True
        self._taken.release()


# -- opening ----------------------------------------------------------------------------------------------------------


def load(storage: Storage, name: str, known: Hashed | None) -> Any:
    """Verified by these hashes, or else by the zip's own checksums. Raises Damaged."""
    check(storage, name, known)
    import torch

    try:
        if isinstance(storage, Folder):
            # Mapped, so that it costs no memory of its own.
            fd = os.open(os.path.join(storage.url, name), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                return torch.load(f"/proc/self/fd/{fd}", map_location="cpu", weights_only=True, mmap=True)
            finally:
                os.close(fd)
        with _opened(storage, name, known) as file:
            return torch.load(file, map_location="cpu", weights_only=True)
    except CheckpointError:
        raise
    except Exception as failure:  # a damaged or hostile file makes torch raise nearly anything
        raise Damaged(f"{name}: torch.load refuses it: {_first_line(failure)}") from None


def check(storage: Storage, name: str, known: Hashed | None) -> None:
    """Every byte, and that it is a zip as torch.save writes them. Raises Damaged."""
    if known is not None:
        known.check_size(storage)
        if isinstance(storage, Folder):
            for _ in chunks.verified(storage, known):
                pass
    try:
        with _opened(storage, name, known) as file:
            _check_zip(file, name, sums=known is None)
    except FileNotFoundError:
        raise Damaged(f"{name} is missing") from None


def _check_zip(file: io.BufferedReader, name: str, sums: bool) -> None:
    try:
        size = file.seek(0, io.SEEK_END)
        file.seek(0)
        if file.read(4) != b"PK\x03\x04":
            raise Damaged(f"{name}: it is not a zip; holdfast opens only what torch.save has written since 1.6")
        with zipfile.ZipFile(file) as archive:
            _check_records(archive.infolist(), size, name)
            if sums:
                for record in archive.infolist():
                    with archive.open(record) as content:
                        while content.read(_STEP_BYTES):
                            pass
    except CheckpointError:
        raise
    except Exception as failure:  # zipfile raises many things for a file that is no good
        raise Damaged(f"{name}: {_first_line(failure)}") from None


def _check_records(records: list[zipfile.ZipInfo], size: int, name: str) -> None:
    """Stored as they are, so that nothing can be larger than the file, and each once."""
    names = [record.filename for record in records]
    if len(set(names)) != len(names):
        raise Damaged(f"{name}: it has two records of one name")
    if any(record.compress_type != zipfile.ZIP_STORED for record in records):
        raise Damaged(f"{name}: its records are compressed, which torch.save never does")
    if any(part in ("", ".", "..") or "\\" in part for one in names for part in one.split("/")):
        raise Damaged(f"{name}: its records have names that lead elsewhere")
    if sum(record.file_size for record in records) > size:
        raise Damaged(f"{name}: its records are larger than the file")
    if sum(one.endswith("/data.pkl") for one in names) != 1:
        raise Damaged(f"{name}: it has not one data.pkl")


def _first_line(failure: Exception) -> str:
    lines = [line.strip() for line in str(failure).splitlines() if line.strip()]
    return (lines[0] if lines else type(failure).__name__)[:300]


def _opened(storage: Storage, name: str, known: Hashed | None) -> io.BufferedReader:
    return io.BufferedReader(_File(storage, name, known), 64 * 1024)


class _File(io.RawIOBase):
    """A file of a storage, read in chunks of which the last few are held; checked by its hashes where known."""

    def __init__(self, storage: Storage, name: str, known: Hashed | None) -> None:
        self._storage = storage
        self._name = name
        self._known = known
        self._chunk_bytes = known.chunk_bytes if known is not None else CHUNK_BYTES
        self._size = storage.size(name)
        self._at = 0
        self._held: dict[int, bytearray] = {}

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        if base + offset < 0:
            raise OSError("before the beginning of the file")
        self._at = base + offset
        return self._at

    def readinto(self, into: Any) -> int:
        with memoryview(into).cast("B") as view:
            number, begin = divmod(self._at, self._chunk_bytes)
            if self._at >= self._size or not len(view):
                return 0
            chunk = self._chunk(number)
            count = min(len(view), len(chunk) - begin)
            view[:count] = memoryview(chunk)[begin : begin + count]
            self._at += count
            return count

    def _chunk(self, number: int) -> bytearray:
        if number in self._held:
            return self._held[number]
        at = number * self._chunk_bytes
        chunk = bytearray(min(self._chunk_bytes, self._size - at))
        if self._storage.read(self._name, at, memoryview(chunk)) != len(chunk):
            raise Damaged(f"{self._name}: it became shorter while it was read")
        if self._known is not None and hash_chunk(memoryview(chunk)) != self._known.hashes[number]:
            raise Damaged(f"{self._name}: bytes {at} to {at + len(chunk)} are not what was written")
        if len(self._held) >= _HELD:
            del self._held[next(iter(self._held))]
        self._held[number] = chunk
        return chunk
