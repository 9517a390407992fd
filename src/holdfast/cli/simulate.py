"""`holdfast simulate`: jobs on virtual time, with everything going wrong that can."""

from __future__ import annotations

import os
import sys

from holdfast.cli.flags import at_least, open_parser
from holdfast.simulate.campaign import run_many
from holdfast.simulate.simulation import Result, Simulation, render

SHOWN = 60  # of the last events before a violation


def main(argv: list[str]) -> int:
    parser = open_parser(
        "holdfast simulate",
        "Run simulated jobs on virtual time, each with its own faults, and check that every invariant holds.",
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--seed", type=int, help="run this one, and show its timeline")
    which.add_argument("--seeds", type=at_least(1), default=200, help="how many to run (default: %(default)s)")
    parser.add_argument("--first", type=int, default=0, help="the first of them (default: %(default)s)")
    parser.add_argument("--nodes", type=at_least(1), help="how many hosts each has (default: as the seed says)")
    parser.add_argument("--jobs", type=at_least(1), default=os.cpu_count() or 1, help="processes (default: one a core)")
    args = parser.parse_args(argv)
    if args.seed is not None:
        return _replay(args.seed, args.nodes)
    nodes = f" --nodes {args.nodes}" if args.nodes else ""

    def show(result: Result) -> None:
        for at_s, who, what in result.notes[-SHOWN:]:
            print(f"{at_s:10.4f}  {who:22} {what}")
        print(f"seed {result.seed} breaks: {result.invariant}: {result.text}")
        print(f"    again, with all of it: holdfast simulate --seed {result.seed}{nodes}", flush=True)

    summary = run_many(range(args.first, args.first + args.seeds), args.nodes, args.jobs, show)
    print(summary.line())
    return 1 if summary.failed else 0


def _replay(seed: int, nodes: int | None) -> int:
    simulation = Simulation(seed, nodes, keep_all=True)
    print(render(simulation.scenario))
    result = simulation.run()
    for at_s, who, what in simulation.timeline.notes:
        print(f"{at_s:10.4f}  {who:22} {render(what)}")
    print(f"seed {seed}: {result.outcome} after {result.virtual_s:.1f} s and {result.worlds} worlds; {result.digest}")
    if result.invariant:
        print(f"breaks: {result.invariant}: {result.text}", file=sys.stderr)
        return 1
    return 0
