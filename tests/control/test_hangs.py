"""When a rank counts as hung: each rule by itself, and random lives against a slow and obvious reference."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from holdfast.control.hangs import (
    ENDING,
    EVALUATING,
    LATE_S,
    SAVING,
    SELDOM_FLOORS,
    STARTING,
    STARTING_FLOORS,
    STEPS_TO_LEARN,
    TRAINING,
    UNSEEN_FLOORS,
    Busy,
    Gaps,
    Hang,
    Mode,
    Rules,
    Section,
    Vitals,
    Watch,
)

FLOOR_S = 10.0
FACTOR = 5.0
UNSEEN_S = UNSEEN_FLOORS * FLOOR_S
NO_GAPS: Gaps = (0.0, 0.0, 0.0, 0.0)
BEGAN_S = 1000.0


def a_watch(mode: Mode = Mode.RESTART, first_s: float | None = None) -> Watch:
    watch = Watch(Rules(mode=mode, floor_s=FLOOR_S, safety_factor=FACTOR, first_s=first_s))
    watch.begin(BEGAN_S)
    return watch


def vitals(
    phase: int = TRAINING,
    alive_s: float = BEGAN_S,
    steps: int = STEPS_TO_LEARN,
    trains: bool = True,
    gaps_s: Gaps = (20.0, 4.0, 0.0, 0.0),
    **more: Any,
) -> Vitals:
    return Vitals(phase, alive_s, steps, trains, gaps_s, **more)


def deadline_s(watch: Watch, seen: Vitals | None, now_s: float = BEGAN_S + 1.0) -> float:
    """How long after the beginning the rank may be silent."""
    due_s = watch.look(now_s, 0, seen)
    assert isinstance(due_s, float)
    return due_s - BEGAN_S


def verdict(watch: Watch, seen: Vitals | None, after_s: float, rank: int = 0) -> Hang:
    hang = watch.look(BEGAN_S + after_s, rank, seen)
    assert isinstance(hang, Hang)
    return hang


# -- what was learned -------------------------------------------------------------------------------------------------


def test_the_first_step_has_long_where_nothing_is_known() -> None:
    assert deadline_s(a_watch(), vitals(STARTING, steps=0, gaps_s=NO_GAPS)) == UNSEEN_S


def test_the_first_step_of_a_later_world_has_several_times_as_long_as_earlier_ones_took_but_not_little() -> None:
    watch = a_watch()
    watch.agree((20.0, 0.0, 0.0, 0.0), False)
    assert deadline_s(watch, vitals(STARTING, steps=0, gaps_s=NO_GAPS)) == STARTING_FLOORS * FLOOR_S
    watch.agree((100.0, 0.0, 0.0, 0.0), False)
    assert deadline_s(watch, vitals(STARTING, steps=0, gaps_s=NO_GAPS)) == FACTOR * 100.0


def test_a_program_without_an_optimizer_is_never_hung() -> None:
    assert deadline_s(a_watch(), vitals(STARTING, steps=0, trains=False, gaps_s=NO_GAPS)) == math.inf


@pytest.mark.parametrize("trains", [True, False])
def test_a_limit_for_the_first_step_that_was_asked_for_counts_as_it_is(trains: bool) -> None:
    watch = a_watch(first_s=3.0)
    watch.agree((100.0, 0.0, 0.0, 0.0), False)
    assert deadline_s(watch, vitals(STARTING, steps=0, trains=trains, gaps_s=NO_GAPS)) == 3.0
    assert verdict(watch, vitals(STARTING, steps=0, trains=trains, gaps_s=NO_GAPS), 3.0).what == "no first step"


def test_no_limit_for_the_first_step_can_be_asked_for() -> None:
    assert deadline_s(a_watch(first_s=0.0), vitals(STARTING, steps=0, gaps_s=NO_GAPS)) == math.inf
    assert deadline_s(a_watch(first_s=0.0), None) == math.inf


def test_a_heartbeat_is_a_first_sign_of_life() -> None:
    """The limit for the first one is done with; what was learned for the first step is not."""
    beating = vitals(STARTING, steps=0, gaps_s=NO_GAPS, client_s=BEGAN_S, heartbeat_s=BEGAN_S)
    assert deadline_s(a_watch(first_s=3.0), beating) == UNSEEN_S


@pytest.mark.parametrize(("steps", "limit_s"), [(STEPS_TO_LEARN - 1, UNSEEN_S), (STEPS_TO_LEARN, FACTOR * 4.0)])
def test_training_has_its_own_limit_once_enough_steps_were_seen(steps: int, limit_s: float) -> None:
    assert deadline_s(a_watch(), vitals(steps=steps)) == limit_s


def test_no_learned_limit_is_below_the_floor() -> None:
    assert deadline_s(a_watch(), vitals(gaps_s=(20.0, 0.01, 0.0, 0.0))) == FLOOR_S


@pytest.mark.parametrize("phase", [EVALUATING, SAVING])
def test_a_first_evaluation_or_save_has_long_and_a_later_one_what_was_learned(phase: int) -> None:
    assert deadline_s(a_watch(), vitals(phase)) == UNSEEN_S
    gaps = [20.0, 4.0, 0.0, 0.0]
    gaps[phase] = 30.0
    assert deadline_s(a_watch(), vitals(phase, gaps_s=(gaps[0], gaps[1], gaps[2], gaps[3]))) == FACTOR * 30.0


@pytest.mark.parametrize("phase", [EVALUATING, SAVING])
def test_a_short_evaluation_or_save_says_little_about_a_long_one(phase: int) -> None:
    gaps = [20.0, 4.0, 0.0, 0.0]
    gaps[phase] = 0.01
    seen = vitals(phase, gaps_s=(gaps[0], gaps[1], gaps[2], gaps[3]))
    assert deadline_s(a_watch(), seen) == SELDOM_FLOORS * FLOOR_S


def test_while_others_step_a_rank_without_an_optimizer_has_another_part_to_play() -> None:
    seen = vitals(STARTING, steps=0, trains=False)
    limit_s = STARTING_FLOORS * FLOOR_S
    late_s = BEGAN_S + limit_s + 1.0
    assert isinstance(a_watch().look(late_s, 0, seen), Hang)
    assert a_watch().look(late_s, 0, seen, lambda: Busy(stepped=True)) == late_s + limit_s
    watch = a_watch()
    watch.others(Busy(stepped=True))
    assert watch.look(late_s, 0, seen) == late_s + limit_s
    training = vitals(STARTING, steps=0, trains=True)
    assert isinstance(a_watch().look(late_s, 0, training, lambda: Busy(stepped=True)), Hang)


def test_after_the_last_step_there_is_long_whatever_was_learned() -> None:
    assert deadline_s(a_watch(), vitals(ENDING, gaps_s=(900.0, 900.0, 900.0, 900.0))) == UNSEEN_S


def test_limits_of_the_scripts_own_end_with_it() -> None:
    seen = own(phase=ENDING, sections=(Section(0, BEGAN_S, 1.0),), heartbeat_s=BEGAN_S, heartbeat_limit_s=2.0)
    assert deadline_s(a_watch(), seen, BEGAN_S + 5.0) == UNSEEN_S


def test_time_counts_from_the_last_sign_of_life() -> None:
    seen = vitals(alive_s=BEGAN_S + 50.0)
    assert deadline_s(a_watch(), seen) == 50.0 + FACTOR * 4.0
    later = vitals(alive_s=BEGAN_S, client_s=BEGAN_S, heartbeat_s=BEGAN_S + 70.0)
    assert deadline_s(a_watch(), later) == 70.0 + FACTOR * 4.0


def test_a_hang_says_what_did_not_come_and_for_how_long() -> None:
    hang = verdict(a_watch(), vitals(), 20.5)
    assert (hang.rank, hang.phase, hang.slot, hang.since_s, hang.limit_s) == (0, TRAINING, -1, BEGAN_S, 20.0)
    assert hang.headline(BEGAN_S + 20.5) == "no step for 20.5 s (limit 20 s)"
    assert verdict(a_watch(), vitals(SAVING), UNSEEN_S).headline(BEGAN_S + UNSEEN_S).startswith("saving for 1.2e+03 s")


def test_at_the_deadline_it_is_a_hang_and_just_before_it_is_none() -> None:
    watch = a_watch()
    assert watch.look(BEGAN_S + 19.999, 0, vitals()) == BEGAN_S + 20.0
    assert isinstance(watch.look(BEGAN_S + 20.0, 0, vitals()), Hang)


# -- before there is a beacon -----------------------------------------------------------------------------------------


def test_a_rank_that_has_left_no_sign_yet_is_hung_only_by_a_limit_that_was_asked_for() -> None:
    assert deadline_s(a_watch(), None) == math.inf
    watch = a_watch(first_s=3.0)
    assert deadline_s(watch, None) == 3.0
    assert verdict(watch, None, 3.0).what == "not started"


# -- what the script says ---------------------------------------------------------------------------------------------


def own(**more: Any) -> Vitals:
    return vitals(client_s=BEGAN_S, **more)


def test_a_first_heartbeat_and_later_ones_have_limits_of_their_own() -> None:
    assert deadline_s(a_watch(), own(first_limit_s=7.0, heartbeat_limit_s=2.0)) == 7.0
    beating = own(first_limit_s=7.0, heartbeat_limit_s=2.0, heartbeat_s=BEGAN_S + 5.0)
    assert deadline_s(a_watch(), beating) == 7.0
    assert verdict(a_watch(), beating, 7.0).headline(BEGAN_S + 7.0) == "no heartbeat for 2 s (limit 2 s)"
    assert verdict(a_watch(), own(first_limit_s=7.0), 7.0).what == "no first heartbeat"


def test_limits_of_the_script_replace_the_learned_ones_even_if_they_are_longer() -> None:
    assert deadline_s(a_watch(), own(heartbeat_s=BEGAN_S, heartbeat_limit_s=500.0)) == 500.0


def test_a_script_that_monitors_itself_without_limits_has_the_learned_ones() -> None:
    assert deadline_s(a_watch(), own(heartbeat_s=BEGAN_S)) == FACTOR * 4.0


def test_every_open_section_counts_however_deep() -> None:
    outer, inner = Section(0, BEGAN_S, 9.0), Section(1, BEGAN_S + 3.0, 4.0)
    assert deadline_s(a_watch(), own(sections=(outer, inner))) == 7.0
    assert deadline_s(a_watch(), own(sections=(outer, Section(1, BEGAN_S + 8.0, 4.0)))) == 9.0
    hang = verdict(a_watch(), own(sections=(outer, inner)), 7.0)
    assert (hang.slot, hang.headline(BEGAN_S + 7.0, "data")) == (1, "section 'data' open for 4 s (limit 4 s)")


def test_time_outside_of_sections_has_a_limit_too() -> None:
    outside = own(outside_s=BEGAN_S + 2.0, outside_limit_s=3.0)
    assert deadline_s(a_watch(), outside) == 5.0
    assert verdict(a_watch(), outside, 5.0).what == "outside of any section"


def test_the_first_of_several_limits_counts() -> None:
    seen = own(heartbeat_s=BEGAN_S, heartbeat_limit_s=6.0, sections=(Section(3, BEGAN_S, 5.0),))
    assert verdict(a_watch(), seen, 6.0).slot == 3


# -- what comes of a verdict ------------------------------------------------------------------------------------------


def test_a_hang_is_warned_of_once_until_the_rank_goes_on_and_hangs_again() -> None:
    watch = a_watch(Mode.WARN)
    verdict(watch, vitals(), 20.0)
    assert isinstance(watch.look(BEGAN_S + 50.0, 0, vitals()), float)
    again = vitals(alive_s=BEGAN_S + 60.0)
    assert verdict(watch, again, 60.0 + 40.0).since_s == BEGAN_S + 60.0


def test_where_worlds_are_restarted_a_verdict_that_was_not_acted_on_comes_again() -> None:
    watch = a_watch()
    assert verdict(watch, vitals(), 20.0).limit_s == 20.0
    assert verdict(watch, vitals(), 40.0).limit_s == verdict(watch, vitals(), 80.0).limit_s == 40.0


def test_after_a_verdict_by_a_learned_limit_the_limit_is_twice_as_long_for_all() -> None:
    watch = a_watch()
    verdict(watch, vitals(), 20.0)
    assert watch.gaps_s[TRAINING] == 2 * 4.0
    watch.begin(BEGAN_S)
    assert deadline_s(watch, vitals(gaps_s=NO_GAPS)) == 40.0


def test_a_verdict_by_a_limit_of_the_scripts_changes_nothing_that_was_learned() -> None:
    watch = a_watch()
    verdict(watch, own(heartbeat_s=BEGAN_S, heartbeat_limit_s=2.0), 2.0)
    assert watch.gaps_s == (20.0, 4.0, 0.0, 0.0)


def test_ranks_are_told_of_one_by_one() -> None:
    watch = a_watch(Mode.WARN)
    assert [verdict(watch, vitals(), 50.0, rank=rank).rank for rank in (0, 1)] == [0, 1]


# -- what is given ----------------------------------------------------------------------------------------------------


def test_an_agent_that_is_late_gives_all_ranks_their_time_again() -> None:
    watch = a_watch()
    watch.late(BEGAN_S + 100.0, LATE_S + 0.1)
    assert watch.look(BEGAN_S + 100.0, 0, vitals()) == BEGAN_S + 120.0
    assert watch.look(BEGAN_S + 100.0, 1, own(sections=(Section(0, BEGAN_S, 5.0),))) == BEGAN_S + 105.0
    verdict(watch, vitals(), 120.0)


def test_an_agent_that_is_hardly_late_gives_nothing() -> None:
    watch = a_watch()
    watch.late(BEGAN_S + 20.5, LATE_S)
    verdict(watch, vitals(), 20.5)


def test_a_new_world_begins_afresh_with_what_was_learned() -> None:
    watch = a_watch(Mode.WARN)
    verdict(watch, vitals(), 20.0)
    watch.begin(BEGAN_S + 30.0)
    assert watch.look(BEGAN_S + 30.0, 0, vitals()) == BEGAN_S + 30.0 + 40.0
    verdict(watch, vitals(), 30.0 + 40.0)  # the same rank again: it is another one


def test_what_others_saw_counts_if_it_is_longer() -> None:
    watch = a_watch()
    watch.agree((1.0, 8.0, 3.0, 0.0), True)
    watch.agree((2.0, 6.0, 0.0, 0.0), False)
    assert (watch.gaps_s, watch.learned) == ((2.0, 8.0, 3.0, 0.0), True)
    assert deadline_s(watch, vitals(steps=0)) == FACTOR * 8.0


def test_who_looks_for_nothing_finds_nothing() -> None:
    watch = a_watch(Mode.OFF)
    seen = own(sections=(Section(0, BEGAN_S, 1.0),))
    assert [watch.look(1e9, 0, each) for each in (seen, vitals(), None)] == [math.inf] * 3


def test_a_rank_that_waits_for_one_that_saves_is_excused_until_that_is_done() -> None:
    watch = a_watch()
    saving = Busy(saving_s=BEGAN_S + 500.0)
    assert watch.look(BEGAN_S + 20.0, 0, vitals(), lambda: saving) == BEGAN_S + 20.0 + 20.0
    assert watch.look(BEGAN_S + 60.0, 0, vitals(), lambda: Busy(done_s=BEGAN_S + 55.0)) == BEGAN_S + 75.0
    assert isinstance(watch.look(BEGAN_S + 75.0, 0, vitals(), lambda: Busy(done_s=BEGAN_S + 55.0)), Hang)


# -- random lives -----------------------------------------------------------------------------------------------------


class Reference:
    """One rank's silence, as one would say it to a person. It knows every sign, and forgets none."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch

    def expected(self, now_s: float, fresh_s: float, seen: Vitals, gaps: list[float], learned: bool) -> bool:
        rules = self.watch.rules
        limits: list[tuple[float, float]] = []
        for section in seen.sections:
            limits.append((section.since_s, section.limit_s))
        if seen.client_s and seen.heartbeat_s and seen.heartbeat_limit_s:
            limits.append((seen.heartbeat_s, seen.heartbeat_limit_s))
        if seen.client_s and not seen.heartbeat_s and seen.first_limit_s:
            limits.append((seen.client_s, seen.first_limit_s))
        if seen.client_s and seen.outside_s and seen.outside_limit_s:
            limits.append((seen.outside_s, seen.outside_limit_s))
        if not limits or seen.phase == ENDING:
            limits = []
            since_s = max(seen.alive_s, seen.heartbeat_s, seen.outside_s)
            limits.append((since_s, self._learned(rules, seen, gaps, learned)))
        return any(max(since_s, fresh_s) + limit_s <= now_s for since_s, limit_s in limits)

    def _learned(self, rules: Rules, seen: Vitals, gaps: list[float], learned: bool) -> float:
        if seen.phase == ENDING:
            return UNSEEN_S
        if seen.phase == STARTING and rules.first_s is not None and not seen.heartbeat_s:
            return rules.first_s if rules.first_s else math.inf
        if seen.phase == STARTING and not gaps[STARTING]:
            return UNSEEN_S if seen.trains else math.inf
        usual = max(FLOOR_S, FACTOR * gaps[seen.phase])
        if seen.phase == STARTING:
            return max(usual, STARTING_FLOORS * FLOOR_S)
        if not gaps[seen.phase] or (seen.phase == TRAINING and not learned):
            return max(usual, UNSEEN_S)
        return usual if seen.phase == TRAINING else max(usual, SELDOM_FLOORS * FLOOR_S)


def some_vitals(rng: random.Random, now_s: float) -> Vitals:
    def ago() -> float:
        return now_s - rng.choice((0.0, 1.0, rng.uniform(0.0, 60.0), rng.uniform(0.0, 3000.0)))

    client = rng.random() < 0.5
    sections = tuple(Section(slot, ago(), rng.uniform(1.0, 50.0)) for slot in range(rng.choice((0, 0, 0, 1, 3))))
    gap_s = rng.choice((0.0, 0.5, 3.0, 40.0))
    return Vitals(
        rng.randrange(5),
        ago(),
        rng.choice((0, 1, STEPS_TO_LEARN - 1, STEPS_TO_LEARN, 1000)),
        rng.random() < 0.8,
        (gap_s, rng.choice((0.0, gap_s)), rng.choice((0.0, gap_s)), rng.choice((0.0, gap_s))),
        client_s=ago() if client else 0.0,
        heartbeat_s=ago() if client and rng.random() < 0.5 else 0.0,
        first_limit_s=rng.choice((0.0, 20.0)) if client else 0.0,
        heartbeat_limit_s=rng.choice((0.0, 10.0)) if client else 0.0,
        outside_s=ago() if client and rng.random() < 0.4 else 0.0,
        outside_limit_s=rng.choice((0.0, 15.0)) if client else 0.0,
        sections=sections,
    )


@pytest.mark.parametrize("seed", range(60))
def test_in_random_lives_a_verdict_comes_when_a_slow_reference_says_so_and_never_else(seed: int) -> None:
    rng = random.Random(seed)
    watch = a_watch(first_s=rng.choice((None, None, 0.0, 25.0)))
    reference = Reference(watch)
    now_s, fresh_s = BEGAN_S, BEGAN_S
    for _ in range(60):
        now_s += rng.choice((0.1, 1.0, 20.0, 300.0))
        if rng.random() < 0.1:
            watch.begin(now_s)
            fresh_s = now_s
        if rng.random() < 0.1:
            by_s = rng.choice((0.5, 2.0))
            watch.late(now_s, by_s)
            fresh_s = now_s if by_s > LATE_S else fresh_s
        seen = some_vitals(rng, now_s)
        gaps = [max(pair) for pair in zip(watch.gaps_s, seen.gaps_s, strict=True)]
        learned = watch.learned or seen.steps >= STEPS_TO_LEARN
        expected = reference.expected(now_s, fresh_s, seen, gaps, learned)
        found = watch.look(now_s, rng.randrange(4), seen)
        assert isinstance(found, Hang) == expected, seen
        if isinstance(found, float):
            assert found > now_s
            if found < math.inf:
                assert reference.expected(found, fresh_s, seen, gaps, learned)
                assert not reference.expected(found - 0.001, fresh_s, seen, gaps, learned)
