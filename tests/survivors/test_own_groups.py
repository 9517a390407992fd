"""Process groups that a program has made for itself before `run.attach()` work in each world, by the same handles."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from harness import Job

SCRIPT = Path(__file__).parent / "scripts" / "grouped.py"
STEPS = 16
RANKS = range(4)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    made = Job(tmp_path)
    yield made
    made.end()


@pytest.fixture(scope="module")
def expected() -> list[torch.Tensor]:
    """What one process comes to that has all samples of each step for itself."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    data = torch.randn(STEPS * 8, 4, generator=torch.Generator().manual_seed(1))
    for x in torch.split(data, 8):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize(
    ("how", "kills"),
    [
        # generation, rank, steps that are done, and where in the next one
        ("groups", [(0, 1, 2, "first"), (1, 1, 0, "making"), (2, 2, 5, "second"), (3, 1, 9, "step")]),
        pytest.param("ddp", [(0, 1, 3, "forward"), (1, 2, 7, "forward"), (2, 1, 11, "update")], marks=pytest.mark.long),
        ("hsdp", [(0, 1, 3, "forward"), (1, 2, 7, "update")]),
        pytest.param("mesh", [(0, 1, 3, "second"), (1, 2, 7, "first")], marks=pytest.mark.long),
        pytest.param("row", [(0, 1, 3, "first"), (1, 2, 7, "update")], marks=pytest.mark.long),
    ],
)
def test_they_are_there_in_the_next_world(
    job: Job, expected: list[torch.Tensor], how: str, kills: list[tuple[int, int, int, str]]
) -> None:
    given = (how, json.dumps(kills), str(STEPS))
    env = {"CHECKPOINT_DIR": str(job.folder / "saved")}
    assert job.run(SCRIPT, *given, nproc=len(RANKS), max_restarts=20, env=env) == 0, job.err
    assert job.leftovers() == []
    torch.testing.assert_close(torch.load(job.folder / "weights.pt"), expected)
    assert len(job.incidents()) == len(kills), job.err
    # One that gloo does not let go of (see design.md) leaves its state, and is replaced.
    replaced = {rank for event in job.events("ranks.signalled") for rank in event["ranks"]}
    for rank in RANKS:
        lines = [line for line in job.news.seen if line["rank"] == rank]
        done = [line["step"] for line in lines]
        assert done[-1] == STEPS
        if how != "hsdp":  # which goes on from the last snapshot
            assert done == sorted(set(done)), f"rank {rank} has done no step twice"
        if rank not in {1, 2} | replaced:
            assert len({line["pid"] for line in lines}) == 1, f"rank {rank} has stayed"
