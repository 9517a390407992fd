"""The decision to restart: how often, how soon, and when it is no use."""

from __future__ import annotations

import pytest

from holdfast.control.causes import Kind
from holdfast.control.restarts import (
    EARLY_S,
    MAX_BACKOFF_S,
    Failure,
    GiveUp,
    History,
    Restart,
    backoff_s,
    decide,
    decide_unless_same_error,
)


def a_failure(
    kind: Kind = Kind.ERROR,
    headline: str = "ValueError: bad",
    where: str = "train.py:7",
    raised: bool = True,
    steps: int | None = 0,
    uptime_s: float = 100.0,
    base: int = 0,
) -> Failure:
    return Failure(kind, 0, headline, where, raised, steps, uptime_s, base)


def after(failures: list[Failure], limit: int = 10) -> History:
    history = History(limit)
    for failure in failures:
        history = history.seen(failure)
    return history


def test_a_failure_is_answered_by_a_restart_while_some_are_left() -> None:
    assert decide(History(3).charged(), a_failure()) == Restart("restart 2 of 3")


def test_asking_twice_is_free() -> None:
    history = History(1)
    assert decide(history, a_failure()) == decide(history, a_failure()) == Restart("restart 1 of 1")
    assert history.left == 1


def test_the_last_restart_is_the_limit() -> None:
    history = History(2).charged().charged()
    assert history.left == 0
    assert decide(history, a_failure()) == GiveUp("no restart: all 2 are used")


def test_without_restarts_the_reason_is_the_flag() -> None:
    assert decide(History(0), a_failure()) == GiveUp("no restart: --max-restarts is 0")


def test_seeing_a_failure_charges_nothing() -> None:
    assert after([a_failure(), a_failure()]).spent == 0


# -- the same error ---------------------------------------------------------------------------------------------------


def test_three_times_the_same_exception_before_a_step_is_a_bug_in_the_program() -> None:
    twice = after([a_failure()] * 2)
    assert isinstance(decide_unless_same_error(twice, a_failure()), Restart)
    decision = decide_unless_same_error(twice.seen(a_failure()), a_failure())
    assert isinstance(decision, GiveUp)
    assert "--retry-same-error" in decision.reason
    assert decision.elsewhere is False


def test_the_plain_decision_goes_on_regardless() -> None:
    assert isinstance(decide(after([a_failure()] * 9), a_failure()), Restart)


@pytest.mark.parametrize(
    "other",
    [
        a_failure(headline="ValueError: worse"),
        a_failure(where="train.py:8"),
        a_failure(steps=1),
        a_failure(raised=False),
        a_failure(kind=Kind.BACKEND),
        a_failure(kind=Kind.OUT_OF_MEMORY),
    ],
    ids=["headline", "line", "stepped", "no exception", "backend", "memory"],
)
def test_another_failure_in_between_begins_the_count_again(other: Failure) -> None:
    same = a_failure()
    history = after([same, same, other, same, same])
    assert history.same_error_in_a_row == 2
    assert isinstance(decide_unless_same_error(history, same), Restart)


@pytest.mark.parametrize(
    "failure",
    [
        a_failure(kind=Kind.SIGNAL, raised=False),
        a_failure(kind=Kind.ERROR, raised=False),
        a_failure(kind=Kind.BACKEND),
        a_failure(kind=Kind.OUT_OF_MEMORY),
        a_failure(kind=Kind.HARDWARE),
        a_failure(kind=Kind.LAUNCHER, raised=False),
        a_failure(steps=1),
    ],
    ids=["signal", "exit code", "backend", "memory", "hardware", "launcher", "stepped"],
)
def test_what_may_be_the_machines_fault_is_never_the_same_error(failure: Failure) -> None:
    assert isinstance(decide_unless_same_error(after([failure] * 9), failure), Restart)


def test_exhausted_restarts_are_the_reason_even_without_the_same_error() -> None:
    assert decide_unless_same_error(History(1).charged(), a_failure()) == GiveUp("no restart: all 1 are used")


# -- crash loops ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("early", "wait_s"), [(0, 0.0), (1, 0.0), (2, 0.5), (3, 1.0), (4, 2.0), (7, 16.0), (8, MAX_BACKOFF_S)]
)
def test_the_wait_doubles_with_every_early_failure(early: int, wait_s: float) -> None:
    assert backoff_s(early) == wait_s


def test_the_wait_has_an_end_however_long_the_loop() -> None:
    assert backoff_s(100_000) == MAX_BACKOFF_S


def test_only_worlds_that_die_soon_and_without_a_step_are_a_crash_loop() -> None:
    early = a_failure(uptime_s=EARLY_S - 0.1)
    assert after([early, early]).early_in_a_row == 2
    assert after([early, early, a_failure(uptime_s=EARLY_S)]).early_in_a_row == 0
    assert after([early, early, a_failure(uptime_s=1.0, steps=1)]).early_in_a_row == 0


def test_a_crash_loop_is_restarted_after_its_wait() -> None:
    early = a_failure(kind=Kind.SIGNAL, raised=False, uptime_s=1.0)
    assert decide(after([early] * 3), early) == Restart("restart 1 of 10", after_s=1.0)


# -- refill -----------------------------------------------------------------------------------------------------------


def test_a_restart_that_is_given_back_can_be_used_again_and_the_count_still_grows() -> None:
    history = History(2).charged().charged().refunded()
    assert (history.left, history.spent) == (1, 2)
    assert decide(history, a_failure()) == Restart("restart 3 of 2 (and 1 given back)")
    assert history.charged().left == 0


def test_no_more_is_given_back_than_was_spent() -> None:
    assert History(3).refunded().left == 3
    assert History(3).charged().refunded().refunded().refunded().left == 3


def test_what_was_given_back_survives_a_failure() -> None:
    assert History(3).charged().refunded().seen(a_failure()).left == 3


def test_a_world_whose_steps_cannot_be_seen_is_taken_for_one_without_any() -> None:
    unseen = Failure(Kind.ERROR, 0, "ValueError: bad", "train.py:7", True, steps=None, uptime_s=1.0)
    assert after([unseen] * 3).same_error_in_a_row == after([unseen] * 3).early_in_a_row == 3


# -- progress ---------------------------------------------------------------------------------------------------------


def stalled_after(*failures: Failure) -> int:
    """With a restart after each."""
    history = History(99)
    for failure in failures:
        history = history.seen(failure).charged()
    return history.stalled


def test_the_first_world_is_no_restart() -> None:
    assert stalled_after(a_failure()) == 0


def test_worlds_without_a_step_count() -> None:
    assert stalled_after(a_failure(), a_failure(), a_failure(), a_failure()) == 3


def test_a_world_that_resumed_has_to_get_past_the_furthest_step() -> None:
    first = a_failure(steps=100)
    again = a_failure(steps=40, base=60)
    assert stalled_after(first, again, again) == 2
    assert stalled_after(first, again, a_failure(steps=41, base=60)) == 0
    assert stalled_after(first, again, a_failure(steps=41, base=60), again) == 1


def test_a_world_that_began_from_nothing_has_to_take_a_step() -> None:
    assert stalled_after(a_failure(steps=100), a_failure(steps=1), a_failure(steps=1)) == 0
    assert stalled_after(a_failure(steps=100), a_failure(steps=0)) == 1


def test_where_steps_cannot_be_seen_nothing_is_known() -> None:
    unseen = a_failure(steps=None)
    assert stalled_after(unseen, unseen, unseen) == 0
    assert stalled_after(a_failure(), a_failure(), unseen, unseen) == 1


def test_a_node_that_joins_is_nobodys_failure_but_what_its_world_got_to_counts() -> None:
    idle, joined = a_failure(), a_failure(kind=Kind.MEMBERSHIP)
    assert stalled_after(idle, idle, joined, joined) == 1
    assert stalled_after(idle, idle, a_failure(kind=Kind.MEMBERSHIP, steps=3)) == 0


def test_how_far_it_got_is_remembered_over_worlds_that_got_less_far() -> None:
    history = after([a_failure(steps=5, base=10), a_failure(steps=1, base=10), a_failure(steps=None)])
    assert history.reached == 15
