"""A visit to a job's coordinator, by somebody who is no node of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

from holdfast.agent.meeting import open_etcd
from holdfast.agent.options import Cluster
from holdfast.agent.preflight import Refused, tls
from holdfast.control import protocol
from holdfast.wire import peer as wire

ANSWER_S = 5.0


async def visit(
    where: Cluster, run_id: str, lift: str = "", leaves: Callable[[], protocol.Recorded] | None = None
) -> protocol.Nodes | None:
    """Who is in the job; None where there is no such job. `lift` takes a host back that was set aside, and what the
    visitor leaves goes into the job's record. Raises Refused, Broken, OSError and TimeoutError."""
    host, port = await _coordinator(where, run_id)
    contexts = tls(where)
    for _ in range(2):
        answers: asyncio.Queue[Any] = asyncio.Queue()
        peer = await wire.connect(host, port, partial(_peer, where, answers), ssl=contexts and contexts[1])
        try:
            peer.send(protocol.Seek(run_id))
            answer = await asyncio.wait_for(answers.get(), ANSWER_S)
            if isinstance(answer, protocol.Here):
                peer.send(protocol.Look(lift))
                answer = await asyncio.wait_for(answers.get(), ANSWER_S)
            if isinstance(answer, protocol.Nodes) and leaves is not None:
                peer.send(leaves())
        finally:
            peer.close()
        if isinstance(answer, protocol.Nodes):
            while leaves is not None and isinstance(await answers.get(), protocol.Message):
                pass  # until the line is closed: what was left has been read then
            return answer
        if not isinstance(answer, protocol.Elsewhere):
            return None
        port = answer.port
    return None


def _peer(where: Cluster, answers: asyncio.Queue[Any]) -> wire.Peer:
    return wire.Peer(
        "client",
        where.secret,
        protocol.ToAgent,
        on_ready=lambda peer: None,
        on_message=lambda peer, message: answers.put_nowait(message),
        on_closed=lambda peer, why: answers.put_nowait(why),
    )


async def _coordinator(where: Cluster, run_id: str) -> tuple[str, int]:
    if where.backend != "etcd":
        return where.endpoints[0]
    from holdfast.coordinator import etcd

    try:
        client = open_etcd(where, run_id)
        try:
            leader = await client.leader()
        finally:
            await client.close()
    except etcd.EtcdError as failure:
        raise Refused(str(failure)) from None
    if leader is None:
        raise Refused(f"etcd knows of no job {run_id!r}")
    return leader.addr, leader.port
