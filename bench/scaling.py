"""A node joins a job whose ranks stay, and leaves it again: for how long the others do not train.

`python -m bench.scaling [--times 10]`: two agents on one machine, one rank each. From the last step that rank 0 did
alone to its first one in the larger world, and back. CPU, gloo; the script is that of `bench.survivors`.
"""

from __future__ import annotations

import argparse
import itertools
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench import survivors
from bench.launchers import ROOT, holdfast, table, versions

ASKED_MS = 150.0
BACK_S = 60.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=10)
    args = parser.parse_args()
    print(f"{versions()}\n`{' '.join(['python -m bench.scaling', *sys.argv[1:]])}`\n", flush=True)
    with tempfile.TemporaryDirectory() as where:
        up, down = measure(Path(where), args.times)
    rows = [_row("a node joins", up, ASKED_MS), _row("it leaves (SIGTERM), and saves", down)]
    print(table(["", "times", "median", "worst", "asked", ""], rows))


def _row(name: str, pauses_ms: list[float], asked_ms: float | None = None) -> list[str]:
    median = statistics.median(pauses_ms)
    times = [str(len(pauses_ms)), f"{median:.0f} ms", f"{max(pauses_ms):.0f} ms"]
    if asked_ms is None:
        return [name, *times, "", ""]
    return [name, *times, f"{asked_ms:.0f} ms", "met" if median <= asked_ms else "not met"]


def measure(folder: Path, times: int) -> tuple[list[float], list[float]]:
    """Pauses of rank 0."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    lines = survivors.Lines(folder, 1)
    first = _agent(folder, port, 0)
    second: subprocess.Popen[bytes] | None = None
    up: list[float] = []
    down: list[float] = []
    try:
        _until_beyond(lines, -1)
        time.sleep(3.0)
        for number in range(times):
            second = _agent(folder, port, 1 + number)
            up.append(_until_beyond(lines, 2 * number))
            time.sleep(1.0)
            second.send_signal(signal.SIGTERM)
            down.append(_until_beyond(lines, 2 * number + 1))
            second.wait(30)
            time.sleep(0.5)
    finally:
        for process in (second, first):
            if process is not None and process.poll() is None:
                process.send_signal(signal.SIGTERM)
                process.wait(30)
    return up, down


def _until_beyond(lines: survivors.Lines, generation: int) -> float:
    """How long rank 0 did no step, in ms. The last of a world is noted when the rank is in the next one."""
    if lines.until_beyond(generation, BACK_S) is None:
        raise SystemExit(f"no step in a later world than {generation} within {BACK_S:g} s")
    before = [step for step in lines.steps[0] if step.generation <= generation]
    after = next(step for step in lines.steps[0] if step.generation > generation)
    times_ns = [step.at_ns for step in (*before[-2:], after)]
    return max((late - early for early, late in itertools.pairwise(times_ns)), default=0) / 1e6


def _agent(folder: Path, port: int, number: int) -> subprocess.Popen[bytes]:
    rendezvous = ["--rdzv-id=bench", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}"]
    command = [*holdfast().command, "--nnodes=1:2", "--nproc-per-node=1", *rendezvous]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "CHECKPOINT_DIR": str(folder / "saved")}
    with open(folder / f"err.{number}", "wb") as err:
        return subprocess.Popen(
            [*command, str(survivors.SCRIPT), str(folder)], env=env, stdout=subprocess.DEVNULL, stderr=err
        )


if __name__ == "__main__":
    main()
