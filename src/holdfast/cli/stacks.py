"""`holdfast stacks`: what the ranks of a running job are doing, and whom the others wait for."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import msgspec

from holdfast.agent import doorbell
from holdfast.cli.flags import open_parser
from holdfast.control import stacks

WHO_S = 2.0


def main(argv: Sequence[str]) -> int:
    parser = open_parser("holdfast stacks", "Show what the ranks of a job on this machine are doing. They go on.")
    parser.add_argument("job", nargs="?", default="", metavar="JOB", help="its run id, or its agent's pid")
    parser.add_argument("--json", action="store_true", help="for programs")
    args = parser.parse_args(list(argv))
    running, silent = _running()
    jobs = [job for job in running if args.job in ("", job.run_id, str(job.pid))]
    if not jobs:
        for why in silent:
            _complain(why, 1)
        return _complain(f"there is no job {args.job!r} on this machine" if running else "no job runs here", 1)
    if len({job.run_id for job in jobs}) > 1:
        _complain("several jobs run here; say which by its run id or pid:", 2)
        _list(jobs)
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


def _running() -> tuple[list[doorbell.Job], list[str]]:
    """The jobs here, and why an agent is not among those that answered."""
    jobs, silent = [], []
    for pid in doorbell.find():
        try:
            answer = doorbell.ask(pid, doorbell.Who(), WHO_S)
        except doorbell.NoAnswer as failure:
            silent.append(str(failure))
            continue
        if isinstance(answer, doorbell.Job):
            jobs.append(answer)
    return jobs, silent


def _list(jobs: Sequence[doorbell.Job]) -> None:
    for job in jobs:
        ranks = f"{job.nproc} rank{'s' if job.nproc != 1 else ''}"
        print(f"  {job.run_id}  pid {job.pid}  {job.program}, {ranks}, generation {job.generation}", file=sys.stderr)


def _show(taken: doorbell.Taken) -> None:
    print(stacks.report(taken.groups, taken.suspects), end="")
    if taken.missing:
        print(f"\nno answer from {taken.missing} of {taken.nodes + taken.missing} nodes")
    if taken.folder:
        print(f"\nmore in {taken.folder}")


def _complain(message: str, code: int) -> int:
    print(f"holdfast stacks: {message}", file=sys.stderr)
    return code
