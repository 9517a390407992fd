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
    """The steps since something was last written in one place."""

    def __init__(self, now_s: float, every_s: float) -> None:
        self.begin(now_s, every_s, 0, 0)

    def begin(self, now_s: float, every_s: float, steps: int, samples: int) -> None:
        self.since_s, self.due_s, self.steps, self.samples = now_s, now_s + every_s, steps, samples


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
        self._every_s = math.inf if quiet else LIVE_S if self._live else PLAIN_S
        self._quiet = quiet
        self._clock = clock
        self._tell = tell
        self._restarts = restarts
        self._windows: tuple[_Window, _Window] | None = None  # of what is shown, and of what is told
        self._began_s = self._now_s = 0.0
        self._due_s = -math.inf  # when something is to be written next
        self._steps = self._samples = 0  # but for the first step of a world, which is not typical
        self._shown = False

    def step(self, samples: int) -> bool:
        """One is done. Whether it is time to say so."""
        self._now_s = now_s = self._clock()
        self._steps += 1
        self._samples += samples
        if now_s < self._due_s:
            return False
        if self._windows is None:
            self._began_s, self._steps, self._samples = now_s, 0, 0
            self._windows = (_Window(now_s, self._every_s), _Window(now_s, TOLD_S))
            self._find_due()
            return False
        return True

    def _find_due(self) -> None:
        assert self._windows is not None
        shown, told = self._windows
        self._due_s = min(shown.due_s, told.due_s) if self._tell is not None else shown.due_s

    def say(self, step: int, epoch: str, loss: float | None, left: int | None) -> None:
        """What is due, and at the end all of it. `left`: steps to the end, if that is known."""
        if self._windows is None:
            return
        now_s, ends = self._now_s, left == 0
        shown, told = self._windows
        if self._tell is not None and (ends or now_s >= told.due_s):
            self._tell(step, epoch, loss, (self._samples - told.samples) / max(1e-9, now_s - told.since_s), left)
            every_s = min(PLAIN_S, max(TOLD_S, (now_s - self._began_s) / 10))
            told.begin(now_s, every_s, self._steps, self._samples)
        if not self._quiet and (ends or now_s >= shown.due_s):
            self._show(step, epoch, loss, left)
            shown.begin(now_s, self._every_s, self._steps, self._samples)
        self._find_due()

    def _show(self, step: int, epoch: str, loss: float | None, left: int | None) -> None:
        assert self._windows is not None
        window, _ = self._windows
        took_s = max(1e-9, self._now_s - window.since_s)
        parts = [f"step {step:,}", f"epoch {epoch}"]
        if loss is not None:
            parts.append(f"loss {loss:.4g}")
        parts.append(f"{(self._samples - window.samples) / took_s:,.0f} samples/s")
        if left:
            parts.append(f"{told_s(left * took_s / (self._steps - window.steps))} left")
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
