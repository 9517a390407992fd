"""Checkpoints on a filesystem: whole or not at all, durable, never outside, and clear when it fails."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import select
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import syscalls

from holdfast.checkpoint import faultpoints, files
from holdfast.checkpoint.errors import CheckpointError
from holdfast.checkpoint.folder import OLD_S, POINTS, Folder
from holdfast.checkpoint.storage import Storage, StorageError, open_storage

filtered = pytest.mark.skipif(not syscalls.is_possible(), reason="this kernel does not let a process filter its calls")


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(str(tmp_path / "checkpoints"))


def content(folder: Storage, name: str) -> bytes:
    buffer = bytearray(folder.size(name) + 1)
    return bytes(buffer[: folder.read(name, 0, memoryview(buffer))])


def everything(folder: Folder) -> list[str]:
    """All files and folders, hidden ones too."""
    root = Path(folder.url)
    return sorted(str(path.relative_to(root)) for path in root.rglob("*"))


# -- what it is for ---------------------------------------------------------------------------------------------------


def test_what_is_written_is_read(folder: Folder) -> None:
    assert folder.names() == [] and folder.names("step_00000001") == []
    folder.write("step_00000001/t000001.00000.bin", [b"abc", memoryview(b"def")])
    assert folder.create("step_00000001/t000001.manifest.json", b"{}")
    assert folder.publish("checkpoint_epoch_1.pt", [b"", b"12", b"3"])
    assert folder.create("empty", b"")
    assert folder.names() == ["checkpoint_epoch_1.pt", "empty", "step_00000001/"]
    assert folder.names("step_00000001") == folder.names("step_00000001/")
    assert folder.names("step_00000001") == ["t000001.00000.bin", "t000001.manifest.json"]
    assert content(folder, "step_00000001/t000001.00000.bin") == b"abcdef"
    assert content(folder, "empty") == b"" and folder.size("empty") == 0
    into = memoryview(bytearray(4))
    assert folder.read("step_00000001/t000001.00000.bin", 4, into) == 2 and bytes(into[:2]) == b"ef"
    assert folder.read("step_00000001/t000001.00000.bin", 6, into) == 0


def test_parts_may_be_large_and_their_memory_reused(folder: Folder) -> None:
    buffer = bytearray(3 * files.WRITE_BYTES + 5)

    def parts() -> Iterator[memoryview]:
        for letter in b"abc":
            buffer[:] = bytes([letter]) * len(buffer)
            yield memoryview(buffer)

    folder.write("big", parts())
    assert content(folder, "big") == b"".join(bytes([letter]) * len(buffer) for letter in b"abc")
    folder.write("numbers", [memoryview(bytearray(16)).cast("i")])
    assert folder.size("numbers") == 16


def test_nothing_is_replaced_but_by_write(folder: Folder) -> None:
    assert folder.create("a", b"first") and not folder.create("a", b"second")
    assert not folder.publish("a", [b"third"])
    assert content(folder, "a") == b"first"
    folder.write("b", [b"an unfinished one"])
    folder.write("b", [b"short"])
    assert content(folder, "b") == b"short"
    assert everything(folder) == ["a", "b"]


def test_what_is_not_there(folder: Folder) -> None:
    folder.create("x/y", b"")
    for missing in ("a", "x/a", "z/a"):
        for operation in (folder.size, folder.set_aside, lambda name: folder.read(name, 0, memoryview(bytearray(1)))):
            with pytest.raises(FileNotFoundError):
                operation(missing)
        folder.delete(missing)
        folder.delete_folder(missing)
    with pytest.raises(FileNotFoundError):
        folder.set_aside("a/")


def test_set_aside_finds_a_free_name(folder: Folder) -> None:
    for attempt, new in enumerate(("damaged_step_1/", "damaged_step_1.2/", "damaged_step_1.3/")):
        folder.create("step_1/a", b"%d" % attempt)
        assert folder.set_aside("step_1/") == new
        assert content(folder, new + "a") == b"%d" % attempt
    folder.create("step_2/a", b"")
    assert folder.set_aside("step_2/a") == "step_2/damaged_a"
    long = "x" * 255
    folder.create(long, b"")
    assert folder.set_aside(long) in folder.names()


def test_a_deleted_folder_can_be_made_again(folder: Folder) -> None:
    for _ in range(2):
        folder.create("step_1/deep/er/a", b"")
        folder.delete_folder("step_1")
        assert everything(folder) == []
    shutil.rmtree(folder.url)
    assert folder.create("step_1/a", b"")


def test_the_directory_may_be_relative_or_a_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    relative = open_storage("file://here")
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    linked = open_storage("link")
    monkeypatch.chdir("/")
    assert relative.create("a", b"") and linked.create("b", b"")
    assert (tmp_path / "here" / "a").exists() and (tmp_path / "real" / "b").exists()
    assert relative.url == str(tmp_path / "here")
    with pytest.raises(CheckpointError):
        Folder("")


# -- never outside ----------------------------------------------------------------------------------------------------

TRICKS = [
    "", "/", "//", "..", "../x", "a/../../x", "a/..", ".", "./x", "a//b", "/etc/passwd", "a\0b", "a\\..\\b", "a\nb",
    "\udcff", "a/b//", "x" * 256,
]  # fmt: skip


@pytest.mark.parametrize("name", TRICKS, ids=[ascii(name)[:20] for name in TRICKS])
def test_a_name_cannot_lead_elsewhere(folder: Folder, name: str) -> None:
    folder.create("a/inside", b"")
    before = everything(folder), sorted(Path(folder.url).parent.iterdir())
    operations: list[Callable[[], object]] = [
        lambda: folder.size(name),
        lambda: folder.read(name, 0, memoryview(bytearray(1))),
        lambda: folder.write(name, [b"x"]),
        lambda: folder.create(name, b"x"),
        lambda: folder.publish(name, [b"x"]),
        lambda: folder.delete(name),
        lambda: folder.delete_folder(name),
        lambda: folder.set_aside(name),
    ]
    if name:
        operations.append(lambda: folder.names(name))
    for operation in operations:
        with pytest.raises(StorageError, match="is not a name inside"):
            operation()
    assert (everything(folder), sorted(Path(folder.url).parent.iterdir())) == before


def test_links_are_not_followed(folder: Folder, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_bytes(b"precious")
    folder.create("own", b"")
    root = Path(folder.url)
    (root / "file").symlink_to(outside / "precious")
    (root / "step_1").symlink_to(outside)
    (root / "dangling").symlink_to(outside / "new")
    os.mkfifo(root / "pipe")
    into = memoryview(bytearray(8))
    refused: list[Callable[[], object]] = [
        lambda: folder.size("file"),
        lambda: folder.read("file", 0, into),
        lambda: folder.read("step_1/precious", 0, into),
        lambda: folder.read("pipe", 0, into),
        lambda: folder.write("file", [b"x"]),
        lambda: folder.write("dangling", [b"x"]),
        lambda: folder.write("step_1/precious", [b"x"]),
        lambda: folder.write("pipe", [b"x"]),
        lambda: folder.create("step_1/new", b"x"),
        lambda: folder.delete("step_1/precious"),
        lambda: folder.set_aside("step_1/precious"),
        lambda: folder.delete_folder("step_1/precious"),
        lambda: folder.names("step_1"),
    ]
    for operation in refused:
        with pytest.raises(StorageError) as failure:
            operation()
        assert "\n" not in str(failure.value)
    assert not folder.create("dangling", b"x")
    assert folder.names() == ["own"]
    folder.delete_folder("step_1")  # the link, not what it leads to
    assert not (root / "step_1").is_symlink()
    assert [path.name for path in outside.iterdir()] == ["precious"]
    assert (outside / "precious").read_bytes() == b"precious"


def test_a_folder_is_deleted_with_its_links_but_not_what_they_lead_to(folder: Folder, tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    folder.create("step_1/deep/a", b"")
    (Path(folder.url) / "step_1" / "deep" / "link").symlink_to(tmp_path / "precious")
    folder.delete_folder("step_1")
    assert everything(folder) == [] and (tmp_path / "precious").is_dir()


def test_names_that_cannot_be_written_are_not_listed(folder: Folder) -> None:
    folder.create("a", b"")
    for name in (b"\xff", b"new\nline", b"back\\slash"):
        Path(folder.url, os.fsdecode(name)).touch()
    assert folder.names() == ["a"]


# -- whole or not at all ----------------------------------------------------------------------------------------------


def test_bytes_are_durable_before_the_name_and_the_name_before_the_answer(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    passed: list[str] = []
    monkeypatch.setattr(faultpoints, "passed", lambda point: passed.append(point))

    def effects(operation: Callable[[], object]) -> list[str]:
        passed.clear()
        operation()
        return [point.split(".")[1] for point in passed if point.endswith(".after")]

    made = ["mkdir", "fsync_folder", "mkdir", "fsync_folder"]
    assert effects(lambda: folder.publish("x/a", [b"1", b"2"])) == [
        *made, "open", "write", "fsync", "rename", "fsync_folder",
    ]  # fmt: skip
    assert effects(lambda: folder.create("x/a", b"1")) == ["fsync_folder"]
    assert effects(lambda: folder.write("x/b", [b"1"])) == ["open", "write", "fsync", "fsync_folder"]
    assert effects(lambda: folder.delete("x/b")) == ["unlink", "fsync_folder"]
    assert effects(lambda: folder.set_aside("x/a")) == ["rename", "fsync_folder"]
    assert effects(lambda: folder.delete_folder("x")) == ["rename", "fsync_folder", "unlink", "rmdir"]
    # One that somebody else has made, perhaps a moment ago.
    (Path(folder.url) / "y").mkdir()
    assert effects(lambda: folder.create("y/a", b"1"))[0] == "fsync_folder"


OLD = b"old" * 1000
NEW = [b"new" * 1000, b"er" * 1000]


def work(folder: Folder, done: Callable[[str], object]) -> None:
    """One of everything, on what `prepare` has made."""
    folder.write("step_2/w", NEW)
    done("write")
    assert folder.create("step_2/c", NEW[0])
    done("create")
    assert folder.publish("p", NEW)
    done("publish")
    folder.delete("d")
    done("delete")
    folder.set_aside("step_0/")
    done("set_aside")
    folder.delete_folder("step_1")
    done("delete_folder")


def prepare(folder: Folder) -> None:
    for name in ("d", "kept", "step_0/a", "step_1/a", "step_1/deep/b"):
        folder.create(name, OLD)


def check(folder: Folder, done: list[str]) -> None:
    """What must hold at any moment, and what must hold because it was said to be done."""
    listed = folder.names()
    assert content(folder, "kept") == OLD
    for name, operation, whole in (("step_2/c", "create", NEW[0]), ("p", "publish", b"".join(NEW))):
        path = Path(folder.url, name)
        assert path.exists() or operation not in done
        assert not path.exists() or content(folder, name) == whole
    if "write" in done:
        assert content(folder, "step_2/w") == b"".join(NEW)
    assert "delete" not in done or "d" not in listed
    assert "d" not in listed or content(folder, "d") == OLD
    assert ("step_0/" in listed) + ("damaged_step_0/" in listed) == 1
    assert "set_aside" not in done or "step_0/" not in listed
    assert "delete_folder" not in done or "step_1/" not in listed
    if "step_1/" in listed:
        assert content(folder, "step_1/a") == content(folder, "step_1/deep/b") == OLD


@pytest.mark.parametrize("point", POINTS)
def test_killed_at_every_point(tmp_path: Path, point: str) -> None:
    for count in range(1, 100):
        folder = Folder(str(tmp_path / str(count)))
        prepare(folder)
        killed, done = syscalls.killed_at(point, count, partial(work, folder))
        check(folder, done)
        folder.sweep()
        assert not [name for name in everything(folder) if ".tmp." in name or ".trash." in name]
        check(folder, done)
        if not killed:
            assert len(done) == 6 and count > 1
            return
    raise AssertionError("it is still killed")


@filtered
@pytest.mark.parametrize(
    "missing",
    [{}, {"renameat2": errno.EINVAL}, {"renameat2": errno.ENOSYS, "linkat": errno.EPERM}],
    ids=["rename", "link", "lock"],
)
def test_of_many_who_create_one_name_one_is_first(folder: Folder, missing: dict[str, int]) -> None:
    """Each way to do it: filesystems have only some of them."""
    folder.names()
    rounds, writers = 10, 4
    for turn in range(rounds):
        go_read, go_write = os.pipe()
        results = [os.pipe() for _ in range(writers)]
        children = []
        for writer in range(writers):
            child = os.fork()
            if child == 0:
                os.close(go_write)
                if missing:
                    syscalls.fail(missing)
                os.read(go_read, 1)  # returns in all of them at once, when the last end is closed
                first = folder.create(f"step_{turn}/m", bytes([writer]) * 100_000)
                os.write(results[writer][1], b"1" if first else b"0")
                os._exit(0)
            children.append(child)
        os.close(go_write)
        assert [os.waitpid(child, 0)[1] for child in children] == [0] * writers
        answers = [os.read(read_end, 1) for read_end, _ in results]
        assert sorted(answers) == [b"0"] * (writers - 1) + [b"1"]
        assert content(folder, f"step_{turn}/m") == bytes([answers.index(b"1")]) * 100_000
        for fd in (go_read, *(end for ends in results for end in ends)):
            os.close(fd)
    assert not [name for name in everything(folder) if ".tmp." in name]


@filtered
def test_without_better_calls_a_rename_waits_for_its_turn(folder: Folder) -> None:
    folder.create("kept", b"")
    root = os.open(folder.url, os.O_RDONLY)
    fcntl.flock(root, fcntl.LOCK_EX)
    child = os.fork()
    if child == 0:
        os.close(root)
        syscalls.fail({"renameat2": errno.ENOSYS, "linkat": errno.EPERM})
        os._exit(0 if not folder.create("a", b"second") else 1)
    watched = os.pidfd_open(child)
    assert select.select([watched], [], [], 0.3)[0] == []  # one that does not wait is done by then
    Path(folder.url, "a").write_bytes(b"first")
    os.close(root)
    os.close(watched)
    assert os.waitpid(child, 0)[1] == 0 and content(folder, "a") == b"first"


@filtered
@pytest.mark.parametrize("missing", [{"renameat2": errno.EINVAL}, {"renameat2": errno.ENOSYS, "linkat": errno.EPERM}])
def test_all_is_done_without_the_newest_calls(folder: Folder, missing: dict[str, int]) -> None:
    prepare(folder)
    assert syscalls.with_failing(missing, lambda: work(folder, str)) == "None"
    check(folder, ["write", "create", "publish", "delete", "set_aside", "delete_folder"])
    assert not [name for name in everything(folder) if ".tmp." in name or ".trash." in name]


# -- when it fails ----------------------------------------------------------------------------------------------------


@filtered
@pytest.mark.parametrize(
    ("call", "error", "words", "full"),
    [
        ("write", errno.EIO, "Input/output error; the disk", False),
        ("write", errno.EDQUOT, "Disk quota exceeded; free some space", True),
        ("fsync", errno.EIO, "Input/output error; the disk", False),
        ("fsync", errno.ENOSPC, "No space left on device; free some space", True),
        ("renameat2", errno.EIO, "Input/output error; the disk", False),
        ("renameat2", errno.EROFS, "Read-only file system; it is mounted read-only", False),
        ("mkdirat", errno.EACCES, "Permission denied; this user may not", False),
    ],
)
def test_a_bad_disk(folder: Folder, call: str, error: int, words: str, full: bool) -> None:
    prepare(folder)
    before = everything(folder)
    says = syscalls.with_failing({call: error}, lambda: folder.publish("step_9/p", NEW))
    assert says == f"StorageError: writing {folder.url}/step_9/p: {words}" + says.partition(words)[2]
    assert says.endswith(f"full={full}") and "\n" not in says
    if call in ("write", "fsync"):
        assert "StorageError" in syscalls.with_failing({call: error}, lambda: folder.write("step_9/w", NEW))
    assert [name for name in everything(folder) if name != "step_9"] == before
    check(folder, [])


@filtered
def test_a_disk_that_cannot_be_read(folder: Folder) -> None:
    folder.create("a", OLD)
    says = syscalls.with_failing({"preadv2": errno.EIO}, lambda: folder.read("a", 0, memoryview(bytearray(8))))
    assert says.startswith(f"StorageError: reading {folder.url}/a: Input/output error; the disk")


def test_a_short_write_is_continued_until_the_limit(folder: Folder) -> None:
    folder.create("kept", OLD)

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (5000, resource.RLIM_INFINITY))
        folder.write("exact", [b"x" * 5000])
        folder.write("large", [b"x" * 5001])

    assert "ulimit -f" in syscalls.in_child(limited)
    assert folder.names() == ["exact", "kept"] and folder.size("exact") == 5000


def test_what_the_parts_raise_is_raised_and_leaves_nothing(folder: Folder) -> None:
    def parts() -> Iterator[bytes]:
        yield b"x"
        raise KeyError("mine")

    for operation in (folder.write, folder.publish):
        with pytest.raises(KeyError):
            operation("a", parts())
    assert everything(folder) == []


FULL_DISK = """
import os, subprocess, sys
from holdfast.checkpoint.folder import Folder
from holdfast.checkpoint.storage import StorageError

subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "none", sys.argv[1]], check=True)
folder = Folder(sys.argv[1] + "/c")
folder.create("kept", b"k" * 100_000)
for operation in (folder.write, folder.publish):
    try:
        operation("large", (b"x" * 10_000 for _ in range(100)))
    except StorageError as failure:
        print(failure.full, failure)
assert os.listdir(folder.url) == ["kept"], os.listdir(folder.url)
folder.write("fits", [b"x" * 100_000])
subprocess.run(["mount", "-o", "remount,ro", "none", sys.argv[1]], check=True)
for operation in (lambda: folder.create("a", b""), lambda: folder.delete("kept"), lambda: folder.set_aside("kept")):
    try:
        operation()
    except StorageError as failure:
        print(failure.full, failure)
assert folder.names() == ["fits", "kept"]
"""


def test_a_disk_that_is_full_and_then_read_only(tmp_path: Path) -> None:
    enter = ["unshare", "--user", "--map-root-user", "--mount"]
    probe = [*enter, "mount", "-t", "tmpfs", "none", str(tmp_path)]
    if shutil.which("unshare") is None or subprocess.run(probe, capture_output=True).returncode != 0:
        pytest.skip("no filesystem can be mounted here")
    command = [*enter, sys.executable, "-c", textwrap.dedent(FULL_DISK), str(tmp_path)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    full = f"True writing {tmp_path}/c/large: No space left on device; free some space there, or keep fewer checkpoints"
    lines = ran.stdout.splitlines()
    assert lines[:2] == [full, full]
    assert len(lines) == 5 and all("False" in line and "mounted read-only" in line for line in lines[2:])


# -- what is left behind ----------------------------------------------------------------------------------------------


def test_sweep_takes_only_what_nobody_will_touch_again(folder: Folder) -> None:
    folder.create("step_1/a", b"")
    root = Path(folder.url)
    killed, _ = syscalls.killed_at("folder.fsync.before", 1, lambda _: folder.create("step_1/b", b"x"))
    assert killed
    (dead,) = (path.name for path in (root / "step_1").glob(".tmp.*"))
    # The same on another machine: its process ids mean nothing here.
    machine = dead.split(".")[2]
    elsewhere, elsewhere_old = (dead.replace(machine, other * 12) for other in "ab")
    for name in (elsewhere, elsewhere_old, ".tmp.somebodys", ".trash.somebodys"):
        (root / name).touch()
    now = (root / elsewhere).stat().st_mtime
    os.utime(root / elsewhere_old, (now - OLD_S - 60,) * 2)
    (root / dead.replace(".tmp.", ".trash.") / "deep").mkdir(parents=True)

    def parts() -> Iterator[bytes]:
        yield b"1"
        removed = folder.sweep()  # while this one is being written
        assert sorted(removed) == sorted([f"step_1/{dead}", elsewhere_old, dead.replace(".tmp.", ".trash.")])
        yield b"2"

    assert folder.publish("step_1/c", parts())
    assert everything(folder) == sorted(
        [elsewhere, ".tmp.somebodys", ".trash.somebodys", "step_1", "step_1/a", "step_1/c"]
    )
    assert folder.names() == [".tmp.somebodys", ".trash.somebodys", "step_1/"]
    assert Folder(folder.url + "/none").sweep() == []
