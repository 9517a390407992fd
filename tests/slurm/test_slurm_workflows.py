"""Workflows on a real Slurm: a controller and three nodes of this machine."""

from __future__ import annotations

import json
import random
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from slurm.slurm_cluster import slurm
from slurm.workflows import Workflows

# A master that counts steps, and a worker that does as `args` say. Whatever ends it, the next life goes on.
TRAIN = """
    workflow:
      name: train
      groups:
      - name: g
        ignoreNonleadStatus: false
        tasks:
        - name: master
          lead: true
          command: [bash, /tmp/run.sh]
          inputs: [{url: UP/models}]
          checkpoint: [{path: /tmp/models, url: UP, frequency: 100ms}]
          files:
          - path: /tmp/run.sh
            contents: |
              mkdir -p /tmp/models
              ls /tmp/marker 2>/dev/null && exit 9
              touch /tmp/marker
              steps=$(cat {{input:0}}/steps 2>/dev/null || echo 0)
              trap 'echo ends $HOLDFAST_ATTEMPT >> SAID; exit 0' TERM
              echo begins $HOLDFAST_ATTEMPT at $steps on $HOLDFAST_NODE with {{host:worker}} >> SAID
              while [ $steps -lt STEPS ]; do
                steps=$((steps + 1))
                echo $steps > /tmp/models/new && mv /tmp/models/new /tmp/models/steps
                echo step $steps >> SAID
                while [ -e SAID.hold ]; do sleep 0.1 & wait $!; done
                sleep 0.2 & wait $!
              done
        - name: worker
          command: [bash, -c]
          args: ["WORKER"]
          exitActions: {RESCHEDULE: 3}
"""
SLEEP = "exec sleep 300"


def train(steps: int, worker: str = SLEEP) -> str:
    return TRAIN.replace("STEPS", str(steps)).replace("WORKER", worker)


def begins(text: str) -> list[tuple[str, ...]]:
    return re.findall(r"begins (\d+) at (\d+) on (\w+) with (\S+)", text)


def test_a_task_that_is_rescheduled_goes_on_elsewhere_from_its_checkpoint(here: Workflows) -> None:
    worker = "[ $HOLDFAST_ATTEMPT = 1 ] || exec sleep 300; while [ ! -e SAID.end ]; do sleep 0.1; done; exit 3"
    hold = here.said.with_suffix(".hold")
    hold.touch()  # after the first step
    runner = here.submit(train(8, worker))
    here.until((here.folder / "up" / "models" / "steps").exists, "a checkpoint")
    here.said.with_suffix(".end").touch()
    here.until_said("begins 2")
    hold.unlink()
    code, said = here.end_of(runner)
    assert code == 0, said + here.why()
    assert "worker waiting on n2, attempt 1: rescheduled: exit code 3" in said
    assert "train-1: completed; 2 completed; 1 reschedule" in said
    status = here.status()
    assert status["tasks"]["master"]["node"] == "n1" and status["tasks"]["worker"]["node"] == "n3"
    assert list(status["nodes_set_aside"]) == ["n2"] and status["tasks"]["master"]["attempt"] == 2
    (first, second) = begins(here.said.read_text())
    assert first == ("1", "0", "n1", "127.0.1.2") and second[0] == "2" and second[2:] == ("n1", "127.0.1.3")
    assert second[1] == "1"
    assert (here.folder / "up" / "models" / "steps").read_text() == "8\n"
    assert "ExcNodeList=n2" in here.slurm.run("scontrol", "show", "job", here.job(2))
    assert not list(here.scratch.iterdir()), "nothing is left on the nodes"


def test_without_a_barrier(here: Workflows) -> None:
    runner = here.submit(train(3).replace("ignoreNonleadStatus: false", "barrier: false"))
    code, said = here.end_of(runner)
    assert code == 0 and "2 completed" in said, said + here.why()


@pytest.mark.long
def test_time_is_over_three_times(here: Workflows) -> None:
    """The warning that Slurm sends before its limit: save, end, and into the queue again."""
    runner = here.submit(train(20))
    for attempt in (1, 2, 3):
        here.until_said(f"begins {attempt} ")
        count = here.said.read_text().count("step")
        here.until(lambda count=count: here.said.read_text().count("step") > count + 2, "steps")  # type: ignore[misc]
        here.slurm.run("scancel", "--signal=USR1", "--batch", here.job())
        here.until_said(f"ends {attempt}")
    code, said = here.end_of(runner)
    assert code == 0, said + here.why()
    text = here.said.read_text()
    assert [begin[0] for begin in begins(text)] == ["1", "2", "3", "4"]
    steps = [int(number) for number in re.findall(r"step (\d+)", text)]
    assert steps == list(range(1, 21)), "each step once: the last upload came after the last step"
    assert "Restarts=3" in here.slurm.run("scontrol", "show", "job", here.job())
    assert here.status()["tasks"]["master"]["reschedules"] == 0


def test_the_runner_is_killed_and_nothing_runs_twice(here: Workflows) -> None:
    runner = here.submit(train(15))
    here.until_said("step 3")
    runner.kill()
    runner.wait()
    assert here.status()["runner"] is None
    code, out, err = here.run("resume")
    assert code == 0, out + err + here.why()
    text = here.said.read_text()
    assert len(begins(text)) == 1 and text.count("step 15") == 1


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.long), pytest.param(3, marks=pytest.mark.long)])
def test_the_runner_is_killed_again_and_again(here: Workflows, seed: int) -> None:
    """In the queue, while it submits, while tasks prepare, run and end: no life begins twice."""
    dice = random.Random(seed)
    worker = "echo worker $HOLDFAST_ATTEMPT >> SAID; sleep 1.5; [ $HOLDFAST_ATTEMPT = 1 ] && exit 3; exec sleep 300"
    runner = here.submit(train(25, worker))
    here.until(lambda: bool(list(here.home.glob("*/standing.json"))), "the workflow")
    for _ in range(12):
        try:
            runner.wait(dice.choice([0.2, 0.3, 0.4, 0.6, 1.0]))
            break
        except subprocess.TimeoutExpired:
            runner.kill()
            runner.wait()
        runner = here.start("resume")
    code, said = here.end_of(runner)
    assert code == 0, said + here.why()
    text = here.said.read_text()
    assert [begin[0] for begin in begins(text)] == ["1", "2"]
    assert re.findall(r"worker (\d)", text) == ["1", "2"]
    assert re.findall(r"step (\d+)", text)[-1] == "25"


def test_the_runner_is_killed_as_it_writes_the_next_job_down(here: Workflows) -> None:
    """Both tasks were to begin anew, together, and all that there is of it is a folder."""
    runner = here.submit(train(12))
    here.until_said("step 3")
    runner.kill()
    runner.wait()
    here.slurm.run("scancel", here.job())
    [folder] = here.home.iterdir()
    here.until(lambda: here.slurm.run("squeue", "--noheader") == "", "its end")
    standing = json.loads((folder / "standing.json").read_text())
    for task in standing["tasks"].values():
        task |= {"state": "queued", "attempt": 2, "node": ""}
    (folder / "standing.json").write_text(json.dumps(standing))
    (folder / "jobs" / "2").mkdir()
    (folder / "jobs" / "2" / "job.part").write_text("{")
    code, out, err = here.run("resume")
    assert code == 0, out + err + here.why()
    (_, second) = begins(here.said.read_text())
    assert second[0] == "2" and int(second[1]) >= 3
    assert sorted(path.name for path in (folder / "jobs").iterdir()) == ["1", "2"], "one for both"


def test_it_is_over_before_the_runner_comes_back(here: Workflows) -> None:
    runner = here.submit(train(5))
    here.until_said("begins 1")
    runner.kill()
    runner.wait()
    here.until_said("step 5")
    here.until(lambda: bool(list(here.home.glob("*/tasks/master/1/ended.json"))), "the master's end")
    code, out, err = here.run("resume")
    assert code == 0, out + err + here.why()
    assert len(begins(here.said.read_text())) == 1


def test_scancel_ends_it_in_order(here: Workflows) -> None:
    runner = here.submit(train(1000))
    here.until_said("step 3")
    here.slurm.run("scancel", here.job())
    code, said = here.end_of(runner)
    assert code == 130 and "train-1: canceled" in said, said + here.why()
    text = here.said.read_text()
    assert "ends 1" in text and len(begins(text)) == 1
    last = int(re.findall(r"step (\d+)", text)[-1])
    saved = int((here.folder / "up" / "models" / "steps").read_text())
    assert saved in (last, last + 1), "it is saved before it is said, and the end may come in between"


def test_cancel_while_it_runs_and_while_it_waits(here: Workflows) -> None:
    runner = here.submit(train(1000))
    here.until_said("step 2")
    whole_nodes = "name: train\n      resources: {default: {cpu: 2}}"  # two of them, and only one is free
    waiting = here.submit(train(1000).replace("name: train", whole_nodes))
    here.until(lambda: len(list(here.home.glob("train-2/jobs/1/id"))) == 1, "the second in the queue")
    assert here.run("cancel", "train-2")[0] == 0
    code, said = here.end_of(waiting)
    assert code == 130 and "2 canceled" in said
    assert here.run("cancel", "train-1")[0] == 0
    assert here.end_of(runner)[0] == 130
    text = here.said.read_text()
    assert "ends 1" in text and len(begins(text)) == 1


@pytest.mark.parametrize("late", [1, pytest.param(2, marks=pytest.mark.long)])
def test_an_old_answer_of_the_queue_says_nothing_of_a_job_that_came_after_it(here: Workflows, late: int) -> None:
    """As the runner begins, it asks twice: whether its job is there already, and how its jobs are. One of the answers
    comes late; the job that it does not know was taken for lost, and had a second life beside its first."""
    slow = here.folder / "bin" / "squeue"
    slow.parent.mkdir()
    slow.write_text(f"""#!/bin/bash
        said=$({shutil.which("squeue")} "$@"; echo .)
        for number in 1 2 3; do mkdir {slow.parent}/$number 2>/dev/null && break; done
        [ $number = {late} ] && sleep 3
        printf %s "${{said%.}}"
    """)
    slow.chmod(0o755)
    here.env["PATH"] = f"{slow.parent}:{here.env['PATH']}"
    code, said = here.end_of(here.submit(train(25)))
    assert code == 0, said
    assert [begin[0] for begin in begins(here.said.read_text())] == ["1"]
    assert here.status()["tasks"]["master"]["attempt"] == 1


@pytest.mark.long
@pytest.mark.parametrize("hears", [pytest.param("all", marks=pytest.mark.long), "the program first"])
def test_a_node_goes_down(here: Workflows, hears: str) -> None:
    """Slurm requeues the job by itself; it goes on where it was, elsewhere. It tells all processes on the node to end,
    one after the other."""
    first = "[ $HOLDFAST_ATTEMPT = 1 ] || exec sleep 300; while [ ! -e SAID.end ]; do sleep 0.1; done; kill -TERM $$"
    runner = here.submit(train(30, first) if hears == "the program first" else train(30))
    here.until_said("step 4")
    here.said.with_suffix(".end").touch()
    here.slurm.run("scontrol", "update", "nodename=n2", "state=down", "reason=test")
    code, said = here.end_of(runner)
    assert code == 0, said + here.why()
    text = here.said.read_text()
    (_, second) = begins(text)
    assert second[0] == "2" and int(second[1]) >= 3 and second[3] != "127.0.1.2"
    steps = [int(number) for number in re.findall(r"step (\d+)", text)]
    assert steps[-1] == 30 and len(steps) < 35


@pytest.mark.long
def test_the_controller_is_restarted(tmp_path: Path) -> None:
    """Tasks go on; what has to be submitted is, once it answers again. With a Slurm of its own: after a restart nodes
    may take minutes until they are idle."""
    with slurm(tmp_path / "slurm") as cluster:
        here = Workflows(cluster, tmp_path)
        _restart_the_controller(here)
        shutil.rmtree(here.outside)


def _restart_the_controller(here: Workflows) -> None:
    worker = "echo worker $HOLDFAST_ATTEMPT >> SAID; [ $HOLDFAST_ATTEMPT = 2 ] && exec sleep 300; sleep 2; exit 3"
    runner = here.submit(train(1000, worker).replace("ignoreNonleadStatus: false", "ignoreNonleadStatus: true"))
    here.until_said("step 3")
    here.slurm.stop("slurmctld")
    try:
        assert runner.stderr is not None and "it is tried again" in runner.stderr.readline()
    finally:
        here.slurm.start_controller()
    here.until_said("worker 2")
    assert here.run("cancel")[0] == 0
    assert here.end_of(runner)[0] == 130
    text = here.said.read_text()
    assert len(begins(text)) == 1 and text.count("worker") == 2


def test_one_that_is_rescheduled_alone_gets_a_job_of_its_own(here: Workflows) -> None:
    worker = (
        "echo worker $HOLDFAST_ATTEMPT on $HOLDFAST_NODE >> SAID; [ $HOLDFAST_ATTEMPT = 1 ] && exit 3; exec sleep 300"
    )
    runner = here.submit(train(1000, worker).replace("ignoreNonleadStatus: false", "ignoreNonleadStatus: true"))
    assert "worker 2 on n2" not in here.until_said("worker 2 on n")
    assert len(begins(here.said.read_text())) == 1
    assert here.run("cancel")[0] == 0
    assert here.end_of(runner)[0] == 130


@pytest.mark.parametrize(
    ("change", "environment", "said"),
    [
        ("resources: {default: {cpu: 64}}", {}, ":9: master wants 64 CPUs, and no node has more than 2"),
        ("resources: {default: {gpu: 1}}", {}, ":9: master wants 1 GPUs, and no node has more than 0"),
        ("", {"SBATCH_PARTITION": "nowhere"}, "nowhere"),
        ("resources: {default: {nodesExcluded: [n1, n2]}}", {}, "g: sbatch:"),
    ],
)
def test_what_slurm_could_never_run_is_refused(
    here: Workflows, change: str, environment: dict[str, str], said: str
) -> None:
    here.env |= environment
    text = train(1).replace("name: train", f"name: train\n      {change}") if change else train(1)
    code, err = here.end_of(here.submit(text))
    assert code == 2 and said in err and err.count("\n") == 1, err
    assert not here.home.exists()


def test_flags_that_do_not_fit(here: Workflows) -> None:
    code, err = here.end_of(here.submit(train(1), "--nodes", "3"))
    assert code == 2 and "--nodes is for this machine; Slurm gives out nodes itself" in err
    here.env |= {"PATH": "/nowhere"}
    code, err = here.end_of(here.submit(train(1)))
    assert code == 2 and "there is no program sinfo: this is not a machine of a Slurm cluster" in err


@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_job_with_a_limit_of_a_minute_trains_for_longer(here: Workflows, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit and its warning are Slurm's own."""
    monkeypatch.setattr("slurm.workflows.WAIT_S", 380.0)
    here.env |= {"SBATCH_TIMELIMIT": "1", "SBATCH_SIGNAL": "B:USR1@30"}
    code, said = here.end_of(here.submit(train(600)))
    assert code == 0, said + here.why()
    text = here.said.read_text()
    assert len(begins(text)) >= 3
    assert [int(number) for number in re.findall(r"step (\d+)", text)] == list(range(1, 601))
