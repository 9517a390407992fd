"""The commit of a step's checkpoint: by whoever finds that all shards are there. It needs nobody else to be alive."""

from __future__ import annotations

import hashlib

import msgspec

from holdfast import _version
from holdfast.checkpoint import checks, faultpoints, sealed, shards, terms
from holdfast.checkpoint.errors import Damaged, Fenced
from holdfast.checkpoint.format import (
    MAX_JSON_BYTES,
    VERSION,
    Listed,
    Manifest,
    Shard,
    Snapshot,
    index_name,
    manifest_name,
    seal,
    step_folder,
)  # fmt: skip
from holdfast.checkpoint.storage import Storage

POINTS = ("commit.before", "commit.after")


class Commit(msgspec.Struct, frozen=True):
    manifest: Manifest | None  # None: not all shards are there
    own: bool = False  # it was this one that made it so
    missing: tuple[int, ...] = ()  # ranks


def commit(storage: Storage, snapshot: Snapshot) -> Commit:
    """Once one's own shard is written. The last to write its index sees those of all others, so one at least commits.
    Raises Fenced if training has gone on from an earlier step elsewhere."""
    step, term = snapshot.step, snapshot.term
    there = set(storage.names(step_folder(step)))
    if _last_part(manifest_name(step, term)) in there:
        return Commit(shards.read_manifest(storage, step, term))
    missing = tuple(rank for rank in snapshot.ranks if _last_part(index_name(step, term, rank)) not in there)
    if missing:
        return Commit(None, missing=missing)
    listed = [_listed(storage, snapshot, rank) for rank in snapshot.ranks]
    manifest = Manifest(
        version=VERSION, step=step, epoch=snapshot.epoch, term=term, generation=snapshot.generation,
        # The first rank's, whoever commits: ranks may have measured different things.
        world_size=snapshot.world_size, metrics=listed[0][1], shards=tuple(one for one, _ in listed),
        created=sealed.now(), holdfast=_version.__version__,
    )  # fmt: skip
    check_fence(storage, term, step)
    faultpoints.passed("commit.before")
    created = storage.create(manifest_name(step, term), seal(manifest))
    faultpoints.passed("commit.after")
    return Commit(manifest if created else shards.read_manifest(storage, step, term), own=created)


def check_fence(storage: Storage, term: int, step: int) -> None:
    """Only a courtesy: what is committed in spite of it is superseded by the same rule, and never restored."""
    if (later := terms.supersedes(terms.read(storage), term, step)) is not None:
        raise Fenced(terms.told(later))


def _listed(storage: Storage, snapshot: Snapshot, rank: int) -> tuple[Listed, dict[str, float]]:
    """What another rank has written is looked at before it is committed: its disk may have failed it. With its
    metrics."""
    name = index_name(snapshot.step, snapshot.term, rank)
    try:
        content = sealed.read_bytes(storage, name, MAX_JSON_BYTES)
    except FileNotFoundError:
        raise Damaged(f"{name} was taken away before it was committed") from None
    shard = sealed.parse(content, Shard, name)
    if (shard.step, shard.term, shard.rank) != (snapshot.step, snapshot.term, rank):
        raise Damaged(f"{name}: it is of step {shard.step}, term {shard.term} and rank {shard.rank}")
    if list(shard.snapshot.get("ranks", ())) != list(snapshot.ranks):
        raise Damaged(f"{name}: rank {rank} saved this step with other ranks than rank {snapshot.rank} did")
    checks.check_pieces(shard.pieces, shard.size_bytes, name)
    file = shards.hashed(shard)
    file.check()
    file.check_size(storage)
    metrics = shard.snapshot.get("metrics")
    found = {str(k): float(v) for k, v in metrics.items()} if isinstance(metrics, dict) else {}
    return Listed(rank, shard.size_bytes, hashlib.sha256(content).hexdigest()), sealed.finite(found)


def is_verified(manifest: Manifest, there: set[str]) -> bool:
    """Whether all shards have been read back, by the names in its folder."""
    marks = (shards.mark_name(manifest.step, manifest.term, listed.rank) for listed in manifest.shards)
    return all(_last_part(mark) in there for mark in marks)


def _last_part(name: str) -> str:
    return name.rpartition("/")[2]
