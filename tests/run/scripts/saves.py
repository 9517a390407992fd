"""An ordinary script with a Checkpointer: DDP and FSDP2 on gloo, every bit of it determined, and faults on order.

`saves.py STEPS [FAULT ...]`, a fault being JSON: {"rank": 1, "step": 5, "how": "SIGKILL", "generation": 0}. It strikes
in the step after that one, when that one's snapshot is complete on this rank and the next one's is not begun. `how` is
a signal's name or "raise". EVERY is every how many steps it saves. At the end each rank tells the hash of all it has.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import holdfast

RANK = int(os.environ["RANK"])
GENERATION = int(os.environ.get("HOLDFAST_GENERATION", "0"))
ABOUT: dict[str, object] = {
    "node": int(os.environ.get("NODE", "0")),
    "rank": RANK,
    "world_size": int(os.environ["WORLD_SIZE"]),
    "restart_count": int(os.environ["TORCHELASTIC_RESTART_COUNT"]),
    "generation": GENERATION,
    "run_id": os.environ["TORCHELASTIC_RUN_ID"],
    "pid": os.getpid(),
}
KEPT: list[object] = []  # torch 2.13 can deadlock when a model is freed right after its last collective


def tell(**news: object) -> None:
    with open(os.environ["NEWS"], "a") as fifo:
        fifo.write(json.dumps({**ABOUT, **news}) + "\n")


def suffer(step: int) -> None:
    for fault in map(json.loads, sys.argv[2:]):
        if (fault["rank"], fault["step"], fault["generation"]) == (RANK, step, GENERATION):
            tell(fault=fault["how"])
            if fault["how"] == "raise":
                raise ValueError(f"planned at rank {RANK}")
            os.kill(os.getpid(), signal.Signals[fault["how"]])


def digest(state: dict[str, Any]) -> str:
    parts = [repr(state["seen"]), repr(torch.rand(3).tolist())]
    for name in ("model", "optimizer", "sharded", "sharded_optimizer"):
        parts += [repr(list(torch.as_tensor(value).flatten().tolist())) for value in flat(state[name].state_dict())]
    return hashlib.sha256("".join(parts).encode()).hexdigest()


def flat(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [item for key in value for item in flat(value[key])]
    if isinstance(value, list | tuple):
        return [item for entry in value for item in flat(entry)]
    if isinstance(value, DTensor):
        return [value.to_local()]
    return [value] if isinstance(value, torch.Tensor | int | float) else []


def main() -> None:
    steps = int(sys.argv[1])
    dist.init_process_group("gloo")
    torch.manual_seed(RANK)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 40), nn.Dropout(0.2), nn.Linear(40, 2)))
    KEPT.append(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    sharded = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 1))  # one row is fewer than there are ranks
    fully_shard(sharded)
    sharded_optimizer = torch.optim.Adam(sharded.parameters(), lr=0.01)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "seen": 0}
    state |= {"sharded": sharded, "sharded_optimizer": sharded_optimizer}
    every = int(os.environ.get("EVERY", "0")) or None
    shared = os.environ.get("SHARED", "1") == "1"
    checkpointer = holdfast.Checkpointer(state=state, every_steps=every, memory_every=1, keep=0, shared=shared)
    restored = checkpointer.restore()
    first = restored.step if restored is not None else 0
    tell(restored=first, name=restored.name if restored is not None else "")
    for step in range(first + 1, steps + 1):
        data = torch.randn(4, 6, generator=torch.Generator().manual_seed(1000 * step + RANK))
        (model(data).square().mean() + sharded(data).square().mean()).backward()
        for one in (optimizer, sharded_optimizer):
            one.step()
            one.zero_grad()
        suffer(step - 1)
        state["seen"] += 4
        checkpointer.step(step, metrics={"loss": 1.0 / step})
        if every is not None and step % every == 0:
            checkpointer.wait()  # else these short steps would find no memory free
        tell(step=step)
        time.sleep(float(os.environ.get("PACE_S", "0")))  # the pace of training
    checkpointer.close()
    tell(digest=digest(state))
    dist.destroy_process_group()


main()
