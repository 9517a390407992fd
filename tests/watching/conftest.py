"""Fixtures for what a terminal shows."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from holdfast.agent import doorbell
from holdfast.observe import screen_job
from watching.jobs_on_disk import NOW_S


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """No job runs, none has left anything in our own place for temporary files, and the clock stands still."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setattr(doorbell, "find", list)
    monkeypatch.setattr(screen_job, "unix_s", lambda: NOW_S)
    return temporary
