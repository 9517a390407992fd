"""The line of an agent in a cluster: finds the coordinator at the endpoint, or where etcd says, or becomes it."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
from typing import TYPE_CHECKING

import msgspec

from holdfast.agent.link import Post, Say
from holdfast.agent.meeting import Addresses, address_towards, cure, family, leads_home, listen, open_etcd, reason
from holdfast.agent.options import Cluster
from holdfast.control import acts, protocol
from holdfast.control.coordinator import Coordinator
from holdfast.control.membership import Record, Settings
from holdfast.control.restarts import Decide
from holdfast.coordinator import ledger
from holdfast.coordinator.desk import Desk
from holdfast.coordinator.host import Host, Merge
from holdfast.wire import peer as wire
from holdfast.wire.session import Broken

if TYPE_CHECKING:
    from ssl import SSLContext

    from holdfast.coordinator.etcd import Etcd, Leader

Answers = asyncio.Queue[protocol.ToAgent]

FIRST_PAUSE_S = 0.02
LAST_PAUSE_S = 1.0
CONNECT_S = 3.0
# What trying again does not mend.
FINAL = ("secret", "insecure", "version", "not-holdfast", "tls")


class Line:
    """The line of an agent in a cluster: a task that finds the coordinator, or becomes it, and does so again whenever
    it is lost. The ranks know nothing of it."""

    def __init__(
        self,
        cluster: Cluster,
        settings: Settings,
        node: str,
        decide: Decide,
        post: Post,
        say: Say,
        ledger_path: str | None,
        ledger_pattern: str,
        tls: tuple[SSLContext, SSLContext] | None,
        merge: Merge,
    ) -> None:
        self.addr = cluster.local_addr
        self._cluster = cluster
        self._settings = settings
        self._node = node
        self._decide = decide
        self._post = post
        self._say = say
        self._merge = merge
        self._ledger_path = ledger_path
        self._ledger_pattern = ledger_pattern
        self._server_tls = tls[0] if tls is not None else None
        self._client_tls = tls[1] if tls is not None else None
        self._said: set[str] = set()
        self._peer: wire.Peer | None = None
        self._host: Host | None = None
        self._desk: Desk | None = None
        self._met = False  # a coordinator of this job, ever
        self._answers: Answers = asyncio.Queue()  # of the present connection, before it is known to be the right one
        self._over = asyncio.Event()  # the present contact
        self._etcd: Etcd | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._keep_in_touch())
        self._task.add_done_callback(self._task_ended)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (failure := task.exception()) is not None:
            task.get_loop().call_exception_handler({"message": "the line failed", "exception": failure})

    @property
    def hosts(self) -> bool:
        return self._host is not None

    def tell(self, message: protocol.ToCoordinator) -> None:
        if self._host is not None:
            self._host.receive(self._node, message)
        elif self._peer is not None:
            self._peer.send(message)

    def hang_up(self, why: str) -> None:
        if self._host is not None:
            self._greet_again()
        elif self._peer is not None:
            self._peer.abort()

    def _greet_again(self) -> None:
        """There is nothing to hang up between two parts of one process; but what they know of each other can be stale,
        after a write to the ledger that took too long."""
        if self._host is not None and not self._host.closed:
            self._post(acts.ContactLost())
            self._host.attach(self._node, self._post, self._greet_again)
            self._post(acts.Contact())

    async def close(self) -> None:
        """Leave; if the coordinator is here and the job has ended, after everybody has been told."""
        if self._host is not None:
            await self._host.close(self._node)
        if self._desk is not None:
            self._desk.close()
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        if self._peer is not None:
            self._peer.close()
        if self._etcd is not None:
            await self._etcd.close()

    # -- finding it ---------------------------------------------------------------------------------------------------

    async def _keep_in_touch(self) -> None:
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                if self._cluster.backend == "etcd":
                    met = await self._meet_where_etcd_says()
                else:
                    met = await self._meet_at_endpoint()
            except Broken as broken:
                met = False
                if broken.kind in FINAL and not self._met:
                    what_next = cure(broken, self._cluster.secret.source)
                    self._post(protocol.Refused(f"the coordinator at {self._where}: it {broken.reason}{what_next}"))
                    return
                self._say_once(f"the coordinator at {self._where}: it {broken.reason}")
            except (OSError, TimeoutError) as failure:
                met = False
                self._say_once(f"no coordinator at {self._where} yet ({reason(failure)}); trying on")
            pause_s = FIRST_PAUSE_S if met else min(pause_s * 2, LAST_PAUSE_S)
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))

    @property
    def _where(self) -> str:
        return ", ".join(f"{host}:{port}" for host, port in self._cluster.endpoints)

    def _say_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self._say(text)

    async def _meet_at_endpoint(self) -> bool:
        """With c10d the agent that can listen at the endpoint is the coordinator; the address tells which host that is,
        and the kernel which of several agents on it."""
        host, port, found = await self._endpoint()
        if self._cluster.is_host is not False:
            listener, taken = listen(found)
            if listener is None and not taken and self._cluster.is_host:
                raise OSError(f"is_host is set, but {host} is no address of this machine; correct one of them")
            if listener is not None:
                await self._coordinate(listener)
                return True
        else:
            taken = False
        return await self._join(host, port, local=taken)

    async def _endpoint(self) -> tuple[str, int, Addresses]:
        """Where to listen, or else to connect. Debian, for one, has a machine's own name in /etc/hosts as 127.0.1.1."""
        [(host, port)] = self._cluster.endpoints
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        if self._cluster.is_host is False or not leads_home(host, found):
            return host, port, found
        if addr := self._cluster.local_addr:
            return addr, port, await loop.getaddrinfo(addr, port, type=socket.SOCK_STREAM)
        where = f"{host} is {found[0][4][0]!s} on this machine, where other machines cannot reach it"
        self._say_once(f"{where}; correct its /etc/hosts, or give --local-addr here")
        return host, port, found

    async def _join(self, host: str, port: int, local: bool) -> bool:
        peer = await self._connect(host, port)
        try:
            peer.send(protocol.Seek(self._settings.run_id))
            answer = await asyncio.wait_for(self._answers.get(), CONNECT_S)
            if isinstance(answer, protocol.Elsewhere):
                peer.close()
                peer = await self._connect(host, answer.port)
                peer.send(protocol.Seek(self._settings.run_id))
                answer = await asyncio.wait_for(self._answers.get(), CONNECT_S)
            if isinstance(answer, protocol.Nobody) and local:
                await self._coordinate_next_to(peer)
                return True
            if not isinstance(answer, protocol.Here):
                job = self._settings.run_id
                self._say_once(f"the coordinator at {self._where} knows no job {job!r} yet; trying on")
                return False
            self._met = True
            self.addr = self._cluster.local_addr or peer.local_host
            self._peer = peer
            self._post(acts.Contact())
            await self._over.wait()
            return True
        finally:
            if self._peer is peer:
                self._peer = None
                self._post(acts.ContactLost())
            peer.close()

    async def _connect(self, host: str, port: int) -> wire.Peer:
        answers: Answers = asyncio.Queue()
        over = asyncio.Event()
        self._answers, self._over = answers, over

        def make() -> wire.Peer:
            return wire.Peer(
                "client",
                self._cluster.secret,
                protocol.ToAgent,
                on_ready=lambda peer: None,
                on_message=lambda peer, message: self._from_peer(peer, message, answers),
                on_closed=lambda peer, why: self._peer_closed(over, answers),
            )

        return await asyncio.wait_for(wire.connect(host, port, make, ssl=self._client_tls), CONNECT_S)

    def _from_peer(self, peer: wire.Peer, message: protocol.ToAgent, answers: Answers) -> None:
        if peer is self._peer:
            self._post(message)
        else:
            answers.put_nowait(message)

    def _peer_closed(self, over: asyncio.Event, answers: Answers) -> None:
        over.set()
        answers.put_nowait(protocol.Nobody())

    # -- being it -----------------------------------------------------------------------------------------------------

    async def _coordinate(self, listener: socket.socket) -> None:
        """Be the coordinator of a job without etcd, with what an earlier life of it left."""
        within_s = self._settings.join_timeout_s + self._settings.node_timeout_s
        found = ledger.find(self._ledger_pattern, self._settings.run_id, within_s)
        if found is not None and found.seats:
            self._say(f"taking up the job at generation {found.generation}, restart {found.history.spent}")
        self.addr = self._cluster.local_addr or listener.getsockname()[0]
        file = ledger.File(self._ledger_path, self._say) if self._ledger_path is not None else ledger.Memory()
        await self._host_job(listener, found.term + 1 if found is not None else 0, found, file)

    async def _coordinate_next_to(self, desk: wire.Peer) -> None:
        """Another job has the endpoint: coordinate at another port, and have its desk send our nodes here. When that
        job ends, its port is free, and whoever of us comes first takes it."""
        addr = desk.remote_host  # the endpoint's own: a second address of this machine is not where it connects from
        listener = socket.create_server((addr, 0), family=family(addr), backlog=wire.BACKLOG)
        desk.send(protocol.Register(self._settings.run_id, listener.getsockname()[1]))
        reclaiming = asyncio.get_running_loop().create_task(self._take_endpoint_later(self._over))
        try:
            await self._coordinate(listener)
        finally:
            reclaiming.cancel()

    async def _take_endpoint_later(self, desk_closed: asyncio.Event) -> None:
        while True:
            await desk_closed.wait()
            with contextlib.suppress(OSError, Broken, TimeoutError):
                host, port, found = await self._endpoint()
                listener, _ = listen(found)
                if listener is not None and self._desk is not None:
                    await self._desk.open(listener)
                    return
                peer = await self._connect(host, port)  # yet another job was faster: register there
                desk_closed = self._over
                if self._desk is not None:
                    peer.send(protocol.Register(self._settings.run_id, self._desk.port))
                    continue
            await asyncio.sleep(LAST_PAUSE_S)

    async def _host_job(
        self, listener: socket.socket, term: int, record: Record | None, kept_in: ledger.Ledger
    ) -> None:
        loop = asyncio.get_running_loop()
        deposed = asyncio.Event()

        def step_down(why: str) -> None:
            self._say(f"this node is no longer the coordinator: {why}")
            deposed.set()

        coordinator = Coordinator(self._settings, term, record, self._node, self._decide)
        host = Host(loop, coordinator, kept_in, step_down, self._merge)
        desk = Desk(self._settings.run_id, host, self._cluster.secret, self._say, self._server_tls)
        try:
            await desk.open(listener)
            self._met = True
            self._host, self._desk = host, desk
            host.attach(self._node, self._post, self._greet_again)
            host.begin()
            self._post(acts.Contact())
            await deposed.wait()
        finally:
            host.abandon()
            desk.close()
            self._host = self._desk = None
            self._post(acts.ContactLost())

    # -- etcd ---------------------------------------------------------------------------------------------------------

    async def _meet_where_etcd_says(self) -> bool:
        from holdfast.coordinator import etcd

        try:
            if self._etcd is None:
                self._etcd = open_etcd(self._cluster, self._settings.run_id)
            leader = await self._etcd.leader()
            if leader is None:
                return await self._campaign(None)
            try:
                return await self._join(leader.addr, leader.port, local=False)
            except ConnectionRefusedError:
                # Its process is gone. Whoever writes next is fenced by the term, so there is no need to wait for the
                # lease.
                return await self._campaign(leader)
            except (OSError, TimeoutError):
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._etcd.wait_change(leader), LAST_PAUSE_S)
                return True
        except etcd.Unreachable as failure:
            self._say_once(f"{failure}; trying on")
            return False
        except etcd.EtcdError as failure:
            if self._met:
                self._say_once(str(failure))
                return False
            self._post(protocol.Refused(str(failure)))
            await asyncio.Event().wait()
            return False

    async def _campaign(self, instead_of: Leader | None) -> bool:
        from holdfast.coordinator.elected import Elected

        assert self._etcd is not None
        addr = self._cluster.local_addr or await address_towards(self._cluster.endpoints)
        listener = socket.create_server((addr, 0), family=family(addr), backlog=wire.BACKLOG)
        won = await self._etcd.campaign(self._node, addr, listener.getsockname()[1], instead_of=instead_of)
        if won is None:
            listener.close()
            return True
        leader, data = won
        self.addr = addr
        try:
            record = msgspec.msgpack.decode(data, type=Record) if data is not None else None
        except msgspec.MsgspecError as unknown:
            listener.close()
            raise Broken("version", f"left a record in etcd that cannot be read here ({unknown})") from None
        watching = asyncio.get_running_loop().create_task(self._watch_lease(self._etcd))
        try:
            await self._host_job(listener, leader.term, record, Elected(self._etcd))
        finally:
            watching.cancel()
        return True

    async def _watch_lease(self, client: Etcd) -> None:
        await client.lost.wait()
        if self._host is not None:
            self._host.depose("its lease in etcd was lost")
