"""Checks of a collective between ranks on this machine: with gloo between two, with NCCL between all GPUs."""

from __future__ import annotations

import contextlib
import datetime
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable
from functools import partial
from typing import NoReturn

import msgspec

from holdfast import linux
from holdfast.control.causes import signal_name
from holdfast.doctor.finding import Asked, Finding, fail, first_line, ok, plural, skipped
from holdfast.wire.symptoms import is_backend

HOME = "127.0.0.1"
NUMBERS = 1 << 20
PERIOD = 97  # a prime: no way to cut the numbers into parts makes two of them alike
MEET_S = 30.0
AFTER_FAILURE_S = 0.5


class Report(msgspec.Struct, frozen=True):
    error: str = ""
    took_s: float = 0.0


def collective(asked: Asked) -> Finding:
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "")
    cure = (
        f"GLOO_SOCKET_IFNAME is {interface!r}: ip addr shows which interfaces there are"
        if interface
        else "see ip addr and this machine's name in /etc/hosts; GLOO_SOCKET_IFNAME chooses an interface"
    )
    return _all_reduce("gloo", 2, cure)


def nccl(asked: Asked) -> Finding:
    count = _count_gpus()
    if count == 0:
        return skipped("no GPU here")
    cure = "run it with NCCL_DEBUG=INFO; see the driver, /dev/shm and NCCL_SOCKET_IFNAME"
    return _all_reduce("nccl", count, cure)


def _count_gpus() -> int:
    """In a process of its own: to ask is to open the driver, and who has done so cannot be forked any more."""
    import torch

    read, write = os.pipe()

    def count() -> None:
        os.write(write, str(torch.cuda.device_count() if torch.cuda.is_available() else 0).encode())

    pid = _fork(count)
    os.close(write)
    with open(read) as pipe:
        text = pipe.read()
    os.waitpid(pid, 0)
    return int(text or "0")


def _all_reduce(backend: str, size: int, cure: str) -> Finding:
    import torch.distributed  # noqa: F401  # once for all that are forked

    what = f"{backend}, {plural(size, 'rank')}"
    listener = socket.create_server((HOME, 0))
    selector = selectors.DefaultSelector()
    pids: list[int] = []
    for rank in range(size):
        read, write = os.pipe()
        pids.append(_fork(partial(_be, backend, rank, size, listener, write)))
        os.close(write)
        selector.register(read, selectors.EVENT_READ, rank)
    reports = _collect(selector, pids)
    linux.signal_all(pids, signal.SIGKILL)
    for pid in pids:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)
    if failed := {rank: report for rank, report in reports.items() if report.error}:
        rank = min(failed, key=lambda rank: (is_backend(failed[rank].error), rank))
        return fail(f"{what}: rank {rank}: {failed[rank].error}", cure)
    took_s = max(report.took_s for report in reports.values())
    text = f"{what}: an all-reduce of {NUMBERS * 4 >> 20} MiB is right, {took_s * 1e3:.1f} ms"
    return ok(text, ranks=size, all_reduce_s=round(took_s, 6))


def _collect(selector: selectors.BaseSelector, pids: list[int]) -> dict[int, Report]:
    """Of all ranks, or until shortly after one has failed: a rank that lost another says so first, and is not to
    blame."""
    reports: dict[int, Report] = {}
    while selector.get_map():
        failed = any(report.error for report in reports.values())
        ready = selector.select(AFTER_FAILURE_S if failed else None)
        if not ready:
            break
        for key, _ in ready:
            content = os.read(key.fd, 1 << 16)
            selector.unregister(key.fd)
            reports[key.data] = (
                msgspec.json.decode(content, type=Report) if content else Report(_epitaph(pids[key.data]))
            )
    return reports


def _epitaph(pid: int) -> str:
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return f"its process was ended by {signal_name(-code)}" if code < 0 else f"its process ended with code {code}"


def _fork(work: Callable[[], None]) -> int:
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            linux.die_with_parent(parent)
            work()
        finally:
            os._exit(0)
    return pid


def _be(backend: str, rank: int, size: int, listener: socket.socket, write: int) -> NoReturn:
    try:
        report = Report(took_s=_reduce(backend, rank, size, listener))
    except Exception as failure:
        report = Report(error=first_line(failure))
    os.write(write, msgspec.json.encode(report))
    while True:  # others may not be done, and the first rank has the store
        signal.pause()


def _reduce(backend: str, rank: int, size: int, listener: socket.socket) -> float:
    """How long one takes, the second: the first makes the connections."""
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import TCPStore

    port = listener.getsockname()[1]
    limit = datetime.timedelta(seconds=MEET_S)
    if rank == 0:
        fd = listener.detach()
        store = TCPStore(HOME, port, size, True, limit, wait_for_workers=False, master_listen_fd=fd)
    else:
        listener.close()
        store = TCPStore(HOME, port, size, False, limit, wait_for_workers=False)
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if backend == "nccl":
        torch.cuda.set_device(device)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit)
    numbers = (torch.arange(NUMBERS, device=device) % PERIOD).float()
    wanted = numbers * (size * (size + 1) // 2)
    took_s = 0.0
    for _ in range(2):
        given = numbers * (rank + 1)
        began_s = time.perf_counter()
        dist.all_reduce(given)
        is_right = torch.equal(given, wanted)  # whole numbers that float32 holds exactly; waits for a GPU, too
        took_s = time.perf_counter() - began_s
        if not is_right:
            raise RuntimeError(f"{int((given != wanted).sum()):,} of {NUMBERS:,} sums of an all-reduce are wrong")
    return took_s
