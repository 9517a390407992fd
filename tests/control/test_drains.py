"""Planned ends: ranks are asked to end at a boundary, everywhere, and only as long as all of them can get there."""

from __future__ import annotations

import signal

import msgspec
import pytest
from scripted import Job, killed, sent
from stories import GRACE_S, Story, a_world, every, running, stopping, the, the_told

from holdfast.agent.result import Result
from holdfast.control import protocol
from holdfast.control.acts import Action, Exited, Finish, HelpersLost, Signal, StopRequested, Timer
from holdfast.control.causes import Kind, RankExit

IN_ORDER = "stopped by SIGTERM; all ranks saved and ended by themselves"


def drains(story: Story, rank: int, status: int = 0) -> list[Action]:
    """The end of a rank that was asked."""
    assert story.node.world is not None
    exit = RankExit(rank, 100 + rank, status, story.now_s + 1.0, 5, drained=True)
    return story.hears(Exited(story.node.world.generation, exit))


# -- a node -----------------------------------------------------------------------------------------------------------


def test_ranks_that_end_in_order_when_the_node_is_told_to_make_it_end_well() -> None:
    story = running()
    told = story.hears(StopRequested(signal.SIGTERM))
    assert the(told, Signal) == Signal((0, 1), signal.SIGTERM, "holdfast got SIGTERM", drain=True)
    assert the(told, Timer) == Timer("grace", 0, GRACE_S)
    assert drains(story, 0) == []
    ended = drains(story, 1)
    assert ended[-1] == Finish(Kind.PREEMPTED, IN_ORDER, drained=True)
    assert the_told(ended, protocol.Down).causes == ()


def test_ranks_that_were_signalled_do_not() -> None:
    story = running()
    story.hears(StopRequested(signal.SIGTERM))
    drains(story, 0)
    assert story.ends(1, 0)[-1] == Finish(Kind.PREEMPTED, "stopped by SIGTERM")


def test_one_that_has_to_be_killed_spoils_it() -> None:
    story = running()
    story.hears(StopRequested(signal.SIGTERM))
    drains(story, 0)
    assert the(story.timer("grace"), Signal) == Signal(
        (1,), signal.SIGKILL, f"still there {GRACE_S:g} s after being told to stop"
    )
    assert drains(story, 1, -signal.SIGKILL)[-1] == Finish(Kind.PREEMPTED, "stopped by SIGTERM")


def test_a_repeated_signal_does_not_cut_it_short_but_a_second_ctrl_c_does() -> None:
    story = running()
    story.hears(StopRequested(signal.SIGTERM))
    assert the(story.hears(StopRequested(signal.SIGTERM)), Signal).drain
    assert the(story.hears(StopRequested(signal.SIGHUP)), Signal).drain
    now = the(story.hears(StopRequested(signal.SIGINT)), Signal)
    assert (now.signum, now.drain) == (signal.SIGKILL, False)


def test_a_planned_stop_of_the_coordinator_asks_and_any_other_signals() -> None:
    assert the(running().hears(protocol.Stop(0, "host-c joins", drain=True)), Signal).drain
    assert not the(running().hears(protocol.Stop(0, "node b is gone")), Signal).drain
    assert not the(running().launched(1), Signal).drain


def test_after_a_planned_stop_the_node_is_there_for_the_next_world() -> None:
    story = running()
    story.hears(protocol.Stop(0, "host-c joins", drain=True))
    drains(story, 0)
    down = the_told(drains(story, 1), protocol.Down)
    assert (down.causes, down.ready) == ((), True)
    story.launched(1)
    assert not the(story.hears(protocol.Stop(1, "node b is gone")), Signal).drain


def test_a_node_that_is_told_after_its_ranks_have_ended_in_order_ends_well() -> None:
    """A scheduler tells one node after the other, and the first one's leaving ends the ranks of all."""
    story = running()
    story.hears(protocol.Stop(0, "node b leaves", drain=True))
    drains(story, 0)
    drains(story, 1)
    assert story.hears(StopRequested(signal.SIGTERM))[-1] == Finish(Kind.PREEMPTED, IN_ORDER, drained=True)


@pytest.mark.parametrize("how", [-signal.SIGTERM, 0])
def test_but_not_if_one_of_them_did_not(how: int) -> None:
    story = running()
    story.hears(protocol.Stop(0, "node b leaves", drain=True))
    drains(story, 0)
    story.ends(1, how)
    assert story.hears(StopRequested(signal.SIGTERM))[-1] == Finish(Kind.PREEMPTED, "stopped by SIGTERM")


def test_a_rank_that_fails_while_all_are_to_end_gives_it_up() -> None:
    story = running()
    story.hears(StopRequested(signal.SIGTERM))
    actions = drains(story, 0, 3)
    why = "rank 0 failed while all were to end: exited with code 3"
    assert the_told(actions, protocol.Failing) == protocol.Failing(0, why)
    assert the(actions, Signal) == Signal((1,), signal.SIGTERM, why)
    assert every(actions, Timer) == []  # the time that they have does not begin anew
    assert not the(story.hears(StopRequested(signal.SIGTERM)), Signal).drain
    assert story.ends(1, -signal.SIGTERM)[-1] == Finish(Kind.PREEMPTED, "stopped by SIGTERM")


def test_a_rank_that_was_signalled_and_ends_gives_nothing_up() -> None:
    """Ranks that cannot be asked get the signal. That one of them goes first is no news to the others."""
    story = running()
    story.hears(StopRequested(signal.SIGTERM))
    assert story.ends(0, -signal.SIGTERM) == []


def test_the_coordinator_may_give_it_up_once() -> None:
    story = running()
    story.hears(protocol.Stop(0, "host-c joins", drain=True))
    assert story.hears(protocol.Stop(0, "host-c joins", drain=True)) == []
    assert story.hears(protocol.Stop(0, "node b is gone")) == [Signal((0, 1), signal.SIGTERM, "node b is gone")]
    assert story.hears(protocol.Stop(0, "node b is gone")) == []


def test_a_node_that_stops_a_failed_world_asks_nobody() -> None:
    story = stopping()
    assert not the(story.hears(StopRequested(signal.SIGTERM)), Signal).drain
    assert drains(story, 1)[-1] == Finish(Kind.PREEMPTED, "stopped by SIGTERM")


def test_helpers_that_are_lost_meanwhile_spoil_it() -> None:
    story = running()
    story.hears(StopRequested(signal.SIGTERM))
    drains(story, 0)
    assert story.hears(HelpersLost("the zygote was killed"))[-1] == Finish(Kind.PREEMPTED, "stopped by SIGTERM")


@pytest.mark.parametrize(("drained", "from_cause", "code"), [(True, False, 0), (True, True, 87), (False, False, 1)])
def test_the_exit_code_of_a_job_that_was_told_to_end(drained: bool, from_cause: bool, code: int) -> None:
    assert Result(Kind.PREEMPTED, "", (), (), None, drained).exit_code(from_cause) == code


# -- the coordinator --------------------------------------------------------------------------------------------------


def drained(actions: list[object]) -> dict[str, bool]:
    return {node: stop.drain for node, stop in sent(actions, protocol.Stop)}  # type: ignore[arg-type]


def test_when_a_node_leaves_the_ranks_of_all_are_asked() -> None:
    job = Job((1, 3)).runs("a", "b", "c")
    assert drained([*job.leaves("b")]) == {"a": True, "b": True, "c": True}
    job.down("a", "b", "c")
    assert job.seated == ["a", "c"]


def test_when_a_node_joins_too() -> None:
    job = Job((1, 3)).runs("a", "b")
    assert drained([*job.comes("c")]) == {"a": True, "b": True}


def test_a_failure_is_no_planned_end() -> None:
    job = Job(2).runs("a", "b")
    assert drained([*job.says("a", protocol.Failing(0, "rank 0 failed"))]) == {"a": False, "b": False}


def test_a_node_that_is_lost_meanwhile_gives_it_up_for_the_others() -> None:
    job = Job((1, 3)).runs("a", "b", "c")
    job.leaves("b")
    assert drained([*job.gone("a")]) == {"b": False, "c": False}
    assert drained([*job.gone("b")]) == {}  # they know


def test_a_rank_that_fails_meanwhile_too() -> None:
    job = Job((1, 3)).runs("a", "b", "c")
    job.leaves("b")
    why = "rank 0 failed while all were to end: exited with code 3"
    assert drained([*job.says("a", protocol.Failing(0, why))]) == {"a": False, "b": False, "c": False}


def test_one_that_has_failed_when_it_is_heard_of_too() -> None:
    job = Job((1, 3)).runs("a", "b", "c")
    job.leaves("b")
    assert drained([*job.down("a")]) == {}
    assert drained([*job.down("b", killed())]) == {"c": False}


def test_where_a_node_is_not_here_nobody_is_asked() -> None:
    """A coordinator that has just taken over has not met all yet, and cannot tell them."""
    before = Job((1, 3)).runs("a", "b", "c")
    job = Job((1, 3), record=before.written, term=1, node="d", elected=True)
    job.comes("b", running=0, generation=0, term=0)
    assert drained([*job.leaves("b")]) == {"b": False}


# -- the job's id -----------------------------------------------------------------------------------------------------


def test_all_worlds_of_a_job_have_one_id_and_each_its_place_under_it() -> None:
    job = Job(2, node="a").runs("a", "b")
    first = job.world("a")
    assert first.job_id and first.ordinal == 0
    assert job.world("b").job_id == first.job_id
    job.fails("a")
    job.down("b")
    assert (job.world("b").job_id, job.world("b").ordinal) == (first.job_id, 1)


def test_a_coordinator_that_takes_over_goes_on_with_it() -> None:
    before = Job(2, node="a").runs("a", "b")
    job = Job(2, record=before.written, term=1, node="b")
    job.comes("b", running=0, generation=0, term=0)
    job.gone("a")
    job.comes("a2")
    job.timer("return")
    job.down("b")
    assert job.world("b").generation == 1
    assert (job.world("b").job_id, job.world("b").ordinal) == (before.world("b").job_id, 1)


def test_a_coordinator_without_a_ledger_learns_it_from_the_nodes() -> None:
    job = Job(2, node="c")
    job.comes("a", "b", generation=4, term=7, job_id="x.7")
    assert (job.world("a").generation, job.world("a").job_id) == (5, "x.7")
    assert job.world("a").ordinal > 0


def test_another_start_of_the_job_has_another_one() -> None:
    before = Job(2, node="a").runs("a", "b")
    for node in ("a", "b"):
        before.says(node, protocol.Done(0, 5))
    assert before.over is not None
    job = Job(2, record=before.written, term=1, node="a").runs("a3", "b3")
    assert job.world("a3").job_id != before.world("a").job_id
    assert (job.world("a3").generation, job.world("a3").ordinal) == (1, 0)


def test_a_node_tells_it_when_it_greets_again() -> None:
    story = Story().runs()
    story.hears(protocol.Launch(msgspec.structs.replace(a_world(1), job_id="x.0")))
    assert the_told(story.meets(1), protocol.Hello).job_id == "x.0"
