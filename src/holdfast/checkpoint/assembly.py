"""Whole tensors of the pieces of a checkpoint. The one place here that needs torch, besides `.pt` files."""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any, cast

from holdfast.checkpoint.errors import CheckpointError
from holdfast.checkpoint.format import ITEM_BYTES, Piece, Snapshot
from holdfast.checkpoint.shards import Opened

if TYPE_CHECKING:
    import torch


def of_memory(snapshot: Snapshot, data: memoryview) -> dict[str, torch.Tensor]:
    """Of a process alone, whose pieces are whole tensors: views of its memory, nothing is copied."""
    tensors = {}
    for piece in snapshot.pieces[: snapshot.written]:
        if piece.sizes != piece.shape:
            raise CheckpointError(f"{piece.key}: only part of it is in this process")
        tensors[piece.key] = _view(piece, data)
    return tensors


def of_step(opened: Opened, keys: Collection[str] | None = None) -> dict[str, torch.Tensor]:
    """All, or these, in memory of their own. Each byte is verified before it is used. Raises Damaged."""
    import torch

    tensors: dict[str, torch.Tensor] = {}
    for _, piece in opened.pieces():
        if piece.key in tensors or (keys is not None and piece.key not in keys):
            continue
        if not opened.covers(piece.key):
            raise CheckpointError(f"{piece.key}: only part of it is here; the rest was saved on other nodes")
        tensors[piece.key] = torch.empty(piece.shape, dtype=_dtype(piece))
    for rank, shard in opened.shards.items():
        _fill(opened, rank, [piece for piece in shard.pieces if piece.key in tensors and piece.size_bytes], tensors)
    return tensors


def _fill(opened: Opened, rank: int, pieces: list[Piece], tensors: dict[str, torch.Tensor]) -> None:
    import torch

    wanted = [(piece.at, piece.at + piece.size_bytes) for piece in pieces]
    coming = iter(pieces)
    piece = next(coming, None)
    target, done = _target(piece, tensors), 0
    for at, chunk in opened.chunks(rank, wanted):
        content = torch.frombuffer(chunk, dtype=torch.uint8)
        while piece is not None and piece.at + done < at + len(chunk):
            begin = piece.at + done - at
            count = min(piece.size_bytes - done, len(chunk) - begin)
            target[done : done + count].copy_(content[begin : begin + count])
            done += count
            if done < piece.size_bytes:
                break
            _put(piece, target, tensors)
            piece = next(coming, None)
            target, done = _target(piece, tensors), 0


def _target(piece: Piece | None, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """Where a piece's bytes go: its place in the tensor where that is dense, else memory of its own."""
    import torch

    if piece is None:
        return torch.empty(0, dtype=torch.uint8)
    box = _box(piece, tensors)
    if box.is_contiguous():
        return box.view(-1).view(torch.uint8)
    return torch.empty(piece.size_bytes, dtype=torch.uint8)


def _put(piece: Piece, target: torch.Tensor, tensors: dict[str, torch.Tensor]) -> None:
    box = _box(piece, tensors)
    if not box.is_contiguous():
        box.copy_(target.view(_dtype(piece)).view(piece.sizes))


def _box(piece: Piece, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    box = tensors[piece.key]
    for dim, (offset, size) in enumerate(zip(piece.offsets, piece.sizes, strict=True)):
        box = box.narrow(dim, offset, size)
    return box


def _view(piece: Piece, data: memoryview) -> torch.Tensor:
    import torch

    count = math.prod(piece.sizes)
    if not count:
        return torch.empty(piece.sizes, dtype=_dtype(piece))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")  # nobody writes to it
        return torch.frombuffer(data, dtype=_dtype(piece), count=count, offset=piece.at).view(piece.sizes)


def _dtype(piece: Piece) -> torch.dtype:
    import torch

    assert piece.dtype in ITEM_BYTES
    found = getattr(torch, piece.dtype, None)
    if not isinstance(found, torch.dtype):
        raise CheckpointError(f"{piece.key}: this torch has no {piece.dtype}")
    return found


def raw(tensor: torch.Tensor) -> Iterator[memoryview]:
    """A tensor's bytes, as they lie."""
    import torch

    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if flat.numel():
        yield memoryview(cast(Any, flat.numpy()))
