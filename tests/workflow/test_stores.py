"""Workflows with a bucket: that is slow, that is down for a while, and while runners and tasks are killed."""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from workflow.flows import WAIT_S, Here

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "checkpoint"))
import s3server
from s3server import S3


@pytest.fixture
def s3() -> Iterator[S3]:
    with s3server.bucket() as s3:
        yield s3


@pytest.fixture
def here(tmp_path: Path, s3: S3) -> Iterator[Here]:
    with Here(tmp_path) as here:
        here.env |= s3.environment
        here.url = s3.url
        yield here


class Gate:
    """Holds requests to the store, the first of those that are meant, until it is opened."""

    def __init__(self, s3: S3, meant: str) -> None:
        self._s3, self._meant = s3, re.compile(meant)
        self._open = threading.Event()
        self._answer = ""
        self.held = threading.Event()
        s3.proxy.choose = self._choose

    def _choose(self, number: int, request: str, headers: dict[str, str]) -> str:
        if not self._meant.search(request):
            return ""
        self.held.set()
        assert self._open.wait(WAIT_S)
        return self._answer

    def open(self, answer: str = "") -> None:
        """With an answer of s3server.FAILURES: what was held does not come through."""
        self._answer = answer
        self._s3.proxy.choose = lambda number, request, headers: ""
        self._open.set()


def test_inputs_checkpoints_and_outputs_in_a_bucket(here: Here, s3: S3) -> None:
    s3.ask("PUT", "some/run/data/words", content=b"one two\n")
    path = here.file("""
        workflow:
          name: w
          tasks:
          - name: a
            command: [bash, /tmp/run.sh]
            inputs: [{url: UP/data}, {url: UP/m}]
            outputs: [{url: UP/out}]
            checkpoint: [{path: /tmp/m, url: UP, frequency: 100ms}]
            exitActions: {RESCHEDULE: 3}
            files:
            - path: /tmp/run.sh
              contents: |
                mkdir /tmp/m
                cat {{input:0}}/words {{input:1}}/steps 2>/dev/null > /tmp/m/steps
                [ $HOLDFAST_ATTEMPT = 2 ] || exit 3
                cp /tmp/m/steps {{output}}/all
          - name: b
            command: [bash, -c, "cat {{input:a}}/all {{input:1}}/all"]
            inputs: [{task: a}, {url: UP/out, regex: "al+"}]
    """)
    code, out, err = here.run("submit", str(path), "--nodes", "2")
    assert code == 0, out + err
    assert here.run("logs", "w-1", "b")[1] == "one two\n" * 4
    assert s3.content("m/steps") == s3.content("out/all") == b"one two\n" * 2
    task = here.status()["tasks"]["a"]
    assert (task["attempt"], task["reschedules"]) == (2, 1) and task["last_checkpoint"]


TRAINS = """
    workflow:
      name: w
      tasks:
      - name: a
        command: [bash, -c]
        args: ["mkdir /tmp/m; echo 0 > /tmp/m/step; read x < OUT/go;
                for i in $(seq STEPS); do echo $i > /tmp/m/step; echo step >> SAID; sleep 0.1; done"]
        checkpoint: [{path: /tmp/m, url: UP, frequency: 100ms}]
        maxReschedules: 0
"""


def run_with_store_down(here: Here, s3: S3, for_s: float, train_s: float) -> None:
    """It is told once, nobody is disturbed, and when the store is back, all arrives."""
    os.mkfifo(here.outside / "go")
    runner = here.start("submit", str(here.file(TRAINS.replace("STEPS", f"{train_s * 10:.0f}"))))
    here.until(lambda: s3.content("m/step") is not None)
    s3.fail("503", 1, 1_000_000)
    down_s = time.monotonic()
    (here.outside / "go").write_text("on\n")
    here.until(lambda: here.told().count("step") >= train_s * 10)
    s3_is_back = threading.Timer(max(0.1, down_s + for_s - time.monotonic()), s3.forget)
    s3_is_back.start()
    out, err = runner.communicate(timeout=for_s + 2 * WAIT_S)
    s3_is_back.join()
    assert runner.returncode == 0, out + err
    assert s3.content("m/step") == b"%d\n" % (train_s * 10)
    told = err.splitlines()
    assert len(told) == 2, err
    assert re.match(r"holdfast: a: /tmp/m could not be uploaded, and is tried again: .*503", told[0])
    assert re.match(r"holdfast: a: /tmp/m could not be uploaded; after \d+ s it is uploaded$", told[1])
    assert out.count("running") == 1 and "0 reschedules" in out


@pytest.mark.long
def test_a_file_that_is_being_written_says_nothing_of_a_store(here: Here, s3: S3) -> None:
    """It is left for later, and whether the store is back is not known by that."""
    waits = [f"until [ -e OUT/go{number} ]; do sleep 0.05; done; " for number in range(4)]
    script = f"{waits[0]}echo 1 > /tmp/m/step; {waits[1]}exec 3>>/tmp/m/step; {waits[2]}exec 3>&-; {waits[3]}"
    text = TRAINS[: TRAINS.index("read x")] + script + TRAINS[TRAINS.index('"]') :]
    runner = here.start("submit", str(here.file(text)))
    here.until(lambda: s3.content("m/step") is not None)
    s3.fail("503", 1, 1_000_000)
    for number in range(3):
        (here.outside / f"go{number}").touch()
        time.sleep(3.0)  # for a try or two
    s3.forget()
    (here.outside / "go3").touch()
    out, err = runner.communicate(timeout=WAIT_S)
    assert runner.returncode == 0, out + err
    assert len(err.splitlines()) == 2 and "; after" in err.splitlines()[1], err


def test_a_store_that_is_down_for_a_while(here: Here, s3: S3) -> None:
    run_with_store_down(here, s3, 3.0, 1.5)


@pytest.mark.long
def test_a_store_that_is_down_for_a_minute(here: Here, s3: S3) -> None:
    run_with_store_down(here, s3, 61.0, 3.0)


def test_a_store_that_is_down_while_a_task_is_prepared(here: Here, s3: S3) -> None:
    """It waits for it; another node would do no better."""
    s3.ask("PUT", "some/run/data/x", content=b"x\n")
    s3.fail("503", 1, 1_000_000)
    path = here.file("""
        workflow:
          name: w
          tasks:
          - {name: a, command: [bash, -c, "cat {{input:0}}/x"], inputs: [{url: UP/data}], maxReschedules: 0}
    """)
    runner = here.start("submit", str(path))
    assert runner.stderr is not None
    assert re.match("holdfast: a: s3://.*/data could not be fetched, and is tried again: ", runner.stderr.readline())
    s3.forget()
    out, err = runner.communicate(timeout=WAIT_S)
    assert runner.returncode == 0, out + err
    assert here.run("logs", "w-1", "a")[1] == "x\n"


def test_a_task_that_is_killed_in_the_middle_of_an_upload(here: Here, s3: S3) -> None:
    """What is under way comes to its end, and then what the task has left; no two at once."""
    os.mkfifo(here.outside / "go")
    gate = Gate(s3, "PUT .*/m/f")
    path = here.file("""
        workflow:
          name: w
          tasks:
          - name: a
            command: [bash, -c]
            args: ["mkdir /tmp/m; echo 1 > /tmp/m/f; read x < OUT/go; echo 2 > /tmp/m/f; echo 3 > /tmp/m/g; kill -9 $$"]
            checkpoint: [{path: /tmp/m, url: UP, frequency: 100ms}]
            exitActions: {COMPLETE: 137}
    """)
    runner = here.start("submit", str(path))
    assert gate.held.wait(WAIT_S)
    (here.outside / "go").write_text("on\n")
    here.until(lambda: (here.folder / "workflows/w-1/tasks/a/1/exit").exists())
    assert here.states() == {"a": "running"}
    gate.open()
    out, err = runner.communicate(timeout=WAIT_S)
    assert runner.returncode == 0, out + err
    assert err == ""
    assert (s3.content("m/f"), s3.content("m/g")) == (b"2\n", b"3\n")
    puts = [request.rpartition("/")[2] for request in s3.proxy.requests if request.startswith("PUT ")]
    assert puts.count("f") == 2 and puts.count("g") == 1


STATES = """
    workflow:
      name: w
      groups:
      - name: g
        ignoreNonleadStatus: false
        tasks:
        - name: a
          lead: true
          command: [bash, -c]
          args: ["echo begins a $HOLDFAST_ATTEMPT >> SAID; mkdir /tmp/m; echo $HOLDFAST_ATTEMPT > /tmp/m/at;
                  trap 'echo told >> SAID; read x < OUT/end; exit 143' TERM;
                  [ $HOLDFAST_ATTEMPT = 2 ] || { sleep 300 & wait; }; read x < OUT/done"]
          checkpoint: [{path: /tmp/m, url: UP, frequency: 1h}]
        - name: b
          command: [bash, -c]
          args: ["echo begins b $HOLDFAST_ATTEMPT >> SAID; [ $HOLDFAST_ATTEMPT = 2 ] || { read x < OUT/fail; exit 3; };
                  echo b has $(cat {{input:0}}/at) >> SAID; echo > OUT/done; sleep 300"]
          inputs: [{url: UP/m}]
          exitActions: {RESCHEDULE: 3}
      - name: h
        tasks: [{name: c, command: [bash, -c, "echo begins c $HOLDFAST_ATTEMPT >> SAID"], inputs: [{task: a}]}]
"""


def test_a_runner_that_is_killed_in_each_state(here: Here, s3: S3) -> None:
    for name in ("end", "fail", "done"):
        os.mkfifo(here.outside / name)
    gate = Gate(s3, "GET .*prefix=some")  # b's inputs
    runner = here.start("submit", str(here.file(STATES)), "--nodes", "3")
    here.until(lambda: gate.held.is_set() and here.states() == {"a": "ready", "b": "preparing", "c": "waiting"})
    here.kill(runner)
    gate.open("lost")

    runner = here.start("resume")
    here.until("begins a 1")
    here.until("begins b 1")
    here.kill(runner)
    assert here.states() == {"a": "running", "b": "running", "c": "waiting"}

    runner = here.start("resume")
    (here.outside / "fail").write_text("now\n")
    here.until("told")
    here.until(lambda: here.states() == {"a": "stopping", "b": "waiting", "c": "waiting"})
    here.kill(runner)

    (here.outside / "end").write_text("now\n")
    here.until(lambda: (here.folder / "workflows/w-1/tasks/a/1/exit").exists())  # between its end and its upload
    gate = Gate(s3, "PUT .*/m/at")
    runner = here.start("resume")
    assert gate.held.wait(WAIT_S)  # in the middle of its last upload
    here.kill(runner)
    gate.open("lost")

    code, out, err = here.run("resume")
    assert code == 0, out + err
    said = here.told()
    begun = Counter(re.findall(r"begins (. \d)", said))
    assert begun == {"a 1": 1, "b 1": 1, "a 2": 1, "b 2": 1, "c 1": 1}, said
    assert said.count("told") == 1 and "b has 1\n" in said
    assert s3.content("m/at") == b"2\n"
    assert here.left() == []
