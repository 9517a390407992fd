"""Hangs and requests on several nodes: one rank hangs, all nodes' ranks are written down, and the job goes on."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

import pytest

from cluster.cluster import Cluster, MakeCluster
from cluster.jobs import Job

ASKS = Path(__file__).parent / "scripts" / "asks.py"
FLOOR = "--hang-floor=1"


def asking(cluster: Cluster, action: str, *, asker: int, nnodes: str) -> Job:
    env = {"ACTION": action, "ASKER": str(asker), "ASK": str(cluster.folder / "ask")}
    return Job(cluster, nnodes=nnodes, script=ASKS, env=env)


def test_a_hang_on_one_node_restarts_all_and_names_that_node(cluster: MakeCluster) -> None:
    pair = cluster()
    job = Job(pair, FLOOR, nnodes="2")
    job.start(0, 1)
    world = job.wait_generation(0, 0, 1)
    pair.wait_step(node=1, min_step=10)
    job.kill_rank(world[1], signal.SIGSTOP)
    again = job.wait_generation(1, 0, 1)
    assert {line["restart_count"] for line in again.values()} == {1}
    assert job.goes_on(again)
    job.release()
    assert job.ends(0, 1) == [0, 0]
    rank = world[1]["rank"]
    for node in (0, 1):
        [incident] = pair.incidents(node)
        assert (incident["kind"], incident["rank"], incident["suspects"]) == ("hang", rank, [rank])
        assert incident["node"] == pair.addr(1)
        assert list(incident["phases_s"]) == ["detect", "stop", "wait", "start", "first step"]
        assert sorted(r for group in incident["groups"] for r in group["ranks"]) == [0, 1]
        assert f"rank {rank} on {pair.addr(1)} hangs: no step for " in pair.err(node)
        [folder] = (pair.run_dir(node) / "stacks").iterdir()
        assert "trains_elastic.py" in (folder / f"rank_{world[node]['rank']}.txt").read_text()
    assert pair.leftovers() == []


@pytest.mark.parametrize("asker", [0, pytest.param(1, marks=pytest.mark.long)])
def test_an_excluded_node_is_replaced_by_a_spare(cluster: MakeCluster, asker: int) -> None:
    trio = cluster()
    job = asking(trio, "ExcludeThisNode", asker=asker, nnodes="2")
    job.start(0, 1)
    job.wait_generation(0, 0, 1)
    job.start(2)
    trio.wait_said(2, "standing by as a spare")
    (trio.folder / "ask").touch()
    others = [node for node in (0, 1, 2) if node != asker]
    again = job.wait_generation(1, *others)
    assert {line["restart_count"] for line in again.values()} == {1}
    [aside] = [node for node in job.nodes()["nodes"] if node["host"] == trio.addr(asker)]
    assert aside["state"] == "set aside"
    assert "asked to exclude its node: the disk is on fire" in aside["why"]
    job.release()
    assert job.ends(0, 1, 2) == [0, 0, 0]
    [incident] = trio.incidents(1 - asker)
    assert (incident["kind"], incident["node"]) == ("lost-node", trio.addr(asker))
    assert incident["headline"] == "asked to exclude its node: the disk is on fire"
    assert trio.leftovers() == []


def test_without_a_spare_the_world_shrinks(cluster: MakeCluster) -> None:
    pair = cluster()
    job = asking(pair, "ExcludeThisNode", asker=1, nnodes="1:2")
    job.start(0, 1)
    job.wait_generation(0, 0, 1)
    (pair.folder / "ask").touch()
    alone = job.wait_generation(1, 0)
    pair.wait_said(1, "set aside")
    assert job.goes_on(alone)
    job.release()
    assert job.ends(0, 1) == [0, 0]
    assert pair.leftovers() == []


def test_a_shutdown_ends_all_agents(cluster: MakeCluster) -> None:
    pair = cluster()
    job = asking(pair, "ShutdownWorkload", asker=1, nnodes="2")
    job.start(0, 1)
    job.wait_generation(0, 0, 1)
    (pair.folder / "ask").touch()
    assert job.ends(0, 1) == [93, 93]
    for node in (0, 1):
        [incident] = pair.incidents(node)
        assert (incident["kind"], incident["node"], incident["restarted"]) == ("requested", pair.addr(1), False)
        assert "asked to end the job: the disk is on fire" in pair.err(node)
    assert pair.leftovers() == []


@pytest.mark.long
def test_the_stacks_of_all_nodes_and_a_request_to_continue_change_nothing(cluster: MakeCluster) -> None:
    pair = cluster()
    job = asking(pair, "Continue", asker=1, nnodes="2")
    job.start(0, 1)
    world = job.wait_generation(0, 0, 1)
    for node in (0, 1):
        done = pair.call(node, [sys.executable, "-m", "holdfast", "stacks", "--json", str(pair.process(node).pid)])
        assert done.returncode == 0, done.stderr
        taken = json.loads(done.stdout)
        assert (taken["nodes"], taken["missing"]) == (2, 0)
        assert sorted(rank for group in taken["groups"] for rank in group["ranks"]) == [0, 1]
    assert job.goes_on(world)
    (pair.folder / "ask").touch()
    assert job.goes_on(world)
    job.release()
    assert job.ends(0, 1) == [0, 0]
    assert [asked["action"] for asked in pair.events(1, "rank.asked")] == ["continue"]
    assert [job.causes(node) for node in (0, 1)] == [[], []]
    assert pair.leftovers() == []
