"""Limits, /dev/shm, names, ports and clocks: well, and broken on purpose."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
from doctoring import examine, hook, need_namespaces

from holdfast.doctor import machine
from holdfast.doctor.finding import Asked


def test_a_machine_that_is_well(tmp_path: Path) -> None:
    report = examine(tmp_path, "--only", "limits", "shm", "clock", "disk", "--log-dir", str(tmp_path / "not" / "yet"))
    assert [finding.check for finding in report.findings] == ["limits", "shm", "clock", "disk"]
    assert {finding.state for finding in report.findings} <= {"ok", "warn"}  # a small machine is one, too
    assert float(report["limits"].figures["open_files"]) >= 512
    assert float(report["shm"].figures["free_bytes"]) > 0
    assert abs(float(report["clock"].figures["raw_rate"])) < 0.01
    assert float(report["disk"].figures["write_bytes_s"]) > 0
    assert not (tmp_path / "not").exists()


@pytest.mark.parametrize(
    ("limit", "state", "cure"),
    [("-n 100", "fail", "raise the hard limit: LimitNOFILE="), ("-Sn 1024", "warn", "ulimit -n 65536")],
)
def test_few_open_files(tmp_path: Path, limit: str, state: str, cure: str) -> None:
    found = examine(tmp_path, "--only", "limits", after=f"ulimit {limit}")["limits"]
    assert (found.state, found.cure[: len(cure)]) == (state, cure)
    assert found.figures["open_files"] == int(limit.split()[1])


def test_infiniband_without_memory_that_can_be_locked(tmp_path: Path) -> None:
    """A /dev with the directory of such a card, and otherwise what a process cannot do without."""
    need_namespaces(tmp_path)
    device = (
        f"mount -t tmpfs none {tmp_path}; touch {tmp_path}/null; mount --bind /dev/null {tmp_path}/null\n"
        f"mkdir {tmp_path}/infiniband; mount --rbind {tmp_path} /dev; ulimit -n 8192; ulimit -l 64"
    )
    found = examine(tmp_path, "--only", "limits", after=device, inside=True)["limits"]
    assert (found.state, found.figures["locked_bytes"]) == ("warn", 64 << 10)
    assert found.text == "InfiniBand is here, and a process may lock only 64 KiB of its memory"
    assert found.cure == "ulimit -l unlimited, or LimitMEMLOCK=infinity of the service"


@pytest.mark.parametrize(("size", "state", "words"), [("8m", "fail", "No space left"), ("64m", "warn", "64 MiB")])
def test_small_shared_memory(tmp_path: Path, size: str, state: str, words: str) -> None:
    need_namespaces(tmp_path)
    mount = f"mount -t tmpfs -o size={size} none /dev/shm"
    found = examine(tmp_path, "--only", "shm", after=mount, inside=True)["shm"]
    assert found.state == state
    assert words in found.text
    assert "--shm-size" in found.cure


def test_no_shared_memory(tmp_path: Path) -> None:
    need_namespaces(tmp_path)
    mount = "mount -t tmpfs none /dev/shm; mount -o remount,ro none /dev/shm"
    found = examine(tmp_path, "--only", "shm", after=mount, inside=True)["shm"]
    assert (found.state, "Read-only" in found.text) == ("fail", True)


def test_a_name_that_nobody_knows(tmp_path: Path) -> None:
    need_namespaces(tmp_path)
    found = examine(tmp_path, "--only", "names", after="hostname no-such-host.invalid", inside=True)["names"]
    assert found.state == "fail"
    assert "'no-such-host.invalid' cannot be resolved" in found.text


def test_a_name_that_leads_home(tmp_path: Path) -> None:
    need_namespaces(tmp_path)
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.1.1 astray\n")
    after = f"hostname astray; mount --bind {hosts} /etc/hosts"
    found = examine(tmp_path, "--only", "names", after=after, inside=True)["names"]
    assert (found.state, found.figures["address"]) == ("warn", "127.0.1.1")
    assert found.text == "astray is 127.0.1.1 on this machine, where other machines cannot reach it"


def test_a_port_that_is_taken(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_server(("127.0.0.1", 0)) as other:
        port, free = listener.getsockname()[1], other.getsockname()[1]
        other.close()
        assert machine.ports(Asked(ports=(free,))).state == "ok"
        found = examine(tmp_path, "--only", "ports", "--port", str(free), str(port))["ports"]
    assert found.state == "fail"
    name = Path("/proc/self/comm").read_text().strip()
    assert found.text == f"port {port} is taken by process {os.getpid()} ({name})"


def test_the_usual_ports_may_be_taken_by_another_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is worth a word, but this machine is none the worse for it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        monkeypatch.setattr(machine, "PORTS", (listener.getsockname()[1],))
        found = machine.ports(Asked())
    assert (found.state, "is taken by process" in found.text) == ("warn", True)


CLOCKS = """
import time
true = time.clock_gettime
RATES = {time.CLOCK_MONOTONIC_RAW: 1.5, time.CLOCK_REALTIME: 0.5}
time.clock_gettime = lambda which: true(which) * RATES.get(which, 1.0)
"""


def test_clocks_that_run_at_other_rates(tmp_path: Path) -> None:
    found = examine(tmp_path, "--only", "clock", env=hook(tmp_path, CLOCKS))["clock"]
    assert found.state == "fail"
    assert 0.4 < float(found.figures["raw_rate"]) < 0.6
    assert -0.6 < float(found.figures["wall_rate"]) < -0.4
    assert "faster than the monotonic one; the wall clock runs " in found.text


def test_a_clock_that_is_slow_to_read(tmp_path: Path) -> None:
    slow = "import time\ntrue = time.monotonic\ntime.monotonic = lambda: [true() for _ in range(200)][-1]\n"
    found = examine(tmp_path, "--only", "clock", env=hook(tmp_path, slow))["clock"]
    assert (found.state, "to read the clock takes" in found.text) == ("warn", True)
