"""Named places at which a test may have this process killed: between any two effects of a save.

`HOLDFAST_FAULT=folder.fsync.before:3` ends the process, as SIGKILL would, at the third time that point is passed.
`HOLDFAST_FAULT=commit.before:1:FILE` does so in one process in all: the first that comes there makes the file.
"""

from __future__ import annotations

import os
import signal

VARIABLE = "HOLDFAST_FAULT"

_wanted, _, _rest = os.environ.get(VARIABLE, "").partition(":")
_count, _, _once = _rest.partition(":")
_left = int(_count or 1)


def passed(point: str) -> None:
    global _left
    if _wanted and point == _wanted:
        _left -= 1
        if _left <= 0 and _is_first():
            os.kill(os.getpid(), signal.SIGKILL)


def _is_first() -> bool:
    if not _once:
        return True
    try:
        os.close(os.open(_once, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True
