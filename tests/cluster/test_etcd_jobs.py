"""Jobs whose coordinator is elected in a real etcd: no node of theirs, and no member of etcd's, is special."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from cluster.cluster import MakeCluster
from cluster.jobs import TOGETHER, Job
from coordinator.etcd_cluster import Cluster as Etcd
from coordinator.etcd_cluster import wait_for

RESTARTS = "restart_count"


@pytest.fixture(scope="module")
def members(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Etcd]:
    etcd = Etcd(tmp_path_factory.mktemp("etcd"))
    yield etcd
    etcd.close()


@pytest.fixture
def etcd(members: Etcd) -> Iterator[Etcd]:
    yield members
    members.heal()


MakeJob = Callable[..., Job]


@pytest.fixture
def make_job(etcd: Etcd, cluster: MakeCluster) -> MakeJob:
    def make(*flags: str, nnodes: str, **options: Any) -> Job:
        nodes = cluster()
        run_id = f"job-{nodes.mark[:8]}"
        endpoint = ",".join(etcd.endpoints)
        return Job(nodes, *flags, nnodes=nnodes, run_id=run_id, endpoint=endpoint, backend="etcd", **options)

    return make


def coordinator(etcd: Etcd, job: Job) -> int | None:
    """The node that etcd says coordinates, by its address."""
    found = etcd.keys(f"/holdfast/{job.run_id}/")
    leader = json.loads(found.get(f"/holdfast/{job.run_id}/coordinator", b"{}"))
    return int(leader["addr"].rpartition(".")[2]) - 1 if leader else None


def keys(etcd: Etcd, job: Job) -> dict[str, bytes]:
    """That etcd has of the job, as it first answers."""
    [found] = wait_for(lambda: [etcd.keys(f"/holdfast/{job.run_id}/")])
    return dict(found)


def start_with_coordinator(etcd: Etcd, job: Job, first: int, *others: int) -> None:
    job.start(first)
    wait_for(lambda: coordinator(etcd, job) == first)
    job.start(*others)


def test_a_job_runs_while_members_of_etcd_die_and_leaves_no_key(etcd: Etcd, make_job: MakeJob) -> None:
    job = make_job(nnodes="2")
    job.start(0, 1)
    world = job.wait_generation(0, 0, 1)
    etcd.kill(etcd.leader())
    assert job.goes_on(world)
    job.kill_rank(world[1])
    again = job.wait_generation(1, 0, 1)
    assert {line[RESTARTS] for line in again.values()} == {1}
    etcd.heal()
    assert keys(etcd, job) != {}
    job.release()
    assert job.ends(0, 1) == [0, 0]
    assert job.causes(0) == job.causes(1)
    assert keys(etcd, job) == {}
    assert job.cluster.leftovers() == []


@pytest.mark.long
def test_a_coordinator_that_only_stands_by_may_die_and_no_rank_stops(etcd: Etcd, make_job: MakeJob) -> None:
    job = make_job("--spares=1", nnodes="2", places={0: 9, 1: 0, 2: 1, 3: 3})
    start_with_coordinator(etcd, job, 0, 1, 2)
    world = job.wait_generation(0, 1, 2)
    job.cluster.kill_node(0)
    wait_for(lambda: coordinator(etcd, job) in (1, 2))
    assert job.goes_on(world)
    job.start(3)
    job.cluster.wait_said(3, "standing by as a spare")
    assert job.goes_on(world)
    job.cluster.kill_node(1)
    replaced = job.wait_generation(1, 2, 3)
    assert {line[RESTARTS] for line in replaced.values()} == {1}
    job.release()
    assert job.ends(2, 3) == [0, 0]
    assert keys(etcd, job) == {}
    assert job.cluster.leftovers() == []


def test_a_coordinator_that_trains_may_die_and_the_rest_goes_on_in_a_new_world(etcd: Etcd, make_job: MakeJob) -> None:
    job = make_job(nnodes="2:3")
    start_with_coordinator(etcd, job, 0, 1, 2)
    job.wait_generation(0, 0, 1, 2)
    job.cluster.kill_node(0)
    rest = job.wait_generation(1, 1, 2)
    assert {line[RESTARTS] for line in rest.values()} == {1}
    job.start(0)
    grown = job.wait_generation(2, 0, 1, 2)
    assert {line[RESTARTS] for line in grown.values()} == {2}
    assert job.nodes()["count"] == 3
    taker = coordinator(etcd, job)
    assert taker in (1, 2)
    job.release()
    assert job.ends(0, 1, 2) == [0, 0, 0]
    assert [kind for _, _, kind, _ in job.causes(1)] == ["lost-node", "membership"]
    found = job.report(taker)  # its record has been that of the job since, and tells of the time before as well
    assert round(sum(found["phases_s"].values()), 6) == found["wall_s"]
    assert [(world["generation"], world["trained_s"] is None) for world in found["worlds"]] == [
        (0, False), (1, False), (2, False),
    ]  # fmt: skip
    assert [each["kind"] for each in found["incidents"]] == ["lost-node", "membership"]
    names = [{name.rpartition(":")[0] for name in world["nodes"]} for world in found["worlds"]]
    others = {job.cluster.addr(i) for i in (1, 2)}
    assert names == [others, others, {job.cluster.addr(0), *others}], "of the lost one, nobody has the lines"
    assert job.causes(1) == job.causes(2)
    assert job.cluster.leftovers() == []


@pytest.mark.long
def test_a_coordinator_that_is_frozen_is_replaced_and_gives_way(etcd: Etcd, make_job: MakeJob) -> None:
    job = make_job("--spares=1", nnodes="2", conf=TOGETHER, places={0: 9, 1: 0, 2: 1})
    start_with_coordinator(etcd, job, 0, 1, 2)
    world = job.wait_generation(0, 1, 2)
    job.cluster.stop_agent(0)
    wait_for(lambda: coordinator(etcd, job) in (1, 2))
    assert job.goes_on(world)
    job.cluster.cont_agent(0)
    job.cluster.wait_said(0, "this node is no longer the coordinator")
    job.kill_rank(world[1])
    again = job.wait_generation(1, 1, 2)
    assert {line[RESTARTS] for line in again.values()} == {1}
    job.release()
    assert job.ends(0, 1, 2) == [0, 0, 0]
    assert job.cluster.leftovers() == []
