"""What a campaign has made is gone after it, also when it was killed, or when a part of it cannot be taken down."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from harness import needs
from holdfast import linux
from holdfast.chaos.network import Network

WAIT_S = 30.0
NEEDS_ROOT = needs(os.geteuid() == 0, "root")

NETWORK = """
from holdfast.chaos.network import Network
with Network(2) as network:
    network.delay(0, 0.01)
    print(network.namespace(0), flush=True)
    input()
"""
ETCD = """
import sys
from pathlib import Path
from holdfast.chaos.etcd import Members
with Members(Path(sys.argv[1])) as members:
    print(members.endpoints, flush=True)
    input()
"""


@contextmanager
def killed(program: str, folder: Path, *argv: str) -> Iterator[tuple[str, list[int]]]:
    """What it has said, and the processes that it had when it was killed."""
    command = [sys.executable, "-c", program, *argv]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=folder, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        said = process.stdout.readline().strip()
        below = list(linux.descendants(process.pid))
        process.kill()
    try:
        yield said, below
    finally:
        linux.signal_all(below, 9)


def still_there(pids: list[int]) -> list[int]:
    linux.wait_for_end(pids, WAIT_S)
    return [pid for pid in pids if linux.state(pid) not in ("", "Z")]


def namespaces(number: str) -> list[str]:
    return [name for name in os.listdir("/run/netns") if name.startswith(f"{number}-")]


@NEEDS_ROOT
def test_a_network_of_a_campaign_that_was_killed(tmp_path: Path) -> None:
    with killed(NETWORK, tmp_path) as (namespace, below):
        number = Path(namespace).name.partition("-")[0]
        assert len(namespaces(number)) == 3
        assert len(below) == 1  # the relay
        assert still_there(below) == []
        with Network(2) as network:
            mine = Path(network.namespace(0)).name.partition("-")[0]
            assert mine == number or namespaces(number) == []
            with Network(1):  # whose campaign lives
                assert len(namespaces(mine)) == 3


@needs(shutil.which("etcd") is not None, "etcd")
def test_members_of_etcd_of_a_campaign_that_was_killed(tmp_path: Path) -> None:
    with killed(ETCD, tmp_path, str(tmp_path / "etcd")) as (_, below):
        assert len(below) == 3
        assert still_there(below) == []


@NEEDS_ROOT
def test_a_network_that_cannot_be_mended_is_removed_all_the_same() -> None:
    with Network(2) as network:
        number = Path(network.namespace(0)).name.partition("-")[0]
        for node in range(2):
            network.delay(node, 0.01)
        ours = linux.children(os.getpid())
        relays = [pid for pid in ours if "relay.py" in linux.read(f"/proc/{pid}/cmdline")]
        assert len(relays) == 2
        subprocess.run(["ip", "netns", "delete", f"{number}-hub"], check=True)
    assert still_there(relays) == []
    assert namespaces(number) == []
