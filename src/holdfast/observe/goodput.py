"""The wall clock of a job, divided: training, and what took the rest of it. A pure function of the record.

All of it is idle at first. Then what is known is painted over it, world after world in the order of time, so that every
microsecond has one colour in the end: nothing is left over, and nothing counts twice.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from enum import StrEnum
from itertools import pairwise

import msgspec

from holdfast.observe import record
from holdfast.observe.heard import Job, Seen
from holdfast.observe.record import IncidentNoted, Noted
from holdfast.observe.state import State


class Phase(StrEnum):
    TRAINING = "training"
    FIRST_START = "first start"
    DETECTION = "detection"
    STOPPING = "stopping"
    FORMING = "forming the world"
    STARTING = "starting"
    RESTORING = "restoring"
    REDONE = "redone work"
    SAVING = "saving stall"
    WAITING = "waiting for nodes"
    IDLE = "idle"


class Span(msgspec.Struct, frozen=True):
    """A stretch of one colour, in whole microseconds, so that sums are exact."""

    since_us: int
    until_us: int
    phase: Phase
    generation: int = -1
    incident: int = 0  # whose cost it is; 0: nobody's

    @property
    def us(self) -> int:
        return self.until_us - self.since_us


class World(msgspec.Struct, frozen=True):
    generation: int
    size: int
    nodes: tuple[str, ...]
    launched_s: float
    trained_s: float | None  # from here on; None: it never came to that
    ended_s: float
    base: int  # steps that were done before it; -1: unknown
    steps: int
    redone: int | None  # of these; None: unknown


class Cost(msgspec.Struct, frozen=True):
    """What an incident took from the wall clock."""

    incident: IncidentNoted
    at_s: float
    redone: int | None  # steps that were done again because of it; None: unknown
    phases_s: dict[str, float]
    lost_s: float  # their sum


class Goodput(msgspec.Struct, frozen=True):
    state: State  # who the job is; nothing of what happened
    ended: record.JobEnded | None
    from_middle: bool  # the record's beginning is missing
    hidden: bool  # no steps can be seen in this program
    earlier_s: float  # so long before the record's zero the job began; all times here count from there
    wall_s: float
    ratio: float  # of training to all
    phases_s: dict[str, float]  # all of them; they add up to `wall_s`
    unknown: tuple[int, ...]  # generations of which nobody knows from which step they went on
    worlds: tuple[World, ...]
    costs: tuple[Cost, ...]
    spans: tuple[Span, ...]

    @property
    def steps(self) -> int:
        return sum(world.steps for world in self.worlds)

    @property
    def redone(self) -> int:
        return sum(world.redone or 0 for world in self.worlds)


def divide(notes: Iterable[Noted]) -> Goodput:
    """Of a whole record or any part of it: what is not in it counts as idle, or not at all."""
    return _Division(Job(list(notes))).goodput()


# -- painting ---------------------------------------------------------------------------------------------------------


class _Canvas:
    def __init__(self, since_us: int, until_us: int) -> None:
        self._strokes = [Span(since_us, until_us, Phase.IDLE)]

    def paint(self, since_us: int, until_us: int, phase: Phase, generation: int = -1, incident: int = 0) -> None:
        """Over what is there."""
        since_us, until_us = max(since_us, self._strokes[0].since_us), min(until_us, self._strokes[0].until_us)
        if since_us < until_us:
            self._strokes.append(Span(since_us, until_us, phase, generation, incident))

    def spans(self) -> tuple[Span, ...]:
        """What is seen in the end, from left to right: of the strokes at a moment, the last."""
        edges = sorted({edge for stroke in self._strokes for edge in (stroke.since_us, stroke.until_us)})
        coming = sorted(enumerate(self._strokes), key=lambda each: each[1].since_us, reverse=True)
        there: list[tuple[int, Span]] = []
        seen: list[Span] = []
        for since_us, until_us in pairwise(edges):
            while coming and coming[-1][1].since_us <= since_us:
                number, stroke = coming.pop()
                heapq.heappush(there, (-number, stroke))
            while there[0][1].until_us <= since_us:
                heapq.heappop(there)
            colour = (there[0][1].phase, there[0][1].generation, there[0][1].incident)
            if seen and (seen[-1].phase, seen[-1].generation, seen[-1].incident) == colour:
                since_us = seen.pop().since_us
            seen.append(Span(since_us, until_us, *colour))
        return tuple(seen)


class _Division:
    def __init__(self, job: Job) -> None:
        self._job = job
        self._canvas = _Canvas(job.start_us, job.end_us)
        self._seen = [job.worlds[generation] for generation in sorted(job.worlds)]
        self._incidents = [job.incidents[number] for number in sorted(job.incidents)]
        self._succeeded = job.ended is not None and job.ended.outcome == "succeeded"
        self._stops = {each.generation: each for each in self._incidents if self._stopped_its_world(each)}
        unseen = self._succeeded or any(each.steps is None for each in self._incidents)
        self._hidden = unseen and not any(world.firsts or world.samples for world in self._seen)
        self._redone: dict[int, int | None] = {}  # by incident
        self._unknown: list[int] = []
        self._best: int | None = None  # the furthest step so far

    def _stopped_its_world(self, incident: IncidentNoted) -> bool:
        """With min-healthy, the others go on after some. These cost nothing."""
        if incident.restarted or self._succeeded:
            return incident.restarted
        samples = self._job.worlds[incident.generation].samples
        went_on = bool(samples) and samples[-1][0] > self._job.at(incident.stopped_at_s)
        return incident is self._incidents[-1] and (self._job.ended is not None or not went_on)

    def goodput(self) -> Goodput:
        job, worlds = self._job, self._worlds()
        if job.signalled_us is not None:
            exits = self._seen[-1].exits.values() if self._seen else ()
            self._canvas.paint(job.signalled_us, max(exits, default=job.end_us), Phase.STOPPING)
        spans = self._canvas.spans()
        sums = dict.fromkeys(Phase, 0)
        costs: dict[int, dict[Phase, int]] = {}
        for span in spans:
            sums[span.phase] += span.us
            cost = costs.setdefault(span.incident, {})
            cost[span.phase] = cost.get(span.phase, 0) + span.us
        wall_us = job.end_us - job.start_us
        return Goodput(
            state=job.state,
            ended=job.ended,
            from_middle=job.from_middle,
            hidden=self._hidden,
            earlier_s=job.earlier_us / 1e6,
            wall_s=wall_us / 1e6,
            ratio=sums[Phase.TRAINING] / wall_us if wall_us else 0.0,
            phases_s={phase.value: us / 1e6 for phase, us in sums.items()},
            unknown=tuple(self._unknown),
            worlds=worlds,
            costs=tuple(self._cost(each, costs.get(each.number, {})) for each in self._incidents),
            spans=spans,
        )

    def _cost(self, incident: IncidentNoted, us: dict[Phase, int]) -> Cost:
        phases_s = {phase.value: us[phase] / 1e6 for phase in Phase if phase in us}
        at_s, redone = self._job.at(incident.failed_at_s) / 1e6, self._redone.get(incident.number, 0)
        return Cost(incident, at_s, redone, phases_s, sum(us.values()) / 1e6)

    def _worlds(self) -> tuple[World, ...]:
        done: list[World] = []
        ended_us = self._job.start_us
        before: IncidentNoted | None = None  # what ended the world before
        if not self._seen:
            self._paint_beginning(self._job.end_us, self._job.end_us)
        for number, world in enumerate(self._seen):
            after = self._seen[number + 1] if number + 1 < len(self._seen) else None
            stop = self._stops.get(world.generation)
            trains_us, ends_us = self._trains_from(world, before), self._ends(world, stop, after)
            up_us = ends_us if trains_us is None else min(trains_us, ends_us)
            # By what ended the one before, since that end is, too: of one node's lines and of an incident the times may
            # have come to this clock in two ways, and differ by milliseconds.
            launched_us = world.launched_us if before is None else self._launched(before, world)
            began_us = world.since_us if launched_us is None else launched_us
            if number == 0 and world.launched_us is not None:
                self._paint_beginning(world.launched_us, up_us)
            elif before is not None:
                self._canvas.paint(began_us, up_us, Phase.STARTING, world.generation, before.number)
            redone = self._count_redone(world, before)
            self._paint_world(world, trains_us, ends_us, redone or 0, before.number if before is not None else 0)
            done.append(_told(world, max(began_us, ended_us), trains_us, ends_us, redone))
            ended_us = round(done[-1].ended_s * 1e6)
            if stop is not None:
                self._paint_stop(stop, after)
            before = stop
        return tuple(done)

    def _launched(self, before: IncidentNoted, world: Seen | None) -> int | None:
        """When the world after an incident was, if it was."""
        if before.launched_at_s is not None:
            return self._job.at(before.launched_at_s)
        return world.launched_us if world is not None else None

    def _trains_from(self, world: Seen, before: IncidentNoted | None) -> int | None:
        """When all of its ranks had stepped."""
        if before is not None and before.recovered_at_s is not None:
            return self._job.at(before.recovered_at_s)
        if world.firsts and (len(world.firsts) >= world.size or world.samples):
            return max(world.firsts.values())
        if world.launched_us is None and world.started_us is None:
            return world.since_us  # the record begins in the middle of it
        if world.samples:
            return world.samples[0][0]
        return world.started_us if self._hidden else None

    def _ends(self, world: Seen, stop: IncidentNoted | None, after: Seen | None) -> int:
        if stop is not None:
            return self._job.at(stop.failed_at_s)
        over = after is not None or self._job.ended is not None or len(world.exits) >= max(1, world.size)
        ends_us = max(world.exits.values()) if over and world.exits else self._job.end_us
        return ends_us if after is None else min(ends_us, after.since_us)

    def _paint_beginning(self, launched_us: int, up_us: int) -> None:
        """The first world, and the wait for those that are to be in it."""
        self._canvas.paint(self._job.start_us, up_us, Phase.FIRST_START)
        if self._job.hellos:
            self._canvas.paint(self._job.hellos[0], launched_us, Phase.WAITING)

    def _paint_world(self, world: Seen, trains_us: int | None, ends_us: int, redone: int, incident: int) -> None:
        paint, generation = self._canvas.paint, world.generation
        if trains_us is not None:
            paint(trains_us, ends_us, Phase.TRAINING, generation)
        if own := [each for each in world.restored if each[0]] or world.restored:
            _, took_us, done_us = max(own, key=lambda each: each[1])
            paint(max(done_us - took_us, world.since_us), min(done_us, ends_us), Phase.RESTORING, generation, incident)
        if trains_us is None:
            return
        if redone:
            paint(trains_us, _reaches(world, redone, trains_us, ends_us), Phase.REDONE, generation, incident)
        since_us, saved_us = trains_us, 0
        for at_us, saving_us in max(world.saving.values(), key=lambda node: node[-1][1], default=[]):
            at_us = min(at_us, ends_us)
            paint(max(since_us, at_us - (saving_us - saved_us)), at_us, Phase.SAVING, generation)
            since_us, saved_us = max(since_us, at_us), saving_us

    def _paint_stop(self, stop: IncidentNoted, after: Seen | None) -> None:
        job, paint = self._job, self._canvas.paint
        failed_us = job.at(stop.failed_at_s)
        found_us = failed_us if stop.detected_at_s is None else max(failed_us, job.at(stop.detected_at_s))
        stopped_us = max(found_us, job.at(stop.stopped_at_s))
        paint(failed_us, found_us, Phase.DETECTION, stop.generation, stop.number)
        paint(found_us, stopped_us, Phase.STOPPING, stop.generation, stop.number)
        if not stop.restarted:
            return
        launched_us = self._launched(stop, after)
        until_us = job.end_us if launched_us is None else launched_us
        came = [hello_us for hello_us in job.hellos if stopped_us < hello_us <= until_us]
        waited_us = until_us if job.hellos and launched_us is None else max(came, default=stopped_us)
        paint(stopped_us, until_us, Phase.FORMING, stop.generation, stop.number)
        paint(stopped_us, waited_us, Phase.WAITING, stop.generation, stop.number)

    def _count_redone(self, world: Seen, before: IncidentNoted | None) -> int | None:
        """Steps that a world before it had done already; None if nobody knows where it went on."""
        best, base = self._best, world.base
        if best is None or (base < 0 and best == 0):  # nothing was done before, as far as this record goes
            self._best = max(0, base) + world.steps
            return 0
        redone = max(0, min(best - base, world.steps)) if base >= 0 else None
        if redone is None and world.steps:
            self._unknown.append(world.generation)
        self._best = max(best, max(0, base) + world.steps)
        if before is not None:
            self._redone[before.number] = redone if world.steps else 0
        return redone if world.steps else 0


def _reaches(world: Seen, steps: int, trains_us: int, ends_us: int) -> int:
    """When it had done so many steps, between two looks as if at an even pace. All did the first before it trained."""
    at_us, done = trains_us, 1
    for next_us, next_done in [*world.samples, (ends_us, world.steps)]:
        next_us = max(at_us, min(next_us, ends_us))
        if next_done >= steps:
            return at_us + round((next_us - at_us) * max(0, steps - done) / max(1, next_done - done))
        at_us, done = next_us, max(done, next_done)
    return ends_us


def _told(world: Seen, began_us: int, trains_us: int | None, ends_us: int, redone: int | None) -> World:
    """In the order in which it was, also where clocks differ by more than it took: what came here from a node that was
    cut off is by that one's, as far as it could be told."""
    trained_us = max(trains_us, began_us) if trains_us is not None and trains_us < ends_us else None
    ended_us = max(ends_us, began_us if trained_us is None else trained_us)
    trained_s = trained_us / 1e6 if trained_us is not None else None
    who = (world.generation, world.size, tuple(dict.fromkeys(world.nodes)))
    return World(*who, began_us / 1e6, trained_s, ended_us / 1e6, world.base, world.steps, redone)
