"""What is in a checkpoint directory, and which of it is meant."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import states
from holdfast.checkpoint import catalogue, persist
from holdfast.checkpoint.catalogue import Found
from holdfast.checkpoint.errors import CheckpointError
from holdfast.checkpoint.folder import Folder
from holdfast.checkpoint.format import Policy


@pytest.fixture
def folder() -> Iterator[Folder]:
    with states.in_memory() as folder:
        yield folder


def foreign(folder: Folder, epoch: int) -> None:
    """As a script writes it by itself."""
    model = torch.nn.Linear(3, 2)
    value = {"epoch": epoch, "model_state_dict": model.state_dict(), "optimizer_state_dict": {}, "loss": 0.5}
    Path(folder.url).mkdir(exist_ok=True)
    torch.save(value, Path(folder.url) / f"checkpoint_epoch_{epoch}.pt")


def test_an_empty_directory_and_none_at_all(folder: Folder) -> None:
    assert catalogue.find(folder).found == () and persist.newest_step(folder) is None
    Path(folder.url).mkdir()
    assert catalogue.find(folder).found == () and states.latest(folder) == []


def test_what_is_known_of_each(folder: Folder) -> None:
    term = states.begin(folder)
    states.save(folder, 100, 3, term=term, metrics={"loss": 0.25})
    states.save(folder, 200, term=term, epoch=7)
    epoch, step = catalogue.find(folder).found
    assert (step.kind, step.step, step.epoch, step.term, step.name) == ("step", 100, None, term, "step_00000100")
    assert step.world_size == 3 and step.metrics == {"loss": 0.25} and step.created.endswith("+00:00")
    assert step.size_bytes == sum(path.stat().st_size for path in (Path(folder.url) / "step_00000100").glob("*.bin"))
    assert (epoch.kind, epoch.step, epoch.epoch, epoch.name) == ("epoch", 200, 7, "checkpoint_epoch_7.pt")
    assert epoch.size_bytes == folder.size("checkpoint_epoch_7.pt")
    for found in (epoch, step):
        assert found.verified and not (found.pinned or found.superseded or found.foreign)


def test_newest_first_by_step_and_then_by_term(folder: Folder) -> None:
    for restored, steps in ((None, (10, 30)), (10, (20, 30))):
        term = states.begin(folder, restored)
        for step in steps:
            states.save(folder, step, term=term)
    found = catalogue.find(folder).found
    assert [(one.step, one.term, one.superseded) for one in found] == [
        (30, 2, False), (30, 1, True), (20, 2, False), (10, 1, False),
    ]  # fmt: skip
    assert persist.newest_step(folder) == 30
    states.begin(folder, restored=10)
    assert [one.step for one in states.latest(folder)] == [10] and persist.newest_step(folder) == 10


def test_where_other_peoples_epochs_stand(folder: Folder) -> None:
    foreign(folder, 3)
    foreign(folder, 9)
    assert states.names(folder) == ["checkpoint_epoch_9.pt", "checkpoint_epoch_3.pt"]
    states.save(folder, 100)
    states.save(folder, 200, epoch=4)
    states.save(folder, 300)
    assert states.names(folder) == [
        "step_00000300",
        "checkpoint_epoch_9.pt",  # above our epoch 4
        "checkpoint_epoch_4.pt",
        "step_00000100",
        "checkpoint_epoch_3.pt",  # above nothing
    ]
    assert [found.foreign for found in catalogue.find(folder).found] == [False, True, False, False, True]


def test_a_deleted_epoch_is_not_missed(folder: Folder) -> None:
    for epoch in (6, 7):
        states.save(folder, epoch * 10, epoch=epoch)
    os.unlink(Path(folder.url) / "checkpoint_epoch_7.pt")
    assert states.names(folder) == ["checkpoint_epoch_6.pt"]
    assert states.save(folder, 75, epoch=7)[0].committed  # and can be made again
    assert states.names(folder) == ["checkpoint_epoch_7.pt", "checkpoint_epoch_6.pt"]


def test_uncommitted_shards_are_no_checkpoint(folder: Folder) -> None:
    persist.persist(folder, *states.snapshot(10, 0, 2))
    assert states.names(folder) == [] and catalogue.find(folder).broken == ()


# -- a directory full of junk -----------------------------------------------------------------------------------------


FOLDERS = (
    "step_10", "step_000000010", "step_00000011", "step_00000012 ", "step_-0000013", "damaged_step_00000014",
    "step_00000015.bak", "step_\u0660\u0660\u0660\u0660\u0660\u0660\u0660\u0661", "checkpoint_epoch_5.pt", "runs",
    ".git",
)  # fmt: skip
FILES = (
    "checkpoint_epoch_.pt", "checkpoint_epoch_-1.pt", "checkpoint_epoch_07.pt", "checkpoint_epoch_8.pt.tmp",
    "checkpoint_epoch_1e3.pt", "step_00000016", "model.pt", "last.ckpt", "events.out", "\x07bell", "a\nb",
)  # fmt: skip


def test_junk_is_not_looked_at(folder: Folder, tmp_path: Path) -> None:
    states.save(folder, 10)
    states.save(folder, 20, epoch=1)
    before = catalogue.find(folder)
    root = Path(folder.url)
    (tmp_path / "step_00000099").mkdir()
    (tmp_path / "step_00000099/t000001.manifest.json").write_text("{}")
    for name in FOLDERS:
        (root / name).mkdir()
        (root / name / "t000001.00000.bin").write_bytes(b"x")
    for name in FILES:
        (root / name).write_bytes(b"PK junk")
    os.symlink(tmp_path / "step_00000099", root / "step_00000099")
    os.symlink("/etc/passwd", root / "checkpoint_epoch_98.pt")
    os.symlink("loop", root / "loop")
    os.mkfifo(root / "checkpoint_epoch_97.pt")
    inside = root / "step_00000010"
    for name in ("t1.manifest.json", "t0000001.manifest.json", "notes.txt", "t000009.manifest.json.bak"):
        (inside / name).write_bytes(b"x")
    (inside / "t000008.manifest.json").mkdir()
    os.symlink("/etc/passwd", inside / "t000007.manifest.json")
    after = catalogue.find(folder)
    assert after.found == before.found and after.broken == () and after.notes == ()


def test_a_broken_manifest_is_told_and_the_others_are_found(folder: Folder) -> None:
    states.save(folder, 10)
    states.save(folder, 20)
    (Path(folder.url) / "step_00000020/t000001.manifest.json").write_bytes(b"torn")
    there = catalogue.find(folder)
    assert [found.name for found in there.found] == ["step_00000010"]
    assert there.broken == (("step_00000020", "step_00000020/t000001.manifest.json: its checksum does not match"),)


def test_a_broken_one_beside_a_sound_one_is_only_noted(folder: Folder) -> None:
    """Whoever sets aside what is broken would take the sound one with it."""
    states.save(folder, 10, term=states.begin(folder))
    states.save(folder, 10, term=states.begin(folder))
    (Path(folder.url) / "step_00000010/t000001.manifest.json").write_bytes(b"torn")
    there = catalogue.find(folder)
    assert [found.term for found in there.found] == [2] and there.broken == () and len(there.notes) == 1


def test_which_of_two_sidecars_a_file_belongs_to(folder: Folder) -> None:
    """A crash may leave the sidecar of a file that never came, or of one that was set aside."""
    first = states.begin(folder)
    states.save(folder, 10, term=first, epoch=1)
    beside = Path(folder.url) / ".holdfast/epochs"
    kept = (beside / "checkpoint_epoch_1.t000001.json").read_bytes()
    second = states.begin(folder)
    states.save(folder, 10, term=second, epoch=1)
    (beside / "checkpoint_epoch_1.t000001.json").write_bytes(kept)
    assert [found.term for found in catalogue.find(folder).found] == [second]
    (Path(folder.url) / "damaged_checkpoint_epoch_1.pt").replace(Path(folder.url) / "checkpoint_epoch_1.pt")
    assert [(found.term, found.superseded) for found in catalogue.find(folder).found] == [(first, True)]


# -- which is meant ---------------------------------------------------------------------------------------------------


@pytest.fixture
def full(folder: Folder) -> Folder:
    term = states.begin(folder)
    for step, loss in ((10, 0.9), (20, 0.3), (30, 0.5)):
        states.save(folder, step, term=term, metrics={"loss": loss, "accuracy": step / 100})
    for step, epoch in ((15, 1), (25, 2)):
        states.save(folder, step, term=term, epoch=epoch, metrics={"loss": step / 50})
    return folder


def chosen(folder: Folder, which: str | int | None, policy: Policy | None = None) -> list[str]:
    return [found.name for found in catalogue.choose(which, catalogue.find(folder), policy or Policy())]


def test_latest(full: Folder) -> None:
    newest_first = [
        "step_00000030", "checkpoint_epoch_2.pt", "step_00000020", "checkpoint_epoch_1.pt", "step_00000010"
    ]  # fmt: skip
    assert chosen(full, None) == chosen(full, "latest") == newest_first


def test_best(full: Folder) -> None:
    assert chosen(full, "best")[:2] == ["step_00000020", "checkpoint_epoch_1.pt"]  # the same loss; the newer one
    assert chosen(full, "best", Policy(metric="accuracy", mode="max"))[0] == "step_00000030"
    assert chosen(full, "best", Policy(mode="max"))[0] == "step_00000010"
    with pytest.raises(CheckpointError, match=r"has the metric 'f1'; they have accuracy, loss"):
        chosen(full, "best", Policy(metric="f1"))


def test_the_best_of_what_was_left_behind_is_not_the_best(full: Folder) -> None:
    states.begin(full, restored=10)
    assert chosen(full, "best") == ["step_00000010"]


@pytest.mark.parametrize("which", ["epoch:2", "epoch_2", "epoch=2", "checkpoint_epoch_2.pt"])
def test_an_epoch(full: Folder, which: str) -> None:
    assert chosen(full, which) == ["checkpoint_epoch_2.pt"]


@pytest.mark.parametrize("which", [20, "20", "step:20", "step_20", "step_00000020", "step_00000020/"])
def test_a_step(full: Folder, which: str | int) -> None:
    assert chosen(full, which) == ["step_00000020"]


def test_the_step_of_an_epoch(full: Folder) -> None:
    assert chosen(full, "step:25") == ["checkpoint_epoch_2.pt"]


@pytest.mark.parametrize("name", ["checkpoint_epoch_2.pt", "step_00000020", "step_00000020/"])
def test_a_path_in_the_directory(full: Folder, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert chosen(full, f"{full.url}/{name}") == [name.rstrip("/")]
    assert chosen(full, f"file://{full.url}/{name}") == [name.rstrip("/")]
    monkeypatch.chdir(Path(full.url).parent)
    assert chosen(full, f"checkpoints/{name}") == [name.rstrip("/")]
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="is not in"):
        chosen(full, f"checkpoints/{name}")


def test_what_was_left_behind_is_chosen_by_its_number_alone(full: Folder) -> None:
    states.begin(full, restored=10)
    assert chosen(full, "latest") == ["step_00000010"]
    assert chosen(full, 30) == ["step_00000030"]


def test_of_one_number_the_one_on_the_line_comes_first(full: Folder) -> None:
    term = states.begin(full, restored=10)
    states.save(full, 20, term=term)
    candidates = catalogue.choose(20, catalogue.find(full), Policy())
    assert [found.term for found in candidates] == [term, 1]


@pytest.mark.parametrize(
    ("which", "says"),
    [
        ("epoch:9", "epoch:9 is not in .*; there are epochs 1, 2 and steps 10, 20, 30"),
        (11, "11 is not in .*; there are epochs"),
        ("newest", '\'newest\' names no checkpoint; "latest", "best"'),
        ("", "names no checkpoint"),
        ("/etc/passwd", "is not in"),
        ("../x/step_00000010", "is not in"),
        (-5, "names no checkpoint"),
    ],
)
def test_what_is_not_there_is_said_with_what_is(full: Folder, which: str | int, says: str) -> None:
    with pytest.raises(CheckpointError, match=says):
        chosen(full, which)


def test_nothing_at_all(folder: Folder) -> None:
    assert chosen(folder, "latest") == chosen(folder, "best") == []
    with pytest.raises(CheckpointError, match="there is no checkpoint at all"):
        chosen(folder, "epoch:1")


def test_found_is_a_plain_value(full: Folder) -> None:
    assert isinstance(catalogue.find(full).found[0], Found)
