"""A step of many batches that is interrupted goes on with the batch that comes next."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from harness import Job

ACCUMULATES = Path(__file__).parent / "scripts" / "accumulates.py"


def trained(folder: Path, kind: str, how: str) -> tuple[list[dict[str, Any]], str]:
    """Which samples each step has used, and what was said."""
    folder.mkdir()
    job = Job(folder)
    try:
        assert job.run(ACCUMULATES, str(folder), kind, how, max_restarts=1) == 0, job.err
        assert len(job.events("incident.opened")) == (how != "lives")
    finally:
        job.end()
    notes = [json.loads(line) for path in folder.glob("used.*.jsonl") for line in path.read_text().splitlines()]
    return notes, job.err


@pytest.mark.parametrize("how", ["dies", pytest.param("waits", marks=pytest.mark.long)])
@pytest.mark.parametrize("kind", ["exact", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("ddp", "fsdp"))])
def test_an_interrupted_step_goes_on_where_it_was(tmp_path: Path, kind: str, how: str) -> None:
    """`waits`: whoever does not die does no more than was kept."""
    right, found = tmp_path / "right", tmp_path / "found"
    trained(right, kind, "lives")
    notes, said = trained(found, kind, how)
    assert "of the 128 samples of step" in said
    kept = {(note["step"], note["kept"]) for note in notes if "kept" in note}
    [(step, done)] = kept
    used = [Counter[int](), Counter[int]()]
    for note in notes:
        if note["step"] == step and "used" in note:
            used[note["of"]].update(note["used"])
    # What was kept is not done again, and nothing is left out.
    assert used[1].total() == 128 - done
    if how == "waits":
        assert used[0].total() == done and set((used[0] + used[1]).values()) == {1}
    if kind == "exact":
        assert (found / "digest").read_text() == (right / "digest").read_text()
    else:
        for one, other in zip(*(torch.load(folder / "end.pt").values() for folder in (found, right)), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
