"""Nodes with a network of their own on one machine: a namespace each, and a bridge between them that can fail.

A cut drops packets and tells neither end. Delays and losses are made by a process that passes the frames of a node on,
since not every kernel has tc's netem.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import socket
import subprocess
import sys
from functools import partial
from types import TracebackType

from holdfast import linux
from holdfast.chaos import relay

_NAMESPACE = re.compile(r"hfchaos(\d+)-(?:hub|\d+)")


class NetworkError(Exception):
    pass


class Network:
    """A context: all of it is gone afterwards."""

    def __init__(self, nodes: int) -> None:
        self._nodes = nodes
        self._undo = contextlib.ExitStack()
        self._number = 0
        self._relays: dict[int, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Network:
        try:
            self._claim()
            _batch(self._hub, "link add br0 type bridge", "link set br0 up")
            for node in range(self._nodes):
                self._connect(node)
        except BaseException:
            self._undo.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, failure: BaseException | None, trace: TracebackType | None
    ) -> None:
        for node in list(self._relays):
            self._undo.callback(self._kill_relay, node)
        self._undo.close()

    @property
    def addresses(self) -> list[str]:
        return [f"10.98.{self._number}.{node + 1}" for node in range(self._nodes)]

    def namespace(self, node: int) -> str:
        """The file that stands for it."""
        return f"/run/netns/{self._name(node)}"

    # -- faults -------------------------------------------------------------------------------------------------------

    def cut(self, node: int) -> None:
        self._set_port(node, cut=True)

    def delay(self, node: int, delay_s: float) -> None:
        self._relay(node, delay_s, 0.0)

    def lose(self, node: int, part: float) -> None:
        self._relay(node, 0.0, part)

    def heal(self, node: int) -> None:
        if node in self._relays:
            self._end_relay(node)
        self._set_port(node, cut=False)

    def _relay(self, node: int, delay_s: float, part: float) -> None:
        """Between the node's port and another port of the bridge. Frames that are on their way now are lost."""
        port, near, far = f"port{node}", f"near{node}", f"far{node}"
        _batch(
            self._hub,
            f"link set {port} nomaster",
            f"link add {near} type veth peer name {far}",
            f"link set {near} master br0 up",
            f"link set {far} up",
        )
        self._set(near, cut=False)
        argv = ["nsenter", f"--net=/run/netns/{self._hub}", sys.executable, "-S", "-E", relay.__file__]
        argv += [port, far, str(delay_s), str(part)]
        dies = partial(linux.die_with_parent, os.getpid())
        process = subprocess.Popen(argv, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, preexec_fn=dies)
        self._relays[node] = process
        assert process.stdout is not None
        if not process.stdout.readline():
            raise NetworkError(f"packets of node {node} cannot be passed on")

    def _kill_relay(self, node: int) -> None:
        with self._relays.pop(node) as process:
            process.kill()

    def _end_relay(self, node: int) -> None:
        self._kill_relay(node)
        _batch(self._hub, f"link delete near{node}", f"link set port{node} master br0")
        self._set_port(node, cut=False)

    def _set_port(self, node: int, cut: bool) -> None:
        self._set(f"port{node}", cut)

    def _set(self, port: str, cut: bool) -> None:
        """A bridge that learns nothing floods; a port without flooding gets nothing, and a locked one is not heard."""
        flood = "off" if cut else "on"
        flags = ["learning", "off", "flood", flood, "mcast_flood", flood, "bcast_flood", flood]
        _run("bridge", "-n", self._hub, "link", "set", "dev", port, *flags, "locked", "on" if cut else "off")

    # -- how it is made -----------------------------------------------------------------------------------------------

    @property
    def _hub(self) -> str:
        return f"hfchaos{self._number}-hub"

    def _name(self, node: int) -> str:
        return f"hfchaos{self._number}-{node}"

    def _claim(self) -> None:
        """A number that no other campaign has."""
        _sweep()
        for self._number in random.sample(range(1, 255), 254):
            if (claim := _claim(self._number)) is None:
                continue
            self._undo.callback(claim.close)
            with contextlib.suppress(NetworkError):
                self._make(self._hub)
                return
        raise NetworkError("no network namespace can be made; ip netns list shows what is there")

    def _make(self, name: str) -> None:
        _run("ip", "netns", "add", name)
        self._undo.callback(_remove, name)

    def _connect(self, node: int) -> None:
        name, others = self._name(node), [each for each in range(self._nodes) if each != node]
        self._make(name)
        peer = f"peer name eth0 address {self._mac(node)} netns {name}"
        _batch(self._hub, f"link add port{node} type veth {peer}", f"link set port{node} master br0 up")
        self._set_port(node, cut=False)
        known = [
            f"neigh add {self.addresses[other]} lladdr {self._mac(other)} dev eth0 nud permanent" for other in others
        ]
        _batch(name, "link set lo up", f"addr add {self.addresses[node]}/24 dev eth0", "link set eth0 up", *known)

    def _mac(self, node: int) -> str:
        return f"02:48:43:00:{self._number:02x}:{node + 1:02x}"


def _claim(number: int) -> socket.socket | None:
    """Held for as long as the campaign lives, however it ends. None: another one has it."""
    claim = socket.socket(socket.AF_UNIX)
    try:
        claim.bind(f"\0holdfast-chaos-network-{number}")
    except OSError:
        claim.close()
        return None
    return claim


def _sweep() -> None:
    """The namespaces that campaigns which were killed have left."""
    left: dict[int, list[str]] = {}
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir("/run/netns"):
            if found := _NAMESPACE.fullmatch(name):
                left.setdefault(int(found[1]), []).append(name)
    for number, names in left.items():
        if (claim := _claim(number)) is not None:
            with claim:
                for name in names:
                    _remove(name)


def _remove(name: str) -> None:
    with contextlib.suppress(NetworkError):
        _run("ip", "netns", "delete", name)


def _batch(name: str, *lines: str) -> None:
    """Many `ip` commands in a namespace by one process."""
    _run("ip", "-n", name, "-batch", "-", told="\n".join(lines))


def _run(*argv: str, told: str = "") -> None:
    done = subprocess.run(argv, input=told, capture_output=True, text=True)
    if done.returncode != 0:
        raise NetworkError(f"{' '.join(argv)}: {done.stderr.strip()}")
