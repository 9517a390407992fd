"""Addresses to meet at: which are this machine's, how to come to etcd, and what went wrong in words."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import os
import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from holdfast.agent.options import Cluster
from holdfast.wire import peer as wire
from holdfast.wire.session import Broken

if TYPE_CHECKING:
    from holdfast.coordinator.etcd import Etcd


Addresses = Sequence[tuple[Any, ...]]  # as getaddrinfo gives them


def open_etcd(cluster: Cluster, run_id: str) -> Etcd:
    """The job's corner of etcd. Raises `EtcdError`; nothing of etcd is imported before it is wanted."""
    from holdfast.coordinator import etcd

    access = cluster.etcd
    scheme = "https://" if access.tls else ""
    members = [f"{scheme}{f'[{host}]' if ':' in host else host}:{port}" for host, port in cluster.endpoints]
    return etcd.Etcd(
        members, run_id, ca=access.ca, cert=access.cert, key=access.key, user=access.user, password=access.password
    )


def leads_home(host: str, found: Addresses) -> bool:
    """Whether a name that others know as this machine's is a loopback address here."""
    addresses = {address[0] for *_, address in found}
    named = host not in addresses and not host.startswith("localhost")
    return named and all(ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in addresses)


def listen(found: Addresses) -> tuple[socket.socket | None, bool]:
    """A socket at the first of these addresses that is this machine's; and whether there is one, but it is taken. The
    next one will not do then: whoever took the first has the name, and localhost often has two."""
    for family, kind, proto, _, address in found:
        listener = socket.socket(family, kind, proto)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(wire.BACKLOG)
            return listener, False
        except OSError as failure:
            listener.close()
            if failure.errno == errno.EADDRINUSE:
                return None, True
    return None, False


async def address_towards(endpoints: tuple[tuple[str, int], ...]) -> str:
    """The address of this machine that others would see from over there."""
    for host, port in endpoints:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_DGRAM)
        family, kind, proto, _, address = found[0]
        with contextlib.suppress(OSError), socket.socket(family, kind, proto) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    raise OSError(f"no route to {endpoints[0][0]}; name this node's address with --local-addr")


def family(addr: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in addr else socket.AF_INET


def cure(broken: Broken, secret_from: str) -> str:
    match broken.kind:
        case "secret":
            from_file = secret_from.startswith("the file ")
            return f"; {'copy that file from' if from_file else 'set it here as it is on'} the coordinator's node"
        case "not-holdfast":
            return "; choose another port with --rdzv-endpoint"
        case "version":
            return "; install the same holdfast everywhere"
    return ""


def reason(failure: BaseException) -> str:
    """What went wrong with a connection, for people."""
    if isinstance(failure, Broken):
        return f"it {failure.reason}"
    if isinstance(failure, socket.gaierror):
        return "its name cannot be resolved"
    if isinstance(failure, TimeoutError):
        return "no answer"
    if isinstance(failure, ConnectionResetError):
        return "it closed the connection; do both ends use TLS?"
    if (doubt := getattr(failure, "verify_message", "")) or type(failure).__name__.startswith("SSL"):
        return f"TLS: {doubt or failure}"
    if isinstance(failure, OSError) and failure.errno is not None:
        return os.strerror(failure.errno)  # asyncio's own text is for programmers
    return str(failure) or type(failure).__name__
