"""What asks an agent to stop: a signal, whoever runs it, or a cloud that takes its machine back."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.agent.notices import Notices

ALWAYS_TAKEN = (signal.SIGUSR1,)  # Slurm's warning that a job's time is nearly over; else it would end the agent alone


class Stops:
    """Signals are heard in the main thread alone."""

    def __init__(self, signals: Iterable[int]) -> None:
        self.asked: int | None = None  # the signal, or the one that says the same
        self._signals = {*signals, *ALWAYS_TAKEN}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._notices: Notices | None = None

    def listen(self, loop: asyncio.AbstractEventLoop, heard: Callable[[int, str], None]) -> None:
        """`heard` is called with the signal, and with the notice if it was one."""
        self._loop, self._heard = loop, heard
        if threading.current_thread() is threading.main_thread():
            for signum in self._signals:
                if signal.getsignal(signum) is not signal.SIG_IGN:  # nohup wants SIGHUP to go unheard
                    loop.add_signal_handler(signum, self._tell, signum)

    def heed(self, cloud: str, complain: Callable[[str], None]) -> None:
        """Its notice is what SIGTERM is from a person."""
        from holdfast.agent.notices import Notices

        unheard = f"--spot={cloud}: no notice can be heard yet, and this is tried again: "
        self._notices = Notices(
            cloud,
            lambda notice: self._soon(self._tell, signal.SIGTERM, notice),
            lambda why: self._soon(complain, unheard + why),
        )

    def request(self, signum: int) -> None:
        """From any thread, at any time."""
        self.asked = self.asked or signum
        self._soon(self._tell, signum)

    def close(self) -> None:
        if self._notices is not None:
            self._notices.close()
        if self._loop is not None and threading.current_thread() is threading.main_thread():
            for signum in self._signals:
                self._loop.remove_signal_handler(signum)

    def _soon(self, call: Callable[..., None], *args: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the job is over
            if self._loop is not None:
                self._loop.call_soon_threadsafe(call, *args)

    def _tell(self, signum: int, why: str = "") -> None:
        self.asked = signum
        self._heard(signum, why)
