"""Useful steps per wall time under one seeded schedule of kills, the same for all that are compared.

`python -m bench.goodput`: holdfast's loop beside torchrun with the checkpoints of the elastic FSDP script (one an
epoch), and beside torchrun with `dcp.async_save` every 50 steps.
`python -m bench.goodput launchers`: holdfast run, torchrun and ft_launcher with one script that saves by itself with
torch.save, and holdfast also with a Checkpointer in it. One failure every 20 s: that of the Llama 3 report, one every
three hours, scaled to a test. The script is this file.

Each runs for as long, with the same kills at the same times. A step is useful if the training does not do it again:
what counts is the step that training stands at in the end. The undisturbed rate is that of plain DDP without
checkpoints under torchrun, measured right before and right after each of the others: machines are not as fast at any
time of the day."""

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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench.launchers import ROOT, Launcher, ft_launcher, holdfast, table, torchrun, versions

SCRIPT = ROOT / "bench" / "useful.py"
OWN = Path(__file__).resolve()
LEAST = 0.97
SAVED_EVERY = 25  # steps, by torch.save: at one failure every 20 s and a step of 20 ms, about what costs least
START_S = 120.0


class Case(NamedTuple):
    name: str
    launcher: Launcher
    script: tuple[str, ...]  # with its arguments; the folder comes after them
    asked: bool = False  # whether it is the one that has to reach LEAST


class Outcome(NamedTuple):
    kills: int  # that hit
    steps: int  # all that were done
    useful: int
    seconds: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=["loop", "launchers"], default="loop")
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--every", type=float, help="seconds between two kills, on average (10; of launchers: 20)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--undisturbed", type=float, default=60.0, help="seconds of each run without kills")
    parser.add_argument("--only", default="", metavar="TEXT", help="those with this in their name")
    args = parser.parse_args()
    every_s = args.every or (20.0 if args.what == "launchers" else 10.0)
    cases = [case for case in (_launchers() if args.what == "launchers" else _loop()) if args.only in case.name]
    kills = schedule(args.seed, args.seconds, every_s)
    print(f"{versions()}\n`{' '.join(['python -m bench.goodput', *sys.argv[1:]])}`\n", flush=True)
    print(f"{len(kills)} kills in {args.seconds:.0f} s, of one of 2 ranks; CPU, gloo\n", flush=True)
    plain = (str(OWN), "train", "none") if args.what == "launchers" else (str(SCRIPT), "none")

    def undisturbed() -> float:
        """Steps a second."""
        ran = run(Case("undisturbed", torchrun(shared_store=False), plain), args.undisturbed, [])
        return ran.useful / ran.seconds

    print(compare(cases, undisturbed, args.seconds, kills))


def schedule(seed: int, seconds: float, every_s: float) -> list[tuple[float, int]]:
    """Moments, and whom it hits."""
    chance = random.Random(seed)
    kills: list[tuple[float, int]] = []
    at_s = chance.expovariate(1 / every_s)
    while at_s < seconds:
        kills.append((at_s, chance.randrange(2)))
        at_s += chance.expovariate(1 / every_s)
    return kills


def _loop() -> list[Case]:
    best = torchrun(shared_store=False)
    return [
        Case("holdfast run, run.batches and run.step", holdfast(), (str(SCRIPT), "holdfast"), asked=True),
        Case(f"{best.name}, a checkpoint an epoch", best, (str(SCRIPT), "epochs")),
        Case(f"{best.name}, dcp.async_save every 50 steps", best, (str(SCRIPT), "async")),
    ]


def _launchers() -> list[Case]:
    saves = (str(OWN), "train", "saves")
    peers = [torchrun(shared_store=False), torchrun(shared_store=True), ft_launcher()]
    return [
        Case("holdfast run, Checkpointer", holdfast(), (str(OWN), "train", "checkpointer"), asked=True),
        *(
            Case(f"{launcher.name}, torch.save every {SAVED_EVERY} steps", launcher, saves)
            for launcher in [holdfast(), *peers]
            if launcher is not None
        ),
    ]


def compare(
    cases: Sequence[Case], undisturbed: Callable[[], float], seconds: float, kills: list[tuple[float, int]]
) -> str:
    rows = []
    before = undisturbed()
    for case in cases:
        ran = run(case, seconds, kills)
        after = undisturbed()
        rate, around = ran.useful / ran.seconds, f"{before:.1f} and {after:.1f}"
        share = 2 * rate / (before + after)
        met = "met" if share >= LEAST else "not met"
        asked = [f"at least {100 * LEAST:.0f} %", met] if case.asked else ["", ""]
        again = f"{max(0, ran.steps - ran.useful):,}" if ran.steps else ""
        rows.append([case.name, str(ran.kills), again, f"{rate:.1f}", around, f"{100 * share:.1f} %", *asked])
        print(f"{case.name}: {rate:.1f}, {around}: {100 * share:.1f} %", file=sys.stderr, flush=True)
        before = after
    wanted = ["what", "kills", "steps done again", "useful steps a second", "undisturbed before and after", "of that"]
    return table([*wanted, "asked", ""], rows)


# -- one run ----------------------------------------------------------------------------------------------------------


def tokens() -> bytes:
    """The text of the language-model example."""
    sys.path.insert(0, str(ROOT / "examples"))
    example: Any = importlib.import_module("train_chars")
    return bytes(example.encode(example.read_text([])).to(example.torch.uint8).numpy())


def run(case: Case, seconds: float, kills: list[tuple[float, int]]) -> Outcome:
    """Time begins with the first step of the first world, for all alike."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if case.script[0] == str(SCRIPT):
            (folder / "tokens").write_bytes(tokens())
        command = [*case.launcher.command, "--nproc-per-node=2", "--max-restarts=10000", *case.script, name]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **case.launcher.env}
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


def _driven(process: subprocess.Popen[bytes], folder: Path, seconds: float, kills: list[tuple[float, int]]) -> Outcome:
    until_s = time.monotonic() + START_S
    while not _steps(folder):
        if process.poll() is not None or time.monotonic() > until_s:
            raise SystemExit(f"it did not start:\n{(folder / 'stderr').read_text()[-2000:]}")
        time.sleep(0.01)
    began_s, first, hits = time.monotonic(), _steps(folder), 0
    logged = len(_log(folder))
    for at_s, rank in kills:
        time.sleep(max(0.0, began_s + at_s - time.monotonic()))
        if process.poll() is not None:
            break  # it has given up; what it has done is what it has done
        hits += _kill(folder, rank)
    time.sleep(max(0.0, began_s + seconds - time.monotonic()))
    return Outcome(hits, len(_log(folder)) - logged, _steps(folder) - first, time.monotonic() - began_s)


def _steps(folder: Path) -> int:
    """What training stands at: the last line of the log, or the number that rank 0 of the other script writes."""
    if lines := _log(folder):
        return int(lines[-1].split()[0])
    try:
        return int((folder / "step").read_text() or 0)
    except (FileNotFoundError, ValueError):
        return 0


def _log(folder: Path) -> list[bytes]:
    """The steps that rank 0 has done, whole lines of them; the last of many is looked for often, so all are read."""
    try:
        return (folder / "steps").read_bytes().split(b"\n")[:-1]
    except FileNotFoundError:
        return []


def _kill(folder: Path, rank: int) -> bool:
    """By the number that the rank has written down, if that is still the same program: it has a file of this folder
    open. Whether it was there to be hit."""
    try:
        pid = int((folder / f"pid.{rank}").read_text())
        links = [os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir() if link.exists()]
        if any(link.startswith(f"{folder}/") for link in links):
            os.kill(pid, signal.SIGKILL)
            return True
    except (FileNotFoundError, ProcessLookupError, ValueError):
        pass
    return False


# -- the script of `launchers` ----------------------------------------------------------------------------------------


def train(kind: str, folder: Path) -> None:
    """Plain DDP with Adam, a step of some 20 ms. Each rank says who it is; rank 0 logs each step that is done."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(
        nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(256, 256), nn.Tanh())))
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    log = os.open(folder / ("steps" if rank == 0 else f"there.{rank}"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    (folder / f"pid.{rank}.part").write_text(str(os.getpid()))
    (folder / f"pid.{rank}.part").rename(folder / f"pid.{rank}")
    step, saved = 0, folder / "saved.pt"
    checkpointer: Any = None
    if kind == "checkpointer":
        import holdfast as package

        checkpointer = package.Checkpointer(folder / "checkpoints", state={"model": model, "optimizer": optimizer})
        found = checkpointer.restore()
        step = found.step if found is not None else 0
    elif saved.exists():
        state = torch.load(saved)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    while True:
        step += 1
        data = torch.randn(1024, 256, generator=torch.Generator().manual_seed(2 * step + rank))
        loss: Any = model(data).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            os.write(log, b"%d %d %d\n" % (step, time.monotonic_ns(), os.getpid()))
        if checkpointer is not None:
            checkpointer.step(step)
        elif kind == "saves" and step % SAVED_EVERY == 0 and rank == 0:
            torch.save(
                {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, f"{saved}.part"
            )
            os.replace(f"{saved}.part", saved)


if __name__ == "__main__":
    if sys.argv[1:2] == ["train"]:
        train(sys.argv[2], Path(sys.argv[3]))
    else:
        main()
