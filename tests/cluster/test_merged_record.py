"""One record of the whole job, where its coordinator is; and what a coordinator does with the paces of all nodes."""

from __future__ import annotations

from pathlib import Path

from cluster.cluster import MakeCluster
from cluster.jobs import Job
from cluster.net import MakeNet
from holdfast.observe import record
from holdfast.observe.record import Noted
from holdfast.observe.state import fold

SLOW_NODE = Path(__file__).parent / "scripts" / "slow_node.py"


def lines(path: Path, node: str = "") -> list[Noted]:
    return [noted for noted in record.read(path / record.NAME) if node in ("", noted.node)]


def test_the_coordinators_record_has_the_lines_of_all_nodes_once(cluster: MakeCluster) -> None:
    pair = cluster()
    job = Job(pair, nnodes="2")
    job.start(0, 1)
    world = job.wait_generation(0, 0, 1)
    job.kill_rank(world[1])
    job.wait_generation(1, 0, 1)
    job.release()
    assert job.ends(0, 1) == [0, 0]
    there = lines(pair.run_dir(1))
    name = there[0].node
    arrived = lines(pair.run_dir(0), name)
    assert [noted.seq for noted in arrived] == list(range(len(arrived))), "each once, in order, from the first on"
    assert {type(noted.what) for noted in arrived} >= {record.RankExited, record.IncidentClosed, record.Progress}
    assert [noted.what for noted in arrived] == [noted.what for noted in there[: len(arrived)]]
    assert {noted.node for noted in there} == {name}, "others have their own alone"
    state = fold(lines(pair.run_dir(0)))
    assert sorted(state.ranks) == [0, 1] and len(state.nodes) == 2 and len(state.incidents) == 1
    assert state.incidents[1].rank == 1 and state.phase == "succeeded"
    exits = [noted.at_s for noted in lines(pair.run_dir(0)) if isinstance(noted.what, record.RankExited)]
    killed_s = state.at(state.incidents[1].failed_at_s)
    assert min(abs(at_s - killed_s) for at_s in exits) < 10.0, "times of both are on one clock"


def test_a_coordinator_that_trains_is_waited_for_and_has_the_whole_jobs_clock(
    cluster: MakeCluster, net: MakeNet
) -> None:
    """Its record begins when it is there again. What was before, the other node has, and tells it."""
    pair = cluster(net(2))
    job = Job(pair, nnodes="2")
    job.start(0, 1)
    job.kill_rank(job.wait_generation(0, 0, 1)[1])
    job.wait_generation(1, 0, 1)
    pair.kill_node(0)
    job.start(0)
    again = job.wait_generation(2, 0, 1)
    assert {line["restart_count"] for line in again.values()} == {2}
    job.release()
    assert job.ends(0, 1) == [0, 0]
    lost = (2, 1, "lost-node", "restart 2 of 3")
    assert (job.causes(0), job.causes(1)) == ([lost], [(1, 0, "signal", "restart 1 of 3"), lost])
    assert pair.leftovers() == []
    notes = lines(pair.run_dir(0))
    ended_s = [noted.at_s for noted in notes if isinstance(noted.what, record.JobEnded)][-1]
    began_s = min(noted.at_s for noted in notes)
    assert began_s < 0
    found = job.report(0)
    assert found["wall_s"] == round(ended_s - began_s, 6)
    assert round(sum(found["phases_s"].values()), 6) == found["wall_s"]
    assert [world["generation"] for world in found["worlds"]] == [0, 1, 2]
    moments = [
        at_s for world in found["worlds"] for at_s in (world["launched_s"], world["trained_s"], world["ended_s"])
    ]
    assert moments == sorted(moments) and moments[0] > 0
    assert [(each["number"], each["kind"]) for each in found["incidents"]] == [(1, "signal"), (2, "lost-node")]
    assert [each["lost_s"] > 0 and each["at_s"] > 0 for each in found["incidents"]] == [True, True]
    assert any("came when the job had run for a while" in caveat for caveat in found["caveats"])


def test_a_node_that_holds_the_others_up_is_replaced_by_a_spare(cluster: MakeCluster) -> None:
    trio = cluster()
    job = Job(trio, "--on-straggler=replace", "--spares=1", nnodes="2", script=SLOW_NODE)
    job.start(0, 2)
    job.start(1, env={"PACE_S": "0.15"})
    trio.wait_said(0, f"{trio.addr(1)} is set aside")
    trio.wait_said(2, "back after")
    job.release()
    assert job.ends(0, 2) == [0, 0]
    assert "rank 1 holds the others up" in trio.err(1)
    [incident] = trio.incidents(0)
    assert (incident["kind"], incident["rank"], incident["node"]) == ("lost-node", 1, trio.addr(1))
    [found] = [noted.what for noted in lines(trio.run_dir(0)) if isinstance(noted.what, record.StragglerFound)]
    assert found.rank == 1 and found.score > 2
