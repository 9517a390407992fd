"""The script that every launcher runs: plain torchrun style, nothing of holdfast's in it.

Each rank appends a line per finished step to its own file: step number, monotonic time in nanoseconds, pid.
"""

from __future__ import annotations

import os
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    folder, steps = sys.argv[1], int(sys.argv[2])
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = torch.randn(32, 64)
    log = os.open(os.path.join(folder, f"steps-{rank}"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for step in range(steps):
        model(data).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        os.write(log, b"%d %d %d\n" % (step, time.monotonic_ns(), os.getpid()))
        time.sleep(0.01)
    dist.destroy_process_group()


main()
