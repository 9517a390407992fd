"""The last step of the ladder: the job fails, a workflow reschedules it, and it goes on where its ranks were."""

from __future__ import annotations

import json
from pathlib import Path

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
