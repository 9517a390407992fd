"""What two doctors say to each other, over the authenticated channel that the nodes of a job use as well."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import platform
import socket
from typing import TypeAlias

import msgspec

from holdfast._version import __version__
from holdfast.doctor.finding import State

LOOKUP_S = 3.0
PASSED_ON = "::ffff:"  # before an IPv4 address that came to a socket of both families


class Hello(msgspec.Struct, frozen=True, tag=True):
    host: str
    versions: dict[str, str]
    back_port: int  # where the other side is to connect to,
    token: str  # and what it is to say there


class Met(msgspec.Struct, frozen=True, tag=True):
    host: str
    versions: dict[str, str]
    seen_as: str  # the address from which the caller came
    known_as: tuple[str, ...]  # the addresses of its name, as found here
    no_way_back: str  # why it could not be reached; '': it was


class Tick(msgspec.Struct, frozen=True, tag=True):
    """What time is it?"""


class Tock(msgspec.Struct, frozen=True, tag=True):
    monotonic_s: float
    wall_s: float


class Load(msgspec.Struct, frozen=True, tag=True):
    """Comes back as it is. A way that loses large packets, and no small ones, is found by this."""

    content: bytes


class Verdict(msgspec.Struct, frozen=True, tag=True):
    """What the caller has found, for who watches the other side."""

    state: State
    text: str


ToServer: TypeAlias = Hello | Tick | Load | Verdict
ToCaller: TypeAlias = Met | Tock | Load


def versions() -> dict[str, str]:
    found = {"holdfast": __version__, "python": platform.python_version()}
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        found["torch"] = importlib.metadata.version("torch")
    return found


async def addresses(host: str) -> tuple[str, ...]:
    """Of a name; none if it cannot be resolved in time."""
    try:
        async with asyncio.timeout(LOOKUP_S):
            found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return ()
    return tuple(dict.fromkeys(str(address[0]) for *_, address in found))


def plain(address: str) -> str:
    return address.removeprefix(PASSED_ON)
