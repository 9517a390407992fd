"""Fixtures for all tests."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from harness import Job

# The same examples every time, and no limit by the clock of a machine that other tests use, too.
settings.register_profile("steady", derandomize=True, deadline=None)
settings.load_profile("steady")

# A shell without job control starts what is in the background with SIGINT ignored, and every program below inherits it.
# Then no test could interrupt anything.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Tests start about a thousand interpreters. Where containers set this, each would compile the package anew: 0.15 s.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    job = Job(tmp_path)
    yield job
    job.end()
