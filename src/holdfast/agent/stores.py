"""The store of the next world: its port, and the process that keeps it, before there is a world that needs them."""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterator

from holdfast import linux
from holdfast.agent import preflight
from holdfast.agent.zygotes import Zygotes
from holdfast.wire import messages


class Stores:
    """One after the other. A keeper that was asked for and has not said that it is there counts for nothing."""

    def __init__(self, helpers: Zygotes, tokens: Iterator[int], port: int, listener: socket.socket | None) -> None:
        self._helpers, self._tokens, self._fixed = helpers, tokens, port
        self._listener = listener
        self._token: int | None = None
        self._pid: int | None = None
        self._dropped: set[int] = set()  # tokens of keepers that nobody needs

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

    def clear(self) -> None:
        """It is gone, with its zygote."""
        self._token = self._pid = None
        self._dropped.clear()

    def close(self) -> None:
        if self._pid is not None:
            linux.end(self._pid, wait_s=0.0)
        if self._listener is not None:
            self._listener.close()
