"""`holdfast stacks` against a socket that answers as an agent does."""

from __future__ import annotations

import asyncio
import os

import msgspec
import pytest

from holdfast.agent import doorbell
from holdfast.agent.doorbell import Answer, Doorbell, Job, Request, Sorry, Taken, Who
from holdfast.cli import stacks as command
from holdfast.control.stacks import Group

PID = os.getpid()
GROUPS = (Group((0, 1), 2, "all_reduce", True, ("x.py:1 f",)), Group((2,), 1, "data.py:41 read", False, ("y.py:2 g",)))
TAKEN = Taken(GROUPS, (2,), "/logs/stacks/0", 2, 1)


def run(*argv: str, answer: Answer = TAKEN) -> int:
    async def reply(request: Request, pid: int) -> Answer:
        return Job(f"run-{PID}", PID, 3, "train.py", 1) if isinstance(request, Who) else answer

    async def scene() -> int:
        bell = Doorbell(asyncio.get_running_loop(), reply)
        assert bell.start()
        try:
            return await asyncio.to_thread(command.main, argv)
        finally:
            bell.close()

    return asyncio.run(scene())


@pytest.fixture(autouse=True)
def no_other_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doorbell, "find", lambda: [PID])


@pytest.mark.parametrize("job", [f"run-{PID}", str(PID), ""], ids=["by run id", "by pid", "the only one"])
def test_it_says_what_the_ranks_do_and_whom_they_wait_for(capsys: pytest.CaptureFixture[str], job: str) -> None:
    assert run(*filter(None, [job])) == 0
    assert capsys.readouterr().out == (
        "2 ranks in all_reduce, rank 2 in data.py:41 read\n"
        "not in a collective: rank 2, likely what the others wait for\n"
        "\nall_reduce: ranks 0, 1\n    x.py:1 f\n"
        "\ndata.py:41 read: rank 2\n    y.py:2 g\n"
        "\nno answer from 1 of 3 nodes\n"
        "\nmore in /logs/stacks/0\n"
    )


def test_programs_get_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(str(PID), "--json") == 0
    assert msgspec.json.decode(capsys.readouterr().out, type=Taken) == TAKEN


def test_a_job_that_cannot_say_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(str(PID), answer=Sorry("no world runs")) == 1
    assert capsys.readouterr().err == "holdfast stacks: no world runs\n"


def test_an_unknown_job_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("nobody's") == 1
    assert capsys.readouterr().err == 'holdfast stacks: there is no job "nobody\'s" on this machine\n'


def test_no_job_is_an_error(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doorbell, "find", list)
    assert command.main([]) == 1
    assert capsys.readouterr().err == "holdfast stacks: no job runs here\n"


def test_an_agent_that_does_not_answer_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([]) == 1
    assert capsys.readouterr().err == (
        f"holdfast stacks: no agent with pid {PID} answers: Connection refused\nholdfast stacks: no job runs here\n"
    )


def test_several_jobs_are_listed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doorbell, "find", lambda: [7, 8])
    monkeypatch.setattr(doorbell, "ask", lambda pid, *_: Job(f"run-{pid}", pid, 2, "train.py", 0))
    assert command.main([]) == 2
    assert capsys.readouterr().err == (
        "holdfast stacks: several jobs run here; say which by its run id or pid:\n"
        "  run-7  pid 7  train.py, 2 ranks, generation 0\n"
        "  run-8  pid 8  train.py, 2 ranks, generation 0\n"
    )


def test_nothing_that_a_program_is_called_or_says_reaches_the_terminal_raw(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    evil = "\x1b[2J\x9b31m\u202e"
    group = Group((0,), 1, evil, False, (f"x.py:1 {evil}",))
    assert run(answer=Taken((group,), (), f"/logs/{evil}", 1, 0)) == 0
    assert run(answer=Sorry(evil)) == 1
    monkeypatch.setattr(doorbell, "find", lambda: [7, 8])
    monkeypatch.setattr(doorbell, "ask", lambda pid, *_: Job(f"{evil}{pid}", pid, 2, evil, 0))
    assert command.main([]) == 2
    said = capsys.readouterr()
    lines = [*said.out.splitlines(), *said.err.splitlines()]
    assert all(line.isprintable() for line in lines) and sum(r"\x1b[2J" in line for line in lines) >= 6
