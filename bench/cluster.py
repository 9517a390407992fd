"""What losing and gaining a node costs: four nodes in network namespaces, two ranks each, gloo, one machine.

    python -m bench.cluster [--jobs 3] [--etcd-runs 5]

Killed: SIGKILL to a node's agent and all of its processes, until all ranks of the others have stepped in a new world.
Cut: its link goes silent, the same. Joined: from a new node's hello until all ranks of the larger world have stepped.
Coordinator: its host, a spare, is killed under a three-member etcd, and a node of the world right after it, until the
others have stepped in a new world; and how many ranks stopped when it was the coordinator's host alone. All clocks are
this machine's own.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from bench.launchers import table, versions
from cluster.cluster import Cluster
from cluster.net import Net
from coordinator.etcd_cluster import Cluster as EtcdCluster

NODES, RANKS = 4, 2
NODE_TIMEOUT_S = 3.0


@contextmanager
def nodes_in_namespaces(count: int) -> Iterator[Cluster]:
    with tempfile.TemporaryDirectory(prefix="holdfast_bench_") as folder, Net(count) as net:
        cluster = Cluster(Path(folder), net)
        cluster.hold()
        try:
            yield cluster
        finally:
            cluster.end()


def start(cluster: Cluster, node: int, *flags: str, endpoint: str = "", order: int | None = None) -> None:
    where = endpoint or f"--rdzv-backend=c10d --rdzv-endpoint={cluster.endpoint()}"
    rank = {"GROUP_RANK": str(node if order is None else order)}
    cluster.start(node, "--max-restarts=1000", "--rdzv-id=bench", *where.split(), *flags, nproc=RANKS, env=rank)


def last_step_s(cluster: Cluster, ranks: int) -> float:
    """When the last rank of the next world of that size did its first step."""
    return max(float(line["at_s"]) for line in cluster.wait_world(ranks).values())


def hello_s(cluster: Cluster, node: int) -> float:
    """When a node said hello, on the monotonic clock."""
    lines = [json.loads(line) for line in (cluster.run_dir(node) / "events.jsonl").read_text().splitlines()]
    said = next(line["time"] for line in lines if line["name"] == "node.hello")
    return time.monotonic() - (time.time() - datetime.fromisoformat(said).timestamp())


# Nodes but the coordinator's, each twice a job: a third time would set it aside.
VICTIMS = (3, 2, 1, 3, 2, 1)


def kills_and_joins(jobs: int) -> tuple[list[float], list[float]]:
    killed: list[float] = []
    joined: list[float] = []
    for _ in range(jobs):
        with nodes_in_namespaces(NODES) as cluster:
            for node in range(NODES):
                start(cluster, node, f"--nnodes=2:{NODES}")
            cluster.wait_world(NODES * RANKS)
            for victim in VICTIMS:
                cluster.wait_step(world_size=NODES * RANKS)
                cluster.pass_over()
                began_s = time.monotonic()
                cluster.kill_node(victim)
                killed.append(last_step_s(cluster, (NODES - 1) * RANKS) - began_s)
                cluster.pass_over()
                start(cluster, victim, f"--nnodes=2:{NODES}")
                done_s = last_step_s(cluster, NODES * RANKS)
                joined.append(done_s - hello_s(cluster, victim))
    return killed, joined


def cuts(jobs: int) -> list[float]:
    cut: list[float] = []
    for _ in range(jobs):
        with nodes_in_namespaces(NODES) as cluster:
            assert cluster.net is not None
            for node in range(NODES):
                start(cluster, node, f"--nnodes=2:{NODES}", f"--node-timeout={NODE_TIMEOUT_S:g}")
            cluster.wait_world(NODES * RANKS)
            for victim in VICTIMS:
                cluster.wait_step(world_size=NODES * RANKS)
                cluster.pass_over()
                began_s = time.monotonic()
                cluster.net.cut(victim)
                cut.append(last_step_s(cluster, (NODES - 1) * RANKS) - began_s)
                cluster.pass_over()
                cluster.net.heal(victim)
                last_step_s(cluster, NODES * RANKS)
    return cut


def coordinators(runs: int) -> tuple[list[float], int]:
    """The coordinator's host is killed, and right after it a node of the world: seconds until the others step again.
    And how many ranks were stopped when it was the coordinator's host alone."""
    took: list[float] = []
    stopped = 0
    for _ in range(runs):
        with tempfile.TemporaryDirectory(prefix="holdfast_bench_") as folder:
            etcd = EtcdCluster(Path(folder) / "etcd")
            cluster = Cluster(Path(folder))
            cluster.hold()
            try:
                for alone in (True, False):
                    begin_under_etcd(cluster, ",".join(etcd.endpoints), f"bench-{alone}")
                    before = cluster.wait_world(NODES * RANKS, run_id=f"bench-{alone}")
                    cluster.pass_over()
                    began_s = time.monotonic()
                    cluster.kill_node(NODES)
                    if alone:
                        step = int(cluster.wait_step()["step"])
                        cluster.wait_step(min_step=step + 300)
                        cluster.pass_over()
                        after = cluster.wait_world(NODES * RANKS, run_id="bench-True")
                        stopped += sum(before[rank]["pid"] != after[rank]["pid"] for rank in before)
                    else:
                        cluster.kill_node(NODES - 1)
                        took.append(last_step_s(cluster, (NODES - 1) * RANKS) - began_s)
                    for node in range(NODES):
                        cluster.kill_node(node)
                    cluster.pass_over()
            finally:
                cluster.end()
                etcd.close()
    return took, stopped


def begin_under_etcd(cluster: Cluster, members: str, job: str) -> None:
    """Node 4 comes first, so it coordinates, and has the last rank, so it is the spare."""
    flags = (f"--nnodes=2:{NODES}", "--rdzv-conf=last_call_timeout=60", f"--rdzv-id={job}")
    for node in (NODES, *range(NODES)):
        endpoint = f"--rdzv-backend=etcd --rdzv-endpoint={members} --local-addr={cluster.addr(node)} --spares=1"
        start(cluster, node, *flags, endpoint=endpoint, order=99 if node == NODES else node)
        if node == NODES:
            wait_for(lambda: "nodes are here" in cluster.err(NODES))


def wait_for(seen: Callable[[], bool], wait_s: float = 60.0) -> None:
    until = time.monotonic() + wait_s
    while not seen():
        if time.monotonic() > until:
            raise RuntimeError(f"not seen within {wait_s} s")
        time.sleep(0.01)


def row(what: str, took: list[float], bar: str) -> list[str]:
    return [what, str(len(took)), f"{statistics.median(took):.2f} s", f"{max(took):.2f} s", bar]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--jobs", type=int, default=3, help=f"jobs with {len(VICTIMS)} losses each")
    parser.add_argument("--etcd-runs", type=int, default=5)
    args = parser.parse_args()
    print(f"{NODES} nodes in network namespaces, {RANKS} ranks each; {versions()}\n")
    killed, joined = kills_and_joins(args.jobs)
    cut = [took_s - NODE_TIMEOUT_S for took_s in cuts(args.jobs)]
    rows = [
        row("node killed, to the next step of the rest", killed, "0.5 s"),
        row(f"node cut off silently, the same, less the node timeout of {NODE_TIMEOUT_S:g} s", cut, "0.5 s"),
        row("node joins, from its hello to the first step of the larger world", joined, "0.5 s"),
    ]
    print(table(["what", "runs", "median", "worst", "asked"], rows), flush=True)
    if args.etcd_runs:
        took, stopped = coordinators(args.etcd_runs)
        what = "etcd: the coordinator's host and then a node killed, to the next step of the rest"
        print()
        print(table(["what", "runs", "median", "worst", "asked"], [row(what, took, "3 s")]))
        print(f"\netcd: ranks stopped by the loss of the coordinator's host alone, in {args.etcd_runs} runs: {stopped}")


if __name__ == "__main__":
    main()
