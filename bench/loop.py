"""What `run.batches` and `run.step` cost a step, beside the same loop written by hand with DistributedSampler."""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
import tempfile
import time
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

import holdfast
from bench.launchers import table, versions
from bench.savers import verdict

BATCH, SAMPLES = 64, 2_000_000
LIMIT_US = 100.0


class Rows(Dataset[Any]):
    """As cheap to read as can be."""

    def __init__(self) -> None:
        self._rows = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return self._rows[index % 64]


class Trainer:
    def __init__(self) -> None:
        self.model = nn.Linear(32, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)

    def step(self, batch: torch.Tensor) -> torch.Tensor:
        loss = self.model(batch).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return torch.as_tensor(loss)


def by_hand(trainer: Trainer) -> Any:
    """Steps, one each time it is asked."""
    dataset = Rows()
    sampler: Any = DistributedSampler(dataset, num_replicas=1, rank=0)
    for epoch in itertools.count():
        sampler.set_epoch(epoch)
        for batch in DataLoader(dataset, batch_size=BATCH, sampler=sampler):
            trainer.step(batch)
            yield


def by_run(trainer: Trainer, folder: str) -> Any:
    run = holdfast.init(checkpoints=folder)
    run.attach(model=trainer.model, optimizer=trainer.optimizer)
    for batch in run.batches(Rows(), BATCH, epochs=1000):
        loss = trainer.step(batch)
        run.step(loss=loss)
        yield


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=500, help="in each round")
    args = parser.parse_args()
    print(f"{versions()}\n`{' '.join(['python -m bench.loop', *sys.argv[1:]])}`\n", flush=True)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        os.environ.pop("RANK", None)
        loops = {"by hand": by_hand(Trainer()), "run": by_run(Trainer(), folder)}
        times_s: dict[str, list[float]] = {name: [] for name in loops}
        for loop in loops.values():
            for _ in range(args.steps):
                next(loop)
        for number in range(args.rounds):
            for name in list(loops)[:: 1 if number % 2 else -1]:
                began_s = time.perf_counter()
                for _ in range(args.steps):
                    next(loops[name])
                times_s[name].append((time.perf_counter() - began_s) / args.steps)
        for loop in loops.values():
            loop.close()
    hand, run = (1e6 * statistics.median(times_s[name]) for name in ("by hand", "run"))
    more = 1e6 * statistics.median(b - a for a, b in zip(times_s["by hand"], times_s["run"], strict=True))
    rows = [
        ["DataLoader and DistributedSampler by hand", f"{hand:.0f} µs", "", ""],
        ["run.batches and run.step", f"{run:.0f} µs", "", ""],
        ["more, median of pairs", f"{more:+.0f} µs", f"under {LIMIT_US:.0f} µs", verdict(more < LIMIT_US)],
    ]
    print(f"Batches of {BATCH}, one process, {args.rounds} rounds of {args.steps} steps in turns\n")
    print(table(["a step", "median", "asked", ""], rows))


if __name__ == "__main__":
    main()
