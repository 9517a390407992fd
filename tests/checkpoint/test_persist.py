"""All of a save: killed anywhere, on a full disk, and what is left of it."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import msgspec
import pytest
import syscalls
import torch

import states
from holdfast.checkpoint import (
    catalogue,
    commits,
    epochs,
    files,
    format,
    keeping,
    persist,
    shards,
    sidecars,
    terms,
    torchfiles,
)  # fmt: skip
from holdfast.checkpoint.errors import CheckpointError, Damaged
from holdfast.checkpoint.folder import Folder
from holdfast.checkpoint.format import Policy
from holdfast.checkpoint.storage import StorageError

filtered = pytest.mark.skipif(not syscalls.is_possible(), reason="this kernel does not let a process filter its calls")

POINTS = (
    *files.POINTS, *terms.POINTS, *shards.POINTS, *commits.POINTS, *epochs.POINTS, *keeping.POINTS, *persist.POINTS
)  # fmt: skip
# What is on disk before an effect is what was there after the one before it, and a kill loses nothing that was not
# synced; half a file that nobody refers to is like another. Of these, some will do. Of what changes names, none is left
# out.
STRIDES = {point: 13 for point in files.POINTS if point.endswith(".before") or "fsync" in point}
STRIDES |= {"folder.open.after": 5, "folder.write.after": 5}
LAST = Policy(last=1)


@pytest.fixture
def folder() -> Iterator[Folder]:
    with states.in_memory() as folder:
        yield folder


def test_what_is_said_of_a_save(folder: Folder) -> None:
    first, second = states.save(folder, 10, 2)
    assert (first.committed, first.verified, first.note) == (False, False, "the part of rank 1 is not there yet")
    assert (second.step, second.name, second.committed, second.verified) == (10, "step_00000010", True, True)
    assert second.seconds > 0 and second.bytes > 0 and second.note == ""
    alone = states.save(folder, 20, epoch=1)[0]
    assert (alone.name, alone.committed, alone.verified) == ("checkpoint_epoch_1.pt", True, True)
    assert alone.bytes == folder.size("checkpoint_epoch_1.pt")


def test_the_last_to_read_back_finds_it_verified(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that commits may be done before the others have read theirs."""
    first, second = (states.snapshot(10, rank, 2) for rank in range(2))
    shards.write(folder, *first)
    outcome = persist.persist(folder, *second)
    assert outcome.committed and not outcome.verified
    outcome = persist.persist(folder, *first)
    assert outcome.committed and outcome.verified


def test_an_epoch_of_several_ranks_is_one_file(folder: Folder) -> None:
    term = states.begin(folder)
    outcomes = states.save(folder, 10, 3, term=term, epoch=1)
    assert [outcome.committed for outcome in outcomes] == [False, False, True]
    assert folder.names() == [".holdfast/", "checkpoint_epoch_1.pt"]
    found = catalogue.find(folder).found[0]
    assert found.verified and found.world_size == 3
    assert states.same(states.load(folder, found), states.state(10))
    assert epochs.open_epoch(folder, found).own == {rank: {"rng": [10, rank]} for rank in range(3)}
    again = persist.persist(folder, *states.snapshot(10, 1, 3, term=term, epoch=1))
    assert again.committed and again.verified and again.note == "it was there already"
    assert folder.names() == [".holdfast/", "checkpoint_epoch_1.pt"]


def test_an_epoch_of_a_step_that_was_saved_before(folder: Folder) -> None:
    states.save(folder, 10, 2)
    outcomes = states.save(folder, 10, 2, epoch=1)
    assert [outcome.committed for outcome in outcomes] == [True, True]
    assert states.names(folder) == ["checkpoint_epoch_1.pt"]


def test_a_step_that_was_saved_before(folder: Folder) -> None:
    states.save(folder, 10, 2)
    before = states.files(folder)
    assert all(outcome.committed and outcome.verified for outcome in states.save(folder, 10, 2))
    assert states.files(folder) == before


# -- killed -----------------------------------------------------------------------------------------------------------


def story(folder: Folder, say: Callable[[str], None]) -> None:
    """Two ranks save steps and an epoch, and another epoch alone; retention deletes what was there. Then training
    begins again from 20, saves over the name of what it left behind, and deletes the rest of that."""
    for restored, last, saves in (
        (10, 2, ((20, 2, None), (30, 2, 2), (40, 1, 3), (45, 2, None))),
        (20, 1, ((25, 2, None), (35, 1, 3))),
    ):
        term = states.begin(folder, restored)
        for step, world_size, epoch in saves:
            if states.save(folder, step, world_size, term=term, epoch=epoch, policy=Policy(last=last))[-1].committed:
                say(str(step))


@pytest.fixture(scope="module")
def beginning() -> Iterator[Folder]:
    """Step 10 of two ranks and epoch 1, and what an unfinished save has left."""
    with states.in_memory() as folder:
        term = states.begin(folder)
        states.save(folder, 5, 2, term=term, epoch=1)
        persist.persist(folder, *states.snapshot(7, 0, 2, term=term))
        states.save(folder, 10, 2, term=term, policy=Policy(last=0))
        yield folder


@pytest.mark.parametrize("point", POINTS)
def test_killed_anywhere(folder: Folder, beginning: Folder, point: str) -> None:
    for count in itertools.count(1, STRIDES.get(point, 1)):
        shutil.rmtree(folder.url, ignore_errors=True)
        shutil.copytree(beginning.url, folder.url)
        killed, done = syscalls.killed_at(point, count, partial(story, folder))
        _check_what_is_left(folder, [10, *map(int, done)], f"{point}:{count}")
        if not killed:
            assert done == ["20", "30", "40", "45", "25", "35"]
            assert count > 1, f"{point} was never passed"
            return


def _check_what_is_left(folder: Folder, acknowledged: list[int], where: str) -> None:
    there = catalogue.find(folder)
    assert not there.broken and not there.notes, where
    for found in there.found:
        assert found.step is not None
        assert states.same(states.load(folder, found), states.state(found.step)), where  # not one is torn
    latest = states.latest(folder)[0]
    assert latest.step is not None
    if there.terms[-1].number > 2:
        acknowledged = [step for step in acknowledged if step in (10, 20, 25, 35)]  # training began again from 20
    expected = max(acknowledged)
    assert latest.step >= expected, where
    _check_that_the_next_save_cleans_up(folder, latest.step, where)


def _check_that_the_next_save_cleans_up(folder: Folder, restored: int, where: str) -> None:
    term = states.begin(folder, restored=restored)
    states.save(folder, 50, 2, term=term, policy=LAST)
    outcome = states.save(folder, 60, 2, term=term, epoch=9, policy=LAST)[-1]
    assert outcome.verified, where
    left = [name for name in states.files(folder) if not name.startswith((".holdfast/terms/", "damaged_"))]
    parts = [f"step_00000050/t{term:06d}.{rank:05d}.{end}" for rank in (0, 1) for end in ("bin", "json", "verified")]
    assert left == [
        *(f".holdfast/epochs/checkpoint_epoch_9.t{term:06d}.{end}" for end in ("json", "verified")),
        "checkpoint_epoch_9.pt",
        *parts,
        f"step_00000050/t{term:06d}.manifest.json",
    ], where
    assert sorted(os.listdir(folder.url)) == sorted(
        {".holdfast", "checkpoint_epoch_9.pt", "step_00000050", *(set(os.listdir(folder.url)) & _ASIDE)}
    ), where


_ASIDE = {"damaged_checkpoint_epoch_3.pt"}


# -- disks that fail --------------------------------------------------------------------------------------------------


ERRORS = [errno.ENOSPC, errno.EDQUOT, errno.EIO]
KINDS = [(1, None), (2, None), (1, 2), (2, 2)]  # of how many ranks, and which epoch


@filtered
@pytest.mark.parametrize(
    ("call", "error", "world_size", "epoch"),
    [  # every call fails with every error, and in every kind of save
        (call, ERRORS[(at + kind) % len(ERRORS)], *KINDS[kind])
        for at, call in enumerate(["write", "fsync", "renameat2"])
        for kind in range(len(KINDS))
    ],
)
def test_a_disk_that_fails_fails_that_save_alone(
    folder: Folder, call: str, error: int, world_size: int, epoch: int | None
) -> None:
    term = states.begin(folder)
    states.save(folder, 10, 2, term=term)
    states.save(folder, 20, term=term, epoch=1)
    before = states.files(folder)

    def work() -> None:
        persist.persist(folder, *states.snapshot(30, world_size - 1, world_size, term=term, epoch=epoch))

    says = syscalls.with_failing({call: error}, work)
    assert says.startswith("StorageError:") and os.strerror(error) in says
    assert f"full={error != errno.EIO}" in says
    assert [name for name in states.files(folder) if name not in before] == []
    assert states.save(folder, 30, world_size, term=term, epoch=epoch, policy=LAST)[-1].verified


def test_an_epoch_that_does_not_fit_is_kept_as_its_step(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> bool:
        raise StorageError("writing checkpoint_epoch_1.pt: No space left on device", full=True)

    term = states.begin(folder)
    persist.persist(folder, *states.snapshot(10, 0, 2, term=term, epoch=1))
    monkeypatch.setattr(epochs, "write", full)
    with pytest.raises(
        StorageError, match=r"could not be made: .*; the state itself is kept in step_00000010"
    ) as caught:
        persist.persist(folder, *states.snapshot(10, 1, 2, term=term, epoch=1))
    assert caught.value.full
    monkeypatch.undo()
    found = catalogue.find(folder).found[0]
    assert (found.kind, found.epoch) == ("step", 1) and states.same(states.load(folder, found), states.state(10))
    assert [one.name for one in catalogue.choose("epoch:1", catalogue.find(folder), Policy())] == ["step_00000010"]


@pytest.mark.parametrize("epoch", [None, 1])
def test_what_cannot_be_read_back_is_a_failure(
    folder: Folder, monkeypatch: pytest.MonkeyPatch, epoch: int | None
) -> None:
    """A disk that says it has written what it has not."""
    read = Folder.read

    def lie(self: Folder, name: str, at: int, into: memoryview, once: bool = False) -> int:
        count = read(self, name, at, into, once)
        if name.endswith((".bin", ".pt")):
            into[count // 2] ^= 1
        return count

    monkeypatch.setattr(Folder, "read", lie)
    with pytest.raises(Damaged, match="are not what was written"):
        states.save(folder, 10, epoch=epoch)
    monkeypatch.undo()
    assert persist.newest_step(folder) is None  # so that what is in memory still counts as newer
    assert [name for name in folder.names() if name.startswith("damaged_")]


def test_a_retention_that_fails_does_not_undo_the_save(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise StorageError("deleting: Permission denied")

    states.save(folder, 10)
    monkeypatch.setattr(Folder, "delete_folder", fail)
    outcome = states.save(folder, 20, policy=LAST)[0]
    assert outcome.committed and outcome.verified
    assert outcome.note == "older checkpoints could not be deleted: deleting: Permission denied"


def test_a_world_that_is_left_behind_while_it_writes_an_epoch(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = torchfiles.saved

    def slow(value: object) -> Iterator[memoryview | bytes]:
        yield from saved(value)
        states.begin(folder, generation=1)

    term = states.begin(folder)
    monkeypatch.setattr(torchfiles, "saved", slow)
    outcome = states.save(folder, 10, term=term, epoch=1)[0]
    assert not outcome.committed and outcome.note == "a later world (term 2, generation 1) writes here now"
    assert folder.names() == [".holdfast/"] and folder.names(".holdfast/epochs") == []


def test_an_epoch_that_is_there_is_refused(folder: Folder) -> None:
    term = states.begin(folder)
    states.save(folder, 10, term=term, epoch=1)
    content = (Path(folder.url) / "checkpoint_epoch_1.pt").read_bytes()
    with pytest.raises(CheckpointError, match=r"checkpoint_epoch_1.pt is there already, of step 10"):
        states.save(folder, 20, term=term, epoch=1)
    assert (Path(folder.url) / "checkpoint_epoch_1.pt").read_bytes() == content


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("why", ["superseded", "damaged", "cut", "not ours", "no sidecar to read"])
def test_what_is_in_the_way_of_an_epoch_is_set_aside(folder: Folder, why: str, world_size: int) -> None:
    term = states.begin(folder)
    path = Path(folder.url) / "checkpoint_epoch_1.pt"
    if why == "not ours":
        torch.save({"epoch": 1, "model_state_dict": {}}, path)
    else:
        states.save(folder, 10, term=term, epoch=1)
    if why == "superseded":
        term = states.begin(folder)
    elif why == "damaged":
        with contextlib.closing(open(path, "r+b")) as file:
            file.seek(200)
            file.write(b"\xff\xfe")
    elif why == "cut":
        os.truncate(path, 300)
    elif why == "no sidecar to read":
        (Path(folder.url) / ".holdfast/epochs/checkpoint_epoch_1.t000001.json").write_bytes(b"torn")
        term = states.begin(folder, restored=10)
    content = path.read_bytes()
    outcomes = states.save(folder, 20, world_size, term=term, epoch=1)
    assert outcomes[-1].verified
    assert any("is damaged_checkpoint_epoch_1.pt now" in outcome.note for outcome in outcomes) or world_size > 1
    assert (Path(folder.url) / "damaged_checkpoint_epoch_1.pt").read_bytes() == content
    assert states.same(states.load(folder, states.latest(folder)[0]), states.state(20))


def test_another_rank_sets_it_aside_while_this_one_looks_at_it(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    states.save(folder, 10, term=states.begin(folder), epoch=1)
    term = states.begin(folder)
    size = Folder.size
    aside: list[str] = []

    def looks(self: Folder, name: str) -> int:
        if name == "checkpoint_epoch_1.pt" and not aside:
            aside.append(self.set_aside(name))
        return size(self, name)

    monkeypatch.setattr(Folder, "size", looks)
    states.save(folder, 20, 2, term=term, epoch=1)
    assert aside == ["damaged_checkpoint_epoch_1.pt"]
    assert states.same(states.load(folder, states.latest(folder)[0]), states.state(20))


def test_an_epoch_of_a_later_version_is_not_touched(folder: Folder) -> None:
    term = states.begin(folder)
    states.save(folder, 10, term=term, epoch=1)
    name = sidecars.name(1, term)
    later = msgspec.structs.replace(sidecars.read(folder, 1, term), version=2)
    (Path(folder.url) / name).write_bytes(format.seal(later))
    with pytest.raises(CheckpointError, match=r"checkpoint_epoch_1.pt is there already; .*version 2"):
        states.save(folder, 20, term=term, epoch=1)
    assert "checkpoint_epoch_1.pt" in folder.names()
