"""The job's state machine, told of events one by one: what it orders, what it records, what it takes no notice of."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable, Iterator
from typing import TypeVar

import pytest

from holdfast.control import job as jobs
from holdfast.control.causes import Kind, RankExit
from holdfast.control.incidents import Incident
from holdfast.control.job import (
    ABANDON_S,
    Action,
    ClearLeftovers,
    Closed,
    Event,
    Exited,
    Finish,
    HelpersLost,
    HelpersReady,
    KeeperLost,
    Launch,
    Opened,
    Phase,
    PrepareHelpers,
    Signal,
    Started,
    Stepped,
    StopRequested,
    Timer,
    TimerFired,
)
from holdfast.wire.messages import Raised

A = TypeVar("A")

GRACE_S = 30.0
FOREVER_S = 60.0  # longer than a crash loop's worlds live


class Story:
    """A job and its clock. Every event comes `after_s` the one before; nothing else moves time."""

    def __init__(self, ranks: int = 2, max_restarts: int = 3) -> None:
        self.now_s = 1000.0
        self.job, self.log = jobs.begin(ranks, max_restarts, GRACE_S)

    def hears(self, event: Event, after_s: float = 1.0) -> list[Action]:
        self.now_s += after_s
        self.job, actions = jobs.advance(self.job, self.now_s, event)
        self.log = [*self.log, *actions]
        return actions

    def starts(self) -> Story:
        self.hears(HelpersReady())
        self.hears(Started(self.job.generation))
        return self

    def steps(self, *ranks: int, after_s: float = 1.0) -> list[Action]:
        actions: list[Action] = []
        for rank in ranks:
            actions += self.hears(Stepped(rank, self.job.generation, self.now_s + after_s), after_s)
        return actions

    def ends(
        self,
        rank: int,
        status: int = 0,
        after_s: float = 1.0,
        at_s: float | None = None,
        steps: int = 0,
        raised: Raised | None = None,
    ) -> list[Action]:
        at_s = self.now_s + after_s if at_s is None else at_s
        exit = RankExit(rank, 100 + rank, status, at_s, steps, raised)
        return self.hears(Exited(self.job.generation, exit), after_s)

    def is_told(self, signum: int = signal.SIGTERM) -> list[Action]:
        return self.hears(StopRequested(signum))

    def timer(self, name: str, after_s: float = 1.0) -> list[Action]:
        return self.hears(TimerFired(name, self.job.generation), after_s)

    def logged(self, kind: type[A]) -> list[A]:
        return every(self.log, kind)

    def raises(
        self, rank: int, headline: str = "ValueError: bad", after_s: float = 1.0, distributed: bool = False
    ) -> Raised:
        """A rank's report of an exception `after_s` from now."""
        at_s = self.now_s + after_s
        return Raised(rank, self.job.generation, at_s, headline, headline, "train.py:7", distributed=distributed)


def every(actions: list[Action], kind: type[A]) -> list[A]:
    return [action for action in actions if isinstance(action, kind)]


def the(actions: list[Action], kind: type[A]) -> A:
    (found,) = every(actions, kind)
    return found


def kinds(actions: list[Action]) -> list[type]:
    return [type(action) for action in actions]


def recovering() -> Story:
    """A job whose first world failed and whose second is up but has not stepped: its incident is open."""
    story = Story().starts()
    story.ends(0, -signal.SIGKILL, after_s=FOREVER_S, steps=5)
    story.ends(1, -signal.SIGTERM)
    story.hears(Started(1))
    return story


def waiting() -> Story:
    """A job that backs off before its second restart."""
    story = Story().starts()
    for _ in range(2):
        story.ends(0, 1)
        story.ends(1, -signal.SIGTERM)
    assert story.job.phase is Phase.WAITING
    return story


# -- a job that goes well ---------------------------------------------------------------------------------------------


def test_a_job_begins_by_preparing_its_helpers() -> None:
    assert Story().log == [PrepareHelpers()]


def test_ready_helpers_launch_generation_zero() -> None:
    assert Story().hears(HelpersReady()) == [Launch(generation=0, restart_count=0)]


def test_helpers_that_are_ready_a_second_time_launch_nothing() -> None:
    assert Story().starts().hears(HelpersReady()) == []


def test_a_job_succeeds_when_its_last_rank_ends_well() -> None:
    story = Story(ranks=3).starts()
    assert story.ends(1) == []
    assert story.ends(0) == []
    assert story.ends(2) == [Finish(None)]
    assert story.job.phase is Phase.DONE


def test_the_steps_of_a_job_are_those_of_its_farthest_rank() -> None:
    story = Story().starts()
    story.ends(0, steps=7)
    story.ends(1, steps=9)
    assert story.job.steps == 9


# -- a rank fails -----------------------------------------------------------------------------------------------------


def test_when_a_rank_fails_the_others_get_sigterm_and_a_grace_timer() -> None:
    story = Story(ranks=3).starts()
    actions = story.ends(1, -signal.SIGKILL)
    assert actions == [
        Signal((0, 2), signal.SIGTERM, "rank 1 failed: killed by SIGKILL"),
        Timer("grace", 0, GRACE_S),
    ]


def test_ranks_that_ended_well_before_are_not_signalled() -> None:
    story = Story(ranks=3).starts()
    story.ends(0)
    assert the(story.ends(1, 1), Signal).ranks == (2,)


def test_nothing_is_launched_before_the_last_rank_is_gone() -> None:
    story = Story(ranks=3).starts()
    story.ends(1, 1)
    assert story.ends(0, -signal.SIGTERM) == []
    assert kinds(story.ends(2, -signal.SIGTERM)) == [ClearLeftovers, Opened, Launch]


def test_a_restart_has_the_next_generation_and_is_charged_once() -> None:
    story = Story(ranks=3).starts()
    for rank in range(3):
        story.ends(rank, 1)
    assert story.logged(Launch) == [Launch(0, 0), Launch(1, 1)]
    assert story.job.history.spent == 1


def test_a_single_rank_that_fails_is_restarted_without_any_signal() -> None:
    story = Story(ranks=1).starts()
    assert kinds(story.ends(0, 1)) == [ClearLeftovers, Opened, Launch]
    assert story.logged(Signal) == []


def test_two_ranks_that_die_at_once_are_one_failure() -> None:
    story = Story(ranks=2, max_restarts=1).starts()
    story.ends(1, -signal.SIGKILL, at_s=1100.0, after_s=100.0, steps=3)
    story.ends(0, -signal.SIGSEGV, at_s=1099.5, after_s=0.0, steps=3)
    incident = the(story.log, Opened).incident
    assert (incident.rank, incident.headline) == (0, "killed by SIGSEGV")
    assert [follower.rank for follower in incident.followers] == [1]
    assert story.logged(Launch)[-1] == Launch(1, 1)


def test_a_rank_that_ends_because_it_was_told_to_is_no_follower() -> None:
    story = Story().starts()
    story.ends(0, 1)
    story.ends(1, -signal.SIGTERM)
    assert the(story.log, Opened).incident.followers == ()


def test_an_incident_says_what_happened_and_what_is_done_about_it() -> None:
    story = Story().starts()
    story.ends(1, 1, steps=12, after_s=FOREVER_S, raised=story.raises(1))
    story.ends(0, -signal.SIGTERM, steps=11)
    incident = the(story.log, Opened).incident
    assert incident.number == 1
    assert incident.generation == 0
    assert incident.kind is Kind.ERROR
    assert incident.what == "rank 1: ValueError: bad"
    assert (incident.pid, incident.status, incident.steps) == (101, 1, 12)
    assert incident.restarted
    assert incident.action == "restart 1 of 3"


def test_the_killed_rank_is_blamed_though_a_follower_reported_first() -> None:
    story = Story().starts()
    died_at_s = story.now_s + 0.5
    story.ends(0, 1, raised=story.raises(0, "DistBackendError: peer closed", distributed=True))
    story.ends(1, -signal.SIGKILL, at_s=died_at_s)
    incident = the(story.log, Opened).incident
    assert (incident.rank, incident.headline) == (1, "killed by SIGKILL")
    assert [follower.rank for follower in incident.followers] == [0]


def test_a_killed_rank_is_blamed_though_the_kernel_takes_its_end_apart_until_after_the_stop() -> None:
    """A process that holds a GPU closes its sockets long before it can be reaped. Only SIGTERM was sent so far, so a
    rank that ended by SIGKILL did not end because of us."""
    story = Story().starts()
    story.ends(0, 1, raised=story.raises(0, "DistBackendError: peer closed", distributed=True))
    story.ends(1, -signal.SIGKILL)
    assert the(story.log, Opened).incident.rank == 1


def test_an_exception_that_a_rank_raises_because_it_was_told_to_stop_is_not_the_cause() -> None:
    story = Story().starts()
    story.ends(0, 1, raised=story.raises(0, "DistBackendError: network is down", distributed=True))
    story.ends(1, 1, raised=story.raises(1, "Interrupted: SIGTERM"))
    incident = the(story.log, Opened).incident
    assert incident.headline == "DistBackendError: network is down"


def test_exhausted_restarts_finish_the_job_with_the_cause() -> None:
    story = Story(max_restarts=1).starts()
    for _ in range(2):
        story.ends(0, -signal.SIGKILL, after_s=FOREVER_S)
        actions = story.ends(1, -signal.SIGTERM)
    assert kinds(actions) == [ClearLeftovers, Closed, Opened, Closed, Finish]
    assert the(actions, Finish) == Finish(Kind.SIGNAL, "no restart: all 1 are used")
    assert not the(actions, Opened).incident.restarted
    assert story.job.history.spent == 1


def test_without_restarts_the_first_failure_is_the_end() -> None:
    story = Story(max_restarts=0).starts()
    story.ends(0, 3)
    assert the(story.ends(1, -signal.SIGTERM), Finish) == Finish(Kind.ERROR, "no restart: --max-restarts is 0")


def test_the_same_error_three_times_before_a_step_ends_the_job() -> None:
    story = Story(ranks=1, max_restarts=10).starts()
    for _ in range(2):
        story.ends(0, 1, after_s=FOREVER_S, raised=story.raises(0, after_s=FOREVER_S))
    finish = the(story.ends(0, 1, after_s=FOREVER_S, raised=story.raises(0, after_s=FOREVER_S)), Finish)
    assert finish.kind is Kind.ERROR
    assert "the same error 3 times in a row" in finish.reason
    assert story.job.history.spent == 2


def test_the_steps_of_all_worlds_are_added_up() -> None:
    story = Story().starts()
    story.ends(0, 1, steps=4)
    story.ends(1, -signal.SIGTERM, steps=5)
    story.ends(0, 0, steps=10)
    story.ends(1, 0, steps=10)
    assert story.job.steps == 15


# -- ranks that do not go ---------------------------------------------------------------------------------------------


def test_ranks_that_outstay_the_grace_are_killed_and_then_abandoned() -> None:
    story = Story(ranks=3).starts()
    story.ends(0, 1)
    story.ends(2, -signal.SIGTERM)
    assert story.timer("grace", after_s=GRACE_S) == [
        Signal((1,), signal.SIGKILL, "still there 30 s after being told to stop"),
        Timer("abandon", 0, ABANDON_S),
    ]
    finish = the(story.timer("abandon", after_s=ABANDON_S), Finish)
    assert finish.kind is Kind.HANG
    assert finish.reason.startswith("rank 1 does not end even by SIGKILL")


def test_a_rank_that_goes_when_killed_is_no_failure_of_its_own() -> None:
    story = Story().starts()
    story.ends(0, 1)
    story.timer("grace", after_s=GRACE_S)
    story.ends(1, -signal.SIGKILL)
    incident = the(story.log, Opened).incident
    assert (incident.rank, incident.followers) == (0, ())
    assert story.logged(Launch)[-1] == Launch(1, 1)


@pytest.mark.parametrize("name", ["grace", "abandon", "backoff"])
def test_a_timer_of_the_last_generation_is_ignored(name: str) -> None:
    story = recovering()
    story.ends(0, 1)
    assert story.hears(TimerFired(name, 0)) == []


@pytest.mark.parametrize("name", ["grace", "abandon", "backoff"])
def test_a_timer_that_outlives_its_purpose_is_ignored(name: str) -> None:
    assert Story().starts().timer(name) == []


def test_abandoning_ranks_closes_the_open_incident() -> None:
    story = recovering()
    story.ends(0, 1)
    story.timer("grace", after_s=GRACE_S)
    story.timer("abandon", after_s=ABANDON_S)
    assert len(story.logged(Closed)) == len(story.logged(Opened))


# -- stale news -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "stale",
    [
        Exited(0, RankExit(0, 100, 1, 0.0)),
        Exited(0, RankExit(0, 100, 0, 0.0)),
        Started(0),
        Stepped(0, 0, 0.0),
        KeeperLost(0),
    ],
    ids=lambda event: type(event).__name__,
)
def test_news_of_the_last_generation_is_ignored(stale: Event) -> None:
    story = recovering()
    before = story.job
    assert story.hears(stale) == []
    assert story.job == before


@pytest.mark.parametrize("between", [waiting, lambda: after_losing_the_helpers()], ids=["waiting", "preparing"])
def test_the_end_of_a_rank_that_is_not_live_is_ignored(between: Callable[[], Story]) -> None:
    story = between()
    assert story.ends(0, 0) == []
    assert story.job.phase is not Phase.DONE


def test_a_job_that_is_done_takes_no_notice_of_anything() -> None:
    story = Story(ranks=1).starts()
    story.ends(0)
    done = story.job
    for event in (HelpersReady(), HelpersLost("x"), KeeperLost(0), StopRequested(15), TimerFired("grace", 0)):
        assert story.hears(event) == []
    assert story.ends(0, 1) == []
    assert story.job == done


# -- told to stop -----------------------------------------------------------------------------------------------------


def preparing() -> Story:
    return Story()


def running() -> Story:
    return Story().starts()


def stopping() -> Story:
    story = Story().starts()
    story.ends(0, 1)
    return story


def after_losing_the_helpers() -> Story:
    story = Story().starts()
    story.hears(HelpersLost("the zygote was killed"), after_s=FOREVER_S)
    assert story.job.phase is Phase.PREPARING
    return story


def test_a_running_job_that_is_told_to_stop_passes_the_signal_on_and_ends_with_its_ranks() -> None:
    story = running()
    assert story.is_told(signal.SIGINT) == [
        Signal((0, 1), signal.SIGINT, "holdfast got SIGINT"),
        Timer("grace", 0, GRACE_S),
    ]
    assert story.ends(0, 0) == []
    assert story.ends(1, -signal.SIGINT) == [ClearLeftovers(), Finish(Kind.PREEMPTED, "stopped by SIGINT")]


def test_a_stopping_job_that_is_told_to_stop_passes_the_signal_on_and_is_not_restarted() -> None:
    story = stopping()
    assert story.is_told(signal.SIGHUP) == [Signal((1,), signal.SIGHUP, "holdfast got SIGHUP")]
    assert story.ends(1, -signal.SIGHUP) == [ClearLeftovers(), Finish(Kind.PREEMPTED, "stopped by SIGHUP")]


@pytest.mark.parametrize("between", [preparing, waiting, after_losing_the_helpers])
def test_a_job_without_ranks_that_is_told_to_stop_ends_at_once(between: Callable[[], Story]) -> None:
    story = between()
    actions = story.is_told()
    assert actions[-1] == Finish(Kind.PREEMPTED, "stopped by SIGTERM")
    assert len(story.logged(Closed)) == len(story.logged(Opened))
    assert every(actions, Launch) == []


def test_a_recovering_job_that_is_told_to_stop_closes_its_incident() -> None:
    story = recovering()
    story.is_told()
    story.ends(0, -signal.SIGTERM)
    assert kinds(story.ends(1, -signal.SIGTERM)) == [ClearLeftovers, Closed, Finish]


@pytest.mark.parametrize("at", [running, stopping, recovering])
def test_a_second_ctrl_c_kills(at: Callable[[], Story]) -> None:
    story = at()
    story.is_told(signal.SIGINT)
    live = tuple(sorted(story.job.live))
    assert story.is_told(signal.SIGINT) == [Signal(live, signal.SIGKILL, "holdfast got SIGINT while stopping")]
    for rank in live:
        actions = story.ends(rank, -signal.SIGKILL)
    assert actions[-1] == Finish(Kind.PREEMPTED, "stopped by SIGINT")
    assert len(story.logged(Launch)) == story.job.generation + 1


def test_a_repeated_sigterm_is_passed_on_and_cuts_nothing_short() -> None:
    story = running()
    story.is_told()
    assert story.is_told() == [Signal((0, 1), signal.SIGTERM, "holdfast got SIGTERM while stopping")]
    assert story.job.phase is Phase.STOPPING


def test_ranks_that_outlive_a_stop_are_killed_after_the_grace() -> None:
    story = running()
    story.is_told()
    story.ends(0, -signal.SIGTERM)
    assert the(story.timer("grace"), Signal) == Signal(
        (1,), signal.SIGKILL, "still there 30 s after being told to stop"
    )


# -- helpers and keepers ----------------------------------------------------------------------------------------------


def test_lost_helpers_are_replaced_and_then_the_world_is() -> None:
    story = running()
    actions = story.hears(HelpersLost("the zygote was killed"))
    assert kinds(actions) == [ClearLeftovers, Opened, PrepareHelpers]
    incident = the(actions, Opened).incident
    assert (incident.kind, incident.what) == (Kind.LAUNCHER, "the zygote was killed")
    assert story.hears(HelpersReady()) == [Launch(1, 1)]


def test_helpers_lost_before_the_first_world_are_not_replaced() -> None:
    story = preparing()
    assert story.hears(HelpersLost("the janitor was killed")) == [
        ClearLeftovers(),
        Finish(Kind.LAUNCHER, "the janitor was killed while workers were about to start"),
    ]


def test_helpers_lost_without_restarts_end_the_job() -> None:
    story = Story(max_restarts=0).starts()
    actions = story.hears(HelpersLost("the zygote was killed"))
    assert kinds(actions) == [ClearLeftovers, Opened, Closed, Finish]
    assert the(actions, Finish).kind is Kind.LAUNCHER


def test_helpers_lost_while_stopping_are_the_end_of_the_ranks_too() -> None:
    story = stopping()
    story.hears(HelpersLost("the zygote was killed"))
    assert story.job.live == frozenset()
    assert story.hears(HelpersReady()) == [Launch(1, 1)]


def test_helpers_lost_after_a_stop_request_end_the_job_as_stopped() -> None:
    story = running()
    story.is_told()
    assert the(story.hears(HelpersLost("the zygote was killed")), Finish) == Finish(
        Kind.PREEMPTED, "stopped by SIGTERM"
    )


def test_helpers_lost_after_a_stop_request_close_the_open_incident() -> None:
    story = recovering()
    story.is_told()
    story.hears(HelpersLost("the zygote was killed"))
    assert len(story.logged(Closed)) == len(story.logged(Opened))


def test_helpers_lost_twice_in_a_row_cost_a_restart_each_and_close_the_first_incident() -> None:
    story = after_losing_the_helpers()
    spent = story.job.history.spent
    actions = story.hears(HelpersLost("the zygote was killed"))
    assert kinds(actions) == [ClearLeftovers, Closed, Opened, PrepareHelpers]
    assert story.job.history.spent == spent + 1


def test_helpers_lost_twice_in_a_row_do_not_count_the_last_worlds_steps_twice() -> None:
    story = running()
    story.ends(0, 0, steps=5)
    story.hears(HelpersLost("the zygote was killed"))
    story.hears(HelpersLost("the zygote was killed"))
    assert story.job.steps == 5


def test_helpers_lost_during_a_backoff_do_not_cost_another_restart() -> None:
    """No world was lost with them: the restart that waits is still the one that was charged."""
    story = waiting()
    spent = story.job.history.spent
    assert story.hears(HelpersLost("the zygote was killed")) == [ClearLeftovers()]
    assert story.hears(TimerFired("backoff", story.job.generation)) == [PrepareHelpers()]
    assert story.hears(HelpersReady()) == [Launch(2, spent)]


def test_a_lost_keeper_ends_the_world_and_is_the_cause() -> None:
    story = running()
    assert story.hears(KeeperLost(0)) == [
        Signal((0, 1), signal.SIGTERM, "the store keeper was killed"),
        Timer("grace", 0, GRACE_S),
    ]
    story.ends(0, -signal.SIGTERM)
    actions = story.ends(1, -signal.SIGTERM)
    assert kinds(actions) == [ClearLeftovers, Opened, Launch]
    incident = the(actions, Opened).incident
    assert (incident.kind, incident.rank, incident.what) == (Kind.LAUNCHER, None, "the store keeper was killed")


def test_a_keeper_lost_while_stopping_is_not_the_cause() -> None:
    story = stopping()
    assert story.hears(KeeperLost(0)) == []
    story.ends(1, -signal.SIGTERM)
    assert the(story.log, Opened).incident.rank == 0


# -- incidents --------------------------------------------------------------------------------------------------------


def test_an_incident_closes_when_all_ranks_have_stepped() -> None:
    story = recovering()
    assert story.steps(1) == []
    assert kinds(story.steps(0)) == [Closed]
    assert story.job.incident is None


def test_the_first_steps_of_a_job_close_nothing() -> None:
    assert Story().starts().steps(0, 1) == []


def test_an_incident_closes_when_the_job_succeeds_without_a_step() -> None:
    story = recovering()
    story.ends(0)
    assert kinds(story.ends(1)) == [Closed, Finish]


def test_the_phases_of_an_incident_add_up_to_what_was_lost() -> None:
    story = Story().starts()
    story.ends(0, 1, after_s=FOREVER_S, raised=story.raises(0))  # raised a second after the last event
    failed_at_s = story.now_s - FOREVER_S + 1.0
    story.ends(1, -signal.SIGTERM, after_s=3.0)
    story.hears(Started(1), after_s=4.0)
    story.steps(0, 1, after_s=2.5)
    incident = the(story.log, Closed).incident
    assert incident.phases_s() == {"stop": FOREVER_S - 1.0 + 3.0, "wait": 0.0, "start": 4.0, "first step": 5.0}
    assert incident.lost_s == story.now_s - failed_at_s
    assert story.job.lost_s == incident.lost_s


def test_the_wait_of_a_backoff_is_a_phase_of_its_own() -> None:
    story = waiting()
    story.timer("backoff", after_s=0.5)
    story.hears(Started(2), after_s=0.25)
    story.steps(0, 1, after_s=1.0)
    assert story.logged(Closed)[-1].incident.phases_s() == {"stop": 1.0, "wait": 0.5, "start": 0.25, "first step": 2.0}


def test_a_failure_in_a_recovering_world_closes_the_former_incident_first() -> None:
    story = recovering()
    story.steps(0)
    story.ends(1, -signal.SIGKILL, after_s=FOREVER_S)
    actions = story.ends(0, -signal.SIGTERM)
    assert kinds(actions) == [ClearLeftovers, Closed, Opened, Launch]
    former, latter = the(actions, Closed).incident, the(actions, Opened).incident
    assert (former.number, former.recovered_at_s) == (1, None)
    assert (latter.number, latter.generation) == (2, 1)
    assert story.job.incident is not None
    assert story.job.incident.number == 2


def test_the_time_lost_of_a_job_is_that_of_all_its_incidents() -> None:
    story = recovering()
    story.ends(0, 1, after_s=FOREVER_S)
    story.ends(1, -signal.SIGTERM)
    story.hears(Started(2))
    story.steps(0, 1)
    incidents: list[Incident] = [closed.incident for closed in story.logged(Closed)]
    assert len(incidents) == 2
    assert story.job.lost_s == sum(incident.lost_s for incident in incidents)


# -- crash loops ------------------------------------------------------------------------------------------------------


def test_the_second_early_failure_in_a_row_waits_and_the_next_one_twice_as_long() -> None:
    story = Story(ranks=1, max_restarts=9).starts()
    assert kinds(story.ends(0, 1)) == [ClearLeftovers, Opened, Launch]
    assert the(story.ends(0, 1), Timer) == Timer("backoff", 1, 0.5)
    assert story.timer("backoff") == [Launch(2, 2)]
    assert the(story.ends(0, 1), Timer) == Timer("backoff", 2, 1.0)


def test_a_world_that_steps_ends_the_crash_loop() -> None:
    story = Story(ranks=1, max_restarts=9).starts()
    story.ends(0, 1)
    story.ends(0, 1)
    story.timer("backoff")
    assert kinds(story.ends(0, 1, steps=1)) == [ClearLeftovers, Closed, Opened, Launch]


def test_nothing_but_its_timer_ends_a_backoff() -> None:
    story = waiting()
    assert story.hears(HelpersReady()) == []
    assert story.timer("grace") == []
    assert story.timer("backoff") == [Launch(2, 2)]


# -- random walks -----------------------------------------------------------------------------------------------------

WALKS = 3000
EVENTS = 60


class Walk:
    """A random but possible life: ranks end only while they live, timers fire once, and helpers die with all ranks.

    Now and then it brings old news of the last generation, and it goes on after the job is done."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._ranks = self._random.randint(1, 4)
        self.limit = self._random.randint(0, 4)
        self._now_s = 50.0
        self._live: set[int] = set()
        self._unstepped: set[int] = set()
        self._unstarted = False
        self._helpers_starting = False
        self._generation = -1
        self._timers: list[TimerFired] = []
        self._steps: dict[int, int] = {}  # by generation
        self.overlaps: list[Launch] = []
        self.most_spent = 0
        self.job, actions = jobs.begin(self._ranks, self.limit, GRACE_S)
        self.log: list[Action] = []
        self._do(actions)
        for _ in range(EVENTS):
            self._advance(self._some_event())
        self._bring_to_an_end()

    @property
    def steps(self) -> int:
        return sum(self._steps.values())

    def all(self, kind: type[A]) -> list[A]:
        return every(self.log, kind)

    def _advance(self, event: Event) -> None:
        self._now_s += self._random.choice([0.0, 0.01, 0.5, 5.0, 40.0])
        self.job, actions = jobs.advance(self.job, self._now_s, event)
        self.most_spent = max(self.most_spent, self.job.history.spent)
        self._do(actions)

    def _do(self, actions: list[Action]) -> None:
        self.log += actions
        for action in actions:
            match action:
                case PrepareHelpers():
                    self._helpers_starting = True
                case Timer(name=name, generation=generation):
                    self._timers.append(TimerFired(name, generation))
                case Launch(generation=generation):
                    if self._live:
                        self.overlaps.append(action)
                    self._generation = generation
                    self._live = set(range(self._ranks))
                    self._unstepped = set(self._live)
                    self._unstarted = True

    def _some_event(self) -> Event:
        choices = list(self._possible())
        (pick,) = self._random.choices([make for _, make in choices], [weight for weight, _ in choices])
        return pick()

    def _possible(self) -> Iterator[tuple[float, Callable[[], Event]]]:
        generation = self._generation
        yield 0.15, lambda: StopRequested(self._random.choice([signal.SIGTERM, signal.SIGINT]))
        yield 0.2, self._lose_helpers
        if self._helpers_starting:
            yield 8.0, self._ready_helpers
        if self._live:
            yield 1.0 * len(self._live), self._end_a_rank
            yield 0.1, lambda: KeeperLost(generation)
        if self._unstarted:
            yield 2.0, self._start
        if self._live & self._unstepped:
            yield 2.0, self._step
        if self._timers:
            yield 0.5, lambda: self._timers.pop(self._random.randrange(len(self._timers)))
        if generation > 0:
            yield 0.3, self._old_news

    def _lose_helpers(self) -> Event:
        self._live.clear()
        self._helpers_starting = self._unstarted = False
        return HelpersLost("the zygote was killed")

    def _ready_helpers(self) -> Event:
        self._helpers_starting = False
        return HelpersReady()

    def _start(self) -> Event:
        self._unstarted = False
        return Started(self._generation)

    def _step(self) -> Event:
        rank = self._random.choice(sorted(self._live & self._unstepped))
        self._unstepped.discard(rank)
        return Stepped(rank, self._generation, self._now_s)

    def _end_a_rank(self, status: int | None = None) -> Event:
        rank = self._random.choice(sorted(self._live))
        self._live.discard(rank)
        if status is None:
            status = self._random.choice([0, 0, 0, 1, 1, -signal.SIGKILL, -signal.SIGTERM, -signal.SIGABRT])
        at_s = self._now_s - self._random.choice([0.0, 0.1])
        raised = None
        if status == 1 and self._random.random() < 0.7:
            backend = self._random.random() < 0.5
            raised = Raised(rank, self._generation, at_s, "E: bad", "E: bad", "train.py:1", distributed=backend)
        steps = 0 if rank in self._unstepped else self._random.randint(1, 9)
        if self.job.phase is not Phase.DONE:
            self._steps[self._generation] = max(steps, self._steps.get(self._generation, 0))
        return Exited(self._generation, RankExit(rank, 100 + rank, status, at_s, steps, raised))

    def _old_news(self) -> Event:
        old = self._random.randrange(self._generation)
        rank = self._random.randrange(self._ranks)
        news: list[Event] = [
            Exited(old, RankExit(rank, 1, self._random.choice([0, 1, -9]), self._now_s)),
            Started(old),
            Stepped(rank, old, self._now_s),
            KeeperLost(old),
            TimerFired(self._random.choice(["grace", "abandon", "backoff"]), old),
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
    assert {type(action) for walk in walks for action in walk.log} == set(jobs.Action.__args__)
    ends = {finish.kind for walk in walks for finish in walk.all(Finish)}
    assert ends >= {None, Kind.ERROR, Kind.BACKEND, Kind.SIGNAL, Kind.LAUNCHER, Kind.PREEMPTED, Kind.HANG}


def test_no_walk_charges_more_restarts_than_its_limit(walks: list[Walk]) -> None:
    for walk in walks:
        assert walk.most_spent <= walk.limit
        assert all(launch.restart_count <= walk.limit for launch in walk.all(Launch))


def test_in_every_walk_generations_grow_by_one(walks: list[Walk]) -> None:
    for walk in walks:
        generations = [launch.generation for launch in walk.all(Launch)]
        assert generations == list(range(len(generations)))


def test_in_no_walk_a_world_is_launched_beside_live_ranks_of_the_last(walks: list[Walk]) -> None:
    assert [walk.overlaps for walk in walks if walk.overlaps] == []


def test_every_walk_finishes_once_and_does_nothing_after(walks: list[Walk]) -> None:
    for walk in walks:
        assert [index for index, action in enumerate(walk.log) if isinstance(action, Finish)] == [len(walk.log) - 1]


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
        numbers = [opened.incident.number for opened in walk.all(Opened)]
        assert numbers == list(range(1, len(numbers) + 1))


def test_in_every_walk_the_time_lost_is_that_of_the_closed_incidents(walks: list[Walk]) -> None:
    for walk in walks:
        assert walk.job.lost_s == pytest.approx(sum(closed.incident.lost_s for closed in walk.all(Closed)))
        for closed in walk.all(Closed):
            incident = closed.incident
            if incident.recovered_at_s is not None and incident.started_at_s is not None:
                assert incident.lost_s == pytest.approx(incident.recovered_at_s - incident.failed_at_s)


def test_in_every_walk_steps_are_counted_once(walks: list[Walk]) -> None:
    assert [seed for seed, walk in enumerate(walks) if walk.job.steps != walk.steps] == []
