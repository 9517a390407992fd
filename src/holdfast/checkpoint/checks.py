"""Whether what a manifest and its indexes say can be true. Anybody may have written them: nothing here is believed.

No name in them is ever used as a path. Names of files are made from the numbers of the folder and the term.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from holdfast.checkpoint.errors import CheckpointError, Damaged
from holdfast.checkpoint.format import ITEM_BYTES, VERSION, Listed, Manifest, Piece, Shard

MAX_BYTES = 1 << 60
MAX_DIMS = 64  # torch's limit
MAX_RANKS = 1_000_000

Box = tuple[tuple[int, ...], tuple[int, ...]]  # offsets, sizes


def check_version(version: int, name: str) -> None:
    """Not damage: a later version of holdfast wrote it."""
    if version != VERSION:
        raise CheckpointError(f"{name}: this is version {version} of the format, this holdfast reads {VERSION}; update")


def check_manifest(manifest: Manifest, step: int, term: int, name: str) -> None:
    if (manifest.step, manifest.term) != (step, term):
        raise Damaged(f"{name}: it is of step {manifest.step} and term {manifest.term}")
    if not 1 <= manifest.world_size <= MAX_RANKS:
        raise Damaged(f"{name}: a world of {manifest.world_size}")
    if manifest.epoch is not None and not 0 <= manifest.epoch < MAX_BYTES:
        raise Damaged(f"{name}: epoch {manifest.epoch}")
    ranks = [listed.rank for listed in manifest.shards]
    if not ranks or len(set(ranks)) != len(ranks) or not all(0 <= rank < manifest.world_size for rank in ranks):
        raise Damaged(f"{name}: its ranks make no sense")
    if not all(0 <= listed.size_bytes <= MAX_BYTES for listed in manifest.shards):
        raise Damaged(f"{name}: its sizes make no sense")
    if not all(map(math.isfinite, manifest.metrics.values())):
        raise Damaged(f"{name}: its metrics make no sense")


def check_shard(shard: Shard, manifest: Manifest, listed: Listed, name: str) -> None:
    said = (shard.step, shard.term, shard.rank, shard.size_bytes)
    if said != (manifest.step, manifest.term, listed.rank, listed.size_bytes):
        raise Damaged(f"{name}: it is not what the manifest says")
    check_pieces(shard.pieces, shard.size_bytes, name)


def check_pieces(pieces: Sequence[Piece], size_bytes: int, name: str) -> None:
    """Each inside its tensor, and one after the other inside the file."""
    end = 0
    for piece in pieces:
        where = f"{name}: {piece.key[:200]!r}"
        if piece.dtype not in ITEM_BYTES:
            raise Damaged(f"{where} has the unknown type {piece.dtype[:50]!r}")
        if not len(piece.shape) == len(piece.offsets) == len(piece.sizes) <= MAX_DIMS:
            raise Damaged(f"{where}: its shapes do not match")
        for whole, offset, size in zip(piece.shape, piece.offsets, piece.sizes, strict=True):
            if not (0 <= whole < MAX_BYTES and offset >= 0 and size >= 0 and offset + size <= whole):
                raise Damaged(f"{where}: its box is not inside its shape")
        if piece.at < end or piece.at + piece.size_bytes > size_bytes:
            raise Damaged(f"{where}: its bytes are not inside the file, or overlap others")
        end = piece.at + piece.size_bytes


def cover(shards: Mapping[int, Shard], name: str) -> dict[str, bool]:
    """Which tensors are here whole. Raises Damaged where two pieces contradict each other."""
    boxes: dict[str, set[Box]] = {}
    kinds: dict[str, tuple[str, tuple[int, ...]]] = {}
    for shard in shards.values():
        for piece in shard.pieces:
            if kinds.setdefault(piece.key, (piece.dtype, piece.shape)) != (piece.dtype, piece.shape):
                raise Damaged(f"{name}: ranks disagree about the shape of {piece.key[:200]!r}")
            boxes.setdefault(piece.key, set()).add((piece.offsets, piece.sizes))  # the same box twice is no harm
    covered = {}
    for key, found in boxes.items():
        if _overlap(found):
            raise Damaged(f"{name}: pieces of {key[:200]!r} overlap")
        covered[key] = sum(math.prod(sizes) for _, sizes in found) == math.prod(kinds[key][1])
    return covered


def _overlap(boxes: Iterable[Box]) -> bool:
    """Along the first dimension, so that a tensor that is cut there costs no more than sorting."""
    solid = sorted(box for box in boxes if math.prod(box[1]))
    if solid and not solid[0][0]:
        return len(solid) > 1
    active: list[Box] = []
    for offsets, sizes in solid:
        active = [box for box in active if box[0][0] + box[1][0] > offsets[0]]
        for other_offsets, other_sizes in active:
            if all(
                one < other + other_size and other < one + size
                for one, size, other, other_size in zip(offsets, sizes, other_offsets, other_sizes, strict=True)
            ):
                return True
        active.append((offsets, sizes))
    return False
