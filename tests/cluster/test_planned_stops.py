"""Nodes that are told to end while they train with a Checkpointer: all ranks of all nodes save the same step first."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.cluster import Cluster, MakeCluster
from cluster.jobs import Job
from harness import SCRIPTS

IN_ORDER = "stopped by SIGTERM; all ranks saved and ended by themselves"


def saving(nodes: Cluster, nnodes: str) -> Job:
    """A job that never ends by itself, with one checkpoint directory and one for temporary files."""
    (nodes.folder / "tmp").mkdir()
    env = {"CHECKPOINT_DIR": str(nodes.folder / "checkpoints"), "TMPDIR": str(nodes.folder / "tmp")}
    env["GLOO_SOCKET_IFNAME"] = "lo"
    return Job(nodes, "--shutdown-timeout=60", nnodes=nnodes, script=SCRIPTS / "saves.py", args=("1000000",), env=env)


def last_steps(nodes: Cluster, generation: int) -> dict[int, int]:
    """The last step that each rank of a world told of."""
    return {
        line["rank"]: line["step"] for line in nodes.news.seen if generation == line["generation"] and "step" in line
    }


def saved_steps(nodes: Cluster) -> list[int]:
    found = [path.name for path in (nodes.folder / "checkpoints").iterdir() if not path.name.startswith(".")]
    return sorted(int(name.removeprefix("step_")) for name in found)


def verify(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "holdfast", "checkpoint", "verify", str(folder)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def is_whole(nodes: Cluster) -> bool:
    """Every byte of all checkpoints is as it was written, and nothing else is left, neither there nor anywhere."""
    checked = verify(nodes.folder / "checkpoints")
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert [path.name for path in (nodes.folder / "tmp").iterdir() if path.name.startswith("holdfast")] == []
    assert nodes.leftovers() == []
    return True


def test_when_one_node_leaves_all_save_the_same_step_and_the_rest_goes_on_from_it(cluster: MakeCluster) -> None:
    trio = cluster()
    job = saving(trio, nnodes="2:3")
    job.start(0, 1, 2)
    job.wait_generation(0, 0, 1, 2)
    trio.signal_agent(1, signal.SIGTERM)
    assert job.ends(1) == [0]
    assert IN_ORDER in trio.err(1)
    job.wait_generation(1, 0, 2)
    [first] = saved_steps(trio)
    # The step that is saved ends the rank before it tells of it.
    assert last_steps(trio, 0) == {0: first - 1, 1: first - 1, 2: first - 1}
    found = [(line["generation"], line["restored"]) for line in trio.news.seen if "restored" in line]
    assert sorted(found) == [(0, 0)] * 3 + [(1, first)] * 2
    # Now the rest, one after the other: when the second hears of it, its ranks have saved and ended with the first's.
    for node in (2, 0):
        trio.signal_agent(node, signal.SIGTERM)
        assert job.ends(node) == [0]
        assert IN_ORDER in trio.err(node)
    [_, second] = saved_steps(trio)
    assert last_steps(trio, 1) == {0: second - 1, 1: second - 1}
    assert is_whole(trio)


@pytest.mark.long
def test_when_all_are_told_all_save_the_same_step(cluster: MakeCluster) -> None:
    """As a scheduler does it. The node that has the coordinator is the last to hear of it."""
    pair = cluster()
    job = saving(pair, nnodes="2")
    job.start(0, 1, nproc=2)
    pair.wait_world(4)
    for node in (1, 0):
        pair.signal_agent(node, signal.SIGTERM)
    assert job.ends(0, 1) == [0, 0]
    [step] = saved_steps(pair)
    assert last_steps(pair, 0) == dict.fromkeys(range(4), step - 1)
    assert f"holdfast: was asked to stop, and saved step {step}" in pair.err(0) + pair.err(1)
    for node in (0, 1):
        assert IN_ORDER in pair.err(node)
        assert job.causes(node) == []
    assert is_whole(pair)
