"""A DDP script for torchrun that knows nothing of Holdfast. It saves after each epoch, and goes on from what it finds.

    torchrun --standalone --nproc-per-node=2 examples/plain_torchrun.py
    holdfast run --standalone --nproc-per-node=2 --max-restarts=3 examples/plain_torchrun.py

Under the second, with not a line changed, a rank that is killed or hangs costs the epoch that it was in.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EPOCHS, BATCH, FILE = int(sys.argv[1]) if len(sys.argv) > 1 else 10, 32, "plain_torchrun.pt"

dist.init_process_group()
device = torch.device(f"cuda:{os.environ['LOCAL_RANK']}" if torch.cuda.is_available() else "cpu")

torch.manual_seed(0)
inputs = torch.randn(2048, 32)
dataset = TensorDataset(inputs, inputs.roll(1, dims=1).sin())
model = DistributedDataParallel(nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)).to(device))
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

done = 0
if os.path.exists(FILE):
    saved = torch.load(FILE, map_location=device, weights_only=True)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    done = saved["epochs"]

sampler = DistributedSampler(dataset)  # type: ignore[var-annotated]
for epoch in range(done, EPOCHS):
    sampler.set_epoch(epoch)
    for x, y in DataLoader(dataset, BATCH, sampler=sampler):
        loss = nn.functional.mse_loss(model(x.to(device)), y.to(device))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    if dist.get_rank() == 0:
        print(f"epoch {epoch + 1}/{EPOCHS}   loss {loss.item():.4f}", flush=True)
        saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epochs": epoch + 1}
        torch.save(saved, FILE + ".part")
        os.replace(FILE + ".part", FILE)  # whoever dies meanwhile leaves the last one whole

dist.destroy_process_group()
