"""The goodput report as one HTML file that needs nothing else: no script, no network. Whatever a job has said is
escaped. Bars are boxes whose widths are shares of a line; the timeline is rectangles."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from html import escape

from holdfast.observe import report
from holdfast.observe.explain import duration
from holdfast.observe.goodput import Cost, Goodput, Phase, Span
from holdfast.observe.report import Peers
from holdfast.observe.screen import clean, many

MOST = 1000  # incidents in the table
WIDE = 1000.0  # the timeline, in units of its own
NARROW = 0.5  # of these; what is narrower is drawn once for all of its kind that are there
TICKS_S = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400)
TICKS = 5

# Of each phase in light and in dark: cold for what is worth it, warm for what a failure costs.
COLOURS = {
    Phase.TRAINING: ("#2f9e77", "#3fb58b"),
    Phase.FIRST_START: ("#8fb8de", "#5f8fbf"),
    Phase.DETECTION: ("#8c2d19", "#b5482f"),
    Phase.STOPPING: ("#c8452b", "#de6245"),
    Phase.FORMING: ("#e07b39", "#e88f52"),
    Phase.STARTING: ("#f0a93b", "#f0b455"),
    Phase.RESTORING: ("#e6cf4f", "#dcc85c"),
    Phase.REDONE: ("#9a4f9e", "#b771bb"),
    Phase.SAVING: ("#3f6fb5", "#6b95d8"),
    Phase.WAITING: ("#7b7f8a", "#8f94a1"),
    Phase.IDLE: ("#cfd3da", "#4a4f5a"),
}

STYLE = """
:root { color-scheme: light dark; --ink: #1c2128; --dim: #5c6470; --paper: #fff; --card: #f5f6f8; --line: #dde1e7;
  --even: #b9c4d3; --odd: #8d9cb1; --alarm: #b3261e; }
@media (prefers-color-scheme: dark) { :root { --ink: #e7eaee; --dim: #9aa3af; --paper: #14171b; --card: #1d2126;
  --line: #323841; --even: #55627a; --odd: #3b4558; --alarm: #ff8a7a; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
main { max-width: 68rem; margin: 0 auto; padding: 2rem 1.25rem 3rem; }
h1 { font-size: 1.35rem; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 1.05rem; margin: 2.25rem 0 .75rem; }
p { margin: .35rem 0; }
.dim, small { color: var(--dim); }
small { font-size: .82rem; overflow-wrap: anywhere; }
.facts { display: flex; flex-wrap: wrap; gap: .6rem; margin: 1.4rem 0 0; padding: 0; list-style: none; }
.facts li { flex: 1 1 8.5rem; background: var(--card); border-radius: .6rem; padding: .7rem .9rem; }
.facts b { display: block; font-size: 1.3rem; line-height: 1.25; white-space: nowrap; }
.facts li:first-child { flex: 2 1 13rem; }
.facts li:first-child b { font-size: 2.2rem; }
.bar { display: flex; height: 2.4rem; border-radius: .4rem; overflow: hidden; background: var(--line); }
.bar i { min-width: 2px; }
.bar.small { height: .55rem; width: 100%; min-width: 6rem; border-radius: .2rem; }
.key { display: grid; grid-template-columns: repeat(auto-fill, minmax(17rem, 1fr)); gap: .1rem 2rem; margin: 1rem 0 0;
  padding: 0; list-style: none; font-variant-numeric: tabular-nums; }
.key li { display: grid; grid-template-columns: 1.4rem 1fr auto 5rem; align-items: center; padding: .2rem 0;
  border-bottom: 1px solid var(--line); }
.key span:nth-child(n+3) { text-align: right; }
.dot { width: .8rem; height: .8rem; border-radius: .2rem; }
svg { display: block; width: 100%; height: 7.6rem; background: var(--card); border-radius: .4rem; }
.even { fill: var(--even); } .odd { fill: var(--odd); } .tick { fill: var(--alarm); }
.axis { position: relative; height: 1.6rem; font-size: .8rem; color: var(--dim); font-variant-numeric: tabular-nums; }
.axis span { position: absolute; transform: translateX(-50%); }
.axis span:first-child { transform: none; }
.axis span.last { transform: translateX(-100%); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .92rem; font-variant-numeric: tabular-nums; }
th { text-align: left; font-weight: 600; color: var(--dim); }
th, td { padding: .45rem .7rem .45rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
td.n, th.n { text-align: right; white-space: nowrap; }
td.cause { min-width: 14rem; overflow-wrap: anywhere; }
td.node { min-width: 6.5rem; overflow-wrap: anywhere; }
td.parts { min-width: 15rem; } .parts span { white-space: nowrap; }
tr:target td { background: var(--card); }
.kind { display: inline-block; border: 1px solid currentColor; border-radius: 1rem; padding: 0 .5rem; font-size: .75rem;
  color: var(--dim); margin-right: .4rem; }
@media (max-width: 44rem) {
  main { padding: 1.25rem .9rem 2rem; }
  .cards thead { position: absolute; clip-path: inset(50%); }
  .cards, .cards tbody, .cards tr, .cards td { display: block; width: 100%; }
  .cards tr { background: var(--card); border-radius: .6rem; padding: .5rem .8rem; margin-bottom: .6rem; }
  .cards td, .cards td.n { border: 0; padding: .15rem 0; text-align: left; }
  .cards td[data-of] { display: inline-block; width: auto; min-width: 0; margin-right: .9rem; }
  .cards td:empty { display: none; }
  .cards td[data-of]::before { content: attr(data-of) ": "; color: var(--dim); }
}
"""


def page(goodput: Goodput, peers: Peers) -> str:
    state = goodput.state
    name = _text(state.program or state.run_id or "a job")
    parts = [
        f"<title>{name}: {100 * goodput.ratio:.1f} % training</title>\n<style>{STYLE}{''.join(_colours())}</style>",
        f"</head>\n<body>\n<main>\n<header>\n<h1>{name}</h1>\n{_subtitle(goodput)}\n</header>",
        _facts(goodput),
        _division(goodput),
        _timeline(goodput),
        _incidents(goodput) if goodput.costs else "<h2>Incidents</h2>\n<p>None.</p>",
        _comparison(goodput, peers) if report.restarts(goodput) else "",
        _caveats(goodput),
    ]
    return f"{_HEAD}{chr(10).join(filter(None, parts))}\n</main>\n</body>\n</html>\n"


_HEAD = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
"""


def _text(said: str) -> str:
    return escape(clean(said))


def _colours() -> Iterator[str]:
    for phase, (light, _) in COLOURS.items():
        yield f".{_class(phase)} {{ background: {light}; fill: {light}; }}\n"
    dark = "".join(
        f".{_class(phase)} {{ background: {dark}; fill: {dark}; }}\n" for phase, (_, dark) in COLOURS.items()
    )
    yield f"@media (prefers-color-scheme: dark) {{\n{dark}}}\n"


def _class(phase: Phase) -> str:
    return phase.name.lower().replace("_", "-")


def _subtitle(goodput: Goodput) -> str:
    state = goodput.state
    size = max((world.size for world in goodput.worlds), default=0)
    nodes = len({node for world in goodput.worlds for node in world.nodes})
    parts = [
        f"job {_text(state.run_id)}" if state.run_id else "",
        many(size, "rank") + (f" on {nodes} nodes" if nodes > 1 else "") if size else "",
        f"started {_text(state.started[:19].replace('T', ' '))} UTC" if state.started else "",
        _text(report.standing(goodput)),
        f"holdfast {_text(state.version)}" if state.version else "",
    ]
    return f'<p class="dim">{" · ".join(part for part in parts if part)}</p>'


def _facts(goodput: Goodput) -> str:
    lost_s = sum(cost.lost_s for cost in goodput.costs)
    again = "?" if goodput.unknown and not goodput.redone else f"{goodput.redone:,}"
    facts = [
        (f"{100 * goodput.ratio:.2f} %", "effective training time ratio"),
        (duration(goodput.wall_s), "wall clock"),
        (f"{len(goodput.costs):,}", f"incidents, {report.restarts(goodput):,} restarts"),
        (duration(lost_s), "lost to incidents"),
        (f"{goodput.steps:,}", f"steps, {again} of them again"),
    ]
    return f'<ul class="facts">{"".join(f"<li><b>{value}</b> {name}</li>" for value, name in facts)}</ul>'


def _division(goodput: Goodput) -> str:
    shares = report.shares(goodput)
    spent = [phase for phase in Phase if goodput.phases_s[phase]]
    label = ", ".join(f"{phase.value} {shares[phase]:.2f} %" for phase in spent)
    rows = "".join(
        f'<li><span class="dot {_class(phase)}"></span><span>{phase.value}</span>'
        f"<span>{duration(goodput.phases_s[phase])}</span><span>{shares[phase]:.2f} %</span></li>\n"
        for phase in Phase
    )
    return (
        f'<section>\n<h2>The wall clock, divided</h2>\n<div class="bar" role="img" aria-label="{label}">'
        f"{_boxes((phase, goodput.phases_s[phase]) for phase in spent)}</div>\n"
        f'<ul class="key">\n{rows}</ul>\n</section>'
    )


def _boxes(spent: Iterable[tuple[Phase, float]]) -> str:
    return "".join(
        f'<i class="{_class(phase)}" style="flex:{spent_s:.6f}" title="{phase.value} {duration(spent_s)}"></i>'
        for phase, spent_s in spent
    )


# -- the timeline -----------------------------------------------------------------------------------------------------


def _timeline(goodput: Goodput) -> str:
    if goodput.wall_s <= 0:
        return ""
    start_s = goodput.spans[0].since_us / 1e6
    drawing = [
        *_phases(goodput.spans, goodput.wall_s),
        *_worlds(goodput, start_s),
        *_ticks(goodput, start_s),
    ]
    return (
        "<section>\n<h2>In the order of time</h2>\n"
        f'<svg viewBox="0 0 {WIDE:g} 100" preserveAspectRatio="none" shape-rendering="crispEdges" role="img" '
        'aria-label="phases, generations and incidents over time; the tables on this page have the same in words">\n'
        f"{chr(10).join(drawing)}\n</svg>\n"
        f'<div class="axis" aria-hidden="true">{"".join(_axis(start_s, goodput.wall_s))}</div>\n'
        '<p class="dim"><small>From top to bottom: phases; generations, one shade after the other; incidents. Each has '
        "a title under the mouse; an incident leads to its row.</small></p>\n</section>"
    )


def _rect(x: float, width: float, y: int, height: int, name: str, title: str) -> str:
    size = f'x="{x:.2f}" y="{y}" width="{width:.2f}" height="{height}"'
    return f'<rect {size} class="{name}"><title>{title}</title></rect>'


def _phases(spans: tuple[Span, ...], wall_s: float) -> Iterator[str]:
    """What failures cost is drawn last, and wide enough to be seen."""
    drawn: set[tuple[Phase, int]] = set()
    per_us = WIDE / (wall_s * 1e6)
    for span in sorted(spans, key=lambda span: span.incident > 0):
        x, width = (span.since_us - spans[0].since_us) * per_us, span.us * per_us
        if width < NARROW:
            width = NARROW if span.incident else width
            if (span.phase, int(x / NARROW)) in drawn:
                continue
            drawn.add((span.phase, int(x / NARROW)))
        of = f", incident {span.incident}" if span.incident else ""
        yield _rect(x, width, 4, 44, _class(span.phase), f"{span.phase.value} {duration(span.us / 1e6)}{of}")


def _worlds(goodput: Goodput, start_s: float) -> Iterator[str]:
    per_s, until = WIDE / goodput.wall_s, -NARROW
    for number, world in enumerate(goodput.worlds):
        x = (world.launched_s - start_s) * per_s
        if x < until + NARROW and (world.ended_s - start_s) * per_s < until + NARROW:
            continue  # beside another of the same place
        until = (world.ended_s - start_s) * per_s
        lived = duration(max(0.0, world.ended_s - world.launched_s))
        title = f"generation {world.generation}: {many(world.size, 'rank')}, {lived}, {many(world.steps, 'step')}"
        yield _rect(x, max(NARROW, until - x), 56, 16, "odd" if number % 2 else "even", title)


def _ticks(goodput: Goodput, start_s: float) -> Iterator[str]:
    drawn: set[int] = set()
    shown = {cost.incident.number for cost in report.costliest(goodput.costs, MOST)}
    for cost in goodput.costs:
        x = (cost.at_s - start_s) * WIDE / goodput.wall_s
        if int(x / NARROW) in drawn or cost.incident.number not in shown:
            continue
        drawn.add(int(x / NARROW))
        title = f"{cost.incident.number}: {_text(cost.incident.what)}, {duration(cost.lost_s)} lost"
        yield f'<a href="#incident-{cost.incident.number}">{_rect(x - 1, 3.0, 80, 16, "tick", title)}</a>'


def _axis(start_s: float, wall_s: float) -> Iterator[str]:
    each_s = next((tick for tick in TICKS_S if wall_s / tick <= TICKS), max(1, round(wall_s / TICKS / 86400)) * 86400)
    for number in range(int(wall_s / each_s) + 1):
        at = 100 * number * each_s / wall_s
        last = ' class="last"' if number and at > 94 else ""
        yield f'<span{last} style="left:{at:.2f}%">{report.when(start_s + number * each_s)}</span>'


# -- the tables -------------------------------------------------------------------------------------------------------


def _incidents(goodput: Goodput) -> str:
    costs = report.costliest(goodput.costs, MOST)
    nodes = any(cost.incident.node for cost in costs)
    heads = ["#", "at", "cause", "rank", *(["node"] if nodes else []), "step", "again", "lost", "where it went"]
    numbers = {"#", "at", "rank", "step", "again", "lost"}
    head = "".join(f'<th scope="col"{" class=n" if name in numbers else ""}>{name}</th>' for name in heads)
    more = (
        f"<p>The {MOST:,} that cost most, of {len(goodput.costs):,}.</p>\n" if len(costs) < len(goodput.costs) else ""
    )
    rows = "".join(_row(cost, nodes) for cost in costs)
    return (
        f'<section>\n<h2>Incidents</h2>\n{more}<div class="scroll"><table class="cards">\n'
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}</tbody>\n</table></div>\n</section>"
    )


def _row(cost: Cost, nodes: bool) -> str:
    incident = cost.incident
    spent = [(phase, cost.phases_s[phase]) for phase in report.COLUMNS if phase in cost.phases_s]
    words = " · ".join(f"<span>{report.COLUMNS[phase]} {duration(spent_s)}</span>" for phase, spent_s in spent)
    bar = f'<div class="bar small" aria-hidden="true">{_boxes(spent)}</div>' if spent else ""
    step = "" if incident.steps is None else f"{incident.steps:,}"
    again = "?" if cost.redone is None else f"{cost.redone:,}"
    cells = [
        f'<td class="n" data-of="incident">{incident.number}</td>',
        f'<td class="n" data-of="at" title="{_text(incident.failed_at)}">{report.when(cost.at_s)}</td>',
        f'<td class="cause"><span class="kind">{_text(incident.kind.value)}</span>{_text(incident.what)}<br>'
        f"<small>{_text(incident.action)}</small></td>",
        f'<td class="n" data-of="rank">{"" if incident.rank is None else incident.rank}</td>',
        *([f'<td class="node" data-of="node">{_text(incident.node)}</td>'] if nodes else []),
        f'<td class="n" data-of="step">{step}</td>',
        f'<td class="n" data-of="steps again">{again}</td>',
        f'<td class="n" data-of="lost"><b>{duration(cost.lost_s)}</b></td>',
        f'<td class="parts">{bar}<small>{words}</small></td>',
    ]
    return f'<tr id="incident-{incident.number}">{"".join(cells)}</tr>\n'


def _comparison(goodput: Goodput, peers: Peers) -> str:
    rows = [f'<tr><td>here</td><td class="n"></td><td class="n"><b>{100 * goodput.ratio:.2f} %</b></td><td></td></tr>']
    for other in report.elsewhere(goodput, peers):
        lost = other.kills - other.recovered
        note = f"did not come back from {lost} of {other.kills} kills" if lost else ""
        rows.append(
            f'<tr><td>{_text(other.name)}</td><td class="n" data-of="more lost">{duration(other.more_s)}</td>'
            f'<td class="n" data-of="ratio">{100 * other.ratio:.2f} %</td><td><small>{note}</small></td></tr>'
        )
    source = (
        f"Measured {peers.date} by <code>{_text(peers.command)}</code> on {_text(peers.machine)}: {_text(peers.what)}"
    )
    return (
        "<section>\n<h2>The same failures under other launchers, by their measured recovery times</h2>\n"
        '<div class="scroll"><table class="cards">\n<thead><tr><th scope="col">launcher</th>'
        '<th scope="col" class="n">more lost</th><th scope="col" class="n">ratio</th><td></td></tr></thead>\n'
        f"<tbody>\n{chr(10).join(rows)}\n</tbody>\n</table></div>\n"
        f"<p><small>{source}; {_text(peers.versions)} ({_text(peers.document)}). Each restart is taken to last as much "
        "longer as theirs did than ours; what the program needs for itself, and the steps done again, are taken to be "
        "the same.</small></p>\n</section>"
    )


def _caveats(goodput: Goodput) -> str:
    lines = "".join(f"<li>{_text(line)}</li>\n" for line in report.caveats(goodput))
    return f"<section>\n<h2>What this cannot know</h2>\n<ul>\n{lines}</ul>\n</section>" if lines else ""
