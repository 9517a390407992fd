"""One page from its start to its end: who may come, where it listens, and when it goes."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from holdfast import linux
from holdfast.dashboard import tokens
from holdfast.dashboard.live import TICK_S, Live
from holdfast.dashboard.server import Server

if TYPE_CHECKING:
    from holdfast.observe.otel import Export

COLLECTOR = "OTEL_EXPORTER_OTLP_ENDPOINT"
HOST = "127.0.0.1"
PORT = 4653  # HOLD, on the keys of a telephone
LAST_S = 1.0  # for watchers to hear of the end


class NoPage(Exception):
    """It cannot be shown; in one line, with what to do."""


def parse_listen(text: str) -> tuple[str, int]:
    """`PORT`, `HOST:PORT` or `[ADDRESS]:PORT`. Raises ValueError with what is wrong."""
    host, colon, port = text.rpartition(":")
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if (colon and not host) or (":" in host and not text.startswith("[")):
        raise ValueError(f"{text!r} is no address to listen on; try {PORT}, 0.0.0.0:{PORT} or [::]:{PORT}")
    if not (port.isascii() and port.isdecimal() and int(port) < 65536):
        raise ValueError(f"{text!r} has no port from 0 to 65535; try {host or HOST}:{PORT}")
    return host or HOST, int(port)


def serve(
    run_dir: str,
    listen: str | None,
    token_file: str | None = None,
    parent: int | None = None,
    record: str | None = None,
    token: str = "",
) -> None:
    """Until SIGTERM or Ctrl-C; with a `parent`, until it or its job has ended. `token`: one for readers, if they need
    one; '' for a new one. Raises NoPage."""
    if parent is not None:
        linux.die_with_parent(parent)
    try:
        live = Live(run_dir, record)
        live.update()
    except OSError as failure:
        raise NoPage(f"cannot read the record in {run_dir}: {failure.strerror}; name a run directory") from None
    server = _listening(listen, live, "--listen" if parent is None else "--dashboard")
    reading = _reading_token(server, token_file, token)
    control = tokens.kept(run_dir)
    server.access = tokens.Access(reading, control, server.server_port)
    ending = threading.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, lambda *_: ending.set())
    server.start()
    _announce(server, reading, run_dir)
    exporting = _exporting(live)
    follow(live, lambda: ending.wait(TICK_S), parent is not None, _complain)
    live.close(LAST_S)
    if exporting is not None:
        exporting.close()


def follow(live: Live, ends: Callable[[], object], to_its_end: bool, complain: Callable[[str], None]) -> None:
    """Update until it ends, or the job has. A record that cannot be read for a while, on a network say, is told of
    once: what was read before is still shown."""
    complained = False
    while not ends():
        try:
            if live.update() and to_its_end:
                return
        except OSError as failure:
            if not complained:
                complain(f"cannot read the record: {failure.strerror}; the page shows what it knows, and tries on")
            complained = True


def _exporting(live: Live) -> Export | None:
    """The metrics, to a collector of OpenTelemetry, where its own variable names one."""
    endpoint = os.environ.get(COLLECTOR)
    if not endpoint:
        return None
    from holdfast.observe import otel

    try:
        return otel.export(live.measure, endpoint, complain=_complain)
    except otel.NoExport as failure:
        _complain(f"{COLLECTOR} is set, but {failure}; the page goes on without")
        return None


def _complain(text: str) -> None:
    print(f"holdfast: {text}", file=sys.stderr, flush=True)


def _listening(listen: str | None, live: Live, flag: str) -> Server:
    """`flag`: by which the person has said where."""
    try:
        host, port = parse_listen(listen or str(PORT))
    except ValueError as failure:
        raise NoPage(str(failure)) from None
    if listen is None:
        with contextlib.suppress(OSError):  # another page has it
            return Server(host, port, live)
        port = 0
    try:
        return Server(host, port, live)
    except OSError as failure:
        raise NoPage(f"cannot listen on {host}:{port}: {failure.strerror}; choose another with {flag}") from None


def _reading_token(server: Server, token_file: str | None, token: str) -> str | None:
    if token_file is not None:
        try:
            return tokens.read(token_file)
        except OSError as failure:
            raise NoPage(f"cannot read {token_file}: {failure.strerror}; it holds the token") from None
        except tokens.Unusable as failure:
            raise NoPage(str(failure)) from None
    return None if tokens.is_loopback(server.server_name) else token or tokens.made()


def _announce(server: Server, reading: str | None, run_dir: str) -> None:
    """Once, and on stderr: a log of stdout should hold no token."""
    host = server.server_name
    host = socket.gethostname() if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host
    query = f"?token={reading}" if reading is not None else ""
    print(f"holdfast: the job's page is http://{host}:{server.server_port}/{query}", file=sys.stderr)
    print(f"holdfast: the token to drain it or to kill a rank there is in {run_dir}/{tokens.NAME}", file=sys.stderr)
    sys.stderr.flush()
