"""Who may speak with a coordinator, and what comes of those who may not: nothing."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from pathlib import Path

import pytest

from cluster.cluster import MakeCluster
from cluster.jobs import Job
from coordinator.etcd_cluster import Certificates


def test_who_has_another_secret_is_told_which_file_and_harms_nothing(cluster: MakeCluster, tmp_path: Path) -> None:
    trio = cluster()
    job = Job(trio, nnodes="2:3", conf="")
    job.start(0, 1)
    world = job.wait_generation(0, 0, 1)
    job.start(2, env={"XDG_CONFIG_HOME": str(tmp_path)})
    assert job.ends(2) == [1]
    [line] = [line for line in trio.err(2).splitlines() if "secret" in line and "next: " not in line]
    assert str(tmp_path / "holdfast" / "secret") in line
    assert "copy that file from the coordinator's node" in line
    trio.wait_said(0, "refused a connection from")
    job.start(2, env={"HOLDFAST_SECRET": "not the one that the others have"})
    assert job.ends(2) == [1]
    assert "the variable HOLDFAST_SECRET; set it here as it is on the coordinator's node" in trio.err(2)
    assert trio.err(0).count("refused a connection from") == 1
    assert job.goes_on(world)
    job.release()
    assert job.ends(0, 1) == [0, 0]
    assert trio.leftovers() == []


def test_garbage_and_half_connections_harm_nothing(cluster: MakeCluster) -> None:
    pair = cluster()
    job = Job(pair, nnodes="2")
    with contextlib.ExitStack() as strangers:
        job.start(0, 1)
        world = job.wait_generation(0, 0, 1)
        said = [b"", b"HOLDFAST\1", b"GET / HTTP/1.1\r\n\r\n", os.urandom(300), b"\xff" * 4096, os.urandom(1 << 20)]
        for words in said * 3:
            stranger = socket.create_connection((pair.addr(0), pair.port))
            strangers.enter_context(stranger)
            with contextlib.suppress(OSError):  # it may have been closed in the middle of them
                stranger.sendall(words)
        for _ in range(50):
            socket.create_connection((pair.addr(0), pair.port)).close()
        assert job.goes_on(world)
        assert job.nodes()["count"] == 2
        job.release()
        assert job.ends(0, 1) == [0, 0]
    assert pair.err(0).count("refused a connection from 127.") <= 4  # once per kind of nonsense
    assert job.causes(0) == []
    assert pair.leftovers() == []


@pytest.mark.long
def test_insecure_says_so_and_keeps_to_its_own(cluster: MakeCluster) -> None:
    trio = cluster()
    job = Job(trio, "--insecure", nnodes="2")
    job.start(0, 1)
    job.wait_generation(0, 0, 1)
    assert "--insecure: whoever reaches the coordinator's port can join or end this job" in trio.err(1)
    careful = Job(trio, nnodes="2")
    careful.start(2)
    assert careful.ends(2) == [1]
    assert "insecure" in trio.err(2)
    job.release()
    assert job.ends(0, 1) == [0, 0]
    assert not (trio.folder / "home" / ".config").exists() or "secret" in os.listdir(
        trio.folder / "home/.config/holdfast"
    )
    assert trio.leftovers() == []


def test_tls_from_end_to_end(cluster: MakeCluster, tmp_path: Path) -> None:
    files = Certificates.make(tmp_path / "tls")
    tls = (f"--tls-cert={files.server}", f"--tls-key={files.key}", f"--tls-ca={files.ca}")
    trio = cluster()
    job = Job(trio, nnodes="2:3", conf="", endpoint=f"127.0.0.1:{trio.port}")
    job.start(0, 1, flags=tls)
    world = job.wait_generation(0, 0, 1)
    job.start(2)
    trio.wait_said(2, "it closed the connection without an answer, as one that expects TLS does")
    trio.signal_agent(2, signal.SIGTERM)
    assert job.ends(2) == [1]
    assert job.goes_on(world)
    job.start(2, flags=tls)
    job.wait_generation(1, 0, 1, 2)
    assert job.nodes(*tls)["count"] == 3
    job.release()
    assert job.ends(0, 1, 2) == [0, 0, 0]
    assert trio.leftovers() == []
