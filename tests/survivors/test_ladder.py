"""What comes after ranks that stay: all are started anew; the job fails, and a workflow reschedules it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from harness import Job
from survivors.stories import STEPS as LAST
from survivors.stories import killed, run, same, stayed, steps
from workflow.flows import Here

STEPS = 20
TRAIN = """
import os, signal, sys, torch, torch.distributed as dist, holdfast
out, attempt = sys.argv[1], os.environ["HOLDFAST_ATTEMPT"]
dist.init_process_group("gloo")
torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(STEPS * 4, 4))
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.AdamW(model.parameters())
run = holdfast.init(save_epochs=0, memory_every=1)
run.attach(model=model, optimizer=optimizer)
for [x] in run.batches(data, 4):
    if attempt == "1" and (run.generation, run.steps_done, run.rank) in ((0, 5, 1), (1, 10, 0)):
        while f"1 {run.generation} {1 - run.rank} {run.steps_done}\\n" not in open(f"{out}/said").read():
            pass  # the other one may have to say so yet
        os.kill(os.getpid(), signal.SIGKILL)
    model(x).square().mean().backward()
    optimizer.step()
    run.step()
    with open(f"{out}/said", "a") as file:
        file.write(f"{attempt} {run.generation} {run.rank} {run.steps_done}\\n")
if run.rank == 0:
    torch.save(model.state_dict(), f"{out}/weights")
""".replace("STEPS", str(STEPS))
FLOW = """
    workflow:
      name: ladder
      tasks:
      - name: train
        command: [bash, /tmp/run.sh]
        exitActions: {RESCHEDULE: 75}
        files:
        - path: /tmp/run.sh
          contents: |
            export CHECKPOINT_DIR=OUT/saved
            PYTHON -m holdfast run --standalone --nproc-per-node=2 --max-restarts=1 --reschedule-exit-code=75 \\
              --log-dir=OUT/logs-$HOLDFAST_ATTEMPT OUT/train.py OUT
"""

# With a limit of a second for worlds of ranks that stay, or what it takes to start anew.
IMPATIENT = """
from holdfast.control import staying
staying.LEAST_S = staying.LONGER = 1.0
from holdfast.cli import main
main()
"""


def check_snapshot(job: Job, expected: Any) -> None:
    """All ranks were started anew, from the last snapshot, of which there is one after every second step."""
    assert job.leftovers() == []
    assert same(torch.load(job.folder / "weights.pt"), expected, bits=False)
    for done in steps(job).values():
        assert len(done) - len(set(done)) <= 2 and done[-1] == LAST
    assert set().union(*steps(job).values()) == set(range(1, LAST + 1))


def test_a_recovery_that_fails_twice_takes_the_next_step(job: Job, undisturbed: Any) -> None:
    """The rank that is new is killed before its first step, in both."""
    kills: list[dict[str, Any]] = [{"rank": 1, "step": 11, "at": "backward"}]
    kills += [{"rank": 1, "generation": generation, "at": "load"} for generation in (1, 2)]
    assert run(job, kills) == 0, job.err
    assert killed(job) == 3
    assert list(map(bool, stayed(job))) == [False, True, True, False]
    *first, last = (incident["action"] for incident in job.incidents())
    assert len(first) == 2 and all(" stay" in action for action in first)
    assert last == "restart 3 of 20; all ranks are started anew: ranks that stayed came to no step in 2 worlds"
    check_snapshot(job, undisturbed())


def test_a_recovery_that_comes_to_no_step_in_time_takes_the_next_step(job: Job, undisturbed: Any) -> None:
    """The rank that is new never gets to where the others wait for it."""
    kills = [{"rank": 1, "step": 11, "at": "backward"}, {"rank": 1, "generation": 1, "at": "import", "how": "stuck"}]
    assert run(job, kills, program=(sys.executable, "-c", IMPATIENT, "run")) == 0, job.err
    assert list(map(bool, stayed(job))) == [False, True, False]
    [_, incident] = job.incidents()
    assert incident["action"].startswith("restart 2 of 20; all ranks are started anew: ranks that stayed did no step")
    check_snapshot(job, undisturbed())


def test_ranks_stay_then_the_job_is_rescheduled(tmp_path: Path) -> None:
    with Here(tmp_path) as here:
        (here.outside / "train.py").write_text(TRAIN)
        flow = here.file(FLOW.replace("PYTHON", here.python))
        code, out, err = here.run("submit", str(flow), "--nodes", "2")
        assert code == 0, out + err
        assert "train preparing on node-2, attempt 2" in out
        steps: dict[tuple[int, int], list[int]] = {}
        for line in dict.fromkeys(here.told().splitlines()):
            attempt, generation, rank, step = map(int, line.split())
            if (attempt, generation, step) != (1, 1, 5):  # the step that was not done came to its end in the next world
                steps.setdefault((attempt, rank), []).append(step)
        assert steps[1, 0] == steps[1, 1] == [*range(1, 11)], "none is lost while ranks stay"
        assert steps[2, 0] == steps[2, 1] == [*range(steps[2, 0][0], STEPS + 1)]
        assert 5 < steps[2, 0][0] <= 11, "from a snapshot that ranks had left in memory"
        [record] = (here.outside / "logs-1").glob("*/events.jsonl")
        events = [json.loads(line) for line in record.read_text().splitlines()]
        first, second = (event["data"] for event in events if event["name"] == "incident.opened")
        assert first["action"] == "restart 1 of 1; 1 rank stays"
        assert not second["restarted"] and second["headline"] == "killed by SIGKILL"
