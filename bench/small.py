"""The training that is disturbed: a small model, a few milliseconds a step, each noted in a file."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
from torch import nn

SAMPLES, BATCH, PAUSE_S = 8192, 64, 0.005


def data() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    inputs = torch.randn(SAMPLES, 64)
    return inputs, inputs.roll(1, dims=1)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))


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
