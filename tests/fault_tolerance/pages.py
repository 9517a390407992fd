"""A rank's place for tests: a real page, a real socket, and this process as the rank."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import pytest

from holdfast.agent import pages
from holdfast.control.hangs import Vitals
from holdfast.wire import messages
from holdfast.worker import place as places
from holdfast.worker.place import Place

GENERATION = 7


class Rank:
    """This process as rank 3, and the agent's end of it."""

    def __init__(self, config: bytes = b"") -> None:
        self._fd, [self.page] = pages.make(1, config)
        self._agent, self._end = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._agent.setblocking(False)
        for end in (self._agent, self._end):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        self._decoder = msgspec.msgpack.Decoder(messages.Report)
        self.place = Place(3, GENERATION, 0, self._end.fileno(), self._fd)
        self.page.say_wake(float("inf"))

    def reports(self) -> list[messages.Report]:
        found: list[messages.Report] = []
        while True:
            try:
                found.append(self._decoder.decode(self._agent.recv(1 << 20)))
            except BlockingIOError:
                return found

    def pokes(self) -> int:
        return sum(isinstance(report, messages.Poke) for report in self.reports())

    def vitals(self) -> Vitals:
        vitals = self.page.read(time.monotonic(), GENERATION)
        assert vitals is not None
        return vitals

    def close(self) -> None:
        self._agent.close()
        self._end.close()
        os.close(self._fd)


@contextmanager
def a_rank(patch: pytest.MonkeyPatch, config: bytes = b"") -> Iterator[Rank]:
    rank = Rank(config)
    patch.setattr(places, "_current", rank.place)
    patch.setattr(places, "_looked", True)
    try:
        yield rank
    finally:
        rank.close()
