"""Processes that wait to be ranks: each has run the program up to where it would go on from a state, in a world that is
none. One of them takes the place of a rank that dies without having to start."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable, Iterator, Mapping

import msgspec

from holdfast.agent import pages
from holdfast.agent.logs import Destination, Plumbing
from holdfast.agent.options import Options
from holdfast.agent.world import MAX_REPORT_BYTES, Stayer, program_name, substitute
from holdfast.agent.zygotes import Zygotes
from holdfast.control.worlds import World, one_gpu_env, worker_env
from holdfast.observe import record
from holdfast.wire import channel, messages
from holdfast.wire.snapshots import STANDBY

REPLACED = 3  # in one world; what ends one after the other is short of something, and the ranks need it more


class _Standby:
    """One of them, and what is its own until it is a rank."""

    def __init__(self, local_rank: int, stayer: Stayer, reports: socket.socket, fds: list[int]) -> None:
        self.local_rank = local_rank
        self.stayer = stayer
        self.reports = reports
        self.fds = fds
        self.ready: messages.StandsBy | None = None

    def close(self, loop: asyncio.AbstractEventLoop) -> None:
        loop.remove_reader(self.reports.fileno())
        self.reports.close()
        channel.close_all(self.fds)


class Standbys:
    """Kept over worlds. As many as were asked for, once the ranks of a world train."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        options: Options,
        helpers: Zygotes,
        env: Mapping[str, str],
        plumbing: Plumbing,
        tokens: Iterator[int],
        emit: Callable[[record.Happened], object],
        on_change: Callable[[int], None],
        complain: Callable[[str], None],
    ) -> None:
        self._loop, self._options, self._helpers, self._env = loop, options, helpers, env
        self._plumbing, self._emit, self._on_change, self._complain = plumbing, emit, on_change, complain
        self._tokens = tokens
        self._all: dict[int, _Standby] = {}  # by token
        self._gave_up = False
        self._filled, self._replaced = -1, 0  # the last world, and how many have ended in it
        self._decoder: msgspec.msgpack.Decoder[messages.Report] = msgspec.msgpack.Decoder(messages.Report)

    def fill(self, world: World, threads: int | None, more_env: Mapping[str, str]) -> None:
        """Start those that are missing. One for each of the first local ranks: a GPU is chosen by that."""
        if world.generation != self._filled:
            self._filled, self._replaced = world.generation, 0
        have = {standby.local_rank for standby in self._all.values()}
        for local_rank in range(min(self._options.standby, world.local_size)):
            if local_rank not in have and not self._gave_up:
                self._start(local_rank, world, threads, more_env)

    def _start(self, local_rank: int, world: World, threads: int | None, more_env: Mapping[str, str]) -> None:
        token = next(self._tokens)
        env = worker_env(world, local_rank, self._env)
        if self._options.virtual_local_rank:
            env |= one_gpu_env(local_rank, self._env)
        # A rank that there is not, so that nobody takes it for the one that writes files for all.
        env |= {**more_env, STANDBY: "1", "RANK": str(world.size), "WORLD_SIZE": str(world.size + 1)}
        output = self._plumbing.open(
            Destination(stdout_console=False, stderr_console=False), world.role, world.size, local_rank, ""
        )
        beacon_fd, _ = pages.make(1, self._options.ranks_config(""))
        reports, report_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        reports.setblocking(False)
        asked, asked_end = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        ours, theirs = channel.pair()
        seat: channel.Channel[messages.Report] = channel.Channel(ours, messages.Report)
        seat.setblocking(False)
        program = substitute(self._options.program, local_rank)
        ends = output.descriptors()
        self._helpers.request(
            messages.ForkWorker(
                token=token,
                program=program,
                rank=world.size,
                world_size=world.size + 1,
                generation=world.generation,
                slot=0,
                env=env,
                stdio=tuple(ends),
                title=f"{program_name(program)} [holdfast standby {local_rank}]",
                threads=threads,
                numa=self._options.numa_binding,
            ),
            [report_end.fileno(), beacon_fd, asked_end, theirs.fileno(), *ends.values()],
        )
        channel.close_all([asked_end, beacon_fd])
        report_end.close()
        theirs.close()
        output.start()
        self._all[token] = _Standby(local_rank, Stayer(0, seat, output), reports, [asked])
        self._loop.add_reader(reports.fileno(), self._hear, token)

    # -- what happens to them -----------------------------------------------------------------------------------------

    def forked(self, token: int, pid: int) -> None:
        if (standby := self._all.get(token)) is not None:
            standby.stayer = standby.stayer._replace(pid=pid)

    def not_forked(self, token: int) -> None:
        if (standby := self._all.pop(token, None)) is not None:
            standby.close(self._loop)
            standby.stayer.close()

    def exited(self, pid: int) -> bool:
        """Whether another one is to be started in the place of one that was ready."""
        for token, standby in list(self._all.items()):
            if standby.stayer.pid == pid:
                tail = standby.stayer.output.tail
                standby.stayer.output.drain()
                last = tail.text()[-1:]
                if standby.ready is None and not self._gave_up:
                    # It would do so again.
                    self._gave_up = True
                    self._complain(
                        "no process stands by from now on: one ended before it was ready: "
                        f"{' '.join(last) or 'it said nothing'}"
                    )
                self._emit(record.StandbyEnded(standby.local_rank, pid, last))
                self.not_forked(token)
                self._on_change(self.ready)
                self._replaced += 1
                return standby.ready is not None and self._replaced <= REPLACED
        return False

    def _hear(self, token: int) -> None:
        standby = self._all[token]
        with contextlib.suppress(BlockingIOError, OSError, msgspec.MsgspecError):
            report = self._decoder.decode(standby.reports.recv(MAX_REPORT_BYTES))
            if isinstance(report, messages.StandsBy):
                standby.ready = report
                noted = record.StandbyReady(standby.local_rank, standby.stayer.pid, report.host_bytes, report.gpu_bytes)
                self._emit(noted)
                self._on_change(self.ready)

    # -- what they are for --------------------------------------------------------------------------------------------

    @property
    def ready(self) -> int:
        return sum(standby.ready is not None for standby in self._all.values())

    def take(self, local_rank: int) -> Stayer | None:
        """One that can be that rank: a process that has a GPU can be no other's than that GPU's."""
        able = [
            (token, standby)
            for token, standby in self._all.items()
            if standby.ready is not None
            and standby.stayer.pid
            and (standby.local_rank == local_rank or not standby.ready.gpu_bytes)
        ]
        if not able:
            return None
        token, standby = min(able, key=lambda each: each[1].local_rank != local_rank)
        del self._all[token]
        standby.close(self._loop)
        return standby.stayer

    def lost(self) -> None:
        """All of them, with their zygote."""
        for standby in self._all.values():
            if standby.ready is not None:
                self._emit(record.StandbyEnded(standby.local_rank, standby.stayer.pid))
        self.clear()

    def clear(self) -> None:
        """They are gone, with their zygote, or will be."""
        for token in list(self._all):
            self.not_forked(token)
