"""What it costs that ranks can stay, as long as none dies: the same small training as a plain loop by hand, by
`run.batches` and `run.step` without it, and with it.

`python -m bench.overhead`: two ranks, CPU, gloo, short and longer steps with nothing between them. All three jobs are
there at once, and of them one goes on at a time while the others are stopped, for half a second each, in turns: how
fast a machine is changes from one second to the next. So does it with where a process happens to lie in memory, so they
are started several times. By hand means DDP, a DataLoader and a DistributedSampler under `holdfast run`: no snapshots,
no progress, no data that goes on where it was."""

from __future__ import annotations

import argparse
import contextlib
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from bench.launchers import table, versions
from bench.survivors import START_S, Lines, job
from holdfast import linux

WAYS = {"by hand": {"LOOP": "hand"}, "all would be started anew": {"STAYS": "0"}, "ranks can stay": {"STAYS": "1"}}
TURN_S, SETTLE_S = 0.5, 0.1


class Step(NamedTuple):
    """What one takes, on average."""

    wall_us: float
    cpu_us: float  # of a rank's thread that trains: gloo's own spins while it waits


class Stopped:
    """A job that trains in its turns alone."""

    def __init__(self, folder: Path, agent: int) -> None:
        self._lines = Lines(folder, 2)
        if self._lines.until_beyond(-1, START_S) is None:
            raise SystemExit(f"it did not start:\n{(folder / 'err').read_text()[-2000:]}")
        time.sleep(3.0)  # the zygote learns
        self._pids = [agent, *linux.descendants(agent)]
        linux.signal_all(self._pids, signal.SIGSTOP)

    def go_on(self) -> None:
        linux.signal_all(self._pids, signal.SIGCONT)

    def turn(self) -> Step:
        self.go_on()
        time.sleep(SETTLE_S)
        self._lines.read()
        first = self._lines.steps[0][-1]
        used_us = _computed_us(first.pid)
        time.sleep(TURN_S)
        self._lines.read()
        last = self._lines.steps[0][-1]
        used_us = _computed_us(first.pid) - used_us
        linux.signal_all(self._pids, signal.SIGSTOP)
        steps = last.step - first.step
        return Step((last.at_ns - first.at_ns) / steps / 1e3, used_us / steps)


def _computed_us(thread: int) -> float:
    return int(linux.read(f"/proc/{thread}/schedstat").split()[0]) / 1e3


@contextlib.contextmanager
def stopped(env: dict[str, str]) -> Iterator[Stopped]:
    with tempfile.TemporaryDirectory() as where, job(Path(where), 2, [], more_env={"PAUSE_S": "0", **env}) as process:
        one = Stopped(Path(where), process.pid)
        try:
            yield one
        finally:
            one.go_on()


def measure(hidden: int, turns: int) -> list[Step]:
    """Of each way the median of its turns."""
    with contextlib.ExitStack() as until_end:
        jobs = [until_end.enter_context(stopped({"HIDDEN": str(hidden), **env})) for env in WAYS.values()]
        found: list[list[Step]] = [[] for _ in jobs]
        for turn in range(turns):
            for number in [(turn + each) % len(jobs) for each in range(len(jobs))]:
                found[number].append(jobs[number].turn())
    return [Step(*(statistics.median(figures) for figures in zip(*steps, strict=True))) for steps in found]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--starts", type=int, default=6)
    parser.add_argument("--turns", type=int, default=12, help="of each job, in each start")
    parser.add_argument("--hidden", type=int, nargs="*", default=[256, 8192], help="neurons, which set a step's length")
    args = parser.parse_args()
    print(f"{versions()}\n`{' '.join(['python -m bench.overhead', *sys.argv[1:]])}`\n", flush=True)
    rows: list[list[str]] = []
    for hidden in args.hidden:
        starts = [measure(hidden, args.turns) for _ in range(args.starts)]
        rows += _rows(f"a step of {hidden} neurons", [[step.wall_us for step in each] for each in starts])
        rows += _rows("what its thread computes in it", [[step.cpu_us for step in each] for each in starts])
    print(table(["what", "", "median", f"more than by hand, of {args.starts} starts", "least", "most"], rows))


def _rows(name: str, starts: list[list[float]]) -> list[list[str]]:
    rows = []
    for number, way in enumerate(WAYS):
        row = [name if not number else "", way, f"{statistics.median(each[number] for each in starts):.0f} µs"]
        more = [each[number] / each[0] * 100 - 100 for each in starts]
        figures = (statistics.median(more), min(more), max(more)) if number else ()
        rows.append([*row, *(f"{each:+.1f} %" for each in figures), *([""] * (3 - len(figures)))])
    return rows


if __name__ == "__main__":
    main()
