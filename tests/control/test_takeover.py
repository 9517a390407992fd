"""A coordinator that takes up what another one left: from its record, from what nodes remember, or from nothing."""

from __future__ import annotations

from typing import Any

import pytest
from scripted import Job, StepDown, Timer, Write, every, killed, sent, told

from holdfast.control import protocol
from holdfast.control.breaking import STOPPED_BEFORE
from holdfast.control.causes import Kind
from holdfast.control.coordinator import ENDED_BEFORE
from holdfast.control.forming import Phase
from holdfast.control.membership import RETURN_S, Policy

LAUNCHED = protocol.Launch
Nodes = int | tuple[int, int]


def taken_up(job: Job, nodes: Nodes = 2, node: str = "", **more: Any) -> Job:
    """The next coordinator, with what the last one wrote; its clock shows another time."""
    return Job(nodes, record=job.written, term=job.coordinator.term + 1, node=node, now_s=7.0, **more)


def returns(job: Job, *nodes: str, generation: int = 0, running: int | None = None, **more: Any) -> None:
    running = generation if running is None else running
    for node in nodes:
        job.comes(node, term=0, arrival="abcd".index(node), generation=generation, running=running, **more)


# -- the world still runs ---------------------------------------------------------------------------------------------


def test_a_new_coordinator_writes_its_term_down_and_waits_for_the_nodes_of_the_world() -> None:
    job = taken_up(Job(nodes=2).runs("a", "b"))
    assert job.written is not None
    assert (job.written.term, job.written.generation) == (1, 0)
    assert [(timer.name, timer.after_s) for timer in every(job.log, Timer)][1:] == [("return", RETURN_S)]
    assert job.post == {}


def test_a_world_whose_nodes_all_return_goes_on_as_if_nothing_had_happened() -> None:
    job = taken_up(Job(nodes=2).runs("a", "b"))
    returns(job, "a", "b")
    job.timer("return")
    assert {type(message) for node in "ab" for message in job.post[node]} == {protocol.Welcome}
    for node in "ab":
        job.says(node, protocol.Done(0, steps=4))
    assert job.over == protocol.Over(None, "", steps=4)


def test_a_node_that_does_not_return_is_lost() -> None:
    job = taken_up(Job(nodes=2).runs("a", "b"))
    returns(job, "a")
    assert told(job.timer("return"), protocol.Stop) == ["a"]
    job.down("a")
    [incident] = job.opened("a")
    assert (incident.kind, incident.headline) == (
        Kind.LOST_NODE,
        "node host-b did not come back to a new coordinator",
    )


def test_a_node_whose_ranks_failed_in_between_says_how() -> None:
    job = taken_up(Job(nodes=2).runs("a", "b"))
    returns(job, "a")
    returns(job, "b", running=-1)
    assert told(job.down("b", killed(rank=3, at_s=4.0)), protocol.Stop) == ["a"]
    job.down("a")
    assert job.opened("a")[0].what == "rank 3 on host-b: killed by SIGKILL"
    assert (job.world("a").generation, job.spent) == (1, 1)


def test_nodes_that_were_done_in_between_end_the_job_well() -> None:
    job = taken_up(Job(nodes=2).runs("a", "b"))
    for node in "ab":
        returns(job, node, running=-1)
        job.says(node, protocol.Done(0, steps=6))
    assert job.over == protocol.Over(None, "", steps=6)


def test_a_world_that_the_last_coordinator_had_stopped_is_followed_by_another() -> None:
    job = taken_up(Job(nodes=2).runs("a", "b"))
    returns(job, "a", "b", running=-1)
    job.down("a", "b")
    assert job.opened("a")[0].headline == STOPPED_BEFORE
    assert job.world("a").generation == 1


def test_a_launch_that_was_lost_on_the_way_is_sent_again() -> None:
    before = Job(nodes=2)
    before.comes("a", "b")
    job = taken_up(before)
    returns(job, "a")
    returns(job, "b", generation=-1)
    assert job.got("a", LAUNCHED) == []
    assert job.world("b") == before.world("b")


def test_a_launch_that_was_lost_is_not_sent_once_the_world_has_broken() -> None:
    before = Job(nodes=2)
    before.comes("a", "b")
    job = taken_up(before)
    returns(job, "a")
    job.fails("a")
    returns(job, "b", generation=-1)
    assert [launch.world.generation for launch in job.got("b", LAUNCHED)] == [1]


def test_a_spare_does_not_break_a_world_that_is_still_returning() -> None:
    job = taken_up(Job(nodes=(1, 3)).runs("a", "b"), nodes=(1, 3))
    returns(job, "a")
    assert told(job.comes("c"), protocol.Stop) == []
    returns(job, "b")
    assert [stop.why for stop in job.got("a", protocol.Stop)] == ["node host-c joined"]


def test_a_node_that_comes_back_to_a_broken_world_has_its_ranks_stopped_before_it_is_used_again() -> None:
    job = Job(nodes=(1, 2)).runs("a", "b")
    job.gone("b")
    job.down("a")
    assert job.seated == ["a"]
    returns(job, "b")
    assert job.got("b", protocol.Stop) == [protocol.Stop(0, "generation 0 is over")]
    assert job.got("a", protocol.Stop)[1:] == []
    job.says("b", protocol.Down(0, 10.0))
    assert [stop.why for stop in job.got("a", protocol.Stop)[1:]] == ["node host-b joined"]


def set_aside() -> Job:
    """Three incidents began at b, and a goes on without it."""
    job = Job(nodes=(1, 2), max_restarts=9).runs("a", "b")
    for _ in range(3):
        job.fails("b")
        job.down("a")
        job.now_s += 60.0
    return job


# -- what is remembered -----------------------------------------------------------------------------------------------


def test_an_open_incident_is_taken_over_told_to_who_returns_and_closed_on_the_new_clock() -> None:
    before = Job(nodes=2).runs("a", "b")
    before.fails("a")
    before.down("b")
    job = taken_up(before)
    returns(job, "a", "b", generation=1)
    assert [incident.number for incident in job.opened("a")] == [1]
    job.steps("a", "b")
    closed = job.got("a", protocol.Closed)[0].incident
    assert closed.number == 1
    assert closed.recovered_at_s is not None
    assert closed.lost_s == closed.recovered_at_s - closed.failed_at_s > 0.0


def test_an_open_incident_began_when_a_node_heard_of_it() -> None:
    """The record does not say for how long nobody has coordinated since."""
    before = Job(nodes=2).runs("a", "b")
    before.fails("a")
    before.down("b")
    assert before.written is not None and before.written.incident is not None
    job = taken_up(before)  # the first comes at 8 s, and says that it is 5 s there
    ago_s = -before.written.incident.failed_at_s
    which = (0, 1)
    returns(job, "a", generation=1, opened=which, failed_at_s=5.0 - ago_s - 60.0)
    returns(job, "b", generation=1, opened=which, failed_at_s=5.0 - ago_s - 20.0)  # it heard of it late
    job.steps("a", "b")
    closed = job.got("a", protocol.Closed)[0].incident
    assert closed.failed_at_s == 8.0 - ago_s - 60.0
    assert closed.stopped_at_s - closed.failed_at_s == job.opened("b")[0].stopped_at_s - job.opened("b")[0].failed_at_s
    assert closed.launched_at_s is not None and closed.launched_at_s < 0.0 < 8.0 <= (closed.recovered_at_s or 0)
    assert closed.lost_s > 60.0


@pytest.mark.parametrize("which", [(-1, 0), (0, 2), (1, 1)], ids=["none", "another", "another world's"])
def test_of_an_open_incident_a_node_that_has_not_heard_knows_nothing(which: tuple[int, int]) -> None:
    before = Job(nodes=2).runs("a", "b")
    before.fails("a")
    before.down("b")
    job = taken_up(before)
    returns(job, "a", generation=1, opened=which, failed_at_s=-1000.0)
    assert job.opened("a")[0].failed_at_s > 0.0


def test_an_incident_that_was_closed_is_not_opened_again() -> None:
    before = Job(nodes=2).runs("a", "b")
    before.fails("a")
    before.down("b")
    before.steps("a", "b")
    job = taken_up(before)
    returns(job, "a", "b", generation=1)
    job.steps("a", "b")
    assert (job.opened("a"), job.got("a", protocol.Closed)) == ([], [])


def test_restarts_quarantine_and_arrivals_survive() -> None:
    job = taken_up(set_aside(), nodes=(1, 2), max_restarts=9)
    assert job.spent == 3
    returns(job, "a", generation=3)
    returns(job, "b", generation=2, running=-1)
    assert job.got("b", protocol.Standby)[0].why.startswith("set aside: 3 incidents")
    job.comes("c")
    assert job.got("c", protocol.Welcome)[0].arrival == 2


def test_restarts_that_were_given_back_are_given_back_once() -> None:
    before = Job(nodes=1, refill_steps=100).runs("a")
    before.fails("a")
    before.fails("a")
    before.says("a", protocol.Beat(9.0, 2, steps=150))
    job = taken_up(before, nodes=1, refill_steps=100)
    returns(job, "a", generation=2)
    job.says("a", protocol.Beat(10.0, 2, steps=160))
    assert (job.spent, job.coordinator.account.history.left) == (2, 2)
    job.says("a", protocol.Beat(11.0, 2, steps=200))
    assert job.coordinator.account.history.left == 3


def test_a_quarantine_ends_in_its_time_and_once_lifted_does_not_come_back() -> None:
    before = set_aside()
    job = taken_up(before, nodes=(1, 2), max_restarts=9)
    returns(job, "a", generation=3)
    returns(job, "b", generation=2, running=-1)
    assert told(job.timer("quarantine"), protocol.Stop) == ["a"]
    before.says("visitor", protocol.Look(lift="host-b"))
    assert before.written is not None
    assert before.written.quarantine == ()


def test_when_nobody_remembers_the_job_its_nodes_were_started_anew_and_the_budget_is_whole() -> None:
    before = Job(nodes=2).runs("a", "b")
    before.fails("a")
    before.down("b")
    before.steps("a", "b")
    job = taken_up(before, node="c")
    job.comes("c", "d")
    job.timer("return")
    job.timer("fence")
    assert (job.world("c").generation, job.spent, job.coordinator.account.history.left) == (2, 1, 3)
    assert job.opened("c") == []


# -- the host of the endpoint was restarted ---------------------------------------------------------------------------


def restarted_host(**more: Any) -> Job:
    before = Job(nodes=2, node="a", **more).runs("a", "b")
    return taken_up(before, node="a2", **more)


def test_a_restarted_host_knows_that_its_own_ranks_are_dead_and_stops_the_others() -> None:
    job = restarted_host()
    assert job.coordinator.phase is Phase.STOPPING
    returns(job, "b")
    assert job.got("b", protocol.Stop) == [protocol.Stop(0, "the world has broken")]
    job.down("b")
    assert job.opened("b")[0].headline == "node host-a was restarted"
    job.comes("a2")
    assert job.world("b").generation == job.world("a2").generation == 1


def test_a_restarted_host_does_not_wait_for_ever_for_the_others() -> None:
    job = restarted_host()
    job.comes("a2", "c")
    job.comes("x", term=0, generation=0)  # somebody remembers the job
    job.timer("return")
    assert job.coordinator.phase is Phase.RUNNING
    assert job.seated == ["a2", "c"]


def test_an_elected_coordinator_knows_nothing_of_its_predecessors_ranks() -> None:
    assert restarted_host(elected=True).coordinator.phase is Phase.RUNNING


# -- the fence --------------------------------------------------------------------------------------------------------


def cut_off_world() -> Job:
    """Both nodes of the world are silent; it may still run. Two spares are here."""
    job = Job(nodes=2, spares=2).runs("a", "b", "c", "d")
    job.gone("a")
    job.gone("b")
    return job


def test_a_world_that_nobody_confirmed_to_be_down_has_the_next_one_wait_for_its_leases() -> None:
    job = cut_off_world()
    assert "it may still run, and ends by itself within" in job.got("c", protocol.Waiting)[-1].why
    assert job.got("c", LAUNCHED) == []
    assert job.written is not None
    assert (job.written.settled, job.written.confirmed) == (True, False)
    assert told(job.timer("fence"), LAUNCHED) == ["c", "d"]


def test_one_of_its_nodes_that_comes_back_and_stops_ends_the_wait() -> None:
    job = cut_off_world()
    returns(job, "a")
    assert told(job.down("a"), LAUNCHED) == ["a", "c"]


def test_a_world_of_which_one_node_is_known_to_be_down_needs_no_fence() -> None:
    job = Job(nodes=2, spares=2).runs("a", "b", "c", "d")
    job.gone("a")
    assert told(job.down("b"), LAUNCHED) == ["b", "c"]


def test_a_world_that_could_do_without_some_needs_more_to_be_known_to_be_down() -> None:
    job = Job(nodes=(2, 4), spares=0, policy=Policy.MIN_HEALTHY).runs("a", "b", "c", "d")
    for node in "abc":
        job.gone(node)
    job.comes("e")
    assert told(job.down("d"), LAUNCHED) == []
    assert "it may still run" in job.got("d", protocol.Waiting)[-1].why


@pytest.mark.parametrize("confirmed", [True, False])
def test_the_next_coordinator_waits_for_the_fence_only_where_the_last_one_had_to(confirmed: bool) -> None:
    before = cut_off_world()
    if confirmed:
        before = Job(nodes=2, spares=2).runs("a", "b")
        before.fails("a")
        before.gone("b")
    job = taken_up(before, spares=2)
    job.comes("c", "d", term=0, generation=0)
    assert bool(job.got("c", LAUNCHED)) is confirmed


# -- the ledger was lost ----------------------------------------------------------------------------------------------


def test_what_nodes_remember_stands_in_for_a_lost_ledger() -> None:
    job = Job(nodes=2)
    job.comes("a", "b", term=4, generation=7, running=7, restarts=2, arrival=1)
    assert job.got("a", protocol.Welcome)[0].term == 5
    assert job.got("b", protocol.Stop) == [protocol.Stop(7, "generation 7 is over")]
    for node in "ab":
        job.says(node, protocol.Down(7, 10.0))
    assert (job.world("a").generation, job.world("a").restart_count) == (8, 2)


def test_what_was_learned_from_nodes_is_written_down_before_they_are_answered() -> None:
    actions = Job(nodes=2).comes("a", term=4, generation=7, restarts=2)
    assert isinstance(actions[0], Write)
    assert (actions[0].record.term, actions[0].record.generation, actions[0].record.history.spent) == (5, 7, 2)


def test_nodes_that_have_moved_on_since_the_record_was_written_are_believed() -> None:
    job = taken_up(Job(nodes=2).runs("a", "b"))
    returns(job, "a", "b", generation=3)
    assert job.coordinator.generation == 3
    job.fails("a")
    job.down("b")
    assert job.world("a").generation == 4


def test_an_elected_coordinator_that_meets_a_newer_term_steps_down() -> None:
    assert Job(nodes=2, elected=True, term=3).comes("a", term=4, generation=1) == [StepDown()]


# -- a job of the same name -------------------------------------------------------------------------------------------


def after_its_end() -> Job:
    before = Job(nodes=1).runs("a")
    before.says("a", protocol.Done(0, steps=8))
    return taken_up(before, nodes=1)


def test_a_job_of_the_same_name_begins_anew_but_for_its_generations() -> None:
    job = after_its_end()
    job.comes("b")
    assert (job.world("b").generation, job.spent, job.coordinator.account.incidents) == (1, 0, 0)


def test_a_node_that_missed_the_end_of_the_last_job_of_that_name_is_told_how_it_ended() -> None:
    job = after_its_end()
    assert sent(job.comes("a", term=0, generation=0), protocol.Over) == [("a", protocol.Over(None, "", steps=8))]
    assert job.coordinator.members == {}


def test_the_end_is_remembered_by_later_coordinators_of_the_new_job_too() -> None:
    job = taken_up(after_its_end(), nodes=1)
    [(_, over)] = sent(job.comes("a", term=0, generation=0), protocol.Over)
    assert over.kind is None
    assert ENDED_BEFORE not in over.reason


def test_incidents_that_ended_with_the_job_are_told_to_the_first_that_comes() -> None:
    before = Job((1, 1), node="a", max_restarts=1)
    before.runs("a")
    before.fails("a")
    before.says("a", protocol.Started(1))
    after = Job((1, 1), before.written, term=1, node="b", max_restarts=1)
    assert after.over is not None, "its node was started anew, and no restart is left"
    after.comes("b")
    assert [closed.incident.number for closed in after.got("b", protocol.Closed)] == [1, 2]
    assert {1, 2} <= {opened.number for opened in after.opened("b")}
    assert after.got("b", protocol.Over)
