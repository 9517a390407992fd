"""`run.batches`: global batches of a dataset, this rank's part of each, from the exact sample where training was."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Sampler

from holdfast.data.order import Order
from holdfast.data.sampler import ElasticSampler
from holdfast.exact import keyed
from holdfast.training.units import Cut, Unit

_AT_ONCE = 4096  # indices are found for so many samples at once: one batch after the other would cost ten times as much


class Batches:
    """One pass over what is left of the epochs. The data's position moves when a step is done, not when it is read."""

    def __init__(
        self,
        dataset: Any,
        sampler: ElasticSampler,
        cut: Cut,
        epochs: int,
        begin: Callable[[Cut, Unit, int], None],
        keys: bool,
        options: dict[str, Any],
        done: int = 0,
    ) -> None:
        """`done`: samples of the first step that are in its gradients already."""
        self.sampler = sampler
        self.cut = cut
        self.epochs = epochs
        self.per_rank = 0  # a rank's batch, where that is what was given
        self.rule = "none"  # by which the learning rate follows the number of ranks then
        self.served = False  # all of this rank's units of a step that is not done yet
        self.unit: Unit | None = None  # that was given out last, of a step that is not done yet
        self.samples = 0  # of that step, on all ranks
        self._begin = begin
        self._moved = False
        self._epoch, self._position, self._done = sampler.epoch, sampler.position, done
        self._size = sampler.order.size
        if keys:
            dataset = keyed.KeyedDataset(dataset, sampler.order.seed)
        self._indices = _Indices(cut, keys)
        options = {"persistent_workers": bool(options.get("num_workers")), **options}
        # A generator of its own: torch's global one is the training's, and is to give the same numbers after a restart.
        self._generator = torch.Generator()
        self._loader = DataLoader(dataset, batch_sampler=self._indices, generator=self._generator, **options)

    @property
    def epoch(self) -> int:
        """How many are done."""
        return self.sampler.epoch

    def __len__(self) -> int:
        """Steps that are left."""
        whole = -(-self._size // self.cut.batch_size)
        rest = -(-(self._size - self.sampler.position) // self.cut.batch_size)
        return max(0, rest + whole * (self.epochs - self.sampler.epoch - 1))

    def move(self, cut: Cut, done: int) -> None:
        """The world is another one: begin again with the first sample that is not used yet, and cut it anew."""
        self.cut = self._indices.cut = cut
        self.unit, self.served, self._moved = None, False, True
        self._epoch, self._position, self._done = self.sampler.epoch, self.sampler.position, done

    def __iter__(self) -> Iterator[Any]:
        while self._epoch < self.epochs:
            self._moved = False
            order = Order(self._size, self.sampler.order.seed, self._epoch, self.sampler.order.shuffle)
            self._indices.point(order, self._position, self._done)
            self._generator.manual_seed(keyed.seed_of(order.seed, self._epoch, "workers"))
            units = self._indices.units
            for batch in self._loader:
                self.unit = unit = units.popleft()
                self.served = unit.is_last
                end = min(self._position + self.cut.batch_size, self._size)
                self.samples = end - self._position
                self._begin(self.cut, unit, self.samples)
                yield batch
                if self._moved:
                    break
                if unit.is_last:
                    self._position, self._done = end, 0
            else:
                self._epoch, self._position = self._epoch + 1, 0

    def commit(self) -> bool:
        """The step is done. Whether the epoch is, too."""
        self.unit, self.served = None, False
        return self.sampler.commit()


class _Indices(Sampler[list[Any]]):
    """Which samples make up each unit, for a loader that reads ahead."""

    def __init__(self, cut: Cut, keys: bool) -> None:
        super().__init__()
        self.cut = cut
        self.units: deque[Unit] = deque()  # that the loader has asked for, in order
        self._keys = keys  # each index with its epoch, by which its randomness is keyed
        self._order: Order | None = None
        self._position = self._done = 0

    def point(self, order: Order, position: int, done: int) -> None:
        self._order, self._position, self._done = order, position, done
        self.units = deque()  # a loader that goes on with what was before does no harm to this one

    def __iter__(self) -> Iterator[list[Any]]:
        assert self._order is not None
        order, size, asked_for = self._order, self.cut.batch_size, self.units
        waiting: list[Unit] = []
        found, enough = 0, 1  # the first batch is not kept waiting for those after it
        for begin in range(self._position, order.size, size):
            done = self._done if begin == self._position else 0
            for unit in self.cut.units(begin, min(begin + size, order.size), done):
                waiting.append(unit)
                found += unit.end - unit.begin
            if found >= enough or begin + size >= order.size:
                for unit, indices in zip(waiting, self._lists(order, waiting), strict=True):
                    asked_for.append(unit)
                    yield indices
                waiting, found, enough = [], 0, min(4 * found, _AT_ONCE)

    def _lists(self, order: Order, units: list[Unit]) -> Iterator[list[Any]]:
        indices: list[Any] = order.pick(_positions(units)).tolist()
        if self._keys:
            indices = [(order.epoch, index) for index in indices]
        at = 0
        for unit in units:
            yield indices[at : at + unit.end - unit.begin]
            at += unit.end - unit.begin


def _positions(units: list[Unit]) -> torch.Tensor:
    """In their order; most are of one length, and then no list is made of each."""
    lengths = {unit.end - unit.begin for unit in units}
    if len(lengths) > 1:
        return torch.cat([torch.arange(unit.begin, unit.end) for unit in units])
    begins = torch.tensor([unit.begin for unit in units])
    return (begins.unsqueeze(1) + torch.arange(lengths.pop())).flatten()
