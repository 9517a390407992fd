"""The goodput report in words: what a person reads in a terminal, and what a program gets as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from textwrap import wrap
from typing import Any

import msgspec

from holdfast.observe.explain import duration
from holdfast.observe.goodput import Cost, Goodput, Phase
from holdfast.observe.screen import clean, cut, many, table

VERSION = 1  # of what programs get
MOST = 40  # incidents in a terminal; more are for the page
BAR = 40
WIDE, LEAST = 100, 40  # columns for a sentence: where nobody says how many there are, and where there are few
WHAT = 46  # columns for the cause of an incident

# What an incident can cost, and the heads of its columns.
COLUMNS = {
    Phase.DETECTION: "detect",
    Phase.STOPPING: "stop",
    Phase.WAITING: "wait",
    Phase.FORMING: "form",
    Phase.STARTING: "start",
    Phase.RESTORING: "restore",
    Phase.REDONE: "redone",
}


class Peer(msgspec.Struct, frozen=True):
    """A launcher whose recoveries from a killed rank were measured."""

    name: str
    kills: int
    recovered: int
    median_s: float
    worst_s: float


class Peers(msgspec.Struct, frozen=True):
    """Them, with where the figures come from."""

    what: str
    document: str
    command: str
    date: str
    machine: str
    versions: str
    ours: Peer
    launchers: tuple[Peer, ...]


class Elsewhere(msgspec.Struct, frozen=True):
    """The same failures under another launcher."""

    name: str
    more_s: float  # than here, over all restarts
    ratio: float
    kills: int
    recovered: int  # of these; a job that does not come back needs a person


def peers() -> Peers:
    return msgspec.json.decode(Path(__file__).with_name("peers.json").read_bytes(), type=Peers)


def elsewhere(goodput: Goodput, peers: Peers) -> list[Elsewhere]:
    """Only what launchers differ in is counted: each restart is as much longer as theirs was than ours when both were
    measured. What the program needs for itself, to load its state or to do steps again, is taken to be the same."""
    training_s = goodput.phases_s[Phase.TRAINING]
    found = []
    for peer in peers.launchers:
        more_s = restarts(goodput) * max(0.0, peer.median_s - peers.ours.median_s)
        wall_s = goodput.wall_s + more_s
        ratio = training_s / wall_s if wall_s else 0.0
        found.append(Elsewhere(peer.name, more_s, ratio, peer.kills, peer.recovered))
    return found


def restarts(goodput: Goodput) -> int:
    return sum(cost.incident.restarted for cost in goodput.costs)


def shares(goodput: Goodput) -> dict[Phase, float]:
    """In percent, with two digits that add up to 100: what rounding takes away goes to where it took most."""
    if goodput.wall_s <= 0:
        return dict.fromkeys(Phase, 0.0)
    exact = {phase: 10_000 * goodput.phases_s[phase] / goodput.wall_s for phase in Phase}
    floors = {phase: int(value) for phase, value in exact.items()}
    left = 10_000 - sum(floors.values())
    for phase in sorted(Phase, key=lambda phase: floors[phase] - exact[phase])[:left]:
        floors[phase] += 1
    return {phase: floor / 100 for phase, floor in floors.items()}


def caveats(goodput: Goodput) -> list[str]:
    """What this report cannot know, and what it did instead."""
    found = []
    if goodput.ended is None:
        found.append("the record has no end: the job still runs, or was killed; this is up to its last line")
    if goodput.from_middle:
        found.append("the record's beginning is missing; this is what the rest of it says")
    if goodput.earlier_s:
        found.append(
            "the node that has this record came when the job had run for a while; what was before is as the other "
            "nodes have it, and what no node has is in the run directory of the coordinator that was lost"
        )
    if goodput.hidden:
        found.append("no steps can be seen in this program: it counts as training while its processes are there")
    if goodput.unknown:
        worlds = ", ".join(map(str, goodput.unknown[:8])) + (", .." if len(goodput.unknown) > 8 else "")
        found.append(
            f"from which step generation {worlds} went on is not known, so nothing of it is called redone: "
            "an optimizer that counts its steps (Adam) or a holdfast checkpoint would tell"
        )
    return found


def costliest(costs: Sequence[Cost], most: int) -> list[Cost]:
    """So many, in their order."""
    kept = sorted(costs, key=lambda cost: cost.lost_s, reverse=True)[:most]
    return sorted(kept, key=lambda cost: cost.incident.number)


def when(seconds: float) -> str:
    """Since the start, as a clock shows it."""
    minutes, rest = divmod(max(0, int(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"


def steps(goodput: Goodput) -> str:
    if goodput.hidden or not goodput.steps:
        return "no steps were seen"
    again = f"{goodput.redone:,} of them again ({100 * goodput.redone / goodput.steps:.2g} %)" if goodput.redone else ""
    known = again or ("how many of them again is not known" if goodput.unknown else "none of them twice")
    return f"{many(goodput.steps, 'step')} done, {known}"


def standing(goodput: Goodput) -> str:
    return goodput.ended.outcome if goodput.ended is not None else "no end yet"


# -- for a terminal ---------------------------------------------------------------------------------------------------


def text(goodput: Goodput, peers: Peers, room: int = 0) -> list[str]:
    """`room`: the columns of a line; 0 for any."""
    lines = [*_head(goodput), "", *_division(goodput), "", steps(goodput)]
    if goodput.costs:
        lines += ["", *_incidents(goodput, room)]
    if restarts(goodput):
        lines += ["", *_comparison(goodput, peers, room)]
    if found := caveats(goodput):
        lines += ["", *(row for line in found for row in wrap(f"note: {line}", max(LEAST, room or WIDE)))]
    return lines


def _head(goodput: Goodput) -> list[str]:
    state = goodput.state
    size = max((world.size for world in goodput.worlds), default=0)
    parts = [clean(state.run_id) or "a job", clean(state.program), many(size, "rank") if size else ""]
    told = f"{clean(standing(goodput))}, {duration(goodput.wall_s)}, {many(restarts(goodput), 'restart')}"
    return [
        f"{', '.join(part for part in parts if part)}: {told}",
        f"effective training time ratio {100 * goodput.ratio:.2f} %",
    ]


def _division(goodput: Goodput) -> list[str]:
    rows = []
    for phase, share in shares(goodput).items():
        spent_s = goodput.phases_s[phase]
        if spent_s or phase is Phase.TRAINING:
            rows.append([phase.value, duration(spent_s), f"{share:.2f} %", "#" * round(BAR * share / 100)])
    rows.append(["wall clock", duration(goodput.wall_s), "100.00 %" if goodput.wall_s else "", ""])
    return [f"  {line}" for line in table(rows, frozenset({1, 2}))]


def _incidents(goodput: Goodput, room: int) -> list[str]:
    costs = costliest(goodput.costs, MOST)
    used = [phase for phase in COLUMNS if any(phase in cost.phases_s for cost in costs)]
    rows = [["#", "at", "step", "cause", "lost", *(COLUMNS[phase] for phase in used)]]
    for cost in costs:
        incident = cost.incident
        step = "" if incident.steps is None else f"{incident.steps:,}"
        spent = [duration(cost.phases_s[phase]) if phase in cost.phases_s else "" for phase in used]
        what = cut(clean(incident.what), WHAT)
        rows.append([str(incident.number), when(cost.at_s), step, what, duration(cost.lost_s), *spent])
    lost_s = sum(cost.lost_s for cost in goodput.costs)
    lines = [f"{many(len(goodput.costs), 'incident')}, {duration(lost_s)} lost"]
    found = table(rows, frozenset({0, 2, *range(4, 5 + len(used))}))
    lines += [f"  {cut(line, room - 2) if room else line}" for line in found]
    if len(costs) < len(goodput.costs):
        lines.append(f"  ... the {MOST} that cost most; --json has all of them, --html most")
    return lines


def _comparison(goodput: Goodput, peers: Peers, room: int) -> list[str]:
    rows = []
    for other in elsewhere(goodput, peers):
        lost = f"it did not come back from {other.kills - other.recovered} of {other.kills} kills"
        note = lost if other.recovered < other.kills else ""
        rows.append([other.name, f"{duration(other.more_s)} more", f"{100 * other.ratio:.2f} %", note])
    rows.insert(0, ["here", "", f"{100 * goodput.ratio:.2f} %", ""])
    source = (
        f"Measured {peers.date} by {peers.command} on {peers.machine} ({peers.document}): {peers.versions}. "
        "What the program needs for itself is taken to be as long as here."
    )
    return [
        "the same failures under other launchers, by their measured recovery times",
        *(f"  {line}" for line in table(rows, frozenset({1, 2}))),
        *(f"  {line}" for line in wrap(source, max(LEAST, room or WIDE) - 2)),
    ]


# -- for programs -----------------------------------------------------------------------------------------------------


def as_json(goodput: Goodput, peers: Peers) -> bytes:
    state = goodput.state
    found: dict[str, Any] = {
        "v": VERSION,
        "run_id": state.run_id,
        "program": state.program,
        "started": state.started,
        "outcome": goodput.ended.outcome if goodput.ended is not None else None,
        "reason": goodput.ended.reason if goodput.ended is not None else None,
        "wall_s": goodput.wall_s,
        "ratio": goodput.ratio,
        "phases_s": goodput.phases_s,
        "steps": goodput.steps,
        "steps_redone": goodput.redone,
        "redone_unknown": goodput.unknown,
        "restarts": restarts(goodput),
        "lost_s": round(sum(cost.lost_s for cost in goodput.costs), 6),
        "incidents": [_incident(cost) for cost in goodput.costs],
        "worlds": goodput.worlds,
        "elsewhere": {"source": peers, "launchers": elsewhere(goodput, peers)},
        "caveats": caveats(goodput),
    }
    return msgspec.json.encode(found)


def _incident(cost: Cost) -> dict[str, Any]:
    incident = cost.incident
    return {
        "number": incident.number,
        "generation": incident.generation,
        "kind": incident.kind.value,
        "what": incident.what,
        "rank": incident.rank,
        "node": incident.node,
        "action": incident.action,
        "restarted": incident.restarted,
        "failed_at": incident.failed_at,
        "at_s": cost.at_s,
        "steps": incident.steps,
        "steps_redone": cost.redone,
        "lost_s": cost.lost_s,
        "phases_s": cost.phases_s,
    }
