"""A small training state that a step determines, cut over ranks as a world would save it."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from holdfast.checkpoint import assembly, catalogue, commits, epochs, persist, shards, terms, tree
from holdfast.checkpoint.catalogue import Found
from holdfast.checkpoint.folder import Folder
from holdfast.checkpoint.format import Piece, Policy, Snapshot, epoch_file
from holdfast.checkpoint.persist import Outcome
from holdfast.checkpoint.storage import Storage

KEEP_ALL = Policy(last=0)


@contextlib.contextmanager
def in_memory() -> Iterator[Folder]:
    """A directory on which fsync is free: what a disk does is tested elsewhere."""
    base = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="holdfast-test-", dir=base) as path:
        yield Folder(f"{path}/checkpoints")


def state(step: int) -> dict[str, Any]:
    seed = torch.Generator().manual_seed(step)
    return {
        "model": {
            "weight": torch.randn(7, 4, generator=seed),
            "bias": torch.randn(5, generator=seed).to(torch.bfloat16),
            "count": torch.tensor(step),
            "empty": torch.empty(0, 3),
        },
        "optimizer": {
            "state": {0: {"step": torch.tensor(float(step)), "exp_avg": torch.randn(7, 4, generator=seed)}},
            "param_groups": [{"lr": 0.1 * step, "betas": (0.9, 0.999), "params": [0]}],
        },
        "scheduler": {"last_epoch": step, "rates": [0.1, float("inf")]},
    }


def own(step: int, rank: int) -> dict[str, Any]:
    return {"rng": [step, rank]}


def same(one: Any, other: Any) -> bool:
    """Bit for bit."""
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def snapshot(
    step: int,
    rank: int = 0,
    world_size: int = 1,
    term: int = 1,
    epoch: int | None = None,
    metrics: dict[str, float] | None = None,
    policy: Policy = KEEP_ALL,
    generation: int = 0,
    ranks: Sequence[int] | None = None,
    values: dict[str, Any] | None = None,
) -> tuple[Snapshot, memoryview]:
    """Tensors with rows are cut along them, unevenly; the others are rank 0's."""
    node: dict[str, Any] = {}
    tensors: dict[str, torch.Tensor] = {}
    for name, value in (values if values is not None else state(step)).items():
        node[name], found = tree.flatten(value, name)
        tensors |= found
    pieces, content = [], bytearray()
    for key, tensor in tensors.items():
        box = _box(tensor, rank, world_size)
        if box is None:
            continue
        content += bytes(-len(content) % 8)
        offsets, part = box
        dtype = str(tensor.dtype).removeprefix("torch.")
        shape = tuple(tensor.shape)
        pieces.append(Piece(key, dtype, shape, offsets, tuple(part.shape), len(content)))
        content += bytes(part.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    common = msgspec.json.encode({"state": node}) if rank == 0 else b"null"
    made = Snapshot(
        url="", term=term, generation=generation, step=step, epoch=epoch, rank=rank, world_size=world_size,
        ranks=tuple(ranks if ranks is not None else range(world_size)), pieces=tuple(pieces), written=len(pieces),
        written_bytes=len(content), own=msgspec.Raw(msgspec.json.encode(tree.flatten(own(step, rank), "own")[0])),
        common=msgspec.Raw(common), metrics=metrics if metrics is not None else {"loss": 1.0 / (1 + step)},
        policy=policy, world="world", file=epoch_file(epoch) if epoch is not None else "",
    )  # fmt: skip
    return made, memoryview(content)


def _box(tensor: torch.Tensor, rank: int, world_size: int) -> tuple[tuple[int, ...], torch.Tensor] | None:
    if tensor.dim() < 2 or world_size == 1:
        return ((0,) * tensor.dim(), tensor) if rank == 0 else None
    rows = -(-tensor.shape[0] // world_size)
    begin, end = min(rank * rows, tensor.shape[0]), min((rank + 1) * rows, tensor.shape[0])
    if begin == end and rank > 0:
        return None
    return (begin, *(0,) * (tensor.dim() - 1)), tensor[begin:end]


def save(storage: Storage, step: int, world_size: int = 1, **options: Any) -> list[Outcome]:
    """All ranks, one after the other."""
    return [persist.persist(storage, *snapshot(step, rank, world_size, **options)) for rank in range(world_size)]


def begin(storage: Storage, restored: int | None = None, job: str = "job", generation: int = 0) -> int:
    return terms.begin(storage, job, generation, restored, 1).number


def load(storage: Storage, found: Found) -> dict[str, Any]:
    """The whole state, verified."""
    if found.kind == "epoch":
        return epochs.open_epoch(storage, found).state
    opened = shards.open_step(storage, found)
    nodes = msgspec.json.decode(opened.common)["state"]
    tensors = assembly.of_step(opened)
    return {name: tree.unflatten(node, tensors) for name, node in nodes.items()}


def latest(storage: Storage) -> list[Found]:
    return catalogue.choose("latest", catalogue.find(storage), Policy())


def names(storage: Storage) -> list[str]:
    """Of all checkpoints, newest first."""
    return [found.name for found in catalogue.find(storage).found]


def files(storage: Storage) -> list[str]:
    """Every file of a folder, hidden ones too."""
    assert isinstance(storage, Folder)
    root = Path(storage.url)
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


def commits_all(storage: Storage, step: int, world_size: int) -> None:
    """Commit what the ranks have written."""
    made, _ = snapshot(step, 0, world_size, values={})
    assert commits.commit(storage, made).own
