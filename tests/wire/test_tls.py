"""TLS around a connection, with certificates made by `openssl` as a user would make them."""

from __future__ import annotations

import asyncio
import gc
import socket
import ssl
import subprocess
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from holdfast.wire import peer as wire
from holdfast.wire import tls
from holdfast.wire.messages import Message
from holdfast.wire.peer import Peer
from holdfast.wire.secret import Secret
from holdfast.wire.session import Broken, Side
from holdfast.wire.tls import TlsError

SECRET = Secret(b"k" * 32, "the file /s")
EC_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-noenc")


class Said(Message, frozen=True):
    text: str


def openssl(*arguments: str, cwd: Path) -> None:
    subprocess.run(["openssl", *arguments], cwd=cwd, check=True, capture_output=True)


class Authority:
    """A CA of its own, with the certificate of one node in `cert` and `key`."""

    def __init__(self, folder: Path, name: str = "IP:127.0.0.1,DNS:localhost") -> None:
        folder.mkdir()
        self.folder = folder
        self.ca, self.cert, self.key = (str(folder / file) for file in ("ca.pem", "cert.pem", "key.pem"))
        subject = ("-subj", f"/CN={folder.name}")
        openssl("req", "-x509", *EC_KEY, *subject, "-keyout", "ca.key", "-out", "ca.pem", cwd=folder)
        openssl("req", *EC_KEY, *subject, "-keyout", "key.pem", "-out", "request.pem", cwd=folder)
        (folder / "names").write_text(f"subjectAltName={name}")
        signing = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-extfile", "names")
        openssl("x509", "-req", "-in", "request.pem", *signing, "-out", "cert.pem", cwd=folder)

    def server(self) -> ssl.SSLContext:
        return tls.server_context(self.cert, self.key, self.ca)

    def client(self) -> ssl.SSLContext:
        return tls.client_context(self.cert, self.key, self.ca)


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls") / "ours")


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls") / "theirs")


class End:
    """One program's side. A server sends each message back."""

    def __init__(self, side: Side, secret: Secret = SECRET) -> None:
        self.side: Side = side
        self.secret = secret
        self.messages: list[Said] = []
        self.closed: asyncio.Queue[Broken | None] = asyncio.Queue()
        self.answered = asyncio.Event()

    def make(self) -> Peer:
        def on_message(peer: Peer, message: Said) -> None:
            self.messages.append(message)
            self.answered.set()
            if self.side == "server":
                peer.send(message)
                if message.text == "stop":
                    peer.close()

        return Peer(
            self.side,
            self.secret,
            Said,
            on_ready=lambda _: None,
            on_message=on_message,
            on_closed=lambda _, why: self.closed.put_nowait(why),
        )


def run(server_tls: ssl.SSLContext | None, test: Callable[[End, int], Coroutine[Any, Any, None]]) -> None:
    """With a server, in a loop whose exception handler must never be called: in an agent, it ends the job."""
    escaped: list[dict[str, Any]] = []

    async def watched() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: escaped.append(context))
        end = End("server")
        server = await wire.serve(socket.create_server(("127.0.0.1", 0)), end.make, ssl=server_tls)
        async with asyncio.timeout(20):
            await test(end, server.sockets[0].getsockname()[1])
        server.close()
        gc.collect()

    asyncio.run(watched())
    assert escaped == []


async def check_talks(port: int, context: ssl.SSLContext) -> None:
    client = End("client")
    peer = await wire.connect("127.0.0.1", port, client.make, ssl=context)
    peer.send(Said("hello" * 10_000))
    await client.answered.wait()
    peer.close()
    assert await client.closed.get() is None
    assert client.messages == [Said("hello" * 10_000)]


def test_messages_go_both_ways_and_both_ends_show_certificates(ours: Authority) -> None:
    async def test(server: End, port: int) -> None:
        await check_talks(port, ours.client())
        assert await server.closed.get() is None
        client = End("client")
        peer = await wire.connect("localhost", port, client.make, ssl=ours.client())
        assert peer._transport is not None
        assert peer._transport.get_extra_info("ssl_object").version() == "TLSv1.3"
        assert peer.peername == f"127.0.0.1:{port}"
        peer.abort()
        why = await server.closed.get()
        assert why is not None
        assert why.kind == "lost"

    run(ours.server(), test)


def test_the_last_message_before_a_close_arrives_while_the_far_end_is_busy_sending(ours: Authority) -> None:
    async def test(server: End, port: int) -> None:
        client = End("client")
        peer = await wire.connect("127.0.0.1", port, client.make, ssl=ours.client())
        peer.send(Said("stop"))
        for _ in range(10):
            peer.send(Said("x" * 200_000))
        assert await client.closed.get() is None
        assert client.messages == [Said("stop")]
        assert await server.closed.get() is None

    run(ours.server(), test)


def test_a_server_without_a_ca_asks_for_no_certificate(ours: Authority) -> None:
    async def test(server: End, port: int) -> None:
        await check_talks(port, tls.client_context(ca=ours.ca))

    run(tls.server_context(ours.cert, ours.key), test)


def test_a_server_of_another_ca_is_refused(ours: Authority, theirs: Authority) -> None:
    async def test(server: End, port: int) -> None:
        for context in (ours.client(), tls.client_context()):
            with pytest.raises(ssl.SSLCertVerificationError):
                await wire.connect("127.0.0.1", port, End("client").make, ssl=context)
        await check_talks(port, theirs.client())

    run(theirs.server(), test)


def test_a_server_by_another_name_is_refused(ours: Authority, tmp_path: Path) -> None:
    elsewhere = Authority(tmp_path / "elsewhere", "IP:192.0.2.1")

    async def test(server: End, port: int) -> None:
        with pytest.raises(ssl.SSLCertVerificationError, match="IP address mismatch"):
            await wire.connect("127.0.0.1", port, End("client").make, ssl=elsewhere.client())

    run(elsewhere.server(), test)


def test_a_client_without_a_certificate_of_the_ca_is_refused(ours: Authority, theirs: Authority) -> None:
    async def test(server: End, port: int) -> None:
        # In TLS 1.3 a client is done before the server has seen its certificate, so the refusal may come after.
        for context in (tls.client_context(ca=ours.ca), tls.client_context(theirs.cert, theirs.key, ours.ca)):
            with pytest.raises((OSError, Broken)) as error:
                await wire.connect("127.0.0.1", port, End("client").make, ssl=context)
            assert not isinstance(error.value, Broken) or error.value.kind == "lost"
        assert server.messages == []
        await check_talks(port, ours.client())

    run(ours.server(), test)


def test_the_secret_counts_inside_tls_too(ours: Authority) -> None:
    async def test(server: End, port: int) -> None:
        other = End("client", Secret(b"o" * 32, "the file /o"))
        with pytest.raises(Broken, match="has another secret than the file /o"):
            await wire.connect("127.0.0.1", port, other.make, ssl=ours.client())
        await check_talks(port, ours.client())

    run(ours.server(), test)


def test_a_client_without_tls_is_told_of_it(ours: Authority) -> None:
    async def test(server: End, port: int) -> None:
        # Some versions of asyncio send a TLS alert before they close; that of Python 3.11 just closes.
        with pytest.raises(Broken, match=r"speaks TLS|as one that expects TLS does"):
            await wire.connect("127.0.0.1", port, End("client").make)
        await check_talks(port, ours.client())

    run(ours.server(), test)


def test_a_server_without_tls_refuses_a_client_with_it(ours: Authority) -> None:
    async def test(server: End, port: int) -> None:
        with pytest.raises(OSError):
            await wire.connect("127.0.0.1", port, End("client").make, ssl=ours.client())
        why = await server.closed.get()
        assert why is not None
        assert why.kind == "tls"

    run(None, test)


def test_a_tls_handshake_that_is_never_finished_is_ended(ours: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "HANDSHAKE_S", 0.2)

    async def test(server: End, port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"\x16\x03\x01")
        assert await reader.read() == b""
        writer.close()
        assert server.closed.empty()

    run(ours.server(), test)


# -- files that are no good -------------------------------------------------------------------------------------------


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(TlsError) as error:
        call()
    assert "\n" not in str(error.value)
    return str(error.value)


def test_missing_files_are_named(ours: Authority) -> None:
    cannot = "cannot be read (No such file or directory); give a file that can"
    assert refusal(lambda: tls.server_context("/no/c", ours.key)) == f"--tls-cert /no/c {cannot}"
    assert refusal(lambda: tls.server_context(ours.cert, "/no/k")) == f"--tls-key /no/k {cannot}"
    assert refusal(lambda: tls.server_context(ours.cert, ours.key, "/no/a")) == f"--tls-ca /no/a {cannot}"
    assert refusal(lambda: tls.client_context("/no/c", ours.key)) == f"--tls-cert /no/c {cannot}"
    assert refusal(lambda: tls.client_context(ca="/no/a")) == f"--tls-ca /no/a {cannot}"
    assert "(Is a directory)" in refusal(lambda: tls.client_context(ca="/"))


def test_files_that_hold_something_else_are_refused(ours: Authority, theirs: Authority, tmp_path: Path) -> None:
    junk = tmp_path / "junk"
    junk.write_text("no certificate")
    assert "is not in PEM format" in refusal(lambda: tls.server_context(str(junk), ours.key))
    assert "is not in PEM format" in refusal(lambda: tls.server_context(ours.cert, str(junk)))
    assert "is not in PEM format" in refusal(lambda: tls.server_context(ours.cert))
    assert "holds no certificate in PEM format" in refusal(lambda: tls.client_context(ca=str(junk)))
    text = refusal(lambda: tls.client_context(ours.cert, theirs.key, ours.ca))
    assert text.startswith(f"the key in {theirs.key} is not that of the certificate {ours.cert};")


def test_a_key_without_a_certificate_is_refused(ours: Authority) -> None:
    assert refusal(lambda: tls.client_context(key=ours.key)).endswith("has no certificate; give --tls-cert as well")


def test_a_key_with_a_passphrase_is_refused_and_nobody_is_asked(ours: Authority, tmp_path: Path) -> None:
    openssl("pkey", "-in", ours.key, "-aes256", "-passout", "pass:hunter22", "-out", "locked.pem", cwd=tmp_path)
    text = refusal(lambda: tls.server_context(ours.cert, str(tmp_path / "locked.pem")))
    assert "has a passphrase, which nobody is there to type" in text
