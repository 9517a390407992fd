"""Connections on loopback: two good ends, every bad one, and a server that goes on after each."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import resource
import socket
import struct
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import msgspec
import pytest

from holdfast.wire import peer as wire
from holdfast.wire.messages import Message
from holdfast.wire.peer import Peer
from holdfast.wire.secret import INSECURE, Secret
from holdfast.wire.session import ANSWER_BYTES, MAX_FRAME_BYTES, Broken, Kind, Session, Side

SECRET = Secret(b"k" * 32, "the file /s")
OTHER = Secret(b"o" * 32, "the file /o")


class Ping(Message, frozen=True):
    number: int
    filling: bytes = b""


class Pong(Message, frozen=True):
    number: int
    filling: bytes = b""


class Said(Message, frozen=True):
    text: str


class Nested(Message, frozen=True):
    anything: Any


Received = Ping | Said | Nested


class End:
    """One program's side: makes its peers and notes what they do. It answers each Ping with as much filling."""

    def __init__(self, secret: Secret = SECRET, receives: Any = Received) -> None:
        self.secret = secret
        self.receives = receives
        self.ready: list[Peer] = []
        self.messages: list[Any] = []
        self.closed: list[Broken | None] = []
        self._changed = asyncio.Event()

    def client(self) -> Peer:
        return self._make("client")

    def server(self) -> Peer:
        return self._make("server")

    def _make(self, side: Side) -> Peer:
        return Peer(
            side,
            self.secret,
            self.receives,
            on_ready=self._on_ready,
            on_message=self._on_message,
            on_closed=self._on_closed,
        )

    def _on_ready(self, peer: Peer) -> None:
        self.ready.append(peer)
        self._changed.set()

    def _on_message(self, peer: Peer, message: Any) -> None:
        self.messages.append(message)
        if isinstance(message, Ping):
            peer.send(Pong(message.number, message.filling))
        self._changed.set()

    def _on_closed(self, peer: Peer, why: Broken | None) -> None:
        self.closed.append(why)
        self._changed.set()

    async def until(self, holds: Callable[[End], object]) -> None:
        async with asyncio.timeout(20):
            while not holds(self):
                self._changed.clear()
                await self._changed.wait()

    async def kinds(self, count: int = 1) -> list[Kind | None]:
        """Why the first `count` connections ended."""
        await self.until(lambda end: len(end.closed) >= count)
        return [None if why is None else why.kind for why in self.closed]


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """In a loop whose exception handler must never be called: in an agent, it ends the job."""
    escaped: list[dict[str, Any]] = []

    async def watched() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: escaped.append(context))
        await test()
        gc.collect()  # an exception that nobody took is reported when its future goes

    asyncio.run(watched())
    assert escaped == []


@contextlib.asynccontextmanager
async def serving(end: End, host: str = "127.0.0.1") -> AsyncIterator[int]:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    server = await wire.serve(socket.create_server((host, 0), family=family), end.server)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


async def check_serves(port: int) -> None:
    """A good client gets its answer."""
    good = End(receives=Pong)
    peer = await wire.connect("127.0.0.1", port, good.client)
    peer.send(Ping(7))
    await good.until(lambda end: end.messages)
    assert good.messages == [Pong(7)]
    peer.close()
    assert await good.kinds() == [None]


class Rogue:
    """A client that has a session but sends what bytes it likes."""

    def __init__(self, port: int, secret: Secret = SECRET) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))  # the kernel accepts it before the server does
        self.socket.setblocking(False)
        self.session = Session("client", secret)
        self._loop = asyncio.get_running_loop()

    async def send(self, data: bytes) -> None:
        await self._loop.sock_sendall(self.socket, data)

    async def shake_hands(self) -> None:
        await self.send(self.session.opening())
        while not self.session.ready:
            self.session.feed(await self._loop.sock_recv(self.socket, ANSWER_BYTES))
            await self.send(self.session.shake())

    async def rest(self) -> bytes:
        """All that comes until the server closes."""
        received = b""
        async with asyncio.timeout(20):
            with contextlib.suppress(ConnectionResetError):
                while data := await self._loop.sock_recv(self.socket, 65536):
                    received += data
        self.socket.close()
        return received


# -- two good ends ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("secret", [SECRET, INSECURE], ids=["secret", "insecure"])
def test_messages_go_both_ways(secret: Secret) -> None:
    async def test() -> None:
        server, client = End(secret), End(secret, Pong)
        async with serving(server) as port:
            peer = await wire.connect("127.0.0.1", port, client.client)
            assert client.ready == [peer]
            assert peer.ready
            assert peer.peername == f"127.0.0.1:{port}"
            sent = [Ping(number, b"x" * number * 1000) for number in range(100)]
            for ping in sent:
                peer.send(ping)
            await client.until(lambda end: len(end.messages) == 100)
            assert server.messages == sent
            assert client.messages == [Pong(ping.number, ping.filling) for ping in sent]
            peer.close()
            assert await client.kinds() == [None]
            assert await server.kinds() == [None]
            assert not peer.ready
            peer.send(Ping(0))  # without effect
            peer.close()
            peer.abort()
        assert (len(client.closed), len(server.closed)) == (1, 1)

    run(test)


def test_ipv6_and_names() -> None:
    async def test() -> None:
        server, client = End(), End()
        async with serving(server, "::1") as port:
            peer = await wire.connect("::1", port, client.client)
            assert peer.peername == f"[::1]:{port}"
            peer.close()
            await server.kinds()
        async with serving(server) as port:
            peer = await wire.connect("localhost", port, client.client, local_addr=("127.0.0.1", 0))
            assert peer.peername == f"127.0.0.1:{port}"
            peer.close()
            await server.kinds(2)

    run(test)


def test_small_messages_are_sent_at_once() -> None:
    async def test() -> None:
        server, client = End(), End()
        async with serving(server) as port:
            peer = await wire.connect("127.0.0.1", port, client.client)
            await server.until(lambda end: end.ready)
            for end in (peer, server.ready[0]):
                assert end._transport is not None
                sock = end._transport.get_extra_info("socket")
                assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            peer.abort()
            await server.kinds()

    run(test)


def test_the_last_message_before_a_close_arrives_while_the_far_end_is_busy_sending() -> None:
    async def test() -> None:
        server, client = End(), End(receives=Said)
        async with serving(server) as port:
            near = await wire.connect("127.0.0.1", port, client.client)
            await server.until(lambda end: end.ready)
            far = server.ready[0]
            assert near._transport is not None
            assert far._transport is not None
            near._transport.pause_reading()
            far._transport.pause_reading()
            near.send(Said("unread"))
            far.send(Said("stop"))
            far.close()
            for _ in range(10):  # turns of the loop, in which a plain close would be done, and answer what comes with
                await asyncio.sleep(0)  # a reset; after that a send fails before "stop" is read
                near.send(Said("busy"))
            near._transport.resume_reading()
            far._transport.resume_reading()
            assert await client.kinds() == [None]
            assert client.messages == [Said("stop")]
            assert await server.kinds() == [None]
            assert server.messages == []

    run(test)


def test_both_ends_may_close_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "FLUSH_S", 1000.0)

    async def test() -> None:
        server, client = End(), End()
        async with serving(server) as port:
            peer = await wire.connect("127.0.0.1", port, client.client)
            await server.until(lambda end: end.ready)
            peer.close()
            server.ready[0].close()
            assert await client.kinds() == [None]
            assert await server.kinds() == [None]

    run(test)


def test_an_end_that_goes_without_a_word_is_told_from_one_that_closes() -> None:
    async def test() -> None:
        server, client = End(), End()
        async with serving(server) as port:
            (await wire.connect("127.0.0.1", port, client.client)).abort()
            assert await client.kinds() == [None]
            assert await server.kinds() == ["lost"]
            rogue = Rogue(port)
            await rogue.shake_hands()
            await server.until(lambda end: len(end.ready) == 2)
            rogue.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset
            rogue.socket.close()
            assert await server.kinds(2) == ["lost", "lost"]
            assert str(server.closed[1]) == "is gone (Connection reset by peer)"
            await check_serves(port)

    run(test)


def test_a_message_that_is_too_large_is_the_senders_to_hear_of() -> None:
    async def test() -> None:
        server, client = End(), End()
        async with serving(server) as port:
            peer = client.client()
            peer.send(Ping(1))  # not connected: without effect
            peer = await wire.connect("127.0.0.1", port, client.client)
            with pytest.raises(ValueError, match="over the limit of 262,144"):
                peer.send(Ping(1, bytes(MAX_FRAME_BYTES)))
            peer.send(Ping(2))
            peer.close()
            await server.kinds()
            assert server.messages == [Ping(2)]

    run(test)


# -- ends that do not belong together ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("secret", "kind", "reason"),
    [
        (OTHER, "secret", "has another secret than the file /o"),
        (INSECURE, "insecure", "has a secret, and this end runs with --insecure"),
    ],
    ids=["another secret", "insecure"],
)
def test_a_client_is_told_why_it_does_not_get_in(secret: Secret, kind: Kind, reason: str) -> None:
    async def test() -> None:
        server, client = End(), End(secret)
        async with serving(server) as port:
            with pytest.raises(Broken) as error:
                await wire.connect("127.0.0.1", port, client.client)
            assert (error.value.kind, str(error.value)) == (kind, reason)
            assert client.closed == [error.value]
            assert await server.kinds() == [kind]
            assert client.ready == server.ready == []
            await check_serves(port)

    run(test)


def test_a_client_with_a_secret_refuses_an_insecure_server() -> None:
    async def test() -> None:
        server, client = End(INSECURE), End()
        async with serving(server) as port:
            with pytest.raises(Broken, match="runs with --insecure, and this end has the file /s"):
                await wire.connect("127.0.0.1", port, client.client)
            assert await server.kinds() == ["insecure"]

    run(test)


def test_a_server_closes_on_a_wrong_proof_and_says_nothing() -> None:
    async def test() -> None:
        server = End()
        async with serving(server) as port:
            rogue = Rogue(port)
            await rogue.send(rogue.session.opening())
            await asyncio.get_running_loop().sock_recv(rogue.socket, ANSWER_BYTES)
            await rogue.send(bytes(32))
            assert await rogue.rest() == b""
            assert await server.kinds() == ["secret"]
            await check_serves(port)

    run(test)


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "not-holdfast"),
        (b"\x15\x03\x01\x00\x02\x02\x46", "tls"),
        (b"", "lost"),
        (b"HOLDFAST\x01", "lost"),
    ],
)
def test_a_client_that_meets_another_program_says_so(said: bytes, kind: Kind) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(42)
        writer.write(said)
        writer.close()

    async def test() -> None:
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            client = End()
            with pytest.raises(Broken) as error:
                await wire.connect("127.0.0.1", server.sockets[0].getsockname()[1], client.client)
            assert error.value.kind == kind
            assert client.closed == [error.value]

    run(test)


def test_nobody_there_is_an_os_error() -> None:
    async def test() -> None:
        with socket.create_server(("127.0.0.1", 0)) as sock:
            port = sock.getsockname()[1]
        with pytest.raises(ConnectionRefusedError):
            await wire.connect("127.0.0.1", port, End().client)
        with pytest.raises(socket.gaierror):
            await wire.connect("no-such-host.invalid", port, End().client)

    run(test)


def test_a_connect_that_is_cancelled_leaves_nothing_behind() -> None:
    async def test() -> None:
        loop = asyncio.get_running_loop()
        client = End()
        with socket.create_server(("127.0.0.1", 0)) as silent:
            connecting = asyncio.create_task(wire.connect("127.0.0.1", silent.getsockname()[1], client.client))
            silent.setblocking(False)
            there, _ = await loop.sock_accept(silent)
            with there:
                assert len(await loop.sock_recv(there, 100)) == 42
                connecting.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await connecting
                assert await loop.sock_recv(there, 100) == b""
            assert await client.kinds() == [None]

    run(test)


# -- bad clients ------------------------------------------------------------------------------------------------------


def sealed(payload: bytes) -> Callable[[Session], bytes]:
    return lambda session: session.seal(payload)


def packed(value: object) -> Callable[[Session], bytes]:
    return sealed(msgspec.msgpack.encode(value))


def flipped(session: Session) -> bytes:
    frame = session.seal(msgspec.msgpack.encode(Said("hello")))
    return frame[:-1] + bytes([frame[-1] ^ 1])


def repeated(session: Session) -> bytes:
    return session.seal(msgspec.msgpack.encode(Said("hello"))) * 2


def swapped(session: Session) -> bytes:
    first = session.seal(msgspec.msgpack.encode(Said("hello")))
    return session.seal(msgspec.msgpack.encode(Said("hello"))) + first


@pytest.mark.parametrize(
    ("bad", "kind", "reason"),
    [
        (flipped, "frame", "altered"),
        (repeated, "frame", "repeated"),
        (swapped, "frame", "moved"),
        (lambda _: b"\xff" * 4, "size", "announced a frame of 4,294,967,295 bytes"),
        (sealed(b"\xc1"), "message", "invalid"),
        (sealed(b"\x82"), "message", "truncated"),
        (packed({"type": "Launch"}), "message", "Invalid value 'Launch'"),
        (packed({"type": "Said"}), "message", "missing required field `text`"),
        (packed({"type": "Said", "text": 3}), "message", "Expected `str`, got `int`"),
        (packed({"type": "Said", "text": "", "more": 1}), "message", "unknown field `more`"),
        (packed([1, 2]), "message", "Expected `object`"),
        (sealed(b"\x82\xa4type\xa4Said\xa4text\xa2\xff\xff"), "message", "utf-8"),
        (sealed(b"\x82\xa4type\xa6Nested\xa8anything" + b"\x91" * 200_000), "message", "recursion"),
        (sealed(msgspec.msgpack.encode(Said("")) + b"more"), "message", "trailing"),
    ],
)
def test_a_bad_frame_ends_its_connection_alone(bad: Callable[[Session], bytes], kind: Kind, reason: str) -> None:
    async def test() -> None:
        server, bystander = End(), End(receives=Pong)
        async with serving(server) as port:
            other = await wire.connect("127.0.0.1", port, bystander.client)
            rogue = Rogue(port)
            await rogue.shake_hands()
            await rogue.send(bad(rogue.session))
            assert await server.kinds() == [kind]
            assert reason.lower() in str(server.closed[0]).lower()
            assert len(server.messages) == (bad is repeated)  # what came before stays good
            await rogue.rest()
            other.send(Ping(1))
            await bystander.until(lambda end: end.messages)
            other.close()
            await check_serves(port)

    run(test)


def test_a_bad_start_ends_its_connection_alone() -> None:
    async def test() -> None:
        server = End()
        hello = Session("client", SECRET).opening()
        starts: list[tuple[bytes, Kind]] = [
            (b"GET / HTTP/1.1\r\n\r\n", "not-holdfast"),
            (b"\x16\x03\x01\x02\x00", "tls"),
            (b"\x00" * 100_000, "not-holdfast"),
            (hello[:8] + b"\x02", "lost"),
            (hello[:8] + b"\x02\x00", "version"),
            (hello[:8] + b"\x01\x80", "version"),
            (hello[:8] + b"\x01\x01", "insecure"),
            (hello + b"x", "size"),
            (hello + bytes(32), "size"),
            (hello, "secret"),
            (b"", "lost"),
        ]
        async with serving(server) as port:
            for count, (start, kind) in enumerate(starts, 1):
                rogue = Rogue(port)
                with contextlib.suppress(ConnectionError):
                    await rogue.send(start)
                    rogue.socket.shutdown(socket.SHUT_WR)
                assert (await server.kinds(count))[-1] == kind, start
                await rogue.rest()
            assert server.ready == []
            await check_serves(port)

    run(test)


def test_a_handshake_or_a_frame_cut_anywhere_is_noticed() -> None:
    async def test() -> None:
        server = End()
        async with serving(server) as port:
            count = 0
            for size in range(42):
                rogue = Rogue(port)
                await rogue.send(rogue.session.opening()[:size])
                rogue.socket.close()
                count += 1
                assert (await server.kinds(count))[-1] == "lost"
            for size in range(1, len(Session("client", SECRET).seal(b"hello"))):
                rogue = Rogue(port)
                await rogue.shake_hands()
                await rogue.send(rogue.session.seal(b"hello")[:size])
                rogue.socket.close()
                count += 1
                assert (await server.kinds(count))[-1] == "frame"
            await check_serves(port)

    run(test)


@pytest.mark.parametrize("said", [0, 9, 41, 42])
def test_a_handshake_that_is_never_finished_is_ended(said: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "HANDSHAKE_S", 0.05)

    async def test() -> None:
        server = End()
        async with serving(server) as port:
            rogue = Rogue(port)
            await rogue.send(rogue.session.opening()[:said])
            assert await server.kinds() == ["late"]
            assert len(await rogue.rest()) == (ANSWER_BYTES if said == 42 else 0)

    run(test)


def test_a_handshake_a_byte_at_a_time_gains_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "HANDSHAKE_S", 0.2)

    async def test() -> None:
        server = End()
        async with serving(server) as port:
            rogue = Rogue(port)
            for byte in rogue.session.opening()[:41]:
                await rogue.send(bytes([byte]))
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(0.02):
                        await server.until(lambda end: end.closed)
                        break
            assert await server.kinds() == ["late"]
            await rogue.rest()

    run(test)


def test_a_server_that_says_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "HANDSHAKE_S", 0.05)

    async def test() -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            with pytest.raises(Broken, match=r"did not finish the handshake in 0\.05 s") as error:
                await wire.connect("127.0.0.1", silent.getsockname()[1], End().client)
            assert error.value.kind == "late"

    run(test)


def test_a_handshake_in_time_is_not_ended_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "HANDSHAKE_S", 0.5)

    async def test() -> None:
        server, client, late = End(), End(receives=Pong), End()
        async with serving(server) as port:
            peer = await wire.connect("127.0.0.1", port, client.client)
            with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(Broken, match="did not finish"):
                await wire.connect("127.0.0.1", silent.getsockname()[1], late.client)  # a later timer has run out
            peer.send(Ping(1))
            await client.until(lambda end: end.messages)
            peer.close()
            assert await server.kinds() == [None]

    run(test)


def test_a_client_that_floods_and_never_reads_is_ended() -> None:
    async def test() -> None:
        server = End()
        async with serving(server) as port:
            rogue = Rogue(port)
            await rogue.shake_hands()
            ping = msgspec.msgpack.encode(Ping(1, bytes(200_000)))
            with contextlib.suppress(ConnectionError):
                for _ in range(1000):  # far more than any kernel's buffers hold
                    await rogue.send(rogue.session.seal(ping))
            assert await server.kinds() == ["full"]
            assert len(server.messages) < 200
            rogue.socket.close()
            await check_serves(port)

    run(test)


def test_a_close_does_not_wait_for_ever_for_a_far_end_that_does_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "FLUSH_S", 0.05)

    async def test() -> None:
        server = End()
        async with serving(server) as port:
            rogue = Rogue(port)
            await rogue.shake_hands()
            await server.until(lambda end: end.ready)
            server.ready[0].close()
            assert await server.kinds() == [None]
            rogue.socket.close()

    run(test)


def test_more_connections_than_descriptors_are_turned_away() -> None:
    async def test() -> None:
        server = End()
        async with serving(server) as port:
            rogues = [Rogue(port) for _ in range(20)]
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            highest = max(rogue.socket.fileno() for rogue in rogues)
            resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 5, hard))
            try:
                assert await rogues[-1].rest() == b""
                for rogue in rogues:
                    rogue.socket.close()
                await server.kinds(4)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            await check_serves(port)

    run(test)


def test_a_closed_server_keeps_no_descriptor() -> None:
    async def test() -> None:
        before = os.listdir("/proc/self/fd")
        sock = socket.create_server(("127.0.0.1", 0))
        server = await wire.serve(sock, End().server)
        assert sock.fileno() == -1  # the server's now
        server.close()
        await server.wait_closed()
        assert os.listdir("/proc/self/fd") == before

    run(test)
