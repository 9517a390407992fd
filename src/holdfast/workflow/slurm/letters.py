"""Short messages between the processes of a workflow, signed with its secret.

Each is also written down where the other can find it. One that gets lost is found later; one that comes twice changes
nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import os
import secrets
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from holdfast.workflow.deciding import Ended, Placed, Prepared, Progressed, Requeued, Stop


class Ask(msgspec.Struct, frozen=True, tag=True):
    """Slurm, which has ended something: it knows what comes next."""


Letter = Placed | Requeued | Prepared | Progressed | Ended | Stop | Ask

SIGNATURE_BYTES = 32
MAX_BYTES = 1400  # fits a packet of any network
_decode = msgspec.json.Decoder(Letter).decode


def make_secret(folder: Path) -> None:
    path = folder / "secret"
    with contextlib.suppress(FileExistsError), open(path, "xb", opener=_private) as file:
        file.write(secrets.token_bytes(32))


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


class Post:
    def __init__(self, folder: Path) -> None:
        self._secret = (folder / "secret").read_bytes()

    def seal(self, letter: Letter) -> bytes:
        body = msgspec.json.encode(letter)
        return hmac.digest(self._secret, body, hashlib.sha256) + body

    def open(self, sealed: bytes) -> Letter | None:
        """None for what is not ours."""
        signature, body = sealed[:SIGNATURE_BYTES], sealed[SIGNATURE_BYTES:]
        if not hmac.compare_digest(signature, hmac.digest(self._secret, body, hashlib.sha256)):
            return None
        try:
            letter: Letter = _decode(body)
        except msgspec.MsgspecError:
            return None
        return letter

    def send(self, letter: Letter, address: Path) -> None:
        """To whoever has written its address there. It may be gone, or out of reach."""
        sealed = self.seal(letter)
        if len(sealed) > MAX_BYTES:
            return
        with contextlib.suppress(OSError, ValueError):
            host, port = address.read_text().split()
            for family, kind, _, _, where in socket.getaddrinfo(host, int(port), type=socket.SOCK_DGRAM):
                with contextlib.suppress(OSError), socket.socket(family, kind) as out:
                    out.sendto(sealed, where)
                    return

    async def listen(self, address: Path, got: Callable[[Letter], object]) -> asyncio.DatagramTransport:
        """And say where."""
        loop = asyncio.get_running_loop()
        transport, _ = await loop.create_datagram_endpoint(lambda: _Box(self, got), ("0.0.0.0", 0))
        port = transport.get_extra_info("sockname")[1]
        part = address.with_suffix(".part")
        part.write_text(f"{socket.gethostname()} {port}\n")
        part.replace(address)
        return transport


class _Box(asyncio.DatagramProtocol):
    def __init__(self, post: Post, got: Callable[[Letter], object]) -> None:
        self._post, self._got = post, got

    def datagram_received(self, data: bytes, addr: Any) -> None:
        if (letter := self._post.open(data)) is not None:
            self._got(letter)
