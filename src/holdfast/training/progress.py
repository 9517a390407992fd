"""How far training is, on one line."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from typing import TextIO

LIVE_S = 0.2  # between two looks of a person at a terminal
PLAIN_S = 10.0  # between two lines of a log
TOLD_S = 1.0  # between two lines of the record, at first; then a tenth of the time so far, and at last as a log

# Of a step: its number, the epoch, the loss, samples a second, and the steps to the end, if that is known.
Tell = Callable[[int, str, float | None, float, int | None], None]


class _Window:
    """The steps since something was last written somewhere."""

    def __init__(self, now_s: float) -> None:
        self.began_s = self.since_s = now_s
        self.samples = self.steps = 0

    def again(self, now_s: float) -> None:
        self.since_s, self.samples, self.steps = now_s, 0, 0


class Progress:
    """To be told of every step. Writes seldom, and asks for the loss only then: on a GPU that waits for the step."""

    def __init__(
        self,
        restarts: int,
        out: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
        tell: Tell | None = None,
        quiet: bool = False,
    ) -> None:
        self._out = out if out is not None else sys.stderr
        self._live = self._out.isatty()
        self._every_s = LIVE_S if self._live else PLAIN_S
        self._quiet = quiet
        self._clock = clock
        self._tell = tell
        self._restarts = restarts
        self._windows: tuple[_Window, _Window] | None = None  # of what is shown, and of what is told
        self._shown = False

    def step(self, step: int, epoch: str, loss: Callable[[], float | None], samples: int, left: int | None) -> None:
        """`left`: steps to the end, if that is known."""
        now_s = self._clock()
        if self._windows is None:  # the first step of a world is not typical
            self._windows = (_Window(now_s), _Window(now_s))
            return
        shown, told = self._windows
        for window in self._windows:
            window.samples += samples
            window.steps += 1
        told_every_s = min(PLAIN_S, max(TOLD_S, (now_s - told.began_s) / 10))
        tells = self._tell is not None and (now_s - told.since_s >= told_every_s or left == 0)
        shows = not self._quiet and (now_s - shown.since_s >= self._every_s or left == 0)
        if not tells and not shows:
            return
        value = loss()
        if tells and self._tell is not None:
            self._tell(step, epoch, value, told.samples / max(1e-9, now_s - told.since_s), left)
            told.again(now_s)
        if shows:
            self._show(step, epoch, value, shown, max(1e-9, now_s - shown.since_s), left)
            shown.again(now_s)

    def _show(
        self, step: int, epoch: str, loss: float | None, window: _Window, took_s: float, left: int | None
    ) -> None:
        parts = [f"step {step:,}", f"epoch {epoch}"]
        if loss is not None:
            parts.append(f"loss {loss:.4g}")
        parts.append(f"{window.samples / took_s:,.0f} samples/s")
        if left:
            parts.append(f"{told_s(left * took_s / window.steps)} left")
        if self._restarts:
            parts.append(f"{self._restarts} restart{'s' if self._restarts > 1 else ''}")
        self._write("   ".join(parts))

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
