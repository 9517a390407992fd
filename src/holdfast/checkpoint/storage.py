"""Where checkpoints are kept: few operations, which a filesystem and an object store both have."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from holdfast.checkpoint.errors import CheckpointError


class StorageError(CheckpointError):
    """An operation failed; what and where is in the text. `full` if there is no room left."""

    def __init__(self, text: str, full: bool = False) -> None:
        super().__init__(text)
        self.full = full


class Storage(Protocol):
    """Names are relative, with `/` between parts. All but `read`, `size` and `names` are durable when they return, and
    only `replace` ever replaces what is there. All raise StorageError; FileNotFoundError for a name not there."""

    url: str  # as a person would write it
    readers: int  # how many reads at once are faster than one

    def names(self, folder: str = "") -> list[str]:
        """What is directly below a folder: files as they are, folders with a `/` at their end. [] if there is none."""

    def size(self, name: str) -> int: ...

    def read(self, name: str, at: int, into: memoryview, once: bool = False) -> int:
        """Fill `into` from there on; returns the bytes read, fewer only at the end of the file. `once`: nobody else on
        this machine is about to read the same, so that it need not be kept in memory, and is the storage's own."""

    def write(self, name: str, parts: Iterable[memoryview | bytes]) -> None:
        """A file of any size, part by part. Not atomic on a filesystem; nobody may rely on it until it is referred to.
        It may replace what an earlier, unfinished write of the same name has left."""

    def create(self, name: str, content: bytes) -> bool:
        """A small file, whole or not at all. False if there is one already, which stays as it is."""

    def publish(self, name: str, parts: Iterable[memoryview | bytes]) -> bool:
        """As `create`, for a file of any size: it is there whole, or not at all."""

    def replace(self, name: str, parts: Iterable[memoryview | bytes]) -> None:
        """A file of any size, in the place of what is there: that, or the new one, and at no moment anything else. Who
        gives the parts may give up by an exception, which comes through."""

    def delete(self, name: str) -> None:
        """A file. None there is no error."""

    def delete_folder(self, name: str) -> None:
        """With all in it. It is out of the way at once, also if this is cut short."""

    def set_aside(self, name: str) -> str:
        """Rename a file, or a folder (with `/` at its end), so that it is never taken for a checkpoint again; returns
        the new name, which begins with `damaged_` and is not in use."""

    def sweep(self) -> list[str]:
        """Remove what writers that are gone have left behind for a moment; returns the names."""


def open_storage(url: str) -> Storage:
    """A directory, or `s3://`, `gs://`, `az://`."""
    scheme, found, _ = url.partition("://")
    if not found or scheme == "file":
        from holdfast.checkpoint.folder import Folder

        return Folder(url.removeprefix("file://"))
    from holdfast.checkpoint.objects import Objects

    return Objects(url)
