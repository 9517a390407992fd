"""What one world has saved, one of another size restores, bit for bit, for DDP and FSDP2; and ranks stay together."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import worlds


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """By four ranks."""
    folder = tmp_path_factory.mktemp("saved")
    worlds.run(4, worlds.save, folder)
    found = sorted(path.name for path in (folder / "checkpoints").iterdir() if path.name[0] != ".")
    assert found == ["checkpoint_epoch_1.pt", "step_00000001", "step_00000002", "step_00000003"]
    yield folder


@pytest.fixture
def copied(saved: Path, tmp_path: Path) -> Path:
    """Who restores an older one has left the newer ones behind."""
    return Path(shutil.copytree(saved, tmp_path / "copied"))


@pytest.mark.parametrize("size", [3, pytest.param(2, marks=pytest.mark.long), 8, 1])
def test_four_ranks_state_is_restored_by_any_number(copied: Path, size: int) -> None:
    epoch = "checkpoint_epoch_1.pt"
    expected = [epoch, "step_00000003", "step_00000002", "step_00000001", epoch]
    assert worlds.run(size, worlds.restore, copied) == [expected] * size


def test_all_ranks_go_back_when_one_of_them_finds_damage(copied: Path) -> None:
    checkpoints = copied / "checkpoints"
    (checkpoints / "checkpoint_epoch_1.pt").unlink()
    [shard] = (checkpoints / "step_00000003").glob("*.00003.bin")
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 4
    shard.chmod(0o644)
    shard.write_bytes(content)
    assert worlds.run(4, worlds.restore_latest, copied) == [(2, True)] * 4
    assert (checkpoints / "damaged_step_00000003").is_dir() and not (checkpoints / "step_00000003").exists()


def test_gradients_of_all_ranks_are_saved_and_come_back_once(tmp_path: Path) -> None:
    worlds.run(2, worlds.accumulate, tmp_path)


def test_when_one_rank_cannot_save_no_rank_does_and_none_waits(tmp_path: Path) -> None:
    skipped = "skipped: another rank is still writing the one before"
    ends = worlds.run(2, worlds.keep_together, tmp_path)
    assert [end[1] for end in ends] == [(2, skipped), (2, "declined")]
    for end in ends:
        assert [step for step, how in end if how == "saved"] == [1, 3, 5, 8]
    folders = sorted(path.name for path in (tmp_path / "checkpoints").glob("step_*"))
    assert folders == [f"step_{step:08d}" for step in (1, 3, 4, 5, 8)]


def test_ranks_with_different_states_are_refused(tmp_path: Path) -> None:
    [first, second] = worlds.run(2, worlds.differ, tmp_path)
    assert first == second and "the ranks have different states" in first


def test_directories_that_ranks_do_not_share_hold_each_its_own(tmp_path: Path) -> None:
    for said in worlds.run(2, worlds.use_own_disks, tmp_path):
        assert "is not the same directory everywhere" in said and "shared=False" in said


def test_ranks_save_at_the_same_steps_by_the_clock_of_one(tmp_path: Path) -> None:
    [first, second] = worlds.run(2, worlds.save_in_time, tmp_path, port=free_port())
    assert first == second
    folders = sorted(path.name for path in (tmp_path / "checkpoints").glob("step_*"))
    assert folders == [f"step_{step:08d}" for step in (*first[0], first[1])]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
