"""Ranks that stay: they leave a world that is over, and are ranks of the next one."""

from __future__ import annotations

import signal

import pytest
from lone_job import FOREVER_S, LoneJob
from scripted import Job, killed, told
from stories import GRACE_S, Story, every, the

from holdfast.control import protocol
from holdfast.control.acts import (
    Bequeathed,
    Closed,
    Leave,
    Left,
    Opened,
    Run,
    Signal,
    Started,
    Stays,
    StopRequested,
    Stumbled,
    Timer,
)
from holdfast.control.causes import Kind
from holdfast.control.membership import Policy
from holdfast.control.staying import ABANDON_WAITS, LEAST_S, LEAVE_S, LONGER, TRIES


def training(ranks: int = 3, max_restarts: int = 10) -> LoneJob:
    """A world whose ranks step, and can stay."""
    job = LoneJob(ranks, max_restarts).starts()
    return stays(job, *range(ranks))


def stays(job: LoneJob, *ranks: int) -> LoneJob:
    for rank in ranks:
        job.hears(Stays(job.generation, rank), 0.0)
    job.steps(*ranks)
    return job


def leaves(job: LoneJob, *ranks: int, steps: int = 5) -> None:
    for rank in ranks:
        job.hears(Left(job.generation, rank, steps=steps), 0.01)


def test_the_others_leave_and_one_process_is_new() -> None:
    job = training()
    actions = job.ends(1, -signal.SIGKILL, after_s=FOREVER_S, steps=5)
    assert the(actions, Leave).ranks == (0, 2) and not every(actions, Signal)
    leaves(job, 0, 2)
    assert [(world.generation, world.stayed) for world in job.worlds] == [(0, False), (1, True)]
    job.hears(Started(1))
    job.steps(0, 1, 2)
    assert job.opened() == job.closed() == [1] and job.spent == 1
    assert job.coordinator.steps == 5


def test_those_that_cannot_are_ended_and_those_that_can_leave() -> None:
    job = LoneJob(3, 10).starts()
    stays(job, 0)
    actions = job.ends(2, -signal.SIGKILL, after_s=FOREVER_S)
    assert the(actions, Leave).ranks == (0,)
    assert the(actions, Signal).ranks == (1,) and the(actions, Signal).signum == signal.SIGTERM
    leaves(job, 0)
    assert len(job.worlds) == 1
    job.ends(1, -signal.SIGTERM)
    assert job.worlds[-1].stayed


def test_one_that_cannot_any_more_is_ended() -> None:
    job = training()
    job.hears(Stays(0, 2, stays=False), 0.0)
    actions = job.ends(1, -signal.SIGKILL, after_s=FOREVER_S)
    assert the(actions, Leave).ranks == (0,) and the(actions, Signal).ranks == (2,)


def test_one_that_has_left_its_state_need_not_get_out() -> None:
    job = training(2)
    job.ends(0, -signal.SIGKILL, after_s=FOREVER_S)
    assert the(job.hears(Bequeathed(0, 1)), Signal).ranks == (1,)
    job.ends(1, -signal.SIGKILL)
    assert [world.stayed for world in job.worlds] == [False, False]
    assert job.hears(Bequeathed(0, 1)) == [], "of a world that is over"


def test_one_that_does_not_get_out_is_killed() -> None:
    job = training()
    job.ends(1, -signal.SIGKILL, after_s=FOREVER_S)
    leaves(job, 2)
    killed = the(job.timer("leave", LEAVE_S), Signal)
    assert killed.ranks == (0,) and killed.signum == signal.SIGKILL
    assert "still in its world" in killed.why
    job.ends(0, -signal.SIGKILL)
    assert job.worlds[-1].stayed


def test_a_collective_that_fails_for_no_reason_that_is_seen_is_a_reason() -> None:
    job = training()
    [timer] = job.hears(Stumbled(0, 2, job.now_s, "connection closed by peer"), FOREVER_S)
    assert isinstance(timer, Timer) and not job.hears(Stumbled(0, 0, job.now_s, "connection closed by peer"), 0.1)
    assert the(job.timer("stumble"), Leave).ranks == (0, 1, 2)
    leaves(job, 0, 1, 2)
    assert job.opened() == [1] and job.worlds[-1].stayed


def test_a_reason_that_is_seen_comes_first() -> None:
    job = training()
    job.hears(Stumbled(0, 0, job.now_s, "connection closed by peer"), FOREVER_S)
    job.ends(1, -signal.SIGKILL, after_s=0.01)
    assert job.timer("stumble") == []
    leaves(job, 0, 2)
    assert job.coordinator.account.incident is not None
    assert job.coordinator.account.incident.kind is Kind.SIGNAL


def test_after_two_worlds_without_a_step_all_are_started_anew() -> None:
    job = training()
    job.ends(1, -signal.SIGKILL, after_s=FOREVER_S, steps=5)
    leaves(job, 0, 2)
    for _ in range(TRIES - 1):
        job.hears(Started(job.generation))
        for rank in range(3):
            job.hears(Stays(job.generation, rank), 0.0)
        assert every(job.ends(1, -signal.SIGKILL, after_s=FOREVER_S), Leave)
        leaves(job, 0, 2, steps=0)
    job.hears(Started(job.generation))
    for rank in range(3):
        job.hears(Stays(job.generation, rank), 0.0)
    actions = job.ends(1, -signal.SIGKILL, after_s=FOREVER_S)
    assert not every(actions, Leave) and the(actions, Signal).signum == signal.SIGTERM
    job.ends(0, -signal.SIGTERM)
    job.ends(2, -signal.SIGTERM)
    assert not job.worlds[-1].stayed
    told = [opened.incident.action for opened in every(job.log, Opened)]
    assert told[0] == "restart 1 of 10; 2 ranks stay"
    assert told[-1].endswith("; all ranks are started anew: ranks that stayed came to no step in 2 worlds")


def test_a_world_of_them_that_comes_to_no_step_is_given_up() -> None:
    job = training()
    job.ends(1, -signal.SIGKILL, after_s=FOREVER_S, steps=5)
    leaves(job, 0, 2)
    [limit] = every(job.hears(Started(1)), Timer)
    assert limit.name == "rejoin" and limit.after_s == max(LEAST_S, LONGER * job.node.start_s)
    stays(job, 0, 2)
    actions = job.timer("rejoin", limit.after_s)
    assert not every(actions, Leave) and "did no step within" in the(actions, Signal).why
    for rank in range(3):
        job.ends(rank, -signal.SIGTERM)
    assert not job.worlds[-1].stayed
    told = every(job.log, Opened)[-1].incident.action
    assert told.endswith(f"; all ranks are started anew: ranks that stayed did no step within {limit.after_s:g} s")


def test_a_job_that_is_told_to_stop_keeps_nobody() -> None:
    job = training()
    job.hears(StopRequested(signal.SIGTERM))
    assert not every(job.log, Leave)
    job = training()
    job.ends(1, -signal.SIGKILL, after_s=FOREVER_S)
    leaves(job, 0)
    job.hears(StopRequested(signal.SIGTERM))
    leaves(job, 2)
    assert job.ended_as is Kind.PREEMPTED


def test_they_are_gone_with_their_zygote() -> None:
    job = training()
    job.ends(1, -signal.SIGKILL, after_s=FOREVER_S)
    leaves(job, 0)
    job.loses_helpers()
    job.starts()
    assert not job.worlds[-1].stayed


def test_a_step_longer_than_the_grace_is_left_without_a_boundary() -> None:
    story = Story(3).runs()
    for rank in (0, 1):
        story.hears(Stays(0, rank))
    story.hears(protocol.Stop(0, "node host2 joined", drain=True))
    actions = story.timer("grace", after_s=GRACE_S)
    assert the(actions, Leave).ranks == (0, 1) and not the(actions, Leave).boundary
    assert the(actions, Signal).ranks == (2,) and the(actions, Signal).signum == signal.SIGKILL, "who does not stay"
    assert [timer.name for timer in every(actions, Timer)] == ["leave", "abandon"]
    story.hears(Left(0, 0))
    assert the(story.timer("leave", after_s=LEAVE_S), Signal).ranks == (1,)


def test_who_is_to_end_with_its_node_is_killed_when_the_grace_is_over() -> None:
    story = Story(2).runs()
    for rank in (0, 1):
        story.hears(Stays(0, rank))
    story.hears(protocol.Stop(0, "node host2 joined", drain=True))
    story.hears(StopRequested(signal.SIGTERM))
    assert the(story.timer("grace", after_s=GRACE_S), Signal).ranks == (0, 1)


def test_one_that_does_not_end_even_by_sigkill_is_not_waited_for() -> None:
    job = training(2)
    job.ends(0, -signal.SIGKILL, after_s=FOREVER_S)
    job.timer("leave", LEAVE_S)
    for _ in range(ABANDON_WAITS):
        job.timer("abandon", 2.0)
    assert job.ended_as is Kind.HANG


def test_ranks_that_wait_for_a_new_one_stay_when_that_dies_before_its_first_step() -> None:
    job = training()
    job.ends(1, -signal.SIGKILL, after_s=FOREVER_S, steps=5)
    leaves(job, 0, 2)
    for rank in (0, 2):
        job.hears(Stays(1, rank), 0.0)  # before the new one has so much as a process
    job.hears(Started(1))
    actions = job.ends(1, -signal.SIGKILL)
    assert the(actions, Leave).ranks == (0, 2) and not every(actions, Signal)
    leaves(job, 0, 2, steps=0)
    told = [opened.incident.action for opened in every(job.log, Opened)]
    assert [action.partition("; ")[2] for action in told] == ["2 ranks stay", "2 ranks stay"]


def plans(story: Story, steps: int) -> None:
    """A node joins, or leaves, before all ranks here are known to have stepped."""
    generation = story.node.generation
    for rank in (0, 1):
        story.hears(Stays(generation, rank))
    story.hears(protocol.Stop(generation, "node host2 joined", drain=True))
    for rank in (0, 1):
        story.hears(Left(generation, rank, steps=steps))
    story.launched(generation + 1)
    story.hears(Started(generation + 1))


@pytest.mark.parametrize("steps", [0, 1])
def test_worlds_that_ended_as_planned_are_no_tries(steps: int) -> None:
    story = Story(2).runs()
    for _ in range(TRIES + 2):
        plans(story, steps)
    for rank in (0, 1):
        story.hears(Stays(story.node.generation, rank))
    actions = story.ends(1, -signal.SIGKILL)
    assert the(actions, Leave).ranks == (0,) and not every(actions, Signal)


def test_a_world_of_which_one_rank_had_stepped_is_no_try() -> None:
    story = Story(2).runs()
    for generation in range(TRIES + 2):
        for rank in (0, 1):
            story.hears(Stays(generation, rank))
        assert the(story.ends(1, -signal.SIGKILL, steps=1), Leave).ranks == (0,)
        story.hears(Left(generation, 0, steps=1))
        story.launched(generation + 1)
        story.hears(Started(generation + 1))


def test_who_has_missed_a_world_is_not_taken_along() -> None:
    story = Story(2).runs()
    for rank in (0, 1):
        story.hears(Stays(0, rank))
    story.hears(protocol.Stop(0, "another node was lost"))
    for rank in (0, 1):
        story.hears(Left(0, rank, steps=5))
    assert the(story.launched(2), Run).outdated, "generation 1 may have committed more than these have"
    assert not story.node.stayed
    story.hears(protocol.Stop(2, "another node was lost"))
    for rank in (0, 1):
        story.ends(rank, -signal.SIGTERM)
    assert not the(story.launched(3), Run).outdated


def test_the_incident_says_who_did_not_leave() -> None:
    job = training(4)
    job.ends(1, -signal.SIGKILL, after_s=FOREVER_S, steps=5)
    job.hears(Bequeathed(0, 0))
    leaves(job, 2)
    job.timer("leave", LEAVE_S)
    for rank in (0, 3):
        job.ends(rank, -signal.SIGKILL)
    [opened] = every(job.log, Opened)
    action = "restart 1 of 10; 1 rank stays; 2 ranks are replaced, too: they did not leave their world"
    assert opened.incident.action == action
    job = training(2)
    job.ends(1, -signal.SIGKILL, after_s=FOREVER_S, steps=5)
    job.hears(Bequeathed(0, 0))
    job.ends(0, -signal.SIGKILL)
    [opened] = every(job.log, Opened)
    assert opened.incident.action == "restart 1 of 10; 1 rank is replaced, too: it did not leave its world"


def test_the_incident_says_why_a_program_does_not_stay_after_all() -> None:
    job = training(2)
    for rank in (0, 1):
        job.hears(Stays(0, rank, stays=False, why="new_group() is called outside of run.train()"))
    job.ends(1, -signal.SIGKILL, after_s=FOREVER_S, steps=5)
    job.ends(0, -signal.SIGTERM)
    [opened] = every(job.log, Opened)
    why = "all ranks are started anew: new_group() is called outside of run.train()"
    assert opened.incident.action == f"restart 1 of 10; {why}"


# -- several nodes ----------------------------------------------------------------------------------------------------


def stepped(job: Job, *nodes: str) -> None:
    for node in nodes:
        job.says(node, protocol.Stepped(job.coordinator.generation, 9.0, 10.0, stays=True))


def recovering() -> Job:
    """With min-healthy: a rank has failed, and those of both nodes wait for the one that takes its place."""
    job = Job((1, 3), max_restarts=0, policy=Policy.MIN_HEALTHY)
    job.comes("a", "b")
    job.timer("last call")
    stepped(job, "a", "b")
    job.now_s += FOREVER_S
    assert told(job.fails("a", stays=True, staying=True, stay=1), protocol.Stop) == ["a", "b"]
    job.down("b", stays=True, staying=True, stay=2)
    return job


def test_with_min_healthy_ranks_that_stay_cost_no_restart() -> None:
    job = recovering()
    assert (job.coordinator.generation, job.spent, job.over) == (1, 0, None)
    assert [opened.action for opened in job.opened("b")] == ["restart that is not counted; 3 ranks stay"]


def test_with_min_healthy_nobody_waits_for_the_dead_before_the_first_step() -> None:
    job = recovering()
    assert told(job.fails("b", stays=True, staying=True, stay=1), protocol.Stop) == ["a", "b"]
    job.down("a", stays=True, staying=True, stay=2)
    assert (job.coordinator.generation, job.spent) == (2, 0)


def test_with_min_healthy_all_that_are_started_anew_are_a_restart() -> None:
    job = recovering()
    job.fails("b", stays=True, anew="ranks that stayed came to no step in 2 worlds")
    job.down("a", stays=True, anew="ranks that stayed came to no step in 2 worlds")
    assert job.over is not None and job.over.reason == "no restart: --max-restarts is 0"


def test_with_min_healthy_too_few_nodes_are_a_restart() -> None:
    job = Job((2, 2), max_restarts=0, policy=Policy.MIN_HEALTHY)
    job.comes("a", "b")
    stepped(job, "a", "b")
    job.gone("b")
    job.down("a", stays=True, staying=True, stay=2)
    assert job.over is not None and job.over.reason == "no restart: --max-restarts is 0"


def test_with_min_healthy_a_node_joins_ranks_that_stay() -> None:
    job = recovering()
    stepped(job, "a", "b")
    job.comes("c")
    assert [stop.drain for stop in job.got("a", protocol.Stop)] == [False, True]
    job.down("a", "b", stays=True, staying=True, stay=2)
    assert sorted(job.seated) == ["a", "b", "c"] and job.spent == 0


def test_the_incident_says_that_a_node_is_set_aside() -> None:
    job = Job((1, 2), max_restarts=9)
    job.runs("a", "b")
    while not job.coordinator.quarantine.holds("host-b"):
        job.fails("b", killed(at_s=8.0))
        job.down("a")
        job.steps(*job.seated)
    actions = [opened.action for opened in job.opened("a")]
    assert actions[-1].endswith("; host-b is set aside") and "set aside" not in actions[0]


def test_the_incident_says_that_shards_stay_in_a_world_of_the_same_size_only() -> None:
    job = LoneJob(3, 10).starts()
    for rank in range(3):
        job.hears(Stays(0, rank, as_it_is=True), 0.0)
    job.steps(0, 1, 2)
    job.ends(1, -signal.SIGKILL, after_s=FOREVER_S, steps=5)
    leaves(job, 0, 2)
    [opened] = every(job.log, Opened)
    assert opened.incident.action == "restart 1 of 10; 2 ranks stay, if the next world is as large"
    job.hears(Started(1))
    job.steps(0, 1, 2)
    [closed] = every(job.log, Closed)
    assert closed.incident.action == "restart 1 of 10; 2 ranks stay", "it was"


def test_the_incident_says_that_shards_did_not_stay_in_a_smaller_world() -> None:
    job = Job((1, 2), max_restarts=9)
    job.runs("a", "b")
    job.now_s += FOREVER_S
    job.gone("b")
    job.down("a", stays=True, staying=True, stay=2, as_they_are=True)
    assert job.opened("a")[-1].action == "restart 1 of 9; 2 ranks stay, if the next world is as large"
    job.steps("a")
    assert job.got("a", protocol.Closed)[-1].incident.action == (
        "restart 1 of 9; all ranks are started anew: what they have does not fit a world of another size"
    )


def test_where_all_were_to_end_one_that_waits_for_its_world_is_told_to() -> None:
    """Its peer on another node was not asked, but signalled, as it had not begun to look."""
    job = training()
    asked = the(job.hears(StopRequested(signal.SIGTERM)), Signal)
    assert asked.drain and asked.ranks == (0, 1, 2)
    told = the(job.hears(Stumbled(0, 1, job.now_s, "connection closed by peer"), FOREVER_S), Signal)
    assert (told.ranks, told.signum, told.drain) == ((0, 1, 2), signal.SIGTERM, False)
    assert job.hears(Stumbled(0, 0, job.now_s, "connection closed by peer"), FOREVER_S) == []


def test_a_world_that_has_failed_a_rank_has_no_boundary_to_end_at() -> None:
    job = training()
    job.hears(Stumbled(0, 2, job.now_s, "connection closed by peer"), FOREVER_S)
    assert not the(job.hears(StopRequested(signal.SIGTERM), 0.1), Signal).drain
