"""A job of several nodes as a test tells of it: every node has the same command line, and a fault is one word."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from cluster.cluster import TRAINS_ELASTIC, WAIT_S, Cluster, Line

STEPS_ALONE = Path(__file__).parent / "scripts" / "steps_alone.py"
# All that a test starts at first come into the first world, however long each takes.
TOGETHER = "last_call_timeout=60"


class Job:
    """One of perhaps several on a cluster. Node i has place i in the order of the infrastructure, unless `places` says
    otherwise. On loopback, where every node could, `host` is the one to have the endpoint. It trains until `release`.
    """

    def __init__(
        self,
        cluster: Cluster,
        *flags: str,
        nnodes: str,
        max_restarts: int = 3,
        conf: str = TOGETHER,
        run_id: str = "job",
        endpoint: str = "",
        backend: str = "c10d",
        host: int = 0,
        places: dict[int, int] | None = None,
        script: Path = TRAINS_ELASTIC,
        args: tuple[str, ...] = (),
        env: dict[str, str] | None = None,
    ) -> None:
        self.cluster = cluster
        self.run_id = run_id
        self.places = places
        self.meeting = (
            f"--rdzv-id={run_id}",
            f"--rdzv-backend={backend}",
            f"--rdzv-endpoint={endpoint or cluster.endpoint()}",
        )
        self.flags = (f"--nnodes={nnodes}", f"--max-restarts={max_restarts}", *flags)
        self._conf = conf
        self._host = host
        self.script, self.args = script, args
        self._hold = cluster.folder / f"hold-{run_id}"
        self._hold.touch()
        self.env = {"STATE": str(cluster.folder / f"step-{run_id}"), "HOLD": str(self._hold), "STEPS": "1"}
        self.env |= {"PACE_S": "0.03", **(env or {})}

    def start(
        self, *nodes: int, flags: tuple[str, ...] = (), nproc: int = 1, env: dict[str, str] | None = None
    ) -> None:
        for i in nodes:
            place = i if self.places is None else self.places.get(i)
            ours = {"GROUP_RANK": str(place)} if place is not None else {}
            every = (*self.meeting, *self.flags, *self._own_flags(i), *flags)
            env_of_node = self.env | ours | (env or {})
            self.cluster.start(i, *every, env=env_of_node, nproc=nproc, script=self.script, args=self.args)

    def _own_flags(self, i: int) -> tuple[str, ...]:
        if self.cluster.net is not None:
            return (f"--rdzv-conf={self._conf}",)
        return (f"--rdzv-conf={self._conf},is_host={i == self._host}", f"--local-addr={self.cluster.addr(i)}")

    def release(self) -> None:
        """Let it end with success."""
        self._hold.unlink()

    def wait_generation(self, generation: int, *nodes: int, timeout_s: float = WAIT_S) -> dict[int, Line]:
        """Wait until every rank of a generation has stepped, one on each of these nodes; returns the news, by node."""
        world = self.cluster.wait_world(len(nodes), generation, self.run_id, timeout_s)
        by_node = {line["node"]: line for line in world.values()}
        assert sorted(by_node) == sorted(nodes), f"generation {generation} has nodes {sorted(by_node)}"
        return by_node

    def goes_on(self, world: dict[int, Line], steps: int = 5) -> bool:
        """Whether the very same ranks do more steps from now on, and nobody else does any."""
        self.cluster.pass_over()
        before = len(self.cluster.news.seen)
        for node in world:
            after = self.cluster.wait_step(node=node, run_id=self.run_id)["step"] + steps
            self.cluster.wait_step(node=node, run_id=self.run_id, min_step=after)
        seen = [line for line in self.cluster.news.seen[before:] if line["run_id"] == self.run_id]
        return {line["pid"] for line in seen} == {line["pid"] for line in world.values()}

    def kill_rank(self, line: Line, signum: int = signal.SIGKILL) -> None:
        os.kill(line["pid"], signum)

    def ends(self, *nodes: int) -> list[int]:
        """The exit codes of nodes, in their order."""
        return [self.cluster.wait_exit(i) for i in nodes]

    def causes(self, i: int) -> list[tuple[Any, ...]]:
        """What node i knows of each incident: its number, the generation that it ended, its kind and what was done."""
        keys = ("number", "generation", "kind", "action")
        return [tuple(incident[key] for key in keys) for incident in self.cluster.incidents(i)]

    def nodes(self, *flags: str, at: int = 0) -> Any:
        """What `holdfast nodes` tells a program, asked on that node."""
        command = [sys.executable, "-m", "holdfast", "nodes", "--json", *self.meeting, *flags]
        done = self.cluster.call(at, command)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def report(self, i: int) -> Any:
        """What `holdfast report` tells a program of node i's record."""
        done = self.cluster.call(
            i, [sys.executable, "-m", "holdfast", "report", "--json", str(self.cluster.run_dir(i))]
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)
