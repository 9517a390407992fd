"""Data that comes in a stream: iterable datasets, and loaders that somebody else has made.

A stream has no order that another number of ranks could share. So less can be promised, and it is said what.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec
import torch
from torch.utils.data import DataLoader, IterableDataset

from holdfast.checkpoint import randomness, tree
from holdfast.training.units import Cut, Unit

_ANY = Cut(1, 0, 1).units(0, 1)[0]  # all of this rank's step, whatever the stream gives
_END = object()


class Place(NamedTuple):
    """Where a stream is in an epoch."""

    own: Any  # a state of its own, packed; None: the epoch's begin
    after: int  # so many batches later


class Stream:
    """Each rank reads its own, and all are to give as many batches."""

    def __init__(
        self, source: Any, batch_size: int, epochs: int, world_size: int, state: Any, options: dict[str, Any]
    ) -> None:
        """`source`: an iterable dataset, which is then read in batches of that size, or any loader."""
        if isinstance(source, IterableDataset):
            self._loader: Any = DataLoader(source, batch_size=batch_size, **options)
        elif options:
            raise ValueError(f"{', '.join(options)}: a loader was given, and it has its options already")
        else:
            self._loader = source
        self.samples = batch_size * world_size
        self.epochs = epochs
        self.epoch = 0
        self.served = False
        self.unit: Unit | None = None
        self._stateful = _stateful(self._loader)
        self._copies = getattr(self._loader, "num_workers", 0) if _is_iterable(self._loader) else 0
        self._done = 0  # batches of this epoch
        self._given = 0  # of those, by this process
        self._ends = False  # the epoch, with the batch that was given out last
        self._read = Place(None, 0)  # with that batch read
        self._committed = Place(None, 0)  # with the last one read that was used
        self._began: Any = None  # randomness as it was when the epoch began
        self._resumes = state is not None
        if state is not None:
            self.load_state_dict(state)

    @property
    def promise(self) -> str:
        """What holds after a restart, in one line."""
        how = "goes on by its own state" if self._stateful is not None else "is read again up to where it was"
        return f"the data is a stream: with as many ranks as before it {how}; with another number its epoch begins anew"

    def __len__(self) -> int:
        """A stream does not know its end."""
        return max(0, self.epochs - self.epoch)

    def __iter__(self) -> Iterator[Any]:
        while self.epoch < self.epochs:
            batch, coming = self._begin()
            while batch is not _END:
                self._read = self._next_place()
                # One ahead: whether a batch is the epoch's last must be known when its step is done.
                following = next(coming, _END)
                self._ends = following is _END
                self.unit, self.served = _ANY, True
                yield batch
                if self.served:  # nobody has said that the step is done; then the data goes on all the same
                    self.commit()
                batch = following

    def commit(self) -> bool:
        self.unit, self.served = None, False
        self._done += 1
        self._committed = self._read
        if self._ends:
            self.epoch, self._done = self.epoch + 1, 0
            self._began = {"all": None, "loader": _drawn(self._loader)}
        return self._ends

    def state_dict(self) -> dict[str, Any]:
        own, after = self._committed
        return {"epoch": self.epoch, "batches": self._done, "own": own, "after": after, "began": self._began}

    @staticmethod
    def begins(epoch: int) -> dict[str, Any]:
        """The state of any stream at the begin of that epoch."""
        return {"epoch": epoch, "batches": 0, "own": None, "after": 0, "began": None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self._done = state["epoch"], state["batches"]
        self._committed, self._began = Place(state["own"], state["after"]), state["began"]

    # -- where an epoch begins, or goes on ----------------------------------------------------------------------------

    def _begin(self) -> tuple[Any, Iterator[Any]]:
        """The next batch, and those after it."""
        resumes, self._resumes = self._resumes, False
        if resumes and self._done:
            return self._go_on()
        # Where each worker has a copy of the dataset, all begin with what the loader was made of.
        loaded = resumes and not self._copies and self._load()
        now = randomness.capture()
        drawn = self._began["loader"] if resumes and self._began is not None else _drawn(self._loader)
        # What was saved with its last batch read has its end before it; torchdata's loader can come to it twice.
        for _ in range(3 if loaded else 1):
            randomness.put_back(now)
            _put_back(self._loader, drawn)
            _set_epoch(self._loader, self.epoch)
            self._began, self._read, self._given = {"all": now, "loader": drawn}, Place(None, 0), 0
            coming = iter(self._loader)
            batch = next(coming, _END)
            if batch is not _END:
                return batch, coming
        raise ValueError("the stream gave no batch at all in an epoch")

    def _go_on(self) -> tuple[Any, Iterator[Any]]:
        """In the middle of an epoch. An order is drawn when it begins, so randomness is as it was then. Afterwards it
        is the training's, in which the draws for the next batch are already."""
        now = randomness.capture()
        _set_epoch(self._loader, self.epoch)
        randomness.put_back(self._began["all"])
        _put_back(self._loader, self._began["loader"])
        self._read = self._committed if self._load() else Place(None, self._done)
        coming = itertools.islice(iter(self._loader), self._read.after, None)
        batch = next(coming, _END)
        randomness.put_back(now)
        if batch is _END:
            raise ValueError(
                f"the stream has no batch after the {self._done} of epoch {self.epoch + 1} that were used before; it "
                "must be the same data"
            )
        return batch, coming

    def _load(self) -> bool:
        """Whether the stream could be told by its own state where it was."""
        if self._stateful is None or self._committed.own is None:
            return False
        self._stateful.load_state_dict(_unpacked(self._committed.own))
        return True

    def _next_place(self) -> Place:
        """With one more batch read. Of a worker that has given none yet, the state may still be that of another epoch,
        or of another process."""
        self._given += 1
        if self._stateful is None or self._given < self._copies:
            return Place(self._read.own, self._read.after + 1)
        return Place(_packed(self._stateful.state_dict()), 0)


def _stateful(loader: Any) -> Any:
    """Who knows where the stream is: the loader, or its dataset, if that is read in this process and not ahead."""
    if _is_iterable(loader) and not _has_state(loader.dataset):
        # torchdata 0.11 would read up to there, too, but counts that twice: the restart after this one misses batches.
        return None
    if type(loader) is DataLoader and loader.num_workers == 0 and _is_iterable(loader):
        return loader.dataset
    return loader if _has_state(loader) else None


def _has_state(part: Any) -> bool:
    return callable(getattr(part, "state_dict", None)) and callable(getattr(part, "load_state_dict", None))


def _is_iterable(loader: Any) -> bool:
    return isinstance(getattr(loader, "dataset", None), IterableDataset)


def _parts(loader: Any) -> list[Any]:
    return [loader, *(getattr(loader, name, None) for name in ("sampler", "dataset"))]


def _set_epoch(loader: Any, epoch: int) -> None:
    """As distributed samplers and many datasets want it, for another order in each."""
    for part in _parts(loader):
        if callable(told := getattr(part, "set_epoch", None)):
            told(epoch)


def _generators(loader: Any) -> list[torch.Generator]:
    """Which of them draw from one of their own."""
    found = [getattr(part, "generator", None) for part in _parts(loader)]
    return list(dict.fromkeys(one for one in found if isinstance(one, torch.Generator)))


def _drawn(loader: Any) -> dict[str, Any]:
    """Where those stand."""
    return _packed([generator.get_state() for generator in _generators(loader)])


def _put_back(loader: Any, drawn: dict[str, Any]) -> None:
    for generator, state in zip(_generators(loader), _unpacked(drawn), strict=False):
        generator.set_state(state)


def _packed(state: Any) -> dict[str, Any]:
    """Plain values alone, since a rank can have no others for itself. A copy: who reads on may change the state."""
    node, tensors = tree.flatten(state, "stream")
    plain = {key: (tensor.dtype, tensor.shape, _bytes(tensor)) for key, tensor in tensors.items()}
    return {"tree": msgspec.json.encode(node), "tensors": plain}


def _unpacked(packed: dict[str, Any]) -> Any:
    tensors = {key: _tensor(*about) for key, about in packed["tensors"].items()}
    return tree.unflatten(msgspec.json.decode(packed["tree"]), tensors)


def _bytes(tensor: torch.Tensor) -> bytes:
    plain = tensor.detach().cpu().contiguous()
    return ctypes.string_at(plain.data_ptr(), plain.numel() * plain.element_size())


def _tensor(dtype: torch.dtype, shape: torch.Size, content: bytes) -> torch.Tensor:
    if not content:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(content), dtype=dtype).reshape(shape)
