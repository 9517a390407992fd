"""The agent: the shell around `control.node`. What happens on this node becomes events; actions become effects."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import time
import uuid
import zlib
from collections import deque
from collections.abc import Coroutine
from typing import Any, TypeVar

import msgspec

from holdfast import linux
from holdfast._version import __version__
from holdfast.agent import joining, preflight
from holdfast.agent.console import Console
from holdfast.agent.forwarding import Forwarder
from holdfast.agent.link import Link
from holdfast.agent.log_plugins import LogPlanner
from holdfast.agent.logs import Logs, Plumbing, TorchrunLogs
from holdfast.agent.monitors import Monitors
from holdfast.agent.options import Options
from holdfast.agent.page import Page
from holdfast.agent.records import Records
from holdfast.agent.result import Result
from holdfast.agent.rundir import RunDirectory
from holdfast.agent.stage import Stage
from holdfast.agent.stops import Stops
from holdfast.agent.vault import Vault
from holdfast.agent.world import RunningWorld
from holdfast.agent.zygotes import Zygotes
from holdfast.control import acts, protocol, restarts, stragglers
from holdfast.control import node as nodes
from holdfast.control.causes import Kind, RankExit, signal_name
from holdfast.control.stragglers import Found
from holdfast.observe import error_file, record, torchelastic
from holdfast.observe.events import Sink
from holdfast.wire import messages
from holdfast.worker import saying

# What the agents alone need to know.
SECRETS = ("HOLDFAST_SECRET", "HOLDFAST_ETCD_PASSWORD")

T = TypeVar("T")


class Agent:
    """Runs one job on one node, once. Signals are handled only if it runs in the main thread."""

    def __init__(
        self,
        options: Options,
        logs: Logs | None = None,
        decide: restarts.Decide | None = None,
        sinks: tuple[Sink, ...] = (),
    ) -> None:
        self._options = options
        self._own_logs = logs
        default = restarts.decide if options.retry_same_error else restarts.decide_unless_same_error
        self._decide = decide or default
        self._sinks = sinks
        self._quiet = options.quiet
        self._id = uuid.uuid4().hex
        self._node: nodes.Node | None = None
        self._link: Link | None = None
        self._inbox: deque[acts.Event] = deque()
        self._acting = False
        self._stage: Stage | None = None
        self._vault: Vault | None = None
        self._helpers_ready = False
        self._stops = Stops(options.signals)
        self._threads: int | None = None
        self._learned = False
        self._at_end = contextlib.ExitStack()

    # -- life ---------------------------------------------------------------------------------------------------------

    async def run(self) -> Result:
        """Run the job to its end. Raises `Refused` before any worker has started."""
        loop = self._loop = asyncio.get_running_loop()
        self._finished: asyncio.Future[acts.Finish] = loop.create_future()
        self._ready = asyncio.Event()
        self._stdout, self._stderr = Console(1, loop), Console(2, loop)
        adopted = linux.adopt_orphans()
        self._stops.listen(loop, self._told_to_stop)
        self._env = self._workers_env()
        self._helpers = Zygotes(loop, self._env, self._from_zygote, self._helpers_lost)
        self._planner = LogPlanner(self._options, self._helpers)
        self._helpers.start()  # torch takes longest: it begins to load while the rest is set up
        loop.set_exception_handler(self._broken)
        try:
            await self._set_up()
            finish = await self._finished
            if self._stage is not None:
                self._stage.clear()
            await self._helpers.stop()
            if self._vault is not None:
                await self._vault.finish()
            if self._link is not None:
                await self._link.close()
            return self._conclude(finish)
        finally:
            await self._helpers.stop()
            if self._link is not None:
                await self._link.close()
            self._at_end.close()
            linux.adopt_orphans(adopted)
            self._stops.close()
            self._stdout.close()
            self._stderr.close()

    def request_stop(self, signum: int = signal.SIGTERM) -> None:
        """End the job as that signal would; may be called from any thread, also before it runs and after it has."""
        self._stops.request(signum)

    def say(self, *lines: str) -> None:
        """Tell the person at the console."""
        if not self._quiet:
            self.complain(*lines)

    def complain(self, *lines: str) -> None:
        """Of what goes wrong, also where nothing else is told. Why the job fails is not said here: its result tells."""
        fresh = "\r\x1b[K" if self._stderr.is_terminal else ""
        self._stderr.write("".join(f"{fresh}holdfast: {line}\n" for line in lines).encode(errors="replace"))

    async def _set_up(self) -> None:
        options = self._options
        listener = preflight.listen(options.master_addr, options.master_port) if options.cluster is None else None
        self._at_end.callback(lambda: listener.close() if listener is not None else None)
        run_dir = preflight.open_run_directory(options)
        try:
            await self._begin(options, run_dir, listener)
        except preflight.Refused:
            if self._finished.done():
                return  # how it ended is known: it was told to stop, say, and what was asked for may well be had
            run_dir.discard_if_temporary()
            raise

    async def _begin(self, options: Options, run_dir: RunDirectory, listener: socket.socket | None) -> None:
        sinks = [*self._sinks]
        if options.event_handler == "console":
            sinks.append(torchelastic.ConsoleSink(options.settings.run_id, options.role, self._stderr.write))
        own = f"{joining.host(options)}:{os.getpid()}"
        self._records = Records(run_dir, sinks, self.say, self.complain, own, self._loop.call_soon)
        self._events = self._records.events
        plumbing = Plumbing(
            self._loop, self._stdout, self._stderr, self.complain, options.prefix_template, options.filters
        )
        redirected = (run_dir.path, options.redirects, options.tee, options.local_ranks, self.complain)
        logs = self._own_logs or TorchrunLogs(*redirected)
        nproc = options.nproc if isinstance(options.nproc, int) else await self._count(options.nproc)
        if options.numa_binding is not None:
            await self._ask("gpu", f"--numa-binding={options.numa_binding}")
        if options.virtual_local_rank:
            preflight.check_gpus(nproc)
        if "OMP_NUM_THREADS" not in os.environ and nproc > 1:
            self.say(f"OMP_NUM_THREADS=1 for each of {nproc} ranks; set it yourself for more")
        self._tell_start(nproc)
        if self._stderr.is_terminal:
            pid = os.getpid()
            self.say(f"next: holdfast status {pid}; holdfast top {pid}; holdfast stacks {pid}")
        if options.preflight and not await self._is_fit(run_dir):
            return
        if options.spot is not None:
            self._stops.heed(options.spot, self.complain)
        grace_s = options.shutdown_timeout_s
        vault = self._vault = Vault(self._loop, self._env, nproc, grace_s, self._events, self.say, self.complain)
        self._at_end.callback(vault.close)
        self._monitors = Monitors(self._loop, options, self._records, self._advance, self.complain, nproc, vault)
        self._at_end.callback(self._monitors.close)
        self._stage = Stage(
            self._loop, options, self._helpers, self._planner, self._env, self._threads, self._records, plumbing, logs,
            self._monitors, listener, self._from_rank, self._dying, self._refuse, self._started,
            lambda ready: self._advance(acts.StandsBy(ready)), self.complain,
        )  # fmt: skip
        self._at_end.callback(self._stage.close)
        self._page = Page(self._loop, options.dashboard, run_dir.path, self.complain)
        self._at_end.callback(self._page.close)
        self._forwarder = Forwarder(self._loop, self._events, lambda message: link.tell(message))
        self._node = joining.make_node(options, self._id, nproc)
        self._link = link = joining.make_link(
            options, self._id, self._decide, self._heard, self.say, run_dir, self._records.merge
        )
        for action in self._node.begin():
            self._do(action)
        link.start()
        if self._stops.asked is not None:
            self._advance(acts.StopRequested(self._stops.asked))

    def _tell_start(self, nproc: int) -> None:
        options, settings = self._options, self._options.settings
        self._events.emit(
            record.JobStarted(
                run_id=settings.run_id,
                node=self._id,
                nproc=nproc,
                program=msgspec.to_builtins(options.program),
                pid=os.getpid(),
                host=joining.host(options),
                clock_s=self._events.start_s,
                version=__version__,
                max_restarts=settings.max_restarts,
                nodes=(settings.min_nodes, settings.max_nodes),
            )
        )

    async def _is_fit(self, run_dir: RunDirectory) -> bool:
        """Whether this node may take part, by `holdfast doctor`. One that is told to stop does not wait for it."""
        from holdfast.agent import fitness

        looked = await self._unless_finished(fitness.examine(self._options, run_dir.path, self._env))
        if looked is None:
            return False
        found, why = looked
        line = self._records.examined(found)
        self.say(*(f"this node is fit, but {warning}" for warning in found.warned if found.fit))
        if not found.fit:
            await self._unless_finished(fitness.tell(self._options, line, self._events))
            self._refuse(f"this node is not fit: {why}", elsewhere=True)
        return found.fit

    async def _unless_finished(self, work: Coroutine[Any, Any, T]) -> T | None:
        """What comes of it; None where the end comes first."""
        task = asyncio.ensure_future(work)
        both: list[asyncio.Future[Any]] = [task, self._finished]
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        return None

    @property
    def _world(self) -> RunningWorld | None:
        return self._stage.world if self._stage is not None else None

    def _refuse(self, reason: str, elsewhere: bool = False) -> None:
        if not self._finished.done():
            self._finished.set_result(acts.Finish(Kind.LAUNCHER, reason, elsewhere=elsewhere))

    def _workers_env(self) -> dict[str, str]:
        env = {name: value for name, value in os.environ.items() if name not in SECRETS}
        env["HOLDFAST_JOB"] = uuid.uuid4().hex
        if "OMP_NUM_THREADS" not in env and self._options.nproc != 1:
            env["OMP_NUM_THREADS"] = "1"
        if self._quiet:
            env[saying.QUIET] = "1"
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

    def _broken(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """A callback failed. Better to end the job, and say so, than to wait for an event that will not come."""
        failure = context.get("exception")
        if self._finished.done():
            return
        if isinstance(failure, preflight.Refused):
            self._refuse(str(failure))
        else:
            self._finished.set_exception(failure or RuntimeError(context["message"]))

    # -- what happens -------------------------------------------------------------------------------------------------

    def _advance(self, event: acts.Event) -> None:
        """One event after the other: what an action brings about, the coordinator's answer say, comes after it."""
        self._inbox.append(event)
        if self._acting or self._node is None:
            return
        self._acting = True
        try:
            while self._inbox:
                for action in self._node.handle(time.monotonic(), self._inbox.popleft()):
                    self._do(action)
        finally:
            self._acting = False

    def _heard(self, event: acts.Event) -> None:
        """From the line to the coordinator."""
        self._advance(event)
        if isinstance(event, protocol.Welcome):
            if self._link is not None and self._link.hosts:  # whose record is this node's own
                self._page.start()
            else:
                self._forwarder.begin(event.recorded)
        elif isinstance(event, acts.ContactLost):
            self._forwarder.end()
            self._page.stop()

    def _told_to_stop(self, signum: int, notice: str) -> None:
        if notice:
            self.say(f"{notice}: it leaves the job, as by SIGTERM")
        if self._node is None:
            if not self._finished.done():
                self._finished.set_result(acts.Finish(Kind.PREEMPTED, f"stopped by {signal_name(signum)}"))
            return
        self._events.emit(record.JobSignalled(signal_name(signum), notice))
        self._advance(acts.StopRequested(signum))

    def _from_zygote(self, message: messages.FromZygote) -> None:
        match message:
            case messages.Ready():
                self._zygote_ready(message)
            case messages.NotGrown(refused=refused):
                self._events.emit(record.ZygoteNotGrown(refused))
            case messages.NotReady(reason=reason):
                self._refuse(reason)
            case messages.Forked(token=token, pid=pid) if token < 0 and self._stage is not None:
                self._stage.forked(token, pid)
            case messages.NotForked(token=token) if token < 0 and self._stage is not None:
                self._stage.not_forked(token)
                if self._world is not None:
                    self._process_ended(self._world, None)
            case messages.Forked(token=token, pid=pid):
                if self._world is not None and self._world.forked(token, pid):
                    self._started(self._world)
            case messages.NotForked(token=token, reason=reason) if self._world is not None:
                self._process_ended(self._world, self._world.not_forked(token, reason, time.monotonic()))
            case messages.Exited(pid=pid) if self._stage is not None and pid in self._stage.dying:
                self._advance(acts.Gone(*self._stage.dying.pop(pid)))
            case messages.Exited(pid=pid) if self._world is not None and self._world.has(pid):
                self._process_ended(self._world, self._world.exited(message))
            case messages.Exited(pid=pid) if self._stage is not None:
                if self._stage.exited(pid):
                    self._park()
            case messages.LogsPlanned():
                self._planner.answered(message)

    def _started(self, running: RunningWorld) -> None:
        """All its ranks have a process."""
        generation = running.world.generation
        self._events.emit(record.WorldStarted(generation, running.pids()))
        self._advance(acts.Started(generation))

    def _zygote_ready(self, ready: messages.Ready) -> None:
        if self._helpers_ready:
            self._events.emit(record.ZygoteGrown(ready.pid, ready.refused))
            self._park()
            return
        self._helpers_ready = True
        self._ready.set()
        self._advance(acts.HelpersReady())
        if self._options.cluster is not None:
            self._helpers.request(messages.Park(self._node.hello.local_size + 1 if self._node is not None else 0))

    def _park(self) -> None:
        """While all ranks train, have the processes of a next world forked: its ranks, and its store keeper. That one
        gets to work at once, but as a child of the zygote that stays."""
        if self._node is not None and self._node.trains:
            if self._vault is not None:
                self._vault.proceed()
            if self._learned and not self._helpers.grows and self._stage is not None and self._link is not None:
                self._stage.prepare_store(self._link.addr)
            self._helpers.request(messages.Park(self._node.hello.local_size + 1, self._options.program))
            if self._stage is not None:
                self._stage.stand_by()

    def _helpers_lost(self, what: str) -> None:
        self._helpers_ready = False
        if self._stage is not None:
            self._stage.helpers_lost()
        if self._node is None:
            self._refuse(f"{what} before any worker started", elsewhere=True)
        self._advance(acts.HelpersLost(what, self._world.steps() if self._world is not None else None))

    def _process_ended(self, running: RunningWorld, exit: RankExit | None, gone: bool = True) -> None:
        generation = running.world.generation
        if exit is not None:
            assert self._stage is not None
            if not gone:
                self._stage.dying[exit.pid] = (generation, exit.rank)
            self._events.emit(record.RankExited(generation, exit.rank, exit.pid, exit.status))
            self._monitors.exited(exit.rank)
            self._advance(acts.Exited(generation, exit, gone))
        elif running.keeper_gone:
            self._advance(acts.KeeperLost(generation))

    def _dying(self, running: RunningWorld, message: messages.Exited) -> None:
        """Of a rank, before its process is gone."""
        if running is self._world and running.is_there(message.pid):
            self._process_ended(running, running.exited(message), gone=False)

    def _from_rank(self, report: messages.Report | None) -> None:
        match report:
            case messages.Stepped(rank=rank, generation=generation, at_s=at_s, modules=modules):
                self._events.emit(record.RankFirstStep(generation, rank))
                self._advance(acts.Stepped(rank, generation, at_s))
                self._watch(rank)
                if modules and not self._learned:
                    self._learned = True
                    names = zlib.decompress(modules).decode().split("\n")
                    self._helpers.learn(tuple(filter(None, names)))
                self._park()
            case messages.Stays(rank=rank, generation=generation, stays=stays, why=why, as_it_is=as_it_is):
                self._advance(acts.Stays(generation, rank, stays, why, as_it_is))
                self._watch(rank)
            case messages.Stumbled(rank=rank, generation=generation, at_s=at_s, headline=headline):
                self._advance(acts.Stumbled(generation, rank, at_s, headline))
            case messages.Left(rank=rank, generation=generation):
                if self._world is not None and self._world.world.generation == generation:
                    self._monitors.exited(rank)
                    self._advance(acts.Left(generation, rank, *self._world.left(rank)))
            case messages.Bequeathed(rank=rank, generation=generation, fd=fd, step=step):
                if self._stage is not None and fd != messages.NO_FILE:
                    self._stage.keep_will(rank, fd, step)
                self._advance(acts.Bequeathed(generation, rank, left=fd != messages.NO_FILE))
            case messages.Raised(rank=rank, generation=generation, headline=headline):
                self._events.emit(record.RankRaised(generation, rank, headline))
            case messages.Trained(step=step, epoch=epoch, loss=loss, samples_per_s=pace, left=left):
                self._events.emit(record.Trained(step, epoch, loss, float(f"{pace:.4g}"), left))
            case messages.Restored(rank=rank, generation=generation, step=step, seconds=seconds, source=source):
                self._events.emit(record.CheckpointRestored(generation, rank, step, round(seconds, 4), source))
            case messages.Leaving():
                pass  # its world keeps that, until it is gone
            case _:
                self._monitors.reported(report)

    def _watch(self, rank: int) -> None:
        if self._world is not None:
            self._world.watch(rank)

    # -- what is done about it ----------------------------------------------------------------------------------------

    def _do(self, action: acts.Action) -> None:
        assert self._stage is not None and self._vault is not None
        match action:
            case acts.PrepareHelpers():
                self._prepare_helpers()
            case acts.Run(world=world, learned=learned, outdated=outdated):
                self._stage.run(world, learned, outdated)
            case acts.Leave(ranks=ranks, why=why, boundary=boundary):
                self._events.emit(record.RanksLeave(ranks, why, boundary))
                if self._world is not None:
                    self._world.leave(ranks, why, boundary)
            case acts.DumpStacks():
                self._monitors.dump(action)
            case acts.Agree(heard=heard):
                self._monitors.agree(heard)
            case acts.Shown(shown=shown):
                self._monitors.shown(shown)
            case acts.Signal(ranks=ranks, signum=signum, why=why, drain=drain):
                self._events.emit(record.RanksSignalled(ranks, signal_name(signum), why, drain))
                if self._world is not None:
                    self._world.signal(ranks, signum, drain)
            case acts.Timer(name=name, key=key, after_s=after_s):
                self._loop.call_later(after_s, self._advance, acts.TimerFired(name, key))
            case acts.ClearLeftovers():
                self._vault.persist(waits=self._world is not None and self._world.goes_on)
                self._stage.clear()
                self._helpers.clear_leftovers(self._stage.dying)
            case acts.Tell(message=message):
                self._tell(message)
            case acts.Lease(until_s=until_s):
                self._stage.lease(until_s)
            case acts.HangUp(why=why):
                self._events.emit(record.CoordinatorGivenUp(why))
                if self._link is not None:
                    self._link.hang_up(why)
            case acts.Told(text=text):
                self._events.emit(record.CoordinatorSaid(text))
                self.say(text)
            case acts.Straggles(generation=generation, found=found):
                self._straggles(generation, found)
            case acts.Opened(incident=incident):
                self._records.opened(incident)
            case acts.Closed(incident=incident):
                self._records.closed(incident)
            case acts.Finish():
                if not self._finished.done():
                    self._finished.set_result(action)

    def _straggles(self, generation: int, found: Found) -> None:
        if found.gone:
            self._events.emit(record.StragglerGone(generation, found.rank))
            self.say(f"rank {found.rank} is as fast as the others again")
            return
        noted = record.StragglerFound(
            generation, found.rank, found.own_s, found.usual_s, round(found.score, 2), stragglers.WINDOWS, found.by
        )
        self._events.emit(noted)
        self.say(f"rank {found.rank} {found.headline}")

    def _tell(self, message: protocol.ToCoordinator) -> None:
        """Fill in what only the shell knows, and send."""
        assert self._link is not None and self._stage is not None
        addr = self._link.addr
        match message:
            case protocol.Hello():
                if self._options.cluster is not None:
                    self._events.emit(record.NodeHello(self._link.addr, message.generation))
                message = msgspec.structs.replace(
                    message, addr=self._link.addr, store_port=self._stage.store_port(addr)
                )
            case protocol.Down() | protocol.Ready():
                message = msgspec.structs.replace(message, store_port=self._stage.store_port(addr))
            case protocol.Beat():
                running = self._world  # which may be the last one still, while the node speaks of the next
                same = running is not None and running.world.generation == message.generation
                steps = running.steps() if running is not None and same else None
                message = msgspec.structs.replace(message, steps=steps if steps is not None else -1)
                message = self._monitors.filled(message)
        self._link.tell(message)

    def _prepare_helpers(self) -> None:
        if self._helpers_ready:
            self._advance(acts.HelpersReady())
        elif not self._helpers.running:
            self._learned = False
            self._helpers.start()

    # -- the end ------------------------------------------------------------------------------------------------------

    def _conclude(self, finish: acts.Finish) -> Result:
        """Everything is down: tell how it went."""
        steps = self._node.steps if self._node is not None else 0
        last = self._records.conclude(finish.kind, finish.reason, steps)
        if last is not None and self._stage is not None:
            world = self._node.world if self._node is not None else None
            path = self._stage.error_file_of(last.rank, world.first_rank if world is not None else 0)
            error_file.forward(path, last.status)
        exits = self._node.exits if self._node is not None else ()
        incidents = tuple(self._records.incidents)
        run_dir = self._records.run_dir.path
        return Result(finish.kind, finish.reason, incidents, exits, run_dir, finish.drained, finish.elsewhere)
