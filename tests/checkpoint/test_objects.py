"""Checkpoints in an object store: a real S3 server, and failures between any two requests."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import s3server
import storework
from s3server import S3
from storework import LARGE, OPERATIONS, PREPARED, connect

from holdfast.checkpoint.errors import CheckpointError
from holdfast.checkpoint.objects import OLD_S, POINTS, Objects
from holdfast.checkpoint.storage import StorageError, open_storage

MIB = 1024 * 1024
MANIFEST = "step_1/t000001.manifest.json"


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3]:
    with s3server.bucket() as s3:
        for name, value in s3.environment.items():
            monkeypatch.setenv(name, value)
        yield s3


@pytest.fixture
def objects(s3: S3) -> Objects:
    return connect(s3.url)


def content(objects: Objects, name: str) -> bytes:
    buffer = bytearray(objects.size(name) + 1)
    return bytes(buffer[: objects.read(name, 0, memoryview(buffer))])


# -- what it is for ---------------------------------------------------------------------------------------------------


def test_what_is_written_is_read(s3: S3, objects: Objects) -> None:
    assert objects.names() == [] and objects.names("step_1") == []
    objects.write("step_1/t000001.00000.bin", [b"abc", memoryview(b"def")])
    assert objects.create(MANIFEST, b"{}")
    assert objects.publish("checkpoint_epoch_1.pt", [b"", b"12", b"3"])
    assert objects.create("empty", b"")
    objects.write("none", [])
    assert objects.names() == ["checkpoint_epoch_1.pt", "empty", "none", "step_1/"]
    assert objects.names("step_1/") == ["t000001.00000.bin", "t000001.manifest.json"]
    assert content(objects, "step_1/t000001.00000.bin") == b"abcdef"
    assert content(objects, "empty") == content(objects, "none") == b""
    into = memoryview(bytearray(4))
    assert objects.read("step_1/t000001.00000.bin", 4, into) == 2 and bytes(into[:2]) == b"ef"
    assert objects.read("step_1/t000001.00000.bin", 6, into) == 0
    assert objects.read("empty", 0, memoryview(b"")) == 0
    assert isinstance(open_storage(s3.url + "/"), Objects) and open_storage(s3.url + "/").url == s3.url


def test_a_large_object_goes_in_parts_and_comes_in_ranges(s3: S3) -> None:
    """In the sizes that are really used, but for the parts: S3 takes no smaller ones."""
    objects = Objects(s3.url)
    objects.bucket.part_bytes = 5 * MIB
    buffer = bytearray(4 * MIB)

    def parts() -> Iterator[memoryview]:
        for letter in b"abcd":
            buffer[:] = bytes([letter]) * len(buffer)
            yield memoryview(buffer).cast("i")

    whole = b"".join(bytes([letter]) * len(buffer) for letter in b"abcd")
    objects.write("w", parts())
    assert sum("partNumber" in request for request in s3.proxy.requests) == 4
    assert s3.content("w") == whole and s3.uploads() == 0
    s3.forget()
    into = memoryview(bytearray(9 * MIB + 1))
    assert objects.read("w", 7, into) == len(into) and into == whole[7 : 7 + len(into)]
    assert len(s3.proxy.requests) == 5
    assert objects.read("w", len(whole) - 3 * MIB, into) == 3 * MIB and into[: 3 * MIB] == whole[-3 * MIB :]


def test_parts_may_be_read_from_the_same_store(objects: Objects) -> None:
    objects.write("from", LARGE)
    assert objects.publish("to", objects.bucket.content("from"))
    assert content(objects, "to") == b"".join(LARGE)


def test_nothing_is_replaced_but_by_write(s3: S3, objects: Objects) -> None:
    assert objects.create("a", b"first") and not objects.create("a", b"second")
    assert not objects.publish("a", [b"third"]) and not objects.publish("a", LARGE)
    assert s3.content("a") == b"first"
    objects.write("b", LARGE)
    objects.write("b", [b"short"])
    assert s3.content("b") == b"short" and s3.stored() == ["a", "b"] and objects.conditional


def test_one_that_appears_while_another_is_sent_stays(s3: S3, objects: Objects) -> None:
    def parts() -> Iterator[bytes]:
        yield from LARGE
        assert objects.create("a", b"was first")

    assert not objects.publish("a", parts())
    objects.bucket.max_copy_bytes = 0  # as if it were larger than the store can copy
    objects.delete("a")
    assert not objects.publish("a", parts())
    assert s3.content("a") == b"was first" and s3.stored() == ["a"] and s3.uploads() == 0
    objects.delete("a")
    assert objects.publish("a", LARGE) and s3.content("a") == b"".join(LARGE)


def test_what_a_copy_finds_already_there_may_be_its_own(s3: S3, objects: Objects) -> None:
    """It cannot be told from another's with the same bytes, which does as well."""
    other = connect(s3.url)

    def parts() -> Iterator[bytes]:
        yield from LARGE
        assert other.publish("a", LARGE)

    assert objects.publish("a", parts())
    assert s3.content("a") == b"".join(LARGE) and s3.stored() == ["a"] and s3.uploads() == 0


def test_what_is_not_there(objects: Objects) -> None:
    for operation in (objects.size, objects.set_aside, lambda name: objects.read(name, 0, memoryview(bytearray(1)))):
        with pytest.raises(FileNotFoundError, match="run/a"):
            operation("a")
    with pytest.raises(FileNotFoundError):
        objects.set_aside("a/")
    objects.delete("a")
    objects.delete_folder("a")


def test_set_aside_and_delete_folder(s3: S3, objects: Objects) -> None:
    for new in ("damaged_step_1/", "damaged_step_1.2/"):
        objects.create("step_1/data.bin", b"data")
        objects.create(MANIFEST, b"{}")
        objects.create("step_10/data.bin", b"another's")
        assert objects.set_aside("step_1/") == new
        assert objects.names(new) == ["t000001.manifest.json"]
        assert objects.names("step_1") == ["data.bin"]
    objects.create("e.pt", b"1")
    assert objects.set_aside("e.pt") == "damaged_e.pt"
    objects.create("e.pt", b"2")
    assert objects.set_aside("e.pt") == "damaged_e.pt.2" and s3.content("damaged_e.pt") == b"1"
    s3.forget()
    objects.create(MANIFEST, b"{}")
    s3.fail_if("503", lambda request, _: "?delete" in request and sum("?delete" in r for r in s3.proxy.requests) > 1)
    with pytest.raises(StorageError):
        objects.delete_folder("step_1")
    assert objects.names("step_1") == ["data.bin"]  # cut short, and yet no checkpoint
    s3.forget()
    objects.delete_folder("step_1/")
    assert objects.names("step_1") == [] and objects.names("step_10") == ["data.bin"]


@pytest.mark.parametrize("name", ["", "..", "../x", "a/../b", "/x", "a//b", "a\\b", "a\nb", "\udcff", "x" * 256])
def test_a_name_cannot_lead_elsewhere(s3: S3, objects: Objects, name: str) -> None:
    operations: list[Callable[[], object]] = [
        lambda: objects.size(name),
        lambda: objects.read(name, 0, memoryview(bytearray(1))),
        lambda: objects.write(name, [b"x"]),
        lambda: objects.create(name, b"x"),
        lambda: objects.publish(name, LARGE),
        lambda: objects.delete(name),
        lambda: objects.delete_folder(name),
        lambda: objects.set_aside(name),
    ]
    s3.forget()
    for operation in operations:
        with pytest.raises(StorageError, match="is not a name inside"):
            operation()
    assert s3.proxy.requests == []


def test_other_peoples_objects(s3: S3, objects: Objects) -> None:
    for key in ("a", "folder/", "x%5Cy", "deep//empty", "%C3%A4"):
        assert s3.ask("PUT", f"some/run/{key}", content=b"1")[0] == 200
    assert s3.ask("PUT", "some/runner", content=b"1")[0] == 200
    assert objects.names() == ["a", "deep/", "folder/", "ä"]


# -- errors in words --------------------------------------------------------------------------------------------------


def test_wrong_urls(monkeypatch: pytest.MonkeyPatch) -> None:
    for url in ("http://host/x", "s3://", "s3:///x", "s3://bucket/../x", "s3://bucket//x"):
        with pytest.raises(CheckpointError, match="url of") as failure:
            open_storage(url)
        assert url.rstrip("/") in str(failure.value)
    for url in ("s3://key:very-secret@bucket/x", "az://c/x?sig=very-secret"):
        with pytest.raises(CheckpointError, match="environment") as failure:
            open_storage(url)
        assert "secret" not in str(failure.value)
    monkeypatch.setitem(sys.modules, "obstore", None)
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    with pytest.raises(CheckpointError, match=r"^s3://b/x needs obstore: pip install 'holdfast\[cloud\]'$"):
        open_storage("s3://b/x")


def test_errors_are_one_line_without_secrets(s3: S3, objects: Objects, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    def fails(operation: Callable[[], object]) -> str:
        with pytest.raises(StorageError) as failure:
            operation()
        said.append(str(failure.value))
        return said[-1]

    nowhere = Objects("s3://no-such-bucket/x")
    for operation in (nowhere.names, lambda: nowhere.create("a", b""), lambda: nowhere.write("a", LARGE)):
        assert "make the bucket first" in fails(operation)
    s3.fail_if("503", lambda request, headers: True)
    down = "tried several times; the store, or the way to it, is down"
    assert fails(objects.names) == f"listing {s3.url}: 503 Service Unavailable (Injected); {down}"
    s3.fail_if("lost", lambda request, headers: True)
    assert "is down" in fails(lambda: objects.create("a", b""))
    s3.fail_if("403", lambda request, headers: True)
    assert "check the credentials" in fails(lambda: objects.write("a", LARGE))
    assert "check the credentials" in fails(lambda: objects.create("a", b""))
    assert len(s3.proxy.requests) == 2  # what is refused is not tried again
    s3.fail_if("507", lambda request, headers: True)
    with pytest.raises(StorageError) as full:
        objects.write("a", [b"x"])
    assert full.value.full
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://192.0.2.1:1")
    assert "AWS_ALLOW_HTTP=true" in fails(lambda: Objects(s3.url).names())
    for text in said:
        assert "\n" not in text and "secret" not in text and len(text) < 400
    assert s3.stored() == []


def test_what_the_parts_raise_is_raised_and_leaves_nothing(s3: S3, objects: Objects) -> None:
    def parts() -> Iterator[bytes]:
        yield from LARGE
        raise KeyError("mine")

    for operation in (objects.write, objects.publish):
        with pytest.raises(KeyError):
            operation("a", parts())
    s3.fail_if("403", lambda request, _: "partNumber=2" in request)
    for operation in (objects.write, objects.publish):
        with pytest.raises(StorageError):
            operation("a", LARGE)
    assert s3.stored() == [] and s3.uploads() == 0


# -- failures between any two requests --------------------------------------------------------------------------------


def prepare(s3: S3) -> None:
    for key in s3.stored():
        if key not in PREPARED:
            s3.ask("DELETE", f"some/run/{key}")
    for key in set(PREPARED).difference(s3.stored()):
        s3.ask("PUT", f"some/run/{key}", content=b"old")


def check(s3: S3, done: Collection[str]) -> None:
    """What must hold at any moment, and what must hold because it was said to be done."""
    keys = s3.stored()
    assert s3.content("kept") == b"old"
    new = [("step_2/w", "write", b"".join(LARGE)), ("step_2/c", "create", b"new"), ("p", "publish", b"".join(LARGE))]
    for key, operation, whole in new:
        assert key in keys or operation not in done
        assert key not in keys or s3.content(key) == whole
    assert "delete" not in done or "d" not in keys
    for old, operation in (("step_0/t1.manifest.json", "set_aside"), ("f", "set_file_aside")):
        copies = [key for key in keys if key.startswith(f"damaged_{old.split('/')[0]}")]
        assert copies or old in keys
        assert all(s3.content(key) == b"old" for key in copies)
        assert operation not in done or (old not in keys and copies)
    assert "step_0/data" in keys
    assert "delete_folder" not in done or not any(key.startswith("step_1/") for key in keys)
    assert "step_1/t1.manifest.json" not in keys or "step_1/data" in keys


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_failure_at_any_request_is_survived(s3: S3, objects: Objects, name: str) -> None:
    """Also an answer that is lost after all was done: who has created an object is told so."""
    prepare(s3)
    s3.forget()
    OPERATIONS[name](objects)
    requests = list(s3.proxy.requests)
    for failure in ("lost", "cut", "503", "500 after"):
        for number, request in enumerate(requests, 1):
            prepare(s3)
            s3.fail(failure, number)
            try:
                OPERATIONS[name](objects)
            except StorageError as error:
                raise AssertionError(f"{failure} at {request}: {error}") from error
            check(s3, [name])
            assert not [key for key in s3.stored() if ".tmp." in key]
    assert objects.conditional


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_store_that_goes_away_at_any_request(s3: S3, objects: Objects, name: str) -> None:
    prepare(s3)
    s3.forget()
    OPERATIONS[name](objects)
    requests = list(s3.proxy.requests)
    for failure in ("503", "cut"):
        for number, request in enumerate(requests, 1):
            if name == "publish" and "delete" in request:
                continue  # of the temporary object: all is done
            prepare(s3)
            s3.fail(failure, number, 10**6)
            with pytest.raises(StorageError):
                OPERATIONS[name](objects)
            s3.forget()
            check(s3, [])


def test_a_store_without_conditional_requests(s3: S3, objects: Objects) -> None:
    s3.fail_if("501", lambda request, headers: "if-none-match" in headers)
    assert objects.create("a", b"1") and not objects.create("a", b"2")
    assert not objects.conditional
    assert s3.content("a") == b"1"
    assert objects.publish("p", LARGE) and not objects.publish("p", LARGE)
    other = connect(s3.url)
    assert other.publish("q", LARGE) and not other.conditional  # noticed at the copy
    assert s3.content("q") == s3.content("p") == b"".join(LARGE) and s3.stored() == ["a", "p", "q"]


# -- processes --------------------------------------------------------------------------------------------------------


def start(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, storework.__file__, *arguments]
    return subprocess.Popen(command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def ask(child: subprocess.Popen[str], line: str) -> list[str]:
    assert child.stdin is not None and child.stdout is not None
    child.stdin.write(line + "\n")
    child.stdin.flush()
    return child.stdout.readline().split()


@pytest.mark.parametrize("operation", dict.fromkeys(point.rpartition(".")[0] for point in POINTS))
def test_killed_at_every_point(s3: S3, objects: Objects, operation: str) -> None:
    with start(s3.url) as victim:
        for side in ("before", "after"):
            status, count = "-9", 0
            while status == "-9":
                prepare(s3)
                count += 1
                *done, status = ask(victim, f"{operation}.{side}:{count}")
                check(s3, done)
                objects.sweep()
                assert not [key for key in s3.stored() if ".tmp." in key]
                check(s3, done)
            assert status == "0" and done == list(OPERATIONS) and count > 1


def test_of_two_processes_that_create_one_name_one_is_first(s3: S3) -> None:
    rounds = 10
    with start(s3.url, "a", str(rounds)) as a, start(s3.url, "b", str(rounds)) as b:
        assert a.stdout is not None and b.stdout is not None
        for turn in range(rounds):
            assert a.stdout.readline() == b.stdout.readline() == "ready\n"
            with ThreadPoolExecutor(2) as pool:
                answers = list(pool.map(ask, (a, b), ("go", "go")))
            assert sorted(answers) == [["False"], ["True"]]
            assert s3.content(f"m{turn}") == b"ab"[answers.index(["True"]) :][:1] * 10_000


def test_sweep_takes_only_what_nobody_will_touch_again(s3: S3, objects: Objects) -> None:
    with start(s3.url) as victim:
        assert ask(victim, "objects.copy.before:1") == ["write", "create", "-9"]
    (dead,) = (key for key in s3.stored() if ".tmp." in key)
    machine = dead.split(".")[2]
    elsewhere = dead.replace(machine, "a" * 12)
    for key in (elsewhere, ".tmp.somebodys"):
        s3.ask("PUT", f"some/run/{key}", content=b"1")
    assert objects.names() == [".tmp.somebodys", "step_2/"]
    assert objects.sweep() == [dead]
    assert {elsewhere, ".tmp.somebodys"} < set(s3.stored())
    assert OLD_S > 3600
