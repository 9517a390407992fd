"""Trains a small model with run.batches, and writes down which samples each step has used."""

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
parser.add_argument("--per-rank", action="store_true")
parser.add_argument("--lr-rule", default="linear")
parser.add_argument("--exact", action="store_true")
parser.add_argument("--fsdp", action="store_true")
parser.add_argument("--plain", action="store_true", help="no dropout, no BatchNorm, no jitter")
parser.add_argument("--attempt", type=int, default=0, help="the how manieth job of a schedule this is")
parser.add_argument("--kill", default="", help="generation:step:rank, ... : that rank kills itself in that step")
parser.add_argument("--kill-worker", type=int, default=-1, help="the data loader worker that reads this sample, once")
parser.add_argument("--stop-after", type=int, default=0, help="steps, in all: all ranks end, as if the machine did")
parser.add_argument("--save-steps", type=int, default=None)
parser.add_argument("--memory-every", type=int, default=None)
parser.add_argument("--stays", type=int, default=0)
args = parser.parse_args()


class Points(Dataset[Any]):
    """Jittered when they are read, if the generator is keyed."""

    def __len__(self) -> int:
        return int(args.samples)

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        if index == args.kill_worker and torch.utils.data.get_worker_info() is not None:
            once = args.out / "killed"
            if not once.exists():
                once.touch()
                os.kill(os.getpid(), signal.SIGKILL)
        x = torch.sin(torch.arange(8) * float(index + 1))
        return index, x if args.plain else x + 0.1 * torch.randn(8)


def digest(*states: Any) -> str:
    made = hashlib.sha256()
    for state in states:
        for name, value in sorted(state.items()):
            whole = value.full_tensor() if hasattr(value, "full_tensor") else value
            made.update(name.encode() + whole.detach().contiguous().numpy().tobytes())
    return made.hexdigest()


def network() -> nn.Module:
    layers: list[nn.Module] = [nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)]
    if not args.plain:
        layers[1:1] = [nn.BatchNorm1d(16), nn.Dropout(0.3)]
    model: nn.Module = nn.Sequential(*layers)
    if args.fsdp:
        from torch.distributed.fsdp import fully_shard

        fully_shard(model)
        return model
    return DistributedDataParallel(model) if dist.is_initialized() else model


def main() -> None:
    torch.manual_seed(1)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    run = holdfast.init(
        checkpoints=args.out / "checkpoints",
        exact=args.exact,
        save_steps=args.save_steps,
        memory_every=args.memory_every,
        stays=bool(args.stays),
    )
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=1.0 if args.plain else 0.7)
    restored = run.attach(model=model, optimizer=optimizer, scheduler=scheduler)
    kills = {tuple(map(int, kill.split(":"))) for kill in args.kill.split(",") if kill}
    training = run._training
    data = run.batches(
        Points(),
        args.batch,
        epochs=args.epochs,
        micro_batch_size=args.micro,
        num_workers=args.workers,
        per_rank=args.per_rank,
        lr_rule=args.lr_rule,
    )
    used: list[int] = []
    at = (-1, -1)
    with open(args.out / f"used.{run.rank}.jsonl", "a", buffering=1) as file:

        def note(**news: Any) -> None:
            place = {"generation": run.generation, "rank": run.rank, "world_size": run.world_size}
            file.write(json.dumps({"attempt": args.attempt, **place, **news}) + "\n")

        found = {"restored": restored.step, "name": restored.name} if restored is not None else {"restored": 0}
        note(**found, lr=optimizer.param_groups[0]["lr"])
        for indices, x in data:
            batches = training._active[0]
            unit, epoch, step = batches.unit, batches.epoch, run.steps_done
            assert unit is not None
            if (run.generation, step) != at:  # what a world that is over had of it is done again
                at, used = (run.generation, step), []
            used += indices.tolist() if unit.weight else []
            if unit.is_last and (run.generation, step, run.rank) in kills:
                os.kill(os.getpid(), signal.SIGKILL)
            loss = (model(x).squeeze(1) - x.sum(1)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            if unit.is_last:
                # Before it commits: what a snapshot has of it was then written down by all ranks.
                note(step=step, epoch=epoch, used=used)
                used = []
            run.step(loss=loss)
            if args.save_steps:
                assert training._checkpointer is not None
                training._checkpointer.wait()  # these short steps would else skip most saves
            if args.stop_after and run.steps_done >= args.stop_after:
                os._exit(0)
    run.close()
    weights = model.state_dict()
    if args.fsdp:
        found_digest = digest(weights)
    else:
        inner = model.module if isinstance(model, DistributedDataParallel) else model
        moments = {f"{at}.{k}": v for at, one in optimizer.state_dict()["state"].items() for k, v in one.items()}
        found_digest = digest(inner.state_dict(), moments)
    values = {k: v.full_tensor() if hasattr(v, "full_tensor") else v for k, v in weights.items()}
    if run.rank_zero:
        torch.save({k.removeprefix("module."): v for k, v in values.items()}, args.out / "weights.pt")
        (args.out / "digest").write_text(found_digest)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
