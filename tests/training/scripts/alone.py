"""Trains without a launcher, tells of every step, and ends when it is asked to or after as many steps as are given."""

from __future__ import annotations

import sys

import torch
from torch import nn

import holdfast

limit = int(sys.argv[1])
run = holdfast.init(checkpoints="checkpoints")
model = nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
run.attach(model=model, optimizer=optimizer)
print("begins", run.steps_done, flush=True)
for batch in run.batches(torch.arange(2000.0).reshape(1000, 2), batch_size=10, epochs=10**6):
    loss = model(batch / 2000).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    run.step(loss=loss)
    print("step", run.steps_done, flush=True)
    if run.steps_done == limit:
        break
run.close()
print("ends", run.steps_done, flush=True)
