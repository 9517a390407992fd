"""Ranks that meet in their gradients alone, so that each can be seen to need PACE_S for itself. Ends without HOLD."""

from __future__ import annotations

import os
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

ASK = 40  # steps between two looks at HOLD, which is one more meeting

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.Adam(model.parameters())
held = torch.ones(1)
step = 0
while held:
    time.sleep(float(os.environ["PACE_S"]))
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    step += 1
    if step % ASK == 0:
        held[0] = float(os.path.exists(os.environ["HOLD"]))
        dist.broadcast(held, 0)
dist.barrier()
sys.stdout.flush()
os._exit(0)
