"""Into the group of a next world, and out of it before it is there."""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections.abc import Iterator

import pytest
from torch._C._distributed_c10d import TCPStore

from holdfast.worker import groups
from holdfast.worker.groups import Made

WAIT_S = 30.0
ALONE = Made("gloo", None, None)
OVER = "the world is over before its group was made"


class Joining:
    """A rank of two that is to be in a world, and its agent's word that this is over."""

    def __init__(self) -> None:
        self.over = threading.Event()
        self.failed: list[BaseException] = []
        self._thread = threading.Thread(target=self._join, daemon=True)
        self._thread.start()

    def _join(self) -> None:
        try:
            groups.join(ALONE, self.over.is_set)
        except BaseException as failure:
            self.failed.append(failure)

    def end_world(self) -> None:
        self.over.set()
        groups.abort(store=True)

    def failure(self) -> str:
        self._thread.join(WAIT_S)
        [failure] = self.failed
        return str(failure)


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """Of a store that nobody keeps yet."""
    found = socket.create_server(("127.0.0.1", 0))
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(found.getsockname()[1]), "RANK": "0", "WORLD_SIZE": "2"}
    for name, value in {**place, "TORCHELASTIC_USE_AGENT_STORE": "True"}.items():
        monkeypatch.setenv(name, value)
    yield found
    found.close()


def keep(port: socket.socket) -> TCPStore:
    fd = os.dup(port.fileno())
    return TCPStore(
        "127.0.0.1", port.getsockname()[1], is_master=True, wait_for_workers=False, master_listen_fd=fd, use_libuv=True
    )


def connections(port: socket.socket) -> list[int]:
    """The states of those that this process has to it, as Linux has them."""
    number, states = port.getsockname()[1], []
    for fd, _ in groups._open_sockets():
        if groups._remote(fd) == number:
            with socket.socket(fileno=os.dup(fd)) as found:
                states.append(found.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0])
    return states


def test_a_store_that_is_late_keeps_nobody_in_a_world_that_is_over(port: socket.socket) -> None:
    """Who is cut off as it connects tries again after half a second, and for a world that is over already."""
    joining = Joining()
    assert select.select([port], [], [], WAIT_S)[0], "it waits for an answer"
    joining.end_world()
    assert connections(port) == [groups.ESTABLISHED]
    store = keep(port)
    assert joining.failure() == OVER
    assert store.num_keys() == 1, "it has told no other rank that it is there"


def test_who_waits_for_others_in_a_world_that_is_over_fails(port: socket.socket) -> None:
    store = keep(port)
    joining = Joining()
    until_s = time.monotonic() + WAIT_S
    while store.num_keys() < 2 and time.monotonic() < until_s:
        pass  # it has not said yet where it can be found
    joining.end_world()
    assert joining.failure() != OVER, "it was told in the middle"
    groups.leave()


def test_nobody_connects_to_a_world_that_is_over(port: socket.socket) -> None:
    with pytest.raises(RuntimeError, match=OVER):
        groups.join(ALONE, lambda: "another rank has failed")
    assert not select.select([port], [], [], 0)[0]
