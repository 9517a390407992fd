"""A slot: one rank's snapshot in shared memory, which outlives the process that took it.

```text
0       header, one page: what is in it, and whether it is complete
4096    data: the bytes of the pieces
        index: the format.Snapshot as JSON
```

The file is a memfd that others hold too. Who fills a slot, or reads it while it could be filled, holds its lock.
Whatever the moment at which the filler is killed: a slot is complete, or it is not loaded.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import struct
import weakref

import msgspec
import xxhash

from holdfast.checkpoint import faultpoints
from holdfast.checkpoint.errors import CheckpointError
from holdfast.checkpoint.format import ITEM_BYTES, Snapshot

DATA_AT = 4096
WORLD_BYTES = 1024  # of the world's name, at most

_MAGIC = b"holdfast"
_VERSION = 1
_EMPTY, _FILLING, _COMPLETE = 0, 1, 2
# magic, version, state, sequence, step, rank, data_at, data_bytes, index_at, index_bytes, xxh3-128 of the index, world
_FIELDS = struct.Struct(f"<8sIIQqqQQQQ16sH{WORLD_BYTES}s")
_HEADER_BYTES = _FIELDS.size + 16  # and the xxh3-128 of all that

_MADV_POPULATE_WRITE = 23  # Linux 5.14
_MADV_HUGEPAGE = 14
_MADV_REMOVE = 9
_PROT_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_MAP_FAILED = ctypes.c_void_p(-1).value


class Head(msgspec.Struct, frozen=True):
    """What a slot says about itself."""

    step: int
    world: str
    rank: int
    complete: bool
    sequence: int  # counts the fillings of this slot


class _Header(msgspec.Struct, frozen=True):
    head: Head
    data_bytes: int
    index_at: int
    index_bytes: int
    index_hash: bytes


class Slot:
    """One process's hold on a slot. The descriptor stays the caller's, and must stay open as long as this is used.

    The lock is the kernel's record lock: it goes when its process ends, and forked children have no part in it. But it
    also goes when the process closes *any* descriptor of the same file; so there should be one in a process.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._memory: memoryview | None = None
        self._populated = 0
        self._filling: _Header | None = None

    # -- the lock ------------------------------------------------------------------------------------------------------

    def lock(self, wait: bool = False) -> bool:
        """False if another process has it; `wait` until that lets it go."""
        try:
            fcntl.lockf(self.fd, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as failure:
            if failure.errno in (errno.EAGAIN, errno.EACCES):
                return False
            raise
        return True

    def unlock(self) -> None:
        fcntl.lockf(self.fd, fcntl.LOCK_UN)

    # -- filling -------------------------------------------------------------------------------------------------------

    def reserve(self, data_bytes: int, index_bytes: int = 0) -> None:
        """Make the memory for a snapshot of that size, and touch it: a first touch is some 10 times slower than what
        comes after. Does not hold the interpreter up. What was in the slot is gone if it has to grow or to shrink."""
        index_at = _index_at(data_bytes)
        needed = index_at + index_bytes
        if len(self._map()) >= needed and self._populated >= needed and self._populated <= 2 * needed + (64 << 20):
            return
        # Room for an index that grows a little, as by the digits of a step: else that would be a new mapping.
        size = _page(needed + index_bytes // 4 + (64 << 10))
        self._write(_EMPTY, None)
        self._resize(size)

    def fill(self, snapshot: Snapshot, data_bytes: int) -> memoryview:
        """Begin: from here on there is nothing to load, until `complete`. Returns where the pieces' bytes go."""
        index = msgspec.json.encode(snapshot)
        header = _Header(
            Head(snapshot.step, snapshot.world, snapshot.rank, False, self._sequence() + 1),
            data_bytes,
            _index_at(data_bytes),
            len(index),
            xxhash.xxh3_128_digest(index),
        )
        self._write(_FILLING, header)
        faultpoints.passed("slot.filling")
        self.reserve(data_bytes, len(index))
        self._write(_FILLING, header)  # again: what `reserve` has grown had to be emptied
        memory = self._map()
        memory[header.index_at : header.index_at + len(index)] = index
        faultpoints.passed("slot.indexed")
        self._filling = header
        return memory[DATA_AT : DATA_AT + data_bytes]

    def complete(self) -> None:
        """All bytes of what was begun are there."""
        if self._filling is None:
            raise RuntimeError("no filling of this slot has begun")
        header, self._filling = self._filling, None
        faultpoints.passed("slot.complete.before")
        self._write(_COMPLETE, header)
        faultpoints.passed("slot.complete.after")

    def clear(self) -> None:
        """Nothing is in it any more. The memory is kept for the next filling."""
        self._filling = None
        self._write(_EMPTY, None)

    # -- reading -------------------------------------------------------------------------------------------------------

    def peek(self) -> Head | None:
        """What is in it, complete or not; None if nothing is, or nothing that can be known."""
        header = self._read()
        return None if header is None else header.head

    def load(self) -> tuple[Snapshot, memoryview] | None:
        """The snapshot and its data, not a copy: valid as long as nobody fills the slot. None if there is none."""
        header = self._read()
        if header is None or not header.head.complete:
            return None
        memory = self._map(header.index_at + header.index_bytes)
        if len(memory) < header.index_at + header.index_bytes:
            return None
        index = memory[header.index_at : header.index_at + header.index_bytes]
        if xxhash.xxh3_128_digest(index) != header.index_hash:
            return None
        try:
            snapshot = msgspec.json.decode(index, type=Snapshot)
        except msgspec.MsgspecError:
            return None
        if not _fits(snapshot, header):
            return None
        return snapshot, memory[DATA_AT : DATA_AT + header.data_bytes]

    # -- the memory ----------------------------------------------------------------------------------------------------

    @property
    def address(self) -> int:
        """Of the data, in this process. 0 where nothing is mapped."""
        return 0 if self._memory is None or not len(self._memory) else _address(self._memory) + DATA_AT

    @property
    def size_bytes(self) -> int:
        """Of the file: the memory that this slot may take."""
        return os.fstat(self.fd).st_size

    def close(self) -> None:
        """Let the mapping go. Views that others still have stay valid; it is unmapped with the last of them."""
        self._memory = None
        self._populated = 0

    def _map(self, at_least: int = 1) -> memoryview:
        """All of the file. An empty file maps to an empty view."""
        if self._memory is None or len(self._memory) < at_least:
            size = os.fstat(self.fd).st_size
            if self._memory is None or len(self._memory) != size:
                self.close()
                self._memory = _mapped(self.fd, size)
        return self._memory

    def _resize(self, size: int) -> None:
        before = os.fstat(self.fd).st_size
        self.close()
        try:
            if size > before:
                os.ftruncate(self.fd, size)
            self._memory = _mapped(self.fd, max(size, before))
            if size < before:
                # Given back, but the file stays as long as it is: a shorter one would kill who still looks there.
                _advise(self._memory, size, before, _MADV_REMOVE)
            _populate(self.fd, self._memory[:size])
        except OSError as failure:
            raise CheckpointError(
                f"no memory for a snapshot of {size / 2**30:.1f} GiB ({os.strerror(failure.errno or 0)}); "
                "snapshots take two times a rank's share of the state"
            ) from None
        self._populated = size

    def _sequence(self) -> int:
        header = self._read()
        return 0 if header is None else header.head.sequence

    def _write(self, state: int, header: _Header | None) -> None:
        if header is None:
            header = _Header(Head(0, "", 0, False, self._sequence()), 0, 0, 0, bytes(16))
        memory = self._map(DATA_AT)
        if len(memory) < DATA_AT:
            os.ftruncate(self.fd, DATA_AT)
            memory = self._map(DATA_AT)
        memory[:_HEADER_BYTES] = _pack(state, header)

    def _read(self) -> _Header | None:
        memory = self._map(DATA_AT)
        return None if len(memory) < DATA_AT else _unpack(bytes(memory[:_HEADER_BYTES]))


def _pack(state: int, header: _Header) -> bytes:
    head = header.head
    world = head.world.encode()
    if len(world) > WORLD_BYTES:
        raise CheckpointError(f"the world's name is longer than {WORLD_BYTES} bytes: {head.world[:60]}...")
    fields = _FIELDS.pack(
        _MAGIC, _VERSION, state, head.sequence, head.step, head.rank, DATA_AT, header.data_bytes,
        header.index_at, header.index_bytes, header.index_hash, len(world), world,
    )  # fmt: skip
    return fields + xxhash.xxh3_128_digest(fields)


def _unpack(page: bytes) -> _Header | None:
    """None if it is empty, torn, or none of ours."""
    fields = page[: _FIELDS.size]
    if page[_FIELDS.size :] != xxhash.xxh3_128_digest(fields):
        return None
    (
        magic,
        version,
        state,
        sequence,
        step,
        rank,
        data_at,
        data_bytes,
        index_at,
        index_bytes,
        index_hash,
        length,
        world,
    ) = _FIELDS.unpack(fields)
    if magic != _MAGIC or version != _VERSION or state not in (_FILLING, _COMPLETE):
        return None
    if data_at != DATA_AT or index_at != _index_at(data_bytes) or length > WORLD_BYTES:
        return None
    name = world[:length].decode(errors="replace")
    return _Header(Head(step, name, rank, state == _COMPLETE, sequence), data_bytes, index_at, index_bytes, index_hash)


def _fits(snapshot: Snapshot, header: _Header) -> bool:
    """Whether the index speaks of bytes that are there: who persists a slot did not make it."""
    if not (0 <= snapshot.written <= len(snapshot.pieces) and 0 <= snapshot.written_bytes <= header.data_bytes):
        return False
    for piece in snapshot.pieces:
        if piece.dtype not in ITEM_BYTES or min(piece.sizes, default=0) < 0:
            return False
        if not 0 <= piece.at <= header.data_bytes - piece.size_bytes:
            return False
    return True


def _page(size: int) -> int:
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE


def _index_at(data_bytes: int) -> int:
    return _page(DATA_AT + data_bytes)


def _mapped(fd: int, size: int) -> memoryview:
    """Not Python's own `mmap`: that keeps a duplicate of the descriptor, and to close it would drop the slot's lock."""
    if size == 0:
        return memoryview(b"")
    address = _libc.mmap(None, size, _PROT_READ_WRITE, mmap.MAP_SHARED, fd, 0)
    if address == _MAP_FAILED or address is None:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    owner = (ctypes.c_ubyte * size).from_address(address)
    # It is unmapped when the last view is gone, a tensor's included. Not at exit: a thread may still be copying then.
    weakref.finalize(owner, _libc.munmap, address, size).atexit = False
    memory = memoryview(owner).cast("B")
    _advise(memory, 0, size, _MADV_HUGEPAGE)  # where the kernel is set to it, a 500th of the page faults
    return memory


def _address(memory: memoryview) -> int:
    return ctypes.addressof(ctypes.c_ubyte.from_buffer(memory))


def _advise(memory: memoryview, start: int, end: int, advice: int) -> int:
    """Returns the error number; 0 if it was taken."""
    if _libc.madvise(_address(memory) + start, end - start, advice) == 0:
        return 0
    return ctypes.get_errno()


def _populate(fd: int, memory: memoryview) -> None:
    """Raises OSError where there is not enough memory; to touch the pages would be SIGBUS then."""
    problem = _advise(memory, 0, len(memory), _MADV_POPULATE_WRITE)
    if problem == errno.EINVAL:  # an older kernel
        os.posix_fallocate(fd, 0, len(memory))
        memory[DATA_AT :: mmap.PAGESIZE] = memory[DATA_AT :: mmap.PAGESIZE].tobytes()
    elif problem:
        raise OSError(problem, os.strerror(problem))
