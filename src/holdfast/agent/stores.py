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
    """One after the other: that of the world that runs here, and the next one's."""

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
        self._begun: socket.socket | None = None  # of the world that has begun, until somebody is asked to keep it
        self._awaited: int | None = None  # who was asked, and is not there yet
        self._dropped: dict[int, bool] = {}  # keepers that are still to come, by token: whether for those who stay
        self._old: dict[int, asyncio.TimerHandle] = {}  # keepers of worlds that are over, and when they end

    def port(self, addr: str) -> int:
        """Of the store that a next world would have here. Bound ahead, so that it can be told."""
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

    def take(self) -> int | None:
        """A world begins whose store is here. Who keeps it, if anybody does so yet. One that was asked to will come,
        and no other is asked: two of them must never answer at one port."""
        self._begun, self._awaited, kept = self._listener, self._token, self._pid
        self._listener = self._token = self._pid = None
        if self._awaited is not None:
            self._let_go()
        if kept is not None:
            self._awaited = None
            linux.signal_all([kept], signal.SIGCONT)
        return kept

    def keep(self, addr: str, port: int) -> None:
        """Have it kept, if nobody was asked to."""
        if self._begun is not None:
            self._awaited = next(self._tokens)
            self._helpers.request(messages.ForkKeeper(self._awaited, addr, port), [self._begun.fileno()])
            self._let_go()

    def _let_go(self) -> None:
        if self._begun is not None:
            self._begun.close()
            self._begun = None

    def retire(self, keeper: int | None, some_stay: bool) -> None:
        """Its world is over. Threads of ranks that stay may still wait there, or be about to connect: they hear that it
        is over while it is there, and torch's client would try for half an hour to reach one that is gone. A port that
        the next world is to have again is waited for; a killed keeper takes milliseconds to let go of it."""
        self._let_go()
        outlives = some_stay and not self._fixed
        if self._awaited is not None:
            self._dropped[self._awaited] = outlives
            self._awaited = None
        if keeper is None:
            return
        if outlives:
            self._keep_for_a_while(keeper)
        else:
            linux.end(keeper, wait_s=1.0 if self._fixed else 0.0)

    def _keep_for_a_while(self, keeper: int) -> None:
        self._old[keeper] = self._loop.call_later(OLD_S, self._end, keeper)

    def _end(self, keeper: int) -> None:
        self._old.pop(keeper).cancel()
        linux.end(keeper, wait_s=0.0)

    # -- what happens to the keeper -----------------------------------------------------------------------------------

    def forked(self, token: int, pid: int) -> bool:
        """Whether it keeps the store of the world that runs."""
        if token == self._token:
            self._pid = pid
        elif (outlives := self._dropped.pop(token, None)) is not None:
            if outlives:  # whose connections wait at its port already
                linux.signal_all([pid], signal.SIGCONT)
                self._keep_for_a_while(pid)
            else:
                linux.end(pid, wait_s=0.0)
        elif token == self._awaited:
            self._awaited = None
            linux.signal_all([pid], signal.SIGCONT)
            return True
        return False

    def not_forked(self, token: int) -> bool:
        """Whether nobody will keep the store of the world that runs."""
        self._dropped.pop(token, None)
        if token == self._token:
            self._token = None
        if token != self._awaited:
            return False
        self._awaited = None
        return True

    def exited(self, pid: int) -> None:
        """The port is open all the same."""
        if pid == self._pid:
            self._token = self._pid = None
        if (timer := self._old.pop(pid, None)) is not None:
            timer.cancel()

    def clear(self) -> None:
        """They are gone, with their zygote."""
        self._token = self._pid = self._awaited = None
        for timer in self._old.values():
            timer.cancel()
        self._old.clear()
        self._dropped.clear()

    def close(self) -> None:
        for keeper in list(self._old):
            self._end(keeper)
        if self._pid is not None:
            linux.end(self._pid, wait_s=0.0)
        self._let_go()
        if self._listener is not None:
            self._listener.close()
