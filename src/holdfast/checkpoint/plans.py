"""Which pieces of a state each rank keeps in memory, and which of those it writes.

Every rank works this out by itself and all come to the same result, so nothing is sent: what it depends on (names,
shapes, types, layouts) is the same on all ranks. Where `Plan.digest` is equal, it was.

A sharded tensor (DTensor) is kept by the ranks that have its parts; a part that several ranks of a node have, by one of
them. Any other tensor is the same on all ranks: one rank of each node keeps it, and one node writes it.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import torch
import xxhash

from holdfast.checkpoint import sharded
from holdfast.checkpoint.errors import CheckpointError
from holdfast.checkpoint.format import ITEM_BYTES, Piece

SMALL_BYTES = 1024  # up to which a tensor is not worth to be shared out
GATHERED_BYTES = 256 * 1024  # up to which tensors on a device are gathered there before they are copied to the host
ALIGNMENT = 64


class Position(msgspec.Struct, frozen=True):
    """Where a rank is. The ranks of a node follow each other, and share its memory."""

    rank: int
    world_size: int
    local_rank: int
    local_size: int
    node: int
    nodes: int

    @property
    def local_ranks(self) -> range:
        first = self.rank - self.local_rank
        return range(first, first + self.local_size)


class Layout(msgspec.Struct, frozen=True, eq=False):
    """What does not change from save to save."""

    pieces: tuple[Piece, ...]  # those to be written first
    written: int
    written_bytes: int
    data_bytes: int
    volatile: tuple[int, ...]
    digest: str
    on_gpu: bool
    is_plain: bool  # no tensor is sharded


class Plan(NamedTuple):
    layout: Layout
    sources: list[torch.Tensor]  # this rank's own tensors, one for each piece. They need not be dense

    @property
    def pieces(self) -> tuple[Piece, ...]:
        return self.layout.pieces

    @property
    def written(self) -> int:
        return self.layout.written

    @property
    def written_bytes(self) -> int:
        return self.layout.written_bytes

    @property
    def data_bytes(self) -> int:
        return self.layout.data_bytes

    @property
    def volatile(self) -> tuple[int, ...]:
        return self.layout.volatile

    @property
    def digest(self) -> str:
        """Of all that the ranks must agree on for their pieces to make up the state."""
        return self.layout.digest


class _Share(NamedTuple):
    """A part of a tensor that this rank keeps."""

    key: str
    box: sharded.Box
    size_bytes: int
    writes: bool


class _Known(NamedTuple):
    keys: list[str]
    volatile: Collection[str]
    described: list[tuple[Any, ...]]
    layout: Layout
    sources: Callable[[Mapping[str, torch.Tensor]], list[torch.Tensor]]


class Planner:
    """Remembers the layouts of the last few kinds of state, so that a plan is made anew only when a state's shape
    changes: this runs in the training loop."""

    def __init__(self, position: Position, shared: bool) -> None:
        self._position = position
        self._shared = shared
        self._known: list[_Known] = []  # the last first

    def plan(self, tensors: Mapping[str, torch.Tensor], volatile: Collection[str]) -> Plan:
        """Raises CheckpointError for a tensor that cannot be saved. All ranks give the same keys in the same order."""
        with torch.no_grad():
            known = self._find(list(tensors), volatile, _described(tensors))
            if known is None:
                layout = _lay_out(tensors, volatile, self._position, self._shared)
                known = _Known(list(tensors), set(volatile), _described(tensors), layout, _taker(layout))
                self._known = [known, *self._known[: _MOST_LAYOUTS - 1]]
            sources = known.sources(tensors)
            return Plan(known.layout, sources if known.layout.is_plain else list(map(sharded.local, sources)))

    def _find(self, keys: list[str], volatile: Collection[str], described: list[tuple[Any, ...]]) -> _Known | None:
        for at, known in enumerate(self._known):
            if known.keys == keys and known.described == described and known.volatile == volatile:
                self._known.insert(0, self._known.pop(at))
                return known
        return None


def _taker(layout: Layout) -> Callable[[Mapping[str, torch.Tensor]], list[torch.Tensor]]:
    keys = [piece.key for piece in layout.pieces]
    if len(keys) < 2:
        return lambda tensors: [tensors[key] for key in keys]
    take = operator.itemgetter(*keys)
    return lambda tensors: list(take(tensors))


_MOST_LAYOUTS = 4
_DESCRIBES = operator.attrgetter("shape", "dtype", "device", "layout", "__class__")
_PLAIN = {torch.Tensor, torch.nn.Parameter}


def check_module(module: torch.nn.Module) -> None:
    """FSDP1's optimizers have plain tensors that differ from rank to rank, which no later look could tell."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None and any(isinstance(part, fsdp.FullyShardedDataParallel) for part in module.modules()):
        raise CheckpointError(
            f"a {type(module).__name__} is wrapped in FullyShardedDataParallel (FSDP1); use fully_shard (FSDP2) instead"
        )


def _described(tensors: Mapping[str, torch.Tensor]) -> list[tuple[Any, ...]]:
    """All that a layout depends on."""
    try:
        plain = list(map(_DESCRIBES, tensors.values()))
    except RuntimeError:
        for key, tensor in tensors.items():
            _check(key, tensor)  # a nested tensor has no shape to tell
        raise
    if _PLAIN.issuperset(map(type, tensors.values())):
        return plain
    return [
        (*described, tensor.device_mesh, tensor.placements) if sharded.is_sharded(tensor) else described  # type: ignore[attr-defined]
        for described, tensor in zip(plain, tensors.values(), strict=True)
    ]


# -- laying out: once, and again when the state's shape changes --------------------------------------------------------


def _lay_out(
    tensors: Mapping[str, torch.Tensor], volatile: Collection[str], position: Position, shared: bool
) -> Layout:
    for key, tensor in tensors.items():
        _check(key, tensor)
    shares = _plain_shares(tensors, volatile, position, shared)
    shares += _sharded_shares(tensors, position, shared)
    order = {key: at for at, key in enumerate(tensors)}
    # What is gathered on a device lies together, so that it is one copy to the host.
    shares.sort(key=lambda share: (not share.writes, *_gathering(share, tensors, volatile), order[share.key]))
    pieces, at = [], 0
    written_bytes = 0
    for share in shares:
        tensor, box = tensors[share.key], share.box
        name = str(tensor.dtype).removeprefix("torch.")
        pieces.append(Piece(share.key, name, tuple(tensor.shape), box.offsets, box.sizes, at))
        at += share.size_bytes
        written_bytes = at if share.writes else written_bytes
        at = -(-at // ALIGNMENT) * ALIGNMENT
    return Layout(
        pieces=tuple(pieces),
        written=sum(share.writes for share in shares),
        written_bytes=written_bytes,
        data_bytes=pieces[-1].at + shares[-1].size_bytes if pieces else 0,
        volatile=tuple(at for at, share in enumerate(shares) if share.key in volatile),
        digest=_digest(tensors),
        on_gpu=any(tensors[share.key].device.type == "cuda" for share in shares),
        is_plain=not any(sharded.is_sharded(tensors[share.key]) for share in shares),
    )


def is_gathered(device: torch.device, size_bytes: int, is_volatile: bool) -> bool:
    return device.type == "cuda" and (is_volatile or size_bytes <= GATHERED_BYTES)


def _gathering(share: _Share, tensors: Mapping[str, torch.Tensor], volatile: Collection[str]) -> tuple[bool, str]:
    device = tensors[share.key].device
    if is_gathered(device, share.size_bytes, share.key in volatile):
        return False, str(device)
    return True, ""


def _check(key: str, tensor: torch.Tensor) -> None:
    kind = type(tensor).__name__
    if kind == "ShardedTensor" or hasattr(tensor, "_is_flat_param"):
        raise CheckpointError(f"{key} is sharded by FSDP1 (FullyShardedDataParallel); use fully_shard (FSDP2) instead")
    if tensor.is_nested:
        raise CheckpointError(f"{key} is a nested tensor, which cannot be saved; save its parts")
    if tensor.layout is not torch.strided:
        raise CheckpointError(f"{key}: a tensor of layout {tensor.layout} cannot be saved; save a dense one")
    if tensor.device.type == "meta":
        raise CheckpointError(f"{key} is on the meta device: it has no data to save")
    if str(tensor.dtype).removeprefix("torch.") not in ITEM_BYTES:
        raise CheckpointError(f"{key}: a tensor of {tensor.dtype} cannot be saved")
    if sharded.is_sharded(tensor):
        sharded.check(key, tensor)
    elif hasattr(tensor, "__tensor_flatten__"):
        raise CheckpointError(f"{key}: a {kind} cannot be saved; save the plain tensors that it is made of")


def _digest(tensors: Mapping[str, torch.Tensor]) -> str:
    described = [
        f"{key} {tensor.dtype} {tuple(tensor.shape)} {sharded.is_sharded(tensor)}" for key, tensor in tensors.items()
    ]
    return xxhash.xxh3_128_hexdigest("\n".join(described).encode())


def _plain_shares(
    tensors: Mapping[str, torch.Tensor], volatile: Collection[str], position: Position, shared: bool
) -> list[_Share]:
    """The largest first, each to whoever has the least so far: first to the nodes, then to the ranks of this one."""
    sizes = {key: _size_bytes(tensor) for key, tensor in tensors.items() if not sharded.is_sharded(tensor)}
    firsts = [key for key, size in sizes.items() if size <= SMALL_BYTES or key in volatile]
    others = sorted(sizes.keys() - set(firsts), key=lambda key: (-sizes[key], key))
    begun = sum(sizes[key] for key in firsts)
    nodes = _dealt(others, sizes, [begun] + [0] * (position.nodes - 1)) if shared else None
    mine = {key for key in others if nodes is None or nodes[key] == position.node}
    # What is written is dealt first, so that the ranks write alike; the rest then evens out what they keep.
    loads = [begun] + [0] * (position.local_size - 1)
    owners = _dealt([key for key in others if key in mine], sizes, loads)
    owners |= _dealt([key for key in others if key not in mine], sizes, loads)
    owners |= dict.fromkeys(firsts, 0)
    if not shared or position.node == 0:
        mine.update(firsts)
    return [
        _Share(key, sharded.whole(tensors[key]), sizes[key], key in mine)
        for key, owner in owners.items()
        if owner == position.local_rank
    ]


def _dealt(keys: Sequence[str], sizes: Mapping[str, int], loads: list[int]) -> dict[str, int]:
    """To whom each goes; what they then have is added to `loads`."""
    owners = {}
    for key in keys:
        owner = owners[key] = min(range(len(loads)), key=loads.__getitem__)
        loads[owner] += sizes[key]
    return owners


def _sharded_shares(tensors: Mapping[str, torch.Tensor], position: Position, shared: bool) -> list[_Share]:
    """Of the ranks that have the same part, one keeps it on each node, and one in the world writes it. The others of a
    node know without being told: the writer is found from the mesh, the same way everywhere."""
    sizes = {key: _size_bytes(tensor) for key, tensor in tensors.items() if sharded.is_sharded(tensor)}
    loads: dict[Any, list[int]] = {}  # of the replicas of a mesh, by their place among them
    shares = []
    for key in sorted(sizes, key=lambda key: (-sizes[key], key)):
        tensor = tensors[key]
        mesh: Any = tensor
        replicas = sharded.replicas(tensor)
        load = loads.setdefault((mesh.device_mesh, len(replicas)), [0] * len(replicas))
        turn = min(range(len(load)), key=load.__getitem__)
        load[turn] += sizes[key]
        here = [rank for rank in replicas if rank in position.local_ranks]
        if position.rank not in here:
            continue  # of a mesh that this rank is no part of
        writer = replicas[turn] if shared else here[turn % len(here)]
        keeper = writer if writer in here else here[turn % len(here)]
        box = sharded.box_of(tensor) if keeper == position.rank else None
        if box is not None:
            shares.append(_Share(key, box, _size_bytes(sharded.local(tensor)), writer == keeper))
    return shares


def _size_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
