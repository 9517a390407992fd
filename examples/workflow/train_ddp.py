"""Data-parallel training with one snapshot file, which is there whole or not at all. See train.yaml for how it is run.

It knows nothing of who starts it, nor that it may be somewhere else the next time.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def batch(epoch: int, step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The same one for the same place, whoever asks."""
    dice = torch.Generator().manual_seed(1_000_000 * epoch + 1_000 * step + rank)
    x = torch.randn(32, 20, generator=dice)
    return x, x[:, :1].sin() + x[:, 1:2] * x[:, 2:3]


class Trainer:
    def __init__(self, snapshot: Path, device: torch.device) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 1)).to(device)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-2)
        self.snapshot, self.device = snapshot, device
        self.epochs_run = 0
        if snapshot.exists():
            self.load()
        # Without this DDP orders its sums anew after the first step, and a run that was interrupted does that twice.
        # With it, such a run has the bits of one that was not.
        self.ddp = DistributedDataParallel(self.model, find_unused_parameters=True)

    def load(self) -> None:
        kept = torch.load(self.snapshot, map_location=self.device, weights_only=True)
        self.model.load_state_dict(kept["model"])
        self.optimizer.load_state_dict(kept["optimizer"])
        self.epochs_run = kept["epochs_run"]

    def save(self) -> None:
        """Under another name first: whoever looks finds the last one, or this one, and never half of it."""
        kept = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "epochs_run": self.epochs_run,
        }
        part = self.snapshot.with_suffix(".part")
        torch.save(kept, part)
        part.replace(self.snapshot)

    def run_epoch(self, steps: int) -> float:
        loss = torch.zeros(())
        for step in range(steps):
            x, y = batch(self.epochs_run, step, dist.get_rank())
            loss = nn.functional.mse_loss(self.ddp(x.to(self.device)), y.to(self.device))
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
        self.epochs_run += 1
        return loss.item()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--snapshot", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--steps", type=int, default=20, help="of an epoch")
    args = parser.parse_args()
    with_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if with_gpu else torch.device("cpu")
    dist.init_process_group("nccl" if with_gpu else "gloo")
    trainer = Trainer(args.snapshot, device)
    if dist.get_rank() == 0:
        print(f"begins with epoch {trainer.epochs_run}", flush=True)
    while trainer.epochs_run < args.epochs:
        loss = trainer.run_epoch(args.steps)
        if dist.get_rank() == 0:
            trainer.save()
            print(f"epoch {trainer.epochs_run - 1}: loss {loss:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
