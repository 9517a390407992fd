"""Whose fault it was: what `holdfast run` leaves for the workflow that it is a task of.

All nodes of a job end with the same exit code. A workflow sets a node aside on which a task failed, and not those that
only failed along with it.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

VARIABLE = "HOLDFAST_VERDICT"  # names a file
_HERE, _ELSEWHERE = "here", "elsewhere"


def leave(here: bool) -> None:
    if path := os.environ.get(VARIABLE):
        with contextlib.suppress(OSError):
            Path(path).write_text(_HERE if here else _ELSEWHERE)


def read(path: Path) -> bool | None:
    """Whether it happened here. None: nobody has said so."""
    try:
        return path.read_text() == _HERE
    except OSError:
        return None
