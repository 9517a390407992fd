"""A torchrun script for worlds whose size may change: DDP on gloo, and a step counter that outlives every world.

The environment says how: STEPS (20) in all, over all worlds; PACE_S (0.01) between them; NEWS, the FIFO for a line a
step; STATE, the file with the last step; HOLD, a file that keeps the job training for as long as it exists; NODE.
"""

from __future__ import annotations

import json
import os
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

RANK = int(os.environ["RANK"])
STEPS = int(os.environ.get("STEPS", "20"))
PACE_S = float(os.environ.get("PACE_S", "0.01"))
STATE = os.environ["STATE"]
KEPT: list[object] = []  # torch 2.13 can deadlock when a model is freed right after its last collective
NUMBERS = {
    "node": "NODE",
    "rank": "RANK",
    "local_rank": "LOCAL_RANK",
    "world_size": "WORLD_SIZE",
    "group_rank": "GROUP_RANK",
    "role_rank": "ROLE_RANK",
    "role_world_size": "ROLE_WORLD_SIZE",
    "restart_count": "TORCHELASTIC_RESTART_COUNT",
}
ABOUT: dict[str, object] = {
    **{key: int(os.environ[name]) for key, name in NUMBERS.items()},
    "generation": int(os.environ.get("HOLDFAST_GENERATION", "0")),  # another launcher has none
    "run_id": os.environ["TORCHELASTIC_RUN_ID"],
    "master_addr": os.environ["MASTER_ADDR"],
    "pid": os.getpid(),
}


def tell(**news: object) -> None:
    """One write of less than a pipe's atomic size, so that lines of many ranks do not mix."""
    with open(os.environ["NEWS"], "a") as fifo:
        fifo.write(json.dumps({**ABOUT, **news}) + "\n")


def saved_step() -> int:
    if not os.path.exists(STATE):
        return 0
    with open(STATE) as file:
        return int(file.read())


def save_step(step: int) -> None:
    part = f"{STATE}.{os.getpid()}"  # a rank 0 that was cut off may still write when the next one does
    with open(part, "w") as file:
        file.write(str(step))
    os.replace(part, STATE)


def from_rank_0(value: int) -> int:
    told = torch.tensor([value])
    dist.broadcast(told, 0)
    return int(told)


def steps_left(step: int) -> int:
    """Rank 0 says so for all: each looking by itself, some might see the hold and some not."""
    held = os.path.exists(os.environ["HOLD"])
    return from_rank_0(max(STEPS - step, 2 if held else 0))


def main() -> None:
    print(f"rank {RANK} of generation {ABOUT['generation']}", flush=True)
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    KEPT.append(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    step = from_rank_0(saved_step())
    left = 2
    # The last step is known beforehand, so that nothing is asked after it: with a bare collective right before the end,
    # torch 2.13 aborted 3 ranks of 75 at exit ("terminate called without an active exception"); like this, none of 90.
    while left > 1 and (left := steps_left(step)) > 0:
        step += 1
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if RANK == 0:
            save_step(step)
        tell(step=step, at_s=time.monotonic())
        time.sleep(PACE_S)
    dist.destroy_process_group()
    tell(done=True)


main()
