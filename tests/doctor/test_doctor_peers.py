"""The way between two nodes: with a doctor at its other end that is well, and with some that are not."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from doctoring import WAIT_S, Report, command, end, environment, examine

from holdfast.doctor import encounter
from holdfast.doctor.finding import Finding
from holdfast.doctor.serving import Server
from holdfast.wire import peer as wire
from holdfast.wire.secret import load
from ports import free_port

SECRET = "the secret of these two nodes"
OTHER = "another secret altogether"
HOST = "127.0.0.1"

Change = Callable[[Any], Any]


class Untrue(Server):
    """As the real one, but for what it says. A change may give None: then nothing is said."""

    def __init__(self, change: Change, secret: str = SECRET) -> None:
        super().__init__(load(environ={"HOLDFAST_SECRET": secret}), lambda visit: None)
        self._change = change

    def _caller(self) -> wire.Peer:
        caller = super()._caller()
        send = caller.send

        def changed(message: msgspec.Struct) -> None:
            if (other := self._change(message)) is not None:
                send(other)

        caller.send = changed  # type: ignore[method-assign]
        return caller


class Leaving(Server):
    def _answer(self, caller: wire.Peer, message: Any) -> None:
        caller.abort()


class Unreachable(Server):
    """It tries to connect back, and there is nobody at that port."""

    async def _meet(self, caller: wire.Peer, hello: encounter.Hello) -> None:
        await super()._meet(caller, msgspec.structs.replace(hello, back_port=free_port()))


def changed(kind: type[msgspec.Struct], **fields: Any) -> Change:
    return lambda message: msgspec.structs.replace(message, **fields) if isinstance(message, kind) else message


def fast(message: Any) -> Any:
    if not isinstance(message, encounter.Tock):
        return message
    return encounter.Tock(message.monotonic_s * 1.5, message.wall_s)


def ahead(message: Any) -> Any:
    if not isinstance(message, encounter.Tock):
        return message
    return encounter.Tock(message.monotonic_s, message.wall_s + 3600)


def swallows(message: Any) -> Any:
    return None if isinstance(message, encounter.Load) else message


class Misled(Server):
    """What it sends back ends at another machine, one that has the same address."""

    async def _meet(self, caller: wire.Peer, hello: encounter.Hello) -> None:
        await super()._meet(caller, msgspec.structs.replace(hello, token="somebody else's"))


def versions(**other: str) -> dict[str, str]:
    return encounter.versions() | other


def servers() -> dict[str, Server]:
    plain = load(environ={"HOLDFAST_SECRET": SECRET})

    def quiet(visit: object) -> None:
        pass

    return {
        "fine": Server(plain, quiet),
        "fast": Untrue(fast),
        "ahead": Untrue(ahead),
        "torch": Untrue(changed(encounter.Met, versions=versions(torch="1.0"))),
        "python": Untrue(changed(encounter.Met, versions=versions(python="3.99.0"))),
        "nameless": Untrue(changed(encounter.Met, known_as=())),
        "astray": Untrue(changed(encounter.Met, known_as=("10.9.8.7",), seen_as="10.1.2.3")),
        "swallows": Untrue(swallows),
        "alters": Untrue(changed(encounter.Load, content=b"x")),
        "hostile": Untrue(changed(encounter.Met, host="evil\x1b[2J\nname")),
        "unreachable": Unreachable(plain, quiet),
        "misled": Misled(plain, quiet),
        "leaves": Leaving(plain, quiet),
        "secret": Untrue(lambda message: message, OTHER),
    }


def rude(listener: socket.socket) -> None:
    """Another program: it speaks first, and in another language."""
    try:
        while True:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")
    except OSError:
        return


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Finding]]:
    """One doctor that visits them all at once; each is asked for its finding."""
    folder = tmp_path_factory.mktemp("peers")
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    all_servers = servers()
    ports: dict[str, int] = {}
    for name, server in all_servers.items():
        listener = socket.create_server((HOST, 0))
        ports[name] = listener.getsockname()[1]
        asyncio.run_coroutine_threadsafe(server.start(listener), loop).result(WAIT_S)
    with socket.create_server((HOST, 0)) as deaf, socket.create_server((HOST, 0)) as ssh:
        ports |= {"deaf": deaf.getsockname()[1], "ssh": ssh.getsockname()[1]}
        other = threading.Thread(target=rude, args=(ssh,))
        other.start()
        ports["nobody"] = free_port()
        peers = [f"{HOST}:{port}" for port in ports.values()] + ["no-such-host.invalid:29400"]
        try:
            flags = ("--only", "peer", "--limit", "60", "--peer", *peers)
            report = examine(folder, *flags, env={"HOLDFAST_SECRET": SECRET}, wait_s=100.0)
        finally:
            for server in all_servers.values():
                loop.call_soon_threadsafe(server.close)
            loop.call_soon_threadsafe(loop.stop)
            thread.join(WAIT_S)
            ssh.shutdown(socket.SHUT_RDWR)
            other.join(WAIT_S)
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    yield lambda name: _of(report, ports, name)


def _of(report: Report, ports: dict[str, int], name: str) -> Finding:
    return report[f"peer {HOST}:{ports[name]}" if name in ports else f"peer {name}"]


def test_a_peer_that_is_well(found: Callable[[str], Finding]) -> None:
    fine = found("fine")
    assert fine.state == "ok", fine
    assert "it connects back" in fine.text and "same versions" in fine.text
    assert {"round_trip_s", "clock_rate", "wall_apart_s"} <= fine.figures.keys()


@pytest.mark.parametrize(
    ("name", "state", "words"),
    [
        ("fast", "fail", "faster than this one"),
        ("ahead", "warn", "the other wall clock is 3,600.0 s ahead"),
        ("torch", "fail", "torch is 1.0 on "),
        ("python", "warn", "python is 3.99.0 on "),
        ("nameless", "warn", "cannot be resolved"),
        ("astray", "warn", "is 10.9.8.7, yet it comes from 10.1.2.3"),
        ("swallows", "fail", "200 kB did not come back, though short messages do"),
        ("alters", "fail", "200 kB came back altered"),
        ("unreachable", "fail", f"cannot connect back to {HOST}: Connection refused"),
        ("misled", "fail", "what it sent came to somebody else"),
        ("leaves", "fail", "in the middle of it"),
        ("secret", "fail", "it has another secret than the variable HOLDFAST_SECRET"),
        ("deaf", "fail", "nobody there: no answer"),
        ("ssh", "fail", "it is no Holdfast"),
        ("nobody", "fail", "nobody there: Connection refused"),
        ("no-such-host.invalid:29400", "fail", "the name 'no-such-host.invalid' cannot be resolved here"),
    ],
)
def test_a_peer_that_is_not(found: Callable[[str], Finding], name: str, state: str, words: str) -> None:
    assert (found(name).state, words in found(name).text) == (state, True), found(name)


def test_a_peer_that_would_move_the_cursor(found: Callable[[str], Finding]) -> None:
    assert "evil" in found("hostile").text
    assert found("hostile").text.isprintable()


# -- both ends for real -----------------------------------------------------------------------------------------------


def serving(folder: Path, *flags: str, **more: str) -> tuple[subprocess.Popen[str], int]:
    """A doctor that serves, and its port."""
    port = free_port()
    process = subprocess.Popen(
        command("--serve", f"{HOST}:{port}", *flags), env=environment(folder, **more), stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == f"serving; on another node: holdfast doctor --peer {HOST}:{port}\n"
    return process, port


def test_two_doctors_that_share_a_secret_file(tmp_path: Path) -> None:
    """Of which there was none before: the first makes it, as with a job's nodes that share a home directory."""
    process, port = serving(tmp_path)
    try:
        report = examine(tmp_path, "--only", "peer", "--peer", f"localhost:{port}")
        alone = examine(tmp_path, "--only", "peer", "--insecure", "--peer", f"{HOST}:{port}")[f"peer {HOST}:{port}"]
        process.send_signal(signal.SIGTERM)
        said = process.communicate(timeout=WAIT_S)[0]
        assert report[f"peer localhost:{port}"].state == "ok", report
        assert said.startswith(f"ok      {socket.gethostname()} at {HOST}: ")
        assert (alone.state, "has a secret" in alone.text) == ("fail", True)
        assert said.splitlines()[1].startswith(f"fail    {HOST}: it runs with --insecure, and this end has the file ")
        assert process.returncode == 1  # one who came was not let in
    finally:
        end(process)


def test_a_doctor_that_is_stopped_in_the_middle(tmp_path: Path) -> None:
    process, port = serving(tmp_path)
    try:
        os.kill(process.pid, signal.SIGSTOP)
        began_s = time.monotonic()
        flags = ("--only", "peer", "--limit", "2", "--peer", f"{HOST}:{port}")
        found = examine(tmp_path, *flags)[f"peer {HOST}:{port}"]
        assert (found.state, found.text) == ("fail", "no answer within 2 s")
        assert time.monotonic() - began_s < WAIT_S
    finally:
        end(process)


def test_a_server_to_which_nobody_came_says_so_by_its_code(tmp_path: Path) -> None:
    process, _ = serving(tmp_path)
    process.send_signal(signal.SIGINT)
    try:
        assert process.wait(WAIT_S) == 1
    finally:
        end(process)


def test_a_port_to_serve_at_that_is_taken(tmp_path: Path) -> None:
    with socket.create_server((HOST, 0)) as listener:
        port = listener.getsockname()[1]
        ran = subprocess.run(
            command("--serve", f"{HOST}:{port}"),
            env=environment(tmp_path),
            capture_output=True,
            text=True,
            timeout=WAIT_S,
        )
    assert ran.returncode == 1
    assert ran.stderr == (
        f"holdfast doctor: cannot listen on port {port} on {HOST}: Address already in use; "
        "choose another, or leave it out\n"
    )
