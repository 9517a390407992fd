"""`holdfast nodes`: who is in a job, and taking back a node that was set aside."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence

import msgspec

from holdfast.agent.meeting import reason
from holdfast.agent.preflight import Refused
from holdfast.agent.visiting import visit
from holdfast.cli import cluster
from holdfast.cli.flags import add_meeting, add_trust, open_parser
from holdfast.cli.usage import Usage
from holdfast.control import protocol
from holdfast.wire.session import Broken


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
        found = asyncio.run(visit(cluster.read(args), args.rdzv_id, args.lift))
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


def _complain(message: str, code: int) -> int:
    print(f"holdfast nodes: {message}", file=sys.stderr)
    return code
