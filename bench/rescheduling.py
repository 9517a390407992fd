"""From the failing exit of one of three nodes to the first new step of all, by `holdfast workflow`.

The seed's scenario, as in tests/workflow/seed: a backend error on one node, the group rescheduled, training goes on
from the uploaded snapshot. On this machine, and on a Slurm with three nodes that this starts for itself.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from bench.launchers import table, versions

TESTS = Path(__file__).resolve().parent.parent / "tests"
SEED = TESTS / "workflow" / "seed" / "seed.yaml"


def measure(launcher: str, place: list[str], env: dict[str, str]) -> float:
    """Seconds, by the clock of the wall: one end is the time of a file."""
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="holdfast-bench-") as folder:
        steps = Path(folder, "steps")
        values = [f"upload_location=file://{folder}/up", f"steps={steps}", "fail_at=4", f"launcher={launcher}"]
        command = [sys.executable, "-m", "holdfast", "workflow", "submit", str(SEED), *place, "--set", *values]
        path = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"
        env = {**env, "HOLDFAST_WORKFLOWS": f"{folder}/flows", "PATH": path}
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
        if done.returncode != 0:
            tails = [f"{path}: {path.read_text()[-3000:]}" for path in Path(folder).glob("flows/*/tasks/*/*/stderr")]
            raise AssertionError("\n".join([done.stdout, done.stderr, *tails]))
        life = Path(folder, "flows", "seed-1", "tasks", "worker_1", "1")
        ended = next(path for path in (life / "exit", life / "ended.json") if path.exists())
        rows = [line.split() for line in steps.read_text().splitlines()]
        return min(float(row[3]) for row in rows if row[0] == "2") - ended.stat().st_mtime


def many(runs: int, one: Callable[[], float]) -> list[str]:
    found = sorted(one() for _ in range(runs))
    return [f"{statistics.median(found):.2f} s", f"{found[0]:.2f} s", f"{found[-1]:.2f} s"]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.rescheduling")
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args(argv)
    sys.path.insert(0, str(TESTS))
    from slurm.slurm_cluster import slurm

    print(f"failing exit to first new step, 3 nodes, {args.runs} runs each; {versions()}\n")
    local = ["--nodes", "4"]
    rows = []
    for launcher, name in (("holdfast", "this machine, holdfast run"), ("torchrun", "this machine, torchrun")):
        one = partial(measure, launcher, local, dict(os.environ))
        rows.append([name, *many(args.runs, one)])
    if shutil.which("sbatch") is None:
        print(table(["", "median", "best", "worst"], rows), "\nno Slurm on this machine", sep="")
        return
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as folder, slurm(Path(folder, "slurm")) as cluster:
        one = partial(measure, "holdfast", ["--backend", "slurm"], cluster.environment)
        rows.append(["Slurm, holdfast run", *many(args.runs, one)])
    print(table(["", "median", "best", "worst"], rows))


if __name__ == "__main__":
    main()
