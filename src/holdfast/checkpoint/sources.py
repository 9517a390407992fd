"""Where a state can be read from: memory of this node, a step's folder, an epoch's file. All look the same here."""

from __future__ import annotations

import bisect
import ctypes
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from holdfast.checkpoint import boxes, tree
from holdfast.checkpoint.boxes import Region
from holdfast.checkpoint.errors import CheckpointError
from holdfast.checkpoint.format import Piece, Snapshot
from holdfast.checkpoint.sharded import is_sharded
from holdfast.checkpoint.shards import Opened

if TYPE_CHECKING:
    from holdfast.checkpoint.epochs import Loaded

_LARGEST = 32  # regions

Copies = list[tuple[torch.Tensor, torch.Tensor]]  # from, to


class Source:
    """A state as it was saved. `read` raises Damaged if it is not."""

    nodes: dict[str, Any]  # the trees of the user's state, by name
    step: int | None
    epoch: int | None
    metrics: dict[str, float]
    world_size: int | None

    def described(self, key: str) -> tuple[str, tuple[int, ...]] | None:
        """A saved tensor's type and whole shape."""
        raise NotImplementedError

    def own(self, rank: int) -> Any:
        """What that rank alone had; None if there was no such rank, or it is not here."""
        raise NotImplementedError

    def lacks(self, targets: Mapping[str, torch.Tensor]) -> str | None:
        """A tensor of which not all that is wanted is here."""
        raise NotImplementedError

    def read(self, targets: Mapping[str, torch.Tensor]) -> None:
        """Devices may still be copying when it returns, in their current streams."""
        raise NotImplementedError


class Pieces(Source):
    """What is cut into boxes, which may lie in several places."""

    def __init__(self, pieces: Iterable[tuple[int, Sequence[Piece]]]) -> None:
        self._pieces: dict[str, list[Piece]] = {}
        self._places: dict[str, list[int]] = {}
        self._looked_at: Mapping[str, torch.Tensor] | None = None
        self._found: dict[str, list[Region]] = {}  # for those
        all_pieces = list(pieces)
        self._only_place = all_pieces[0][0] if len(all_pieces) == 1 else None
        for place, some in all_pieces:
            for piece in some:
                self._pieces.setdefault(piece.key, []).append(piece)
                self._places.setdefault(piece.key, []).append(place)

    def described(self, key: str) -> tuple[str, tuple[int, ...]] | None:
        found = self._pieces.get(key)
        return (found[0].dtype, found[0].shape) if found else None

    def lacks(self, targets: Mapping[str, torch.Tensor]) -> str | None:
        self._looked_at, self._found = None, {}
        for key, tensor in targets.items():
            regions = boxes.regions(tensor, self._pieces.get(key, []))
            if regions is None:
                return key
            self._found[key] = regions
        self._looked_at = targets
        return None

    def _by_place(self, targets: Mapping[str, torch.Tensor]) -> dict[int, list[Region]]:
        """Of targets of which nothing was found lacking."""
        if self._looked_at is not targets and (key := self.lacks(targets)) is not None:
            raise CheckpointError(f"{key}: not all of it was saved where this rank can read it")
        found: dict[int, list[Region]] = {}
        if self._only_place is not None:
            return {self._only_place: list(itertools.chain.from_iterable(self._found.values()))}
        for key, regions in self._found.items():
            pieces, places = self._pieces.get(key, []), self._places.get(key, [])
            for region in regions:
                place = places[next(at for at, piece in enumerate(pieces) if piece is region.piece)]
                found.setdefault(place, []).append(region)
        return found


class Memory(Pieces):
    """The slots of this node, as ranks that are gone have left them."""

    def __init__(
        self, slots: Sequence[tuple[Snapshot, memoryview]], copy: Callable[[Copies, memoryview], None]
    ) -> None:
        super().__init__((place, snapshot.pieces) for place, (snapshot, _) in enumerate(slots))
        self._slots = slots
        self._copy = copy
        first = slots[0][0]
        self.step, self.epoch, self.metrics = first.step, first.epoch, first.metrics
        self.world_size: int | None = first.world_size
        commons = (_decode(snapshot.common) for snapshot, _ in slots)
        self.nodes = next((common["state"] for common in commons if common is not None), {})

    def own(self, rank: int) -> Any:
        for snapshot, _ in self._slots:
            if snapshot.rank == rank:
                return _plain(snapshot.own)
        return None

    def read(self, targets: Mapping[str, torch.Tensor]) -> None:
        for place, regions in self._by_place(targets).items():
            data = self._slots[place][1]
            whole = torch.frombuffer(data, dtype=torch.uint8)
            # The large ones first: while a device copies them there is time to see to thousands of small ones.
            regions.sort(key=lambda region: region.span[0] - region.span[1])
            for some in (regions[:_LARGEST], regions[_LARGEST:]):
                self._copy([(region.of(whole[slice(*region.span)]), region.into) for region in some], data)


class Step(Pieces):
    """A step's folder. Each chunk that is needed is read once, and checked before a byte of it is used."""

    def __init__(self, opened: Opened, alone: bool = True) -> None:
        super().__init__((rank, shard.pieces) for rank, shard in opened.shards.items())
        self._opened = opened
        self._alone = alone  # no other rank of this machine reads it
        manifest = opened.manifest
        self.step, self.epoch, self.metrics = manifest.step, manifest.epoch, manifest.metrics
        self.world_size: int | None = manifest.world_size
        self.nodes = _decode(opened.common)["state"]

    def own(self, rank: int) -> Any:
        return _plain(self._opened.own(rank)) if rank in self._opened.shards else None

    def read(self, targets: Mapping[str, torch.Tensor]) -> None:
        # What is replicated all ranks read, and the first of a machine reads it for the others.
        sizes = {True: 0, False: 0}
        for tensor in targets.values():
            sizes[is_sharded(tensor)] += tensor.numel() * tensor.element_size()
        once = self._alone or sizes[True] > sizes[False]
        for rank, regions in self._by_place(targets).items():
            self._read_shard(rank, sorted(regions, key=lambda region: region.span), once)

    def _read_shard(self, rank: int, regions: list[Region], once: bool) -> None:
        spans = [region.span for region in regions]
        pending: list[tuple[tuple[int, int], Region, torch.Tensor]] = []
        coming = 0
        for at, chunk in self._opened.chunks(rank, _joined(spans), once):
            end = at + len(chunk)
            upto = bisect.bisect_left(spans, (end, 0), lo=coming)
            for region in regions[coming:upto]:
                pending.append((region.span, region, _buffer(region)))
            coming = upto
            content = torch.frombuffer(chunk, dtype=torch.uint8).data_ptr()
            for (first, last), _, buffer in pending:
                low, high = max(first, at), min(last, end)
                # Not `copy_`: the threads that it leaves spinning would keep those that read from their work.
                ctypes.memmove(buffer.data_ptr() + low - first, content + low - at, high - low)
            for (_, last), region, buffer in pending:
                if last <= end and not region.direct:
                    region.into.copy_(region.of(buffer))
            pending = [entry for entry in pending if entry[0][1] > end]


class Epoch(Source):
    """An epoch's file, which is whole. It was checked when it was opened."""

    def __init__(self, loaded: Loaded) -> None:
        self.step, self.epoch, self.metrics = loaded.step, loaded.epoch, loaded.metrics
        self.world_size = loaded.world_size
        self._own = loaded.own
        self.nodes, self._tensors = {}, {}
        for name, value in loaded.state.items():
            if name == "model" and isinstance(value, dict):
                value = _without_wrapper(value)
            self.nodes[name], tensors = tree.flatten(value, tree.part(name))
            self._tensors.update(tensors)

    def described(self, key: str) -> tuple[str, tuple[int, ...]] | None:
        tensor = self._tensors.get(key)
        return (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)) if tensor is not None else None

    def own(self, rank: int) -> Any:
        return self._own.get(rank)

    def lacks(self, targets: Mapping[str, torch.Tensor]) -> str | None:
        return next((key for key in targets if key not in self._tensors), None)

    def read(self, targets: Mapping[str, torch.Tensor]) -> None:
        for key, target in targets.items():
            whole = self._tensors[key]
            shape = tuple(whole.shape)
            name = str(whole.dtype).removeprefix("torch.")
            for region in boxes.regions(target, [Piece(key, name, shape, (0,) * len(shape), shape, 0)]) or []:
                part = whole
                for dim, (offset, length) in enumerate(zip(region.offsets, region.lengths, strict=True)):
                    part = part.narrow(dim, offset, length)
                region.into.copy_(part)


def _buffer(region: Region) -> torch.Tensor:
    """Bytes for the span: the target's own where they lie as they were saved."""
    if region.direct:
        return region.into.reshape(-1).view(torch.uint8)
    begin, end = region.span
    return torch.empty(end - begin, dtype=torch.uint8)


def _joined(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    joined: list[tuple[int, int]] = []
    for begin, end in spans:
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((begin, end))
    return joined


def _without_wrapper(state: dict[Any, Any]) -> dict[Any, Any]:
    """A state that was saved of a wrapped module, as scripts commonly do: without the wrapper's name."""
    for prefix in ("module.", "_orig_mod."):
        if state and all(isinstance(key, str) and key.startswith(prefix) for key in state):
            return _without_wrapper({key.removeprefix(prefix): value for key, value in state.items()})
    return state


def _decode(raw: msgspec.Raw) -> Any:
    return msgspec.json.decode(raw)


def _plain(raw: msgspec.Raw) -> Any:
    return tree.unflatten(_decode(raw), {})
