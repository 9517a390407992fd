"""Faults from outside, each on what it is done to: processes, files, a disk, links between nodes, members of etcd."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from coordinator.etcd_cluster import wait_for
from holdfast import linux
from holdfast.chaos import disk, etcd, faults
from holdfast.chaos.disk import NotHere
from holdfast.chaos.faults import Injected
from holdfast.chaos.hands import Hands
from holdfast.chaos.kinds import KINDS
from holdfast.chaos.network import Network, NetworkError
from holdfast.chaos.plan import Due
from holdfast.checkpoint.storage import open_storage
from holdfast.observe import record
from holdfast.observe.state import State
from states import save

WAIT_S = 30.0
NEEDS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
CLONE_NEWNET = 0x40000000


class Node:
    """A process that stands for a rank, a writer or an agent."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(["sleep", "1000"])

    @property
    def code(self) -> int | None:
        return self.process.poll()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


class Job:
    """In generation 3 of its life 1, with one rank."""

    def __init__(self, *nodes: Node) -> None:
        self.life, self.state = 1, State()
        self.state.take(record.Noted(record.WorldLaunched(3, 1, 0, local_size=1), 0.0, "", "n", 0))
        self.nodes = nodes
        self.lead = SimpleNamespace(writer=nodes[0].process.pid if nodes else None)
        self.started: list[int] = []

    @property
    def agents(self) -> Any:
        """Their processes are below this one's; each of them is one, too, with a life of its own."""
        here = SimpleNamespace(process=SimpleNamespace(pid=os.getpid()))
        return self.nodes if len(self.nodes) > 1 else [here]

    def pid_of(self, rank: int) -> int:
        return self.nodes[rank].process.pid

    def start_node(self, node: int) -> None:
        self.started.append(node)


@pytest.fixture
def node() -> Iterator[Node]:
    made = Node()
    yield made
    made.kill()


def make(folder: Path, job: Job, **more: Any) -> Hands:
    ours: Any = job
    return Hands(folder, ours, folder / "checkpoints", **more)


def due(kind: str, **more: Any) -> Due:
    return Due(7, KINDS[kind], for_s=2.0, **more)


def noted(folder: Path) -> Injected:
    [found] = faults.read(str(folder))
    assert (found.number, found.life, found.generation, found.step) == (7, 1, 3, 40)
    return found


# -- processes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["kill", "segfault"])
def test_a_signal_to_a_rank(kind: str, node: Node, tmp_path: Path) -> None:
    assert make(tmp_path, Job(node)).strike(due(kind), 40, 99) is None
    signum = {"kill": signal.SIGKILL, "segfault": signal.SIGSEGV}[kind]
    assert node.process.wait(WAIT_S) == -signum
    assert (noted(tmp_path).kind, noted(tmp_path).rank, noted(tmp_path).pid) == (kind, 0, node.process.pid)


def test_a_rank_that_is_stopped(node: Node, tmp_path: Path) -> None:
    make(tmp_path, Job(node)).strike(due("stop"), 40, 99)
    wait_for(lambda: linux.state(node.process.pid) == "T")
    assert noted(tmp_path).kind == "stop"


def test_a_disk_is_slow_until_it_is_mended(node: Node, tmp_path: Path) -> None:
    mend = make(tmp_path, Job(node)).strike(due("slow-disk"), 40, 99)
    wait_for(lambda: linux.state(node.process.pid) == "T")
    assert (noted(tmp_path).pid, noted(tmp_path).for_s) == (node.process.pid, 2.0)
    assert mend is not None
    mend()
    wait_for(lambda: linux.state(node.process.pid) == "S")


def test_the_writer_is_lost_once(node: Node, tmp_path: Path) -> None:
    hands = make(tmp_path, Job(node))
    assert hands.strike(due("writer-loss"), 40, 99) is None
    assert node.process.wait(WAIT_S) == -signal.SIGKILL
    with pytest.raises(NotHere, match="nobody writes checkpoints"):
        hands.strike(due("writer-loss"), 40, 99)
    assert noted(tmp_path).kind == "writer-loss"


def test_a_program_that_is_to_fail_at_its_import_has_its_world_ended(node: Node, tmp_path: Path) -> None:
    hands = make(tmp_path, Job(node))
    hands.strike(due("crash-on-import"), 40, 99)
    assert node.process.wait(WAIT_S) == -signal.SIGKILL
    [kill] = faults.read(str(tmp_path))
    assert (kill.number, kill.kind, kill.pid) == (99, "kill", node.process.pid)
    [order] = msgspec.json.decode((tmp_path / "orders.json").read_bytes(), type=faults.Orders).orders
    assert (order.number, order.kind, order.rank) == (7, "crash-on-import", 0)


def test_a_world_that_cannot_be_ended_fails_at_no_import(
    node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hands = make(tmp_path, Job(node))
    node.kill()
    monkeypatch.setattr(Hands, "_is_ours", lambda self, pid: True)  # it ended since somebody looked
    with pytest.raises(ProcessLookupError):
        hands.strike(due("crash-on-import"), 40, 99)
    assert msgspec.json.decode((tmp_path / "orders.json").read_bytes(), type=faults.Orders).orders == ()
    assert not (tmp_path / faults.NAME).exists()


def test_a_node_is_lost_and_started_again_unless_it_has_ended(node: Node, tmp_path: Path) -> None:
    first = Node()
    try:
        job = Job(first, node)
        hands = make(tmp_path, job)
        hands.strike(due("node-loss"), 40, 99)
        assert (first.code, node.code, job.started) == (None, -signal.SIGKILL, [1])
        assert (noted(tmp_path).node, noted(tmp_path).pid) == (1, node.process.pid)
        with pytest.raises(NotHere, match="node 1 has ended"):
            hands.strike(due("node-loss"), 40, 99)
        assert noted(tmp_path).kind == "node-loss"
    finally:
        first.kill()


# -- files and disks --------------------------------------------------------------------------------------------------


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoints"
    storage = open_storage(str(folder))
    for step in (10, 20):
        assert all(outcome.committed for outcome in save(storage, step))
    return folder


@pytest.mark.parametrize("chance", [0.0, 0.3, 0.999])
def test_one_bit_of_the_newest_checkpoint(chance: float, saved: Path) -> None:
    before = contents(saved)
    done = disk.damage(saved, "bit-flip", chance)
    after = contents(saved)
    assert [name for name in before if before[name] != after[name]] == [done.file]
    assert (done.step, done.file.partition("/")[0]) == (20, done.name)
    flipped = int.from_bytes(before[done.file]) ^ int.from_bytes(after[done.file])
    assert (flipped.bit_count(), len(after[done.file])) == (1, len(before[done.file]))


def test_the_newest_checkpoint_is_cut_in_half(saved: Path) -> None:
    before = contents(saved)
    done = disk.damage(saved, "torn-file", 0.5)
    whole = before[done.file]
    assert done.step == 20
    assert contents(saved) == before | {done.file: whole[: len(whole) // 2]}


FILLS = """
import errno, os, sys
from pathlib import Path
from holdfast.chaos import disk
folder = Path(sys.argv[1])
disk.own_disk(folder, 1)
(folder / "before").write_bytes(bytes(100_000))
print(disk.fill(folder))
try:
    with open(folder / "more", "wb", buffering=0) as file:
        file.write(b"x")
    print("room")
except OSError as failure:
    print(errno.errorcode[failure.errno])
disk.free(folder)
(folder / "more").write_bytes(bytes(500_000))
print(sorted(os.listdir(folder)))
"""


@NEEDS_ROOT
def test_a_disk_is_filled_to_the_last_byte_and_nobody_else_sees_it(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", FILLS, str(tmp_path)], capture_output=True, text=True, timeout=WAIT_S)
    told, then, there = done.stdout.splitlines()
    assert (told.endswith("bytes written, and no room for more"), then) == (True, "ENOSPC"), done.stderr
    assert int(told.split()[0]) > 800_000
    assert there == "['before', 'more']"
    assert list(tmp_path.iterdir()) == []


# -- links ------------------------------------------------------------------------------------------------------------


def socket_on(network: Network, at: int) -> socket.socket:
    """Of a node. A socket stays in the network that it was made in."""
    made: list[socket.socket] = []

    def make() -> None:
        with open(network.namespace(at)) as file:
            assert ctypes.CDLL(None).setns(file.fileno(), CLONE_NEWNET) == 0
        made.append(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        made[0].bind((network.addresses[at], 7000))
        made[0].settimeout(WAIT_S)

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    return made[0]


def arrives(sender: socket.socket, receiver: socket.socket, *sent: bytes) -> list[bytes]:
    """What comes of it. Packets keep their order, so a last word that is said until it is heard ends it."""
    for packet in sent:
        sender.sendto(packet, receiver.getsockname())
    last, came = b"last " + os.urandom(8), []
    receiver.settimeout(0.05)
    for _ in range(int(WAIT_S / 0.05)):
        sender.sendto(last, receiver.getsockname())
        with contextlib.suppress(TimeoutError):
            while (packet := receiver.recv(100)) != last:
                came.append(packet)
            return [packet for packet in came if not packet.startswith(b"last")]
    raise AssertionError(f"{came}, and no last word")


@NEEDS_ROOT
@pytest.mark.parametrize("kind", ["link-cut", "link-loss", "link-delay"])
def test_a_link_fails_both_ways_and_is_mended(kind: str, tmp_path: Path) -> None:
    packets = [b"%d" % number for number in range(200)]
    with Network(2) as network, socket_on(network, 0) as near, socket_on(network, 1) as far:
        mend = make(tmp_path, Job(), links=network).strike(due(kind, node=1, part=0.5, delay_s=0.2), 40, 99)
        assert (noted(tmp_path).kind, noted(tmp_path).node, noted(tmp_path).for_s) == (kind, 1, 2.0)
        for one, other in ((near, far), (far, near)):
            if kind == "link-cut":
                one.sendto(b"lost", other.getsockname())
            elif kind == "link-loss":
                came = arrives(one, other, *packets)
                assert 0 < len(came) < len(packets)
                assert came == [packet for packet in packets if packet in came]
            else:
                sent_s = time.monotonic()
                assert arrives(one, other, b"late") == [b"late"]
                assert time.monotonic() - sent_s >= 0.2
        assert mend is not None
        mend()
        assert arrives(near, far, *packets) == arrives(far, near, *packets) == packets


@NEEDS_ROOT
def test_a_link_that_cannot_be_cut_is_no_fault(tmp_path: Path) -> None:
    with Network(2) as network:
        hands = make(tmp_path, Job(), links=network)
        hub = Path(network.namespace(0)).name.partition("-")[0] + "-hub"
        subprocess.run(["ip", "netns", "delete", hub], check=True)
        with pytest.raises(NetworkError):
            hands.strike(due("link-cut", node=1), 40, 99)
    assert not (tmp_path / faults.NAME).exists()


# -- etcd -------------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(shutil.which("etcd") is None, reason="needs etcd")
def test_the_leader_of_etcd_is_lost_and_another_one_leads(tmp_path: Path) -> None:
    def leaders() -> dict[int, object]:
        """Whom each member that answers says to lead."""
        told = {int(each.rpartition(":")[2]): etcd._ask(int(each.rpartition(":")[2])) for each in ports}
        return {port: found.get("leader") for port, found in told.items() if found}

    with etcd.Members(tmp_path / "etcd") as members:
        ports = members.endpoints.split(",")
        before = leaders()
        hands = make(tmp_path, Job(), etcd=members)
        mend = hands.strike(due("etcd-leader-loss"), 40, 99)
        assert noted(tmp_path).text.endswith("of 3")
        wait_for(lambda: len(leaders()) == 2 and set(leaders().values()).isdisjoint({*before.values(), None}))
        members.kill_leader()
        with pytest.raises(OSError, match="etcd has no leader"):
            hands.strike(due("etcd-leader-loss"), 40, 99)  # one alone elects nobody
        assert noted(tmp_path).kind == "etcd-leader-loss"
        assert mend is not None
        mend()
        wait_for(lambda: len(leaders()) == 3 and len(set(leaders().values())) == 1 and None not in leaders().values())
