"""A small DDP training for chaos plans: exact to the bit at the same number of ranks, and slow enough to be broken.

    holdfast chaos run examples/chaos/plan.toml -- --nproc-per-node=2 --ft-rank-heartbeat-timeout=3 \\
        examples/chaos/train_paced.py --epochs=12
"""

from __future__ import annotations

import argparse
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import holdfast
from holdfast.fault_tolerance import RankMonitorClient

SAMPLES, BATCH, WIDTH = 1024, 32, 16


def main() -> nn.Module:
    parser = argparse.ArgumentParser(description="Train a small network, at a pace.")
    parser.add_argument("--epochs", type=int, default=12, help=f"of {SAMPLES // BATCH} steps")
    parser.add_argument("--save-every", type=int, default=25, metavar="STEPS")
    args = parser.parse_args()
    # What a step takes at least, until the last fault has come. An undisturbed twin has nothing to wait for.
    pace_s, over = float(os.environ.get("PACE_S", "0.02")), os.environ.get("HOLDFAST_CHAOS_OVER", "")

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    inputs = torch.randn(SAMPLES, WIDTH)
    dataset = TensorDataset(inputs, inputs.roll(1, dims=1).sin())
    model = DistributedDataParallel(nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    run = holdfast.init(save_steps=args.save_every, save_epochs=args.epochs, health_check_steps=0)
    run.attach(model=model, optimizer=optimizer)
    # Heartbeats have a limit of their own. One that was learned from steps doubles with every hang.
    client = RankMonitorClient(required=False)
    client.init_workload_monitoring()
    for x, y in run.batches(dataset, BATCH, epochs=args.epochs):
        began_s = time.monotonic()
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        client.send_heartbeat()
        run.step(loss=loss)
        if not os.path.exists(over):
            time.sleep(max(0.0, began_s + pace_s - time.monotonic()))
    client.shutdown_workload_monitoring()
    run.close()
    dist.destroy_process_group()
    return model


if __name__ == "__main__":
    kept = main()  # torch 2.13 can deadlock when a model is freed right after its last collective on gloo
