"""Pages as real processes, and one browser for all tests of a process."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path

import pytest

from dashboard.chromium import Browser
from holdfast import linux

WAIT_S = 30.0


class Page:
    """`holdfast dashboard` of a run directory, and what it printed."""

    def __init__(self, run_dir: Path, *flags: str, command: tuple[str, ...] = ("holdfast", "dashboard")) -> None:
        listen = () if "--listen" in flags else ("--listen", "127.0.0.1:0")
        self.process = subprocess.Popen(
            [sys.executable, "-m", *command, str(run_dir), *listen, *flags],
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=partial(linux.die_with_parent, os.getpid()),
        )
        assert self.process.stderr is not None
        self.said = [self.process.stderr.readline() for _ in range(2)]
        found = re.search(r"(http://\S+:(\d+)/)(?:\?token=(\S+))?", self.said[0])
        assert found is not None, self.said[0] + self.process.stderr.read()
        self.url, self.port, self.token = found[1], int(found[2]), found[3]
        kept = re.search(r" is in (\S+)$", self.said[1])
        assert kept is not None, self.said
        self.control = Path(kept[1]).read_text().strip()

    def ask(self, path: str, method: str = "GET", **headers: str) -> tuple[int, bytes]:
        answer, body = self.answer(path, method, **headers)
        return answer.status, body

    def answer(self, path: str, method: str = "GET", **headers: str) -> tuple[HTTPResponse, bytes]:
        """Headers are named with underscores."""
        line = HTTPConnection("127.0.0.1", self.port, timeout=WAIT_S)
        try:
            line.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
            found = line.getresponse()
            return found, found.read()
        finally:
            line.close()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        self.process.communicate(timeout=WAIT_S)


Open = Callable[..., Page]


@pytest.fixture
def open_page() -> Iterator[Open]:
    opened: list[Page] = []

    def start(run_dir: Path, *flags: str, **more: tuple[str, ...]) -> Page:
        opened.append(Page(run_dir, *flags, **more))
        return opened[-1]

    yield start
    for page in opened:
        page.close()


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    made = Browser(tmp_path_factory.mktemp("chromium"))
    yield made
    made.close()


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """A process that could be a rank."""
    process = subprocess.Popen(["sleep", "600"])
    yield process
    process.kill()
    process.wait()
