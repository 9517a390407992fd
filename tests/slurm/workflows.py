"""Workflows that a test submits to its Slurm."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from slurm.slurm_cluster import Slurm

WAIT_S = 90.0


class Workflows:
    def __init__(self, slurm: Slurm, folder: Path) -> None:
        self.slurm, self.folder = slurm, folder
        self.home = folder / "workflows"
        path = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"
        self.scratch = folder / "scratch"
        self.scratch.mkdir()
        ours = {"HOLDFAST_WORKFLOWS": str(self.home), "PATH": path, "SLURM_TMPDIR": str(self.scratch)}
        self.env = {**slurm.environment, **ours}
        self.outside = Path(tempfile.mkdtemp(dir="/var/tmp", prefix="holdfast-test-"))  # tasks see no /tmp of ours
        self._started: list[subprocess.Popen[str]] = []
        self._heard: list[str] = []

    def file(self, text: str) -> str:
        path = self.folder / "flow.yaml"
        said = textwrap.dedent(text).replace("UP", f"file://{self.folder}/up").replace("SAID", str(self.said))
        path.write_text(said)
        return str(path)

    @property
    def said(self) -> Path:
        return self.outside / "said"

    def start(self, *args: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "holdfast", "workflow", *args]
        process = subprocess.Popen(command, env=self.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self._started.append(process)
        return process

    def run(self, *args: str) -> tuple[int, str, str]:
        process = self.start(*args)
        out, err = process.communicate(timeout=WAIT_S)
        return process.returncode, out, err

    def submit(self, text: str, *args: str) -> subprocess.Popen[str]:
        return self.start("submit", self.file(text), "--backend", "slurm", *args)

    def end_of(self, runner: subprocess.Popen[str]) -> tuple[int, str]:
        out, err = runner.communicate(timeout=WAIT_S)
        self._heard.append(out + err)
        return runner.returncode, out + err

    def status(self) -> dict[str, Any]:
        code, out, err = self.run("status", "--json")
        assert code == 0, err
        return json.loads(out)  # type: ignore[no-any-return]

    def until_said(self, wanted: str) -> str:
        """The text of the file that tasks write, once it has that."""

        def there() -> bool:
            return self.said.exists() and wanted in self.said.read_text()

        self.until(there, wanted)
        return self.said.read_text()

    def until(self, happens: Callable[[], bool], what: str) -> None:
        end_s = time.monotonic() + WAIT_S
        while not happens():
            assert time.monotonic() < end_s, f"never: {what}; {self.why()}"
            time.sleep(0.05)

    def job(self, number: int = 1) -> str:
        """Its number in Slurm."""
        path = next(self.home.iterdir()) / "jobs" / str(number) / "id"
        self.until(lambda: path.exists() and path.read_text() != "", f"job {number}")
        return path.read_text()

    def why(self) -> str:
        """What runners, jobs, tasks and Slurm have said."""
        paths = [*self.home.glob("*/jobs/*/out"), *self.home.glob("*/tasks/*/*/ended.json"), self.said]
        outs = [f"{path}:\n{path.read_text(errors='replace')}" for path in paths if path.exists()]
        queue = self.slurm.run("squeue", "--states=all", check=False)
        return "\n".join([*self._heard, *outs, queue, self.slurm.logs()])

    def end(self) -> None:
        for process in self._started:
            if process.poll() is None:
                process.kill()
                process.wait()
        self.slurm.clear()
        shutil.rmtree(self.outside)
