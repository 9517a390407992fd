"""Which job a word means."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

from holdfast.agent import doorbell
from holdfast.agent.doorbell import Answer, Doorbell, Job, Request, Sorry, Who
from holdfast.observe import find
from watching.jobs_on_disk import Written

Result = TypeVar("Result")
PID = os.getpid()


def with_agent(job: Job, look: Callable[[], Result]) -> Result:
    """While an agent answers for that job, in this process."""

    async def answer(request: Request, pid: int) -> Answer:
        return job if isinstance(request, Who) else Sorry("not now")

    async def scene() -> Result:
        bell = Doorbell(asyncio.get_running_loop(), answer)
        assert bell.start()
        try:
            return await asyncio.to_thread(look)
        finally:
            bell.close()

    return asyncio.run(scene())


def newest(*jobs: Written) -> None:
    """By the time of their records, the last one is."""
    for at, job in enumerate(jobs):
        os.utime(job.record, (1_000 + at, 1_000 + at))


@pytest.mark.parametrize("what", ["run directory", "record", "log directory"])
def test_a_path_is_a_job(alone: Path, tmp_path: Path, what: str) -> None:
    job = Written(tmp_path / "logs").trains()
    path = {"run directory": job.run_dir, "record": job.record, "log directory": tmp_path / "logs"}[what]
    assert find.find(str(path)) == find.Found("made", job.run_dir, job.record)


def test_two_jobs_in_one_directory_are_listed(alone: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = Written(tmp_path / "logs", "one").trains(), Written(tmp_path / "logs", "two").trains()
    newest(one, two)
    with pytest.raises(find.NotFound) as failure:
        find.find(str(tmp_path / "logs"))
    assert find.complain("status", failure.value) == 2
    assert capsys.readouterr().err == (
        f"holdfast status: several jobs are in {tmp_path / 'logs'}; say which by its folder:\n"
        f"  {two.run_dir}\n  {one.run_dir}\n"
    )


def test_of_two_lives_of_one_job_the_later_is_meant(alone: Path, tmp_path: Path) -> None:
    first, second = Written(tmp_path / "logs").trains(), Written(tmp_path / "logs").trains()
    newest(second, first)
    assert find.find(str(tmp_path / "logs")).run_dir == first.run_dir
    newest(first, second)
    assert find.find(str(tmp_path / "logs")).run_dir == second.run_dir


def test_without_a_word_it_is_the_last_that_left_a_record(alone: Path) -> None:
    one, two = Written(alone / "holdfast_a", "one").trains(), Written(alone / "holdfast_b", "two").trains()
    newest(one, two)
    assert find.find().run_id == "two"
    assert find.find("one").run_dir == one.run_dir
    assert [job.run_id for job in find.jobs()] == ["two", "one"]


@pytest.mark.skipif(os.getuid() != 0, reason="gives a folder to another user")
def test_what_others_leave_in_the_common_place_is_nobodys(alone: Path) -> None:
    mine, other = Written(alone / "holdfast_a", "mine").trains(), Written(alone / "holdfast_b", "other").trains()
    newest(mine, other)
    os.chown(other.run_dir, 65534, 65534)
    assert find.find().run_id == "mine"


def test_no_job_at_all(alone: Path) -> None:
    with pytest.raises(find.NotFound, match="no job runs here, and none has left a record"):
        find.find()


def test_an_unknown_word_is_shown_harmless(alone: Path) -> None:
    with pytest.raises(find.NotFound) as failure:
        find.find("no\x1b[2Jsuch")
    assert str(failure.value).startswith(r"there is no job 'no\\x1b[2Jsuch' on this machine")


def test_a_folder_without_a_record(alone: Path, tmp_path: Path) -> None:
    with pytest.raises(find.NotFound, match=r"has no events\.jsonl, nor has a folder in it"):
        find.find(str(tmp_path))


def test_a_record_whose_beginning_is_torn_is_named_by_its_folder(alone: Path, tmp_path: Path) -> None:
    job = Written(tmp_path / "logs", "torn")
    job.append(b'_at_s":1}\n').launches(1.0)
    assert find.find(str(job.run_dir)).run_id == "torn"


@pytest.mark.parametrize("word", ["", "mine", str(PID), "path"], ids=["nothing", "run id", "pid", "path"])
def test_a_running_job_is_found_with_its_agent(
    alone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, word: str
) -> None:
    monkeypatch.setattr(doorbell, "find", lambda: [PID])
    job, ended = Written(tmp_path / "logs", "mine").trains(), Written(alone / "holdfast_a", "ended").trains()
    newest(job, ended)
    said = Job("mine", PID, 2, "train.py", 0, str(job.run_dir))
    found = with_agent(said, lambda: find.find(str(job.run_dir) if word == "path" else word))
    assert found == find.Found("mine", job.run_dir, job.record, PID)
    assert [each.run_id for each in with_agent(said, lambda: list(find.jobs()))] == ["mine", "ended"]


def test_a_run_directory_is_where_the_agent_has_it(
    alone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doorbell, "find", lambda: [PID])
    job = Written(tmp_path / "logs", "mine").trains()
    monkeypatch.chdir(tmp_path)
    said = Job("mine", PID, 2, "train.py", 0, str(job.run_dir.relative_to(tmp_path)))
    assert with_agent(said, lambda: find.find("mine")).run_dir == job.run_dir


def test_a_job_that_keeps_no_record_says_so(alone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doorbell, "find", lambda: [PID])
    with pytest.raises(find.NotFound, match="job mine keeps no record: it was started with --log-dir=/dev/null"):
        with_agent(Job("mine", PID, 2, "train.py", 0), find.find)


def test_several_running_jobs_are_listed(alone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doorbell, "find", lambda: [7, 8])
    monkeypatch.setattr(doorbell, "ask", lambda pid, *_: Job(f"run-{pid}", pid, 2, "train.py", 0, "/logs"))
    with pytest.raises(find.NotFound, match="several jobs run here") as failure:
        find.find()
    assert failure.value.choices == (
        "run-7  pid 7  train.py, 2 ranks, generation 0",
        "run-8  pid 8  train.py, 2 ranks, generation 0",
    )


def test_of_several_nodes_on_one_machine_the_merged_record_is_meant(
    alone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, both = Written(tmp_path, "job", "a:7").trains(), Written(tmp_path, "job", "a:8").trains().starts(node="a:7")
    folders = {7: one.run_dir, 8: both.run_dir}
    monkeypatch.setattr(doorbell, "find", lambda: [7, 8])
    monkeypatch.setattr(doorbell, "ask", lambda pid, *_: Job("job", pid, 2, "train.py", 0, str(folders[pid])))
    assert find.find("job").pid == 8
    assert find.find("7").run_dir == one.run_dir
    assert [job.pid for job in find.jobs()] == [8]


def test_an_agent_that_does_not_answer_is_named(alone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doorbell, "find", lambda: [PID])
    with pytest.raises(find.NotFound, match=f"no agent with pid {PID} answers: .*; name the run directory instead"):
        find.find()


def test_an_ended_job_does_not_stand_in_for_one_whose_agent_is_silent(
    alone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doorbell, "find", lambda: [PID])
    ended = Written(alone / "holdfast_a", "ended").trains().ends(3600)
    with pytest.raises(find.NotFound, match=f"no agent with pid {PID} answers"):
        find.find()
    assert find.find("ended").run_dir == ended.run_dir, "who names it means it"


def test_an_agent_that_ends_while_it_is_asked_is_not_silent() -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0holdfast/{os.getuid()}/{os.getpid()}")
        listener.listen()

        def hear() -> None:
            connection, _ = listener.accept()
            listener.close()
            connection.close()

        agent = threading.Thread(target=hear)
        agent.start()
        _, silent = find.running()
        agent.join()
    assert not [why for why in silent if f"pid {os.getpid()} " in why]
