"""What is known of an epoch's `.pt` file beside it: its hashes, and where on the line of history it stands."""

from __future__ import annotations

import math
import re

import msgspec

from holdfast.checkpoint import checks, sealed
from holdfast.checkpoint.chunks import Hashed
from holdfast.checkpoint.errors import Damaged
from holdfast.checkpoint.format import epoch_file, hash_chunk
from holdfast.checkpoint.storage import Storage

FOLDER = ".holdfast/epochs"
NAME = re.compile(r"checkpoint_epoch_(\d{1,18})\.t(\d{6,18})\.(json|verified)", re.ASCII)
END_BYTES = 64 * 1024
MAX_BYTES = 256 * 1024 * 1024  # of the sidecar: hashes of 50 TB


class Sidecar(msgspec.Struct, frozen=True):
    """`checkpoint_epoch_N.tTTTTTT.json`"""

    version: int
    epoch: int
    step: int
    term: int
    generation: int
    world_size: int
    metrics: dict[str, float]
    size_bytes: int
    chunk_bytes: int
    hashes: tuple[str, ...]
    ends: str  # of the first and the last bytes: tells cheaply which of two sidecars a file belongs to
    created: str
    holdfast: str

    def hashed(self) -> Hashed:
        return Hashed(epoch_file(self.epoch), self.size_bytes, self.chunk_bytes, self.hashes)


def name(epoch: int, term: int) -> str:
    return f"{FOLDER}/checkpoint_epoch_{epoch}.t{term:06d}.json"


def mark_name(epoch: int, term: int) -> str:
    """The file that says that the `.pt` was read back whole."""
    return f"{FOLDER}/checkpoint_epoch_{epoch}.t{term:06d}.verified"


def read(storage: Storage, epoch: int, term: int) -> Sidecar:
    """Raises Damaged, CheckpointError if it is of another version, and FileNotFoundError."""
    where = name(epoch, term)
    sidecar = sealed.read(storage, where, Sidecar, MAX_BYTES)
    checks.check_version(sidecar.version, where)
    if (sidecar.epoch, sidecar.term) != (epoch, term):
        raise Damaged(f"{where}: it is of epoch {sidecar.epoch} and term {sidecar.term}")
    if not 0 <= sidecar.step < checks.MAX_BYTES or not 1 <= sidecar.world_size <= checks.MAX_RANKS:
        raise Damaged(f"{where}: its numbers make no sense")
    if not all(map(math.isfinite, sidecar.metrics.values())):
        raise Damaged(f"{where}: its metrics make no sense")
    sidecar.hashed().check()
    return sidecar


def hash_ends(first: bytes, last: bytes) -> str:
    return hash_chunk(first + last)


def read_ends(storage: Storage, file: str, size_bytes: int) -> str:
    """The last bytes of a `.pt` hold the checksums of its records, and the first some of its values."""
    found = []
    for at in (0, max(0, size_bytes - END_BYTES)):
        content = bytearray(min(END_BYTES, size_bytes))
        got = storage.read(file, at, memoryview(content)) if content else 0
        found.append(bytes(content[:got]))
    return hash_ends(*found)


def terms_of(names: list[str]) -> dict[int, list[int]]:
    """By epoch, the terms of which there are sidecars; from the names in their folder."""
    found: dict[int, list[int]] = {}
    for entry in names:
        match = NAME.fullmatch(entry)
        if match and match[3] == "json" and name(int(match[1]), int(match[2])).endswith("/" + entry):
            found.setdefault(int(match[1]), []).append(int(match[2]))
    return found


def belonging(storage: Storage, epoch: int, terms: list[int], size_bytes: int) -> Sidecar | None:
    """The one of a file with this size; None if it has none. Raises Damaged if none of those that are there fits."""
    if not terms:
        return None
    readable, why = [], ""
    for term in sorted(terms, reverse=True):
        try:
            readable.append(read(storage, epoch, term))
        except Damaged as failure:
            why = why or str(failure)
        except FileNotFoundError:
            continue
    fitting = [sidecar for sidecar in readable if sidecar.size_bytes == size_bytes]
    if len(readable) > 1 or why:
        ends = read_ends(storage, epoch_file(epoch), size_bytes)
        fitting = [sidecar for sidecar in fitting if sidecar.ends == ends]
    if fitting:
        return fitting[0]
    if not readable and not why:
        return None
    said = " or ".join(str(sidecar.size_bytes) for sidecar in readable)
    raise Damaged(why or f"{epoch_file(epoch)}: it has {size_bytes} bytes, and is not what was written ({said} bytes)")
