"""The store of the next world, which is there before it is needed."""

from __future__ import annotations

import itertools
import signal
import socket
import subprocess
from collections.abc import Iterator, Sequence

import pytest

from holdfast.agent.stores import Stores
from holdfast.wire import messages

ADDR = "127.0.0.1"


class Helpers:
    """Notes what is asked for."""

    def __init__(self) -> None:
        self.asked: list[messages.ForkKeeper] = []

    def request(self, message: messages.ForkKeeper, fds: Sequence[int]) -> None:
        assert len(fds) == 1
        self.asked.append(message)


@pytest.fixture
def helpers() -> Helpers:
    return Helpers()


@pytest.fixture
def stores(helpers: Helpers) -> Iterator[Stores]:
    made = Stores(helpers, itertools.count(-1, -1), 0, None)  # type: ignore[arg-type]
    yield made
    made.close()


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    found = subprocess.Popen(["sleep", "60"])
    yield found
    found.kill()
    found.wait()


def port_of(listener: socket.socket | None) -> int:
    assert listener is not None
    with listener:
        return int(listener.getsockname()[1])


def test_a_keeper_that_is_there_is_taken_with_its_port(
    stores: Stores, helpers: Helpers, process: subprocess.Popen[bytes]
) -> None:
    stores.prepare(ADDR)
    stores.prepare(ADDR)
    [asked] = helpers.asked
    assert asked.waits and asked.host == ADDR
    stores.forked(asked.token, process.pid)
    assert stores.port(ADDR) == asked.port
    listener, keeper = stores.take()
    assert (port_of(listener), keeper) == (asked.port, process.pid)
    assert process.poll() is None
    assert stores.take() == (None, None), "each is for one world"
    stores.prepare(ADDR)
    assert helpers.asked[1].port != asked.port


def test_one_that_has_not_said_that_it_is_there_is_not_waited_for(
    stores: Stores, helpers: Helpers, process: subprocess.Popen[bytes]
) -> None:
    """Nobody knows whether it will come; two at one port would be two stores."""
    stores.prepare(ADDR)
    [asked] = helpers.asked
    port = stores.port(ADDR)
    assert port != asked.port
    stores.forked(asked.token, process.pid)
    assert process.wait(10) == -signal.SIGKILL
    listener, keeper = stores.take()
    assert (port_of(listener), keeper) == (port, None)


@pytest.mark.parametrize("end", ["exited", "not forked", "with its zygote"])
def test_one_that_is_gone_leaves_the_port_to_another(
    stores: Stores, helpers: Helpers, process: subprocess.Popen[bytes], end: str
) -> None:
    stores.prepare(ADDR)
    [asked] = helpers.asked
    if end == "not forked":
        stores.not_forked(asked.token)
    else:
        stores.forked(asked.token, process.pid)
        stores.exited(process.pid) if end == "exited" else stores.clear()
    assert stores.port(ADDR) == asked.port
    listener, keeper = stores.take()
    assert (port_of(listener), keeper) == (asked.port, None)


def test_a_port_that_was_asked_for_is_not_taken_ahead(helpers: Helpers) -> None:
    with socket.create_server((ADDR, 0)) as other:
        fixed = other.getsockname()[1]
    stores = Stores(helpers, itertools.count(-1, -1), fixed, None)  # type: ignore[arg-type]
    stores.prepare(ADDR)
    assert helpers.asked == []
    assert stores.port(ADDR) == fixed
    stores.close()
