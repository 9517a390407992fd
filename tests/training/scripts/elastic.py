"""Trains a small model with run.batches, and writes down which samples each committed step has used."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

import holdfast

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--samples", type=int, default=97)
parser.add_argument("--batch", type=int, default=10)
parser.add_argument("--micro", type=int, default=None)
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--workers", type=int, default=0)
parser.add_argument("--exact", action="store_true")
parser.add_argument("--fsdp", action="store_true")
parser.add_argument("--plain", action="store_true", help="no dropout and no BatchNorm")
parser.add_argument("--kill", default="", help="generation:step:rank, ... : that rank kills itself before that step")
parser.add_argument("--stop-after", type=int, default=0, help="steps, in all: all ranks end, as if the machine did")
parser.add_argument("--save-steps", type=int, default=None)
args = parser.parse_args()


class Points(Dataset[Any]):
    """Jittered when they are read, if the generator is keyed."""

    def __len__(self) -> int:
        return int(args.samples)

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        x = torch.sin(torch.arange(8) * float(index + 1))
        return index, x if args.plain else x + 0.1 * torch.randn(8)


def digest(*states: Any) -> str:
    made = hashlib.sha256()
    for state in states:
        for name, value in sorted(state.items()):
            whole = value.full_tensor() if hasattr(value, "full_tensor") else value
            made.update(name.encode() + whole.detach().contiguous().numpy().tobytes())
    return made.hexdigest()


def main() -> None:
    torch.manual_seed(1)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    run = holdfast.init(checkpoints=args.out / "checkpoints", exact=args.exact, save_steps=args.save_steps)
    layers: list[nn.Module] = [nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)]
    if not args.plain:
        layers[1:1] = [nn.BatchNorm1d(16), nn.Dropout(0.3)]
    model: nn.Module = nn.Sequential(*layers)
    if args.fsdp:
        from torch.distributed.fsdp import fully_shard

        fully_shard(model)
    elif dist.is_initialized():
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    run.attach(model=model, optimizer=optimizer)
    kills = {tuple(map(int, kill.split(":"))) for kill in args.kill.split(",") if kill}
    used: list[int] = []
    generation = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    training = run._training
    data = run.batches(
        Points(), args.batch, epochs=args.epochs, micro_batch_size=args.micro, num_workers=args.workers
    )
    for indices, x in data:
        before = training._cursors.step
        if (generation, before, run.rank) in kills:
            os.kill(os.getpid(), signal.SIGKILL)
        unit = training._active[0].unit
        assert unit is not None
        used += indices.tolist() if unit.weight else []
        epoch = training._active[0].sampler.epoch
        loss = (model(x).squeeze(1) - x.sum(1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.step(loss=loss)
        if training._cursors.step > before:
            line = json.dumps({"step": before, "epoch": epoch, "rank": run.rank, "used": used}) + "\n"
            with open(args.out / f"used.{run.rank}.jsonl", "a") as file:
                file.write(line)
            used = []
        if args.stop_after and training._cursors.step >= args.stop_after:
            os._exit(0)
    run.close()
    weights = model.state_dict()
    if args.fsdp:
        found = digest(weights)
    else:
        inner = model.module if isinstance(model, DistributedDataParallel) else model
        moments = {f"{at}.{k}": v for at, one in optimizer.state_dict()["state"].items() for k, v in one.items()}
        found = digest(inner.state_dict(), moments)
    if run.rank_zero:
        values = {k: v.full_tensor() if hasattr(v, "full_tensor") else v for k, v in weights.items()}
        torch.save({k.removeprefix("module."): v for k, v in values.items()}, args.out / "weights.pt")
        (args.out / "digest").write_text(found)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
