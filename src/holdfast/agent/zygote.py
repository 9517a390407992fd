"""The zygote: a single-threaded process that has imported torch and forks workers and store keepers on request.

Importing torch and what an optimizer pulls in takes two seconds; forking a process that has done so takes five
milliseconds. A zygote does nothing else, so it never keeps a restart waiting: when the first world has shown which
installed modules its ranks import, a new zygote is forked to import those (`Grow`), and takes over once it holds them.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from holdfast import linux
from holdfast.wire import channel, messages

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing import LogsSpecs

Work = Callable[[], None]

# torch._dynamo is what constructing any torch.optim optimizer imports; FSDP comes with it.
PRELOAD = (
    "torch", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.checkpoint", "holdfast.worker.bootstrap"
)  # fmt: skip


_log_plans: dict[str, LogsSpecs] = {}  # a grown zygote inherits them, with what they remember


def main(channel_fd: int, extra: tuple[str, ...] = ()) -> None:
    """Serve until the agent is gone. Returns only in a child, when its work is done."""
    try:
        work = _serve(channel_fd, extra)
    except channel.ChannelClosed:
        os._exit(0)
    work()


def _serve(channel_fd: int, extra: tuple[str, ...]) -> Work:
    link: channel.Channel[messages.ToZygote] = channel.Channel(channel.adopt(channel_fd), messages.ToZygote)
    linux.set_title("holdfast zygote" if not extra else "holdfast zygote-to-be")
    gc.disable()  # imports make no garbage worth 0.4 s of collections
    if extra:
        link.send(messages.Growing(os.getpid()))
        refused = _import_checked(extra)
    else:
        try:
            for name in PRELOAD:
                importlib.import_module(name)
        except Exception as failure:
            link.send(messages.NotReady(f"cannot import torch: {type(failure).__name__}: {failure}"))
            os._exit(1)
        from holdfast.worker import counters, groups, phases

        for wraps in (phases, groups, counters):
            wraps.wrap()
        refused = {}
    importlib.import_module("holdfast.worker.programs").preloaded()
    gc.freeze()  # a collection in a child would otherwise write to, and so copy, every page of these objects
    _settle_threads()
    linux.set_title("holdfast zygote")
    link.send(messages.Ready(os.getpid(), str(sys.modules["torch"].__version__), refused))
    return Zygote(link).serve()


class Zygote:
    """The request loop. One message in, at most one fork; a child leaves the loop with the work it is to do."""

    def __init__(self, link: channel.Channel[messages.ToZygote]) -> None:
        self._link = link
        self._children: set[int] = set()
        self._retired = False
        self._parked: dict[int, channel.Channel[messages.ToZygote]] = {}
        self._wakeup_r, self._wakeup_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(self._wakeup_w, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def serve(self) -> Work:
        poll = select.poll()
        poll.register(self._wakeup_r, select.POLLIN)
        poll.register(self._link.fileno(), select.POLLIN)
        while True:
            ready = {fd for fd, _ in poll.poll()}
            if self._wakeup_r in ready:
                os.read(self._wakeup_r, 512)
                self._reap()
            if self._link.fileno() in ready:
                received = self._link.receive()
                if received is not None and (work := self._handle(*received)) is not None:
                    return work
            if self._retired and not self._children:
                self._link.send(messages.Retired())
                os._exit(0)

    def _handle(self, request: messages.ToZygote, fds: list[int]) -> Work | None:
        match request:
            case messages.ForkWorker() | messages.ForkKeeper():
                return self._start(request, fds)
            case messages.CountDevices(token=token):
                return self._fork(token, fds, lambda: _count_devices(request, fds[0]))
            case messages.PlanLogs():
                self._link.send(self._plan_logs(request))
            case messages.Park(count=count, program=program):
                while len(self._parked) < count:
                    parked, work = self._park(program)
                    if not parked or work is not None:
                        return work
            case messages.Grow():
                return self._grow(request, fds)
            case messages.Retire():
                self._retired = True
                linux.signal_all(self._parked, signal.SIGKILL)
                linux.set_title("holdfast retired zygote")
        return None

    def _start(self, request: messages.ForkWorker | messages.ForkKeeper, fds: list[int]) -> Work | None:
        """Give the work to a child that was forked ahead, or fork one now."""
        while self._parked:
            pid, link = self._parked.popitem()
            try:
                link.send(request, fds)
            except channel.ChannelClosed:
                continue  # it was killed; its end is reported as any other's
            finally:
                link.close()
            channel.close_all(fds)
            self._link.send(messages.Forked(request.token, pid))
            return None
        return self._fork(request.token, fds, lambda: _work(request, fds))

    def _park(self, program: messages.Program | None) -> tuple[bool, Work | None]:
        """Fork a child that waits to be told what it is. A fork takes 6 ms; a restart should not wait for several."""
        ours, theirs = channel.pair()
        zygote = os.getpid()
        try:
            pid = os.fork()
        except OSError:
            ours.close()
            theirs.close()
            return False, None
        if pid == 0:
            ours.close()
            self._leave()
            os.setsid()
            linux.die_with_parent(zygote)
            linux.set_title("holdfast parked")
            return True, lambda: _wait_for_work(theirs, program)
        theirs.close()
        self._children.add(pid)
        self._parked[pid] = channel.Channel(ours, messages.ToZygote)
        return True, None

    def _fork(self, token: int, fds: list[int], work: Work) -> Work | None:
        zygote = os.getpid()
        try:
            pid = os.fork()
        except OSError as failure:
            channel.close_all(fds)
            self._link.send(messages.NotForked(token, failure.strerror or str(failure)))
            return None
        if pid == 0:
            self._leave()
            os.setsid()
            linux.die_with_parent(zygote)
            return work
        channel.close_all(fds)
        self._children.add(pid)
        self._link.send(messages.Forked(token, pid))
        return None

    def _grow(self, request: messages.Grow, fds: list[int]) -> Work | None:
        """Fork a zygote-to-be beside this one. Forked twice, so that the janitor is its parent and this one may end."""
        first = os.fork()
        if first != 0:
            channel.close_all(fds)
            os.waitpid(first, 0)
            return None
        self._leave()
        between = os.getpid()
        if os.fork() != 0:
            os._exit(0)
        while os.getppid() == between:
            os.sched_yield()
        os.setsid()
        linux.die_with_parent(request.janitor)
        return lambda: main(fds[0], request.modules)

    def _leave(self) -> None:
        """In a child: give up what is the zygote's own."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.close(self._wakeup_r)
        os.close(self._wakeup_w)
        self._link.close()
        for link in self._parked.values():
            link.close()

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, raw = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                self._children.discard(pid)
                if (parked := self._parked.pop(pid, None)) is not None:
                    parked.close()
                self._link.send(messages.Exited(pid, os.waitstatus_to_exitcode(raw), time.monotonic()))

    def _plan_logs(self, request: messages.PlanLogs) -> messages.LogsPlanned:
        from holdfast.agent import torch_plugins

        try:
            return torch_plugins.plan_logs(_log_plans, request)
        except Exception as failure:
            reason = f"{type(failure).__name__}: {failure}"
            return messages.LogsPlanned({}, {}, {}, {}, {}, "", "", error=reason)


def _wait_for_work(sock: socket.socket, program: messages.Program | None) -> None:
    if program is not None:
        importlib.import_module("holdfast.worker.programs").prepare(program)
        importlib.import_module("holdfast.worker.rehearsal").rehearse()
    link: channel.Channel[messages.ToZygote] = channel.Channel(sock, messages.ToZygote)
    try:
        received = link.receive()
    except channel.ChannelClosed:
        received = None
    link.close()
    if received is None:
        os._exit(0)
    request, fds = received
    assert isinstance(request, (messages.ForkWorker, messages.ForkKeeper))
    _work(request, fds)


def _work(request: messages.ForkWorker | messages.ForkKeeper, fds: list[int]) -> None:
    if isinstance(request, messages.ForkKeeper):
        _keep_store(request, fds[0])
    else:
        _run_worker(request, fds)


def _run_worker(request: messages.ForkWorker, fds: list[int]) -> None:
    from holdfast.worker import bootstrap  # loaded before the fork, see PRELOAD

    bootstrap.run(request, fds)


def _keep_store(request: messages.ForkKeeper, listener: int) -> None:
    """Hold one TCPStore, for one world, until the agent ends this process."""
    from torch._C._distributed_c10d import TCPStore

    linux.set_title("holdfast next store" if request.waits else "holdfast store")
    signal.signal(signal.SIGCONT, lambda *_: None)
    store = TCPStore(request.host, request.port, is_master=True, wait_for_workers=False, master_listen_fd=listener)
    while store is not None:
        signal.pause()
        linux.set_title("holdfast store")  # for people


def _count_devices(request: messages.CountDevices, answer_fd: int) -> None:
    from holdfast.agent import torch_plugins

    link: channel.Channel[messages.Report] = channel.Channel(channel.adopt(answer_fd), messages.Report)
    try:
        link.send(messages.Counted(request.token, torch_plugins.count_devices(request.kind)))
    except ValueError as refusal:
        link.send(messages.Counted(request.token, 0, str(refusal)))
    os._exit(0)  # this process may hold a GPU context; nothing of it is to be torn down in order


def _import_checked(names: tuple[str, ...]) -> dict[str, str]:
    """Import what a world's ranks had imported. On the first package that cannot be shared by a fork, say so and end:
    its threads or its GPU context cannot be taken out of this process again, but the next one can do without it."""
    refused: dict[str, str] = {}
    for name in names:
        package = name.partition(".")[0]
        if package in refused:
            continue
        try:
            importlib.import_module(name)
        except Exception as failure:
            refused[package] = f"{type(failure).__name__}: {failure}"
            continue
        if reason := _unforkable():
            refused[package] = reason
            break
    return refused


def _unforkable() -> str:
    """Why a child of this process would be broken, or ''."""
    if linux.thread_count() > 1:
        _settle_threads()
        if linux.thread_count() > 1:
            return "it leaves a thread running"
    torch = sys.modules["torch"]
    if torch.cuda.is_initialized() or _holds_gpu():
        return "it opens the GPU"
    return ""


def _holds_gpu() -> bool:
    for fd in linux.open_descriptors():
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{fd}").startswith("/dev/nvidia-uvm"):
                return True
    return False


def _settle_threads() -> None:
    """Fork once for nothing: OpenBLAS ends its thread pool at a fork, and starts it again only when it is used."""
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
