"""The handshake and the frames, byte by byte: what two good ends agree on, and everything else that must fail."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest

import holdfast
from holdfast.wire.secret import INSECURE, Secret
from holdfast.wire.session import ANSWER_BYTES, HELLO_BYTES, MAX_FRAME_BYTES, Broken, Kind, Session

SECRET = Secret(b"k" * 32, "the file /s")
OTHER = Secret(b"o" * 32, "the file /o")


def shake(session: Session, data: bytes) -> bytes:
    session.feed(data)
    return session.shake()


def opened(secret: Secret = SECRET) -> tuple[Session, Session]:
    client, server = Session("client", secret), Session("server", secret)
    assert shake(server, shake(client, shake(server, client.opening()))) == b""
    assert client.ready
    assert server.ready
    return client, server


def receive_all(session: Session, data: bytes) -> list[bytes]:
    session.feed(data)
    return list(iter(session.receive, None))


def breaks(call: Callable[[Session, bytes], object], session: Session, data: bytes) -> Broken:
    with pytest.raises(Broken) as error:
        call(session, data)
    return error.value


def flips(data: bytes) -> list[bytes]:
    """The data with each one of its bits turned."""
    return [
        data[:place] + bytes([data[place] ^ 1 << bit]) + data[place + 1 :]
        for place in range(len(data))
        for bit in range(8)
    ]


# -- two good ends ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("secret", [SECRET, INSECURE], ids=["secret", "insecure"])
def test_messages_go_both_ways(secret: Secret) -> None:
    client, server = opened(secret)
    assert receive_all(server, client.seal(b"one") + client.seal(b"two")) == [b"one", b"two"]
    assert receive_all(client, server.seal(b"three")) == [b"three"]
    assert receive_all(server, client.seal(b"x" * MAX_FRAME_BYTES)) == [b"x" * MAX_FRAME_BYTES]
    assert receive_all(client, server.farewell()) == [b""]


def test_bytes_may_come_one_at_a_time() -> None:
    client, server = Session("client", SECRET), Session("server", SECRET)
    answer = b"".join(shake(server, bytes([byte])) for byte in client.opening())
    proof = b"".join(shake(client, bytes([byte])) for byte in answer)
    assert [shake(server, bytes([byte])) for byte in proof] == [b""] * 32
    assert [payload for byte in client.seal(b"one") for payload in receive_all(server, bytes([byte]))] == [b"one"]


def test_the_client_may_speak_right_after_its_proof() -> None:
    client, server = Session("client", SECRET), Session("server", SECRET)
    proof = shake(client, shake(server, client.opening()))
    assert shake(server, proof + client.seal(b"one")) == b""
    assert receive_all(server, b"") == [b"one"]


def test_no_two_connections_look_alike() -> None:
    (client, _), (again, other_server) = opened(), opened()
    assert client.opening() != again.opening()
    frame = client.seal(b"one")
    assert frame != again.seal(b"one")
    assert breaks(receive_all, other_server, frame).kind == "frame"


def test_a_message_over_the_limit_is_not_sent() -> None:
    client, server = opened()
    with pytest.raises(ValueError, match="262,145 bytes"):
        client.seal(bytes(MAX_FRAME_BYTES + 1))
    assert receive_all(server, client.seal(b"goes on")) == [b"goes on"]


# -- ends that do not belong together ---------------------------------------------------------------------------------


def test_the_client_finds_another_secret_by_itself() -> None:
    client, server = Session("client", SECRET), Session("server", OTHER)
    answer = shake(server, client.opening())
    why = breaks(shake, client, answer)
    assert (why.kind, str(why)) == ("secret", "has another secret than the file /s")
    assert not client.ready


def test_the_server_refuses_a_client_without_the_secret_and_says_nothing() -> None:
    client, server = Session("client", SECRET), Session("server", SECRET)
    shake(server, client.opening())
    why = breaks(shake, server, bytes(32))
    assert (why.kind, why.last_words) == ("secret", b"")
    assert not server.ready


@pytest.mark.parametrize(("client_secret", "server_secret"), [(SECRET, INSECURE), (INSECURE, SECRET)])
def test_a_secure_end_and_an_insecure_one_refuse_each_other(client_secret: Secret, server_secret: Secret) -> None:
    client, server = Session("client", client_secret), Session("server", server_secret)
    at_server = breaks(shake, server, client.opening())
    at_client = breaks(shake, client, at_server.last_words)
    assert (at_server.kind, at_client.kind) == ("insecure", "insecure")
    insecure, secure = (at_client, at_server) if client_secret is INSECURE else (at_server, at_client)
    assert str(insecure) == "has a secret, and this end runs with --insecure"
    assert str(secure) == "runs with --insecure, and this end has the file /s"


def test_both_ends_hear_that_their_versions_differ() -> None:
    client, server = Session("client", SECRET), Session("server", SECRET)
    newer = client.opening()[:8] + b"\x02" + client.opening()[9:] + b"and what a later version may add"
    at_server = breaks(shake, server, newer)
    assert (at_server.kind, str(at_server)) == ("version", "speaks version 2 of the protocol, this end version 1")
    assert at_server.last_words == client.opening()[:10]
    from_newer = at_server.last_words[:8] + b"\x02\x00"
    assert breaks(shake, client, from_newer).kind == "version"


@pytest.mark.parametrize(
    ("first", "kind"),
    [
        (b"GET / HTTP/1.1\r\n", "not-holdfast"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "not-holdfast"),
        (b"\x00", "not-holdfast"),
        (b"HOLDFASd", "not-holdfast"),
        (b"\x16\x03\x01\x02\x00\x01", "tls"),
        (b"\x15\x03\x03\x00\x02\x02\x46", "tls"),
    ],
)
def test_another_program_is_told_by_its_first_bytes(first: bytes, kind: Kind) -> None:
    assert breaks(shake, Session("server", SECRET), first).kind == kind
    assert breaks(shake, Session("client", SECRET), first).kind == kind


def test_a_reflected_handshake_proves_nothing() -> None:
    client = Session("client", SECRET)
    mirror = client.opening() + bytes(32)
    assert breaks(shake, client, mirror).kind == "secret"

    # One client's words to another: both want to hear a server.
    client, second = Session("client", SECRET), Session("client", SECRET)
    assert breaks(shake, client, second.opening() + bytes(32)).kind == "secret"

    # The server's own proof, sent back as the client's, with the server's nonce echoed from the start or not.
    server = Session("server", SECRET)
    answer = shake(server, Session("client", SECRET).opening())
    assert breaks(shake, server, answer[HELLO_BYTES:]).kind == "secret"
    second_server = Session("server", SECRET)
    second_answer = shake(second_server, answer[:HELLO_BYTES])
    assert breaks(shake, server, second_answer[HELLO_BYTES:]).kind == "secret"


def test_a_recorded_handshake_opens_no_second_connection() -> None:
    client, server = Session("client", SECRET), Session("server", SECRET)
    proof = shake(client, shake(server, client.opening()))
    later = Session("server", SECRET)
    shake(later, client.opening())
    assert breaks(shake, later, proof).kind == "secret"


# -- a handshake that is tampered with --------------------------------------------------------------------------------


def test_a_bit_turned_anywhere_in_the_hello_fails() -> None:
    for place in range(HELLO_BYTES * 8):
        client, server = Session("client", SECRET), Session("server", SECRET)
        hello = flips(client.opening())[place]
        try:
            answer = shake(server, hello)
        except Broken as why:
            assert why.kind in ("not-holdfast", "version", "insecure")
        else:
            assert breaks(shake, client, answer).kind == "secret"
        assert not client.ready
        assert not server.ready


def test_a_bit_turned_anywhere_in_the_answer_fails() -> None:
    for place in range(ANSWER_BYTES * 8):
        client, server = Session("client", SECRET), Session("server", SECRET)
        answer = flips(shake(server, client.opening()))[place]
        breaks(shake, client, answer)
        assert not client.ready


def test_a_bit_turned_anywhere_in_the_proof_fails() -> None:
    for place in range(32 * 8):
        client, server = Session("client", SECRET), Session("server", SECRET)
        proof = flips(shake(client, shake(server, client.opening())))[place]
        assert breaks(shake, server, proof).kind == "secret"
        assert not server.ready


def test_a_handshake_cut_anywhere_is_not_ready() -> None:
    client, server = Session("client", SECRET), Session("server", SECRET)
    hello = client.opening()
    for size in range(HELLO_BYTES):
        cut = Session("server", SECRET)
        assert shake(cut, hello[:size]) == b""
        assert (cut.ready, cut.cut().kind) == (False, "lost")
    answer = shake(server, hello)
    for byte in answer[:-1]:
        assert shake(client, bytes([byte])) == b""
        assert (client.ready, client.cut().kind) == (False, "lost")
    for byte in shake(client, answer[-1:])[:-1]:
        assert shake(server, bytes([byte])) == b""
        assert (server.ready, server.cut().kind) == (False, "secret")  # which is what it most likely was


def test_nothing_may_follow_before_the_handshake_is_done() -> None:
    client, server = Session("client", SECRET), Session("server", SECRET)
    answer = shake(server, client.opening())
    assert breaks(shake, client, answer + b"x").kind == "size"
    assert breaks(shake, Session("server", SECRET), client.opening() + b"x").kind == "size"


# -- frames that are tampered with ------------------------------------------------------------------------------------


def test_a_bit_turned_anywhere_in_a_frame_fails() -> None:
    client, server = opened()
    frame = client.seal(b"one")
    for bad in flips(frame):
        server._buffer.clear()
        announced = int.from_bytes(bad[:4], "big")
        if len(b"one") < announced <= MAX_FRAME_BYTES:  # it can be told only when that much has come, or none does
            assert receive_all(server, bad) == []
            assert server.cut().kind == "frame"
            bad = bytes(announced)
        assert breaks(receive_all, server, bad).kind in ("frame", "size")
    server._buffer.clear()
    assert receive_all(server, frame) == [b"one"]  # so it was the bits alone


def test_a_frame_cut_anywhere_is_not_delivered() -> None:
    client, server = opened()
    frame = client.seal(b"one")
    assert server.cut().kind == "lost"
    for byte in frame[:-1]:
        assert receive_all(server, bytes([byte])) == []
        assert server.cut().kind == "frame"


def test_a_frame_that_was_cut_shorter_on_the_way_fails() -> None:
    client, server = opened()
    first, second = client.seal(b"first"), client.seal(b"second")
    for size in range(len(first)):
        server._buffer.clear()
        assert breaks(receive_all, server, first[:size] + second).kind in ("frame", "size")


def test_a_repeated_frame_fails() -> None:
    client, server = opened()
    frame = client.seal(b"one")
    assert receive_all(server, frame) == [b"one"]
    assert breaks(receive_all, server, frame).kind == "frame"


def test_swapped_frames_fail() -> None:
    client, server = opened()
    first, second = client.seal(b"one"), client.seal(b"two")
    assert breaks(receive_all, server, second + first).kind == "frame"


def test_a_dropped_frame_fails_the_next() -> None:
    client, server = opened()
    client.seal(b"dropped")
    assert breaks(receive_all, server, client.seal(b"two")).kind == "frame"


def test_a_frame_sent_back_to_its_maker_fails() -> None:
    client, server = opened()
    assert breaks(receive_all, client, client.seal(b"one")).kind == "frame"
    assert breaks(receive_all, server, server.seal(b"one")).kind == "frame"


def test_a_forged_farewell_fails() -> None:
    _, server = opened()
    assert breaks(receive_all, server, bytes(20)).kind == "frame"


@pytest.mark.parametrize("size", [MAX_FRAME_BYTES + 1, 2**31, 2**32 - 1])
def test_an_oversized_frame_is_refused_by_its_length_alone(size: int) -> None:
    _, server = opened()
    assert breaks(receive_all, server, size.to_bytes(4, "big")).kind == "size"


def test_what_is_broken_stays_broken() -> None:
    client, server = opened()
    bad, good = client.seal(b"one")[:-1] + b"X", client.seal(b"two")
    for _ in range(3):
        assert breaks(receive_all, server, bad + good).kind == "frame"


# -- noise ------------------------------------------------------------------------------------------------------------


def pieces(noise: random.Random, data: bytes) -> list[bytes]:
    cuts = sorted(noise.randrange(len(data) + 1) for _ in range(noise.randrange(4)))
    return [data[start:end] for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True)]


def feed_handshake(session: Session, data: list[bytes]) -> None:
    for piece in data:
        if not session.ready:
            shake(session, piece)


@pytest.mark.parametrize("seed", range(4))
def test_strangers_never_get_through(seed: int) -> None:
    noise = random.Random(seed)
    for _ in range(1000):
        session = Session(noise.choice(("client", "server")), noise.choice((SECRET, INSECURE)))
        start = session._hello[: noise.randrange(43)]
        try:
            feed_handshake(session, pieces(noise, start + noise.randbytes(noise.randrange(200))))
        except Broken as why:
            assert why.reason
        assert not session.ready


@pytest.mark.parametrize("seed", range(4))
def test_noise_among_frames_delivers_nothing_but_what_was_sent(seed: int) -> None:
    noise = random.Random(seed)
    for _ in range(500):
        client, server = opened()
        sent = [noise.randbytes(noise.randrange(1, 60)) for _ in range(4)]
        stream = bytearray(b"".join(client.seal(payload) for payload in sent))
        for _ in range(noise.randrange(1, 4)):
            place = noise.randrange(len(stream))
            match noise.randrange(3):
                case 0:
                    stream[place] ^= noise.randrange(1, 256)
                case 1:
                    del stream[place : place + noise.randrange(1, 30)]
                case 2:
                    stream[place:place] = noise.randbytes(noise.randrange(1, 30))
            stream = stream or bytearray(b"x")
        got: list[bytes] = []
        try:
            for piece in pieces(noise, bytes(stream)):
                server.feed(piece)
                while (payload := server.receive()) is not None:
                    got.append(payload)
        except Broken as why:
            assert why.kind in ("frame", "size")
        assert got == sent[: len(got)]


# -- nothing here runs what it receives -------------------------------------------------------------------------------


def test_no_code_travels_between_nodes() -> None:
    source = Path(holdfast.__file__).parent
    # A function goes to the ranks of its own machine, in a file that is private to the user.
    allowed = {"agent/launch.py", "worker/programs.py"}
    executes = re.compile(r"\b(?:cloud|c|_)?pickle\b|\bmarshal\b|\bshelve\b|\bdill\b|\beval\(|\bshell=True")
    folders = [source / name for name in ("wire", "control", "coordinator", "agent", "worker")]
    files = [file for folder in folders for file in folder.rglob("*.py")]
    assert len(files) > 20
    found = {str(file.relative_to(source)) for file in files if executes.search(file.read_text())}
    assert found == allowed
