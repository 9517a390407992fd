"""Objects in a bucket, by their keys: what obstore can do, made exact also where an answer is lost.

What stores have, through obstore: all put an object only if there is none (S3 and Azure: `If-None-Match: *`, Google:
`x-goog-if-generation-match: 0`), but only one that is sent in a single request. So a large one is sent in parts under
a temporary key, and the store itself copies it if there is none: Google and Azure have that, S3 has it for a copy in
parts (`copy_if_not_exists=multipart`), Cloudflare's R2 wants `AWS_COPY_IF_NOT_EXISTS` as its documentation says.

A process that is killed may leave an upload that was never completed. It is no object and is not listed, but it is paid
for: let a lifecycle rule of the bucket abort incomplete uploads after a day.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError
from obstore.store import ObjectStore

from holdfast.checkpoint import cloud, faultpoints
from holdfast.checkpoint.storage import StorageError

_OWNER = "holdfast"  # a key of an object's metadata
_TRIES = 3  # of a request whose outcome is unknown. obstore repeats only those that are harmless to repeat
_READ_BYTES = 2 * 1024 * 1024  # a request for less would mostly wait for its answer to begin
_MAX_PARTS = 10_000
_AT_ONCE = 8


class _There(Exception):
    """An object has appeared under the key that was to be written."""


class Bucket:
    """`conditional` turns False when the store refuses conditional requests. Then `create` looks first and puts after,
    and of two that do so in the same moment both may believe that they were first."""

    small_bytes = 8 * 1024 * 1024  # up to this, one request
    part_bytes = 32 * 1024 * 1024  # eight are in memory while they are sent; 10,000 of them make 312 GiB
    max_copy_bytes = 5 * 1024**3  # of S3

    def __init__(self, store: ObjectStore) -> None:
        self.store = store
        self.conditional = True
        self._readers = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="holdfast-bucket")

    # -- what is there ------------------------------------------------------------------------------------------------

    def keys(self, folder: str) -> list[str]:
        """Of all objects below a folder."""
        return [item["path"] for chunk in obstore.list(self.store, folder + "/") for item in chunk]

    def size(self, key: str) -> int:
        return obstore.head(self.store, key)["size"]

    def is_there(self, key: str) -> bool:
        try:
            obstore.head(self.store, key)
        except FileNotFoundError:
            return False
        return True

    def read(self, key: str, at: int, into: memoryview) -> int:
        """By several requests at once: one alone gets a small part of what the network could do."""
        with into.cast("B") as view:
            step = max(_READ_BYTES, -(-len(view) // _AT_ONCE))
            starts = range(0, len(view), step)
            pieces = [view[start : start + step] for start in starts]
            if len(pieces) == 1:
                return self._read(key, at, pieces[0])
            counts = list(self._readers.map(lambda start, piece: self._read(key, at + start, piece), starts, pieces))
        done = 0
        for start, count in zip(starts, counts, strict=True):
            if count and done != start:
                raise OSError(f"{key}: the store gave less than it has")
            done += count
        return done

    def _read(self, key: str, at: int, into: memoryview) -> int:
        try:
            content = memoryview(obstore.get_range(self.store, key, start=at, length=len(into)))
        except BaseError:
            # Behind the end stores say that such a range cannot be had, each in its own words.
            if at < self.size(key):
                raise
            return 0
        into[: len(content)] = content
        return len(content)

    def content(self, key: str) -> Iterator[memoryview]:
        """All of it, in pieces that are good until the next is asked for."""
        buffer = memoryview(bytearray(self.small_bytes))
        at = 0
        while count := self.read(key, at, buffer):
            yield buffer[:count]
            at += count

    # -- small objects ------------------------------------------------------------------------------------------------

    def put(self, key: str, content: bytes, token: str = "") -> None:
        """With a token: only if there is none."""
        faultpoints.passed("objects.put.before")
        if token:
            obstore.put(self.store, key, content, mode="create", attributes={_OWNER: token})
        else:
            obstore.put(self.store, key, content, use_multipart=False)
        faultpoints.passed("objects.put.after")

    def create(self, key: str, content: bytes) -> bool:
        """An answer can be lost, and then a request that is sent again finds the object that it has made itself. So
        each carries a token in the object's metadata, by which it is known again."""
        token = secrets.token_hex(16)
        for left in reversed(range(_TRIES)):
            if not self.conditional:
                break
            try:
                self.put(key, content, token)
                return True
            except AlreadyExistsError:
                owner = self._owner(key)
                if owner is not None:
                    return owner == token
                if not left:
                    raise  # one that comes and goes: S3 answers so while another is being deleted
            except BaseError as failure:
                if cloud.is_unsupported(failure):
                    self.conditional = False
                elif not left or cloud.is_refused(failure):
                    raise
        if self.is_there(key):
            return False
        self.put(key, content)
        return True

    def _owner(self, key: str) -> str | None:
        """The token with which an object was created, "" if with none. None: there is no object."""
        try:
            attributes = obstore.get(self.store, key, options={"head": True}).attributes
        except FileNotFoundError:
            return None
        return str(attributes.get(_OWNER, ""))

    # -- large objects ------------------------------------------------------------------------------------------------

    def upload(self, key: str, pieces: Iterable[memoryview | bytes], only_if_none: bool = False) -> bool:
        """In parts. Whatever is raised in between aborts the upload, and no object appears.

        False if there is one, which is looked for just before the end, since only then the object appears. That is not
        exact; it is for stores that have nothing better, and for what is too large to be copied.
        """
        writer = obstore.open_writer(self.store, key, buffer_size=self.part_bytes, max_concurrency=_AT_ONCE)
        try:
            with writer:
                # Not by obstore.put: it would ask for the pieces from within, where none can be read from a store.
                self._send(writer, key, pieces)
                if only_if_none and self.is_there(key):
                    raise _There
                faultpoints.passed("objects.complete.before")
        except _There:
            return False
        faultpoints.passed("objects.complete.after")
        return True

    def _send(self, writer: obstore.WritableFile, key: str, pieces: Iterable[memoryview | bytes]) -> None:
        left = self.part_bytes * _MAX_PARTS
        for piece in pieces:
            left -= len(piece)
            if left < 0:
                raise StorageError(f"{key}: an object cannot be larger than {self.part_bytes * _MAX_PARTS} bytes here")
            faultpoints.passed("objects.part.before")
            writer.write(bytes(piece))  # a copy: obstore keeps what it is given until it is sent
            faultpoints.passed("objects.part.after")

    def copy(self, key: str, target: str) -> bool:
        """Only if there is none. True also if there is one with the same bytes: after a lost answer it is this one."""
        if not self.conditional or self.size(key) > self.max_copy_bytes:
            return self.upload(target, self.content(key), only_if_none=True)
        for left in reversed(range(_TRIES)):
            faultpoints.passed("objects.copy.before")
            try:
                obstore.copy(self.store, key, target, overwrite=False)
            except AlreadyExistsError:
                return self._is_same(key, target)
            except BaseError as failure:
                if cloud.is_unsupported(failure):
                    self.conditional = False
                    return self.upload(target, self.content(key), only_if_none=True)
                if self.is_there(target):
                    return self._is_same(key, target)
                if not left or cloud.is_refused(failure):
                    raise
            else:
                faultpoints.passed("objects.copy.after")
                return True
        raise AssertionError("the last try returns or raises")

    def _is_same(self, one: str, other: str) -> bool:
        if self.size(one) != self.size(other):
            return False
        return all(a == b for a, b in zip(self.content(one), self.content(other), strict=True))

    # -- removing -----------------------------------------------------------------------------------------------------

    def delete(self, keys: list[str]) -> None:
        """None there is no error."""
        if not keys:
            return
        faultpoints.passed("objects.delete.before")
        with contextlib.suppress(FileNotFoundError):
            obstore.delete(self.store, keys)
        faultpoints.passed("objects.delete.after")
