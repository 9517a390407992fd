"""Where nodes come in: the listening socket of a coordinator, and of others' that meet at the same endpoint."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

from holdfast.control import protocol
from holdfast.coordinator.host import Deliver, Host
from holdfast.wire import peer as wire
from holdfast.wire.secret import Secret
from holdfast.wire.session import Broken

if TYPE_CHECKING:
    from ssl import SSLContext


class Desk:
    """Serves one job's coordinator. A second job whose nodes were given the same endpoint registers its own port here,
    and its nodes are sent on."""

    def __init__(
        self, run_id: str, host: Host, secret: Secret, say: Callable[[str], None], ssl: SSLContext | None = None
    ) -> None:
        self._run_id = run_id
        self._host = host
        self._secret = secret
        self._say = say
        self._ssl = ssl
        self._server: asyncio.Server | None = None
        self._delivers: dict[wire.Peer, tuple[str, Deliver]] = {}
        self._others: dict[str, tuple[int, wire.Peer]] = {}
        self._peers: set[wire.Peer] = set()
        self._visitors = 0
        self._complained: set[str] = set()

    async def open(self, sock: socket.socket) -> None:
        self._server = await wire.serve(sock, self._make_peer, ssl=self._ssl)

    @property
    def port(self) -> int:
        assert self._server is not None
        return int(self._server.sockets[0].getsockname()[1])

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for peer in list(self._peers):
            peer.close()

    def _make_peer(self) -> wire.Peer:
        return wire.Peer(
            "server",
            self._secret,
            protocol.ToCoordinator,
            on_ready=self._peers.add,
            on_message=self._from,
            on_closed=self._closed,
        )

    def _from(self, peer: wire.Peer, message: protocol.ToCoordinator) -> None:
        match message:
            case protocol.Seek(run_id=run_id):
                self._sought(peer, run_id)
            case protocol.Register(run_id=run_id, port=port):
                self._others[run_id] = (port, peer)
            case _:
                self._from_job(peer, message)

    def _sought(self, peer: wire.Peer, run_id: str) -> None:
        if run_id == self._run_id and not self._host.closed:
            self._visitors += 1
            self._delivers[peer] = (f"visitor {self._visitors}", peer.send)
            peer.send(protocol.Here())
        elif run_id in self._others:
            peer.send(protocol.Elsewhere(self._others[run_id][0]))
        else:
            peer.send(protocol.Nobody())

    def _from_job(self, peer: wire.Peer, message: protocol.ToCoordinator) -> None:
        if peer not in self._delivers:
            peer.abort()  # it never said which job it means
            return
        node, deliver = self._delivers[peer]
        if isinstance(message, protocol.Hello) and message.node != node:
            node = message.node
            self._delivers[peer] = (node, deliver)
            self._host.attach(node, deliver, peer.close)
        elif isinstance(message, protocol.Look):
            self._host.attach(node, deliver, peer.close)
        self._host.receive(node, message)

    def _closed(self, peer: wire.Peer, why: Broken | None) -> None:
        self._peers.discard(peer)
        for run_id in [run_id for run_id, (_, registrant) in self._others.items() if registrant is peer]:
            del self._others[run_id]
        if (known := self._delivers.pop(peer, None)) is not None:
            self._host.detach(*known)
        if why is not None and why.kind not in ("lost", "full"):
            self._complain(peer, why)

    def _complain(self, peer: wire.Peer, why: Broken) -> None:
        """Strangers and mistakes are told of once per address and kind; they harm nothing."""
        who = peer.peername.rpartition(":")[0]
        if f"{who} {why.kind}" not in self._complained and len(self._complained) < 100:
            self._complained.add(f"{who} {why.kind}")
            self._say(f"refused a connection from {who}: it {why}")
