"""Which ends of a job are worth another machine: by kind, by what was decided beyond it, and on every node."""

from __future__ import annotations

import pytest
from scripted import Job, killed
from stories import idle

from holdfast.agent.result import Result
from holdfast.control import protocol
from holdfast.control.acts import Finish
from holdfast.control.causes import EXIT_CODES, Cause, Kind, is_worth_rescheduling

N = 75

BY_KIND = {
    None: False,
    Kind.ERROR: False,
    Kind.BACKEND: True,
    Kind.SIGNAL: True,
    Kind.OUT_OF_MEMORY: False,
    Kind.HARDWARE: True,
    Kind.HANG: True,
    Kind.LOST_NODE: True,
    Kind.PREEMPTED: True,
    Kind.LAUNCHER: True,
    Kind.REQUESTED: False,
    Kind.MEMBERSHIP: True,
}


def raised(kind: Kind = Kind.ERROR) -> Cause:
    return Cause(kind, "ValueError: bad", 8.0, rank=0, status=1, raised=True, where="train.py:7")


def over_on(job: Job, node: str) -> Finish:
    """What a node makes of what it is told at the end."""
    [over] = job.got(node, protocol.Over)
    [finish] = idle().hears(over)
    assert isinstance(finish, Finish)
    return finish


def is_worth_it(finish: Finish) -> bool:
    return is_worth_rescheduling(finish.kind, finish.elsewhere)


# -- the rule ---------------------------------------------------------------------------------------------------------


def test_every_kind_has_a_row() -> None:
    assert set(BY_KIND) == {None, *Kind}


@pytest.mark.parametrize(("kind", "worth"), BY_KIND.items())
def test_the_kind_says_it_unless_more_is_known(kind: Kind | None, worth: bool) -> None:
    assert is_worth_rescheduling(kind) is worth
    assert is_worth_rescheduling(kind, elsewhere=True)
    assert not is_worth_rescheduling(kind, elsewhere=False)


# -- the exit code ----------------------------------------------------------------------------------------------------


def a_result(kind: Kind | None, drained: bool = False, elsewhere: bool | None = None) -> Result:
    return Result(kind, "", (), (), None, drained, elsewhere)


@pytest.mark.parametrize(("kind", "worth"), BY_KIND.items())
def test_the_code_is_the_given_one_or_what_it_would_be_without(kind: Kind | None, worth: bool) -> None:
    without = 0 if kind is None else 93 if kind is Kind.REQUESTED else 1
    assert a_result(kind).exit_code(False) == without
    assert a_result(kind).exit_code(False, N) == (N if worth else without)
    of_cause = 0 if kind is None else EXIT_CODES[kind]
    assert a_result(kind).exit_code(True) == of_cause
    assert a_result(kind).exit_code(True, N) == (N if worth else of_cause)


def test_a_job_that_was_stopped_in_order_is_not_done() -> None:
    assert a_result(Kind.PREEMPTED, drained=True).exit_code(False, N) == N


def test_a_kill_that_restarts_do_not_get_past_has_the_code_of_a_kill() -> None:
    assert a_result(Kind.SIGNAL, elsewhere=False).exit_code(False, N) == 1
    assert a_result(Kind.SIGNAL, elsewhere=False).exit_code(True, N) == 83


# -- every node -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cause", "worth"), [(killed(at_s=8.0), True), (raised(), False), (raised(Kind.BACKEND), True)]
)
def test_all_nodes_end_alike_whoever_failed(cause: Cause, worth: bool) -> None:
    job = Job(nodes=2, max_restarts=0).runs("a", "b")
    job.fails("b", cause)
    job.down("a")
    assert over_on(job, "a") == over_on(job, "b")
    assert is_worth_it(over_on(job, "a")) is worth


@pytest.mark.parametrize(("cause", "worth"), [(killed(at_s=8.0), True), (raised(), False)])
def test_a_spare_goes_where_the_others_go_and_has_succeeded_otherwise(cause: Cause, worth: bool) -> None:
    job = Job(nodes=1, spares=1, max_restarts=0).runs("a", "b")
    job.fails("a", cause)
    spare = over_on(job, "b")
    assert spare.kind is None
    assert is_worth_it(spare) is worth


def test_a_spare_of_a_job_that_succeeded_is_done() -> None:
    job = Job(nodes=1, spares=1).runs("a", "b")
    job.says("a", protocol.Done(0))
    assert over_on(job, "b") == Finish(None)


def test_too_few_nodes_are_a_matter_of_machines() -> None:
    job = Job(nodes=2)
    job.comes("a")
    job.timer("join")
    assert is_worth_it(over_on(job, "a"))


def test_a_node_that_asks_to_be_excluded_where_there_is_no_other_may_find_one() -> None:
    job = Job(nodes=1, alone=True).runs("a")
    job.says("a", protocol.Request(0, 0, "exclude-node", "ECC errors"))
    job.down("a")
    assert is_worth_it(over_on(job, "a"))


def test_who_is_refused_would_be_refused_from_anywhere() -> None:
    [finish] = idle().hears(protocol.Refused("no"))
    assert isinstance(finish, Finish)
    assert not is_worth_it(finish)


# -- no progress ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [kind for kind in Kind if kind is not Kind.MEMBERSHIP])  # which stalls nothing
def test_restarts_that_got_nowhere_would_get_nowhere_elsewhere_unless_it_was_no_program(kind: Kind) -> None:
    job = Job(nodes=1, max_restarts=99, max_no_progress=2).runs("a")
    for _ in range(3):
        job.fails("a", Cause(kind, "it ended", 8.0, rank=0), steps=7, base=10)
        job.now_s += 60.0
    assert over_on(job, "a").kind is kind
    assert is_worth_it(over_on(job, "a")) is (kind in (Kind.HARDWARE, Kind.PREEMPTED))


def test_the_same_error_before_the_first_step_is_the_programs() -> None:
    job = Job(nodes=1, max_restarts=99)
    job.comes("a")
    for _ in range(3):
        job.now_s += 60.0
        job.fails("a", raised(), steps=0)
    assert over_on(job, "a").elsewhere is False


def test_a_job_that_has_used_its_restarts_but_got_further_each_time_is_worth_it() -> None:
    job = Job(nodes=1, max_restarts=2, max_no_progress=2).runs("a")
    for base in (10, 20, 30):
        job.fails("a", steps=7, base=base)
        job.now_s += 60.0
    assert is_worth_it(over_on(job, "a"))
