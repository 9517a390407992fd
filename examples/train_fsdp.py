"""The elastic FSDP script that everybody copies, with checkpoints that survive a killed rank and another world size.

    holdfast run --standalone --nproc-per-node=2 --max-restarts=3 examples/train_fsdp.py
    torchrun --standalone --nproc-per-node=2 examples/train_fsdp.py

On GPUs with NCCL where there is one for each rank, else on the CPU with gloo. Checkpoints go to $CHECKPOINT_DIR.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import holdfast

EPOCHS = int(os.environ.get("EPOCHS", "3"))
BATCH, WIDTH, SAMPLES = 16, 128, 2048


def order_of(epoch: int) -> torch.Tensor:
    """All samples of an epoch, shuffled. The same on all ranks, whatever their number."""
    return torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(epoch))


def main() -> nn.Module:
    on_gpu = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    run = holdfast.init()
    torch.manual_seed(0)
    inputs = torch.randn(SAMPLES, WIDTH)
    targets = inputs.roll(1, dims=1).sin()

    model = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)).to(device)
    mesh = init_device_mesh(device.type, (run.world_size,))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)

    # Samples, not batches: another number of ranks goes on in the same epoch and sees each of the others once.
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "epoch": 0, "samples": 0}
    total = state["loss"] = torch.zeros((), device=device)
    checkpointer = holdfast.Checkpointer(state=state, keep=3, every_steps=50)
    restored = checkpointer.restore()
    step = restored.step if restored else 0

    for epoch in range(state["epoch"], EPOCHS):
        rest = order_of(epoch)[state["samples"] :]
        whole = len(rest) - len(rest) % (BATCH * run.world_size)
        for number, batch in enumerate(rest[:whole].view(-1, run.world_size, BATCH)[:, run.rank]):
            if number % 10 == 0:
                run.health_check(timeout_s=10)  # says which rank is missing
            loss = nn.functional.mse_loss(model(inputs[batch].to(device)), targets[batch].to(device))
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            step += 1
            total.copy_(loss.detach())
            state["samples"] += BATCH * run.world_size
            checkpointer.step(step)  # snapshots in memory, a checkpoint every 50 steps, an orderly end when asked to
        scheduler.step()
        dist.all_reduce(total)  # all ranks are to give the same metrics
        metrics = {"loss": total.item() / run.world_size}
        state.update(epoch=epoch + 1, samples=0)
        # Waited for, so that no epoch is missing. Without `blocking` it is written beside the next one.
        checkpointer.save(step, epoch=epoch + 1, metrics=metrics, blocking=True)
        if run.rank == 0:
            print(f"epoch {epoch + 1}/{EPOCHS}   step {step}   loss {metrics['loss']:.4f}", flush=True)
    checkpointer.close()
    dist.destroy_process_group()
    return model


if __name__ == "__main__":
    kept = main()  # torch 2.13 can deadlock when a model is freed right after its last collective on gloo
