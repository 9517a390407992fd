"""The side of `holdfast doctor --serve`: answers callers, and connects back to them."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from holdfast.agent.meeting import reason
from holdfast.doctor import encounter
from holdfast.doctor.finding import State, one_line
from holdfast.wire import peer as wire
from holdfast.wire.secret import Secret
from holdfast.wire.session import Broken

if TYPE_CHECKING:
    from ssl import SSLContext

BACK_S = 3.0


class Visit(msgspec.Struct, frozen=True):
    """One caller, and what it has found; or why it left before."""

    host: str  # its own word for itself; '' if it had none
    address: str
    state: State
    text: str


class Server:
    """Answers whoever has the secret. `tell` hears of each caller when it leaves."""

    def __init__(self, secret: Secret, tell: Callable[[Visit], None]) -> None:
        self._secret, self._tell = secret, tell
        self._server: asyncio.Server | None = None
        self._callers: dict[wire.Peer, encounter.Hello | None] = {}
        self._done: set[wire.Peer] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    async def start(self, listener: socket.socket, tls: SSLContext | None = None) -> None:
        self._server = await wire.serve(listener, self._caller, ssl=tls)

    def close(self) -> None:
        self._closed = True
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        for caller in list(self._callers):
            caller.abort()

    def _caller(self) -> wire.Peer:
        return wire.Peer(
            "server",
            self._secret,
            encounter.ToServer,
            on_ready=self._greet,
            on_message=self._answer,
            on_closed=self._left,
        )

    def _greet(self, caller: wire.Peer) -> None:
        self._callers[caller] = None

    def _answer(self, caller: wire.Peer, message: Any) -> None:
        match message:
            case encounter.Tick():
                caller.send(encounter.Tock(time.monotonic(), time.time()))
            case encounter.Load():
                caller.send(message)
            case encounter.Hello():
                self._callers[caller] = message
                task = asyncio.get_running_loop().create_task(self._meet(caller, message))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            case encounter.Verdict():
                self._done.add(caller)
                self._report(caller, message.state, message.text)

    async def _meet(self, caller: wire.Peer, hello: encounter.Hello) -> None:
        known_as = await encounter.addresses(hello.host)
        why = await _connect_back(caller.remote_host, hello)
        seen_as = encounter.plain(caller.remote_host)
        met = encounter.Met(socket.gethostname(), encounter.versions(), seen_as, known_as, why)
        caller.send(met)

    def _left(self, caller: wire.Peer, why: Broken | None) -> None:
        if caller not in self._done and not self._closed:
            self._report(caller, "fail", f"it {why.reason}" if why is not None else "it left before it was done")
        self._done.discard(caller)
        self._callers.pop(caller, None)

    def _report(self, caller: wire.Peer, state: State, text: str) -> None:
        hello = self._callers.get(caller)
        host = one_line(hello.host) if hello is not None else ""
        address = encounter.plain(caller.peername.strip("[]").rpartition(":")[0].rstrip("]"))
        self._tell(Visit(host, address, state, one_line(text)))


async def _connect_back(host: str, hello: encounter.Hello) -> str:
    """Why it did not work; '' if it did. Only the caller knows whether what was said there came to it."""
    try:
        async with asyncio.timeout(BACK_S):
            _, writer = await asyncio.open_connection(host, hello.back_port)
            with contextlib.closing(writer):
                writer.write(f"{hello.token}\n".encode())
                await writer.drain()
    except (OSError, TimeoutError, ValueError, OverflowError) as failure:
        return one_line(reason(failure))
    return ""


async def serve(
    listener: socket.socket,
    secret: Secret,
    tls: SSLContext | None,
    tell: Callable[[Visit], None],
    stopped: asyncio.Event,
    limit_s: float,
) -> None:
    server = Server(secret, tell)
    await server.start(listener, tls)
    try:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await stopped.wait()
    finally:
        server.close()
