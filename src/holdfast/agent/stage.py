"""Where worlds run on this node, one after the other: each with ranks, streams, beacons and a store of its own."""

from __future__ import annotations

import asyncio
import itertools
import signal
import socket
from collections.abc import Callable, Mapping

from holdfast import linux
from holdfast.agent import preflight
from holdfast.agent.log_plugins import LogPlanner
from holdfast.agent.logs import Destination, Logs, Plumbing
from holdfast.agent.memory import OomWatch
from holdfast.agent.monitors import Monitors
from holdfast.agent.options import Options
from holdfast.agent.records import Records
from holdfast.agent.standby import Standbys
from holdfast.agent.stores import Stores
from holdfast.agent.will import Will
from holdfast.agent.world import RunningWorld, Stayer
from holdfast.agent.zygotes import Zygotes
from holdfast.control.worlds import World
from holdfast.observe.record import WorldLaunched
from holdfast.wire import messages
from holdfast.wire.snapshots import DOORBELL, RESUME, STANDBY, STAYED, WILL


class Stage:
    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        options: Options,
        helpers: Zygotes,
        planner: LogPlanner,
        env: Mapping[str, str],
        threads: int | None,
        records: Records,
        plumbing: Plumbing,
        logs: Logs,
        monitors: Monitors,
        listener: socket.socket | None,
        on_report: Callable[[messages.Report | None], None],
        on_dying: Callable[[RunningWorld, messages.Exited], None],
        on_refused: Callable[[str], None],
        on_up: Callable[[RunningWorld], None],
        on_standby: Callable[[int], None],
        complain: Callable[[str], None],
    ) -> None:
        self._loop = loop
        self._options = options
        self._helpers = helpers
        self._planner = planner
        self._env = env
        self._threads = threads
        self._records = records
        self._plumbing = plumbing
        self._logs = logs
        self._monitors = monitors
        self._on_report = on_report
        self._on_dying = on_dying
        self._on_refused = on_refused
        self._on_up = on_up  # where nobody had to be forked
        self._oom = OomWatch()
        self._lease_until_s = 0.0
        self._destinations: dict[int, Destination] = {}
        self._stayers: dict[int, Stayer] = {}  # by local rank
        tokens = itertools.count(-1, -1)
        self._stores = Stores(loop, helpers, tokens, options.master_port, listener)
        self._standbys = Standbys(
            loop, options, helpers, env, plumbing, tokens, records.events.emit, on_standby, complain
        )
        self.world: RunningWorld | None = None
        self._beside = False  # new ranks need not wait for those that die
        self._gpus: dict[tuple[int, int], int] = {}
        self._will = Will()
        self.dying: dict[int, tuple[int, int]] = {}  # by pid: generation and rank of those that have ended

    def run(self, world: World, learned: str, outdated: bool = False) -> None:
        """Start the ranks of a world, with the timeouts that earlier ones have agreed on."""
        self.clear()
        if outdated:
            self._will.forget()
        for local_rank, stayer in list(self._stayers.items()):
            if outdated or stayer.only not in (None, (world.first_rank + local_rank, world.size)):
                linux.signal_session(stayer.pid, signal.SIGKILL)
                # Who takes its place waits for its end, as for that of one that has failed.
                self.dying[stayer.pid] = (world.generation - 1, world.first_rank + local_rank)
                self._stayers.pop(local_rank).close()
        for local_rank in range(world.local_size) if world.stayed else ():
            if local_rank not in self._stayers and (standby := self._standbys.take(local_rank)) is not None:
                self._stayers[local_rank] = standby
        self._records.events.emit(
            WorldLaunched(
                generation=world.generation,
                size=world.size,
                restarts=world.restart_count,
                first_rank=world.first_rank,
                group_rank=world.group_rank,
                group_size=world.group_size,
                master=f"{world.master_addr}:{world.master_port}",
                local_size=world.local_size,
                stayed=tuple(world.first_rank + local_rank for local_rank in sorted(self._stayers)),
            )
        )
        keeps = world.group_rank == 0
        self.world = running = RunningWorld(
            world,
            (lambda: self._stores.keep(world.master_addr, world.master_port)) if keeps else None,
            self._loop,
            self._helpers,
            self._oom,
            self._on_report,
            self._on_dying,
            self._lease_until_s,
            self._options.ranks_config(learned),
            self._stayers,
        )
        self._stayers = {}
        if keeps and (keeper := self._stores.take()) is not None:
            running.kept(keeper)
        self._monitors.begin(running)
        if self._options.logs_plugin is None:
            self._start_ranks(running, {r: self._logs.place(world.generation, r) for r in range(world.local_size)})
        else:
            self._planning = self._loop.create_task(self._start_ranks_as_planned(running))
            self._planning.add_done_callback(lambda task: task.result())

    def _start_ranks(self, running: RunningWorld, destinations: dict[int, Destination], filtered: str = "") -> None:
        self._destinations = destinations
        folder = filtered or self._records.run_dir.join(f"attempt_{running.world.generation}") or ""
        running.launch(
            self._options, self._env, destinations, self._plumbing, folder, self._threads,
            self._own_env(running.world), () if self._beside else tuple(self.dying),
            self._gpus if running.world.stayed else {},
        )  # fmt: skip
        if running.is_up():
            self._loop.call_soon(self._on_up, running)

    def _own_env(self, world: World) -> dict[str, str]:
        """What ranks get from us beside torchrun's variables, whatever this agent was started with."""
        # Only the first world begins where the user says; the next ones go on from there.
        resume = self._options.resume if world.ordinal == 0 else ""
        stayed = "1" if world.stayed else ""
        return {DOORBELL: self._monitors.doorbell, RESUME: resume, STAYED: stayed, STANDBY: "", WILL: self._will.path}

    def keep_will(self, rank: int, fd: int, step: int) -> None:
        """For the next world."""
        if self.world is not None and (pid := self.world.pids().get(rank)) is not None:
            self._will.keep(pid, fd, self.world.world.generation, step)

    async def _start_ranks_as_planned(self, running: RunningWorld) -> None:
        try:
            plan = await self._planner.plan(running.world, self._env)
        except preflight.Refused as refusal:
            self._on_refused(str(refusal))
            return
        self._start_ranks(running, plan.destinations, plan.filtered_dir)

    def lease(self, until_s: float) -> None:
        """Ranks of this world and the next ones may step until then."""
        self._lease_until_s = until_s
        if self.world is not None:
            self.world.lease(until_s)

    def store_port(self, addr: str) -> int:
        return self._stores.port(addr)

    def prepare_store(self, addr: str) -> None:
        """The ranks train: there is time for it."""
        self._stores.prepare(addr)

    def error_file_of(self, rank: int | None, first_rank: int) -> str:
        """Where a rank of the last world left its error, if it was one of this node's."""
        found = self._destinations.get(rank - first_rank) if rank is not None else None
        return found.error_file if found is not None else ""

    def clear(self) -> None:
        """The world's ranks are gone; so goes the rest of it."""
        if self.world is not None:
            self._monitors.end()
            self._will.world_over(self.world.world.generation, bool(self.world.steps()))
            self._beside = self.world.beside
            self._gpus |= self.world.gpus
            stayers = self.world.close()
            self._stayers |= stayers
            self._stores.retire(self.world.keeper, bool(stayers))
            self._plumbing.end_world()
            self.world = None

    def stand_by(self) -> None:
        """The ranks train: there is time to start processes that wait, and what the last ones left is not needed."""
        if self.world is None:
            return
        world = self.world.world
        self._will.world_over(world.generation, stepped=True)
        if self._options.standby:
            self._standbys.fill(world, self._threads, self._own_env(world))

    def forked(self, token: int, pid: int) -> None:
        """One that is no rank, or not yet."""
        if self._stores.forked(token, pid) and self.world is not None and self.world.kept(pid):
            self._on_up(self.world)
        self._standbys.forked(token, pid)

    def not_forked(self, token: int) -> None:
        if self._stores.not_forked(token) and self.world is not None:
            self.world.lose_keeper()
        self._standbys.not_forked(token)

    def helpers_lost(self) -> None:
        """And all of them."""
        self._stores.clear()
        self._standbys.lost()
        self.dying.clear()  # they are gone, or will be
        if self.world is not None:
            self.world.lose_left()
        for stayer in self._stayers.values():
            stayer.close()
        self._stayers.clear()

    def exited(self, pid: int) -> bool:
        """Perhaps one that waited for a place; whether one like it is to be started."""
        self._stores.exited(pid)
        missing = self._standbys.exited(pid)
        for local_rank, stayer in list(self._stayers.items()):
            if stayer.pid == pid:
                self._stayers.pop(local_rank).close()
        return missing

    def close(self) -> None:
        self._oom.close()
        self._will.forget()
        self._standbys.clear()
        self._stores.close()
        for stayer in self._stayers.values():
            stayer.close()
