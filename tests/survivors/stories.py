"""A training in which ranks are killed at given points, and what is known of it afterwards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from harness import Job

SCRIPT = Path(__file__).parent / "scripts" / "survives.py"
STEPS = 30


def run(job: Job, kills: list[dict[str, Any]], *flags: str, nproc: int = 3, **options: Any) -> int:
    return start(job, kills, *flags, nproc=nproc, **options).wait()


def start(job: Job, kills: list[dict[str, Any]], *flags: str, nproc: int = 3, **options: Any) -> Job:
    given = (f"--kills={json.dumps(kills)}", f"--steps={STEPS}", *flags)
    env = {"CHECKPOINT_DIR": str(job.folder / "saved"), **options.pop("env", {})}
    return job.start(SCRIPT, *given, nproc=nproc, max_restarts=20, env=env, **options)


def steps(job: Job) -> dict[int, list[int]]:
    """Those that each rank has done, in order."""
    found: dict[int, list[int]] = {}
    for line in job.news.seen:
        if "step" in line:
            found.setdefault(line["rank"], []).append(line["step"])
    return found


def pids(job: Job, rank: int) -> list[int]:
    return list(dict.fromkeys(line["pid"] for line in job.news.seen if line["rank"] == rank))


def stayed(job: Job) -> list[list[int]]:
    """Which ranks have, in each world."""
    return [event["stayed"] for event in job.events("world.launched")]


def replaced(job: Job, why: str) -> set[int]:
    """Ranks that did not get out of a world."""
    return {rank for event in job.events("ranks.signalled") if why in event["why"] for rank in event["ranks"]}


def killed(job: Job) -> int:
    """How many of those that were planned."""
    return len(list(job.folder.glob("killed.*")))


def same(one: Any, other: Any, bits: bool) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other) if bits else torch.allclose(one, other, rtol=1e-4, atol=1e-6)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key], bits) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(same(here, there, bits) for here, there in zip(one, other, strict=True))
    return bool(one == other)


def check(job: Job, expected: Any, dead: set[int], nproc: int = 3, bits: bool = False) -> None:
    """Of more than two ranks, DDP sums gradients in another order in the first step of a world. One that gloo does not
    let go of (see design.md) leaves its state, and is replaced."""
    assert job.leftovers() == []
    dead = dead | replaced(job, "has left its state")
    assert same(torch.load(job.folder / "weights.pt"), expected, bits or nproc == 2)
    for rank in range(nproc):
        if rank not in dead:
            assert len(pids(job, rank)) == 1, f"rank {rank} has stayed"
    found = steps(job)
    for rank, done in found.items():
        assert done == sorted(set(done)) and done[-1] == STEPS, f"rank {rank} has done no step twice"
    assert set().union(*found.values()) == set(range(1, STEPS + 1))
