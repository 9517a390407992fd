"""One fixed binary tree over the leaves of a batch, and sums in its order.

Node (level, place) covers the leaves from place * 2^level up to, not including, (place + 1) * 2^level, cut at the
number of leaves. It is its left half plus its right half; where there is no right half, it is its left half and nothing
is added. Which additions are made, and in which order, then depends on the number of leaves alone: whoever makes them,
the sum has the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

Values = list[torch.Tensor]  # flat ones, one a dtype and device


class Node(NamedTuple):
    level: int
    place: int

    def leaves(self, count: int) -> range:
        return range(min(self.place << self.level, count), min((self.place + 1) << self.level, count))


def root(count: int) -> Node:
    return Node((count - 1).bit_length(), 0)


def subtrees(run: range, count: int) -> list[Node]:
    """The largest nodes that lie wholly within a run of leaves, in order; at most two a level."""
    found = []
    top = root(count).level
    leaf = run.start
    while leaf < run.stop:
        level = 0
        while level < top and leaf % (2 << level) == 0 and min(leaf + (2 << level), count) <= run.stop:
            level += 1
        found.append(Node(level, leaf >> level))
        leaf += 1 << level
    return found


class Sums:
    """What the leaves of one run add up to, taken one after the other like a binary counter counts.

    At most one sum a level is kept on the way up and one on the way down, and all of them are made in the tensors of
    the leaves: `add` takes these over. Those it needs no more come back by `spare`, so that a run of any length, and
    every step after the first, works in the same few buffers.
    """

    def __init__(self) -> None:
        self._count = 0
        self._next: int | None = None
        self._kept: list[tuple[Node, Values]] = []
        self._spare: list[Values] = []

    def begin(self, count: int) -> None:
        """A new batch of so many leaves. What the last one's sums were in will be written over."""
        if count < 1:
            raise ValueError(f"a batch has at least one leaf, not {count}")
        self._spare += (values for _, values in self._kept)
        self._kept = []
        self._count, self._next = count, None

    def spare(self) -> Values | None:
        """Tensors of an earlier leaf that nobody needs any more, to write the next leaf into."""
        return self._spare.pop() if self._spare else None

    def add(self, leaf: int, values: Sequence[torch.Tensor]) -> None:
        if not 0 <= leaf < self._count or self._next not in (None, leaf):
            wanted = f"leaf {self._next}" if self._next is not None else "any"
            raise ValueError(f"leaf {leaf} of {self._count} cannot be added: {wanted} comes next")
        self._next = leaf + 1
        node, total = Node(0, leaf), list(values)
        top = root(self._count).level
        while node.level < top:
            if node.place % 2 == 0:
                if (node.place + 1) << node.level < self._count:
                    break  # its right half comes later
            elif self._kept and self._kept[-1][0] == Node(node.level, node.place - 1):
                left = self._kept.pop()[1]
                _add(left, total)
                self._spare.append(total)
                total = left
            else:
                break  # its left half is another run's
            node = Node(node.level + 1, node.place // 2)
        self._kept.append((node, total))

    def partials(self) -> list[tuple[Node, Values]]:
        """The run's largest nodes in order, those that `subtrees` names."""
        return list(self._kept)


def complete(count: int, partials: Mapping[Node, Sequence[torch.Tensor]]) -> Values:
    """The sum of all leaves from nodes that cover each of them once. It is made in the partials' own tensors."""

    def total(node: Node) -> Values:
        if node in partials:
            return list(partials[node])
        if node.level == 0:
            raise ValueError(f"nobody has summed leaf {node.place} of {count}")
        left = total(Node(node.level - 1, node.place * 2))
        right = Node(node.level - 1, node.place * 2 + 1)
        if right.leaves(count):
            _add(left, total(right))
        return left

    return total(root(count))


def _add(left: Values, right: Values) -> None:
    for into, more in zip(left, right, strict=True):
        into.add_(more)
