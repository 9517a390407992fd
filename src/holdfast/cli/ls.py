"""`holdfast ls`: the jobs of this machine, those that run and those that left a record."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence

import msgspec

from holdfast.agent import doorbell
from holdfast.cli.flags import open_parser
from holdfast.observe import find, screen
from holdfast.observe.screen_job import Watched

ENDED = 20  # jobs that are over, unless all are asked for
COLUMNS = ("RUN ID", "STATE", "PROGRAM", "NODES", "RANKS", "STEP", "RESTARTS", "AGE", "RUN DIRECTORY")
NUMBERS = frozenset((3, 4, 5, 6))


class Row(msgspec.Struct, frozen=True):
    """A job, for programs. What is not known is null."""

    run_id: str
    standing: str
    pid: int | None
    program: str
    nodes: int | None
    ranks: int | None
    step: int | None
    restarts: int | None
    age_s: float | None  # since it began
    run_dir: str

    def cells(self) -> tuple[str, ...]:
        numbers = (self.nodes, self.ranks, self.step, self.restarts)
        age = screen.age(self.age_s) if self.age_s is not None else "-"
        words = tuple("-" if number is None else f"{number:,}" for number in numbers)
        named = (screen.cut(self.run_id, 36), self.standing, screen.cut(self.program or "-", 24))
        return tuple(screen.clean(cell) for cell in (*named, *words, age, self.run_dir or "-"))


def main(argv: Sequence[str]) -> int:
    parser = open_parser("holdfast ls", "List the jobs of this machine, running and ended.")
    parser.add_argument(
        "folders", nargs="*", metavar="LOG_DIR", help="also the jobs that ended and left their record in there"
    )
    parser.add_argument("--all", action="store_true", help=f"of those that ended not only the last {ENDED}")
    parser.add_argument("--json", action="store_true", help="for programs, one object a line")
    args = parser.parse_args(list(argv))
    for folder in args.folders:
        if not os.path.isdir(folder):
            return find.complain("ls", find.NotFound(f"{screen.clean(folder)} is no folder; name a --log-dir"))
    running, silent = find.running()
    found, is_cut = _some(find.jobs(args.folders), None if args.all else ENDED)
    rows = [_row(each, running) for each in found]
    known = {row.run_id for row in rows}
    rows = [*(_unrecorded(job) for job in running if not job.run_dir and job.run_id not in known), *rows]
    for why in silent:
        print(f"holdfast ls: {why}", file=sys.stderr)
    if args.json:
        screen.show(msgspec.json.encode(row).decode() for row in rows)
    elif not rows:
        screen.show(["no job runs here, and none has left a record; name a log directory to see what is in there"])
    else:
        screen.show(screen.table([COLUMNS, *(row.cells() for row in rows)], NUMBERS))
        if is_cut:
            screen.show(["there are older ones; holdfast ls --all shows them"])
    return 0


def _some(found: Iterator[find.Found], most: int | None) -> tuple[list[find.Found], bool]:
    """All that run, and so many of the others; and whether there were more."""
    taken: list[find.Found] = []
    for each in found:
        if each.pid is None and most is not None:
            if most == 0:
                return taken, True
            most -= 1
        taken.append(each)
    return taken, False


def _row(found: find.Found, running: Sequence[doorbell.Job]) -> Row:
    program = next((job.program for job in running if job.pid == found.pid), "")
    try:
        job = Watched(found)
        job.look()
    except OSError:
        return Row(found.run_id, "unreadable", found.pid, program, None, None, None, None, None, str(found.run_dir))
    job.close()
    world = job.state.world
    return Row(
        run_id=job.run_id,
        standing=job.word,
        pid=job.pid,
        program=job.state.program or program,
        nodes=len(world.nodes) if world is not None else None,
        ranks=world.size if world is not None else None,
        step=job.state.step or None,
        restarts=job.state.restarts,
        age_s=job.now_s + (job.since_end_s if job.is_over else 0.0),
        run_dir=str(found.run_dir),
    )


def _unrecorded(job: doorbell.Job) -> Row:
    return Row(job.run_id, "running", job.pid, job.program, None, job.nproc, None, None, None, "")
