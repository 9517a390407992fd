"""The node's snapshots: memory that outlives the ranks that filled it, and the writer that makes checkpoints of it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import subprocess
from collections.abc import Callable, Mapping

from holdfast import linux
from holdfast.agent.doorbell import Handed, Sorry
from holdfast.agent.world import RunningWorld
from holdfast.checkpoint.writing import hand_slots, make_slots, start_writer
from holdfast.observe import record
from holdfast.observe.events import EventLog
from holdfast.wire import channel
from holdfast.wire.snapshots import (
    Attach,
    Attached,
    Client,
    Finish,
    FromWriter,
    Persist,
    Persisted,
    Proceed,
    Saved,
    world_name,
)

FORKED_S = 10.0  # how long a rank may ring before its fork has been heard of
WAITS_S = 1.0  # for a next world, with what the last one has left


class Vault:
    """Kept over worlds. Nothing of it is there before a rank asks for it."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        env: Mapping[str, str],
        nproc: int,
        grace_s: float,
        events: EventLog,
        say: Callable[[str], None],
        complain: Callable[[str], None],
    ) -> None:
        self._loop = loop
        # Without the mark by which what ranks leave is known: it is no rank's.
        self._env = {name: value for name, value in env.items() if name != "HOLDFAST_JOB"}
        self._nproc = nproc
        self._grace_s = grace_s
        self._events = events
        self._say, self._complain = say, complain
        self._slots: list[int] = []
        self._writer: channel.Channel[FromWriter] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._process_fd = -1
        self._used: RunningWorld | None = None  # the last world with a rank that has attached
        self._tokens = itertools.count()
        self._persisting: set[int] = set()
        self._waits = False  # with some of it
        self._gone = asyncio.Event()  # the writer
        self._said = self._committed = (-1, "")

    # -- ranks --------------------------------------------------------------------------------------------------------

    async def attach(self, running: RunningWorld | None, pid: int, wants: Attach) -> Handed | Sorry:
        """A rank's slots, and a line to the writer. For ranks of the world that runs, and nobody else."""
        if running is None:
            return Sorry("there is no world")
        local_rank = running.local_rank_of(pid)
        if local_rank is None:
            with contextlib.suppress(TimeoutError):  # the fork may be heard of only after the rank is
                await asyncio.wait_for(running.all_forked.wait(), FORKED_S)
            local_rank = running.local_rank_of(pid)
        if local_rank is None:
            return Sorry(f"process {pid} is no rank of this world")
        if not self._slots:
            self._slots = make_slots(2 * self._nproc)
        ours, theirs = channel.pair()
        with theirs:
            try:
                self._send(Client(), theirs.fileno())
            except OSError as failure:
                ours.close()
                return Sorry(f"no writer could be started: {failure.strerror or failure}")
        self._used = running
        slots = self._slots if wants.slots else []
        world = running.world
        return Handed(Attached(local_rank, len(slots), world_name(world.job_id, world.generation)), ours, slots)

    def persist(self, waits: bool = False) -> None:
        """The last world is over, and not well: have saved what its ranks have left in memory. `waits`: when the next
        one trains. Its ranks would have to share their cores with the writer, and have it all in memory."""
        if self._used is None:
            return
        world, self._used = self._used.world, None
        token = next(self._tokens)
        name = world_name(world.job_id, world.generation)
        try:
            self._send(Persist(token, name, world.first_rank, world.local_size, waits))
        except OSError as failure:
            self._persisted(Persisted(token, None, False, text=f"no writer: {failure.strerror or failure}"))
        else:
            self._persisting.add(token)
            if waits:
                self._waits = True
                self._loop.call_later(WAITS_S, self.proceed)

    def proceed(self) -> None:
        """The next world trains, or takes its time."""
        if self._waits and self._writer is not None:
            with contextlib.suppress(channel.ChannelClosed, OSError):  # its end is seen by that of the process
                self._writer.send(Proceed())
        self._waits = False

    # -- the writer ---------------------------------------------------------------------------------------------------

    def _send(self, message: Client | Persist, *fds: int) -> None:
        """To the writer that is there, or to a new one. Raises OSError."""
        for _ in range(2):
            if self._writer is None:
                self._start()
            assert self._writer is not None
            try:
                self._writer.send(message, fds)
                return
            except channel.ChannelClosed:
                self._lost()
        raise BrokenPipeError("the writer ends as soon as it is started")

    def _start(self) -> None:
        sock, self._process = start_writer("agent", self._env)
        self._process_fd = os.pidfd_open(self._process.pid)
        writer: channel.Channel[FromWriter] = channel.Channel(sock, FromWriter)
        self._writer = writer
        self._gone.clear()
        self._events.emit(record.WriterStarted(self._process.pid))
        with contextlib.suppress(channel.ChannelClosed):  # found out by who sends next
            hand_slots(writer, self._slots)
        writer.setblocking(False)
        self._loop.add_reader(writer.fileno(), self._hear)
        self._loop.add_reader(self._process_fd, self._lost)

    def _hear(self) -> None:
        """Its end is seen by that of the process, which comes a little later."""
        assert self._writer is not None
        while True:
            try:
                received = self._writer.receive()
            except (channel.ChannelClosed, OSError):
                self._loop.remove_reader(self._writer.fileno())
                return
            if received is None:
                return
            match received[0]:
                case Saved() as saved:
                    self._saved(saved)
                case Persisted() as persisted:
                    self._persisting.discard(persisted.token)
                    self._persisted(persisted)

    def _lost(self) -> None:
        """The writer is gone; the next one who needs it gets another."""
        if self._writer is None or self._process is None:
            return
        self._hear()  # its last words
        self._loop.remove_reader(self._writer.fileno())
        self._loop.remove_reader(self._process_fd)
        self._writer.close()
        self._writer = None
        linux.end(self._process.pid, wait_s=1.0)  # not for ever: it may be stuck in a disk
        self._events.emit(record.WriterEnded(self._process.pid, self._process.poll()))
        self._process = None
        os.close(self._process_fd)
        for token in self._persisting:
            self._persisted(Persisted(token, None, False, text="the writer was killed"))
        self._persisting.clear()
        self._gone.set()

    # -- what came of it ----------------------------------------------------------------------------------------------

    def _saved(self, saved: Saved) -> None:
        if saved.ok:
            if saved.committed and self._committed != (saved.step, saved.name):  # every rank here may find it so
                self._committed = (saved.step, saved.name)
                seconds = round(saved.seconds, 3)
                noted = record.CheckpointSaved(saved.step, saved.name, saved.bytes, seconds, saved.verified)
                self._events.emit(noted)
            return
        self._events.emit(record.CheckpointFailed(saved.step, saved.text, saved.name, saved.rank))
        if self._said != (saved.step, saved.text):  # every rank has the same to say of a full disk
            self._said = (saved.step, saved.text)
            self._complain(f"the checkpoint of step {saved.step} failed: {saved.text}; training goes on")

    def _persisted(self, persisted: Persisted) -> None:
        if not persisted.ok:
            self._events.emit(record.CheckpointFailed(persisted.step, persisted.text))
            self._complain(f"what the ranks left in memory could not be saved: {persisted.text}")
        elif persisted.step is not None:
            self._events.emit(
                record.CheckpointPersisted(
                    step=persisted.step,
                    checkpoint=persisted.name,
                    bytes=persisted.bytes,
                    seconds=round(persisted.seconds, 3),
                    committed=persisted.committed,
                    note=persisted.text,
                )
            )
            if persisted.committed:  # else it waits for other nodes, or nobody wants it any more
                self._say(f"step {persisted.step}, which the ranks had left in memory, is saved: {persisted.name}")

    # -- the end ------------------------------------------------------------------------------------------------------

    async def finish(self) -> None:
        """Let the writer do what it was asked for, for no longer than ranks have to end."""
        if self._writer is None:
            return
        with contextlib.suppress(channel.ChannelClosed, OSError):
            self._writer.send(Finish())
        try:
            await asyncio.wait_for(self._gone.wait(), self._grace_s)
        except TimeoutError:
            self._complain(f"checkpoints were still being written {self._grace_s:g} s after the end, and are given up")

    def close(self) -> None:
        self._lost()
        channel.close_all(self._slots)
        self._slots = []
