"""What is left of a run that was given no log directory."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from holdfast.agent import rundir
from holdfast.agent.rundir import KEPT, MAY_GO, RunDirectory
from holdfast.observe.find import TAIL

STEPS = """
import torch
weight = torch.nn.Parameter(torch.ones(1))
optimizer = torch.optim.SGD([weight], lr=0.1)
for _ in range(3):
    weight.grad = torch.ones(1)
    optimizer.step()
"""


def holdfast(temporary: Path, *args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "holdfast", *args]
    env = {**os.environ, "TMPDIR": str(temporary)}
    return subprocess.run(command, env=env, check=True, timeout=60, capture_output=True, text=True)


def kept_in(temporary: Path) -> set[str]:
    return {path.name for path in temporary.iterdir() if path.name.startswith("holdfast")}


@pytest.fixture
def temporary(tmp_path: Path) -> Path:
    folder = tmp_path / "tmp"
    folder.mkdir()
    return folder


def test_a_clean_run_without_a_step_leaves_nothing(tmp_path: Path, temporary: Path) -> None:
    script = tmp_path / "fine.py"
    script.write_text("")
    assert "next:" not in holdfast(temporary, "run", str(script)).stderr
    assert kept_in(temporary) == set()


def test_a_clean_run_that_trained_can_be_reported_afterwards(tmp_path: Path, temporary: Path) -> None:
    script = tmp_path / "steps.py"
    script.write_text(STEPS)
    said = holdfast(temporary, "run", str(script)).stderr
    [first] = kept_in(temporary)
    [run_dir] = (temporary / first).glob("*_*")
    assert said.splitlines()[-1] == f"holdfast: next: holdfast report {run_dir}"
    run_id = run_dir.name[:-TAIL]
    report, status = (holdfast(temporary, command, run_id).stdout for command in ("report", "status"))
    assert "succeeded" in report and "succeeded" in status and "step        3" in status
    for at in range(KEPT):
        (temporary / f"holdfast_{at}" / "run_abcdefgh").mkdir(parents=True)
        mark(temporary / f"holdfast_{at}", at)
    assert holdfast(temporary, "run", "--quiet", str(script)).stderr == ""
    kept = kept_in(temporary)
    assert len(kept) == KEPT and first in kept
    assert kept > {f"holdfast_{at}" for at in range(2, KEPT)}, "the oldest made way"


def mark(root: Path, at_s: float) -> None:
    (root / MAY_GO).touch()
    os.utime(root / MAY_GO, (at_s, at_s))


def test_nothing_makes_way_but_what_an_agent_has_marked_so(
    temporary: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setattr(rundir, "KEPT", 1)
    runs = RunDirectory(None, "job")
    coordinates = RunDirectory(None, "job")
    Path(coordinates.join("ledger") or "").touch()
    named = RunDirectory(str(temporary / "holdfast_training"), "job")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    mark(elsewhere, 0)
    (temporary / "holdfast_link").symlink_to(elsewhere)
    old = RunDirectory(None, "job")
    for ended in (coordinates, named, old):
        ended.keep_for_now()
    mark(Path(old.path or "").parent, 1)
    RunDirectory(None, "job").keep_for_now()
    assert not os.path.exists(old.path or "")
    assert all(os.path.isdir(each.path or "") for each in (runs, coordinates, named))
    assert (elsewhere / MAY_GO).exists() and len(kept_in(temporary)) == 5
