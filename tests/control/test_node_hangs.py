"""A node whose ranks hang, or ask for something: what it writes down, whom it tells, and how its ranks are ended."""

from __future__ import annotations

import signal

import pytest
from stories import GRACE_S, ZYGOTE, Story, a_world, blamed, every, running, the, the_told, told

from holdfast.control import protocol
from holdfast.control.acts import (
    Action,
    Agree,
    Asked,
    Contact,
    ContactLost,
    Dumped,
    DumpStacks,
    Event,
    Finish,
    HelpersLost,
    Hung,
    Learned,
    PeekAsked,
    Run,
    Shown,
    Signal,
    StopRequested,
    Tell,
    Timer,
    Told,
)
from holdfast.control.causes import Kind
from holdfast.control.hangs import STARTING, Hang, Mode
from holdfast.control.node import DUMP_S, NATIVE_S
from holdfast.control.stacks import MAX_GROUPS, Group
from holdfast.control.standing import Phase
from holdfast.control.staying import ABANDON_S, ABANDON_WAITS

WHY = "rank 1 hangs: no step for 31 s (limit 30 s)"
PLACES = (Group((0,), 1, "all_reduce", True), Group((1,), 1, "data.py:41 read", frames=("data.py:41 read",)))


def hung(rank: int = 1, generation: int = 0, phase: int = 1, since_s: float = 980.0) -> Hung:
    return Hung(generation, Hang(rank, "no step", since_s, 30.0, phase), "no step for 31 s (limit 30 s)")


def killed(actions: list[Action]) -> tuple[int, ...]:
    assert the(actions, Signal).signum == signal.SIGKILL
    return the(actions, Signal).ranks


# -- a rank hangs -----------------------------------------------------------------------------------------------------


def test_the_coordinator_hears_of_a_hang_and_the_stacks_are_written_before_anybody_is_ended() -> None:
    story = running()
    native = story.now_s + 1.0 - 980.0 >= NATIVE_S
    assert story.hears(hung()) == [
        Tell(protocol.Failing(0, WHY, hang=True, native=native)),
        DumpStacks(0, native=native),
        Timer("dump", 0, DUMP_S),
    ]
    assert story.node.phase is Phase.STOPPING


def test_when_the_stacks_are_there_the_ranks_are_killed_and_the_hang_is_the_cause() -> None:
    story = running()
    story.hears(hung())
    assert killed(story.hears(Dumped(0, PLACES))) == (0, 1)
    story.ends(0, -signal.SIGKILL)
    actions = story.ends(1, -signal.SIGKILL)
    down = the_told(actions, protocol.Down)
    assert blamed(actions) == [(1, "no step for 31 s (limit 30 s)")]
    assert (down.causes[0].kind, down.causes[0].failed_at_s, down.groups) == (Kind.HANG, 980.0, PLACES)


def test_stacks_that_take_too_long_are_not_waited_for_and_do_not_end_anybody_twice() -> None:
    story = running()
    story.hears(hung())
    assert killed(story.timer("dump", after_s=DUMP_S)) == (0, 1)
    assert every(story.hears(Dumped(0, PLACES)), Signal) == []
    assert story.timer("dump") == []


def test_a_dump_timer_that_comes_after_the_stacks_does_nothing() -> None:
    story = running()
    story.hears(hung())
    story.hears(Dumped(0, PLACES))
    assert story.timer("dump") == []


def test_ranks_that_do_not_go_though_killed_are_abandoned_as_ever() -> None:
    story = running()
    story.hears(hung())
    story.hears(Dumped(0, PLACES))
    for _ in range(ABANDON_WAITS):
        actions = story.timer("abandon", after_s=ABANDON_S / ABANDON_WAITS)
    assert the(actions, Finish).kind is Kind.HANG


def test_another_signal_than_sigkill_leaves_a_grace() -> None:
    story = Story(hang_signal=signal.SIGTERM).runs()
    story.hears(hung())
    assert story.hears(Dumped(0, PLACES)) == [Signal((0, 1), signal.SIGTERM, WHY), Timer("grace", 0, GRACE_S)]
    assert killed(story.timer("grace", after_s=GRACE_S)) == (0, 1)


def test_of_several_verdicts_the_first_counts() -> None:
    story = running()
    story.hears(hung(1))
    assert story.hears(hung(0)) == []
    story.hears(Dumped(0, PLACES))
    story.ends(0, -signal.SIGKILL)
    assert [rank for rank, _ in blamed(story.ends(1, -signal.SIGKILL))] == [1]


@pytest.mark.parametrize("event", [hung(generation=4), hung(rank=5)], ids=["another generation", "no rank of ours"])
def test_a_verdict_about_somebody_else_is_ignored(event: Event) -> None:
    story = running()
    assert story.hears(event) == []
    assert story.node.phase is Phase.RUNNING


def test_a_rank_that_has_ended_does_not_hang() -> None:
    story = running()
    story.ends(1, 0)
    assert story.hears(hung(1)) == []


def test_a_world_that_is_being_stopped_anyway_is_not_found_hung() -> None:
    story = running()
    story.ends(0, 1)
    assert story.hears(hung(1)) == []


def test_stacks_of_the_last_generation_end_nobody() -> None:
    story = running()
    story.hears(hung())
    story.timer("dump")
    story.ends(0, -signal.SIGKILL)
    story.ends(1, -signal.SIGKILL)
    story.launched(1)
    assert story.hears(Dumped(0, PLACES)) == []
    assert story.node.phase is Phase.RUNNING


def test_without_a_coordinator_a_learned_limit_ends_nobody_and_one_that_was_asked_for_does() -> None:
    """The rank may wait for another node, and nobody could tell us so."""
    story = running()
    story.hears(ContactLost())
    assert story.hears(hung()) == []
    assert every(story.hears(hung(phase=-1)), DumpStacks) != []


# -- while the stacks are written -------------------------------------------------------------------------------------


def test_ranks_that_end_meanwhile_are_not_signalled() -> None:
    story = running()
    story.hears(hung())
    story.ends(0, 0)
    assert killed(story.hears(Dumped(0, PLACES))) == (1,)


def test_a_world_whose_ranks_all_end_meanwhile_is_down_and_the_stacks_come_too_late() -> None:
    story = running()
    story.hears(hung())
    story.ends(0, 0)
    assert blamed(story.ends(1, 0)) == [(1, "no step for 31 s (limit 30 s)")]
    assert story.hears(Dumped(0, PLACES)) == []


def test_a_rank_that_fails_meanwhile_is_a_cause_behind_the_hang() -> None:
    story = running()
    story.hears(hung())
    story.ends(0, -signal.SIGSEGV)
    story.hears(Dumped(0, PLACES))
    actions = story.ends(1, -signal.SIGKILL)
    assert [cause.kind for cause in the_told(actions, protocol.Down).causes] == [Kind.HANG, Kind.SIGNAL]


def test_a_node_that_is_told_to_stop_meanwhile_passes_that_on_and_ends_with_its_ranks() -> None:
    story = running()
    story.hears(hung())
    actions = story.hears(StopRequested(signal.SIGTERM))
    assert told(actions) == [protocol.Leaving(signal.SIGTERM)]
    assert the(actions, Signal).signum == signal.SIGTERM
    assert killed(story.hears(Dumped(0, PLACES))) == (0, 1)
    story.ends(0, -signal.SIGTERM)
    assert story.ends(1, -signal.SIGKILL)[-1] == Finish(Kind.PREEMPTED, "stopped by SIGTERM")


def test_helpers_that_are_lost_meanwhile_take_the_ranks_with_them() -> None:
    story = running()
    story.hears(hung())
    assert [cause.kind for cause in the_told(story.hears(HelpersLost(ZYGOTE)), protocol.Down).causes] == [
        Kind.HANG,
        Kind.LAUNCHER,
    ]
    assert story.hears(Dumped(0, PLACES)) == story.timer("dump") == []


def test_a_coordinator_that_comes_meanwhile_hears_that_it_is_a_hang() -> None:
    story = running()
    story.hears(hung())
    story.hears(ContactLost())
    failing = the_told(story.hears(Contact()), protocol.Failing)
    assert (failing.why, failing.hang) == (WHY, True)


def test_a_newer_world_does_not_wait_for_stacks() -> None:
    story = running()
    story.hears(hung())
    assert the(story.launched(1), Signal).signum == signal.SIGTERM
    story.ends(0, -signal.SIGTERM)
    assert story.ends(1, -signal.SIGTERM)[-1] == Run(a_world(1))


# -- hangs elsewhere --------------------------------------------------------------------------------------------------


def test_when_a_rank_of_another_node_hangs_the_stacks_are_written_here_too() -> None:
    story = running()
    assert story.hears(protocol.Stop(0, WHY, hang=True)) == [DumpStacks(0), Timer("dump", 0, DUMP_S)]
    assert killed(story.hears(Dumped(0, PLACES))) == (0, 1)
    story.ends(0, -signal.SIGKILL)
    down = the_told(story.ends(1, -signal.SIGKILL), protocol.Down)
    assert (down.causes, down.groups) == ((), PLACES)


def test_who_has_noticed_by_itself_does_not_dump_twice() -> None:
    story = running()
    story.hears(hung())
    assert story.hears(protocol.Stop(0, WHY, hang=True)) == []


def test_a_plain_stop_is_not_slowed_by_stacks() -> None:
    assert every(running().hears(protocol.Stop(0, "node b is gone")), DumpStacks) == []


def test_what_ranks_elsewhere_took_is_passed_on_to_the_monitors() -> None:
    heard = protocol.Heard(1.0, (1.0, 2.0, 0.0, 0.0), True)
    assert every(running().hears(heard), Agree) == [Agree(heard)]
    assert every(running().hears(protocol.Heard(1.0)), Agree) == []


# -- warnings and looks -----------------------------------------------------------------------------------------------


def test_where_hangs_are_only_warned_of_somebody_is_told_and_nobody_ended() -> None:
    story = Story(hang_mode=Mode.WARN).runs()
    warned, dump = story.hears(hung())
    assert isinstance(warned, Told)
    assert warned.text.startswith("rank 1 may hang: no step for 31 s")
    assert isinstance(dump, DumpStacks)
    assert story.hears(Dumped(0, PLACES)) == [Told("rank 0 in all_reduce, rank 1 in data.py:41 read")]
    assert story.node.phase is Phase.RUNNING


def test_who_looks_sees_what_the_ranks_are_doing_and_nobody_is_ended() -> None:
    story = running()
    show = protocol.Show("n2", 7, 3)
    assert the(story.hears(show), DumpStacks).show == show
    [shown] = told(story.hears(Dumped(0, PLACES * 20, show)))
    assert shown == protocol.Shown("n2", 7, 3, "host1", (PLACES * 20)[:MAX_GROUPS])
    assert story.node.phase is Phase.RUNNING


def test_a_look_and_an_answer_pass_through() -> None:
    story = running()
    assert told(story.hears(PeekAsked(7))) == [protocol.Peek(7)]
    shown = protocol.Shown("n1", 7, 1, "host2", PLACES)
    assert story.hears(shown) == [Shown(shown)]


# -- requests and timeouts --------------------------------------------------------------------------------------------


def test_a_request_is_told_at_once_and_once() -> None:
    story = running()
    request = protocol.Request(0, 1, "exclude-node", "ECC errors")
    assert told(story.hears(Asked(0, 1, "exclude-node", "ECC errors"))) == [request]
    assert story.hears(Asked(0, 0, "exclude-node", "so do I")) == []


def test_to_end_the_job_goes_beyond_all_else() -> None:
    story = running()
    story.hears(Asked(0, 1, "exclude-node", "ECC errors"))
    shutdown = protocol.Request(0, 0, "shutdown", "the loss is NaN")
    assert told(story.hears(Asked(0, 0, "shutdown", "the loss is NaN"))) == [shutdown]
    assert story.hears(Asked(0, 1, "shutdown", "again")) == []


@pytest.mark.parametrize("asked", [Asked(0, 1, "continue", ""), Asked(3, 1, "shutdown", "")], ids=["continue", "stale"])
def test_what_changes_nothing_is_not_told(asked: Asked) -> None:
    assert running().hears(asked) == []


def test_a_request_that_nobody_could_hear_comes_with_the_next_greeting_even_if_its_world_is_over() -> None:
    story = running()
    story.hears(ContactLost())
    story.hears(Asked(0, 1, "shutdown", "the loss is NaN"))
    story.ends(0, 1)
    story.ends(1, -signal.SIGTERM)
    asks = the_told(story.hears(Contact()), protocol.Hello).asks
    assert asks == protocol.Request(0, 1, "shutdown", "the loss is NaN")


def test_a_request_is_not_told_of_the_next_world() -> None:
    story = running()
    story.hears(Asked(0, 1, "exclude-node", "ECC errors"))
    story.ends(0, 1)
    story.ends(1, -signal.SIGTERM)
    story.launched(1)
    story.hears(ContactLost())
    assert the_told(story.hears(Contact()), protocol.Hello).asks is None


def test_timeouts_are_told_by_the_node_of_rank_0_and_remembered_by_all() -> None:
    first = running()
    assert told(first.hears(Learned('{"a": 1}'))) == [protocol.Learned('{"a": 1}')]
    assert first.hears(Learned('{"a": 1}')) == []
    second = Story().runs()
    second.ends(0, 1)
    second.ends(1, -signal.SIGTERM)
    second.launched(1, first_rank=2)
    assert second.hears(Learned('{"a": 1}')) == []
    second.hears(ContactLost())
    assert the_told(second.hears(Contact()), protocol.Hello).learned == '{"a": 1}'


def test_timeouts_that_are_too_long_to_send_are_not() -> None:
    assert running().hears(Learned("x" * (protocol.MAX_LEARNED + 1))) == []


def test_a_launch_brings_the_timeouts_to_its_ranks() -> None:
    story = running()
    story.ends(0, 1)
    story.ends(1, -signal.SIGTERM)
    assert story.hears(protocol.Launch(a_world(1), '{"a": 1}')) == [Run(a_world(1), '{"a": 1}')]


def test_a_node_that_had_given_up_takes_the_jobs_own_end_if_it_hears_of_it() -> None:
    story = running()
    story.hears(ContactLost())
    story.timer("contact", key=story.node.contacts)
    story.meets()
    story.hears(protocol.Over(Kind.REQUESTED, "rank 1 asked"))
    story.ends(0, -signal.SIGTERM)
    assert story.ends(1, -signal.SIGTERM)[-1] == Finish(Kind.REQUESTED, "rank 1 asked")


def test_a_hang_before_the_first_step_is_one_like_any_other() -> None:
    story = running()
    assert every(story.hears(hung(phase=STARTING)), DumpStacks) != []
