"""Requests to stop that reach a training process itself, where no agent takes them for it."""

from __future__ import annotations

import signal
import threading
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)  # a scheduler's end, and Slurm's warning before it


class Requests:
    """Handlers only take note. One that the script has set itself stays the script's."""

    def __init__(self) -> None:
        self.stop = False
        if threading.current_thread() is not threading.main_thread():
            return
        for signum in SIGNALS:
            if signal.getsignal(signum) is signal.SIG_DFL:
                signal.signal(signum, self._note)

    def close(self) -> None:
        """Nobody looks any more: from here on such a signal ends the process, as it would without all this."""
        if threading.current_thread() is not threading.main_thread():
            return
        for signum in SIGNALS:
            if signal.getsignal(signum) == self._note:
                signal.signal(signum, signal.SIG_DFL)

    def _note(self, signum: int, frame: Any) -> None:
        self.stop = True
