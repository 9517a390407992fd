"""Children in which chosen system calls fail, or which are killed: what a bad disk and a bad moment look like."""

from __future__ import annotations

import ctypes
import errno
import importlib
import mmap
import os
import platform
import struct
from collections.abc import Callable, Mapping

from holdfast.checkpoint import faultpoints

_PR_SET_SECCOMP = 22
_PR_SET_NO_NEW_PRIVS = 38
_SECCOMP_MODE_FILTER = 2
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_LOAD, _EQUAL, _RETURN = 0x20, 0x15, 0x06

_NUMBERS = {
    "x86_64": {
        "write": 1,
        "fsync": 74,
        "preadv2": 327,
        "renameat2": 316,
        "linkat": 265,
        "mkdirat": 258,
    },
    "aarch64": {
        "write": 64,
        "fsync": 82,
        "preadv2": 286,
        "renameat2": 276,
        "linkat": 37,
        "mkdirat": 34,
        "unlinkat": 35,
    },
}


def fail(calls: Mapping[str, int]) -> None:
    """From now on the kernel answers these calls of this process with these errors. There is no way back."""
    numbers = _NUMBERS[platform.machine()]
    program = [(_LOAD, 0, 0, 0)]
    for name, error in calls.items():
        program += [(_EQUAL, 0, 1, numbers[name]), (_RETURN, 0, 0, _ERRNO | error)]
    program.append((_RETURN, 0, 0, _ALLOW))
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in program))
    header = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(program), ctypes.addressof(code)))
    libc = ctypes.CDLL(None, use_errno=True)
    for arguments in ((_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), (_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, header, 0, 0)):
        if libc.prctl(*arguments) != 0:
            raise OSError(ctypes.get_errno(), "prctl: " + os.strerror(ctypes.get_errno()))


def in_child(work: Callable[[], object]) -> str:
    """What `work` returns, or the error that it raises, as text. By shared memory: no call is needed to report it."""
    with mmap.mmap(-1, 65536) as report:
        child = os.fork()
        if child == 0:
            try:
                text = repr(work())
            except BaseException as failure:
                text = f"{type(failure).__name__}: {failure} full={getattr(failure, 'full', None)}"
            content = text.encode()
            report[: len(content)] = content
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        return report[:].rstrip(b"\0").decode()


def with_failing(calls: Mapping[str, int], work: Callable[[], object]) -> str:
    def child() -> object:
        fail(calls)
        return work()

    return in_child(child)


def killed_at(point: str, count: int, work: Callable[[Callable[[str], None]], object]) -> tuple[bool, list[str]]:
    """Run `work` in a child that is killed when it passes a point for the `count`-th time. Returns whether it was, and
    what it had reported done."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.environ[faultpoints.VARIABLE] = f"{point}:{count}"
            importlib.reload(faultpoints)
            work(lambda done: _say(write_end, done))
            status = 0
        finally:
            os._exit(status)
    os.close(write_end)
    with open(read_end) as reports:
        done = reports.read().split()
    status = os.waitpid(child, 0)[1]
    assert status in (0, 9), f"at {point}:{count} it ended with {status}, after {done}"
    return status == 9, done


def _say(fd: int, done: str) -> None:
    os.write(fd, f"{done}\n".encode())


def is_possible() -> bool:
    """Whether this kernel lets a process filter its own calls."""
    if platform.machine() not in _NUMBERS:
        return False
    return "Error" not in with_failing({"fsync": errno.EIO}, lambda: None)
