"""`holdfast checkpoint` on real directories."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

import states
from holdfast.checkpoint import catalogue
from holdfast.checkpoint.folder import Folder
from holdfast.cli import checkpoint as command

Output = pytest.CaptureFixture[str]


@pytest.fixture
def folder() -> Iterator[Folder]:
    with states.in_memory() as folder:
        yield folder


@pytest.fixture
def full(folder: Folder) -> Folder:
    term = states.begin(folder)
    states.save(folder, 10, 2, term=term, metrics={"loss": 0.5})
    states.save(folder, 20, 2, term=term, metrics={"loss": 0.25, "accuracy": 0.875})
    states.save(folder, 30, term=term, epoch=1, metrics={"loss": 0.75})
    return folder


def run(*argv: str) -> int:
    return command.main(argv)


def damage(folder: Folder, name: str) -> None:
    path = Path(folder.url) / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_ls(full: Folder, capsys: Output) -> None:
    (Path(full.url) / "step_00000010/t000001.manifest.json").write_bytes(b"torn")
    assert run("pin", full.url, "20") == 0
    capsys.readouterr()
    assert run("ls", full.url) == 0
    lines = [line.split("  ") for line in capsys.readouterr().out.splitlines()]
    rows = [[cell.strip() for cell in line if cell.strip()] for line in lines]
    assert rows[0] == list(command.COLUMNS)
    assert rows[1][:3] == ["checkpoint_epoch_1.pt", "30", "1"] and rows[1][-2:] == ["loss=0.75", "verified"]
    assert rows[2][:3] == ["step_00000020", "20", "-"] and rows[2][3] == "256 B" and rows[2][4].endswith(" s")
    assert rows[2][5:] == ["2", "accuracy=0.875 loss=0.25", "verified, pinned"]
    assert rows[3] == [
        "step_00000010", "damaged: step_00000010/t000001.manifest.json: its checksum does not match"
    ]  # fmt: skip


def test_ls_says_what_was_left_behind_and_what_is_not_ours(full: Folder, capsys: Output) -> None:
    import torch

    torch.save({"model_state_dict": {}}, f"{full.url}/checkpoint_epoch_9.pt")
    states.begin(full, restored=20)
    assert run("ls", full.url) == 0
    out = capsys.readouterr().out
    assert "verified, superseded" in out and "not ours" in out


def test_ls_of_nothing(folder: Folder, capsys: Output) -> None:
    assert run("ls", folder.url) == 1
    assert capsys.readouterr().err == f"holdfast checkpoint: there is no directory {folder.url}\n"
    os.mkdir(folder.url)
    assert run("ls", folder.url) == 0
    assert capsys.readouterr().out == f"no checkpoints in {folder.url}\n"


def test_programs_get_json(full: Folder, capsys: Output) -> None:
    assert run("ls", full.url, "--json") == 0
    said = msgspec.json.decode(capsys.readouterr().out)
    assert [found["name"] for found in said["found"]] == ["checkpoint_epoch_1.pt", "step_00000020", "step_00000010"]
    assert said["broken"] == []
    assert run("show", full.url, "20", "--json") == 0
    said = msgspec.json.decode(capsys.readouterr().out)
    assert said["checkpoint"]["metrics"] == {"loss": 0.25, "accuracy": 0.875}
    assert ["model/weight", "float32", [7, 4]] in said["tensors"]


def test_show(full: Folder, capsys: Output) -> None:
    assert run("show", full.url, "best") == 0
    out = capsys.readouterr().out
    assert "name     step_00000020" in out and "metric   accuracy = 0.875" in out
    assert "tensor   model/weight  float32[7, 4]" in out
    assert run("show", full.url) == 0
    assert "checkpoint_epoch_1.pt" in capsys.readouterr().out


def test_verify(full: Folder, capsys: Output) -> None:
    assert run("verify", full.url) == 0
    assert "step_00000020: whole, 256 B" in capsys.readouterr().out
    damage(full, "step_00000020/t000001.00001.bin")
    assert run("verify", full.url, "10") == 0
    assert run("verify", full.url, "step:20") == 1
    assert "step_00000020: damaged\n  step_00000020/t000001.00001.bin: bytes 0 to 96" in capsys.readouterr().out
    assert run("verify", full.url) == 1
    assert "step_00000020" in states.names(full)  # nothing is set aside
    damage(full, "checkpoint_epoch_1.pt")
    (Path(full.url) / "step_00000010/t000001.manifest.json").write_bytes(b"torn")
    capsys.readouterr()
    assert run("verify", full.url) == 1
    assert capsys.readouterr().out.count("damaged") == 3


def test_export(full: Folder, capsys: Output, tmp_path: Path) -> None:
    for name in ("a.pt", "a.safetensors"):
        assert run("export", full.url, "latest", str(tmp_path / name)) == 0
        assert f"checkpoint_epoch_1.pt is in {tmp_path / name}" in capsys.readouterr().out
        assert run("export", full.url, "10", str(tmp_path / name)) == 1
        assert "nothing is overwritten" in capsys.readouterr().err


def test_pin(full: Folder, capsys: Output) -> None:
    assert run("pin", full.url, "epoch:1") == 0
    assert [found.pinned for found in catalogue.find(full).found] == [True, False, False]
    assert run("pin", full.url, "epoch:1", "--undo") == 0
    assert capsys.readouterr().out.endswith("checkpoint_epoch_1.pt is not pinned any more\n")
    assert not any(found.pinned for found in catalogue.find(full).found)


def test_rm(full: Folder, capsys: Output) -> None:
    assert run("rm", full.url, "latest") == 1
    assert "checkpoint_epoch_1.pt is the newest that was verified; nothing was deleted" in capsys.readouterr().err
    run("pin", full.url, "10")
    assert run("rm", full.url, "20", "10") == 1
    assert "step_00000010 is pinned; nothing was deleted" in capsys.readouterr().err
    assert len(states.names(full)) == 3
    assert run("rm", full.url, "20") == 0
    assert run("rm", full.url, "10", "--force") == 0
    assert full.names() == [".holdfast/", "checkpoint_epoch_1.pt"]
    assert run("rm", full.url, "epoch:1", "--force") == 0
    assert full.names() == [".holdfast/"] and full.names(".holdfast/epochs") == [] == full.names(".holdfast/pins")


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["show", "99"], "99 is not in"),
        (["show", "newest"], "names no checkpoint"),
        (["rm", "epoch:7"], "there are epochs 1 and steps 10, 20"),
    ],
)
def test_what_is_not_there(full: Folder, capsys: Output, argv: list[str], says: str) -> None:
    assert run(argv[0], full.url, *argv[1:]) == 1
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("argv", [[], ["ls"], ["export", "here", "latest"], ["lss", "here"], ["ls", "here", "--jsn"]])
def test_bad_usage_is_one_line(capsys: Output, argv: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        command.main(argv)
    assert caught.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_it_is_a_command_and_needs_no_torch(full: Folder) -> None:
    code = "import sys; sys.argv[0] = 'holdfast'; from holdfast.cli import main\ntry: main()\n"
    code += "finally: assert 'torch' not in sys.modules"
    done = subprocess.run(
        [sys.executable, "-c", code, "checkpoint", "ls", full.url], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "checkpoint_epoch_1.pt" in done.stdout
