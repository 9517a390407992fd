"""The store of the next world, which is there before it is needed."""

from __future__ import annotations

import asyncio
import itertools
import signal
import socket
import subprocess
from collections.abc import Iterator, Sequence

import pytest

from holdfast.agent import stores as stores_module
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
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    made = asyncio.new_event_loop()
    yield made
    made.close()


@pytest.fixture
def stores(loop: asyncio.AbstractEventLoop, helpers: Helpers) -> Iterator[Stores]:
    made = Stores(loop, helpers, itertools.count(-1, -1), 0, None)  # type: ignore[arg-type]
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


def test_a_port_that_was_asked_for_is_not_taken_ahead(loop: asyncio.AbstractEventLoop, helpers: Helpers) -> None:
    with socket.create_server((ADDR, 0)) as other:
        fixed = other.getsockname()[1]
    stores = Stores(loop, helpers, itertools.count(-1, -1), fixed, None)  # type: ignore[arg-type]
    stores.prepare(ADDR)
    assert helpers.asked == []
    assert stores.port(ADDR) == fixed
    stores.close()


def test_the_store_of_a_world_of_which_nobody_stays_ends_with_it(
    stores: Stores, process: subprocess.Popen[bytes]
) -> None:
    stores.retire(process.pid, some_stay=False)
    assert process.wait(10) == -signal.SIGKILL


def test_that_of_ranks_that_stay_is_there_for_a_while(
    monkeypatch: pytest.MonkeyPatch,
    loop: asyncio.AbstractEventLoop,
    stores: Stores,
    process: subprocess.Popen[bytes],
) -> None:
    """A thread of theirs may be about to connect to it."""
    monkeypatch.setattr(stores_module, "OLD_S", 0.05)
    stores.retire(process.pid, some_stay=True)
    loop.run_until_complete(asyncio.sleep(0))
    assert process.poll() is None
    loop.run_until_complete(asyncio.sleep(0.1))
    assert process.wait(10) == -signal.SIGKILL


@pytest.mark.parametrize("end", ["exited", "with its zygote"])
def test_one_that_is_gone_by_itself_is_not_ended_again(
    end: str,
    monkeypatch: pytest.MonkeyPatch,
    loop: asyncio.AbstractEventLoop,
    stores: Stores,
    process: subprocess.Popen[bytes],
) -> None:
    """Its number may be another process's by then: here it is."""
    monkeypatch.setattr(stores_module, "OLD_S", 0.05)
    stores.retire(process.pid, some_stay=True)
    stores.exited(process.pid) if end == "exited" else stores.clear()
    loop.run_until_complete(asyncio.sleep(0.1))
    assert process.poll() is None


def test_with_the_agent_all_of_them_end(stores: Stores, process: subprocess.Popen[bytes]) -> None:
    stores.retire(process.pid, some_stay=True)
    stores.close()
    assert process.wait(10) == -signal.SIGKILL
