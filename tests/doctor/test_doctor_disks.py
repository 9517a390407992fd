"""The disk of run directories and the checkpoint target: well, full, read-only, too small a file, deaf, untrue."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from doctoring import examine, hook, need_namespaces

from holdfast.doctor import disks
from holdfast.doctor.finding import Asked

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "checkpoint"))
import s3server


def test_a_target_that_is_well_is_left_as_it_was(tmp_path: Path) -> None:
    target = tmp_path / "run"
    (target / "step_1").mkdir(parents=True)
    (target / "step_1" / "data").write_bytes(b"x")
    found = examine(tmp_path, "--only", "checkpoint", "--checkpoint-dir", f"file://{target}")["checkpoint"]
    assert found.state in ("ok", "warn")  # a slow disk is worth a word
    assert {"write_bytes_s", "read_bytes_s", "free_bytes"} <= found.figures.keys()
    assert [path.relative_to(target).as_posix() for path in target.rglob("*")] == ["step_1", "step_1/data"]


def test_none_is_named(tmp_path: Path) -> None:
    assert examine(tmp_path, "--only", "checkpoint")["checkpoint"].state == "skipped"


def test_no_large_file_can_be_written(tmp_path: Path) -> None:
    target = tmp_path / "run"
    target.mkdir()
    flags = ("--only", "shm", "disk", "checkpoint", "--log-dir", str(target), "--checkpoint-dir", str(target))
    report = examine(tmp_path, *flags, after="ulimit -f 1024")
    assert [(found.state, "File too large" in found.text) for found in report.findings] == [("fail", True)] * 3
    assert list(target.iterdir()) == []


@pytest.mark.parametrize(("options", "words"), [("size=20m", "No space left"), ("ro", "Read-only file system")])
def test_full_and_read_only(tmp_path: Path, options: str, words: str) -> None:
    need_namespaces(tmp_path)
    mount = f"mount -t tmpfs -o {options} none {tmp_path}"
    flags = ("--only", "disk", "checkpoint", "--log-dir", str(tmp_path), "--checkpoint-dir", str(tmp_path))
    report = examine(tmp_path, *flags, after=mount, inside=True)
    assert [(found.state, words in found.text) for found in report.findings] == [("fail", True)] * 2


def test_little_space_is_worth_a_word(tmp_path: Path) -> None:
    need_namespaces(tmp_path)
    mount = f"mount -t tmpfs -o size=200m none {tmp_path}"
    found = examine(tmp_path, "--only", "disk", "--log-dir", str(tmp_path), after=mount, inside=True)["disk"]
    assert (found.state, "200 MiB are free" in found.text) == ("warn", True), found


def test_a_disk_that_is_slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """16 MiB, as before a world, for which it needs a second more."""
    durable = os.fsync

    def slowly(fd: int) -> None:
        if os.fstat(fd).st_size >= disks.FEW_BLOCKS * disks.BLOCK_BYTES:
            time.sleep(1.0)
        durable(fd)

    monkeypatch.setattr(os, "fsync", slowly)
    asked = Asked(log_dir=str(tmp_path), checkpoint_dir=str(tmp_path / "run"), together=True)
    for found in (disks.disk(asked), disks.checkpoint(asked)):
        assert (found.state, found.text.startswith("write ")) == ("warn", True), found
        assert 0 < float(found.figures["write_bytes_s"]) < disks.SLOW_BYTES_S
        assert found.cure == "is it the disk that was meant, and does somebody else use it?"


def test_a_line_that_takes_long_to_be_durable(tmp_path: Path) -> None:
    slow = "import os, time\ntrue = os.fdatasync\nos.fdatasync = lambda fd: (time.sleep(0.12), true(fd))\n"
    found = examine(tmp_path, "--only", "disk", "--log-dir", str(tmp_path), env=hook(tmp_path, slow))["disk"]
    assert (found.state, "to make a line durable takes 0.1" in found.text) == ("warn", True), found
    assert float(found.figures["sync_s"]) > disks.SLOW_SYNC_S


def test_a_target_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    found = examine(tmp_path, "--only", "checkpoint", "--checkpoint-dir", str(tmp_path / "file"))["checkpoint"]
    assert found.state == "fail"


def test_a_target_that_is_no_url(tmp_path: Path) -> None:
    found = examine(tmp_path, "--only", "checkpoint", "--checkpoint-dir", "ftp://host/run")["checkpoint"]
    assert (found.state, "ftp://host/run" in found.text) == ("fail", True)


UNTRUE = """
import importlib.abc, sys

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "holdfast.checkpoint.storage" and "holdfast.checkpoint.files" not in sys.modules:
            from holdfast.checkpoint import files
            change(files)
        return None

def change(files):
"""


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            "    def rename(old, new, folder):\n        import os\n"
            "        os.rename(old, new, src_dir_fd=folder, dst_dir_fd=folder)\n        return True\n"
            "    files.rename = rename\n    from holdfast.checkpoint import folder\n"
            "    folder._is_there = lambda name, fd: False\n",
            "a file was made twice, though it was there",
        ),
        (
            "    read = files.read\n    def changed(fd, at, into, once=False):\n"
            "        count = read(fd, at, into, once)\n        if at:\n            into[0] ^= 1\n        return count\n"
            "    files.read = changed\n",
            "block 1 of 8 was not read as it was written",
        ),
    ],
    ids=["replaces what is there", "flips a bit"],
)
def test_a_file_system_that_is_untrue(tmp_path: Path, change: str, words: str) -> None:
    """As some that are mounted over a network: a rename that replaces, a bit that flips."""
    text = f"{UNTRUE}{change}\nsys.meta_path.insert(0, Finder())\n"
    target = tmp_path / "some" / "run"
    found = examine(tmp_path, "--only", "checkpoint", "--checkpoint-dir", str(target), env=hook(tmp_path, text))
    assert (found["checkpoint"].state, found["checkpoint"].text) == ("fail", f"{target}: {words}")
    assert not (tmp_path / "some").exists()  # it was made for this alone


# -- object stores ----------------------------------------------------------------------------------------------------


@pytest.fixture
def store() -> Iterator[s3server.S3]:
    with s3server.bucket() as found:
        yield found


def test_a_bucket(tmp_path: Path, store: s3server.S3) -> None:
    found = examine(tmp_path, "--only", "checkpoint", "--checkpoint-dir", store.url, env=store.environment)[
        "checkpoint"
    ]
    assert found.state in ("ok", "warn"), found
    assert "conditional" not in found.text
    assert (store.stored(), store.uploads()) == ([], 0)


def test_a_bucket_without_conditional_put(tmp_path: Path, store: s3server.S3) -> None:
    """Then two jobs that write there cannot keep out of each other's way."""
    store.fail_if("501", lambda request, headers: "if-none-match" in headers)
    found = examine(tmp_path, "--only", "checkpoint", "--checkpoint-dir", store.url, env=store.environment)[
        "checkpoint"
    ]
    assert (found.state, "has no conditional put" in found.text) == ("warn", True), found


def test_a_bucket_that_refuses(tmp_path: Path, store: s3server.S3) -> None:
    url = "s3://" + "no-such-bucket-" + os.urandom(4).hex() + "/run"
    found = examine(tmp_path, "--only", "checkpoint", "--checkpoint-dir", url, env=store.environment)["checkpoint"]
    assert (found.state, found.cure) == ("fail", "make the bucket first, or correct its name")


def test_a_store_that_does_not_answer_is_cut_off(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        endpoint = {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{deaf.getsockname()[1]}", "NO_PROXY": "127.0.0.1"}
        keys = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1"}
        flags = ("--only", "checkpoint", "--checkpoint-dir", "s3://bucket/run", "--limit", "1.5")
        found = examine(tmp_path, *flags, env=endpoint | keys)["checkpoint"]
    assert (found.state, found.text) == ("fail", "no answer within 1.5 s")
    assert "does not answer" in found.cure
