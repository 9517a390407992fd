"""Every byte of a checkpoint, read and compared with what was written."""

from __future__ import annotations

from holdfast.checkpoint import chunks, epochs, shards, sidecars
from holdfast.checkpoint.catalogue import Found
from holdfast.checkpoint.errors import CheckpointError
from holdfast.checkpoint.storage import Storage, StorageError


def verify(storage: Storage, found: Found) -> list[str]:
    """What is wrong; nothing is changed. Raises StorageError if it cannot be read."""
    try:
        return _step(storage, found) if found.kind == "step" else _epoch(storage, found)
    except StorageError:
        raise
    except CheckpointError as failure:
        return [str(failure)]


def _step(storage: Storage, found: Found) -> list[str]:
    opened = shards.open_step(storage, found)
    assert opened.common
    return [wrong for shard in opened.shards.values() for wrong in chunks.damages(storage, shards.hashed(shard))]


def _epoch(storage: Storage, found: Found) -> list[str]:
    if found.foreign:
        epochs.open_epoch(storage, found)  # there is nothing to compare with but what the zip says of itself
        return []
    assert found.epoch is not None and found.term is not None
    try:
        file = sidecars.read(storage, found.epoch, found.term).hashed()
    except FileNotFoundError:
        return [f"{sidecars.name(found.epoch, found.term)} is missing"]
    file.check_size(storage)
    return chunks.damages(storage, file)
