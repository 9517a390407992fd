"""The newest state, from the memory of a rank that has it to those that have not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from holdfast.checkpoint import boxes, contents
from holdfast.checkpoint.checkpointer import Checkpointer
from holdfast.checkpoint.placing import prepare
from holdfast.checkpoint.sources import Source
from holdfast.checkpoint.together import Together
from holdfast.training import direct

CHUNK_BYTES = 64 << 20
_ALIGNMENT = 16


class Offer(msgspec.Struct, frozen=True, array_like=True):
    """What a rank has: the state after a step, of the training as it went in a generation. None at all: -1."""

    generation: int = -1
    step: int = -1
    done: int = 0  # samples of the next step, which was interrupted
    term: int = -1  # of checkpoints
    world_size: int = 0  # that the learning rate is meant for: one rank may have scaled it already, and another not


UNFIT = Offer(step=-2)  # of a rank that has trained, and has no state that is whole


class Said(msgspec.Struct, frozen=True, array_like=True):
    offer: Offer
    machine: str  # whose GPU it uses, if it does
    desk: bool


class Decided(msgspec.Struct, frozen=True, array_like=True):
    """Who gives it, and who lacks it."""

    source: int
    best: Offer
    lack: tuple[int, ...]
    near: bool = False  # all these can open the memory of each other's GPUs
    desks: bool = False  # all ranks have one
    unfit: bool = False  # some rank can neither give a state nor begin with the one it has


class Described(msgspec.Struct, frozen=True, array_like=True):
    nodes: Any
    tensors: list[tuple[str, str, tuple[int, ...]]]
    given: direct.Given | None = None  # where those of them are that need not be sent


class Checkpoints(Checkpointer):
    """Those of a world to which ranks bring a state along. What each has is told with the first thing that all are
    asked anyway."""

    def __init__(self, mine: Offer, directory: Any, state: dict[str, Any], **options: Any) -> None:
        self._mine = mine
        self.decided: Decided | None = None  # None: no rank has anything
        self.unfit = False
        super().__init__(directory, state, **options)

    def _all_have(self, desk: bool) -> bool:
        said = msgspec.json.encode(Said(self._mine, direct.machine(), desk))
        decided = msgspec.json.decode(self.together.agree(said, _decide), type=Decided)
        self.decided, self.unfit = decided if decided.best.step >= 0 else None, decided.unfit
        return decided.desks

    def save_owed(self, step: int, owed: Mapping[str, Any]) -> None:
        """An epoch that ended with the last step of a world, which may have gone before it was saved. If it was, the
        writer finds it there."""
        self._save(step, owed["epoch"], owed["metrics"], sure=True)


def _decide(said: list[bytes]) -> bytes:
    ranks = [msgspec.json.decode(one, type=Said) for one in said]
    offers = [each.offer for each in ranks]
    best = max(offers, key=lambda offer: (offer.generation, offer.step, offer.done))
    source = offers.index(best)
    lack = tuple(rank for rank, offer in enumerate(offers) if offer != best)
    machines = {ranks[rank].machine for rank in (source, *lack)}
    near = len(machines) == 1 and "" not in machines
    desks, unfit = all(each.desk for each in ranks), UNFIT in offers
    return msgspec.json.encode(Decided(source, best, lack, near, desks, unfit))


class Broadcast:
    """From one rank to all. Those that have it take part, too: a collective is a matter of all ranks."""

    def __init__(self, together: Together, source: int) -> None:
        self._together, self._source = together, source

    def tell(self, told: bytes) -> bytes:
        return self._together.agree(told, lambda said: said[self._source])

    def send(self, buffer: torch.Tensor) -> None:
        dist.broadcast(buffer, self._source)


class Alone:
    """From one rank to one other, with nobody else."""

    def __init__(self, together: Together, source: int, to: int) -> None:
        self._together, self._source, self._to = together, source, to

    def tell(self, told: bytes) -> bytes:
        if self._together.rank == self._to:
            return self._together.fetch("state")
        self._together.post("state", told)
        return told

    def send(self, buffer: torch.Tensor) -> None:
        if self._together.rank == self._to:
            dist.recv(buffer, self._source)
        else:
            dist.send(buffer, self._to)


def hand_over(
    together: Together, decided: Decided, state: Mapping[str, Any], changes: Callable[[], None] = lambda: None
) -> None:
    """All ranks come here. Those that lack the state have it afterwards; the others' is not touched. Before the first
    byte of it changes, `changes` is called."""
    gives, takes = together.rank == decided.source, together.rank in decided.lack
    way = _way(together, decided)
    if way is None:
        return
    tensors: dict[str, torch.Tensor] = {}
    told = b""
    if gives:
        found = contents.collect(state)
        tensors = {key: tensor.detach() for key, tensor in found.tensors.items()}
        told = msgspec.json.encode(described(found, direct.give(tensors) if decided.near else None))
    theirs = msgspec.json.decode(way.tell(told), type=Described)
    finish = []
    if takes:
        placing = prepare(state, Peer(decided.best.step, theirs))
        tensors, finish = {key: tensor.detach() for key, tensor in placing.targets.items()}, placing.finish
    if theirs.given is not None:
        theirs = _open_memory(together, theirs, theirs.given, tensors if takes else None, changes)
    _send(way, theirs, tensors, gives, takes, changes)
    for each in finish:
        each()


def _way(together: Together, decided: Decided) -> Broadcast | Alone | None:
    """How it goes; None if it does not concern this rank. With NCCL two ranks would need connections of their own."""
    if not decided.lack:
        return None
    if len(decided.lack) > 1 or decided.near or "nccl" in dist.get_backend():
        return Broadcast(together, decided.source)
    [to] = decided.lack
    return Alone(together, decided.source, to) if together.rank in (decided.source, to) else None


def _open_memory(
    together: Together,
    theirs: Described,
    given: direct.Given,
    targets: dict[str, torch.Tensor] | None,
    changes: Callable[[], None],
) -> Described:
    """All ranks come here, those that take it with where it goes. Returns what is still to be sent: where one of them
    cannot open the memory, all of it."""
    if targets is not None:
        changes()
    taken = targets is None or direct.take(given, targets)
    if together.agree(b"1" if taken else b"0", min) == b"0":
        return theirs
    return msgspec.structs.replace(theirs, tensors=[each for each in theirs.tensors if each[0] not in given.pieces])


def from_rank_zero(together: Together, state: Mapping[str, Any]) -> None:
    """All ranks come here, and have its state afterwards."""
    hand_over(together, Decided(0, Offer(), tuple(range(1, together.size))), state)


class Peer(Source):
    """A state that comes from another rank."""

    def __init__(self, step: int, described: Described) -> None:
        self.step, self.epoch, self.metrics, self.world_size = step, None, {}, None
        self.nodes = described.nodes
        self._described = {key: (dtype, shape) for key, dtype, shape in described.tensors}

    def described(self, key: str) -> tuple[str, tuple[int, ...]] | None:
        return self._described.get(key)


def _send(
    way: Broadcast | Alone,
    described: Described,
    tensors: Mapping[str, torch.Tensor],
    gives: bool,
    takes: bool,
    changes: Callable[[], None],
) -> None:
    """In few pieces, each a buffer that is packed here and unpacked there."""
    device = torch.device("cuda", torch.cuda.current_device()) if "nccl" in dist.get_backend() else torch.device("cpu")
    with torch.no_grad():
        for chunk, size in chunks(described):
            buffer = torch.empty(size, dtype=torch.uint8, device=device)
            views = {key: view(buffer, at, dtype, shape) for key, at, dtype, shape in chunk}
            if gives:
                for key, part in views.items():
                    part.copy_(tensors[key])
            way.send(buffer)
            if takes:
                changes()
                for key, part in views.items():
                    if (target := tensors.get(key)) is not None:
                        target.copy_(part)


def chunks(described: Described) -> Iterator[tuple[list[tuple[str, int, torch.dtype, tuple[int, ...]]], int]]:
    chunk: list[tuple[str, int, torch.dtype, tuple[int, ...]]] = []
    at = 0
    for key, name, shape in described.tensors:
        dtype = boxes.dtype_of(name)
        size = dtype.itemsize
        for length in shape:
            size *= length
        if chunk and at + size > CHUNK_BYTES:
            yield chunk, at
            chunk, at = [], 0
        chunk.append((key, at, dtype, tuple(shape)))
        at += -(-size // _ALIGNMENT) * _ALIGNMENT
    if chunk:
        yield chunk, at


def view(buffer: torch.Tensor, at: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    count = 1
    for length in shape:
        count *= length
    return buffer[at : at + count * dtype.itemsize].view(dtype).view(shape)


def described(found: contents.Contents, given: direct.Given | None = None) -> Described:
    tensors = [(key, str(each.dtype).removeprefix("torch."), tuple(each.shape)) for key, each in found.tensors.items()]
    return Described(found.nodes, tensors, given)
