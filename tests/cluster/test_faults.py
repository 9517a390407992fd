"""Nodes that are cut off, frozen or killed, in each role: the rest trains on, and who comes back is taken in."""

from __future__ import annotations

import os
import signal
from typing import Literal

import pytest

from cluster.cluster import Cluster, Line, MakeCluster
from cluster.jobs import STEPS_ALONE, TOGETHER, Job
from cluster.net import MakeNet
from coordinator.etcd_cluster import wait_for

RESTARTS = "restart_count"


def is_alive(line: Line) -> bool:
    return os.path.exists(f"/proc/{line['pid']}")


@pytest.mark.long
def test_a_silent_node_is_lost_and_after_the_cut_its_old_ranks_go_before_it_joins(
    cluster: MakeCluster, net: MakeNet
) -> None:
    network = net(3)
    trio = cluster(network)
    job = Job(trio, nnodes="2:3", max_restarts=6)
    job.start(0, 1, 2)
    world = job.wait_generation(0, 0, 1, 2)
    # Not three times the same node: it would be set aside.
    cuts: list[tuple[int, Literal["both", "in", "out"]]] = [(2, "both"), (2, "in"), (1, "out")]
    for lost, (node, way) in zip((1, 3, 5), cuts, strict=True):
        network.cut(node) if way == "both" else network.cut_one_way(node, way)
        rest = job.wait_generation(lost, 0, 3 - node)
        assert {line[RESTARTS] for line in rest.values()} == {lost}, way
        network.heal(node)
        zombie, world = world[node], job.wait_generation(lost + 1, 0, 1, 2)
        assert not is_alive(zombie), way
        assert {line[RESTARTS] for line in world.values()} == {lost + 1}, way
    job.release()
    assert job.ends(0, 1, 2) == [0, 0, 0]
    assert [kind for _, _, kind, _ in job.causes(0)] == ["lost-node", "membership"] * 3
    assert job.causes(0)[:4] == job.causes(1)[:4]  # until it was cut off itself
    assert trio.leftovers() == []


@pytest.mark.long
def test_a_frozen_agent_is_lost_and_comes_back_as_a_newcomer(cluster: MakeCluster) -> None:
    trio = cluster()
    job = Job(trio, nnodes="2:3")
    job.start(0, 1, 2)
    zombie = job.wait_generation(0, 0, 1, 2)[1]
    trio.stop_agent(1)
    job.wait_generation(1, 0, 2)
    trio.cont_agent(1)
    again = job.wait_generation(2, 0, 1, 2)
    assert not is_alive(zombie)
    assert {line[RESTARTS] for line in again.values()} == {2}
    job.release()
    assert job.ends(0, 1, 2) == [0, 0, 0]
    assert f"node {trio.addr(1)} is gone (silent for 3 s)" in trio.err(0)
    assert trio.leftovers() == []


@pytest.mark.long
def test_a_slow_network_harms_nothing(cluster: MakeCluster, net: MakeNet) -> None:
    network = net(2)
    network.delay(1, 100)
    pair = cluster(network)
    job = Job(pair, nnodes="2")
    job.start(0, 1)
    assert job.goes_on(job.wait_generation(0, 0, 1), steps=2)  # a step takes most of a second
    job.release()
    assert job.ends(0, 1) == [0, 0]
    assert job.causes(0) == []
    assert pair.leftovers() == []


@pytest.mark.long
def test_who_is_cut_off_for_too_long_ends_its_ranks_and_itself(cluster: MakeCluster, net: MakeNet) -> None:
    network = net(2)
    pair = cluster(network)
    job = Job(pair, "--exit-code-from-cause", nnodes="1:2")
    job.start(0)
    # Its own limit, not the coordinator's: that also counts while nodes start, and a busy machine takes long for it.
    job.start(1, flags=(f"--rdzv-conf={TOGETHER},join_timeout=5",))
    cut_off = job.wait_generation(0, 0, 1)[1]
    network.cut(1)
    job.wait_generation(1, 0)
    assert job.ends(1) == [86]
    assert "no coordinator could be reached for 5 s" in pair.err(1)
    assert not is_alive(cut_off)
    assert pair.processes(1) == {}
    job.release()
    assert job.ends(0) == [0]
    assert pair.leftovers() == []


def test_all_nodes_ask_for_other_machines_whichever_of_them_failed(cluster: MakeCluster) -> None:
    """Also the healthy one, which has the coordinator."""
    pair = cluster()
    job = Job(pair, "--reschedule-exit-code=75", nnodes="2", max_restarts=0, script=STEPS_ALONE)
    job.start(0, 1)
    job.kill_rank(job.wait_generation(0, 0, 1)[1])
    assert job.ends(0, 1) == [75, 75]
    assert [kind for _, _, kind, _ in job.causes(0)] == ["signal"]
    assert all("worth rescheduling: exit code 75" in pair.err(node) for node in (0, 1))
    assert pair.leftovers() == []


@pytest.mark.long
def test_a_coordinator_that_only_stands_by_may_die_and_take_up_where_it_was(cluster: MakeCluster, net: MakeNet) -> None:
    trio = cluster(net(3))
    job = Job(trio, "--spares=1", nnodes="2", places={0: 9, 1: 0, 2: 1})
    job.start(0, 1, 2)
    job.kill_rank(job.wait_generation(0, 1, 2)[1])
    world = job.wait_generation(1, 1, 2)
    os.utime(trio.run_dir(0) / "ledger", (0, 0))
    wait_for(lambda: (trio.run_dir(0) / "ledger").stat().st_mtime > 0)  # kept fresh: an old one would not be taken up
    trio.kill_node(0)
    assert job.goes_on(world)
    job.start(0)
    trio.wait_said(0, "taking up the job at generation 1, restart 1")
    trio.wait_said(0, "standing by as a spare")
    assert job.goes_on(world)
    job.kill_rank(world[2])
    later = job.wait_generation(2, 1, 2)
    assert {line[RESTARTS] for line in later.values()} == {2}
    trio.kill_node(1)
    last = job.wait_generation(3, 0, 2)
    assert {line[RESTARTS] for line in last.values()} == {3}
    job.release()
    assert job.ends(0, 2) == [0, 0]
    assert [number for number, *_ in job.causes(2)] == [1, 2, 3]
    assert trio.leftovers() == []


@pytest.mark.long
def test_a_job_ends_well_without_its_coordinator(cluster: MakeCluster) -> None:
    trio = cluster()
    job = Job(trio, "--spares=1", nnodes="2", places={0: 9, 1: 0, 2: 1}, conf=f"{TOGETHER},close_timeout=1")
    job.start(0, 1, 2)
    world = job.wait_generation(0, 1, 2)
    trio.kill_node(0)
    assert job.goes_on(world)
    job.release()
    assert job.ends(1, 2) == [0, 0]
    assert trio.leftovers() == []


def test_the_store_keeper_and_then_all_of_its_node_may_die(cluster: MakeCluster) -> None:
    trio = cluster()
    job = Job(trio, nnodes="2:3", places={0: 2, 1: 0, 2: 1})
    job.start(0, 1, 2)
    first = job.wait_generation(0, 0, 1, 2)
    assert first[0]["master_addr"] == trio.addr(1)
    os.kill(keeper_of(trio, 1), signal.SIGKILL)
    second = job.wait_generation(1, 0, 1, 2)
    trio.kill_node(1)
    third = job.wait_generation(2, 0, 2)
    assert [world[0][RESTARTS] for world in (first, second, third)] == [0, 1, 2]
    assert third[0]["master_addr"] == trio.addr(2)
    job.release()
    assert job.ends(0, 2) == [0, 0]
    assert [kind for _, _, kind, _ in job.causes(2)] == ["launcher", "lost-node"]
    assert trio.leftovers() == []


def keeper_of(trio: Cluster, node: int) -> int:
    [pid] = [pid for pid, title in trio.processes(node).items() if title == "holdfast store"]
    return pid
