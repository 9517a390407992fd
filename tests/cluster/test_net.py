"""The network that the cluster tests stand on does what it says, and is gone afterwards."""

from __future__ import annotations

import select
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cluster.net import HOSTS, MakeNet, Net

SAYS_WHO_IT_IS = """
import os, socket, sys
print(os.getpid(), socket.gethostname(), socket.gethostbyname(socket.gethostname()), os.environ["MARK"])
print(socket.create_connection((sys.argv[1], 5000), 10).recv(100).decode())
"""
RESOLVES_WHEN_ASKED = """
import socket, sys
for name in sys.stdin:
    try:
        print(socket.gethostbyname(name.strip()), flush=True)
    except socket.gaierror as failure:
        print(failure.errno, flush=True)
"""


def python(text: str, *args: str) -> list[str]:
    return [sys.executable, "-S", "-E", "-c", text, *args]


def listen(net: Net, i: int) -> socket.socket:
    server = net.socket(i)
    server.bind((net.addr(i), 5000))
    server.listen()
    server.settimeout(10)
    return server


def connect(net: Net, one: int, other: int) -> tuple[socket.socket, socket.socket]:
    """Both ends of a connection between two nodes."""
    with listen(net, other) as server:
        client = net.socket(one)
        client.settimeout(10)
        client.connect((net.addr(other), 5000))
        accepted = server.accept()[0]
        accepted.settimeout(10)
        return client, accepted


def datagrams(net: Net, i: int) -> socket.socket:
    receiver = net.socket(i, socket.SOCK_DGRAM)
    receiver.bind((net.addr(i), 5000))
    receiver.settimeout(10)
    return receiver


def has_news(*links: socket.socket, within_s: float) -> bool:
    """Whether one of them has data, an end or an error."""
    return bool(select.select(links, [], links, within_s)[0])


def round_trip_s(one: socket.socket, other: socket.socket) -> float:
    at_s = time.monotonic()
    one.sendall(b"?")
    assert other.recv(1) == b"?"
    other.sendall(b"!")
    assert one.recv(1) == b"!"
    return time.monotonic() - at_s


def test_a_program_runs_on_its_node_and_reaches_another_by_name(net: MakeNet) -> None:
    pair = net(2)
    with listen(pair, 1) as server:
        environment = {"MARK": "mine", "PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
        command = python(SAYS_WHO_IT_IS, pair.host(1))
        process = pair.exec(0, command, stdout=subprocess.PIPE, text=True, env=environment)
        link, peer = server.accept()
        with link:
            link.sendall(b"hello from node1")
        out, _ = process.communicate(timeout=10)
    assert out == f"{process.pid} node0 {pair.addr(0)} mine\nhello from node1\n"
    assert peer[0] == pair.addr(0)
    assert process.returncode == 0


def test_a_cut_is_silent_and_heals(net: MakeNet) -> None:
    trio = net(3)
    one, other = connect(trio, 0, 1)
    bystander, third = connect(trio, 0, 2)
    with one, other, bystander, third, trio.socket(0) as late:
        trio.cut(1)
        one.sendall(b"to the cut node")
        other.sendall(b"from the cut node")
        late.setblocking(False)
        assert late.connect_ex((trio.addr(1), 5001)) != 0
        round_trip_s(bystander, third)
        assert not has_news(one, other, late, within_s=1.0)
        assert not select.select([], [late], [], 0)[1]  # neither connected nor refused
        trio.heal(1)
        assert other.recv(100) == b"to the cut node"
        assert one.recv(100) == b"from the cut node"
        assert select.select([], [late], [], 10)[1]
        assert late.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) != 0  # refused, by a node that is there again


@pytest.mark.parametrize("way", ["in", "out"])
def test_a_cut_one_way_leaves_the_other(net: MakeNet, way: str) -> None:
    pair = net(2)
    with datagrams(pair, 0) as node0, datagrams(pair, 1) as node1:
        pair.cut_one_way(1, "in" if way == "in" else "out")
        node0.sendto(b"in", (pair.addr(1), 5000))
        node1.sendto(b"out", (pair.addr(0), 5000))
        reached, cut_off = (node0, node1) if way == "in" else (node1, node0)
        assert reached.recv(100) == (b"out" if way == "in" else b"in")
        assert not has_news(cut_off, within_s=0.2)
        pair.heal(1)
        node0.sendto(b"in again", (pair.addr(1), 5000))
        node1.sendto(b"out again", (pair.addr(0), 5000))
        assert node0.recv(100) == b"out again"
        assert node1.recv(100) == b"in again"


def test_a_delay_makes_packets_late_and_keeps_them_whole(net: MakeNet) -> None:
    pair = net(2)
    one, other = connect(pair, 0, 1)
    with one, other:
        pair.delay(1, 50)
        assert round_trip_s(one, other) >= 0.1
        sent = bytes(range(256)) * 1000  # segmented by the kernel, so that frames beyond the MTU pass
        one.sendall(sent)
        received = b""
        while len(received) < len(sent):
            received += other.recv(1 << 20)
        assert received == sent
        pair.cut(1)
        one.sendall(b"x")
        assert not has_news(other, within_s=0.3)
        pair.delay(1, 0)
        assert not has_news(other, within_s=0.3)  # still cut
        pair.heal(1)
        assert other.recv(1) == b"x"
        assert min(round_trip_s(one, other) for _ in range(20)) < 0.1


def test_a_name_can_come_to_be_known_late(net: MakeNet) -> None:
    pair = net(2)
    command = python(RESOLVES_WHEN_ASKED)
    process = pair.exec(0, command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write("head.cluster\n")
    assert process.stdout.readline() == f"{socket.EAI_NONAME}\n"
    pair.add_host("head.cluster", pair.addr(1))
    process.stdin.write("head.cluster\n")
    assert process.stdout.readline() == f"{pair.addr(1)}\n"
    process.communicate()


def test_two_networks_do_not_meet(net: MakeNet) -> None:
    here, there = net(2), net(2)
    assert not {here.addr(0), here.addr(1)} & {there.addr(0), there.addr(1)}
    one, other = connect(here, 0, 1)
    three, four = connect(there, 0, 1)
    with one, other, three, four, here.socket(0) as stray:
        here.cut(1)
        round_trip_s(three, four)
        with pytest.raises(OSError, match="unreachable"):
            stray.connect((there.addr(1), 5000))


def test_nothing_is_left_even_after_an_exception(net: MakeNet) -> None:
    net(1)  # skips where there are none
    with pytest.raises(ZeroDivisionError), Net(2) as pair:
        names = [pair.name(0), pair.name(1), pair.name(0).removesuffix("0") + "hub"]
        assert set(names) <= set(namespaces())
        pair.delay(0, 1)
        sleeper = pair.exec(1, ["sleep", "300"])
        deaf = pair.exec(0, ["sh", "-c", "trap '' TERM; sleep 300 & wait"], start_new_session=True)
        raise ZeroDivisionError
    assert (sleeper.returncode, deaf.returncode) == (-9, -9)
    assert not set(names) & set(namespaces())
    assert [name for name in names if (HOSTS / name).exists()] == []
    assert [link.name for link in Path("/sys/class/net").iterdir() if link.name.startswith(("port", "late"))] == []
    pair.close()


def namespaces() -> list[str]:
    return [path.name for path in Path("/run/netns").iterdir()]
