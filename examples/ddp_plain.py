"""A plain DDP script. ddp_minimal.py is what becomes of it with Holdfast."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EPOCHS, BATCH = 20, 64

if "RANK" in os.environ:  # else it runs alone
    dist.init_process_group()
rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
device = torch.device(f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if torch.cuda.is_available() else "cpu")

torch.manual_seed(0)
inputs = torch.randn(2048, 32)
dataset = TensorDataset(inputs, inputs.roll(1, dims=1).sin())
model: nn.Module = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32))
model.to(device)
if dist.is_initialized():
    model = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

sampler = DistributedSampler(dataset, world_size, rank)
loader = DataLoader(dataset, BATCH // world_size, sampler=sampler)
for epoch in range(EPOCHS):
    sampler.set_epoch(epoch)
    for x, y in loader:
        loss = nn.functional.mse_loss(model(x.to(device)), y.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if rank == 0:
        print(f"epoch {epoch + 1}/{EPOCHS}   loss {loss.item():.4f}", flush=True)

if dist.is_initialized():
    dist.destroy_process_group()
