"""Folders to storage and back, while others write in them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from holdfast.checkpoint.errors import CheckpointError
from holdfast.checkpoint.folder import Folder
from holdfast.checkpoint.storage import StorageError
from holdfast.workflow.transfers import INDEX, Done, Index, Upload, fetch


@pytest.fixture
def here(tmp_path: Path) -> Path:
    (tmp_path / "here").mkdir()
    return tmp_path / "here"


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/there"


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != INDEX
    }


def write(folder: Path, **files: str) -> None:
    for name, text in files.items():
        path = folder / name.replace("__", "/").replace("_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_what_is_new_goes_over_and_comes_back(here: Path, url: str, tmp_path: Path) -> None:
    upload = Upload(here, url)
    assert upload.run() == Done(0, 0)
    write(here, a_pt="one", sub__b_pt="two")
    assert upload.run() == Done(2, 6)
    assert upload.run() == Done(0, 0)
    write(here, a_pt="three")
    assert upload.run() == Done(1, 5)
    assert fetch(url, tmp_path / "back") == Done(2, 8)
    assert contents(tmp_path / "back") == contents(here) == contents(tmp_path / "there")


def test_nothing_there_is_no_failure(url: str, tmp_path: Path) -> None:
    assert fetch(url, tmp_path / "back") == Done(0, 0)
    assert (tmp_path / "back").is_dir()


def test_only_what_is_asked_for(here: Path, url: str, tmp_path: Path) -> None:
    write(here, a_pt="one", b_log="two", sub__c_pt="three")
    assert Upload(here, url, r".*\.pt").run().files == 2
    assert fetch(url, tmp_path / "back", "sub/").files == 1
    assert contents(tmp_path / "back") == {"sub/c.pt": b"three"}


def test_a_file_that_is_open_for_writing_is_left_for_later(here: Path, url: str, tmp_path: Path) -> None:
    write(here, a_pt="whole")
    upload = Upload(here, url)
    with open(here / "b.pt", "w") as file:
        file.write("half of")
        file.flush()
        assert upload.run() == Done(1, 5, ("b.pt",))
        file.write(" it")
    assert upload.run() == Done(1, 10)
    with open(here / "a.pt", "r+") as file:
        file.write("W")
        file.flush()
        assert upload.run() == Done(0, 0, ("a.pt",))
        assert contents(tmp_path / "there")["a.pt"] == b"whole"
    assert upload.run().files == 1
    assert contents(tmp_path / "there") == contents(here)


def test_when_all_writers_are_gone_half_a_file_is_all_there_will_be(here: Path, url: str) -> None:
    with open(here / "a.pt", "w") as file:
        file.write("half")
        file.flush()
        assert Upload(here, url).run(writers_gone=True) == Done(1, 4)


def test_what_it_has_sent_it_deletes_with_it_and_nothing_else(here: Path, url: str, tmp_path: Path) -> None:
    write(here, a_pt="one", b_pt="two")
    Upload(here, url).run()
    upload = Upload(here, url)  # a new life of the task, with an empty folder
    for path in here.iterdir():
        path.unlink()
    assert upload.run() == Done(0, 0)
    assert contents(tmp_path / "there").keys() == {"a.pt", "b.pt"}
    write(here, c_pt="three")
    upload.run()
    (here / "c.pt").unlink()
    write(here, d_pt="four")
    upload.run()
    assert contents(tmp_path / "there").keys() == {"a.pt", "b.pt", "d.pt"}


def test_links_are_not_followed(here: Path, url: str, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("x")
    (here / "link").symlink_to(tmp_path / "secret")
    (here / "folder").symlink_to(tmp_path)
    assert Upload(here, url).run() == Done(0, 0)


def test_a_damaged_file_is_refused_and_one_that_an_upload_was_cut_off_at_is_not(
    here: Path, url: str, tmp_path: Path
) -> None:
    write(here, a_pt="one", b_pt="two")
    Upload(here, url).run()
    index = msgspec.json.decode((tmp_path / "there" / INDEX).read_bytes(), type=Index)
    assert {name: len(entry.hashes) for name, entry in index.files.items()} == {"a.pt": 1, "b.pt": 1}
    write(here, a_pt="newer")
    upload = Upload(here, url)
    real = Folder.replace

    def cut(self: Folder, name: str, parts: object) -> None:
        if name == "a.pt":
            raise StorageError("cut")
        real(self, name, parts)  # type: ignore[arg-type]

    try:
        Folder.replace = cut  # type: ignore[method-assign]
        with pytest.raises(CheckpointError, match="cut"):
            upload.run()
    finally:
        Folder.replace = real  # type: ignore[method-assign]
    fetch(url, tmp_path / "back")
    assert contents(tmp_path / "back") == {"a.pt": b"one", "b.pt": b"two"}
    assert upload.run() == Done(1, 5)
    fetch(url, tmp_path / "again")
    assert contents(tmp_path / "again")["a.pt"] == b"newer"
    (tmp_path / "there" / "b.pt").write_text("twq")
    with pytest.raises(CheckpointError, match=r"b\.pt is damaged: it is not what was uploaded"):
        fetch(url, tmp_path / "back")
    (tmp_path / "there" / INDEX).write_text("{")
    with pytest.raises(CheckpointError, match="delete it to go on without checks"):
        fetch(url, tmp_path / "back")


KILLED = """
import os, sys, signal
from holdfast.checkpoint import files
from holdfast.workflow.transfers import Upload
from pathlib import Path
at = int(sys.argv[3])
count = 0
real = files.write
def write(fd, parts):
    global count
    count += 1
    if count == at:
        for part in parts:
            os.write(fd, part[: len(part) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
    real(fd, parts)
files.write = write
Upload(Path(sys.argv[1]), sys.argv[2]).run()
"""


@pytest.mark.parametrize("at", range(1, 7))
def test_killed_in_the_middle_of_an_upload(here: Path, url: str, tmp_path: Path, at: int) -> None:
    """Whatever is there then is whole: the file before, or the new one."""
    write(here, a_pt="one" * 1000, b_pt="two" * 1000)
    Upload(here, url).run()
    write(here, a_pt="1" * 3000, b_pt="2" * 3000)
    done = subprocess.run([sys.executable, "-c", KILLED, str(here), url, str(at)], check=False)
    assert done.returncode == (-signal.SIGKILL if at <= 5 else 0)
    fetch(url, tmp_path / "back")
    found = contents(tmp_path / "back")
    assert found["a.pt"] in (b"one" * 1000, b"1" * 3000) and found["b.pt"] in (b"two" * 1000, b"2" * 3000)
    Upload(here, url).run()
    fetch(url, tmp_path / "end")
    assert contents(tmp_path / "end") == contents(here)
    assert not [name for name in os.listdir(tmp_path / "there") if name.startswith(".tmp") and at > 5]
