"""The page of a job as its agent sees it: a process that never holds the agent up."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import pytest

from holdfast import linux
from holdfast.agent import page as pages
from holdfast.agent.page import Page
from holdfast.observe import record
from holdfast.observe.events import EventLog

WAIT_S = 30.0


@pytest.fixture
def run_dir(tmp_path: Path) -> str:
    log = EventLog(str(tmp_path / record.NAME), [], print, "n1:1")
    log.emit(record.JobStarted("job", "id", 1, {"path": "train.py"}, 1))
    log.close()
    return str(tmp_path)


@contextmanager
def stderr_read() -> Iterator[BinaryIO]:
    """What this process and its children print there meanwhile."""
    before = os.dup(2)
    out, into = os.pipe()
    os.dup2(into, 2)
    os.close(into)
    try:
        with open(out, "rb") as file:
            yield file
    finally:
        os.dup2(before, 2)
        os.close(before)


async def said(stderr: BinaryIO) -> str:
    return (await asyncio.wait_for(asyncio.to_thread(stderr.readline), WAIT_S)).decode()


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not holds():  # noqa: ASYNC110 - the kernel tells the loop, and not us
            await asyncio.sleep(0.005)


def children() -> list[int]:
    """Those that nobody has waited for are among them."""
    return linux.children(os.getpid())


def test_nobody_waits_for_a_page_that_is_slow_to_end_and_the_next_has_its_token(
    run_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "END_S", 0.1)

    async def scene(stderr: BinaryIO) -> None:
        before = set(children())
        page = Page(asyncio.get_running_loop(), "0.0.0.0:0", run_dir, print)
        page.start()
        first = re.search(r"token=(\S+)", await said(stderr))
        await said(stderr)
        [slow] = set(children()) - before
        os.kill(slow, signal.SIGSTOP)
        page.stop()
        assert linux.state(slow) not in ("", "Z"), "it has not ended, and here we are"
        page.start()
        second = re.search(r"token=(\S+)", await said(stderr))
        assert first is not None and second is not None and first[1] == second[1]
        assert slow not in children()
        page.close()
        assert set(children()) == before

    with stderr_read() as stderr:
        asyncio.run(scene(stderr))


def test_a_port_that_is_taken_is_one_line_and_leaves_nothing(run_dir: str) -> None:
    async def scene(stderr: BinaryIO, port: int) -> None:
        before = children()
        page = Page(asyncio.get_running_loop(), str(port), run_dir, print)
        page.start()
        assert await said(stderr) == (
            f"holdfast: no page: cannot listen on 127.0.0.1:{port}: Address already in use; "
            "choose another with --dashboard\n"
        )
        await until(lambda: children() == before)
        page.stop()
        page.close()

    with stderr_read() as stderr, socket.create_server(("127.0.0.1", 0)) as taken:
        asyncio.run(scene(stderr, taken.getsockname()[1]))
