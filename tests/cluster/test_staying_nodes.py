"""Nodes come and go, and the ranks of the others stay in their processes."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from cluster.cluster import Cluster, Line, MakeCluster
from cluster.jobs import Job

SCRIPT = Path(__file__).parents[1] / "survivors" / "scripts" / "survives.py"


def training(nodes: Cluster, nnodes: str, *flags: str, more: tuple[str, ...] = ()) -> Job:
    """It never ends by itself."""
    (nodes.folder / "state").mkdir()
    env = {"CHECKPOINT_DIR": str(nodes.folder / "checkpoints"), "STATE": str(nodes.folder / "state")}
    env["GLOO_SOCKET_IFNAME"] = "lo"
    args = ("--steps=100000", "--pace=0.02", *more)
    return Job(nodes, *flags, nnodes=nnodes, script=SCRIPT, args=args, env=env, conf="", max_restarts=1)


def steps(nodes: Cluster, pid: int) -> list[int]:
    return [line["step"] for line in nodes.news.seen if line["pid"] == pid]


def check_agreement(nodes: Cluster) -> None:
    """All ranks have the same weights and learning rate after each step, and each sample is used once. Who leaves or
    dies in a step may not have told of it."""
    done: dict[int, list[Line]] = {}
    for line in nodes.news.seen:
        done.setdefault(line["step"], []).append(line)
    position, sizes = 0, set()
    for step, lines in sorted(done.items()):
        [size] = {line["ranks"] for line in lines}
        assert len({(line["rate"], line["weights"]) for line in lines}) == 1, (step, lines)
        assert lines[0]["rate"] == pytest.approx(1e-2 * size * 0.9 ** (step // 5))
        given = range(position, position + 16 * size)
        used = sorted(sample for line in lines for sample in line["used"])
        assert used == list(given) or (len(lines) < size and set(used) <= set(given)), (step, used, given)
        position = given.stop
        sizes.add(size)
    assert sizes == {1, 2, 3}


def test_a_node_joins_one_leaves_and_one_is_lost(cluster: MakeCluster) -> None:
    """With a batch of each rank's own, so that the global one and the learning rate are others in each world."""
    trio = cluster()
    job = training(trio, "1:3", more=("--per-rank",))
    job.start(0)
    first = job.wait_generation(0, 0)[0]
    for node in (1, 2):
        job.start(node)
        world = job.wait_generation(node, *range(node + 1))
        assert world[0]["pid"] == first["pid"] and {line["restart_count"] for line in world.values()} == {0}
    second = world[1]["pid"]
    trio.signal_agent(2, signal.SIGTERM)
    assert job.ends(2) == [0]
    world = job.wait_generation(3, 0, 1)
    assert [world[node]["pid"] for node in (0, 1)] == [first["pid"], second]
    assert {line["restart_count"] for line in world.values()} == {0}
    trio.kill_node(1)
    world = job.wait_generation(4, 0)
    assert world[0]["pid"] == first["pid"] and world[0]["restart_count"] == 1
    trio.signal_agent(0, signal.SIGTERM)
    assert job.ends(0) == [0]
    done = steps(trio, first["pid"])
    assert done == list(range(1, len(done) + 1)), "no step is done twice, and none is left out"
    check_agreement(trio)
    assert trio.leftovers() == []


def test_with_min_healthy_a_rank_is_replaced_and_no_restart_counted(cluster: MakeCluster) -> None:
    pair = cluster()
    job = training(pair, "2:2", "--restart-policy=min-healthy")
    job.start(0, 1)
    before = job.wait_generation(0, 0, 1)
    os.kill(before[1]["pid"], signal.SIGKILL)
    after = job.wait_generation(1, 0, 1)
    assert after[0]["pid"] == before[0]["pid"] and after[1]["pid"] != before[1]["pid"]
    assert {line["restart_count"] for line in after.values()} == {0}
    pair.signal_agent(0, signal.SIGTERM)
    pair.signal_agent(1, signal.SIGTERM)
    assert job.ends(0, 1) == [0, 0]
    assert "restart that is not counted; 1 rank stays" in pair.err(0)
    assert pair.leftovers() == []


@pytest.mark.parametrize(
    "flags",
    [("--fsdp",), pytest.param(("--own", "--before"), marks=pytest.mark.long)],
    ids=["shards", "groups"],
)
def test_who_can_be_no_other_saves_before_a_node_joins(cluster: MakeCluster, flags: tuple[str, ...]) -> None:
    """Of the world as it was: neither shards nor groups of the program's own fit one of another size."""
    pair = cluster()
    job = training(pair, "1:2", more=(*flags, "--train"))
    job.start(0)
    first = job.wait_generation(0, 0)[0]
    job.start(1)
    second = job.wait_generation(1, 0, 1)[0]
    assert second["pid"] != first["pid"] and second["restart_count"] == 0
    [saved] = map(int, re.findall(r"goes on in another world, and saved step (\d+)", pair.err(0)))
    assert steps(pair, first["pid"])[-1] == saved - 1, "of its last step a rank does not get to tell"
    assert steps(pair, second["pid"])[0] == saved + 1, "no step is done twice, and none is left out"
    pair.signal_agent(0, signal.SIGTERM)
    pair.signal_agent(1, signal.SIGTERM)
    assert job.ends(0, 1) == [0, 0]
    assert "1 rank stays, if the next world is as large" in pair.err(0)
    assert pair.leftovers() == []


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("times", [10])
def test_one_joins_and_leaves_again_and_again(cluster: MakeCluster, times: int) -> None:
    pair = cluster()
    job = training(pair, "1:2")
    job.start(0)
    first = job.wait_generation(0, 0)[0]["pid"]
    for time in range(times):
        job.start(1)
        world = job.wait_generation(2 * time + 1, 0, 1)
        assert world[0]["pid"] == first
        pair.signal_agent(1, signal.SIGTERM)
        assert job.ends(1) == [0]
        assert job.wait_generation(2 * time + 2, 0)[0]["restart_count"] == 0
    pair.signal_agent(0, signal.SIGTERM)
    assert job.ends(0) == [0]
    done = steps(pair, first)
    assert done == list(range(1, len(done) + 1)), "no step is done twice, and none is left out"
    assert pair.leftovers() == []


def test_a_spare_node_takes_the_place_of_a_lost_one(cluster: MakeCluster) -> None:
    """Its rank is new, those of the other node stay."""
    trio = cluster()
    job = training(trio, "2")
    job.start(0, 1)
    before = job.wait_generation(0, 0, 1)
    job.start(2)
    trio.wait_said(2, "standing by as a spare")
    trio.wait_ready(2)
    trio.kill_node(1)
    after = job.wait_generation(1, 0, 2)
    assert after[0]["pid"] == before[0]["pid"]
    assert {line["restart_count"] for line in after.values()} == {1}
    trio.signal_agent(0, signal.SIGTERM)
    trio.signal_agent(2, signal.SIGTERM)
    assert job.ends(0, 2) == [0, 0]
    [(_, _, kind, action)] = job.causes(0)
    assert kind == "lost-node" and action == "restart 1 of 1; 1 rank stays"
    stays, lost, new = (steps(trio, line["pid"]) for line in (before[0], before[1], after[2]))
    assert stays == list(range(1, len(stays) + 1)), "no step is done twice, and none is left out"
    assert new == list(range(new[0], new[-1] + 1)) and new[0] >= len(lost), "from there, too"
    assert trio.leftovers() == []
