"""`holdfast stacks`: what the ranks of a running job are doing, and whom the others wait for."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import msgspec

from holdfast.agent import doorbell
from holdfast.cli.flags import open_parser
from holdfast.control import stacks
from holdfast.observe import find
from holdfast.observe.screen import clean


def main(argv: Sequence[str]) -> int:
    parser = open_parser("holdfast stacks", "Show what the ranks of a job on this machine are doing. They go on.")
    parser.add_argument("job", nargs="?", default="", metavar="JOB", help="its run id, or its agent's pid")
    parser.add_argument("--json", action="store_true", help="for programs")
    args = parser.parse_args(list(argv))
    running, silent = find.running()
    jobs = [job for job in running if args.job in ("", job.run_id, str(job.pid))]
    if not jobs:
        for why in silent:
            _complain(why, 1)
        return _complain(f"there is no job {args.job!r} on this machine" if running else "no job runs here", 1)
    if len({job.run_id for job in jobs}) > 1:
        _complain("several jobs run here; say which by its run id or pid:", 2)
        print(*(f"  {find.line(job)}" for job in jobs), sep="\n", file=sys.stderr)
        return 2
    try:
        taken = doorbell.ask(jobs[0].pid, doorbell.Stacks())  # any agent of a job speaks for all of its nodes
    except doorbell.NoAnswer as failure:
        return _complain(str(failure), 1)
    if not isinstance(taken, doorbell.Taken):
        return _complain(taken.why if isinstance(taken, doorbell.Sorry) else "another version answers", 1)
    if args.json:
        print(msgspec.json.encode(taken).decode())
    else:
        _show(taken)
    return 0


def _show(taken: doorbell.Taken) -> None:
    """Names come from the program, and may hold anything."""
    print(*map(clean, stacks.report(taken.groups, taken.suspects).splitlines()), sep="\n")
    if taken.missing:
        print(f"\nno answer from {taken.missing} of {taken.nodes + taken.missing} nodes")
    if taken.folder:
        print(f"\nmore in {clean(taken.folder)}")


def _complain(message: str, code: int) -> int:
    print(f"holdfast stacks: {clean(message)}", file=sys.stderr)
    return code
