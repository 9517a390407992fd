"""Steps and prints for as long as the file HOLD exists. Each rank trains by itself."""

from __future__ import annotations

import json
import os
import sys
import time

import torch

RANK, GENERATION = int(os.environ["RANK"]), int(os.environ.get("HOLDFAST_GENERATION", "0"))

model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
step = 0
while os.path.exists(os.environ["HOLD"]):
    model(torch.ones(1)).sum().backward()
    optimizer.step()
    step += 1
    print(f"rank {RANK} generation {GENERATION} step {step}", flush=True)
    print(f"\x1b[31mloss of rank {RANK} falls\x1b[0m", file=sys.stderr, flush=True)
    with open(os.environ["NEWS"], "a") as news:
        news.write(json.dumps({"rank": RANK, "generation": GENERATION, "pid": os.getpid(), "step": step}) + "\n")
    time.sleep(0.05)
