"""The handshake and the frames between two nodes, as bytes in and bytes out: no sockets, no clock.

Each end proves that it holds the job's secret before the other believes a word, and every frame after that is signed:

    client  magic, version, flags, nonce                   42 bytes
    server  magic, version, flags, nonce, server's proof   74 bytes
    client  client's proof                                 32 bytes
    both    length, MAC, payload; again and again

A proof covers both openings under a label of its own direction, so one sent back to its maker proves nothing. The MAC
covers a frame's place in its direction, which is never sent, so a frame that was dropped, repeated, moved or cut fails.
The server proves itself first: a client with another secret finds out by itself and can tell its user.
Frames are signed, not hidden. Where others can listen and must not, TLS goes around all this (`tls.py`).
"""

from __future__ import annotations

import hmac
import os
import struct
from typing import Literal

from holdfast.wire.secret import Secret

Side = Literal["client", "server"]
Kind = Literal[
    "not-holdfast",  # another program is there
    "tls",  # it speaks TLS, and this end does not
    "version",
    "insecure",  # one end has a secret, the other says --insecure
    "secret",  # it has another secret
    "size",  # more bytes than are allowed
    "frame",  # a frame was altered, or cut off
    "message",  # a well-signed frame holds no message that is known here
    "late",  # no handshake in time
    "full",  # it does not read what it is sent
    "lost",  # the connection ended by itself
]

VERSION = 1
MAX_FRAME_BYTES = 256 * 1024

_MAGIC = b"HOLDFAST"
_HEADER = struct.Struct("!8sBB")  # its layout is for all versions: an end must be able to say which one it is
_INSECURE_FLAG = 1
_NONCE_BYTES = 32
_PROOF_BYTES = 32
HELLO_BYTES = _HEADER.size + _NONCE_BYTES
ANSWER_BYTES = HELLO_BYTES + _PROOF_BYTES

_LENGTH = struct.Struct("!I")
_COUNTER = struct.Struct("!Q")
_MAC_BYTES = 16
FRAME_HEAD_BYTES = _LENGTH.size + _MAC_BYTES


class Broken(Exception):
    """The connection is of no more use. `reason` is what the far end did: "the coordinator at H:P {reason}"."""

    def __init__(self, kind: Kind, reason: str, last_words: bytes = b"") -> None:
        super().__init__(reason)
        self.kind: Kind = kind
        self.reason = reason
        self.last_words = last_words  # what the far end is told before the connection closes


class Session:
    """One end of a connection. After `Broken` it stays broken."""

    def __init__(self, side: Side, secret: Secret) -> None:
        self.ready = False
        self._side = side
        self._secret = secret
        self._flags = _INSECURE_FLAG if secret.insecure else 0
        self._hello = _HEADER.pack(_MAGIC, VERSION, self._flags) + os.urandom(_NONCE_BYTES)
        self._transcript = b""  # both openings, the client's first
        self._buffer = bytearray()
        self._sign_key = b""
        self._check_key = b""
        self._sent = 0
        self._received = 0

    def opening(self) -> bytes:
        """What to send as soon as there is a connection."""
        return self._hello if self._side == "client" else b""

    def feed(self, data: bytes) -> None:
        """Take bytes in. To keep the buffer small, call `shake` or `receive` after each."""
        self._buffer += data

    def shake(self) -> bytes:
        """Go on with the handshake, and give back what to send; `ready` says when it is done."""
        if self._side == "client":
            return self._take_answer()
        return self._take_hello() if not self._transcript else self._take_proof()

    def seal(self, payload: bytes) -> bytes:
        """The frame to send. Each is good once, in this order."""
        if len(payload) > MAX_FRAME_BYTES:
            raise ValueError(f"a message of {len(payload):,} bytes is over the limit of {MAX_FRAME_BYTES:,}")
        mac = _mac(self._sign_key, self._sent, payload)
        self._sent += 1
        return _LENGTH.pack(len(payload)) + mac + payload

    def receive(self) -> bytes | None:
        """The payload of the next frame, b"" for a farewell, None until all of it is here."""
        buffer = self._buffer
        if len(buffer) < _LENGTH.size:
            return None
        (size,) = _LENGTH.unpack_from(buffer)
        if size > MAX_FRAME_BYTES:
            raise Broken("size", f"announced a frame of {size:,} bytes; {MAX_FRAME_BYTES:,} are allowed")
        end = FRAME_HEAD_BYTES + size
        if len(buffer) < end:
            return None
        payload = bytes(buffer[FRAME_HEAD_BYTES:end])
        mac = buffer[_LENGTH.size : FRAME_HEAD_BYTES]
        if not hmac.compare_digest(mac, _mac(self._check_key, self._received, payload)):
            raise Broken("frame", "sent a frame that was altered, repeated or moved on its way")
        self._received += 1
        del buffer[:end]
        return payload

    def farewell(self) -> bytes:
        """The last frame to send, an empty one. A connection that ends without it was cut, perhaps by a third party."""
        return self.seal(b"")

    def cut(self) -> Broken:
        """What to make of a connection that ended here, without a farewell."""
        if self._side == "client" and not self.ready and not self._buffer:
            return Broken("lost", "closed the connection without an answer, as one that expects TLS does")
        if self._side == "server" and not self.ready and self._transcript:
            return Broken("secret", "left when it saw this end's proof, as one with another secret does")
        if not self.ready:
            return Broken("lost", "closed the connection in the middle of the handshake")
        if self._buffer:
            return Broken("frame", "closed the connection in the middle of a frame")
        return Broken("lost", "closed the connection without a word")

    # -- the handshake ------------------------------------------------------------------------------------------------

    def _take_hello(self) -> bytes:
        self._check_header()
        if not self._holds_just(HELLO_BYTES):
            return b""
        self._transcript = bytes(self._buffer) + self._hello
        self._buffer.clear()
        return self._hello + self._digest(b"server proof")

    def _take_answer(self) -> bytes:
        self._check_header()
        if not self._holds_just(ANSWER_BYTES):
            return b""
        self._transcript = self._hello + bytes(self._buffer[:HELLO_BYTES])
        self._check_proof(self._buffer[HELLO_BYTES:], b"server proof")
        self._buffer.clear()
        self._open(sign=b"client frames", check=b"server frames")
        return self._digest(b"client proof")

    def _take_proof(self) -> bytes:
        # The client may speak right after its proof, so these are not the last bytes, as they are before.
        if len(self._buffer) >= _PROOF_BYTES:
            self._check_proof(self._buffer[:_PROOF_BYTES], b"client proof")
            del self._buffer[:_PROOF_BYTES]
            self._open(sign=b"server frames", check=b"client frames")
        return b""

    def _check_header(self) -> None:
        """Refuse the far end by the first byte that tells. A client that can be helped is told what this end is."""
        start = self._buffer[: _HEADER.size]
        if not _MAGIC.startswith(start[: len(_MAGIC)]):
            if start[0] in (0x15, 0x16):  # the record types of a TLS alert and of a TLS handshake
                raise Broken("tls", "speaks TLS, and this end does not")
            raise Broken("not-holdfast", "is no Holdfast")
        if len(start) < _HEADER.size:
            return
        _, version, flags = _HEADER.unpack(start)
        last_words = self._hello[: _HEADER.size] if self._side == "server" else b""
        if version != VERSION:
            raise Broken("version", f"speaks version {version} of the protocol, this end version {VERSION}", last_words)
        if flags not in (0, _INSECURE_FLAG):
            raise Broken("version", f"asks for what this version does not know (flags {flags:#x})", last_words)
        if flags != self._flags:
            theirs = "runs with --insecure, and this end has" if flags else "has a secret, and this end runs with"
            raise Broken("insecure", f"{theirs} {self._secret.source}", last_words)

    def _holds_just(self, size: int) -> bool:
        if len(self._buffer) > size:
            raise Broken("size", "went on before the handshake was done")
        return len(self._buffer) == size

    def _check_proof(self, proof: bytearray, label: bytes) -> None:
        if not hmac.compare_digest(proof, self._digest(label)):
            raise Broken("secret", f"has another secret than {self._secret.source}")

    def _open(self, *, sign: bytes, check: bytes) -> None:
        self._sign_key, self._check_key = self._digest(sign), self._digest(check)
        self.ready = True

    def _digest(self, label: bytes) -> bytes:
        """A proof or a key of this connection. The transcript has one length, so no label can run into it."""
        return hmac.digest(self._secret.key, b"holdfast 1 " + label + self._transcript, "sha256")


def _mac(key: bytes, counter: int, payload: bytes) -> bytes:
    return hmac.digest(key, _COUNTER.pack(counter) + payload, "sha256")[:_MAC_BYTES]
