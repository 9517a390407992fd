"""A message channel between two processes of one machine: typed packets, each with the file descriptors it hands over.

Packets are `SOCK_SEQPACKET`: a message arrives whole or not at all, and a dead peer reads as end of file.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import msgspec

T = TypeVar("T")

# The largest environment and module lists seen are a tenth of this; the kernel's default send buffer is 208 KiB.
MAX_PACKET_BYTES = 160 * 1024
MAX_FDS = 16


class ChannelClosed(Exception):
    """The process at the other end is gone."""


class Channel(Generic[T]):
    """One end of a channel that receives messages of the given type and sends any `msgspec.Struct`."""

    def __init__(self, sock: socket.socket, receives: Any) -> None:
        self._sock = sock
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(receives)

    def fileno(self) -> int:
        return self._sock.fileno()

    def send(self, message: msgspec.Struct, fds: Sequence[int] = ()) -> None:
        packet = msgspec.msgpack.encode(message)
        if len(packet) > MAX_PACKET_BYTES:
            raise ValueError(f"{type(message).__name__} of {len(packet)} bytes is over the {MAX_PACKET_BYTES} allowed")
        try:
            if fds:
                socket.send_fds(self._sock, [packet], list(fds))
            else:
                self._sock.send(packet)
        except (BrokenPipeError, ConnectionResetError) as gone:
            raise ChannelClosed from gone

    def receive(self) -> tuple[T, list[int]] | None:
        """The next message and its descriptors, or None when a non-blocking channel has none."""
        try:
            packet, fds, _, _ = socket.recv_fds(self._sock, MAX_PACKET_BYTES, MAX_FDS)
        except BlockingIOError:
            return None
        except ConnectionResetError as gone:
            raise ChannelClosed from gone
        if not packet:
            raise ChannelClosed
        try:
            return self._decoder.decode(packet), fds
        except msgspec.MsgspecError:
            close_all(fds)
            raise

    def setblocking(self, blocking: bool) -> None:
        self._sock.setblocking(blocking)

    def close(self) -> None:
        self._sock.close()


def pair() -> tuple[socket.socket, socket.socket]:
    """Two connected ends; neither survives an exec unless passed on by name."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def adopt(fd: int) -> socket.socket:
    """A socket from a descriptor that another process handed over."""
    return socket.socket(fileno=fd)


def close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)
