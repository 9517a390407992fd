"""One rank's part of a checkpoint: written in one pass, read back verified."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec

from holdfast.checkpoint import checks, chunks, faultpoints, sealed
from holdfast.checkpoint.chunks import Hashed
from holdfast.checkpoint.errors import CheckpointError, Damaged
from holdfast.checkpoint.format import (
    CHUNK_BYTES,
    MAX_JSON_BYTES,
    VERSION,
    Listed,
    Manifest,
    Piece,
    Shard,
    Snapshot,
    index_name,
    manifest_name,
    seal,
    shard_name,
)  # fmt: skip
from holdfast.checkpoint.storage import Storage, StorageError

if TYPE_CHECKING:
    from holdfast.checkpoint.catalogue import Found

POINTS = ("shard.before", "shard.written", "shard.after", "scrub.before", "scrub.after")
MAX_MANIFEST_BYTES = 256 * 1024 * 1024  # a million ranks


def write(storage: Storage, snapshot: Snapshot, data: memoryview) -> Shard:
    """The bytes, then the index that refers to them. What is there already is not written again."""
    step, term, rank = snapshot.step, snapshot.term, snapshot.rank
    index = index_name(step, term, rank)
    if (there := _there(storage, snapshot)) is not None:
        return there
    written = data[: snapshot.written_bytes]
    if len(written) != snapshot.written_bytes:
        raise CheckpointError(f"step {step}, rank {rank}: {len(data)} bytes are less than its pieces take")
    hashes: list[str] = []
    faultpoints.passed("shard.before")
    storage.write(shard_name(step, term, rank), chunks.hashing(written, hashes))
    faultpoints.passed("shard.written")
    shard = Shard(
        version=VERSION, step=step, term=term, rank=rank, size_bytes=len(written), chunk_bytes=CHUNK_BYTES,
        hashes=tuple(hashes), pieces=snapshot.pieces[: snapshot.written], own=snapshot.own, common=snapshot.common,
        snapshot={
            "epoch": snapshot.epoch, "generation": snapshot.generation, "world_size": snapshot.world_size,
            "ranks": list(snapshot.ranks), "metrics": sealed.finite(snapshot.metrics),
            "policy": msgspec.to_builtins(snapshot.policy), "file": snapshot.file,
        },
    )  # fmt: skip
    try:
        created = storage.create(index, seal(shard))
    except StorageError:
        with contextlib.suppress(CheckpointError):  # a full disk is not kept full by what nobody refers to
            remove(storage, snapshot)
        raise
    if not created:
        raise CheckpointError(f"{index} is there already; somebody else writes as rank {rank} of term {term}")
    faultpoints.passed("shard.after")
    return shard


def _there(storage: Storage, snapshot: Snapshot) -> Shard | None:
    """Written before, whole: by a save of the same step, or before the writer was told again."""
    index = index_name(snapshot.step, snapshot.term, snapshot.rank)
    try:
        shard = read_index(storage, index)
    except FileNotFoundError:
        return None
    if shard.pieces != snapshot.pieces[: snapshot.written] or shard.size_bytes != snapshot.written_bytes:
        raise CheckpointError(f"{index} is there already, with another state; a step is saved once")
    return shard


def remove(storage: Storage, snapshot: Snapshot) -> None:
    """One's own, which is in no checkpoint. The index first: without it the bytes are nothing."""
    storage.delete(index_name(snapshot.step, snapshot.term, snapshot.rank))
    storage.delete(shard_name(snapshot.step, snapshot.term, snapshot.rank))


def mark_name(step: int, term: int, rank: int) -> str:
    """The file that says that this shard was read back whole."""
    return index_name(step, term, rank).removesuffix(".json") + ".verified"


def scrub(storage: Storage, shard: Shard) -> None:
    """Read it back and say so. Raises Damaged."""
    faultpoints.passed("scrub.before")
    file = hashed(shard)
    file.check_size(storage)
    for _ in chunks.verified(storage, file):
        pass
    storage.create(mark_name(shard.step, shard.term, shard.rank), b"every byte was read back\n")
    faultpoints.passed("scrub.after")


# -- reading ----------------------------------------------------------------------------------------------------------


def hashed(shard: Shard) -> Hashed:
    name = shard_name(shard.step, shard.term, shard.rank)
    return Hashed(name, shard.size_bytes, shard.chunk_bytes, shard.hashes)


def read_index(storage: Storage, name: str) -> Shard:
    return sealed.read(storage, name, Shard, MAX_JSON_BYTES)


def read_manifest(storage: Storage, step: int, term: int) -> Manifest:
    """Raises Damaged, CheckpointError if it is of another version, and FileNotFoundError."""
    name = manifest_name(step, term)
    manifest = sealed.read(storage, name, Manifest, MAX_MANIFEST_BYTES)
    checks.check_version(manifest.version, name)
    checks.check_manifest(manifest, step, term, name)
    return manifest


class Opened:
    """A step's checkpoint whose manifest and indexes are right. Its bytes are checked as they are read."""

    def __init__(self, storage: Storage, manifest: Manifest, shards: dict[int, Shard]) -> None:
        self.manifest = manifest
        self.shards = shards
        self._storage = storage
        self._covered = checks.cover(shards, manifest_name(manifest.step, manifest.term))

    @property
    def common(self) -> msgspec.Raw:
        for shard in self.shards.values():
            if bytes(shard.common) != b"null":
                return shard.common
        raise Damaged(f"{manifest_name(self.manifest.step, self.manifest.term)}: no rank has the common values")

    def own(self, rank: int) -> msgspec.Raw:
        """`null` if that rank had none, or is not here."""
        shard = self.shards.get(rank)
        return shard.own if shard is not None else msgspec.Raw(b"null")

    def covers(self, key: str) -> bool:
        """Whether all of that tensor is here."""
        return self._covered.get(key, False)

    def keys(self) -> list[str]:
        return list(self._covered)

    def pieces(self) -> Iterator[tuple[int, Piece]]:
        for rank, shard in self.shards.items():
            for piece in shard.pieces:
                yield rank, piece

    def chunks(
        self, rank: int, wanted: Sequence[tuple[int, int]] | None = None, once: bool = True
    ) -> Iterator[tuple[int, memoryview]]:
        """The chunks of a rank's bytes that overlap the wanted ranges, in order, with where each begins. A chunk may be
        used until the next is asked for. `once` as for `Storage.read`. Raises Damaged."""
        return chunks.verified(self._storage, hashed(self.shards[rank]), wanted, once)


def open_step(storage: Storage, found: Found) -> Opened:
    """Raises Damaged; StorageError if it cannot be read, which says nothing about what is there."""
    assert found.kind == "step" and found.step is not None and found.term is not None
    try:
        manifest = read_manifest(storage, found.step, found.term)
    except FileNotFoundError:
        raise Damaged(f"{manifest_name(found.step, found.term)} is missing") from None
    return open_manifest(storage, manifest)


def open_manifest(storage: Storage, manifest: Manifest) -> Opened:
    listed = sorted(manifest.shards, key=lambda shard: shard.rank)
    return Opened(storage, manifest, {one.rank: _open_shard(storage, manifest, one) for one in listed})


def _open_shard(storage: Storage, manifest: Manifest, listed: Listed) -> Shard:
    name = index_name(manifest.step, manifest.term, listed.rank)
    try:
        content = sealed.read_bytes(storage, name, MAX_JSON_BYTES)
    except FileNotFoundError:
        raise Damaged(f"{name} is missing") from None
    if hashlib.sha256(content).hexdigest() != listed.index_sha256:
        raise Damaged(f"{name}: it is not the one that the manifest names")
    shard = sealed.parse(content, Shard, name)
    checks.check_version(shard.version, name)
    checks.check_shard(shard, manifest, listed, name)
    file = hashed(shard)
    file.check()
    file.check_size(storage)
    return shard
