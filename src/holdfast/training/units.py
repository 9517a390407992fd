"""What one rank computes in one step: units of a global batch, one forward and backward each. Pure."""

from __future__ import annotations

from typing import NamedTuple

from holdfast.data.split import leaves, run_of, share
from holdfast.exact.trees import Node

_LEAVES_IN_ROUND = 8  # of each rank
_WHOLE = Node(0, 0)


class Unit(NamedTuple):
    """Samples by their positions in an epoch's order."""

    begin: int
    end: int
    weight: float  # of the gradient of its mean loss; 0: who has no samples takes some along that count nothing
    number: int  # of the leaf, in exact mode; else of the units of this step
    is_last: bool  # of this rank in this step
    done: int = 0  # how many samples of the step are, once all ranks have done this unit; in exact mode, the round's
    closes: bool = True  # a round, in exact mode: with it all ranks' leaves up to here can be summed
    round: Node = _WHOLE  # exact mode: the leaves of it


class Cut(NamedTuple):
    """How a global batch is cut."""

    batch_size: int  # of all ranks together
    rank: int
    world_size: int
    micro_batch_size: int | None = None  # of a rank, in each unit
    leaves: int | None = None  # exact mode: this many, whatever the world

    def units(self, begin: int, end: int, done: int = 0) -> list[Unit]:
        """Of this rank, for the global batch at these positions, without the samples that are done already. Never none:
        all ranks take part in each step, and have as many: each forward of a sharded model is a matter of all of them.
        """
        if self.leaves is not None:
            return self._leaves(begin, end, done)
        samples = end - begin
        width = min(self.batch_size, (self.micro_batch_size or self.batch_size) * self.world_size)
        units: list[Unit] = []
        for low in range(begin + done, end, width):
            high = min(low + width, end)
            ranks = self._busy(high - low, width)
            first, last = share(low, high, self.rank, ranks) if self.rank < ranks else (low, low)
            weight = (last - first) * self.world_size / samples  # the mean over ranks is taken later, by DDP or FSDP
            units.append(_unit(begin, end, first, last, weight, len(units), high == end, high - begin))
        return units

    def _busy(self, samples: int, width: int) -> int:
        """How many ranks take part in that many. In a short last unit none has one sample alone, of which BatchNorm can
        make nothing, as long as all have more in the others."""
        if samples >= 2 * self.world_size or width < 2 * self.world_size:
            return self.world_size
        return max(1, samples // 2)

    def leaf_count(self, samples: int) -> int:
        """Of a global batch of that many samples."""
        return len(leaves(0, samples, self.batch_size, self.leaves or 1))

    def _leaves(self, begin: int, end: int, done: int) -> list[Unit]:
        """In rounds of whole subtrees: what the leaves of a round add up to is known to all ranks when it ends."""
        assert self.leaves is not None
        cuts = leaves(begin, end, self.batch_size, self.leaves)
        first = next(number for number, (low, _) in enumerate(cuts) if low - begin >= done)
        level = self._level
        units = []
        for place in range(first >> level, -(-len(cuts) >> level)):
            node = Node(level, place)
            these = node.leaves(len(cuts))
            after, ends = cuts[these[-1]][1] - begin, these.stop == len(cuts)
            mine = [these[at] for at in run_of(len(these), self.rank, self.world_size)]
            for number in mine:
                low, high = cuts[number]
                closes = number == mine[-1]
                weight = (high - low) / (end - begin)
                units.append(_unit(begin, end, low, high, weight, number, ends and closes, after, closes, node))
            if not mine:
                units.append(_unit(begin, end, begin, begin, 0.0, these.start, ends, after, True, node))
        return units

    def can_go_on(self, samples: int, done: int) -> bool:
        """Whether a step of so many samples can begin with the rest of them: where one round ends, in exact mode."""
        if self.leaves is None:
            return self.micro_batch_size is not None and done < samples
        ends = [low for low, _ in leaves(0, samples, self.batch_size, self.leaves)]
        return done in ends and ends.index(done) % (1 << self._level) == 0

    @property
    def _level(self) -> int:
        """Of a round: enough leaves for each rank that sending their sum is a small part of the work."""
        return (_LEAVES_IN_ROUND * self.world_size - 1).bit_length()


def _unit(
    begin: int, end: int, low: int, high: int, weight: float, number: int, is_last: bool, done: int,
    closes: bool = True, of: Node = _WHOLE,
) -> Unit:  # fmt: skip
    if high <= low:
        low, high, weight = begin, min(begin + 2, end), 0.0
    return Unit(low, high, weight, number, is_last, done, closes, of)
