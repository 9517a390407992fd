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

from holdfast import linux
from holdfast.cli.flags import open_parser
from holdfast.workflow import beside, deciding, following, homes, lives, machine, placing, reading, table, templates
from holdfast.workflow.local import Local
from holdfast.workflow.record import LOCAL, SLURM, Record, Submitted, save
from holdfast.workflow.runner import Backend, Left, Runner, Works
from holdfast.workflow.shown import AGE_S, Screen, Shown, size
from holdfast.workflow.spec import Problem, Workflow


def main(argv: Sequence[str]) -> int:
    args = make_parser().parse_args(list(argv))
    act: Callable[[argparse.Namespace], int] = args.act
    try:
        return act(args)
    except (Problem, homes.NotThere, homes.Taken, Left) as failure:
        print(f"holdfast workflow: {failure}", file=sys.stderr)
        return 2 if isinstance(failure, Problem) else 130 if isinstance(failure, Left) else 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left to say is for nobody
        return 1
    except OSError as failure:
        print(f"holdfast workflow: {failure}", file=sys.stderr)
        return 1


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
        if name == "status":
            one.add_argument("-f", "--follow", action="store_true", help="go on showing it until it is over")
    one = _add(acts, "logs", _logs, "print what a task has printed")
    one.add_argument("id", metavar="ID")
    one.add_argument("task", metavar="TASK")
    one.add_argument("--attempt", type=_count, metavar="N", help="default: its last")
    one.add_argument("-f", "--follow", action="store_true", help="until it has ended, and all of its attempts")
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
        print(reading.rendering(reading.content(args.file), args.file, _values(args)).text, end="")
        return 0
    folder = homes.make(workflow.name)
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    workflow = _with_files(workflow, folder)
    if args.backend == SLURM:
        submitted = _to_slurm(folder, workflow, now)
    else:
        submitted = Submitted(folder.name, workflow, now, nodes=nodes, private=lives.can_be_private())
    save(folder, submitted)
    save(folder, deciding.begin(workflow))  # with which it is there
    return _run(folder, args.json, "begins")


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


def _run(folder: Path, as_json: bool, word: str, cancel: bool = False) -> int:
    linux.raise_open_files()
    lock = homes.Lock(folder)
    try:
        record = homes.read(folder)  # not before: another may have had it until now
        shown = Shown(record, as_json, word)
        code = asyncio.run(_running(folder, record, shown, cancel))
    except OSError as failure:
        text = f"{failure}; the tasks go on without a runner: holdfast workflow resume {folder.name}"
        raise OSError(text) from failure
    finally:
        lock.release()
    shown.end()
    if as_json:
        print(msgspec.json.encode(table.as_json(record, None)).decode(), flush=True)
    if beside.is_busy():
        os._exit(code)  # something still waits for a store that does not answer
    return code


async def _running(folder: Path, record: Record, shown: Shown, cancel: bool) -> int:
    runner, works = Runner(folder, record, shown.changed), Works()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, runner.cancel)
    loop.add_signal_handler(signal.SIGINT, lambda: runner.interrupt(works))
    if cancel:
        runner.cancel()
    backend: Backend
    if record.submitted.backend == SLURM:
        from holdfast.workflow.slurm.backend import Slurm

        backend = Slurm(folder, record, works, runner.tell, shown.say)
    else:
        backend = Local(folder, record, works, runner.tell, shown.say)
    return await runner.run(backend, works)


# -- the others -------------------------------------------------------------------------------------------------------


def _status(args: argparse.Namespace) -> int:
    folder = homes.find(args.id)
    if args.follow:
        return _follow_status(folder, args.json)
    record, runner = homes.read(folder), homes.runner(folder)
    if args.json:
        print(msgspec.json.encode(table.as_json(record, runner)).decode())
    else:
        print(table.text(record, size()[0] if sys.stdout.isatty() else None))
        print(table.summary(record))
        if runner is None and not deciding.is_over(record.standing):
            print(f"its runner is gone; go on with: holdfast workflow resume {record.id}")
    return 0


def _follow_status(folder: Path, as_json: bool) -> int:
    """A table that is written over; elsewhere, or for programs, one after the other."""
    live = sys.stdout.isatty() and not as_json
    screen = Screen()

    def draw(record: Record) -> None:
        if live:
            screen.draw(record)
        elif as_json:
            print(msgspec.json.encode(table.as_json(record, homes.runner(folder))).decode(), flush=True)
        else:
            print(table.text(record), flush=True)

    record = following.follow_table(folder, draw, AGE_S if live else None)
    if not as_json:
        print(table.summary(record))
    return 0


def _resume(args: argparse.Namespace) -> int:
    return _run(homes.find(args.id), args.json, "goes on")


def _cancel(args: argparse.Namespace) -> int:
    """By its runner, or, where that is gone, here."""
    folder = homes.find(args.id)
    record = homes.read(folder)
    if deciding.is_over(record.standing):
        raise homes.NotThere(f"{folder.name} is over")
    if (runner := homes.runner(folder)) is None:
        _run(folder, args.json, "is canceled", cancel=True)
        return 0
    if host := homes.elsewhere(folder):
        raise homes.Taken(f"the runner of {folder.name} is on {host}; cancel it there")
    with contextlib.suppress(ProcessLookupError):
        fd = os.pidfd_open(runner)
        try:
            signal.pidfd_send_signal(fd, signal.SIGTERM)
            select.select([fd], [], [])  # it has ended
        finally:
            os.close(fd)
    record = homes.read(folder)
    print(msgspec.json.encode(table.as_json(record, None)).decode() if args.json else table.summary(record))
    return 0


def _logs(args: argparse.Namespace) -> int:
    folder = homes.find(args.id)
    record = homes.read(folder)
    if args.task not in record.standing.tasks:
        raise homes.NotThere(f"{record.id} has no task {args.task!r}: {table.some(record.standing.tasks)}")
    at = record.standing.tasks[args.task]
    if (args.attempt or 0) > at.attempt or not (args.follow or at.attempt):
        has = f"its last is {at.attempt}" if at.attempt else f"it has not begun; it is {at.state}"
        raise homes.NotThere(f"{args.task} has no attempt {args.attempt or 1}: {has}")
    if args.follow:
        following.follow(folder, args.task, args.attempt, lambda text: print(f"holdfast: {text}", file=sys.stderr))
    else:
        following.Printed(folder / "tasks" / args.task / str(args.attempt or at.attempt)).show()
    return 0


def _ls(args: argparse.Namespace) -> int:
    records = []
    for folder in homes.there():
        try:
            records.append((homes.read(folder), homes.runner(folder)))
        except homes.NotThere as failure:
            print(f"holdfast workflow: {failure}", file=sys.stderr)
    if args.json:
        print(msgspec.json.encode([table.as_json(*one) for one in records]).decode())
        return 0
    for record, _ in records:
        print(table.summary(record))
    if not records:
        print(f"there are no workflows in {homes.root()}")
    return 0
