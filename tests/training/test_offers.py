"""Who gives the state to whom, by what each rank of a world says that it has."""

from __future__ import annotations

import msgspec

from holdfast.training.handover import UNFIT, Decided, Offer, Said, _decide


def decided(*offers: Offer, machines: tuple[str, ...] = (), desk: bool = True) -> Decided:
    machines = machines or ("",) * len(offers)
    said = [msgspec.json.encode(Said(*each, desk)) for each in zip(offers, machines, strict=True)]
    return msgspec.json.decode(_decide(said), type=Decided)


def test_the_highest_step_of_the_newest_generation_wins() -> None:
    found = decided(Offer(3, 50), Offer(4, 40), Offer(4, 41), Offer())
    assert (found.source, found.lack) == (2, (0, 1, 3))


def test_of_one_step_the_most() -> None:
    assert decided(Offer(4, 41, done=8), Offer(4, 41, done=24)).source == 1


def test_where_all_are_new_they_begin() -> None:
    found = decided(Offer(), Offer())
    assert found.best.step < 0 and not found.unfit


def test_one_that_has_trained_and_has_nothing_whole_begins_nothing() -> None:
    """Its weights are neither those of a step nor those of the beginning."""
    assert decided(UNFIT, Offer()).unfit
    found = decided(UNFIT, Offer(4, 41), Offer())
    assert (found.source, found.lack) == (1, (0, 2))


def test_memory_of_gpus_is_opened_on_one_machine_alone() -> None:
    assert decided(Offer(4, 41), Offer(), machines=("a", "a")).near
    assert not decided(Offer(4, 41), Offer(), machines=("a", "b")).near
    assert not decided(Offer(4, 41), Offer(), machines=("", "")).near


def test_a_desk_is_used_if_all_have_one() -> None:
    assert decided(Offer(), Offer()).desks
    assert not decided(Offer(), desk=False).desks
