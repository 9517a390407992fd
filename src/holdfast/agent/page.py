"""The web page of a job: a process of its own beside the agent, so that nothing it does can cost the job anything."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

from holdfast import linux

END_S = 2.0  # for those who look on, and for a last word to a collector of metrics


class Page:
    """Started where the coordinator is, whose record is that of the whole job."""

    def __init__(self, listen: str | None, run_dir: str | None, complain: Callable[[str], None]) -> None:
        self._listen, self._run_dir, self._complain = listen, run_dir, complain
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        if self._listen is None or self._process is not None:
            return
        if self._run_dir is None:
            self._complain("--dashboard has no effect: with --log-dir=/dev/null there is no record to show")
            self._listen = None
            return
        command = [sys.executable, "-P", "-m", "holdfast.dashboard", self._run_dir, "--listen", self._listen]
        command += ["--parent", str(os.getpid())]
        try:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
        except OSError as failure:
            self._complain(f"there is no page: {failure.strerror}; training goes on")

    def close(self) -> None:
        """Those who look on are shown the end first."""
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(END_S)
            except subprocess.TimeoutExpired:
                linux.end(self._process.pid, END_S)
                self._process.poll()
            self._process = None
