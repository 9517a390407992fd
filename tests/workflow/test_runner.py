"""Workflows on this machine, with real processes: what the commands of `holdfast workflow` do."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from workflow.flows import WAIT_S, Here


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Here]:
    with Here(tmp_path) as here:
        yield here


def test_a_task_that_is_rescheduled_goes_on_from_its_checkpoint_on_another_node(here: Here) -> None:
    path = here.file("""
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
                  [ -f {{input:0}}/steps ] && cp {{input:0}}/steps /tmp/models/steps
                  for i in 1 2 3; do
                    echo "$HOLDFAST_ATTEMPT on $HOLDFAST_NODE at {{host:worker}}" >> /tmp/models/steps.part
                    cat /tmp/models/steps.part >> /tmp/models/steps
                    rm /tmp/models/steps.part
                    sleep 0.1
                  done
                  [ $HOLDFAST_ATTEMPT = 2 ] || exec sleep 300
            - name: worker
              command: [bash, -c]
              args: ["[ $HOLDFAST_ATTEMPT = 1 ] || exec sleep 300; until [ -e OUT/go ]; do sleep 0.05; done; exit 3"]
              exitActions: {RESCHEDULE: 3}
    """)
    runner = here.start("submit", str(path), "--nodes", "3")
    here.until((here.folder / "up" / "models" / "steps").exists)
    (here.outside / "go").touch()
    out, err = runner.communicate(timeout=WAIT_S)
    assert runner.returncode == 0, out + err
    assert "worker waiting on node-2, attempt 1: rescheduled: exit code 3" in out
    assert "train-1: completed; 2 completed; 1 reschedule" in out
    status = here.status()
    assert status["tasks"]["worker"]["node"] == "node-3" and status["tasks"]["master"]["node"] == "node-1"
    assert [status["tasks"][name]["attempt"] for name in ("master", "worker")] == [2, 2]
    assert "node-2" in status["nodes_set_aside"] and status["exit_code"] == 0
    steps = (here.folder / "up" / "models" / "steps").read_text().splitlines()
    first = [line for line in steps if line.startswith("1 on node-1 at 127.1.0.3")]
    assert 1 <= len(first) <= 3 and steps[len(first) :] == ["2 on node-1 at 127.1.0.3"] * 3
    assert not (Path("/tmp") / "marker").exists()


def test_who_is_about_to_say_that_it_is_to_blame_is_waited_for(here: Here) -> None:
    path = here.file("""
        workflow:
          name: train
          groups:
          - name: g
            ignoreNonleadStatus: false
            tasks:
            - name: master
              lead: true
              command: [bash, -c]
              args: ["[ $HOLDFAST_ATTEMPT = 1 ] || exit 0; echo -n elsewhere > $HOLDFAST_VERDICT; exit 3"]
              exitActions: {RESCHEDULE: 3}
            - name: worker
              command: [bash, -c]
              args: ["[ $HOLDFAST_ATTEMPT = 1 ] || exit 0; until [ -e OUT/go ]; do sleep 0.05; done;
                      echo -n here > $HOLDFAST_VERDICT; exit 3"]
              exitActions: {RESCHEDULE: 3}
    """)
    runner = here.start("submit", str(path), "--nodes", "3")
    made = here.folder / "workflows" / "train-1" / "standing.json"
    here.until(lambda: made.exists() and here.states("train-1")["worker"] == "stopping")
    (here.outside / "go").touch()
    out, err = runner.communicate(timeout=WAIT_S)
    assert runner.returncode == 0, out + err
    assert "worker stopping on node-2, attempt 1: begins anew with master" in out
    assert list(here.status()["nodes_set_aside"]) == ["node-2"]


def test_exit_codes_and_logs(here: Here) -> None:
    path = here.file("""
        workflow:
          name: w
          tasks:
          - {name: good, command: [bash, -c], args: ["echo said; echo wrong >&2; exit 15"], exitActions: {COMPLETE: 15}}
          - {name: bad, command: [bash, -c], args: ["exit 7"]}
          - {name: after, command: ["true"], inputs: [{task: bad}]}
    """)
    code, out, _ = here.run("submit", str(path))
    assert code == 7 and "1 completed" in out and "2 failed" in out
    assert here.run("logs", "w-1", "good") == (0, "said\n", "wrong\n")
    code, _, err = here.run("logs", "w-1", "nobody")
    assert code == 1 and err == "holdfast workflow: w-1 has no task 'nobody': good, bad, after\n"
    assert here.run("ls")[1].startswith("w-1: failed; ")


def test_outputs_are_inputs_of_others(here: Here) -> None:
    path = here.file("""
        workflow:
          name: w
          tasks:
          - {name: one, command: [bash, -c], args: ["echo hello > {{output}}/a"], outputs: [{url: UP/out}]}
          - name: two
            command: [bash, -c, "cat {{input:one}}/a {{input:1}}/a"]
            inputs: [{task: one}, {url: UP/out}]
    """)
    code, out, err = here.run("submit", str(path))
    assert code == 0, out + err
    assert here.run("logs", "w-1", "two")[1] == "hello\nhello\n"


SLEEPS = """
    workflow:
      name: w
      tasks:
      - name: a
        command: [bash, -c]
        args: ["echo begun $HOLDFAST_ATTEMPT $$ >> {SAID}; setsid sleep 300 & sleep 2; echo done >> {SAID}"]
"""


def test_a_runner_that_is_killed_is_started_again_and_nothing_runs_twice(here: Here) -> None:
    path = here.file(SLEEPS.replace("{SAID}", str(here.said)))
    runner = here.start("submit", str(path))
    here.until("begun 1")
    here.kill(runner)
    status = here.status()
    assert status["runner"] is None and status["tasks"]["a"]["state"] == "running"
    assert "its runner is gone; go on with: holdfast workflow resume w-1" in here.run("status")[1]
    code, out, err = here.run("resume", "w-1")
    assert code == 0, out + err
    said = here.said.read_text()
    assert said.count("begun") == 1 and said.count("done") == 1
    assert here.left() == []


def test_a_task_that_ends_while_nobody_looks(here: Here) -> None:
    path = here.file(SLEEPS.replace("{SAID}", str(here.said)))
    runner = here.start("submit", str(path))
    here.until("begun 1")
    here.kill(runner)
    here.until("done")
    assert here.run("resume")[0] == 0
    assert here.status()["tasks"]["a"] | {"why": ""} == {
        "group": "a-group", "lead": True, "state": "completed", "node": "node-1", "attempt": 1, "reschedules": 0,
        "exit_code": 0, "last_checkpoint": None, "why": "",
    }  # fmt: skip


def test_cancel_with_a_runner_and_without_one(here: Here) -> None:
    path = here.file(SLEEPS.replace("{SAID}", str(here.said)).replace("sleep 2", "sleep 200"))
    runner = here.start("submit", str(path))
    here.until("begun 1")
    code, out, _ = here.run("cancel", "--json")
    assert code == 0 and json.loads(out)["state"] == "canceled"
    assert runner.wait(WAIT_S) == 130
    here.said.unlink()
    runner = here.start("submit", str(path))
    here.until("begun 1")
    here.kill(runner)
    assert here.run("cancel", "w-2")[0] == 0
    assert here.status("w-2")["state"] == "canceled"
    assert here.left() == []
    code, _, err = here.run("cancel", "w-2")
    assert code == 1 and err == "holdfast workflow: w-2 is over\n"


def test_two_runners_of_one_workflow(here: Here) -> None:
    path = here.file(SLEEPS.replace("{SAID}", str(here.said)).replace("sleep 2", "sleep 200"))
    runner = here.start("submit", str(path))
    here.until("begun 1")
    code, _, err = here.run("resume", "w-1")
    assert code == 1 and err == f"holdfast workflow: w-1 has a runner, process {runner.pid}\n"
    runner.terminate()
    assert runner.wait(WAIT_S) == 130


def test_an_upload_target_that_fails_for_a_while(here: Here) -> None:
    """It is retried and told of, and training goes on; the last upload waits for it."""
    (here.folder / "up").write_text("a file where the folder should be\n")
    path = here.file(
        """
        workflow:
          name: w
          tasks:
          - name: a
            command: [bash, -c]
            args: ["mkdir -p /tmp/m; echo x > /tmp/m/f; sleep 1.5"]
            checkpoint: [{path: /tmp/m, url: UP, frequency: 100ms}]
    """
    )
    runner = here.start("submit", str(path))
    assert runner.stderr is not None
    told = runner.stderr.readline()
    (here.folder / "up").unlink()
    out, err = runner.communicate(timeout=WAIT_S)
    assert runner.returncode == 0, out + err
    assert told.startswith("holdfast: a: /tmp/m could not be uploaded, and is tried again: ")
    assert (here.folder / "up" / "m" / "f").read_text() == "x\n"


def test_what_is_refused_before_anything_starts(here: Here) -> None:
    path = here.file(
        "workflow:\n  name: w\n  tasks:\n  - {name: a, command: [x], resource: big}\n  resources: {big: {gpu: 99}}\n"
    )
    code, _, err = here.run("submit", str(path))
    assert code == 2
    assert err == f"holdfast workflow: {path}:4: a wants 99 GPUs, and no node has more than 0\n"
    path = here.file("workflow:\n  name: w\n  task: []\n")
    for command in ("submit", "validate"):
        code, _, err = here.run(command, str(path))
        assert code == 2 and f"{path}:3: workflow: unknown key 'task'" in err
    code, _, err = here.run("submit", str(path), "--set", "x")
    assert code == 2 and "--set x: NAME=VALUE is meant" in err
    assert not (here.folder / "workflows").exists()


def test_a_dry_run_runs_nothing(here: Here) -> None:
    path = here.file("""
        workflow:
          name: w
          tasks:
          - {name: a, command: ["{{ what }}", "{{output}}"]}
        default-values:
          what: "false"
    """)
    code, out, _ = here.run("submit", str(path), "--dry-run", "--set", "what=true")
    assert code == 0 and 'command: ["true", "{{output}}"]' in out
    assert here.run("validate", str(path))[1].endswith("w is well: 1 groups, 1 tasks\n")
    assert not (here.folder / "workflows").exists()


def test_a_task_that_cannot_be_started(here: Here) -> None:
    """It fails, and not the runner: the other one completes."""
    path = here.file("""
        workflow:
          name: w
          tasks:
          - {name: a, command: [echo, "{{ 'x' * 200000 }}"], maxReschedules: 0}
          - {name: b, command: ["true"]}
    """)
    code, out, err = here.run("submit", str(path))
    assert code == 1 and err == ""
    assert "a failed on node-1, attempt 1: it could not be started: [Errno 7] Argument list too long" in out
    assert here.states() == {"a": "failed", "b": "completed"}


def test_a_checkpoint_that_was_there_before_is_no_progress(here: Here) -> None:
    path = here.file("""
        workflow:
          name: w
          tasks:
          - name: a
            command: [bash, -c, "mkdir /tmp/m; cp {{input:0}}/x /tmp/m || echo new > /tmp/m/x; exit 3"]
            inputs: [{url: UP/m}]
            checkpoint: [{path: /tmp/m, url: UP, frequency: 1h}]
            exitActions: {RESCHEDULE: 3}
            maxReschedules: 1
    """)
    code, out, _ = here.run("submit", str(path), "--nodes", "2")
    assert code == 3 and "attempt 2: exit code 3, after 1 reschedule without progress" in out


def test_who_interrupts_twice_does_not_wait(here: Here) -> None:
    os.mkfifo(here.outside / "end")
    path = here.file("""
        workflow:
          name: w
          tasks:
          - name: a
            command: [bash, -c]
            args: ["trap 'echo told >> SAID; read x < OUT/end; exit 0' TERM; echo set >> SAID; sleep 300 & wait"]
    """)
    runner = here.start("submit", str(path))
    here.until("set")
    runner.send_signal(signal.SIGINT)
    here.until("told")
    runner.send_signal(signal.SIGINT)
    _, err = runner.communicate(timeout=WAIT_S)
    assert runner.returncode == 130
    resume = "holdfast workflow resume w-1"
    assert err == f"holdfast workflow: w-1 is left as it is, some of it still ending; see to that with: {resume}\n"
    assert here.states() == {"a": "stopping"}
    resumed = here.start("resume", "--json")
    (here.outside / "end").write_text("now\n")
    out, err = resumed.communicate(timeout=WAIT_S)
    assert resumed.returncode == 130, err
    assert json.loads(out)["state"] == "canceled" and here.told() == "set\ntold\n"


def test_a_runner_that_cannot_write_down_what_it_does(here: Here) -> None:
    """It does nothing that it could not write down."""
    os.mkfifo(here.outside / "end")
    path = here.file("""
        workflow:
          name: w
          tasks:
          - {name: a, command: [bash, -c, "echo begins a >> SAID; read x < OUT/end"]}
          - {name: b, command: [bash, -c, "echo begins b >> SAID"], inputs: [{task: a}]}
    """)
    runner = here.start("submit", str(path))
    here.until("begins a")
    full = here.folder / "workflows" / "w-1" / "standing.part"
    full.mkdir()
    (here.outside / "end").write_text("now\n")
    _, err = runner.communicate(timeout=WAIT_S)
    assert runner.returncode == 1
    assert err.endswith(f"Is a directory: '{full}'; the tasks go on without a runner: holdfast workflow resume w-1\n")
    full.rmdir()
    assert here.run("resume")[0] == 0
    assert here.told() == "begins a\nbegins b\n"
