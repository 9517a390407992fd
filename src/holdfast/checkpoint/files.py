"""System calls of a checkpoint on a filesystem: files written whole and durably, renames that replace nothing."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import stat
from collections.abc import Iterable

from holdfast.checkpoint import direct, faultpoints

# Large enough that the calls cost nothing, small enough that the disk starts early and the last fsync has little left.
WRITE_BYTES = 8 * 1024 * 1024

_RENAME_NOREPLACE = 1
_SYNC_FILE_RANGE_WRITE = 2
_libc = ctypes.CDLL(None, use_errno=True)

POINTS = tuple(
    f"folder.{operation}.{side}"
    for operation in ("mkdir", "open", "write", "fsync", "rename", "fsync_folder", "unlink", "rmdir")
    for side in ("before", "after")
)


def create(name: str, folder: int, flags: int) -> int:
    """A regular file to be written. Never one behind a symbolic link, never a pipe that nobody reads."""
    faultpoints.passed("folder.open.before")
    flags |= os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    fd = _only_regular(os.open(name, flags, 0o666, dir_fd=folder), name)
    faultpoints.passed("folder.open.after")
    return fd


def open_to_read(name: str, folder: int) -> int:
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    return _only_regular(os.open(name, flags, dir_fd=folder), name)


def _only_regular(fd: int, name: str) -> int:
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    raise OSError(errno.EINVAL, "Not a regular file", name)


def read(fd: int, at: int, into: memoryview, once: bool = False) -> int:
    """Until `into` is full or the file ends. What is read once goes past the page cache, if it can."""
    with into.cast("B") as view:
        done = _read_direct(fd, at, view) if once else 0
        if done == len(view):
            return done
        # The kernel reads ahead 128 KiB at a time by itself, which is too little to keep a fast disk busy.
        advise(fd, at + done, 2 * (len(view) - done), os.POSIX_FADV_WILLNEED)
        while done < len(view) and (count := os.preadv(fd, [view[done:]], at + done)):
            done += count
        return done


def _read_direct(fd: int, at: int, view: memoryview) -> int:
    size = direct.blocks(view, at)
    if not size or not direct.begin(fd):
        return 0
    done = 0
    try:
        while done < size:
            count = os.preadv(fd, [view[done:size]], at + done)
            done += count
            if count == 0 or count % direct.BLOCK_BYTES:
                break  # where the file ends
    except OSError as failure:
        if not direct.is_refused(failure):
            raise
    finally:
        direct.end(fd)
    return done


def advise(fd: int, at: int, size_bytes: int, advice: int) -> None:
    with contextlib.suppress(OSError):  # only advice
        os.posix_fadvise(fd, at, size_bytes, advice)


def write(fd: int, parts: Iterable[memoryview | bytes]) -> None:
    """Each part may be reused as soon as the next one is asked for.

    Space is not reserved beforehand: how much is needed is known only at the end, ext4 and XFS reserve it with each
    write anyway, and glibc's posix_fallocate writes every block where a filesystem has no such thing.
    """
    out = _Out(fd)
    for part in parts:
        with memoryview(part) as whole, whole.cast("B") as view:
            out.add(view)
    out.finish()


class _Out:
    """A file that is written from its begin: large parts from where they lie, the others gathered in a buffer."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._at = 0
        self._held = 0  # bytes in the buffer
        self._buffer: memoryview | None = None
        self._direct: bool | None = None  # None: not tried yet

    def add(self, view: memoryview) -> None:
        done = 0
        while done < len(view):
            rest = view[done:]
            if self._held == 0 and (size := self._straight(rest)):
                self._write(rest[:size])
            else:
                size = self._hold(rest)
            done += size

    def _straight(self, view: memoryview) -> int:
        return len(view) if self._direct is False else direct.blocks(view, self._at)

    def _hold(self, view: memoryview) -> int:
        if self._buffer is None:
            self._buffer = direct.buffer(WRITE_BYTES)
        size = min(len(view), WRITE_BYTES - self._held)
        self._buffer[self._held : self._held + size] = view[:size]
        self._held += size
        if self._held == WRITE_BYTES:
            self._flush()
        return size

    def _flush(self) -> None:
        assert self._buffer is not None
        self._write(self._buffer[: self._held])
        self._held = 0

    def finish(self) -> None:
        """The last bytes, which fill no block, go the other way."""
        if self._held:
            self._flush()
        self._end_direct()

    def _write(self, view: memoryview) -> None:
        done = 0
        while done < len(view):
            rest = view[done : done + WRITE_BYTES]
            if size := direct.blocks(rest, self._at):
                self._begin_direct()
                rest = rest[:size]
            else:
                self._end_direct()
            faultpoints.passed("folder.write.before")
            try:
                written = os.write(self._fd, rest)
            except OSError as failure:
                if not (self._direct and direct.is_refused(failure)):
                    raise
                self._end_direct()
                continue
            faultpoints.passed("folder.write.after")
            if not self._direct:
                _start_writeback(self._fd, self._at, written)
            self._at += written
            done += written

    def _begin_direct(self) -> None:
        if self._direct is None:
            self._direct = direct.begin(self._fd)

    def _end_direct(self) -> None:
        """For good: after a part that fills no block there is nothing that could go that way."""
        if self._direct:
            direct.end(self._fd)
        self._direct = False


def _start_writeback(fd: int, at: int, size_bytes: int) -> None:
    """Let the disk begin with these bytes while the next are made. A hint: what fails here fails again in fsync."""
    if size_bytes >= WRITE_BYTES and hasattr(_libc, "sync_file_range"):
        _libc.sync_file_range(fd, ctypes.c_int64(at), ctypes.c_int64(size_bytes), _SYNC_FILE_RANGE_WRITE)


def sync(fd: int) -> None:
    faultpoints.passed("folder.fsync.before")
    os.fsync(fd)
    faultpoints.passed("folder.fsync.after")


def sync_folder(fd: int) -> None:
    faultpoints.passed("folder.fsync_folder.before")
    try:
        os.fsync(fd)
    except OSError as failure:
        # Some network and FUSE filesystems have no such thing: there, a name is durable when the call returns.
        if failure.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS):
            raise
    faultpoints.passed("folder.fsync_folder.after")


def make_folder(name: str, parent: int | None = None) -> bool:
    """False if it is there."""
    faultpoints.passed("folder.mkdir.before")
    try:
        os.mkdir(name, dir_fd=parent)
    except FileExistsError:
        return False
    faultpoints.passed("folder.mkdir.after")
    return True


def unlink(name: str, folder: int) -> None:
    faultpoints.passed("folder.unlink.before")
    os.unlink(name, dir_fd=folder)
    faultpoints.passed("folder.unlink.after")


def remove(name: str, folder: int) -> None:
    """A file, or a folder with all in it. Links are removed, not followed. Somebody else may be doing the same."""
    try:
        inside = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    except FileNotFoundError:
        return
    except NotADirectoryError:
        with contextlib.suppress(FileNotFoundError):
            unlink(name, folder)
        return
    try:
        for entry in os.listdir(inside):
            remove(entry, inside)
    finally:
        os.close(inside)
    faultpoints.passed("folder.rmdir.before")
    with contextlib.suppress(FileNotFoundError):
        os.rmdir(name, dir_fd=folder)
    faultpoints.passed("folder.rmdir.after")


# -- renames that replace nothing -------------------------------------------------------------------------------------

_UNSUPPORTED = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EPERM, errno.EMLINK)


def rename(old: str, new: str, folder: int) -> bool:
    """Within one folder; False if the new name is in use. Three ways, since no filesystem has all of them: NFS has no
    rename without replacing, FAT and many in user space have no hard links, and no folder can be linked."""
    faultpoints.passed("folder.rename.before")
    for way in (_rename_exclusively, _link, _rename_with_lock):
        try:
            way(old, new, folder)
        except FileExistsError:
            return False
        except OSError as failure:
            if failure.errno not in _UNSUPPORTED or way is _rename_with_lock:
                raise
        else:
            faultpoints.passed("folder.rename.after")
            return True
    raise AssertionError("the last way returns or raises")


def _rename_exclusively(old: str, new: str, folder: int) -> None:
    if not hasattr(_libc, "renameat2"):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), new)
    if _libc.renameat2(folder, os.fsencode(old), folder, os.fsencode(new), _RENAME_NOREPLACE) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), new)


def _link(old: str, new: str, folder: int) -> None:
    if stat.S_ISDIR(os.stat(old, dir_fd=folder, follow_symlinks=False).st_mode):
        raise OSError(errno.EPERM, os.strerror(errno.EPERM), new)
    try:
        os.link(old, new, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)
    except FileExistsError:
        # NFS sends a request again when the answer is lost; then what exists is our own link.
        if not _is_same(old, new, folder):
            raise
    unlink(old, folder)


def _is_same(one: str, other: str, folder: int) -> bool:
    found = [os.stat(name, dir_fd=folder, follow_symlinks=False) for name in (one, other)]
    return (found[0].st_dev, found[0].st_ino) == (found[1].st_dev, found[1].st_ino)


def _rename_with_lock(old: str, new: str, folder: int) -> None:
    """Exact among the processes that share the lock, which on most network filesystems are those of one node."""
    fcntl.flock(folder, fcntl.LOCK_EX)
    try:
        with contextlib.suppress(FileNotFoundError):
            os.stat(new, dir_fd=folder, follow_symlinks=False)
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), new)
        os.rename(old, new, src_dir_fd=folder, dst_dir_fd=folder)
    finally:
        fcntl.flock(folder, fcntl.LOCK_UN)
