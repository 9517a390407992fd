"""A small real network: a namespace a node, a bridge between them, and faults that TCP does not hear of."""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

DELAYS = Path(__file__).parent / "scripts" / "delays.py"
HOSTS = Path("/etc/netns")  # where `ip netns exec` looks too, so that a person can look around in a namespace by hand
NEEDED = ("ip", "bridge", "nsenter", "unshare", "mount")
END_S = 10.0

_CLONE_NEWNET = 0x40000000

# `ip netns exec` would do, but it hides /sys/fs/cgroup, where an agent reads of OOM kills, and gives no host name.
_ENTER = """
mount --bind "$1/hosts" /etc/hosts && mount --bind "$1/nsswitch.conf" /etc/nsswitch.conf || exit 125
echo "$2" > /proc/sys/kernel/hostname || exit 125
shift 2
exec "$@"
"""


class NetError(Exception):
    """The network cannot be had here, or a change of it was refused."""


class Net:
    """`Net(3)` has node0 to node2 at 10.77.<k>.1 to .3; no other network has that k. Nothing is in the root namespace.

    Addresses of neighbours are fixed, so that a cut is silent for as long as it lasts: with ARP, a connect to a node
    that is cut off would fail after three seconds with "no route to host".
    """

    def __init__(self, nodes: int) -> None:
        self.nodes = nodes
        self._cut: list[set[str]] = [set() for _ in range(nodes)]
        self._late: dict[int, subprocess.Popen[Any]] = {}
        self._started: list[subprocess.Popen[Any]] = []
        with contextlib.ExitStack() as undo:
            self._k = _claim(undo)
            for i in range(nodes):
                _make_namespace(self.name(i), undo)
                self._write_names(i)
            self._connect()
            self._undo = undo.pop_all()

    def __enter__(self) -> Net:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Kill what still runs in the namespaces, and remove them with all that is in them. Twice is once."""
        for process in self._started:
            process.kill()  # one that has not entered its namespace yet is not found there
        self._undo.close()
        for process in self._started:
            process.wait(END_S)

    # -- who is where ---------------------------------------------------------------------------------------------

    def addr(self, i: int) -> str:
        return f"10.77.{self._k}.{i + 1}"

    def name(self, i: int) -> str:
        """Its namespace, as `ip netns` knows it."""
        return f"{_prefix(self._k)}-{i}"

    def host(self, i: int) -> str:
        """Its name, which every node resolves, and which is its own host name."""
        return f"node{i}"

    def add_host(self, name: str, addr: str) -> None:
        """Let every node resolve one more name from now on. Processes that run already see it too."""
        for i in range(self.nodes):
            # In place: what a process has mounted on /etc/hosts is this file, not its name.
            with open(HOSTS / self.name(i) / "hosts", "a") as file:
                file.write(f"{addr} {name}\n")

    # -- programs and sockets inside ------------------------------------------------------------------------------

    def exec(self, i: int, argv: Sequence[str | Path], **popen: Any) -> subprocess.Popen[Any]:
        """Start a program on a node, as `Popen(argv, **popen)` would. Its pid is the program's own."""
        enter = ["nsenter", f"--net=/run/netns/{self.name(i)}", "unshare", "--mount", "--uts", "sh", "-c", _ENTER, "sh"]
        command = [*enter, HOSTS / self.name(i), self.host(i), *argv]
        process: subprocess.Popen[Any] = subprocess.Popen(command, **popen)
        self._started.append(process)
        return process

    def socket(self, i: int, kind: socket.SocketKind = socket.SOCK_STREAM) -> socket.socket:
        """A socket of this process on that node's network: a socket stays in the namespace that it was made in."""
        made: list[socket.socket] = []
        thread = threading.Thread(target=lambda: made.append(_socket_in(self.name(i), kind)))
        thread.start()
        thread.join()
        [found] = made
        return found

    def pids(self, i: int) -> list[int]:
        return _pids(self.name(i))

    # -- faults ---------------------------------------------------------------------------------------------------

    def cut(self, i: int) -> None:
        """Drop every packet from and to a node. Neither end is told."""
        self._cut[i] = {"in", "out"}
        self._set_port(i)

    def cut_one_way(self, i: int, way: Literal["in", "out"]) -> None:
        """Drop what goes to the node ("in") or what comes from it ("out"); the other way stays as it is."""
        self._cut[i].add(way)
        self._set_port(i)

    def heal(self, i: int) -> None:
        """End all cuts of a node. A delay stays."""
        self._cut[i].clear()
        self._set_port(i)

    def delay(self, i: int, delay_ms: float) -> None:
        """Make each packet to and each packet from a node so late: a round trip takes twice that. 0 ends it.

        A process passes the frames on, since not every kernel has tc's netem. Those on their way now are lost.
        """
        hub, direct = _hub(self._k), f"port{i}"
        if i in self._late:
            self._late[i].kill()
            self._late.pop(i).wait()
            _run("ip", "-n", hub, "link", "delete", f"late{i}")
            if self._cut[i]:  # a port that comes to a bridge is open until it is told otherwise
                _run("ip", "-n", hub, "link", "set", direct, "down")
            _run("ip", "-n", hub, "link", "set", direct, "master", "br0")
        if delay_ms:
            _batch(
                hub,
                f"link set {direct} nomaster",
                f"link add late{i} type veth peer name back{i}",
                f"link set late{i} master br0 up",
                f"link set back{i} up",
            )
            command = ["ip", "netns", "exec", hub, sys.executable, "-S", "-E", str(DELAYS)]
            process = subprocess.Popen([*command, direct, f"back{i}", str(delay_ms)], stdout=subprocess.PIPE)
            self._started.append(process)
            self._late[i] = process
            assert process.stdout is not None
            if not process.stdout.readline():
                raise NetError(f"packets of {self.host(i)} cannot be delayed: {DELAYS} has ended; see its stderr")
            process.stdout.close()
        self._set_port(i)
        if not delay_ms and self._cut[i]:
            _run("ip", "-n", hub, "link", "set", direct, "up")

    def _set_port(self, i: int) -> None:
        """A bridge that learns nothing floods; a port without flooding gets nothing, and a locked one is not heard."""
        port = f"late{i}" if i in self._late else f"port{i}"
        flood = "off" if "in" in self._cut[i] else "on"
        flags = ["learning", "off", "flood", flood, "mcast_flood", flood, "bcast_flood", flood]
        flags += ["locked", "on" if "out" in self._cut[i] else "off"]
        _run("bridge", "-n", _hub(self._k), "link", "set", "dev", port, *flags)

    # -- how it is made -------------------------------------------------------------------------------------------

    def _mac(self, i: int) -> str:
        return f"02:48:46:00:{self._k:02x}:{i + 1:02x}"

    def _connect(self) -> None:
        lines = ["link add br0 type bridge", "link set br0 up"]
        for i in range(self.nodes):
            peer = f"peer name eth0 address {self._mac(i)} netns {self.name(i)}"
            lines += [f"link add port{i} type veth {peer}", f"link set port{i} master br0 up"]
        _batch(_hub(self._k), *lines)
        for i in range(self.nodes):
            self._set_port(i)
            others = [j for j in range(self.nodes) if j != i]
            _batch(
                self.name(i),
                "link set lo up",
                f"addr add {self.addr(i)}/24 dev eth0",
                "link set eth0 up",
                *(f"neigh add {self.addr(j)} lladdr {self._mac(j)} dev eth0 nud permanent" for j in others),
            )
        until_s = time.monotonic() + END_S
        while _run("bridge", "-n", _hub(self._k), "link").count("state forwarding") < self.nodes:
            if time.monotonic() > until_s:  # until then a port drops what comes, and a datagram comes once
                raise NetError("the ports of the bridge do not come up")

    def _write_names(self, i: int) -> None:
        lines = ["127.0.0.1 localhost", *(f"{self.addr(j)} {self.host(j)}" for j in range(self.nodes))]
        (HOSTS / self.name(i) / "hosts").write_text("\n".join(lines) + "\n")
        # No DNS in here, so a name that is not in the file is unknown at once, as if a server had said so.
        (HOSTS / self.name(i) / "nsswitch.conf").write_text("passwd: files\ngroup: files\nhosts: files\n")


MakeNet = Callable[[int], Net]  # the fixture `net`


def why_not() -> str | None:
    """What keeps this machine from having a Net; None if nothing does."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if missing := [program for program in NEEDED if shutil.which(program) is None]:
        return f"network namespaces need {', '.join(missing)}; run tools/system-packages"
    try:
        with Net(1) as net:
            code = net.exec(0, ["true"], stderr=subprocess.DEVNULL).wait()
            return None if code == 0 else f"a program cannot be started in a network namespace: exit {code}"
    except (NetError, OSError) as failure:
        return f"network namespaces cannot be made: {failure}"


def _prefix(k: int) -> str:
    return f"hfnet{k}"


def _hub(k: int) -> str:
    return f"{_prefix(k)}-hub"


def _claim(undo: contextlib.ExitStack) -> int:
    """A number that no other network has: the hub's namespace is made in its name, or exists already."""
    for k in random.sample(range(1, 255), 254):
        try:
            _make_namespace(_hub(k), undo)
        except NetError as failure:
            if "File exists" not in str(failure):
                raise
        else:
            return k
    raise NetError("254 networks exist already; remove what killed runs left: ip netns list, ip netns delete")


def _make_namespace(name: str, undo: contextlib.ExitStack) -> None:
    _run("ip", "netns", "add", name)
    undo.callback(_remove_namespace, name)
    (HOSTS / name).mkdir(parents=True, exist_ok=True)


def _remove_namespace(name: str) -> None:
    while pids := _pids(name):
        for pid in pids:
            _kill(pid)
    shutil.rmtree(HOSTS / name, ignore_errors=True)
    _run("ip", "netns", "delete", name)


def _pids(name: str) -> list[int]:
    return [int(pid) for pid in _run("ip", "netns", "pids", name).split()]


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        fd = os.pidfd_open(pid)
        try:
            signal.pidfd_send_signal(fd, signal.SIGKILL)
            if not select.select([fd], [], [], END_S)[0]:
                raise NetError(f"process {pid} is still there {END_S} s after SIGKILL")
        finally:
            os.close(fd)


def _socket_in(name: str, kind: socket.SocketKind) -> socket.socket:
    """Of the thread that calls this, nothing else may be wanted: it stays in the namespace."""
    with open(f"/run/netns/{name}") as namespace:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(namespace.fileno(), _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"setns to {name}")
    return socket.socket(socket.AF_INET, kind)


def _batch(name: str, *lines: str) -> None:
    """Many `ip` commands in a namespace by one process."""
    _run("ip", "-n", name, "-batch", "-", told="\n".join(lines))


def _run(*argv: str, told: str = "") -> str:
    done = subprocess.run(argv, input=told, capture_output=True, text=True)
    if done.returncode != 0:
        raise NetError(f"{' '.join(argv)}: {done.stderr.strip()}")
    return done.stdout
