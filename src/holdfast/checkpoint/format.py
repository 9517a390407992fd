"""What a checkpoint is made of, as it is written: plain JSON beside raw bytes. No pickle.

```text
step_00001000/
  t000007.00000.bin       the bytes of rank 0's pieces
  t000007.00000.json      its index: where each piece lies, and the hash of each chunk
  t000007.00001.bin  ...
  t000007.manifest.json   written last: with it there is a checkpoint, without it there is none
```

`t000007` is the term: who writes to a directory takes the next number first, so no two ever write the same name.
"""

from __future__ import annotations

import hashlib
import math
import re
from typing import Any, TypeVar

import msgspec
import xxhash

from holdfast.checkpoint.errors import Damaged

VERSION = 1
CHUNK_BYTES = 8 * 1024 * 1024
MAX_JSON_BYTES = 1 << 30

ITEM_BYTES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "complex32": 4, "complex64": 8, "complex128": 16,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "uint16": 2, "uint32": 4, "uint64": 8, "bool": 1,
}  # fmt: skip


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """A box of one tensor. Its bytes are dense, in C order."""

    key: str
    dtype: str  # torch's name without `torch.`
    shape: tuple[int, ...]  # of the whole tensor
    offsets: tuple[int, ...]  # of the box in it
    sizes: tuple[int, ...]
    at: int  # from the start of the data

    @property
    def size_bytes(self) -> int:
        return math.prod(self.sizes) * ITEM_BYTES[self.dtype]


class Policy(msgspec.Struct, frozen=True):
    """What is kept. 0: none by this rule."""

    last: int = 3
    best: int = 0
    metric: str = "loss"
    mode: str = "min"  # or max
    every: int = 0  # each step, or epoch, that this divides


class Snapshot(msgspec.Struct, frozen=True):
    """One rank's part of a state, beside its bytes: the index of a slot in memory, from which a shard is written."""

    url: str  # of the checkpoint directory
    term: int
    generation: int
    step: int
    epoch: int | None
    rank: int
    world_size: int
    ranks: tuple[int, ...]  # whose shards make a checkpoint: all, or this node's where directories are not shared
    pieces: tuple[Piece, ...]  # in the order of their bytes. Those to be written come first
    written: int  # how many of them this rank writes; the others are written on another node
    written_bytes: int
    own: msgspec.Raw  # values of this rank alone, as a tree
    common: msgspec.Raw  # values that are the same on all ranks; `null` on ranks that leave them to another
    metrics: dict[str, float]
    policy: Policy
    world: str  # which start of the job this is of: slots of one step and world belong together
    file: str = ""  # "checkpoint_epoch_7.pt" where that is to be made of it, else a step directory
    local_size: int = 1  # how many ranks of that world were on this node
    part: int = 0  # of the step that comes next: how much of it is done. Such a state stays in memory


class Shard(msgspec.Struct, frozen=True):
    """One rank's part of a checkpoint: `tNNNNNN.RRRRR.json`."""

    version: int
    step: int
    term: int
    rank: int
    size_bytes: int  # of the .bin
    chunk_bytes: int
    hashes: tuple[str, ...]  # xxh3-128 of each chunk
    pieces: tuple[Piece, ...]
    own: msgspec.Raw
    common: msgspec.Raw
    snapshot: dict[str, Any]  # what a manifest needs: epoch, generation, world_size, ranks, metrics, policy


class Listed(msgspec.Struct, frozen=True):
    """A shard as the manifest names it."""

    rank: int
    size_bytes: int
    index_sha256: str  # of the .json


class Manifest(msgspec.Struct, frozen=True):
    version: int
    step: int
    epoch: int | None
    term: int
    generation: int
    world_size: int
    metrics: dict[str, float]
    shards: tuple[Listed, ...]
    created: str  # wall clock, for people
    holdfast: str  # version

    @property
    def size_bytes(self) -> int:
        return sum(shard.size_bytes for shard in self.shards)


S = TypeVar("S", bound=msgspec.Struct)


def seal(value: msgspec.Struct) -> bytes:
    """Two lines: the value as JSON, and the SHA-256 of the first."""
    body = msgspec.json.encode(value)
    return body + b"\n" + hashlib.sha256(body).hexdigest().encode() + b"\n"


def unseal(content: bytes, kind: type[S], name: str) -> S:
    """Raises Damaged."""
    body, _, rest = content.partition(b"\n")
    if rest != hashlib.sha256(body).hexdigest().encode() + b"\n":
        raise Damaged(f"{name}: its checksum does not match")
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.MsgspecError as failure:
        raise Damaged(f"{name}: {failure}") from None


def hash_chunk(chunk: memoryview | bytes) -> str:
    return xxhash.xxh3_128_hexdigest(chunk)


# -- names ------------------------------------------------------------------------------------------------------------

STEP_FOLDER = re.compile(r"step_(\d{8,18})", re.ASCII)
EPOCH_FILE = re.compile(r"checkpoint_epoch_(\d{1,18})\.pt", re.ASCII)
MANIFEST = re.compile(r"t(\d{6,18})\.manifest\.json", re.ASCII)
SHARD_INDEX = re.compile(r"t(\d{6,18})\.(\d{5,9})\.json", re.ASCII)


def step_folder(step: int) -> str:
    return f"step_{step:08d}"


def epoch_file(epoch: int) -> str:
    return f"checkpoint_epoch_{epoch}.pt"


def manifest_name(step: int, term: int) -> str:
    return f"{step_folder(step)}/t{term:06d}.manifest.json"


def shard_name(step: int, term: int, rank: int) -> str:
    return f"{step_folder(step)}/t{term:06d}.{rank:05d}.bin"


def index_name(step: int, term: int, rank: int) -> str:
    return f"{step_folder(step)}/t{term:06d}.{rank:05d}.json"
