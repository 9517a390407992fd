"""The web page of a job: a process of its own beside the agent, so that nothing it does can cost the job anything."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import subprocess
import sys
from collections.abc import Callable

from holdfast import linux

END_S = 2.0  # for those who look on, and for a last word to a collector of metrics


class Page:
    """Started where the coordinator is, whose record is that of the whole job."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, listen: str | None, run_dir: str | None, complain: Callable[[str], None]
    ) -> None:
        self._loop, self._listen, self._run_dir, self._complain = loop, listen, run_dir, complain
        self._token = secrets.token_urlsafe(32)  # the next process's, too: addresses that were given away stay good
        self._process: subprocess.Popen[bytes] | None = None
        self._fd = -1
        self._wanted = False
        self._kill: asyncio.TimerHandle | None = None  # once it was told to end

    def start(self) -> None:
        """One that ends still has its port: the next comes after it."""
        self._wanted = True
        if self._listen is None or self._process is not None:
            return
        if self._run_dir is None:
            self._complain("--dashboard has no effect: with --log-dir=/dev/null there is no record to show")
            self._listen = None
            return
        command = [sys.executable, "-P", "-m", "holdfast.dashboard", self._run_dir, "--listen", self._listen]
        command += ["--parent", str(os.getpid()), "--token-on-stdin"]
        try:
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
        except OSError as failure:
            self._complain(f"there is no page: {failure.strerror}; training goes on")
            return
        assert self._process.stdin is not None
        with contextlib.suppress(OSError), self._process.stdin as stdin:
            stdin.write(f"{self._token}\n".encode())
        self._fd = os.pidfd_open(self._process.pid)
        self._loop.add_reader(self._fd, self._ended)

    def stop(self) -> None:
        """The coordinator is elsewhere now. The job goes on, and does not wait for this."""
        self._wanted = False
        if self._process is not None and self._kill is None:
            self._process.terminate()
            self._kill = self._loop.call_later(END_S, self._process.kill)

    def _ended(self) -> None:
        """Of one that ends by itself, the reason is told by it; it is not tried again."""
        again = self._wanted and self._kill is not None
        self._reap()
        if again:
            self.start()

    def _reap(self) -> None:
        assert self._process is not None
        self._loop.remove_reader(self._fd)
        os.close(self._fd)
        if self._kill is not None:
            self._kill.cancel()
        self._process.poll()
        self._process = self._kill = None

    def close(self) -> None:
        """The job is over: those who look on are shown the end first."""
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(END_S)
            except subprocess.TimeoutExpired:
                linux.end(self._process.pid, END_S)
            self._reap()
