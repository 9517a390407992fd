"""A program: passes Ethernet frames between two devices, each later by so much, or lost by chance. It needs root.

`relay.py DEVICE DEVICE DELAY_S PART`. It says "ready" when it has begun, and runs until it is killed. It imports
nothing of the package, so that it starts at once.
"""

from __future__ import annotations

import heapq
import random
import select
import socket
import sys
import time

ALL_PROTOCOLS = 3
MAX_FRAME_BYTES = 1 << 17
ROOM_BYTES = 1 << 25  # what finds none while this process waits for a CPU would be lost by no plan
_SOL_PACKET = 263
_PACKET_VNET_HDR = 15  # frames come with the work that is left to do on them, checksums say, and go on with it
_PACKET_IGNORE_OUTGOING = 23
_SO_SNDBUFFORCE, _SO_RCVBUFFORCE = 32, 33


def main(first: str, second: str, delay_s: float, part: float) -> None:
    ends = [_open(first), _open(second)]
    waiting: list[tuple[float, int, int, bytes]] = []
    count = 0
    print("ready", flush=True)
    while True:
        wait_s = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        ready, _, _ = select.select(ends, [], [], wait_s)
        now_s = time.monotonic()
        for end in ready:
            try:
                frame = end.recv(MAX_FRAME_BYTES)
            except OSError:
                continue  # the device is down
            if random.random() >= part:
                count += 1  # frames of one moment stay in order
                heapq.heappush(waiting, (now_s + delay_s, count, 1 - ends.index(end), frame))
        while waiting and waiting[0][0] <= time.monotonic():
            _, _, to, frame = heapq.heappop(waiting)
            try:
                ends[to].send(frame)
            except OSError:
                continue  # a full queue loses it, as a real one does


def _open(device: str) -> socket.socket:
    made = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    made.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
    made.setsockopt(_SOL_PACKET, _PACKET_IGNORE_OUTGOING, 1)
    for buffer in (_SO_RCVBUFFORCE, _SO_SNDBUFFORCE):
        made.setsockopt(socket.SOL_SOCKET, buffer, ROOM_BYTES)
    made.bind((device, ALL_PROTOCOLS))
    return made


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]), float(sys.argv[4]))
