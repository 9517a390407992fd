"""A training that has not attached all that counts: `optimizer`, `scheduler`, `shards`. Or all, and makes a mistake as
its world ends (`mistake`). Rank 1 is killed in the first world; of the `first` step, in that one."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import holdfast
from holdfast.worker import place

what = sys.argv[1]
dist.init_process_group("gloo")
torch.manual_seed(0)
data = TensorDataset(torch.randn(80, 4))
model = DistributedDataParallel(nn.Linear(4, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
state: dict[str, Any] = {"model": model} if what in ("optimizer", "first") else {"model": model, "optimizer": optimizer}
kept: list[Any] = []
if what == "scheduler":
    kept.append(torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5))
if what == "shards":
    fully_shard(other := nn.Linear(4, 1))
    kept.append(other)
run = holdfast.init(save_epochs=0, memory_every=1)
run.attach(**state)


def train() -> None:
    for [x] in run.batches(data, 8):
        if (run.generation, run.steps_done, run.rank) == (0, 0 if what == "first" else 5, 1):
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "mistake" and (run.steps_done, run.rank) == (5, 0):
            here = place.current()
            assert here is not None and here.seat is not None
            while run.generation == 0 and not here.seat.over:
                time.sleep(0.001)
            raise RuntimeError("of the program's own")
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        for scheduler in kept if what == "scheduler" else []:
            scheduler.step()
        run.step()


if what == "mistake":
    run.train(train)
else:
    train()
with open(f"{os.environ['STATE']}/weights.{run.rank}", "w") as file:
    file.write(repr([parameter.tolist() for parameter in model.parameters()]))
run.close()
dist.destroy_process_group()
