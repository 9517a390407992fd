"""The commands that users of torchrun have, as they are written in its documentation, on several nodes."""

from __future__ import annotations

import os
import signal

import pytest

from cluster.cluster import Cluster, Line, MakeCluster
from cluster.net import MakeNet


def spelled(how: str, *flags: str) -> tuple[str, ...]:
    """Each flag in one of its two spellings: `--rdzv-id=x` or `--rdzv_id=x`."""
    if how == "dashes":
        return flags
    names = (flag.partition("=") for flag in flags)
    return tuple("--" + name[2:].replace("-", "_") + equals + value for name, equals, value in names)


def ends(cluster: Cluster, nodes: range) -> list[int]:
    return [cluster.wait_exit(i) for i in nodes]


def by_node(world: dict[int, Line]) -> dict[int, list[Line]]:
    """The news of each node's ranks, in the order of their local ranks."""
    lines = sorted(world.values(), key=lambda line: line["local_rank"])
    return {node: [line for line in lines if line["node"] == node] for node in {line["node"] for line in lines}}


def test_the_fault_tolerant_job(cluster: MakeCluster, net: MakeNet) -> None:
    pair = cluster(net(2))
    pair.hold()
    rendezvous = ("--rdzv-id=J", "--rdzv-backend=c10d", "--rdzv-endpoint=node0")
    for node, how in enumerate(("dashes", "underscores")):
        pair.start(node, *spelled(how, "--nnodes=2", "--max-restarts=3", *rendezvous), nproc=2)
    world = pair.wait_world(4)
    assert {line["master_addr"] for line in world.values()} <= {pair.addr(0), pair.addr(1)}
    os.kill(world[3]["pid"], signal.SIGKILL)
    again = pair.wait_world(4, generation=1)
    assert {line["restart_count"] for line in again.values()} == {1}
    assert {line["run_id"] for line in again.values()} == {"J"}
    pair.release()
    assert ends(pair, range(2)) == [0, 0]
    assert pair.incidents(0)[0]["headline"] == pair.incidents(1)[0]["headline"] == "killed by SIGKILL"
    assert pair.leftovers() == []


def test_the_elastic_job_with_nodes_of_different_sizes(cluster: MakeCluster, net: MakeNet) -> None:
    four = cluster(net(4))
    four.hold()
    rendezvous = ("--rdzv-id=J", "--rdzv-backend=c10d", "--rdzv-endpoint=node0:29400")
    elastic = ("--nnodes=2:4", "--max-restarts=3", *rendezvous)
    four.start(0, *elastic, nproc=1)
    four.start(1, *elastic, nproc=2)
    four.wait_world(3)
    four.start(2, *elastic, nproc=1)
    four.wait_world(4)
    four.start(3, *elastic, nproc=2)
    world = four.wait_world(6)
    assert sorted(world) == list(range(6))
    assert {node: len(lines) for node, lines in by_node(world).items()} == {0: 1, 1: 2, 2: 1, 3: 2}
    four.release()
    assert ends(four, range(4)) == [0] * 4
    assert four.leftovers() == []


def test_the_static_job(cluster: MakeCluster, net: MakeNet) -> None:
    pair = cluster(net(2))
    pair.hold()
    for node in (1, 0):
        pair.start(node, "--nnodes=2", f"--node-rank={node}", "--master-addr=node0", "--max-restarts=1", nproc=1)
    world = pair.wait_world(2)
    assert [world[rank]["node"] for rank in (0, 1)] == [0, 1]
    assert {line["master_addr"] for line in world.values()} == {pair.addr(0)}
    os.kill(world[0]["pid"], signal.SIGKILL)
    again = pair.wait_world(2, generation=1)
    assert [again[rank]["node"] for rank in (0, 1)] == [0, 1]
    pair.release()
    assert ends(pair, range(2)) == [0, 0]
    assert pair.leftovers() == []


@pytest.mark.long
def test_roles_of_different_sizes_and_places_of_the_infrastructure(cluster: MakeCluster) -> None:
    """SLURM_PROCID goes before GROUP_RANK, and both before the order of arrival."""
    trio = cluster()
    trio.hold()
    rendezvous = ("--rdzv-id=J", "--rdzv-backend=c10d", f"--rdzv-endpoint={trio.endpoint()}")
    job = ("--nnodes=3", "--max-restarts=3", "--ft-restart-policy=any-failed", "--ft-use-infra-group-rank=True")
    places = [{"SLURM_PROCID": "2", "GROUP_RANK": "0"}, {"GROUP_RANK": "1"}, {"SLURM_PROCID": "0", "GROUP_RANK": "2"}]
    for node, (role, nproc) in enumerate([("trainer", 2), ("evaluator", 1), ("trainer", 1)]):
        conf = f"--rdzv-conf=is_host={node == 0},join_timeout=60,timeout=30"
        own = (conf, f"--role={role}", f"--local-addr={trio.addr(node)}")
        trio.start(node, *rendezvous, *job, *own, nproc=nproc, env=places[node])
    first = trio.wait_world(4)
    os.kill(first[0]["pid"], signal.SIGKILL)
    for world in (first, trio.wait_world(4, generation=1)):
        nodes = by_node(world)
        assert [world[rank]["node"] for rank in range(4)] == [2, 1, 0, 0]
        assert {line["master_addr"] for line in world.values()} == {trio.addr(2)}
        roles = {i: [(line["role_rank"], line["role_world_size"]) for line in nodes[i]] for i in nodes}
        assert roles == {2: [(0, 3)], 1: [(0, 1)], 0: [(1, 3), (2, 3)]}
        assert [nodes[i][0]["group_rank"] for i in range(3)] == [2, 1, 0]
    trio.release()
    assert ends(trio, range(3)) == [0, 0, 0]
    assert trio.leftovers() == []


@pytest.mark.long
def test_ranks_that_are_kept_rather_than_given_by_the_infrastructure(cluster: MakeCluster) -> None:
    trio = cluster()
    trio.hold()
    rendezvous = ("--rdzv-id=J", "--rdzv-backend=c10d", f"--rdzv-endpoint={trio.endpoint()}")
    job = ("--nnodes=2", "--max-restarts=3", "--ft-use-infra-group-rank=False")

    def start(node: int) -> None:
        own = (f"--local-addr={trio.addr(node)}", f"--rdzv-conf=is_host={node == 0},last_call_timeout=0")
        trio.start(node, *rendezvous, *job, *own, nproc=1, env={"GROUP_RANK": str(2 - node)})

    start(0)
    start(1)
    first = trio.wait_world(2)
    assert [first[rank]["node"] for rank in (0, 1)] == [1, 0]
    start(2)
    trio.wait_said(2, "standing by as a spare")
    trio.kill_node(1)
    second = trio.wait_world(2, generation=1)
    assert [second[rank]["node"] for rank in (0, 1)] == [2, 0]
    start(1)
    trio.wait_said(1, "standing by as a spare")
    trio.kill_node(2)
    third = trio.wait_world(2, generation=2)
    assert [third[rank]["node"] for rank in (0, 1)] == [1, 0]
    trio.release()
    assert ends(trio, range(2)) == [0, 0]
    assert trio.leftovers() == []
