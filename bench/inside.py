"""A rank is killed, and the others stay: Holdfast beside torchft and NVIDIA's in-process wrapper.

`python -m bench.inside`: one small training, CPU, gloo. Two times: until the survivors do their next
step, and until all ranks do. Torchft has no launcher: a killed rank is started again at once here. The wrapper goes on
with fewer ranks, and a lost one never comes back: each kill has a job of its own, and the rank that keeps the store is
spared."""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from bench.launchers import PEER_VENV, ROOT, ft_launcher, table, versions
from bench.survivors import BACK_S, START_S, Lines, Step, measure

STARTS = 3  # of a peer that comes to no first step
LIGHTHOUSE = ("--min_replicas=1", "--join_timeout_ms=100", "--quorum_tick_ms=10", "--heartbeat_timeout_ms=500")


class Times(NamedTuple):
    """Of kills; None: they did not come to a step again in a minute."""

    survivors_ms: list[float | None]
    all_ms: list[float | None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20, help="of each")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    if ft_launcher() is None:
        raise SystemExit("without the peers there is nothing to compare")
    print(f"{versions()}\n`{' '.join(['python -m bench.inside', *sys.argv[1:]])}`\n", flush=True)
    rows = []
    for name, flags in (("holdfast", []), ("holdfast, standby", [f"--standby={args.ranks}"])):
        measured = measure(name, args.ranks, flags, args.kills, args.seed)
        times: list[float | None] = [*measured.times_ms, *[None] * measured.failed]
        rows.append(_row(name, args.ranks, Times(times, times)))
    rows.append(_row("torchft", args.ranks, torchft(args.ranks, args.kills, args.seed)))
    rows.append(_row("NVRx in-process", args.ranks, nvrx(args.ranks, args.kills, args.seed)))
    figures = ["median", "90 %", "worst", "never"]
    print(table(["", "ranks", "kills", *(f"{who}: {what}" for who in ("survivors", "all") for what in figures)], rows))


def _row(name: str, ranks: int, times: Times) -> list[str]:
    row = [name, str(ranks), str(len(times.survivors_ms)), *_figures(times.survivors_ms), *_figures(times.all_ms)]
    print(" ".join(row), file=sys.stderr, flush=True)
    return row


def _figures(times_ms: list[float | None]) -> list[str]:
    ordered = sorted(ms for ms in times_ms if ms is not None)
    never = str(len(times_ms) - len(ordered))
    if not ordered:
        return [*["-"] * 3, never]
    picked = (statistics.median(ordered), ordered[int(0.9 * (len(ordered) - 1))], ordered[-1])
    return [*(f"{ms:.0f} ms" for ms in picked), never]


# -- peers ------------------------------------------------------------------------------------------------------------


def torchft(ranks: int, kills: int, seed: int) -> Times:
    """A job that does not come back is given up, and another one takes its place; and so is one that does not begin,
    which is told and not counted: nobody was killed there."""
    chance, times, unstarted = random.Random(seed), Times([], []), 0
    while len(times.all_ms) < kills:
        with contextlib.ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            env = {"LIGHTHOUSE": stack.enter_context(_lighthouse(folder))}
            jobs = stack.enter_context(_jobs())
            for rank in range(ranks):
                jobs[rank] = _start("torchft", folder, rank, ranks, env)
            lines = Lines(folder, ranks)
            begun_ns = _wait(lines, lambda rank, step: step.generation == ranks)
            if begun_ns is None and (unstarted := unstarted + 1) < STARTS:
                print(f"torchft: no first step in {START_S:.0f} s; it is started again", file=sys.stderr, flush=True)
                continue
            _started(begun_ns, folder)
            while len(times.all_ms) < kills:
                time.sleep(1.0 + 0.5 * chance.random())
                rank = chance.randrange(ranks)
                _end(jobs[rank])
                began_ns = time.monotonic_ns()
                jobs[rank] = _start("torchft", folder, rank, ranks, env)
                others = [other for other in range(ranks) if other != rank]

                new = began_ns, rank, jobs[rank].pid
                shrunk_ns = _wait(lines, _in_world(ranks - 1, *new), others)
                grown_ns = _wait(lines, _in_world(ranks, *new)) if shrunk_ns is not None else None
                times.survivors_ms.append(_ms(began_ns, shrunk_ns))
                times.all_ms.append(_ms(began_ns, grown_ns))
                if grown_ns is None:
                    break
    return times


def _in_world(size: int, since_ns: int, new_rank: int, pid: int) -> Callable[[int, Step], bool]:
    """A step of one of that size after a kill; that rank's by the new process."""

    def is_it(rank: int, step: Step) -> bool:
        return step.at_ns > since_ns and step.generation == size and (rank != new_rank or step.pid == pid)

    return is_it


def nvrx(ranks: int, kills: int, seed: int) -> Times:
    chance, times = random.Random(seed), Times([], [])
    for _ in range(kills):
        with tempfile.TemporaryDirectory() as where, _jobs() as jobs:
            folder = Path(where)
            env = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(_free_port())}
            for rank in range(ranks):
                jobs[rank] = _start("nvrx", folder, rank, ranks, env)
            lines = Lines(folder, ranks)
            _started(_wait(lines, lambda rank, step: True), folder)
            time.sleep(1.0 + 0.5 * chance.random())
            rank = chance.randrange(1, ranks)
            began_ns = time.monotonic_ns()
            _end(jobs[rank])
            others = [other for other in range(ranks) if other != rank]
            back_ns = _wait(lines, lambda _, step: step.generation == ranks - 1, others)
            times.survivors_ms.append(_ms(began_ns, back_ns))
            times.all_ms.append(None)
    return times


def _ms(began_ns: int, ended_ns: int | None) -> float | None:
    return (ended_ns - began_ns) / 1e6 if ended_ns is not None else None


def _started(at_ns: int | None, folder: Path) -> None:
    if at_ns is None:
        said = "\n".join(path.read_text(errors="replace")[-2000:] for path in folder.glob("err*"))
        raise SystemExit(f"no step came in {max(START_S, BACK_S):.0f} s:\n{said}")


def _wait(lines: Lines, is_it: Callable[[int, Step], bool], ranks: list[int] | None = None) -> int | None:
    """When the last of those ranks did the first such step; None: a minute has gone by."""
    until_s = time.monotonic() + max(START_S, BACK_S)
    while time.monotonic() < until_s:
        lines.read()
        found = [
            next((step.at_ns for step in lines.steps[rank] if is_it(rank, step)), None)
            for rank in (ranks if ranks is not None else range(len(lines.steps)))
        ]
        if None not in found:
            return max(at_ns for at_ns in found if at_ns is not None)
        time.sleep(0.002)
    return None


def _start(which: str, folder: Path, rank: int, ranks: int, env: dict[str, str]) -> subprocess.Popen[bytes]:
    own = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "PYTHONPATH": str(ROOT),
        "no_proxy": "*",
    }
    command = [str(PEER_VENV / "bin" / "python"), "-W", "ignore", "-m", "bench.inside_peers", which, str(folder)]
    with open(folder / f"err.{rank}", "ab") as err:
        given = {**os.environ, "OMP_NUM_THREADS": "1", **own, **env}
        return subprocess.Popen(command, env=given, stdout=err, stderr=err, start_new_session=True)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


@contextlib.contextmanager
def _jobs() -> Iterator[dict[int, subprocess.Popen[bytes]]]:
    jobs: dict[int, subprocess.Popen[bytes]] = {}
    try:
        yield jobs
    finally:
        for process in jobs.values():
            with contextlib.suppress(ProcessLookupError):  # of the session: the wrapper has processes of its own
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@contextlib.contextmanager
def _lighthouse(folder: Path) -> Iterator[str]:
    """Torchft's server of quorums."""
    port = _free_port()
    command = [str(PEER_VENV / "bin" / "torchft_lighthouse"), f"--bind=127.0.0.1:{port}", *LIGHTHOUSE]
    with open(folder / "err.lighthouse", "wb") as err:
        process = subprocess.Popen(command, stdout=err, stderr=err)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


if __name__ == "__main__":
    main()
