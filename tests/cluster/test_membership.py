"""Nodes that come and go: each change is one new world, one incident everywhere, and one count of restarts."""

from __future__ import annotations

import math
import signal
import sys
import time

import pytest

from cluster.cluster import MakeCluster
from cluster.jobs import STEPS_ALONE, Job

RESTARTS = "restart_count"


def test_a_killed_node_is_a_scale_down_and_an_arriving_one_a_scale_up(cluster: MakeCluster) -> None:
    trio = cluster()
    job = Job(trio, nnodes="2:3")
    job.start(0, 1, 2)
    job.wait_generation(0, 0, 1, 2)
    trio.kill_node(2)
    smaller = job.wait_generation(1, 0, 1)
    job.start(2)
    larger = job.wait_generation(2, 0, 1, 2)
    assert {line[RESTARTS] for line in smaller.values()} == {1}
    assert {line[RESTARTS] for line in larger.values()} == {2}
    assert [larger[i]["group_rank"] for i in range(3)] == [0, 1, 2]
    job.release()
    assert job.ends(0, 1, 2) == [0, 0, 0]
    lost, joined = (1, 0, "lost-node", "restart 1 of 3"), (2, 1, "membership", "restart 2 of 3")
    assert (job.causes(0), job.causes(1), job.causes(2)) == ([lost, joined], [lost, joined], [joined])
    assert f"node {trio.addr(2)} is gone" in trio.err(1)
    assert trio.leftovers() == []


@pytest.mark.long
def test_below_min_it_waits_and_says_for_whom_then_ends(cluster: MakeCluster) -> None:
    trio = cluster()
    job = Job(trio, nnodes="3", conf="")
    # The first world has no more time than later ones have, and the start of an agent is part of it. So the coordinator
    # comes last, and has twice the time that the start of the others has taken on this machine, now.
    began_s = time.monotonic()
    job.start(1, 2)
    for node in (1, 2):
        trio.wait_ready(node)
    limit_s = max(6, math.ceil(2 * (time.monotonic() - began_s)))
    job.start(0, flags=("--exit-code-from-cause", f"--rdzv-conf=join_timeout={limit_s},is_host=True"))
    job.wait_generation(0, 0, 1, 2)
    trio.kill_node(2)
    waiting = f"2 of 3 nodes are here; waiting at most {limit_s} s for 1 more node (lost: {trio.addr(2)})"
    trio.wait_said(0, waiting)
    trio.wait_said(1, waiting)
    assert job.ends(0, 1) == [86, 1]
    late = f"2 of 3 nodes came within {limit_s} s; lost: {trio.addr(2)}; start the others, or lower --nnodes"
    assert late in trio.err(1)
    assert trio.leftovers() == []


@pytest.mark.long
def test_three_planned_scale_ups_and_downs_keep_the_logs_of_every_generation(cluster: MakeCluster) -> None:
    trio = cluster()
    job = Job(trio, "-r", "3", nnodes="2:3", max_restarts=6, conf="")
    job.start(0, 1)
    job.wait_generation(0, 0, 1)
    for generation in (1, 3, 5):
        job.start(2, flags=("--exit-code-from-cause",))
        job.wait_generation(generation, 0, 1, 2)
        trio.signal_agent(2, signal.SIGTERM)
        assert job.ends(2) == [87]
        last = job.wait_generation(generation + 1, 0, 1)
    assert {line[RESTARTS] for line in last.values()} == {6}
    job.release()
    assert job.ends(0, 1) == [0, 0]
    for node in (0, 1):
        logs = [trio.run_dir(node) / f"attempt_{generation}" / "0" / "stdout.log" for generation in range(7)]
        assert [log.read_text() for log in logs] == [f"rank {node} of generation {g}\n" for g in range(7)]
    assert [kind for _, _, kind, _ in job.causes(0)] == ["membership", "preempted"] * 3
    assert job.causes(0) == job.causes(1)
    assert trio.leftovers() == []


@pytest.mark.long
def test_with_a_budget_for_failures_membership_is_free(cluster: MakeCluster) -> None:
    pair = cluster()
    job = Job(pair, "--restart-budget=failures", nnodes="1:2", max_restarts=1, conf="")
    job.start(0)
    job.wait_generation(0, 0)
    job.start(1)
    joined = job.wait_generation(1, 0, 1)
    job.kill_rank(joined[1])
    failed = job.wait_generation(2, 0, 1)
    pair.kill_node(1)
    alone = job.wait_generation(3, 0)
    assert [world[0][RESTARTS] for world in (joined, failed, alone)] == [0, 1, 1]
    job.release()
    assert job.ends(0) == [0]
    assert [(kind, action) for _, _, kind, action in job.causes(0)] == [
        ("membership", "restart that is not counted"),
        ("signal", "restart 1 of 1"),
        ("lost-node", "restart that is not counted"),
    ]
    assert pair.leftovers() == []


@pytest.mark.long
def test_good_steps_give_a_restart_back(cluster: MakeCluster) -> None:
    pair = cluster()
    job = Job(pair, "--restart-refill=20", nnodes="2", max_restarts=1, env={"PACE_S": "0.01"})
    job.start(0, 1)
    world = job.wait_generation(0, 0, 1)
    job.kill_rank(world[1])
    world = job.wait_generation(1, 0, 1)
    pair.wait_step(min_step=world[0]["step"] + 200)  # a beat, which tells of steps, comes every half second
    job.kill_rank(world[1])
    world = job.wait_generation(2, 0, 1)
    assert {line[RESTARTS] for line in world.values()} == {2}
    job.release()
    assert job.ends(0, 1) == [0, 0]
    assert [action for *_, action in job.causes(1)] == ["restart 1 of 1", "restart 2 of 1 (and 1 given back)"]
    assert pair.leftovers() == []


@pytest.mark.long
def test_who_joins_when_no_restart_is_left_stands_by_and_ends_with_the_job(cluster: MakeCluster) -> None:
    trio = cluster()
    job = Job(trio, nnodes="2:3", max_restarts=0, conf="")
    job.start(0, 1)
    world = job.wait_generation(0, 0, 1)
    job.start(2)
    trio.wait_said(2, "standing by as a spare: no restarts are left to take it in")
    assert job.goes_on(world)
    job.release()
    assert job.ends(0, 1, 2) == [0, 0, 0]
    assert job.causes(0) == []
    assert trio.leftovers() == []


@pytest.mark.long
def test_deterministic_assignment_keeps_ranks(cluster: MakeCluster) -> None:
    trio = cluster()
    job = Job(trio, "--rank-assignment=deterministic", nnodes="2:3")
    job.start(0, 1, 2)
    first = job.wait_generation(0, 0, 1, 2)
    assert [first[i]["group_rank"] for i in range(3)] == [0, 1, 2]
    trio.kill_node(1)
    job.wait_generation(1, 0, 2)
    job.start(1)
    again = job.wait_generation(2, 0, 1, 2)
    assert [again[i]["group_rank"] for i in range(3)] == [0, 2, 1]  # node 2 filled the gap, and keeps that rank
    job.release()
    assert job.ends(0, 1, 2) == [0, 0, 0]
    assert trio.leftovers() == []


@pytest.mark.long
def test_spares_stand_by_die_unnoticed_and_take_a_dead_nodes_place(cluster: MakeCluster) -> None:
    four = cluster()
    job = Job(four, nnodes="2")
    job.start(0, 1)
    world = job.wait_generation(0, 0, 1)
    job.start(2, 3)
    four.wait_said(2, "standing by as a spare")
    four.wait_said(3, "standing by as a spare")
    four.kill_node(2)
    assert job.goes_on(world)
    assert sorted(node["state"] for node in job.nodes()["nodes"]) == ["node rank 0", "node rank 1", "spare"]
    four.kill_node(1)
    replaced = job.wait_generation(1, 0, 3)
    assert {line[RESTARTS] for line in replaced.values()} == {1}
    job.start(1)
    four.wait_said(1, "standing by as a spare")
    assert job.goes_on(replaced)
    job.release()
    assert job.ends(0, 1, 3) == [0, 0, 0]
    assert four.leftovers() == []


@pytest.mark.long
def test_spares_asked_for_are_held_back_until_one_is_needed(cluster: MakeCluster) -> None:
    four = cluster()
    job = Job(four, "--spares=1", nnodes="2:3")
    job.start(0, 1, 2, 3)
    job.wait_generation(0, 0, 1, 2)
    four.wait_said(3, "standing by as a spare")
    four.kill_node(1)
    job.wait_generation(1, 0, 2, 3)
    job.release()
    assert job.ends(0, 2, 3) == [0, 0, 0]
    assert four.leftovers() == []


@pytest.mark.long
def test_last_call_waits_for_more_than_min_and_sigterm_to_all_ends_the_job(cluster: MakeCluster) -> None:
    four = cluster()
    job = Job(four, "--exit-code-from-cause", nnodes="1:4", conf="last_call_timeout=8")
    job.start(0, 1, 2)
    job.wait_generation(0, 0, 1, 2)
    for node in (2, 1, 0):
        four.signal_agent(node, signal.SIGTERM)
    assert job.ends(0, 1, 2) == [87, 87, 87]
    assert four.leftovers() == []


@pytest.mark.long
def test_min_healthy_leaves_the_others_alone_until_they_are_too_few(cluster: MakeCluster) -> None:
    trio = cluster()
    job = Job(trio, "--restart-policy=min-healthy", nnodes="2:3", script=STEPS_ALONE)
    job.start(0, 1, 2)
    world = job.wait_generation(0, 0, 1, 2)
    job.kill_rank(world.pop(2))
    trio.wait_said(0, "2 healthy nodes go on")
    assert job.goes_on(world)
    job.kill_rank(world[1])
    again = job.wait_generation(1, 0, 1, 2)
    assert {line[RESTARTS] for line in again.values()} == {1}
    trio.kill_node(2)
    assert job.goes_on({0: again[0], 1: again[1]})
    job.release()
    assert job.ends(0, 1) == [0, 0]
    assert trio.leftovers() == []


@pytest.mark.long
def test_a_node_that_keeps_failing_is_set_aside_until_it_is_taken_back(cluster: MakeCluster) -> None:
    pair = cluster()
    job = Job(pair, nnodes="1:2", max_restarts=9)
    job.start(0, 1)
    for generation in range(3):
        job.kill_rank(job.wait_generation(generation, 0, 1)[1])
    job.wait_generation(3, 0)
    bad = pair.addr(1)
    pair.wait_said(0, f"{bad} is set aside: 3 incidents within 10 minutes began there, the last: killed by SIGKILL")
    [seen] = [node for node in job.nodes()["nodes"] if node["host"] == bad]
    assert seen["state"] == "set aside"
    assert "3 incidents" in seen["why"]
    shown = pair.call(0, [sys.executable, "-m", "holdfast", "nodes", *job.meeting])
    assert f"job {job.run_id}: running, generation 3, 3 of 9 restarts used" in shown.stdout
    assert "1 rank    set aside: 3 incidents" in shown.stdout
    assert job.nodes("--lift", bad)["lifted"] is True
    back = job.wait_generation(4, 0, 1)
    assert {line[RESTARTS] for line in back.values()} == {4}
    job.release()
    assert job.ends(0, 1) == [0, 0]
    assert pair.leftovers() == []
