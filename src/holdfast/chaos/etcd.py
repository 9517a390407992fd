"""Three members of etcd for a campaign, of which the leader can be lost. They are on this machine and keep to it."""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import subprocess
import time
from functools import partial
from pathlib import Path
from types import TracebackType

from holdfast import linux

MEMBERS = 3
READY_S = 30.0


class EtcdError(Exception):
    pass


class Members:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True)
        ports = _free_ports(2 * MEMBERS)
        self._ports = list(zip(ports[::2], ports[1::2], strict=True))
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    @property
    def endpoints(self) -> str:
        return ",".join(f"127.0.0.1:{client}" for client, _ in self._ports)

    def __enter__(self) -> Members:
        try:
            for member in range(MEMBERS):
                self._start(member, "new")
            until_s = time.monotonic() + READY_S
            while self._leader() is None:
                if time.monotonic() > until_s:
                    raise EtcdError(f"etcd has no leader after {READY_S:g} s; see {self._folder}")
                time.sleep(0.1)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, failure: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def kill_leader(self) -> str:
        leader = self._leader()
        if leader is None:
            raise OSError("etcd has no leader")
        self._processes[leader].kill()
        self._processes[leader].wait()
        return f"member {leader} of {MEMBERS}"

    def mend(self) -> None:
        for member, process in self._processes.items():
            if process.poll() is not None:
                self._start(member, "existing")

    def _start(self, member: int, state: str) -> None:
        client, peer = self._ports[member]
        everybody = ",".join(f"m{at}=http://127.0.0.1:{port}" for at, (_, port) in enumerate(self._ports))
        argv = ["etcd", f"--name=m{member}", f"--data-dir={self._folder / f'm{member}'}", "--logger=zap"]
        argv += [
            f"--listen-client-urls=http://127.0.0.1:{client}",
            f"--advertise-client-urls=http://127.0.0.1:{client}",
        ]
        argv += [
            f"--listen-peer-urls=http://127.0.0.1:{peer}",
            f"--initial-advertise-peer-urls=http://127.0.0.1:{peer}",
        ]
        argv += [f"--initial-cluster={everybody}", f"--initial-cluster-state={state}", "--log-level=error"]
        with open(self._folder / f"m{member}.log", "ab") as log:
            self._processes[member] = subprocess.Popen(
                argv,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                preexec_fn=partial(linux.die_with_parent, os.getpid()),  # also of one that is killed
            )

    def _leader(self) -> int | None:
        """By asking each who it is and who leads."""
        for member, (client, _) in enumerate(self._ports):
            process = self._processes[member]
            if process.poll() is not None:
                continue
            told = _ask(client)
            header = told.get("header")
            if isinstance(header, dict) and told.get("leader") and told["leader"] == header.get("member_id"):
                return member
        return None

    def _end(self) -> None:
        for process in self._processes.values():
            process.kill()
            process.wait()


def _ask(port: int) -> dict[str, object]:
    """A member's status, over etcd's gateway for JSON."""
    import http.client

    line = http.client.HTTPConnection("127.0.0.1", port, timeout=2.0)
    try:
        line.request("POST", "/v3/maintenance/status", body=b"{}")
        found = json.loads(line.getresponse().read())
    except (OSError, ValueError, http.client.HTTPException):
        return {}
    finally:
        line.close()
    return found if isinstance(found, dict) else {}


def _free_ports(count: int) -> list[int]:
    """Below those that the kernel gives to whoever connects somewhere: until a member has it, nobody else takes one."""
    found: list[int] = []
    with contextlib.ExitStack() as held:
        while len(found) < count:
            port = random.randrange(12_000, 30_000)
            with contextlib.suppress(OSError):
                held.enter_context(socket.create_server(("127.0.0.1", port)))
                found.append(port)
    return found
