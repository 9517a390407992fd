"""The writer: a process beside the training that makes checkpoints of snapshots in memory.

Under `holdfast run` it is one a node, a child of the agent, and dies with it. Elsewhere it is one a process, and
outlives it: what that one left in memory when it was killed is written before the writer ends.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import selectors
import signal
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import msgspec

from holdfast import linux
from holdfast.checkpoint.errors import CheckpointError
from holdfast.checkpoint.reading import Held, Reading
from holdfast.wire import channel
from holdfast.wire.snapshots import Client, Finish, Persist, Persisted, Proceed, Save, Saved, Slots, ToWriter

MAX_WRITES = 8  # at once
NICENESS = 10

Done: TypeAlias = Callable[[], None]


class Asked(NamedTuple):
    """To save what a world has left, by the agent; by nobody, where the owner is gone."""

    turn: int
    by: Persist | None
    slots: list[int]  # that are held for it


class Line:
    """Somebody who talks to the writer. Of what one asks for, one thing is written after the other."""

    def __init__(self, sock: socket.socket) -> None:
        self.link: channel.Channel[ToWriter] = channel.Channel(sock, ToWriter)
        self.link.setblocking(False)
        self.asked: deque[tuple[int, Save]] = deque()  # each with its turn
        self.busy = False

    def tell(self, message: Saved | Persisted) -> None:
        """It may be gone, or not listening; what was written is written."""
        with contextlib.suppress(channel.ChannelClosed, OSError):
            self.link.send(message)


class Writer:
    """One thread listens; each write has one of its own. Only the first touches what is here."""

    def __init__(self, control: socket.socket, owner: int, under_agent: bool) -> None:
        self._reading = Reading()
        self._under_agent = under_agent
        self._control = Line(control)
        self._lines = [self._control]  # also those that are gone and are still owed a write
        self._turns = itertools.count()
        self._persists: deque[Asked] = deque()
        self._persisting = False  # the first of them
        self._waits = False  # what is chosen is not written yet
        self._chosen: Callable[[], None] | None = None
        self._running = 0
        self._results: deque[Done] = deque()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._ending = self._orphaned = False
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._control.link, selectors.EVENT_READ, lambda: self._hear(self._control))
        self._selector.register(self._wake, selectors.EVENT_READ, self._take_results)
        if not under_agent:
            self._watch(owner)

    def run(self) -> None:
        while not (self._ending and self._is_idle()):
            for key, _ in self._selector.select():
                key.data()

    def _watch(self, owner: int) -> None:
        """The end of its line is not enough: a fork of the owner, a data loader say, may hold that open."""
        try:
            fd = os.pidfd_open(owner)
        except ProcessLookupError:
            fd = -1
        if os.getppid() != owner:  # it was killed before this one had started
            self._lose_owner()
        else:
            self._selector.register(fd, selectors.EVENT_READ, lambda: self._lose_owner(fd))

    def _is_idle(self) -> bool:
        return self._running == 0 and not self._persists and not any(line.asked for line in self._lines)

    # -- what is heard ------------------------------------------------------------------------------------------------

    def _hear(self, line: Line) -> None:
        while line.link.fileno() >= 0:
            try:
                received = line.link.receive()
            except (channel.ChannelClosed, OSError):
                self._lose(line)
                return
            except msgspec.MsgspecError:
                continue
            if received is None:
                return
            self._obey(line, *received)

    def _obey(self, line: Line, message: ToWriter, fds: list[int]) -> None:
        match message:
            case Save():
                self._asked_to_save(line, message)
            case _ if line is not self._control:
                channel.close_all(fds)
            case Slots(first=first):
                self._reading.take(first, fds)
            case Client() if fds:
                client = Line(channel.adopt(fds.pop()))
                self._lines.append(client)
                self._selector.register(client.link, selectors.EVENT_READ, lambda: self._hear(client))
            case Persist():
                self._asked_to_persist(message)
            case Proceed():
                self._proceed()
            case Finish():
                self._ending = True
                self._proceed()
        self._start_what_can()

    def _lose(self, line: Line) -> None:
        self._selector.unregister(line.link)
        line.link.close()
        if line is not self._control:
            if not line.asked and not line.busy:
                self._lines.remove(line)
        elif self._under_agent:
            os._exit(1)
        else:
            self._orphan()

    def _lose_owner(self, fd: int = -1) -> None:
        if fd >= 0:
            self._selector.unregister(fd)
        self._hear(self._control)  # its last words
        self._orphan()

    def _orphan(self) -> None:
        """Nobody will ask any more: write what there is, once all that was asked for is."""
        if not self._ending:
            self._ending = self._orphaned = True
            self._asked_to_persist(None)
            self._start_what_can()

    # -- what is asked for --------------------------------------------------------------------------------------------

    def _asked_to_save(self, line: Line, save: Save) -> None:
        # It is held from now on, so that nobody fills it anew before it is its turn.
        if why := self._reading.hold(save.slot, save.step):
            self._answer(line, Saved(save.slot, save.step, False, text=why))
        else:
            line.asked.append((next(self._turns), save))
            self._proceed()  # the next world trains

    def _asked_to_persist(self, persist: Persist | None) -> None:
        """Its slots are held at once: the next world must not fill them before they are read. What the last one's ranks
        have still asked for comes first."""
        for line in self._lines[1:]:
            self._hear(line)
        slots = self._reading.hold_all(persist.world if persist is not None else None)
        self._persists.append(Asked(next(self._turns), persist, slots))
        if persist is not None and persist.waits:
            self._waits = True
        else:
            self._proceed()

    def _proceed(self) -> None:
        self._waits = False
        if self._chosen is not None:
            chosen, self._chosen = self._chosen, None
            chosen()

    def _start_what_can(self) -> None:
        """What a world has left comes after all that was asked for before, and before all that was asked for since: of
        parts of an earlier step than one that is there, nobody knows any more that they are about to be a checkpoint.
        And no slot is written by two at once: the second would cut short the file that the first has committed."""
        last = self._persists[0].turn if self._persists else math.inf
        first = math.inf
        for line in self._lines:
            if not line.asked:
                continue
            turn, save = line.asked[0]
            first = min(first, turn)
            if turn < last and not line.busy and self._running < MAX_WRITES:
                line.busy = True
                self._write(self._save, line, save)
        if last < first and not self._persisting:
            self._persisting = True
            self._write(self._choose, *self._persists[0][1:])

    # -- what is written, each in a thread ----------------------------------------------------------------------------

    def _write(self, work: Callable[..., Done], *args: object) -> None:
        self._running += 1

        def carry_out() -> None:
            self._results.append(work(*args))
            os.eventfd_write(self._wake, 1)

        threading.Thread(target=carry_out, daemon=True).start()

    def _save(self, line: Line, save: Save) -> Done:
        try:
            rank, outcome = self._reading.write(save.slot, save.step)
        except Exception as failure:  # whatever it is, it must not end the writer, and somebody waits for an answer
            saved = Saved(save.slot, save.step, False, text=_one_line(failure))
        else:
            saved = Saved(
                save.slot, save.step, True, rank, outcome.committed, outcome.verified, outcome.name, outcome.bytes,
                outcome.seconds, outcome.note,
            )  # fmt: skip
        return lambda: self._saved(line, saved)

    def _saved(self, line: Line, saved: Saved) -> None:
        line.busy = False
        line.asked.popleft()
        self._reading.release([saved.slot])
        self._answer(line, saved)
        if line.link.fileno() < 0 and not line.asked and line is not self._control:
            self._lines.remove(line)

    def _answer(self, line: Line, saved: Saved) -> None:
        for listener in {line, self._control}:
            if listener.link.fileno() >= 0:
                listener.tell(saved)

    def _choose(self, persist: Persist | None, slots: list[int]) -> Done:
        """The next world has room for its snapshots while the last one's is written: the rest is let go first."""
        token = persist.token if persist is not None else 0
        ranks = range(persist.first_rank, persist.first_rank + persist.local_size) if persist is not None else None
        try:
            candidates = self._reading.choose(slots, ranks)
        except Exception as failure:
            failed = Persisted(token, None, False, text=_one_line(failure))
            return lambda: self._persisted(slots, failed)
        needed = [slot for _, parts in candidates for slot in parts]

        def write() -> None:
            self._reading.release([slot for slot in slots if slot not in needed])
            self._chosen = lambda: self._write(self._persist, token, needed, candidates)
            if not self._waits:
                self._proceed()

        return write

    def _persist(self, token: int, slots: list[int], candidates: Sequence[tuple[int, Held]]) -> Done:
        try:
            persisted = self._reading.write_newest(token, candidates)
        except Exception as failure:
            persisted = Persisted(token, None, False, text=_one_line(failure))
        return lambda: self._persisted(slots, persisted)

    def _persisted(self, slots: list[int], persisted: Persisted) -> None:
        self._reading.release(slots)
        self._persists.popleft()
        self._persisting = False
        if self._orphaned:
            _say_last(persisted)
        elif self._control.link.fileno() >= 0:
            self._control.tell(persisted)

    def _take_results(self) -> None:
        os.eventfd_read(self._wake)
        while self._results:
            self._running -= 1
            self._results.popleft()()
        self._start_what_can()


def _one_line(failure: Exception) -> str:
    text = " ".join(str(failure).split())
    return text if isinstance(failure, CheckpointError) and text else f"{type(failure).__name__}: {text}"


def _say_last(persisted: Persisted) -> None:
    """To whoever still reads what the owner's errors went to."""
    if not persisted.ok:
        text = f"its last snapshot could not be saved: {persisted.text}"
    elif persisted.step is not None and persisted.committed:
        text = f"its last snapshot, of step {persisted.step}, was saved as {persisted.name}"
    elif persisted.step is not None:
        text = f"its part of the last snapshot, of step {persisted.step}, was saved; {persisted.text}"
    else:
        return
    with contextlib.suppress(OSError):
        os.write(2, f"holdfast: the process ended; {text}\n".encode())


def main() -> None:
    """Arguments: the descriptor of the control socket, the owner's pid, whether that is an agent, and when to load
    torch."""
    fd, owner, kind, when = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
    if kind == "agent":
        linux.die_with_parent(owner)
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGPIPE):
        signal.signal(ignored, signal.SIG_IGN)  # it ends with its owner, when nothing is half done
    os.set_inheritable(fd, False)
    linux.set_title("holdfast writer")
    with contextlib.suppress(OSError):
        os.nice(NICENESS)
    linux.lower_io_priority()
    if when == "now":
        threading.Thread(target=_load_torch, daemon=True).start()
    Writer(channel.adopt(fd), owner, kind == "agent").run()
    os._exit(0)  # all is on storage; to take torch apart in order takes longer than many a save


def _load_torch() -> None:
    """The first epoch's file would have to wait for it, and the next ones be skipped."""
    with contextlib.suppress(Exception):
        import torch  # noqa: F401


if __name__ == "__main__":
    main()
