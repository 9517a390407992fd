"""One authenticated connection to another node, as callbacks of the event loop: no task and no thread of its own.

Nothing that the far end does raises here. It ends this connection, with the reason, and no other.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import os
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import msgspec

from holdfast.wire.secret import Secret
from holdfast.wire.session import Broken, Session, Side

if TYPE_CHECKING:
    from ssl import SSLContext

HANDSHAKE_S = 5.0
FLUSH_S = 5.0  # how long `close` waits for a far end that does not read, or does not close in turn
MAX_UNSENT_BYTES = 4 * 1024 * 1024
BACKLOG = 4096  # Linux's own limit; all the nodes of a job come at once
_SECOND_ADDRESS_S = 0.25  # of RFC 8305: when to try IPv4 as well, where IPv6 does not answer


class Peer(asyncio.Protocol):
    """The far end of a connection.

    `on_closed` is called once for every connection that was made, also for one that never got as far as `on_ready`. Its
    reason is None if this end closed, or the far end said that it does; a process that was killed says nothing. What a
    callback raises is a bug, and goes to the loop's handler.
    """

    def __init__(
        self,
        side: Side,
        secret: Secret,
        receives: Any,
        *,
        on_ready: Callable[[Peer], None],
        on_message: Callable[[Peer, Any], None],
        on_closed: Callable[[Peer, Broken | None], None],
    ) -> None:
        self.peername = "an unknown address"
        self._session = Session(side, secret)
        self._decoder = _decoder(receives)
        self._on_ready = on_ready
        self._on_message = on_message
        self._on_closed = on_closed
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._over = False  # nothing more is sent, and what still arrives is dropped
        self._gone = False
        self._why: Broken | None = None

    @property
    def local_host(self) -> str:
        """This end's own address on the connection: the one by which the far end can reach it."""
        return str(self._transport.get_extra_info("sockname")[0]) if self._transport is not None else ""

    @property
    def remote_host(self) -> str:
        """The address that the far end is at."""
        return str(self._transport.get_extra_info("peername")[0]) if self._transport is not None else ""

    @property
    def ready(self) -> bool:
        """The handshake was done, and nothing has ended the connection since."""
        return self._session.ready and not self._over

    def send(self, message: msgspec.Struct) -> None:
        """Send one message; without effect once the connection ends. Raises ValueError for one that is too large."""
        if self._over or self._transport is None:
            return
        if not self._session.ready:
            raise RuntimeError("a message was sent before the handshake was done")
        frame = self._session.seal(msgspec.msgpack.encode(message))
        if self._transport.get_write_buffer_size() + len(frame) > MAX_UNSENT_BYTES:
            self._break(Broken("full", f"does not read: {MAX_UNSENT_BYTES:,} bytes wait to be sent"))
            return
        self._transport.write(frame)

    def close(self) -> None:
        """End the connection when all that was sent has been read. `on_closed` follows, after FLUSH_S at the latest.

        The far end is told, and closes first. A socket closed over unread bytes makes the kernel send a reset, and the
        far end, busy sending, would lose the last messages, such as the one that tells it to stop.
        """
        if self._over:
            return
        if self._transport is None or not self._session.ready:
            self.abort()
            return
        self._over = True
        self._transport.write(self._session.farewell())
        self._set_timer(FLUSH_S, self.abort)

    def abort(self) -> None:
        """End the connection now; what was not sent yet is lost."""
        self._over = True
        if self._transport is not None:
            self._transport.abort()

    async def opened(self) -> None:
        """Wait for the end of the handshake; raises Broken if there is none."""
        if not self._session.ready and not self._gone:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if not self._session.ready:
            raise self._why or Broken("lost", "was left before the handshake was done")

    # -- what the loop calls ------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if self._over:  # aborted before there was anything to abort
            self._transport.abort()
            return
        if address := transport.get_extra_info("peername"):  # none where the far end has left already
            host, port = address[:2]
            self.peername = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        with contextlib.suppress(OSError):
            # asyncio does so itself, but not for a socket made without naming TCP, as most that are bound ahead are.
            transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._set_timer(HANDSHAKE_S, self._be_late)
        if opening := self._session.opening():
            self._transport.write(opening)

    def data_received(self, data: bytes) -> None:
        assert self._transport is not None
        if self._transport.is_closing():
            return
        self._session.feed(data)
        try:
            if not self._session.ready and not self._shake():
                return
            while not self._transport.is_closing() and (payload := self._session.receive()) is not None:
                if not payload:
                    self.abort()  # the farewell: nobody is left to flush to
                elif not self._over:  # else these words crossed ours
                    self._deliver(payload)
        except Broken as why:
            self._break(why)

    def eof_received(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if not self._over and self._why is None:
            self._why = self._session.cut() if error is None else Broken("lost", f"is gone ({_say(error)})")
        self._over = self._gone = True
        self._wake()
        self._on_closed(self, self._why)

    # -- the rest -----------------------------------------------------------------------------------------------------

    def _shake(self) -> bool:
        assert self._transport is not None
        if reply := self._session.shake():
            self._transport.write(reply)
        if not self._session.ready:
            return False
        if self._timer is not None:
            self._timer.cancel()
        self._wake()
        self._on_ready(self)
        return True

    def _deliver(self, payload: bytes) -> None:
        try:
            message = self._decoder.decode(payload)
        except Exception as error:  # also text that is no UTF-8, and nesting too deep: msgspec has no one class for all
            raise Broken("message", f"sent what is no message here ({_say(error)[:200]})") from error
        self._on_message(self, message)

    def _break(self, why: Broken) -> None:
        if not self._over:  # once this end has closed, how the far end leaves is all the same
            self._why = why
        if why.last_words and self._transport is not None:
            self._transport.write(why.last_words)
        self.abort()

    def _be_late(self) -> None:
        self._break(Broken("late", f"did not finish the handshake in {HANDSHAKE_S:g} s"))

    def _set_timer(self, delay_s: float, call: Callable[[], None]) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(delay_s, call)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)  # never an exception: one that nobody waits for goes to the loop's handler


async def connect(
    host: str,
    port: int,
    make_peer: Callable[[], Peer],
    ssl: SSLContext | None = None,
    local_addr: tuple[str, int] | None = None,
) -> Peer:
    """A peer with its handshake done. Raises OSError where there is no connection, and Broken where it is no good."""
    _, peer = await asyncio.get_running_loop().create_connection(
        make_peer,
        host,
        port,
        ssl=ssl,
        local_addr=local_addr,
        happy_eyeballs_delay=_SECOND_ADDRESS_S,
        ssl_handshake_timeout=HANDSHAKE_S if ssl else None,
        ssl_shutdown_timeout=FLUSH_S if ssl else None,
    )
    try:
        await peer.opened()
    except BaseException:
        peer.abort()
        raise
    return peer


async def serve(sock: socket.socket, make_peer: Callable[[], Peer], ssl: SSLContext | None = None) -> asyncio.Server:
    """Accept connections on a bound socket, which is the server's from now on (`server.sockets` has it)."""
    return await asyncio.get_running_loop().create_server(
        make_peer,
        sock=_Listener(sock),
        backlog=BACKLOG,
        ssl=ssl,
        ssl_handshake_timeout=HANDSHAKE_S if ssl else None,
        ssl_shutdown_timeout=FLUSH_S if ssl else None,
    )


class _Listener(socket.socket):
    """A listening socket that has no errors.

    asyncio reports an `accept` that failed to the loop's handler, where it would end the job; and strangers can make it
    fail, with more connections than there are descriptors. Those too many are accepted with a descriptor that is kept
    for this, and closed. Left in the queue they would keep the loop awake.
    """

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock.family, sock.type, sock.proto, fileno=sock.detach())
        self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def accept(self) -> tuple[socket.socket, Any]:
        try:
            return super().accept()
        except BlockingIOError:
            raise
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                self._shed()
            raise BlockingIOError from error  # which asyncio takes for "no more at present"

    def _shed(self) -> None:
        self._drop_spare()
        with contextlib.suppress(OSError):
            super().accept()[0].close()
        with contextlib.suppress(OSError):
            self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def _drop_spare(self) -> None:
        if self._spare >= 0:
            os.close(self._spare)
        self._spare = -1  # the number may be another's by the next time

    def close(self) -> None:
        self._drop_spare()
        super().close()


@functools.cache
def _decoder(receives: Any) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(receives)


def _say(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
