"""What must hold in every record, whatever was done to the job. Pure: records and faults in, what is broken out."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import msgspec

from holdfast.chaos.faults import Injected
from holdfast.control.causes import Kind
from holdfast.observe import record
from holdfast.observe.record import IncidentNoted, Noted

# What a restart budget may leave uncounted.
FREE = (Kind.MEMBERSHIP, Kind.LOST_NODE, Kind.PREEMPTED)


class Record(msgspec.Struct, frozen=True):
    """What one agent has written in one life of a job."""

    life: int
    node: int
    notes: Sequence[Noted]

    @property
    def own(self) -> list[Noted]:
        """Its own lines, in order; those of other nodes come when they come."""
        lead = next((noted.node for noted in self.notes if isinstance(noted.what, record.JobStarted)), "")
        return [noted for noted in self.notes if noted.node == lead]

    @property
    def clock_s(self) -> float:
        return next((noted.what.clock_s for noted in self.notes if isinstance(noted.what, record.JobStarted)), 0.0)

    @property
    def ended(self) -> record.JobEnded | None:
        return next((noted.what for noted in self.own if isinstance(noted.what, record.JobEnded)), None)


def incidents(records: Iterable[Record]) -> dict[tuple[int, int], IncidentNoted]:
    """By life and number, as they were last told."""
    found: dict[tuple[int, int], IncidentNoted] = {}
    for each in records:
        for noted in each.own:
            if isinstance(noted.what, IncidentNoted):
                before = found.get((each.life, noted.what.number))
                if before is None or isinstance(noted.what, record.IncidentClosed):
                    found[each.life, noted.what.number] = noted.what
    return found


def broken(records: Sequence[Record], injected: Sequence[Injected]) -> dict[str, list[str]]:
    """By invariant, what breaks it. An invariant that holds has an empty list."""
    found: dict[str, list[str]] = {
        "generations count up by one": [],
        "no world steps after a later one": [],
        "each world that ended has one incident": [],
        "restarts are counted once": [],
        "no committed checkpoint is lost": [],
    }
    generations, order, ended, counted, kept = found.values()
    for each in records:
        where = f"life {each.life}, node {each.node}"
        generations += _generations(where, each)
        order += _in_order(where, each)
        counted += _counted(where, each)
    for life in sorted({each.life for each in records}):
        ended += _explained(life, [each for each in records if each.life == life])
    kept += _kept(records, injected)
    return found


def _launched(each: Record) -> list[record.WorldLaunched]:
    return [noted.what for noted in each.own if isinstance(noted.what, record.WorldLaunched)]


def _generations(where: str, each: Record) -> list[str]:
    worlds = _launched(each)
    several = bool(worlds) and worlds[0].group_size > 1  # a node that is not in a world is not told of it
    wrong = []
    for before, after in itertools.pairwise(worlds):
        apart = after.generation - before.generation
        if apart < 1 or (apart > 1 and not several):
            wrong.append(f"{where}: generation {after.generation} follows {before.generation}")
    return wrong


def _in_order(where: str, each: Record) -> list[str]:
    stepped, wrong = -1, []
    for noted in each.own:
        match noted.what:
            case record.RankFirstStep(generation=generation) | record.Progress(generation=generation):
                if generation < stepped:
                    wrong.append(f"{where}: generation {generation} steps after {stepped} has, at {noted.at_s:.3f} s")
                stepped = max(stepped, generation)
    return wrong


def _counted(where: str, each: Record) -> list[str]:
    kinds = {noted.what.generation: noted.what.kind for noted in each.own if isinstance(noted.what, IncidentNoted)}
    wrong = []
    for before, after in itertools.pairwise(_launched(each)):
        apart = after.generation - before.generation
        more = after.restarts - before.restarts
        least = int(apart == 1 and before.generation in kinds and kinds[before.generation] not in FREE)
        if not least <= more <= max(1, apart):
            wrong.append(
                f"{where}: {more} restarts are counted from generation {before.generation} to {after.generation}"
            )
    return wrong


def _explained(life: int, records: Sequence[Record]) -> list[str]:
    """However many nodes tell of it, an incident is one by its number."""
    by_generation: dict[int, set[int]] = {}
    for (_, number), incident in incidents(records).items():
        by_generation.setdefault(incident.generation, set()).add(number)
    wrong = [
        f"life {life}: generation {generation} has incidents {', '.join(map(str, sorted(numbers)))}"
        for generation, numbers in by_generation.items()
        if len(numbers) > 1
    ]
    worlds = sorted({world.generation for each in records for world in _launched(each)})
    wrong += [
        f"life {life}: generation {generation} ended without an incident"
        for generation in worlds[:-1]
        if generation not in by_generation
    ]
    ended = next((each.ended for each in records if each.ended is not None), None)
    if worlds and ended is not None and (ended.outcome == "succeeded") == (worlds[-1] in by_generation):
        wrong.append(f"life {life}: the job ended with {ended.outcome!r} after generation {worlds[-1]}")
    return wrong


def _kept(records: Sequence[Record], injected: Sequence[Injected]) -> list[str]:
    """A world goes on from the newest checkpoint that was committed when it began to restore, or from something newer,
    unless a fault has damaged that one. A world that stepped and restored nothing has begun anew."""
    damaged = [(fault.file, fault.at_s) for fault in injected if fault.file]
    saved: list[tuple[float, int, str]] = []
    for each in records:
        for noted in each.own:
            match noted.what:
                case record.CheckpointSaved(step=step, checkpoint=name):
                    saved.append((each.clock_s + noted.at_s, step, name))
                case record.CheckpointPersisted(step=step, checkpoint=name, committed=True):
                    saved.append((each.clock_s + noted.at_s, step, name))
    wrong = []
    for each in records:
        for began_s, step, where in _begun(each):
            bad = {name for name, at_s in damaged if at_s < began_s}
            floor = max((of for at_s, of, name in saved if at_s < began_s and name not in bad), default=0)
            if step < floor:
                wrong.append(f"{where}: goes on from step {step}, though {floor} was committed")
    return wrong


def _begun(each: Record) -> list[tuple[float, int, str]]:
    """When each restore of a record's worlds began, and its step."""
    found: list[tuple[float, int, str]] = []
    launched: dict[int, float] = {}
    restored: set[int] = set()
    for noted in each.own:
        at_s = each.clock_s + noted.at_s
        match noted.what:
            case record.WorldLaunched(generation=generation):
                launched[generation] = at_s
            case record.CheckpointRestored(rank=rank, step=step, seconds=seconds, generation=generation):
                restored.add(generation)
                found.append((at_s - seconds, step, f"life {each.life}, generation {generation}, rank {rank}"))
            case record.RankFirstStep(generation=generation) if generation not in restored and generation in launched:
                restored.add(generation)
                found.append((launched[generation], 0, f"life {each.life}, generation {generation}"))
    return found
