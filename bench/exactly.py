"""What exact mode costs: the step of the language-model example at 2 ranks, beside plain DDP, in turns."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.launchers import ROOT, table, versions
from bench.savers import verdict

LIMIT = 1.6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch", type=int, default=32, help="sequences, of both ranks together")
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--as-rank", choices=("plain", "exact"), help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.as_rank:
        train(args.as_rank, args.steps, args.batch, args.out)
        return
    print(f"{versions()}\n`{' '.join(['python -m bench.exactly', *sys.argv[1:]])}`\n", flush=True)
    times_s: dict[str, list[float]] = {"plain": [], "exact": []}
    for number in range(args.rounds):
        for mode in list(times_s)[:: 1 if number % 2 else -1]:
            times_s[mode].append(measured(mode, args))
    plain, exact = (statistics.median(times_s[mode]) for mode in ("plain", "exact"))
    ratio = statistics.median(b / a for a, b in zip(times_s["plain"], times_s["exact"], strict=True))
    rows = [
        ["plain DDP", f"{1e3 * plain:.1f} ms", "", "", ""],
        ["exact", f"{1e3 * exact:.1f} ms", f"{ratio:.2f}", f"at most {LIMIT}", verdict(ratio <= LIMIT)],
    ]
    print(
        f"{args.nproc} ranks, {args.batch} sequences a step, {args.rounds} runs of {args.steps} steps each, in turns\n"
    )
    print(table(["a step", "median", "of plain, median of pairs", "asked", ""], rows))


def measured(mode: str, args: argparse.Namespace) -> float:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "times.json")
        command = [
            str(Path(sys.executable).parent / "holdfast"), "run", "--standalone", f"--nproc-per-node={args.nproc}",
            str(Path(__file__)), f"--as-rank={mode}", f"--out={out}", f"--steps={args.steps}", f"--batch={args.batch}",
        ]  # fmt: skip
        env = {
            **os.environ,
            "PYTHONPATH": f"{ROOT}:{ROOT / 'examples'}",
            "CHECKPOINT_DIR": str(Path(folder, "checkpoints")),
        }
        subprocess.run(command, check=True, env=env, stderr=subprocess.DEVNULL)
        return float(statistics.median(json.loads(out.read_text())))


def train(mode: str, steps: int, batch: int, out: Path) -> None:
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from torch.nn.parallel import DistributedDataParallel

    import holdfast

    example: Any = importlib.import_module("train_chars")
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    dataset = example.windows(example.encode(example.read_text([])), steps * batch)
    run = holdfast.init(exact=mode == "exact", save_epochs=0, memory_every=0, health_check_steps=0)
    model = DistributedDataParallel(example.CharModel())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    run.attach(model=model, optimizer=optimizer)
    times_s: list[float] = []
    began_s = time.perf_counter()
    done = before = 0
    for inputs, targets in run.batches(dataset, batch, epochs=1):
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        run.step(loss=loss)
        done = run.steps_done
        if done > before:
            times_s.append(time.perf_counter() - began_s)
            began_s, before = time.perf_counter(), done
    if run.rank_zero:
        out.write_text(json.dumps(times_s[5:]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
