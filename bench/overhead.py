"""What it costs that ranks can stay, as long as none dies: the same small training with and without, in turns.

`python -m bench.overhead`: two ranks, CPU, gloo, steps of a millisecond or two, with nothing between them. What is left
of the difference in steps of a hundred milliseconds is a hundredth of it."""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

from bench.launchers import table, versions
from bench.survivors import START_S, Lines, job


def step_us(stays: bool, seconds: float) -> float:
    """What a step takes, on average."""
    with tempfile.TemporaryDirectory() as where, job(Path(where), 2, [], STAYS=str(int(stays)), PAUSE_S="0"):
        lines = Lines(Path(where), 2)
        if lines.until_beyond(-1, START_S) is None:
            raise SystemExit(f"it did not start:\n{(Path(where) / 'err').read_text()[-2000:]}")
        time.sleep(3.0)  # the zygote learns
        lines.read()
        first = lines.steps[0][-1]
        time.sleep(seconds)
        lines.read()
        last = lines.steps[0][-1]
        return (last.at_ns - first.at_ns) / (last.step - first.step) / 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=5.0)
    args = parser.parse_args()
    print(f"{versions()}\n`{' '.join(['python -m bench.overhead', *sys.argv[1:]])}`\n", flush=True)
    pairs = [(step_us(False, args.seconds), step_us(True, args.seconds)) for _ in range(args.rounds)]
    without, with_it = (statistics.median(each) for each in zip(*pairs, strict=True))
    more = [one - other for other, one in pairs]
    rows = [
        ["all ranks would be started anew", f"{without:.0f} µs"],
        ["ranks can stay", f"{with_it:.0f} µs"],
        [f"more, median of {args.rounds} pairs", f"{statistics.median(more):+.0f} µs"],
        ["  least and most", f"{min(more):+.0f} and {max(more):+.0f} µs"],
    ]
    print(table(["a step", ""], rows))


if __name__ == "__main__":
    main()
