"""What the ranks of this node are doing: written down before a hung world is stopped, and for whoever asks."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Callable

import msgspec

from holdfast.agent import dumps
from holdfast.agent.doorbell import Taken
from holdfast.agent.rundir import RunDirectory
from holdfast.agent.world import RunningWorld
from holdfast.control import acts, protocol, stacks
from holdfast.wire import channel

# Nodes that have not answered by then are named as missing.
ANSWER_S = 8.0


class Evidence:
    """Takes one dump after the other: two at once would read each other's."""

    def __init__(self, run_dir: RunDirectory, post: Callable[[acts.Event], None]) -> None:
        self._run_dir = run_dir
        self._post = post
        self._one = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._number = itertools.count(1)
        self._visitor = itertools.count(1)
        self._visits: dict[int, Visit] = {}
        self.folder = ""  # of the last dump

    def dump(self, running: RunningWorld | None, wanted: acts.DumpStacks) -> None:
        """Write the stacks down; `Dumped` follows."""
        task = asyncio.get_running_loop().create_task(self._dump(running, wanted))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _dump(self, running: RunningWorld | None, wanted: acts.DumpStacks) -> None:
        groups: tuple[stacks.Group, ...] = ()
        async with self._one:
            if running is not None and running.world.generation == wanted.generation:
                name = f"{next(self._number):04}_generation_{wanted.generation}"
                folder = self._run_dir.join("stacks", name)
                groups = await self._take(running.targets(), folder, wanted.native)
                self.folder = folder or ""
        self._post(acts.Dumped(wanted.generation, groups, wanted.show))

    async def _take(self, targets: list[dumps.Target], folder: str | None, native: bool) -> tuple[stacks.Group, ...]:
        """With descriptors of its own: the world may end meanwhile, and its descriptors be another's."""
        own = [msgspec.structs.replace(one, fd=os.dup(one.fd) if one.fd >= 0 else -1) for one in targets]
        try:
            return stacks.group(await dumps.take(own, folder, native))
        finally:
            channel.close_all([one.fd for one in own if one.fd >= 0])

    async def peek(self) -> Taken:
        """What all ranks of the job are doing, of all nodes."""
        number = next(self._visitor)
        visit = self._visits[number] = Visit()
        self._post(acts.PeekAsked(number))
        try:
            await asyncio.wait_for(visit.complete.wait(), ANSWER_S)
        except TimeoutError:
            pass
        finally:
            del self._visits[number]
        several = len(visit.shown) > 1
        groups = stacks.merge(
            msgspec.structs.replace(group, node=shown.host if several else "")
            for shown in visit.shown
            for group in shown.groups
        )
        return Taken(
            groups=groups,
            suspects=stacks.suspects(groups),
            folder=self.folder,
            nodes=len(visit.shown),
            missing=visit.nodes - len(visit.shown),
        )

    def shown(self, shown: protocol.Shown) -> None:
        if (visit := self._visits.get(shown.visit)) is not None:
            visit.add(shown)


class Visit:
    """One request for all nodes' stacks, and the answers so far."""

    def __init__(self) -> None:
        self.nodes = 1
        self.shown: list[protocol.Shown] = []
        self.complete = asyncio.Event()

    def add(self, shown: protocol.Shown) -> None:
        self.nodes = shown.nodes
        self.shown.append(shown)
        if len(self.shown) >= self.nodes:
            self.complete.set()
