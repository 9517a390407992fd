"""`holdfast doctor`: whether this machine, and the way to others, is fit for a job."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec

from holdfast._version import __version__
from holdfast.cli.flags import add_trust, open_parser
from holdfast.cli.usage import Usage, one_of
from holdfast.doctor.checks import CHECKS, NAMES
from holdfast.doctor.finding import Asked, Finding

if TYPE_CHECKING:
    from ssl import SSLContext

    from holdfast.doctor.serving import Visit
    from holdfast.wire.secret import Secret

PORT = 29400  # where nodes meet as well: a firewall that lets these through lets a job through
SERVE_S = 3600.0
WAIT_S = 5.0  # for a node that does not serve yet


def main(argv: Sequence[str]) -> int:
    args = _parser().parse_args(list(argv), argparse.Namespace(given=set(), rdzv_backend="c10d", rdzv_conf=""))
    try:
        return _serve(args) if args.serve is not None else _examine(args)
    except Usage as wrong:
        return _complain(str(wrong), 2)
    except KeyboardInterrupt:
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = open_parser("holdfast doctor", "Check this machine, and the way to other nodes, before a job needs them.")
    parser.epilog = "checks:\n" + "\n".join(f"  {check.name:11} {check.what}" for check in CHECKS)
    parser.epilog += "\nexit codes: 0 nothing failed, 1 a check failed, 2 usage"
    add = parser.add_argument
    add("--only", nargs="+", action="extend", default=[], metavar="NAME", help="these checks, not all")
    add("--checkpoint-dir", default="", metavar="URL", help="also the place where checkpoints will go")
    add("--log-dir", default="", metavar="DIR", help="where run directories will go (default: a temporary one)")
    add("--port", nargs="+", action="extend", type=int, default=[], metavar="PORT", help="ports that the job will need")
    add("--peer", nargs="+", action="extend", default=[], metavar="HOST:PORT", help="also the way to nodes that serve")
    add("--serve", default=None, metavar="[HOST:]PORT", help="answer others' --peer, for an hour or until interrupted")
    add("--limit", type=float, default=None, metavar="S", help="for each check, instead of its own limit")
    add("--json", action="store_true", help="for programs")
    add_trust(parser)
    return parser


# -- this machine -----------------------------------------------------------------------------------------------------


def _examine(args: argparse.Namespace) -> int:
    from holdfast.doctor.examination import examine

    chosen = [one_of("--only", name, NAMES) for name in args.only]
    peers = [_address("--peer", text) for text in args.peer]
    _check(args, chosen)
    asked = Asked(
        checkpoint_dir=args.checkpoint_dir,
        log_dir=args.log_dir,
        ports=tuple(args.port),
        secret_file=args.secret_file,
        insecure=args.insecure,
        tls=_tls(args),
        wait_s=min(WAIT_S, (args.limit or 2 * WAIT_S) / 2),
    )
    began_s = time.monotonic()
    checks = [check for check in CHECKS if not chosen or check.name in chosen]
    tell = (lambda finding: None) if args.json else _show_if_read
    findings = asyncio.run(examine(checks, asked, peers, limit_s=args.limit, tell=tell))
    failed = any(finding.state == "fail" for finding in findings)
    took_s = time.monotonic() - began_s
    if args.json:
        report = {"host": socket.gethostname(), "version": __version__, "ok": not failed, "took_s": round(took_s, 3)}
        print(msgspec.json.encode(report | {"findings": findings}).decode())
    else:
        counts = Counter(finding.state for finding in findings)
        said = [f"{counts[state]} {state}" for state in ("ok", "warn", "fail", "skipped") if counts[state]]
        print(f"{', '.join(said)}, in {took_s:.1f} s")
    return 1 if failed else 0


def _check(args: argparse.Namespace, chosen: Sequence[str]) -> None:
    from holdfast.cli import cluster

    cluster.check_contact(args)
    if args.limit is not None and not 0 < args.limit < 1e6:
        raise Usage(f"--limit={args.limit:g}: a number of seconds above 0 is meant")
    for port in args.port:
        if not 0 < port < 65536:
            raise Usage(f"--port={port}: a port from 1 to 65535 is meant")
    if "peer" in chosen and not args.peer:
        raise Usage("--only peer needs --peer HOST:PORT, a node on which holdfast doctor --serve runs")
    for flag, name in (("peer", "peer"), ("checkpoint_dir", "checkpoint"), ("port", "ports"), ("log_dir", "disk")):
        if getattr(args, flag) and chosen and name not in chosen:
            raise Usage(f"--{flag.replace('_', '-')} is for the check {name}, which --only leaves out")


def _show(finding: Finding) -> None:
    print(f"{finding.state:8}{finding.check:11} {finding.text}", flush=True)
    if finding.cure:
        print(f"{'':20}next: {finding.cure}", flush=True)


def _show_if_read(finding: Finding) -> None:
    """A reader that has left, as `head` does, is no reason to leave checks half done."""
    try:
        _show(finding)
    except BrokenPipeError:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.close(null)


# -- the other side ---------------------------------------------------------------------------------------------------


def _serve(args: argparse.Namespace) -> int:
    from holdfast.agent import preflight
    from holdfast.wire import secret
    from holdfast.wire.tls import TlsError, server_context

    if others := [flag for flag in ("only", "checkpoint_dir", "log_dir", "port", "peer") if getattr(args, flag)]:
        raise Usage(f"--serve only answers; give --{others[0].replace('_', '-')} in a second command")
    _check(args, ())
    host, port = _address("--serve", args.serve if ":" in args.serve else f":{args.serve}")
    try:
        shared = secret.INSECURE if args.insecure else secret.load(args.secret_file)
        context = server_context(*tls) if (tls := _tls(args)) is not None else None
        listener = preflight.listen(host or ("::" if socket.has_dualstack_ipv6() else "0.0.0.0"), port)
    except (secret.SecretError, TlsError, preflight.Refused) as refusal:
        return _complain(str(refusal), 1)
    visits: list[Visit] = []

    def tell(visit: Visit) -> None:
        visits.append(visit)
        _announce(visit, args.json)

    if not args.json:
        name = host or socket.gethostname()
        print(f"serving; on another node: holdfast doctor --peer {name}:{listener.getsockname()[1]}", flush=True)
    asyncio.run(_until_stopped(listener, shared, context, tell, args.limit or SERVE_S))
    return 0 if visits and all(visit.state != "fail" for visit in visits) else 1


async def _until_stopped(
    listener: socket.socket, shared: Secret, tls: SSLContext | None, tell: Callable[[Visit], None], limit_s: float
) -> None:
    from holdfast.doctor.serving import serve

    stopped = asyncio.Event()
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(signum, stopped.set)
    await serve(listener, shared, tls, tell, stopped, limit_s)


def _announce(visit: Visit, as_json: bool) -> None:
    if as_json:
        print(msgspec.json.encode(visit).decode(), flush=True)
    else:
        who = f"{visit.host} at {visit.address}" if visit.host else visit.address
        print(f"{visit.state:8}{who}: {visit.text}", flush=True)


def _tls(args: argparse.Namespace) -> tuple[str, str, str] | None:
    return (args.tls_cert, args.tls_key, args.tls_ca) if args.tls_cert is not None else None


def _address(flag: str, text: str) -> tuple[str, int]:
    """HOST, HOST:PORT or [IPV6]:PORT; for --serve the host may be left out."""
    from holdfast.cli.cluster import unbracketed

    host, colon, port = text.rpartition(":")
    if not colon or text.endswith("]") or (text.count(":") > 1 and not text.startswith("[")):
        host, port = text, str(PORT)
    if (not host and flag == "--peer") or not port.isdigit() or not 0 < int(port) < 65536:
        meant = "HOST:PORT" if flag == "--peer" else "PORT or HOST:PORT"
        raise Usage(f"{flag}={text.lstrip(':')}: {meant} is meant, for example node1:{PORT}")
    return unbracketed(host), int(port)


def _complain(message: str, code: int) -> int:
    print(f"holdfast doctor: {message}", file=sys.stderr)
    return code
