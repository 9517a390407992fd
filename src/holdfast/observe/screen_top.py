"""What `holdfast top` shows: a job on a screen of any size. What matters most comes first, and what does not fit is
counted."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from holdfast.observe.explain import duration
from holdfast.observe.screen import age, ago, clean, cut, left, many, right, step_time, table
from holdfast.observe.screen_job import FAILED, LOST, RECOVERING, STARTING, STOPPED, Watched
from holdfast.observe.screen_status import (
    checkpoint,
    incident,
    lost,
    restarts,
    standby,
    standing,
    step,
    stragglers,
    world,
)
from holdfast.observe.state import Rank

BAD, WARN, TITLE, DIM = "31", "33", "7", "2"  # as a terminal is told
WORST = ("failed", "hung")
WIDE = 100  # columns; with less, pids are left out, and names of nodes cut
MARKS = {"starting": "s", "training": ".", "evaluating": "e", "saving": "w", "ending": "z", "exited": "x"}
QUIT = "  q quits "
LEGEND = ". training  s starting  e evaluating  w saving  z ending  x exited  ! straggler  H hung  F failed"


class Row(NamedTuple):
    text: str
    style: str = ""


def frame(job: Watched, columns: int, lines: int) -> list[Row]:
    """As many rows as there are lines, at most, none of them wider than the screen."""
    head = _head(job)
    nodes = _nodes(job, most=max(2, lines // 8))
    happened = _incidents(job, most=max(1, lines // 14))
    room = lines - len(head) - len(nodes) - len(happened)
    rows = [*head, *nodes, *_ranks(job, columns, room), *happened]
    fitted = [Row(cut(row.text, columns), row.style) for row in rows[: max(0, lines)]]
    if fitted and columns > 2 * len(QUIT):
        fitted[0] = Row(left(rows[0].text, columns - len(QUIT)) + QUIT, TITLE)
    return fitted


def line(job: Watched) -> str:
    """All of it in one, for who has no screen."""
    words = [standing(job), step(job), world(job), stragglers(job) and f"stragglers: {stragglers(job)}"]
    return clean("; ".join(filter(None, words)))


def _head(job: Watched) -> list[Row]:
    title = f"holdfast top   {job.state.program or 'a program'}   job {job.run_id}   {job.word}   {age(job.now_s)}"
    style = WARN if job.word in (STARTING, RECOVERING) else BAD if job.word in (FAILED, STOPPED, LOST) else ""
    often, cost, saved, far, waiting = restarts(job), lost(job), checkpoint(job), step(job), standby(job)
    spent = "   ".join(filter(None, [often and f"restarts {often}", cost and f"lost {cost}"]))
    rows = [Row(clean(title), TITLE), Row(clean(standing(job)), style)]
    texts = [
        far and f"step {far}",
        world(job),
        waiting and f"standby {waiting}",
        spent,
        saved and f"checkpoint {saved}",
    ]
    rows += [Row(clean(text)) for text in texts if text]
    if slow := stragglers(job):
        rows.append(Row(clean(f"stragglers {slow}"), WARN))
    if job.is_silent:
        rows.append(Row("its agent does not answer; this is what its record says", WARN))
    return rows


# -- nodes ------------------------------------------------------------------------------------------------------------


def _nodes(job: Watched, most: int) -> list[Row]:
    """Where there are several. Those that are not in the world come first."""
    found = job.nodes()
    if len(found) < 2:
        return []
    slow = Counter(rank.node for rank in job.state.ranks.values() if rank.straggles)
    found.sort(key=lambda each: (each[1] == "in the world", -slow[each[0]]))
    rows = [Row(""), Row(f"{left('NODE', 24)}  {right('RANKS', 5)}  {left('STATE', 12)}  HEARD", DIM)]
    for name, place in found[:most]:
        node = job.state.nodes[name]
        note = f"  {many(slow[name], 'straggler')}" if slow[name] else ""
        heard = ago(job.now_s - node.heard_s)
        text = f"{left(clean(job.short(name)), 24)}  {node.nproc:5}  {left(place, 12)}  {heard}{note}"
        rows.append(Row(text, WARN if place == "gone" or note else ""))
    if len(found) > most:
        counts = Counter(place for _, place in found[most:])
        rest = ", ".join(f"{count} {place}" for place, count in counts.items())
        rows.append(Row(f"and {many(len(found) - most, 'more node')}: {rest}", DIM))
    return rows


# -- ranks ------------------------------------------------------------------------------------------------------------


def _ranks(job: Watched, columns: int, room: int) -> list[Row]:
    ranks = sorted(job.state.ranks.values(), key=lambda rank: rank.rank)
    if not ranks or room < 4:
        return []
    grid = _grid(ranks, columns)
    if len(ranks) <= room - 2 or len(grid) > room // 2:
        grid = []
    return [*grid, *_table(job, ranks, columns, room - len(grid))]


def _table(job: Watched, ranks: list[Rank], columns: int, room: int) -> list[Row]:
    """All of them in order; of too many those that are in trouble, then the slowest."""
    most = room - 2  # without the blank and the columns' names
    left_out: list[Rank] = []
    if len(ranks) > most:
        usual = Counter(rank.state for rank in ranks).most_common(1)[0][0]
        front = max(job.step_of(rank) for rank in ranks)
        worst = sorted(ranks, key=lambda rank: _trouble(job, rank, usual, front))
        ranks, left_out = worst[: most - 1], worst[most - 1 :]
    several, wide = len(job.state.nodes) > 1, columns >= WIDE
    sections = any(rank.section_s for rank in ranks)
    cells = [_cells(job, rank, several, sections, wide) for rank in ranks]
    lines = table([_names(several, sections, wide), *cells], frozenset((0, *range(2 + several, len(cells[0]) - 1))))
    rows = [Row(""), Row(lines[0], DIM), *map(Row, lines[1:], map(_style, ranks))]
    if left_out:
        counts = Counter(rank.state for rank in left_out)
        rest = ", ".join(f"{count:,} {state}" for state, count in counts.most_common())
        rows.append(Row(f"and {many(len(left_out), 'more rank')}: {rest}", DIM))
    return rows


def _names(several: bool, sections: bool, wide: bool) -> list[str]:
    node, times, pid = ["NODE"] * several, ["SECTIONS"] * sections, ["PID"] * wide
    return ["RANK", *node, "STATE", "STEP", "STEP TIME", "OWN TIME", *times, "LAST SIGN", *pid, ""]


def _cells(job: Watched, rank: Rank, several: bool, sections: bool, wide: bool) -> list[str]:
    node = [cut(clean(job.short(rank.node)), 24 if wide else 10)] if several else []
    sign = job.signs.get(rank.rank)
    section = f"in {sign.section} for {duration(sign.section_s)}" if sign is not None and sign.section else ""
    note = clean(" ".join(filter(None, ["straggler" if rank.straggles else "", section, rank.text])))
    times = [step_time(rank.step_s), step_time(rank.own_s), *([step_time(rank.section_s)] if sections else [])]
    silent = duration(sign.silent_s) if sign is not None else "-"
    pid = [str(rank.pid or "-")] if wide else []
    return [str(rank.rank), *node, rank.state, f"{job.step_of(rank):,}", *times, silent, *pid, note]


def _style(rank: Rank) -> str:
    return BAD if rank.state in WORST else WARN if rank.straggles else ""


def _trouble(job: Watched, rank: Rank, usual: str, front: int) -> tuple[bool, bool, bool, int, float, int]:
    """The smaller, the more somebody wants to see it."""
    behind = front - job.step_of(rank)
    apart = rank.state != usual
    return rank.state not in WORST, not rank.straggles, not apart, -behind, -(rank.own_s or rank.step_s), rank.rank


def _grid(ranks: list[Rank], columns: int) -> list[Row]:
    """A character a rank, in order: of a thousand, a person sees at once which one differs."""
    per_row = max(10, (columns - 8) // 10 * 10)
    rows = [Row(""), Row(f"ranks: {LEGEND}", DIM)]
    for at in range(0, len(ranks), per_row):
        some = ranks[at : at + per_row]
        rows.append(Row(f"{some[0].rank:6}  " + "".join(map(_mark, some))))
    return rows


def _mark(rank: Rank) -> str:
    if rank.state in WORST:
        return rank.state[0].upper()
    return "!" if rank.straggles else MARKS.get(rank.state, "?")


# -- incidents --------------------------------------------------------------------------------------------------------


def _incidents(job: Watched, most: int) -> list[Row]:
    all_ = job.state.incidents
    if not all_:
        return []
    rows = [Row(""), Row(f"{many(len(all_), 'incident')}, the last ones first", DIM)]
    for number in sorted(all_, reverse=True)[:most]:
        what, answer = incident(job, all_[number])
        rows += [Row(what), Row(f"    {answer}", DIM)]
    return rows
