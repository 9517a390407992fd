"""The training that is disturbed: a small model, a few milliseconds a step, each noted in a file. As a script it trains
by `run.batches` and `run.step`, or with `LOOP=hand` as one does without, as fast as it can for as long as it may."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

SAMPLES, BATCH, PAUSE_S = 8192, 64, 0.005


def data() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    inputs = torch.randn(SAMPLES, 64)
    return inputs, inputs.roll(1, dims=1)


def model() -> nn.Module:
    torch.manual_seed(0)
    hidden = int(os.environ.get("HIDDEN", "256"))
    return nn.Sequential(nn.Linear(64, hidden), nn.GELU(), nn.Linear(hidden, 64))


def optimizer(of: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(of.parameters(), lr=1e-3)


class Log:
    """A file for each rank, whoever that is."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._rank, self._file = folder, -1, -1

    def step(self, rank: int, generation: int, step: int) -> None:
        if rank != self._rank:
            self._rank = rank
            self._file = os.open(self._folder / f"steps.{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(self._file, b"%d %d %d %d\n" % (time.monotonic_ns(), generation, step, os.getpid()))


def train(folder: Path) -> None:
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import TensorDataset

    import holdfast

    dist.init_process_group("gloo")
    dataset = TensorDataset(*data())
    wrapped = DistributedDataParallel(model())
    adam = optimizer(wrapped)
    run = holdfast.init(save_epochs=0, health_check_steps=0, stays=os.environ.get("STAYS") != "0")
    run.attach(model=wrapped, optimizer=adam)
    log, pause_s = Log(folder), float(os.environ.get("PAUSE_S", PAUSE_S))
    for x, y in run.batches(dataset, BATCH, epochs=1_000_000):
        before, generation = run.steps_done, run.generation
        loss: Any = nn.functional.mse_loss(wrapped(x), y)
        adam.zero_grad()
        loss.backward()
        adam.step()
        run.step(loss=loss)
        if run.steps_done > before:  # in that world, even if it is in the next one by now: by this rank, or by another
            log.step(run.rank, generation, run.steps_done)
        if pause_s:  # a sleep of nothing gives the core away
            time.sleep(pause_s)


def train_by_hand(folder: Path) -> None:
    """Until it is ended."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, TensorDataset
    from torch.utils.data.distributed import DistributedSampler

    dist.init_process_group("gloo")
    dataset = TensorDataset(*data())
    sampler: DistributedSampler[Any] = DistributedSampler(dataset)
    loader = DataLoader(dataset, BATCH // dist.get_world_size(), sampler=sampler, drop_last=True)
    wrapped = DistributedDataParallel(model())
    adam = optimizer(wrapped)
    log, step = Log(folder), 0
    for epoch in range(1_000_000):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss: Any = nn.functional.mse_loss(wrapped(x), y)
            adam.zero_grad()
            loss.backward()
            adam.step()
            step += 1
            log.step(dist.get_rank(), 0, step)


if __name__ == "__main__":
    (train_by_hand if os.environ.get("LOOP") == "hand" else train)(Path(sys.argv[1]))
