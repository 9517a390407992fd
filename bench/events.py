"""The record: what an event costs the agent, and what all of it costs a node of 64 ranks at 20 steps a second."""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench.launchers import holdfast, table, versions
from bench.start import cpu_s
from holdfast.control.causes import Kind
from holdfast.observe import record
from holdfast.observe.events import EventLog
from holdfast.observe.record import IncidentOpened, Progress, RankExited, What

STEPS = """
import time
import torch
parameter = torch.nn.Parameter(torch.zeros(1))
optimizer = torch.optim.SGD([parameter], lr=0.1)
next_s = time.monotonic()
while True:
    parameter.sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    next_s += 0.05
    time.sleep(max(0.0, next_s - time.monotonic()))
"""


ROUNDS, EACH = 100, 500


def cost_us(what: What) -> tuple[float, int]:
    """Of one event, median of the rounds, and its bytes."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, record.NAME)
        log = EventLog(str(path), [], print, "node-1:4711")
        log.emit(what)
        size = path.stat().st_size
        rounds = []
        for _ in range(ROUNDS):
            began_s = time.perf_counter()
            for _ in range(EACH):
                log.emit(what)
            rounds.append((time.perf_counter() - began_s) / EACH * 1e6)
        return statistics.median(rounds), size


def node_cost(ranks: int, seconds: float) -> tuple[float, int, int]:
    """The agent's share of a core, and the bytes and lines that its record grew by."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "steps.py")
        script.write_text(STEPS)
        flags = [f"--nproc-per-node={ranks}", f"--log-dir={folder}/logs", "--hang-detection=off"]
        agent = subprocess.Popen([*holdfast().command, *flags, str(script)], stderr=subprocess.DEVNULL)
        try:
            while True:
                time.sleep(0.5)
                found = [path.read_text() for path in Path(folder).glob(f"logs/*/{record.NAME}")]
                if found and found[0].count('"rank.first_step"') == ranks:
                    break
                assert agent.poll() is None, "it has ended"
            time.sleep(5)
            path = next(Path(folder).glob(f"logs/*/{record.NAME}"))
            before_s, before = cpu_s(agent.pid), path.read_text()
            time.sleep(seconds)
            grown = path.read_text()[len(before) :]
            return (cpu_s(agent.pid) - before_s) / seconds, len(grown), grown.count("\n")
        finally:
            agent.terminate()
            agent.wait()


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.events", description=__doc__)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=60.0)
    args = parser.parse_args(argv)
    incident = IncidentOpened(1, 0, Kind.ERROR, "ValueError: x", "restart 1 of 3", True, traceback="line\n" * 40)
    steps = tuple(range(1000, 1000 + args.ranks))
    own_us = tuple(47_111 + 7 * rank for rank in range(args.ranks))
    phases = "1" * args.ranks
    together = Progress(0, 0, 1064, (1064,), 0, (50_000,), own_us, 0.1, phases)
    apart = Progress(0, 0, 1064, steps, 0, own_us, own_us, 0.1, phases)
    rows = []
    for name, what in (
        ("a rank's exit", RankExited(0, 1, 4711, -9)),
        (f"progress of {args.ranks} ranks that step together", together),
        (f"progress of {args.ranks} ranks, each at its own pace", apart),
        ("an incident with a traceback of 40 lines", incident),
    ):
        cost, size = cost_us(what)
        rows.append([f"event: {name}, {size} bytes", f"{cost:.1f} us"])
    share, size, lines = node_cost(args.ranks, args.seconds)
    rows.append(
        [f"agent of {args.ranks} ranks at 20 steps a second, {args.seconds:g} s", f"{share * 100:.2f} % of a core"]
    )
    rows.append(["  what its record grew by in that time", f"{lines} lines, {size / 1000:.1f} kB"])
    print(f"{versions()}; {sys.platform}; events: median of {ROUNDS} rounds of {EACH}\n")
    print(table(["what", "figure"], rows))


if __name__ == "__main__":
    main()
