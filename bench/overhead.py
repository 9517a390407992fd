"""What it costs that ranks can stay, as long as none dies: the same small training with and without, in turns.

`python -m bench.overhead`: two ranks, CPU, gloo, steps of a few milliseconds with nothing between them: how long they
take, and how long a rank computes in them, which is steadier. In steps of a hundred milliseconds a difference counts a
twentieth of what it does here."""

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


class Step(NamedTuple):
    """What one takes, on average."""

    wall_us: float
    cpu_us: float  # of one rank


def measure(stays: bool, seconds: float) -> Step:
    with tempfile.TemporaryDirectory() as where, job(Path(where), 2, [], STAYS=str(int(stays)), PAUSE_S="0"):
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
    args = parser.parse_args()
    print(f"{versions()}\n`{' '.join(['python -m bench.overhead', *sys.argv[1:]])}`\n", flush=True)
    pairs = [(measure(False, args.seconds), measure(True, args.seconds)) for _ in range(args.rounds)]
    rows = [
        _row("it takes", [(without.wall_us, with_it.wall_us) for without, with_it in pairs]),
        _row("a rank computes", [(without.cpu_us, with_it.cpu_us) for without, with_it in pairs]),
    ]
    columns = [
        "in a step",
        "all would be started anew",
        "ranks can stay",
        f"more, of {args.rounds} pairs",
        "least",
        "most",
    ]
    print(table(columns, rows))


def _row(name: str, pairs: list[tuple[float, float]]) -> list[str]:
    without, with_it = (statistics.median(each) for each in zip(*pairs, strict=True))
    more = [one - other for other, one in pairs]
    figures = (statistics.median(more), min(more), max(more))
    return [name, f"{without:.0f} µs", f"{with_it:.0f} µs", *(f"{each:+.0f} µs" for each in figures)]


if __name__ == "__main__":
    main()
