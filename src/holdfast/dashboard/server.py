"""The page's server: a few fixed addresses, answered from memory. Nothing in a request becomes a path of a file."""

from __future__ import annotations

import contextlib
import socket
import socketserver
import sys
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from typing import cast
from urllib.parse import SplitResult, parse_qs, urlsplit

import msgspec

from holdfast.dashboard.acting import Refused
from holdfast.dashboard.live import Live
from holdfast.dashboard.tokens import Access
from holdfast.observe import metrics

MAX_WATCHERS = 256
MAX_BODY_BYTES = 4096
IDLE_S = 15.0  # a watcher is told that nothing happened; half a minute is what proxies wait for
RETRY_MS = 1000  # so long a watcher whose line broke waits before it comes back
STALL_S = 10.0  # a caller that neither reads nor writes for so long is let go

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_SAFE = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_TEXT = "text/plain; charset=utf-8"
_JSON = "application/json"
METRICS = "text/plain; version=0.0.4; charset=utf-8"


def assets() -> dict[str, tuple[str, bytes]]:
    """By address, their type and content."""
    found: dict[str, tuple[str, bytes]] = {}
    for file in (resources.files("holdfast.dashboard") / "page").iterdir():
        kind = _TYPES.get("." + file.name.rpartition(".")[2])
        if kind is not None:
            found["/" if file.name == "page.html" else f"/{file.name}"] = kind, file.read_bytes()
    return found


class Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False  # watchers stay for hours
    request_queue_size = 128

    def __init__(self, host: str, port: int, live: Live) -> None:
        """Raises OSError where it cannot listen. `access` is set before the first caller is served."""
        self.live = live
        self.access = Access("", "", 0)
        self.assets = assets()
        self.address_family, address = _resolved(host, port)
        super().__init__(address, Handler)

    def server_bind(self) -> None:
        """Without http.server's question to the name service, which may take a minute to say nothing."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def handle_error(self, request: object, client_address: object) -> None:
        """A caller that went away is no news; all else is a mistake of ours."""
        if not isinstance(failure := sys.exception(), OSError):
            print(f"holdfast: the page could not answer: {failure!r}", file=sys.stderr, flush=True)

    def start(self) -> None:
        threading.Thread(target=self.serve_forever, args=(0.5,), daemon=True, name="holdfast-page").start()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "holdfast", ""
    error_content_type, error_message_format = _TEXT, "%(code)d %(message)s\n"
    disable_nagle_algorithm = True
    timeout = STALL_S

    @property
    def _server(self) -> Server:
        return cast(Server, self.server)

    def do_GET(self) -> None:
        if (url := self._url()) is None:
            return
        query = parse_qs(url.query)
        given = query.get("token", [""])[0]
        access = self._server.access
        if not access.is_for_us(self.headers):
            self._say(HTTPStatus.FORBIDDEN, "this page answers to localhost and 127.0.0.1 only")
            return
        if not access.may_read(self.headers, given):
            self._say(HTTPStatus.UNAUTHORIZED, "a token is needed: open the address that was printed at the start")
            return
        if url.path == "/events":
            self._events(self.headers.get("Last-Event-ID") or query.get("since", [""])[0])
        elif url.path == "/state":
            self._state()
        elif url.path == "/metrics":
            self._metrics()
        elif url.path.startswith("/incident/"):
            self._incident(url.path.removeprefix("/incident/"))
        elif (asset := self._server.assets.get(url.path)) is not None:
            # With the page, not with a redirection: behind a link from elsewhere, a strict cookie would not come along.
            cookie = {"Set-Cookie": access.cookie()} if given and access.reading is not None else {}
            self._send(HTTPStatus.OK, *asset, cookie)
        else:
            self._say(HTTPStatus.NOT_FOUND, "there is no such page; try /")

    def do_POST(self) -> None:
        access = self._server.access
        with contextlib.suppress(ValueError):
            self.rfile.read(min(MAX_BODY_BYTES, max(0, int(self.headers.get("Content-Length", "0")))))
        self.close_connection = True  # what is left of a longer body is not a request
        if (url := self._url()) is None:
            return
        if not (access.is_for_us(self.headers) and access.is_from_us(self.headers)):
            self._say(HTTPStatus.FORBIDDEN, "this did not come from the page itself")
        elif not access.may_read(self.headers) or not access.may_act(self.headers):
            self._say(HTTPStatus.UNAUTHORIZED, "the control token is wrong; it is in the run directory")
        elif url.path == "/drain":
            self._act(lambda live: live.agent.drain(live.state))
        elif url.path == "/kill":
            rank = parse_qs(url.query).get("rank", [""])[0]
            if rank.isascii() and rank.isdecimal() and len(rank) < 10:
                self._act(lambda live: live.agent.kill(live.state, int(rank)))
            else:
                self._say(HTTPStatus.BAD_REQUEST, "say which rank by ?rank=N")
        else:
            self._say(HTTPStatus.NOT_FOUND, "what can be done is /drain and /kill")

    def _url(self) -> SplitResult | None:
        try:
            return urlsplit(self.path)
        except ValueError as failure:
            self._say(HTTPStatus.BAD_REQUEST, str(failure))
            return None

    # -- answers ------------------------------------------------------------------------------------------------------

    def _state(self) -> None:
        plain, packed = self._server.live.snapshot()
        if "gzip" in self.headers.get("Accept-Encoding", ""):
            self._send(HTTPStatus.OK, _JSON, packed, {"Content-Encoding": "gzip", "Vary": "Accept-Encoding"})
        else:
            self._send(HTTPStatus.OK, _JSON, plain)

    def _incident(self, number: str) -> None:
        right = number.isascii() and number.isdecimal() and len(number) < 10
        body = self._server.live.incident(int(number)) if right else None
        if body is None:
            self._say(HTTPStatus.NOT_FOUND, "there is no such incident")
        else:
            self._send(HTTPStatus.OK, _JSON, body)

    def _metrics(self) -> None:
        text = self._server.live.measure(metrics.render)
        self._send(HTTPStatus.OK, METRICS, text.encode())

    def _events(self, since: str) -> None:
        live = self._server.live
        if not live.watch(MAX_WATCHERS):
            self._say(HTTPStatus.SERVICE_UNAVAILABLE, f"{MAX_WATCHERS} others watch already")
            return
        self.close_connection = True
        try:
            self._head(HTTPStatus.OK, "text/event-stream; charset=utf-8", {"Connection": "close"})
            self.wfile.write(b"retry: %d\n\n" % RETRY_MS)
            number = live.follow(since)
            while number is not None:
                changes = live.after(number, IDLE_S)
                if changes is None:
                    break
                text = b"".join(b"id: %b\ndata: %b\n\n" % (name.encode(), data) for name, _, data in changes)
                self.wfile.write(text or b": still here\n\n")
                number = changes[-1][1] if changes else number
            # Anew: the page asks for the whole state, and comes back.
            self.wfile.write(b"event: %b\ndata: {}\n\n" % (b"bye" if live.closed else b"anew"))
        except OSError:
            pass  # it has gone, or reads nothing
        finally:
            live.unwatch()

    def _act(self, act: Callable[[Live], str]) -> None:
        try:
            done = act(self._server.live)
        except Refused as refusal:
            self._send(HTTPStatus.CONFLICT, _JSON, msgspec.json.encode({"why": str(refusal)}))
        else:
            self._send(HTTPStatus.OK, _JSON, msgspec.json.encode({"done": done}))

    def _say(self, status: HTTPStatus, text: str) -> None:
        self._send(status, _TEXT, f"{text}\n".encode())

    def _send(self, status: HTTPStatus, kind: str, body: bytes, more: dict[str, str] | None = None) -> None:
        with contextlib.suppress(OSError):
            self._head(status, kind, {**(more or {}), "Content-Length": str(len(body))})
            self.wfile.write(body)

    def _head(self, status: HTTPStatus, kind: str, more: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**_SAFE, **more, "Content-Type": kind}.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Addresses may have a token in them."""


def _resolved(host: str, port: int) -> tuple[socket.AddressFamily, tuple[str, int]]:
    """Raises OSError."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    return family, (str(address[0]), int(address[1]))
