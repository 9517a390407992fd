"""One node's state machine and its coordinator: greetings, orders, silence, and what a node does without one."""

from __future__ import annotations

import signal

import pytest
from stories import (
    BEAT_S,
    CLOSE_S,
    JOIN_S,
    ZYGOTE,
    Story,
    a_world,
    between,
    every,
    idle,
    running,
    stopping,
    the,
    the_told,
    told,
    without_helpers,
)

from holdfast.control import protocol
from holdfast.control.acts import (
    Action,
    Closed,
    Contact,
    ContactLost,
    Finish,
    HangUp,
    HelpersLost,
    HelpersReady,
    Lease,
    Opened,
    PrepareHelpers,
    Run,
    Signal,
    Stepped,
    StopRequested,
    Tell,
    Timer,
    Told,
)
from holdfast.control.causes import Kind
from holdfast.control.incidents import Incident
from holdfast.control.membership import BEATS
from holdfast.control.standing import Phase


def cut_off(story: Story) -> Story:
    story.hears(ContactLost())
    return story


def greeting(story: Story) -> tuple[protocol.Hello, list[protocol.ToCoordinator]]:
    """What a new coordinator hears first, and what with it."""
    hello, *rest = told(story.hears(Contact()))
    assert isinstance(hello, protocol.Hello)
    return hello, rest


def succeeded() -> Story:
    story = running()
    story.ends(0, steps=3)
    story.ends(1, steps=4)
    return story


# -- greetings --------------------------------------------------------------------------------------------------------


def test_a_node_begins_by_preparing_its_helpers_and_waits_for_a_coordinator() -> None:
    assert Story().log == [PrepareHelpers(), Timer("contact", 0, JOIN_S)]


def test_a_node_greets_only_when_it_is_warm() -> None:
    story = Story()
    assert story.hears(Contact()) == [Timer("beat", 1, BEAT_S)]
    assert [type(message) for message in told(story.hears(HelpersReady()))] == [protocol.Hello]


def test_a_warm_node_greets_at_once_and_once_per_contact() -> None:
    story = Story()
    story.hears(HelpersReady())
    hello, rest = greeting(story)
    assert (hello.generation, hello.running, hello.ready, rest) == (-1, -1, True, [])
    assert hello.now_s == story.now_s
    assert told(story.hears(HelpersReady())) == [protocol.Ready(0)]


def test_a_node_that_was_in_a_world_greets_even_without_helpers() -> None:
    story = cut_off(without_helpers())
    hello, rest = greeting(story)
    assert not hello.ready
    assert [type(message) for message in rest] == [protocol.Down]
    assert told(story.hears(HelpersReady())) == [protocol.Ready(0)]


def test_a_greeting_carries_what_the_node_knows_of_the_past() -> None:
    story = Story()
    story.hears(HelpersReady())
    hello, _ = greeting(story)
    story.hears(protocol.Welcome(term=4, arrival=7, said_s=hello.now_s))
    story.launched(9, restarts=2)
    hello, _ = greeting(cut_off(story))
    assert (hello.term, hello.arrival, hello.generation, hello.restarts, hello.running) == (4, 7, 9, 2, 9)


def test_a_running_node_has_nothing_more_to_say_in_its_greeting_until_it_has_stepped() -> None:
    story = cut_off(running())
    assert greeting(story)[1] == []
    cut_off(story)
    story.hears(Stepped(0, 0, 1020.0))
    assert told(story.hears(Stepped(1, 0, 1021.0))) == []
    assert greeting(story)[1] == [protocol.Stepped(0, at_s=1021.0, now_s=story.now_s)]


def test_a_failing_node_says_so_again_in_its_greeting() -> None:
    hello, rest = greeting(cut_off(stopping()))
    assert hello.running == 0
    assert rest == [protocol.Failing(0, "rank 0 failed: exited with code 1")]


def test_a_node_whose_world_failed_while_it_was_cut_off_tells_the_causes_with_its_greeting() -> None:
    story = cut_off(running())
    assert told(story.ends(0, 1)) == []
    assert told(story.ends(1, -signal.SIGTERM)) == []
    hello, [down] = greeting(story)
    assert isinstance(down, protocol.Down)
    assert (hello.running, [cause.rank for cause in down.causes]) == (-1, [0])


def test_a_node_that_succeeded_while_it_was_cut_off_tells_so_with_its_greeting() -> None:
    story = cut_off(running())
    story.ends(0, steps=3)
    story.ends(1, steps=4)
    assert greeting(story)[1] == [protocol.Done(0, steps=4)]


def test_a_leaving_node_says_so_again_before_anything_else() -> None:
    story = cut_off(running())
    story.hears(StopRequested(signal.SIGTERM))
    assert greeting(story)[1][0] == protocol.Leaving(signal.SIGTERM)


# -- orders -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("generation", [3, 2])
def test_a_launch_of_a_generation_that_is_not_newer_is_ignored(generation: int) -> None:
    story = idle()
    story.launched(3)
    assert story.launched(generation) == []
    assert story.node.phase is Phase.RUNNING


def test_a_launch_that_comes_before_the_welcome_is_of_an_earlier_contact_and_is_ignored() -> None:
    story = Story()
    story.hears(HelpersReady())
    hello, _ = greeting(story)
    assert story.launched() == []
    story.hears(protocol.Welcome(0, 0, said_s=hello.now_s - 1.0))  # and so is a welcome to what was said in that one
    assert story.launched() == []
    story.hears(protocol.Welcome(0, 0, said_s=hello.now_s))
    assert story.launched() == [Run(a_world())]


def test_a_launch_while_old_ranks_live_stops_them_first() -> None:
    story = running()
    assert the(story.launched(1), Signal) == Signal((0, 1), signal.SIGTERM, "generation 1 has begun")
    assert story.ends(0, -signal.SIGTERM) == []
    actions = story.ends(1, -signal.SIGTERM)
    assert actions[-1] == Run(a_world(1))
    assert the_told(actions, protocol.Down).generation == 0


def test_only_the_newest_of_several_launches_is_run_when_the_old_ranks_are_gone() -> None:
    story = running()
    story.launched(1)
    story.launched(2)
    story.ends(0, -signal.SIGTERM)
    assert every(story.ends(1, -signal.SIGTERM), Run) == [Run(a_world(2))]


def test_a_stop_ends_the_ranks_of_its_generation_and_their_end_has_no_cause() -> None:
    story = running()
    assert the(story.hears(protocol.Stop(0, "node b is gone")), Signal).why == "node b is gone"
    assert story.hears(protocol.Stop(0, "node b is gone")) == []
    story.ends(0, -signal.SIGTERM)
    assert the_told(story.ends(1, -signal.SIGTERM), protocol.Down).causes == ()


def test_a_stop_of_an_older_world_leaves_the_newer_one_alone() -> None:
    story = between()
    story.launched(1)
    assert story.hears(protocol.Stop(0, "old")) == []


def test_a_stop_for_a_world_that_never_ran_here_is_answered_and_remembered() -> None:
    story = idle()
    down = the_told(story.hears(protocol.Stop(4, "broken")), protocol.Down)
    assert (down.generation, down.causes, down.ready) == (4, (), True)
    assert story.launched(4) == []
    assert story.launched(5) == [Run(a_world(5))]


def test_a_stop_takes_back_a_launch_that_waits_for_old_ranks() -> None:
    story = running()
    story.launched(1)
    assert story.hears(protocol.Stop(1, "broken")) == []
    story.ends(0, -signal.SIGTERM)
    actions = story.ends(1, -signal.SIGTERM)
    assert every(actions, Run) == []
    assert the_told(actions, protocol.Down).generation == 1


def test_a_stop_takes_back_a_launch_that_waits_for_helpers() -> None:
    story = without_helpers()
    story.launched(1)
    assert the_told(story.hears(protocol.Stop(1, "broken")), protocol.Down).generation == 1
    assert every(story.hears(HelpersReady()), Run) == []


def test_the_end_of_the_job_is_the_end_of_an_idle_node_at_once_and_of_a_running_one_with_its_ranks() -> None:
    assert idle().hears(protocol.Over(Kind.LOST_NODE, "too few")) == [Finish(Kind.LOST_NODE, "too few")]
    story = running()
    assert the(story.hears(protocol.Over(None)), Signal).why == "the job has ended"
    story.ends(0, -signal.SIGTERM)
    assert story.ends(1, -signal.SIGTERM)[-1] == Finish(None)


def test_a_node_that_is_told_to_stop_stays_stopped_whatever_the_coordinator_says() -> None:
    story = running()
    story.hears(StopRequested(signal.SIGTERM))
    assert story.hears(protocol.Over(None)) == []
    story.ends(0)
    assert the(story.ends(1), Finish).kind is Kind.PREEMPTED


def test_a_refused_node_ends_with_the_reason() -> None:
    assert idle().hears(protocol.Refused("no")) == [Finish(Kind.LAUNCHER, "no", elsewhere=False)]


def test_what_a_person_should_know_is_passed_on() -> None:
    story = idle()
    for message in (protocol.Standby("a"), protocol.Waiting("b"), protocol.Note("c")):
        story.hears(message)
    assert [said.text for said in every(story.log, Told)] == ["a", "b", "c"]


# -- incidents --------------------------------------------------------------------------------------------------------


def incident(number: int = 1) -> Incident:
    return Incident(number, 0, Kind.ERROR, "bad", "restart", True, failed_at_s=50.0, stopped_at_s=51.0)


def test_an_incident_is_moved_to_this_nodes_clock_and_recorded_once_though_told_twice() -> None:
    story = idle()
    opened = the(story.hears(protocol.Opened(incident(), now_s=60.0)), Opened).incident
    assert (opened.failed_at_s, opened.stopped_at_s) == (story.now_s - 10.0, story.now_s - 9.0)
    assert story.hears(protocol.Opened(incident(), now_s=61.0)) == []
    assert len(every(story.hears(protocol.Opened(incident(2), now_s=62.0)), Opened)) == 1


def test_who_comes_back_says_when_the_last_incident_began() -> None:
    story = idle()
    failed_at_s = the(story.hears(protocol.Opened(incident(3), now_s=60.0)), Opened).incident.failed_at_s
    hello, _ = greeting(cut_off(story))
    assert (hello.opened, hello.failed_at_s) == ((0, 3), failed_at_s)


def test_incidents_are_recorded_even_when_the_node_is_done() -> None:
    story = idle()
    story.hears(StopRequested(signal.SIGTERM))
    assert story.node.phase is Phase.DONE
    assert len(every(story.hears(protocol.Opened(incident(), 60.0)), Opened)) == 1
    assert len(every(story.hears(protocol.Closed(incident(), 60.0)), Closed)) == 1


# -- beats ------------------------------------------------------------------------------------------------------------


def beat(story: Story) -> list[Action]:
    return story.timer("beat", story.node.contacts, after_s=BEAT_S)


def test_a_node_beats_with_its_time_and_the_generation_it_runs() -> None:
    idler, runner = idle(), running()
    assert beat(idler) == [Tell(protocol.Beat(idler.now_s, -1)), Timer("beat", 1, BEAT_S)]
    assert the_told(beat(runner), protocol.Beat) == protocol.Beat(runner.now_s, 0)


def test_beats_that_are_answered_go_on_for_ever() -> None:
    story = idle()
    for _ in range(5 * BEATS):
        assert every(beat(story), HangUp) == []
        story.hears(protocol.Heard(story.now_s))


def test_a_coordinator_that_answers_no_beat_is_given_up_once() -> None:
    story = idle()
    for _ in range(BEATS):
        assert every(beat(story), HangUp) == []
    assert beat(story) == [HangUp("it has been silent")]


def test_a_node_that_has_said_nothing_yet_expects_no_answer() -> None:
    story = Story()
    story.hears(Contact())
    for _ in range(3 * BEATS):
        assert told(beat(story)) == []
    assert every(story.log, HangUp) == []


def test_a_beat_of_an_earlier_contact_is_ignored() -> None:
    story = cut_off(idle())
    old = story.node.contacts - 1
    story.meets()
    assert story.timer("beat", old) == []


def test_the_lease_counts_from_the_beats_own_time_not_from_when_the_answer_was_read() -> None:
    story = idle()
    said_s = story.now_s
    assert story.hears(protocol.Heard(said_s), after_s=500.0) == [Lease(said_s + JOIN_S)]
    assert story.hears(protocol.Welcome(0, 0, said_s)) == [Lease(said_s + JOIN_S)]


def test_a_welcome_alone_does_not_prolong_the_lease_of_ranks_that_a_stop_may_follow_for() -> None:
    story = cut_off(running())
    hello, _ = greeting(story)
    assert story.hears(protocol.Welcome(0, 0, hello.now_s)) == []
    assert story.hears(protocol.Heard(story.now_s)) == [Lease(story.now_s - 1.0 + JOIN_S)]


# -- nobody there -----------------------------------------------------------------------------------------------------


def waited(story: Story) -> list[Action]:
    return story.timer("contact", story.node.contacts)


def test_a_node_that_reaches_no_coordinator_in_time_ends_as_lost() -> None:
    finish = the(waited(Story()), Finish)
    assert finish == Finish(Kind.LOST_NODE, "no coordinator could be reached for 600 s")


def test_a_running_node_that_reaches_no_coordinator_stops_its_ranks_first() -> None:
    story = running()
    assert story.hears(ContactLost()) == [Timer("contact", 2, JOIN_S)]
    assert every(waited(story), Signal) == [Signal((0, 1), signal.SIGTERM, "no coordinator could be reached for 600 s")]
    story.ends(0, -signal.SIGTERM)
    assert the(story.ends(1, -signal.SIGTERM), Finish).kind is Kind.LOST_NODE


def test_a_contact_timer_counts_only_while_there_is_no_contact() -> None:
    story = Story()
    story.hears(HelpersReady())
    story.hears(Contact())
    assert story.timer("contact", 0) == story.timer("contact", 1) == []
    cut_off(story)
    assert story.timer("contact", 0) == []


def test_a_contact_that_never_was_and_is_lost_does_not_begin_the_wait_again() -> None:
    assert Story().hears(ContactLost()) == []


def test_a_node_that_succeeded_waits_shorter_for_somebody_to_tell() -> None:
    story = succeeded()
    assert story.hears(ContactLost()) == [Timer("contact", 2, CLOSE_S)]
    assert waited(story) == [Finish(None)]


def test_a_node_that_succeeds_while_cut_off_begins_the_shorter_wait_then() -> None:
    story = cut_off(running())
    story.ends(0)
    assert story.ends(1) == [Timer("contact", 3, CLOSE_S)]
    assert story.timer("contact", 2) == []
    assert story.timer("contact", 3) == [Finish(None)]


def test_a_coordinator_of_a_lower_term_than_was_seen_is_hung_up_on() -> None:
    story = Story()
    story.hears(HelpersReady())
    story.meets(term=3)
    cut_off(story)
    assert every(story.meets(term=2), HangUp) == [HangUp("it has been replaced by a newer coordinator")]
    assert story.launched() == []
    assert story.node.term == 3


def test_helpers_lost_while_cut_off_are_told_with_the_next_greeting() -> None:
    story = cut_off(running())
    assert told(story.hears(HelpersLost(ZYGOTE, steps=2))) == []
    hello, [down] = greeting(story)
    assert isinstance(down, protocol.Down)
    assert (hello.ready, down.ready, down.steps, down.causes[0].kind) == (False, False, 2, Kind.LAUNCHER)
