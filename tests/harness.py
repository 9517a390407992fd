"""A real job under test: `holdfast run` as a child process, its ranks' news over a FIFO, and what is left of it."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast import linux

SCRIPTS = Path(__file__).parent / "run" / "scripts"
TRAINS = SCRIPTS / "trains.py"
WAIT_S = 60.0


def needs(is_there: bool, what: str) -> pytest.MarkDecorator:
    """Skips a test where a person's machine lacks something. CI lacks nothing: there it runs, and fails."""
    return pytest.mark.skipif(not is_there and os.environ.get("HOLDFAST_CI") != "1", reason=f"needs {what}")


class News:
    """Lines that ranks write to a FIFO as they go: JSON objects with at least rank, generation and pid."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self._fd = os.open(path, os.O_RDWR | os.O_NONBLOCK)  # read-write, so that it is never at its end
        self._rest = b""
        self.seen: list[dict[str, Any]] = []
        self._taken = 0

    def wait(self, wanted: Callable[[dict[str, Any]], bool], wait_s: float = WAIT_S) -> dict[str, Any]:
        """The next line that is wanted; those before it are passed over."""
        until = time.monotonic() + wait_s
        while True:
            while self._taken < len(self.seen):
                self._taken += 1
                if wanted(self.seen[self._taken - 1]):
                    return self.seen[self._taken - 1]
            left_s = until - time.monotonic()
            if left_s <= 0 or not select.select([self._fd], [], [], left_s)[0]:
                raise AssertionError(f"no such news within {wait_s} s; the last were {self.seen[-5:]}")
            self._read()

    def read_until_exit(self, pid: int, wait_s: float) -> None:
        """Wait for more, or for the process to end."""
        fd = os.pidfd_open(pid)
        ready, _, _ = select.select([self._fd, fd], [], [], wait_s)
        os.close(fd)
        if self._fd in ready:
            self._read()

    def read_rest(self) -> None:
        """What is there already."""
        while select.select([self._fd], [], [], 0)[0]:
            self._read()

    def _read(self) -> None:
        *lines, self._rest = (self._rest + os.read(self._fd, 1 << 16)).split(b"\n")
        self.seen += [json.loads(line) for line in lines]


class Job:
    """Starts `holdfast run`, watches it from outside, and knows every process that came of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log_dir = folder / "logs"
        self.mark = uuid.uuid4().hex
        self.news = News(folder / "news")
        self._process: subprocess.Popen[bytes] | None = None

    def start(
        self,
        script: str | Path,
        *args: str,
        flags: tuple[str, ...] = (),
        nproc: int | str = 2,
        max_restarts: int = 0,
        env: dict[str, str] | None = None,
        log_dir: str | None = None,
        program: tuple[str, ...] = (sys.executable, "-m", "holdfast", "run"),
    ) -> Job:
        command = [*program, f"--nproc-per-node={nproc}", f"--max-restarts={max_restarts}"]
        command += ["--log-dir", log_dir or str(self.log_dir), *flags, str(script), *args]
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("PET_", "TORCHELASTIC_"))}
        environment.pop("PYTHONUNBUFFERED", None)  # it makes a line two writes, and another rank's may come between
        environment |= {"HOLDFAST_TEST": self.mark, "NEWS": str(self.folder / "news"), "OMP_NUM_THREADS": "1"}
        environment |= {"STATE": str(self.folder), **(env or {})}
        with open(self.folder / "out", "wb") as out, open(self.folder / "err", "wb") as err:
            self._process = subprocess.Popen(command, stdout=out, stderr=err, env=environment, cwd=self.folder)
        return self

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def wait(self, wait_s: float = WAIT_S) -> int:
        """Its exit code. The news are read meanwhile: ranks that write to a full FIFO would wait for us."""
        assert self._process is not None
        until = time.monotonic() + wait_s
        while (code := self._process.poll()) is None:
            left_s = until - time.monotonic()
            if left_s <= 0:
                raise AssertionError(f"still running after {wait_s} s; stderr so far:\n{self.err}")
            self.news.read_until_exit(self._process.pid, left_s)
        self.news.read_rest()
        return code

    def run(self, script: str | Path, *args: str, **options: Any) -> int:
        return self.start(script, *args, **options).wait()

    def signal(self, signum: int) -> None:
        assert self._process is not None
        self._process.send_signal(signum)

    def wait_step(self, rank: int, step: int, generation: int | None = None) -> dict[str, Any]:
        def wanted(line: dict[str, Any]) -> bool:
            right = line["rank"] == rank and line.get("step", -1) >= step
            return right and generation in (None, line["generation"])

        return self.news.wait(wanted)

    def wait_event(self, name: str, times: int = 1) -> None:
        """Let the job train until its log has such an event, so many times."""
        self.news.wait(lambda line: "step" in line)
        while len(self.events(name)) < times:
            self.news.wait(lambda line: "step" in line)

    # -- what is known afterwards ---------------------------------------------------------------------------------

    @property
    def out(self) -> str:
        return (self.folder / "out").read_text(errors="replace")

    @property
    def err(self) -> str:
        return (self.folder / "err").read_text(errors="replace")

    @property
    def run_dir(self) -> Path:
        [path] = self.log_dir.iterdir()
        return path

    def events(self, name: str | None = None) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in (self.run_dir / "events.jsonl").read_text().splitlines()]
        return [line["data"] for line in lines if name in (None, line["name"])]

    def incidents(self) -> list[dict[str, Any]]:
        return [json.loads(path.read_text()) for path in sorted((self.run_dir / "incidents").glob("*.json"))]

    def processes(self) -> dict[int, str]:
        """Every live process that carries this test's mark in its environment, with its command line."""
        found: dict[int, str] = {}
        mark = f"HOLDFAST_TEST={self.mark}".encode()
        for pid in linux.bearers(mark):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                found[pid] = linux.read(f"/proc/{pid}/cmdline").replace("\0", " ").strip()
        return found

    def process(self, title: str) -> int:
        """The one process with that title. A fresh fork has its parent's for a moment: let the job train meanwhile."""
        while True:
            found = [pid for pid, text in self.processes().items() if text == title or text.startswith(title + " of")]
            if len(found) == 1:
                return found[0]
            self.news.wait(lambda line: "step" in line)

    def leftovers(self, within_s: float = 5.0) -> list[str]:
        """What is still alive of the job after so long: nothing, one hopes."""
        until = time.monotonic() + within_s
        while found := self.processes():
            left_s = until - time.monotonic()
            if left_s <= 0:
                return sorted(found.values())
            _wait_for_exit(next(iter(found)), left_s)
        return []

    def end(self) -> None:
        """Whatever the test did, leave nothing behind."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self.leftovers()
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _wait_for_exit(pid: int, wait_s: float) -> None:
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    select.select([fd], [], [], wait_s)
    os.close(fd)
