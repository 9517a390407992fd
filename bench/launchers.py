"""The launchers that are compared, each with its best settings, and the environment that holds them."""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "bench" / "steps.py"
PEER_VENV = ROOT / ".bench-venv"


@dataclass(frozen=True)
class Launcher:
    name: str
    command: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict)


def holdfast() -> Launcher:
    return Launcher("holdfast run", (sys.executable, "-m", "holdfast", "run"))


def torchrun(shared_store: bool) -> Launcher:
    command = (str(Path(sys.executable).parent / "torchrun"), "--standalone")
    if shared_store:
        return Launcher("torchrun (default)", command)
    return Launcher("torchrun (best setting)", command, {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"})


def ft_launcher() -> Launcher | None:
    """NVIDIA's, in an environment of its own: it brings many dependencies. None where it cannot be installed."""
    binary = PEER_VENV / "bin" / "ft_launcher"
    if not binary.exists():
        print("setting up nvidia-resiliency-ext in .bench-venv ...", file=sys.stderr)
        pip = [
            str(PEER_VENV / "bin" / "python"),
            "-m",
            "pip",
            "install",
            "-q",
            "torch==2.13.0",
            "nvidia-resiliency-ext",
            "torchft",
        ]
        made = subprocess.run([sys.executable, "-m", "venv", str(PEER_VENV)], capture_output=True).returncode == 0
        if not made or subprocess.run(pip, capture_output=True).returncode != 0:
            print("nvidia-resiliency-ext cannot be installed here; its rows are left out", file=sys.stderr)
            return None
    command = (
        str(binary),
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=localhost:0",
        "--monitor-interval=0.1",
        "--workers-stop-timeout=1",
    )
    return Launcher("ft_launcher", _supported(command))


def _supported(command: tuple[str, ...]) -> tuple[str, ...]:
    """Leave out flags that the installed version does not know."""
    help_text = subprocess.run([command[0], "--help"], capture_output=True, text=True).stdout
    return tuple(part for part in command if not part.startswith("--") or part.partition("=")[0] in help_text)


def versions() -> str:
    import torch

    import holdfast as package

    parts = [f"holdfast {package.__version__}", f"torch {torch.__version__}", f"Python {platform.python_version()}"]
    peer = PEER_VENV / "bin" / "python"
    if peer.exists():
        ask = "import importlib.metadata as m; print(m.version('nvidia-resiliency-ext'))"
        found = subprocess.run([str(peer), "-c", ask], capture_output=True, text=True).stdout.strip()
        parts.append(f"nvidia-resiliency-ext {found}")
    cores = len(os.sched_getaffinity(0))
    return f"{', '.join(parts)}; {cores} cores, Linux {platform.release()}"


class Run:
    """One launcher running the script; its steps are read from the ranks' files."""

    def __init__(self, launcher: Launcher, folder: Path, nproc: int, steps: int, max_restarts: int) -> None:
        self.folder = folder
        self.nproc = nproc
        self.started_ns = time.monotonic_ns()
        self._offset = [0] * nproc
        self._lines: list[list[tuple[int, int]]] = [[] for _ in range(nproc)]
        with open(folder / "stderr", "wb") as stderr:
            self.process = self._start(launcher, steps, max_restarts, stderr)

    def _start(self, launcher: Launcher, steps: int, max_restarts: int, stderr: IO[bytes]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [
                *launcher.command,
                f"--nproc-per-node={self.nproc}",
                f"--max-restarts={max_restarts}",
                str(SCRIPT),
                str(self.folder),
                str(steps),
            ],
            env={**os.environ, "OMP_NUM_THREADS": "1", **launcher.env},
            stdout=subprocess.DEVNULL,
            stderr=stderr,
        )

    def steps(self, rank: int) -> list[tuple[int, int]]:
        """(time in ns, pid) of every step so far."""
        path = self.folder / f"steps-{rank}"
        if path.exists():
            with open(path) as file:
                file.seek(self._offset[rank])
                while (line := file.readline()).endswith("\n"):
                    self._offset[rank] += len(line)
                    _, at_ns, pid = line.split()
                    self._lines[rank].append((int(at_ns), int(pid)))
        return self._lines[rank]

    def wait_new_step(self, since_ns: int, not_pids: set[int], timeout_s: float) -> int | None:
        """When every rank had done a step after `since_ns` in a new process; None if that did not happen."""
        until = time.monotonic() + timeout_s
        while time.monotonic() < until and self.process.poll() is None:
            firsts = []
            for rank in range(self.nproc):
                new = [at for at, pid in self.steps(rank) if at > since_ns and pid not in not_pids]
                if not new:
                    break
                firsts.append(new[0])
            if len(firsts) == self.nproc:
                return max(firsts)
            time.sleep(0.002)
        return None

    def pids(self) -> list[int]:
        return [self.steps(rank)[-1][1] for rank in range(self.nproc)]

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(15)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        for rank in range(self.nproc):  # a launcher may leave its ranks behind
            for pid in {pid for _, pid in self.steps(rank)}:
                try:
                    if b"steps.py" in Path(f"/proc/{pid}/cmdline").read_bytes():
                        os.kill(pid, signal.SIGKILL)
                except (FileNotFoundError, ProcessLookupError):
                    continue


def table(headers: list[str], rows: list[list[str]]) -> str:
    """A Markdown table with aligned columns."""
    widths = [max(len(row[i]) for row in [headers, *rows]) for i in range(len(headers))]

    def line(cells: list[str]) -> str:
        return "| " + " | ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)) + " |"

    return "\n".join([line(headers), line(["-" * width for width in widths]), *map(line, rows)])
