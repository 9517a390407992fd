"""ddp_plain.py with Holdfast: it goes on where it was, at any number of ranks. docs/getting-started.md explains it."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import holdfast

EPOCHS, BATCH = 20, 64

if "RANK" in os.environ:  # else it runs alone
    dist.init_process_group()
device = torch.device(f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if torch.cuda.is_available() else "cpu")

torch.manual_seed(0)
inputs = torch.randn(2048, 32)
dataset = TensorDataset(inputs, inputs.roll(1, dims=1).sin())
model: nn.Module = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32))
model.to(device)
if dist.is_initialized():
    model = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

run = holdfast.init()
run.attach(model=model, optimizer=optimizer)
for x, y in run.batches(dataset, BATCH, epochs=EPOCHS):
    loss = nn.functional.mse_loss(model(x.to(device)), y.to(device))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    run.step(loss=loss)

run.close()
if dist.is_initialized():
    dist.destroy_process_group()
