"""Whether a rank that is to leave its world gets out of it by itself: its training's thread, as another one sees it."""

from __future__ import annotations

import sys
import threading
import time
from typing import NamedTuple

import torch

from holdfast import linux

IDLE_S = 0.003  # what a thread that does nothing does at most from one look at it to the next, which is 50 ms
IDLE = 6  # looks in a row at one that does nothing, after which it is taken for stuck
LOST = 2  # the same where it waits in a collective: nobody is left who could end that
BUSY = 60  # looks in all, also at one that does something
COLLECTIVES = tuple(f"{torch.__path__[0]}/{part}/" for part in ("distributed", "autograd", "nn/parallel"))


class Look(NamedTuple):
    late: bool  # it is time to try what else may let it out
    stuck: bool


class Watch:
    """Over the thread that makes it. What that one does is counted from `begin` on."""

    def __init__(self) -> None:
        self._ident, self._thread = threading.get_ident(), threading.get_native_id()
        self._clock = time.pthread_getcpuclockid(self._ident)
        self.begin()

    def begin(self) -> None:
        self._looks = self._idle = 0
        self._awake_s = self._now_s()

    def look(self, collectives: bool = True) -> Look:
        """Without `collectives`, one that it waits in may yet come to its end."""
        before_s, self._awake_s = self._awake_s, self._now_s()
        self._looks += 1
        # One that waits for its GPU does nothing, either, and gets out when that is done.
        idle = self._awake_s - before_s < IDLE_S and not torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        idle = idle and linux.state(self._thread) not in ("R", "D")  # it waits for a core now, or for a disk
        self._idle = self._idle + 1 if idle else 0
        enough = LOST if collectives and self._is_in_collective() else IDLE
        late = enough // 2 in (self._idle, self._looks)  # by its looks alone, if it may wait for its GPU
        return Look(late, self._idle >= enough or self._looks >= BUSY)

    def _now_s(self) -> float:
        """For so long it has had something to do: on a busy machine it may get no core for it."""
        return time.clock_gettime(self._clock) + linux.waited_s(self._thread)

    def _is_in_collective(self) -> bool:
        frame = sys._current_frames().get(self._ident)
        return frame is not None and frame.f_code.co_filename.startswith(COLLECTIVES)
