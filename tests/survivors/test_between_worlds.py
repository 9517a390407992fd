"""What else can go wrong while ranks are on their way from one world into the next."""

from __future__ import annotations

from typing import Any

import torch

from harness import Job
from holdfast.training.handover import UNFIT, Offer
from holdfast.training.worlds import Worlds
from survivors.stories import STEPS, run, same


def test_a_state_on_its_way_is_that_of_the_world_it_was_trained_in() -> None:
    """A rank that is stuck in the hand-over leaves it as such, with its term: one of the next world, or of none, would
    be taken for newer than what was saved."""
    worlds = Worlds.__new__(Worlds)
    worlds._carried, worlds._torn = Offer(3, 50, term=7), False
    assert worlds._offer() == Offer(3, 50, term=7)
    worlds._torn = True
    assert worlds._offer() == UNFIT


def test_who_has_nothing_leaves_nothing() -> None:
    worlds = Worlds.__new__(Worlds)
    worlds._carried, worlds._torn = Offer(), False
    worlds.survival = object()  # type: ignore[assignment]  # it is there, and not asked
    assert worlds._bequeath() is None


def test_an_epoch_that_ends_with_its_world_is_saved(job: Job, undisturbed: Any) -> None:
    """One rank dies after the last step, and before it is saved: the others have no step left to do, and cannot save
    without it."""
    assert run(job, [{"rank": 1, "step": STEPS, "at": "state"}], "--save-epochs=1") == 0, job.err
    assert same(torch.load(job.folder / "weights.pt"), undisturbed(), bits=False)
    assert (job.folder / "saved" / "checkpoint_epoch_1.pt").exists()
    assert job.leftovers() == []
