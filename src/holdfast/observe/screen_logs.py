"""Where the output of a job's ranks is: the log files of its nodes, by generation and rank."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import NamedTuple

from holdfast.agent import doorbell
from holdfast.observe import find, record
from holdfast.observe.screen import clean, many, ranks
from holdfast.observe.screen_job import host_of, is_here

STREAMS = ("stdout", "stderr")
KEEP = "give holdfast run --redirects 3 (to files) or --tee 3 (to files and to the console)"


class Log(NamedTuple):
    generation: int
    rank: int
    stream: str
    path: Path


class Wanted(NamedTuple):
    """Which logs: of these ranks, or of all; from this generation to that, or to all that follow."""

    ranks: frozenset[int] | None
    first: int
    last: int | None
    streams: tuple[str, ...] = STREAMS

    def has_generation(self, generation: int) -> bool:
        return self.first <= generation and (self.last is None or generation <= self.last)

    def has(self, log: Log) -> bool:
        of_rank = self.ranks is None or log.rank in self.ranks
        return of_rank and self.has_generation(log.generation) and log.stream in self.streams


class Tree:
    """The run directory of one node: which ranks it had in which generation, and where their output is."""

    def __init__(self, run_dir: Path, file: Path) -> None:
        """Raises OSError where there is no record."""
        self.run_dir = run_dir
        self.node: str | None = None
        self.nodes: set[str] = set()  # all of which the record has a line
        self.placed: dict[int, dict[str, range]] = {}  # by generation and node: its ranks
        self.started: set[int] = set()  # generations whose ranks have a process here, and so their files
        self._pid = 0
        self._has_ended = False
        self._reader = record.Reader(file)
        self.read()

    def read(self) -> None:
        for noted in self._reader:
            self.nodes.add(noted.node)
            if self.node is None:
                self.node = noted.node
            is_own = noted.node == self.node
            match noted.what:
                case record.JobStarted(pid=pid) if is_own:
                    self._pid = pid
                case record.WorldLaunched(generation=generation, first_rank=first, local_size=count):
                    self.placed.setdefault(generation, {})[noted.node] = range(first, first + count)
                case record.WorldStarted(generation=generation) if is_own:
                    self.started.add(generation)
                case record.JobEnded() if is_own:
                    self._has_ended = True

    def close(self) -> None:
        self._reader.close()

    def is_over(self) -> bool:
        """Nothing more is going to be written."""
        is_gone = self._pid > 0 and is_here(host_of(self.node or "")) and self._pid not in doorbell.find()
        return self._has_ended or is_gone

    def generations(self) -> set[int]:
        return {*self.placed, *_numbers(self.run_dir, "attempt_")}

    def logs(self, wanted: Wanted) -> list[Log]:
        found = []
        for generation in filter(wanted.has_generation, _numbers(self.run_dir, "attempt_")):
            first = self.placed.get(generation, {}).get(self.node or "", range(0)).start
            folder = self.run_dir / f"attempt_{generation}"
            for local in _numbers(folder):
                here = [Log(generation, first + local, name, folder / str(local) / f"{name}.log") for name in STREAMS]
                found += [log for log in here if wanted.has(log) and log.path.exists()]
        return found

    def folders(self, wanted: Wanted) -> list[Path]:
        """Where something may appear."""
        numbers = filter(wanted.has_generation, _numbers(self.run_dir, "attempt_"))
        attempts = [self.run_dir / f"attempt_{number}" for number in numbers]
        return [self.run_dir, *attempts, *(folder / str(local) for folder in attempts for local in _numbers(folder))]


class Logs:
    """Of all nodes of a job whose run directories can be seen from here. Earlier lives with the same run id are not
    among the nodes that its record knows."""

    def __init__(self, found: find.Found) -> None:
        """Raises OSError."""
        self.main = Tree(found.run_dir, found.record)
        self._found = found
        self._others: dict[Path, Tree] = {}
        self._looked_for = 1
        self._look_for_others()

    def read(self) -> None:
        for tree in self.trees:
            tree.read()
        self._look_for_others()

    def _look_for_others(self) -> None:
        if len(self.main.nodes) == self._looked_for:
            return
        self._looked_for = len(self.main.nodes)
        for run_dir in find.siblings(self._found)[1:]:
            if run_dir in self._others:
                continue
            with contextlib.suppress(OSError):
                tree = Tree(run_dir, run_dir / record.NAME)
                if tree.node in self.main.nodes and tree.node != self.main.node:
                    self._others[run_dir] = tree
                else:
                    tree.close()

    @property
    def trees(self) -> list[Tree]:
        return [self.main, *self._others.values()]

    def generations(self) -> list[int]:
        return sorted({each for tree in self.trees for each in tree.generations()})

    def logs(self, wanted: Wanted) -> list[Log]:
        """In order; of each rank standard output first."""
        found = [log for tree in self.trees for log in tree.logs(wanted)]
        return sorted(found, key=lambda log: (log.generation, log.rank))

    def folders(self, wanted: Wanted) -> list[Path]:
        return [folder for tree in self.trees for folder in tree.folders(wanted)]

    def ranks_of(self, generation: int) -> set[int]:
        """As the record has them; empty in the first versions."""
        return {rank for each in self.main.placed.get(generation, {}).values() for rank in each}

    def missing(self, wanted: Wanted) -> str:
        """Why something that is wanted is not there; '' if all is."""
        generations = self.generations()
        if not generations:
            return "the job has started no rank yet"
        if not any(map(wanted.has_generation, generations)):
            return f"there is no generation {wanted.first}; the last one is {generations[-1]}"
        here = self.logs(Wanted(None, wanted.first, wanted.last))
        if not here and wanted.ranks is None:
            return f"the job keeps no logs, what its ranks print goes to the console; {KEEP}"
        lacking = (wanted.ranks or frozenset()) - {log.rank for log in here}
        return self._lacking(min(lacking), wanted, here) if lacking else ""

    def _lacking(self, rank: int, wanted: Wanted, here: list[Log]) -> str:
        generations = [each for each in self.generations() if wanted.has_generation(each)]
        known = {each for generation in generations for each in self.ranks_of(generation)}
        seen = {tree.node for tree in self.trees}
        for generation in generations:
            for node, placed in self.main.placed.get(generation, {}).items():
                if rank in placed and node not in seen:
                    host = clean(host_of(node) or node)
                    return f"rank {rank} ran on {host}, and what it printed is there; ask there"
        if known and rank not in known:
            return f"there is no rank {rank}; there {'is' if len(known) == 1 else 'are'} {many(len(known), 'rank')}"
        if not here:
            return f"the job keeps no logs, what its ranks print goes to the console; {KEEP}"
        return f"there is no log of rank {rank}; kept are those of {ranks({log.rank for log in here})}"


def _numbers(folder: Path, prefix: str = "") -> list[int]:
    """Of the files with such names, in order."""
    try:
        names = os.listdir(folder)
    except OSError:
        return []
    rest = [name.removeprefix(prefix) for name in names if name.startswith(prefix)]
    return sorted(int(each) for each in rest if each.isascii() and each.isdigit())
