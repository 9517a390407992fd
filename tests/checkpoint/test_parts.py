"""A step that is done in part is kept in memory, beside the last whole one and never instead of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from desks import SIZE, a_snapshot, fill, saved_steps

import holdfast
from holdfast.checkpoint import writing
from holdfast.checkpoint.folder import Folder
from holdfast.checkpoint.format import Policy, Snapshot
from holdfast.checkpoint.reading import Reading
from holdfast.checkpoint.restore import Restoring
from holdfast.checkpoint.slots import Slot
from holdfast.checkpoint.together import Together


@pytest.fixture
def saving(tmp_path: Path) -> Iterator[holdfast.Checkpointer]:
    saving = holdfast.Checkpointer(tmp_path, {"x": torch.zeros(10)}, memory_every=1)
    yield saving
    saving.close()


def left(saving: holdfast.Checkpointer) -> set[tuple[int, int]]:
    return {(snapshot.step, snapshot.part) for snapshot, _ in saving._snapshots.left_by_others()}


def test_the_last_whole_step_stays(saving: holdfast.Checkpointer) -> None:
    saving.step(1)
    saving.step(2)
    assert left(saving) == {(1, 0), (2, 0)}
    for part in (1, 2, 3):
        saving.part(2, part)
        assert left(saving) == {(2, 0), (2, part)}
    saving.step(3)
    assert left(saving) == {(2, 0), (3, 0)}
    saving.part(3, 1)
    assert left(saving) == {(3, 0), (3, 1)}


def test_a_part_of_a_step_is_not_saved_as_one(tmp_path: Path) -> None:
    url = str(tmp_path)
    fds = writing.make_slots(4)
    reading = Reading()
    reading.take(0, fds)
    for rank in (0, 1):
        fill(Slot(fds[2 * rank]), a_snapshot(url, 5, rank, (0, 1), part=3))
    assert reading.write_newest(1, reading.choose([0, 1, 2, 3], range(2))).step is None
    assert saved_steps(url) == []
    for rank in (0, 1):
        fill(Slot(fds[2 * rank + 1]), a_snapshot(url, 5, rank, (0, 1)))
    assert reading.write_newest(1, reading.choose([0, 1, 2, 3], range(2))).committed
    assert saved_steps(url) == [5]  # with the bytes of the whole one


def options(tmp_path: Path, *snapshots: Snapshot) -> list[str]:
    restoring = Restoring(Folder(str(tmp_path)), Policy(), Together(0, 1), shared=True, sets_aside=True, alone=True)
    memory = [(snapshot, memoryview(bytearray(SIZE))) for snapshot in snapshots]
    return [option.state for option in restoring._options(None, memory, lambda *_: None)]


def test_ranks_go_on_from_the_same_part_or_from_the_whole_step(tmp_path: Path) -> None:
    url = Folder(str(tmp_path)).url

    def of(rank: int, part: int) -> Snapshot:
        return a_snapshot(url, 5, rank, (0, 1), part=part)

    whole = [of(0, 0), of(1, 0)]
    assert options(tmp_path, *whole) == ["1:5"]
    assert options(tmp_path, *whole, of(0, 2), of(1, 2)) == ["1:5+2", "1:5"]
    assert options(tmp_path, *whole, of(0, 2), of(1, 1)) == ["1:5"]
    assert options(tmp_path, of(0, 2), of(1, 2), a_snapshot(url, 6, 0, (0, 1)), a_snapshot(url, 6, 1, (0, 1))) == [
        "1:6",
        "1:5+2",
    ]
