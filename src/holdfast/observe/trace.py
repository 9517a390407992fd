"""A job's record as a trace for Perfetto (ui.perfetto.dev) or chrome://tracing: the Trace Event Format, in JSON.

The job comes first, with its wall clock, worlds and incidents; then each node, with a row for each of its ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from holdfast.observe import record
from holdfast.observe.goodput import Goodput
from holdfast.observe.record import Noted

JOB = 0  # the job's place among the nodes
WALL, WORLDS, INCIDENTS = 1, 2, 3  # its rows
AGENT = 0  # a node's first row; rank r has row r + 1


class _Life(msgspec.Struct):
    """A rank in a world."""

    generation: int
    since_us: int
    stepped_us: int | None = None
    pid: int = 0


def encode(notes: Sequence[Noted], goodput: Goodput) -> bytes:
    return msgspec.json.encode(
        {
            "traceEvents": [*_job(goodput), *_Nodes(notes, goodput.earlier_s).events],
            "displayTimeUnit": "ms",
            "otherData": {"run_id": goodput.state.run_id, "started": goodput.state.started},
        }
    )


def _job(goodput: Goodput) -> list[dict[str, Any]]:
    events = [_called("process", JOB, 0, f"job {goodput.state.run_id}".strip())]
    events += [_called("thread", JOB, row, name) for row, name in _ROWS.items()]
    args: dict[str, Any]
    for span in goodput.spans:
        told = [("generation", span.generation, span.generation >= 0), ("incident", span.incident, span.incident > 0)]
        shown = {name: value for name, value, is_one in told if is_one}
        events.append(_stretch(JOB, WALL, span.since_us, span.until_us, span.phase.value, shown))
    for world in goodput.worlds:
        args = {"size": world.size, "base": world.base, "steps": world.steps, "redone": world.redone}
        since_us, until_us = round(world.launched_s * 1e6), round(world.ended_s * 1e6)
        events.append(_stretch(JOB, WORLDS, since_us, until_us, f"generation {world.generation}", args))
    lasts_us = {span.incident: span.until_us for span in goodput.spans}
    ends_us = [
        *(round(cost.at_s * 1e6) for cost in goodput.costs[1:]),
        goodput.spans[-1].until_us if goodput.spans else 0,
    ]
    for cost, end_us in zip(goodput.costs, ends_us, strict=False):
        incident = cost.incident
        args = {"kind": incident.kind.value, "rank": incident.rank, "node": incident.node, "action": incident.action}
        since_us = round(cost.at_s * 1e6)
        until_us = max(since_us, min(lasts_us.get(incident.number, since_us), end_us))
        args |= {"lost_s": cost.lost_s, "phases_s": cost.phases_s}
        events.append(_stretch(JOB, INCIDENTS, since_us, until_us, f"{incident.number}: {incident.what}", args))
    return events


_ROWS = {WALL: "wall clock", WORLDS: "worlds", INCIDENTS: "incidents"}


class _Nodes:
    """Each node's own lines."""

    def __init__(self, notes: Sequence[Noted], earlier_s: float) -> None:
        self.events: list[dict[str, Any]] = []
        self._nodes: dict[str, int] = {}
        self._lives: dict[tuple[str, int], _Life] = {}
        self._rows: set[tuple[str, int]] = set()
        self._saves = 0
        last_us = 0
        for noted in sorted(notes, key=lambda noted: noted.at_s):
            last_us = max(last_us, at_us := round((earlier_s + noted.at_s) * 1e6))
            self._take(noted, at_us)
        for node, rank in list(self._lives):
            self._end(node, rank, last_us, {})

    def _take(self, noted: Noted, at_us: int) -> None:
        node = noted.node
        match noted.what:
            case record.JobStarted(host=host):
                self._node(node, host)
            case record.WorldLaunched() as launched:
                for rank in range(launched.first_rank, launched.first_rank + launched.local_size):
                    self._begin(node, rank, launched.generation, at_us)
            case record.WorldStarted(generation=generation, pids=pids):
                for rank, pid in pids.items():
                    self._begin(node, rank, generation, at_us).pid = pid
            case record.RankFirstStep(rank=rank, generation=generation):
                self._begin(node, rank, generation, at_us).stepped_us = at_us
            case record.CheckpointRestored(rank=rank, generation=generation) as restored:
                life = self._begin(node, rank, generation, at_us)
                since_us = max(life.since_us, at_us - round(restored.seconds * 1e6))
                args = {"step": restored.step, "source": restored.source}
                self._add(_stretch(self._node(node), rank + 1, since_us, at_us, "restoring", args))
            case record.RankExited(rank=rank, status=status):
                self._end(node, rank, at_us, {"status": status})
            case record.RankRaised(rank=rank, error=error):
                self._mark(node, rank + 1, at_us, "raised", {"error": error})
            case record.RankHung(rank=rank, what=what):
                self._mark(node, rank + 1, at_us, "hung", {"what": what})
            case record.StragglerFound(rank=rank, own_s=own_s, typical_s=typical_s, by=by):
                self._mark(node, rank + 1, at_us, "straggles", {"own_s": own_s, "typical_s": typical_s, "by": by})
            case record.StragglerGone(rank=rank):
                self._mark(node, rank + 1, at_us, "straggles no more", {})
            case record.Progress(step=step):
                self._count(self._node(node), at_us, "step", step)
            case record.Trained(loss=float() as loss):
                self._count(JOB, at_us, "loss", loss)
            case record.CheckpointSaved() | record.CheckpointPersisted() as saved:
                args = {"step": saved.step, "checkpoint": saved.checkpoint, "bytes": saved.bytes}
                self._save(node, at_us - round(saved.seconds * 1e6), at_us, noted.what.NAME, args)
            case record.CheckpointFailed(step=step, why=why):
                self._mark(node, AGENT, at_us, "checkpoint.failed", {"step": step, "why": why})
            case record.FaultInjected(kind=kind, text=text):
                self._add(_moment(JOB, INCIDENTS, at_us, f"fault: {kind}", {"text": text}))
            case record.JobSignalled(signal=signal, why=why):
                self._mark(node, AGENT, at_us, signal, {"why": why} if why else {})
            case record.CoordinatorSaid(text=text):
                self._mark(node, AGENT, at_us, text, {})

    def _begin(self, node: str, rank: int, generation: int, at_us: int) -> _Life:
        """The life of this rank in this world, from here on unless it is known already."""
        if (node, rank) not in self._rows:
            self._rows.add((node, rank))
            self._add(_called("thread", self._node(node), rank + 1, f"rank {rank}"))
        life = self._lives.get((node, rank))
        if life is None or life.generation != generation:
            self._end(node, rank, at_us, {})
            life = self._lives[node, rank] = _Life(generation, at_us)
        return life

    def _end(self, node: str, rank: int, at_us: int, args: dict[str, Any]) -> None:
        if (life := self._lives.pop((node, rank), None)) is None:
            return
        number, told = self._node(node), {"pid": life.pid, **args}
        self._add(_stretch(number, rank + 1, life.since_us, at_us, f"generation {life.generation}", told))
        stepped_us = at_us if life.stepped_us is None else life.stepped_us
        self._add(_stretch(number, rank + 1, life.since_us, stepped_us, "starting", {}))
        self._add(_stretch(number, rank + 1, stepped_us, at_us, "training", {}))

    def _save(self, node: str, since_us: int, until_us: int, name: str, args: dict[str, Any]) -> None:
        """Saves overlap each other, so they have ids and not rows."""
        self._saves += 1
        common = {"pid": self._node(node), "tid": AGENT, "cat": "checkpoint", "id": self._saves, "name": name}
        self._add({**common, "ph": "b", "ts": max(0, since_us), "args": args})
        self._add({**common, "ph": "e", "ts": max(0, until_us)})

    def _mark(self, node: str, row: int, at_us: int, name: str, args: dict[str, Any]) -> None:
        self._add(_moment(self._node(node), row, at_us, name, args))

    def _count(self, number: int, at_us: int, name: str, value: float) -> None:
        self._add({"ph": "C", "pid": number, "tid": 0, "ts": max(0, at_us), "name": name, "args": {name: value}})

    def _node(self, node: str, host: str = "") -> int:
        if node not in self._nodes:
            self._nodes[node] = len(self._nodes) + 1
            self._add(_called("process", self._nodes[node], 0, f"node {node or host}".strip()))
            self._add(_called("thread", self._nodes[node], AGENT, "agent"))
        return self._nodes[node]

    def _add(self, event: dict[str, Any]) -> None:
        self.events.append(event)


def _called(what: str, number: int, row: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": number, "tid": row, "name": f"{what}_name", "args": {"name": name}}


def _stretch(number: int, row: int, since_us: int, until_us: int, name: str, args: dict[str, Any]) -> dict[str, Any]:
    since_us = max(0, since_us)  # of a node that was there before the leading one
    length_us = max(0, until_us - since_us)
    return {"ph": "X", "pid": number, "tid": row, "ts": since_us, "dur": length_us, "name": name, "args": args}


def _moment(number: int, row: int, at_us: int, name: str, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "i", "s": "t", "pid": number, "tid": row, "ts": max(0, at_us), "name": name, "args": args}
