"""Folders to and from storage: checkpoints of tasks that may be writing at any moment, and inputs that are checked.

A file goes over only if nobody has it open for writing and it is the same after it was read as before; it takes its
place at once, and is read back. Beside the files lies an index with the hashes that each of them may have: before an
upload the new ones are added, after it the old ones are taken away. So at any moment, also after an upload that was cut
short, each file can be checked, and a damaged one is never taken for one that is only newer.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

import msgspec
import xxhash

from holdfast.checkpoint import cloud, names
from holdfast.checkpoint.errors import CheckpointError
from holdfast.checkpoint.storage import Storage, open_storage

INDEX = ".holdfast-upload.json"
PIECE_BYTES = 8 * 1024 * 1024


class Entry(msgspec.Struct, frozen=True):
    """What a file may be: one of these."""

    hashes: tuple[str, ...]


class Index(msgspec.Struct):
    files: dict[str, Entry]


class Done(msgspec.Struct, frozen=True):
    files: int
    bytes: int
    left_out: tuple[str, ...] = ()  # being written


class Changing(Exception):
    """A file that is being written."""


def may_pass(failure: BaseException) -> bool:
    """Whether it is worth another try: a store that is down, and not one that has said no."""
    cause = failure.__cause__
    return cause is not None and not isinstance(cause, OSError) and not cloud.is_refused(cause)


# -- to storage -------------------------------------------------------------------------------------------------------


class Upload:
    """One folder of a task, to one place, as often as one likes. Not for two threads at once."""

    def __init__(self, path: Path, url: str, regex: str = "") -> None:
        self._path = path
        self._storage = open_storage(url)
        self._regex = re.compile(regex)
        self._known: dict[str, tuple[int, int, int]] = {}  # what is there as it is here: inode, size, time
        self._index: Index | None = None

    def run(self, writers_gone: bool = False) -> Done:
        """Raises CheckpointError; what was there before is there still."""
        if self._index is None:
            self._storage.sweep()  # what one that was killed has left there
            self._index = read_index(self._storage)
        found = dict(self._files())
        new = [name for name, seen in found.items() if self._known.get(name) != seen]
        files = size = 0
        left_out: list[str] = []
        for name in sorted(new, key=lambda name: found[name][2]):  # in the order in which they were written
            try:
                if self._send(name, writers_gone):
                    files, size = files + 1, size + found[name][1]
            except Changing:
                left_out.append(name)
            except FileNotFoundError:
                continue  # it is gone again, which the next one will see
        gone = [name for name in self._known if name not in found]
        for name in gone:  # of what this has sent; what others have is not this one's to delete
            self._storage.delete(name)
            del self._known[name]
            self._index.files.pop(name, None)
        if files or gone:
            self._write_index()
        return Done(files, size, tuple(left_out))

    def _files(self) -> Iterator[tuple[str, tuple[int, int, int]]]:
        for folder, folders, there in os.walk(self._path):
            folders.sort()
            for file in there:
                path = os.path.join(folder, file)
                name = os.path.relpath(path, self._path)
                with contextlib.suppress(FileNotFoundError):
                    status = os.lstat(path)
                    if stat.S_ISREG(status.st_mode) and _is_name(name) and self._regex.match(name):
                        yield name, _seen(status)

    def _send(self, name: str, writers_gone: bool) -> bool:
        """Whether it had to be sent: what a life has from the last checkpoint is there as it is."""
        assert self._index is not None
        fd = os.open(self._path / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            seen = _seen(os.fstat(fd))
            if not writers_gone:
                _check_no_writer(fd)
            digest = _hash(fd)
            self._check_same(fd, seen, writers_gone)
            before = self._index.files.get(name)
            if before is not None and before.hashes == (digest,) and self._is_there(name, seen[1], digest):
                self._known[name] = seen
                return False
            others = [one for one in before.hashes if one != digest] if before is not None else []
            self._index.files[name] = Entry((*others, digest))
            self._write_index()
            self._storage.replace(name, self._pieces(fd, seen, writers_gone))
            if not self._is_there(name, seen[1], digest):
                raise CheckpointError(f"{self._storage.url}/{name} is not what was written")
            self._index.files[name] = Entry((digest,))
            self._known[name] = seen
            return True
        finally:
            os.close(fd)

    def _pieces(self, fd: int, seen: tuple[int, int, int], writers_gone: bool) -> Iterator[bytes]:
        at = 0
        while piece := os.pread(fd, PIECE_BYTES, at):
            yield piece
            at += len(piece)
        self._check_same(fd, seen, writers_gone)  # while it can still be given up

    def _check_same(self, fd: int, seen: tuple[int, int, int], writers_gone: bool) -> None:
        if _seen(os.fstat(fd)) != seen:
            raise Changing
        if not writers_gone:
            _check_no_writer(fd)

    def _is_there(self, name: str, size: int, digest: str) -> bool:
        try:
            return self._storage.size(name) == size and _stored_hash(self._storage, name) == digest
        except FileNotFoundError:
            return False

    def _write_index(self) -> None:
        assert self._index is not None
        self._storage.replace(INDEX, [msgspec.json.encode(self._index)])


def _check_no_writer(fd: int) -> None:
    """A lease for reading is given only where nobody has the file open for writing. Where there are no leases (network
    filesystems, files of others), that it does not change has to do."""
    try:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except OSError as failure:
        if failure.errno == errno.EAGAIN:
            raise Changing from None


def _seen(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_ino, status.st_size, status.st_mtime_ns


def _is_name(name: str) -> bool:
    return all(names.is_allowed(part) and not names.is_passing(part) for part in name.split("/")) and name != INDEX


def _hash(fd: int) -> str:
    made = xxhash.xxh3_128()
    at = 0
    while piece := os.pread(fd, PIECE_BYTES, at):
        made.update(piece)
        at += len(piece)
    return made.hexdigest()


def _stored_hash(storage: Storage, name: str) -> str:
    made = xxhash.xxh3_128()
    for piece in _stored(storage, name):
        made.update(piece)
    return made.hexdigest()


def _stored(storage: Storage, name: str) -> Iterator[memoryview]:
    """In pieces that are good until the next is asked for."""
    buffer = memoryview(bytearray(PIECE_BYTES))
    at = 0
    while count := storage.read(name, at, buffer):
        yield buffer[:count]
        at += count
        if count < len(buffer):
            return


# -- from storage -----------------------------------------------------------------------------------------------------


def fetch(url: str, into: Path, regex: str = "") -> Done:
    """All that is below an address, into a folder. Nothing there is no failure. Raises CheckpointError for a file that
    is not what was uploaded."""
    storage = open_storage(url)
    index = read_index(storage)
    wanted = re.compile(regex)
    into.mkdir(parents=True, exist_ok=True)
    files = size = 0
    for name in _names(storage, ""):
        if name == INDEX or not wanted.match(name):
            continue
        size += _take(storage, name, into / name, index.files.get(name))
        files += 1
    return Done(files, size)


def _take(storage: Storage, name: str, path: Path, entry: Entry | None) -> int:
    path.parent.mkdir(parents=True, exist_ok=True)
    made, size = xxhash.xxh3_128(), 0
    with open(path, "wb") as file:
        for piece in _stored(storage, name):
            made.update(piece)
            file.write(piece)
            size += len(piece)
    if entry is not None and made.hexdigest() not in entry.hashes:
        path.unlink()
        raise CheckpointError(f"{storage.url}/{name} is damaged: it is not what was uploaded")
    return size


def _names(storage: Storage, folder: str) -> Iterator[str]:
    for name in storage.names(folder):
        if name.endswith("/"):
            yield from _names(storage, folder + name)
        else:
            yield folder + name


def read_index(storage: Storage) -> Index:
    try:
        content = b"".join(bytes(piece) for piece in _stored(storage, INDEX))
        return msgspec.json.decode(content, type=Index)
    except FileNotFoundError:
        return Index({})
    except msgspec.MsgspecError as failure:
        raise CheckpointError(
            f"{storage.url}/{INDEX} is damaged ({failure}); delete it to go on without checks"
        ) from None
