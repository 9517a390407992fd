"""Who takes what of a global batch: all of it once, at any world size, and sizes need divide nothing."""

from __future__ import annotations


def share(begin: int, end: int, rank: int, world_size: int) -> tuple[int, int]:
    """The positions of a rank out of those from `begin` up to `end`: contiguous, in the order of the ranks. The sizes
    differ by at most one and the larger come first, so rank 0 has nothing only where there is nothing."""
    _check(begin, end)
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} is not one of a world of {world_size}")
    each, more = divmod(end - begin, world_size)
    first = begin + rank * each + min(rank, more)
    return first, first + each + (rank < more)


def leaves(begin: int, end: int, batch_size: int, count: int) -> list[tuple[int, int]]:
    """The positions of a global batch in fixed pieces, none of them empty. Where one is cut is a matter of `begin`,
    `batch_size` and `count` alone and never of the world, so that what is summed over a piece is the same bits in any
    world. The short last batch of an epoch has fewer pieces; what is left over there goes to the last of them if it is
    no more than half a piece: few samples make a poor one, and BatchNorm can make nothing of a single one."""
    _check(begin, end)
    if batch_size < 1 or count < 1:
        raise ValueError(f"a batch of {batch_size} cannot be cut into {count} pieces; both are at least 1")
    if end - begin > batch_size:
        raise ValueError(f"positions {begin} to {end} are more than a batch of {batch_size}")
    width = -(-batch_size // count)
    cuts = [(at, min(at + width, end)) for at in range(begin, end, width)]
    if len(cuts) > 1 and 2 * (end - cuts[-1][0]) <= width:
        cuts[-2:] = [(cuts[-2][0], end)]
    return cuts


def run_of(leaf_count: int, rank: int, world_size: int) -> range:
    """The leaves of a rank: contiguous, so that it can sum most of them by itself."""
    return range(*share(0, leaf_count, rank, world_size))


def _check(begin: int, end: int) -> None:
    if begin > end:
        raise ValueError(f"positions {begin} to {end}: the end is before the beginning")
