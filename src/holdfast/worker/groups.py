"""The process groups of a rank: how to get out of one that is broken, and into the next world's.

NCCL can be aborted from another thread, and lets go of who waits within milliseconds. Then it takes half a second
more, until one of its own threads looks up; nobody waits for that. Gloo cannot be aborted: a rank that waits for a peer
waits until the connection is closed, or for half an hour. So the connections that a gloo group makes are noted as it
makes them, and closed from here.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import os
import socket
import stat
import sys
import termios
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, NamedTuple, NoReturn

from holdfast import linux
from holdfast.wire.snapshots import STANDBY, STAYED
from holdfast.worker import handles

SETTLE_S = 0.005
STILL = 12  # looks, a quarter of a millisecond apart, between which nothing has moved
ERRORS = 2  # a level of torch's C++ logs
ESTABLISHED = 1  # as Linux has it in the first byte of tcp_info
# What takes all ranks, or another one.
COLLECTIVES = (
    "all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "all_to_all", "all_to_all_single",
    "barrier", "batch_isend_irecv", "broadcast", "broadcast_object_list", "gather", "gather_object", "irecv", "isend",
    "monitored_barrier", "new_group", "recv", "reduce", "reduce_scatter", "reduce_scatter_tensor",
    "scatter", "scatter_object_list", "send", "split_group",
)  # fmt: skip
GROUPS = ("new_group", "split_group")


class Made(NamedTuple):
    """How the default group was made."""

    backend: str | None
    timeout: timedelta | None
    device: Any


_connects = False  # to the store of its next world
_settled = False  # this rank has what the others have
_early = ""  # what the program called for all ranks before that
_on_own_group: Callable[[str], None] | None = None
_wanted: Made | None = None
_level: int | None = None  # of those logs, while they are hushed
_wrappers: weakref.WeakSet[Any] = weakref.WeakSet()
_meshes: list[weakref.ref[Any]] = []  # two that are alike are two
_backends = threading.Lock()  # a group is asked for what it consists of in C++, or is given something else
_sockets: set[tuple[int, int]] = set()  # of gloo's connections: descriptor and inode
_ending: dict[int, threading.Thread] = {}  # each that aborts one of NCCL's, by that one's id


def wrap() -> None:
    """Note what groups are made, and their connections. A zygote does that for all its children, as `phases.wrap`."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d
    from torch.distributed.device_mesh import DeviceMesh
    from torch.nn.parallel import DistributedDataParallel

    if (make := getattr(c10d, "_new_process_group_helper", None)) is not None:
        c10d._new_process_group_helper = _noting(make)
    for name in COLLECTIVES:
        if (call := getattr(c10d, name, None)) is not None:
            watched = _watched(name, call)
            for module in (c10d, dist, sys.modules.get("torch.distributed.device_mesh")):
                if getattr(module, name, None) is call:
                    setattr(module, name, watched)
    DistributedDataParallel.__init__ = _noted(DistributedDataParallel.__init__)  # type: ignore[method-assign]
    DeviceMesh.__init__ = _keeping(DeviceMesh.__init__)  # type: ignore[method-assign]


def stand_by() -> None:
    """In a process that has no rank yet."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    dist.init_process_group = c10d.init_process_group = _pretend(c10d.init_process_group)
    register_optimizer_step_pre_hook(_trains_in_vain)


def _watched(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def called(*args: Any, **kwargs: Any) -> Any:
        global _early
        if not _settled and name == "new_group":
            return _make_own(call, args, kwargs)
        if not _settled:
            _early = _early or name
        elif name in GROUPS and _on_own_group is not None:
            _on_own_group(name)
        return call(*args, **kwargs)

    return called


def _make_own(call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A group that can be made again in each world, or else is a call like others."""
    global _early
    _refuse_to_stand_by_in("new_group()")
    kept = False
    try:
        group = call(*args, **kwargs)
        kept = handles.keep(call, args, kwargs, group)
        return group
    finally:
        if not kept:
            _early = _early or "new_group"


def _refuse_to_stand_by_in(what: str) -> None:
    if os.environ.get(STANDBY):
        why = f"{what} is called before run.attach(), and who is in a group, and where, depends on the rank"
        refuse_to_stand_by(f"cannot take a rank's place: {why}")


def _keeping(init: Callable[..., None]) -> Callable[..., None]:
    """Of a mesh, which may have the default group in it."""

    @functools.wraps(init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        if not _settled:
            _refuse_to_stand_by_in("DeviceMesh()")
        init(self, *args, **kwargs)
        if not _settled:
            handles.keep_default()
            _meshes.append(weakref.ref(self))

    return __init__


def meshes() -> list[Any]:
    """Each DeviceMesh that was made before `run.attach()`, by the program or for it, and is still there."""
    return [mesh for each in _meshes if (mesh := each()) is not None]


def on_own_group(call: Callable[[str], None]) -> None:
    """What is to be called when the program makes a group for itself later."""
    global _on_own_group
    _on_own_group = call


def early() -> str:
    """What the program has called before `run.attach()`, if anything, that a rank which is new among old ones would be
    alone in."""
    return _early


def _pretend(init: Callable[..., None]) -> Callable[..., None]:
    """For a process without a rank: a group whose collectives do nothing. How the program wanted it is kept."""

    @functools.wraps(init)
    def init_process_group(
        backend: Any = None, init_method: Any = None, timeout: timedelta | None = None, *args: Any, **kwargs: Any
    ) -> None:
        global _wanted
        if not os.environ.get(STANDBY):  # it has a rank by now
            init(backend, init_method, timeout, *args, **kwargs)
            return
        from torch.testing._internal.distributed import fake_pg

        _wanted = Made(backend, timeout, kwargs.get("device_id"))
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        init("fake", rank=rank, world_size=size, store=fake_pg.FakeStore())

    return init_process_group


def _trains_in_vain(*_: Any) -> None:
    if os.environ.get(STANDBY):
        refuse_to_stand_by("has to call run.attach() before it trains")


def refuse_to_stand_by(why: str) -> NoReturn:
    print(f"holdfast: a program that stands by {why}", file=sys.stderr, flush=True)
    os._exit(1)


def _noted(init: Callable[..., None]) -> Callable[..., None]:
    """Of a new rank among old ones without a word to them: they have wrapped their modules long ago, and bring the
    weights along. What is wrapped after that is wrapped by all."""

    @functools.wraps(init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        alone = not _settled and (os.environ.get(STAYED) or os.environ.get(STANDBY))
        init(self, *args, **({**kwargs, "init_sync": False} if alone else kwargs))
        if not _settled:
            _wrappers.add(self)
        elif _on_own_group is not None:
            _on_own_group("DistributedDataParallel")

    return __init__


def wrappers() -> list[Any]:
    """Each DistributedDataParallel that the program has made before `run.attach()` and still has."""
    return list(_wrappers)


def _noting(make: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(make)
    def made(*args: Any, **kwargs: Any) -> Any:
        before = set(_open_sockets())
        try:
            return make(*args, **kwargs)
        finally:
            _sockets.update(found for found in _open_sockets() if found not in before and _remote(found[0]))

    return made


def _open_sockets() -> Iterator[tuple[int, int]]:
    """Descriptors, and their inodes."""
    for fd in linux.open_descriptors():
        with contextlib.suppress(OSError):
            status = os.fstat(fd)
            if stat.S_ISSOCK(status.st_mode):
                yield fd, status.st_ino


def _remote(fd: int) -> int:
    """The port at the other end of a TCP connection; 0 if it is none, or is one that listens."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as found:
        if found.family in (socket.AF_INET, socket.AF_INET6) and found.type == socket.SOCK_STREAM:
            return int(found.getpeername()[1])
    return 0


def settle() -> None:
    global _settled
    _settled = True


def abort(store: bool = False) -> None:
    """Have whoever waits in a collective of this world fail, now; or also whoever waits for its store, if it has got
    to it: torch's client tries again after half a second where its connecting is cut off. From any thread."""
    from torch.distributed import distributed_c10d as c10d

    with _backends:
        for backend in [each for group in list(c10d._world.pg_names) for each in handles.backends(group) or [group]]:
            _abort(backend)
    stores = os.environ.get("MASTER_PORT", "") if store and not _connects else ""
    if stores:
        _hush(True)
    with contextlib.ExitStack() as opened:
        closing = []
        for fd, inode in _open_sockets():
            with contextlib.suppress(OSError):  # whoever had it may close it in this moment
                if (fd, inode) in _sockets or (stores and str(_remote(fd)) == stores):
                    closing.append(opened.enter_context(socket.socket(fileno=os.dup(fd))))
        _settle(closing)
        for each in closing:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


def _abort(backend: Any) -> None:
    """NCCL's each in a thread of its own: that of one may wait for what the GPU does for another."""
    if not _is_nccl(backend):
        with contextlib.suppress(Exception):
            backend.abort()
    elif id(backend) not in _ending:
        ends = threading.Thread(target=_abort_nccl, args=(backend,), name="holdfast-nccl", daemon=True)
        _ending[id(backend)] = ends
        ends.start()


def _abort_nccl(backend: Any) -> None:
    for end in (backend.abort, backend.shutdown):
        with contextlib.suppress(Exception):
            end()
    del _ending[id(backend)]


def _is_nccl(backend: Any) -> bool:
    from torch.distributed import distributed_c10d as c10d

    return c10d.is_nccl_available() and isinstance(backend, c10d.ProcessGroupNCCL)


def wait_for_gpu() -> None:
    """After `abort()`: until what the GPU was doing in these groups has come to its end. It writes into memory that is
    given to something else from here on."""
    import torch

    if _ending:
        torch.cuda.synchronize()


def _hush(hushed: bool) -> None:
    """Whether torch's C++ keeps its warnings to itself: who waits at a store that is closed prints a page of frames."""
    import torch

    global _level
    with contextlib.suppress(OSError, ValueError):  # a torch that has it elsewhere
        flag = ctypes.c_int.in_dll(ctypes.CDLL(f"{torch.__path__[0]}/lib/libc10.so"), "FLAGS_caffe2_log_level")
        if hushed and _level is None:
            _level, flag.value = flag.value, max(ERRORS, flag.value)
        elif not hushed and _level is not None:
            flag.value, _level = _level, None


def _settle(connections: list[socket.socket]) -> None:
    """Let what is on its way between the living arrive. Gloo tells nobody who waits for a message that was cut off in
    its middle, so that whoever does so waits for the group's timeout. Of two ranks no other lives."""
    if os.environ.get("WORLD_SIZE") == "2":
        return
    until_s = time.monotonic() + SETTLE_S
    before, still = list(map(_unread, connections)), 0
    while any(before) and still < STILL and time.monotonic() < until_s:
        time.sleep(SETTLE_S / 20)
        now = list(map(_unread, connections))
        before, still = now, still + 1 if now == before else 0


def _unread(connection: socket.socket) -> bytes:
    """How much was not read, here and there, if both ends are."""
    counts = [bytearray(4), bytearray(4)]
    with contextlib.suppress(OSError):
        if connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == ESTABLISHED:
            for what, count in zip((termios.FIONREAD, termios.TIOCOUTQ), counts, strict=True):
                fcntl.ioctl(connection, what, count)
    return b"".join(counts) if any(map(any, counts)) else b""


def made() -> Made | None:
    """None: there is no group."""
    import torch
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    if not dist.is_initialized():
        return None
    if _wanted is not None:
        return _wanted
    group = c10d._get_default_group()
    timeout = None
    for device in group._device_types:
        with contextlib.suppress(Exception):
            timeout = group._get_backend(torch.device(device)).options._timeout
    backend = str(dist.get_backend(group))
    if backend == dist.Backend.UNDEFINED:  # one for each kind of device
        backend = str(c10d._world.pg_backend_config[group])
    return Made(backend, timeout, getattr(group, "bound_device_id", None))


def leave() -> None:
    """Forget all groups. They are gone when nobody has them any more, which with gloo is waited for: its threads look
    only every ten milliseconds whether they are to end."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    abort()
    last = list(c10d._world.pg_names)
    if _ending:
        c10d._world.pg_names.clear()  # those in there are shut down first, which is being done already
    with contextlib.suppress(Exception):
        dist.destroy_process_group()
    with _backends:
        last += handles.let_go(last)
    threading.Thread(target=last.clear, name="holdfast-groups", daemon=True).start()
    _sockets.clear()


def join(as_before: Made, is_over: Callable[[], object]) -> None:
    """The group of the world that the environment names, and those that the program has made before `run.attach()`.
    Raises RuntimeError if that world is over by now, too."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    # A group has the number of those before it in its name. One that could not be made has taken one, and new ranks
    # begin with the first.
    c10d._world.group_count = 0
    _hush(False)
    store, rank, size = _connect(as_before.timeout or c10d.default_pg_timeout, is_over)
    dist.init_process_group(
        as_before.backend, store=store, rank=rank, world_size=size, timeout=as_before.timeout,
        device_id=as_before.device,
    )  # fmt: skip
    handles.make_again()


def _connect(timeout: timedelta, is_over: Callable[[], object]) -> tuple[Any, int, int]:
    """As `init_process_group` does, but nobody cuts it off. Whoever would have has known before that the world is over,
    so that it is seen here, before or after."""
    global _connects
    from torch.distributed import distributed_c10d as c10d
    from torch.distributed.rendezvous import rendezvous

    _connects = True
    try:
        if not is_over():
            store, rank, size = next(rendezvous("env://", timeout=timeout))
            store.set_timeout(timeout)
    finally:
        _connects = False
    if is_over():
        raise RuntimeError("the world is over before its group was made")
    return c10d.PrefixStore("default_pg", store), rank, size
