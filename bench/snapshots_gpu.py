"""Checkpoints on a GPU: what snapshots in memory cost each step, what they hold, how fast they come back, and torch's
own four savers in the same run. Results also go to $OUT/snapshots_gpu.json as they come."""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import holdfast
from bench.launchers import table, versions
from bench.savers import Ours, Sample, Saver, Trial, milliseconds, stock, verdict
from bench.training import Shape, Training
from holdfast.checkpoint import contents
from holdfast.checkpoint.devices import piece_view

_cuda: Any = torch.cuda
PORTABLE = 1  # cudaHostRegisterPortable
BLOCK = 20  # steps
EVERY = (1, 5)
BEGAN_S = time.monotonic()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", default=None, help="to save to; /dev/shm if there is room, without")
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=14)
    parser.add_argument("--vocabulary", type=int, default=49152)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--step-ms", type=float, default=90.0, help="the sequence is made as long as that takes")
    parser.add_argument("--rounds", type=int, default=7, help=f"of {BLOCK} steps each way")
    parser.add_argument("--peer-rounds", type=int, default=2, help="saves by each of torch's")
    parser.add_argument("--checked", type=int, default=20, help="snapshots that are compared with the state")
    parser.add_argument("--limit", type=float, default=420.0, help="seconds after which no further saver is tried")
    args = parser.parse_args()
    print(f"{_cuda.get_device_name()}, {versions()}")
    print(f"`{' '.join(['python -m bench.snapshots_gpu', *sys.argv[1:]])}`\n", flush=True)
    training = Training(Shape(args.width, args.layers, args.vocabulary, args.batch, 256), "cuda", torch.bfloat16)
    sequence = fit(training, args.batch, args.step_ms / 1e3)
    print(f"{training}; {args.batch} sequences of {sequence} tokens\n", flush=True)
    results = Results(training, args)
    trial = Trial(training)
    with tempfile.TemporaryDirectory(dir=args.directory or roomy(6 * training.size_bytes)) as name:
        folder = Path(name)
        say(f"saves to {folder}")
        checkpointers = {
            every: holdfast.Checkpointer(folder / f"every{every}", training.state, keep=1, memory_every=every)
            for every in EVERY
        }
        steps = itertools.count(1)
        bandwidth(training.size_bytes, results)
        costs(training, checkpointers, steps, args.rounds, results)
        checkpointers[5].close()
        checks(training, checkpointers[1], steps, args.checked, results)
        restores(training, checkpointers[1], results)
        savers(training, trial, Ours(checkpointers[1]), steps, folder, args, results)
        checkpointers[1].close()
    results.tell()


class Results:
    def __init__(self, training: Training, args: argparse.Namespace) -> None:
        self.figures: dict[str, Any] = {"state_bytes": training.size_bytes, "arguments": vars(args)}
        self.rows: list[list[str]] = []

    def add(self, what: str, figure: str, asked: str = "", met: bool | None = None) -> None:
        say(f"{what}: {figure}" + (f"; asked: {asked}: {verdict(met)}" if met is not None else ""))
        self.rows.append([what, figure, asked, verdict(met) if met is not None else ""])
        if out := os.environ.get("OUT"):
            Path(out, "snapshots_gpu.json").write_text(json.dumps({**self.figures, "rows": self.rows}, indent=1))

    def tell(self) -> None:
        print("\n" + table(["what", "figure", "asked", ""], self.rows))


def say(text: str) -> None:
    print(f"[{time.monotonic() - BEGAN_S:6.1f} s] {text}", file=sys.stderr, flush=True)


def roomy(size_bytes: int) -> str | None:
    return "/dev/shm" if shutil.disk_usage("/dev/shm").free > size_bytes else None


def fit(training: Training, batch: int, step_s: float) -> int:
    """The length of a sequence for which a step takes that long. A step's time is about linear in it."""
    times_s = {}
    for sequence in (512, 1024):
        training.feed(batch, sequence)
        block(training, None, itertools.repeat(0), BLOCK // 2)  # the clocks of a GPU settle
        times_s[sequence] = block(training, None, itertools.repeat(0), BLOCK // 2)[0]
    slope_s = max(1e-6, (times_s[1024] - times_s[512]) / 512)
    sequence = max(64, round((1024 + (step_s - times_s[1024]) / slope_s) / 64) * 64)
    training.feed(batch, sequence)
    return sequence


# -- steps with snapshots, and without --------------------------------------------------------------------------------


def block(training: Training, checkpointer: Any, steps: Any, count: int = BLOCK) -> tuple[float, float]:
    """Seconds a step, by the GPU's clock and by ours. The block begins and ends just before a snapshot would be taken,
    so that each is counted with what it costs the step after it; the copy of the last one is waited for, uncounted."""
    _cuda.synchronize()
    marks = []
    began_s = time.perf_counter()
    for _ in range(count + 1):
        training.forward_backward()
        training.optimizer.step()
        mark = _cuda.Event(enable_timing=True)
        mark.record()
        marks.append(mark)
        step = next(steps)
        if checkpointer is not None:
            checkpointer.step(step)
    marks[-1].synchronize()
    wall_s = (time.perf_counter() - began_s) / (count + 1)
    _cuda.synchronize()
    return marks[0].elapsed_time(marks[-1]) / 1e3 / count, wall_s


def costs(training: Training, checkpointers: dict[int, Any], steps: Any, rounds: int, results: Results) -> None:
    """In turns, and each time in another order: what a GPU does by itself changes with its temperature."""
    for every, checkpointer in checkpointers.items():  # two snapshots that make the memory
        began_s = time.perf_counter()
        block(training, checkpointer, steps, 2 * every)
        say(f"memory for snapshots every {every} made in {time.perf_counter() - began_s:.1f} s")
    taken: dict[int, list[tuple[float, float]]] = {every: [] for every in (0, *EVERY)}
    for number in range(rounds):
        order = list(taken)
        for every in [*order[number % 3 :], *order[: number % 3]]:
            taken[every].append(block(training, checkpointers.get(every), steps))
    plain_s = [gpu for gpu, _ in taken[0]]
    step_s = statistics.median(plain_s)
    figure = f"{milliseconds(plain_s)}; by the host {milliseconds([wall for _, wall in taken[0]])}"
    results.figures["plain_s"] = taken[0]
    results.add("a step, no snapshots", figure)
    for every, limit in zip(EVERY, (0.10, 0.01), strict=True):
        shares = [with_one[0] / without[0] - 1 for with_one, without in zip(taken[every], taken[0], strict=True)]
        share, walls = statistics.median(shares), [wall for _, wall in taken[every]]
        spread = f"{100 * min(shares):+.2f} to {100 * max(shares):+.2f}"
        figure = f"{100 * share:+.2f} % ({spread}), {1e3 * share * step_s:+.1f} ms"
        figure += f"; by the host {milliseconds(walls)}"
        results.figures[f"every{every}_s"] = taken[every]
        results.add(f"snapshot every {every} steps", figure, f"at most {100 * limit:.0f} % of a step", share <= limit)


# -- what is in a snapshot --------------------------------------------------------------------------------------------


def checks(training: Training, checkpointer: Any, steps: Any, count: int, results: Results) -> None:
    """Each snapshot against a clone that the GPU made in its turn. Training goes on meanwhile, every other time with
    the optimizer at once: that would change what is being copied if it did not wait."""
    right = changed = 0
    for number in range(count):
        step = next(steps)
        checkpointer.step(step)
        live = contents.collect(training.state).tensors
        clones = {key: tensor.detach().clone() for key, tensor in live.items()}
        if number % 2 == 0:
            training.forward_backward()
        training.optimizer.step()
        changed += any(not _same(clones[key], live[key]) for key in list(live)[:8])
        for snapshot, data in checkpointer._snapshots.left_by_others():
            if snapshot.step == step:
                right += _holds(snapshot, data, clones)
    results.figures |= {"right": right, "changed": changed}
    figure = f"{right} right; training had changed the state meanwhile in {changed}"
    met = right == changed == count
    results.add(f"{count} snapshots, one each step, bit for bit what the state was", figure, "all", met)
    before = {key: tensor.detach().clone() for key, tensor in contents.collect(training.state).tensors.items()}
    checkpointer.step(next(steps))
    training.forward_backward()
    training.optimizer.step()
    restored = checkpointer.restore()
    after = contents.collect(training.state).tensors
    met = restored.name == "memory" and all(_same(before[key], after[key]) for key in before)
    results.add("restored after one more step, bit for bit", "right" if met else "wrong", "right", met)


def _holds(snapshot: Any, data: memoryview, clones: dict[str, torch.Tensor]) -> bool:
    base = torch.frombuffer(data, dtype=torch.uint8)
    keys = {piece.key for piece in snapshot.pieces}
    return keys == clones.keys() and all(
        _same(piece_view(base, piece, piece.at).to(clones[piece.key].device), clones[piece.key])
        for piece in snapshot.pieces
    )


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """By their bits: a NaN is equal to itself."""
    return torch.equal(one.detach().reshape(-1).view(torch.uint8), other.detach().reshape(-1).view(torch.uint8))


# -- how fast it comes back -------------------------------------------------------------------------------------------


def bandwidth(size_bytes: int, results: Results) -> None:
    """One buffer of the state's size, touched and registered, from and to one on the GPU."""
    host, device = torch.ones(size_bytes, dtype=torch.uint8), torch.ones(size_bytes, dtype=torch.uint8, device="cuda")
    began_s = time.perf_counter()
    if int(_cuda.cudart().cudaHostRegister(host.data_ptr(), size_bytes, PORTABLE)):
        raise SystemExit("the host's memory cannot be page-locked here")
    results.add("cudaHostRegister of as much memory", f"{time.perf_counter() - began_s:.2f} s")
    for name, into, source in (("to", device, host), ("from", host, device)):
        times_s = _timed(functools.partial(into.copy_, source, non_blocking=True), 7)[2:]
        figure = results.figures[f"pinned_{name}_gb_s"] = size_bytes / statistics.median(times_s) / 1e9
        results.add(f"pinned copy {name} the GPU", f"{figure:.1f} GB/s")
    _cuda.cudart().cudaHostUnregister(host.data_ptr())


def restores(training: Training, checkpointer: Any, results: Results) -> None:
    size = training.size_bytes
    link = results.figures["pinned_to_gb_s"]
    # As in a new process, which finds a slot that it has not registered. There is no public way to let go of it.
    checkpointer._snapshots._copier.close()
    first_s = _timed(checkpointer.restore, 1)[0]
    times_s = _timed(checkpointer.restore, 7)
    figure = size / statistics.median(times_s) / 1e9
    share = figure / link
    results.figures |= {"restore_s": times_s, "restore_first_s": first_s}
    figures = f"{figure:.1f} GB/s, {100 * share:.0f} % of the pinned copy; {milliseconds(times_s)}"
    results.add("restore from memory to the GPU", figures, "at least 80 %", share >= 0.8)
    results.add("the same with its registration", f"{size / first_s / 1e9:.1f} GB/s, {first_s:.2f} s")


def _timed(act: Callable[[], object], times: int) -> list[float]:
    taken_s = []
    for _ in range(times):
        _cuda.synchronize()
        began_s = time.perf_counter()
        act()
        _cuda.synchronize()
        taken_s.append(time.perf_counter() - began_s)
    return taken_s


# -- torch's own ------------------------------------------------------------------------------------------------------


def savers(
    training: Training, trial: Trial, ours: Ours, steps: Any, folder: Path, args: argparse.Namespace, results: Results
) -> None:
    trial.steps = itertools.count(next(steps) + 1)
    count = 5  # steps; a copy that runs beside them is over by then
    plain = statistics.median(trial.run(None, count).total_s for _ in range(3))
    with stock(training, folder / "stock") as peers:
        for saver in [ours, *peers]:
            if time.monotonic() - BEGAN_S > args.limit:
                results.add(f"a save by {saver.name}", "not tried: out of time")
                continue
            try:
                samples = _samples(trial, saver, count, args.peer_rounds)
            except Exception as failure:  # of one; the others are still worth the machine's time
                traceback.print_exc()
                results.add(f"a save by {saver.name}", f"failed: {type(failure).__name__}: {str(failure)[:120]}")
                continue
            held, added = [one.held_s for one in samples], [one.total_s - plain for one in samples]
            results.figures[saver.name] = {"held_s": held, "added_s": added}
            figure = f"held up {milliseconds(held)}, steps longer by {milliseconds(added)}"
            results.add(f"a save by {saver.name} to {folder.parent}", figure)


def _samples(trial: Trial, saver: Saver, count: int, rounds: int) -> list[Sample]:
    """The first makes memory and processes, and is not counted."""
    return [trial.run(saver, count) for _ in range(rounds + 1)][1:]


if __name__ == "__main__":
    main()
