"""An agent's line to its coordinator, and the shortest one: a coordinator in the same process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from holdfast.control import acts, protocol
from holdfast.control.coordinator import Coordinator
from holdfast.control.membership import Settings
from holdfast.control.restarts import Decide
from holdfast.coordinator import ledger
from holdfast.coordinator.host import Host

Post = Callable[[acts.Event], None]
Say = Callable[[str], None]


class Link(Protocol):
    """What an agent needs of its line."""

    addr: str  # by which the other nodes reach this one

    @property
    def hosts(self) -> bool: ...  # whether the coordinator is in this process

    def tell(self, message: protocol.ToCoordinator) -> None: ...
    def hang_up(self, why: str) -> None: ...
    async def close(self) -> None: ...


class Alone:
    """One node, and its coordinator beside it: messages are calls."""

    def __init__(self, addr: str, node: str, settings: Settings, decide: Decide, post: Post) -> None:
        self.addr = addr
        self._node = node
        self._post = post
        loop = asyncio.get_running_loop()
        self._host = Host(loop, Coordinator(settings, 0, None, node, decide), ledger.Memory(), lambda why: None)

    @property
    def hosts(self) -> bool:
        return True

    def start(self) -> None:
        self._host.attach(self._node, self._post, lambda: None)
        self._host.begin()
        self._post(acts.Contact())

    def tell(self, message: protocol.ToCoordinator) -> None:
        self._host.receive(self._node, message)

    def hang_up(self, why: str) -> None:
        return None

    async def close(self) -> None:
        await self._host.close(self._node)
