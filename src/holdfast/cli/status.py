"""`holdfast status`: one look at a job, on one screen, and a code for scripts."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import msgspec

from holdfast.cli.flags import open_parser
from holdfast.observe import find, screen, screen_status
from holdfast.observe.screen_job import Watched

EXITS = """exit codes: 0 it trains, or has succeeded; 1 it has failed, was stopped, or its agent is gone;
2 there is no such job; 3 it runs and does not train now: it starts, or recovers."""


def main(argv: Sequence[str]) -> int:
    parser = open_parser("holdfast status", "Show how a job is, what happened to it and what that cost.")
    parser.epilog = EXITS
    parser.add_argument(
        "job",
        nargs="?",
        default="",
        metavar="JOB",
        help="its run id, its agent's pid, its run directory or its record; nothing: the one that runs here, or the "
        "last one",
    )
    parser.add_argument("--json", action="store_true", help="for programs")
    args = parser.parse_args(list(argv))
    try:
        found = find.find(args.job)
    except find.NotFound as failure:
        return find.complain("status", failure)
    try:
        job = Watched(found)
        job.look()
    except OSError as failure:
        return find.complain("status", find.NotFound(f"cannot read {found.record}: {failure.strerror}"))
    job.close()
    if args.json:
        print(msgspec.json.encode(screen_status.as_json(job)).decode())
    else:
        columns = os.get_terminal_size(1).columns if sys.stdout.isatty() else 0
        screen.show(screen_status.lines(job, columns))
    return job.exit_code
