"""The store of the next world, which is there before it is needed."""

from __future__ import annotations

import asyncio
import itertools
import signal
import socket
import subprocess
from collections.abc import Iterator, Sequence

import pytest

from holdfast import linux
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


def is_open(port: int) -> bool:
    with socket.socket() as asked:
        return asked.connect_ex((ADDR, port)) == 0


def test_a_keeper_that_is_there_is_taken_with_its_port(
    stores: Stores, helpers: Helpers, process: subprocess.Popen[bytes]
) -> None:
    stores.prepare(ADDR)
    stores.prepare(ADDR)
    [asked] = helpers.asked
    assert asked.waits and asked.host == ADDR
    assert not stores.forked(asked.token, process.pid)
    assert stores.port(ADDR) == asked.port
    assert stores.take() == process.pid
    stores.keep(ADDR, asked.port)
    assert helpers.asked == [asked], "it is kept already"
    assert process.poll() is None
    assert stores.take() is None, "each is for one world"
    stores.prepare(ADDR)
    assert helpers.asked[1].port != asked.port


def test_one_that_was_asked_for_comes_to_the_world_that_has_begun(
    stores: Stores, helpers: Helpers, process: subprocess.Popen[bytes]
) -> None:
    """However late: a second one at its port would be a second store, and ranks would be spread over both."""
    stores.prepare(ADDR)
    [asked] = helpers.asked
    assert stores.port(ADDR) == asked.port
    assert stores.take() is None
    stores.keep(ADDR, asked.port)
    assert helpers.asked == [asked]
    assert stores.forked(asked.token, process.pid)
    assert not stores.forked(asked.token - 1, process.pid), "that is somebody else's"
    assert process.poll() is None


def test_one_that_was_asked_for_and_cannot_come_is_told(stores: Stores, helpers: Helpers) -> None:
    stores.prepare(ADDR)
    [asked] = helpers.asked
    stores.take()
    assert stores.not_forked(asked.token)
    assert not is_open(asked.port)


def test_where_nobody_was_asked_the_world_asks(
    stores: Stores, helpers: Helpers, process: subprocess.Popen[bytes]
) -> None:
    port = stores.port(ADDR)
    assert stores.take() is None
    assert is_open(port)
    stores.keep(ADDR, port)
    stores.keep(ADDR, port)
    [asked] = helpers.asked
    assert asked.port == port and not asked.waits
    assert stores.forked(asked.token, process.pid)


@pytest.mark.parametrize("ahead", [True, False], ids=["asked ahead", "asked by its world"])
def test_one_that_comes_when_its_world_is_over_ends(
    ahead: bool, stores: Stores, helpers: Helpers, process: subprocess.Popen[bytes]
) -> None:
    if ahead:
        stores.prepare(ADDR)
    port = stores.port(ADDR)
    stores.take()
    stores.keep(ADDR, port)
    [asked] = helpers.asked
    stores.retire(None, some_stay=False)
    assert not stores.forked(asked.token, process.pid)
    assert process.wait(10) == -signal.SIGKILL


def test_one_that_comes_when_the_world_of_ranks_that_stay_is_over_answers_them_first(
    monkeypatch: pytest.MonkeyPatch,
    loop: asyncio.AbstractEventLoop,
    stores: Stores,
    helpers: Helpers,
    process: subprocess.Popen[bytes],
) -> None:
    """They have connected to its port already, and whoever was cut off there would try again after half a second."""
    monkeypatch.setattr(stores_module, "OLD_S", 0.05)
    stores.prepare(ADDR)
    stores.take()
    stores.retire(None, some_stay=True)
    process.send_signal(signal.SIGSTOP)  # as it waits to be told to begin
    assert not stores.forked(helpers.asked[0].token, process.pid)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.2)
    assert linux.state(process.pid) == "S"
    loop.run_until_complete(asyncio.sleep(0.1))
    assert process.wait(10) == -signal.SIGKILL


def test_a_world_that_was_never_launched_leaves_no_port_open(stores: Stores) -> None:
    port = stores.port(ADDR)
    stores.take()
    stores.retire(None, some_stay=False)
    assert not is_open(port)


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
    assert stores.take() is None
    stores.keep(ADDR, asked.port)
    assert [each.port for each in helpers.asked] == [asked.port] * 2


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
