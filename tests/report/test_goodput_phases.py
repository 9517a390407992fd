"""Each phase of the wall clock, from a record that has it."""

from __future__ import annotations

import msgspec
import pytest

from holdfast.observe import record, report
from holdfast.observe.goodput import Goodput, Phase, divide
from report.written import CLOCK_S, LEAD, Written, killed, moved, spent, taken_over


def test_an_undisturbed_job_starts_trains_and_ends() -> None:
    job = Written().world(0, 1.0, 1.5, 1.9, 2.0).progress(9.0, 0, 70, base=0).exits(9.0, 0).end(10.0)
    assert spent(job.divided()) == {Phase.FIRST_START: 2.0, Phase.TRAINING: 7.0, Phase.IDLE: 1.0}
    assert job.divided().ratio == pytest.approx(0.7)
    assert job.divided().steps == 70


def test_a_killed_rank_costs_stopping_forming_and_starting() -> None:
    divided = killed().divided()
    assert spent(divided) == {
        Phase.FIRST_START: 2.0,
        Phase.TRAINING: 3.0 + 3.5,
        Phase.STOPPING: 0.1,
        Phase.FORMING: 0.2,
        Phase.STARTING: 0.7,
        Phase.IDLE: 0.5,
    }
    [cost] = divided.costs
    assert cost.phases_s == {"stopping": 0.1, "forming the world": 0.2, "starting": 0.7}
    assert (cost.at_s, cost.lost_s) == (5.0, 1.0)


def test_ranks_that_stay_end_no_process_and_their_world_is_stopped_when_they_have_left_it() -> None:
    """Rank 1 is killed, rank 0 goes on where it was: no step is done again, though it exits in the second only."""
    job = Written().world(0, 1.0, 1.5, 2.0, 2.0).progress(5.0, 0, 30, base=0)
    job.note(5.0, record.RankExited(0, 1, 101, -9)).note(5.0, record.RanksLeave((0,), "rank 1 failed"))
    job.incident(1, 0, 5.0, 5.1, launched_s=5.1, started_s=5.2, recovered_s=5.5, steps=30)
    job.note(5.1, record.WorldLaunched(1, 2, 1, local_size=2, stayed=(0,)))
    job.note(5.2, record.WorldStarted(1, {0: 100, 1: 102}))
    job.note(5.4, record.CheckpointRestored(1, 0, 30, 0.0, "the memory of rank 0"))
    job.note(5.4, record.CheckpointRestored(1, 1, 30, 0.125, "the memory of rank 0"))
    for rank in (0, 1):
        job.note(5.5, record.RankFirstStep(1, rank))
    divided = job.progress(9.0, 1, 35, base=30).exits(9.0, 1).end(10.0).divided()
    assert spent(divided) == {
        Phase.FIRST_START: 2.0,
        Phase.TRAINING: 3.0 + 3.5,
        Phase.STOPPING: 0.1,
        Phase.STARTING: 0.275,
        Phase.RESTORING: 0.125,
        Phase.IDLE: 1.0,
    }
    assert (divided.steps, divided.redone, divided.unknown) == (65, 0, ())
    assert (divided.costs[0].lost_s, divided.costs[0].redone) == (0.5, 0)


def test_a_hang_costs_the_time_until_it_is_found() -> None:
    job = Written().world(0, 1.0, 1.5, 2.0, 2.0)
    job.incident(1, 0, 4.0, 7.5, detected_s=7.0, launched_s=7.5, started_s=7.6, recovered_s=8.0)
    divided = job.world(1, 7.5, 7.6, 8.0, 8.0).exits(10.0, 1).end(10.0).divided()
    assert spent(divided)[Phase.DETECTION] == 3.0
    assert spent(divided)[Phase.STOPPING] == 0.5
    assert Phase.FORMING not in spent(divided)


def test_restoring_is_taken_out_of_starting() -> None:
    job = killed()
    for rank, seconds in ((0, 0.1), (1, 0.25)):
        job.note(5.8, record.CheckpointRestored(1, rank, 10, seconds, "memory"))
    divided = job.divided()
    assert spent(divided)[Phase.RESTORING] == 0.25
    assert spent(divided)[Phase.STARTING] == 0.45
    assert divided.costs[0].phases_s["restoring"] == 0.25


def test_steps_done_again_are_not_training() -> None:
    """30 steps were done; it goes on from 10, and has its 20th new one at 8.0 less a step."""
    divided = killed(base=10).divided()
    assert divided.redone == 20
    assert divided.costs[0].redone == 20
    redone_s = spent(divided)[Phase.REDONE]
    assert redone_s == pytest.approx(2.0 * 19 / 20, abs=0.001)  # from the first step at 6.0 to the 21st at 8.0
    assert spent(divided)[Phase.TRAINING] == pytest.approx(6.5 - redone_s, abs=0.001)
    assert divided.unknown == ()


def test_who_goes_on_where_it_was_redoes_nothing() -> None:
    divided = killed(base=30).divided()
    assert divided.redone == 0 and Phase.REDONE not in spent(divided) and divided.unknown == ()


def test_all_is_redone_by_who_does_not_get_as_far_again() -> None:
    job = Written().world(0, 1.0, 1.5, 2.0, 2.0)
    job.incident(1, 0, 5.0, 5.0, launched_s=5.0, started_s=5.0, recovered_s=6.0, steps=300)
    divided = job.world(1, 5.0, 5.0, 6.0, 6.0).progress(9.0, 1, 50, base=0).exits(9.0, 1).end(9.0).divided()
    assert divided.redone == 50
    assert spent(divided)[Phase.REDONE] == 3.0


def test_without_a_base_nothing_is_called_redone_and_that_is_said() -> None:
    divided = killed(base=-1).divided()
    assert divided.unknown == (1,)
    assert divided.costs[0].redone is None and divided.worlds[1].redone is None
    assert Phase.REDONE not in spent(divided)


def test_a_checkpoint_tells_the_base_where_the_optimizer_does_not_count() -> None:
    job = killed(base=-1)
    job.note(5.8, record.CheckpointRestored(1, 0, 25, 0.1, "memory"))
    assert job.divided().redone == 5
    assert job.divided().unknown == ()


def test_saves_that_hold_training_up_are_taken_out_of_it() -> None:
    job = Written().world(0, 1.0, 1.5, 2.0, 2.0)
    job.progress(4.0, 0, 20, saving_s=0.25).progress(6.0, 0, 40, saving_s=0.25).progress(8.0, 0, 60, saving_s=0.75)
    divided = job.exits(9.0, 0).end(9.0).divided()
    assert spent(divided)[Phase.SAVING] == 0.75
    assert spent(divided)[Phase.TRAINING] == 6.25


def test_the_wait_for_nodes_is_not_the_start() -> None:
    job = Written().note(1.0, record.NodeHello("a", -1)).note(4.0, record.NodeHello("b", -1), "n2:9")
    divided = job.world(0, 5.0, 5.1, 6.0, 6.0).exits(9.0, 0).end(9.0).divided()
    assert spent(divided) == {Phase.FIRST_START: 2.0, Phase.WAITING: 4.0, Phase.TRAINING: 3.0}


def test_a_restart_that_waits_for_a_node_says_so() -> None:
    """A node says hello at 8.0, and at 8.5 the new world is launched."""
    job = Written().note(1.0, record.NodeHello("a", -1)).world(0, 1.0, 1.1, 2.0, 2.0)
    job.incident(1, 0, 5.0, 5.5, launched_s=8.5, started_s=8.6, recovered_s=9.0, node="n2")
    job.note(8.0, record.NodeHello("c", -1), "n3:1").world(1, 8.5, 8.6, 9.0, 9.0)
    divided = job.exits(10.0, 1).end(10.0).divided()
    assert divided.costs[0].phases_s == {
        "stopping": 0.5,
        "forming the world": 0.5,
        "starting": 0.5,
        "waiting for nodes": 2.5,
    }


def test_a_node_that_never_comes_is_waited_for_to_the_end() -> None:
    job = Written().note(1.0, record.NodeHello("a", -1)).world(0, 1.0, 1.1, 2.0, 2.0)
    divided = job.incident(1, 0, 5.0, 5.5).end(60.0, "lost-node").divided()
    assert spent(divided)[Phase.WAITING] == 54.5


def test_a_world_that_fails_before_its_first_step_costs_its_predecessor() -> None:
    job = Written().world(0, 1.0, 1.5, 2.0, 2.0)
    job.incident(1, 0, 4.0, 4.1, launched_s=4.1, started_s=4.2, again_s=5.0)
    job.world(1, 4.1, 4.2)
    job.incident(2, 1, 5.0, 5.1, launched_s=5.1, started_s=5.2, recovered_s=6.0)
    divided = job.world(2, 5.1, 5.2, 6.0, 6.0).exits(9.0, 2).end(9.0).divided()
    assert [cost.lost_s for cost in divided.costs] == [1.0, 1.0]
    assert divided.costs[0].phases_s == {"stopping": 0.1, "starting": 0.9}
    assert divided.worlds[1].trained_s is None


def test_the_failure_that_ends_a_job_leaves_the_rest_idle() -> None:
    job = Written().world(0, 1.0, 1.5, 2.0, 2.0).incident(1, 0, 6.0, 6.5, restarted=False).end(7.0, "error")
    assert spent(job.divided()) == {
        Phase.FIRST_START: 2.0,
        Phase.TRAINING: 4.0,
        Phase.STOPPING: 0.5,
        Phase.IDLE: 0.5,
    }


def test_a_job_that_is_told_to_stop_is_stopping_until_its_ranks_are_gone() -> None:
    job = Written().world(0, 1.0, 1.5, 2.0, 2.0).note(6.0, record.JobSignalled("SIGTERM"))
    divided = job.exits(7.5, 0, -15).end(8.0, "preempted").divided()
    assert spent(divided) == {Phase.FIRST_START: 2.0, Phase.TRAINING: 4.0, Phase.STOPPING: 1.5, Phase.IDLE: 0.5}


def test_a_world_begins_by_the_clock_of_the_end_before_it() -> None:
    """The line of its launch came here from a node whose times are 0.6 s off."""
    job = Written().world(0, 1.0, 1.5, 2.0, 2.0)
    job.incident(1, 0, 6.0, 6.2, launched_s=6.5, started_s=6.6, recovered_s=7.0)
    divided = job.world(1, 5.9, 6.0, 6.4, 6.4).exits(9.0, 1).end(9.0).divided()
    assert [(world.launched_s, world.ended_s) for world in divided.worlds] == [(1.0, 6.0), (6.5, 9.0)]


def test_the_moments_of_worlds_are_in_order_where_clocks_differ_by_more_than_a_world_took() -> None:
    """The lines of the second came here from a node whose times are 0.6 s off, and it was over in 0.3 s."""
    job = Written().world(0, 1.0, 1.5, 2.0, 2.0)
    job.incident(1, 0, 6.0, 6.2, launched_s=6.5, started_s=6.6, again_s=6.7)
    job.world(1, 5.9, 6.0, 6.1, 6.1).incident(2, 1, 6.4, 6.8, launched_s=7.0, started_s=7.1, recovered_s=7.2)
    worlds = job.world(2, 7.0, 7.1, 7.2, 7.2).exits(9.0, 2).end(9.0).divided().worlds
    moments = [at_s for world in worlds for at_s in (world.launched_s, world.trained_s, world.ended_s)]
    assert moments == [1.0, 2.0, 6.0, 6.5, 6.5, 6.5, 7.0, 7.2, 9.0]


def test_a_failure_that_the_others_survive_costs_nothing() -> None:
    """With min-healthy the world goes on."""
    job = Written().world(0, 1.0, 1.5, 2.0, 2.0).incident(1, 0, 4.0, 4.5, restarted=False)
    divided = job.progress(8.0, 0, 60).exits(9.0, 0).end(9.0).divided()
    assert spent(divided) == {Phase.FIRST_START: 2.0, Phase.TRAINING: 7.0}
    assert divided.costs[0].lost_s == 0.0


def test_a_program_whose_steps_cannot_be_seen_trains_while_it_is_there() -> None:
    job = Written().world(0, 1.0, 1.5)
    job.incident(1, 0, 4.0, 4.1, launched_s=4.1, started_s=4.3, again_s=7.0, steps=None)
    job.world(1, 4.1, 4.3).incident(2, 1, 7.0, 7.2, restarted=False, steps=None)
    divided = job.end(7.2, "error").divided()
    assert divided.hidden
    assert spent(divided)[Phase.TRAINING] == 2.5 + 2.7
    assert spent(divided)[Phase.STARTING] == 0.2


def test_the_last_step_of_a_world_that_is_over_counts_before_its_failure() -> None:
    """The last look at a world's ranks is written when the next one is launched."""
    job = Written().world(0, 1.0, 1.5, 2.0, 2.0).progress(4.0, 0, 20, saving_s=0.1)
    job.incident(1, 0, 5.0, 5.1, launched_s=8.0, started_s=8.1, recovered_s=8.5)
    job.progress(8.0, 0, 30, saving_s=0.4).world(1, 8.0, 8.1, 8.5, 8.5)
    divided = job.exits(9.0, 1).end(9.0).divided()
    assert spent(divided)[Phase.SAVING] == 0.4
    assert spent(divided)[Phase.FORMING] == 2.9


# -- parts of a record ------------------------------------------------------------------------------------------------


def test_a_record_without_an_end_goes_to_its_last_line() -> None:
    job = Written().world(0, 1.0, 1.5, 2.0, 2.0).progress(9.0, 0, 70)
    assert spent(job.divided()) == {Phase.FIRST_START: 2.0, Phase.TRAINING: 7.0}
    assert job.divided().ended is None


def test_an_incident_that_is_open_costs_up_to_the_last_line() -> None:
    job = Written().world(0, 1.0, 1.5, 2.0, 2.0).incident(1, 0, 5.0, 5.5).world(1, 6.0, 6.5)
    divided = job.note(8.0, record.CoordinatorSaid("x")).divided()
    assert divided.costs[0].phases_s == {"stopping": 0.5, "forming the world": 0.5, "starting": 2.0}


def test_a_job_that_is_still_starting_has_nothing_else() -> None:
    assert spent(Written().note(3.0, record.CoordinatorSaid("x")).divided()) == {Phase.FIRST_START: 3.0}


def test_a_record_that_begins_in_the_middle_has_its_own_clock() -> None:
    """From 4.0 on. What the clock showed is found by the incident, which was told right after."""
    whole = killed()
    part = [noted for noted in whole.notes if noted.at_s >= 4.0]
    divided = divide(part)
    assert divided.from_middle
    assert divided.wall_s == 6.0
    assert spent(divided) == {
        Phase.TRAINING: 1.0 + 3.5,
        Phase.STOPPING: 0.1,
        Phase.FORMING: 0.2,
        Phase.STARTING: 0.7,
        Phase.IDLE: 0.5,
    }


def test_a_record_of_the_first_versions_has_no_clock_either() -> None:
    old = [msgspec.structs.replace(noted, node="", seq=-1) for noted in killed().notes]
    started = old[0].what
    assert isinstance(started, record.JobStarted)
    old[0] = msgspec.structs.replace(old[0], what=msgspec.structs.replace(started, clock_s=0.0))
    assert spent(divide(old)) == spent(killed().divided())


def test_an_empty_record_is_divided_too() -> None:
    divided = divide([])
    assert (divided.wall_s, divided.ratio, divided.spans) == (0.0, 0.0, ())


# -- several nodes ----------------------------------------------------------------------------------------------------


def test_incidents_are_those_of_the_leading_node() -> None:
    """Another node has the same one, on a clock of its own."""
    job = killed()
    theirs = [
        msgspec.structs.replace(noted, node="n2:9", what=moved(noted.what, 900.0))
        for noted in job.notes
        if isinstance(noted.what, record.IncidentNoted)
    ]
    assert spent(divide([*job.notes, *theirs])) == spent(job.divided())


def test_what_was_before_the_leading_node_came_is_as_others_have_it() -> None:
    divided = taken_over().divided()
    assert (divided.earlier_s, divided.wall_s) == (100.0, 110.0)
    assert spent(divided) == {
        Phase.FIRST_START: 5.0,
        Phase.TRAINING: 35.0 + 52.0 + 4.0,
        Phase.STOPPING: 0.5 + 1.0,
        Phase.FORMING: 0.5 + 7.0,
        Phase.STARTING: 2.0 + 2.0,
        Phase.IDLE: 1.0,
    }
    assert [(cost.incident.number, cost.at_s, cost.lost_s) for cost in divided.costs] == [
        (1, 40.0, 3.0),
        (2, 95.0, 10.0),
    ]
    assert [world.launched_s for world in divided.worlds] == [2.0, 41.0, 103.0]
    assert any("came when the job had run for a while" in caveat for caveat in report.caveats(divided))


def test_the_leading_node_is_the_first_in_the_file_and_not_in_time() -> None:
    """Another may have been there earlier, on another clock."""
    job = killed()
    other = record.JobStarted("r1", "other", 2, {"path": "x"}, 9, clock_s=77.0)
    job.note(-30.0, other, "n2:9")
    assert spent(job.divided()) == spent(killed().divided())


def test_a_leading_node_without_ranks_still_knows_when_all_have_stepped() -> None:
    """The coordinator's host may be a spare."""
    job = Written()
    job.note(1.0, record.WorldLaunched(0, 2, 0, local_size=2), "n2:9")
    for rank in (0, 1):
        job.note(3.0 + rank, record.RankFirstStep(0, rank), "n2:9")
    divided = job.progress(6.0, 0, 9, node="n2:9").end(8.0, "preempted").divided()
    assert spent(divided) == {Phase.FIRST_START: 4.0, Phase.TRAINING: 4.0}


def test_lines_of_another_node_may_come_late() -> None:
    job = killed()
    early = [noted for noted in job.notes if isinstance(noted.what, record.RankFirstStep)]
    assert spent(divide([*(noted for noted in job.notes if noted not in early), *early])) == spent(job.divided())


def test_spans_name_the_incident_that_they_are_a_cost_of() -> None:
    divided: Goodput = killed(base=10).divided()
    own = [span.phase for span in divided.spans if span.incident == 1]
    assert own == [Phase.STOPPING, Phase.FORMING, Phase.STARTING, Phase.REDONE]
    assert {span.generation for span in divided.spans if span.phase is Phase.TRAINING} == {0, 1}
    assert LEAD in divided.state.nodes and divided.state.clock_s == CLOCK_S
