"""A rank that holds the others up is named, though all of them step at the same pace."""

from __future__ import annotations

from harness import Job

# Rank 1 is slow for as long as the file `slow` is there, and all of them end once `on` is gone.
SLOW = """
import json, os, sys, time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
rank, here = dist.get_rank(), os.path.dirname(os.path.abspath(sys.argv[0]))
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.Adam(model.parameters())
on, step = torch.ones(1), 0
while on:
    slow = rank == 1 and os.path.exists(os.path.join(here, "slow"))
    time.sleep(0.05 if slow else 0.01)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    step += 1
    if step % 25 == 0:
        if rank == 0:
            with open(os.environ["NEWS"], "a") as news:
                news.write(json.dumps({"rank": 0, "generation": 0, "pid": os.getpid(), "step": step}) + "\\n")
        on[0] = float(os.path.exists(os.path.join(here, "on")))
        dist.broadcast(on, 0)
dist.barrier()
sys.stdout.flush()
os._exit(0)
"""


def test_the_slow_one_is_found_and_told_when_it_is_slow_no_longer(job: Job) -> None:
    script = job.folder / "slow.py"
    script.write_text(SLOW)
    for name in ("on", "slow"):
        (job.folder / name).touch()
    job.start(script, max_restarts=0)
    job.wait_event("straggler.found")
    (job.folder / "slow").unlink()
    job.wait_event("straggler.gone")
    (job.folder / "on").unlink()
    assert job.wait() == 0
    [found] = job.events("straggler.found")
    assert found["rank"] == 1 and found["score"] > 1.3 and found["own_s"] > found["typical_s"]
    assert [gone["rank"] for gone in job.events("straggler.gone")] == [1]
    assert "rank 1 holds the others up: it needs " in job.err
    assert "rank 1 is as fast as the others again" in job.err
    steps = [max(event["steps"]) for event in job.events("progress")]
    assert steps == sorted(steps) and steps[-1] == job.events("job.ended")[0]["steps"], (
        "the last look sees the last step"
    )
    assert {event["base"] for event in job.events("progress")} == {0}
    assert all(len(event["own_us"]) == 2 for event in job.events("progress"))
