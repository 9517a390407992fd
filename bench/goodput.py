"""Useful steps per wall time under one seeded schedule of kills: holdfast beside torchrun with the checkpoints of the
elastic FSDP script (one an epoch), and beside torchrun with `dcp.async_save` every 50 steps.

Each runs the same training for as long, with the same kills at the same times. A step is useful if the training does
not do it again: what counts is the step that training stands at in the end. The undisturbed rate is that of plain DDP
without checkpoints under torchrun, measured right before and right after each of the others: machines are not as fast
at any time of the day."""

from __future__ import annotations

import argparse
import importlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.launchers import ROOT, Launcher, holdfast, table, torchrun, versions
from bench.savers import verdict

SCRIPT = ROOT / "bench" / "useful.py"
KINDS = ("holdfast", "epochs", "async")
LEAST = 0.97


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--every", type=float, default=10.0, help="seconds between two kills, on average")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--undisturbed", type=float, default=60.0, help="seconds of each run without kills")
    args = parser.parse_args()
    chance = random.Random(args.seed)
    kills: list[tuple[float, int]] = []
    at_s = chance.expovariate(1 / args.every)
    while at_s < args.seconds:
        kills.append((at_s, chance.randrange(2)))
        at_s += chance.expovariate(1 / args.every)
    print(f"{versions()}\n`{' '.join(['python -m bench.goodput', *sys.argv[1:]])}`\n", flush=True)
    print(f"{len(kills)} kills in {args.seconds:.0f} s, of one of 2 ranks; CPU, gloo\n", flush=True)
    launchers = {"holdfast": holdfast(), "epochs": torchrun(shared_store=False), "async": torchrun(shared_store=False)}

    def undisturbed() -> float:
        return run(torchrun(shared_store=False), "none", args.undisturbed, []) / float(args.undisturbed)

    names = {
        "holdfast": "holdfast run, run.batches and run.step",
        "epochs": "torchrun (best setting), a checkpoint an epoch",
        "async": "torchrun (best setting), dcp.async_save every 50 steps",
    }
    rows = []
    before = undisturbed()
    for kind in KINDS:
        useful = run(launchers[kind], kind, args.seconds, kills) / args.seconds
        after = undisturbed()
        share = 2 * useful / (before + after)
        asked = [f"at least {100 * LEAST:.0f} %", verdict(share >= LEAST)] if kind == "holdfast" else ["", ""]
        around = f"{before:.1f} and {after:.1f}"
        rows.append([names[kind], str(len(kills)), f"{useful:.1f}", around, f"{100 * share:.1f} %", *asked])
        print(f"{names[kind]}: {useful:.1f}, {around}: {100 * share:.1f} %", file=sys.stderr, flush=True)
        before = after
    wanted = ["what", "kills", "useful steps a second", "undisturbed before and after", "of that", "asked", ""]
    print(table(wanted, rows))


def tokens() -> bytes:
    """The text of the language-model example."""
    sys.path.insert(0, str(ROOT / "examples"))
    example: Any = importlib.import_module("train_chars")
    return bytes(example.encode(example.read_text([])).to(example.torch.uint8).numpy())


def run(launcher: Launcher, kind: str, seconds: float, kills: list[tuple[float, int]]) -> int:
    """Useful steps. Time begins with the first step of the first world, for all alike."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "tokens").write_bytes(tokens())
        command = [*launcher.command, "--nproc-per-node=2", "--max-restarts=10000", str(SCRIPT), kind, name]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **launcher.env}
        with open(folder / "stderr", "wb") as stderr:
            process = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=stderr)
        try:
            return _driven(process, folder, seconds, kills)
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(40)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            for rank in range(2):
                _kill(folder, rank)


def _driven(process: subprocess.Popen[bytes], folder: Path, seconds: float, kills: list[tuple[float, int]]) -> int:
    while not _steps(folder):
        if process.poll() is not None:
            raise SystemExit(f"it did not start:\n{(folder / 'stderr').read_text()[-2000:]}")
        time.sleep(0.01)
    began_s, first = time.monotonic(), _steps(folder)
    for at_s, rank in kills:
        time.sleep(max(0.0, began_s + at_s - time.monotonic()))
        if process.poll() is not None:
            break  # it has given up; what it has done is what it has done
        _kill(folder, rank)
    time.sleep(max(0.0, began_s + seconds - time.monotonic()))
    return _steps(folder) - first


def _steps(folder: Path) -> int:
    """What training stands at: rank 0 writes the number of its last step, in place."""
    try:
        return int((folder / "step").read_text() or 0)
    except (FileNotFoundError, ValueError):
        return 0


def _kill(folder: Path, rank: int) -> None:
    """By the number that the rank has written down, if that is still the same program."""
    try:
        pid = int((folder / f"pid.{rank}").read_text())
        if b"useful.py" in Path(f"/proc/{pid}/cmdline").read_bytes() or _is_fork(pid, folder):
            os.kill(pid, signal.SIGKILL)
    except (FileNotFoundError, ProcessLookupError, ValueError):
        pass


def _is_fork(pid: int, folder: Path) -> bool:
    """Of a zygote: it has the zygote's command line, and this folder in its files."""
    links = Path(f"/proc/{pid}/fd").iterdir()
    return any(os.readlink(link).startswith(str(folder)) for link in links if link.exists())


if __name__ == "__main__":
    main()
