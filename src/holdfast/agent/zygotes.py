"""The agent's side of its helper processes: one janitor, and the zygotes below it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence

from holdfast import linux
from holdfast.agent.janitor import ORPHAN_EXIT_S, ORPHAN_TERM_S
from holdfast.wire import channel, messages

# Not `-m`: the working directory would come first on the path, and a user's random.py would shadow Python's own.
_START = "import sys\nif sys.path[:1] == ['']: del sys.path[0]\nfrom holdfast.agent.janitor import main\nmain()"
_TITLE_ROOM = "-" * 160  # a worker's title is written over the command line it was forked with
_MAX_GROWTHS = 4


class Zygote:
    """The channel to one zygote. It outlives the zygote's use: a retired one still reports its children's ends."""

    def __init__(self, sock: socket.socket, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._outbox: deque[tuple[messages.ToZygote, list[int]]] = deque()
        self.link: channel.Channel[messages.FromZygote] = channel.Channel(sock, messages.FromZygote)
        self.link.setblocking(False)
        self.pid = 0
        self.done = False  # it has nothing more to report

    def post(self, message: messages.ToZygote, fds: Sequence[int] = ()) -> None:
        """Send without waiting. What the socket has no room for goes out when it has, with descriptors of its own."""
        with contextlib.suppress(channel.ChannelClosed):
            if not self._outbox:
                try:
                    self.link.send(message, fds)
                    return
                except BlockingIOError:
                    self._loop.add_writer(self.link.fileno(), self._flush)
            self._outbox.append((message, [os.dup(fd) for fd in fds]))

    def _flush(self) -> None:
        try:
            while self._outbox:
                message, fds = self._outbox[0]
                self.link.send(message, fds)
                channel.close_all(fds)
                self._outbox.popleft()
        except BlockingIOError:
            return
        except channel.ChannelClosed:
            self._outbox.clear()
        self._loop.remove_writer(self.link.fileno())

    def close(self) -> None:
        if self.link.fileno() >= 0:
            self._loop.remove_reader(self.link.fileno())
            self._loop.remove_writer(self.link.fileno())
        self.link.close()
        for _, fds in self._outbox:
            channel.close_all(fds)
        self._outbox.clear()


class Zygotes:
    """Starts, feeds and ends the helpers. Tells its owner through callbacks, all called in the loop."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        env: Mapping[str, str],
        on_message: Callable[[messages.FromZygote], None],
        on_lost: Callable[[str], None],
    ) -> None:
        self._loop = loop
        self._env = env
        self._on_message = on_message
        self._on_lost = on_lost
        self._janitor: subprocess.Popen[bytes] | None = None
        self._janitor_fd = -1
        self._lifeline = -1
        self._zygotes: list[Zygote] = []
        self._growing: Zygote | None = None
        self._wanted: tuple[str, ...] = ()
        self._growths = 0
        self._leftovers: dict[int, int] = {}  # descriptors by pid: a pid alone may be another process by then

    def start(self) -> None:
        """Start a janitor, which forks the first zygote."""
        ours, theirs = channel.pair()
        lifeline_r, self._lifeline = os.pipe2(os.O_CLOEXEC)
        fds = (theirs.fileno(), lifeline_r)
        self._janitor = subprocess.Popen(
            [sys.executable, "-u", "-c", _START, str(os.getpid()), *map(str, fds), _TITLE_ROOM],
            env=dict(self._env),
            pass_fds=fds,
            start_new_session=True,
        )
        theirs.close()
        os.close(lifeline_r)
        self._janitor_fd = os.pidfd_open(self._janitor.pid)
        self._loop.add_reader(self._janitor_fd, self._janitor_ended)
        self._attach(Zygote(ours, self._loop))
        self._growths = 0

    @property
    def running(self) -> bool:
        return self._janitor is not None

    @property
    def grows(self) -> bool:
        """Whether another zygote will soon take the place of the one that is asked now."""
        return self._growing is not None

    # -- requests -----------------------------------------------------------------------------------------------------

    def request(self, message: messages.ToZygote, fds: Sequence[int] = ()) -> None:
        """Ask the newest zygote. If it has just died, `on_lost` follows by itself."""
        if self._zygotes:
            self._zygotes[-1].post(message, fds)

    def learn(self, modules: tuple[str, ...]) -> None:
        """Have the next worlds forked from a zygote that holds these modules too."""
        if self._growing is not None or self._growths >= _MAX_GROWTHS or not modules or self._janitor is None:
            return
        self._growths += 1
        self._wanted = modules
        ours, theirs = channel.pair()
        self._growing = Zygote(ours, self._loop)
        self.request(messages.Grow(modules, self._janitor.pid), [theirs.fileno()])
        theirs.close()
        self._loop.add_reader(self._growing.link.fileno(), self._grown, self._growing)

    def has(self, pid: int) -> bool:
        """Whether that is a zygote."""
        return any(zygote.pid == pid for zygote in self._all_zygotes())

    # -- leftovers ----------------------------------------------------------------------------------------------------

    def clear_leftovers(self, dying: Iterable[int]) -> None:
        """End what the last world's workers left running. Called before the next world starts, so none is its own.
        Children of workers that are still `dying` are not orphans yet."""
        zygotes = {zygote.pid for zygote in self._all_zygotes()}
        if self._janitor is None:
            return
        left = [pid for parent in dying for pid in linux.descendants(parent)]
        for orphan in linux.children(self._janitor.pid):
            left += (orphan, *linux.descendants(orphan)) if orphan not in zygotes else ()
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                if pid not in self._leftovers:
                    self._leftovers[pid] = os.pidfd_open(pid)
        if 0 not in zygotes:
            self._end_leftovers_soon()  # else one of them may be a zygote that has not said yet who it is

    def _end_leftovers_soon(self) -> None:
        if self._leftovers:
            # Some of them clean up behind a dead worker and end by themselves; the next world need not wait for that.
            self._loop.call_later(ORPHAN_EXIT_S, self._signal_leftovers, signal.SIGTERM)
            self._loop.call_later(ORPHAN_EXIT_S + ORPHAN_TERM_S, self._end_leftovers)

    def _spare(self, zygote: int) -> None:
        """The new zygote has said who it is, or is given up: what else was found is left over indeed."""
        for pid in (zygote, *linux.descendants(zygote)) if zygote else ():
            if (fd := self._leftovers.pop(pid, None)) is not None:
                os.close(fd)
        self._end_leftovers_soon()

    def _signal_leftovers(self, signum: int) -> None:
        for pid, fd in self._leftovers.items():
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(fd, signum)
                linux.signal_all(linux.descendants(pid), signum)

    def _end_leftovers(self) -> None:
        self._signal_leftovers(signal.SIGKILL)
        channel.close_all(list(self._leftovers.values()))
        self._leftovers.clear()

    # -- the end ------------------------------------------------------------------------------------------------------

    async def stop(self) -> None:
        """End all helpers and everything below them; returns when they are gone."""
        if self._janitor is None:
            return
        self._loop.remove_reader(self._janitor_fd)
        gone = asyncio.Event()
        self._loop.add_reader(self._janitor_fd, gone.set)
        if self._growing is not None and self._growing.pid:
            linux.signal_all([self._growing.pid], signal.SIGKILL)  # it does not listen while it imports
        for zygote in self._all_zygotes():
            zygote.close()
        self._zygotes.clear()
        self._growing = None
        os.close(self._lifeline)
        try:
            await asyncio.wait_for(gone.wait(), 5.0)
        except TimeoutError:
            linux.signal_all([*linux.descendants(self._janitor.pid), self._janitor.pid], signal.SIGKILL)
        self._forget()

    def _forget(self) -> None:
        """Let go of helpers that are gone."""
        if self._janitor is None:
            return
        for zygote in self._all_zygotes():
            zygote.close()
        self._zygotes.clear()
        self._growing = None
        self._end_leftovers()
        self._loop.remove_reader(self._janitor_fd)
        os.close(self._janitor_fd)
        self._janitor.wait()
        self._janitor = None

    # -- what comes back ----------------------------------------------------------------------------------------------

    def _attach(self, zygote: Zygote) -> None:
        self._zygotes.append(zygote)
        self._loop.add_reader(zygote.link.fileno(), self._readable, zygote)

    def _readable(self, zygote: Zygote) -> None:
        while True:
            try:
                received = zygote.link.receive()
            except channel.ChannelClosed:
                self._zygote_ended(zygote)
                return
            if received is None:
                return
            message, _ = received
            match message:
                case messages.Ready(pid=pid):
                    zygote.pid = pid
                case messages.Retired():
                    zygote.done = True
            self._on_message(message)

    def _zygote_ended(self, zygote: Zygote) -> None:
        zygote.close()
        if zygote in self._zygotes:
            self._zygotes.remove(zygote)
        if not zygote.done:
            self._lost("the zygote was killed")

    def _janitor_ended(self) -> None:
        self._lost("the janitor was killed")

    def _lost(self, what: str) -> None:
        """One helper is gone: end the others too, and whatever they leave; the job starts again with new ones."""
        if self._janitor is None:
            return
        _end_all_of(self._janitor.pid, f"HOLDFAST_JOB={self._env['HOLDFAST_JOB']}".encode())
        with contextlib.suppress(OSError):
            os.close(self._lifeline)
        self._forget()
        self._on_lost(what)

    def _grown(self, zygote: Zygote) -> None:
        """News from the new zygote: who it is, that it holds what it was asked to, or what it must not hold."""
        try:
            received = zygote.link.receive()
        except channel.ChannelClosed:
            self._abandon_growth(zygote)
            return
        match received and received[0]:
            case messages.Growing(pid=pid):
                zygote.pid = pid
                self._spare(pid)
            case messages.Ready() as ready:
                unforkable = {name for name, why in ready.refused.items() if why.startswith("it ")}
                if unforkable:
                    self._abandon_growth(zygote)
                    self._on_message(messages.NotGrown(ready.refused))
                    self.learn(tuple(n for n in self._wanted if n.partition(".")[0] not in unforkable))
                else:
                    self._take_over(zygote, ready)

    def _abandon_growth(self, zygote: Zygote) -> None:
        """Without its channel it ends by itself."""
        zygote.close()
        self._growing = None
        self._spare(0)

    def _take_over(self, zygote: Zygote, ready: messages.Ready) -> None:
        self._growing = None
        self._loop.remove_reader(zygote.link.fileno())
        for old in self._zygotes:
            old.post(messages.Retire())
        self._attach(zygote)
        self._on_message(ready)

    def _all_zygotes(self) -> list[Zygote]:
        return [*self._zygotes, *([self._growing] if self._growing is not None else [])]


def _end_all_of(janitor: int, mark: bytes) -> None:
    """End a janitor and all that was below it. What it leaves comes to this process, and is known by its environment;
    it is killed until there is nothing new, and reaped, since no one else will."""
    ours: set[int] = set()
    for _ in range(40):
        ours.update(linux.descendants(janitor))
        ours.update(pid for pid in linux.descendants(os.getpid()) if pid != janitor and mark in linux.environment(pid))
        linux.signal_all([janitor], signal.SIGKILL)
        alive = [pid for pid in ours if linux.state(pid) not in ("", "Z")]
        for pid in alive:
            linux.end(pid, wait_s=0.05)
        for pid in ours:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        if not alive:
            return
