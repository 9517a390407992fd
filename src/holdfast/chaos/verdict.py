"""The verdict on a campaign: each fault against its incident, what recoveries took, what must hold, and the weights.

Pure, but for `load`, which reads what a campaign has left in its folder.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import msgspec

from holdfast.chaos import faults, invariants, job, telling
from holdfast.chaos.conductor import ENDED, Ended
from holdfast.chaos.faults import Injected
from holdfast.chaos.invariants import Record
from holdfast.chaos.kinds import KINDS, Answer
from holdfast.observe import goodput, record
from holdfast.observe.record import IncidentNoted

WEIGHTS = "weights.json"


class Weights(msgspec.Struct, frozen=True):
    """Digests of the final weights; '' where there are none."""

    job: str = ""
    twin: str = ""
    why_not: str = ""


class Campaign(msgspec.Struct, frozen=True):
    """All that a verdict is made of."""

    records: tuple[Record, ...]
    injected: tuple[Injected, ...]
    ended: Ended
    weights: Weights | None = None  # None: there was no twin


class Matched(msgspec.Struct, frozen=True):
    """One fault, and what became of it. `wrong` is '' where it is as it should be."""

    injected: Injected
    recovery_s: float | None = None
    incident: int | None = None
    wrong: str = ""


class Check(msgspec.Struct, frozen=True):
    name: str
    wrong: tuple[str, ...] = ()
    note: str = ""

    @property
    def held(self) -> bool:
        return not self.wrong


class Row(msgspec.Struct, frozen=True):
    """The faults of one kind; times in seconds."""

    kind: str
    faults: int
    right: int
    p50_s: float | None = None
    p90_s: float | None = None
    p99_s: float | None = None
    max_s: float | None = None


class Verdict(msgspec.Struct, frozen=True):
    held: bool
    rows: tuple[Row, ...]
    checks: tuple[Check, ...]
    goodput: float | None = None  # the part of the wall clock in which the job trained
    steps: int = 0  # how far it came, by its optimizer's count
    wall_s: float = 0.0


def load(folder: Path) -> Campaign:
    """Raises OSError where the folder is not a campaign's, and msgspec.MsgspecError where it is damaged."""
    records = []
    for lived in job.lives(folder / "job"):
        records.append(Record(lived.life, lived.node, record.read(folder / "job" / lived.run_dir / record.NAME)))
    ended = msgspec.json.decode((folder / ENDED).read_bytes(), type=Ended)
    try:
        weights = msgspec.json.decode((folder / WEIGHTS).read_bytes(), type=Weights)
    except FileNotFoundError:
        weights = None
    try:
        injected = faults.read(str(folder))
    except FileNotFoundError:
        injected = []
    return Campaign(tuple(records), tuple(injected), ended, weights)


def judge(campaign: Campaign) -> Verdict:
    matched = match(campaign.records, campaign.injected)
    checks = [
        Check("every fault of the plan was done", campaign.ended.passed_over),
        _answers(campaign, matched),
        _no_others(campaign, matched),
        *(Check(name, tuple(wrong)) for name, wrong in invariants.broken(campaign.records, campaign.injected).items()),
        Check("no process is left", campaign.ended.leftovers),
        _end(campaign),
        _same_weights(campaign.weights),
    ]
    notes = [noted for each in campaign.records for noted in each.own]
    rows = [_row(kind, [each for each in matched if each.injected.kind == kind]) for kind in _kinds(matched)]
    return Verdict(
        held=all(check.held for check in checks),
        rows=tuple(rows),
        checks=tuple(checks),
        goodput=_goodput(campaign),
        steps=max((each.what.step for each in notes if isinstance(each.what, record.Progress)), default=0),
        wall_s=campaign.ended.wall_s,
    )


# -- faults and incidents ---------------------------------------------------------------------------------------------


def match(records: Sequence[Record], injected: Sequence[Injected]) -> list[Matched]:
    """A world ends once, so life and generation say which incident is whose; no guess by time is needed."""
    by_world: dict[tuple[int, int], IncidentNoted] = {}
    for (life, _), incident in invariants.incidents(records).items():
        by_world.setdefault((life, incident.generation), incident)
    taken: dict[tuple[int, int], int] = {}
    matched = []
    for fault in injected:
        kind = KINDS.get(fault.kind)
        if kind is None:
            matched.append(Matched(fault, wrong=f"there is no kind {fault.kind!r} in this version"))
            continue
        match kind.answer:
            case Answer.INCIDENT:
                matched.append(_match_incident(fault, by_world, taken))
            case Answer.LIFE:
                matched.append(_match_life(fault, records))
            case Answer.NOTHING:
                matched.append(Matched(fault, wrong=telling.untold(fault, records)))
    # What should have done nothing is at fault where its world ended, and nobody else has ended it.
    for at, each in enumerate(matched):
        world = (each.injected.life, each.injected.generation)
        kind = KINDS.get(each.injected.kind)
        if kind is not None and kind.answer is Answer.NOTHING and world in by_world and world not in taken:
            incident = by_world[world]
            taken[world] = each.injected.number
            wrong = f"ended its world, incident {incident.number}: {incident.kind}: {incident.headline}"
            matched[at] = Matched(each.injected, incident=incident.number, wrong=wrong)
    return matched


def _match_incident(
    fault: Injected, by_world: dict[tuple[int, int], IncidentNoted], taken: dict[tuple[int, int], int]
) -> Matched:
    kind, world = KINDS[fault.kind], (fault.life, fault.generation)
    incident = by_world.get(world)
    if incident is None:
        return Matched(fault, wrong=f"has no incident in generation {fault.generation} of life {fault.life}")
    if world in taken:
        return Matched(fault, wrong=f"came when fault {taken[world]} had ended generation {fault.generation} already")
    taken[world] = fault.number
    wrong = ""
    if incident.kind not in kind.causes:
        wanted = " or ".join(sorted(kind.causes))
        wrong = f"is told as {incident.kind} ({incident.what}), and {wanted} is right"
    elif kind.names_rank and incident.rank != fault.rank:
        wrong = f"is blamed on rank {incident.rank}, and rank {fault.rank} was struck"
    recovered_s = incident.recovered_at_s or incident.failed_again_at_s
    if not wrong and recovered_s is None:
        wrong = f"was not recovered from: {incident.action}"
    took_s = incident.recovered_at_s - fault.at_s if incident.recovered_at_s is not None else None
    return Matched(fault, took_s, incident.number, wrong)


def _match_life(fault: Injected, records: Sequence[Record]) -> Matched:
    following = [each for each in records if each.life == fault.life + 1]
    stepped = [
        each.clock_s + noted.at_s
        for each in following
        for noted in each.own
        if isinstance(noted.what, record.RankFirstStep)
    ]
    if not stepped:
        return Matched(fault, wrong="was followed by no life in which a rank stepped")
    took_s = min(stepped) - fault.at_s
    if not fault.file:
        return Matched(fault, took_s)
    restored = [
        noted.what for each in following for noted in each.own if isinstance(noted.what, record.CheckpointRestored)
    ]
    first = [each for each in restored if each.generation == restored[0].generation]
    if not first:
        return Matched(fault, took_s, wrong=f"{fault.file} was damaged, and the next life restored nothing")
    if any(each.source == fault.file or each.step >= (fault.committed or 0) for each in first):
        return Matched(
            fault, took_s, wrong=f"{fault.file} was damaged, and the next life went on from {first[0].source}"
        )
    return Matched(fault, took_s)


def _answers(campaign: Campaign, matched: Sequence[Matched]) -> Check:
    wrong = [f"fault {each.injected.number} ({each.injected.kind}) {each.wrong}" for each in matched if each.wrong]
    silent = set(campaign.ended.unanswered)
    wrong += [f"fault {number} was not come through in time" for number in sorted(silent)]
    return Check("every fault has its one incident, with the right cause", tuple(wrong), f"{len(matched)} faults")


def _no_others(campaign: Campaign, matched: Sequence[Matched]) -> Check:
    explained = {(each.injected.life, each.incident) for each in matched if each.incident is not None}
    others = [
        f"life {life}, incident {number}: {incident.what}"
        for (life, number), incident in invariants.incidents(campaign.records).items()
        if (life, number) not in explained
    ]
    return Check("no incident but those of the faults", tuple(others))


# -- the rest ---------------------------------------------------------------------------------------------------------


def _end(campaign: Campaign) -> Check:
    name = "the job has succeeded"
    if campaign.ended.code is None:
        return Check(name, ("it did not end by itself and was killed",))
    last = max((each.life for each in campaign.records), default=0)
    outcomes = {each.ended.outcome for each in campaign.records if each.life == last and each.ended is not None}
    if campaign.ended.code != 0 or outcomes != {"succeeded"}:
        said = ", ".join(sorted(outcomes)) or "no word of an end in its record"
        return Check(name, (f"exit code {campaign.ended.code}; {said}",))
    return Check(name)


def _same_weights(weights: Weights | None) -> Check:
    name = "final weights are those of the undisturbed twin"
    if weights is None:
        return Check(name, note="no twin was run")
    if weights.why_not:
        return Check(name, (weights.why_not,))
    if not weights.job and not weights.twin:
        return Check(name, ("neither run left a checkpoint in $CHECKPOINT_DIR or printed 'final weights: ...'",))
    if weights.job != weights.twin:
        return Check(name, (f"{weights.job or 'none'} here, {weights.twin or 'none'} there",))
    return Check(name, note=weights.job)


def _goodput(campaign: Campaign) -> float | None:
    """By the report's own division of the wall clock. Over several lives, the time between them counts as lost."""
    trained_us = 0
    for each in campaign.records:
        if each.node == 0:
            divided = goodput.divide(each.notes)
            zero_us = round(divided.earlier_s * 1e6)  # what was before is in the record before, too
            trained = [span for span in divided.spans if span.phase is goodput.Phase.TRAINING]
            trained_us += sum(max(0, span.until_us - max(zero_us, span.since_us)) for span in trained)
    return trained_us / 1e6 / campaign.ended.wall_s if campaign.ended.wall_s else None


def _kinds(matched: Sequence[Matched]) -> list[str]:
    seen = {each.injected.kind for each in matched}
    return [name for name in KINDS if name in seen] + sorted(seen - KINDS.keys())


def _row(kind: str, matched: Sequence[Matched]) -> Row:
    times = sorted(each.recovery_s for each in matched if each.recovery_s is not None)
    right = sum(not each.wrong for each in matched)
    if not times:
        return Row(kind, len(matched), right)
    p50_s, p90_s, p99_s = (percentile(times, part) for part in (0.5, 0.9, 0.99))
    return Row(kind, len(matched), right, p50_s, p90_s, p99_s, times[-1])


def percentile(ordered: Sequence[float], part: float) -> float:
    """The least value that so large a part does not pass."""
    return ordered[max(0, math.ceil(part * len(ordered)) - 1)]


# -- for people -------------------------------------------------------------------------------------------------------

MAX_SHOWN = 20


def text(verdict: Verdict) -> str:
    lines = ["kind               faults  right     p50     p90     p99     max"]
    for row in verdict.rows:
        times = (row.p50_s, row.p90_s, row.p99_s, row.max_s)
        cells = "".join(f"{f'{each:.2f} s' if each is not None else '-':>8}" for each in times)
        lines.append(f"{row.kind:17} {row.faults:7} {row.right:6}{cells}")
    lines.append("")
    for check in verdict.checks:
        note = f" ({check.note})" if check.note else ""
        lines.append(f"{'holds' if check.held else 'BROKEN':7} {check.name}{note}")
        lines += [f"          {wrong}" for wrong in check.wrong[:MAX_SHOWN]]
        if len(check.wrong) > MAX_SHOWN:
            lines.append(f"          and {len(check.wrong) - MAX_SHOWN} more")
    total = sum(row.faults for row in verdict.rows)
    part = f", goodput {100 * verdict.goodput:.1f} %" if verdict.goodput is not None else ""
    word = "everything held" if verdict.held else "not everything held"
    lines.append(f"\n{word}: {total} faults in {verdict.wall_s:.0f} s, up to step {verdict.steps}{part}")
    return "\n".join(lines)
