"""One checkpoint as one file for others."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import safetensors.torch
import torch

import states
from holdfast.checkpoint import catalogue, epochs, export
from holdfast.checkpoint.errors import CheckpointError, Damaged
from holdfast.checkpoint.folder import Folder


@pytest.fixture
def folder() -> Iterator[Folder]:
    with states.in_memory() as folder:
        yield folder


@pytest.mark.parametrize("world_size", [1, 2, 5])
@pytest.mark.parametrize("epoch", [None, 4])
def test_a_pt_has_everything(folder: Folder, tmp_path: Path, world_size: int, epoch: int | None) -> None:
    states.save(folder, 10, world_size, epoch=epoch, metrics={"loss": 0.5})
    target = str(tmp_path / "out.pt")
    size = export.export(folder, catalogue.find(folder).found[0], target)
    assert size == os.path.getsize(target)
    value = torch.load(target)
    assert states.same(value["model_state_dict"], states.state(10)["model"])
    assert states.same(value["optimizer_state_dict"], states.state(10)["optimizer"])
    assert value["loss"] == 0.5 and value["epoch"] == epoch
    again = epochs.open_file(Folder(str(tmp_path)), "out.pt")
    assert states.same(again.state, states.state(10)) and again.step == 10 and again.world_size == world_size
    assert again.own == {rank: states.own(10, rank) for rank in range(world_size)}


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("epoch", [None, 4])
def test_safetensors_have_the_model(folder: Folder, tmp_path: Path, world_size: int, epoch: int | None) -> None:
    states.save(folder, 10, world_size, epoch=epoch)
    target = str(tmp_path / "out.safetensors")
    export.export(folder, catalogue.find(folder).found[0], target)
    assert states.same(dict(safetensors.torch.load_file(target)), states.state(10)["model"])


def test_every_type_that_safetensors_know(folder: Folder, tmp_path: Path) -> None:
    model = {name: torch.zeros(3, 2).to(getattr(torch, name)) for name in export.TYPES if name != "float8_e8m0fnu"}
    states.save(folder, 10, values={"model": model})
    export.export(folder, catalogue.find(folder).found[0], str(tmp_path / "out.safetensors"))
    assert states.same(dict(safetensors.torch.load_file(str(tmp_path / "out.safetensors"))), model)


def test_other_peoples_files_too(folder: Folder, tmp_path: Path) -> None:
    os.mkdir(folder.url)
    torch.save({"MODEL_STATE": {"w": torch.ones(2)}, "EPOCHS_RUN": 3}, f"{folder.url}/checkpoint_epoch_3.pt")
    export.export(folder, catalogue.find(folder).found[0], str(tmp_path / "out.pt"))
    value = torch.load(tmp_path / "out.pt")
    assert value["epoch"] == 3 and states.same(value["model_state_dict"], {"w": torch.ones(2)})


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("out.txt", "a name that ends in .pt or .safetensors is meant"),
        ("nowhere/out.pt", "there is no directory"),
        ("there.pt", "is there already; nothing is overwritten"),
        ("link.pt", "is there already; nothing is overwritten"),
    ],
)
def test_what_is_refused(folder: Folder, tmp_path: Path, name: str, says: str) -> None:
    states.save(folder, 10)
    (tmp_path / "there.pt").write_text("mine")
    (tmp_path / "link.pt").symlink_to("gone")
    with pytest.raises(CheckpointError, match=says):
        export.export(folder, catalogue.find(folder).found[0], str(tmp_path / name))
    assert (tmp_path / "there.pt").read_text() == "mine"


@pytest.mark.parametrize("kind", [".pt", ".safetensors"])
@pytest.mark.parametrize("epoch", [None, 4])
def test_a_damaged_one_leaves_no_file(folder: Folder, tmp_path: Path, kind: str, epoch: int | None) -> None:
    states.save(folder, 10, epoch=epoch)
    path = Path(folder.url) / ("checkpoint_epoch_4.pt" if epoch else "step_00000010/t000001.00000.bin")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(Damaged):
        export.export(folder, catalogue.find(folder).found[0], str(tmp_path / f"out{kind}"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"model": {"w": torch.zeros(2, dtype=torch.complex128)}}, "w: safetensors has no torch.complex128"),
        ({"net": {"w": torch.zeros(2)}}, "there is no model in it"),
    ],
)
def test_what_safetensors_cannot_hold(folder: Folder, tmp_path: Path, values: dict[str, object], says: str) -> None:
    states.save(folder, 10, values=values)
    with pytest.raises(CheckpointError, match=says):
        export.export(folder, catalogue.find(folder).found[0], str(tmp_path / "out.safetensors"))
    assert list(tmp_path.iterdir()) == []
