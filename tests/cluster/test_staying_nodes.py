"""Nodes come and go, and the ranks of the others stay in their processes."""

from __future__ import annotations

import itertools
import os
import re
import signal
from pathlib import Path

import pytest
import torch
from torch import nn

import metadata
from cluster.cluster import WAIT_S, Cluster, Line, MakeCluster
from cluster.jobs import Job
from holdfast.checkpoint import catalogue, export
from holdfast.checkpoint.folder import Folder

STEPS = 100_000
SCRIPT = Path(__file__).parents[1] / "survivors" / "scripts" / "survives.py"


def training(nodes: Cluster, nnodes: str, *flags: str, more: tuple[str, ...] = ()) -> Job:
    """It never ends by itself."""
    (nodes.folder / "state").mkdir()
    env = {"CHECKPOINT_DIR": str(nodes.folder / "checkpoints"), "STATE": str(nodes.folder / "state")}
    env["GLOO_SOCKET_IFNAME"] = "lo"
    args = (f"--steps={STEPS}", "--pace=0.02", *more)
    return Job(nodes, *flags, nnodes=nnodes, script=SCRIPT, args=args, env=env, conf="", max_restarts=1)


def steps(nodes: Cluster, *pids: int) -> list[int]:
    return [line["step"] for line in nodes.news.seen if line["pid"] in pids]


def has_stayed(nodes: Cluster, before: int, line: Line) -> bool:
    """Whether node 0's rank is the same process still. Where a peer is killed in the middle of a message nobody gets
    out of it: the rank leaves its state to another process then, and that is said. The line may be of a step that was
    done when the world before ended; a step later the rank can be told to stop in order."""
    assert nodes.news.wait(lambda other: other["pid"] == line["pid"] and other["step"] > line["step"], WAIT_S)
    stays: bool = before == line["pid"]
    assert stays or "rank is replaced, too: it did not leave its world" in nodes.err(0), nodes.err(0)
    return stays


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
    has_stayed(trio, first["pid"], world[0])
    assert world[0]["restart_count"] == 1
    trio.signal_agent(0, signal.SIGTERM)
    assert job.ends(0) == [0]
    done = steps(trio, first["pid"], world[0]["pid"])
    assert done == list(range(1, len(done) + 1)), "no step is done twice, and none is left out"
    check_agreement(trio)
    assert trio.leftovers() == []


def test_a_node_whose_cloud_takes_it_back_leaves_in_order(cluster: MakeCluster) -> None:
    pair = cluster()
    with metadata.serving() as cloud:
        job = training(pair, "1:2", more=("--per-rank",))
        job.start(0)
        first = job.wait_generation(0, 0)[0]
        job.start(1, flags=("--spot=gcp",), env=cloud.env)
        job.wait_generation(1, 0, 1)
        cloud.notice()
        assert job.ends(1) == [0]
        world = job.wait_generation(2, 0)
    assert world[0]["pid"] == first["pid"] and world[0]["restart_count"] == 0
    assert "Google Cloud takes this machine back within 30 s: it leaves the job, as by SIGTERM" in pair.err(1)
    pair.signal_agent(0, signal.SIGTERM)
    assert job.ends(0) == [0]
    done = steps(pair, first["pid"])
    assert done == list(range(1, len(done) + 1)), "no step is done twice, and none is left out"
    assert pair.leftovers() == []


def test_with_min_healthy_a_rank_is_replaced_and_no_restart_counted(cluster: MakeCluster) -> None:
    pair = cluster()
    job = training(pair, "2:2", "--restart-policy=min-healthy")
    job.start(0, 1)
    before = job.wait_generation(0, 0, 1)
    os.kill(before[1]["pid"], signal.SIGKILL)
    after = job.wait_generation(1, 0, 1)
    stays = has_stayed(pair, before[0]["pid"], after[0])
    assert after[1]["pid"] != before[1]["pid"]
    assert {line["restart_count"] for line in after.values()} == {0 if stays else 1}
    pair.signal_agent(0, signal.SIGTERM)
    pair.signal_agent(1, signal.SIGTERM)
    assert job.ends(0, 1) == [0, 0]
    assert ("restart that is not counted; 1 rank stays" if stays else "restart 1 of") in pair.err(0)
    assert pair.leftovers() == []


def test_who_can_be_no_other_saves_before_a_node_joins(cluster: MakeCluster) -> None:
    """Of the world as it was: groups of the program's own do not fit one of another size."""
    pair = cluster()
    job = training(pair, "1:2", more=("--own", "--before", "--train"))
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


def test_shards_are_cut_anew_as_nodes_come_and_go(cluster: MakeCluster) -> None:
    """In the same process: of two ranks, of one, and of two again."""
    pair = cluster()
    job = training(pair, "1:2", more=("--fsdp", "--train"))
    job.start(0)
    first = job.wait_generation(0, 0)[0]["pid"]
    job.start(1)
    world = job.wait_generation(1, 0, 1)
    assert world[0]["pid"] == first and world[0]["restart_count"] == 0
    pair.signal_agent(1, signal.SIGTERM)
    assert job.ends(1) == [0]
    assert job.wait_generation(2, 0)[0]["pid"] == first
    job.start(1)
    world = job.wait_generation(3, 0, 1)
    assert world[0]["pid"] == first and world[0]["restart_count"] == 0
    pair.kill_node(1)
    world = job.wait_generation(4, 0)
    has_stayed(pair, first, world[0])
    assert world[0]["restart_count"] == 1
    pair.signal_agent(0, signal.SIGTERM)
    assert job.ends(0) == [0]
    assert pair.leftovers() == []
    done = steps(pair, first, world[0]["pid"])
    moves = [after - before for before, after in itertools.pairwise(done)]
    assert max(moves) <= 2, "of the last step of a world a rank may not get to tell"
    assert sum(move <= 0 for move in moves) <= 1, "only what the lost node has taken with it is done again"
    check_weights(pair.folder / "checkpoints")


def check_weights(folder: Path) -> None:
    """Of the last checkpoint: those that one process alone comes to."""
    storage = Folder(str(folder))
    last = catalogue.find(storage).found[0]
    export.export(storage, last, str(folder / "last.pt"))
    saved = torch.load(folder / "last.pt")["model_state_dict"]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.9)
    data = torch.randn(STEPS * 16, 8)
    assert last.step is not None
    for step in range(last.step):
        x = data[16 * step : 16 * (step + 1)]
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), x.roll(1, dims=1).sin()).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        scheduler.step()
    for name, weights in model.state_dict().items():
        assert torch.allclose(saved[name], weights, rtol=1e-3, atol=1e-4), name


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
    stays = has_stayed(trio, before[0]["pid"], after[0])
    assert {line["restart_count"] for line in after.values()} == {1}
    trio.signal_agent(0, signal.SIGTERM)
    trio.signal_agent(2, signal.SIGTERM)
    assert job.ends(0, 2) == [0, 0]
    [(_, _, kind, action)] = job.causes(0)
    became = "1 rank stays" if stays else "1 rank is replaced, too: it did not leave its world"
    assert kind == "lost-node" and action == f"restart 1 of 1; {became}"
    done = steps(trio, before[0]["pid"], after[0]["pid"])
    lost, new = (steps(trio, line["pid"]) for line in (before[1], after[2]))
    assert done == list(range(1, len(done) + 1)), "no step is done twice, and none is left out"
    assert new == list(range(new[0], new[-1] + 1)) and new[0] >= len(lost), "from there, too"
    assert trio.leftovers() == []
