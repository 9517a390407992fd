"""Which bytes of what was saved belong where in what is to be filled, at any world size: torch's own resharding."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner_helpers import _create_chunk_list, create_read_items_for_chunk_list

from holdfast.checkpoint.format import ITEM_BYTES, Piece
from holdfast.checkpoint.sharded import is_sharded


class Region(NamedTuple):
    """A part of a piece, and the part of a tensor that it goes to."""

    piece: Piece
    offsets: tuple[int, ...]  # in the piece
    lengths: tuple[int, ...]
    into: torch.Tensor
    span: tuple[int, int]  # the bytes of the data from its first to its last element. There may be others between

    def of(self, span: torch.Tensor) -> torch.Tensor:
        """The elements, given the bytes of the span."""
        dense = span.view(dtype_of(self.piece.dtype))
        if self.lengths == self.piece.sizes:
            return dense.view(self.lengths)
        return dense.as_strided(self.lengths, _strides(self.piece.sizes))

    @property
    def direct(self) -> bool:
        """Whether the span's bytes are the target's."""
        begin, end = self.span
        into = self.into
        dense = end - begin == into.numel() * into.element_size()
        return dense and into.device.type == "cpu" and into.is_contiguous() and into.dtype is dtype_of(self.piece.dtype)


def _region(piece: Piece, offsets: tuple[int, ...], lengths: tuple[int, ...], into: torch.Tensor) -> Region:
    strides = _strides(piece.sizes)
    first = sum(offset * stride for offset, stride in zip(offsets, strides, strict=True))
    last = first + sum((length - 1) * stride for length, stride in zip(lengths, strides, strict=True))
    item = ITEM_BYTES[piece.dtype]
    return Region(piece, offsets, lengths, into, (piece.at + first * item, piece.at + (last + 1) * item))


def regions(tensor: torch.Tensor, pieces: Sequence[Piece]) -> list[Region] | None:
    """None if the pieces leave a part of it out."""
    if len(pieces) == 1 and pieces[0].sizes == tensor.shape and not is_sharded(tensor):
        piece = pieces[0]
        span = piece.at, piece.at + piece.size_bytes
        return [Region(piece, (0,) * len(piece.sizes), piece.sizes, tensor, span)] if tensor.numel() else []
    sharded: Any = tensor
    chunks = [chunk for chunk in _create_chunk_list(tensor) if math.prod(chunk.sizes)]
    saved = TensorStorageMetadata(
        TensorProperties(tensor.dtype),
        tensor.shape,
        [ChunkStorageMetadata(torch.Size(piece.offsets), torch.Size(piece.sizes)) for piece in pieces],
    )
    found = []
    for item in create_read_items_for_chunk_list("", saved, chunks):
        assert item.storage_index.index is not None
        into = sharded.__get_tensor_shard__(item.dest_index) if is_sharded(tensor) else tensor
        for dim, (offset, length) in enumerate(zip(item.dest_offsets, item.lengths, strict=True)):
            into = into.narrow(dim, offset, length)
        piece = pieces[item.storage_index.index]
        found.append(_region(piece, tuple(item.storage_offsets), tuple(item.lengths), into))
    wanted = sum(math.prod(chunk.sizes) for chunk in chunks)
    return found if sum(math.prod(region.lengths) for region in found) == wanted else None


def dtype_of(name: str) -> torch.dtype:
    return getattr(torch, name)  # type: ignore[no-any-return]


def _strides(sizes: Sequence[int]) -> tuple[int, ...]:
    strides = [1] * len(sizes)
    for dim in range(len(sizes) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * sizes[dim + 1]
    return tuple(strides)
