"""The effects of one world: its store, its ranks' processes, their streams, beacons and reports."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import msgspec

from holdfast import linux
from holdfast.agent import dumps, pages
from holdfast.agent.logs import Destination, Plumbing, RankOutput
from holdfast.agent.memory import OomWatch
from holdfast.agent.options import Options
from holdfast.agent.zygotes import Zygotes
from holdfast.control.causes import RankExit
from holdfast.control.worlds import World, one_gpu_env, worker_env
from holdfast.lifeline import Lifeline, look_at
from holdfast.wire import channel, messages

MAX_REPORT_BYTES = 200 * 1024


def _queue_length() -> int:
    """How many reports fit into the socket before its writers have to wait."""
    try:
        return int(linux.read("/proc/sys/net/unix/max_dgram_qlen"))
    except (OSError, ValueError):
        return 1


QUEUE_LENGTH = _queue_length()


class Stayer(NamedTuple):
    """A process that has left its world, and waits to be a rank of the next one."""

    pid: int
    seat: channel.Channel[messages.Report]
    output: RankOutput  # its streams, until it has others
    only: tuple[int, int] | None = None  # the rank, and the size of a world, that it can have; None: any

    def close(self) -> None:
        self.seat.close()
        self.output.close()


class RunningWorld:
    """Owns everything that ends with its world."""

    def __init__(
        self,
        world: World,
        keep_store: Callable[[], None] | None,  # None: another node does that
        loop: asyncio.AbstractEventLoop,
        helpers: Zygotes,
        oom: OomWatch,
        on_report: Callable[[messages.Report | None], None],  # None: a poke may have found no room
        on_dying: Callable[[RunningWorld, messages.Exited], None],
        lease_until_s: float = 0.0,
        config: bytes = b"",
        stayers: Mapping[int, Stayer] | None = None,  # by local rank
    ) -> None:
        self.world = world
        self._loop = loop
        self._helpers = helpers
        self._oom = oom
        self._on_report = on_report
        self._on_dying = on_dying
        self._watched: set[int] = set()  # local ranks
        self._keep_store = keep_store or (lambda: None)
        self._beacon_fd, self.pages = pages.make(world.local_size, config)
        self._stacks: dict[int, int] = {}  # by local rank: where its stacks can be read when it is asked for them
        self._stayers = dict(stayers or {})
        self._seats: dict[int, channel.Channel[messages.Report]] = {}
        self._left: set[int] = set()  # local ranks that stay
        self._as_they_are: set[int] = set()  # those of them that can be no other rank
        if lease_until_s:
            self.lease(lease_until_s)
        self._reports, self._report_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._reports.setblocking(False)
        self._decoder: msgspec.msgpack.Decoder[messages.Report] = msgspec.msgpack.Decoder(messages.Report)
        self._loop.add_reader(self._reports.fileno(), self.read_reports)
        self._raised: dict[int, messages.Raised] = {}
        self._leaving: dict[int, messages.Leaving] = {}
        self._outputs: dict[int, RankOutput] = {}
        self._pids: dict[int, int] = {}  # by local rank
        self._pending_signal: int | None = None
        self._gone: set[int] = set()
        self._cold = False
        self._needs_keeper = keep_store is not None
        self.keeper: int | None = None  # of the store, where that is here
        self.keeper_gone = False
        self._beside: list[bool] = []
        self.gpus: dict[tuple[int, int], int] = {}  # in use, by rank and the number of ranks
        self.all_forked = asyncio.Event()

    def launch(
        self,
        options: Options,
        inherited: Mapping[str, str],
        destinations: Mapping[int, Destination],
        plumbing: Plumbing,
        filtered_dir: str,
        threads: int | None,
        more_env: Mapping[str, str],
        after: tuple[int, ...],
        gpus: Mapping[tuple[int, int], int],
    ) -> None:
        """Ask for all ranks and the store keeper. They come up side by side: the store's port is open already."""
        world = self.world
        self._cold = isinstance(options.program, messages.Command)
        if self._stayers:
            self._keep_store()  # those wait for nothing else
        for local_rank in range(world.local_size):
            to = destinations[local_rank]
            rank = world.first_rank + local_rank
            env = worker_env(world, local_rank, inherited)
            if options.virtual_local_rank:
                env |= one_gpu_env(local_rank, inherited)
            env["TORCHELASTIC_ERROR_FILE"] = to.error_file
            env |= more_env
            output = plumbing.open(to, world.role, rank, local_rank, filtered_dir)
            self._outputs[local_rank] = output
            ends = output.descriptors()
            program = substitute(options.program, local_rank)
            self._stacks[local_rank], asked_end = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
            place = messages.ForkWorker(
                token=self._token(local_rank),
                program=program,
                rank=rank,
                world_size=world.size,
                generation=world.generation,
                slot=local_rank,
                env=env,
                stdio=tuple(ends),
                title=f"{program_name(program)} [holdfast rank {rank}/{world.size} generation {world.generation}]",
                threads=threads,
                numa=options.numa_binding,
                after=after,
                gpu=gpus.get((rank, world.size), -1),
            )
            self._seat(local_rank, place, [self._report_end.fileno(), self._beacon_fd, asked_end], list(ends.values()))
            os.close(asked_end)
            output.start()
        # New ranks have more to do before they need it, and its port takes them already.
        self._keep_store()
        self._report_end.close()

    def _seat(self, local_rank: int, place: messages.ForkWorker, fds: list[int], streams: list[int]) -> None:
        """Have a process be that rank: one that has stayed, or a new one."""
        if (stayer := self._stayers.get(local_rank)) is not None:
            if 1 not in place.stdio:  # it writes to the console itself, from now on at least
                place = msgspec.structs.replace(place, stdio=(1, *place.stdio))
                streams = [1, *streams]
            with contextlib.suppress(channel.ChannelClosed, BlockingIOError):  # then its end is seen, as any other's
                stayer.seat.send(place, [*fds, *streams])
            self._seats[local_rank], self._pids[local_rank] = stayer.seat, stayer.pid
            return
        ours, theirs = channel.pair()
        self._seats[local_rank] = channel.Channel(ours, messages.Report)
        self._seats[local_rank].setblocking(False)
        self._helpers.request(place, [*fds, theirs.fileno(), *streams])
        theirs.close()

    def leave(self, ranks: tuple[int, ...], why: str, boundary: bool) -> None:
        """Have ranks leave this world, and stay."""
        for rank in ranks:
            with contextlib.suppress(channel.ChannelClosed, BlockingIOError):  # then it does not leave, and is killed
                self._seats[rank - self.world.first_rank].send(
                    messages.Leave(self.world.generation, why, boundary, self.steps() or 0)
                )

    @property
    def beside(self) -> bool:
        """Whether those of the next world need not wait until those of this one are gone."""
        return bool(self._beside) and all(self._beside)

    @property
    def goes_on(self) -> bool:
        """Whether a rank of this one is to be in the next."""
        return bool(self._left)

    def left(self, rank: int) -> tuple[int | None, int]:
        """A rank has; the steps it had done, and those of its optimizer before."""
        local_rank = rank - self.world.first_rank
        self._left.add(local_rank)
        page = self.pages[local_rank]
        return page.steps, page.base

    def lose_left(self) -> None:
        """Those that have left are gone, with their zygote, and nobody tells of it."""
        self._left.clear()

    def lease(self, until_s: float) -> None:
        """Let the ranks step until then."""
        for page in self.pages:
            page.lease(until_s)

    # -- what happens to the processes --------------------------------------------------------------------------------

    def _place(self, token: int) -> int | None:
        """Whose token that is: a local rank's, or nobody's of this world."""
        local_rank = token - self._token(0)
        return local_rank if 0 <= local_rank < self.world.local_size else None

    def not_forked(self, token: int, reason: str, at_s: float) -> RankExit | None:
        """A rank that could not be started."""
        local_rank = self._place(token)
        if local_rank is None:
            return None
        return RankExit(self.world.first_rank + local_rank, 0, 1, at_s, not_started=reason)

    def forked(self, token: int, pid: int) -> bool:
        """Note a process of this world; True when it was the last one to come up."""
        local_rank = self._place(token)
        if local_rank is None:
            return False
        self._pids[local_rank] = pid
        if self._pending_signal is not None:
            linux.signal_session(pid, self._pending_signal)
        return self.is_up()

    def kept(self, pid: int) -> bool:
        """By that process; as above."""
        self.keeper = pid
        return self.is_up()

    def lose_keeper(self) -> None:
        """Without it no rank can do anything."""
        self.keeper, self.keeper_gone = None, True

    def is_up(self) -> bool:
        """Whether all have a process."""
        if len(self._pids) == self.world.local_size and (self.keeper is not None or not self._needs_keeper):
            self.all_forked.set()
        return self.all_forked.is_set()

    def has(self, pid: int) -> bool:
        return pid == self.keeper or pid in self._pids.values()

    def is_there(self, pid: int) -> bool:
        """Whether that is a rank, and has not ended."""
        return any(pid == of and local_rank not in self._gone for local_rank, of in self._pids.items())

    def exited(self, message: messages.Exited) -> RankExit | None:
        """The end of one of this world's ranks, with all that is known of it; None if it is none of them."""
        if message.pid == self.keeper:
            self.lose_keeper()
        local_rank = next((r for r, pid in self._pids.items() if pid == message.pid), None)
        if local_rank is None:
            return None
        self._gone.add(local_rank)
        self._left.discard(local_rank)
        self.read_reports()
        output = self._outputs[local_rank]
        output.drain()
        rank = self.world.first_rank + local_rank
        killed = message.status == -signal.SIGKILL
        return RankExit(
            rank=rank,
            pid=message.pid,
            status=message.status,
            at_s=message.at_s,
            steps=self.pages[local_rank].steps,
            base=self.pages[local_rank].base,
            drained=self.pages[local_rank].is_draining,
            raised=self._raised.get(rank) if message.status != 0 else None,
            left=self._leaving.get(rank) if message.status != 0 else None,
            stderr_tail=output.tail.text(),
            oom_killed=killed and self._oom.killed(message.pid),
        )

    def watch(self, rank: int) -> None:
        """From now on, say when this rank is dying, long before its process is gone."""
        local_rank = rank - self.world.first_rank
        if local_rank in self._pids and local_rank not in self._watched:
            self._watched.add(local_rank)
            wait = (self.pages[local_rank].lifeline, self._pids[local_rank])
            threading.Thread(target=self._wait_for, args=wait, name=f"lifeline-{rank}", daemon=True).start()

    def _wait_for(self, lifeline: Lifeline, pid: int) -> None:
        """In a thread. It ends when the rank does, or goes to another world. An orphan has died of its zygote's death,
        which is to be told first."""
        if lifeline.wait() and (dying := look_at(pid)) and dying.status and self._helpers.has(dying.parent):
            ended = messages.Exited(pid, dying.status, time.monotonic())
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._on_dying, self, ended)

    def signal(self, ranks: tuple[int, ...], signum: int, drain: bool = False) -> None:
        """`drain`: ranks that end by themselves when they are asked to are asked. A boundary takes all of them: where
        one has not begun to look whether it is, nobody is. Where ranks have stayed, all of them will look."""
        answers = {rank: self._drains(self.pages[rank - self.world.first_rank]) for rank in ranks}
        asked = [rank for rank, drains in answers.items() if drains] if drain and None not in answers.values() else []
        for rank in asked:
            self.pages[rank - self.world.first_rank].drain()
        if not asked:
            self._pending_signal = signum
        for rank in answers.keys() - asked:
            if (pid := self._pids.get(rank - self.world.first_rank)) is not None:
                linux.signal_session(pid, signum)
                if signum != signal.SIGKILL:
                    linux.signal_session(pid, signal.SIGCONT)  # one that is stopped would not hear of it

    def _drains(self, page: pages.Page) -> bool | None:
        return page.drains if page.drains is not None else self.world.stayed or None

    def targets(self) -> list[dumps.Target]:
        """Whom to ask for stacks."""
        return [
            dumps.Target(self.world.first_rank + slot, pid, -1 if self._cold else self._stacks[slot])
            for slot, pid in self._pids.items()
            if slot not in self._gone
        ]

    def steps(self) -> int | None:
        """The most that any rank has done."""
        return max((page.steps for page in self.pages if page.steps is not None), default=None)

    def pids(self) -> dict[int, int]:
        return {self.world.first_rank + r: pid for r, pid in self._pids.items()}

    def local_rank_of(self, pid: int) -> int | None:
        """Whose process that is. A command's may be a shell that has started the program."""
        ranks = {rank_pid: r for r, rank_pid in self._pids.items()}
        while self._cold and pid not in ranks and pid > 1:
            pid = linux.parent(pid)
        return ranks.get(pid)

    def close(self) -> dict[int, Stayer]:
        """The ranks are gone, or stay: end the streams and the pages."""
        self.read_reports()
        self._loop.remove_reader(self._reports.fileno())
        self._reports.close()
        self._report_end.close()
        os.close(self._beacon_fd)
        channel.close_all(list(self._stacks.values()))
        stay = {local: self._stayer(local) for local in self._left}
        self._pids.clear()  # nobody is left to be asked
        for local_rank, output in self._outputs.items():
            if local_rank not in stay:
                output.close()
                self._seats[local_rank].close()
        for stayer in self._stayers.values():
            stayer.output.close()
        return stay

    def _stayer(self, local_rank: int) -> Stayer:
        only = (self.world.first_rank + local_rank, self.world.size) if local_rank in self._as_they_are else None
        return Stayer(self._pids[local_rank], self._seats[local_rank], self._outputs[local_rank], only)

    def read_reports(self) -> None:
        """Take the ranks' reports. Called also when a rank ends, so that what it said is known before its end is."""
        for number in itertools.count():
            try:
                packet = self._reports.recv(MAX_REPORT_BYTES)
            except (BlockingIOError, OSError):
                if number >= QUEUE_LENGTH:
                    self._on_report(None)
                return
            with contextlib.suppress(msgspec.MsgspecError):  # a stray write to an inherited descriptor
                report = self._decoder.decode(packet)
                if isinstance(report, messages.Raised):
                    self._raised.setdefault(report.rank, report)
                if isinstance(report, messages.Stays):
                    self.gpus[report.rank, self.world.size] = report.gpu
                    if report.as_it_is:
                        self._as_they_are.add(report.rank - self.world.first_rank)
                if isinstance(report, messages.Left):
                    self._beside.append(report.beside)
                if isinstance(report, messages.Leaving):
                    self._leaving.setdefault(report.rank, report)
                self._on_report(report)

    def _token(self, local_rank: int) -> int:
        return self.world.generation * 1_000_000 + local_rank


def substitute(program: messages.Program, local_rank: int) -> messages.Program:
    """Torchrun's one macro: `${local_rank}` in a program's arguments."""

    def fill(args: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(arg.replace("${local_rank}", str(local_rank)) for arg in args)

    match program:
        case messages.Script(args=args) | messages.Module(args=args):
            return msgspec.structs.replace(program, args=fill(args))
        case messages.Command(argv=argv):
            return msgspec.structs.replace(program, argv=fill(argv))
    return program


def program_name(program: messages.Program) -> str:
    match program:
        case messages.Script(path=path):
            return os.path.basename(path)
        case messages.Module(name=name):
            return name
        case messages.Command(argv=argv):
            return os.path.basename(argv[0])
    return "function"
