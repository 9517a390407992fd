"""A machine's metadata, as AWS and Google document theirs, on loopback. `notice` is what they tell from then on."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlparse

AWS_NOTICE = '{"action": "terminate", "time": "2026-11-18T08:22:00Z"}'


class Metadata:
    def __init__(self) -> None:
        self.asked: list[str] = []
        self.token = "first"
        self._told = threading.Event()
        self._changed = threading.Condition()
        handler = type("Handler", (_Handler,), {"metadata": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self.address = f"127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    @property
    def env(self) -> dict[str, str]:
        return {
            "AWS_EC2_METADATA_SERVICE_ENDPOINT": f"http://{self.address}", "GCE_METADATA_HOST": self.address,
            "http_proxy": "http://127.0.0.1:1",  # which must not be asked
        }  # fmt: skip

    def notice(self) -> None:
        with self._changed:
            self._told.set()
            self._changed.notify_all()

    @property
    def noticed(self) -> bool:
        return self._told.is_set()

    def was_asked(self, path: str, times: int, wait_s: float = 30.0) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self.asked.count(path) >= times, wait_s), self.asked

    def note(self, path: str) -> None:
        with self._changed:
            self.asked.append(path)
            self._changed.notify_all()

    def wait_for_change(self, wait_s: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self.noticed, wait_s)

    def close(self) -> None:
        self.notice()
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    metadata: Metadata

    def do_PUT(self) -> None:
        self.metadata.note(self.path)
        assert self.headers["X-aws-ec2-metadata-token-ttl-seconds"]
        self._answer(200, self.metadata.token)

    def do_GET(self) -> None:
        url = urlparse(self.path)
        self.metadata.note(url.path)
        if url.path == "/latest/meta-data/spot/instance-action":
            if self.headers["X-aws-ec2-metadata-token"] != self.metadata.token:
                self._answer(401, "")
            elif self.metadata.noticed:
                self._answer(200, AWS_NOTICE)
            else:
                self._answer(404, "")
        elif url.path == "/computeMetadata/v1/instance/preempted" and self.headers["Metadata-Flavor"] == "Google":
            asked = parse_qs(url.query)
            if asked.get("wait_for_change") == ["true"] and asked.get("last_etag") == [str(False)]:
                self.metadata.wait_for_change(float(asked["timeout_sec"][0]))
            noticed = self.metadata.noticed
            self._answer(200, str(noticed).upper(), {"ETag": str(noticed)})
        else:
            self._answer(403, "")

    def _answer(self, code: int, text: str, headers: dict[str, str] | None = None) -> None:
        self.send_response(code)
        for name, value in {"Content-Length": str(len(text)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        with contextlib.suppress(OSError):
            self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        pass


@contextlib.contextmanager
def serving() -> Iterator[Metadata]:
    metadata = Metadata()
    try:
        yield metadata
    finally:
        metadata.close()
