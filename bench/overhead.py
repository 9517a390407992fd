"""What it costs that ranks can stay, as long as none dies: the same small training as a plain loop by hand, by
`run.batches` and `run.step` without it, and with it, in turns.

`python -m bench.overhead`: two ranks, CPU, gloo, short and longer steps with nothing between them:
how long they take, and how long a rank computes in them, which is steadier. By hand means DDP, a DataLoader and a
DistributedSampler under `holdfast run`: no snapshots, no progress, no data that goes on where it was."""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from bench.launchers import table, versions
from bench.start import cpu_s
from bench.survivors import START_S, Lines, job

WAYS = {"by hand": {"LOOP": "hand"}, "all would be started anew": {"STAYS": "0"}, "ranks can stay": {"STAYS": "1"}}


class Step(NamedTuple):
    """What one takes, on average."""

    wall_us: float
    cpu_us: float  # of one rank


def measure(seconds: float, env: dict[str, str]) -> Step:
    more_env = {"PAUSE_S": "0", **env}
    with tempfile.TemporaryDirectory() as where, job(Path(where), 2, [], more_env=more_env):
        lines = Lines(Path(where), 2)
        if lines.until_beyond(-1, START_S) is None:
            raise SystemExit(f"it did not start:\n{(Path(where) / 'err').read_text()[-2000:]}")
        time.sleep(3.0)  # the zygote learns
        lines.read()
        first, used_s = lines.steps[0][-1], cpu_s(lines.steps[0][-1].pid)
        time.sleep(seconds)
        lines.read()
        last = lines.steps[0][-1]
        steps = last.step - first.step
        return Step((last.at_ns - first.at_ns) / steps / 1e3, (cpu_s(last.pid) - used_s) / steps * 1e6)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--hidden", type=int, nargs="*", default=[256, 8192], help="neurons, which set a step's length")
    args = parser.parse_args()
    print(f"{versions()}\n`{' '.join(['python -m bench.overhead', *sys.argv[1:]])}`\n", flush=True)
    rows: list[list[str]] = []
    for hidden in args.hidden:
        rounds = [
            [measure(args.seconds, {"HIDDEN": str(hidden), **env}) for env in WAYS.values()] for _ in range(args.rounds)
        ]
        rows += _rows(f"a step of {hidden} neurons", [[step.wall_us for step in each] for each in rounds])
        rows += _rows("what a rank computes in it", [[step.cpu_us for step in each] for each in rounds])
    print(table(["what", "", "median", f"more than by hand, of {args.rounds} rounds", "least", "most"], rows))


def _rows(name: str, rounds: list[list[float]]) -> list[list[str]]:
    rows = []
    for number, way in enumerate(WAYS):
        row = [name if not number else "", way, f"{statistics.median(each[number] for each in rounds):.0f} µs"]
        more = [each[number] / each[0] * 100 - 100 for each in rounds]
        figures = (statistics.median(more), min(more), max(more)) if number else ()
        rows.append([*row, *(f"{each:+.1f} %" for each in figures), *([""] * (3 - len(figures)))])
    return rows


if __name__ == "__main__":
    main()
