"""Data that comes in a stream: iterable datasets, and loaders that somebody else has made.

A stream has no order that another number of ranks could share. So less can be promised, and it is said what.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from holdfast.training.units import Unit

_ANY = Unit(0, 0, 1.0, 0, True)


class Stream:
    """Each rank reads its own, and all are to give as many batches."""

    def __init__(
        self, source: Any, batch_size: int, epochs: int, world_size: int, state: Any, options: dict[str, Any]
    ) -> None:
        """`source`: an iterable dataset, which is then read in batches of that size, or any loader."""
        if isinstance(source, IterableDataset):
            self._loader: Any = DataLoader(source, batch_size=batch_size, **options)
        else:
            self._loader = source
        self.samples = batch_size * world_size
        self.epochs = epochs
        self.epoch = 0
        self.served = False
        self.unit: Unit | None = None
        self._done = 0  # batches of this epoch
        self._ends = False  # the epoch, with the batch that was given out last
        self._skip = 0
        self._is_stateful = callable(getattr(self._loader, "state_dict", None))
        self._resumes = state is not None
        if state is not None:
            self.load_state_dict(state)

    @property
    def promise(self) -> str:
        """What holds after a restart, in one line."""
        how = "goes on by its own state" if self._is_stateful else "is read again up to where it was"
        return (
            f"the data is a stream: with as many ranks as before it {how}; with another number, its epoch begins anew"
        )

    def __len__(self) -> int:
        """A stream does not know its end."""
        return max(0, self.epochs - self.epoch)

    def __iter__(self) -> Iterator[Any]:
        while self.epoch < self.epochs:
            _set_epoch(self._loader, self.epoch)
            coming = itertools.islice(iter(self._loader), self._skip, None)
            self._skip = 0
            # One ahead: whether a batch is the epoch's last must be known when its step is done.
            batch = next(coming, _END)
            if batch is _END and self._done == 0:
                raise ValueError("the stream gave no batch at all in an epoch")
            while batch is not _END:
                state = self._loader.state_dict() if self._is_stateful else None
                following = next(coming, _END)
                self._state, self._ends = state, following is _END
                self.unit, self.served = _ANY, True
                yield batch
                if self.served:  # nobody has said that the step is done; then the data goes on all the same
                    self.commit()
                batch = following

    def commit(self) -> bool:
        self.unit, self.served = None, False
        self._done += 1
        self._committed = self._state
        if self._ends:
            self.epoch, self._done, self._committed = self.epoch + 1, 0, None
        return self._ends

    _state: Any = None
    _committed: Any = None

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "batches": self._done, "loader": self._committed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self._done, self._committed = state["epoch"], state["batches"], state["loader"]
        if self._committed is not None and self._is_stateful:
            self._loader.load_state_dict(self._committed)
        else:
            self._skip = self._done


_END = object()


def _set_epoch(loader: Any, epoch: int) -> None:
    """As distributed samplers and many datasets want it, for another order in each."""
    for owner in (getattr(loader, "sampler", None), getattr(loader, "dataset", None)):
        if callable(told := getattr(owner, "set_epoch", None)):
            told(epoch)
