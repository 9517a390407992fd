"""The stores of worlds: the port of the next one, and the process that keeps it, before there is a world that needs
them; and those of worlds that are over, until nobody does."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Iterator

from holdfast import linux
from holdfast.agent import preflight
from holdfast.agent.zygotes import Zygotes
from holdfast.wire import messages

OLD_S = 2.0  # a store outlives its world by that


class Stores:
    """One after the other. A keeper that was asked for and has not said that it is there counts for nothing."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        helpers: Zygotes,
        tokens: Iterator[int],
        port: int,
        listener: socket.socket | None,
    ) -> None:
        self._loop, self._helpers, self._tokens, self._fixed = loop, helpers, tokens, port
        self._listener = listener
        self._token: int | None = None
        self._pid: int | None = None
        self._dropped: set[int] = set()  # tokens of keepers that nobody needs
        self._old: dict[int, asyncio.TimerHandle] = {}  # keepers of worlds that are over, and when they end

    def port(self, addr: str) -> int:
        """Of the store that a next world would have here. Bound ahead, so that it can be told."""
        if self._token is not None and self._pid is None and self._listener is not None:
            self._dropped.add(self._token)
            self._listener.close()  # two of them must never answer at one port
            self._listener = self._token = None
        if self._listener is None:
            self._listener = preflight.listen(addr, self._fixed)
        return int(self._listener.getsockname()[1])

    def prepare(self, addr: str) -> None:
        """Have it kept already, while there is time. A port that was asked for is still in use."""
        if self._fixed or self._token is not None:
            return
        port = self.port(addr)
        assert self._listener is not None
        self._token = next(self._tokens)
        self._helpers.request(messages.ForkKeeper(self._token, addr, port, waits=True), [self._listener.fileno()])

    def take(self) -> tuple[socket.socket | None, int | None]:
        """For a world that begins: where its store is, and who keeps it, if anybody does so yet."""
        if self._pid is not None:
            linux.signal_all([self._pid], signal.SIGCONT)
        taken = self._listener, self._pid
        self._listener = self._token = self._pid = None
        return taken

    def retire(self, keeper: int, some_stay: bool) -> None:
        """Its world is over. Threads of ranks that stay may still wait there, or be about to connect: they hear that it
        is over while it is there, and torch's client would try for half an hour to reach one that is gone. A port that
        the next world is to have again is waited for; a killed keeper takes milliseconds to let go of it."""
        if self._fixed or not some_stay:
            linux.end(keeper, wait_s=1.0 if self._fixed else 0.0)
        else:
            self._old[keeper] = self._loop.call_later(OLD_S, self._end, keeper)

    def _end(self, keeper: int) -> None:
        self._old.pop(keeper).cancel()
        linux.end(keeper, wait_s=0.0)

    # -- what happens to the keeper -----------------------------------------------------------------------------------

    def forked(self, token: int, pid: int) -> None:
        if token == self._token:
            self._pid = pid
        elif token in self._dropped:
            self._dropped.discard(token)
            linux.end(pid, wait_s=0.0)

    def not_forked(self, token: int) -> None:
        self._dropped.discard(token)
        if token == self._token:
            self._token = None

    def exited(self, pid: int) -> None:
        """The port is open all the same."""
        if pid == self._pid:
            self._token = self._pid = None
        if (timer := self._old.pop(pid, None)) is not None:
            timer.cancel()

    def clear(self) -> None:
        """They are gone, with their zygote."""
        self._token = self._pid = None
        for timer in self._old.values():
            timer.cancel()
        self._old.clear()
        self._dropped.clear()

    def close(self) -> None:
        for keeper in list(self._old):
            self._end(keeper)
        if self._pid is not None:
            linux.end(self._pid, wait_s=0.0)
        if self._listener is not None:
            self._listener.close()
