"""A real etcd cluster on loopback whose members can be killed, stopped and restarted, and a wire that loses answers."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
import json
import os
import shutil
import signal
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ports import free_port

DEADLINE_S = 20.0


def require_etcd() -> str:
    """The server's path; without one the tests are skipped, and where all is to be tested that is a failure."""
    if (path := shutil.which("etcd")) is not None:
        return path
    if os.environ.get("HOLDFAST_CI") == "1":
        pytest.fail("HOLDFAST_CI=1 and no etcd in PATH: apt-get install etcd-server")
    pytest.skip("no etcd in PATH: apt-get install etcd-server")


@dataclass(frozen=True)
class Certificates:
    """One authority, one certificate for the servers and one for the clients."""

    ca: Path
    server: Path
    client: Path
    key: Path  # of both: what is tested is who signed

    @classmethod
    def make(cls, directory: Path) -> Certificates:
        directory.mkdir(parents=True)

        def openssl(*args: str) -> None:
            subprocess.run(["openssl", *args], cwd=directory, check=True, capture_output=True)

        (directory / "extensions").write_text("subjectAltName=IP:127.0.0.1\nextendedKeyUsage=serverAuth,clientAuth\n")
        new = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
        openssl("req", "-x509", *new, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=authority", "-days", "2")
        openssl("req", *new, "-keyout", "key.pem", "-out", "request", "-subj", "/CN=holdfast")
        signer = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2", "-extfile", "extensions")
        for name in ("server.pem", "client.pem"):
            openssl("x509", "-req", "-in", "request", *signer, "-out", name)
        return cls(*(directory / name for name in ("ca.pem", "server.pem", "client.pem", "key.pem")))


class Cluster:
    """Members are numbered from 0. A member keeps its ports and its data over a restart."""

    def __init__(self, directory: Path, size: int = 3, certificates: Certificates | None = None) -> None:
        self._binary = require_etcd()
        self._directory = directory
        self._certificates = certificates
        self._scheme = "http" if certificates is None else "https"
        self._tls: ssl.SSLContext | None = None
        if certificates is not None:
            self._tls = ssl.create_default_context(cafile=certificates.ca)
            self._tls.load_cert_chain(certificates.client, certificates.key)
        ports = [free_port() for _ in range(2 * size)]
        self.ports, self._peer_ports = ports[:size], ports[size:]
        self._processes: list[subprocess.Popen[bytes]] = [self._spawn(member) for member in range(size)]
        self.wait_healthy()

    @property
    def endpoints(self) -> list[str]:
        return [f"127.0.0.1:{port}" for port in self.ports]

    def _spawn(self, member: int) -> subprocess.Popen[bytes]:
        client, peer = f"{self._scheme}://127.0.0.1:{self.ports[member]}", self._peer(member)
        # A test run that is killed outright leaves no members behind.
        argv = [
            "setpriv",
            "--pdeathsig=KILL",
            self._binary,
            f"--name=m{member}",
            f"--data-dir={self._directory / f'm{member}'}",
        ]
        argv += [f"--listen-client-urls={client}", f"--advertise-client-urls={client}"]
        argv += [f"--listen-peer-urls={peer}", f"--initial-advertise-peer-urls={peer}"]
        everyone = ",".join(f"m{each}={self._peer(each)}" for each in range(len(self.ports)))
        argv += [f"--initial-cluster={everyone}", f"--initial-cluster-token={self._directory}"]
        argv += ["--heartbeat-interval=50", "--election-timeout=500", "--log-level=error"]
        if (tls := self._certificates) is not None:
            argv += [f"--cert-file={tls.server}", f"--key-file={tls.key}"]
            argv += ["--client-cert-auth", f"--trusted-ca-file={tls.ca}"]
        self._directory.mkdir(parents=True, exist_ok=True)
        with open(self._directory / f"m{member}.log", "ab") as log:
            return subprocess.Popen(argv, stdout=log, stderr=log, stdin=subprocess.DEVNULL)

    def _peer(self, member: int) -> str:
        return f"http://127.0.0.1:{self._peer_ports[member]}"

    # -- what befalls a member

    def kill(self, member: int) -> None:
        self._processes[member].kill()
        self._processes[member].wait()

    def stop(self, member: int) -> None:
        self._processes[member].send_signal(signal.SIGSTOP)

    def cont(self, member: int) -> None:
        self._processes[member].send_signal(signal.SIGCONT)

    def restart(self, member: int) -> None:
        self.kill(member)
        self._processes[member] = self._spawn(member)

    def heal(self) -> None:
        """All members run, and agree."""
        for member, process in enumerate(self._processes):
            self.cont(member) if process.poll() is None else self.restart(member)
        self.wait_healthy()

    def close(self) -> None:
        for member in range(len(self._processes)):
            self.kill(member)

    # -- what a member says, over its own HTTP gateway: not the client that is under test

    def wait_healthy(self) -> None:
        for member in range(len(self.ports)):
            wait_for(functools.partial(self._ask, member, "/health", None), lambda said: said["health"] == "true")

    def leader(self) -> int:
        def found() -> int | None:
            for member in range(len(self.ports)):
                with contextlib.suppress(OSError, ValueError):
                    status = self._ask(member, "/v3/maintenance/status", {})
                    if status.get("leader") == status["header"]["member_id"]:
                        return member
            return None

        return int(wait_for(found, lambda found: found is not None))

    def post(self, path: str, body: dict[str, Any], token: str | None = None) -> dict[str, Any]:
        return self._ask(0, path, body, token)

    def leases(self) -> list[str]:
        return [lease["ID"] for lease in self.post("/v3/lease/leases", {}).get("leases", [])]

    def keys(self, under: str) -> dict[str, bytes]:
        end = under[:-1] + chr(ord(under[-1]) + 1)
        found = self.post("/v3/kv/range", {"key": encoded(under), "range_end": encoded(end)})
        return {base64.b64decode(kv["key"]).decode(): base64.b64decode(kv["value"]) for kv in found.get("kvs", [])}

    def transactions(self) -> int:
        """How many calls of Txn the members have answered, whatever came of them."""
        return self._count('grpc_server_handled_total{grpc_code="OK",grpc_method="Txn"')

    def watches(self) -> int:
        """How many watches stand."""
        return self._count("etcd_debugging_mvcc_watcher_total ")

    def _count(self, metric: str) -> int:
        pages = [self._fetch(member, "/metrics", None, None).decode() for member in range(len(self.ports))]
        lines = [line for page in pages for line in page.splitlines() if line.startswith(metric)]
        return sum(int(float(line.rpartition(" ")[2])) for line in lines)

    def _ask(self, member: int, path: str, body: dict[str, Any] | None, token: str | None = None) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self._fetch(member, path, body, token))
        return answer

    def _fetch(self, member: int, path: str, body: dict[str, Any] | None, token: str | None) -> bytes:
        url = f"{self._scheme}://127.0.0.1:{self.ports[member]}{path}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(url, data, {"Authorization": token} if token else {})
        handlers = (urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=self._tls))
        with urllib.request.build_opener(*handlers).open(request, timeout=5.0) as response:
            answer: bytes = response.read()
            return answer


def encoded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def wait_for(look: Callable[[], Any], is_so: Callable[[Any], bool] = bool) -> Any:
    """Look until it is so; a member that does not answer yet is looked at again."""
    until = time.monotonic() + DEADLINE_S
    while True:
        seen: Any = "no answer"
        with contextlib.suppress(OSError, ValueError):
            if is_so(seen := look()):
                return seen
        assert time.monotonic() < until, f"not within {DEADLINE_S} s; last seen: {seen}"
        time.sleep(0.02)


class Relay:
    """A wire to each member. The first request with a given text goes unanswered, or is held on its way in."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.endpoints: list[str] = []
        self._deafen_at: bytes | None = None
        self._hold_at: bytes | None = None
        self._held: tuple[asyncio.StreamWriter, bytes] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def lose_answer_to(self, text: bytes) -> None:
        self._deafen_at = text

    def hold(self, text: bytes) -> None:
        self._hold_at = text

    async def release(self) -> None:
        """Deliver what was held, without what followed it: whoever sent it has given it up since."""
        assert self._held is not None, "nothing was held"
        writer, chunk = self._held
        writer.write(chunk)
        await writer.drain()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Relay]:
        async with contextlib.AsyncExitStack() as stack:
            for port in self._cluster.ports:
                server = await asyncio.start_server(functools.partial(self._serve, port), "127.0.0.1", 0)
                stack.callback(server.close)
                self.endpoints.append(f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
            yield self
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there_reader, there_writer = await asyncio.open_connection("127.0.0.1", port)
        deaf = asyncio.Event()
        for copy in (self._inward(reader, there_writer, deaf), self._outward(there_reader, writer, deaf)):
            self._tasks.add(asyncio.create_task(copy))

    async def _inward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, deaf: asyncio.Event) -> None:
        holding = False
        with contextlib.closing(writer):
            while chunk := await reader.read(1 << 16):
                if self._deafen_at is not None and self._deafen_at in chunk:
                    self._deafen_at = None
                    deaf.set()
                if self._hold_at is not None and self._hold_at in chunk:
                    self._hold_at, self._held, holding = None, (writer, chunk), True
                if not holding:
                    writer.write(chunk)
                    await writer.drain()

    async def _outward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, deaf: asyncio.Event) -> None:
        with contextlib.closing(writer):
            while chunk := await reader.read(1 << 16):
                if not deaf.is_set():
                    writer.write(chunk)
                    await writer.drain()
