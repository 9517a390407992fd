"""Thousands of random but possible lives of a job on one node, from seeds, and what holds in every one of them."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable, Iterator
from typing import TypeVar

import pytest
from lone_job import ZYGOTE, LoneJob, Queued
from stories import every

from holdfast.control import acts
from holdfast.control.acts import (
    Asked,
    Closed,
    Dumped,
    DumpStacks,
    Exited,
    Finish,
    HelpersLost,
    HelpersReady,
    Hung,
    KeeperLost,
    Leave,
    Left,
    Opened,
    Paced,
    PeekAsked,
    PrepareHelpers,
    Run,
    Started,
    Stays,
    Stepped,
    StopRequested,
    Stumbled,
    TimerFired,
)
from holdfast.control.causes import Kind, RankExit
from holdfast.control.hangs import Hang
from holdfast.control.stacks import Group
from holdfast.control.standing import Phase
from holdfast.control.stragglers import Window
from holdfast.wire.messages import Raised

A = TypeVar("A")

ACTIONS = ("continue", "exclude-node", "shutdown")
WALKS = 1500
EVENTS = 60


class Walk:
    """Ranks end only while they live, timers fire once, and helpers die with all ranks. Now and then it brings old news
    of the last generation, and it goes on after the job is done."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._ranks = self._random.randint(1, 4)
        self.limit = self._random.randint(0, 4)
        self._live: set[int] = set()
        self._unstepped: set[int] = set()
        self._unstarted = False
        self._helpers_starting = True
        self._dumps: list[Queued] = []
        self._leaves: set[int] = set()  # ranks that were told to
        self._generation = -1
        self._steps: dict[int, int] = {}  # by generation
        self.overlaps: list[Run] = []
        self.most_spent = 0
        self.job = LoneJob(self._ranks, self.limit)
        for _ in range(EVENTS):
            self._advance(self._some_event())
        self._bring_to_an_end()

    @property
    def log(self) -> list[acts.Action]:
        return self.job.log

    @property
    def steps(self) -> int:
        return sum(self._steps.values())

    def all(self, kind: type[A]) -> list[A]:
        return every(self.log, kind)

    def _advance(self, event: Queued) -> None:
        actions = self.job.hears(event, after_s=self._random.choice([0.0, 0.01, 0.5, 5.0, 40.0]))
        self.most_spent = max(self.most_spent, self.job.spent)
        for action in actions:
            match action:
                case PrepareHelpers():
                    self._helpers_starting = True
                case Run(world=world):
                    if self._live:
                        self.overlaps.append(action)
                    self._generation = world.generation
                    self._live = set(range(self._ranks))
                    self._unstepped = set(self._live)
                    self._leaves = set()
                    self._unstarted = True
                case Leave(ranks=ranks):
                    self._leaves.update(ranks)
                case DumpStacks(generation=generation, show=show):
                    places = tuple(Group((rank,), 1, "train.py:7 step") for rank in sorted(self._live))
                    self._dumps.append(Dumped(generation, places, show))

    def _some_event(self) -> Queued:
        choices = list(self._possible())
        (pick,) = self._random.choices([make for _, make in choices], [weight for weight, _ in choices])
        return pick()

    def _possible(self) -> Iterator[tuple[float, Callable[[], Queued]]]:
        generation, timers = self._generation, self.job.timers
        yield 0.15, lambda: StopRequested(self._random.choice([signal.SIGTERM, signal.SIGINT]))
        yield 0.2, self._lose_helpers
        if self._helpers_starting:
            yield 8.0, self._ready_helpers
        if self._live:
            yield 1.0 * len(self._live), self._end_a_rank
            yield 0.1, lambda: KeeperLost(generation)
            yield 0.2, self._hang
            yield 0.05, lambda: Asked(generation, min(self._live), self._random.choice(ACTIONS), "ECC errors")
            yield 2.0, self._pace
            yield 2.0, lambda: Stays(generation, self._random.choice(sorted(self._live)))
            yield 0.2, lambda: Stumbled(generation, min(self._live), self.job.now_s, "connection closed by peer")
        if self._live & self._leaves:
            yield 4.0, self._leave
        if self._dumps:
            yield 3.0, lambda: self._dumps.pop(self._random.randrange(len(self._dumps)))
        yield 0.1, lambda: PeekAsked(1)
        if self._unstarted:
            yield 2.0, self._start
        if self._live & self._unstepped:
            yield 2.0, self._step
        if timers:
            yield 0.5, lambda: timers.pop(self._random.randrange(len(timers)))
        if generation > 0:
            yield 0.3, self._old_news

    def _leave(self) -> Queued:
        rank = self._random.choice(sorted(self._live & self._leaves))
        self._live.discard(rank)
        return Left(self._generation, rank, self._steps.get(self._generation, 0))

    def _pace(self) -> Queued:
        slow_s = self._random.choice([0.1, 0.5, 0.5])
        return Paced(self._generation, Window(2, ((min(self._live), slow_s),), 0.1, 0.1))

    def _hang(self) -> Queued:
        rank = self._random.choice(sorted(self._live))
        hang = Hang(rank, "no step", self.job.now_s - 31.0, 30.0, phase=1)
        return Hung(self._generation, hang, hang.headline(self.job.now_s))

    def _lose_helpers(self) -> Queued:
        self._live.clear()
        self._helpers_starting = self._unstarted = False
        return HelpersLost(ZYGOTE)

    def _ready_helpers(self) -> Queued:
        self._helpers_starting = False
        return HelpersReady()

    def _start(self) -> Queued:
        self._unstarted = False
        return Started(self._generation)

    def _step(self) -> Queued:
        rank = self._random.choice(sorted(self._live & self._unstepped))
        self._unstepped.discard(rank)
        return Stepped(rank, self._generation, self.job.now_s)

    def _end_a_rank(self, status: int | None = None) -> Queued:
        rank = self._random.choice(sorted(self._live))
        self._live.discard(rank)
        if status is None:
            status = self._random.choice([0, 0, 0, 1, 1, -signal.SIGKILL, -signal.SIGTERM, -signal.SIGABRT])
        at_s = self.job.now_s - self._random.choice([0.0, 0.1])
        raised = None
        if status == 1 and self._random.random() < 0.7:
            backend = self._random.random() < 0.5
            raised = Raised(rank, self._generation, at_s, "E: bad", "E: bad", "train.py:1", distributed=backend)
        steps = 0 if rank in self._unstepped else self._random.randint(1, 9)
        if self.job.node.phase is not Phase.DONE:
            self._steps[self._generation] = max(steps, self._steps.get(self._generation, 0))
        return Exited(self._generation, RankExit(rank, 100 + rank, status, at_s, steps, raised))

    def _old_news(self) -> Queued:
        old = self._random.randrange(self._generation)
        rank = self._random.randrange(self._ranks)
        news: list[Queued] = [
            Exited(old, RankExit(rank, 1, self._random.choice([0, 1, -9]), self.job.now_s)),
            Started(old),
            Stepped(rank, old, self.job.now_s),
            KeeperLost(old),
            Hung(old, Hang(rank, "no step", 1.0, 30.0), "no step"),
            Dumped(old, ()),
            Asked(old, rank, "shutdown", "too late"),
            TimerFired(self._random.choice(["grace", "abandon", "contact", "dump"]), old),
        ]
        return self._random.choice(news)

    def _bring_to_an_end(self) -> None:
        self._advance(StopRequested(signal.SIGTERM))
        while self._live:
            self._advance(self._end_a_rank(-signal.SIGTERM))
        self._advance(StopRequested(signal.SIGTERM))


@pytest.fixture(scope="module")
def walks() -> list[Walk]:
    return [Walk(seed) for seed in range(WALKS)]


def test_walks_visit_every_kind_of_action_and_of_end(walks: list[Walk]) -> None:
    """So that the tests below are about something."""
    seen = {type(action) for walk in walks for action in walk.log}
    of_a_cluster = {acts.Tell, acts.Lease, acts.HangUp, acts.Agree}
    assert seen == set(acts.Action.__args__) - of_a_cluster
    ends = {finish.kind for walk in walks for finish in walk.all(Finish)}
    assert ends >= {None, Kind.ERROR, Kind.BACKEND, Kind.SIGNAL, Kind.LAUNCHER, Kind.PREEMPTED, Kind.HANG}
    assert ends >= {Kind.REQUESTED, Kind.LOST_NODE}


def test_no_walk_charges_more_restarts_than_its_limit(walks: list[Walk]) -> None:
    for walk in walks:
        assert walk.most_spent <= walk.limit
        assert all(count <= walk.limit for _, count in walk.job.launches)


def test_in_every_walk_generations_grow_by_one(walks: list[Walk]) -> None:
    for walk in walks:
        generations = [generation for generation, _ in walk.job.launches]
        assert generations == list(range(len(generations)))


def test_in_no_walk_a_world_is_launched_beside_live_ranks_of_the_last(walks: list[Walk]) -> None:
    assert [walk.overlaps for walk in walks if walk.overlaps] == []


def test_every_walk_finishes_once_and_only_records_what_it_cost_after(walks: list[Walk]) -> None:
    for seed, walk in enumerate(walks):
        (end,) = [index for index, action in enumerate(walk.log) if isinstance(action, Finish)]
        assert {type(action) for action in walk.log[end + 1 :]} <= {Opened, Closed}, f"seed {seed}"


def test_in_every_walk_each_opened_incident_is_closed_once(walks: list[Walk]) -> None:
    left_open: list[int] = []
    for seed, walk in enumerate(walks):
        open_number: int | None = None
        for action in walk.log:
            if isinstance(action, Opened):
                assert open_number is None, f"seed {seed}: incident {open_number} is still open"
                open_number = action.incident.number
            elif isinstance(action, Closed):
                assert open_number == action.incident.number, f"seed {seed}: closed, but not open"
                open_number = None
        if open_number is not None:
            left_open.append(seed)
    assert left_open == []


def test_in_every_walk_incidents_are_numbered_from_one(walks: list[Walk]) -> None:
    for walk in walks:
        assert walk.job.opened() == list(range(1, len(walk.job.opened()) + 1))


def test_in_every_walk_the_phases_of_an_incident_that_recovered_add_up(walks: list[Walk]) -> None:
    for walk in walks:
        for incident in [closed.incident for closed in walk.all(Closed)]:
            if incident.recovered_at_s is not None and incident.started_at_s is not None:
                assert incident.lost_s == pytest.approx(incident.recovered_at_s - incident.failed_at_s)


def test_in_every_walk_an_incident_promises_a_restart_only_where_the_job_was_not_given_up(walks: list[Walk]) -> None:
    for seed, walk in enumerate(walks):
        (finish,) = walk.all(Finish)
        given_up = [closed.incident for closed in walk.all(Closed) if not closed.incident.restarted]
        if given_up and given_up[0].action != "the job ends":  # a rank asked for that, whatever else went wrong
            assert [incident.kind for incident in given_up] == [finish.kind], f"seed {seed}"


def test_in_every_walk_steps_are_counted_once(walks: list[Walk]) -> None:
    assert [seed for seed, walk in enumerate(walks) if walk.job.node.steps != walk.steps] == []
