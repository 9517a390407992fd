"""The seed's scenario: three nodes, an error of the backend on one, and the same weights in the end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

from ports import free_port

HERE = Path(__file__).resolve().parent / "seed"
EXAMPLES = HERE.parents[2] / "examples" / "workflow"
EPOCHS, FAIL_AT = 8, 4


def values(folder: Path, steps: Path, launcher: str) -> list[str]:
    return [
        *("--set", f"upload_location=file://{folder}/up", f"steps={steps}", f"n_epochs={EPOCHS}"),
        *(f"fail_at={FAIL_AT}", f"launcher={launcher}", f"master_port={free_port()}"),
    ]


def undisturbed(folder: Path) -> dict[str, torch.Tensor]:
    """The weights of a run of which nothing ever ends."""
    snapshot = folder / "undisturbed.pth"
    command = [
        *(sys.executable, "-m", "holdfast", "run", "--standalone", "--nproc-per-node=3", str(HERE / "seed.py")),
        *(f"--total_epochs={EPOCHS}", f"--snapshot_path={snapshot}", f"--steps={folder}/undisturbed"),
    ]
    env = {**os.environ, "PYTHONPATH": str(EXAMPLES), "HOLDFAST_ATTEMPT": "0", "OMP_NUM_THREADS": "1"}
    subprocess.run(command, env=env, check=True, capture_output=True, timeout=100)
    return weights(snapshot)


def weights(snapshot: Path) -> dict[str, torch.Tensor]:
    kept = torch.load(snapshot, weights_only=True)
    assert kept["epochs_run"] == EPOCHS
    state: dict[str, torch.Tensor] = kept["model"]
    return state


def check(folder: Path, steps: Path, expected: dict[str, torch.Tensor]) -> None:
    """Epochs were done by the first life up to the error, then by the second from its last checkpoint on."""
    rows = [line.split() for line in steps.read_text().splitlines()]
    first = [int(epoch) for attempt, rank, epoch, _ in rows if attempt == "1" and rank == "0"]
    second = [int(epoch) for attempt, rank, epoch, _ in rows if attempt == "2" and rank == "0"]
    assert first == list(range(1, FAIL_AT + 1)), "it failed where it was to"
    assert second == list(range(FAIL_AT + 1, EPOCHS + 1)), "the last upload came after the last epoch"
    found = weights(folder / "up" / "models" / "snapshot.pth")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
