"""A training with a checkpoint of its own: Adam, saved every ten steps, and rank 1 kills itself after 14 of 30."""

from __future__ import annotations

import os
import signal

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

STEPS, EVERY, FATAL = 30, 10, 14
RANK, SAVED = int(os.environ["RANK"]), os.path.join(os.environ["STATE"], "saved.pt")
KEPT: list[object] = []  # torch 2.13 can deadlock when a model is freed right after its last collective


def main() -> None:
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    KEPT.append(model)
    optimizer = torch.optim.Adam(model.parameters())
    step = 0
    if os.path.exists(SAVED):
        saved = torch.load(SAVED)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]
    while step < STEPS:
        step += 1
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % EVERY == 0:
            if RANK == 0:
                state = {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save(state, SAVED + ".part")
                os.replace(SAVED + ".part", SAVED)
            dist.barrier()
        if step == FATAL and RANK == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
    dist.destroy_process_group()


main()
