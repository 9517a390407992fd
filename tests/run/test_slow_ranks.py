"""A rank that holds the others up is named, though all of them step at the same pace."""

from __future__ import annotations

import re

from harness import Job

# While the file `slow` is there, rank 1 is slow before its gradients, and rank 2 in a section after them. All of them
# end once `on` is gone.
SLOW = """
import json, os, sys, time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from holdfast.fault_tolerance import RankMonitorClient
dist.init_process_group("gloo")
rank, here = dist.get_rank(), os.path.dirname(os.path.abspath(sys.argv[0]))
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.Adam(model.parameters())
client = RankMonitorClient()
client.init_workload_monitoring()
on, step = torch.ones(1), 0
while on:
    slow = os.path.exists(os.path.join(here, "slow"))
    time.sleep(0.1 if slow and rank == 1 else 0.01)
    model(torch.ones(2, 4)).sum().backward()
    with client.section("after"):
        time.sleep(0.1 if slow and rank == 2 else 0.01)
    optimizer.step()
    optimizer.zero_grad()
    step += 1
    if step % 10 == 0:
        if rank == 0:
            with open(os.environ["NEWS"], "a") as news:
                news.write(json.dumps({"rank": 0, "generation": 0, "pid": os.getpid(), "step": step}) + "\\n")
        on[0] = float(os.path.exists(os.path.join(here, "on")))
        dist.broadcast(on, 0)
dist.barrier()
sys.stdout.flush()
os._exit(0)
"""


def test_slow_ones_are_found_and_told_when_they_are_slow_no_longer(job: Job) -> None:
    script = job.folder / "slow.py"
    script.write_text(SLOW)
    for name in ("on", "slow"):
        (job.folder / name).touch()
    job.start(script, nproc=3)
    wait_ranks(job, "straggler.found", {1, 2})
    (job.folder / "slow").unlink()
    wait_ranks(job, "straggler.gone", {1, 2})
    (job.folder / "on").unlink()
    assert job.wait() == 0
    found = job.events("straggler.found")  # on a busy machine, others may be among them, too
    assert {(each["rank"], each["by"]) for each in found} >= {(1, "step"), (2, "section")}
    assert all(each["score"] > 1.3 and each["own_s"] > each["typical_s"] for each in found)
    assert re.search("rank 1 holds the others up: it needs .* ms a step for itself, the others ", job.err)
    assert re.search("rank 2 holds the others up: it needs .* ms a step in its sections, the others ", job.err)
    assert "rank 1 is as fast as the others again" in job.err
    steps = [max(event["steps"]) for event in job.events("progress")]
    assert steps == sorted(steps) and steps[-1] == job.events("job.ended")[0]["steps"], (
        "the last look sees the last step"
    )
    assert {event["base"] for event in job.events("progress")} == {0}
    assert all(len(event["own_us"]) == 3 for event in job.events("progress"))


def wait_ranks(job: Job, name: str, ranks: set[int]) -> None:
    """There has been such an event of each of them."""
    job.news.wait(lambda line: "step" in line)
    while not ranks <= {event["rank"] for event in job.events(name)}:
        job.news.wait(lambda line: "step" in line)
