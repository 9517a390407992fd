"""Many seeds, on all cores, and what they amounted to."""

from __future__ import annotations

import multiprocessing
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

import msgspec

from holdfast.simulate.simulation import Result, run

CHUNK = 20


class Summary(msgspec.Struct):
    seeds: int = 0
    virtual_s: float = 0.0
    wall_s: float = 0.0
    worlds: int = 0
    faults: Counter[str] = msgspec.field(default_factory=Counter)
    outcomes: Counter[str] = msgspec.field(default_factory=Counter)
    failed: list[Result] = msgspec.field(default_factory=list)

    def add(self, result: Result) -> None:
        self.seeds += 1
        self.virtual_s += result.virtual_s
        self.worlds += result.worlds
        self.faults.update(result.faults)
        self.outcomes[result.outcome] += 1
        if result.invariant:
            self.failed.append(result)

    def line(self) -> str:
        faults = ", ".join(f"{count} {kind}" for kind, count in self.faults.most_common())
        speed = self.virtual_s / self.wall_s if self.wall_s else 0.0
        return (
            f"{self.seeds} seeds, {len(self.failed)} failed; {self.virtual_s / 3600:.1f} virtual hours in "
            f"{self.wall_s:.0f} s ({speed:,.0f} times real time); {self.worlds} worlds; "
            f"{sum(self.faults.values())} faults: {faults}"
        )


def run_many(
    seeds: Iterable[int], nodes: int | None, jobs: int, failed: Callable[[Result], None] = lambda result: None
) -> Summary:
    summary = Summary()
    began_s = time.monotonic()
    for result in _results([(seed, nodes) for seed in seeds], jobs):
        summary.add(result)
        if result.invariant:
            failed(result)
    summary.wall_s = time.monotonic() - began_s
    return summary


def _results(tasks: list[tuple[int, int | None]], jobs: int) -> Iterator[Result]:
    if jobs <= 1:
        yield from map(_run, tasks)
        return
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        yield from pool.imap(_run, tasks, chunksize=CHUNK)


def _run(task: tuple[int, int | None]) -> Result:
    return run(*task)
