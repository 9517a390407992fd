"""A training whose ranks have process groups of their own, made before `run.attach()`, and meet in those."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import holdfast

how, given, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
kills = {tuple(kill) for kill in json.loads(given)}  # generation, rank, steps that are done, and where
out = Path(os.environ["STATE"])


def may_die(where: str, done: int) -> None:
    if (int(os.environ["HOLDFAST_GENERATION"]), int(os.environ["RANK"]), done, where) in kills:
        os.kill(os.getpid(), signal.SIGKILL)


def made(model: nn.Module) -> tuple[nn.Module, list[dist.ProcessGroup], list[dist.ProcessGroup]]:
    """The model, the groups in which its gradients are summed up, one after the other, and one for nothing."""
    if how == "ddp":
        return DistributedDataParallel(model, process_group=dist.new_group()), [], []
    if how == "hsdp":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        fully_shard(model, mesh=mesh)
        return model, [], []
    if how == "row":
        return model, [init_device_mesh("cpu", (4,)).get_group()], []
    if how == "mesh":
        return model, init_device_mesh("cpu", (2, 2)).get_all_groups(), []
    spare = dist.new_group()
    pairs = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    may_die("making", 0)
    across, _ = dist.new_subgroups_by_enumeration([[0, 2], [3, 1]])  # type: ignore[no-untyped-call]
    return model, [pairs[dist.get_rank() // 2], across], [spare]


dist.init_process_group("gloo")
torch.manual_seed(0)
model, groups, spare = made(nn.Linear(4, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
data = torch.randn(steps * 8, 4, generator=torch.Generator().manual_seed(1))
run = holdfast.init(save_epochs=0, memory_every=1)
run.attach(model=model, optimizer=optimizer)
for each in spare:
    dist.destroy_process_group(each)


def say(**more: Any) -> None:
    with open(os.environ["NEWS"], "w") as news:
        more |= {"rank": run.rank, "generation": run.generation, "pid": os.getpid()}
        news.write(json.dumps(more) + "\n")


def train() -> None:
    for [x] in run.batches(TensorDataset(data), 8, epochs=1, shuffle=False):
        may_die("forward", run.steps_done)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        for group in groups:
            may_die("second" if group is not groups[0] else "first", run.steps_done)
            for parameter in model.parameters():
                assert parameter.grad is not None
                dist.all_reduce(parameter.grad, group=group)
                parameter.grad /= dist.get_world_size(group)
        may_die("update", run.steps_done)
        optimizer.step()
        may_die("step", run.steps_done)
        run.step()
        say(step=run.steps_done)


run.train(train)
weights = [each.full_tensor() if isinstance(each, DTensor) else each for each in model.parameters()]
if run.rank_zero:
    torch.save([each.detach() for each in weights], out / "weights.pt")
run.close()
dist.destroy_process_group()
