"""The seed's example on this machine, as it is written and with `holdfast run` in the place of torchrun."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from workflow import scenario


@pytest.mark.parametrize("launcher", ["holdfast", pytest.param("torchrun", marks=pytest.mark.long)])
def test_a_backend_error_on_one_of_three_nodes(tmp_path: Path, launcher: str) -> None:
    path = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"
    env = {**os.environ, "HOLDFAST_WORKFLOWS": str(tmp_path / "workflows"), "PATH": path}
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="holdfast-test-") as outside:
        steps = Path(outside, "steps")
        command = [sys.executable, "-m", "holdfast", "workflow", "submit", str(scenario.HERE / "seed.yaml")]
        command += ["--nodes", "4", "--json", *scenario.values(tmp_path, steps, launcher)]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=110, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        scenario.check(tmp_path, steps, scenario.undisturbed(tmp_path))
    status = json.loads(done.stdout)
    tasks = status["tasks"]
    assert [task["attempt"] for task in tasks.values()] == [2, 2, 2]
    if launcher == "holdfast":  # which knows whose fault it was
        assert list(status["nodes_set_aside"]) == ["node-2"] and tasks["worker_1"]["node"] == "node-4"
