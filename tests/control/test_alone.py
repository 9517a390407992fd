"""A whole job on one node, told of events one by one: restarts, their count, their incidents and their cost."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest
from lone_job import FOREVER_S, GRACE_S, ZYGOTE, LoneJob
from stories import every, the

from holdfast.control.acts import (
    Action,
    ClearLeftovers,
    Closed,
    Finish,
    HelpersLost,
    HelpersReady,
    KeeperLost,
    Opened,
    PrepareHelpers,
    Run,
    Signal,
    Started,
)
from holdfast.control.causes import Kind
from holdfast.control.forming import Phase
from holdfast.control.staying import ABANDON_S, ABANDON_WAITS


def kinds(actions: list[Action]) -> list[type]:
    return [type(action) for action in actions]


def preparing() -> LoneJob:
    return LoneJob()


def running() -> LoneJob:
    return LoneJob().starts()


def stopping() -> LoneJob:
    job = running()
    job.ends(0, 1, at_s=job.now_s + 0.5)
    return job


def recovering() -> LoneJob:
    """The first world failed and the second is up but has not stepped: its incident is open."""
    job = running()
    job.fails(after_s=FOREVER_S, steps=5)
    job.hears(Started(1))
    return job


def waiting() -> LoneJob:
    """A job that backs off before its second restart."""
    job = running()
    job.fails()
    job.fails()
    assert job.coordinator.phase is Phase.WAITING
    return job


def after_losing_the_helpers() -> LoneJob:
    job = running()
    job.loses_helpers(after_s=FOREVER_S)
    return job


# -- restarts ---------------------------------------------------------------------------------------------------------


def test_ready_helpers_launch_generation_zero() -> None:
    job = LoneJob()
    assert job.log == [PrepareHelpers()]
    assert kinds(job.hears(HelpersReady())) == [Run]
    assert job.launches == [(0, 0)]
    assert job.hears(HelpersReady()) == []


def test_a_job_succeeds_when_its_last_rank_ends_well() -> None:
    job = LoneJob(ranks=3).starts()
    assert job.ends(1, steps=4) == []
    assert job.ends(0, steps=6) == []
    assert job.ends(2, steps=5) == [Finish(None)]
    assert job.node.steps == 6


def test_a_restart_has_the_next_generation_and_is_charged_once() -> None:
    job = LoneJob(ranks=3).starts()
    for rank in range(3):
        job.ends(rank, 1)
    assert job.launches == [(0, 0), (1, 1)]
    assert job.spent == 1


def test_nothing_is_launched_before_the_last_rank_is_gone() -> None:
    job = LoneJob(ranks=3).starts()
    job.ends(1, 1)
    assert job.ends(0, -signal.SIGTERM) == []
    assert kinds(job.ends(2, -signal.SIGTERM)) == [ClearLeftovers, Opened, Run]


def test_two_ranks_that_die_at_once_are_one_failure() -> None:
    job = LoneJob(max_restarts=1).starts()
    job.ends(1, -signal.SIGKILL, at_s=1100.0, after_s=100.0, steps=3)
    job.ends(0, -signal.SIGSEGV, at_s=1099.5, after_s=0.0, steps=3)
    incident = the(job.log, Opened).incident
    assert (incident.rank, incident.headline) == (0, "killed by SIGSEGV")
    assert [follower.rank for follower in incident.followers] == [1]
    assert job.launches[-1] == (1, 1)


def test_an_incident_says_what_happened_and_what_is_done_about_it() -> None:
    job = running()
    job.ends(1, 1, steps=12, after_s=FOREVER_S, raised=job.raises(1))
    job.ends(0, -signal.SIGTERM, steps=11)
    incident = the(job.log, Opened).incident
    assert (incident.number, incident.generation, incident.kind) == (1, 0, Kind.ERROR)
    assert incident.what == "rank 1: ValueError: bad"
    assert (incident.pid, incident.status, incident.steps) == (101, 1, 12)
    assert (incident.restarted, incident.action) == (True, "restart 1 of 3")


def test_the_killed_rank_is_blamed_though_a_follower_reported_first() -> None:
    job = running()
    job.ends(0, 1, raised=job.raises(0, "DistBackendError: peer closed", distributed=True))
    job.ends(1, -signal.SIGKILL)
    incident = the(job.log, Opened).incident
    assert (incident.rank, incident.headline) == (1, "killed by SIGKILL")
    assert [follower.rank for follower in incident.followers] == [0]


def test_exhausted_restarts_finish_the_job_with_the_cause() -> None:
    job = LoneJob(max_restarts=1).starts()
    job.fails(after_s=FOREVER_S)
    actions = job.fails(after_s=FOREVER_S)
    assert kinds(actions) == [ClearLeftovers, Closed, Opened, Closed, Finish]
    assert the(actions, Finish) == Finish(Kind.SIGNAL, "no restart: all 1 are used")
    assert not the(actions, Opened).incident.restarted
    assert job.spent == 1


def test_without_restarts_the_first_failure_is_the_end() -> None:
    job = LoneJob(max_restarts=0).starts()
    job.ends(0, 3)
    assert the(job.ends(1, -signal.SIGTERM), Finish) == Finish(Kind.ERROR, "no restart: --max-restarts is 0")


def test_the_same_error_three_times_before_a_step_ends_the_job() -> None:
    job = LoneJob(ranks=1, max_restarts=10).starts()
    for _ in range(3):
        actions = job.ends(0, 1, after_s=FOREVER_S, raised=job.raises(0, after_s=FOREVER_S))
    finish = the(actions, Finish)
    assert finish.kind is Kind.ERROR
    assert "the same error 3 times in a row" in finish.reason
    assert job.spent == 2


def test_the_steps_of_all_worlds_are_added_up() -> None:
    job = running()
    job.fails(steps=5)
    job.ends(0, steps=10)
    job.ends(1, steps=10)
    assert job.node.steps == job.coordinator.steps == 15


# -- a rank that cannot be ended --------------------------------------------------------------------------------------


def test_a_stuck_rank_is_a_hang_and_no_restart_is_promised() -> None:
    job = stopping()
    job.timer("grace", after_s=GRACE_S)
    for _ in range(ABANDON_WAITS):
        actions = job.timer("abandon", after_s=ABANDON_S / ABANDON_WAITS)
    finish = the(actions, Finish)
    assert finish.kind is Kind.HANG
    assert finish.reason.startswith("rank 1 does not end even by SIGKILL")
    incident = the(actions, Opened).incident
    assert (incident.kind, incident.rank, incident.restarted, incident.action) == (Kind.HANG, 0, False, finish.reason)
    assert job.spent == 0
    assert job.launches == [(0, 0)]


def test_abandoning_ranks_closes_every_incident() -> None:
    job = recovering()
    job.ends(0, 1)
    job.timer("grace", after_s=GRACE_S)
    for _ in range(ABANDON_WAITS):
        job.timer("abandon", after_s=ABANDON_S / ABANDON_WAITS)
    assert job.opened() == job.closed() == [1, 2]


# -- told to stop -----------------------------------------------------------------------------------------------------


def test_a_running_job_that_is_told_to_stop_ends_with_its_ranks_and_without_an_incident() -> None:
    job = running()
    assert the(job.is_told(signal.SIGINT), Signal).signum == signal.SIGINT
    assert job.ends(0, 0) == []
    assert job.ends(1, -signal.SIGINT) == [ClearLeftovers(), Finish(Kind.PREEMPTED, "stopped by SIGINT")]
    assert job.opened() == []


def test_a_stopping_job_that_is_told_to_stop_is_not_restarted() -> None:
    job = stopping()
    job.is_told(signal.SIGHUP)
    assert job.ends(1, -signal.SIGHUP) == [ClearLeftovers(), Finish(Kind.PREEMPTED, "stopped by SIGHUP")]


@pytest.mark.parametrize("at", [preparing, waiting, after_losing_the_helpers])
def test_a_job_without_ranks_that_is_told_to_stop_ends_at_once(at: Callable[[], LoneJob]) -> None:
    job = at()
    actions = job.is_told()
    assert the(actions, Finish) == Finish(Kind.PREEMPTED, "stopped by SIGTERM")
    assert every(actions, Run) == []
    assert job.closed() == job.opened()


def test_a_recovering_job_that_is_told_to_stop_closes_its_incident() -> None:
    job = recovering()
    job.is_told()
    job.ends(0, -signal.SIGTERM)
    job.ends(1, -signal.SIGTERM)
    assert (job.ended_as, job.closed()) == (Kind.PREEMPTED, [1])


@pytest.mark.parametrize("at", [running, stopping, recovering])
def test_a_second_ctrl_c_kills(at: Callable[[], LoneJob]) -> None:
    job = at()
    job.is_told(signal.SIGINT)
    live = tuple(sorted(job.node.live))
    assert job.is_told(signal.SIGINT) == [Signal(live, signal.SIGKILL, "holdfast got SIGINT while stopping")]
    for rank in live:
        job.ends(rank, -signal.SIGKILL)
    assert job.ended_as is Kind.PREEMPTED
    assert len(job.launches) == job.generation + 1


# -- helpers and keepers ----------------------------------------------------------------------------------------------


def test_lost_helpers_are_replaced_and_then_the_world_is() -> None:
    job = running()
    actions = job.loses_helpers()
    assert sorted(kinds(actions), key=str) == sorted([ClearLeftovers, Opened, PrepareHelpers], key=str)
    incident = the(actions, Opened).incident
    assert (incident.kind, incident.what, incident.restarted) == (Kind.LAUNCHER, ZYGOTE, True)
    assert kinds(job.hears(HelpersReady())) == [Run]
    assert job.launches == [(0, 0), (1, 1)]


def test_helpers_lost_before_the_first_world_are_not_replaced() -> None:
    reason = "the janitor was killed while workers were about to start"
    assert LoneJob().hears(HelpersLost("the janitor was killed")) == [ClearLeftovers(), Finish(Kind.LAUNCHER, reason)]


def test_helpers_lost_without_restarts_end_the_job() -> None:
    job = LoneJob(max_restarts=0).starts()
    assert the(job.loses_helpers(), Finish).kind is Kind.LAUNCHER
    assert job.opened() == job.closed() == [1]


def test_helpers_lost_while_stopping_are_the_end_of_the_ranks_too() -> None:
    job = stopping()
    job.loses_helpers()
    assert the(job.log, Opened).incident.rank == 0
    assert kinds(job.hears(HelpersReady())) == [Run]
    assert job.launches == [(0, 0), (1, 1)]


@pytest.mark.parametrize("at", [running, recovering])
def test_helpers_lost_after_a_stop_request_end_the_job_as_stopped(at: Callable[[], LoneJob]) -> None:
    job = at()
    job.is_told()
    assert the(job.loses_helpers(), Finish) == Finish(Kind.PREEMPTED, "stopped by SIGTERM")
    assert job.closed() == job.opened()


@pytest.mark.parametrize("at", [after_losing_the_helpers, waiting])
def test_helpers_lost_between_two_worlds_do_not_cost_another_restart(at: Callable[[], LoneJob]) -> None:
    """No world was lost with them: the restart that waits is still the one that was charged."""
    job = at()
    spent = job.spent
    assert kinds(job.loses_helpers()) == [ClearLeftovers, PrepareHelpers]
    job.hears(HelpersReady())
    if job.coordinator.phase is Phase.WAITING:
        job.timer("backoff")
    assert job.launches[-1] == (spent, spent)


def test_helpers_lost_in_a_crash_loop_are_waited_for_when_the_wait_is_over() -> None:
    job = waiting()
    job.loses_helpers()
    assert job.timer("backoff") == []
    assert kinds(job.hears(HelpersReady())) == [Run]


def test_a_lost_keeper_ends_the_world_and_is_the_cause() -> None:
    job = running()
    job.hears(KeeperLost(0))
    job.ends(0, -signal.SIGTERM)
    actions = job.ends(1, -signal.SIGTERM)
    assert kinds(actions) == [ClearLeftovers, Opened, Run]
    incident = the(actions, Opened).incident
    assert (incident.kind, incident.rank, incident.what) == (Kind.LAUNCHER, None, "the store keeper was killed")


# -- incidents --------------------------------------------------------------------------------------------------------


def test_an_incident_closes_when_all_ranks_have_stepped_and_the_first_steps_of_a_job_close_nothing() -> None:
    assert running().steps(0, 1) == []
    job = recovering()
    assert job.steps(1) == []
    assert kinds(job.steps(0)) == [Closed]


def test_an_incident_closes_when_the_job_succeeds_without_a_step() -> None:
    job = recovering()
    job.ends(0)
    assert kinds(job.ends(1)) == [Closed, Finish]


def test_the_phases_of_an_incident_add_up_to_what_was_lost() -> None:
    job = running()
    job.ends(0, 1, after_s=FOREVER_S, raised=job.raises(0))  # raised a second after the last event
    failed_at_s = job.now_s - FOREVER_S + 1.0
    job.ends(1, -signal.SIGTERM, after_s=3.0)
    job.hears(Started(1), after_s=4.0)
    job.steps(0, 1, after_s=2.5)
    incident = the(job.log, Closed).incident
    assert incident.phases_s() == {"stop": FOREVER_S - 1.0 + 3.0, "wait": 0.0, "start": 4.0, "first step": 5.0}
    assert incident.lost_s == job.now_s - failed_at_s


def test_the_wait_of_a_backoff_is_a_phase_of_its_own() -> None:
    job = waiting()
    job.timer("backoff", after_s=0.5)
    job.hears(Started(2), after_s=0.25)
    job.steps(0, 1, after_s=1.0)
    phases = every(job.log, Closed)[-1].incident.phases_s()
    assert phases == {"stop": 1.0, "wait": 0.5, "start": 0.25, "first step": 2.0}


def test_a_failure_in_a_recovering_world_closes_the_former_incident_first() -> None:
    job = recovering()
    job.steps(0)
    job.ends(1, -signal.SIGKILL, after_s=FOREVER_S)
    actions = job.ends(0, -signal.SIGTERM)
    assert kinds(actions) == [ClearLeftovers, Closed, Opened, Run]
    former, latter = the(actions, Closed).incident, the(actions, Opened).incident
    assert (former.number, former.recovered_at_s) == (1, None)
    assert list(former.phases_s()) == ["stop", "wait", "start", "failed again"]
    assert (latter.number, latter.generation) == (2, 1)


# -- crash loops ------------------------------------------------------------------------------------------------------


def test_the_second_early_failure_in_a_row_waits_and_nothing_but_its_timer_ends_the_wait() -> None:
    job = waiting()
    assert job.hears(HelpersReady()) == []
    assert job.timer("grace") == []
    assert kinds(job.timer("backoff")) == [Run]
    assert job.launches == [(0, 0), (1, 1), (2, 2)]


def test_a_world_that_steps_ends_the_crash_loop() -> None:
    job = waiting()
    job.timer("backoff")
    assert kinds(job.fails(steps=1)) == [ClearLeftovers, Closed, Opened, Run]
