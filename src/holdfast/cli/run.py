"""`holdfast run`: from flags to a job."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
from argparse import Namespace
from collections.abc import Sequence
from difflib import get_close_matches
from importlib.machinery import PathFinder

from holdfast import linux, verdict
from holdfast.agent.agent import Agent
from holdfast.agent.logs import LogFilters, parse_std
from holdfast.agent.options import Options
from holdfast.agent.preflight import Refused
from holdfast.cli import cluster, fault_tolerance, flags
from holdfast.cli.usage import Usage, nearest, one_of
from holdfast.observe.torchelastic import HANDLERS
from holdfast.wire.messages import Command, Module, Program, Script, portable
from holdfast.wire.snapshots import RESUME
from holdfast.worker.saying import is_quiet


def main(argv: Sequence[str]) -> int:
    linux.fill_standard_streams()
    try:
        args = flags.parse(argv)
        options = read(args)
    except Usage as wrong:
        return _complain(str(wrong), 2)
    except Refused as refusal:
        return _complain(str(refusal), 1)
    for note in notes(args) if not options.quiet else ():
        print(f"holdfast: {note}", file=sys.stderr)
    try:
        result = asyncio.run(Agent(options).run())
    except Refused as refusal:
        return _complain(str(refusal), 1)
    except KeyboardInterrupt:
        return 1
    except Exception as bug:
        return _internal_error(bug)
    for line in result.failure() if options.quiet and not result.drained else ():  # else the agent has told
        print(f"holdfast: {line}", file=sys.stderr)
    if result.is_worth_rescheduling:
        verdict.leave(result.is_of_this_node)
    if options.reschedule_exit_code is not None and result.is_worth_rescheduling and not options.quiet:
        print(f"holdfast: worth rescheduling: exit code {options.reschedule_exit_code}", file=sys.stderr)
    return result.exit_code(options.exit_code_from_cause, options.reschedule_exit_code)


def read(args: Namespace) -> Options:
    """Check every flag that can be checked without torch, and say what is wrong in one line."""
    if not _has_directory():
        raise Usage("the current directory has been removed; change to one that exists")
    cluster.check(args)
    ft = fault_tolerance.read(args)
    settings = cluster.settings(args, ft)
    return Options(
        program=_program(args),
        nproc=_nproc(args.nproc_per_node),
        settings=settings,
        cluster=None if settings.alone else cluster.read(args),
        role=args.role,
        shutdown_timeout_s=_shutdown_timeout(args.shutdown_timeout),
        signals=_signals(args.signals_to_handle),
        retry_same_error=args.retry_same_error,
        exit_code_from_cause=args.exit_code_from_cause,
        reschedule_exit_code=args.reschedule_exit_code,
        master_addr=cluster.unbracketed(args.local_addr or args.master_addr),
        master_port=args.master_port or 0 if settings.alone and not args.standalone else 0,
        virtual_local_rank=args.virtual_local_rank,
        numa_binding=args.numa_binding,
        log_dir=args.log_dir,
        redirects=_std("--redirects", args.redirects),
        tee=_std("--tee", args.tee),
        local_ranks=_local_ranks(args.local_ranks_filter),
        filters=LogFilters(_filters(args.duplicate_stdout_filters), _filters(args.duplicate_stderr_filters)),
        prefix_template=os.environ.get("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"),
        logs_plugin=args.logs_specs,
        dashboard=_listen(args.dashboard),
        preflight=args.preflight,
        standby=args.standby,
        spot=args.spot,
        quiet=args.quiet or is_quiet(),
        event_handler=one_of("--event-log-handler", args.event_log_handler, HANDLERS),
        # Somebody's variable from outside is taken for the flag, so that it too counts for the first world alone.
        resume=args.resume or os.environ.get(RESUME, ""),
        ft=ft,
    )


def _listen(given: str | None) -> str | None:
    """Where the page is to be."""
    if given is None:
        return None
    host, colon, port = given.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    is_host = bool(host) if colon else True
    is_port = port.isascii() and port.isdecimal() and int(port) < 65536
    if not is_host or not is_port or (":" in bare and bare == host):
        raise Usage(f"--dashboard={given}: [HOST:]PORT is meant, as in 8080, 0.0.0.0:8080 or [::]:8080")
    return f"{host or '127.0.0.1'}:{port}"


def _has_directory() -> bool:
    try:
        return bool(os.getcwd())
    except FileNotFoundError:
        return False


def notes(args: Namespace) -> list[str]:
    """What was asked for and has no effect. Nothing is ignored in silence."""
    said: list[str] = []
    if "monitor_interval" in args.given:
        said.append("--monitor-interval has no effect: ranks are watched, not polled")
    if "start_method" in args.given:
        said.append("--start-method has no effect: ranks are forked from a process that has torch loaded")
    if args.event_log_handler == "dynamic_rendezvous":
        said.append("--event-log-handler=dynamic_rendezvous has no effect: there is no such rendezvous here")
    return said + cluster.notes(args) + fault_tolerance.notes(args)


def _program(args: Namespace) -> Program:
    target, rest = args.training_script, tuple(map(portable, args.training_script_args))
    if args.module and args.no_python:
        raise Usage("--module and --no-python exclude each other; a module is run by Python")
    interpreter = os.environ.get("PYTHON_EXEC", sys.executable)
    _check_program("PYTHON_EXEC", interpreter)
    if args.no_python and not args.run_path:
        _check_program("--no-python", target)
        return Command((portable(target), *rest))
    if args.module:
        _check_module(target)
    else:
        _check_script(target)
    if args.cold_start or interpreter != sys.executable:
        return Command((interpreter, "-u", *(["-m"] if args.module else []), portable(target), *rest))
    return Module(target, rest) if args.module else Script(portable(target), rest)


def _check_script(path: str) -> None:
    if not os.path.exists(path):
        raise Usage(f"there is no script {path!r}; {_near_file(path) or 'check its path'}")
    if os.path.isdir(path) and not os.path.exists(os.path.join(path, "__main__.py")):
        raise Usage(f"{path!r} is a directory without a __main__.py; name a script")
    if not os.access(path, os.R_OK):
        raise Usage(f"the script {path!r} cannot be read; check its permissions")


def _check_module(name: str) -> None:
    """Only whether its top package is there: to look further would be to import it, here."""
    top = name.partition(".")[0]
    path = [os.getcwd(), *sys.path]
    if top not in sys.builtin_module_names and PathFinder.find_spec(top, path) is None:
        raise Usage(f"there is no module {top!r} in the current directory or on the path; check its name")


def _check_program(flag: str, name: str) -> None:
    if shutil.which(name) is None:
        raise Usage(f"{flag}: there is no program {name!r} that can be run; check its path and permissions")


def _near_file(path: str) -> str:
    folder, name = os.path.split(path)
    try:
        near = get_close_matches(name, os.listdir(folder or "."), 1)
    except OSError:
        return ""
    return f"did you mean {os.path.join(folder, near[0])}?" if near else ""


def _nproc(text: str) -> int | str:
    try:
        count = int(text)
    except ValueError:
        if not text.isidentifier():
            raise Usage(f"--nproc-per-node={text}: a number, cpu, gpu, xpu or auto is meant") from None
        return len(os.sched_getaffinity(0)) if text == "cpu" else text
    if count < 1:
        raise Usage(f"--nproc-per-node={text}: at least 1 is meant")
    return count


def _shutdown_timeout(given: int | None) -> float:
    if given is not None:
        return float(given)
    text = os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "30")
    try:
        return float(max(0, int(text)))
    except ValueError:
        raise Usage(f"TORCH_ELASTIC_SHUTDOWN_TIMEOUT={text}: a number of seconds is meant") from None


def _signals(text: str) -> tuple[int, ...]:
    numbers: list[int] = []
    for name in filter(None, (part.strip() for part in text.split(","))):
        if name not in signal.Signals.__members__:
            raise Usage(
                f"--signals-to-handle: there is no signal {name!r}{nearest(name, list(signal.Signals.__members__))}"
            )
        if name in ("SIGKILL", "SIGSTOP"):
            raise Usage(f"--signals-to-handle: {name} cannot be handled by any program")
        numbers.append(signal.Signals[name])
    return tuple(numbers)


def _std(flag: str, text: str) -> int | dict[int, int]:
    try:
        return parse_std(text)
    except ValueError as wrong:
        raise Usage(f"{flag}: {wrong}") from None


def _local_ranks(text: str) -> frozenset[int] | None:
    if not text:
        return None
    try:
        return frozenset(int(part) for part in text.split(","))
    except ValueError:
        raise Usage(f"--local-ranks-filter={text}: a list of local ranks like 0,1,2 is meant") from None


def _filters(items: list[str] | str) -> tuple[str, ...]:
    return tuple(item for item in items if item)


def _complain(message: str, code: int) -> int:
    print(f"holdfast run: {message}", file=sys.stderr)
    return code


def _internal_error(bug: Exception) -> int:
    """Ours, not the user's. They get one line; the traceback goes to a file that they can send."""
    import tempfile
    import traceback

    with tempfile.NamedTemporaryFile("w", prefix="holdfast_bug_", suffix=".txt", delete=False) as file:
        traceback.print_exception(bug, file=file)
    return _complain(f"a bug in holdfast ended the job: {type(bug).__name__}: {bug}; please send us {file.name}", 1)
