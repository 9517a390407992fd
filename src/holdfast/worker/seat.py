"""A rank's seat: a line to its agent that outlives worlds. By it a rank that stays hears that its world is over, and
which place it has in the next one."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable

from holdfast.wire import channel, messages

LATE_S = 0.05

Place = tuple[messages.ForkWorker, list[int]]


class Seat:
    """Nobody listens before `watch`: what is said until then waits in the socket."""

    def __init__(self, fd: int) -> None:
        self._link: channel.Channel[messages.ToWorker] = channel.Channel(channel.adopt(fd), messages.ToWorker)
        self._changed = threading.Condition()
        self._place: Place | None = None
        self._gone = self._waits = False
        self.over = ""  # why the world that this rank is in is over
        self.asked = ""  # why all ranks are to leave it after the same step
        self._generation = -1

    def watch(self, generation: int, on_over: Callable[[int], None], on_late: Callable[[], None]) -> None:
        """Listen from now on, in a thread. Call `on_over` in it as soon as the world is over, with the steps that were
        done in it, and `on_late` if it was not left soon after, again and again."""
        self._generation = generation
        listen = threading.Thread(target=self._listen, args=(on_over, on_late), name="holdfast-seat", daemon=True)
        listen.start()

    def left(self) -> None:
        """The world is, and a place is waited for."""
        with self._changed:
            self._waits = True
            self._changed.notify_all()

    def wait_until_over(self) -> None:
        """Something that takes all ranks has failed. Where all were asked to leave, others may have done so already,
        and taken the store with them."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self.over or self.asked) or self._gone)
            self.over = self.over or self.asked

    def is_over_within(self, wait_s: float) -> str:
        """Why the world is over, if that is heard by then. Where nobody listens it never is."""
        with self._changed:
            if self._generation >= 0:
                self._changed.wait_for(lambda: bool(self.over) or self._gone, wait_s)
            return self.over

    def leave_at_boundary(self) -> None:
        """All ranks are at it. The others may have been asked before this one was."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self.asked or self.over) or self._gone)
            self.over = self.over or self.asked

    def next_place(self) -> Place:
        """Wait for it. Where the agent is gone there is none, and this process ends as that does."""
        with self._changed:
            self._changed.wait_for(lambda: self._place is not None or self._gone)
            if self._place is None:
                os._exit(1)
            place, self._place = self._place, None
            self._waits = False
            self.over, self.asked, self._generation = "", "", place[0].generation
            return place

    def _has_left_within(self, wait_s: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self._waits, wait_s)

    def _listen(self, on_over: Callable[[int], None], on_late: Callable[[], None]) -> None:
        while True:
            try:
                received = self._link.receive()
            except (channel.ChannelClosed, OSError):
                with self._changed:
                    self._gone = True
                    self._changed.notify_all()
                return
            match received:
                case (messages.Leave(generation=generation), _) if generation != self._generation:
                    pass
                case (messages.Leave(why=why, boundary=True), _):
                    with self._changed:
                        self.asked = why
                        self._changed.notify_all()
                case (messages.Leave(why=why, steps=steps), _):
                    with self._changed:
                        self.over = why
                        self._changed.notify_all()
                    with contextlib.suppress(Exception):  # whatever they come to, the next place has to be heard of
                        on_over(steps)
                    while not self._has_left_within(LATE_S):
                        with contextlib.suppress(Exception):
                            on_late()
                case (messages.ForkWorker() as request, fds):
                    with self._changed:
                        self._place = (request, fds)
                        self._changed.notify_all()
