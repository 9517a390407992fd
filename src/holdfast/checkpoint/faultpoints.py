"""Named places at which a test may have this process killed: between any two effects of a save.

`HOLDFAST_FAULT=folder.fsync.before:3` ends the process, as SIGKILL would, at the third time that point is passed.
"""

from __future__ import annotations

import os
import signal

VARIABLE = "HOLDFAST_FAULT"

_wanted, _, _count = os.environ.get(VARIABLE, "").partition(":")
_left = int(_count or 1)


def passed(point: str) -> None:
    global _left
    if _wanted and point == _wanted:
        _left -= 1
        if _left <= 0:
            os.kill(os.getpid(), signal.SIGKILL)
