"""A small training of which every bit is determined: by its seed, by the step, and by the random generators."""

from __future__ import annotations

import random
from typing import Any

import numpy
import torch
from torch import nn


class Net(nn.Module):
    """Buffers that change in forward, numbers drawn in forward, and sizes that no world size divides."""

    def __init__(self, width: int = 7) -> None:
        super().__init__()
        self.inner = nn.Linear(5, width)
        self.norm = nn.BatchNorm1d(width)
        self.outer = nn.Linear(width, 3, bias=False)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = nn.functional.dropout(self.norm(self.inner(inputs)), 0.1, self.training)
        return self.outer(hidden) * self.scale  # type: ignore[no-any-return]


class Training:
    """`state` is what a user would give to a Checkpointer."""

    def __init__(self, seed: int, width: int = 7) -> None:
        seed_all(seed)
        self.model = Net(width)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=2, gamma=0.5)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0, growth_interval=2)
        self.state: dict[str, Any] = {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "scaler": self.scaler,
        }

    def step(self, step: int) -> float:
        seed = torch.Generator().manual_seed(step)
        inputs, wanted = torch.randn(8, 5, generator=seed), torch.randn(8, 3, generator=seed)
        loss = nn.functional.mse_loss(self.model(inputs), wanted)
        self.optimizer.zero_grad()
        self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()
        return float(loss.detach())


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed)


def draws() -> list[float]:
    """From each generator that a script commonly uses; the second gauss of each pair is remembered, too."""
    return [float(torch.rand(())), random.random(), random.gauss(0, 1), numpy.random.rand(), numpy.random.randn()]


def frozen(value: Any) -> Any:
    """A copy that nothing changes any more."""
    if hasattr(value, "state_dict"):
        value = value.state_dict()
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: frozen(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(frozen(item) for item in value)
    return value
