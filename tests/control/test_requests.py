"""Hangs, requests and timeouts at the coordinator: who is told, who is blamed, and what a rank can ask for."""

from __future__ import annotations

from typing import Any

from scripted import Job, Timer, Write, every, killed, sent, told

from holdfast.control import protocol
from holdfast.control.causes import Cause, Kind
from holdfast.control.forming import Phase
from holdfast.control.membership import Budget, Policy
from holdfast.control.orders import Action
from holdfast.control.quarantine import FOREVER_S, QUARANTINE_S
from holdfast.control.stacks import Group

LAUNCHED = protocol.Launch
WHY = "rank 2 hangs: no step for 31 s (limit 30 s)"


def hang(rank: int, since_s: float = -25.0) -> Cause:
    return Cause(Kind.HANG, "no step for 31 s (limit 30 s)", since_s, rank=rank, detected_at_s=6.0)


def waiting(*ranks: int) -> Group:
    return Group(ranks, len(ranks), "all_reduce", True, ("all_reduce",))


def reading(*ranks: int) -> Group:
    return Group(ranks, len(ranks), "data.py:41 read", frames=("data.py:41 read",))


def hangs(job: Job, node: str, **more: Any) -> list[Action]:
    return job.says(node, protocol.Failing(job.coordinator.generation, WHY, hang=True, **more))


def asks(job: Job, node: str, action: str, rank: int = 0, description: str = "ECC errors") -> list[Action]:
    return job.says(node, protocol.Request(job.coordinator.generation, rank, action, description))


def taken_up(job: Job, nodes: int | tuple[int, int] = 2, **more: Any) -> Job:
    return Job(nodes, record=job.written, term=job.coordinator.term + 1, now_s=7.0, **more)


def returns(job: Job, *nodes: str, **more: Any) -> list[Action]:
    generation = job.coordinator.generation
    more = {"term": 0, "generation": generation, "running": generation, **more}
    return [action for node in nodes for action in job.comes(node, arrival="abcd".index(node), **more)]


# -- hangs ------------------------------------------------------------------------------------------------------------


def test_all_nodes_are_told_that_it_is_a_hang_and_whether_there_is_time() -> None:
    job = Job(nodes=3).runs("a", "b", "c")
    stops = sent(hangs(job, "b", native=True), protocol.Stop)
    assert stops == [(node, protocol.Stop(0, WHY, hang=True, native=True)) for node in "abc"]


def test_a_plain_failure_is_no_hang_for_anybody() -> None:
    job = Job(nodes=2).runs("a", "b")
    stops = sent(job.says("a", protocol.Failing(0, "rank 0 failed")), protocol.Stop)
    assert [stop.hang for _, stop in stops] == [False, False]


def test_a_hang_is_one_incident_with_the_suspect_named_over_all_nodes() -> None:
    job = Job(nodes=2).runs("a", "b")
    hangs(job, "a")
    hangs(job, "b")
    job.down("a", hang(0), groups=(waiting(0, 1),))
    job.down("b", hang(2), groups=(waiting(3), reading(2)))
    [incident] = job.opened("a")
    assert (incident.kind, incident.rank, incident.node, incident.suspects) == (Kind.HANG, 2, "host-b", (2,))
    assert [(group.ranks, group.node) for group in incident.groups] == [((0, 1, 3), ""), ((2,), "host-b")]
    assert incident.detected_at_s is not None
    assert incident.detected_at_s - incident.failed_at_s == 31.0
    assert (job.spent, job.world("a").generation) == (1, 1)


def test_the_stacks_of_one_world_are_not_taken_for_the_next_ones() -> None:
    job = Job(nodes=2).runs("a", "b")
    hangs(job, "a")
    job.down("a", hang(0), groups=(waiting(0, 1),))
    job.down("b", groups=(reading(2, 3),))
    hangs(job, "a")
    job.down("a", hang(0))
    job.down("b")
    assert (job.opened("a")[1].rank, job.opened("a")[1].groups) == (0, ())


def test_a_node_that_hangs_again_and_again_is_set_aside() -> None:
    job = Job(nodes=(1, 2), max_restarts=9).runs("a", "b")
    for _ in range(3):
        hangs(job, "a")
        job.down("a", hang(0), groups=(waiting(0, 1),))
        job.down("b", groups=(reading(2), waiting(3)))
        job.now_s += 60.0
    assert job.seated == ["a"]


def test_with_min_healthy_the_others_go_on_without_the_node_that_hangs_and_its_stacks_are_kept() -> None:
    job = Job(nodes=(2, 3), policy=Policy.MIN_HEALTHY).runs("a", "b", "c")
    assert told(hangs(job, "c"), protocol.Stop) == []
    job.down("c", hang(5), groups=(reading(5), waiting(4)))
    [incident] = job.opened("a")
    assert (incident.kind, incident.suspects, incident.node) == (Kind.HANG, (5,), "host-c")


def test_a_hang_that_is_told_again_by_a_node_that_returns_to_a_new_coordinator_is_one_there() -> None:
    job = taken_up(Job(nodes=2).runs("a", "b"))
    returns(job, "a", "b")
    assert [stop.hang for _, stop in sent(hangs(job, "a"), protocol.Stop)] == [True, True]


def test_the_longest_gaps_of_all_nodes_are_told_to_each() -> None:
    job = Job(nodes=2).runs("a", "b")
    job.says("a", protocol.Beat(1.0, gaps_s=(9.0, 1.0, 0.0, 4.0)))
    [(_, heard)] = sent(job.says("b", protocol.Beat(2.0, gaps_s=(3.0, 2.0, 0.0, 0.0), trained=True)), protocol.Heard)
    assert (heard.said_s, heard.gaps_s, heard.trained) == (2.0, (9.0, 2.0, 0.0, 4.0), True)
    [(_, heard)] = sent(job.says("a", protocol.Beat(3.0)), protocol.Heard)
    assert (heard.gaps_s, heard.trained) == ((9.0, 2.0, 0.0, 4.0), True)


def test_a_node_hears_for_how_long_others_evaluate_or_save_but_not_of_itself() -> None:
    job = Job(nodes=2).runs("a", "b")
    [(_, own)] = sent(job.says("a", protocol.Beat(1.0, busy_for_s=40.0, calm_for_s=9.0)), protocol.Heard)
    assert (own.busy_for_s, own.calm_for_s) == (0.0, -1.0)
    [(_, heard)] = sent(job.says("b", protocol.Beat(2.0)), protocol.Heard)
    assert (heard.busy_for_s, heard.calm_for_s) == (39.0, 10.0)


# -- exclude-node -----------------------------------------------------------------------------------------------------


def test_an_excluded_node_is_replaced_by_a_spare_at_once() -> None:
    job = Job(nodes=2, spares=1).runs("a", "b", "c")
    assert told(asks(job, "b", "exclude-node", rank=3), protocol.Stop) == ["a", "b"]
    job.down("a", "b")
    assert job.seated == ["a", "c"]
    [incident] = job.opened("a")
    assert incident.what == "rank 3 on host-b: asked to exclude its node: ECC errors"
    assert (incident.kind, job.spent) == (Kind.LOST_NODE, 1)
    assert job.got("b", protocol.Standby)[-1].why.startswith("set aside: rank 3 asked to exclude its node")


def test_without_a_spare_the_world_shrinks() -> None:
    job = Job(nodes=(1, 2)).runs("a", "b")
    asks(job, "b", "exclude-node")
    assert told(job.down("a", "b"), LAUNCHED) == ["a"]


def test_where_too_few_are_left_others_are_waited_for_and_the_job_ends_without_them() -> None:
    job = Job(nodes=2).runs("a", "b")
    asks(job, "b", "exclude-node")
    assert told(job.down("a", "b"), LAUNCHED) == []
    job.timer("join")
    assert job.over is not None
    assert (job.over.kind, job.over.reason[:12]) == (Kind.LOST_NODE, "1 of 2 nodes")


def test_another_node_can_take_the_place_and_the_same_host_cannot() -> None:
    job = Job(nodes=2).runs("a", "b")
    asks(job, "b", "exclude-node")
    job.down("a", "b")
    again = protocol.Hello(protocol.VERSION, "b2", "host-b", "10.0.0.9", 2, 29500)
    assert told(job.says("b2", again), LAUNCHED) == []
    assert told(job.comes("c"), LAUNCHED) == ["a", "c"]


def test_a_job_of_one_node_ends_where_that_is_to_be_excluded() -> None:
    job = Job(nodes=1, alone=True)
    job.comes("a")
    asks(job, "a", "exclude-node", rank=1)
    job.down("a")
    reason = "rank 1 asked to exclude its node: ECC errors; there is no other node to go on with"
    assert job.over == protocol.Over(Kind.LOST_NODE, reason, steps=1)
    assert [(incident.kind, incident.node) for incident in job.opened("a")] == [(Kind.LOST_NODE, "")]


def test_a_world_that_is_being_stopped_is_not_stopped_again_and_the_next_is_without_the_node() -> None:
    job = Job(nodes=(1, 2)).runs("a", "b")
    job.says("a", protocol.Failing(0, "rank 0 failed"))
    assert told(asks(job, "b", "exclude-node"), protocol.Stop) == []
    job.down("a", killed(at_s=8.0))
    assert told(job.down("b"), LAUNCHED) == ["a"]
    assert (job.spent, len(job.opened("a"))) == (1, 1)


def test_a_request_after_its_world_has_ended_counts_for_the_next() -> None:
    job = Job(nodes=(1, 2)).runs("a", "b")
    job.fails("a", ready=False)
    job.down("b")
    assert told(asks(job, "a", "exclude-node"), LAUNCHED) == ["b"]


def test_a_request_of_an_older_world_is_ignored() -> None:
    job = Job(nodes=2).runs("a", "b")
    job.fails("a")
    job.down("b")
    assert job.says("b", protocol.Request(0, 2, "shutdown", "too late")) == []
    assert job.coordinator.phase is Phase.RUNNING


def test_a_request_of_a_node_that_is_not_in_the_world_is_ignored() -> None:
    job = Job(nodes=1, spares=1).runs("a", "b")
    assert asks(job, "b", "shutdown") == []


def test_an_exclusion_is_written_and_outlives_the_coordinator() -> None:
    before = Job(nodes=(1, 2)).runs("a", "b")
    asks(before, "b", "exclude-node")
    job = taken_up(before, (1, 2))
    returns(job, "a", "b")
    hangs(job, "a")
    job.down("a", "b")
    assert job.seated == ["a"]


def test_an_exclusion_has_no_end_and_can_be_lifted() -> None:
    job = Job(nodes=(1, 2)).runs("a", "b")
    asks(job, "b", "exclude-node")
    job.down("a", "b")
    assert [timer for timer in every(job.log, Timer) if timer.name == "quarantine"] == []
    assert told(job.says("visitor", protocol.Look(lift="host-b")), protocol.Stop) == ["a"]
    job.down("a")
    assert job.seated == ["a", "b"]


def test_an_exclusion_is_not_cut_short_by_a_quarantine() -> None:
    job = Job(nodes=(1, 2), max_restarts=9).runs("a", "b")
    for _ in range(2):
        job.fails("b", killed(2, at_s=8.0))
        job.down("a")
        job.now_s += 60.0
    asks(job, "b", "exclude-node", rank=2)
    job.down("a", "b")
    assert job.coordinator.quarantine.left_s("host-b", job.now_s) > FOREVER_S / 2 > QUARANTINE_S


def test_with_the_budget_of_failures_an_exclusion_is_free() -> None:
    job = Job(nodes=(1, 2), max_restarts=0, budget=Budget.FAILURES).runs("a", "b")
    asks(job, "b", "exclude-node")
    job.down("a", "b")
    assert (job.spent, job.over, job.seated) == (0, None, ["a"])


# -- shutdown ---------------------------------------------------------------------------------------------------------


def test_a_shutdown_stops_the_world_and_ends_the_job_with_a_code_that_says_so() -> None:
    job = Job(nodes=2, spares=1).runs("a", "b", "c")
    assert told(asks(job, "b", "shutdown", rank=2, description="the loss is NaN"), protocol.Stop) == ["a", "b"]
    job.down("a", "b", steps=5)
    reason = "rank 2 asked to end the job: the loss is NaN; it is not to be requeued"
    assert job.over == protocol.Over(Kind.REQUESTED, reason, steps=5)
    assert job.got("a", protocol.Over) == [job.over]
    [incident] = job.opened("a")
    assert (incident.kind, incident.action, incident.restarted) == (Kind.REQUESTED, "the job ends", False)
    assert [closed.incident for closed in job.got("a", protocol.Closed)] == [incident]
    assert job.spent == 0


def test_a_shutdown_whose_nodes_are_all_gone_by_then_is_told_whole_to_the_next_that_comes() -> None:
    job = Job(nodes=2).runs("a", "b")
    asks(job, "b", "shutdown")
    job.gone("a")
    job.gone("b")
    job.comes("c")
    [incident] = job.opened("c")
    assert (incident.kind, incident.action) == (Kind.REQUESTED, "the job ends")
    assert [closed.incident for closed in job.got("c", protocol.Closed)] == [incident]
    assert job.got("c", protocol.Over) == [job.over]


def test_a_shutdown_during_a_stop_ends_the_job_instead_of_a_restart() -> None:
    job = Job(nodes=2).runs("a", "b")
    job.says("a", protocol.Failing(0, "rank 0 failed"))
    asks(job, "b", "shutdown")
    job.down("a", killed(at_s=8.0))
    job.down("b")
    assert job.over is not None
    assert job.over.kind is Kind.REQUESTED


def test_a_shutdown_after_its_world_has_settled_ends_the_job_at_once() -> None:
    job = Job(nodes=2).runs("a", "b")
    job.fails("a", ready=False)
    job.down("b")
    assert job.coordinator.phase is Phase.GATHERING
    asks(job, "b", "shutdown")
    assert job.over is not None
    assert job.over.kind is Kind.REQUESTED


def test_a_shutdown_counts_for_more_than_nodes_that_leave() -> None:
    job = Job(nodes=2).runs("a", "b")
    asks(job, "b", "shutdown")
    for node in "ab":
        job.leaves(node)
    job.down("a", "b")
    assert job.over is not None
    assert job.over.kind is Kind.REQUESTED


def test_a_shutdown_outlives_the_coordinator_that_accepted_it() -> None:
    before = Job(nodes=2).runs("a", "b")
    asks(before, "b", "shutdown")
    job = taken_up(before)
    assert told(returns(job, "a"), protocol.Stop) == ["a"]
    returns(job, "b", running=-1)
    job.down("a", "b")
    assert job.over is not None
    assert (job.over.kind, job.got("a", LAUNCHED)) == (Kind.REQUESTED, [])
    assert job.opened("a")[0].kind is Kind.REQUESTED


def test_a_shutdown_is_done_though_nobody_of_its_world_returns_but_somebody_remembers() -> None:
    before = Job(nodes=2, spares=1).runs("a", "b", "c")
    asks(before, "b", "shutdown")
    job = taken_up(before, spares=1)
    job.comes("c", term=0, arrival=2)
    job.timer("return")
    assert job.over is not None
    assert job.over.kind is Kind.REQUESTED


def test_a_job_whose_nodes_were_all_started_anew_begins_anew_whatever_was_asked_before() -> None:
    before = Job(nodes=1).runs("a")
    asks(before, "a", "shutdown")
    job = taken_up(before, 1)
    job.comes("x")
    job.timer("return")
    job.timer("fence")
    assert (job.over, job.seated) == (None, ["x"])


def test_a_request_that_comes_with_a_greeting_is_done_before_another_world_is_formed() -> None:
    before = Job(nodes=(1, 2)).runs("a", "b")
    before.fails("a", ready=False)
    before.down("b")
    job = taken_up(before, (1, 2))
    request = protocol.Request(0, 2, "exclude-node", "ECC errors")
    assert told(returns(job, "b", running=-1, asks=request), LAUNCHED) == []
    assert told(returns(job, "a", running=-1), LAUNCHED) == ["a"]


def test_the_same_request_over_several_connections_is_one_cause() -> None:
    job = Job(nodes=(1, 2)).runs("a", "b")
    for _ in range(3):
        asks(job, "b", "exclude-node", rank=2)
    job.down("a", "b")
    assert job.opened("a")[0].followers == ()


# -- progress ---------------------------------------------------------------------------------------------------------


def test_a_job_that_gets_no_further_ends_and_says_why() -> None:
    job = Job(nodes=1, max_restarts=99, max_no_progress=2).runs("a")
    for _ in range(3):
        assert job.over is None
        job.fails("a", steps=7, base=10)
        job.now_s += 60.0
    reason = "2 restarts in a row got no further than step 17 (--max-no-progress-restarts sets how many may)"
    assert job.over == protocol.Over(Kind.SIGNAL, reason, steps=21, elsewhere=False)


def test_any_number_may_where_none_was_set() -> None:
    job = Job(nodes=1, max_restarts=99).runs("a")
    for _ in range(20):
        job.fails("a", steps=7, base=10)
        job.now_s += 60.0
    assert job.over is None


def test_what_a_node_did_while_nobody_could_hear_it_counts() -> None:
    """Its ranks train on until their lease is over; how far they got is told after the incident was opened."""
    job = Job(nodes=2, max_restarts=99, max_no_progress=2).runs("a", "b")
    job.fails("a", steps=25)
    job.down("b", steps=25)
    job.runs()
    job.gone("b")
    job.down("a", steps=0, base=20)
    assert job.coordinator.account.history.stalled == 1
    job.comes("b", generation=1, running=1)
    late = job.says("b", protocol.Down(1, 10.0, (), 22, base=20, store_port=29501))
    history = job.coordinator.account.history
    assert (history.stalled, history.reached) == (0, 42)
    assert every(late, Write)[0].record.history == history


# -- timeouts ---------------------------------------------------------------------------------------------------------


def test_timeouts_are_written_and_go_into_every_later_world() -> None:
    job = Job(nodes=2).runs("a", "b")
    job.says("a", protocol.Learned('{"a": 1}'))
    assert job.written is not None
    assert job.written.learned == '{"a": 1}'
    job.fails("a")
    job.down("b")
    assert [launch.learned for launch in job.got("b", LAUNCHED)] == ["", '{"a": 1}']


def test_timeouts_outlive_the_coordinator_and_even_its_ledger() -> None:
    before = Job(nodes=2).runs("a", "b")
    before.says("a", protocol.Learned('{"a": 1}'))
    kept, lost = taken_up(before), Job(nodes=2)
    for job in (kept, lost):
        returns(job, "a", "b", generation=0, running=-1, learned='{"a": 1}')
        job.down("a", "b")
        assert job.got("a", LAUNCHED)[-1].learned == '{"a": 1}'


def test_another_job_under_the_same_name_learns_for_itself() -> None:
    before = Job(nodes=1).runs("a")
    before.says("a", protocol.Learned('{"a": 1}'))
    before.says("a", protocol.Done(0))
    job = taken_up(before, 1)
    job.comes("x")
    assert job.got("x", LAUNCHED)[-1].learned == ""


# -- looking ----------------------------------------------------------------------------------------------------------


def test_a_peek_asks_every_node_of_the_world_and_each_answer_goes_to_who_asked() -> None:
    job = Job(nodes=2, spares=1).runs("a", "b", "c")
    asked = sent(job.says("c", protocol.Peek(7)), protocol.Show)
    assert asked == [(node, protocol.Show("c", 7, 2)) for node in "ab"]
    shown = protocol.Shown("c", 7, 2, "host-a", (waiting(0),))
    assert sent(job.says("a", shown), protocol.Shown) == [("c", shown)]


def test_without_a_world_who_peeks_is_asked_alone() -> None:
    job = Job(nodes=2)
    job.comes("a")
    assert sent(job.says("a", protocol.Peek(7)), protocol.Show) == [("a", protocol.Show("a", 7, 1))]


def test_an_answer_for_a_node_that_is_gone_goes_nowhere() -> None:
    job = Job(nodes=(1, 2)).runs("a", "b")
    assert job.says("a", protocol.Shown("z", 7, 2, "host-a", ())) == []
