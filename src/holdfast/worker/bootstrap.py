"""From a fresh fork of the zygote to the user's program, so that the program cannot tell the difference."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import os
import random
import signal
import sys
import time
import zlib
from typing import Any, NoReturn

from holdfast import linux
from holdfast.wire import messages
from holdfast.wire.snapshots import STANDBY, STAYED
from holdfast.worker import contexts, errors, groups, place, programs, stacks
from holdfast.worker.beacon import Beacon, Phase
from holdfast.worker.phases import Phases
from holdfast.worker.place import Place
from holdfast.worker.seat import Seat

TOLD_S = 1.0
EXIT_LOST_NODE = 86  # as `control.causes` has it, which a rank does not import


def run(request: messages.ForkWorker, fds: list[int]) -> NoReturn:
    """Become the rank that `request` describes, run its program, and exit as Python would."""
    report_fd, beacon_fd, stacks_fd, seat_fd, *stdio = fds
    place.take_streams(request, stdio)
    for signum in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(signum, signal.SIG_DFL)
    os.environ.update(request.env)
    contexts.given()
    if request.gpu != contexts.NO_GPU:
        contexts.open_ahead(request.gpu)
    linux.set_title(request.title)
    _bind(request)
    if isinstance(request.program, messages.Command):
        linux.wait_for_end(request.after, place.GONE_S)
        _exec(request, report_fd, beacon_fd)
    _take_fresh_randomness()
    if request.threads is not None:
        sys.modules["torch"].set_num_threads(request.threads)
    with contextlib.suppress(OSError, ValueError, RuntimeError):
        faulthandler.enable(file=2, all_threads=True)
    stacks.install(stacks_fd)
    gc.enable()
    here = Place(request.rank, request.generation, request.slot, report_fd, beacon_fd, Seat(seat_fd))
    for fd in (report_fd, beacon_fd):
        os.close(fd)
    place.take(here)
    reporter = Reporter(here)
    Phases(here.beacon, reporter.first_step).install()
    if os.environ.get(STANDBY):
        groups.stand_by()
    elif os.environ.get(STAYED):  # others wait for this one
        importlib.import_module("holdfast.worker.kernels").load_with_first_parameter()
    here.beacon.enter(Phase.STARTING)  # the agent may not have known yet that there is somebody to watch
    if here.beacon.has_lease:
        _keep_to_lease(here.beacon)
    if "HOLDFAST_CHAOS" in os.environ:
        importlib.import_module("holdfast.chaos.inside").install()
    linux.wait_for_end(request.after, place.GONE_S)
    try:
        programs.run(request.program, request.rank)
    except SystemExit as leaving:
        if leaving.code not in (None, 0) and place.current() is here:
            reporter.leaving(leaving.code)
        raise
    except KeyboardInterrupt as interrupt:
        errors.show(interrupt)
        raise SystemExit(128 + signal.SIGINT) from None
    except BaseException as failure:
        here.failed = True
        if place.current() is here:
            reporter.raised(failure)
        errors.show(failure)
        if place.current() is here and errors.describe(failure).distributed:
            _say_what_could_have_been(here)
        raise SystemExit(1) from None
    finally:
        if place.current() is here:  # and not a fork of the program's own that has come to its end
            here.beacon.enter(Phase.ENDING)
    raise SystemExit(0)


def _say_what_could_have_been(here: Place) -> None:
    """A rank may have seen that another one is gone before anybody has told it so."""
    if here.seat is not None and (over := here.seat.is_over_within(TOLD_S)):
        text = f"holdfast: its world was over: {over}; in run.train() this rank could have gone on"
        print(text, file=sys.stderr, flush=True)


class Reporter:
    """Tells the agent the few things that it must not have to ask for: the first step, an exception, and an
    exit with a code."""

    def __init__(self, place: Place) -> None:
        self._place = place
        # What a zygote should import beforehand. In a process that joins others it has heard of that.
        self._learns = place.slot == 0 and not os.environ.get(STAYED) and not os.environ.get(STANDBY)

    def raised(self, failure: BaseException) -> None:
        told = errors.describe(failure)
        errors.leave_error_file(told)
        self._place.report(
            messages.Raised(
                rank=self._place.rank,
                generation=self._place.generation,
                at_s=time.monotonic(),
                headline=told.headline,
                traceback=told.traceback,
                where=told.where,
                distributed=told.distributed,
                out_of_memory=told.out_of_memory,
                hardware=told.hardware,
            )
        )

    def leaving(self, given: object) -> None:
        code = given & 0xFF if isinstance(given, int) else 1  # as Python has it
        self._place.report(messages.Leaving(self._place.rank, self._place.generation, time.monotonic(), code))

    def first_step(self) -> None:
        modules = b""
        if self._learns:
            self._learns = False
            modules = zlib.compress("\n".join(programs.installed_modules()).encode(), 1)
        self._place.report(messages.Stepped(self._place.rank, self._place.generation, time.monotonic(), modules))


def _keep_to_lease(beacon: Beacon) -> None:
    """Take no step after the lease: this node may have been cut off, and a world without it be training by now. The
    agent would have ended this rank long before, unless it is stopped itself."""
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    rank = os.getpid()

    def before_step(*_: Any) -> None:
        if beacon.lease_is_over and os.getpid() == rank:
            print(
                "holdfast: this node was cut off from the job for too long; the rank ends", file=sys.stderr, flush=True
            )
            os._exit(EXIT_LOST_NODE)

    register_optimizer_step_pre_hook(before_step)


def _exec(request: messages.ForkWorker, report_fd: int, beacon_fd: int) -> NoReturn:
    """Start another program in this process. It must not inherit the signals that Python ignores, and it may want to
    use the monitor's client."""
    command = request.program
    assert isinstance(command, messages.Command)
    for fd in (report_fd, beacon_fd):
        os.set_inheritable(fd, True)
    where = (request.rank, request.generation, request.slot, report_fd, beacon_fd)
    os.environ[place.VARIABLE] = ":".join(map(str, where))
    for signum in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(signum, signal.SIG_DFL)
    argv = [messages.native(argument) for argument in command.argv]
    try:
        os.execvpe(argv[0], argv, os.environ)
    except OSError as failure:
        print(f"holdfast: cannot run {argv[0]}: {failure.strerror}", file=sys.stderr, flush=True)
        os._exit(127 if isinstance(failure, FileNotFoundError) else 126)


def _bind(request: messages.ForkWorker) -> None:
    """Keep this rank on the CPUs near its GPU, by torch's own rules."""
    if request.numa is None:
        return
    from torch.numa import binding

    binding._maybe_apply_numa_binding_to_current_process(
        gpu_index=request.slot, numa_options=binding.NumaOptions(binding.AffinityMode(request.numa))
    )


def _take_fresh_randomness() -> None:
    """A cold process starts every generator from the system's entropy; a fork would share its zygote's."""
    random.seed()
    sys.modules["torch"].default_generator.seed()
    if (numpy_random := sys.modules.get("numpy.random")) is not None:
        numpy_random.seed()
