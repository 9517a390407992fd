"""Questions to an agent over its local socket: who may ask, what is refused, and what is left behind."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from holdfast.agent import doorbell
from holdfast.agent.doorbell import Answer, Doorbell, Job, NoAnswer, Request, Sorry, Stacks, Taken, Who
from holdfast.control.stacks import Group

JOB = Job("run-1", os.getpid(), 2, "train.py", 3)
TAKEN = Taken((Group((0, 1), 2, "all_reduce", True, ("x.py:1 f",)),), (), "/tmp/logs/stacks", 1, 1)


async def reply(request: Request, pid: int) -> Answer:
    return JOB if isinstance(request, Who) else TAKEN


@asynccontextmanager
async def bell(answer: Callable[[Request, int], Awaitable[Answer]] = reply) -> AsyncIterator[Doorbell]:
    found = Doorbell(asyncio.get_running_loop(), answer)
    assert found.start()
    try:
        yield found
    finally:
        found.close()


def say(text: bytes) -> bytes:
    """What comes back for these bytes, by a client of another make."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(10)
        connection.connect(f"\0holdfast/{os.getuid()}/{os.getpid()}")
        connection.sendall(text)
        connection.shutdown(socket.SHUT_WR)
        answer = b""
        while chunk := connection.recv(1 << 16):
            answer += chunk
        return answer


def test_a_question_is_answered() -> None:
    async def scene() -> None:
        async with bell():
            assert os.getpid() in doorbell.find()
            assert await asyncio.to_thread(doorbell.ask, os.getpid(), Who()) == JOB
            assert await asyncio.to_thread(doorbell.ask, os.getpid(), Stacks()) == TAKEN

    asyncio.run(scene())


def test_nothing_is_left_when_it_is_closed() -> None:
    async def scene() -> None:
        async with bell() as one:
            assert not Doorbell(asyncio.get_running_loop(), reply).start()  # one agent in one process
            one.close()
            one.close()
        assert os.getpid() not in doorbell.find()
        async with bell():
            assert await asyncio.to_thread(doorbell.ask, os.getpid(), Who()) == JOB

    asyncio.run(scene())


def test_nobody_there_is_said() -> None:
    with pytest.raises(NoAnswer, match=f"no agent with pid {os.getpid()} answers: Connection refused"):
        doorbell.ask(os.getpid(), Who())


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b"\n", "not understood"),
        (b"", "not understood"),
        (b"\xff\xfe{}\n", "not understood"),
        (b'{"type":"Dance"}\n', "not understood"),
        (b"[" * 70_000 + b"\n", "too long"),
        (b'{"type":"Who"' + b" " * 70_000, "too long"),
    ],
)
def test_nonsense_is_refused_and_the_next_is_answered(text: bytes, why: str) -> None:
    async def scene() -> None:
        async with bell():
            assert why.encode() in await asyncio.to_thread(say, text)
            assert await asyncio.to_thread(doorbell.ask, os.getpid(), Who()) == JOB

    asyncio.run(scene())


def test_an_answer_that_fails_or_is_too_long_is_an_answer() -> None:
    async def fail(request: Request, pid: int) -> Answer:
        if isinstance(request, Who):
            raise RuntimeError("no world")
        return Sorry("x" * doorbell.MAX_ANSWER_BYTES)

    async def scene() -> None:
        async with bell(fail):
            assert await asyncio.to_thread(doorbell.ask, os.getpid(), Who()) == Sorry("RuntimeError: no world")
            assert await asyncio.to_thread(doorbell.ask, os.getpid(), Stacks()) == Sorry("the answer is too long")

    asyncio.run(scene())


def test_a_caller_who_says_nothing_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doorbell, "REQUEST_S", 0.05)

    def wait_silently() -> bytes:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(10)
            connection.connect(f"\0holdfast/{os.getuid()}/{os.getpid()}")
            return connection.recv(1)

    async def scene() -> None:
        async with bell():
            assert await asyncio.to_thread(wait_silently) == b""

    asyncio.run(scene())


def test_an_agent_that_says_nothing_is_given_up() -> None:
    async def never(request: Request, pid: int) -> Answer:
        await asyncio.Event().wait()
        raise AssertionError

    async def scene() -> None:
        async with bell(never):
            with pytest.raises(NoAnswer, match=r"no answer in 0\.1 s"):
                await asyncio.to_thread(doorbell.ask, os.getpid(), Who(), 0.1)

    asyncio.run(scene())


@pytest.mark.skipif(os.getuid() != 0, reason="needs another user")
def test_another_user_is_not_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Request] = []

    async def note(request: Request, pid: int) -> Answer:
        asked.append(request)
        return JOB

    def ask_as_another() -> int:
        name = f"\0holdfast/{os.getuid()}/{os.getpid()}"
        if (pid := os.fork()) == 0:
            os.setuid(12345)
            with socket.socket(socket.AF_UNIX) as connection:
                connection.connect(name)
                connection.settimeout(10)
                os._exit(0 if connection.recv(1) == b"" else 1)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    async def scene() -> None:
        async with bell(note):
            assert await asyncio.to_thread(ask_as_another) == 0

    asyncio.run(scene())
    assert asked == []


@pytest.mark.skipif(os.getuid() != 0, reason="needs another user")
def test_a_stranger_with_the_name_of_an_agent_is_not_believed() -> None:
    taken = socket.socket(socket.AF_UNIX)
    if (pid := os.fork()) == 0:
        os.setuid(12345)
        taken.bind(f"\0holdfast/54321/{os.getppid()}")
        taken.listen()
        os.kill(os.getpid(), 19)
        os._exit(0)
    os.waitpid(pid, os.WUNTRACED)
    taken.close()
    try:
        with pytest.raises(NoAnswer, match="is not an agent of this user"):
            doorbell.ask(os.getpid(), Who())
    finally:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
