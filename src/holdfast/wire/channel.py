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

# The kernel's default send buffer is 208 KiB. What is larger, a command line of megabytes say, goes in a nameless file.
MAX_PACKET_BYTES = 128 * 1024
MAX_FDS = 16
_IN_A_FILE = b"\xc1"  # a byte that no msgpack message begins with


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
        """Send one message. Raises BlockingIOError on a non-blocking channel that is full."""
        packet = msgspec.msgpack.encode(message)
        if len(packet) <= MAX_PACKET_BYTES:
            self._send(packet, fds)
            return
        file = os.memfd_create("holdfast-message", os.MFD_CLOEXEC)
        with open(file, "wb") as writer:
            writer.write(packet)
            writer.flush()
            self._send(_IN_A_FILE, [*fds, file])

    def _send(self, packet: bytes, fds: Sequence[int]) -> None:
        try:
            socket.send_fds(self._sock, [packet], list(fds))
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
        for fd in fds:
            os.set_inheritable(fd, False)
        if packet == _IN_A_FILE and fds:
            with open(fds.pop(), "rb") as reader:
                reader.seek(0)
                packet = reader.read()
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
