"""`.pt` files: plain torch.load opens ours, and ours opens only what is safe and whole."""

from __future__ import annotations

import io
import os
import pickle
import tarfile
import threading
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import states
from holdfast.checkpoint import catalogue, epochs, sidecars, torchfiles
from holdfast.checkpoint.catalogue import Found
from holdfast.checkpoint.epochs import Loaded
from holdfast.checkpoint.errors import CheckpointError, Damaged
from holdfast.checkpoint.folder import Folder
from holdfast.checkpoint.storage import Storage


@pytest.fixture
def folder() -> Iterator[Folder]:
    with states.in_memory() as folder:
        os.mkdir(folder.url)
        yield folder


class Elsewhere:
    """A storage that is no folder of this machine, as far as anybody can see."""

    def __init__(self, folder: Folder) -> None:
        self.url = "s3://bucket/checkpoints"
        self.names, self.size, self.read = folder.names, folder.size, folder.read


def opened(folder: Folder, everywhere: bool = True) -> Loaded:
    found = catalogue.find(folder).found[0]
    loaded = epochs.open_epoch(folder, found)
    if everywhere:
        other: Storage = Elsewhere(folder)  # type: ignore[assignment]
        again = epochs.open_epoch(other, found)
        assert states.same(loaded.state, again.state) and loaded.own == again.own
    return loaded


# -- ours -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 3])
def test_plain_torch_load_opens_it(folder: Folder, world_size: int) -> None:
    states.save(folder, 70, world_size, epoch=7, metrics={"loss": 0.25, "f1": 0.5})
    value = torch.load(f"{folder.url}/checkpoint_epoch_7.pt")
    assert list(value) == ["epoch", "model_state_dict", "optimizer_state_dict", "loss", "holdfast"]
    assert value["epoch"] == 7 and value["loss"] == 0.25
    assert states.same(value["model_state_dict"], states.state(70)["model"])
    assert states.same(value["optimizer_state_dict"], states.state(70)["optimizer"])
    assert value["holdfast"] == {
        "step": 70, "term": 1, "generation": 0, "world_size": world_size, "metrics": {"loss": 0.25, "f1": 0.5},
        "state": {"scheduler": states.state(70)["scheduler"]},
        "own": {rank: states.own(70, rank) for rank in range(world_size)},
    }  # fmt: skip
    assert zipfile.ZipFile(f"{folder.url}/checkpoint_epoch_7.pt").testzip() is None


def test_a_real_model_and_optimizer_take_it(folder: Folder) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(2):
        model(torch.randn(5, 4)).sum().backward()
        optimizer.step()
    values = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    states.save(folder, 2, epoch=1, values=values)
    value = torch.load(f"{folder.url}/checkpoint_epoch_1.pt")
    other = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    other.load_state_dict(value["model_state_dict"])
    later = torch.optim.AdamW(other.parameters(), lr=1.0)
    later.load_state_dict(value["optimizer_state_dict"])
    assert states.same(dict(other.state_dict()), dict(model.state_dict()))
    assert states.same(later.state_dict(), optimizer.state_dict())


def test_every_kind_of_value_comes_back(folder: Folder) -> None:
    values: dict[str, Any] = {
        "model": OrderedDict(a=torch.zeros(2)),
        "data": {
            "ordered": OrderedDict(b=1), "counter": Counter("aab"), "set": {1, 2}, "bytes": b"\x00\xff",
            "complex": 1 + 2j, "large": 2**100, "nan": float("inf"), "dtype": torch.bfloat16,
            "size": torch.Size([2, 3]), "device": torch.device("cpu"), "tuple": (1, [2, (3,)]), "none": None, 7: True,
            "array": numpy.arange(6, dtype=numpy.uint32).reshape(2, 3), "deep": [{"array": numpy.ones(2)}],
        },
    }  # fmt: skip
    states.save(folder, 10, epoch=1, values=values)
    torch.load(f"{folder.url}/checkpoint_epoch_1.pt")
    found = opened(folder, everywhere=False).state["data"]
    for key, value in values["data"].items():
        if key in ("array", "deep"):
            continue
        assert found[key] == value and type(found[key]) is type(value), key
    assert numpy.array_equal(found["array"], values["data"]["array"]) and found["array"].dtype == numpy.uint32
    assert numpy.array_equal(found["deep"][0]["array"], numpy.ones(2))


@pytest.mark.parametrize("loss", [float("nan"), None])
def test_a_loss_that_is_none(folder: Folder, loss: float | None) -> None:
    states.save(folder, 10, epoch=1, metrics={"loss": loss} if loss is not None else {})
    value = torch.load(f"{folder.url}/checkpoint_epoch_1.pt")
    assert value["loss"] is None or value["loss"] != value["loss"]
    assert catalogue.find(folder).found[0].metrics == {}
    assert opened(folder, everywhere=False).epoch == 1


def test_a_state_without_a_model(folder: Folder) -> None:
    states.save(folder, 10, epoch=1, values={"net": {"w": torch.ones(3)}})
    assert "model_state_dict" not in torch.load(f"{folder.url}/checkpoint_epoch_1.pt")
    assert states.same(opened(folder).state, {"net": {"w": torch.ones(3)}})


def test_it_is_uniform(folder: Folder) -> None:
    states.save(folder, 70, 2, epoch=7, metrics={"loss": 0.25})
    loaded = opened(folder)
    assert (loaded.step, loaded.epoch, loaded.metrics, loaded.world_size) == (70, 7, {"loss": 0.25}, 2)
    assert states.same(loaded.state, states.state(70))
    assert loaded.own == {0: states.own(70, 0), 1: states.own(70, 1)}


def test_a_file_of_many_chunks_is_hashed_as_it_is_read(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"model": {str(number): torch.randn(400_000) for number in range(12)}}  # 19 MB
    states.save(folder, 10, epoch=1, values=values)
    sidecar = sidecars.read(folder, 1, 1)
    assert len(sidecar.hashes) == 3 and sidecar.size_bytes == folder.size("checkpoint_epoch_1.pt")
    assert sidecar.ends == sidecars.read_ends(folder, "checkpoint_epoch_1.pt", sidecar.size_bytes)
    assert states.same(opened(folder).state, values)


def test_nothing_is_left_running_when_a_write_fails(folder: Folder) -> None:
    before = threading.active_count()
    parts = torchfiles.saved({"a": torch.zeros(5_000_000)})
    next(parts)
    parts.close()  # type: ignore[attr-defined]
    assert threading.active_count() == before

    class Odd:
        def __reduce__(self) -> Any:
            raise RuntimeError("no")

    with pytest.raises(CheckpointError, match=r"torch\.save: no"):
        list(torchfiles.saved({"a": Odd()}))
    assert threading.active_count() == before


# -- other people's ---------------------------------------------------------------------------------------------------


def put(folder: Folder, value: Any, epoch: int = 1, **options: Any) -> None:
    torch.save(value, f"{folder.url}/checkpoint_epoch_{epoch}.pt", **options)


def test_the_form_of_tutorials(folder: Folder) -> None:
    model, schedule = {"w": torch.ones(2)}, {"last_epoch": 3}
    optimizer: dict[str, Any] = {"state": {}, "param_groups": []}
    put(folder, {"epoch": 5, "model_state_dict": model, "optimizer_state_dict": optimizer, "loss": 0.234,
                 "scheduler_state_dict": schedule, "args": {"lr": 1}})  # fmt: skip
    loaded = opened(folder)
    assert (loaded.step, loaded.epoch, loaded.metrics, loaded.own) == (None, 5, {"loss": 0.234}, {})
    assert states.same(loaded.state, {"model": model, "optimizer": optimizer, "scheduler": schedule})


def test_the_form_of_osmo(folder: Folder) -> None:
    put(folder, {"MODEL_STATE": {"w": torch.ones(2)}, "EPOCHS_RUN": 4})
    loaded = opened(folder)
    assert loaded.epoch == 4 and states.same(loaded.state, {"model": {"w": torch.ones(2)}})
    os.rename(f"{folder.url}/checkpoint_epoch_1.pt", f"{folder.url}/snapshot.pt")
    assert epochs.open_file(folder, "snapshot.pt").epoch == 4


def test_a_models_state_alone(folder: Folder) -> None:
    put(folder, OrderedDict(w=torch.ones(2)))
    assert states.same(opened(folder).state, {"model": {"w": torch.ones(2)}})


@pytest.mark.parametrize(
    "value",
    [[], {}, 5, torch.ones(2), {"a": 1}, {"holdfast": 5}, {"holdfast": {"state": []}}, {"holdfast": {}},
     {"holdfast": {"step": 1, "world_size": 1, "metrics": {"a": "b"}, "state": {}, "own": {}}}],
)  # fmt: skip
def test_what_is_no_state_is_refused(folder: Folder, value: Any) -> None:
    put(folder, value)
    with pytest.raises(Damaged):
        opened(folder)


# -- hostile ones -----------------------------------------------------------------------------------------------------


class Evil:
    """Runs a command when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch {self.mark}",)


def records(path: str) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def rezip(path: str, parts: list[tuple[str, bytes]], kind: int = zipfile.ZIP_STORED, extra: bytes = b"") -> None:
    with zipfile.ZipFile(path, "w", kind) as archive:
        for name, content in parts:
            archive.writestr(name, content)
    if extra:
        with open(path, "ab") as file:
            file.write(extra)


def hostile(folder: Folder, mark: Path, how: str) -> None:
    path = f"{folder.url}/checkpoint_epoch_1.pt"
    evil = pickle.dumps({"model_state_dict": Evil(mark)}, protocol=2)
    put(folder, {"epoch": 1, "model_state_dict": {"w": torch.ones(2)}, "loss": 0.1})
    good = records(path)
    root = next(iter(good)).partition("/")[0]
    pickled = f"{root}/data.pkl"
    if how == "a pickle in a zip":
        put(folder, {"model_state_dict": Evil(mark)})
    elif how == "a bare pickle":
        Path(path).write_bytes(evil)
    elif how == "the form before 1.6":
        put(folder, {"model_state_dict": {"w": torch.ones(2)}, "x": Evil(mark)}, _use_new_zipfile_serialization=False)
    elif how == "a good one in the form before 1.6":
        put(folder, {"model_state_dict": {"w": torch.ones(2)}}, _use_new_zipfile_serialization=False)
    elif how == "a tar":
        with tarfile.open(path, "w") as archive:
            for name in ("storages", "tensors", "pickle"):
                info = tarfile.TarInfo(name)
                info.size = len(evil)
                archive.addfile(info, io.BytesIO(evil))
    elif how == "two pickles of one name":
        rezip(path, [*good.items(), (pickled, evil)])
    elif how == "two pickles of one name, the other way":
        rezip(path, [(pickled, evil), *good.items()])
    elif how == "two tensors of one name":
        rezip(path, [*good.items(), (f"{root}/data/0", good[f"{root}/data/0"][::-1])])
    elif how == "two roots":
        rezip(path, [*good.items(), ("other/data.pkl", evil)])
    elif how == "a script":
        rezip(path, [*good.items(), (f"{root}/constants.pkl", evil)])
    elif how == "a bomb":
        rezip(path, [*good.items(), (f"{root}/data/9", bytes(1 << 25))], zipfile.ZIP_DEFLATED)
    elif how == "a path":
        rezip(path, [*good.items(), ("../../../etc/cron.d/x", b"x")])
    elif how == "an absolute path":
        rezip(path, [*good.items(), ("/etc/cron.d/x", b"x")])
    elif how == "a path as a storage":
        rezip(
            path,
            [(name, content.replace(b"\x01\x00\x00\x000q", b"\x01\x00\x00\x00/q")) for name, content in good.items()],
        )
    elif how == "no pickle":
        rezip(path, [(name, content) for name, content in good.items() if name != pickled])
    elif how == "a pickle that eats the stack":
        rezip(path, [(name, b"\x80\x02" + b"(" * 100_000 + b"." if name == pickled else content)
                     for name, content in good.items()])  # fmt: skip
    elif how == "a pickle that calls eval":
        rezip(path, [(name, b"cbuiltins\neval\n(V1+1\ntR." if name == pickled else content)
                     for name, content in good.items()])  # fmt: skip
    elif how == "a huge tensor":
        value = {"model_state_dict": {"w": torch.ones(2)}}
        put(folder, value)
        good = records(path)
        rezip(
            path,
            [
                (name, content.replace(b"K\x02\x85", b"\x8a\x06\xff\xff\xff\xff\xff\x7f\x85"))
                for name, content in good.items()
            ],
        )
    else:
        raise AssertionError(how)


@pytest.mark.parametrize(
    "how",
    ["a pickle in a zip", "a bare pickle", "the form before 1.6", "a good one in the form before 1.6", "a tar",
     "two pickles of one name", "two pickles of one name, the other way", "two tensors of one name", "two roots",
     "a script", "a bomb", "a path",
     "an absolute path", "a path as a storage", "no pickle", "a pickle that eats the stack", "a pickle that calls eval",
     "a huge tensor"],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:Duplicate name", "ignore:'torch.load' received a zip file")
def test_a_hostile_file_is_refused_and_runs_nothing(
    folder: Folder, tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Somebody's environment must not open the door either.
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    hostile(folder, tmp_path / "ran", how)
    found = catalogue.find(folder).found[0]
    other: Storage = Elsewhere(folder)  # type: ignore[assignment]
    for storage in (folder, other):
        with pytest.raises(Damaged, match=r"checkpoint_epoch_1\.pt: "):
            epochs.open_epoch(storage, found)
    assert not (tmp_path / "ran").exists()


def test_a_file_behind_a_link_is_not_opened(folder: Folder, tmp_path: Path) -> None:
    put(folder, {"model_state_dict": {"w": torch.ones(2)}})
    found = catalogue.find(folder).found[0]
    os.replace(f"{folder.url}/checkpoint_epoch_1.pt", f"{folder.url}/elsewhere")
    os.symlink("elsewhere", f"{folder.url}/checkpoint_epoch_1.pt")
    assert catalogue.find(folder).found == ()
    with pytest.raises(CheckpointError):
        epochs.open_epoch(folder, found)


def test_a_sidecar_that_vanishes_is_damage(folder: Folder) -> None:
    states.save(folder, 10, epoch=1)
    found: Found = catalogue.find(folder).found[0]
    os.unlink(f"{folder.url}/.holdfast/epochs/checkpoint_epoch_1.t000001.json")
    with pytest.raises(Damaged, match="is missing"):
        epochs.open_epoch(folder, found)
    assert states.same(opened(folder).state, states.state(10))  # without one it counts as anybody's
