"""Checkpoints in an object store: Amazon S3 and what speaks like it, Google Cloud Storage, Azure Blob Storage."""

from __future__ import annotations

import contextlib
import datetime
import errno
import itertools
import os
from collections.abc import Iterable, Iterator

from holdfast.checkpoint import cloud, names
from holdfast.checkpoint.storage import StorageError

POINTS = tuple(
    f"objects.{operation}.{side}"
    for operation in ("put", "part", "complete", "copy", "delete")
    for side in ("before", "after")
)
OLD_S = 24 * 3600.0  # then a temporary object of another machine is nobody's

_MANIFEST = ".manifest.json"


class Objects:
    """An object appears whole or not at all, so `write` is as good as `publish` here, but that it replaces."""

    readers = 3  # each waits for an answer most of the time

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        store = cloud.connect(self.url)
        from holdfast.checkpoint.bucket import Bucket  # only now is it known that obstore is installed

        self.bucket = Bucket(store)

    @property
    def conditional(self) -> bool:
        """Whether `create` is exact: the store has conditional requests, as far as is known."""
        return self.bucket.conditional

    # -- reading ------------------------------------------------------------------------------------------------------

    def names(self, folder: str = "") -> list[str]:
        import obstore

        prefix = _key(folder) if folder else None
        with self._told("listing", folder, absent=False):
            found = obstore.list_with_delimiter(self.bucket.store, prefix)
        objects = [item["path"].rpartition("/")[2] for item in found["objects"]]
        folders = [path.rstrip("/").rpartition("/")[2] for path in found["common_prefixes"]]
        listed = [name for name in objects if names.is_allowed(name) and not names.is_passing(name)]
        return sorted(listed + [name + "/" for name in folders if names.is_allowed(name)])

    def size(self, name: str) -> int:
        with self._told("looking at", name):
            return self.bucket.size(_key(name))

    def read(self, name: str, at: int, into: memoryview, once: bool = False) -> int:
        with self._told("reading", name):
            return self.bucket.read(_key(name), at, into)

    # -- writing ------------------------------------------------------------------------------------------------------

    def write(self, name: str, parts: Iterable[memoryview | bytes]) -> None:
        with self._told("writing", name, absent=False):
            whole, pieces = _gather(parts, self.bucket.small_bytes)
            if whole is None:
                self.bucket.upload(_key(name), pieces)
            else:
                self.bucket.put(_key(name), whole)

    def replace(self, name: str, parts: Iterable[memoryview | bytes]) -> None:
        self.write(name, parts)

    def create(self, name: str, content: bytes) -> bool:
        with self._told("writing", name, absent=False):
            return self.bucket.create(_key(name), content)

    def publish(self, name: str, parts: Iterable[memoryview | bytes]) -> bool:
        """True also in the rare case that another has published the very same bytes in the same moment."""
        with self._told("writing", name, absent=False):
            key = _key(name)
            if self.bucket.is_there(key):
                return False
            whole, pieces = _gather(parts, self.bucket.small_bytes)
            if whole is not None:
                return self.bucket.create(key, whole)
            if not self.conditional:
                return self.bucket.upload(key, pieces, only_if_none=True)
            temporary = names.passing(names.TEMPORARY)
            try:
                self.bucket.upload(temporary, pieces)
                return self.bucket.copy(temporary, key)
            finally:
                with contextlib.suppress(Exception):  # what stays is swept
                    self.bucket.delete([temporary])

    # -- removing -----------------------------------------------------------------------------------------------------

    def delete(self, name: str) -> None:
        with self._told("deleting", name, absent=False):
            self.bucket.delete([_key(name)])

    def delete_folder(self, name: str) -> None:
        """Manifests first: without one there is no checkpoint."""
        with self._told("deleting", name, absent=False):
            keys = self.bucket.keys(_key(name))
            self.bucket.delete([key for key in keys if key.endswith(_MANIFEST)])
            self.bucket.delete([key for key in keys if not key.endswith(_MANIFEST)])

    def set_aside(self, name: str) -> str:
        """There is no rename, and a folder may be large: of a folder only the manifests move, to `damaged_<folder>/`.
        Without one there is no checkpoint. The data stay where they are."""
        with self._told("setting aside", name):
            return self._set_folder_aside(_key(name)) if name.endswith("/") else self._set_file_aside(_key(name))

    def _set_file_aside(self, key: str) -> str:
        for attempt in itertools.count():
            target = _damaged(key, attempt)
            if not self.bucket.is_there(target) and self.bucket.copy(key, target):
                break
        self.bucket.delete([key])
        return target

    def _set_folder_aside(self, key: str) -> str:
        keys = self.bucket.keys(key)
        if not keys:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), key)
        attempt = 0
        while self.bucket.keys(target := _damaged(key, attempt)):
            attempt += 1
        manifests = [found for found in keys if found.endswith(_MANIFEST)]
        for manifest in manifests:
            self.bucket.copy(manifest, target + manifest.removeprefix(key))
        self.bucket.delete(manifests)
        return target + "/"

    def sweep(self) -> list[str]:
        """Remove temporary objects whose writers are gone; returns their names."""
        import obstore

        with self._told("sweeping", "", absent=False):
            # A store refuses the requests of a clock that is minutes off: a day by both clocks is a day.
            now = datetime.datetime.now(datetime.UTC)
            found = {
                item["path"]: item["last_modified"]
                for item in obstore.list_with_delimiter(self.bucket.store)["objects"]
            }
            abandoned = [key for key, at in found.items() if names.is_abandoned(key, (now - at).total_seconds(), OLD_S)]
            self.bucket.delete(abandoned)
            return abandoned

    @contextlib.contextmanager
    def _told(self, doing: str, name: str, absent: bool = True) -> Iterator[None]:
        """A store's error as one line. That an object is absent is an answer to who reads; that a bucket is, is not."""
        from obstore.exceptions import BaseError

        path = f"{self.url}/{name}".rstrip("/")
        try:
            yield
        except FileNotFoundError as failure:
            if absent and "NoSuchBucket" not in str(failure):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path) from None
            raise StorageError(f"{doing} {path}: {cloud.explain(failure)}") from failure
        except (BaseError, OSError) as failure:
            raise StorageError(f"{doing} {path}: {cloud.explain(failure)}", cloud.is_full(failure)) from failure


def _key(name: str) -> str:
    return "/".join(names.split(name))


def _damaged(key: str, attempt: int) -> str:
    folder, slash, last = key.rpartition("/")
    return folder + slash + names.damaged(last, attempt)


def _gather(parts: Iterable[memoryview | bytes], small_bytes: int) -> tuple[bytes | None, Iterator[memoryview | bytes]]:
    """All of it if it is small, else None and all of it in pieces."""
    pieces = _cut(parts, small_bytes)
    first = bytearray()
    for piece in pieces:
        first += piece
        if len(first) > small_bytes:
            return None, itertools.chain([memoryview(first)], pieces)
    return bytes(first), iter(())


def _cut(parts: Iterable[memoryview | bytes], most_bytes: int) -> Iterator[memoryview]:
    """Pieces that are small beside what an upload holds in memory anyway, of parts of any size."""
    for part in parts:
        with memoryview(part) as whole, whole.cast("B") as view:
            for at in range(0, len(view), most_bytes):
                with view[at : at + most_bytes] as piece:
                    yield piece
