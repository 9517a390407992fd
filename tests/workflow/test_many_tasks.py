"""Many tasks: the runner costs nothing while they sleep, and an end is seen at once. bench/workflows.py has figures."""

from __future__ import annotations

import os
import time
from pathlib import Path

from workflow.flows import Here

TASKS = 60
SLEEP_S = 2.0

FLOW = """
    workflow:
      name: w
      tasks:
      {% for at in range(n) %}
      - name: t{{at}}
        command: [sh, -c, "echo >> SAID; exec cat OUT/{{at}}"]
        checkpoint: [{path: /tmp/m, url: UP/{{at}}, frequency: 5s}]
      {% endfor %}
    default-values: {n: 1}
"""


def test_tasks_that_sleep_cost_nothing_and_an_end_is_seen_at_once(tmp_path: Path) -> None:
    with Here(tmp_path) as here:
        for at in range(TASKS):
            os.mkfifo(here.outside / str(at))
        runner = here.start("submit", str(here.file(FLOW)), "--set", f"n={TASKS}")
        here.until(lambda: len(here.told()) == TASKS)
        here.until(lambda: set(here.states().values()) == {"running"})
        # The best of some: this machine has other things to do, too.
        assert any(used_s(runner.pid) < 0.02 * SLEEP_S for _ in range(5))
        assert any(seen_after_s(here, at) < 0.2 for at in range(TASKS // 2))
        runner.terminate()
        assert runner.wait(40) == 130
        assert here.left() == []


def used_s(pid: int) -> float:
    before_s = cpu_s(pid)
    time.sleep(SLEEP_S)
    return cpu_s(pid) - before_s


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def seen_after_s(here: Here, at: int) -> float:
    with open(here.outside / str(at), "w"):
        ended_s = time.monotonic()
    here.until(lambda: here.states()[f"t{at}"] == "completed")
    return time.monotonic() - ended_s
