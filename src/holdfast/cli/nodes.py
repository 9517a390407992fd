"""`holdfast nodes`: who is in a job, and taking back a node that was set aside."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec

from holdfast.agent.meeting import open_etcd, reason
from holdfast.agent.options import Cluster
from holdfast.agent.preflight import Refused, tls
from holdfast.cli import cluster
from holdfast.cli.flags import add_meeting, add_trust, open_parser
from holdfast.cli.usage import Usage
from holdfast.control import protocol
from holdfast.wire import peer as wire
from holdfast.wire.session import Broken

ANSWER_S = 5.0


def main(argv: Sequence[str]) -> int:
    parser = open_parser("holdfast nodes", "Show the nodes of a running job, or take back one that was set aside.")
    add_meeting(parser)
    add_trust(parser)
    parser.add_argument("--lift", default="", metavar="HOST", help="end the quarantine of this node")
    parser.add_argument("--json", action="store_true", help="for programs")
    args = parser.parse_args(list(argv), argparse.Namespace(given=set(), spares=1, nnodes="1:2", standalone=False))
    try:
        cluster.check_contact(args)
        if not args.rdzv_endpoint:
            raise Usage("--rdzv-endpoint is needed, as it was given to holdfast run")
        found = asyncio.run(_ask(cluster.read(args), args.rdzv_id, args.lift))
    except Usage as wrong:
        return _complain(str(wrong), 2)
    except (Refused, Broken, OSError, TimeoutError) as failure:
        return _complain(f"no answer from {args.rdzv_endpoint}: {reason(failure)}", 1)
    if found is None:
        return _complain(f"there is no job {args.rdzv_id!r} at {args.rdzv_endpoint}; check --rdzv-id", 1)
    if args.json:
        print(msgspec.json.encode(found).decode())
    else:
        _show(found)
    if args.lift and not found.lifted:
        return _complain(f"{args.lift!r} was not set aside", 1)
    return 0


def _show(found: protocol.Nodes) -> None:
    spent = f"{found.restarts} of {found.max_restarts} restarts used"
    print(f"job {found.run_id}: {found.phase}, generation {found.generation}, {spent}, term {found.term}")
    width = max((len(node.host) for node in found.nodes), default=0)
    for node in found.nodes:
        ranks = f"{node.ranks} rank{'s' if node.ranks != 1 else ''}"
        print(f"  {node.host:{width}}  {node.addr:15}  {ranks:9} {node.state}{f': {node.why}' if node.why else ''}")
    if found.count > len(found.nodes):
        print(f"  and {found.count - len(found.nodes)} more")


async def _ask(where: Cluster, run_id: str, lift: str) -> protocol.Nodes | None:
    host, port = await _coordinator(where, run_id)
    for _ in range(2):
        answers: asyncio.Queue[Any] = asyncio.Queue()
        contexts = tls(where)
        peer = await wire.connect(host, port, partial(_peer, where, answers), ssl=contexts and contexts[1])
        peer.send(protocol.Seek(run_id))
        answer = await asyncio.wait_for(answers.get(), ANSWER_S)
        if isinstance(answer, protocol.Here):
            peer.send(protocol.Look(lift))
            answer = await asyncio.wait_for(answers.get(), ANSWER_S)
        peer.close()
        if isinstance(answer, protocol.Nodes):
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


def _complain(message: str, code: int) -> int:
    print(f"holdfast nodes: {message}", file=sys.stderr)
    return code
