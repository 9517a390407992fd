"""Whole saves into an object store: a real S3 server, killed between requests, and requests that fail."""

from __future__ import annotations

import itertools
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import cloudstory
import pytest
import s3server
from s3server import S3

import states
from holdfast.checkpoint import catalogue, export, keeping, persist, verify
from holdfast.checkpoint.format import Policy
from holdfast.checkpoint.objects import POINTS, Objects

# What is stored before a request is what was stored after the one before it. A save makes dozens of requests, of a few
# kinds: some of each will do here, since every one is tried on a filesystem.
AFTER = [point for point in POINTS if point.endswith(".after")]
STRIDES = {"objects.put.after": 8, "objects.delete.after": 6, "objects.part.after": 2}


@pytest.fixture(scope="module")
def server() -> Iterator[S3]:
    with s3server.bucket() as s3, pytest.MonkeyPatch.context() as patch:
        for name, value in s3.environment.items():
            patch.setenv(name, value)
        yield s3


@pytest.fixture
def s3(server: S3) -> Iterator[S3]:
    """A directory of its own."""
    server.forget()
    run = f"some/{uuid.uuid4().hex}"
    server.url = f"s3://{server.bucket}/{run}"
    yield server
    server.forget()


@pytest.fixture
def objects(s3: S3) -> Objects:
    return cloudstory.connect(s3.url)


def test_all_of_it(objects: Objects, tmp_path: Path) -> None:
    assert cloudstory.tell(objects) == [10, 20, 30]
    there = catalogue.find(objects)
    assert [found.name for found in there.found] == ["step_00000030", "checkpoint_epoch_1.pt"] and not there.broken
    for found in there.found:
        assert found.step is not None and found.verified
        assert verify.verify(objects, found) == []
        assert states.same(states.load(objects, found), states.state(found.step))
        export.export(objects, found, str(tmp_path / f"{found.step}.pt"))
    keeping.pin(objects, there.found[0])
    assert catalogue.find(objects).found[0].pinned
    assert [found.name for found in catalogue.choose(f"{objects.url}/step_00000030", there, Policy())] == [
        "step_00000030"
    ]


@pytest.mark.parametrize("name", ["step_00000030/t000001.00001.bin", "checkpoint_epoch_1.pt"])
def test_damage_is_found_and_set_aside(s3: S3, objects: Objects, name: str) -> None:
    cloudstory.tell(objects)
    key = f"{objects.url.removeprefix(f's3://{s3.bucket}/')}/{name}"
    content = bytearray(s3.ask("GET", key)[1])
    content[len(content) // 2] ^= 1
    s3.ask("PUT", key, content=bytes(content))
    found = next(one for one in catalogue.find(objects).found if name.startswith(one.name))
    assert verify.verify(objects, found) != []
    objects.set_aside(f"{found.name}/" if found.kind == "step" else found.name)
    left = [one.name for one in catalogue.find(objects).found]
    assert found.name not in left and len(left) == 1
    term = states.begin(objects, restored=20)
    states.save(objects, 40, 2, term=term, policy=Policy(last=1))
    stored = [one for one in s3.stored() if one.startswith(key.partition(name)[0])]
    assert [one for one in stored if "/damaged_" in one]  # and it is still there
    if found.kind == "step":
        assert key in stored


class Story:
    """The process that forks those that are killed."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, cloudstory.__file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, url: str, fault: str) -> tuple[bool, list[int]]:
        """Whether it was killed, and what it had done."""
        assert self._process.stdin is not None and self._process.stdout is not None
        print(url, fault, file=self._process.stdin, flush=True)
        *done, status = map(int, self._process.stdout.readline().split())
        assert status in (0, -9), f"{fault}: {status}"
        return status == -9, done

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=30)


@pytest.fixture(scope="module")
def story(server: S3) -> Iterator[Story]:
    story = Story()
    yield story
    story.end()


@pytest.mark.parametrize("point", AFTER)
def test_killed_between_requests(s3: S3, story: Story, point: str) -> None:
    for count in itertools.count(1, STRIDES.get(point, 1)):
        url = f"{s3.url}/{count}"
        killed, done = story.run(url, f"{point}:{count}")
        _check_what_is_left(cloudstory.connect(url), done, f"{point}:{count}")
        if not killed:
            assert done == [10, 20, 30] and count > 1
            return


def _check_what_is_left(objects: Objects, done: list[int], where: str) -> None:
    there = catalogue.find(objects)
    assert not there.broken and not there.notes, where
    for found in there.found:
        assert found.step is not None
        assert states.same(states.load(objects, found), states.state(found.step)), where
    newest = persist.newest_step(objects)
    assert not done or (newest is not None and newest >= done[-1]), where
    term = states.begin(objects, restored=newest)
    for step, epoch in ((40, None), (50, 9)):
        assert states.save(objects, step, 2, term=term, epoch=epoch, policy=Policy(last=1))[-1].verified, where
    assert [name for name in objects.names() if not name.startswith(".")] == [
        "checkpoint_epoch_9.pt", "step_00000040/"
    ], where  # fmt: skip


@pytest.mark.parametrize("failure", ["lost", "500 after"])
def test_a_request_that_fails_now_and_then_is_tried_again(s3: S3, objects: Objects, failure: str) -> None:
    seen: set[str] = set()

    def each_once(request: str, headers: dict[str, str]) -> bool:
        fresh = request not in seen and not request.startswith("POST")
        seen.add(request)
        return fresh

    meant: Callable[[str, dict[str, str]], bool] = each_once
    s3.fail_if(failure, meant)
    assert cloudstory.tell(objects) == [10, 20, 30]
    for found in catalogue.find(objects).found:
        assert states.same(states.load(objects, found), states.state(found.step or 0))
