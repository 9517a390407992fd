"""What is checked on this node before any worker starts. A refusal is one line, with the next step in it."""

from __future__ import annotations

import asyncio
import os
import socket
from typing import TYPE_CHECKING, Any

from holdfast.agent.options import Cluster, Options
from holdfast.agent.rundir import RunDirectory
from holdfast.agent.zygotes import Zygotes
from holdfast.control.worlds import one_gpu_env
from holdfast.wire import channel, messages

if TYPE_CHECKING:
    from ssl import SSLContext


class Refused(Exception):
    """Something the user asked for cannot be had."""


def listen(host: str, port: int) -> socket.socket:
    """The socket that a store keeper will serve. Bound by the agent, so that its port is known before any fork."""
    listener: socket.socket | None = None
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, proto)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(2048)
        return listener
    except socket.gaierror as failure:
        raise Refused(
            f"cannot resolve the host name {host!r}: {failure.strerror}; check its spelling and DNS"
        ) from None
    except OSError as failure:
        if listener is not None:
            listener.close()
        what = f"port {port} on {host}" if port else f"the address {host}"
        raise Refused(f"cannot listen on {what}: {failure.strerror}; choose another, or leave it out") from None


def open_run_directory(options: Options) -> RunDirectory:
    try:
        run_dir = RunDirectory(options.log_dir, options.settings.run_id)
        if (folder := run_dir.join("incidents")) is not None:
            os.makedirs(folder, exist_ok=True)
        return run_dir
    except OSError as failure:
        where = failure.filename or options.log_dir
        raise Refused(
            f"--log-dir: cannot write {where}: {failure.strerror}; name one that this user may write"
        ) from None


def tls(cluster: Cluster) -> tuple[SSLContext, SSLContext] | None:
    """The contexts of both sides: a node is one or the other, as it comes."""
    if cluster.tls is None:
        return None
    from holdfast.wire.tls import TlsError, client_context, server_context

    try:
        return server_context(*cluster.tls), client_context(*cluster.tls)
    except TlsError as failure:
        raise Refused(str(failure)) from None


def check_gpus(nproc: int) -> None:
    try:
        one_gpu_env(nproc - 1, os.environ)
    except ValueError as refusal:
        raise Refused(f"--virtual-local-rank: {refusal}; lower --nproc-per-node or name more GPUs") from None


async def count_devices(helpers: Zygotes, kind: str, flag: str, stopped: asyncio.Future[Any]) -> int:
    """Ask torch, in a process of its own: to look at a GPU is to open it, and a zygote must not."""
    loop = asyncio.get_running_loop()
    ours, theirs = channel.pair()
    link: channel.Channel[messages.Report] = channel.Channel(ours, messages.Report)
    answered = asyncio.Event()
    loop.add_reader(link.fileno(), answered.set)
    try:
        helpers.request(messages.CountDevices(-1, kind), [theirs.fileno()])  # -1: no process of any world
        theirs.close()
        stopped.add_done_callback(lambda _: answered.set())  # a driver may hang for ever
        await answered.wait()
        if stopped.done():
            raise Refused(f"{flag}: stopped while devices were counted")
        received = link.receive()
        counted = received[0] if received else None
    except channel.ChannelClosed:
        counted = None
    finally:
        loop.remove_reader(link.fileno())
        link.close()
    if isinstance(counted, messages.Counted) and counted.count > 0:
        return counted.count
    reason = counted.reason if isinstance(counted, messages.Counted) else "the process that counted the devices died"
    raise Refused(f"{flag}: {reason}")
