"""What a seed stands for: a job's settings, its hosts, its program, and how much will go wrong."""

from __future__ import annotations

import random
import signal

import msgspec

from holdfast.control import hangs
from holdfast.control.membership import Assignment, Budget, Policy, Settings


class Machine(msgspec.Struct, frozen=True):
    """A host, and how an agent is started on it."""

    local_size: int
    role: str
    order: int | None
    comes_at_s: float


class Program(msgspec.Struct, frozen=True):
    """What the ranks do."""

    steps: int
    step_s: float
    commit_every: int
    start_s: float  # from fork to the first line
    backend_timeout_s: float  # after which a collective without its peers fails
    deaf: float  # how often a rank ignores SIGTERM
    stuck: float  # how often it cannot be ended at all
    fails_at: int  # the step at which it fails in every world, or -1
    drains: bool  # its ranks end at a boundary when they are asked to
    never_drains: float  # how often they do not get there
    stays: bool = False  # its ranks leave a world that is over, and are ranks of the next


class Scenario(msgspec.Struct, frozen=True):
    settings: Settings
    machines: tuple[Machine, ...]
    program: Program
    grace_s: float
    close_timeout_s: float
    drift: float
    hostile: bool
    faults: int
    calm_at_s: float  # no fault after that, and everything is mended
    isolated: bool  # among them, for sure: a whole world that nobody hears of for longer than its lease
    hang_rules: hangs.Rules
    hang_signal: int


def draw(seed: int, nodes: int | None = None) -> Scenario:
    """The scenario of a seed. Its chances are its own, so that a change here does not change what is drawn later."""
    rng = random.Random(f"scenario {seed}")
    alone = nodes is None and rng.random() < 0.04
    hosts = nodes or (1 if alone else rng.choice((1, 2, 2, 3, 3, 3, 4, 4, 4, 5, 5, 6, 8)))
    # A world of one node, with others to take its place: what a lease is for.
    isolated = nodes is None and hosts > 1 and rng.random() < 0.08
    static = not alone and not isolated and rng.random() < 0.08
    spares = 0 if static or alone else rng.choice((0, 0, 0, 0, 1, 1, 2))
    max_nodes = 1 if isolated else hosts if static else max(1, hosts - spares - rng.choice((0, 0, 0, 1)))
    min_nodes = max_nodes if static or rng.random() < 0.25 else rng.randint(1, max_nodes)
    elected = not alone and not static and rng.random() < 0.4
    node_timeout_s = rng.choice((1.5, 3.0, 3.0, 3.0, 4.5))
    step_s = rng.uniform(0.1, 0.3 if isolated else 1.0)
    watch = random.Random(f"hangs {seed}")
    ends = random.Random(f"drains {seed}")
    settings = Settings(
        run_id="simulated",
        min_nodes=min_nodes,
        max_nodes=max_nodes,
        spares=spares,
        max_restarts=rng.choice((0, 1, 2, 3, 5, 10, 20, 20)),
        budget=rng.choice((Budget.ALL, Budget.ALL, Budget.FAILURES)),
        refill_steps=rng.choice((0, 0, 0, 5, 20)),
        policy=Policy.MIN_HEALTHY if rng.random() < 0.12 else Policy.ANY_FAILED,
        assignment=rng.choice((Assignment.INFRASTRUCTURE, Assignment.INFRASTRUCTURE, Assignment.DETERMINISTIC)),
        static=static,
        alone=alone,
        elected=elected,
        join_timeout_s=rng.uniform(5.0, 10.0 if isolated else 30.0),
        last_call_s=rng.choice((0.0, 0.0, 0.0, rng.uniform(1.0, 6.0))),
        node_timeout_s=node_timeout_s,
        max_no_progress=watch.choice((0, 0, 2, 3, 5)),
    )
    return Scenario(
        settings=settings,
        machines=tuple(_machines(rng, hosts, static)),
        program=Program(
            steps=round(rng.uniform(60.0 if isolated else 10.0, 90.0) / step_s),
            step_s=step_s,
            commit_every=rng.choice((1, 2, 5, 10)),
            start_s=rng.uniform(0.05, 1.5),
            backend_timeout_s=rng.choice((5.0, 15.0, 60.0)),
            deaf=rng.choice((0.0, 0.05, 0.3)),
            stuck=rng.choice((0.0, 0.0, 0.002)),
            fails_at=rng.choice((0, 3, 12)) if rng.random() < 0.06 else -1,
            drains=ends.random() < 0.4,
            never_drains=ends.choice((0.0, 0.0, 0.2, 1.0)),
            stays=random.Random(f"stays {seed}").random() < 0.4,
        ),
        grace_s=rng.uniform(0.5, 5.0),
        close_timeout_s=rng.uniform(3.0, 30.0),
        drift=rng.choice((0.0, 1e-4, 1e-3)),
        hostile=rng.random() < 0.15,
        faults=0 if rng.random() < 0.05 else min(40, round(rng.expovariate(1 / 9.0)) + 1),
        calm_at_s=rng.uniform(60.0 if isolated else 20.0, 100.0),
        isolated=isolated,
        hang_rules=_hang_rules(watch, isolated),
        hang_signal=watch.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGTERM)),
    )


def _hang_rules(rng: random.Random, isolated: bool) -> hangs.Rules:
    """Short limits, so that a run has time for a hang; where a lease is to be tested, nothing else may stop a world."""
    if isolated or rng.random() < 0.3:
        return hangs.Rules(mode=hangs.Mode.OFF)
    return hangs.Rules(
        mode=hangs.Mode.WARN if rng.random() < 0.15 else hangs.Mode.RESTART,
        floor_s=rng.choice((rng.uniform(0.3, 1.0), rng.uniform(1.0, 3.0))),
        first_s=rng.choice((None, None, rng.uniform(8.0, 20.0))),
    )


def _machines(rng: random.Random, hosts: int, static: bool) -> list[Machine]:
    same_size = rng.choice((1, 1, 2, 4))
    mixed = rng.random() < 0.2
    roles = ("trainer", "reader") if rng.random() < 0.15 else ("default",)
    ordered = static or rng.random() < 0.25
    orders = list(range(hosts))
    rng.shuffle(orders)
    storm = rng.random() < 0.5  # all come at once
    return [
        Machine(
            local_size=rng.randint(1, 4) if mixed else same_size,
            role=rng.choice(roles),
            order=orders[index] if ordered else None,
            comes_at_s=rng.uniform(0.0, 0.05 if storm else 8.0),
        )
        for index in range(hosts)
    ]
