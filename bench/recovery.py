"""SIGKILL of a rank to the next finished step on all ranks: holdfast and its peers, one run, one script."""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import tempfile
import time
from pathlib import Path

from bench.launchers import Launcher, Run, ft_launcher, holdfast, table, torchrun, versions


def kill_repeatedly(launcher: Launcher, kills: int, timeout_s: float, seed: int) -> list[float]:
    """The recovery times in seconds, of the kills that were recovered from. A job that is lost is started anew."""
    chance = random.Random(seed)
    times: list[float] = []
    lost = 0
    while len(times) + lost < kills:
        with tempfile.TemporaryDirectory() as folder:
            run = Run(launcher, Path(folder), 2, 10_000_000, kills + 10)
            try:
                if run.wait_new_step(run.started_ns, set(), 120) is None:
                    raise SystemExit(f"{launcher.name} did not start:\n{(Path(folder) / 'stderr').read_text()[-2000:]}")
                while len(times) + lost < kills:
                    time.sleep(0.3 + chance.random() * 0.3)
                    pids = run.pids()
                    at_ns = time.monotonic_ns()
                    os.kill(chance.choice(pids), signal.SIGKILL)
                    back_ns = run.wait_new_step(at_ns, set(pids), timeout_s)
                    if back_ns is None:
                        lost += 1
                        break
                    times.append((back_ns - at_ns) / 1e9)
            finally:
                run.stop()
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200, help="kills of a rank under holdfast")
    parser.add_argument("--peer-kills", type=int, default=8, help="kills under each peer")
    parser.add_argument("--timeout", type=float, default=45.0, help="seconds after which a job counts as not recovered")
    args = parser.parse_args()
    ours, peer = holdfast(), ft_launcher()
    print(f"SIGKILL of one of 2 ranks to the next step on all ranks; CPU, gloo; {versions()}\n")
    results: dict[str, tuple[list[float], int]] = {}
    for launcher, kills in [
        (ours, args.kills),
        (torchrun(shared_store=True), args.peer_kills),
        (torchrun(shared_store=False), args.peer_kills),
        *([(peer, args.peer_kills)] if peer is not None else []),
    ]:
        times = kill_repeatedly(launcher, kills, args.timeout, seed=1)
        results[launcher.name] = (times, kills)
    base = statistics.median(results[ours.name][0])
    rows = []
    for name, (times, kills) in results.items():
        ordered = sorted(times)
        if not ordered:
            rows.append([name, f"{kills}", f"0 of {kills}", "", "", "", ""])
            continue
        median = statistics.median(ordered)
        p99 = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
        rows.append(
            [
                name,
                f"{kills}",
                f"{len(times)} of {kills}",
                f"{median * 1000:.0f} ms",
                f"{p99 * 1000:.0f} ms" if len(ordered) >= 100 else "",
                f"{ordered[-1] * 1000:.0f} ms",
                f"{median / base:.0f}x",
            ]
        )
    print(table(["launcher", "kills", "recovered", "median", "99th percentile", "worst", "of ours"], rows))


if __name__ == "__main__":
    main()
