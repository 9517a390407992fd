"""Trains with steps of many batches, each kept as soon as it is done, and dies in the middle of one."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

import holdfast
from holdfast.training import accumulation

accumulation.KEEP_S = 1e-9  # of work: every unit is worth it

BATCH, SAMPLES, EPOCHS = 128, 600, 3


class Points(Dataset[Any]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, torch.sin(torch.arange(8) * float(index + 1))


def main() -> None:
    out, kind, dies, waits = Path(sys.argv[1]), sys.argv[2], sys.argv[3] != "lives", sys.argv[3] == "waits"
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    norm = nn.BatchNorm1d(16) if kind == "exact" else nn.Identity()  # whose statistics are each rank's own, else
    model: nn.Module = nn.Sequential(nn.Linear(8, 16), norm, nn.Dropout(0.1 * (kind == "exact")), nn.Linear(16, 1))
    if kind == "fsdp":
        from torch.distributed.fsdp import fully_shard

        fully_shard(model)
    else:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    run = holdfast.init(checkpoints=out / "checkpoints", exact=kind == "exact", leaves=64, memory_every=1)
    run.attach(model=model, optimizer=optimizer)
    training: Any = run._training
    micro = None if kind == "exact" else 8
    with open(out / f"used.{run.rank}.jsonl", "a", buffering=1) as file:
        for indices, x in run.batches(Points(), BATCH, epochs=EPOCHS, micro_batch_size=micro):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            step, unit = run.steps_done, training._active[0].unit
            if unit.weight:
                file.write(json.dumps({"step": step, "of": run.generation, "used": indices.tolist()}) + "\n")
            run.step()
            kept = training._accumulation.keeps(unit) and unit.done >= BATCH // 2
            if dies and run.generation == 0 and kept:
                training._checkpointer._snapshots.wait()
                file.write(json.dumps({"step": step, "of": 0, "kept": unit.done}) + "\n")
                dist.barrier()  # all ranks have it
                if run.rank == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                if waits:  # the others do nothing more in this world
                    signal.pause()
    if run.rank_zero or kind == "fsdp":
        state = {name: getattr(value, "full_tensor", lambda value=value: value)() for name, value in state_of(model)}
        if run.rank_zero:
            torch.save(state, out / "end.pt")
            made = hashlib.sha256(b"".join(value.contiguous().numpy().tobytes() for value in state.values()))
            (out / "digest").write_text(made.hexdigest())
    run.close()
    dist.destroy_process_group()


def state_of(model: nn.Module) -> list[tuple[str, Any]]:
    return sorted(getattr(model, "module", model).state_dict().items())


main()
