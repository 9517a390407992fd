"""All that becomes of one rank's snapshot: a shard, perhaps the commit, perhaps an epoch's file; then it is read back,
and what is not to be kept is deleted."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import msgspec

from holdfast.checkpoint import catalogue, commits, epochs, faultpoints, keeping, shards
from holdfast.checkpoint.commits import Commit
from holdfast.checkpoint.errors import CheckpointError, Damaged, Fenced
from holdfast.checkpoint.format import Shard, Snapshot, step_folder
from holdfast.checkpoint.storage import Storage, StorageError

POINTS = ("settle.before", "keep.before", "keep.after")


class Outcome(msgspec.Struct, frozen=True):
    step: int
    name: str  # of the checkpoint
    bytes: int  # that this rank wrote
    seconds: float
    committed: bool  # it can be restored
    verified: bool  # all of it has been read back
    note: str = ""  # why it is not committed, or what else there is to say


def persist(storage: Storage, snapshot: Snapshot, data: memoryview) -> Outcome:
    """Raises CheckpointError, and StorageError with `full` if the disk is; what was there before is untouched then.

    A commit that is not this rank's to make is no failure: the last one does it.
    """
    began = time.monotonic()
    try:
        commits.check_fence(storage, snapshot.term, snapshot.step)
        if snapshot.file and snapshot.ranks == (snapshot.rank,):
            outcome = _alone(storage, snapshot, data)
        else:
            outcome = _together(storage, snapshot, data)
    except Fenced as failure:
        with contextlib.suppress(CheckpointError):
            if not _is_committed(storage, snapshot):
                shards.remove(storage, snapshot)
        outcome = Outcome(snapshot.step, _name(snapshot), 0, 0.0, False, False, str(failure))
    return msgspec.structs.replace(outcome, seconds=time.monotonic() - began)


def newest_step(storage: Storage) -> int | None:
    """Of what is committed and on the line of history."""
    there = catalogue.find(storage)
    steps = [found.step for found in there.found if found.step is not None and not found.superseded]
    return max(steps, default=None)


def _name(snapshot: Snapshot) -> str:
    return snapshot.file or step_folder(snapshot.step)


def _alone(storage: Storage, snapshot: Snapshot, data: memoryview) -> Outcome:
    """A process without peers: its memory is all there is, and goes straight into the epoch's file."""
    note = epochs.make_room(storage, snapshot)
    if note is None:
        return _done(snapshot, 0, "it was there already", verified=epochs.is_verified(storage, snapshot))
    size = epochs.write(storage, snapshot, epochs.of_memory(snapshot, data))
    return _settle_file(storage, snapshot, size, note)


def _together(storage: Storage, snapshot: Snapshot, data: memoryview) -> Outcome:
    note = epochs.make_room(storage, snapshot) if snapshot.file else ""
    if note is None:
        return _done(snapshot, 0, "it was there already", verified=epochs.is_verified(storage, snapshot))
    before = _is_committed(storage, snapshot)
    shard = shards.write(storage, snapshot, data)
    try:
        commit = commits.commit(storage, snapshot)
    except (FileNotFoundError, Damaged):
        # Another rank may have committed it, made the file of it and deleted the folder, all while this one looked.
        if not snapshot.file or snapshot.file not in storage.names():
            raise
        return _done(snapshot, shard.size_bytes, "another rank has made the file of it", committed=False)
    if not snapshot.file:
        return _settle_step(storage, snapshot, shard, commit)
    if commit.manifest is None:
        return _waiting(snapshot, shard, commit)
    # A step that was saved as such before has its manifest already, and nobody's to-do is to make a file of it.
    if not (commit.own or (before and snapshot.rank == min(snapshot.ranks))):
        return _done(snapshot, shard.size_bytes, "another rank makes the file of it", committed=False)
    snapshot = msgspec.structs.replace(snapshot, metrics=commit.manifest.metrics)
    try:
        size = epochs.write(storage, snapshot, epochs.of_step(storage, snapshot, commit.manifest))
    except StorageError as failure:
        kept = f"the state itself is kept in {step_folder(snapshot.step)}"
        raise StorageError(f"{snapshot.file} could not be made: {failure}; {kept}", failure.full) from None
    return _settle_file(storage, snapshot, size, note)  # which also deletes the step's folder


def _is_committed(storage: Storage, snapshot: Snapshot) -> bool:
    return snapshot.term in catalogue.manifest_terms(storage.names(step_folder(snapshot.step)))


# -- reading back, and what goes ---------------------------------------------------------------------------------------


def _settle_step(storage: Storage, snapshot: Snapshot, shard: Shard, commit: Commit) -> Outcome:
    """Each rank reads its own back. Whoever finds that all have is the one who may delete others for it."""
    faultpoints.passed("settle.before")
    with _set_aside_if_damaged(storage, snapshot, f"{step_folder(snapshot.step)}/"):
        shards.scrub(storage, shard)
    if (manifest := commit.manifest) is None:
        with contextlib.suppress(FileNotFoundError):
            manifest = shards.read_manifest(storage, snapshot.step, snapshot.term)  # another's, meanwhile
    if manifest is None:
        return _waiting(snapshot, shard, commit)
    verified = commits.is_verified(manifest, set(storage.names(step_folder(snapshot.step))))
    note = _keep(storage, snapshot) if verified else ""
    return _done(snapshot, shard.size_bytes, note, verified=verified)


def _settle_file(storage: Storage, snapshot: Snapshot, size: int, note: str) -> Outcome:
    faultpoints.passed("settle.before")
    with _set_aside_if_damaged(storage, snapshot, snapshot.file):
        epochs.scrub(storage, snapshot)
    kept = _keep(storage, snapshot)
    return _done(snapshot, size, "; ".join(filter(None, (note, kept))), verified=True)


@contextlib.contextmanager
def _set_aside_if_damaged(storage: Storage, snapshot: Snapshot, name: str) -> Iterator[None]:
    """What the disk has not kept must not be taken for the newest there is: the state is still in memory. But a later
    world may have deleted this one's, and what is there now is its own."""
    try:
        yield
    except Damaged:
        commits.check_fence(storage, snapshot.term, snapshot.step)
        with contextlib.suppress(CheckpointError, FileNotFoundError):
            storage.set_aside(name)
        raise


def _keep(storage: Storage, snapshot: Snapshot) -> str:
    """The checkpoint is there; that others could not be deleted is worth a word, but does not undo it."""
    faultpoints.passed("keep.before")
    try:
        keeping.apply(storage, snapshot.policy)
    except (CheckpointError, FileNotFoundError) as failure:
        return f"older checkpoints could not be deleted: {failure}"
    faultpoints.passed("keep.after")
    return ""


def _waiting(snapshot: Snapshot, shard: Shard, commit: Commit) -> Outcome:
    ranks = ", ".join(map(str, commit.missing[:8])) + (", ..." if len(commit.missing) > 8 else "")
    return _done(snapshot, shard.size_bytes, f"the part of rank {ranks} is not there yet", committed=False)


def _done(snapshot: Snapshot, size: int, note: str, committed: bool = True, verified: bool = False) -> Outcome:
    return Outcome(snapshot.step, _name(snapshot), size, 0.0, committed, verified, note)
