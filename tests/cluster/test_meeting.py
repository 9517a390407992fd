"""How nodes find their job: late names, taken ports, taken places, and joiners that never make it."""

from __future__ import annotations

import signal

import pytest

from cluster.cluster import MakeCluster
from cluster.jobs import Job
from cluster.net import HOSTS, MakeNet


@pytest.mark.long
def test_two_jobs_meet_at_one_endpoint_and_whichever_lives_has_it(cluster: MakeCluster) -> None:
    five = cluster()
    one = Job(five, run_id="one", nnodes="2")
    one.start(0, 1)
    one.wait_generation(0, 0, 1)
    two = Job(five, run_id="two", nnodes="2:3", conf="", host=2)
    two.start(2, 3)
    second = two.wait_generation(0, 2, 3)
    assert sorted(node["host"] for node in one.nodes()["nodes"]) == [five.addr(0), five.addr(1)]
    assert sorted(node["host"] for node in two.nodes()["nodes"]) == [five.addr(2), five.addr(3)]
    five.kill_node(0)
    one.start(0)
    five.wait_said(0, "taking up the job at generation 0, restart 0")
    one.wait_generation(1, 0, 1)
    assert two.goes_on(second)
    one.release()
    assert one.ends(0, 1) == [0, 0]
    two.start(4)
    two.wait_generation(1, 2, 3, 4)
    assert two.nodes()["count"] == 3
    two.release()
    assert two.ends(2, 3, 4) == [0, 0, 0]
    assert one.causes(1) == [(1, 0, "lost-node", "restart 1 of 3")]
    assert [kind for _, _, kind, _ in two.causes(2)] == ["membership"]
    assert five.leftovers() == []


def test_two_agents_of_one_host_are_two_nodes(cluster: MakeCluster) -> None:
    pair = cluster()
    job = Job(pair, nnodes="2")
    job.start(0)
    job.start(1, flags=(f"--local-addr={pair.addr(0)}", "--max-restarts=7"))
    world = job.wait_generation(0, 0, 1)
    assert [world[i]["rank"] for i in (0, 1)] == [0, 1]
    assert [node["host"] for node in job.nodes()["nodes"]] == [pair.addr(0)] * 2
    for node in (0, 1):
        pair.wait_said(node, "; the job runs with the coordinator's")
    job.release()
    assert job.ends(0, 1) == [0, 0]
    assert pair.leftovers() == []


def test_a_name_with_several_addresses_has_one_coordinator(cluster: MakeCluster, net: MakeNet) -> None:
    """As localhost has on most machines: the agent that comes second must not take the address that is still free."""
    network = net(1)
    network.add_host("head", "::1")
    network.add_host("head", "127.0.0.1")
    host = cluster(network)
    host.hold()
    job = ("--nnodes=2", "--rdzv-id=J", "--rdzv-backend=c10d", "--rdzv-endpoint=head")
    agents = [host.start(0, *job, nproc=1) for _ in range(2)]
    host.wait_world(2)
    host.release()
    assert [agent.wait(60) for agent in agents] == [0, 0]
    assert host.leftovers() == []


@pytest.mark.long
def test_a_node_rank_is_had_once(cluster: MakeCluster) -> None:
    trio = cluster()
    trio.hold()
    static = ("--nnodes=2", f"--master-addr={trio.addr(0)}", f"--master-port={trio.port}")
    for node, rank in ((0, 0), (1, 1)):
        trio.start(node, *static, f"--node-rank={rank}", f"--local-addr={trio.addr(node)}", nproc=1)
    trio.wait_world(2)
    trio.start(2, *static, "--node-rank=1", f"--local-addr={trio.addr(2)}", nproc=1)
    assert trio.wait_exit(2) == 1
    assert f"--node-rank 1 is taken by {trio.addr(1)}; give each node its own" in trio.err(2)
    trio.release()
    assert [trio.wait_exit(i) for i in (0, 1)] == [0, 0]
    assert trio.incidents(0) == []
    assert trio.leftovers() == []


def test_a_machine_that_knows_itself_as_loopback_says_so_or_is_told_its_address(
    cluster: MakeCluster, net: MakeNet
) -> None:
    network = net(2)
    (HOSTS / network.name(0) / "hosts").write_text("127.0.1.1 node0\n")
    pair = cluster(network)
    job = Job(pair, nnodes="2", endpoint="node0")
    job.start(0)
    pair.wait_said(0, "node0 is 127.0.1.1 on this machine, where other machines cannot reach it")
    pair.signal_agent(0, signal.SIGTERM)
    assert job.ends(0) == [1]
    job.start(0, flags=(f"--local-addr={network.addr(0)}",))
    job.start(1)
    job.wait_generation(0, 0, 1)
    job.release()
    assert job.ends(0, 1) == [0, 0]
    assert pair.leftovers() == []


@pytest.mark.long
def test_a_name_may_be_known_late_and_joiners_that_time_out_harm_nothing(cluster: MakeCluster, net: MakeNet) -> None:
    network = net(3)
    trio = cluster(network)
    job = Job(trio, "--exit-code-from-cause", nnodes="2:3", conf="", endpoint="head.cluster")
    job.start(0, 1)
    trio.wait_said(0, "no coordinator at head.cluster:29400 yet (its name cannot be resolved); trying on")
    trio.wait_said(1, "its name cannot be resolved")
    network.add_host("head.cluster", network.addr(0))
    world = job.wait_generation(0, 0, 1)
    job.start(2, flags=("--rdzv-id=another", "--rdzv-conf=join_timeout=1"))
    assert job.ends(2) == [86]
    network.cut(2)
    job.start(2, flags=("--rdzv-conf=join_timeout=1",))
    assert job.ends(2) == [86]
    assert "no coordinator could be reached for 1 s" in trio.err(2)
    assert job.goes_on(world)
    job.release()
    assert job.ends(0, 1) == [0, 0]
    assert job.causes(0) == []
    assert trio.leftovers() == []
