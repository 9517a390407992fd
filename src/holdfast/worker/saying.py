"""A line of ours, on a rank's stderr."""

from __future__ import annotations

import sys


def say(text: str) -> None:
    """On a terminal it takes the place of the line of progress, which comes again."""
    clear = "\r\x1b[K" if sys.stderr.isatty() else ""
    print(f"{clear}holdfast: {text}", file=sys.stderr, flush=True)
