"""Ranks of a world as real processes, and a training by leaves for them to do."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from holdfast.exact.buffers import Flat
from holdfast.exact.combine import Exchange
from holdfast.exact.keyed import KeyedDataset, seed_all, seed_of
from holdfast.exact.modules import Buffers
from holdfast.exact.trees import Sums

sys.path.insert(0, str(Path(__file__).parents[1] / "checkpoint"))

import worlds

SEED = 3

Sample = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def run(size: int, work: Callable[[], Any]) -> list[Any]:
    """What `work()` returns on each rank."""
    return worlds.run(size, _work, work)


def _work(rank: int, size: int, work: Callable[[], Any]) -> Any:
    return work()


class Points(Dataset[Sample]):
    """Each is jittered when it is read."""

    def __getitem__(self, index: int) -> Sample:
        x = torch.sin(torch.arange(6) * float(index + 1)) + 0.1 * torch.randn(6)
        return x, torch.tensor(index % 5), torch.tensor(float(index % 3))

    def __len__(self) -> int:
        return 97


class Net(nn.Module):
    """Dropout, running statistics, a table that few leaves use, a bf16 layer, and a parameter that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(5, 8)
        self.rare = nn.Embedding(4, 8)
        self.enter = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.4)
        self.brief = nn.Linear(8, 8, dtype=torch.bfloat16)
        self.leave = nn.Linear(8, 1)
        self.unused = nn.Parameter(torch.ones(3))
        self.register_buffer("mask", torch.tensor([0.1, float("-inf")]))

    def forward(self, x: torch.Tensor, row: torch.Tensor, rare: bool) -> torch.Tensor:
        h = self.enter(x) + self.rows(row)
        if rare:
            h = h + self.rare(row % 4)
        h = self.drop(torch.relu(self.norm(h)))
        h = h + self.brief(h.to(torch.bfloat16)).to(h.dtype)
        return torch.as_tensor(self.leave(h)).squeeze(1)


def batches() -> Iterator[tuple[int, list[list[int]]]]:
    """Steps, and the samples of each one's leaves: four a leaf, three in the last."""
    for step, leaves in enumerate([11, 5, 2, 7, 1]):
        samples = [(step * 31 + offset) % 97 for offset in range(4 * leaves - 1)]
        yield step, [samples[start : start + 4] for start in range(0, len(samples), 4)]


def train() -> str:
    """A hash of all that is left after some steps."""
    torch.manual_seed(1)
    model = Net()
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=0.05, weight_decay=0.1)
    dataset = KeyedDataset(Points(), SEED)
    exchange, sums, buffers = Exchange(), Sums(), Buffers(model)
    flat = Flat([*parameters, *buffers.floating])
    for step, leaves in batches():
        sums.begin(len(leaves))
        buffers.begin_step()
        samples = sum(map(len, leaves))
        for leaf in exchange.run(len(leaves)):
            x, row, y = map(torch.stack, zip(*(dataset[index] for index in leaves[leaf]), strict=True))
            torch.manual_seed(os.getpid())  # whatever else a rank may have drawn
            seed_all(seed_of(SEED, step, leaf))
            buffers.begin_leaf()
            errors = nn.functional.mse_loss(model(x, row, rare=leaf % 4 == 1), y, reduction="sum")
            torch.autograd.backward(errors / samples)
            values = [*(parameter.grad for parameter in parameters), *buffers.after_leaf(leaf)]
            sums.add(leaf, flat.gather(values, sums.spare()))
            optimizer.zero_grad()
        totals = flat.views(exchange.combine(sums.partials(), len(leaves), flat.specs))
        exchange.first(buffers.firsts)
        buffers.finish(totals[len(parameters) :], len(leaves))
        for parameter, gradient in zip(parameters, totals, strict=False):
            parameter.grad = gradient
        optimizer.step()
        optimizer.zero_grad()
    assert torch.equal(model.unused, torch.ones(3))  # weight decay would have shrunk it
    assert torch.equal(model.get_buffer("mask"), torch.tensor([0.1, float("-inf")]))
    assert model.norm.num_batches_tracked is not None and model.norm.num_batches_tracked.item() == 5
    assert model.rare.weight in optimizer.state and model.unused not in optimizer.state
    return _hash([model.state_dict(), optimizer.state_dict()["state"]])


def _hash(tree: Any) -> str:
    found = hashlib.sha256()

    def feed(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            found.update(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(value, dict):
            for key, inner in value.items():
                found.update(str(key).encode())
                feed(inner)
        else:
            for inner in value:
                feed(inner)

    feed(tree)
    return found.hexdigest()
