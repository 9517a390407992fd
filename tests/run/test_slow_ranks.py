"""A rank that holds the others up is named, though all of them step at the same pace."""

from __future__ import annotations

from harness import Job

SLOW = """
import os, sys, time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
rank, slow, kept = dist.get_rank(), sys.argv[1], []
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.Adam(model.parameters())
for step in range(int(sys.argv[2])):
    time.sleep(0.03 if str(rank) == slow and step < int(sys.argv[3]) else 0.01)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.barrier()
sys.stdout.flush()
os._exit(0)
"""


def test_the_slow_one_is_found_and_told_when_it_is_slow_no_longer(job: Job) -> None:
    script = job.folder / "slow.py"
    script.write_text(SLOW)
    assert job.run(script, "1", "400", "170", max_restarts=0) == 0
    [found] = job.events("straggler.found")
    assert found["rank"] == 1 and 1.5 < found["score"] < 5 and found["own_s"] > found["typical_s"]
    assert [gone["rank"] for gone in job.events("straggler.gone")] == [1]
    assert "rank 1 holds the others up: it needs 3" in job.err
    assert "rank 1 is as fast as the others again" in job.err
    steps = [max(event["steps"]) for event in job.events("progress")]
    assert steps == sorted(steps) and steps[-1] == 400, "the last look sees the last step"
    assert {event["base"] for event in job.events("progress")} == {0}


def test_ranks_alike_are_left_alone(job: Job) -> None:
    script = job.folder / "slow.py"
    script.write_text(SLOW)
    assert job.run(script, "none", "300", "0", max_restarts=0) == 0
    assert job.events("straggler.found") == []
    assert all(len(event["own_s"]) == 2 for event in job.events("progress"))
