"""The coordinator and nodes that come, stay, fail and go: who is in the world, and what each change costs."""

from __future__ import annotations

import signal

import pytest
from scripted import FOREVER_S, Drop, End, Job, Timer, Write, every, killed, sent, told

from holdfast.control import protocol
from holdfast.control.causes import Cause, Kind
from holdfast.control.forming import Phase
from holdfast.control.membership import BEATS, Budget, Policy

LAUNCHED = protocol.Launch


def waiting_text(job: Job, node: str) -> str:
    return job.got(node, protocol.Waiting)[-1].why


# -- gathering --------------------------------------------------------------------------------------------------------


def test_a_world_is_formed_when_the_last_node_comes_and_written_down_before_anybody_hears_of_it() -> None:
    job = Job(nodes=3)
    assert told(job.comes("a", "b"), LAUNCHED) == []
    actions = job.comes("c")
    assert told(actions, LAUNCHED) == ["a", "b", "c"]
    assert isinstance(actions[0], Write)
    assert (actions[0].record.generation, len(actions[0].record.seats)) == (0, 3)


def test_ranks_follow_the_order_of_arrival() -> None:
    job = Job(nodes=2)
    job.comes("a", local_size=3)
    job.comes("b", local_size=1)
    assert [(job.world(n).first_rank, job.world(n).size, job.world(n).group_rank) for n in "ab"] == [
        (0, 4, 0),
        (3, 4, 1),
    ]


def test_who_waits_is_told_for_how_many_and_for_how_long() -> None:
    job = Job(nodes=3)
    job.comes("a", "b")
    assert waiting_text(job, "a") == "1 of 3 nodes are here; waiting at most 600 s for 2 more nodes"
    assert waiting_text(job, "b") == "2 of 3 nodes are here; waiting at most 600 s for 1 more node"


def test_when_a_node_of_the_last_world_is_lost_everybody_is_told_which() -> None:
    job = Job(nodes=2).runs("a", "b")
    job.gone("b")
    job.down("a")
    assert waiting_text(job, "a").endswith("for 1 more node (lost: host-b)")


def test_nobody_is_waited_for_for_ever() -> None:
    job = Job(nodes=2)
    job.comes("a")
    job.timer("join")
    reason = "1 of 2 nodes came within 600 s; start the others, or lower --nnodes"
    assert job.got("a", protocol.Over) == [protocol.Over(Kind.LOST_NODE, reason)]


def test_the_last_call_leaves_more_than_the_fewest_nodes_time_to_come() -> None:
    job = Job(nodes=(1, 3))
    assert Timer("last call", job.coordinator.epoch, 30.0) in job.comes("a")
    assert told(job.comes("b"), LAUNCHED) == []
    assert told(job.timer("last call"), LAUNCHED) == ["a", "b"]


def test_the_last_call_is_over_when_everybody_is_there_and_is_made_once() -> None:
    job = Job(nodes=(1, 2))
    assert told(job.comes("a", "b"), LAUNCHED) == ["a", "b"]
    job.fails("a")
    assert told(job.down("b"), LAUNCHED) == ["a", "b"]


def test_a_node_of_another_version_is_refused() -> None:
    job = Job()
    hello = protocol.Hello(protocol.VERSION + 1, "a", "host-a", "10.0.0.1", 1, 0)
    [(_, refused)] = sent(job.says("a", hello), protocol.Refused)
    assert "install the same holdfast everywhere" in refused.reason


def test_nodes_with_other_settings_are_let_in_with_a_note_to_everybody() -> None:
    job = Job(nodes=3)
    job.comes("a", settings="--max-restarts=3")
    assert told(job.comes("b", settings="--max-restarts=5"), protocol.Note) == ["a", "b"]


def test_static_ranks_are_what_the_nodes_say_and_missing_ones_are_named() -> None:
    job = Job(nodes=3, static=True)
    job.comes("a", order=2)
    assert waiting_text(job, "a").endswith("for node rank 0, node rank 1")
    job.comes("b", order=0)
    job.comes("c", order=1)
    assert [job.world(node).group_rank for node in "abc"] == [2, 0, 1]


def test_a_static_rank_that_is_taken_or_too_high_is_refused() -> None:
    job = Job(nodes=2, static=True)
    job.comes("a", order=0)
    job.comes("b", order=0)
    job.comes("c", order=2)
    assert "--node-rank 0 is taken by host-a" in job.got("b", protocol.Refused)[0].reason
    assert "--node-rank 2 is not below --nnodes 2" in job.got("c", protocol.Refused)[0].reason


# -- a rank fails -----------------------------------------------------------------------------------------------------


def test_a_failing_node_has_the_others_stopped_at_once_and_all_are_launched_when_all_are_down() -> None:
    job = Job(nodes=3).runs("a", "b", "c")
    failing = job.says("b", protocol.Failing(0, "rank 2 failed"))
    assert sorted(told(failing, protocol.Stop)) == ["a", "b", "c"]
    job.down("b", killed(rank=2))
    assert told(job.down("a"), LAUNCHED) == []
    assert told(job.down("c"), LAUNCHED) == ["a", "b", "c"]
    assert {(job.world(n).generation, job.world(n).restart_count) for n in "abc"} == {(1, 1)}


def test_the_incident_names_the_rank_and_its_node_and_everybody_hears_of_it() -> None:
    job = Job(nodes=2).runs("a", "b")
    job.fails("b", killed(rank=3))
    job.down("a")
    for node in "ab":
        [incident] = job.opened(node)
        assert (incident.what, incident.action) == ("rank 3 on host-b: killed by SIGKILL", "restart 1 of 3")


def test_causes_of_several_nodes_are_one_incident_with_the_first_as_its_cause() -> None:
    job = Job(nodes=2).runs("a", "b")
    job.fails("b", killed(rank=3, at_s=9.0))
    job.down("a", killed(rank=0, at_s=2.0))
    [incident] = job.opened("a")
    assert (incident.rank, [follower.rank for follower in incident.followers]) == (0, [3])
    assert job.spent == 1


def test_used_up_restarts_end_the_job_on_every_node() -> None:
    job = Job(nodes=2, max_restarts=0).runs("a", "b")
    job.fails("b")
    actions = job.down("a")
    assert told(actions, protocol.Over) == ["a", "b"]
    assert job.over == protocol.Over(Kind.SIGNAL, "no restart: --max-restarts is 0", steps=1)
    assert every(actions, End) == [End()]


def test_an_incident_closes_when_every_node_has_stepped() -> None:
    job = Job(nodes=2).runs("a", "b")
    job.fails("b")
    job.down("a")
    job.steps("a")
    assert job.got("a", protocol.Closed) == []
    job.steps("b")
    assert [closed.incident.number for closed in job.got("a", protocol.Closed)] == [1]


def test_the_job_succeeds_when_every_node_is_done() -> None:
    job = Job(nodes=2).runs("a", "b")
    assert told(job.says("a", protocol.Done(0, steps=7)), protocol.Over) == []
    job.says("b", protocol.Done(0, steps=9))
    assert job.over == protocol.Over(None, "", steps=9)


def test_a_node_that_is_done_may_lose_its_helpers_or_go_without_harm_to_the_world() -> None:
    job = Job(nodes=3).runs("a", "b", "c")
    for node in "ab":
        job.says(node, protocol.Done(0, steps=7))
    job.down("a", ready=False)
    job.gone("b")
    assert job.coordinator.phase is Phase.RUNNING
    job.says("c", protocol.Done(0, steps=7))
    assert job.over == protocol.Over(None, "", steps=7)


def test_nodes_whose_helpers_come_back_are_waited_for() -> None:
    job = Job(nodes=(1, 2)).runs("a", "b")
    job.fails("b", Cause(Kind.LAUNCHER, "the zygote was killed", 9.0), ready=False)
    assert told(job.down("a"), LAUNCHED) == []
    assert told(job.says("b", protocol.Ready(29502)), LAUNCHED) == ["a", "b"]


def test_late_comers_are_told_that_the_job_is_over() -> None:
    job = Job(nodes=1, spares=1).runs("a")
    job.says("a", protocol.Done(0))
    assert sent(job.comes("z"), protocol.Over) == [("z", protocol.Over(None))]


# -- nodes are lost ---------------------------------------------------------------------------------------------------


def test_a_silent_node_is_dropped_after_its_beats_and_a_beating_one_is_not() -> None:
    job = Job(nodes=2).runs("a", "b")
    for _ in range(BEATS + 1):
        job.says("a", protocol.Beat(job.now_s, 0))
        actions = job.timer("tick")
    assert every(actions, Drop) == [Drop("b")]
    job.down("a")
    assert job.opened("a")[0].headline == "node host-b is gone (silent for 3 s)"


def test_a_beat_is_answered_with_its_own_time() -> None:
    job = Job(nodes=2).runs("a", "b")
    heard = protocol.Heard(77.5, stepped=True)
    assert sent(job.says("a", protocol.Beat(77.5, 0)), protocol.Heard) == [("a", heard)]


def test_a_lost_node_shrinks_the_world_if_enough_are_left() -> None:
    job = Job(nodes=(2, 3)).runs("a", "b", "c")
    job.gone("a")
    job.down("b")
    assert told(job.down("c"), LAUNCHED) == ["b", "c"]
    assert (job.world("b").first_rank, job.world("b").size, job.spent) == (0, 4, 1)


def test_an_incident_that_is_over_while_nobody_is_there_is_told_whole_to_the_first_that_comes() -> None:
    job = Job(nodes=1).runs("a")
    job.fails("a")
    job.gone("a")  # before the next world has stepped
    assert job.over is None
    job.comes("b", "c")
    assert [opened.number for opened in job.opened("b")] == [1, 2]
    assert [closed.incident.number for closed in job.got("b", protocol.Closed)] == [1]
    assert [opened.number for opened in job.opened("c")] == [2], "once is enough for the record"


def test_a_spare_takes_the_place_of_a_lost_node() -> None:
    job = Job(nodes=2, spares=1).runs("a", "b", "c")
    assert [standby.why for standby in job.got("c", protocol.Standby)] == ["standing by as a spare"]
    job.gone("a")
    assert told(job.down("b"), LAUNCHED) == ["b", "c"]


def test_spares_are_held_back_even_where_there_is_room() -> None:
    assert Job(nodes=(1, 4), spares=1).runs("a", "b", "c").seated == ["a", "b"]


def test_a_node_that_leaves_ends_the_world_and_is_not_in_the_next() -> None:
    job = Job(nodes=(1, 2)).runs("a", "b")
    assert told(job.leaves("b"), protocol.Stop) == ["a", "b"]
    job.down("b")
    assert told(job.down("a"), LAUNCHED) == ["a"]
    assert job.opened("a")[0].headline == "node host-b leaves: it got SIGTERM"


def test_when_all_nodes_leave_the_job_was_stopped_and_has_no_incident() -> None:
    job = Job(nodes=2).runs("a", "b")
    for node in "ab":
        job.leaves(node)
    job.down("a", "b")
    assert job.over == protocol.Over(Kind.PREEMPTED, "stopped by SIGTERM", steps=1)
    assert job.opened("a") == []


def test_a_node_that_cannot_end_its_ranks_is_not_in_the_next_world() -> None:
    job = Job(nodes=(1, 2)).runs("a", "b")
    job.fails("b", fit=False)
    assert told(job.down("a"), LAUNCHED) == ["a"]


# -- nodes join -------------------------------------------------------------------------------------------------------


def test_a_node_that_joins_makes_the_world_larger() -> None:
    job = Job(nodes=(1, 2)).runs("a")
    assert told(job.comes("b"), protocol.Stop) == ["a"]
    assert told(job.down("a"), LAUNCHED) == ["a", "b"]
    incident = job.opened("a")[0]
    assert (incident.kind, incident.headline) == (Kind.MEMBERSHIP, "node host-b joined")


def test_a_join_is_charged_after_the_first_step_and_free_before_it() -> None:
    late = Job(nodes=(1, 2)).runs("a")
    late.comes("b")
    late.down("a")
    assert late.spent == 1
    early = Job(nodes=(1, 2), last_call_s=0.0)
    early.comes("a", "b")
    early.down("a", steps=None)
    assert (early.spent, early.world("a").group_size) == (0, 2)


def test_a_failure_and_a_join_in_one_stop_are_charged_once() -> None:
    job = Job(nodes=(2, 3)).runs("a", "b")
    job.comes("c")
    job.fails("a")
    job.gone("b")
    assert job.spent == 1
    assert sorted(job.seated) == ["a", "c"]


def test_with_the_budget_of_failures_joins_and_losses_are_free() -> None:
    job = Job(nodes=(1, 2), max_restarts=0, budget=Budget.FAILURES).runs("a")
    job.comes("b")
    job.down("a")
    job.gone("b")
    job.down("a")
    assert (job.spent, job.coordinator.generation, job.over) == (0, 2, None)
    job.fails("a")
    assert job.over is not None
    assert job.over.kind is Kind.SIGNAL


def test_with_no_restart_left_a_node_that_comes_stands_by_and_is_told_why() -> None:
    job = Job(nodes=(1, 2), max_restarts=0).runs("a")
    assert told(job.comes("b"), protocol.Stop) == []
    assert job.got("b", protocol.Standby)[-1].why == "standing by as a spare: no restarts are left to take it in"


def test_a_join_that_was_free_when_it_began_never_ends_the_job() -> None:
    """The ranks may do their first step between the decision to stop them and their end."""
    job = Job(nodes=(1, 2), max_restarts=0, last_call_s=0.0)
    job.comes("a", "b")
    job.down("a", steps=3)
    assert (job.over, job.world("a").group_size) == (None, 2)


def test_nobody_joins_a_world_that_is_about_to_end() -> None:
    job = Job(nodes=(2, 3)).runs("a", "b")
    job.says("a", protocol.Done(0))
    assert told(job.comes("c"), protocol.Stop) == []


def test_a_full_world_does_not_grow() -> None:
    assert told(Job(nodes=1, spares=1).runs("a").comes("b"), protocol.Stop) == []


@pytest.mark.parametrize(("done", "left"), [(99, 2), (100, 3), (350, 3)])
def test_good_steps_give_restarts_back_but_never_more_than_were_spent(done: int, left: int) -> None:
    job = Job(nodes=1, max_restarts=3, refill_steps=100).runs("a")
    job.fails("a")
    job.says("a", protocol.Beat(job.now_s, 1, steps=done))
    assert (job.coordinator.account.history.left, job.spent) == (left, 1)


# -- min-healthy ------------------------------------------------------------------------------------------------------


def min_healthy() -> Job:
    return Job(nodes=(2, 3), policy=Policy.MIN_HEALTHY).runs("a", "b", "c")


def test_with_min_healthy_the_others_go_on_while_enough_are_healthy() -> None:
    job = min_healthy()
    actions = job.fails("c")
    assert told(actions, protocol.Stop) == []
    assert "2 healthy nodes go on" in job.got("a", protocol.Note)[0].text
    for node in "ab":
        job.says(node, protocol.Done(0, steps=5))
    assert job.over == protocol.Over(None, "", steps=5)


def test_with_min_healthy_a_lost_node_that_comes_back_stops_nobody_whatever_its_ranks_have_become() -> None:
    job = Job(nodes=(2, 3), policy=Policy.MIN_HEALTHY)
    job.comes("a", "b", "c")
    for node in "ab":
        job.says(node, protocol.Stepped(0, at_s=9.0, now_s=10.0, stays=True))
    job.gone("c")
    assert told(job.comes("c", term=0, arrival=2, generation=0, running=0), protocol.Stop) == ["c"]
    job.says("c", protocol.Stepped(0, at_s=9.0, now_s=10.0, stays=True))  # which it could not say before
    assert told(job.down("c", staying=True, stay=1, stays=True), protocol.Stop) == []
    assert [incident.kind for incident in job.opened("a")] == [Kind.LOST_NODE]


def test_with_min_healthy_ranks_that_can_stay_are_not_left_to_wait_for_a_lost_node_before_their_first_step() -> None:
    job = Job(nodes=(1, 3), policy=Policy.MIN_HEALTHY)
    job.comes("a", "b")
    job.timer("last call")
    for node in "ab":
        job.says(node, protocol.Stepped(0, at_s=9.0, now_s=10.0, stays=True))
    job.fails("b", stays=True, replaced=1)
    job.down("a", stays=True, replaced=1)
    assert (job.coordinator.generation, job.seated) == (1, ["a", "b"])
    assert told(job.gone("b"), protocol.Stop) == ["a"], "what it has begun takes all ranks"


def test_with_min_healthy_the_world_breaks_when_too_few_are_left() -> None:
    job = min_healthy()
    job.gone("c")
    assert told(job.says("b", protocol.Failing(0, "rank 2 failed")), protocol.Stop) == ["a", "b"]
    job.down("a", "b")
    assert (job.spent, job.seated) == (1, ["a", "b"])


# -- quarantine and looking -------------------------------------------------------------------------------------------


def keeps_failing(job: Job, node: str, others: str, *causes: Cause) -> None:
    for _ in range(3):
        job.fails(node, *causes)
        job.down(*others)
        job.now_s += FOREVER_S


def test_a_node_at_which_three_incidents_begin_is_set_aside_and_taken_back_when_its_time_is_over() -> None:
    job = Job(nodes=(1, 2), max_restarts=9).runs("a", "b")
    keeps_failing(job, "b", "a")
    assert job.seated == ["a"]
    assert "holdfast nodes --lift host-b takes it back" in job.got("a", protocol.Note)[-1].text
    assert told(job.timer("quarantine"), protocol.Stop) == ["a"]


@pytest.mark.parametrize(("kind", "seated"), [(Kind.HARDWARE, ["a"]), (Kind.ERROR, ["a", "b"])])
def test_failing_hardware_speaks_against_a_node_and_a_programs_error_does_not(kind: Kind, seated: list[str]) -> None:
    job = Job(nodes=(1, 2), max_restarts=9).runs("a", "b")
    keeps_failing(job, "b", "a", Cause(kind, "it ended", 8.0, rank=2))
    assert job.seated == seated


def test_a_node_without_which_there_are_too_few_is_never_set_aside() -> None:
    job = Job(nodes=2, max_restarts=9).runs("a", "b")
    keeps_failing(job, "b", "a")
    assert job.seated == ["a", "b"]


def test_a_quarantine_can_be_lifted_by_whoever_looks() -> None:
    job = Job(nodes=(1, 2), max_restarts=9).runs("a", "b")
    keeps_failing(job, "b", "a")
    actions = job.says("visitor", protocol.Look(lift="host-b"))
    [(_, nodes)] = sent(actions, protocol.Nodes)
    assert nodes.lifted
    assert told(actions, protocol.Stop) == ["a"]


def test_who_looks_sees_every_node_with_its_place() -> None:
    job = Job(nodes=2, spares=2).runs("b", "a", "c", "d")
    job.leaves("d", signal.SIGINT)
    [(_, nodes)] = sent(job.says("visitor", protocol.Look()), protocol.Nodes)
    assert [(seen.host, seen.state) for seen in nodes.nodes] == [
        ("host-b", "node rank 0"),
        ("host-a", "node rank 1"),
        ("host-c", "spare"),
        ("host-d", "leaving"),
    ]
    assert (nodes.run_id, nodes.phase, nodes.count, nodes.max_restarts) == ("run", "running", 4, 3)


def test_ranks_that_lost_their_peers_to_a_planned_stop_are_no_failure() -> None:
    """Nodes stop one after the other: what the slower ones say of their backend is the stop's own doing."""
    job = Job(nodes=(2, 3)).runs("a", "b")
    job.steps("a", "b")
    job.comes("c")
    job.down("a", Cause(Kind.BACKEND, "connection closed", job.now_s, rank=1), "b")
    assert [incident.kind for incident in job.opened("a")] == [Kind.MEMBERSHIP]
