"""Scripts that are watched by what they say about themselves: heartbeats, sections, learned timeouts and requests."""

from __future__ import annotations

from typing import Any

import pytest

from harness import SCRIPTS, Job

WATCHED = SCRIPTS / "watched.py"
BEATS = ("--ft-initial-rank-heartbeat-timeout=3", "--ft-rank-heartbeat-timeout=1")
SECTIONS = ("--ft-rank-section-timeouts=data:1,outer:1",)
OUTSIDE = ("--ft-rank-out-of-section-timeout=1",)


def causes(job: Job) -> list[tuple[Any, ...]]:
    return [(incident["kind"], incident["rank"]) for incident in job.incidents()]


def test_placeholder() -> None: ...
