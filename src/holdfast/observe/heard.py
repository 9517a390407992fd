"""A job's record, sorted by its worlds, with all moments on one clock: what its wall clock is divided by."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from holdfast.observe import record
from holdfast.observe.record import IncidentNoted, Noted
from holdfast.observe.state import fold

_FAR_S = 1e9  # no job's clock gets there; a time beyond it is a broken line's


class Seen(msgspec.Struct):
    """A world, as it was heard of. Moments are in microseconds since the job began."""

    generation: int
    since_us: int
    size: int = 0
    nodes: list[str] = []
    launched_us: int | None = None
    started_us: int | None = None
    firsts: dict[int, int] = {}
    exits: dict[int, int] = {}
    samples: list[tuple[int, int]] = []  # moment, and steps in this world
    saving: dict[str, list[tuple[int, int]]] = {}  # of each node: moment, and what saves have taken so far
    restored: list[tuple[bool, int, int]] = []  # on the leading node, how long it took, and when it was done
    base: int = -1
    steps: int = 0


class Job:
    """The node that writes the record leads: it is the first in it, and the clock is its own.

    A node that was started when the job had run for a while, and coordinates since, writes of what was before it too:
    the others tell it all that they have. So the job begins with the first line of any node, if a world was launched
    before the leading one came; else with that one.
    """

    def __init__(self, notes: Sequence[Noted]) -> None:
        self.state = fold(notes[:1])
        self.from_middle = not self.state.nodes
        self.lead = notes[0].node if notes else ""
        times_us = [_us(noted.at_s) for noted in notes] or [0]
        self.earlier_us = -min(times_us) if not self.from_middle and self._came_late(notes) else 0
        self.start_us = min(times_us) if self.from_middle else 0
        self.end_us = max(self.start_us, self.earlier_us + max(times_us))
        self.ended: record.JobEnded | None = None
        self.worlds: dict[int, Seen] = {}
        self.incidents: dict[int, IncidentNoted] = {}  # on the leading node's clock
        self._own: set[int] = set()  # of these, what it has told itself
        self.hellos: list[int] = []
        self.signalled_us: int | None = None
        self._clocks_s: dict[str, float] = {}  # what each node's clock showed at the record's zero
        for noted in notes:
            if (clock_s := _clock_s(noted)) is not None:
                self._clocks_s[noted.node] = max(clock_s, self._clocks_s.get(noted.node, clock_s))
        self._clock_s = self.state.clock_s or self._clocks_s.get(self.lead, 0.0)
        for noted in sorted(notes, key=lambda noted: noted.at_s):
            self._take(noted, self.earlier_us + _us(noted.at_s))

    def at(self, monotonic_s: float) -> int:
        """A moment of the leading node's clock."""
        return self.earlier_us + _us(monotonic_s - self._clock_s)

    def _came_late(self, notes: Sequence[Noted]) -> bool:
        others = (noted for noted in notes if noted.at_s < 0 and noted.node != self.lead)
        return any(isinstance(noted.what, record.WorldLaunched) for noted in others)

    def _take(self, noted: Noted, at_us: int) -> None:
        match noted.what:
            case record.NodeHello():
                self.hellos.append(at_us)
            case record.JobSignalled() if noted.node == self.lead and self.signalled_us is None:
                self.signalled_us = at_us
            case record.JobEnded() as ended if noted.node == self.lead:
                self.ended, self.end_us = ended, max(self.start_us, at_us)
            case record.WorldLaunched() as launched:
                world = self._world(launched.generation, at_us)
                world.size = launched.size
                world.nodes.append(noted.node)
                if world.launched_us is None or noted.node == self.lead:
                    world.launched_us = at_us
            case record.WorldStarted(generation=generation):
                self._world(generation, at_us).started_us = at_us  # the last node's
            case record.RankFirstStep(generation=generation, rank=rank):
                self._world(generation, at_us).firsts.setdefault(rank, at_us)
            case record.RankExited(generation=generation, rank=rank):
                self._world(generation, at_us).exits[rank] = at_us
            case record.CheckpointRestored() as restored:
                world = self._world(restored.generation, at_us)
                world.restored.append((noted.node == self.lead, _us(restored.seconds), at_us))
                world.base = restored.step if world.base < 0 else world.base
            case record.Progress() as progress:
                world = self._world(progress.generation, at_us)
                world.steps = max(world.steps, *progress.steps, 0)
                world.base = progress.base if progress.base >= 0 else world.base
                world.samples.append((at_us, world.steps))
                world.saving.setdefault(noted.node, []).append((at_us, _us(progress.saving_s)))
            case IncidentNoted() as incident:
                self._hear_incident(noted.node, incident)

    def _hear_incident(self, node: str, incident: IncidentNoted) -> None:
        """All nodes have it, each on its own clock. What another one says counts only of what was before the leading
        one came."""
        if node == self.lead:
            self._own.add(incident.number)
        elif incident.number in self._own:
            return
        else:
            incident = _moved(incident, self._clock_s - self._clocks_s[node])
        self.incidents[incident.number] = incident
        world = self._world(incident.generation, self.at(incident.failed_at_s))
        world.steps = max(world.steps, incident.steps or 0)

    def _world(self, generation: int, at_us: int) -> Seen:
        return self.worlds.setdefault(generation, Seen(generation, at_us))


def _us(seconds: float) -> int:
    return round(max(-_FAR_S, min(_FAR_S, seconds)) * 1e6)


def _clock_s(noted: Noted) -> float | None:
    """What the node's clock showed at the record's zero, at least. A start is told a moment after the clock was read,
    and whatever an incident tells of was before it was told."""
    match noted.what:
        case record.JobStarted(clock_s=clock_s):
            return clock_s - noted.at_s
        case IncidentNoted() as told:
            marks = (told.stopped_at_s, told.launched_at_s, told.started_at_s, told.recovered_at_s)
            return max(mark for mark in marks if mark is not None) - noted.at_s
    return None


def _moved(incident: IncidentNoted, by_s: float) -> IncidentNoted:
    """To another clock."""
    times = {name: getattr(incident, name) for name in incident.__struct_fields__ if name.endswith("_at_s")}
    return msgspec.structs.replace(incident, **{name: at_s + by_s for name, at_s in times.items() if at_s is not None})
