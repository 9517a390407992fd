"""A rank's snapshots: its state, copied into one of two slots in memory beside the training."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from concurrent.futures import Future
from typing import Any

import msgspec
import torch

from holdfast.checkpoint import contents, learned, plans, randomness, tree
from holdfast.checkpoint.copying import Copier
from holdfast.checkpoint.errors import CheckpointError
from holdfast.checkpoint.format import Policy, Snapshot
from holdfast.checkpoint.plans import Position
from holdfast.checkpoint.slots import Slot
from holdfast.checkpoint.together import Together
from holdfast.checkpoint.writing import Desk
from holdfast.wire import channel

_NOTHING = msgspec.Raw(b"null")


class Moment(msgspec.Struct, frozen=True):
    """What a snapshot is of."""

    step: int
    epoch: int | None
    metrics: dict[str, float]
    term: int
    generation: int
    file: str = ""
    part: int = 0


class Memory:
    """The node's slots, as a process has them: mapped, and page-locked where they are filled from a GPU. That takes a
    tenth of a second for some gigabytes, and so does the way back; who goes on in another world keeps them."""

    def __init__(self, desk: Desk) -> None:
        self._fds = desk.take_slots()
        self.own = desk.own
        self.slots = [Slot(fd) for fd in self._fds]
        self.copier = Copier()

    def move(self, desk: Desk) -> None:
        """To another place in another world."""
        if self.own != desk.own:
            self._let_go()
        self.own = desk.own

    def leave(self) -> None:
        """What is kept for the next world is what this process fills itself."""
        self.copier.rest()
        for index, slot in enumerate(self.slots):
            if index not in self.own:
                slot.close()

    def close(self) -> None:
        self._let_go()
        channel.close_all(self._fds)
        self._fds = []

    def _let_go(self) -> None:
        self.copier.close()
        for slot in self.slots:
            slot.close()


class Snapshots:
    """Copies, and what they cost the training."""

    def __init__(
        self,
        memory: Memory,
        world: str,
        position: Position,
        together: Together,
        url: str,
        shared: bool,
        policy: Policy,
    ) -> None:
        self._slots, self._own, self._copier = memory.slots, memory.own, memory.copier
        self._world = world
        self._position = position
        self._together = together
        self._agreed = ""
        self._url = url
        self._seen = tree.Memory()
        self._planner = plans.Planner(position, shared)
        self._policy = policy
        self._copying: Future[None] | None = None
        self._on_device = False
        self._newest = self._newest_left()
        first = position.rank - position.local_rank
        self._ranks = tuple(range(position.world_size) if shared else range(first, first + position.local_size))
        self._cost_s = 0.0  # of the last one, so far
        self._stalls: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def take(
        self, state: Mapping[str, Any], moment: Moment, used: Collection[int], mine: Any = None, sure: bool = False
    ) -> tuple[int, Future[None]] | None:
        """Begin to copy the state; which slot it goes to, and when it is there. None if neither slot is free; `sure`:
        then wait until the writer has let go of one."""
        began_s = time.monotonic()
        self.wait()
        # A rank without a free slot does this too: others may have one, and what they ask here they ask all ranks.
        found = contents.collect(state, self._seen)
        plan = self._planner.plan(found.tensors, found.volatile)
        self._check_alike(plan.digest)
        index = self._free(used, sure, moment.part > 0)
        if index is None:
            return None
        slot = self._slots[index]
        copying: Future[None] = Future()
        try:
            self._on_device = plan.layout.on_gpu
            data = slot.fill(self._snapshot(moment, found, plan, mine), plan.data_bytes)
            self._copier.start(plan, data, lambda failure: self._copied(slot, copying, failure))
        except BaseException:
            slot.unlock()
            raise
        self._copying = copying
        if not moment.part:
            self._newest = index
        self._cost_s = time.monotonic() - began_s
        return index, copying

    def cost(self) -> float | None:
        """What the last one has cost, once; None while that is not known. The host's time, and the devices' waiting."""
        if self._cost_s == 0.0 or not all(_passed(after) for _, after in self._stalls):
            return None
        cost_s = self._cost_s + sum(_between_s(*stall) for stall in self._stalls)
        self._cost_s, self._stalls = 0.0, []
        return cost_s

    def _check_alike(self, digest: str) -> None:
        """The ranks' pieces make up one state only if all have the same tensors. Asked when they change: once."""
        if digest == self._agreed:
            return
        said = self._together.agree(digest.encode(), lambda all_said: b"" if len(set(all_said)) > 1 else all_said[0])
        if not said:
            raise CheckpointError(
                "the ranks have different states: names, types and shapes must be alike on all of them"
            )
        self._agreed = digest

    def _free(self, used: Collection[int], sure: bool, partial: bool) -> int | None:
        """The one that is not the newest, if it may be. A slot is locked by whoever fills or writes it. A part of a
        step never takes the place of the newest whole one."""
        other = self._own[0] if self._newest == self._own[1] else self._own[1]
        unused = [index for index in ((other,) if partial else (other, self._newest)) if index not in used]
        for index in unused:
            if self._slots[index].lock():
                return index
        return next((index for index in unused if self._slots[index].lock(wait=True)), None) if sure else None

    def _newest_left(self) -> int:
        """By whoever had these slots before: it is the last to be filled. Of two of the same step the whole one."""
        first, second = (_step(self._slots[index]) for index in self._own)
        if first == second >= 0:
            loaded = self._slots[self._own[1]].load()
            return self._own[0] if loaded is not None and loaded[0].part else self._own[1]
        return self._own[0] if first > second else self._own[1]

    def _copied(self, slot: Slot, copying: Future[None], failure: BaseException | None) -> None:
        if failure is None:
            slot.complete()
        slot.unlock()
        if failure is None:
            copying.set_result(None)
        else:
            copying.set_exception(failure)

    def _snapshot(self, moment: Moment, found: contents.Contents, plan: plans.Plan, mine: Any) -> Snapshot:
        position = self._position
        own, _ = tree.flatten({"rng": randomness.capture(), "gaps": learned.capture(), "rank": mine}, "own")
        common = _NOTHING
        if position.local_rank == 0:
            common = msgspec.Raw(msgspec.json.encode({"state": found.nodes}))
        return Snapshot(
            url=self._url,
            term=moment.term,
            generation=moment.generation,
            step=moment.step,
            epoch=moment.epoch,
            rank=position.rank,
            world_size=position.world_size,
            ranks=self._ranks,
            pieces=plan.pieces,
            written=plan.written,
            written_bytes=plan.written_bytes,
            own=msgspec.Raw(msgspec.json.encode(own)),
            common=common,
            metrics=moment.metrics,
            policy=self._policy,
            world=self._world,
            file=moment.file,
            local_size=position.local_size,
            part=moment.part,
        )

    def before_step(self) -> None:
        """The optimizer is about to change what may still be being copied."""
        if self._copying is None or self._copying.done():
            return
        began_s = time.monotonic()
        stall = self._mark() if self._on_device else None
        self._copier.wait_before_step()
        if stall is not None:
            self._stalls.append((stall, self._mark()))
        self._cost_s += time.monotonic() - began_s

    def _mark(self) -> torch.cuda.Event:
        mark = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        mark.record()
        return mark

    def wait(self) -> None:
        """Until the last one is there. One that failed has told whoever wanted it."""
        if self._copying is not None:
            self._copying.exception()

    def left_by_others(self) -> list[tuple[Snapshot, memoryview]]:
        """What is complete on this node, of any world."""
        self.wait()
        found = []
        for slot in self._slots:
            try:
                loaded = slot.load()
            except CheckpointError:
                continue  # torn, or of another version
            if loaded is not None:
                found.append(loaded)
        return found

    def restore(self, copies: Any, data: memoryview) -> None:
        self._copier.restore(copies, data)


def _step(slot: Slot) -> int:
    """That is whole in it, whichever world's it is; -1 if none is."""
    head = slot.peek()
    return head.step if head is not None and head.complete else -1


def _passed(event: torch.cuda.Event) -> bool:
    return bool(event.query())  # type: ignore[no-untyped-call]


def _between_s(before: torch.cuda.Event, after: torch.cuda.Event) -> float:
    return float(before.elapsed_time(after)) / 1e3
