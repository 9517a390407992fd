"""What one rank computes in one step: units of a global batch, one forward and backward each. Pure."""

from __future__ import annotations

from typing import NamedTuple

from holdfast.data.split import leaves, run_of, share


class Unit(NamedTuple):
    """Samples by their positions in an epoch's order."""

    begin: int
    end: int
    weight: float  # of the gradient of its mean loss; 0: who has no samples takes some along that count nothing
    number: int  # of the leaf, in exact mode; else of this rank's units
    is_last: bool  # of this rank in this step


class Cut(NamedTuple):
    """How a global batch is cut."""

    batch_size: int  # of all ranks together
    rank: int
    world_size: int
    micro_batch_size: int | None = None  # of a rank, in each unit
    leaves: int | None = None  # exact mode: this many, whatever the world

    def units(self, begin: int, end: int) -> list[Unit]:
        """Of this rank, for the global batch at these positions. Never none: all ranks take part in each step."""
        if self.leaves is not None:
            return self._leaves(begin, end)
        ranks = self._busy(end - begin)
        first, last = share(begin, end, self.rank, ranks) if self.rank < ranks else (begin, begin)
        # All ranks have as many: each forward of a sharded model is a matter of all of them.
        most = -(-(end - begin) // ranks)
        size = min(most, self.micro_batch_size or most)
        count = -(-most // size)
        scale = self.world_size / (end - begin)  # the mean over ranks is taken later, by DDP or FSDP
        units = []
        for number in range(count):
            low, high = min(last, first + number * size), min(last, first + (number + 1) * size)
            units.append(_unit(begin, end, low, high, (high - low) * scale, number, number == count - 1))
        return units

    def _busy(self, samples: int) -> int:
        """How many ranks take part in that many. In an epoch's short last batch none has one sample alone, of which
        BatchNorm can make nothing, as long as all have more in the others."""
        if samples >= 2 * self.world_size or self.batch_size < 2 * self.world_size:
            return self.world_size
        return max(1, samples // 2)

    def leaf_count(self, samples: int) -> int:
        """Of a global batch of that many samples."""
        return len(leaves(0, samples, self.batch_size, self.leaves or 1))

    def _leaves(self, begin: int, end: int) -> list[Unit]:
        assert self.leaves is not None
        cuts = leaves(begin, end, self.batch_size, self.leaves)
        mine = run_of(len(cuts), self.rank, self.world_size)
        units = []
        for number in mine:
            low, high = cuts[number]
            weight = (high - low) / (end - begin)
            units.append(_unit(begin, end, low, high, weight, number, number == mine[-1]))
        return units or [_unit(begin, end, begin, begin, 0.0, 0, True)]


def _unit(begin: int, end: int, low: int, high: int, weight: float, number: int, is_last: bool) -> Unit:
    if high > low:
        return Unit(low, high, weight, number, is_last)
    return Unit(begin, min(begin + 2, end), 0.0, number, is_last)
