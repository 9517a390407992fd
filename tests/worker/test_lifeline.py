"""Whoever waits for a process's lifeline hears of its death before the process is gone, and how it ended."""

from __future__ import annotations

import mmap
import os
import signal
import threading
import time
from collections.abc import Callable

import pytest

from holdfast.lifeline import Dying, Lifeline, look_at

PLACE = 448


def make() -> tuple[Lifeline, memoryview]:
    memory = memoryview(mmap.mmap(-1, 4096))
    line = Lifeline(memory, PLACE)
    line.make()
    return line, memory


def child(line: Lifeline, then: Callable[[], None]) -> int:
    """A process that holds it, and has much to be taken apart."""
    ready, tell = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            line.take()
            much = mmap.mmap(-1, 256 << 20)
            for at in range(0, len(much), 4096):
                much[at] = 1
            os.write(tell, b".")
            then()
        finally:
            os._exit(0)
    os.read(ready, 1)
    os.close(ready)
    os.close(tell)
    return pid


@pytest.mark.parametrize(
    ("how", "status"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), -signal.SIGKILL),
        (lambda: os.kill(os.getpid(), signal.SIGTERM), -signal.SIGTERM),
        (lambda: os._exit(3), 3),
        (lambda: os._exit(0), 0),
    ],
    ids=["killed", "terminated", "exit 3", "exit 0"],
)
def test_an_end_is_known_before_the_process_is_gone(how: Callable[[], None], status: int) -> None:
    line, _ = make()
    ready, go = os.pipe()

    def when_told() -> None:
        os.read(ready, 1)
        how()

    pid = child(line, when_told)
    fd = os.pidfd_open(pid)
    os.write(go, b".")
    assert line.wait()
    found = look_at(pid)
    _, raw = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(raw) == status
    assert found is None or found == Dying(status, os.getpid())  # None: this machine took its time
    for each in (fd, ready, go):
        os.close(each)


def test_who_lets_go_is_not_dead() -> None:
    line, _ = make()
    ready, go = os.pipe()

    def let_go() -> None:
        line.let_go()
        os.read(ready, 1)

    pid = child(line, let_go)
    assert not line.wait()
    assert look_at(pid) is None
    os.write(go, b".")
    os.waitpid(pid, 0)


def test_a_thread_that_ends_is_not_the_process() -> None:
    """It may have been the one that held it."""
    line, _ = make()
    holder = threading.Thread(target=line.take)
    holder.start()
    holder.join()
    assert line.wait()
    assert look_at(os.getpid()) is None


def test_a_program_that_becomes_another_one_lives_on() -> None:
    line, _ = make()
    pid = child(line, lambda: os.execv("/bin/sleep", ["sleep", "60"]))
    try:
        assert line.wait()
        assert look_at(pid) is None
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_it_is_heard_of_early() -> None:
    """Of ten large processes at least one, whatever else the machine does."""
    early = 0
    for _ in range(10):
        line, _ = make()
        pid = child(line, lambda: time.sleep(60))
        os.kill(pid, signal.SIGKILL)
        assert line.wait()
        early += look_at(pid) is not None
        os.waitpid(pid, 0)
    assert early
