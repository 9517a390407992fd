"""The order of an epoch: how long a seek takes, and how many indices one core finds in a second."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable

import torch

from bench.launchers import table, versions
from bench.savers import verdict
from holdfast.data.order import Order
from holdfast.data.sampler import ElasticSampler

HUGE = 10**10
SIZES = {"10^6 + 3": 10**6 + 3, "10^10": HUGE}
SEEK_S = 1e-3
PER_SECOND = 5e6


def timed(act: Callable[..., object], *given: object) -> float:
    began_s = time.perf_counter()
    act(*given)
    return time.perf_counter() - began_s


def seek(epoch: int, position: int) -> int:
    """A new Order, as after a restart, and one index of it."""
    return Order(HUGE, 0, epoch).at(position)


def takes(chance: random.Random, size: int, count: int) -> float:
    """Indices per second, of the median take of so many at a random position."""
    order = Order(size, 0, 0)
    begins = [chance.randrange(size - count) for _ in range(max(50, 200_000 // count))]
    return count / statistics.median(timed(order.take, begin, begin + count) for begin in begins)


def sampled(batch_size: int, world_size: int) -> float:
    """Seconds that one rank's list of a global batch takes: the mean over 2,000 of them."""
    loop = iter(ElasticSampler(HUGE, batch_size, rank=0, world_size=world_size))
    return sum(timed(next, loop) for _ in range(2000)) / 2000


def main() -> None:
    torch.set_num_threads(1)
    chance = random.Random(0)
    print(f"The order of an epoch, on one core; {versions()}\n", flush=True)
    takes(chance, HUGE, 4096)  # the first use of an operation is slower
    rows = []
    found = sorted(timed(seek, epoch, chance.randrange(HUGE)) for epoch in range(1000))
    for name, took_s in (("median", statistics.median(found)), ("99th percentile", found[990])):
        figure = f"{1e6 * took_s:.0f} us"
        rows.append([f"seek in an epoch of 10^10, {name} of 1000", figure, "under 1 ms", verdict(took_s < SEEK_S)])
    for name, size in SIZES.items():
        for count in (256, 4096, 65536):
            rate = takes(chance, size, count)
            what = f"{count} indices of {name}, {1e6 * count / rate:.0f} us"
            rows.append([what, f"{rate / 1e6:.1f} million/s", "5 million/s", verdict(rate >= PER_SECOND)])
    plain_s = min(timed(torch.randperm, 10**7) for _ in range(3))
    rows.append(["torch.randperm(10^7), all of it before the first", f"{10 / plain_s:.1f} million/s", "", ""])
    rows.append(["  which a seek in it waits for", f"{1e3 * plain_s:.0f} ms", "", ""])
    for batch_size, world_size in ((64, 1), (256, 4), (4096, 8)):
        what = f"ElasticSampler, one rank's list, batch of {batch_size} over {world_size}"
        rows.append([what, f"{1e6 * sampled(batch_size, world_size):.1f} us", "", ""])
    print(table(["what", "figure", "asked", ""], rows))


if __name__ == "__main__":
    main()
