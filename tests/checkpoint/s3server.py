"""An S3 server on loopback (moto's), and a proxy in front of it that fails at the request that it is told to.

The server is a child process, one per process of tests. The proxy lets one request at a time through: moto looks and
then puts, which is not atomic in its threads, and a real store is.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import http.client
import http.server
import os
import re
import socket
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator

from holdfast import linux

HOST = "127.0.0.1"
AUTHORIZATION = "AWS4-HMAC-SHA256 Credential=key/20200101/us-east-1/s3/aws4_request"  # moto asks no more

# What can happen to a request: it does not arrive; it arrives and the answer is lost; it is refused; it is done and
# the answer says that it was not; the store does not know such a request.
FAILURES = ("lost", "cut", "500", "503", "500 after", "501")


class Proxy(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, port: int) -> None:
        super().__init__((HOST, 0), _Handler)
        self.upstream = port
        self.one_at_a_time = threading.Lock()
        self.requests: list[str] = []  # "PUT /bucket/key"
        self.choose: Callable[[int, str, dict[str, str]], str] = lambda number, request, headers: ""

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that is killed closes its connections; that is meant."""


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: Proxy

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        with self.server.one_at_a_time:
            request = f"{self.command} {self.path}"
            self.server.requests.append(request)
            headers = {name.lower(): value for name, value in self.headers.items()}
            failure = self.server.choose(len(self.server.requests), request, headers)
            if failure in ("", "cut", "500 after"):
                status, answer_headers, answer = self._forward(body)
        if failure in ("lost", "cut"):
            self.close_connection = True
            with contextlib.suppress(OSError):
                self.connection.shutdown(socket.SHUT_RDWR)
            return
        if failure:
            status, answer_headers, answer = int(failure.split()[0]), [], b"<Error><Code>Injected</Code></Error>"
        self.send_response_only(status)
        for name, value in answer_headers:
            self.send_header(name, value)
        if self.command != "HEAD" or failure:
            self.send_header("Content-Length", str(0 if self.command == "HEAD" else len(answer)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer)

    def _forward(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        connection = http.client.HTTPConnection(HOST, self.server.upstream, timeout=30)
        try:
            connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                if name.lower() != "connection":
                    connection.putheader(name, value)
            connection.endheaders(body)
            answer = connection.getresponse()
            content = answer.read()
            ours = {"connection", "transfer-encoding"} | (set() if self.command == "HEAD" else {"content-length"})
            kept = [(name, value) for name, value in answer.getheaders() if name.lower() not in ours]
            return answer.status, kept, content
        finally:
            connection.close()

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _serve

    def log_message(self, format: str, *arguments: object) -> None:
        pass


class S3:
    """A bucket of its own, reached through the proxy; and what is really in it, asked of the server itself."""

    def __init__(self, proxy: Proxy) -> None:
        self.proxy = proxy
        self.bucket = f"bucket-{uuid.uuid4().hex}"
        self.url = f"s3://{self.bucket}/some/run"
        self.environment = {
            "AWS_ENDPOINT_URL": f"http://{HOST}:{proxy.server_address[1]}",
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "very-secret",
            "AWS_REGION": "us-east-1",
            "NO_PROXY": HOST,
        }
        assert self.ask("PUT")[0] == 200

    def ask(self, method: str, key: str = "", query: str = "", content: bytes = b"") -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(HOST, self.proxy.upstream, timeout=30)
        try:
            path = f"/{self.bucket}{'/' + key if key else ''}{query}"
            connection.request(method, path, content, {"Authorization": AUTHORIZATION})
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def stored(self) -> list[str]:
        """Below the url."""
        found = re.findall(r"<Key>(.*?)</Key>", self.ask("GET", query="?list-type=2")[1].decode())
        return sorted(key.removeprefix("some/run/") for key in found)

    def uploads(self) -> int:
        """How many are incomplete."""
        return len(re.findall("<UploadId>", self.ask("GET", query="?uploads")[1].decode()))

    def content(self, name: str) -> bytes | None:
        status, content = self.ask("GET", f"some/run/{name}")
        return content if status == 200 else None

    # -- failures -----------------------------------------------------------------------------------------------------

    def forget(self) -> None:
        """Count requests from here on, and let all through."""
        self.proxy.requests.clear()
        self.proxy.choose = lambda number, request, headers: ""

    def fail(self, failure: str, first: int, last: int | None = None) -> None:
        """The requests from `first` to `last`, counted from 1 here; only `first` if there is no `last`."""
        self.forget()
        self.proxy.choose = lambda number, request, headers: failure if first <= number <= (last or first) else ""

    def fail_if(self, failure: str, meant: Callable[[str, dict[str, str]], bool]) -> None:
        self.forget()
        self.proxy.choose = lambda number, request, headers: failure if meant(request, headers) else ""


@contextlib.contextmanager
def bucket() -> Iterator[S3]:
    proxy = Proxy(_server_port())
    thread = threading.Thread(target=proxy.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield S3(proxy)
    finally:
        proxy.shutdown()
        proxy.server_close()
        thread.join()


@functools.cache
def _server_port() -> int:
    child = subprocess.Popen(
        [sys.executable, __file__, str(os.getpid())], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    atexit.register(linux.end, child.pid, 10)
    assert child.stdout is not None
    return int(child.stdout.readline())


def _serve_forever(parent: int) -> None:
    linux.die_with_parent(parent)
    from moto import settings
    from moto.server import ThreadedMotoServer

    settings.S3_UPLOAD_PART_MIN_SIZE = 1  # so that tests send small parts; S3 wants 5 MiB
    server = ThreadedMotoServer(HOST, 0, verbose=False)
    server.start()
    print(server.get_host_and_port()[1], flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    _serve_forever(int(sys.argv[1]))
