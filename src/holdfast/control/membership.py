"""Who is in a world and with which rank: plain functions of who is there."""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import StrEnum

import msgspec

from holdfast.control.incidents import Incident
from holdfast.control.protocol import Hello, Over
from holdfast.control.restarts import History
from holdfast.control.worlds import World

# A node is silent once it has missed this many of its own beats in a row.
BEATS = 6
# A node can be in the middle of a call to a coordinator that is gone, which takes 3 s to fail, and pauses for 1 s then.
RETURN_S = 5.0


class Budget(StrEnum):
    ALL = "all"  # as torchrun's documentation says: failures and membership changes
    FAILURES = "failures"


class Policy(StrEnum):
    ANY_FAILED = "any-failed"
    MIN_HEALTHY = "min-healthy"


class Assignment(StrEnum):
    INFRASTRUCTURE = "infrastructure"
    DETERMINISTIC = "deterministic"


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What a job was asked to be; the same on every node."""

    run_id: str = "none"
    min_nodes: int = 1
    max_nodes: int = 1
    spares: int = 0  # nodes to hold back even if there were room for them
    max_restarts: int = 0
    budget: Budget = Budget.ALL
    refill_steps: int = 0  # good steps that give one restart back; 0: none do
    policy: Policy = Policy.ANY_FAILED
    assignment: Assignment = Assignment.INFRASTRUCTURE
    static: bool = False  # each node brings its own group rank
    alone: bool = False  # one node, in one process with its coordinator: nobody to wait for
    elected: bool = False  # a newer term means another coordinator, not a lost ledger
    join_timeout_s: float = 600.0
    last_call_s: float = 0.0
    node_timeout_s: float = 3.0
    replaces_stragglers: bool = False  # by another node, where there is one
    max_no_progress: int = 0  # restarts in a row that did not get further; 0: any number

    @property
    def beat_s(self) -> float:
        return self.node_timeout_s / BEATS

    @property
    def return_s(self) -> float:
        """How long nodes may take to come to a new coordinator."""
        return max(self.node_timeout_s, RETURN_S)

    @property
    def everyone(self) -> int:
        return self.max_nodes + self.spares


class Seat(msgspec.Struct, frozen=True):
    """A node's place in a world."""

    node: str
    host: str
    addr: str
    local_size: int
    role: str
    store_port: int
    group_rank: int
    order: int | None
    arrival: int
    stays: bool = False  # some of its ranks were ranks of an earlier world


class Record(msgspec.Struct, frozen=True):
    """What a coordinator must not forget: written before anybody acts on it."""

    run_id: str
    term: int
    generation: int
    history: History
    node: str = ""  # the coordinator's own
    incidents: int = 0
    steps: int = 0
    arrivals: int = 0
    refill_mark: int = 0  # the steps of the world for which restarts were given back
    seats: tuple[Seat, ...] = ()  # of the world of that generation
    settled: bool = False  # what ended that world has been decided on; its nodes may still have to be fenced
    confirmed: bool = True  # they need not: one of them has said that its ranks are gone
    incident: Incident | None = None  # the open one; its times count from when this was written
    quarantine: tuple[tuple[str, str, float], ...] = ()  # host, why, seconds left
    over: Over | None = None
    since: int = 0  # the term in which this job began; nodes of an older one with the same name are not its own
    former: Over | None = None  # how that one ended
    learned: str = ""  # the timeouts that ranks have agreed on
    ending: Over | None = None  # how the job ends once that world is down: a rank asked for it
    job_id: str = ""
    first_generation: int = 0  # of the worlds of that job


class Member:
    """A node that is connected."""

    def __init__(self, hello: Hello, arrival: int, now_s: float) -> None:
        self.hello = hello
        self.arrival = arrival
        self.missed = 0
        self.heard_s = now_s
        self.ready = hello.ready
        self.staying = hello.staying
        self.store_port = hello.store_port
        self.busy = False  # it has ranks of an old world
        self.leaving: int | None = None
        self.fit = True
        self.busy_until_s = self.calm_since_s = -math.inf  # its ranks evaluate or save, and were last done with it
        self.told = ""  # the last thing it was told about standing by

    @property
    def available(self) -> bool:
        return self.ready and self.fit and not self.busy and self.leaving is None

    @property
    def returning(self) -> bool:
        """It is about to be available: its helpers are starting, or its old ranks are being stopped."""
        return self.fit and self.leaving is None and not self.available

    @property
    def rank_key(self) -> tuple[bool, int, int]:
        """Infrastructure ranks first, then the order of arrival."""
        order = self.hello.order
        return (order is None, order if order is not None else 0, self.arrival)


def target(settings: Settings, available: int, had: int = 0) -> int:
    """How many nodes the world after one of `had` is to have; 0 if there are too few. Spares are held back from what
    would make it larger, and are there to keep it from getting smaller."""
    if available < settings.min_nodes:
        return 0
    wanted = max(settings.min_nodes, available - settings.spares, min(had, available))
    return min(wanted, settings.max_nodes)


def choose(settings: Settings, available: Sequence[Member], previous: Sequence[Seat]) -> list[Member]:
    """The nodes of the next world. Who was in the last one stays: to replace it would cost without need."""
    if settings.static:
        by_rank = {member.hello.order: member for member in available}
        return list(by_rank.values()) if len(by_rank) >= settings.min_nodes else []
    had = {seat.node for seat in previous}
    ranked = sorted(available, key=lambda m: (m.hello.node not in had, m.rank_key))
    return ranked[: target(settings, len(ranked), len(had))]


def seat(settings: Settings, chosen: Sequence[Member], previous: Sequence[Seat]) -> tuple[Seat, ...]:
    """Group ranks for the chosen, in order of group rank."""
    ordered = sorted(chosen, key=lambda member: member.rank_key)
    if settings.assignment is Assignment.DETERMINISTIC and not settings.static:
        ordered = _keep_ranks(ordered, {seat.node: seat.group_rank for seat in previous})
    return tuple(
        Seat(
            m.hello.node, m.hello.host, m.hello.addr, m.hello.local_size, m.hello.role, m.store_port, rank,
            m.hello.order, m.arrival, m.staying,
        )
        for rank, m in enumerate(ordered)
    )  # fmt: skip


def _keep_ranks(members: list[Member], had: dict[str, int]) -> list[Member]:
    """Everybody whose rank still exists keeps it; the others fill the gaps in their order."""
    places: list[Member | None] = [None] * len(members)
    others: list[Member] = []
    for member in members:
        rank = had.get(member.hello.node, len(members))
        if rank < len(members):
            places[rank] = member
        else:
            others.append(member)
    rest = iter(others)
    return [place if place is not None else next(rest) for place in places]


def shares(
    settings: Settings, seats: Sequence[Seat], generation: int, restarts: int, job_id: str = "", ordinal: int = 0
) -> list[World]:
    """Each node's own share of the world, in the order of the seats. The store is on the node with group rank 0."""
    role_sizes: dict[str, int] = {}
    for place in seats:
        role_sizes[place.role] = role_sizes.get(place.role, 0) + place.local_size
    size = sum(place.local_size for place in seats)
    role_ranks = dict.fromkeys(role_sizes, 0)
    first_rank = 0
    worlds: list[World] = []
    for place in seats:
        worlds.append(
            World(
                run_id=settings.run_id,
                generation=generation,
                restart_count=restarts,
                max_restarts=settings.max_restarts,
                master_addr=seats[0].addr,
                master_port=seats[0].store_port,
                local_size=place.local_size,
                role=place.role,
                first_rank=first_rank,
                world_size=size,
                group_rank=place.group_rank,
                group_size=len(seats),
                role_first_rank=role_ranks[place.role],
                role_size=role_sizes[place.role],
                job_id=job_id,
                ordinal=ordinal,
                stayed=any(other.stays for other in seats),
            )
        )
        first_rank += place.local_size
        role_ranks[place.role] += place.local_size
    return worlds
