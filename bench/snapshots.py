"""Checkpoints on a CPU: how long a save holds training up, what goes to disk and comes back, and 10,000 snapshots.

Beside torch's own four savers, the machine's memcpy, and a plain write and read of the same bytes, in the same run.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

import holdfast
from bench import disks
from bench.launchers import table, versions
from bench.savers import Ours, Sample, Saver, Trial, milliseconds, rate, stock, verdict
from bench.start import memory_kb, tree
from bench.training import Shape, Training

SMALL = Shape(width=128, layers=2, vocabulary=1024, batch=1, sequence=16)
TURNS, TURN = 40, 50  # of the old one and of the new one, and the snapshots in each
PARTS = ("growth", "stall", "disk")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", default=None, help="on the disk that is meant; a temporary one without")
    parser.add_argument("--only", choices=PARTS, action="append", help="one part; may be given again")
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--layers", type=int, default=10)
    parser.add_argument("--vocabulary", type=int, default=16384)
    parser.add_argument("--sequence", type=int, default=128, help="tokens a step; more make it longer")
    parser.add_argument("--rounds", type=int, default=9, help="saves of ours in each way, writes and reads")
    parser.add_argument("--peer-rounds", type=int, default=3, help="saves by each of torch's, in each way")
    parser.add_argument("--steps", type=int, default=6, help="in which a save beside them is written")
    parser.add_argument("--snapshots", type=int, default=10_000)
    args = parser.parse_args()
    parts = args.only or PARTS
    print(f"{versions()}\n`{' '.join(['python -m bench.snapshots', *sys.argv[1:]])}`\n", flush=True)
    with tempfile.TemporaryDirectory(dir=args.directory) as name:
        folder = Path(name)
        if "growth" in parts:  # first, while this process has nothing else
            growth(folder / "many", args.snapshots)
        if "stall" not in parts and "disk" not in parts:
            return
        training = Training(Shape(args.width, args.layers, args.vocabulary, 1, args.sequence))
        print(f"A model of {training}\n", flush=True)
        trial = Trial(training)
        with contextlib.closing(holdfast.Checkpointer(folder / "ours", training.state, keep=1, memory_every=0)) as ours:
            if "stall" in parts:
                stalls(training, trial, Ours(ours), folder, args)
            if "disk" in parts:
                disks.measure(training, ours, folder, trial.steps, args.rounds)
        trial.close()


# -- how long a save holds training up --------------------------------------------------------------------------------


class Memcpy:
    """The same number of bytes, into memory that was touched before."""

    def __init__(self, size_bytes: int) -> None:
        self._source, self._target = (torch.ones(size_bytes, dtype=torch.uint8) for _ in range(2))
        self.one_s: list[float] = []  # by one call
        self.two_s: list[float] = []  # by two threads, as a snapshot is copied when training has nothing else to do
        self._run(2)

    def run(self) -> None:
        self.one_s.append(self._run(1))
        self.two_s.append(self._run(2))

    def _run(self, threads: int) -> float:
        size = len(self._source) // threads
        source, target = self._source.data_ptr(), self._target.data_ptr()
        began_s = time.perf_counter()
        others = [
            threading.Thread(target=ctypes.memmove, args=(target + at * size, source + at * size, size))
            for at in range(1, threads)
        ]
        for other in others:
            other.start()
        ctypes.memmove(target, source, size)
        for other in others:
            other.join()
        return time.perf_counter() - began_s


class Samples:
    """Of one saver, in rounds. Each round also has steps without a save."""

    def __init__(self) -> None:
        self.held_s: list[float] = []
        self.added_s: list[float] = []

    def add(self, sample: Sample, plain: Sample) -> None:
        self.held_s.append(sample.held_s)
        self.added_s.append(sample.total_s - plain.total_s)

    def cells(self) -> list[str]:
        return [milliseconds(self.held_s), milliseconds(self.added_s)]


def stalls(training: Training, trial: Trial, ours: Ours, folder: Path, args: argparse.Namespace) -> None:
    with stock(training, folder / "stock") as peers:
        first_s = trial.run(ours, 0).held_s
        for saver in [ours, *peers]:
            trial.run(saver, 0)  # makes its memory, and its process
        memcpy = Memcpy(training.size_bytes)
        savers = [ours, *peers]
        alone = _rounds(trial, savers, 0, args, memcpy.run)
        beside = _rounds(trial, savers, args.steps, args)
    cores = torch.get_num_threads()
    torch.set_num_threads(max(1, cores - 1))
    spare = _rounds(trial, [ours], args.steps, args)
    one_s = _forward_backward_s(training)
    torch.set_num_threads(cores)
    all_s = _forward_backward_s(training)
    copy_s = statistics.median(memcpy.one_s)
    held = f"held up ({args.rounds} saves; torch's {args.peer_rounds})"
    rows = [[saver.name, *alone[saver.name].cells(), *beside[saver.name].cells()] for saver in savers]
    print(table(["a save by", held, "steps longer", "beside forward and backward: held up", "steps longer"], rows))
    print(f"\nOurs, the very first, which makes the memory: {1e3 * first_s:.0f} ms.\n")
    rows = []
    for what, times_s in (("one call", memcpy.one_s), ("two threads", memcpy.two_s)):
        copied = f"{milliseconds(times_s)}, {rate(training.size_bytes, statistics.median(times_s))}"
        rows.append([f"memcpy of the state, warm, {what}", copied, "", ""])
    rows.append(_claim("nothing overlaps", alone, 1.2 * copy_s, copy_s))
    for what, found, beside_s in (("all cores", beside, all_s), ("one core left free", spare, one_s)):
        longer = "longer than the copy"
        rows.append([f"forward and backward, {what}", f"{1e3 * beside_s:.0f} ms", longer, verdict(beside_s > copy_s)])
        rows.append(_claim("beside these", found, 0.05 * copy_s, copy_s))
    print(table(["what", "median", "asked", ""], rows), "\n", flush=True)


def _claim(how: str, found: dict[str, Samples], limit_s: float, copy_s: float) -> list[str]:
    times_s = found["holdfast"].held_s
    stall_s = statistics.median(times_s)
    figure = f"{milliseconds(times_s)}, {100 * stall_s / copy_s:.1f} % of one memcpy"
    asked = f"at most {1e3 * limit_s:.1f} ms, {100 * limit_s / copy_s:.0f} %"
    return [f"held up, {how}", figure, asked, verdict(stall_s <= limit_s)]


def _rounds(
    trial: Trial,
    savers: list[Saver] | list[Ours],
    beside: int,
    args: argparse.Namespace,
    also: Callable[[], object] | None = None,
) -> dict[str, Samples]:
    """Interleaved, since the machine's speed drifts, and each time in another order."""
    found = {name: Samples() for name in ["without", *(saver.name for saver in savers)]}
    for number in range(args.rounds):
        if also is not None:
            also()
        plain = trial.run(None, beside)
        found["without"].add(plain, Sample(0.0, 0.0))
        turn = number % len(savers)
        for saver in [*savers[turn:], *savers[:turn]]:
            if number < args.peer_rounds or isinstance(saver, Ours):
                found[saver.name].add(trial.run(saver, beside), plain)
    return found


def _forward_backward_s(training: Training) -> float:
    times_s = []
    for _ in range(3):
        began_s = time.perf_counter()
        training.forward_backward()
        times_s.append(time.perf_counter() - began_s)
    return statistics.median(times_s)


# -- many -------------------------------------------------------------------------------------------------------------


def growth(folder: Path, snapshots: int) -> None:
    """A snapshot every step, and every hundredth written to disk. The optimizer has one thread: it is not the point.

    A machine's speed drifts by more than what is looked for. So in the end the old one takes turns with a new one,
    which has taken few: what the old one takes longer has grown."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    training = Training(SMALL)
    part = max(1, snapshots // 10)
    writes_every = max(1, part // 10)
    trial = Trial(training)
    old = holdfast.Checkpointer(folder / "old", training.state, keep=1, every_steps=writes_every, memory_every=1)
    used: list[dict[str, int]] = []
    for step in range(1, snapshots + 1):
        trial.snapshot(old, step)
        if step in (part, snapshots):
            old.wait()
            used.append(_used())
    new = holdfast.Checkpointer(folder / "new", training.state, keep=1, memory_every=1)
    times_s: dict[bool, list[float]] = {True: [], False: []}
    for number in range(2 * TURNS):
        is_old = number % 2 == 0
        for at in range(TURN):
            step = snapshots + number * TURN + at + 1
            took_s = trial.snapshot(old if is_old else new, step)
            if at >= TURN // 5:
                times_s[is_old].append(took_s)
    trial.close()
    old.close()
    new.close()
    torch.set_num_threads(threads)
    new_s, old_s = (statistics.median(times_s[is_old]) for is_old in (False, True))
    shift = 100 * (old_s / new_s - 1)
    times = f"{1e6 * new_s:.0f} µs, a new one's", f"{1e6 * old_s:.0f} µs"
    rows = [["time of one, median, in turns", *times, f"{shift:+.1f} %", "at most +5 %", verdict(shift <= 5)]]
    for what, most in (("resident kB, with the writer", 4096), ("descriptors", 0), ("threads", 0)):
        before, after = (one[what] for one in used)
        grown = after - before
        rows.append([what, f"{before:,}", f"{after:,}", f"{grown:+,}", f"at most +{most:,}", verdict(grown <= most)])
    size = f"{training.size_bytes / 1e6:.1f} MB"
    print(f"{snapshots:,} snapshots of a state of {size}, one of {writes_every} also written to disk\n")
    print(table(["what", f"after {part:,}", f"after {snapshots:,}", "growth", "asked", ""], rows), "\n", flush=True)


def _used() -> dict[str, int]:
    """By this process and its writer."""
    found = dict.fromkeys(("resident kB, with the writer", "descriptors", "threads"), 0)
    for pid in tree(os.getpid()):
        counts = (memory_kb(pid, "Rss"), *(len(os.listdir(f"/proc/{pid}/{kind}")) for kind in ("fd", "task")))
        for what, count in zip(found, counts, strict=True):
            found[what] += count
    return found


if __name__ == "__main__":
    main()
