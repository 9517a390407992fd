"""Every kind of byte of every file: flipped, cut off, gone. All of it is found, and nothing damaged is ever loaded."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import states
from holdfast.checkpoint import catalogue, chunks, format, shards, verify
from holdfast.checkpoint.catalogue import Found
from holdfast.checkpoint.errors import CheckpointError, Damaged
from holdfast.checkpoint.folder import Folder
from holdfast.checkpoint.storage import StorageError

SIDECAR = ".holdfast/epochs/checkpoint_epoch_1.t000001.json"
STEP_FILES = [f"step_00000010/t000001.{rest}" for rest in ("00000.bin", "00001.bin", "00000.json", "manifest.json")]
EPOCH_FILES = ["checkpoint_epoch_1.pt", SIDECAR]


@pytest.fixture(scope="module")
def sound() -> Iterator[Folder]:
    """Of chunks so small that there are many."""
    with pytest.MonkeyPatch.context() as patch, states.in_memory() as folder:
        for module in (format, chunks, shards):
            patch.setattr(module, "CHUNK_BYTES", 64)
        states.save(folder, 10, 2)
        patch.undo()
        states.save(folder, 20, epoch=1)
        yield folder


@pytest.fixture
def folder(sound: Folder) -> Iterator[Folder]:
    with states.in_memory() as folder:
        shutil.copytree(sound.url, folder.url)
        yield folder


def of(folder: Folder, name: str) -> Found:
    """The checkpoint that a file belongs to."""
    kind = "step" if name.startswith("step") else "epoch"
    return next(found for found in catalogue.find(folder).found if found.kind == kind)


def is_found_damaged(folder: Folder, found: Found) -> bool:
    """By the look at the directory, or when it is verified; and loading never gets through."""
    told = found.name in dict(catalogue.find(folder).broken)
    with pytest.raises(Damaged):
        states.load(folder, found)
    return told or verify.verify(folder, found) != []


def test_what_is_sound_is_sound(folder: Folder) -> None:
    for found in catalogue.find(folder).found:
        assert verify.verify(folder, found) == []


@pytest.mark.parametrize("name", [*STEP_FILES, *EPOCH_FILES])
def test_a_flipped_bit_is_found_wherever_it_is(folder: Folder, name: str) -> None:
    found = of(folder, name)
    path = Path(folder.url) / name
    content = path.read_bytes()
    dice = random.Random(name)
    places = {0, len(content) - 1, *range(0, len(content), max(1, len(content) // 60))}
    for place in sorted(places):
        spoiled = bytearray(content)
        spoiled[place] ^= 1 << dice.randrange(8)
        path.write_bytes(spoiled)
        assert is_found_damaged(folder, found), f"byte {place} of {len(content)}"
    path.write_bytes(content)
    assert verify.verify(folder, found) == []


@pytest.mark.parametrize("name", [*STEP_FILES, *EPOCH_FILES])
def test_a_cut_or_longer_file_is_found(folder: Folder, name: str) -> None:
    found = of(folder, name)
    path = Path(folder.url) / name
    content = path.read_bytes()
    for spoiled in (b"", content[:1], content[: len(content) // 2], content[:-1], content + b"\0", content * 2):
        path.write_bytes(spoiled)
        assert is_found_damaged(folder, found), len(spoiled)


@pytest.mark.parametrize("name", [*STEP_FILES, SIDECAR, "checkpoint_epoch_1.pt"])
def test_a_file_that_is_gone_is_found(folder: Folder, name: str) -> None:
    found = of(folder, name)
    os.unlink(Path(folder.url) / name)
    assert verify.verify(folder, found) != []
    with pytest.raises(Damaged):
        states.load(folder, found)
    if name.endswith((".bin", "00000.json")):
        assert dict(catalogue.find(folder).broken)["step_00000010"] == f"{name} is missing"


@pytest.mark.parametrize("name", [*STEP_FILES, *EPOCH_FILES])
def test_a_file_that_is_another_ones_is_found(folder: Folder, name: str) -> None:
    """Whole, but not the one that belongs here."""
    found = of(folder, name)
    with states.in_memory() as other:
        states.save(other, 10, 2, metrics={"loss": 0.5}, values=states.state(11))
        states.save(other, 20, epoch=1, values=states.state(21))
        shutil.copy(Path(other.url) / name, Path(folder.url) / name)
    assert is_found_damaged(folder, found)


def test_all_that_is_wrong_is_told(folder: Folder) -> None:
    found = of(folder, "step")
    for rank in (0, 1):
        path = Path(folder.url) / f"step_00000010/t000001.{rank:05d}.bin"
        content = bytearray(path.read_bytes())
        content[3] ^= 4
        content[70] ^= 4
        path.write_bytes(content)
    assert verify.verify(folder, found) == [
        f"step_00000010/t000001.{rank:05d}.bin: bytes {at} to {min(at + 64, size)} are not what was written"
        for rank, size in ((0, 160), (1, 96))
        for at in (0, 64)
    ]


@pytest.mark.parametrize("place", [0.1, 0.3, 0.5, 0.7, 0.9])
def test_other_peoples_files_are_checked_by_their_own_sums(folder: Folder, place: float) -> None:
    """torch.load itself would not notice."""
    path = Path(folder.url) / "checkpoint_epoch_5.pt"
    torch.save({"epoch": 5, "model_state_dict": {"w": torch.arange(5000.0)}}, path)
    found = next(one for one in catalogue.find(folder).found if one.foreign)
    assert verify.verify(folder, found) == []
    content = bytearray(path.read_bytes())
    content[int(place * len(content))] ^= 16
    path.write_bytes(content)
    assert verify.verify(folder, found) != []
    with pytest.raises(Damaged):
        states.load(folder, found)


def test_what_cannot_be_read_is_not_called_damaged(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise StorageError("reading: Input/output error")

    found = of(folder, "step")
    opened = shards.open_step(folder, found)
    monkeypatch.setattr(Folder, "read", fail)
    for attempt in (lambda: verify.verify(folder, found), lambda: list(opened.chunks(0))):
        with pytest.raises(StorageError) as caught:
            attempt()
        assert not isinstance(caught.value, Damaged) and isinstance(caught.value, CheckpointError)
