"""The rank's side of a look at its stack: a signal that makes it write all threads' frames into a pipe of the agent's.

The handler is C's: it works while Python is blocked in C with its lock held, and it restarts the system call that it
interrupts. Forks inherit it, and with it the pipe; what is executed anew does not.
"""

from __future__ import annotations

import faulthandler
import os
import signal

STACK_SIGNAL = signal.SIGRTMAX - 2  # real-time, so none that a library has a use for by its name

# How a dump of the main thread ends in everything forked from the zygote, which is started with `-c`.
LAST_LINE = b" in <module>\n"
LAST_FILE = b'  File "<string>", line '

_fd = -1


def install(fd: int) -> None:
    """`fd` is the pipe's write end. A pipe that nobody empties must not hold up the rank. One that was there before is
    closed."""
    global _fd
    os.set_blocking(fd, False)
    signal.signal(STACK_SIGNAL, signal.SIG_IGN)  # what is left when Python shuts down, lest a late look kills the rank
    faulthandler.register(STACK_SIGNAL, file=fd, all_threads=True, chain=False)
    if _fd >= 0:
        os.close(_fd)
    _fd = fd


def is_complete(dump: bytes) -> bool:
    line = dump[dump.rfind(b"\n", 0, -1) + 1 :]
    return line.startswith(LAST_FILE) and line.endswith(LAST_LINE)
