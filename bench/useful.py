"""The training of bench/goodput.py: the same model, data and steps, with three ways to survive a killed rank."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import train_chars

EPOCH, BATCH, EPOCHS = 1000 * train_chars.BATCH, train_chars.BATCH, 10_000  # 1000 steps an epoch


class Windows(Dataset[Any]):
    """Of a file of tokens, mapped into memory."""

    def __init__(self, path: Path) -> None:
        self._tokens = torch.from_file(str(path), size=path.stat().st_size, dtype=torch.uint8)
        self._step = (len(self._tokens) - train_chars.CONTEXT - 1) / EPOCH

    def __len__(self) -> int:
        return EPOCH

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        at = int(index * self._step)
        window = self._tokens[at : at + train_chars.CONTEXT + 1].long()
        return window[:-1], window[1:]


class Told:
    """Who this is, and how far it is, for the one who kills and counts."""

    def __init__(self, folder: Path, rank: int) -> None:
        pid = folder / f"pid.{rank}"
        pid.with_suffix(f".{os.getpid()}").write_text(str(os.getpid()))
        pid.with_suffix(f".{os.getpid()}").rename(pid)
        self._rank = rank
        self._fd = os.open(folder / "step", os.O_WRONLY | os.O_CREAT)  # by which a fork of a zygote is known

    def step(self, step: int) -> None:
        if self._rank == 0:
            os.pwrite(self._fd, b"%-12d" % step, 0)


def main() -> None:
    kind, folder = sys.argv[1], Path(sys.argv[2])
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(train_chars.CharModel())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    told = Told(folder, rank)
    if kind == "holdfast":
        with_holdfast(model, optimizer, told, folder)
    else:
        by_hand(kind, model, optimizer, told, folder, rank)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> torch.Tensor:
    inputs, targets = batch
    loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
    return torch.as_tensor(loss)


def with_holdfast(model: nn.Module, optimizer: torch.optim.Optimizer, told: Told, folder: Path) -> None:
    import holdfast

    run = holdfast.init(checkpoints=folder / "checkpoints")
    run.attach(model=model, optimizer=optimizer)
    for batch in run.batches(Windows(folder / "tokens"), BATCH, epochs=EPOCHS):
        run.step(loss=train(model, optimizer, batch))
        told.step(run.steps_done)


def by_hand(kind: str, model: Any, optimizer: Any, told: Told, folder: Path, rank: int) -> None:
    """As the elastic FSDP script does it: a file an epoch, or torch's own asynchronous saves."""
    dataset = Windows(folder / "tokens")
    sampler: Any = DistributedSampler(dataset)
    step = restore(kind, model, optimizer, folder)
    saving: Any = None
    while True:
        epoch, skip = divmod(step, EPOCH // BATCH)
        sampler.set_epoch(epoch)
        left = list(sampler)[skip * (BATCH // 2) :]
        for batch in DataLoader(dataset, batch_size=BATCH // 2, sampler=left):
            train(model, optimizer, batch)
            step += 1
            told.step(step)
            if kind == "async" and step % 50 == 0:
                if saving is not None:
                    saving.result()
                saving = save_async(step, model, optimizer, folder)
        if kind == "epochs" and rank == 0:
            state = {"step": step, "model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, folder / "epoch.tmp")
            os.replace(folder / "epoch.tmp", folder / "epoch.pt")


def save_async(step: int, model: Any, optimizer: Any, folder: Path) -> Any:
    dcp: Any = importlib.import_module("torch.distributed.checkpoint")
    state = {"step": step, "model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
    return dcp.async_save(state, checkpoint_id=folder / "dcp" / f"{step:09d}")


def restore(kind: str, model: Any, optimizer: Any, folder: Path) -> int:
    if kind == "epochs" and (folder / "epoch.pt").exists():
        state = torch.load(folder / "epoch.pt")
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        return int(state["step"])
    if kind == "async":
        dcp: Any = importlib.import_module("torch.distributed.checkpoint")
        done = [path.parent for path in (folder / "dcp").glob("*/.metadata")] if (folder / "dcp").exists() else []
        found: list[Any] = [max((int(path.name) for path in done), default=0)]
        dist.broadcast_object_list(found, src=0)
        if found[0]:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = torch.zeros_like(parameter)
            optimizer.step()  # makes the moments, for dcp to load into
            optimizer.zero_grad()
            state = {"step": 0, "model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
            dcp.load(state, checkpoint_id=folder / "dcp" / f"{found[0]:09d}")
            model.module.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
        return int(found[0])
    return 0


if __name__ == "__main__":
    main()
