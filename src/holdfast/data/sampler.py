"""A batch sampler that gives every sample of an epoch exactly once, whatever happens to the world in between.

Its state is a position in an order that knows nothing of ranks. The position moves when a step commits and at no other
time: what was only prefetched, or belongs to a step that failed, is given out again, to whichever ranks there are.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sized
from typing import Any

import torch
from torch.utils.data import Sampler

from holdfast.data import fingerprint as fingerprints
from holdfast.data.order import VERSION, Order
from holdfast.data.split import share

# Indices are found for so many of a rank's samples at once, or so many batches where they are small: one by one, a
# batch of 64 would cost 40 us instead of 12.
_AT_ONCE = 1024
_BATCHES_AT_ONCE = 64


class DataChanged(ValueError):
    """The dataset is not the one that the state was saved with."""


class ElasticSampler(Sampler[list[int]]):
    """For `DataLoader(dataset, batch_sampler=...)`, on every rank with the same arguments. `batch_size` is that of all
    ranks together. Each item is what this rank takes of the next global batch: at most one index more than any other
    rank, and an empty list where the batch has fewer samples than there are ranks. A collate function must take that.

        for batch in loader:
            ...
            optimizer.step()
            sampler.commit()

    Rank and world size are those of torch.distributed, or else of the environment's RANK and WORLD_SIZE.
    """

    def __init__(
        self,
        dataset_or_size: Sized | int,
        batch_size: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        rank: int | None = None,
        world_size: int | None = None,
        fingerprint: str | None = None,
    ) -> None:
        """Without a `fingerprint`, the dataset is asked for one; an empty one is not compared with that of a save."""
        super().__init__()
        self._size = dataset_or_size if isinstance(dataset_or_size, int) else len(dataset_or_size)
        if self._size < 1:
            raise ValueError(f"the dataset has {self._size} samples; there is nothing to train on")
        if batch_size < 1:
            raise ValueError(f"batch_size is that of all ranks together and at least 1, not {batch_size}")
        self._batch_size = batch_size
        self._rank, self._world_size = _place(rank, world_size)
        if fingerprint is None:
            fingerprint = "" if isinstance(dataset_or_size, int) else fingerprints.of(dataset_or_size)
        self._fingerprint = fingerprint
        self._order = Order(self._size, seed, 0, shuffle)
        self._position = 0

    @property
    def epoch(self) -> int:
        return self._order.epoch

    @property
    def position(self) -> int:
        """How many samples of this epoch are committed."""
        return self._position

    @property
    def batches_done(self) -> int:
        """How many global batches of the present size the committed samples of this epoch fill."""
        return -(-self._position // self._batch_size)

    @property
    def batch_size(self) -> int:
        return self._batch_size

    @property
    def order(self) -> Order:
        """Of this epoch."""
        return self._order

    def __len__(self) -> int:
        """Global batches left in this epoch, the short last one included."""
        return -(-(self._size - self._position) // self._batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        """From the committed position to the end of the epoch. Moves nothing, since a loader reads ahead."""
        return self._batches(self._order, self._position)

    def commit(self) -> bool:
        """Call it after the optimizer's step: the samples of one global batch are done. True if those were the last of
        the epoch; the next one begins with an order of its own."""
        self._position += self._batch_size
        if self._position < self._size:
            return False
        self._order = Order(self._size, self._order.seed, self._order.epoch + 1, self._order.shuffle)
        self._position = 0
        return True

    def move(self, batch_size: int, rank: int, world_size: int) -> None:
        """The world is another one. Call it between two steps; whoever reads ahead has to begin again."""
        self._batch_size = batch_size
        self._rank, self._world_size = _place(rank, world_size)

    def state_dict(self) -> dict[str, Any]:
        """A few numbers, the same on every rank."""
        return {
            "version": VERSION,
            "epoch": self._order.epoch,
            "position": self._position,
            "seed": self._order.seed,
            "size": self._size,
            "batch_size": self._batch_size,
            "shuffle": self._order.shuffle,
            "fingerprint": self._fingerprint,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where the save was, in its order: seed and shuffling are the save's. The batch size and the world
        may be others. Raises DataChanged for another dataset, ValueError for what no sampler has saved."""
        if state.get("version") != VERSION:
            raise ValueError(
                f"the sampler's state has version {state.get('version')!r}, and this Holdfast knows {VERSION}; resume "
                "with the Holdfast that saved it"
            )
        epoch, position, size, seed = (_integer(state, name) for name in ("epoch", "position", "size", "seed"))
        shuffle, fingerprint = state.get("shuffle"), state.get("fingerprint")
        if epoch < 0 or not 0 <= position < size or not isinstance(shuffle, bool) or not isinstance(fingerprint, str):
            raise ValueError(f"this is no state of a sampler: {dict(state)!r}")
        if size != self._size:
            raise _changed(f"{size} samples", f"{self._size}")
        if fingerprint and self._fingerprint and fingerprint != self._fingerprint:
            raise _changed(f"the fingerprint {fingerprint}", self._fingerprint)
        self._order = Order(size, seed, epoch, shuffle)
        self._position = position

    def _batches(self, order: Order, position: int) -> Iterator[list[int]]:
        width = -(-self._batch_size // self._world_size)
        step = self._batch_size * min(_BATCHES_AT_ONCE, max(1, _AT_ONCE // width))
        for first in range(position, order.size, step):
            begins = range(first, min(first + step, order.size), self._batch_size)
            shares = [
                share(begin, min(begin + self._batch_size, order.size), self._rank, self._world_size)
                for begin in begins
            ]
            positions = [torch.arange(begin, end, device="cpu") for begin, end in shares]
            indices = order.pick(torch.cat(positions)).tolist()
            at = 0
            for begin, end in shares:
                yield indices[at : at + end - begin]
                at += end - begin


def _place(rank: int | None, world_size: int | None) -> tuple[int, int]:
    if (rank is None) != (world_size is None):
        raise ValueError("rank and world_size go together: give both or neither")
    if rank is None or world_size is None:
        rank, world_size = _found_place()
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} is not one of a world of {world_size}")
    return rank, world_size


def _found_place() -> tuple[int, int]:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    rank, world_size = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
    try:
        return int(rank), int(world_size)
    except ValueError:
        raise ValueError(f"RANK={rank} and WORLD_SIZE={world_size} of the environment are no numbers") from None


def _integer(state: Mapping[str, Any], name: str) -> int:
    value = state.get(name)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"this is no state of a sampler: its {name} is {value!r}")
    return value


def _changed(had: str, has: str) -> DataChanged:
    return DataChanged(
        f"the dataset changed since the save: it had {had} and now has {has}; an epoch cannot go on in another one. "
        "Resume with the dataset of the save, or leave the sampler's state out and begin its first epoch anew"
    )
