"""Sums in the fixed tree have the same bits however its leaves are split up."""

from __future__ import annotations

import itertools
import random

import leafvalues
import pytest
import torch

from holdfast.data.split import run_of
from holdfast.exact.trees import Node, Sums, Values, complete, root, subtrees

SIZE = 40


def summed(run: range, count: int, sums: Sums | None = None) -> list[tuple[Node, Values]]:
    sums = sums or Sums()
    sums.begin(count)
    for leaf in run:
        sums.add(leaf, leafvalues.values(leaf, SIZE))
    return sums.partials()


def runs(count: int, cuts: list[int]) -> list[range]:
    return [range(start, stop) for start, stop in itertools.pairwise([0, *cuts, count])]


@pytest.mark.parametrize("count", range(1, 18))
def test_every_split_over_any_ranks_has_the_bits_of_one_process(count: int) -> None:
    [(node, alone)] = summed(range(count), count)
    assert node == root(count)
    expected = leafvalues.bits(alone)
    dice = random.Random(count)
    for world in range(1, 7):
        splits = [runs(count, sorted(dice.randrange(count + 1) for _ in range(world - 1))) for _ in range(8)]
        for split in [*splits, [run_of(count, rank, world) for rank in range(world)]]:
            partials = [partial for run in split for partial in summed(run, count)]
            dice.shuffle(partials)
            assert leafvalues.bits(complete(count, dict(partials))) == expected, split


def test_the_order_of_additions_is_the_one_that_is_promised() -> None:
    a, b, c, d, e = (leafvalues.value(leaf, SIZE, torch.float32) for leaf in range(5))
    [(_, found)] = summed(range(5), 5)
    assert leafvalues.bits(found[:1]) == leafvalues.bits([((a + b) + (c + d)) + e])
    in_turn = a + b + c + d + e
    assert leafvalues.bits(found[:1]) != leafvalues.bits([in_turn])


def test_partials_are_the_largest_nodes_of_the_run() -> None:
    for count in range(1, 34):
        for start in range(count):
            for stop in range(start, count + 1):
                run = range(start, stop)
                nodes = subtrees(run, count)
                assert [leaf for node in nodes for leaf in node.leaves(count)] == list(run)
                sums = Sums()
                sums.begin(count)
                for leaf in run:
                    sums.add(leaf, [])
                assert [node for node, _ in sums.partials()] == nodes
    assert subtrees(range(3, 7), 7) == [Node(0, 3), Node(2, 1)]  # 3, and 4 to 6 as there is no 7
    assert subtrees(range(0), 7) == []


def test_a_long_run_and_every_later_step_use_few_buffers() -> None:
    sums, made = Sums(), 0
    for _ in range(3):
        sums.begin(1000)
        for leaf in range(1000):
            spare = sums.spare()
            if spare is None:
                made, spare = made + 1, [torch.empty(1)]
            spare[0].fill_(leaf)
            sums.add(leaf, spare)
        [(_, [total])] = sums.partials()
        assert total.item() == 499500
    assert made <= 11


def test_leaves_out_of_turn_and_trees_with_holes_are_refused() -> None:
    sums = Sums()
    with pytest.raises(ValueError, match="at least one leaf"):
        sums.begin(0)
    sums.begin(4)
    sums.add(1, [])
    with pytest.raises(ValueError, match="leaf 3 of 4 cannot be added: leaf 2 comes next"):
        sums.add(3, [])
    with pytest.raises(ValueError, match="nobody has summed leaf 0 of 4"):
        complete(4, dict(sums.partials()))


@pytest.mark.parametrize("world", range(1, 7))
def test_runs_are_contiguous_and_balanced(world: int) -> None:
    for count in range(20):
        found = [run_of(count, rank, world) for rank in range(world)]
        assert [leaf for run in found for leaf in run] == list(range(count))
        assert [len(run) for run in found] == sorted((len(run) for run in found), reverse=True)
        assert len(found[0]) - len(found[-1]) <= 1
