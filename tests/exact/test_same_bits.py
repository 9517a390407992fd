"""Ranks that are processes end with the same bits, however many there are."""

from __future__ import annotations

import leafvalues
import leafworlds
import pytest
import torch
import torch.distributed as dist

from holdfast.exact.buffers import Spec
from holdfast.exact.combine import Exchange
from holdfast.exact.trees import Sums

SIZES = [0, 1, 63, 300, 1000]  # some have fewer slices than ranks
COUNTS = [1, 2, 3, 5, 8, 13]


def combine_many() -> None:
    """Compare every sum with the one that this process would make alone."""
    groups: list[dist.ProcessGroup | None] = [None]
    if dist.get_world_size() > 2:
        pair = dist.new_group([0, 2])
        groups += [pair] if dist.get_rank() in (0, 2) else []
    for group in groups:
        exchange, sums = Exchange(group), Sums()
        for size in SIZES:
            specs = [Spec(size, dtype, torch.device("cpu")) for dtype in leafvalues.DTYPES]
            for count in COUNTS:
                alone = Sums()
                alone.begin(count)
                for leaf in range(count):
                    alone.add(leaf, leafvalues.values(leaf, size))
                [(_, expected)] = alone.partials()
                for _ in range(2):
                    sums.begin(count)
                    for leaf in exchange.run(count):
                        sums.add(leaf, leafvalues.values(leaf, size))
                    found = exchange.combine(sums.partials(), count, specs)
                    assert leafvalues.bits(found) == leafvalues.bits(expected), (size, count)
        mine = [torch.tensor(exchange.rank + 5), torch.full((3,), exchange.rank == 0), torch.empty(0, 2)]
        mine.append(torch.full((2, 2), exchange.rank + 0.5, dtype=torch.float64))
        exchange.first(mine)
        assert mine[0].item() == 5 and mine[1].tolist() == [True] * 3 and mine[3].tolist() == [[0.5] * 2] * 2


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_ranks_finish_the_tree_with_the_bits_of_one_process(world: int) -> None:
    leafworlds.run(world, combine_many)


def test_five_steps_of_training_end_with_the_same_bits_at_any_number_of_ranks() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        alone = leafworlds.train()
    finally:
        torch.set_num_threads(threads)
    for world in (1, 2, 3, 4):
        assert leafworlds.run(world, leafworlds.train) == [alone] * world


def test_partials_of_other_leaves_are_refused() -> None:
    sums = Sums()
    sums.begin(3)
    sums.add(0, [torch.zeros(1)])
    with pytest.raises(ValueError, match=r"rank 0 has \[0, 1, 2\] of 3 leaves"):
        Exchange().combine(sums.partials(), 3, [Spec(1, torch.float32, torch.device("cpu"))])
