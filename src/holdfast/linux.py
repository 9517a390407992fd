"""What Python has no word for on Linux: parent-death signals, subreapers, process titles, process trees, changes."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import select
import signal
import time
from collections.abc import Iterable, Iterator

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_PR_GET_CHILD_SUBREAPER = 37

_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}  # glibc has no word for it either
_IOPRIO_LOWEST = 2 << 13 | 7  # of those who get their share: "idle" would wait for others for ever

_EXEC_S = 5.0  # on a disk that is slow

_IN_CHANGED = 0x2 | 0x8 | 0x80 | 0x100 | 0x200  # written to, closed after that, moved here, made, deleted

_libc = ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, value: object) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}): {os.strerror(number)}")


def read(path: str) -> str:
    """A file of /proc or /sys, whole."""
    with open(path, errors="replace") as file:
        return file.read()


def fill_standard_streams() -> None:
    """A program started with some of 0 to 2 closed would get them for its own sockets, and write its output there."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)


def die_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when `parent` ends; end now if it has ended already."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def lower_io_priority() -> None:
    """Let others go first at the disk, where there is a choice."""
    if (number := _IOPRIO_SET.get(os.uname().machine)) is not None:
        _libc.syscall(number, 1, 0, _IOPRIO_LOWEST)


def adopt_orphans(adopt: bool = True) -> bool:
    """Become (or stop being) the parent of descendants whose own parent ends. Returns what was set before."""
    before = ctypes.c_int()
    _prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before))
    _prctl(_PR_SET_CHILD_SUBREAPER, int(adopt))
    return bool(before.value)


def set_title(title: str) -> None:
    """Make `ps` and `top` show `title`. It is written over the original command line, so it is cut to that length."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        fields = read("/proc/self/stat").rpartition(")")[2].split()
        start, end = int(fields[45]), int(fields[46])
        if end > start:
            text = title.encode()[: end - start - 1]
            ctypes.memmove(start, text + b"\0" * (end - start - len(text)), end - start)
        _prctl(_PR_SET_NAME, title.encode()[:15])


def children(pid: int) -> list[int]:
    """The live children of a process, those of each of its threads."""
    found: list[int] = []
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                found += map(int, read(f"/proc/{pid}/task/{thread}/children").split())
    except (FileNotFoundError, ProcessLookupError):
        return []
    return found


def descendants(pid: int) -> Iterator[int]:
    """Every process below `pid`, parents before children, as seen at one moment."""
    for child in children(pid):
        yield child
        yield from descendants(child)


def parent(pid: int) -> int:
    """0 when it is gone, or nobody's here."""
    try:
        return int(read(f"/proc/{pid}/stat").rpartition(")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError, IndexError, ValueError):
        return 0


def state(pid: int) -> str:
    """The one-letter state of a process (R, S, D, T, Z, ...), or '' when it is gone."""
    try:
        return read(f"/proc/{pid}/stat").rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError, IndexError):
        return ""


def environment(pid: int) -> list[bytes]:
    """What a process was started with; nothing of one that is gone, or somebody else's."""
    try:
        if not (found := _environment(pid)):
            until_s = time.monotonic() + _EXEC_S
            while _is_in_exec(pid) and time.monotonic() < until_s:
                time.sleep(0.001)  # there is nothing to wait on
            found = _environment(pid)
    except OSError:
        return []
    return found.split(b"\0")


def _environment(pid: int) -> bytes:
    with open(f"/proc/{pid}/environ", "rb") as file:
        return file.read()


def _is_in_exec(pid: int) -> bool:
    """Whether its new program has no environment yet. Whoever started it has heard before that, that all went well."""
    os.readlink(f"/proc/{pid}/exe")  # the kernel's own have none, and no environment
    return read(f"/proc/{pid}/stat").rpartition(")")[2].split()[48] == "0"


def bearers(*marks: bytes) -> list[int]:
    """Every other process with one of these in its environment. One that has ended has none."""
    pids = [int(entry) for entry in os.listdir("/proc") if entry.isdigit() and int(entry) != os.getpid()]
    return [pid for pid in pids if not set(marks).isdisjoint(environment(pid))]


def waited_s(thread: int) -> float:
    """How long a thread of this process has waited for a core, in all; 0 where the kernel does not count that."""
    try:
        return int(read(f"/proc/self/task/{thread}/schedstat").split()[1]) / 1e9
    except (OSError, IndexError):
        return 0.0


def signal_all(pids: Iterable[int], signum: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signum)


def end(pid: int, wait_s: float) -> None:
    """Kill a process, and wait until it holds nothing any more."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        signal_all([pid], signal.SIGKILL)
        select.select([fd], [], [], wait_s)
    finally:
        os.close(fd)


def wait_for_end(pids: Iterable[int], wait_s: float) -> None:
    """Until these processes are gone, or for so long."""
    until_s = time.monotonic() + wait_s
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            fd = os.pidfd_open(pid)
            try:
                select.select([fd], [], [], max(0.0, until_s - time.monotonic()))
            finally:
                os.close(fd)


def signal_session(pid: int, signum: int) -> None:
    """Signal a process that leads its own group, and the group; the process alone if it has not got there yet."""
    try:
        os.killpg(pid, signum)
    except (ProcessLookupError, PermissionError):
        signal_all([pid], signum)


def raise_open_files() -> None:
    """As many as this process may have. Those that it starts have as many, if nobody tells them otherwise."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class Changes:
    """In folders: something in one of them was written, made or replaced. `fd` is readable then."""

    def __init__(self) -> None:
        """Raises OSError: of these, a user may have only so many."""
        self.fd = _checked("inotify_init1", _libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))

    def add(self, folder: str) -> None:
        _checked(folder, _libc.inotify_add_watch(self.fd, os.fsencode(folder), _IN_CHANGED))

    def forget(self) -> None:
        """What has happened so far."""
        with contextlib.suppress(BlockingIOError):
            while os.read(self.fd, 65536):
                pass

    def close(self) -> None:
        os.close(self.fd)


def _checked(what: str, result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), what)
    return result


def open_descriptors() -> list[int]:
    return [int(name) for name in os.listdir("/proc/self/fd")]


def thread_count() -> int:
    return len(os.listdir("/proc/self/task"))
