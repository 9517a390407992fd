"""Ports for servers that a test starts later, or starts again."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket

# Below the ports that the kernel gives to whoever asks for any, and above those that jobs choose by themselves.
FIRST, END = 30_000, 32_000
SHARES = 8  # processes that run tests beside each other have ports of their own

_size = (END - FIRST) // SHARES
_share = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % SHARES
_numbers = itertools.count(os.getpid())


def free_port() -> int:
    """None that was given lately: it may be bound only in a while."""
    for number in itertools.islice(_numbers, _size):
        port = FIRST + _share * _size + number % _size
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("", port))
            return port
    raise AssertionError(f"no port is free of {_size} from {FIRST + _share * _size} on")
