"""A training on streams of every kind at once: `python streamstory.py --out FOLDER`, alone or as a rank.

Each step has a batch of each, and writes down which samples that were.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

import holdfast

SAMPLES, BATCH, EPOCHS = 22, 4, 2  # of all ranks together, at one rank and at two: 6 steps an epoch
TRICKIEST = "torchdata, iterable with a state, workers"
TOGETHER = ("iterable", "iterable with a state", "loader", "torchdata", "torchdata, workers", TRICKIEST)

READ_AGAIN = "with as many ranks as before it is read again up to where it was"
OWN_STATE = "with as many ranks as before it goes on by its own state"


class Numbers(IterableDataset[int]):
    """In another order in each epoch, and of that each worker has a part."""

    def __init__(self, mine: list[int]) -> None:
        self.mine = mine
        self.at = 0
        self.first = 0

    def __iter__(self) -> Iterator[int]:
        order = self.order()
        info = get_worker_info()
        mine = order[info.id :: info.num_workers] if info is not None else order
        self.at, self.first = self.first, 0
        while self.at < len(mine):
            self.at += 1
            yield mine[self.at - 1]

    def order(self) -> list[int]:
        if get_worker_info() is not None:
            return self.mine  # all workers must have the same
        return [self.mine[at] for at in torch.randperm(len(self.mine))]


class Kept(Numbers):
    """It says where it is, and goes on from there."""

    def order(self) -> list[int]:
        return self.mine

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.first = state["at"]


class Moving(Kept):
    """Its state is the very thing that moves, and it knows its begin itself."""

    def __init__(self, mine: list[int]) -> None:
        super().__init__(mine)
        self.state = {"at": 0}

    def __iter__(self) -> Iterator[int]:
        while self.state["at"] < len(self.mine):
            self.state["at"] += 1
            yield self.mine[self.state["at"] - 1]
        self.state["at"] = 0

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


class Kind(NamedTuple):
    promise: str
    source: Any
    workers: int = 0  # if Holdfast is to make the loader


def kinds(rank: int, world_size: int) -> dict[str, Kind]:
    mine: Any = list(range(rank, SAMPLES, world_size))
    each = BATCH // world_size
    chance = [torch.Generator().manual_seed(rank) for _ in range(3)]
    drawn = RandomSampler(mine, generator=chance[0])
    return {
        "iterable": Kind(READ_AGAIN, Numbers(mine)),
        "iterable, workers": Kind(READ_AGAIN, Numbers(mine), 2),
        "iterable with a state": Kind(OWN_STATE, Kept(mine)),
        "iterable with a state, workers": Kind(READ_AGAIN, Kept(mine), 2),
        "iterable with a moving state": Kind(OWN_STATE, Moving(mine)),
        "loader": Kind(READ_AGAIN, DataLoader(mine, each, shuffle=True)),
        "loader, workers": Kind(READ_AGAIN, DataLoader(mine, each, shuffle=True, generator=chance[1], num_workers=2)),
        "loader, a seeded sampler": Kind(READ_AGAIN, DataLoader(mine, each, sampler=drawn)),
        "torchdata": Kind(OWN_STATE, StatefulDataLoader(mine, each, shuffle=True, generator=chance[2])),
        "torchdata, workers": Kind(OWN_STATE, StatefulDataLoader(mine, each, shuffle=True, num_workers=2)),
        "torchdata, iterable": Kind(READ_AGAIN, StatefulDataLoader(Numbers(mine), each)),
        "torchdata, iterable, workers": Kind(READ_AGAIN, StatefulDataLoader(Numbers(mine), each, num_workers=2)),
        "torchdata, iterable with a state": Kind(OWN_STATE, StatefulDataLoader(Kept(mine), each)),
        TRICKIEST: Kind(OWN_STATE, StatefulDataLoader(Kept(mine), each, num_workers=2)),
        "torchdata, iterable with a moving state": Kind(OWN_STATE, StatefulDataLoader(Moving(mine), each)),
    }


def options(kind: Kind) -> dict[str, Any]:
    return {"num_workers": kind.workers} if kind.workers else {}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--attempt", type=int, default=0)
    parser.add_argument("--kill", default="", help="generation:step:rank, ... : that rank kills itself in that step")
    parser.add_argument("--stop-after", choices=["0"], help="every World says so; none is stopped here")
    args = parser.parse_args()
    torch.manual_seed(1)
    dist.init_process_group("gloo")
    run = holdfast.init(checkpoints=args.out / "checkpoints", save_steps=1)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(1, 1), nn.Dropout(0.5)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    restored = run.attach(model=model, optimizer=optimizer)
    kill_at = {tuple(map(int, kill.split(":"))) for kill in args.kill.split(",") if kill}
    about = {"attempt": args.attempt, "generation": run.generation, "rank": run.rank, "world_size": run.world_size}
    named = {name: kind for name, kind in kinds(run.rank, run.world_size).items() if name in TOGETHER}
    streams = [run.batches(kind.source, BATCH, epochs=EPOCHS, **options(kind)) for kind in named.values()]
    training = run._training
    with open(args.out / f"used.{run.rank}.jsonl", "a", buffering=1) as file:

        def note(**news: Any) -> None:
            file.write(json.dumps(about | news) + "\n")

        note(restored=restored.step if restored is not None else 0)
        for batches in zip(*streams, strict=False):
            step, epochs = run.steps_done, [stream.epoch for stream in training._active]
            if (run.generation, step, run.rank) in kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            loss = model(torch.cat(batches).float().unsqueeze(1)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            used = {name: batch.tolist() for name, batch in zip(named, batches, strict=True)}
            note(step=step, epochs=dict(zip(named, epochs, strict=True)), used=used)
            run.step(loss=loss)
            assert training._checkpointer is not None
            training._checkpointer.wait()  # these short steps would else skip most saves
    run.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
