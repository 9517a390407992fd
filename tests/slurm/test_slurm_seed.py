"""The seed's scenario on a real Slurm: the same weights in the end."""

from __future__ import annotations

import os

import pytest

from slurm.workflows import Workflows
from workflow import scenario


@pytest.mark.parametrize("launcher", ["holdfast", pytest.param("torchrun", marks=pytest.mark.long)])
def test_a_backend_error_on_one_of_three_nodes(here: Workflows, launcher: str) -> None:
    """There is no fourth: the bad node is taken again, because it is better than none."""
    steps = here.outside / "steps"
    runner = here.start(
        *("submit", str(scenario.HERE / "seed.yaml"), "--backend", "slurm"),
        *scenario.values(here.folder, steps, launcher),
    )
    code, said = here.end_of(runner)
    assert code == 0, said + here.why()
    scenario.check(here.folder, steps, scenario.undisturbed(here.folder))
    status = here.status()
    assert [task["attempt"] for task in status["tasks"].values()] == [2, 2, 2]
    if launcher == "holdfast":
        assert list(status["nodes_set_aside"]) == ["n2"]
    exit_s = os.stat(next(here.home.glob("*/tasks/worker_1/1/ended.json"))).st_mtime
    begun_s = min(float(line.split()[3]) for line in steps.read_text().splitlines() if line.startswith("2 "))
    print(f"from the failing exit to the first new step: {begun_s - exit_s:.2f} s")
