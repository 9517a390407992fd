"""One job's corner of etcd: who coordinates it, in which term, and the record a successor starts from.

Safety is the term's alone: every write is a transaction that fails once a newer term exists. The lease only tells that
a coordinator is gone, so that a wrong guess about it costs a needless take-over and never a record.

etcd 3.4 or newer. The watch and the keep-alive are our own: aetcd's wait for ever on a member that is stopped.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import quote

import msgspec

from holdfast.coordinator.etcd_members import CALL_TIMEOUT_S, PAUSE_S, EtcdError, Members, Refused, Unreachable
from holdfast.coordinator.etcd_members import read_pem as _pem

__all__ = ["Deposed", "Etcd", "EtcdError", "Leader", "Unreachable"]

WATCH_QUIET_S = 2.0  # a watch with no word for so long is asked whether it still stands

T = TypeVar("T")


class Leader(msgspec.Struct, frozen=True):
    """Who coordinates. The term grows with every change, also over jobs of the same name."""

    term: int
    node: str
    addr: str
    port: int


class Deposed(Exception):
    """A newer term exists: whoever holds the older one must stop acting."""


@dataclass(frozen=True)
class _Lease:
    id: int
    ttl_s: float
    sent_s: float  # when it was asked for: etcd counts from later, so that we give up first


@dataclass
class _Held:
    """What the coordinator knows of its own term."""

    leader: Leader
    lease: int
    fence: int  # the revision that put the term. Unlike the term it never comes twice, even after `clear`
    record_revision: int  # the last known write of the record; a write that arrives late finds another and fails


class Etcd:
    """One agent's view of one job's keys. `lost` is set once a coordinator that was elected here must stop acting: its
    lease is gone, or could not be renewed in time by this machine's own clock, or a newer term was met."""

    def __init__(
        self,
        endpoints: Sequence[str],
        run_id: str,
        *,
        ca: str | os.PathLike[str] | None = None,
        cert: str | os.PathLike[str] | None = None,
        key: str | os.PathLike[str] | None = None,
        user: str | None = None,
        password: str | None = None,
    ) -> None:
        if (cert is None) != (key is None):
            raise EtcdError("etcd: a client certificate needs its key, and a key its certificate")
        if (user is None) != (password is None):
            raise EtcdError("etcd: a user needs a password, and a password a user")
        tls = None if ca is None and cert is None else (_pem(ca), _pem(cert), _pem(key))
        login = None if user is None or password is None else (user, password)
        self.lost = asyncio.Event()
        self._members = Members(endpoints, tls, login)
        # Quoted: job `a` must not clear the keys of job `a/b`.
        self._corner = f"/holdfast/{quote(run_id, safe='')}/".encode()
        self._term = self._corner + b"term"
        self._coordinator = self._corner + b"coordinator"
        self._record = self._corner + b"record"
        self._held: _Held | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._valid_until_s = 0.0
        self._acting = asyncio.Lock()  # a holder's writes follow one another: each names the one before

    @property
    def valid(self) -> bool:
        """Whether the lease still stands by this machine's own clock. `lost` comes with a turn of the loop, and a
        process that slept hears other things first."""
        return self._held is not None and asyncio.get_running_loop().time() < self._valid_until_s

    async def leader(self) -> Leader | None:
        """Who coordinates now."""
        return (await self._look())[0]

    async def campaign(
        self, node: str, addr: str, port: int, ttl_s: float = 2.0, instead_of: Leader | None = None
    ) -> tuple[Leader, bytes | None] | None:
        """Become the coordinator if there is none, or if it is still exactly `instead_of`, whatever its lease says.

        Returns the new term's leader and the last record; None if another won. An attempt whose answer was lost is
        known by its lease, which is nobody else's; one that arrives late finds other revisions and changes nothing.
        A term held here before is let go of first.
        """
        await self._let_go()
        lease: _Lease | None = None
        while True:
            seen = await self._transact(then=[self._get(self._coordinator), self._get(self._term)])
            current, term = map(_first, seen.responses)
            if current is not None and lease is not None and current.lease == lease.id:
                record = _first((await self._transact(then=[self._get(self._record)])).responses[0])
                return self._hold(_decode(current.value), lease, current.mod_revision, record)
            if current is not None and _decode(current.value) != instead_of:
                if lease is not None:
                    await self._revoke_soon(lease.id, CALL_TIMEOUT_S)
                return None
            lease = lease or await self._grant(ttl_s)
            # The first term of a job is a revision of etcd's, which only grow: a node of an earlier job of this name
            # must not know of a newer one.
            leader = Leader(seen.header.revision if term is None else int(term.value) + 1, node, addr, port)
            try:
                done = await self._transact(
                    compare=[
                        self._at_revision(self._term, _revision(term)),
                        self._at_revision(self._coordinator, _revision(current)),
                    ],
                    then=[
                        self._put(self._term, b"%d" % leader.term),
                        self._put(self._coordinator, msgspec.json.encode(leader), lease.id),
                        self._get(self._record),
                    ],
                )
            except Refused as error:
                if error.code != "NOT_FOUND":
                    raise
                lease = None  # it ran out on the way; nothing can be put under it any more
                continue
            if done.succeeded:
                stale_lease = 0 if current is None else current.lease
                return self._hold(leader, lease, done.header.revision, _first(done.responses[2]), stale_lease)

    async def write(self, record: bytes) -> None:
        """Replace the record, in this term. Raises `Deposed` when the term is over.

        A write that was retried can reach etcd a second time long after, and must not undo a later one: each names the
        revision it replaces. In this term nobody else writes, so another revision than the known one is our own.
        """
        async with self._acting:
            held = self._must_hold()
            while True:
                done = await self._transact(
                    compare=[
                        self._at_revision(self._term, held.fence),
                        self._at_revision(self._record, held.record_revision),
                    ],
                    then=[self._put(self._record, record)],
                    otherwise=[self._get(self._term), self._get(self._record)],
                )
                if done.succeeded:
                    held.record_revision = done.header.revision
                    return
                term, present = map(_first, done.responses)
                if term is None or term.mod_revision != held.fence:
                    raise await self._deposed(held)
                held.record_revision = _revision(present)
                if present is not None and present.value == record:
                    return

    async def wait_change(self, known: Leader | None) -> Leader | None:
        """Return the coordinator as soon as it is another than `known`. Outlasts members, watches and all of etcd being
        away; what cannot pass (a refused user, a certificate) is raised."""
        while True:
            try:
                leader, revision = await self._look()
                if leader != known:
                    return leader
                async with contextlib.aclosing(self._events(revision + 1)) as events:
                    async for leader in events:
                        if leader != known:
                            return leader
            except Unreachable:
                pass
            await asyncio.sleep(PAUSE_S)  # a watch that ends as soon as it begins must not spin

    async def resign(self) -> None:
        """Hand over now: without the lease the coordinator's key is gone, and whoever watches it sees that at once."""
        async with self._acting:
            held = await self._let_go()
            if held is not None:
                await self._revoke(held.lease)

    async def clear(self) -> None:
        """The job is over: remove all its keys. Raises `Deposed` when a newer term's coordinator has yet to say so."""
        async with self._acting:
            held = self._must_hold()
            rpc, end = self._members.rpc, self._corner[:-1] + b"0"  # the first key after all that begin so: "/" + 1
            done = await self._transact(
                compare=[self._at_revision(self._term, held.fence)],
                then=[rpc.RequestOp(request_delete_range=rpc.DeleteRangeRequest(key=self._corner, range_end=end))],
                otherwise=[self._get(self._term)],
            )
            # No term at all: this very call, the first time it was sent, or another coordinator with the same in mind.
            if not done.succeeded and _first(done.responses[0]) is not None:
                raise await self._deposed(held)
            await self._let_go()
            await self._revoke(held.lease)

    async def close(self) -> None:
        """Stop without a word to etcd: a coordinator that closes without resigning is missed when its lease ends."""
        await self._let_go()
        await self._members.close()

    # -- holding a term

    def _must_hold(self) -> _Held:
        if self._held is None:
            raise Deposed("this agent holds no term")
        return self._held

    def _hold(
        self, leader: Leader, lease: _Lease, fence: int, record: Any, stale_lease: int = 0
    ) -> tuple[Leader, bytes | None]:
        self._held = _Held(leader, lease.id, fence, _revision(record))
        self._valid_until_s = lease.sent_s + lease.ttl_s
        self.lost.clear()
        self._keeper = asyncio.create_task(self._keep(lease, stale_lease))
        # However it ends, unless by `_let_go`: the lease is not kept any more.
        self._keeper.add_done_callback(lambda task: None if task.cancelled() else self.lost.set())
        return leader, None if record is None else record.value

    async def _let_go(self) -> _Held | None:
        held, self._held = self._held, None
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            keeper.cancel()
            await asyncio.gather(keeper, return_exceptions=True)
        return held

    async def _deposed(self, held: _Held) -> Deposed:
        await self._let_go()
        self.lost.set()
        return Deposed(f"term {held.leader.term} of {held.leader.node} is over: a newer coordinator has the job")

    async def _keep(self, lease: _Lease, stale_lease: int) -> None:
        """Renew every third of the lease; return when it is gone or can no longer be proved.

        Attempts are short, so that a member that hangs leaves time for the others.
        """
        now = asyncio.get_running_loop().time
        while (left_s := lease.sent_s + lease.ttl_s - now()) > 0:
            sent_s = now()
            try:
                async with asyncio.timeout(left_s):  # a log-in on the way has a timeout of its own
                    ttl_s = await self._members.once(self._renewal(lease.id), lease.ttl_s / 6)
            except (EtcdError, TimeoutError):
                await asyncio.sleep(min(PAUSE_S, left_s))
                continue
            if ttl_s <= 0:
                return
            lease = _Lease(lease.id, ttl_s, sent_s)
            self._valid_until_s = sent_s + ttl_s
            if stale_lease and await self._revoke_soon(stale_lease, ttl_s / 6):
                # The one who was replaced may be alive, and learns from its lease that it is over.
                stale_lease = 0
            await asyncio.sleep(sent_s + ttl_s / 3 - now())

    def _renewal(self, lease: int) -> Callable[[Any, float], Awaitable[float]]:
        rpc = self._members.rpc

        async def ask(channel: Any, timeout_s: float) -> float:
            call = rpc.LeaseStub(channel).LeaseKeepAlive(timeout=timeout_s, metadata=self._members.metadata())
            try:
                await call.write(rpc.LeaseKeepAliveRequest(ID=lease))
                response = await call.read()
                if not response:
                    raise Unreachable("the member ended the stream")
                return float(response.TTL)
            finally:
                call.cancel()

        return ask

    async def _grant(self, ttl_s: float) -> _Lease:
        """A lease under an id of our own: asked for twice, it is still one."""
        sent_s, lease, whole_s = asyncio.get_running_loop().time(), secrets.randbits(62) + 1, math.ceil(ttl_s)
        request = self._members.rpc.LeaseGrantRequest(TTL=whole_s, ID=lease)
        try:
            return _Lease(lease, float((await self._members.call("Lease", "LeaseGrant", request)).TTL), sent_s)
        except Refused as error:
            if "lease already exists" not in error.details:
                raise
            return _Lease(lease, float(whole_s), sent_s)

    async def _revoke(self, lease: int) -> None:
        try:
            await self._members.call("Lease", "LeaseRevoke", self._members.rpc.LeaseRevokeRequest(ID=lease))
        except Refused as error:
            if error.code != "NOT_FOUND":
                raise

    async def _revoke_soon(self, lease: int, timeout_s: float) -> bool:
        """One attempt, and whether there is nothing left to try: a lease that nobody renews ends by itself."""
        request = self._members.rpc.LeaseRevokeRequest(ID=lease)
        try:
            await self._members.once(self._members.unary("Lease", "LeaseRevoke", request), timeout_s)
        except EtcdError as error:
            return isinstance(error, Refused)
        return True

    # -- reading and writing keys

    async def _look(self) -> tuple[Leader | None, int]:
        """Who coordinates, and the revision of the whole store in which that was so."""
        seen = await self._members.call("KV", "Range", self._members.rpc.RangeRequest(key=self._coordinator))
        return (_decode(seen.kvs[0].value) if seen.kvs else None), seen.header.revision

    async def _events(self, revision: int) -> AsyncGenerator[Leader | None, None]:
        """What the coordinator's key becomes from `revision` on. Ends when the watch cannot be relied on any more."""
        rpc, (at, channel) = self._members.rpc, self._members.channel()
        # A member cut off from the others would watch in silence; asked for a leader, it ends the watch.
        call = rpc.WatchStub(channel).Watch(metadata=(*self._members.metadata(), ("hasleader", "true")))
        create = rpc.WatchCreateRequest(key=self._coordinator, start_revision=revision)
        read: asyncio.Future[Any] | None = None
        asked = False
        try:
            await asyncio.wait_for(call.write(rpc.WatchRequest(create_request=create)), CALL_TIMEOUT_S)
            while True:
                read = read or asyncio.ensure_future(call.read())  # to cancel a read would cancel the watch
                await asyncio.wait([read], timeout=CALL_TIMEOUT_S if asked else WATCH_QUIET_S)
                if read.done():
                    response, read, asked = read.result(), None, False
                    if not response or response.canceled:
                        break
                    for event in response.events:
                        yield None if event.type == rpc.Event.DELETE else _decode(event.kv.value)
                elif asked:
                    break
                else:  # a member that is stopped is as quiet as one without news, until it is asked
                    asked = True
                    progress = rpc.WatchRequest(progress_request=rpc.WatchProgressRequest())
                    await asyncio.wait_for(call.write(progress), CALL_TIMEOUT_S)
        except (rpc.AioRpcError, TimeoutError):
            pass
        finally:
            call.cancel()
            if read is not None:
                await asyncio.gather(read, return_exceptions=True)
        self._members.leave(at)

    async def _transact(
        self, *, compare: Sequence[Any] = (), then: Sequence[Any] = (), otherwise: Sequence[Any] = ()
    ) -> Any:
        request = self._members.rpc.TxnRequest(compare=compare, success=then, failure=otherwise)
        return await self._members.call("KV", "Txn", request)

    def _get(self, key: bytes) -> Any:
        rpc = self._members.rpc
        return rpc.RequestOp(request_range=rpc.RangeRequest(key=key))

    def _put(self, key: bytes, value: bytes, lease: int = 0) -> Any:
        rpc = self._members.rpc
        return rpc.RequestOp(request_put=rpc.PutRequest(key=key, value=value, lease=lease))

    def _at_revision(self, key: bytes, revision: int) -> Any:
        """Holds while the key is what that revision made it; 0: while there is none."""
        compare = self._members.rpc.Compare
        return compare(key=key, target=compare.MOD, result=compare.EQUAL, mod_revision=revision)


def _first(response: Any) -> Any:
    """The key that one `_get` of a transaction found, or None."""
    found = response.response_range.kvs
    return found[0] if found else None


def _revision(found: Any) -> int:
    return 0 if found is None else int(found.mod_revision)


def _decode(value: bytes) -> Leader:
    try:
        return msgspec.json.decode(value, type=Leader)
    except msgspec.DecodeError as error:
        raise EtcdError(
            f"etcd: another program wrote the coordinator's key ({error}): choose another --rdzv-id"
        ) from None
