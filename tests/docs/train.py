"""The `train.py` that the documents' examples run: an ordinary small DDP script with a checkpoint."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

STEPS = 6
CHECKPOINT = "checkpoint.pt"


def main() -> DistributedDataParallel:
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    step = 0
    if os.path.exists(CHECKPOINT):
        state = torch.load(CHECKPOINT, weights_only=True)
        model.module.load_state_dict(state["model"])
        step = state["step"]
    while step < STEPS:
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if dist.get_rank() == 0:
            torch.save({"model": model.module.state_dict(), "step": step}, CHECKPOINT + ".part")
            os.replace(CHECKPOINT + ".part", CHECKPOINT)
            print(f"step {step}", flush=True)
    dist.destroy_process_group()
    return model


if __name__ == "__main__":
    kept = main()  # torch 2.13 can deadlock when a model is freed right after its last collective on gloo
