"""Passes frames between two interfaces, each so many milliseconds late: `delays.py ONE OTHER MS`.

It says "ready" when it listens. For kernels that have no netem.
"""

from __future__ import annotations

import contextlib
import select
import socket
import sys
import time
from collections import deque

_ETH_P_ALL = 3
_SOL_PACKET = 263
_PACKET_VNET_HDR = 15  # frames come with what is left to do on them, segmenting and checksums, and go on like that
_PACKET_IGNORE_OUTGOING = 23
_SO_SNDBUFFORCE = 32
_SO_RCVBUFFORCE = 33
_ROOM = 1 << 25  # whatever the system's limit: what finds no room while this process waits for a CPU is lost
_LARGEST = 1 << 17


def listen(interface: str) -> socket.socket:
    link = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    link.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
    link.setsockopt(_SOL_PACKET, _PACKET_IGNORE_OUTGOING, 1)
    for buffer in (_SO_RCVBUFFORCE, _SO_SNDBUFFORCE):
        link.setsockopt(socket.SOL_SOCKET, buffer, _ROOM)
    link.bind((interface, _ETH_P_ALL))
    link.setblocking(False)
    return link


def main() -> None:
    one, other = listen(sys.argv[1]), listen(sys.argv[2])
    delay_s = float(sys.argv[3]) / 1000
    across = {one: other, other: one}
    waiting: deque[tuple[float, socket.socket, bytes]] = deque()
    print("ready", flush=True)
    while True:
        wait_s = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        for link in select.select([one, other], [], [], wait_s)[0]:
            with contextlib.suppress(OSError):  # none left to read, or the interface is down
                while True:
                    waiting.append((time.monotonic() + delay_s, across[link], link.recv(_LARGEST)))
        while waiting and waiting[0][0] <= time.monotonic():
            _, link, frame = waiting.popleft()
            with contextlib.suppress(OSError):  # a network may lose frames
                link.send(frame)


main()
