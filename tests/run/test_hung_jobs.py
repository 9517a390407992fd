"""Ranks that hang in every way there is: found without a line of code, named, written down, and cured."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from harness import SCRIPTS, Job
from holdfast.agent.result import Result
from holdfast.control.causes import Kind

HANGS = SCRIPTS / "hangs.py"
FLOOR = ("--hang-floor=1",)
LEARNED = 8  # a step by which limits are learned
# An evaluation or a save may take ten floors. For short ones, steps get their second by the factor and the pace.
SELDOM = ("--hang-floor=0.2", "--ft-safety-factor=100")
PACED = {"PACE_S": "0.01"}


def fault(how: str, step: int = LEARNED, rank: int | str = 1, generations: tuple[int, ...] = (0,)) -> str:
    return json.dumps({"rank": rank, "step": step, "how": how, "generations": generations})


def only_incident(job: Job) -> dict[str, Any]:
    [incident] = job.incidents()
    return incident


def stacks(job: Job, dump: int = 0) -> dict[str, str]:
    folder = sorted((job.run_dir / "stacks").iterdir())[dump]
    return {path.name: path.read_text() for path in folder.iterdir()}


# -- where a rank can hang --------------------------------------------------------------------------------------------


FRAMES = {
    "busy": "in busy",
    "sleep": "in sleep",
    "hold_the_gil": "in hold_the_gil",
    "skip_a_collective": "in skip_a_collective",
    "load_data": "in read",
    "load_data_in_a_worker": "-- data loader worker",
}


@pytest.mark.parametrize(
    "ways", [("busy", "hold_the_gil"), ("sleep", "skip_a_collective"), ("load_data", "load_data_in_a_worker")]
)
def test_a_rank_that_hangs_is_named_and_the_world_comes_back_and_has_twice_the_time(
    job: Job, ways: tuple[str, str]
) -> None:
    faults = [fault(ways[0]), fault(ways[1], step=2 * LEARNED, generations=(1,))]
    assert job.run(HANGS, "20", *faults, max_restarts=2, flags=FLOOR) == 0
    assert (job.folder / "step").read_text() == "20"
    incidents = job.incidents()
    assert len(incidents) == len(list((job.run_dir / "stacks").iterdir())) == 2
    for number, (incident, how) in enumerate(zip(incidents, ways, strict=True)):
        assert (incident["kind"], incident["rank"], incident["suspects"]) == ("hang", 1, [1])
        assert incident["headline"].startswith("no step for ")
        assert list(incident["phases_s"]) == ["detect", "stop", "wait", "start", "first step"]
        assert incident["phases_s"]["detect"] >= 1
        assert sum(incident["phases_s"].values()) == pytest.approx(incident["lost_s"])
        collectives = {group["what"]: group["ranks"] for group in incident["groups"] if group["collective"]}
        assert collectives == {"backward": [0]}
        found = stacks(job, number)
        assert sorted(found) == ["rank_0.txt", "rank_1.txt", "summary.txt"]
        assert FRAMES[how] in found["rank_1.txt"]
        assert "_engine_run_backward" in found["rank_0.txt"]
        assert "not in a collective: rank 1, likely what the others wait for" in found["summary.txt"]
    assert job.err.count("rank 1 hangs: no step for ") == 2
    assert job.err.count("rank 1: likely what the others wait for") == 2
    assert [sent["signal"] for sent in job.events("ranks.signalled")] == ["SIGKILL"] * 2
    first, second = (min(e["limit_s"] for e in job.events("rank.hung") if e["generation"] == g) for g in (0, 1))
    assert second >= 2 * first
    assert job.leftovers() == []


def test_a_deadlock_of_all_blames_nobody_and_a_stopped_rank_is_named_as_such(job: Job) -> None:
    faults = [fault("cross"), fault("stop_itself", step=2 * LEARNED, generations=(1,))]
    assert job.run(HANGS, "20", *faults, max_restarts=2, flags=FLOOR) == 0
    deadlock, stop = job.incidents()
    assert (deadlock["kind"], deadlock["rank"], deadlock["suspects"]) == ("hang", None, [])
    assert {group["what"] for group in deadlock["groups"]} == {"backward", "all_reduce"}
    assert "the world hangs: no step for " in job.err
    assert (stop["kind"], stop["rank"], stop["suspects"]) == ("hang", 1, [1])
    assert "stopped by a signal" in stacks(job, 1)["summary.txt"]
    assert "hangs.py" in stacks(job, 1)["rank_1.txt"]
    assert "rank 1 stopped by a signal" in job.err
    assert job.leftovers() == []


@pytest.mark.long
def test_before_init(job: Job) -> None:
    flags = ("--ft-initial-rank-heartbeat-timeout=4",)
    assert job.run(HANGS, "12", fault("sleep", step=-1), max_restarts=1, flags=flags) == 0
    incident = only_incident(job)
    assert (incident["kind"], incident["rank"], incident["steps"]) == ("hang", 1, 0)
    assert incident["headline"].startswith("no first step for ")
    assert "in sleep" in stacks(job)["rank_1.txt"]
    assert "in init_process_group" in stacks(job)["rank_0.txt"]
    assert "rank 1 hangs: no first step" in job.err
    assert job.leftovers() == []


def test_evaluations_and_saves_have_limits_of_their_own(job: Job) -> None:
    """Nobody waits for this rank, so it is its own limit that ends it; the other one is done and gone by then."""
    faults = [fault("save", LEARNED - 1), fault("save_to_a_broken_disk")]
    faults += [fault("evaluate", 2 * LEARNED - 1, generations=(1,))]
    faults += [fault("evaluate_for_ever", 2 * LEARNED, generations=(1,))]
    faults += [fault("leave_at_once", 21, rank=0, generations=(0, 1))]
    assert job.run(HANGS, "20", *faults, max_restarts=2, flags=SELDOM, env={"ALONE": "1", **PACED}) == 0
    saving, evaluating = job.incidents()
    assert [(incident["kind"], incident["rank"]) for incident in (saving, evaluating)] == [("hang", 1)] * 2
    assert saving["headline"].startswith("saving for ")
    assert evaluating["headline"].startswith("evaluating for ")
    assert "in write" in stacks(job, 0)["rank_1.txt"]
    assert "in evaluate_for_ever" in stacks(job, 1)["rank_1.txt"]
    assert job.leftovers() == []


@pytest.mark.long
def test_a_save_that_hangs_while_the_others_wait_for_it(job: Job) -> None:
    faults = [fault("save", LEARNED - 1, rank=0), fault("save_to_a_broken_disk", rank=0)]
    assert job.run(HANGS, "12", *faults, max_restarts=1, flags=SELDOM, env=PACED) == 0
    incident = only_incident(job)
    assert (incident["kind"], incident["rank"], incident["suspects"]) == ("hang", 0, [0])
    assert "in write" in stacks(job)["rank_0.txt"]
    assert job.leftovers() == []


@pytest.mark.parametrize("env", [{"ALONE": "1"}, {}], ids=["alone", "while the other waits"])
def test_a_first_save_is_no_hang(job: Job, env: dict[str, str]) -> None:
    """It has no time to go by, and may take a hundred times as long as a step."""
    assert job.run(HANGS, "12", fault("pause_in_a_save", rank=0), flags=FLOOR, env=env) == 0
    assert job.events("rank.hung") == []


def test_after_the_last_step(job: Job) -> None:
    """The other rank has to have taken down its process group and left by then, or it would be found too. On a busy
    machine a second may be too little for that."""
    faults = [fault("leave_at_once", step=13, rank=0), fault("sleep", step=13)]
    assert job.run(HANGS, "12", *faults, max_restarts=1, flags=("--hang-floor=3",)) == 0
    incident = only_incident(job)
    assert (incident["kind"], incident["rank"], incident["steps"]) == ("hang", 1, 12)
    assert list(incident["phases_s"])[:2] == ["detect", "stop"]
    assert "in sleep" in stacks(job)["rank_1.txt"]
    assert job.leftovers() == []


@pytest.mark.long
def test_at_the_interpreters_exit(job: Job) -> None:
    """An end may take 120 floors; for the test that is not to be two minutes, steps get theirs by the safety factor."""
    flags = ("--hang-floor=0.03", "--ft-safety-factor=500")
    assert job.run(HANGS, "12", fault("sleep_at_exit"), max_restarts=1, flags=flags) == 0
    incident = only_incident(job)
    assert (incident["kind"], incident["rank"]) == ("hang", 1)
    assert incident["headline"].startswith("ending for ")
    assert job.leftovers() == []


# -- what follows -----------------------------------------------------------------------------------------------------


def test_a_world_that_hangs_before_its_first_step_is_restarted_too(job: Job) -> None:
    """How long a first step takes was learned in the world before: ten times that, and the pace makes it two seconds
    for the others."""
    faults = [fault("killed"), fault("sleep", step=0, generations=(1,))]
    flags = ("--hang-floor=0.25", "--ft-safety-factor=10")
    assert job.run(HANGS, "12", *faults, max_restarts=2, flags=flags, env={"PACE_S": "0.2"}) == 0
    assert [incident["kind"] for incident in job.incidents()] == ["signal", "hang"]
    assert job.incidents()[1]["headline"].startswith("no first step for ")
    assert job.incidents()[1]["suspects"] == [1]
    assert list(job.incidents()[0]["phases_s"])[-1] == "failed again"
    assert job.leftovers() == []


def test_without_restarts_the_job_ends_and_says_why(job: Job) -> None:
    assert job.run(HANGS, "12", fault("sleep"), flags=(*FLOOR, "--reschedule-exit-code=75")) == 75
    assert Result(Kind.HANG, "", (), (), None).exit_code(from_cause=False) == 1
    assert Result(Kind.HANG, "", (), (), None).exit_code(from_cause=True) == 85
    assert only_incident(job)["kind"] == "hang"
    assert "the job failed: rank 1 hangs: no step for " in job.err
    assert "rank 0 in backward, rank 1 in hangs.py:" in job.err
    assert "--max-restarts is 0" in job.err
    assert job.leftovers() == []


@pytest.mark.long
def test_warn_lets_a_rank_be_and_says_so_once(job: Job) -> None:
    flags = (*FLOOR, "--hang-detection=warn")
    assert job.run(HANGS, "12", fault("pause"), max_restarts=1, flags=flags) == 0
    assert job.incidents() == []
    assert "may hang: no step for " in job.err
    assert "--hang-detection=warn lets it be" in job.err
    assert all(job.err.count(f"rank {rank} may hang") <= 1 for rank in (0, 1))
    assert "in pause" in stacks(job)["rank_1.txt"]
    assert len(job.events("world.launched")) == 1


def test_off_says_nothing(job: Job) -> None:
    flags = (*FLOOR, "--hang-detection=off")
    assert job.run(HANGS, "12", fault("pause"), flags=flags) == 0
    assert job.events("rank.hung") == []
    assert "hang" not in job.err
    assert not (job.run_dir / "stacks").exists()


def test_a_rank_that_ignores_the_termination_signal_is_killed(job: Job) -> None:
    flags = (*FLOOR, "--ft-rank-termination-signal=SIGTERM", "--shutdown-timeout=1")
    assert job.run(HANGS, "12", fault("sleep_deaf"), max_restarts=1, flags=flags) == 0
    assert [sent["signal"] for sent in job.events("ranks.signalled")] == ["SIGTERM", "SIGKILL"]
    assert only_incident(job)["suspects"] == [1]
    assert only_incident(job)["phases_s"]["stop"] >= 1
    assert job.leftovers() == []


@pytest.mark.long
def test_a_program_that_does_not_train_is_left_alone(job: Job) -> None:
    """A shell script has no beacon and no optimizer; how long it takes is its own business."""
    script = job.folder / "waits.sh"
    script.write_text("#!/bin/bash\nsleep 2\n")
    script.chmod(0o755)
    flags = ("--hang-floor=0.01", "--no-python")
    assert job.run(script, flags=flags) == 0
    assert job.events("rank.hung") == []


# -- progress ---------------------------------------------------------------------------------------------------------


def test_restarts_that_get_no_further_are_stopped(job: Job) -> None:
    always = fault("killed", step=0, generations=tuple(range(20)))
    assert job.run(HANGS, "12", always, max_restarts=10, flags=("--reschedule-exit-code=75",)) == 1
    assert len(job.events("world.launched")) == 4
    assert {incident["kind"] for incident in job.incidents()} == {"signal"}
    assert "3 restarts in a row got no further than step 0" in job.err


OPTIMIZERS = """
import torch

weights = [torch.nn.Parameter(torch.ones(1))]

def loss():
    optimizer.zero_grad()
    value = sum(weight.square().sum() for weight in weights)
    value.backward()
    return value

for make in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.LBFGS):
    optimizer = make(weights, lr=0.01)
    for _ in range(5):
        if make is not torch.optim.LBFGS:
            loss()
        optimizer.step(loss)
"""


def test_the_steps_of_every_optimizer_are_counted(job: Job) -> None:
    script = job.folder / "optimizers.py"
    script.write_text(OPTIMIZERS)
    assert job.run(script, nproc=1) == 0
    assert job.events("job.ended")[0]["steps"] == 20


RESUMES = """
import os, sys, torch

path = os.path.join(os.environ["STATE"], "checkpoint")
weight = torch.nn.Parameter(torch.ones(1))
optimizer = torch.optim.Adam([weight])
if os.path.exists(path):
    optimizer.load_state_dict(torch.load(path))
for step in range(3):
    weight.grad = torch.ones(1)
    optimizer.step()
    if step == 1 and (sys.argv[1] == "advances" or not os.path.exists(path)):
        torch.save(optimizer.state_dict(), path)
sys.exit(5 if os.environ["HOLDFAST_GENERATION"] < sys.argv[2] else 0)
"""


def test_a_job_that_resumes_and_advances_is_not_stopped(job: Job) -> None:
    script = job.folder / "resumes.py"
    script.write_text(RESUMES)
    flags = ("--max-no-progress-restarts=1",)
    assert job.run(script, "advances", "5", nproc=1, max_restarts=5, flags=flags) == 0
    assert len(job.incidents()) == 5


def test_a_job_that_comes_to_the_same_step_each_time_is_stopped(job: Job) -> None:
    script = job.folder / "resumes.py"
    script.write_text(RESUMES)
    assert job.run(script, "stands still", "9", nproc=1, max_restarts=9) == 1
    assert "3 restarts in a row got no further than step 5" in job.err
    assert len(job.events("world.launched")) == 5


def test_it_is_not_when_that_is_asked_for(job: Job) -> None:
    script = job.folder / "resumes.py"
    script.write_text(RESUMES)
    flags = ("--max-no-progress-restarts=0",)
    assert job.run(script, "stands still", "9", nproc=1, max_restarts=5, flags=flags) == 1
    assert len(job.events("world.launched")) == 6
    assert "all 5 are used" in job.err


# -- stacks on request ------------------------------------------------------------------------------------------------


def ask_for_stacks(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "holdfast", "stacks", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=30)


def test_the_stacks_of_a_healthy_job(job: Job) -> None:
    job.start(HANGS, "100000", env={"PACE_S": "0.05"})
    seen = job.wait_step(1, 3)
    done = ask_for_stacks(str(job.pid), "--json")
    assert done.returncode == 0, done.stderr
    taken = json.loads(done.stdout)
    assert sorted(rank for group in taken["groups"] for rank in group["ranks"]) == [0, 1]
    assert (taken["nodes"], taken["missing"]) == (1, 0)
    files = {path.name for path in Path(taken["folder"]).iterdir()}
    assert files == {"rank_0.txt", "rank_1.txt", "summary.txt"}
    assert "hangs.py" in (Path(taken["folder"]) / "rank_1.txt").read_text()
    assert job.wait_step(1, seen["step"] + 10, generation=0)["pid"] == seen["pid"]
    shown = ask_for_stacks(str(job.pid))
    assert shown.returncode == 0
    assert f"more in {job.run_dir}" in shown.stdout
    job.signal(signal.SIGTERM)
    job.wait()
    assert job.events("rank.hung") == []
    assert job.leftovers() == []


def test_the_stacks_of_no_job(tmp_path: Path) -> None:
    done = ask_for_stacks(str(os.getpid()))
    assert done.returncode == 1
    assert "no job" in done.stderr
