"""Checkpoints on a filesystem: a local disk, `/dev/shm`, or a directory that nodes share."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterable, Iterator

from holdfast.checkpoint import files, names
from holdfast.checkpoint.errors import CheckpointError
from holdfast.checkpoint.storage import StorageError

POINTS = files.POINTS  # between any two effects of what is done here
OLD_S = 24 * 3600.0  # then a temporary file of another machine, to which nothing was written, is nobody's

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_FULL = (errno.ENOSPC, errno.EDQUOT)
_ADVICE = {
    errno.ENOENT: "the folder was taken away meanwhile, or the directory is a link to nothing",
    errno.ENOSPC: "free some space there, or keep fewer checkpoints",
    errno.EDQUOT: "free some space there, keep fewer checkpoints, or ask for a larger quota",
    errno.EIO: "the disk or the file server failed, see dmesg; name another directory if it goes on",
    errno.EROFS: "it is mounted read-only; name another directory, or remount it",
    errno.EACCES: "this user may not; change the owner or the mode, or name another directory",
    errno.EPERM: "this user may not; change the owner or the mode, or name another directory",
    errno.ESTALE: "the file server has forgotten it; mount it again",
    errno.EFBIG: "larger than a file may be here; see ulimit -f",
    errno.EMFILE: "see ulimit -n",
    errno.ELOOP: "it is a symbolic link, and those are not followed here; remove it",
    errno.ENOTDIR: "a file or a symbolic link is where a folder should be; move it away",
    errno.EISDIR: "a folder is where a file should be; move it away",
}


class Folder:
    """Every name is looked up part by part from the root, and no symbolic link below it is ever followed: what lies in
    a checkpoint directory may have been put there by anybody. The root itself may be a link; people mount like that."""

    readers = 2  # one waits for the disk while the other's bytes are on their way

    def __init__(self, path: str) -> None:
        if not path or "\0" in path:
            raise CheckpointError(f"{path!r} is not a directory's name")
        self.url = os.path.abspath(path)  # a process that writes for another may stand elsewhere
        self._durable: set[str] = set()  # folders whose own names are known to be on disk

    # -- reading ------------------------------------------------------------------------------------------------------

    def names(self, folder: str = "") -> list[str]:
        """Without links, pipes and the like, names that no storage would take, and what is there for a moment."""
        parts = names.split(folder) if folder else []
        with self._told("listing", folder), contextlib.suppress(FileNotFoundError), self._folder(parts) as fd:
            return sorted(_listed(fd))
        return []

    def size(self, name: str) -> int:
        with self._told("looking at", name), self._parent(name) as (fd, last):
            status = os.stat(last, dir_fd=fd, follow_symlinks=False)
            if not stat.S_ISREG(status.st_mode):
                raise OSError(errno.EINVAL, "Not a regular file", name)
            return status.st_size

    def read(self, name: str, at: int, into: memoryview, once: bool = False) -> int:
        with self._told("reading", name), self._parent(name) as (parent, last):
            fd = files.open_to_read(last, parent)
            try:
                return files.read(fd, at, into, once)
            finally:
                os.close(fd)

    # -- writing ------------------------------------------------------------------------------------------------------

    def write(self, name: str, parts: Iterable[memoryview | bytes]) -> None:
        """What fails is removed again, so that a full disk is not kept full by half a file."""
        with self._told("writing", name, absent=False), self._parent(name, make=True) as (parent, last):
            fd = files.create(last, parent, os.O_TRUNC)
            with self._removed_if_failed(last, parent):
                self._fill(fd, parts)
            files.sync_folder(parent)

    def create(self, name: str, content: bytes) -> bool:
        return self.publish(name, [content])

    def publish(self, name: str, parts: Iterable[memoryview | bytes]) -> bool:
        with self._told("writing", name, absent=False), self._parent(name, make=True) as (parent, last):
            if _is_there(last, parent):
                files.sync_folder(parent)  # whoever is told that it is there may rely on it
                return False
            temporary = names.passing(names.TEMPORARY)
            fd = files.create(temporary, parent, os.O_EXCL)
            with self._removed_if_failed(temporary, parent):
                self._fill(fd, parts)
                created = files.rename(temporary, last, parent)
            if not created:
                files.unlink(temporary, parent)
            files.sync_folder(parent)
            return created

    def replace(self, name: str, parts: Iterable[memoryview | bytes]) -> None:
        with self._told("writing", name, absent=False), self._parent(name, make=True) as (parent, last):
            temporary = names.passing(names.TEMPORARY)
            fd = files.create(temporary, parent, os.O_EXCL)
            with self._removed_if_failed(temporary, parent):
                self._fill(fd, parts)
                os.rename(temporary, last, src_dir_fd=parent, dst_dir_fd=parent)
            files.sync_folder(parent)

    def _fill(self, fd: int, parts: Iterable[memoryview | bytes]) -> None:
        try:
            files.write(fd, parts)
            files.sync(fd)
            # What went through the page cache: training needs the memory more, and it is read back from the disk.
            files.advise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)

    @contextlib.contextmanager
    def _removed_if_failed(self, name: str, parent: int) -> Iterator[None]:
        try:
            yield
        except BaseException:
            with contextlib.suppress(OSError):
                files.unlink(name, parent)
            raise

    # -- removing -----------------------------------------------------------------------------------------------------

    def delete(self, name: str) -> None:
        with self._told("deleting", name), contextlib.suppress(FileNotFoundError), self._parent(name) as (fd, last):
            files.unlink(last, fd)
            files.sync_folder(fd)

    def delete_folder(self, name: str) -> None:
        with self._told("deleting", name), contextlib.suppress(FileNotFoundError), self._parent(name) as (fd, last):
            self._forget(name)
            trash = names.passing(names.TRASH)
            files.rename(last, trash, fd)
            files.sync_folder(fd)
            files.remove(trash, fd)

    def set_aside(self, name: str) -> str:
        with self._told("setting aside", name), self._parent(name) as (fd, last):
            self._forget(name)
            attempt = 0
            while not files.rename(last, names.damaged(last, attempt), fd):
                attempt += 1
            files.sync_folder(fd)
            parts = [*names.split(name)[:-1], names.damaged(last, attempt)]
            return "/".join(parts) + ("/" if name.endswith("/") else "")

    def sweep(self) -> list[str]:
        """Remove what writers that are gone have left behind for a moment, to two folders deep; returns the names."""
        removed: list[str] = []
        with self._told("sweeping", ""), contextlib.suppress(FileNotFoundError), self._folder([]) as root:
            self._sweep(root, "", 2, _clock_s(root), removed)
        return removed

    def _sweep(self, fd: int, path: str, depth: int, now_s: float, removed: list[str]) -> None:
        for name in os.listdir(fd):
            with contextlib.suppress(FileNotFoundError):
                status = os.stat(name, dir_fd=fd, follow_symlinks=False)
                if names.is_abandoned(name, now_s - status.st_mtime, OLD_S):
                    files.remove(name, fd)
                    removed.append(path + name)
                elif stat.S_ISDIR(status.st_mode) and depth and not names.is_passing(name):
                    inside = os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=fd)
                    try:
                        self._sweep(inside, f"{path}{name}/", depth - 1, now_s, removed)
                    finally:
                        os.close(inside)

    # -- the way to a name --------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _parent(self, name: str, make: bool = False) -> Iterator[tuple[int, str]]:
        """The folder in which a name is, open, and the name's last part."""
        parts = names.split(name)
        with self._folder(parts[:-1], make) as fd:
            yield fd, parts[-1]

    @contextlib.contextmanager
    def _folder(self, parts: list[str], make: bool = False) -> Iterator[int]:
        if make:
            _make_root(self.url)
        fd = os.open(self.url, _FOLDER)
        try:
            for count, part in enumerate(parts, 1):
                if make:
                    self._make("/".join(parts[:count]), part, fd)
                below = os.open(part, _FOLDER | os.O_NOFOLLOW, dir_fd=fd)
                os.close(fd)
                fd = below
            yield fd
        finally:
            os.close(fd)

    def _make(self, path: str, part: str, parent: int) -> None:
        """One that is there already may have been made a moment ago by a process that has not synced it yet."""
        if files.make_folder(part, parent) or path not in self._durable:
            files.sync_folder(parent)
            self._durable.add(path)

    def _forget(self, name: str) -> None:
        gone = name.removesuffix("/")
        self._durable -= {path for path in tuple(self._durable) if path == gone or path.startswith(gone + "/")}

    @contextlib.contextmanager
    def _told(self, doing: str, name: str, absent: bool = True) -> Iterator[None]:
        """An error of the system as one line: what failed, where, why, and what to do. That a name is absent is a
        plain answer to who reads; to who writes it is a failure like others: the folder was taken away meanwhile."""
        path = f"{self.url}/{name}".rstrip("/")
        try:
            yield
        except OSError as failure:
            if absent and isinstance(failure, FileNotFoundError):
                raise FileNotFoundError(failure.errno, failure.strerror, path) from None
            why = failure.strerror or type(failure).__name__
            advice = _ADVICE.get(failure.errno or 0, "")
            text = f"{doing} {path}: {why}" + (f"; {advice}" if advice else "")
            raise StorageError(text, full=failure.errno in _FULL) from failure


def _listed(folder: int) -> Iterator[str]:
    with os.scandir(folder) as entries:
        for entry in entries:
            if not names.is_allowed(entry.name) or names.is_passing(entry.name):
                continue
            if entry.is_dir(follow_symlinks=False):
                yield entry.name + "/"
            elif entry.is_file(follow_symlinks=False):
                yield entry.name


def _is_there(name: str, folder: int) -> bool:
    try:
        os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def _make_root(path: str) -> None:
    """With all above it that is missing, each known to be on disk."""
    if os.path.isdir(path):
        return
    above = os.path.dirname(path)
    _make_root(above)
    files.make_folder(path)
    fd = os.open(above, _FOLDER)
    try:
        files.sync_folder(fd)
    finally:
        os.close(fd)


def _clock_s(folder: int) -> float:
    """The time on the clock by which this filesystem dates its files, which need not be this machine's."""
    name = names.passing(names.TEMPORARY)
    fd = files.create(name, folder, os.O_EXCL)
    try:
        os.write(fd, b"\n")
        return os.fstat(fd).st_mtime
    finally:
        os.close(fd)
        files.unlink(name, folder)
