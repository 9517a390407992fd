"""Many tasks of one workflow on this machine: what the runner costs while they sleep, and how soon an end is seen.

Each task waits at a pipe of its own. Opening one is the end of that task; its state is then read from the file which
`holdfast workflow status` reads, as fast as this process can.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from bench.launchers import table, versions
from bench.start import cpu_s, memory_kb

COMMAND = (sys.executable, "-m", "holdfast", "workflow")
LIMIT_S = 300.0


class Flow:
    """A workflow that runs, in a folder outside of /tmp: tasks have one of their own."""

    def __init__(self, tasks: int, one_group: bool, often: str) -> None:
        self.tasks = tasks
        self.folder = Path(tempfile.mkdtemp(dir="/var/tmp", prefix="holdfast-bench-"))
        (self.folder / "pipes").mkdir()
        for at in range(tasks):
            os.mkfifo(self.folder / "pipes" / str(at))
        (self.folder / "flow.yaml").write_text(text(tasks, one_group, often, self.folder))
        self.begun_s = time.monotonic()
        self._env = {**os.environ, "HOLDFAST_WORKFLOWS": str(self.folder / "flows")}
        with open(self.folder / "said", "wb") as said:
            self.runner = subprocess.Popen(
                [*COMMAND, "submit", "flow.yaml"], cwd=self.folder, env=self._env, stdout=said, stderr=said
            )

    def until_all_run(self) -> float:
        """How long it took, from the command on."""
        self._until(lambda: (self.folder / "begun").exists() and self._begun() == self.tasks)
        return time.monotonic() - self.begun_s

    def _begun(self) -> int:
        return (self.folder / "begun").stat().st_size

    def state(self, task: str) -> str:
        standing = json.loads((self.folder / "flows" / "many-1" / "standing.json").read_bytes())
        return str(standing["tasks"][task]["state"])

    def end(self, at: int) -> float:
        """One task; returns how long it took until that could be seen."""
        with open(self.folder / "pipes" / str(at), "w"):
            ended_s = time.monotonic()
        self._until(lambda: self.state(f"t{at}") == "completed")
        return time.monotonic() - ended_s

    def ask(self) -> float:
        """`status --json`; returns how long it took to answer."""
        begun_s = time.monotonic()
        subprocess.run([*COMMAND, "status", "--json"], env=self._env, stdout=subprocess.DEVNULL, check=True)
        return time.monotonic() - begun_s

    def _until(self, is_so: Callable[[], bool]) -> None:
        while not is_so():
            if time.monotonic() > self.begun_s + LIMIT_S or self.runner.poll() is not None:
                raise SystemExit((self.folder / "said").read_text())
            time.sleep(0.001)

    def close(self) -> float:
        """Cancel it. Returns how long that took."""
        begun_s = time.monotonic()
        self.runner.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.runner.wait(LIMIT_S)
        self.runner.kill()
        self.runner.wait()
        took_s = time.monotonic() - begun_s
        shutil.rmtree(self.folder)
        return took_s


def text(tasks: int, one_group: bool, often: str, folder: Path) -> str:
    """The last is the lead: when that ends, so do the others. `often`: how often checkpoints are looked for."""
    lines = ["workflow:", "  name: many", *(["  groups:", "  - name: g", "    tasks:"] if one_group else ["  tasks:"])]
    for at in range(tasks):
        lead = "lead: true, " if one_group and at == tasks - 1 else ""
        command = f"[sh, -c, 'echo >> {folder}/begun; exec cat {folder}/pipes/{at}']"
        where = f"path: /tmp/m, url: 'file://{folder}/up/{at}', frequency: {often}"
        checkpoint = f", checkpoint: [{{{where}}}]" if often else ""
        lines.append(f"    - {{name: t{at}, {lead}command: {command}{checkpoint}}}")
    return "\n".join(lines) + "\n"


def measure(tasks: int, one_group: bool, often: str, for_s: float, ends: int) -> list[str]:
    flow = Flow(tasks, one_group, often)
    try:
        run_s = flow.until_all_run()
        time.sleep(35.0 if often else 3.0)  # the first look at a checkpoint asks its storage, too
        before, begun_s = cpu_s(flow.runner.pid), time.monotonic()
        time.sleep(for_s)
        share = (cpu_s(flow.runner.pid) - before) / (time.monotonic() - begun_s)
        memory_mb = memory_kb(flow.runner.pid, "Rss") / 1024
        seen_s = [flow.end(at) for at in range(ends)]
        asked_s = [flow.ask() for _ in range(5)]
    finally:
        canceled_s = flow.close()
    return [
        f"{tasks} in {'one group' if one_group else f'{tasks} groups'}",
        f"looked for every {often}" if often else "none",
        f"{run_s:.1f} s",
        f"{100 * share:.2f} %",
        f"{1000 * statistics.median(seen_s):.0f} ms",
        f"{1000 * max(seen_s):.0f} ms",
        f"{1000 * statistics.median(asked_s):.0f} ms",
        f"{memory_mb:.0f} MB",
        f"{canceled_s:.1f} s",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=30.0, help="of sleep, over which the runner's CPU is measured")
    parser.add_argument("--ends", type=int, default=20, help="how many tasks are ended, one after the other")
    args = parser.parse_args()
    print(f"Tasks that sleep, {args.seconds:g} s of it; then {args.ends} end, one after the other; {versions()}\n")
    rows = [
        measure(args.tasks, one_group, often, args.seconds, args.ends)
        for one_group, often in ((False, ""), (True, ""), (False, "30s"))
    ]
    seen = f"end is seen, median of {args.ends}"
    print(
        table(
            [
                "tasks",
                "checkpoints",
                "all run after",
                "of a core",
                seen,
                "worst",
                "status answers in",
                "memory",
                "canceled in",
            ],
            rows,
        )
    )


if __name__ == "__main__":
    main()
