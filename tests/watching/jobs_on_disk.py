"""Records of jobs that never ran, in run directories like those of an agent."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from holdfast.control.causes import Kind
from holdfast.control.incidents import Follower
from holdfast.observe import record
from holdfast.observe.events import iso
from holdfast.observe.record import What

ELSEWHERE = "n1:100"  # a node on another machine, whose agent cannot be asked
CLOCK_S = 5_000.0
NOW_S = 1_800_000_000.0


class Written:
    """A job's run directory. By its record it began an hour ago, by a clock that stands still or by the real one."""

    def __init__(self, log_dir: Path, run_id: str = "made", node: str = ELSEWHERE, now_s: float = NOW_S) -> None:
        self.run_dir = log_dir / f"{run_id}_{len(list(log_dir.glob('*'))):08}"
        self.run_dir.mkdir(parents=True)
        self.run_id, self.node = run_id, node
        self.record = self.run_dir / record.NAME
        self._zero_s = now_s - 3600.0
        self._seqs: dict[str, int] = {}

    def note(self, at_s: float, what: What, node: str | None = None) -> Written:
        name = node if node is not None else self.node
        seq = self._seqs[name] = self._seqs.get(name, -1) + 1
        line = {"v": 1, "node": name, "seq": seq, "name": what.NAME, "at_s": at_s, "time": iso(self._zero_s + at_s)}
        return self.append(msgspec.json.encode({**line, "data": what}) + b"\n")

    def append(self, data: bytes) -> Written:
        with self.record.open("ab") as file:
            file.write(data)
        return self

    # -- what happens in a job ----------------------------------------------------------------------------------------

    def starts(self, at_s: float = 0.0, nproc: int = 2, node: str | None = None, **more: Any) -> Written:
        name = node or self.node
        host, _, pid = name.rpartition(":")
        data: dict[str, Any] = {"max_restarts": 3, "version": "0", "program": {"path": "/home/you/train.py"}, **more}
        started = record.JobStarted(
            run_id=self.run_id, node="id", nproc=nproc, pid=int(pid or 0), host=host, clock_s=CLOCK_S, **data
        )
        return self.note(at_s, started, node)

    def launches(
        self, at_s: float, generation: int = 0, size: int = 2, first: int = 0, here: int = 0, node: str | None = None
    ) -> Written:
        launched = record.WorldLaunched(
            generation=generation, size=size, restarts=generation, first_rank=first, local_size=here or size
        )
        return self.note(at_s, launched, node)

    def steps(self, at_s: float, generation: int = 0, ranks: Sequence[int] = (0, 1)) -> Written:
        for rank in ranks:
            self.note(at_s, record.RankFirstStep(generation, rank))
        return self

    def progresses(self, at_s: float, steps: Sequence[int], generation: int = 0, base: int = 0, **more: Any) -> Written:
        progress = record.Progress(
            generation=generation, first_rank=0, step=base + max(steps), steps=tuple(steps), base=base, **more
        )
        return self.note(at_s, progress)

    def trains(self, step: int = 40) -> Written:
        """Two ranks, for an hour, until ten seconds ago."""
        self.starts().launches(5).steps(8)
        return self.progresses(3590, (step, step), step_us=(250_000, 250_000), own_us=(100_000, 100_000), phases="11")

    def fails(
        self, at_s: float, number: int = 1, generation: int = 0, back_s: float | None = 2.0, **more: Any
    ) -> Written:
        """An incident, opened, and closed if it came back after that long."""
        at = CLOCK_S + at_s
        data: dict[str, Any] = {
            "number": number, "generation": generation, "kind": Kind.SIGNAL, "headline": "killed by SIGKILL",
            "action": f"restart {number} of 3", "restarted": True, "rank": 1, "steps": 27, "failed_at_s": at,
            "stopped_at_s": at + 0.5, "failed_at": iso(self._zero_s + at_s),
            "followers": (Follower(0, "RuntimeError: Connection reset by peer"),), **more,
        }  # fmt: skip
        self.note(at_s + 0.5, record.IncidentOpened(**data))
        if back_s is not None:
            data |= {"launched_at_s": at + 0.5, "started_at_s": at + 1, "recovered_at_s": at + back_s}
            self.note(at_s + back_s, record.IncidentClosed(**data))
        return self

    def ends(self, at_s: float, outcome: str = "succeeded", reason: str = "") -> Written:
        return self.note(at_s, record.JobEnded(outcome, reason, 40, at_s, 0.0))

    def prints(self, generation: int, local_rank: int, texts: Mapping[str, bytes]) -> Written:
        folder = self.run_dir / f"attempt_{generation}" / str(local_rank)
        folder.mkdir(parents=True, exist_ok=True)
        for stream, text in texts.items():
            with (folder / f"{stream}.log").open("ab") as file:
                file.write(text)
        return self


def large(log_dir: Path, nodes: int = 125, per_node: int = 8, incidents: int = 20) -> Written:
    """A job of a thousand ranks: one of them failed, one hangs, one straggles, and a node stands by."""
    names = [f"n{number:03}:100" for number in range(nodes)]
    job = Written(log_dir, "large", names[0])
    size = nodes * per_node
    for name in [*names, "spare:100"]:
        job.starts(nproc=per_node, node=name)
    for number in range(1, incidents + 1):
        job.fails(number * 60.0, number, number - 1)
    for at, name in enumerate(names):
        first = at * per_node
        job.launches(2_000, incidents, size, first, per_node, name)
        ranks = range(first, first + per_node)
        job.note(2_001, record.WorldStarted(incidents, {rank: 1_000 + rank for rank in ranks}), name)
        for rank in ranks:
            job.note(2_010, record.RankFirstStep(incidents, rank), name)
        steps = tuple(50_000 for _ in range(per_node))
        own_us = tuple(100_000 + 1_000 * (each % 3) for each in range(per_node))
        pace = {"step_us": (250_000,) * per_node, "own_us": own_us, "phases": "1" * per_node}
        job.note(3_580, record.Progress(incidents, first, 50_000, steps, 0, **pace), name)  # type: ignore[arg-type]
    job.note(3_585, record.StragglerFound(incidents, 611, 0.4, 0.1, 9.0, 5))
    job.note(3_586, record.RankHung(incidents, 700, "no step for 60 s", 60.0))
    return job.note(3_587, record.RankExited(incidents, 998, 1_998, -9))


def here(pid: int) -> str:
    """A node of this machine, as a record names it."""
    return f"{socket.gethostname()}:{pid}"
