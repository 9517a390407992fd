"""Command to first step, memory of all processes, and the cost of the agent itself."""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

from bench.launchers import Launcher, Run, holdfast, table, torchrun, versions


def tree(pid: int) -> list[int]:
    """A process and all below it."""
    found = [pid]
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            found += tree(int(child))
    return found


def memory_kb(pid: int, field: str) -> int:
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1])
    return 0


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(launcher: Launcher, nproc: int) -> tuple[float, float]:
    """Seconds to the first step on all ranks, and the PSS of everything a while later in MB."""
    with tempfile.TemporaryDirectory() as folder:
        run = Run(launcher, Path(folder), nproc, 10_000_000, 0)
        try:
            first_ns = run.wait_new_step(run.started_ns, set(), 180)
            assert first_ns is not None, (Path(folder) / "stderr").read_text()
            time.sleep(3)
            pss = sum(memory_kb(pid, "Pss") for pid in tree(run.process.pid))
            return (first_ns - run.started_ns) / 1e9, pss / 1024
        finally:
            run.stop()


def agent_figures() -> list[list[str]]:
    """Of our agent alone: memory, CPU over ten seconds of training, and the time until it starts its zygote."""
    with tempfile.TemporaryDirectory() as folder:
        run = Run(holdfast(), Path(folder), 2, 10_000_000, 0)
        try:
            helper_s = None
            while helper_s is None:
                if len(tree(run.process.pid)) > 1:
                    helper_s = (time.monotonic_ns() - run.started_ns) / 1e9
            assert run.wait_new_step(run.started_ns, set(), 60) is not None
            time.sleep(3)
            agent = run.process.pid
            rss = memory_kb(agent, "Rss") / 1024
            before = cpu_s(agent)
            time.sleep(10)
            used = cpu_s(agent) - before
        finally:
            run.stop()
    return [
        ["resident memory of the agent", f"{rss:.0f} MB"],
        ["command to the start of the zygote's process", f"{helper_s * 1000:.0f} ms"],
        ["CPU time of the agent in 10 s of training", f"{used * 1000:.0f} ms"],
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args()
    subprocess.run(["sync"], check=False)
    print(f"Command to the first step on all ranks, and memory (PSS) of all processes; {versions()}\n")
    rows = []
    for nproc in (2, 8):
        seconds: dict[str, list[float]] = {}
        memory: dict[str, list[float]] = {}
        for _ in range(args.runs):  # interleaved, since the machine's speed drifts
            for launcher in (holdfast(), torchrun(shared_store=True)):
                to_step_s, pss_mb = measure(launcher, nproc)
                seconds.setdefault(launcher.name, []).append(to_step_s)
                memory.setdefault(launcher.name, []).append(pss_mb)
        theirs = "torchrun (default)"
        for name in seconds:
            to_step_s, pss_mb = statistics.median(seconds[name]), statistics.median(memory[name])
            rows.append(
                [
                    name,
                    f"{nproc}",
                    f"{to_step_s:.2f} s",
                    f"{to_step_s / statistics.median(seconds[theirs]):.2f}",
                    f"{pss_mb:.0f} MB",
                    f"{pss_mb / statistics.median(memory[theirs]):.2f}",
                ]
            )
    print(table(["launcher", "ranks", f"first step, median of {args.runs}", "ratio", "PSS", "ratio"], rows))
    print("\nThe agent\n")
    print(table(["what", "figure"], agent_figures()))


if __name__ == "__main__":
    main()
