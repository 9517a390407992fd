"""What is deleted, and what never is."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import states
from holdfast.checkpoint import catalogue, keeping, persist, terms
from holdfast.checkpoint.folder import Folder
from holdfast.checkpoint.format import Policy


@pytest.fixture
def folder() -> Iterator[Folder]:
    with states.in_memory() as folder:
        yield folder


def fill(folder: Folder, steps: range, term: int = 1) -> None:
    for step in steps:
        states.save(folder, step, term=term)


def test_epochs_and_steps_are_counted_apart(folder: Folder) -> None:
    fill(folder, range(10, 60, 10))
    for epoch in range(1, 6):
        states.save(folder, epoch * 100, epoch=epoch)
    removed = keeping.apply(folder, Policy(last=2))
    assert states.names(folder) == ["checkpoint_epoch_5.pt", "checkpoint_epoch_4.pt", "step_00000050", "step_00000040"]
    assert {(one.name, one.reason) for one in removed} == {
        ("step_00000010", "4 newer ones were verified"), ("step_00000020", "3 newer ones were verified"),
        ("step_00000030", "2 newer ones were verified"), ("checkpoint_epoch_1.pt", "4 newer ones were verified"),
        ("checkpoint_epoch_2.pt", "3 newer ones were verified"),
        ("checkpoint_epoch_3.pt", "2 newer ones were verified"),
    }  # fmt: skip
    assert sorted(os.listdir(f"{folder.url}/.holdfast/epochs")) == [
        f"checkpoint_epoch_{epoch}.t000001.{end}" for epoch in (4, 5) for end in ("json", "verified")
    ]


def test_the_rules_of_a_save_are_applied_after_it(folder: Folder) -> None:
    policy = Policy(last=1, best=1, every=40)
    for step, loss in ((10, 0.5), (20, 0.1), (30, 0.9), (40, 0.8), (50, 0.7), (60, float("nan"))):
        states.save(folder, step, 2, metrics={"loss": loss}, policy=policy)
    assert states.names(folder) == ["step_00000060", "step_00000040", "step_00000020"]


def test_pinned_ones_stay_until_they_are_not(folder: Folder) -> None:
    fill(folder, range(10, 40, 10))
    keeping.pin(folder, catalogue.find(folder).found[-1])
    keeping.pin(folder, catalogue.find(folder).found[-1])
    keeping.apply(folder, Policy(last=1))
    assert [(found.name, found.pinned) for found in catalogue.find(folder).found] == [
        ("step_00000030", False), ("step_00000010", True),
    ]  # fmt: skip
    keeping.unpin(folder, catalogue.find(folder).found[-1])
    keeping.apply(folder, Policy(last=1))
    assert states.names(folder) == ["step_00000030"]


def test_other_peoples_files_stay(folder: Folder) -> None:
    fill(folder, range(10, 30, 10))
    for epoch in range(1, 6):
        torch.save({"model_state_dict": {}}, f"{folder.url}/checkpoint_epoch_{epoch}.pt")
    Path(f"{folder.url}/notes.txt").write_text("mine")
    Path(f"{folder.url}/step_00000010/notes.txt").write_text("mine")
    Path(f"{folder.url}/damaged_step_00000005").mkdir()
    Path(f"{folder.url}/damaged_step_00000005/t000001.00000.bin").write_text("mine")
    keeping.apply(folder, Policy(last=1))
    assert [name for name in states.files(folder) if not name.startswith((".holdfast", "step_00000020"))] == [
        *(f"checkpoint_epoch_{epoch}.pt" for epoch in range(1, 6)),
        "damaged_step_00000005/t000001.00000.bin", "notes.txt", "step_00000010/notes.txt",
    ]  # fmt: skip


def test_of_two_terms_in_one_folder_only_one_goes(folder: Folder) -> None:
    fill(folder, range(10, 40, 10), term=states.begin(folder))
    second = states.begin(folder, restored=10)
    states.save(folder, 20, term=second)
    keeping.apply(folder, Policy(last=2))
    assert [(found.step, found.term) for found in catalogue.find(folder).found] == [(20, second), (10, 1)]
    assert {name.partition(".")[0] for name in folder.names("step_00000020")} == {"t000002"}
    assert states.same(states.load(folder, states.latest(folder)[0]), states.state(20))


def test_a_folder_that_others_may_write_to_next_is_not_taken_away(folder: Folder) -> None:
    """Training goes on from 10 and is about to save 30 again: its old files go, its folder stays."""
    fill(folder, range(10, 40, 10), term=states.begin(folder))
    second = states.begin(folder, restored=10)
    before = os.stat(f"{folder.url}/step_00000030").st_ino
    states.save(folder, 15, term=second, policy=Policy(last=1))
    assert states.names(folder) == ["step_00000015"]
    assert os.stat(f"{folder.url}/step_00000030").st_ino == before and folder.names("step_00000030") == []
    states.save(folder, 40, term=second, policy=Policy(last=1))
    assert folder.names() == [".holdfast/", "step_00000040/"]


def test_what_may_still_be_written_is_left(folder: Folder) -> None:
    first = states.begin(folder)
    persist.persist(folder, *states.snapshot(5, 0, 2, term=first))  # nobody will finish it
    states.save(folder, 10, 2, term=first)
    persist.persist(folder, *states.snapshot(20, 0, 2, term=first))  # its other half may come
    keeping.apply(folder, Policy(last=1))
    half = ["t000001.00000.bin", "t000001.00000.json", "t000001.00000.verified"]
    assert folder.names() == [".holdfast/", "step_00000010/", "step_00000020/"]
    assert folder.names("step_00000020") == half
    states.begin(folder, restored=20)  # from memory, while 20 is written
    keeping.apply(folder, Policy(last=1))
    assert folder.names("step_00000020") == half
    states.begin(folder, restored=10)  # nobody goes on from it
    keeping.apply(folder, Policy(last=1))
    assert folder.names("step_00000020") == []


def test_shards_of_what_was_set_aside_are_left(folder: Folder) -> None:
    """On an object store only the manifest is moved."""
    states.save(folder, 10, term=states.begin(folder))
    Path(f"{folder.url}/damaged_step_00000010").mkdir()
    os.rename(
        f"{folder.url}/step_00000010/t000001.manifest.json", f"{folder.url}/damaged_step_00000010/t000001.manifest.json"
    )
    states.save(folder, 20, term=states.begin(folder), policy=Policy(last=1))
    assert "t000001.00000.bin" in folder.names("step_00000010")


def test_terms_are_forgotten_when_nothing_is_as_old(folder: Folder) -> None:
    for number in range(20):
        states.save(folder, 10 * number, term=states.begin(folder, restored=10 * number), policy=Policy(last=2))
    assert [term.number for term in terms.read(folder)] == list(range(13, 21))


def test_an_old_term_stays_while_it_leaves_something_behind(folder: Folder) -> None:
    states.save(folder, 100, term=states.begin(folder))
    keeping.pin(folder, catalogue.find(folder).found[0])
    for number in range(12):
        states.save(folder, 10 + number, term=states.begin(folder, restored=9 + number), policy=Policy(last=1))
    assert [found.superseded for found in catalogue.find(folder).found] == [True, False]


def test_sidecars_of_files_that_are_gone_go(folder: Folder) -> None:
    term = states.begin(folder)
    for epoch in (1, 2):
        states.save(folder, epoch * 10, term=term, epoch=epoch)
    os.unlink(f"{folder.url}/checkpoint_epoch_1.pt")
    Path(f"{folder.url}/.holdfast/epochs/notes.txt").write_text("mine")
    states.save(folder, 30, term=term, epoch=3)
    assert sorted(os.listdir(f"{folder.url}/.holdfast/epochs")) == [
        *(f"checkpoint_epoch_{epoch}.t000001.{end}" for epoch in (2, 3) for end in ("json", "verified")),
        "notes.txt",
    ]


def test_a_broken_checkpoint_is_not_deleted(folder: Folder) -> None:
    fill(folder, range(10, 60, 10))
    Path(f"{folder.url}/step_00000010/t000001.manifest.json").write_bytes(b"torn")
    os.unlink(f"{folder.url}/step_00000020/t000001.00000.bin")
    states.save(folder, 60, epoch=1)
    os.truncate(f"{folder.url}/checkpoint_epoch_1.pt", 100)
    states.save(folder, 70, policy=Policy(last=1))
    assert folder.names() == [
        ".holdfast/", "checkpoint_epoch_1.pt", "step_00000010/", "step_00000020/", "step_00000070/"
    ]  # fmt: skip
    assert len(catalogue.find(folder).broken) == 3
