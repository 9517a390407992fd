"""How far training is, on one line."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from typing import TextIO

LIVE_S = 0.2  # between two looks of a person at a terminal
PLAIN_S = 10.0  # between two lines of a log


class Progress:
    """To be told of every step. Writes seldom, and asks for the loss only then: on a GPU that waits for the step."""

    def __init__(self, restarts: int, out: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._out = out if out is not None else sys.stderr
        self._live = self._out.isatty()
        self._every_s = LIVE_S if self._live else PLAIN_S
        self._clock = clock
        self._restarts = restarts
        self._since_s: float | None = None  # of what the rates are computed from
        self._samples = self._steps = 0
        self._shown = False

    def step(self, step: int, epoch: str, loss: Callable[[], float | None], samples: int, left: int | None) -> None:
        """`left`: steps to the end, if that is known."""
        now_s = self._clock()
        if self._since_s is None:  # the first step of a world is not typical
            self._since_s = now_s
            return
        self._samples += samples
        self._steps += 1
        if now_s - self._since_s < self._every_s and left != 0:
            return
        took_s = max(1e-9, now_s - self._since_s)
        parts = [f"step {step:,}", f"epoch {epoch}"]
        if (value := loss()) is not None:
            parts.append(f"loss {value:.4g}")
        parts.append(f"{self._samples / took_s:,.0f} samples/s")
        if left:
            parts.append(f"{told_s(left * took_s / self._steps)} left")
        if self._restarts:
            parts.append(f"{self._restarts} restart{'s' if self._restarts > 1 else ''}")
        self._write("   ".join(parts))
        self._since_s, self._samples, self._steps = now_s, 0, 0

    def end(self) -> None:
        if self._live and self._shown:
            self._out.write("\n")
            self._out.flush()
            self._shown = False

    def _write(self, line: str) -> None:
        self._shown = True
        self._out.write(f"\r\x1b[K{line}" if self._live else f"holdfast: {line}\n")
        self._out.flush()


def told_s(seconds: float) -> str:
    """As a person would say it."""
    if seconds < 90:
        return f"{math.ceil(seconds)} s"
    if seconds < 90 * 60:
        return f"{round(seconds / 60)} min"
    if seconds < 36 * 3600:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 86400:.1f} days"
