"""One node's state machine and its ranks, event by event: what it orders, what it tells, what it takes no notice of."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable

import pytest
from stories import (
    GRACE_S,
    ZYGOTE,
    Story,
    a_world,
    between,
    blamed,
    every,
    idle,
    preparing,
    running,
    stopping,
    the,
    the_told,
    told,
    without_helpers,
)

from holdfast.control import protocol
from holdfast.control.acts import (
    ClearLeftovers,
    Event,
    Exited,
    Finish,
    Gone,
    HelpersLost,
    HelpersReady,
    KeeperLost,
    Lease,
    PrepareHelpers,
    Run,
    Signal,
    Started,
    Stepped,
    StopRequested,
    Tell,
    Timer,
    TimerFired,
)
from holdfast.control.causes import Cause, Kind, RankExit
from holdfast.control.standing import Phase
from holdfast.control.staying import ABANDON_S, ABANDON_WAITS
from holdfast.wire.messages import Leaving

# -- a world that goes well -------------------------------------------------------------------------------------------


def test_a_launch_runs_the_world_and_says_when_it_has_started_and_stepped() -> None:
    story = idle()
    assert story.launched() == [Run(a_world())]
    assert told(story.hears(Started(0))) == [protocol.Started(0)]
    assert story.hears(Stepped(1, 0, 1010.0)) == []
    assert told(story.hears(Stepped(0, 0, 1009.0))) == [protocol.Stepped(0, at_s=1010.0, now_s=story.now_s)]


def test_it_trains_from_the_first_step_of_its_last_rank_until_its_world_is_over() -> None:
    """What is made ready for the next world is so meanwhile, and not when others have been told of it already."""
    story = idle()
    story.launched()
    story.hears(Started(0))
    story.hears(Stepped(0, 0, 1.0))
    assert not story.node.trains
    story.hears(Stepped(1, 0, 1.0))
    assert story.node.trains
    story.hears(KeeperLost(0))
    assert not story.node.trains


def test_the_live_ranks_are_counted_from_the_nodes_first_rank() -> None:
    story = idle()
    story.launched(first_rank=6)
    assert story.node.live == {6, 7}


def test_a_world_is_done_when_its_last_rank_ends_well() -> None:
    story = Story(ranks=3).runs()
    assert story.ends(1, steps=7) == []
    assert story.ends(0, steps=9) == []
    assert story.ends(2, steps=8) == [Tell(protocol.Done(0, steps=9))]
    assert (story.node.phase, story.node.steps) == (Phase.IDLE, 9)


def test_a_launch_that_finds_no_helpers_waits_for_them() -> None:
    story = without_helpers()
    assert story.launched(1) == []
    assert story.hears(HelpersReady())[-1] == Run(a_world(1))


# -- a rank fails -----------------------------------------------------------------------------------------------------


def test_when_a_rank_fails_the_coordinator_hears_it_and_the_others_get_sigterm_and_a_grace_timer() -> None:
    story = Story(ranks=3).runs()
    why = "rank 1 failed: killed by SIGKILL"
    assert story.ends(1, -signal.SIGKILL) == [
        Tell(protocol.Failing(0, why)),
        Signal((0, 2), signal.SIGTERM, why),
        Timer("grace", 0, GRACE_S),
    ]


def test_ranks_that_ended_well_before_are_not_signalled() -> None:
    story = Story(ranks=3).runs()
    story.ends(0)
    assert the(story.ends(1, 1), Signal).ranks == (2,)


def test_the_world_is_down_with_its_last_rank_and_not_before() -> None:
    story = Story(ranks=3).runs()
    story.ends(1, 1, steps=4)
    assert story.ends(0, -signal.SIGTERM, steps=5) == []
    actions = story.ends(2, -signal.SIGTERM)
    assert actions[0] == ClearLeftovers()
    down = the_told(actions, protocol.Down)
    assert (down.generation, down.steps, down.ready, down.fit) == (0, 5, True, True)
    assert blamed(actions) == [(1, "exited with code 1")]


def test_a_single_rank_that_fails_is_down_at_once_without_any_signal() -> None:
    actions = Story(ranks=1).runs().ends(0, 1)
    assert [type(message) for message in told(actions)] == [protocol.Failing, protocol.Down]
    assert every(actions, Signal) == []


def test_two_ranks_that_die_at_once_are_both_told_the_first_first() -> None:
    story = running()
    story.ends(1, -signal.SIGKILL, at_s=1100.0)
    assert [rank for rank, _ in blamed(story.ends(0, -signal.SIGSEGV, at_s=1099.5))] == [0, 1]


def test_a_rank_that_ends_because_it_was_told_to_is_no_cause() -> None:
    assert blamed(stopping().ends(1, -signal.SIGTERM)) == [(0, "exited with code 1")]


def test_a_killed_rank_is_a_cause_though_the_kernel_takes_its_end_apart_until_after_the_stop() -> None:
    """A process that holds a GPU closes its sockets long before it can be reaped. Only SIGTERM was sent so far, so a
    rank that ended by SIGKILL did not end because of us."""
    assert (1, "killed by SIGKILL") in blamed(stopping().ends(1, -signal.SIGKILL))


def test_a_rank_that_raised_before_the_stop_is_a_cause_and_one_that_raised_because_of_it_is_none() -> None:
    before, after = running(), running()
    early = before.raises(1)
    before.ends(0, 1, after_s=2.0)
    assert (1, "ValueError: bad") in blamed(before.ends(1, 1, raised=early))
    after.ends(0, 1)
    assert blamed(after.ends(1, 1, raised=after.raises(1, "Interrupted"))) == [(0, "exited with code 1")]


@pytest.mark.parametrize("status", [3, -signal.SIGTERM])
def test_a_rank_that_had_left_before_the_stop_is_a_cause_however_late_it_is_gone(status: int) -> None:
    """Its sockets close while its interpreter ends, so that a peer may fail, and be gone, before it is."""
    before, after = running(), running()
    left = Leaving(1, 0, before.now_s + 1.0, 3)
    before.ends(0, 1, after_s=2.0)
    assert (1, "exited with code 3") in blamed(before.ends(1, status, left=left))
    after.ends(0, 1)
    late = Leaving(1, 0, after.now_s + 1.0, 3)
    assert blamed(after.ends(1, status, left=late)) == [(0, "exited with code 1")]


def test_a_rank_that_ends_well_while_it_is_stopped_makes_no_success() -> None:
    assert blamed(stopping().ends(1, 0)) == [(0, "exited with code 1")]


def test_the_steps_of_all_worlds_are_added_up() -> None:
    story = running()
    story.ends(0, 1, steps=4)
    story.ends(1, -signal.SIGTERM, steps=5)
    story.launched(1)
    story.ends(0, steps=10)
    story.ends(1, steps=10)
    assert story.node.steps == 15


# -- ranks that do not go ---------------------------------------------------------------------------------------------


def test_ranks_that_outstay_the_grace_are_killed_and_then_abandoned_and_the_node_leaves() -> None:
    story = stopping()
    assert story.timer("grace", after_s=GRACE_S) == [
        Signal((1,), signal.SIGKILL, "still there 30 s after being told to stop"),
        Timer("abandon", 0, ABANDON_S / ABANDON_WAITS),
    ]
    for _ in range(ABANDON_WAITS - 1):  # so that a machine which sleeps meanwhile has waited but once
        assert story.timer("abandon", after_s=ABANDON_S) == [Timer("abandon", 0, ABANDON_S / ABANDON_WAITS)]
    actions = story.timer("abandon", after_s=ABANDON_S)
    assert the(actions, Finish).kind is Kind.HANG
    assert the(actions, Finish).reason.startswith("rank 1 does not end even by SIGKILL")
    assert not the_told(actions, protocol.Down).fit
    assert [cause.kind for cause in the_told(actions, protocol.Down).causes] == [Kind.ERROR, Kind.HANG]


def test_a_rank_that_goes_when_killed_is_no_cause_of_its_own() -> None:
    story = stopping()
    story.timer("grace", after_s=GRACE_S)
    assert blamed(story.ends(1, -signal.SIGKILL)) == [(0, "exited with code 1")]


def dead(rank: int, status: int = -signal.SIGKILL, generation: int = 0) -> Exited:
    """And the kernel is not done with it yet."""
    return Exited(generation, RankExit(rank, 100 + rank, status, 0.0), gone=False)


def test_nobody_waits_until_the_kernel_is_done_with_the_dead() -> None:
    story = running()
    assert Timer("gone", 0, ABANDON_S / ABANDON_WAITS) in story.hears(dead(0))
    assert the_told(story.hears(dead(1, -signal.SIGTERM)), protocol.Down).causes[0].rank == 0
    assert the(story.launched(1), Run).world.generation == 1
    assert story.hears(Gone(0, 0)) == story.hears(Gone(0, 1)) == []
    assert story.timer("gone") == []


def test_a_dead_one_that_does_not_go_has_the_node_leave() -> None:
    """It holds what the process in its place waits for."""
    story = running()
    story.hears(dead(0))
    story.ends(1, -signal.SIGTERM)
    story.launched(1)
    for _ in range(ABANDON_WAITS - 1):
        assert the(story.timer("gone", after_s=ABANDON_S), Timer).name == "gone"
    assert the(story.timer("gone", after_s=ABANDON_S), Signal).why.startswith("rank 0 does not end even by SIGKILL")
    actions = [*story.hears(Exited(1, RankExit(0, 100, -signal.SIGTERM, 0.0)))]
    actions += story.hears(Exited(1, RankExit(1, 101, -signal.SIGTERM, 0.0)))
    assert the(actions, Finish).kind is Kind.HANG and not the_told(actions, protocol.Down).fit


@pytest.mark.parametrize("name", ["grace", "abandon", "gone"])
def test_a_timer_of_the_last_generation_or_without_a_purpose_is_ignored(name: str) -> None:
    story = between()
    assert story.timer(name) == []
    story.launched(1)
    assert story.timer(name, key=1) == []
    story.ends(0, 1)
    assert story.timer(name, key=0) == []


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
    story = between()
    story.launched(1)
    assert story.hears(stale) == []
    assert (sorted(story.node.live), sorted(story.node.stepped), story.node.phase) == ([0, 1], [], Phase.RUNNING)


@pytest.mark.parametrize("at", [between, without_helpers])
def test_the_end_of_a_rank_that_is_not_live_is_ignored(at: Callable[[], Story]) -> None:
    assert at().ends(0) == []


def test_a_node_that_is_done_takes_no_notice_of_anything() -> None:
    story = idle()
    story.hears(protocol.Over(None))
    for event in (HelpersReady(), HelpersLost("x"), KeeperLost(0), StopRequested(15), TimerFired("contact", 1)):
        assert story.hears(event) == []
    assert story.launched() == []


# -- told to stop by somebody here ------------------------------------------------------------------------------------


def test_a_running_node_that_is_told_to_stop_says_so_passes_the_signal_on_and_ends_with_its_ranks() -> None:
    story = running()
    assert story.hears(StopRequested(signal.SIGINT)) == [
        Tell(protocol.Leaving(signal.SIGINT)),
        Signal((0, 1), signal.SIGINT, "holdfast got SIGINT", drain=True),
        Timer("grace", 0, GRACE_S),
    ]
    assert story.ends(0, 0) == []
    assert story.ends(1, -signal.SIGINT)[-1] == Finish(Kind.PREEMPTED, "stopped by SIGINT")


def test_a_stopping_node_that_is_told_to_stop_passes_the_signal_on_without_a_second_grace() -> None:
    story = stopping()
    assert story.hears(StopRequested(signal.SIGHUP)) == [
        Tell(protocol.Leaving(signal.SIGHUP)),
        Signal((1,), signal.SIGHUP, "holdfast got SIGHUP"),
    ]
    assert story.ends(1, -signal.SIGHUP)[-1] == Finish(Kind.PREEMPTED, "stopped by SIGHUP")


@pytest.mark.parametrize("at", [preparing, idle, between, without_helpers])
def test_a_node_without_ranks_that_is_told_to_stop_ends_at_once(at: Callable[[], Story]) -> None:
    assert at().hears(StopRequested(signal.SIGTERM))[-1] == Finish(Kind.PREEMPTED, "stopped by SIGTERM")


@pytest.mark.parametrize("at", [running, stopping])
def test_a_second_ctrl_c_kills(at: Callable[[], Story]) -> None:
    story = at()
    story.hears(StopRequested(signal.SIGINT))
    live = tuple(sorted(story.node.live))
    killed = Signal(live, signal.SIGKILL, "holdfast got SIGINT while stopping")
    assert story.hears(StopRequested(signal.SIGINT)) == [killed]
    for rank in live:
        actions = story.ends(rank, -signal.SIGKILL)
    assert actions[-1] == Finish(Kind.PREEMPTED, "stopped by SIGINT")


def test_a_repeated_sigterm_is_passed_on_and_cuts_nothing_short() -> None:
    story = running()
    story.hears(StopRequested(signal.SIGTERM))
    again = Signal((0, 1), signal.SIGTERM, "holdfast got SIGTERM while stopping", drain=True)
    assert story.hears(StopRequested(signal.SIGTERM)) == [again]
    assert the(story.timer("grace"), Signal).signum == signal.SIGKILL


# -- helpers and keepers ----------------------------------------------------------------------------------------------


def test_lost_helpers_take_the_world_with_them_and_are_replaced() -> None:
    story = running()
    actions = story.hears(HelpersLost(ZYGOTE, steps=6))
    assert [type(action) for action in actions] == [Tell, ClearLeftovers, PrepareHelpers, Tell]
    down = the_told(actions, protocol.Down)
    assert (down.steps, down.ready) == (6, False)
    assert down.causes == (Cause(Kind.LAUNCHER, ZYGOTE, story.now_s),)
    assert told(story.hears(HelpersReady())) == [protocol.Ready(0)]


def test_helpers_lost_before_the_first_world_are_not_replaced() -> None:
    reason = "the janitor was killed while workers were about to start"
    assert preparing().hears(HelpersLost("the janitor was killed")) == [ClearLeftovers(), Finish(Kind.LAUNCHER, reason)]


def test_a_spare_gets_new_helpers_though_it_never_had_a_world() -> None:
    actions = idle().hears(HelpersLost(ZYGOTE))
    assert every(actions, PrepareHelpers) == [PrepareHelpers()]
    assert the_told(actions, protocol.Down).ready is False


def test_helpers_lost_between_two_worlds_cost_nothing_but_readiness() -> None:
    actions = between().hears(HelpersLost(ZYGOTE))
    assert every(actions, PrepareHelpers) == [PrepareHelpers()]
    down = the_told(actions, protocol.Down)
    assert (down.generation, down.ready, down.causes) == (0, False, ())


def test_helpers_lost_while_stopping_are_not_the_first_cause() -> None:
    assert blamed(stopping().hears(HelpersLost(ZYGOTE)))[0] == (0, "exited with code 1")


def test_helpers_lost_after_a_stop_request_end_the_node_with_its_steps_counted() -> None:
    story = running()
    story.hears(StopRequested(signal.SIGTERM))
    assert story.hears(HelpersLost(ZYGOTE, steps=3))[-1] == Finish(Kind.PREEMPTED, "stopped by SIGTERM")
    assert story.node.steps == 3


def test_helpers_lost_twice_in_a_row_do_not_count_the_last_worlds_steps_twice() -> None:
    story = running()
    story.ends(0, 0, steps=5)
    story.hears(HelpersLost(ZYGOTE))
    story.hears(HelpersLost(ZYGOTE))
    assert story.node.steps == 5


def test_a_lost_keeper_ends_the_world_and_is_the_cause_unless_it_was_stopping_anyway() -> None:
    story = running()
    assert the(story.hears(KeeperLost(0)), Signal).why == "the store keeper was killed"
    story.ends(0, -signal.SIGTERM)
    assert blamed(story.ends(1, -signal.SIGTERM)) == [(None, "the store keeper was killed")]
    assert stopping().hears(KeeperLost(0)) == []


def test_a_node_that_is_alone_has_no_lease_and_no_timers_but_for_its_ranks() -> None:
    story = Story(join_timeout_s=math.inf).runs()
    assert [action for action in story.log if isinstance(action, Lease | Timer)] == []
