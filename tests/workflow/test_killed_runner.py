"""The runner is killed, at every step of what it does, and started again: nothing runs twice, nothing is lost."""

from __future__ import annotations

import random
import re
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from workflow.flows import WAIT_S, Here


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Here]:
    with Here(tmp_path) as here:
        yield here


FLOW = """
    workflow:
      name: w
      groups:
      - name: g
        ignoreNonleadStatus: false
        tasks:
        - name: lead
          lead: true
          command: [bash, /tmp/run.sh]
          inputs: [{url: UP/m}]
          checkpoint: [{path: /tmp/m, url: UP, frequency: 100ms}]
          files:
          - path: /tmp/run.sh
            contents: |
              echo begins $HOLDFAST_TASK $HOLDFAST_ATTEMPT >> SAID
              mkdir -p /tmp/m && cp {{input:0}}/* /tmp/m 2>/dev/null
              trap 'echo told > /tmp/m/told$HOLDFAST_ATTEMPT; exit 143' TERM
              echo $HOLDFAST_ATTEMPT > /tmp/m/at$HOLDFAST_ATTEMPT
              echo $HOLDFAST_ATTEMPT > {{output}}/at
              echo ready $HOLDFAST_ATTEMPT >> SAID
              if [ $HOLDFAST_ATTEMPT = 1 ]; then sleep 300 & wait; fi
              until grep -q "begins other 2" SAID; do sleep 0.05; done
        - name: other
          command: [bash, -c]
          args: ["echo begins $HOLDFAST_TASK $HOLDFAST_ATTEMPT >> SAID;
                  until grep -q ready.$HOLDFAST_ATTEMPT SAID; do sleep 0.05; done;
                  [ $HOLDFAST_ATTEMPT != 1 ] || exit 3; setsid sleep 300"]
          exitActions: {RESCHEDULE: 3}
      - name: h
        tasks:
        - name: after
          command: [bash, -c, "echo begins $HOLDFAST_TASK $HOLDFAST_ATTEMPT >> SAID; cat {{input:lead}}/at >> SAID"]
          inputs: [{task: lead}]
          outputs: [{url: UP/done}]
"""

# The runner, killed at the so-manieth of those moments at which something is about to be or has just been written,
# started or sent.
KILLED = """
import os, signal, subprocess, sys
from holdfast.cli import workflow
from holdfast.workflow import lives, local, transfers

left = int(sys.argv.pop(1))

def count():
    global left
    left -= 1
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)

def killed_around(owner, name):
    real = getattr(owner, name)
    def act(*args, **named):
        count()
        made = real(*args, **named)
        count()
        return made
    setattr(owner, name, act)

killed_around(os, "replace")
killed_around(subprocess, "Popen")
killed_around(local.Local, "do")
killed_around(lives.Life, "make")
killed_around(lives.Life, "forbid")
killed_around(transfers, "fetch")
killed_around(transfers.Upload, "_send")
killed_around(transfers.Upload, "run")
sys.exit(workflow.main(sys.argv[1:]))
"""


def run_killed(here: Here, dice: random.Random, about: int) -> int:
    """Runs it to its end, with a new runner whenever one was killed, after about so many of those moments. Returns how
    many were."""
    args: tuple[str, ...] = ("submit", str(here.file(FLOW)), "--nodes", "3")
    kills = 0
    while True:
        runner = here.start(str(1 + int(dice.expovariate(1 / about))), *args, python=("-c", KILLED))
        out, err = runner.communicate(timeout=WAIT_S)
        if runner.returncode != -signal.SIGKILL:
            assert runner.returncode == 0, out + err
            assert err == ""
            return kills
        kills += 1
        if (here.folder / "workflows" / "w-1" / "standing.json").exists():
            args = ("resume", "w-1")
        elif (here.folder / "workflows").exists():
            (here.folder / "workflows" / "w-1").rename(here.folder / f"never-{kills}")  # it never came to be


def check_all_is_well(here: Here) -> None:
    said = here.told()
    begun = Counter(re.findall(r"begins (\w+ \d+)", said))
    assert set(begun.values()) == {1}, said  # nothing ran twice
    assert begun.keys() == {"lead 1", "lead 2", "other 1", "other 2", "after 1"}
    assert said.endswith("begins after 1\n2\n")
    status = here.status()
    assert (status["state"], status["exit_code"]) == ("completed", 0)
    tasks = status["tasks"]
    assert {name: (task["state"], task["attempt"], task["reschedules"]) for name, task in tasks.items()} == {
        "lead": ("completed", 2, 0), "other": ("completed", 2, 1), "after": ("completed", 1, 0),
    }  # fmt: skip
    assert tasks["other"]["node"] != "node-2" and status["nodes_set_aside"].keys() == {"node-2"}
    kept = {path.name for path in (here.folder / "up" / "m").iterdir()} - {".holdfast-upload.json"}
    assert kept == {"at1", "told1", "at2"}, kept
    assert here.left() == []


@pytest.mark.parametrize(("private", "seed", "about"), [(True, 3, 12), (False, 1, 20)])
def test_killed_again_and_again(here: Here, private: bool, seed: int, about: int) -> None:
    if not private:
        here.without_namespaces()
    assert run_killed(here, random.Random(seed), about) >= 4
    check_all_is_well(here)


@pytest.mark.long
@pytest.mark.parametrize("private", [True, False])
@pytest.mark.parametrize("seed", range(40))
def test_killed_at_many_moments(here: Here, seed: int, private: bool) -> None:
    if not private:
        here.without_namespaces()
    run_killed(here, random.Random(seed), 8 + seed)
    check_all_is_well(here)
