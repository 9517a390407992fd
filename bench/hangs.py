"""Hangs: what watching costs, how soon one is found, and how soon all ranks step again. NVIDIA's launcher beside it."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO

from bench.launchers import Launcher, Run, ft_launcher, holdfast, table, versions

SCRIPT = Path(__file__).parent / "monitored.py"
LIMIT_S = 3.0
OURS = (f"--ft-rank-heartbeat-timeout={LIMIT_S:g}", "--ft-initial-rank-heartbeat-timeout=60")
# The shortest interval at which it looks is its best setting.
THEIRS = (*OURS, "--ft-workload-check-interval=0.1", "--ft-rank-section-timeouts=step:60")


class Monitored(Run):
    """A run of the script that hangs when told to."""

    def __init__(self, launcher: Launcher, folder: Path, monitored: bool) -> None:
        self._client = "client" if monitored else "none"
        super().__init__(launcher, folder, 2, 0, 100)

    def _start(self, launcher: Launcher, steps: int, max_restarts: int, stderr: IO[bytes]) -> subprocess.Popen[bytes]:
        logs = (f"--log-dir={self.folder / 'logs'}",) if launcher.name.startswith("holdfast") else ()
        return subprocess.Popen(
            [
                *launcher.command,
                *logs,
                f"--nproc-per-node={self.nproc}",
                f"--max-restarts={max_restarts}",
                str(SCRIPT),
                "train",
                str(self.folder),
                self._client,
            ],
            env={**os.environ, "OMP_NUM_THREADS": "1", **launcher.env},
            stdout=subprocess.DEVNULL,
            stderr=stderr,
        )


def hang_repeatedly(launcher: Launcher, hangs: int, monitored: bool) -> tuple[list[float], list[float]]:
    """Seconds beyond the limit until the next step on all ranks, and, for ours, until the hang was found."""
    back: list[float] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run = Monitored(launcher, folder, monitored)
        try:
            since_ns, pids = run.started_ns, set[int]()
            for _ in range(hangs):
                if run.wait_new_step(since_ns, pids, 120) is None:
                    raise SystemExit(f"{launcher.name} did not start:\n{(folder / 'stderr').read_text()[-2000:]}")
                time.sleep(1.0)
                pids = set(run.pids())
                (folder / "hang").touch()
                while (folder / "hang").exists():
                    time.sleep(0.002)
                since_ns = run.steps(1)[-1][0]
                found_ns = run.wait_new_step(since_ns, pids, 60)
                if found_ns is None:
                    raise SystemExit(f"{launcher.name} did not come back:\n{(folder / 'stderr').read_text()[-2000:]}")
                back.append((found_ns - since_ns) / 1e9 - LIMIT_S)
                since_ns, pids = found_ns - 1, set()
        finally:
            run.stop()
        incidents = [json.loads(path.read_text()) for path in folder.glob("logs/*/incidents/*.json")]
    return back, [one["detected_at_s"] - one["failed_at_s"] - LIMIT_S for one in incidents]


def calls(launcher: Launcher) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as name:
        command = [*launcher.command, "--nproc-per-node=1", str(SCRIPT), "calls", name]
        env = {**os.environ, "OMP_NUM_THREADS": "1", **launcher.env}
        done = subprocess.run(command, env=env, capture_output=True, text=True)
        if done.returncode != 0:
            raise SystemExit(f"{launcher.name}: {done.stderr[-2000:]}")
        found: dict[str, float] = json.loads((Path(name) / "calls.json").read_text())
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hangs", type=int, default=10, help="under holdfast, with the client and without")
    parser.add_argument("--peer-hangs", type=int, default=4)
    args = parser.parse_args()
    print(f"{versions()}; a limit of {LIMIT_S:g} s\n")
    base, peer = holdfast(), ft_launcher()
    launchers = [Launcher("holdfast run", (*base.command, *OURS))]
    if peer is not None:
        launchers.append(Launcher(peer.name, (*peer.command, *THEIRS), peer.env))
    cost = {launcher.name: calls(launcher) for launcher in launchers}
    names = ["heartbeat", "section pair", "step hook"]
    rows = [[name, *(f"{us[key]:.2f} µs" if key in us else "" for key in names)] for name, us in cost.items()]
    print(table(["a call", *names], rows), "\n")
    rows = []
    alone = Launcher("holdfast run, no line of code", (*base.command, f"--hang-floor={LIMIT_S:g}"))
    for launcher, monitored in [(launchers[0], True), (alone, False), *((one, True) for one in launchers[1:])]:
        count = args.peer_hangs if launcher.name == "ft_launcher" else args.hangs
        # A learned limit is doubled by each hang that was found, so each is one of a new job.
        runs = [hang_repeatedly(launcher, count, True)] if monitored else [
            hang_repeatedly(launcher, 1, False) for _ in range(count)
        ]  # fmt: skip
        back, found = [s for run in runs for s in run[0]], [s for run in runs for s in run[1]]
        rows.append([launcher.name, f"{count}", *_times(found), *_times(back)])
    columns = ["launcher", "hangs", "found: limit +", "worst", "next step: limit +", "worst"]
    print(table(columns, rows), "\n")
    subprocess.run([sys.executable, "-m", "bench.watching"], check=True)


def _times(times: list[float]) -> list[str]:
    if not times:
        return ["", ""]
    return [f"{statistics.median(times) * 1000:.0f} ms", f"{max(times) * 1000:.0f} ms"]


if __name__ == "__main__":
    main()
