"""The agent: the shell around `control.job`. What happens on this node becomes events; actions become effects."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import threading
import time
import uuid
import zlib
from typing import Any

import msgspec

from holdfast import linux
from holdfast.agent import preflight
from holdfast.agent.console import Console
from holdfast.agent.logs import Destination, Logs, Plumbing, TorchrunLogs, std_of
from holdfast.agent.memory import OomWatch
from holdfast.agent.options import Options
from holdfast.agent.records import Records
from holdfast.agent.rundir import RunDirectory
from holdfast.agent.world import RunningWorld
from holdfast.agent.zygotes import Zygotes
from holdfast.control import job as jobs
from holdfast.control import restarts
from holdfast.control.causes import EXIT_CODES, Kind, RankExit, signal_name
from holdfast.control.incidents import Incident
from holdfast.control.worlds import World, worker_env
from holdfast.observe import error_file, torchelastic
from holdfast.observe.events import Sink
from holdfast.wire import messages


class Result(msgspec.Struct, frozen=True):
    """How a job ended."""

    kind: Kind | None  # None is success
    reason: str
    incidents: tuple[Incident, ...]
    exits: tuple[RankExit, ...]  # of the last world
    run_dir: str | None

    def exit_code(self, from_cause: bool) -> int:
        if self.kind is None:
            return 0
        return EXIT_CODES[self.kind] if from_cause else 1


class Agent:
    """Runs one job on one node, once. Signals are handled only if it runs in the main thread."""

    def __init__(
        self,
        options: Options,
        logs: Logs | None = None,
        decide: restarts.Decide | None = None,
        sinks: tuple[Sink, ...] = (),
        quiet: bool = False,
    ) -> None:
        self._options = options
        self._own_logs = logs
        default = restarts.decide if options.retry_same_error else restarts.decide_unless_same_error
        self._decide = decide or default
        self._sinks = sinks
        self._quiet = quiet
        self._job: jobs.Job | None = None
        self._world: RunningWorld | None = None
        self._destinations: dict[int, Destination] = {}
        self._helpers_ready = False
        self._stop_signal: int | None = None
        self._threads: int | None = None
        self._plan: asyncio.Future[messages.LogsPlanned] | None = None
        self._learned = False

    # -- life ---------------------------------------------------------------------------------------------------------

    async def run(self) -> Result:
        """Run the job to its end. Raises `Refused` before any worker has started."""
        loop = self._loop = asyncio.get_running_loop()
        self._finished: asyncio.Future[jobs.Finish] = loop.create_future()
        self._ready = asyncio.Event()
        self._stdout, self._stderr = Console(1, loop), Console(2, loop)
        self._oom = OomWatch()
        self._listener = socket.socket()
        adopted = linux.adopt_orphans()
        self._take_signals()
        self._env = self._workers_env()
        self._helpers = Zygotes(loop, self._env, self._from_zygote, self._helpers_lost)
        self._helpers.start()  # torch takes longest: it begins to load while the rest is set up
        loop.set_exception_handler(self._broken)
        try:
            await self._set_up()
            finish = await self._finished
            self._close_world()
            await self._helpers.stop()
            return self._conclude(finish)
        finally:
            await self._helpers.stop()
            self._oom.close()
            linux.adopt_orphans(adopted)
            self._release_signals()
            self._listener.close()
            self._stdout.close()
            self._stderr.close()

    def request_stop(self, signum: int = signal.SIGTERM) -> None:
        """End the job as that signal would; may be called from any thread, also before it runs and after it has."""
        self._stop_signal = self._stop_signal or signum
        with contextlib.suppress(AttributeError, RuntimeError):
            self._loop.call_soon_threadsafe(self._on_signal, signum)

    def say(self, *lines: str) -> None:
        """Tell the person at the console."""
        if not self._quiet:
            fresh = "\r\x1b[K" if self._stderr.is_terminal else ""
            self._stderr.write("".join(f"{fresh}holdfast: {line}\n" for line in lines).encode(errors="replace"))

    async def _set_up(self) -> None:
        options = self._options
        self._listener = preflight.listen(options.master_addr, options.master_port)
        run_dir = preflight.open_run_directory(options)
        try:
            await self._begin(options, run_dir)
        except preflight.Refused:
            run_dir.discard_if_temporary()
            raise

    async def _begin(self, options: Options, run_dir: RunDirectory) -> None:
        sinks = [*self._sinks]
        if options.event_handler == "console":
            sinks.append(torchelastic.ConsoleSink(options.run_id, options.role, self._stderr.write))
        self._records = Records(run_dir, sinks, self.say)
        self._events = self._records.events
        self._plumbing = Plumbing(
            self._loop, self._stdout, self._stderr, self.say, options.prefix_template, options.filters
        )
        redirected = (run_dir.path, options.redirects, options.tee, options.local_ranks, self.say)
        self._logs = self._own_logs or TorchrunLogs(*redirected)
        nproc = options.nproc if isinstance(options.nproc, int) else await self._count(options.nproc)
        if options.numa_binding is not None:
            await self._ask("gpu", f"--numa-binding={options.numa_binding}")
        if options.virtual_local_rank:
            preflight.check_gpus(nproc)
        if "OMP_NUM_THREADS" not in os.environ and nproc > 1:
            self.say(f"OMP_NUM_THREADS=1 for each of {nproc} ranks; set it yourself for more")
        self._events.emit(
            "job.started",
            run_id=options.run_id,
            nproc=nproc,
            program=msgspec.to_builtins(options.program),
            pid=os.getpid(),
        )
        self._job, actions = jobs.begin(nproc, options.max_restarts, options.shutdown_timeout_s)
        self._do(actions)
        if self._stop_signal is not None:
            self._advance(jobs.StopRequested(self._stop_signal))

    def _workers_env(self) -> dict[str, str]:
        env = {**os.environ, "HOLDFAST_JOB": uuid.uuid4().hex}
        if "OMP_NUM_THREADS" not in env and self._options.nproc != 1:
            env["OMP_NUM_THREADS"] = "1"
        return env

    async def _count(self, kind: str) -> int:
        count = await self._ask(kind, f"--nproc-per-node={kind}")
        if count == 1 and "OMP_NUM_THREADS" not in os.environ:
            self._threads = len(os.sched_getaffinity(0))
            self._env["OMP_NUM_THREADS"] = str(self._threads)
        return count

    async def _ask(self, kind: str, flag: str) -> int:
        """How many devices there are, once torch is there to tell."""
        self._finished.add_done_callback(lambda _: self._ready.set())
        await self._ready.wait()
        if self._finished.done():
            raise preflight.Refused(self._finished.result().reason)
        return await preflight.count_devices(self._helpers, kind, flag, self._finished)

    def _take_signals(self) -> None:
        if threading.current_thread() is threading.main_thread():
            for signum in self._options.signals:
                if signal.getsignal(signum) is not signal.SIG_IGN:  # nohup wants SIGHUP to go unheard
                    self._loop.add_signal_handler(signum, self._on_signal, signum)

    def _release_signals(self) -> None:
        if threading.current_thread() is threading.main_thread():
            for signum in self._options.signals:
                self._loop.remove_signal_handler(signum)

    def _broken(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """A callback failed. Better to end the job, and say so, than to wait for an event that will not come."""
        failure = context.get("exception")
        if self._finished.done():
            return
        if isinstance(failure, preflight.Refused):
            self._finished.set_result(jobs.Finish(Kind.LAUNCHER, str(failure)))
        else:
            self._finished.set_exception(failure or RuntimeError(context["message"]))

    # -- what happens -------------------------------------------------------------------------------------------------

    def _advance(self, event: jobs.Event) -> None:
        if self._job is not None and not self._finished.done():
            self._job, actions = jobs.advance(self._job, time.monotonic(), event, self._decide)
            self._do(actions)

    def _on_signal(self, signum: int) -> None:
        self._stop_signal = signum
        if self._job is None:
            if not self._finished.done():
                self._finished.set_result(jobs.Finish(Kind.PREEMPTED, f"stopped by {signal_name(signum)}"))
            return
        self._events.emit("job.signalled", signal=signal_name(signum))
        self._advance(jobs.StopRequested(signum))

    def _from_zygote(self, message: messages.FromZygote) -> None:
        match message:
            case messages.Ready():
                self._zygote_ready(message)
            case messages.NotGrown(refused=refused):
                self._events.emit("zygote.not_grown", refused=refused)
            case messages.NotReady(reason=reason):
                if not self._finished.done():
                    self._finished.set_result(jobs.Finish(Kind.LAUNCHER, reason))
            case messages.Forked(token=token, pid=pid):
                if self._world is not None and self._world.forked(token, pid):
                    generation = self._world.world.generation
                    self._events.emit("world.started", generation=generation, pids=self._world.pids())
                    self._advance(jobs.Started(generation))
            case messages.NotForked(token=token, reason=reason) if self._world is not None:
                self._process_ended(self._world, self._world.not_forked(token, reason, time.monotonic()))
            case messages.Exited() if self._world is not None:
                self._process_ended(self._world, self._world.exited(message))
            case messages.LogsPlanned() if self._plan is not None:
                self._plan.set_result(message)

    def _zygote_ready(self, ready: messages.Ready) -> None:
        if self._helpers_ready:
            self._events.emit("zygote.grown", pid=ready.pid, refused=ready.refused)
            self._park()
            return
        self._helpers_ready = True
        self._ready.set()
        self._advance(jobs.HelpersReady())

    def _park(self) -> None:
        """Once all ranks train, have the processes of a next world forked: its ranks, and its store keeper."""
        if self._job is not None and self._job.stepped == frozenset(self._job.ranks):
            self._helpers.request(messages.Park(len(self._job.ranks) + 1))

    def _helpers_lost(self, what: str) -> None:
        self._helpers_ready = False
        if self._job is None and not self._finished.done():
            self._finished.set_result(jobs.Finish(Kind.LAUNCHER, f"{what} before any worker started"))
        self._advance(jobs.HelpersLost(what, self._world.steps() if self._world is not None else None))

    def _process_ended(self, running: RunningWorld, exit: RankExit | None) -> None:
        generation = running.world.generation
        if exit is not None:
            self._events.emit("rank.exited", generation=generation, rank=exit.rank, pid=exit.pid, status=exit.status)
            self._advance(jobs.Exited(generation, exit))
        elif running.keeper_gone:
            self._advance(jobs.KeeperLost(generation))

    def _from_rank(self, report: messages.Report) -> None:
        match report:
            case messages.Stepped(rank=rank, generation=generation, at_s=at_s, modules=modules):
                self._events.emit("rank.first_step", generation=generation, rank=rank)
                self._advance(jobs.Stepped(rank, generation, at_s))
                self._park()
                if modules and not self._learned:
                    self._learned = True
                    names = zlib.decompress(modules).decode().split("\n")
                    self._helpers.learn(tuple(filter(None, names)))
            case messages.Raised(rank=rank, generation=generation, headline=headline):
                self._events.emit("rank.raised", generation=generation, rank=rank, error=headline)

    # -- what is done about it ----------------------------------------------------------------------------------------

    def _do(self, actions: list[jobs.Action]) -> None:
        for action in actions:
            match action:
                case jobs.PrepareHelpers():
                    self._prepare_helpers()
                case jobs.Launch():
                    self._launch(action)
                case jobs.Signal(ranks=ranks, signum=signum, why=why):
                    self._events.emit("ranks.signalled", ranks=ranks, signal=signal_name(signum), why=why)
                    if self._world is not None:
                        self._world.signal(ranks, signum)
                case jobs.Timer(name=name, generation=generation, after_s=after_s):
                    self._loop.call_later(after_s, self._advance, jobs.TimerFired(name, generation))
                case jobs.ClearLeftovers():
                    self._close_world()
                    self._helpers.clear_leftovers()
                case jobs.Opened(incident=incident):
                    self._records.opened(incident)
                case jobs.Closed(incident=incident):
                    self._records.closed(incident)
                case jobs.Finish():
                    if not self._finished.done():
                        self._finished.set_result(action)

    def _prepare_helpers(self) -> None:
        if self._helpers_ready:
            self._advance(jobs.HelpersReady())
        elif not self._helpers.running:
            self._learned = False
            self._helpers.start()

    def _launch(self, launch: jobs.Launch) -> None:
        """Bring up a world. The first one has the socket that was opened to see whether it can be."""
        if launch.generation > 0:
            self._listener = preflight.listen(self._options.master_addr, self._options.master_port)
        options = self._options
        assert self._job is not None
        world = World(
            run_id=options.run_id,
            generation=launch.generation,
            restart_count=launch.restart_count,
            max_restarts=options.max_restarts,
            master_addr=options.master_addr,
            master_port=self._listener.getsockname()[1],
            local_size=len(self._job.ranks),
            role=options.role,
        )
        self._events.emit("world.launched", generation=world.generation, size=world.size, restarts=world.restart_count)
        self._world = RunningWorld(world, self._listener, self._loop, self._helpers, self._oom, self._from_rank)
        if options.logs_plugin is None:
            self._start_ranks(self._world, {r: self._logs.place(world.generation, r) for r in range(world.local_size)})
        else:
            self._planning = self._loop.create_task(self._start_ranks_as_planned(self._world, options.logs_plugin))
            self._planning.add_done_callback(lambda task: task.result())

    def _start_ranks(self, running: RunningWorld, destinations: dict[int, Destination], filtered: str = "") -> None:
        self._destinations = destinations
        folder = filtered or self._records.run_dir.join(f"attempt_{running.world.generation}") or ""
        running.launch(self._options, self._env, destinations, self._plumbing, folder, self._threads)

    async def _start_ranks_as_planned(self, running: RunningWorld, plugin: str) -> None:
        """Ask the user's `torchrun.logs_specs` plug-in, which lives in the zygote since it needs torch."""
        options, ranks = self._options, range(running.world.local_size)
        self._plan = self._loop.create_future()
        self._helpers.request(
            messages.PlanLogs(
                plugin=plugin,
                log_dir=options.log_dir,
                redirects={rank: std_of(options.redirects, rank) for rank in ranks},
                tee={rank: std_of(options.tee, rank) for rank in ranks},
                local_ranks=tuple(options.local_ranks) if options.local_ranks is not None else None,
                envs={rank: worker_env(running.world, rank, self._env) for rank in ranks},
            )
        )
        plan = await self._plan
        self._plan = None
        if plan.error:
            self._finished.set_result(jobs.Finish(Kind.LAUNCHER, f"--logs-specs {plugin}: {plan.error}"))
            return
        self._start_ranks(
            running, {rank: _planned(plan, rank) for rank in ranks}, os.path.dirname(plan.filtered_stdout)
        )

    def _close_world(self) -> None:
        if self._world is not None:
            self._world.close(free_port=bool(self._options.master_port))
            self._plumbing.end_world()
            self._world = None

    # -- the end ------------------------------------------------------------------------------------------------------

    def _conclude(self, finish: jobs.Finish) -> Result:
        """Everything is down: tell how it went."""
        steps = self._job.steps if self._job is not None else 0
        last = self._records.conclude(finish.kind, finish.reason, steps)
        if last is not None:
            error_file.forward(self._error_file_of(last.rank), last.status)
        exits = self._job.exits if self._job is not None else ()
        incidents = tuple(self._records.incidents)
        return Result(finish.kind, finish.reason, incidents, exits, self._records.run_dir.path)

    def _error_file_of(self, rank: int | None) -> str:
        return self._destinations[rank].error_file if rank in self._destinations else ""


def _planned(plan: messages.LogsPlanned, rank: int) -> Destination:
    stdout, stderr = plan.stdouts.get(rank, ""), plan.stderrs.get(rank, "")
    return Destination(
        stdout_file="" if stdout == os.devnull else stdout,
        stderr_file="" if stderr == os.devnull else stderr,
        stdout_console=not stdout or rank in plan.tee_stdouts,
        stderr_console=not stderr or rank in plan.tee_stderrs,
        prefixed=rank in plan.tee_stdouts or rank in plan.tee_stderrs,
        error_file=plan.error_files.get(rank, ""),
    )
