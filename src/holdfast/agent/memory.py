"""Was it the kernel's OOM killer? Its log says so by process; a control group's counter says so for the group."""

from __future__ import annotations

import contextlib
import os
import re

from holdfast import linux

_KILLED = re.compile(rb"Killed process (\d+)")


class OomWatch:
    """Reads what the kernel has said since this was made. Both sources may be closed to us; then it knows nothing."""

    def __init__(self) -> None:
        self._log_fd = -1
        with contextlib.suppress(OSError):
            self._log_fd = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.lseek(self._log_fd, 0, os.SEEK_END)
        self._named: set[int] = set()
        self._counter_path = _counter_path()
        self._count = _read_counter(self._counter_path)

    def killed(self, pid: int) -> bool:
        """Whether a process that ended by SIGKILL was killed for memory. Asked once per process."""
        self._read_log()
        count = _read_counter(self._counter_path)
        counted = count > self._count
        self._count = count
        return pid in self._named or counted

    def close(self) -> None:
        if self._log_fd >= 0:
            os.close(self._log_fd)
            self._log_fd = -1

    def _read_log(self) -> None:
        while self._log_fd >= 0:
            try:
                record = os.read(self._log_fd, 8192)
            except BrokenPipeError:
                continue  # the ring buffer overtook us
            except OSError:
                return
            if not record:
                return
            self._named.update(int(pid) for pid in _KILLED.findall(record))


def _counter_path() -> str:
    """The file that counts OOM kills in our control group, of either version."""
    with contextlib.suppress(OSError):
        for line in linux.read("/proc/self/cgroup").splitlines():
            _, controllers, path = line.split(":", 2)
            for candidate in (
                f"/sys/fs/cgroup/memory{path}/memory.oom_control" if "memory" in controllers.split(",") else "",
                f"/sys/fs/cgroup{path}/memory.events" if not controllers else "",
            ):
                if candidate and os.path.exists(candidate):
                    return candidate
    return ""


def _read_counter(path: str) -> int:
    if path:
        with contextlib.suppress(OSError, ValueError):
            for line in linux.read(path).splitlines():
                if line.startswith("oom_kill "):
                    return int(line.split()[1])
    return 0
