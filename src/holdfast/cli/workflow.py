"""`holdfast workflow`: tasks of a file, run on this machine, and run again elsewhere when that can help."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import os
import select
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from holdfast.cli.flags import open_parser
from holdfast.workflow import deciding, homes, lives, machine, placing, reading, table, templates
from holdfast.workflow.local import Local
from holdfast.workflow.record import LOCAL, SLURM, Record, Submitted, save
from holdfast.workflow.runner import Backend, Runner, Works
from holdfast.workflow.spec import Problem, Workflow


def main(argv: Sequence[str]) -> int:
    args = make_parser().parse_args(list(argv))
    act: Callable[[argparse.Namespace], int] = args.act
    try:
        return act(args)
    except (Problem, homes.NotThere, homes.Taken) as failure:
        print(f"holdfast workflow: {failure}", file=sys.stderr)
        return 2 if isinstance(failure, Problem) else 1


def make_parser() -> argparse.ArgumentParser:
    parser = open_parser("holdfast workflow", "Run the tasks of a workflow file; reschedule those that it can help.")
    acts = parser.add_subparsers(required=True, metavar="submit|validate|status|logs|cancel|resume|ls")
    for name, act, what in (
        ("submit", _submit, "run a workflow; ends with its exit code, and Ctrl-C cancels it"),
        ("validate", _validate, "say whether a workflow file could be run"),
    ):
        one = _add(acts, name, act, what)
        one.add_argument("file", metavar="FILE")
        one.add_argument("--set", nargs="+", action="extend", default=[], metavar="K=V", help="in place of a default")
        one.add_argument("--backend", choices=(LOCAL, SLURM), default=LOCAL, help="where it runs (default local)")
        one.add_argument("--nodes", type=_count, metavar="N", help="local: act as so many nodes (default 1)")
        if name == "submit":
            one.add_argument("--dry-run", action="store_true", help="print what would be run, and run nothing")
            one.add_argument("--json", action="store_true", help="how it ended, for programs")
    for name, act, what in (
        ("status", _status, "show how its tasks stand"),
        ("cancel", _cancel, "stop all of its tasks; their last checkpoints are uploaded"),
        ("resume", _resume, "go on where its runner was killed"),
    ):
        one = _add(acts, name, act, what)
        one.add_argument("id", nargs="?", default="", metavar="ID", help="default: the last that was submitted")
        one.add_argument("--json", action="store_true", help="for programs")
    one = _add(acts, "logs", _logs, "print what a task has printed")
    one.add_argument("id", metavar="ID")
    one.add_argument("task", metavar="TASK")
    one.add_argument("--attempt", type=_count, metavar="N", help="default: its last")
    _add(acts, "ls", _ls, "list the workflows of this machine").add_argument("--json", action="store_true")
    return parser


def _add(acts: Any, name: str, act: Callable[[argparse.Namespace], int], what: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = acts.add_parser(name, help=what, description=what)
    parser.set_defaults(act=act)
    return parser


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"a number of at least 1 is meant, not {text!r}")
    return int(text)


# -- submit -----------------------------------------------------------------------------------------------------------


def _values(args: argparse.Namespace) -> dict[str, Any]:
    values = {}
    for given in args.set:
        name, equals, text = given.partition("=")
        if not equals or not name:
            raise Problem(f"--set {given}: NAME=VALUE is meant", args.file)
        values[name] = templates.as_value(text)
    return values


def _read(args: argparse.Namespace) -> tuple[Workflow, tuple[machine.Node, ...]]:
    if args.backend == SLURM and args.nodes is not None:
        raise Problem("--nodes is for this machine; Slurm gives out nodes itself", args.file)
    workflow = reading.read(args.file, _values(args))
    if args.backend == SLURM:
        return workflow, _check_slurm(workflow, args.file)
    nodes = machine.nodes(args.nodes or 1)
    _check_nodes(workflow, nodes, args.file)
    return workflow, nodes


def _check_nodes(workflow: Workflow, nodes: Sequence[machine.Node], file: str) -> None:
    for group in workflow.groups:
        for task in group.tasks:
            if why := placing.lacking(task, nodes):
                raise Problem(why, file, task.line)


def _check_slurm(workflow: Workflow, file: str) -> tuple[machine.Node, ...]:
    """Whether Slurm would take each of its jobs. It knows best."""
    from holdfast.workflow.slurm import checks, commands

    try:
        _check_nodes(workflow, commands.nodes(os.environ.get("SBATCH_PARTITION", "")), file)
        for group in workflow.groups:
            if why := checks.refusal(group):
                raise Problem(why, file, group.line)
    except commands.Failed as failure:
        raise Problem(str(failure), file) from None
    return ()


def _validate(args: argparse.Namespace) -> int:
    workflow, _ = _read(args)
    tasks = sum(len(group.tasks) for group in workflow.groups)
    print(f"{args.file}: {workflow.name} is well: {len(workflow.groups)} groups, {tasks} tasks")
    return 0


def _submit(args: argparse.Namespace) -> int:
    workflow, nodes = _read(args)
    if args.dry_run:
        print(reading.rendering(Path(args.file).read_text(encoding="utf-8"), args.file, _values(args)).text, end="")
        return 0
    folder = homes.make(workflow.name)
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    workflow = _with_files(workflow, folder)
    if args.backend == SLURM:
        submitted = _to_slurm(folder, workflow, now)
    else:
        submitted = Submitted(folder.name, workflow, now, nodes=nodes, private=lives.can_be_private())
    record = Record(submitted, deciding.begin(workflow))
    save(folder, submitted)
    save(folder, record.standing)  # with which it is there
    return _run(folder, record, args.json)


def _to_slurm(folder: Path, workflow: Workflow, now: str) -> Submitted:
    from holdfast.workflow.slurm import letters
    from holdfast.workflow.slurm.backend import environment

    letters.make_secret(folder)
    return Submitted(folder.name, workflow, now, SLURM, sbatch=environment())


def _with_files(workflow: Workflow, folder: Path) -> Workflow:
    """As they are now: whoever edits one later changes no task that is rescheduled."""
    kept: dict[str, str] = {}

    def keep(file: Any) -> Any:
        if file.local is None:
            return file
        if file.local not in kept:
            (folder / "files").mkdir(exist_ok=True)
            kept[file.local] = str(folder / "files" / str(len(kept)))
            Path(kept[file.local]).write_bytes(Path(file.local).read_bytes())
        return msgspec.structs.replace(file, local=kept[file.local])

    replace = msgspec.structs.replace
    groups = [
        replace(group, tasks=tuple(replace(task, files=tuple(map(keep, task.files))) for task in group.tasks))
        for group in workflow.groups
    ]
    return replace(workflow, groups=tuple(groups))


def _run(folder: Path, record: Record, as_json: bool, cancel: bool = False) -> int:
    lock = homes.Lock(folder)
    shown = _Shown(record, quiet=as_json)
    try:
        code = asyncio.run(_running(folder, record, shown, cancel))
    finally:
        lock.release()
    shown.end()
    if as_json:
        print(msgspec.json.encode(table.as_json(record, None)).decode())
    return code


async def _running(folder: Path, record: Record, shown: _Shown, cancel: bool) -> int:
    runner, works = Runner(folder, record, shown.changed), Works()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(signum, runner.cancel)
    if cancel:
        runner.cancel()
    backend: Backend
    if record.submitted.backend == SLURM:
        from holdfast.workflow.slurm.backend import Slurm

        backend = Slurm(folder, record, works, runner.tell, shown.say)
    else:
        backend = Local(folder, record, works, runner.tell, shown.say)
    return await runner.run(backend, works)


class _Shown:
    """A table that is written over on a terminal, a line for each change elsewhere."""

    def __init__(self, record: Record, quiet: bool) -> None:
        self._record, self._quiet = record, quiet
        self._live = sys.stdout.isatty() and not quiet
        self._lines = 0
        self._before: dict[str, tuple[str, int]] = {}
        if not quiet:
            print(f"{record.id} begins; holdfast workflow status {record.id} shows how it stands", flush=True)

    def changed(self) -> None:
        if self._live:
            self._draw()
        elif not self._quiet:
            for name, at in self._record.standing.tasks.items():
                if self._before.get(name) != (at.state, at.attempt):
                    self._before[name] = at.state, at.attempt
                    if at.attempt:
                        where = f" on {at.node}" if at.node else ""
                        why = f": {at.why}" if at.why else ""
                        print(f"{name} {at.state}{where}, attempt {at.attempt}{why}", flush=True)

    def say(self, text: str) -> None:
        if self._live:
            sys.stdout.write(f"\x1b[{self._lines}F\x1b[J" if self._lines else "")
            self._lines = 0
        print(f"holdfast: {text}", file=sys.stderr, flush=True)
        if self._live:
            self._draw()

    def end(self) -> None:
        if self._live:
            self._draw()
        if not self._quiet:
            print(table.summary(self._record), flush=True)

    def _draw(self) -> None:
        text = table.text(self._record)
        sys.stdout.write((f"\x1b[{self._lines}F\x1b[J" if self._lines else "") + text + "\n")
        sys.stdout.flush()
        self._lines = text.count("\n") + 1


# -- the others -------------------------------------------------------------------------------------------------------


def _status(args: argparse.Namespace) -> int:
    folder = homes.find(args.id)
    record, runner = homes.read(folder), homes.runner(folder)
    if args.json:
        print(msgspec.json.encode(table.as_json(record, runner)).decode())
    else:
        print(table.text(record))
        print(table.summary(record))
        if runner is None and not deciding.is_over(record.standing):
            print(f"its runner is gone; go on with: holdfast workflow resume {record.id}")
    return 0


def _resume(args: argparse.Namespace) -> int:
    folder = homes.find(args.id)
    record = homes.read(folder)
    return _run(folder, record, args.json)


def _cancel(args: argparse.Namespace) -> int:
    """By its runner, or, where that is gone, here."""
    folder = homes.find(args.id)
    runner = homes.runner(folder)
    if runner is None:
        record = homes.read(folder)
        if deciding.is_over(record.standing):
            raise homes.NotThere(f"{folder.name} is over")
        _run(folder, record, args.json, cancel=True)
        return 0
    fd = os.pidfd_open(runner)
    try:
        signal.pidfd_send_signal(fd, signal.SIGTERM)
        select.select([fd], [], [])  # it has ended
    finally:
        os.close(fd)
    print(table.summary(homes.read(folder)))
    return 0


def _logs(args: argparse.Namespace) -> int:
    folder = homes.find(args.id)
    record = homes.read(folder)
    if args.task not in record.standing.tasks:
        raise homes.NotThere(f"{record.id} has no task {args.task!r}: {', '.join(record.standing.tasks)}")
    attempt = args.attempt or record.standing.tasks[args.task].attempt
    life = folder / "tasks" / args.task / str(attempt)
    if not life.is_dir():
        raise homes.NotThere(f"{args.task} has no attempt {attempt}")
    for name, out in (("stdout", sys.stdout), ("stderr", sys.stderr)):
        with contextlib.suppress(FileNotFoundError):
            out.buffer.write((life / name).read_bytes())
            out.flush()
    return 0


def _ls(args: argparse.Namespace) -> int:
    records = [(homes.read(folder), homes.runner(folder)) for folder in homes.there()]
    if args.json:
        print(msgspec.json.encode([table.as_json(*one) for one in records]).decode())
        return 0
    for record, _ in records:
        print(table.summary(record))
    if not records:
        print(f"there are no workflows in {homes.root()}")
    return 0
