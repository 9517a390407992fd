"""Randomness by key instead of by carried state: who asks for the same thing gets the same numbers, on any rank."""

from __future__ import annotations

import operator
import random
import sys
from typing import Any, SupportsIndex, TypeVar

import torch
import xxhash
from torch.utils.data import Dataset, IterableDataset

T_co = TypeVar("T_co", covariant=True)


def seed_of(*key: SupportsIndex | str) -> int:
    """63 bits that depend on the key alone, and stay the same over versions and machines."""
    parts = (f"s{len(part)}:{part}" if isinstance(part, str) else f"i{operator.index(part)};" for part in key)
    return xxhash.xxh3_64_intdigest("".join(parts).encode()) & 0x7FFF_FFFF_FFFF_FFFF


def seed_all(seed: int) -> None:
    """Every generator that a model or a dataset commonly draws from. Not torch.manual_seed, which takes 100 us to ask
    for each kind of accelerator whether it is there."""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(seed)
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        # numpy 2 loads numpy.random when somebody first asks for it, so it must be asked for here, before the dataset
        # does. It takes 32 bits at once; twice as many take five times as long.
        numpy.random.seed(seed & 0xFFFF_FFFF)


class KeyedDataset(Dataset[T_co]):
    """A map-style dataset whose random augmentation depends on (seed, epoch, index), and not on which worker or rank
    reads the sample or on what it has read before.

    Workers get the epoch as it is when they start. Persistent ones do not hear of later ones: then give the index as
    (epoch, index). Whatever is drawn after a sample was read in this process goes on from the sample's seed.
    """

    def __init__(self, dataset: Dataset[T_co], seed: int, epoch: int = 0) -> None:
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
            raise TypeError(f"{type(dataset).__name__} has no samples by index, so nothing to key randomness by")
        self.dataset = dataset
        self.seed = seed
        self.epoch = epoch

    def __getitem__(self, index: Any) -> T_co:
        epoch = self.epoch
        if isinstance(index, tuple):
            epoch, index = index
        seed_all(seed_of(self.seed, epoch, index))
        return self.dataset[index]

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        # Not the special ones: while one is unpickled there is no dataset yet, and by __getitems__ torch would read a
        # whole batch past the keys.
        if name.startswith("__") or name == "dataset":
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.dataset, name)
