"""`holdfast.launch`: a Python function on several ranks, from a script, a test or a notebook."""

from __future__ import annotations

import asyncio
import os
import pickle
import shutil
import signal
import sys
import tempfile
import threading
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from multiprocessing import spawn
from typing import Any

import msgspec

from holdfast.agent.agent import Agent
from holdfast.agent.logs import LogFilters, Logs
from holdfast.agent.options import NUMA_MODES, Options
from holdfast.agent.result import Result
from holdfast.control.membership import Settings
from holdfast.control.restarts import Decide
from holdfast.fault_tolerance.config import FaultToleranceConfig, HangDetection
from holdfast.observe.events import Event
from holdfast.wire.messages import Command, Function, Program, portable
from holdfast.worker import programs
from holdfast.worker.saying import is_quiet


class JobFailed(Exception):
    """A job ended without success. `errors` has, by rank, what each failed rank of the last world ended with."""

    def __init__(self, result: Result) -> None:
        self.result = result
        self.errors: dict[int, str] = {
            exit.rank: exit.raised.traceback if exit.raised is not None else exit.headline
            for exit in sorted(result.exits, key=lambda exit: exit.rank)
            if exit.is_failure
        }
        last, lines = result.ended_by, result.failure()
        for rank, error in self.errors.items():
            if last is None or rank != last.rank:
                lines += [f"  rank {rank}:", *(f"    {line}" for line in error.rstrip().splitlines())]
        super().__init__("\n".join(lines))


def launch(
    function: Callable[..., Any] | Sequence[str],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    nproc: int | str = 1,
    max_restarts: int = 0,
    run_id: str | None = None,
    role: str = "default",
    log_dir: str | None = None,
    redirects: int | Mapping[int, int] = 0,
    tee: int | Mapping[int, int] = 0,
    shutdown_timeout_s: float = 30.0,
    retry_same_error: bool = False,
    virtual_local_rank: bool = False,
    numa_binding: str | None = None,
    local_addr: str = "127.0.0.1",
    master_port: int = 0,
    local_ranks_filter: Collection[int] | None = None,
    log_line_prefix_template: str | None = None,
    duplicate_stdout_filters: Sequence[str] = (),
    duplicate_stderr_filters: Sequence[str] = (),
    logs: Logs | None = None,
    decide: Decide | None = None,
    on_event: Callable[[Event], None] | None = None,
    quiet: bool = False,
    hang_detection: HangDetection | None = None,
    hang_floor_s: float | None = None,
    max_no_progress_restarts: int | None = None,
    ft: FaultToleranceConfig | None = None,
) -> dict[int, Any]:
    """Call `function(*args, **kwargs)` on `nproc` ranks and return what each returned, by rank.

    Every rank has torchrun's environment, so `init_process_group()` works as it is. A failed rank restarts all of them,
    at most `max_restarts` times; then `JobFailed` tells every rank's error. `function` may also be a command, a list of
    strings; its ranks return None.

    Three things can be replaced: where output goes (`logs`, an object with a `place` method), whether a failure leads
    to a restart (`decide`, from the history and the failure to `Restart` or `GiveUp`), and who hears of events
    (`on_event`). They are plain Python, called in this process.

    A rank that hangs restarts all of them too. `ft` says how that is found; the three keywords before it say the same
    for what is changed most, and beat it.
    """
    if programs.loading:
        raise RuntimeError(
            "holdfast.launch was called while a rank imported this script; put the call under if __name__ == '__main__'"
        )
    _check(nproc, max_restarts, shutdown_timeout_s, numa_binding)
    ft = _fault_tolerance(ft, hang_detection, hang_floor_s, max_no_progress_restarts)
    if isinstance(function, str):
        function = [function]
    private = tempfile.mkdtemp(prefix="holdfast_call_")
    try:
        program: Program
        if callable(function):
            program = Function(os.path.join(private, "call"))
            with open(program.path, "wb") as file:
                file.write(_pickle_call(function, tuple(args), dict(kwargs or {})))
        else:
            program = Command(tuple(portable(part) for part in (*function, *map(str, args))))
        options = Options(
            program=program,
            nproc=nproc,
            settings=Settings(
                run_id=run_id or str(uuid.uuid4()),
                max_restarts=max_restarts,
                alone=True,
                max_no_progress=ft.max_no_progress_restarts,
            ),
            role=role,
            log_dir=log_dir,
            redirects=redirects,
            tee=tee,
            shutdown_timeout_s=shutdown_timeout_s,
            retry_same_error=retry_same_error,
            virtual_local_rank=virtual_local_rank,
            numa_binding=numa_binding,
            master_addr=local_addr,
            master_port=master_port,
            local_ranks=frozenset(local_ranks_filter) if local_ranks_filter is not None else None,
            prefix_template=log_line_prefix_template,
            filters=LogFilters(tuple(duplicate_stdout_filters), tuple(duplicate_stderr_filters)),
            quiet=quiet or is_quiet(),
            ft=ft,
        )
        sinks = (on_event,) if on_event is not None else ()
        result = _run_beside(Agent(options, logs=logs, decide=decide, sinks=sinks))
        if result.kind is not None:
            raise JobFailed(result)
        ranks = sorted(exit.rank for exit in result.exits)
        return {rank: _load_result(private, rank) if callable(function) else None for rank in ranks}
    finally:
        shutil.rmtree(private, ignore_errors=True)


def _check(nproc: int | str, max_restarts: int, shutdown_timeout_s: float, numa_binding: str | None) -> None:
    if isinstance(nproc, int) and nproc < 1:
        raise ValueError(f"nproc={nproc}: at least 1 is meant")
    if max_restarts < 0:
        raise ValueError(f"max_restarts={max_restarts}: at least 0 is meant")
    if not shutdown_timeout_s >= 0:
        raise ValueError(f"shutdown_timeout_s={shutdown_timeout_s}: at least 0 is meant")
    if numa_binding not in (None, *NUMA_MODES):
        raise ValueError(f"numa_binding={numa_binding!r}: one of {', '.join(NUMA_MODES)} is meant")


def _fault_tolerance(
    ft: FaultToleranceConfig | None, detection: HangDetection | None, floor_s: float | None, no_progress: int | None
) -> FaultToleranceConfig:
    """Raises ValueError."""
    given = {"hang_detection": detection, "hang_floor": floor_s, "max_no_progress_restarts": no_progress}
    return msgspec.structs.replace(
        ft or FaultToleranceConfig(), **{key: value for key, value in given.items() if value is not None}
    )


def _run_beside(agent: Agent) -> Result:
    """Run the agent in a thread with a loop of its own: a notebook's main thread has one already."""
    outcome: list[Result | BaseException] = []
    ended = threading.Event()  # an interrupted `Thread.join` leaves a thread that claims to have ended

    def run() -> None:
        try:
            outcome.append(asyncio.run(agent.run()))
        except BaseException as failure:
            outcome.append(failure)
        finally:
            ended.set()

    threading.Thread(target=run, name="holdfast-agent").start()
    while not ended.is_set():
        try:
            ended.wait()
        except KeyboardInterrupt:
            agent.request_stop(signal.SIGINT)
    [end] = outcome
    if isinstance(end, BaseException):
        raise end
    return end


def _pickle_call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    """The call, behind what a fresh process needs to load it: the path, and the script that is `__main__` here."""
    preparation = {
        key: value
        for key, value in spawn.get_preparation_data("holdfast").items()
        if key in ("sys_path", "dir", "init_main_from_path", "init_main_from_name")
    }
    by_reference = "<locals>" not in function.__qualname__ and "<lambda>" not in function.__qualname__
    if function.__module__ == "__main__" and not hasattr(sys.modules["__main__"], "__file__"):
        by_reference = False
    if by_reference:
        return pickle.dumps(preparation) + pickle.dumps((function, args, kwargs))
    try:
        import cloudpickle
    except ImportError:
        raise TypeError(
            f"{function.__qualname__} is defined in a notebook or inside another function; "
            "to send it to ranks, pip install 'holdfast[notebook]', or move it to the top of a module"
        ) from None
    preparation = {key: value for key, value in preparation.items() if not key.startswith("init_main")}
    return pickle.dumps(preparation) + bytes(cloudpickle.dumps((function, args, kwargs)))


def _load_result(private: str, rank: int) -> Any:
    """None for a rank that ended itself with `sys.exit(0)`."""
    path = os.path.join(private, f"result-{rank}")
    if not os.path.exists(path):
        return None
    with open(path, "rb") as file:
        return pickle.load(file)
