"""The checker by itself: what it accepts, and what it must not."""

from __future__ import annotations

import msgspec
import pytest

from holdfast.control.causes import Kind
from holdfast.control.incidents import Incident
from holdfast.control.membership import Settings
from holdfast.control.worlds import World
from holdfast.simulate import observed as seen
from holdfast.simulate.invariants import Checker, Violation

SETTINGS = Settings(min_nodes=1, max_nodes=2, max_restarts=3)


def world(generation: int, rank: int = 0, restarts: int = 0) -> World:
    return World(
        "job", generation, restarts, 3, "a", 1, local_size=1, first_rank=rank, world_size=2, group_rank=rank,
        group_size=2, role_first_rank=rank, role_size=2,
    )  # fmt: skip


def incident(number: int, generation: int, kind: Kind = Kind.SIGNAL, headline: str = "killed") -> Incident:
    return Incident(number, generation, kind, headline, "restart", True)


class Told(Checker):
    def __init__(self) -> None:
        super().__init__(SETTINGS)
        self.at_s = 0.0

    def hears(self, *events: seen.Event) -> None:
        for event in events:
            self.at_s += 1.0
            self.saw(self.at_s, event)

    def launches(self, generation: int, restarts: int = 0, term: int = 0, coordinator: str = "n0.1") -> None:
        for rank in range(2):
            share = world(generation, rank, restarts)
            self.hears(seen.Launched(term, coordinator, f"n{rank}.1", f"n{rank}", share))


@pytest.fixture
def checker() -> Told:
    told = Told()
    told.launches(0)
    return told


def breaks(checker: Told, invariant: str, *events: seen.Event) -> None:
    with pytest.raises(Violation) as caught:
        checker.hears(*events)
    assert caught.value.invariant == invariant


def test_a_good_story(checker: Told) -> None:
    checker.hears(seen.Ran("n0.1", world(0), 0), seen.Restored(0, 0), seen.Stepped(0, 1), seen.Committed(0, 1))
    checker.hears(seen.IncidentOpened(0, incident(1, 0)))
    checker.launches(1, restarts=1)
    checker.hears(seen.Restored(1, 1), seen.Stepped(1, 2), seen.IncidentClosed(0, incident(1, 0)))
    checker.hears(seen.Ended(0, None, "", 2, False), seen.Finished("n0.1", None, "", 0))
    checker.at_end()


def test_a_generation_is_never_used_again(checker: Told) -> None:
    checker.launches(2)
    breaks(checker, "generations", seen.Launched(0, "n0.1", "n0.1", "n0", world(1)))


def test_a_world_is_the_same_for_all() -> None:
    checker = Told()
    checker.hears(seen.Launched(0, "n0.1", "n0.1", "n0", world(0)))
    breaks(checker, "agreement", seen.Launched(0, "n0.1", "n1.1", "n1", world(0, 1, restarts=1)))


def test_ranks_have_no_gap() -> None:
    checker = Told()
    checker.hears(seen.Launched(0, "n0.1", "n0.1", "n0", world(0)))
    wrong = msgspec.structs.replace(world(0, 1), first_rank=0)
    breaks(checker, "ranks", seen.Launched(0, "n0.1", "n1.1", "n1", wrong))


def test_a_term_is_one_coordinators(checker: Told) -> None:
    breaks(checker, "one coordinator", seen.Stopped(0, "n1.1", "n0.1", 0, "why"))


def test_a_stop_has_a_reason(checker: Told) -> None:
    breaks(checker, "causes", seen.Stopped(0, "n0.1", "n0.1", 0, ""))


@pytest.mark.parametrize("late", [seen.Stepped(0, 5), seen.Committed(0, 5)])
def test_an_older_world_does_nothing_after_a_newer(checker: Told, late: seen.Event) -> None:
    checker.hears(seen.IncidentOpened(0, incident(1, 0)))
    checker.launches(1, restarts=1)
    checker.hears(seen.Stepped(1, 1))
    breaks(checker, "fencing", late)


def test_no_rank_starts_beside_an_older_one(checker: Told) -> None:
    breaks(checker, "fencing", seen.Ran("n0.1", world(0), 1))


def test_a_restore_is_not_older_than_a_commit(checker: Told) -> None:
    checker.hears(seen.Committed(0, 7))
    breaks(checker, "checkpoints", seen.Restored(0, 6))


@pytest.mark.parametrize("restarts", [0, 2])
def test_an_incident_is_charged_once(checker: Told, restarts: int) -> None:
    checker.hears(seen.IncidentOpened(0, incident(1, 0)))
    breaks(checker, "restarts", seen.Launched(0, "n0.1", "n0.1", "n0", world(1, restarts=restarts)))


def test_the_budget_is_kept() -> None:
    checker = Told()
    for generation in range(4):
        checker.launches(generation, restarts=generation)
    breaks(checker, "restarts", seen.Launched(0, "n0.1", "n0.1", "n0", world(4, restarts=4)))


def test_a_world_has_one_incident(checker: Told) -> None:
    checker.hears(seen.IncidentOpened(0, incident(1, 0)))
    breaks(checker, "incidents", seen.IncidentOpened(0, incident(2, 0)))


def test_every_world_but_the_last_has_an_incident(checker: Told) -> None:
    checker.launches(1)
    with pytest.raises(Violation, match="generation 0 ended without one"):
        checker.at_end()


def test_every_incident_is_closed(checker: Told) -> None:
    checker.hears(seen.IncidentOpened(0, incident(1, 0)), seen.Ended(0, Kind.SIGNAL, "no restart", 2, False))
    with pytest.raises(Violation, match="incident 1 was never closed"):
        checker.at_end()


def test_a_world_is_not_stopped_for_no_reason(checker: Told) -> None:
    breaks(checker, "causes", seen.IncidentOpened(0, incident(1, 0, Kind.MEMBERSHIP, "the world was stopped")))


def test_who_is_set_aside_or_leaves_is_not_taken(checker: Told) -> None:
    checker.hears(seen.SetAside("n1"))
    breaks(checker, "quarantine", seen.Launched(0, "n0.1", "n1.1", "n1", world(1, 1)))
    checker.hears(seen.TakenBack("n1"), seen.Left("n0.1", 1))
    breaks(checker, "leavers", seen.Launched(0, "n0.1", "n0.1", "n0", world(2)))


def test_nothing_comes_after_the_end(checker: Told) -> None:
    checker.hears(seen.Ended(0, None, "", 2, False))
    breaks(checker, "the end", seen.Launched(0, "n0.1", "n0.1", "n0", world(1)))


def test_no_rank_is_left_behind(checker: Told) -> None:
    breaks(checker, "leftovers", seen.Finished("n0.1", None, "", 1))


def test_a_job_does_not_end_for_want_of_nodes_that_are_there(checker: Told) -> None:
    breaks(checker, "the end", seen.Ended(0, Kind.LOST_NODE, "1 of 1 nodes came within 5 s", 1, False))


def test_worlds_do_not_come_too_fast() -> None:
    checker = Told()
    with pytest.raises(Violation, match="worlds within a minute"):
        for generation in range(60):
            checker.at_s -= 2.0
            checker.launches(generation)


# -- hangs, requests and progress -------------------------------------------------------------------------------------


def found(silent_s: float = 10.0, awake_s: float = 99.0, limit_s: float = 10.0, least_s: float = 5.0) -> seen.FoundHung:
    return seen.FoundHung("n0.1", 0, 1, silent_s, awake_s, limit_s, least_s)


def a_hang(*suspects: int) -> Incident:
    return msgspec.structs.replace(incident(1, 0, Kind.HANG, "no step"), suspects=suspects)


@pytest.mark.parametrize("wrong", [found(silent_s=9.0), found(awake_s=1.0), found(least_s=11.0)])
def test_nobody_is_found_hung_too_soon(checker: Told, wrong: seen.FoundHung) -> None:
    checker.hears(found())
    breaks(checker, "hangs", wrong)


def test_a_hang_needs_a_monitor_that_found_it(checker: Told) -> None:
    breaks(checker, "hangs", seen.IncidentOpened(0, a_hang()))


def test_only_ranks_that_hang_are_suspected(checker: Told) -> None:
    checker.hears(seen.Hung(0, 1), found(), seen.IncidentOpened(0, a_hang(1)))
    other = Told()
    other.launches(0)
    other.hears(seen.Hung(0, 1), found())
    breaks(other, "hangs", seen.IncidentOpened(0, a_hang(0, 1)))


def test_who_was_to_be_excluded_is_in_no_later_world_unless_it_was_lifted(checker: Told) -> None:
    checker.hears(seen.Excluded("n1"))
    breaks(checker, "requests", seen.Launched(0, "n0.1", "n1.2", "n1", world(1, 1)))
    checker.hears(seen.TakenBack("n1"), seen.Launched(0, "n0.1", "n1.2", "n1", world(2, 1)))


def test_after_somebody_asked_for_the_end_there_is_no_world_and_no_other_end(checker: Told) -> None:
    checker.hears(seen.EndAsked(0))
    breaks(checker, "requests", seen.Launched(0, "n0.1", "n0.1", "n0", world(1)))
    breaks(checker, "requests", seen.Ended(0, Kind.SIGNAL, "no restart", 2, False))


def test_the_end_is_not_as_asked_where_nobody_asked(checker: Told) -> None:
    breaks(checker, "requests", seen.Ended(0, Kind.REQUESTED, "rank 1 asked", 2, False))


def stuck_at(steps: int, worlds: int, advances: bool = True) -> Told:
    settings = Settings(min_nodes=1, max_nodes=2, max_restarts=9, max_no_progress=2)
    checker = Told()
    Checker.__init__(checker, settings)
    for generation in range(worlds):
        checker.launches(generation, restarts=generation)
        if steps and advances:
            checker.hears(seen.Stepped(generation, steps + generation))
        failed = msgspec.structs.replace(incident(generation + 1, generation), steps=steps)
        checker.hears(seen.IncidentOpened(0, failed), seen.IncidentClosed(0, failed))
    return checker


def test_worlds_without_a_step_do_not_follow_each_other_for_ever() -> None:
    stuck_at(1, 5)
    with pytest.raises(Violation, match="2 restarts in a row"):
        stuck_at(0, 3)


def test_a_job_is_not_given_up_while_it_gets_further() -> None:
    reason = "2 restarts in a row got no further than step 9 (--max-no-progress-restarts sets how many may)"
    stuck_at(1, 3, advances=False).hears(seen.Ended(0, Kind.SIGNAL, reason, 2, False))
    breaks(stuck_at(1, 3), "progress", seen.Ended(0, Kind.SIGNAL, reason, 2, False))


def test_a_coordinator_that_slept_through_the_end_of_its_job_says_nothing_of_the_next(checker: Told) -> None:
    checker.hears(seen.Ended(0, None, "", 2, False), seen.Renewed(another_job=True, term=3))
    checker.hears(seen.IncidentClosed(0, incident(7, 0)), seen.Ended(0, Kind.SIGNAL, "no restart: all", 2, False))
    assert checker.ended is None


def test_no_step_is_lost_that_a_living_rank_has(checker: Told) -> None:
    checker.hears(seen.Restored(0, 6, held=6))
    breaks(checker, "staying", seen.Restored(0, 6, held=7))


def test_who_could_stay_is_not_ended_without_a_reason(checker: Told) -> None:
    checker.hears(seen.Discarded("n0.1", 0, 0, "late"))
    breaks(checker, "staying", seen.Discarded("n0.1", 0, 0, ""))
    checker.hears(seen.FoundHung("n0.1", 0, 1, 9.0, 9.0, 5.0, 5.0), seen.Discarded("n0.1", 0, 0, ""))
