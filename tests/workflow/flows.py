"""Workflows that a test runs on this machine, with real processes."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from holdfast import linux
from holdfast.workflow.lives import MARK

WAIT_S = 40.0


class Here:
    """A folder with a workflow file, and workflows of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.python = folder, sys.executable
        self.env = {**os.environ, "HOLDFAST_WORKFLOWS": str(folder / "workflows")}
        self.outside = Path(tempfile.mkdtemp(dir="/var/tmp", prefix="holdfast-test-"))  # tasks see no /tmp of ours
        self.said = self.outside / "said"
        self.url = f"file://{folder}/up"
        self._started: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Here:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: object, trace: TracebackType | None) -> None:
        for process in self._started:
            self.kill(process)
        for pid in self.left():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(self.outside)

    def file(self, text: str) -> Path:
        """In which UP is an address, SAID a file and OUT a folder that tasks see, too."""
        path = self.folder / "flow.yaml"
        for name, value in (("UP", self.url), ("SAID", self.said), ("OUT", self.outside)):
            text = text.replace(name, str(value))
        path.write_text(textwrap.dedent(text))
        return path

    def without_namespaces(self) -> None:
        """As on a machine that does not let us make any."""
        (self.folder / "bin").mkdir()
        (self.folder / "bin" / "unshare").symlink_to("/bin/false")
        self.env["PATH"] = f"{self.folder}/bin:{os.environ['PATH']}"

    def start(self, *args: str, python: tuple[str, ...] = ("-m", "holdfast", "workflow")) -> subprocess.Popen[str]:
        command = [self.python, *python, *args]
        process = subprocess.Popen(command, env=self.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self._started.append(process)
        return process

    def run(self, *args: str) -> tuple[int, str, str]:
        process = self.start(*args)
        out, err = process.communicate(timeout=WAIT_S)
        return process.returncode, out, err

    def kill(self, process: subprocess.Popen[str]) -> None:
        process.kill()
        process.communicate(timeout=WAIT_S)

    def status(self, identity: str = "") -> dict[str, Any]:
        code, out, err = self.run("status", "--json", *([identity] if identity else []))
        assert code == 0, err
        return json.loads(out)  # type: ignore[no-any-return]

    def states(self, identity: str = "w-1") -> dict[str, str]:
        """As in the file that `status` reads."""
        standing = json.loads((self.folder / "workflows" / identity / "standing.json").read_bytes())
        return {name: task["state"] for name, task in standing["tasks"].items()}

    def until(self, wanted: str | Callable[[], bool]) -> None:
        """It is so; for a text: a task has said it."""
        end_s = time.monotonic() + WAIT_S
        while not (wanted() if callable(wanted) else wanted in self.told()):
            assert time.monotonic() < end_s, f"{wanted!r} never came to be; {self.told()}"
            time.sleep(0.005)

    def told(self) -> str:
        """By tasks."""
        return self.said.read_text() if self.said.exists() else ""

    def left(self) -> list[int]:
        """Processes of tasks of these workflows."""
        mark = f"{MARK}={self.folder}/".encode()
        pids = [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]
        return [pid for pid in pids if any(each.startswith(mark) for each in linux.environment(pid))]
