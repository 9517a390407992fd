"""A line of ours, on a rank's stderr."""

from __future__ import annotations

import os
import sys

QUIET = "HOLDFAST_QUIET"  # 1: only what goes wrong is shown


def is_quiet() -> bool:
    return os.environ.get(QUIET) == "1"


def say(text: str) -> None:
    if not is_quiet():
        complain(text)


def complain(text: str) -> None:
    """What goes wrong. On a terminal it takes the place of the line of progress, which comes again."""
    clear = "\r\x1b[K" if sys.stderr.isatty() else ""
    print(f"{clear}holdfast: {text}", file=sys.stderr, flush=True)
